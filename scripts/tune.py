"""Does a draft help this main model here, and with which K, engine, devices and properties is it fastest?

    python scripts/tune.py models/embedded/main models/embedded/draft --minutes 5

Ends with one recommendation, greedy: the command and the lines of Python, or "do not use this draft", each with the
measured reason. It is written to recommended.json beside the two folders; the samples take it with --recommended.

Successive halving under a time budget. First devices and plugin properties, by the time of one iteration (K draft steps
and one check), K guessed from costs and a trial of each draft; then engine, draft, K, confidence threshold and adaptive
length for the sets that are left, by decoding. All are measured a little, the better half more, all in turns, beside
the main model alone with its defaults. The last ones decode longer, in several rounds: their medians and ranges count.

Speed never hides what a setting does to the text (scripts/text_quality.py says how that is judged, and where the limit
is): a set of properties beyond it is shown and marked, and recommended only with --allow-quality-loss.

Ctrl-C ends it early with the best so far. Several drafts may be given: the best one is found.
"""

import argparse
import dataclasses
import os
import signal
import statistics
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # until something is measured that is worth keeping
if hasattr(signal, "SIGPIPE"):  # `| head` ends it quietly
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import measuring  # noqa: E402
import numpy as np  # noqa: E402
import openvino as ov  # noqa: E402
import text_quality  # noqa: E402
import tune_verdict  # noqa: E402
from arguments import add_prompt_arguments, key_value, refuse_unsound, whole  # noqa: E402
from measuring import Way  # noqa: E402
from prompt_files import read_prompts, token_ids  # noqa: E402
from text_quality import Quality  # noqa: E402
from tqdm import tqdm  # noqa: E402
from tune_settings import (  # noqa: E402
    EXACT,
    SCHEDULERS,
    Models,
    Properties,
    PropertySet,
    Setting,
    available,
    kind,
    merged,
    property_values,
)

from speculative import costs, device_facts, metrics, recommendation  # noqa: E402
from speculative.draft_length import LONGEST  # noqa: E402

NOISE = 1.02  # gain below which a property is left at its default
SAMPLE_K = 5  # of samples/speculative_decoding_lm.py with its defaults
THRESHOLDS = (0.3, 0.5, 0.7)  # of the draft's confidence
FIRST_TOKENS = 24  # of a run in the first round of halving; doubled from round to round
MOST_REFERENCES = 8  # texts in f32
LEAST_SETS = 2  # property sets that have more time: the default one and the most promising
LEAST_RUN = 2  # prompts of a round of halving, at least
ROUNDS = 6  # of the last ones, if the budget allows
# Shares of the budget by whose end each stage is over.
REFERENCE_BY, DRAFTS_BY, PROPERTIES_BY, LENGTHS_BY = 0.06, 0.15, 0.4, 0.7


# ---- what is known of a candidate -----------------------------------------------------------------------------------


@dataclass
class Candidate:
    """A property set (first stage) or a setting (second), and what was measured of it."""

    setting: PropertySet | Setting
    speedup: float = 0.0  # first stage: of an iteration; second: of decoding, over the main model alone with defaults
    alone: float = 0.0  # first stage: speedup of plain decoding
    throughput: float | None = None
    spread: tuple[float, float] | None = None
    dropped: str = ""  # in which round, or why

    @property
    def models(self) -> PropertySet:
        return self.setting if isinstance(self.setting, PropertySet) else self.setting.models


@dataclass
class Clock:
    """The budget, and a progress bar of it with the time left."""

    seconds: float
    begin: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        # a bar of time, not of runs: how many runs there are depends on how long they take
        form = "{desc} |{bar}| {n:.0f} of {total:.0f} s{postfix}"
        self.bar = tqdm(total=self.seconds, bar_format=form, leave=False, dynamic_ncols=True)

    def tick(self, stage: str = "") -> None:
        if stage:
            self.bar.set_description_str(stage, refresh=False)
        spent = min(time.perf_counter() - self.begin, self.seconds)
        self.bar.set_postfix_str(f"{self.seconds - spent:.0f} s left", refresh=False)
        self.bar.update(spent - self.bar.n)
        if stage:
            self.bar.refresh()

    def until(self, share: float) -> float:
        """Seconds left until this share of the budget is spent."""
        return self.begin + share * self.seconds - time.perf_counter()


