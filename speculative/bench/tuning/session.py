"""State of a tuning run that its stages share: candidates, time budget, machines and calls to their processes."""

import argparse
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from speculative.bench import quality as text_quality
from speculative.bench.cluster import ray_nodes
from speculative.bench.cluster.child_process import ChildFailed
from speculative.bench.cluster.hosts import Place
from speculative.bench.cluster.worker_process import RAISABLE
from speculative.bench.harness import Method
from speculative.bench.methods import ADAPTIVE_LOOKUP
from speculative.bench.quality import Quality
from speculative.bench.tuning.client import TuningClient
from speculative.bench.tuning.settings import (
    SCHEDULERS,
    PropertySet,
    Setting,
    kind,
    merged,
)
from speculative.cli.progress import tqdm
from speculative.drafting.policy import LONGEST, Costs
from speculative.error_text import engine_lines
from speculative.pair.draft_limits import genai_limit
from speculative.pair.engines import GENAI, NATIVE
from speculative.sequence import metrics

SAMPLE_K = 5  # default of samples/speculative_decoding_lm.py
FIRST_TOKENS = 24  # per run in the first halving round; doubled every round
MIN_PROMPTS_PER_ROUND = 2  # minimum prompts per halving round
MIN_ROUNDS = 2  # new rounds after the choice, whatever the budget: one round has no range
# Share of the budget at which each stage ends.
REFERENCE_BY, DRAFTS_BY, PROPERTIES_BY, LENGTHS_BY, CHOSEN_BY = 0.06, 0.15, 0.4, 0.65, 0.82


T = TypeVar("T")
Tried = TypeVar("Tried", bound=PropertySet | Setting)


