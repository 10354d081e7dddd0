"""Pipelines that are compared, each in a process of its own: the place at which a process loads a model moves its speed
by 5 to 10 %, whoever's pipeline it is.

    processes = [DecodingProcess(alone), DecodingProcess(pair)]  # of a Job each
    ways = [way for process in processes for way in process.ways]
    complete = measure(processes, ways, prompts, rounds=3, starts=3)

The processes live side by side, so that runs alternate between them; each start ends them all and starts new ones, in
another order. Time is taken in the process that decodes.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from speculative.bench.cluster.worker_process import WorkerProcess
from speculative.bench.genai import Run
from speculative.bench.harness import Way, ctrl_c_raises, interleave, shuffled
from speculative.decoder import GenerationResult

WORKER = "speculative.bench.decoding_worker"


@dataclass(frozen=True)
class Job:
    """What a process loads, and the ways in which it decodes: (name, draft length, temperature)."""

    name: str
    engine: str  # "GenAI" or "ours"
    main: Path
    device: str
    draft: Path | None
    draft_device: str
    properties: dict
    max_new_tokens: int
    ways: tuple[tuple[str, int | str, float], ...]
    lookup: bool = False  # GenAI's prompt lookup, which is a pipeline of its own
    keep_caches: bool = False
    huge_pages: bool = False


class DecodingProcess:
    """A job's process; `starts` has what each start was: seconds to load, and bytes in huge pages."""

    def __init__(self, job: Job):
        self.job = job
        self.starts: list[dict] = []
        self._worker = WorkerProcess([sys.executable, "-m", WORKER])
        self.ways = [self._way(*way) for way in job.ways]

    def start(self) -> None:
        """Load the models in a new process. Raises RuntimeError or ValueError where they are refused, and Failed."""
        self._worker.close()
        told = self._worker.call("load", self.job)
        self.starts.append({"name": self.job.name, "start": len(self.starts) + 1, **told})

    def close(self) -> None:
        self._worker.close()

    def token_view(self, ids: np.ndarray, draft_length: int | str) -> dict:
        return self._worker.call("token_view", ids, draft_length)

    def _way(self, name: str, draft_length: int | str, temperature: float) -> Way:
        way = Way(name, self.job.engine, draft_length, temperature, lambda ids: self._decode(way, ids))
        if self.job.engine == "ours":
            way.seconds = [[] for _ in range(2 if self.job.draft else 1)]
        return way

    def _decode(self, way: Way, ids: np.ndarray) -> Run | GenerationResult:
        run, seconds = self._worker.call("decode", way.name, ids)
        for known, new in zip(way.seconds, seconds, strict=True):
            known += new
        return run


def measure(
    processes: list[DecodingProcess], ways: list[Way], prompts: list[np.ndarray], rounds: int, starts: int
) -> bool:
    """Add `rounds` rounds of each of `starts` starts to every way.

    False: Ctrl-C came, and the full rounds before it are kept. Raises KeyboardInterrupt where there are none.
    """
    try:
        with ctrl_c_raises():
            for start in range(starts):
                for process in shuffled(processes, start):
                    process.start()
                describe = f"start {start + 1} of {starts}" if starts > 1 else ""
                if not interleave(ways, prompts, rounds, describe=describe):
                    return False
    except KeyboardInterrupt:
        if not ways[0].rounds:
            raise
        return False
    return True


@dataclass
class Closing:
    """A context at whose end every process is ended."""

    processes: list[DecodingProcess] = field(default_factory=list)

    def __enter__(self) -> list[DecodingProcess]:
        return self.processes

    def __exit__(self, *_) -> None:
        for process in self.processes:
            process.close()
