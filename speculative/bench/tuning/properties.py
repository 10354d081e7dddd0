"""Devices and plugin properties, ranked by the time of one iteration: K draft steps and a verification."""

import statistics
from pathlib import Path

import numpy as np

from speculative.bench.tuning.client import TuningClient
from speculative.bench.tuning.session import LENGTHS_BY, PROPERTIES_BY, Candidate, Session
from speculative.bench.tuning.settings import (
    Properties,
    PropertySet,
    draft_property_values,
)
from speculative.drafting import cost_model

NOISE = 1.02  # gain below which a property stays at its default
PRECISIONS = ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION", "EXECUTION_MODE_HINT")
MIN_SETS = 2  # property sets that may take more time: the default and the most promising one


class PropertyStage:
    """Finds the fastest property sets within the quality limits."""

    def __init__(self, session: Session):
        self.session = session

    def try_properties(self) -> None:
        self.session.clock.tick("properties")
        if len(self.session.sets) > 1:  # devices first, with default properties
            self.time_sets(self.session.sets, 3)
            ranked = sorted(self.session.measured_sets(), key=lambda one: -one.speedup)
            kept = {one.models for one in ranked[: max(1, len(ranked) // 2)]} | {self.session.default}
            self.session.drop(self.session.property_candidates.values(), kept, "devices")
            self.session.sets = [one for one in self.session.sets if one in kept]
        for property_set in list(self.session.sets):
            ask = lambda bench, tried=property_set: self.session.attempt(bench, tried, "property_values", tried.device)  # noqa: E731
            values = self.session.on_one(ask) or []
            self.session.sets += [property_set.with_properties(value) for value in values]
            draft_values = draft_property_values(property_set.draft_device) if self.session.drafts[0] else []
            self.session.sets += [property_set.with_draft_properties(value) for value in draft_values]
        self.session.sets = list(dict.fromkeys(self.session.sets))

        repeats, round_ = 5, 0
        while True:
            round_ += 1
            self.time_sets(self.session.sets, repeats)
            if round_ == 1:  # combine the best value of each property
                together = self.together()
                if together and self.session.clock.until(PROPERTIES_BY) > 0:
                    self.session.sets = [*self.session.sets, together]
                    self.time_sets([together], repeats)
            ranked = [one for one in self.session.measured_sets() if one.models in self.session.sets]
            ranked.sort(key=lambda one: (not self.session.fits(one.models), -one.speedup))
            kept = {one.models for one in ranked[: max(2, len(ranked) // 2)]}
            kept |= {self.session.default, self.best_alone(ranked)}
            self.session.drop(self.session.property_candidates.values(), kept, f"properties {round_}")
            enough = len(kept) >= len(self.session.sets) or self.session.clock.until(PROPERTIES_BY) < 0
            self.session.sets = [one for one in self.session.sets if one in kept]
            if enough:
                break
            repeats *= 2
        ranked = [
            one
            for one in self.session.measured_sets()
            if one.models in self.session.sets and self.session.fits(one.models)
        ]
        by_iteration = sorted(ranked, key=lambda one: -one.speedup)
        self.session.fastest = [one.models for one in by_iteration[:2]] or [self.session.default]
        self.session.fastest_alone = self.best_alone(ranked, NOISE)

    def best_alone(self, candidates: list[Candidate], above: float = 0.0) -> PropertySet:
        """The set within the quality limits with the fastest plain decoding; the default if none is faster than
        `above`. Sets that differ from the default only in the draft are ignored: without a draft they are equal."""
        default = (self.session.default.device, self.session.default.properties)
        changed = [
            one for one in candidates if (one.models.device, one.models.properties) != default and one.alone > above
        ]
        fitting = [one for one in changed if self.session.fits(one.models)]
        return max(fitting, key=lambda one: one.alone).models if fitting else self.session.default

    def together(self) -> PropertySet | None:
        """The default plus the best value of each property that helps by itself, if there are at least two; properties
        that help only the draft are set for it only. At most one precision property: some exclude each other."""
        best: dict[tuple[bool, str], tuple[float, Properties]] = {}
        for one in self.session.measured_sets():
            both, draft = one.models.added_to(self.session.default)
            same_devices = (one.models.device, one.models.draft_device) == (
                self.session.default.device,
                self.session.default.draft_device,
            )
            added = both or draft
            if same_devices and len(added) == 1 and one.speedup > NOISE and self.session.fits(one.models):
                key = (not both, "precision" if added[0][0] in PRECISIONS else added[0][0])
                best[key] = max(best.get(key, (0.0, ())), (one.speedup, added))
        if len(best) < 2:
            return None
        models = self.session.default
        for (for_draft_only, _), (_, added) in sorted(best.items()):
            models = models.with_draft_properties(added) if for_draft_only else models.with_properties(added)
        return models

    def time_sets(self, sets: list[PropertySet], repeats: int) -> None:
        """Time K draft steps plus one verification, and one plain step, interleaved over all sets; judge their quality.
        Each machine measures a part of the sets and the default set."""
        most_time = sets[:MIN_SETS]
        others = [one for one in sets if one != self.session.default]
        self.session.share(others, lambda part, bench: self.time_part(bench, part, most_time, repeats))

    def time_part(
        self, bench: TuningClient, sets: list[PropertySet], most_time: list[PropertySet], repeats: int
    ) -> None:
        draft = self.session.drafts[0]
        for group in bench.ask("groups", [self.session.default], sets):
            bench.ask("keep", group, [draft])
            loaded = []
            for models in group:
                out_of_time = self.session.clock.until(LENGTHS_BY if models in most_time else PROPERTIES_BY) < 0
                if out_of_time and models != self.session.default and not bench.ask("is_loaded", models, [draft]):
                    self.session.note = "the budget had no time for all properties: give more --minutes"
                elif self.session.loads(bench, models, [draft]):
                    self.session.judge(bench, models)
                    loaded += [models] if str(models) not in self.session.failed else []
            seconds = self.time_iterations(bench, loaded, draft, repeats)
            if self.session.default not in seconds:
                continue
            plain, iteration = seconds[self.session.default]
            for models, (alone, drafting) in seconds.items():
                one = self.session.property_candidates.setdefault(models, Candidate(models))
                one.alone, one.speedup = plain / alone, iteration / drafting

    def time_iterations(
        self, bench: TuningClient, sets: list[PropertySet], draft: Path | None, repeats: int
    ) -> dict[PropertySet, tuple[float, float]]:
        """Seconds of a plain step and of an iteration with K draft tokens: medians of interleaved runs. Failed sets are
        left out."""
        limits = [self.session.attempt(bench, one, "room", one, draft) for one in sets]
        width = min(limit[0] for limit in limits if limit)
        capacity = min(limit[1] for limit in limits if limit)
        context = max(1, min(cost_model.CONTEXT, capacity - self.session.k - 1))
        tokens = (np.arange(context + self.session.k + 1, dtype=np.int64) * 7919 + 1) % width
        times: dict[PropertySet, list[tuple]] = {
            models: [] for models in sets if str(models) not in self.session.failed
        }
        for _ in range(repeats + 1):
            for models in list(times):
                seconds = self.session.attempt(bench, models, "iteration", models, draft, tokens, self.session.k)
                if seconds:
                    times[models].append(seconds)
                else:
                    del times[models]
        results = {}
        for models, measured in times.items():
            plain, check, step = (statistics.median(seconds) for seconds in zip(*measured[1:], strict=True))
            results[models] = plain, check + self.session.k * step
            bench.ask("forget", models, draft)
        return results
