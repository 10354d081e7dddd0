"""Replicas that share cores with the rest of their server: HTTP, proxies, Ray and clients on the same machine.

server = ServerCosts.of(json.loads(Path("serving.json").read_text()))  # of scripts/benchmark_serving.py
cores = SharedCores(environment, server, replicas=2)
cores.use(requests=1, pieces=1)  # for an answer's first piece of text
seconds *= cores.slowdown(replica)  # of its next iteration
cores.leave(replica)  # it has no requests
"""

import math
from dataclasses import dataclass

import numpy as np
import simpy

from speculative.bench.capacity.least_squares import non_negative
from speculative.bench.result import Drawn

AVERAGING_SECONDS = 0.5  # seconds over which the work of a server is averaged
MEASURED_SERVERS = 2  # that benchmark_serving.py starts: with the draft, and without it
MIN_SHARE = 0.1  # share of the cores that the replicas always have


@dataclass(frozen=True)
class ServerCosts:
    """Processor time of a server, without its engines, and of its clients."""

    cores: float  # that come with each replica
    threads: int  # of each replica's engine
    idle: float  # cores in use without requests, for each replica of a server
    request: float  # processor seconds
    piece: float  # processor seconds for each piece of text that is streamed
    latency: float  # seconds that a request takes without inference
    servers: int = 1  # that run at the same time, all but one of them idle

    @classmethod
    def of(cls, result: Drawn) -> "ServerCosts":
        """Estimate them from a result of benchmark_serving.py, by least squares over its rows. Raises ValueError if it
        has no processor times."""
        try:
            environment = result["environment"]
            measured = [time for row in result["rows"] if (time := row.get("processor_time"))]
            work = np.array([[row["seconds"], row["requests"], row["pieces"]] for row in measured], float)
            used = np.array([row["servers"] + row["clients"] for row in measured])
            cores, threads, latency, replicas = (
                environment[key] for key in ("cores", "threads", "round_trip", "replicas")
            )
        except (KeyError, TypeError, AttributeError):
            measured = []
        if not measured:
            raise ValueError("it has no processor times: give a result of benchmark_serving.py, with servers that it "
                             "started")  # fmt: skip
        idle, request, piece = non_negative(work, used).tolist()
        return cls(cores / replicas, threads, idle / (replicas * MEASURED_SERVERS), request, piece, latency)


class SharedCores:
    """The cores of all replicas, of which the engines have those that the rest of the server does not use."""

    def __init__(self, environment: simpy.Environment, costs: ServerCosts, replicas: int):
        self._busy: set[object] = set()  # replicas
        self._environment = environment
        self._costs = costs
        self._replicas = replicas
        self._recent = 0.0  # processor seconds for requests and pieces of text, older ones with less weight
        self._updated_at = 0.0

    def use(self, requests: int = 0, pieces: int = 0) -> None:
        """Count work of the server."""
        self._decay()
        self._recent += requests * self._costs.request + pieces * self._costs.piece

    def slowdown(self, replica: object) -> float:
        """The factor by which sharing slows down `replica`, which computes now, and the other busy ones."""
        self._busy.add(replica)
        self._decay()
        costs, cores = self._costs, self._costs.cores * self._replicas
        idle = costs.idle * self._replicas * costs.servers
        available = cores - idle - self._recent / AVERAGING_SECONDS
        return max(len(self._busy) * costs.threads / max(available, MIN_SHARE * cores), 1.0)

    def leave(self, replica: object) -> None:
        """`replica` is idle."""
        self._busy.discard(replica)

    def _decay(self) -> None:
        now = float(self._environment.now)
        self._recent *= math.exp((self._updated_at - now) / AVERAGING_SECONDS)
        self._updated_at = now
