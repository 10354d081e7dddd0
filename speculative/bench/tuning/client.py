"""Client of tune.py's model process, on this machine or on one of a cluster."""

import sys
from typing import Any

from speculative.bench.cluster.child_process import ChildFailed
from speculative.bench.cluster.hosts import Place
from speculative.bench.cluster.worker_process import WorkerProcess

WORKER = "speculative.bench.tuning.worker"


class TuningClient:
    """The models of one machine, in a separate process: calls the methods of tuning/worker.py by name."""

    def __init__(self, place: Place):
        self.machine = place.machine
        self._worker = None if place.machine else WorkerProcess([sys.executable, "-m", WORKER])

    def call(self, name: str, *arguments: object) -> Any:
        """Raises what tuning/worker.py raises, ChildFailed if its process crashed, NodeLost if the machine is lost."""
        return self._send("call", name, *arguments)

    def ask(self, name: str, *arguments: object) -> Any:
        """Make a call that cannot fail because of a candidate; retried once if the process crashed."""
        try:
            return self.call(name, *arguments)
        except ChildFailed:
            return self.call(name, *arguments)

    def remember(self, name: str, *arguments: object) -> None:
        """Make a call that is repeated after every restart of the process."""
        self._send("remember", name, *arguments)

    def close(self) -> None:
        if self._worker:
            self._worker.close()

    def _send(self, method: str, *arguments: object) -> Any:
        if self.machine:
            return self.machine.worker(method, WORKER, *arguments)
        return getattr(self._worker, method)(*arguments)
