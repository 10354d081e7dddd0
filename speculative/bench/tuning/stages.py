"""The stages of tune.py: drafts, devices and properties, then engine and draft length, then the finalists.

Every stage interleaves its candidates with their baseline: the default properties, or the main model alone with them.
On a cluster each machine measures part of the candidates and the baseline, so that both sides of a ratio come from one
machine; finalists are measured on all machines, each round on one. The models run in separate processes
(tuning/client.py): a crash costs only the current candidate.
"""

import argparse
import dataclasses
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from speculative.bench import quality as text_quality
from speculative.bench.cluster import ray_nodes
from speculative.bench.cluster.child_process import Failed
from speculative.bench.cluster.hosts import Place
from speculative.bench.cluster.worker_process import RAISED
from speculative.bench.harness import Way
from speculative.bench.quality import Quality
from speculative.bench.tuning import verdict as tune_verdict
from speculative.bench.tuning.client import TuningClient
from speculative.bench.tuning.settings import (
    EXACT,
    SCHEDULERS,
    Properties,
    PropertySet,
    Setting,
    draft_property_values,
    kind,
    merged,
)
from speculative.cli.progress import tqdm
from speculative.drafting import cost_model
from speculative.drafting.policy import LONGEST, Costs
from speculative.pair.engines import GENAI, NATIVE
from speculative.sequence import metrics

NOISE = 1.02  # gain below which a property stays at its default
SAMPLE_K = 5  # default of samples/speculative_decoding_lm.py
PRECISIONS = ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION", "EXECUTION_MODE_HINT")
THRESHOLDS = (0.3, 0.5, 0.7)  # draft confidence
FIRST_TOKENS = 24  # per run in the first halving round; doubled every round
MOST_REFERENCES = 8  # texts in f32
LEAST_SETS = 2  # property sets that may take more time: the default and the most promising one
LEAST_RUN = 2  # minimum prompts per halving round
ROUNDS = 6  # of the finalists, if the budget allows
# Share of the budget at which each stage ends.
REFERENCE_BY, DRAFTS_BY, PROPERTIES_BY, LENGTHS_BY, CHOSEN_BY = 0.06, 0.15, 0.4, 0.65, 0.82
LEAST_ROUNDS = 2  # new rounds after the choice, whatever the budget: one round has no range


# ---- candidates -----------------------------------------------------------------------------------------------------


@dataclass
class Candidate:
    """A property set (first stage) or a setting (second), and its measurements."""

    setting: PropertySet | Setting
    speedup: float = 0.0  # first stage: of an iteration; second: of decoding over the main model alone with defaults
    alone: float = 0.0  # first stage: speedup of plain decoding
    throughput: float | None = None
    spread: tuple[float, float] | None = None
    dropped: str = ""  # the round, or the reason

    @property
    def models(self) -> PropertySet:
        return self.setting if isinstance(self.setting, PropertySet) else self.setting.models


@dataclass
class Contest:
    """Settings decoded in interleaved rounds until a share of the budget is spent, and their prompts. Each machine
    decodes at least `least_rounds`, whatever the budget."""

    by: float
    least_rounds: int = 0
    settings: list[Setting] = field(default_factory=list)
    ways: dict[Setting, Way] = field(default_factory=dict)
    prompts: list[np.ndarray] = field(default_factory=list)


@dataclass
class Clock:
    """The time budget and its progress bar."""

    seconds: float
    begin: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self._one = threading.Lock()  # machines of a cluster tick concurrently
        # the bar shows time, not runs: the number of runs depends on their duration
        form = "{desc} |{bar}| {n:.0f} of {total:.0f} s{postfix}"
        self.bar = tqdm(total=self.seconds, bar_format=form, leave=False, dynamic_ncols=True)

    def tick(self, stage: str = "") -> None:
        with self._one:
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


class Ended(Exception):
    """Tuning cannot continue; measurements so far count. The message says why."""


