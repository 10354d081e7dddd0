"""Where tune.py has its models: on this machine or one of a cluster, in a process of their own."""

import sys

from speculative.bench.cluster.child_process import Failed
from speculative.bench.cluster.hosts import Place
from speculative.bench.cluster.worker_process import WorkerProcess

WORKER = "speculative.bench.tuning.worker"


class TuningClient:
    """The models on a machine, in a process of their own: tuning/worker.py's, whose methods are called by name."""

    def __init__(self, place: Place):
        self.machine = place.machine
        self._worker = None if place.machine else WorkerProcess([sys.executable, "-m", WORKER])

    def call(self, name: str, *arguments) -> object:
        """Raises what tuning/worker.py raises, Failed when its process crashed, ray_nodes.Lost when the machine is."""
        return self._do("call", name, *arguments)

    def ask(self, name: str, *arguments) -> object:
        """Call what no candidate can be blamed for: once more where the process crashed."""
        try:
            return self.call(name, *arguments)
        except Failed:
            return self.call(name, *arguments)

    def remember(self, name: str, *arguments) -> None:
        """Call, and again whenever the process had to be started anew."""
        self._do("remember", name, *arguments)

    def close(self) -> None:
        if self._worker:
            self._worker.close()

    def _do(self, what: str, *arguments) -> object:
        if self.machine:
            return self.machine.worker(what, WORKER, *arguments)
        return getattr(self._worker, what)(*arguments)
