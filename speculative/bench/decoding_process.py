"""Interleaved comparison of pipelines, each in its own process, started several times if needed: the memory a process
loads a model into changes its speed by 5 to 10 %, for any pipeline.

    processes = [DecodingProcess(alone), DecodingProcess(pair)]  # one ProcessJob each
    methods = [method for process in processes for method in process.methods]
    complete = measure(processes, methods, prompts, rounds=3, starts=3)

The processes coexist, so that runs alternate between them; each start replaces all of them, in a different order. Time
is measured in the process that decodes.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from speculative.bench.cluster.worker_process import WorkerProcess
from speculative.bench.genai import Run
from speculative.bench.harness import Method, interleave, shuffled
from speculative.bench.result import Loading, ProcessStart, TokenView
from speculative.cli.processes import signals_raise
from speculative.decoder import GenerationResult
from speculative.models.spec import ModelSpec
from speculative.pair.engines import NATIVE

WORKER = "speculative.bench.decoding_worker"


@dataclass(frozen=True)
class ProcessJob:
    """The models a process loads and its decoding methods: (name, draft length, temperature)."""

    name: str
    engine: str  # genai or native
    main: ModelSpec
    draft: ModelSpec | None
    max_new_tokens: int
    methods: tuple[tuple[str, int | str, float], ...]
    lookup: bool = False  # GenAI's prompt lookup, which needs a separate pipeline
    keep_caches: bool = False
    huge_pages: bool = False


class DecodingProcess:
    """A job's process; `starts` has the load time and bytes in huge pages of each start."""

    def __init__(self, job: ProcessJob):
        self.job = job
        self.starts: list[ProcessStart] = []
        self._worker = WorkerProcess([sys.executable, "-m", WORKER])
        self.methods = [self._method(*method) for method in job.methods]

    def start(self) -> None:
        """Load the models in a new process. Raises RuntimeError or ValueError if they are rejected, or ChildFailed."""
        self._worker.close()
        loading: Loading = self._worker.call("load", self.job)
        self.starts.append({"name": self.job.name, "start": len(self.starts) + 1, **loading})

    def close(self) -> None:
        self._worker.close()

    def token_view(self, ids: np.ndarray, draft_length: int | str) -> TokenView:
        return self._worker.call("token_view", ids, draft_length)

    def _method(self, name: str, draft_length: int | str, temperature: float) -> Method:
        method = Method(
            name, self.job.engine, draft_length, temperature, lambda *arguments: self._decode(method, *arguments)
        )
        if self.job.engine == NATIVE:
            method.seconds = [[] for _ in range(2 if self.job.draft else 1)]
        return method

    def _decode(self, method: Method, ids: np.ndarray, json_schema: str = "") -> Run | GenerationResult:
        run, seconds = self._worker.call("decode", method.name, ids, json_schema)
        for total, added in zip(method.seconds, seconds, strict=True):
            total += added
        return run


def measure(
    processes: list[DecodingProcess],
    methods: list[Method],
    prompts: list[np.ndarray],
    rounds: int,
    starts: int,
    json_schemas: Sequence[str] = (),
) -> bool:
    """Add `rounds` rounds of each of `starts` starts to every method. `json_schemas`: see `interleave`.

    Returns False after Ctrl-C; complete rounds are kept. Raises KeyboardInterrupt if there are none.
    """
    try:
        with signals_raise():
            for start in range(starts):
                for process in shuffled(processes, start):
                    process.start()
                describe = f"start {start + 1} of {starts}" if starts > 1 else ""
                if not interleave(methods, prompts, rounds, describe=describe, json_schemas=json_schemas):
                    return False
    except KeyboardInterrupt:
        if not methods[0].rounds:
            raise
        return False
    return True


@dataclass
class Closing:
    """A context that closes every process on exit."""

    processes: list[DecodingProcess] = field(default_factory=list)

    def __enter__(self) -> list[DecodingProcess]:
        return self.processes

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.close()