class Tuning:
    """One run: what was tried, what came out. Its stages are called in the order they stand in."""

    def __init__(self, arguments: argparse.Namespace, prompts: list[np.ndarray]):
        self.arguments = arguments
        self.prompts = prompts
        self.drafts: list[Path] = arguments.drafts
        longest = max(len(ids) for ids in prompts) + arguments.max_new_tokens
        self.models = Models(arguments.main, max(longest + LONGEST + 2, 128))
        self.clock = Clock(60 * arguments.minutes)
        fixed = merged((), tuple(arguments.property))
        devices = [(one, other) for one in arguments.devices for other in arguments.devices]
        self.sets = [PropertySet(one, other, fixed, fixed) for one, other in devices]
        self.default = self.sets[0]
        self.baseline = Setting(self.default, "GenAI")
        self.references: list[text_quality.ReferenceText] = []
        self.quality: dict[PropertySet, Quality] = {}
        self.alpha: dict[Path, float] = {}  # per-token acceptance of each draft
        self.property_candidates: dict[PropertySet, Candidate] = {}
        self.candidates: dict[Setting, Candidate] = {}
        self.ways: dict[Setting, Way] = {}  # of the last stage, with their rounds
        self.decoded_prompts: list[np.ndarray] = []  # by them
        self.failed: dict[str, str] = {}
        self.k = 0  # a first guess of the best draft length
        self.note = ""  # what the budget left no time for

    def run(self) -> None:
        self.make_references()
        self.try_drafts()
        self.try_properties()
        self.halve()
        self.compare()

    # ---- loading, and judging what is loaded

    def loads(self, setting: Setting | PropertySet, drafts: list[Path] | None = None) -> bool:
        """Load a candidate's models; what cannot be loaded is kept as failed, with the reason."""
        self.clock.tick()
        try:
            if isinstance(setting, Setting):
                self.models.load(setting)
            else:
                for draft in drafts or self.drafts:
                    self.models.pair(setting, draft)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            self.failed[str(setting)] = " ".join(str(error).split())[-300:]
            return False
        finally:
            self.clock.tick()
        return True

    def judge(self, models: PropertySet) -> None:
        """What these properties do to the text: once, as draft and draft length change none of it."""
        if models not in self.quality and self.references:
            main, _ = self.models.pair(models, None)
            self.quality[models] = text_quality.judge(main, self.references)
            main.forget()
            self.clock.tick()

    def fits(self, models: PropertySet) -> bool:
        if self.arguments.allow_quality_loss or models not in self.quality:
            return True
        return self.quality[models].fits(self.quality.get(self.default))

    # ---- stage 0: the main model alone in f32

    def make_references(self) -> None:
        self.clock.tick("f32 reference")
        exact = self.default.with_properties(EXACT)
        main, _ = self.models.pair(exact, None)
        for ids in self.prompts:
            tokens = min(64, self.arguments.max_new_tokens)
            self.references.append(text_quality.reference_text(main, ids, tokens))
            self.clock.tick()
            enough = len(self.references) >= MOST_REFERENCES or self.clock.until(REFERENCE_BY) < 0
            if enough and len(self.references) >= LEAST_RUN:
                break

    # ---- stage 1: devices and properties, by the time of one iteration

    def try_drafts(self) -> None:
        """How often each draft is right, and what it costs with default properties: a first guess of K."""
        self.clock.tick("drafts")
        for draft in list(self.drafts):
            if not self.loads(self.default, [draft]):
                self.drafts.remove(draft)
                continue
            runs = []
            for ids in self.prompts[:4]:
                runs.append(self.models.decode(Setting(self.default, "ours", draft, 4), ids, 2 * FIRST_TOKENS))
                self.clock.tick()
                if self.clock.until(DRAFTS_BY) < 0:
                    break
            proposed = [n for run in runs for n in run.proposed]
            gained = [n for run in runs for n in run.gained]
            self.alpha[draft] = metrics.per_token_acceptance(proposed, gained) or 0.0
            self.measure_costs(self.default, draft)
        if not self.drafts:
            raise RuntimeError(next(iter(self.failed.values())))
        self.drafts.sort(key=lambda draft: max(self.predicted(self.default, draft).values()), reverse=True)
        best = self.predicted(self.default, self.drafts[0])
        self.k = max(best, key=best.__getitem__)

    def measure_costs(self, models: PropertySet, draft: Path) -> None:
        if (models, draft) not in self.models.costs:
            self.models.costs[models, draft] = costs.measure(*self.models.pair(models, draft))
            self.clock.tick()

    def predicted(self, models: PropertySet, draft: Path) -> dict[int, float]:
        """Speedup by K, from the costs of these models and the draft's acceptance."""
        measured = self.models.costs[models, draft]
        verify = measured.verify()
        c = measured.draft / verify[1]
        alpha = self.alpha[draft]
        return {
            k: metrics.predicted_speedup(metrics.block_efficiency_at(alpha, k), k, c, verify[k + 1] / verify[1])
            for k in range(1, LONGEST + 1)
        }

    def try_properties(self) -> None:
        core, draft = ov.Core(), self.drafts[0]
        self.clock.tick("properties")
        if len(self.sets) > 1:  # devices first, as they are
            self.time_sets(self.sets, 3)
            ranked = sorted(self.measured_sets(), key=lambda one: -one.speedup)
            kept = {one.models for one in ranked[: max(1, len(ranked) // 2)]} | {self.default}
            self.drop(self.property_candidates.values(), kept, "devices")
            self.sets = [one for one in self.sets if one in kept]
        for found in list(self.sets):
            self.sets += [found.with_properties(value) for value in property_values(found.device, core)]
        self.sets = list(dict.fromkeys(self.sets))

        repeats, round_ = 5, 0
        while True:
            round_ += 1
            self.time_sets(self.sets, repeats)
            if round_ == 1:  # the best value of each property together
                together = self.together()
                if together and self.clock.until(PROPERTIES_BY) > 0:
                    self.sets = [*self.sets, together]
                    self.time_sets([together], repeats)
            ranked = [one for one in self.measured_sets() if one.models in self.sets]
            ranked.sort(key=lambda one: (not self.fits(one.models), -one.speedup))
            kept = {one.models for one in ranked[: max(2, len(ranked) // 2)]}
            kept |= {self.default, max(ranked, key=lambda one: self.fits(one.models) * one.alone).models}
            self.drop(self.property_candidates.values(), kept, f"properties {round_}")
            enough = len(kept) >= len(self.sets) or self.clock.until(PROPERTIES_BY) < 0
            self.sets = [one for one in self.sets if one in kept]
            if enough:
                break
            repeats *= 2
        ranked = [one for one in self.measured_sets() if one.models in self.sets and self.fits(one.models)]
        by_iteration = sorted(ranked, key=lambda one: -one.speedup)
        self.fastest = [one.models for one in by_iteration[:2]] or [self.default]
        alone = max(ranked, key=lambda one: one.alone, default=None)
        self.fastest_alone = alone.models if alone and alone.alone > NOISE else self.default
        for models in self.fastest:
            self.loads(models, [draft])

    def measured_sets(self) -> list[Candidate]:
        return [one for one in self.property_candidates.values() if one.speedup]

    def together(self) -> PropertySet | None:
        """The default with the best value of each property that pays by itself, if these are two or more."""
        best: dict[str, tuple[float, Properties]] = {}
        for one in self.measured_sets():
            added = tuple(item for item in one.models.properties if item not in self.default.properties)
            same_devices = (one.models.device, one.models.draft_device) == (
                self.default.device,
                self.default.draft_device,
            )
            if same_devices and len(added) == 1 and one.speedup > NOISE and self.fits(one.models):
                best[added[0][0]] = max(best.get(added[0][0], (0.0, ())), (one.speedup, added))
        if len(best) < 2:
            return None
        return self.default.with_properties(tuple(item for _, added in best.values() for item in added))

    def time_sets(self, sets: list[PropertySet], repeats: int) -> None:
        """Time K draft steps and one check, and one plain step, of all sets in turns; judge their texts."""
        draft = self.drafts[0]
        for group in self.models.groups([self.default], sets):
            self.models.keep(group, [draft])
            here = []
            for models in group:
                allowed = LENGTHS_BY if models in sets[:LEAST_SETS] else PROPERTIES_BY
                out_of_time = self.clock.until(allowed) < 0 and models != self.default
                if out_of_time and not self.models.is_loaded(models, [draft]):
                    self.note = "the budget had no time for all properties: give more --minutes"
                elif str(models) not in self.failed and self.loads(models, [draft]):
                    self.judge(models)
                    here.append(models)
            seconds = self.time_iterations(here, draft, repeats)
            if not seconds[self.default]:
                continue
            plain, iteration = seconds[self.default]
            for models in here:
                one = self.property_candidates.setdefault(models, Candidate(models))
                one.alone, one.speedup = plain / seconds[models][0], iteration / seconds[models][1]

    def time_iterations(
        self, sets: list[PropertySet], draft: Path, repeats: int
    ) -> dict[PropertySet, tuple[float, float]]:
        """Seconds of a plain step and of an iteration with K draft tokens, medians of runs in turns."""
        pairs = {models: self.models.pair(models, draft) for models in sets}
        times: dict[PropertySet, list[list[float]]] = {models: [[], [], []] for models in sets}
        width = min(model.width for pair in pairs.values() for model in pair)
        context = max(
            1, min(costs.CONTEXT, *(model.capacity - self.k - 1 for pair in pairs.values() for model in pair))
        )
        tokens = (np.arange(context + self.k + 1, dtype=np.int64) * 7919 + 1) % width
        for pair in pairs.values():
            for model in pair:
                model.logits(tokens[:context])
        for _ in range(repeats + 1):
            for models, (main, drafter) in pairs.items():
                for seconds, model, n in zip(times[models], (main, main, drafter), (1, self.k + 1, 1), strict=True):
                    begin = time.perf_counter()
                    model.backend.run(context, tokens[context : context + n], n)
                    seconds.append(time.perf_counter() - begin)
            self.clock.tick()
        found = {}
        for models, measured in times.items():
            plain, check, step = (statistics.median(seconds[1:]) for seconds in measured)
            found[models] = plain, check + self.k * step
        for pair in pairs.values():
            for model in pair:
                model.forget()
        return found

    def drop(self, candidates, kept: set, where: str) -> None:
        for one in candidates:
            if one.setting not in kept and not one.dropped:
                one.dropped = where

    # ---- stage 2: engine, draft, draft length, by decoding

    def settings(self) -> list[Setting]:
        """What is tried with the property sets that are left: most with the fastest, little with the others. The first
        ones are tried whatever the budget, the others as far as it goes."""
        best_set, draft = self.fastest[0], self.drafts[0]
        best = self.lengths(best_set, draft)[0]
        found = [
            Setting(self.default, "GenAI", draft, SAMPLE_K),
            Setting(best_set, "GenAI", draft, best),
            Setting(best_set, "ours", draft, best),
            Setting(best_set, "ours", draft, "adaptive"),
            Setting(self.fastest_alone, "GenAI"),
        ]
        least = len(found)
        for place, models in enumerate(dict.fromkeys([*self.fastest, self.default])):
            for draft in self.drafts if place == 0 else self.drafts[:1]:
                lengths = self.lengths(models, draft)
                fixed = lengths if place == 0 else [lengths[0], *([SAMPLE_K] if place == 1 else [])]
                found += [Setting(models, engine, draft, k) for k in fixed for engine in ("GenAI", "ours")]
                found += [Setting(models, "ours", draft, k) for k in ("adaptive", *THRESHOLDS[: 3 * (place == 0)])]
        longest = 7 if kind(best_set.device) == "NPU" else LONGEST  # where GenAI lets K grow to twice K
        found = [one for one in found if one.engine == "ours" or one.draft_length <= longest]
        if kind(best_set.device) != "NPU":
            found += [dataclasses.replace(found[1], scheduler=scheduler) for scheduler in SCHEDULERS]
        found.append(Setting(self.fastest_alone, "ours"))
        found = list(dict.fromkeys(found))
        plain = self.models.costs[self.default, self.drafts[0]].main[1]
        affordable = int(self.clock.until(LENGTHS_BY) / (LEAST_RUN * FIRST_TOKENS * plain))
        if affordable < len(found):
            self.note = "the budget had no time for all draft lengths: give more --minutes"
        return found[: max(least, affordable)]

    def lengths(self, models: PropertySet, draft: Path) -> list[int]:
        """Fixed lengths worth a look, the likeliest first. Acceptance comes in runs, which favours longer ones."""
        if (models, draft) not in self.models.costs and self.loads(models, [draft]):
            self.measure_costs(models, draft)
        gains = self.predicted(models, draft)
        best = max(gains, key=gains.__getitem__)
        near = [k for k in gains if gains[k] > 0.85 * gains[best]] + [k for k in (best + 2, best + 4) if k in gains]
        step = -(-len(set(near)) // 6)
        return [best, *(k for k in sorted(set(near))[::step] if k != best)]

    def halve(self) -> None:
        settings, round_, tokens, start = self.settings(), 0, FIRST_TOKENS, 0
        while True:
            round_ += 1
            self.clock.tick(f"{len(settings)} settings, round {round_}")
            left = self.clock.until(LENGTHS_BY)
            settings = self.decode_round(settings, min(tokens, self.arguments.max_new_tokens), start, left / 2)
            start += LEAST_RUN
            found = [one for one in map(self.candidates.get, settings) if one and one.speedup]
            drafted = sorted((one for one in found if one.setting.draft), key=lambda one: -one.speedup)
            if len(drafted) <= 6 or self.clock.until(LENGTHS_BY) <= 0:
                break
            kept = {one.setting for one in drafted[: max(4, len(drafted) // 2)]}
            for engine in ("GenAI", "ours"):  # the samples have either
                kept |= {one.setting for one in [one for one in drafted if one.setting.engine == engine][:2]}
            kept |= {one.setting for one in found if not one.setting.draft}
            self.drop(found, kept, f"lengths {round_}")
            best = drafted[0].setting
            if round_ == 1 and isinstance(best.draft_length, int):  # the neighbours of the best, if they were left out
                around = [dataclasses.replace(best, draft_length=best.draft_length + i) for i in (-1, 1)]
                kept |= {one for one in around if 1 <= one.draft_length <= LONGEST and one not in self.candidates}
            settings = [one for one in dict.fromkeys([*settings, *kept]) if one in kept]
            tokens *= 2

    def decode_round(self, settings: list[Setting], tokens: int, start: int, seconds: float) -> list[Setting]:
        """Decode with all settings in turns, each prompt once, as many prompts as `seconds` allow. Those that ran."""
        ran = []
        by_models = sorted(settings, key=lambda one: (str(one.models), one.engine, str(one.draft), one.scheduler))
        groups = self.models.groups([self.baseline], by_models)
        for group in groups:
            self.models.keep(group, [])
            here = [one for one in group if str(one) not in self.failed and self.loads(one)]
            for one in here:  # shapes are compiled when they first occur
                self.models.decode(one, self.prompts[start % len(self.prompts)], 8)
                self.clock.tick()
            gained, spent = dict.fromkeys(here, 0), dict.fromkeys(here, 0.0)
            begin, prompts = time.perf_counter(), 0
            while prompts < min(LEAST_RUN, len(self.prompts)) or time.perf_counter() - begin < seconds / len(groups):
                if prompts == len(self.prompts):
                    break
                ids = self.prompts[(start + prompts) % len(self.prompts)]
                for one in here:
                    run = self.models.decode(one, ids, tokens)
                    gained[one] += len(run.tokens) - 1
                    spent[one] += run.decode_seconds
                    self.clock.tick()
                for one in here:
                    candidate = self.candidates.setdefault(one, Candidate(one))
                    candidate.throughput = gained[one] / spent[one]
                    candidate.speedup = candidate.throughput * spent[self.baseline] / gained[self.baseline]
                prompts += 1
                if self.clock.until(1) < 0:
                    break
            ran += here
        return list(dict.fromkeys(ran))

    # ---- stage 3: the last ones, against the main model alone

    def finalists(self) -> list[Setting]:
        found = [one for one in self.candidates.values() if one.speedup and not one.dropped and one.setting.draft]
        found.sort(key=lambda one: -one.speedup)
        chosen = [one.setting for one in found[:2]]
        for engine in ("GenAI", "ours"):
            chosen += [one.setting for one in found if one.setting.engine == engine][:2]
        usual = Setting(self.default, "GenAI", self.drafts[0], SAMPLE_K)
        steps = [Setting(one.models, "GenAI", one.draft, SAMPLE_K) for one in chosen]  # by the properties alone
        alone = Setting(self.fastest_alone, "GenAI")
        return list(dict.fromkeys([self.baseline, alone, usual, *steps, *chosen]))

    def compare(self) -> None:
        """Rounds of all finalists in turns until the budget is spent. Each round has other prompts than the one before,
        so that the ranges say how much depends on the prompt, too."""
        settings = self.finalists()
        self.clock.tick("the last ones")
        self.models.keep(settings, [])
        settings = [one for one in settings if str(one) not in self.failed and self.loads(one)]
        ways = {one: self.way(one) for one in settings}
        begin = time.perf_counter()
        warm_up = self.decode_all(ways, self.prompts[-1:])
        seconds = time.perf_counter() - begin  # of one prompt
        at_once = min(max(1, int(self.clock.until(1) / seconds / ROUNDS)), len(self.prompts))
        start = 0
        while self.clock.until(1) > 1.1 * at_once * seconds:
            prompts = [self.prompts[(start + i) % len(self.prompts)] for i in range(at_once)]
            self.keep_round(ways, self.decode_all(ways, prompts), prompts)
            start += at_once
        if not self.ways:
            self.keep_round(ways, warm_up, self.prompts[-1:])

    def decode_all(self, ways: dict[Setting, Way], prompts: list[np.ndarray]) -> dict[Setting, list]:
        runs: dict[Setting, list] = {one: [] for one in ways}
        for ids in prompts:
            for one, way in ways.items():
                runs[one].append(way.decode(ids))
                self.clock.tick()
        return runs

    def keep_round(self, ways: dict[Setting, Way], runs: dict[Setting, list], prompts: list[np.ndarray]) -> None:
        for one, way in ways.items():
            way.rounds.append(runs[one])
        self.decoded_prompts += prompts
        self.ways = ways

    def way(self, setting: Setting) -> Way:
        length = setting.draft_length if isinstance(setting.draft_length, int) else setting.length
        tokens = self.arguments.max_new_tokens
        return Way(str(setting), setting.engine, length, 0.0, lambda ids: self.models.decode(setting, ids, tokens))


# ---- the program ----------------------------------------------------------------------------------------------------


def minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0
    if 0 < value <= 1440:
        return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes above 0 and up to 1440")


def devices(text: str) -> list[str]:
    """CPU,GPU,NPU; as in OpenVINO, the names behind AUTO: or HETERO: belong to it."""
    names: list[str] = []
    for part in text.split(","):
        name = part.strip()
        if ":" not in name and names and ":" in names[-1]:
            names[-1] += f",{name}"
        else:
            names.append(name)
    for name in names:
        for fact in device_facts.look_up(name):
            if fact.missing and kind(fact.name) != "NPU":  # which NPUW_DEVICES=CPU stands in for
                raise argparse.ArgumentTypeError(f"there is no {fact.name!r}: {fact.missing}")
    return list(dict.fromkeys(names))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("main", type=Path, help="main model (IR folder)")
    parser.add_argument("drafts", type=Path, nargs="+", metavar="draft", help="draft (IR folder), or several")
    parser.add_argument("--minutes", type=minutes, default=10.0, metavar="M", help="time budget (default: 10)")
    parser.add_argument(
        "--devices", type=devices, metavar="CPU,GPU", help="for main and draft (default: those of CPU, GPU, NPU here)"
    )
    add_prompt_arguments(parser, max_prompts=40)
    parser.add_argument(
        "--max-new-tokens", type=whole, default=100, metavar="N", help="new tokens of the longest runs (default: 100)"
    )
    parser.add_argument(
        "--property",
        type=key_value,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="OpenVINO property that everything has, main and draft",
    )
    parser.add_argument(
        "--allow-quality-loss", action="store_true", help="recommend what changes the text beyond the limits, too"
    )
    parser.add_argument(
        "--out", type=measuring.output_file, metavar="FILE", help="write the recommendation here, not beside the pair"
    )
    measuring.add_output_arguments(parser)
    arguments = parser.parse_args()
    if arguments.max_new_tokens < 8:
        parser.error(f"--max-new-tokens {arguments.max_new_tokens} leaves too little to time: take 8 or more")
    arguments.drafts = list(dict.fromkeys(arguments.drafts))
    if not arguments.devices:
        here = available(ov.Core())
        arguments.devices = [name for name in ("CPU", "GPU", "NPU") if name in here]
    arguments.device = arguments.draft_device = arguments.devices[0]  # for the environment
    arguments.draft = arguments.drafts[0]
    return arguments


@contextmanager
def nothing_lost():
    """Yields a list; Ctrl-C ends the block and leaves True in it."""
    interrupted: list[bool] = []
    try:
        with measuring.ctrl_c_raises():
            yield interrupted
    except KeyboardInterrupt:
        interrupted.append(True)


def write_recommendation(arguments: argparse.Namespace, found: dict, draft: Path) -> str:
    """Where it was written, or why it was not, in one sentence."""
    file = arguments.out or recommendation.place(arguments.main, [draft])
    if not file:
        return (
            f"{arguments.main} and {draft} share no folder, so no recommended.json was written: --out FILE says where."
        )
    try:
        recommendation.write(file, found)
    except OSError as error:
        return f"{file} was not written ({error.strerror}): --out FILE writes it elsewhere."
    return f"Written to {file}."


def main() -> int:
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8")
    arguments = parse_arguments()
    for draft in arguments.drafts:
        refuse_unsound(arguments.main, draft)
    try:
        chosen = read_prompts(arguments.prompts, arguments.max_prompts)
        prompts = token_ids(chosen, arguments.main, arguments.max_new_tokens)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        tuning = Tuning(arguments, prompts)
        with measuring.OtherLoad() as load, nothing_lost() as interrupted:
            try:
                tuning.run()
            finally:
                tuning.clock.bar.close()
    except (RuntimeError, ValueError, KeyError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # what is known is printed whole
    verdict = tune_verdict.judge(tuning)
    if verdict:
        sentences = verdict.sentences
    elif interrupted:
        sentences = ["Nothing was decoded with the draft yet, so there is nothing to recommend."]
    else:
        print(f"error: nothing could be decoded: {'; '.join(tuning.failed.values())}", file=sys.stderr)
        return 1
    sentences = [*sentences, *([load.sentence] if load.sentence else [])]
    if interrupted:
        sentences.append("Interrupted: recommended.json is only written at the end.")
    else:
        sentences.append(write_recommendation(arguments, verdict.as_dict(), verdict.draft))
    print(tune_verdict.table(tuning), "", *sentences, "", sep="\n")
    result = {
        "program": "tune",
        "summary": sentences,
        "environment": measuring.environment(arguments, load),
        "rows": tune_verdict.rows(tuning),
        "candidates": tune_verdict.candidates(tuning),
        "recommendation": verdict.as_dict() if verdict else None,
    }
    measuring.write_outputs(arguments, result)
    return 130 if interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