@dataclass
class Candidate(Generic[Tried]):
    """A property set (first stage) or a setting (second), and its measurements."""

    setting: Tried
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
    decodes at least `min_rounds`, whatever the budget."""

    by: float
    min_rounds: int = 0
    settings: list[Setting] = field(default_factory=list)
    methods: dict[Setting, Method] = field(default_factory=dict)
    prompts: list[np.ndarray] = field(default_factory=list)


@dataclass
class Clock:
    """The time budget and its progress bar."""

    seconds: float
    begin: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.lock = threading.Lock()  # machines of a cluster tick concurrently
        # the bar shows time, not runs: the number of runs depends on their duration
        form = "{desc} |{bar}| {n:.0f} of {total:.0f} s{postfix}"
        self.bar = tqdm(total=self.seconds, bar_format=form, leave=False, dynamic_ncols=True)

    def tick(self, stage: str = "") -> None:
        with self.lock:
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


class Session:
    """Candidates and results of a tuning run, and its machines."""

    def __init__(self, arguments: argparse.Namespace, prompts: list[np.ndarray], places: list[Place]):
        self.arguments = arguments
        self.prompts = prompts
        self.place = places[0]  # the others are identical
        self.benches = [TuningClient(place) for place in places]  # lost ones are removed
        self.machines = [place.name for place in places if place.machine]
        self.drafts: list[Path | None] = arguments.drafts or [None]  # None: suffix decoding instead of a draft
        self._several_drafts = len(self.drafts) > 1
        self.costs: dict[tuple[PropertySet, Path | None], Costs] = {}
        self.clock = Clock(60 * arguments.minutes)
        fixed = merged((), tuple(arguments.property))
        devices = [(one, other) for one in arguments.devices for other in arguments.devices]
        if not arguments.drafts:
            devices = [(one, one) for one in arguments.devices]
        self.sets = [PropertySet(one, other, fixed, fixed) for one, other in devices]
        self.default = self.sets[0]
        self.fastest: list[PropertySet] = []  # for drafting, at most two
        self.fastest_alone = self.default  # for decoding without a draft
        self.baseline = Setting(self.default, GENAI)
        self.references: list[text_quality.ReferenceText] = []
        self.quality: dict[PropertySet, Quality] = {}
        self.alpha: dict[Path | None, float] = {}  # per-token acceptance of each draft
        self.property_candidates: dict[PropertySet, Candidate[PropertySet]] = {}
        self.candidates: dict[Setting, Candidate[Setting]] = {}
        self.choosing = Contest(CHOSEN_BY)  # the finalists; decides the choice
        self.remeasured = Contest(1.0, MIN_ROUNDS)  # the choice and its baselines in new rounds; these are reported
        self.failed: dict[str, str] = {}
        self.not_in_genai = {one: why for one in arguments.drafts if (why := genai_limit(arguments.main, one))}
        self.failed |= {f"GenAI's pipeline with {draft}": why for draft, why in self.not_in_genai.items()}
        self.k = 0  # first estimate of the best draft length
        self.note = ""  # what the budget had no time for
        self.other_load = 0.0  # background load on the machines of a cluster
        self._failed_once: set[str] = set()  # baselines that failed once
        self.lock = threading.Lock()  # for state that several machines change

    def share(self, items: list, work: Callable[[list, TuningClient], None]) -> None:
        """Run `work` on parts of `items`, one per machine, concurrently. A lost machine's part goes to another."""
        if len(self.benches) == 1 and not self.benches[0].machine:
            work(items, self.benches[0])
            return
        n = max(1, min(len(self.benches), len(items)))
        parts = [items[i * len(items) // n : (i + 1) * len(items) // n] for i in range(n)]
        unfinished = ray_nodes.distribute(parts, self.benches, lambda *_: True, work, lambda *_: None)
        if unfinished:
            raise Ended(f"no machine left: {unfinished[0][1]}")

    def on_one(self, work: Callable[[TuningClient], T]) -> T:
        """Run `work` on one machine and return its result."""
        results: list[T] = []
        self.share([None], lambda _, bench: results.append(work(bench)))
        return results[-1]

    def remember(self, name: str, *arguments: object) -> None:
        """Make a remembered call on all machines."""
        for bench in list(self.benches):
            try:
                bench.remember(name, *arguments)
            except ray_nodes.NodeLost:
                self.benches.remove(bench)
        if not self.benches:
            raise Ended("all machines were lost")

    def attempt(self, bench: TuningClient, setting: Setting | PropertySet, name: str, *arguments: object) -> Any:
        """The result of a call for a candidate. None: it failed or crashed the process, and is recorded as failed with
        the reason. A baseline is retried once, as tuning cannot continue without it."""
        while True:
            try:
                return bench.call(name, *arguments)
            except (*RAISABLE, ChildFailed) as error:
                reason = " ".join(engine_lines(error))[:300]
            finally:
                self.clock.tick()
            if setting not in (self.default, self.baseline):
                self.failed[str(setting)] = reason
                return None
            if str(setting) in self._failed_once:
                raise Ended(f"the baseline failed twice ({setting}): {reason}")
            self._failed_once.add(str(setting))

    def loads(
        self, bench: TuningClient, setting: Setting | PropertySet, drafts: list[Path | None] | None = None
    ) -> bool:
        """Load a candidate's models."""
        drafts_to_load = [] if isinstance(setting, Setting) else (drafts or self.drafts)
        return str(setting) not in self.failed and bool(
            self.attempt(bench, setting, "load_models", setting, drafts_to_load)
        )

    def decode(self, bench: TuningClient, setting: Setting, ids: np.ndarray, tokens: int) -> Any:
        """A run, or None if it failed."""
        adaptive = bool(setting.draft) and isinstance(setting.draft_length, str)
        cached = self.costs.get((setting.models, setting.draft)) if adaptive else None
        return self.attempt(bench, setting, "decode", setting, ids, tokens, cached)

    def warm(self, bench: TuningClient, settings: list[Setting]) -> list[Setting]:
        """Load the settings and decode a few tokens, as shapes are compiled on first use. Returns those that ran."""
        loaded = [one for one in settings if self.loads(bench, one)]
        return [one for one in loaded if self.decode(bench, one, self.prompts[0], 8)]

    def judge(self, bench: TuningClient, models: PropertySet) -> None:
        """Judge the output quality of these properties, once: draft and draft length do not affect it."""
        if models not in self.quality and self.references:
            main = (models.device, models.properties)
            cached = [self.quality[one] for one in self.quality if (one.device, one.properties) == main]
            quality = cached[0] if cached else self.attempt(bench, models, "judge", models)
            if quality:
                self.quality[models] = quality

    def fits(self, models: PropertySet) -> bool:
        if self.arguments.allow_quality_loss or models not in self.quality:
            return True
        return self.quality[models].fits(self.quality.get(self.default))

    def measure_costs(self, bench: TuningClient, models: PropertySet, draft: Path | None) -> bool:
        if (models, draft) not in self.costs:
            costs = self.attempt(bench, self.drafting(models, draft, 1), "measure_costs", models, draft)
            if not costs:
                return False
            self.costs[models, draft] = costs
        return True

    def drafting(self, models: PropertySet, draft: Path | None, k: int) -> Setting:
        """This project's engine with a draft, or by suffix decoding, which chooses K itself."""
        return self.with_draft(models, NATIVE, draft, k if draft else ADAPTIVE_LOOKUP)

    def with_draft(
        self, models: PropertySet, engine: str, draft: Path | None, draft_length: int | float | str
    ) -> Setting:
        """The setting with a draft, whose name it has if there are several."""
        return Setting(models, engine, draft, draft_length, draft_name=str(draft or "") if self._several_drafts else "")

    def drafts_with(self, setting: Setting) -> bool:
        """Whether the setting is one of those in question: with a draft, or by suffix decoding if none is given."""
        return bool(setting.draft) or (setting.copies and None in self.drafts)

    @property
    def sample_setting(self) -> Setting:
        """The default settings of samples/speculative_decoding_lm.py, or without a draft of suffix_decoding_lm.py."""
        draft = self.drafts[0]
        if draft:
            return self.with_draft(self.default, GENAI, draft, SAMPLE_K)
        return self.drafting(self.default, None, 0)

    def predicted(self, models: PropertySet, draft: Path | None) -> dict[int, float]:
        """Predicted speedup per K, from the costs of these models and the draft's acceptance."""
        measured = self.costs[models, draft]
        verify = measured.verify()
        c = measured.draft / verify[1]
        alpha = self.alpha[draft]
        return {
            k: metrics.predicted_speedup(metrics.block_efficiency_at(alpha, k), k, c, verify[k + 1] / verify[1])
            for k in range(1, LONGEST + 1)
        }

    def measured_sets(self) -> list[Candidate[PropertySet]]:
        return [one for one in self.property_candidates.values() if one.speedup]

    def possible(self, settings: Iterable[Setting]) -> list[Setting]:
        """The settings whose engine takes their draft, each once."""
        return [one for one in dict.fromkeys(settings) if one.engine != GENAI or one.draft not in self.not_in_genai]

    def drop(self, candidates: Iterable[Candidate[Tried]], kept: set[Tried], where: str) -> None:
        for one in candidates:
            if one.setting not in kept and not one.dropped:
                one.dropped = where

    def alone(self) -> list[Setting]:
        """The methods whose gains must not be credited to a draft: the main model alone with each engine and scheduler,
        and suffix decoding, unless it is what is tried."""
        models = self.fastest_alone
        schedulers = SCHEDULERS if kind(models.device) != "NPU" else ()
        return [
            Setting(models, GENAI),
            Setting(models, NATIVE),
            *([] if None in self.drafts else [Setting(models, NATIVE, draft_length=ADAPTIVE_LOOKUP)]),
            *(Setting(models, GENAI, scheduler=scheduler) for scheduler in schedulers),
        ]

    def in_turns(
        self, bench: TuningClient, settings: list[Setting], ids: np.ndarray, tokens: int
    ) -> Iterator[tuple[Setting, Any]]:
        """Yield each setting with its run. After a failure the other settings are warmed up again."""
        for number, one in enumerate(settings):
            run = self.decode(bench, one, ids, tokens)
            if run:
                yield one, run
            else:
                self.warm(bench, [*settings[:number], *settings[number + 1 :]])