class Tuning:
    """One tuning run: candidates and results. The stages run in the order of their definition."""

    def __init__(self, arguments: argparse.Namespace, prompts: list[np.ndarray], places: list[Place]):
        self.arguments = arguments
        self.prompts = prompts
        self.place = places[0]  # the others are identical
        self.benches = [TuningClient(place) for place in places]  # lost ones are removed
        self.machines = [place.name for place in places if place.machine]
        self.drafts: list[Path] = arguments.drafts
        self.costs: dict[tuple[PropertySet, Path], Costs] = {}
        self.clock = Clock(60 * arguments.minutes)
        fixed = merged((), tuple(arguments.property))
        devices = [(one, other) for one in arguments.devices for other in arguments.devices]
        self.sets = [PropertySet(one, other, fixed, fixed) for one, other in devices]
        self.default = self.sets[0]
        self.baseline = Setting(self.default, GENAI)
        self.references: list[text_quality.ReferenceText] = []
        self.quality: dict[PropertySet, Quality] = {}
        self.alpha: dict[Path, float] = {}  # per-token acceptance of each draft
        self.property_candidates: dict[PropertySet, Candidate] = {}
        self.candidates: dict[Setting, Candidate] = {}
        self.choosing = Contest(CHOSEN_BY)  # the finalists; decides the choice
        self.afresh = Contest(1.0, LEAST_ROUNDS)  # the choice and its baselines in new rounds; these are reported
        self.failed: dict[str, str] = {}
        self.k = 0  # first estimate of the best draft length
        self.note = ""  # what the budget had no time for
        self.other_load = 0.0  # background load on the machines of a cluster
        self._shaken: set[str] = set()  # baselines that failed once
        self._one = threading.Lock()  # for state that several machines change

    def run(self) -> None:
        longest = max(len(ids) for ids in self.prompts) + self.arguments.max_new_tokens
        self.remember("open", self.arguments.main, max(longest + LONGEST + 2, 128))
        self.make_references()
        self.try_drafts()
        self.try_properties()
        self.halve()
        self.compare(self.choosing, self.finalists())
        self.measure_afresh()

    # ---- distributing work over machines

    def share(self, items: list, work: Callable[[list, TuningClient], None]) -> None:
        """Run `work` on parts of `items`, one per machine, concurrently. A lost machine's part goes to another."""
        if len(self.benches) == 1 and not self.benches[0].machine:
            work(items, self.benches[0])
            return
        n = max(1, min(len(self.benches), len(items)))
        parts = [items[i * len(items) // n : (i + 1) * len(items) // n] for i in range(n)]
        left = ray_nodes.spread(parts, self.benches, lambda *_: True, work, lambda *_: None)
        if left:
            raise Ended(f"no machine left: {left[0][1]}")

    def on_one(self, work: Callable[[TuningClient], object]) -> object:
        """Run `work` on one machine and return its result."""
        found = []
        self.share([None], lambda _, bench: found.append(work(bench)))
        return found[-1]

    def remember(self, name: str, *arguments) -> None:
        """Make a remembered call on all machines."""
        for bench in list(self.benches):
            try:
                bench.remember(name, *arguments)
            except ray_nodes.Lost:
                self.benches.remove(bench)
        if not self.benches:
            raise Ended("all machines were lost")

    def tried(self, bench: TuningClient, setting: Setting | PropertySet, name: str, *arguments) -> object:
        """The result of a call for a candidate. None: it failed or crashed the process, and is recorded as failed with
        the reason. A baseline is retried once, as tuning cannot continue without it."""
        while True:
            try:
                return bench.call(name, *arguments)
            except (*RAISED.values(), Failed) as error:
                reason = " ".join(str(error).split())[-300:]
            finally:
                self.clock.tick()
            if setting not in (self.default, self.baseline):
                self.failed[str(setting)] = reason
                return None
            if str(setting) in self._shaken:
                raise Ended(f"the baseline failed twice ({setting}): {reason}")
            self._shaken.add(str(setting))

    def loads(self, bench: TuningClient, setting: Setting | PropertySet, drafts: list[Path] | None = None) -> bool:
        """Load a candidate's models."""
        wanted = [] if isinstance(setting, Setting) else (drafts or self.drafts)
        return str(setting) not in self.failed and bool(self.tried(bench, setting, "load_models", setting, wanted))

    def decode(self, bench: TuningClient, setting: Setting, ids: np.ndarray, tokens: int):
        """A run, or None if it failed."""
        adaptive = setting.draft_length == "adaptive"
        known = self.costs.get((setting.models, setting.draft)) if adaptive else None
        return self.tried(bench, setting, "decode", setting, ids, tokens, known)

    def warm(self, bench: TuningClient, settings: list[Setting]) -> list[Setting]:
        """Load the settings and decode a few tokens, as shapes are compiled on first use. Returns those that ran."""
        loaded = [one for one in settings if self.loads(bench, one)]
        return [one for one in loaded if self.decode(bench, one, self.prompts[0], 8)]

    def judge(self, bench: TuningClient, models: PropertySet) -> None:
        """Judge the output quality of these properties, once: draft and draft length do not affect it."""
        if models not in self.quality and self.references:
            main = (models.device, models.properties)
            known = [self.quality[one] for one in self.quality if (one.device, one.properties) == main]
            quality = known[0] if known else self.tried(bench, models, "judge", models)
            if quality:
                self.quality[models] = quality

    def fits(self, models: PropertySet) -> bool:
        if self.arguments.allow_quality_loss or models not in self.quality:
            return True
        return self.quality[models].fits(self.quality.get(self.default))

    # ---- stage 0: the main model alone in f32

    def make_references(self) -> None:
        self.clock.tick("f32 reference")
        self.on_one(self.references_on)
        self.remember("take_references", self.references)

    def references_on(self, bench: TuningClient) -> None:
        self.references.clear()
        exact = self.default.with_properties(EXACT)
        tokens = min(64, self.arguments.max_new_tokens)
        for ids in self.prompts:
            reference = self.tried(bench, exact, "reference", exact, ids, tokens)
            if not reference:
                break
            self.references.append(reference)
            enough = len(self.references) >= MOST_REFERENCES or self.clock.until(REFERENCE_BY) < 0
            if enough and len(self.references) >= LEAST_RUN:
                break

    # ---- stage 1: devices and properties, by the time of one iteration

    def try_drafts(self) -> None:
        """Acceptance and cost of each draft with default properties, for a first estimate of K."""
        self.clock.tick("drafts")
        self.on_one(self.try_drafts_on)
        if not self.drafts:
            raise Ended(next(iter(self.failed.values())))
        self.drafts.sort(key=lambda draft: max(self.predicted(self.default, draft).values()), reverse=True)
        best = self.predicted(self.default, self.drafts[0])
        self.k = max(best, key=best.__getitem__)

    def try_drafts_on(self, bench: TuningClient) -> None:
        for draft in list(self.drafts):
            setting, runs = Setting(self.default, NATIVE, draft, 4), []
            for ids in self.prompts[:4]:
                run = self.decode(bench, setting, ids, 2 * FIRST_TOKENS)
                runs += [run] if run else []
                if not run or self.clock.until(DRAFTS_BY) < 0:
                    break
            if not runs or not self.measure_costs(bench, self.default, draft):
                self.drafts.remove(draft)
                continue
            proposed = [n for run in runs for n in run.proposed]
            gained = [n for run in runs for n in run.gained]
            self.alpha[draft] = metrics.per_token_acceptance(proposed, gained) or 0.0

    def measure_costs(self, bench: TuningClient, models: PropertySet, draft: Path) -> bool:
        if (models, draft) not in self.costs:
            found = self.tried(bench, Setting(models, NATIVE, draft, 1), "measure_costs", models, draft)
            if not found:
                return False
            self.costs[models, draft] = found
        return True

    def predicted(self, models: PropertySet, draft: Path) -> dict[int, float]:
        """Predicted speedup per K, from the costs of these models and the draft's acceptance."""
        measured = self.costs[models, draft]
        verify = measured.verify()
        c = measured.draft / verify[1]
        alpha = self.alpha[draft]
        return {
            k: metrics.predicted_speedup(metrics.block_efficiency_at(alpha, k), k, c, verify[k + 1] / verify[1])
            for k in range(1, LONGEST + 1)
        }

    def try_properties(self) -> None:
        self.clock.tick("properties")
        if len(self.sets) > 1:  # devices first, with default properties
            self.time_sets(self.sets, 3)
            ranked = sorted(self.measured_sets(), key=lambda one: -one.speedup)
            kept = {one.models for one in ranked[: max(1, len(ranked) // 2)]} | {self.default}
            self.drop(self.property_candidates.values(), kept, "devices")
            self.sets = [one for one in self.sets if one in kept]
        for found in list(self.sets):
            ask = lambda bench, found=found: self.tried(bench, found, "property_values", found.device)  # noqa: E731
            values = self.on_one(ask) or []
            self.sets += [found.with_properties(value) for value in values]
            self.sets += [found.with_draft_properties(value) for value in draft_property_values(found.draft_device)]
        self.sets = list(dict.fromkeys(self.sets))

        repeats, round_ = 5, 0
        while True:
            round_ += 1
            self.time_sets(self.sets, repeats)
            if round_ == 1:  # combine the best value of each property
                together = self.together()
                if together and self.clock.until(PROPERTIES_BY) > 0:
                    self.sets = [*self.sets, together]
                    self.time_sets([together], repeats)
            ranked = [one for one in self.measured_sets() if one.models in self.sets]
            ranked.sort(key=lambda one: (not self.fits(one.models), -one.speedup))
            kept = {one.models for one in ranked[: max(2, len(ranked) // 2)]}
            kept |= {self.default, self.best_alone(ranked)}
            self.drop(self.property_candidates.values(), kept, f"properties {round_}")
            enough = len(kept) >= len(self.sets) or self.clock.until(PROPERTIES_BY) < 0
            self.sets = [one for one in self.sets if one in kept]
            if enough:
                break
            repeats *= 2
        ranked = [one for one in self.measured_sets() if one.models in self.sets and self.fits(one.models)]
        by_iteration = sorted(ranked, key=lambda one: -one.speedup)
        self.fastest = [one.models for one in by_iteration[:2]] or [self.default]
        self.fastest_alone = self.best_alone(ranked, NOISE)

    def best_alone(self, found: list[Candidate], above: float = 0.0) -> PropertySet:
        """The set within the quality limits with the fastest plain decoding; the default if none is faster than
        `above`. Sets that differ from the default only in the draft are ignored: without a draft they are equal."""
        usual = (self.default.device, self.default.properties)
        own = [one for one in found if (one.models.device, one.models.properties) != usual and one.alone > above]
        fitting = [one for one in own if self.fits(one.models)]
        return max(fitting, key=lambda one: one.alone).models if fitting else self.default

    def measured_sets(self) -> list[Candidate]:
        return [one for one in self.property_candidates.values() if one.speedup]

    def together(self) -> PropertySet | None:
        """The default plus the best value of each property that helps by itself, if there are at least two; properties
        that help only the draft are set for it only. At most one precision property: some exclude each other."""
        best: dict[tuple[bool, str], tuple[float, Properties]] = {}
        for one in self.measured_sets():
            both, draft = one.models.added_to(self.default)
            same_devices = (one.models.device, one.models.draft_device) == (
                self.default.device,
                self.default.draft_device,
            )
            added = both or draft
            if same_devices and len(added) == 1 and one.speedup > NOISE and self.fits(one.models):
                key = (not both, "precision" if added[0][0] in PRECISIONS else added[0][0])
                best[key] = max(best.get(key, (0.0, ())), (one.speedup, added))
        if len(best) < 2:
            return None
        models = self.default
        for (for_draft_only, _), (_, added) in sorted(best.items()):
            models = models.with_draft_properties(added) if for_draft_only else models.with_properties(added)
        return models

    def time_sets(self, sets: list[PropertySet], repeats: int) -> None:
        """Time K draft steps plus one verification, and one plain step, interleaved over all sets; judge their quality.
        Each machine measures a part of the sets and the default set."""
        most_time = sets[:LEAST_SETS]
        others = [one for one in sets if one != self.default]
        self.share(others, lambda part, bench: self.time_part(bench, part, most_time, repeats))

    def time_part(
        self, bench: TuningClient, sets: list[PropertySet], most_time: list[PropertySet], repeats: int
    ) -> None:
        draft = self.drafts[0]
        for group in bench.ask("groups", [self.default], sets):
            bench.ask("keep", group, [draft])
            here = []
            for models in group:
                out_of_time = self.clock.until(LENGTHS_BY if models in most_time else PROPERTIES_BY) < 0
                if out_of_time and models != self.default and not bench.ask("is_loaded", models, [draft]):
                    self.note = "the budget had no time for all properties: give more --minutes"
                elif self.loads(bench, models, [draft]):
                    self.judge(bench, models)
                    here += [models] if str(models) not in self.failed else []
            seconds = self.time_iterations(bench, here, draft, repeats)
            if self.default not in seconds:
                continue
            plain, iteration = seconds[self.default]
            for models, (alone, drafting) in seconds.items():
                one = self.property_candidates.setdefault(models, Candidate(models))
                one.alone, one.speedup = plain / alone, iteration / drafting

    def time_iterations(
        self, bench: TuningClient, sets: list[PropertySet], draft: Path, repeats: int
    ) -> dict[PropertySet, tuple[float, float]]:
        """Seconds of a plain step and of an iteration with K draft tokens: medians of interleaved runs. Failed sets are
        left out."""
        rooms = [room for room in (self.tried(bench, one, "room", one, draft) for one in sets) if room]
        width, capacity = min(room[0] for room in rooms), min(room[1] for room in rooms)
        context = max(1, min(cost_model.CONTEXT, capacity - self.k - 1))
        tokens = (np.arange(context + self.k + 1, dtype=np.int64) * 7919 + 1) % width
        times: dict[PropertySet, list[tuple]] = {models: [] for models in sets if str(models) not in self.failed}
        for _ in range(repeats + 1):
            for models in list(times):
                seconds = self.tried(bench, models, "iteration", models, draft, tokens, self.k)
                if seconds:
                    times[models].append(seconds)
                else:
                    del times[models]
        found = {}
        for models, measured in times.items():
            plain, check, step = (statistics.median(seconds) for seconds in zip(*measured[1:], strict=True))
            found[models] = plain, check + self.k * step
            bench.ask("forget", models, draft)
        return found

    def drop(self, candidates, kept: set, where: str) -> None:
        for one in candidates:
            if one.setting not in kept and not one.dropped:
                one.dropped = where

    # ---- stage 2: engine, draft, draft length, by decoding

    def settings(self) -> list[Setting]:
        """The settings to try with the remaining property sets: many with the fastest, few with the others. The first
        ones are tried whatever the budget, the rest as far as it goes."""
        best_set, draft = self.fastest[0], self.drafts[0]
        best = self.lengths(best_set, draft)[0]
        found = [
            Setting(self.default, GENAI, draft, SAMPLE_K),
            Setting(best_set, GENAI, draft, best),
            Setting(best_set, NATIVE, draft, best),
            Setting(best_set, NATIVE, draft, "adaptive"),
            *self.alone(),
        ]
        least = len(found)
        for place, models in enumerate(dict.fromkeys([*self.fastest, self.default])):
            for draft in self.drafts if place == 0 else self.drafts[:1]:
                lengths = self.lengths(models, draft)
                fixed = lengths if place == 0 else [lengths[0], *([SAMPLE_K] if place == 1 else [])]
                found += [Setting(models, engine, draft, k) for k in fixed for engine in (GENAI, NATIVE)]
                found += [Setting(models, NATIVE, draft, k) for k in ("adaptive", *THRESHOLDS[: 3 * (place == 0)])]
        longest = 7 if kind(best_set.device) == "NPU" else LONGEST  # on an NPU, GenAI may grow K to twice its value
        found = [one for one in found if one.engine == NATIVE or one.draft_length <= longest]
        if kind(best_set.device) != "NPU":
            found += [dataclasses.replace(found[1], scheduler=scheduler) for scheduler in SCHEDULERS]
        found = list(dict.fromkeys(found))
        plain = self.costs[self.default, self.drafts[0]].main[1]
        affordable = int(self.clock.until(LENGTHS_BY) / (LEAST_RUN * FIRST_TOKENS * plain))
        if affordable < len(found):
            self.note = "the budget had no time for all draft lengths: give more --minutes"
        return found[: max(least, affordable)]

    def alone(self) -> list[Setting]:
        """The main model alone with each engine and scheduler, whose gains must not be credited to the draft."""
        models = self.fastest_alone
        schedulers = SCHEDULERS if kind(models.device) != "NPU" else ()
        return [
            Setting(models, GENAI),
            Setting(models, NATIVE),
            *(Setting(models, GENAI, scheduler=scheduler) for scheduler in schedulers),
        ]

    def lengths(self, models: PropertySet, draft: Path) -> list[int]:
        """Fixed lengths to try, most promising first. Accepted tokens come in runs, which favours longer drafts."""
        if not self.on_one(lambda bench: self.measure_costs(bench, models, draft)):
            return [self.k]
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
            for engine in (GENAI, NATIVE):  # there are samples for both
                kept |= {one.setting for one in [one for one in drafted if one.setting.engine == engine][:2]}
            kept |= {one.setting for one in found if not one.setting.draft}
            self.drop(found, kept, f"lengths {round_}")
            best = drafted[0].setting
            if round_ == 1 and isinstance(best.draft_length, int):  # add the best one's neighbours, if untested
                around = [dataclasses.replace(best, draft_length=best.draft_length + i) for i in (-1, 1)]
                kept |= {one for one in around if 1 <= one.draft_length <= LONGEST and one not in self.candidates}
            settings = [one for one in dict.fromkeys([*settings, *kept]) if one in kept]
            tokens *= 2

    def decode_round(self, settings: list[Setting], tokens: int, start: int, seconds: float) -> list[Setting]:
        """Decode with all settings interleaved, each prompt once, as many prompts as `seconds` allow. Each machine has
        a part of the settings and the baseline. Returns the settings that ran."""
        ran: list[Setting] = []
        by_models = sorted(settings, key=lambda one: (str(one.models), one.engine, str(one.draft), one.scheduler))
        others = [one for one in by_models if one != self.baseline]
        self.share(others, lambda part, bench: ran.extend(self.decode_part(bench, part, tokens, start, seconds)))
        return list(dict.fromkeys(ran))

    def decode_part(
        self, bench: TuningClient, settings: list[Setting], tokens: int, start: int, seconds: float
    ) -> list[Setting]:
        ran = []
        groups = bench.ask("groups", [self.baseline], settings)
        for group in groups:
            bench.ask("keep", group, [])
            here = self.warm(bench, group)
            gained, spent = dict.fromkeys(here, 0), dict.fromkeys(here, 0.0)
            begin, prompts = time.perf_counter(), 0
            while prompts < min(LEAST_RUN, len(self.prompts)) or time.perf_counter() - begin < seconds / len(groups):
                if prompts == len(self.prompts):
                    break
                ids = self.prompts[(start + prompts) % len(self.prompts)]
                for one, run in self.in_turns(bench, here, ids, tokens):
                    gained[one] += len(run.tokens) - 1
                    spent[one] += run.decode_seconds
                here = [one for one in here if str(one) not in self.failed]
                for one in here:
                    candidate = self.candidates.setdefault(one, Candidate(one))
                    throughput, alone = (gained[way] / spent[way] for way in (one, self.baseline))
                    candidate.throughput, candidate.speedup = throughput, throughput / alone  # both from this machine
                prompts += 1
                if self.clock.until(1) < 0:
                    break
            ran += here
        return ran

    def in_turns(self, bench: TuningClient, settings: list[Setting], ids: np.ndarray, tokens: int):
        """Yield each setting with its run. After a failure the other settings are warmed up again."""
        for number, one in enumerate(settings):
            run = self.decode(bench, one, ids, tokens)
            if run:
                yield one, run
            else:
                self.warm(bench, [*settings[:number], *settings[number + 1 :]])

    # ---- stage 3: the finalists against the main model alone

    def finalists(self) -> list[Setting]:
        found = [one for one in self.candidates.values() if one.speedup and not one.dropped and one.setting.draft]
        found.sort(key=lambda one: -one.speedup)
        chosen = [one.setting for one in found[:2]]
        for engine in (GENAI, NATIVE):
            chosen += [one.setting for one in found if one.setting.engine == engine][:2]
        usual = Setting(self.default, GENAI, self.drafts[0], SAMPLE_K)
        steps = [Setting(one.models, GENAI, one.draft, SAMPLE_K) for one in chosen]  # the gain from properties alone
        return list(dict.fromkeys([self.baseline, *self.alone(), usual, *steps, *chosen]))

    def measure_afresh(self) -> None:
        """Measure the choice and its baselines in new rounds. The fastest of many near-equals is partly the luckiest:
        the rounds that selected it flatter it, new ones do not."""
        settings = tune_verdict.to_measure_afresh(self)
        if settings:
            self.compare(self.afresh, settings)

    def compare(self, contest: Contest, settings: list[Setting]) -> None:
        """Run interleaved rounds of all settings until the contest's share of the budget is spent. Each round uses
        other prompts than the one before, so that ranges include the variation between prompts. On a cluster each
        machine runs its own rounds."""
        contest.settings = settings
        self.clock.tick("new rounds of the choice" if contest is self.afresh else "finalists")
        machines = len(self.benches)
        try:
            self.share(
                list(range(machines)), lambda numbers, bench: self.compare_on(bench, contest, *numbers, machines)
            )
        except Ended:
            if not contest.ways:
                raise

    def compare_on(self, bench: TuningClient, contest: Contest, number: int, machines: int) -> None:
        if contest.ways and self.clock.until(contest.by) < 0:  # a lost machine's share
            return
        settings = contest.settings
        bench.ask("keep", settings, [])
        settings = [one for one in settings if self.loads(bench, one)]
        begin = time.perf_counter()
        warm_up = self.decode_all(bench, settings, self.prompts[-1:])
        seconds = time.perf_counter() - begin  # per prompt
        at_once = min(max(1, int(self.clock.until(contest.by) / seconds / ROUNDS)), len(self.prompts))
        start = number * at_once
        if contest is self.afresh:
            start += len(self.choosing.prompts)
        rounds = 0
        while rounds < contest.least_rounds or self.clock.until(contest.by) > 1.1 * at_once * seconds:
            prompts = [self.prompts[(start + i) % len(self.prompts)] for i in range(at_once)]
            self.keep_round(contest, self.decode_all(bench, settings, prompts), prompts)
            start += machines * at_once
            rounds += 1
        if not contest.ways:
            self.keep_round(contest, warm_up, self.prompts[-1:])
        if bench.machine:
            self.other_load = max(self.other_load, bench.ask("other_load"))

    def decode_all(
        self, bench: TuningClient, settings: list[Setting], prompts: list[np.ndarray]
    ) -> dict[Setting, list]:
        runs: dict[Setting, list] = {one: [] for one in settings}
        for ids in prompts:
            here = [one for one in settings if str(one) not in self.failed]
            for one, run in self.in_turns(bench, here, ids, self.arguments.max_new_tokens):
                runs[one].append(run)
        return {one: found for one, found in runs.items() if str(one) not in self.failed}

    def keep_round(self, contest: Contest, runs: dict[Setting, list], prompts: list[np.ndarray]) -> None:
        """Add a round to the contest; settings that failed are dropped from it."""
        with self._one:
            ways = contest.ways or {one: self.way(one) for one in runs}
            ways = {one: way for one, way in ways.items() if len(runs.get(one, [])) == len(prompts)}
            for one, way in ways.items():
                way.rounds.append(runs[one])
            contest.prompts += prompts
            contest.ways = ways

    def way(self, setting: Setting) -> Way:
        length = setting.draft_length if isinstance(setting.draft_length, int) else setting.length
        tokens = self.arguments.max_new_tokens
        return Way(
            str(setting), setting.engine, length, 0.0, lambda ids: self.decode(self.benches[0], setting, ids, tokens)
        )
