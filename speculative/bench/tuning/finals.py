"""Finalists against the main model alone, in interleaved rounds; then the choice once more in new rounds."""

import time

import numpy as np

from speculative.bench.harness import Method
from speculative.bench.tuning.choice import to_remeasure
from speculative.bench.tuning.client import TuningClient
from speculative.bench.tuning.session import SAMPLE_K, Contest, Ended, Session
from speculative.bench.tuning.settings import Setting
from speculative.pair.engines import GENAI, NATIVE

ROUNDS = 6  # of the finalists, if the budget allows


class Finals:
    """Compares settings over whole rounds."""

    def __init__(self, session: Session):
        self.session = session

    def finalists(self) -> list[Setting]:
        candidates = [one for one in self.session.candidates.values() if one.speedup and not one.dropped]
        candidates = [one for one in candidates if self.session.drafts_with(one.setting)]
        candidates.sort(key=lambda one: -one.speedup)
        chosen = [one.setting for one in candidates[:2]]
        for engine in (GENAI, NATIVE):
            chosen += [one.setting for one in candidates if one.setting.engine == engine][:2]
        # the gain of the properties alone
        steps = [self.session.with_draft(one.models, GENAI, one.draft, SAMPLE_K) for one in chosen if one.draft]
        others = [*self.session.alone(), self.session.sample_setting]
        return self.session.possible([self.session.baseline, *others, *steps, *chosen])

    def remeasure(self) -> None:
        """Measure the choice and its baselines in new rounds. The fastest of many near-equals is partly the luckiest:
        the rounds that selected it flatter it, new ones do not."""
        settings = to_remeasure(self.session)
        if settings:
            self.compare(self.session.remeasured, settings)

    def compare(self, contest: Contest, settings: list[Setting]) -> None:
        """Run interleaved rounds of all settings until the contest's share of the budget is spent. Each round uses
        other prompts than the one before, so that ranges include the variation between prompts. On a cluster each
        machine runs its own rounds."""
        contest.settings = settings
        self.session.clock.tick("new rounds of the choice" if contest is self.session.remeasured else "finalists")
        machines = len(self.session.benches)

        def work(numbers: list[int], bench: TuningClient) -> None:
            for number in numbers:
                self.compare_on(bench, contest, number, machines)

        try:
            self.session.share(list(range(machines)), work)
        except Ended:
            if not contest.methods:
                raise

    def compare_on(self, bench: TuningClient, contest: Contest, number: int, machines: int) -> None:
        if contest.methods and self.session.clock.until(contest.by) < 0:  # a lost machine's share
            return
        settings = contest.settings
        bench.ask("keep", settings, [])
        settings = [one for one in settings if self.session.loads(bench, one)]
        begin = time.perf_counter()
        warm_up = self.decode_all(bench, settings, self.session.prompts[-1:])
        seconds = time.perf_counter() - begin  # per prompt
        at_once = min(max(1, int(self.session.clock.until(contest.by) / seconds / ROUNDS)), len(self.session.prompts))
        start = number * at_once
        if contest is self.session.remeasured:
            start += len(self.session.choosing.prompts)
        rounds = 0
        while rounds < contest.min_rounds or self.session.clock.until(contest.by) > 1.1 * at_once * seconds:
            prompts = [self.session.prompts[(start + i) % len(self.session.prompts)] for i in range(at_once)]
            self.keep_round(contest, self.decode_all(bench, settings, prompts), prompts)
            start += machines * at_once
            rounds += 1
        if not contest.methods:
            self.keep_round(contest, warm_up, self.session.prompts[-1:])
        if bench.machine:
            self.session.other_load = max(self.session.other_load, bench.ask("other_load"))

    def decode_all(
        self, bench: TuningClient, settings: list[Setting], prompts: list[np.ndarray]
    ) -> dict[Setting, list]:
        runs: dict[Setting, list] = {one: [] for one in settings}
        for ids in prompts:
            running = [one for one in settings if str(one) not in self.session.failed]
            for one, run in self.session.in_turns(bench, running, ids, self.session.arguments.max_new_tokens):
                runs[one].append(run)
        return {one: runs_of_setting for one, runs_of_setting in runs.items() if str(one) not in self.session.failed}

    def keep_round(self, contest: Contest, runs: dict[Setting, list], prompts: list[np.ndarray]) -> None:
        """Add a round to the contest; settings that failed are dropped from it."""
        with self.session.lock:
            methods = contest.methods or {one: self.method(one) for one in runs}
            methods = {one: method for one, method in methods.items() if len(runs.get(one, [])) == len(prompts)}
            for one, method in methods.items():
                method.rounds.append(runs[one])
            contest.prompts += prompts
            contest.methods = methods

    def method(self, setting: Setting) -> Method:
        length = setting.draft_length if isinstance(setting.draft_length, int) else setting.length
        tokens = self.session.arguments.max_new_tokens
        return Method(
            str(setting),
            setting.engine,
            length,
            0.0,
            lambda ids: self.session.decode(self.session.benches[0], setting, ids, tokens),
        )
