"""Divides a time budget between the stages of a training, over all runs of the same command."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from speculative.atomic_write import atomic_write

ENDS = {"texts": 0.25, "states": 0.42, "training": 0.9}  # the share of the budget at which each stage ends


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
        try:
            yield
        finally:
            self.tick()
            self._stage = None
            atomic_write(self._file, json.dumps(self.spent, indent=1))

    def tick(self) -> None:
        """Add the seconds since the last call to the current stage."""
        now = time.monotonic()
        if self._stage:
            self.spent[self._stage] = self.spent.get(self._stage, 0.0) + now - self._mark
        self._mark = now

    def remaining(self, name: str) -> float:
        """Seconds that the stage may still take; 0 if its time is up."""
        self.tick()
        earlier = sum(self.spent.get(stage, 0.0) for stage, end in ENDS.items() if end <= ENDS[name])
        return max(0.0, ENDS[name] * self.seconds - earlier)

    @property
    def verdict_seconds(self) -> float:
        return (1 - ENDS["training"]) * self.seconds
