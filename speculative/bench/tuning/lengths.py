"""Engine, draft and draft length, ranked by decoding: successive halving within the time budget."""

import dataclasses
import time
from pathlib import Path

from speculative.bench.methods import TWO_SOURCES
from speculative.bench.tuning.client import TuningClient
from speculative.bench.tuning.session import (
    FIRST_TOKENS,
    LENGTHS_BY,
    MIN_PROMPTS_PER_ROUND,
    SAMPLE_K,
    Candidate,
    Session,
)
from speculative.bench.tuning.settings import (
    SCHEDULERS,
    PropertySet,
    Setting,
    kind,
)
from speculative.drafting.policy import LONGEST
from speculative.pair.engines import GENAI, NATIVE

THRESHOLDS = (0.3, 0.5, 0.7)  # draft confidence


class LengthStage:
    """Tries settings with the remaining property sets."""

    def __init__(self, session: Session):
        self.session = session

    def settings(self) -> list[Setting]:
        """The settings to try with the remaining property sets: many with the fastest, few with the others. The first
        ones are tried whatever the budget, the rest as far as it goes."""
        best_set, draft = self.session.fastest[0], self.session.drafts[0]
        sets = list(dict.fromkeys([*self.session.fastest, self.session.default]))
        if not draft:
            return [*self.session.alone(), *(self.session.drafting(models, None, 0) for models in sets)]
        best = self.lengths(best_set, draft)[0]
        candidates = [
            self.session.sample_setting,
            self.session.with_draft(best_set, GENAI, draft, best),
            self.session.with_draft(best_set, NATIVE, draft, best),
            self.session.with_draft(best_set, NATIVE, draft, "adaptive"),
            self.session.with_draft(best_set, NATIVE, draft, TWO_SOURCES),
            *self.session.alone(),
        ]
        num_required = len(candidates)
        for index, models in enumerate(sets):
            for draft in self.session.drafts if index == 0 else self.session.drafts[:1]:
                lengths = self.lengths(models, draft)
                fixed = lengths if index == 0 else [lengths[0], *([SAMPLE_K] if index == 1 else [])]
                candidates += [
                    self.session.with_draft(models, engine, draft, k) for k in fixed for engine in (GENAI, NATIVE)
                ]
                rules: list[str | float] = ["adaptive", *THRESHOLDS[: 3 * (index == 0)]]
                candidates += [self.session.with_draft(models, NATIVE, draft, rule) for rule in rules]
        longest = 7 if kind(best_set.device) == "NPU" else LONGEST  # on an NPU, GenAI may grow K to twice its value
        candidates = [
            one
            for one in candidates
            if one.engine == NATIVE or isinstance(one.draft_length, str) or one.draft_length <= longest
        ]
        if kind(best_set.device) != "NPU":
            candidates += [dataclasses.replace(candidates[1], scheduler=scheduler) for scheduler in SCHEDULERS]
        candidates = self.session.possible(candidates)
        plain = self.session.costs[self.session.default, self.session.drafts[0]].main[1]
        affordable = int(self.session.clock.until(LENGTHS_BY) / (MIN_PROMPTS_PER_ROUND * FIRST_TOKENS * plain))
        if affordable < len(candidates):
            self.session.note = "the budget had no time for all draft lengths: give more --minutes"
        return candidates[: max(num_required, affordable)]

    def lengths(self, models: PropertySet, draft: Path | None) -> list[int]:
        """Fixed lengths to try, most promising first. Accepted tokens come in runs, which favours longer drafts."""
        if not self.session.on_one(lambda bench: self.session.measure_costs(bench, models, draft)):
            return [self.session.k]
        gains = self.session.predicted(models, draft)
        best = max(gains, key=gains.__getitem__)
        nearby = [k for k in gains if gains[k] > 0.85 * gains[best]] + [k for k in (best + 2, best + 4) if k in gains]
        step = -(-len(set(nearby)) // 6)
        return [best, *(k for k in sorted(set(nearby))[::step] if k != best)]

    def halve(self) -> None:
        settings, round_, tokens, start = self.settings(), 0, FIRST_TOKENS, 0
        while True:
            round_ += 1
            self.session.clock.tick(f"{len(settings)} settings, round {round_}")
            remaining = self.session.clock.until(LENGTHS_BY)
            settings = self.decode_round(
                settings, min(tokens, self.session.arguments.max_new_tokens), start, remaining / 2
            )
            start += MIN_PROMPTS_PER_ROUND
            tried = [one for one in map(self.session.candidates.get, settings) if one and one.speedup]
            drafted = [one for one in tried if self.session.drafts_with(one.setting)]
            drafted.sort(key=lambda one: -one.speedup)
            if len(drafted) <= 6 or self.session.clock.until(LENGTHS_BY) <= 0:
                break
            kept_settings = {one.setting for one in drafted[: max(4, len(drafted) // 2)]}
            for engine in (GENAI, NATIVE):  # there are samples for both
                kept_settings |= {one.setting for one in [one for one in drafted if one.setting.engine == engine][:2]}
            kept_settings |= {one.setting for one in tried if not self.session.drafts_with(one.setting)}
            self.session.drop(tried, kept_settings, f"lengths {round_}")
            best = drafted[0].setting
            if round_ == 1 and isinstance(best.draft_length, int):  # add the best one's neighbours, if untested
                nearby = [k for k in (best.draft_length - 1, best.draft_length + 1) if 1 <= k <= LONGEST]
                neighbours = [dataclasses.replace(best, draft_length=k) for k in nearby]
                kept_settings |= {one for one in neighbours if one not in self.session.candidates}
            settings = [one for one in dict.fromkeys([*settings, *kept_settings]) if one in kept_settings]
            tokens *= 2

    def decode_round(self, settings: list[Setting], tokens: int, start: int, seconds: float) -> list[Setting]:
        """Decode with all settings interleaved, each prompt once, as many prompts as `seconds` allow. Each machine has
        a part of the settings and the baseline. Returns the settings that ran."""
        ran: list[Setting] = []
        by_models = sorted(settings, key=lambda one: (str(one.models), one.engine, str(one.draft), one.scheduler))
        others = [one for one in by_models if one != self.session.baseline]
        self.session.share(
            others, lambda part, bench: ran.extend(self.decode_part(bench, part, tokens, start, seconds))
        )
        return list(dict.fromkeys(ran))

    def decode_part(
        self, bench: TuningClient, settings: list[Setting], tokens: int, start: int, seconds: float
    ) -> list[Setting]:
        ran = []
        groups = bench.ask("groups", [self.session.baseline], settings)
        for group in groups:
            bench.ask("keep", group, [])
            running = self.session.warm(bench, group)
            gained, spent = dict.fromkeys(running, 0), dict.fromkeys(running, 0.0)
            begin, prompts = time.perf_counter(), 0
            while prompts < min(
                MIN_PROMPTS_PER_ROUND, len(self.session.prompts)
            ) or time.perf_counter() - begin < seconds / len(groups):
                if prompts == len(self.session.prompts):
                    break
                ids = self.session.prompts[(start + prompts) % len(self.session.prompts)]
                for one, run in self.session.in_turns(bench, running, ids, tokens):
                    gained[one] += len(run.tokens) - 1
                    spent[one] += run.decode_seconds
                running = [one for one in running if str(one) not in self.session.failed]
                for one in running:
                    candidate = self.session.candidates.setdefault(one, Candidate(one))
                    throughput, alone = (gained[setting] / spent[setting] for setting in (one, self.session.baseline))
                    candidate.throughput, candidate.speedup = throughput, throughput / alone  # both from this machine
                prompts += 1
                if self.session.clock.until(1) < 0:
                    break
            ran += running
        return ran
