"""Divides a time budget between the stages of a training, over all runs of the same command."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from speculative.atomic_write import atomic_write

SAVE_EVERY = 60.0  # seconds; a process that is killed loses no more
PAUSE = 20  # times as long as a save or an evaluation takes, until the next one: both grow with the draft
ENDS = {"texts": 0.25, "states": 0.42, "training": 0.9}  # the share of the budget at which each stage ends


class Interval:
    """Runs a job every so many seconds, or less often, if that took more than 1 / PAUSE of the time."""

    def __init__(self, seconds: float):
        self._least = self._pause = seconds
        self._ended = time.monotonic()

    def run(self, job: Callable[[], object]) -> None:
        """Run `job` if it is due."""
        begin = time.monotonic()
        if begin - self._ended > self._pause:
            job()
            self._ended = time.monotonic()
            self._pause = max(self._least, PAUSE * (self._ended - begin))


class Clock:
    """Seconds spent in each stage, kept in a file; time that a stage leaves over goes to the next ones."""

    def __init__(self, file: Path, minutes: float):
        self._file = file
        self.seconds = minutes * 60  # of all stages
        self.spent: dict[str, float] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        self._stage: str | None = None
        self._mark = 0.0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Within the block, time counts for the stage `name`, also if it ends with an error."""
        self._stage, self._mark = name, time.monotonic()
        self._saves = Interval(SAVE_EVERY)
        try:
            yield
        finally:
            self.tick()
            self._stage = None
            self._save()

    def tick(self) -> None:
        """Add the seconds since the last call to the current stage."""
        now = time.monotonic()
        if self._stage:
            self.spent[self._stage] = self.spent.get(self._stage, 0.0) + now - self._mark
        self._mark = now

    def remaining(self, name: str) -> float:
        """Seconds that the stage may still take; 0 if its time is up."""
        self.tick()
        if self._stage:
            self._saves.run(self._save)
        earlier = sum(self.spent.get(stage, 0.0) for stage, end in ENDS.items() if end <= ENDS[name])
        return max(0.0, ENDS[name] * self.seconds - earlier)

    @property
    def used_minutes(self) -> float:
        """The budget that the stages before the verdict have used up."""
        return sum(self.spent.get(stage, 0.0) for stage in ENDS) / ENDS["training"] / 60

    def _save(self) -> None:
        atomic_write(self._file, json.dumps(self.spent, indent=1))

    @property
    def verdict_seconds(self) -> float:
        return (1 - ENDS["training"]) * self.seconds
