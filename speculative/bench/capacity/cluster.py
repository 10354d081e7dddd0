"""Simulated cluster: replicas behind a router, with requests that arrive (open loop) or clients (closed loop).

served = serve(costs, Settings(), replicas=4, workload=workload, rate=3.0, count=300, router="balanced", seed=0)
span = ClosedLoop(costs, Settings(), workload, seed=0).run(clients=8, seconds=10.0, first=0)
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import simpy

from speculative.bench.capacity.costs import Costs
from speculative.bench.capacity.replica import Replica, Settings, SimulatedRequest
from speculative.bench.capacity.workload import Workload
from speculative.bench.load.metrics import RequestRecord, Span

RouterName = Literal["balanced", "prefix"]
ROUTERS: tuple[RouterName, ...] = ("balanced", "prefix")
IMBALANCE = 10  # requests between the most and the least loaded replica from which prefixes are not followed
MOST_SIMULATED = 16  # replicas; more are simulated as this many, with their share of the requests
RETRY = 0.1  # seconds after which a client whose request was refused sends another
WARM_UP = 0.1  # share of the requests that are not counted: the replicas were empty


class Router:
    """Chooses a replica for each request.

    "balanced" takes the less loaded of two random replicas, as Ray Serve does by default (Mitzenmacher 2001, "The power
    of two choices"). "prefix" takes the replica that has the beginning of the request, and for a new beginning the one
    that has the fewest, unless the load is out of balance, like Ray Serve's PrefixCacheAffinityRouter.
    """

    def __init__(self, name: RouterName, replicas: Sequence[Replica], random: np.random.Generator):
        self._by_prefix = name == "prefix"
        self._replicas = replicas
        self._random = random
        self._has: dict[int, int] = {}  # index of the replica by chat
        self._held = [0] * len(replicas)  # chats

    def choose(self, chat: int) -> Replica:
        loads = [replica.load for replica in self._replicas]
        if len(loads) == 1:
            return self._replicas[0]
        if not self._by_prefix or max(loads) - min(loads) > IMBALANCE:
            one, other = self._random.choice(len(loads), 2, replace=False).tolist()
            chosen = one if loads[one] <= loads[other] else other
        else:
            chosen = self._has.get(chat, min(range(len(loads)), key=lambda i: (self._held[i], loads[i])))
        if self._has.get(chat) != chosen:
            self._held[chosen] += 1
            self._has[chat] = chosen
        return self._replicas[chosen]


@dataclass(frozen=True)
class Served:
    """What became of the requests that are counted."""

    requests: list[SimulatedRequest]
    utilisation: float  # share of the time that a replica runs iterations, from 0 to 1
    batch: float  # mean number of requests in an iteration
    seconds: float  # until the last answer

    def ttft(self) -> list[float]:
        """Seconds to the first token of each request; of a refused one infinitely many."""
        return [one.first - one.sent if not one.refused else float("inf") for one in self.requests]

    def tpot(self) -> list[float]:
        """Seconds per output token after the first, of each request that has others; of a refused one infinitely
        many."""
        return [
            float("inf") if one.refused else (one.end - one.first) / (one.output - 1)
            for one in self.requests
            if one.refused or one.output > 1
        ]


def serve(
    costs: Costs, settings: Settings, replicas: int, workload: Workload, rate: float, count: int, router: RouterName,
    seed: int,
) -> Served:  # fmt: skip
    """Simulate `count` requests, `rate` per second for all replicas together, until all are answered or refused.

    Of more than `MOST_SIMULATED` replicas, so many are simulated with their share of the requests: a router that
    compares two random replicas does not work otherwise with more of them.
    """
    simulated = min(replicas, MOST_SIMULATED)
    share = simulated / replicas
    random = np.random.default_rng(seed)
    # A router by prefix keeps a chat on these replicas; otherwise any replica may have had its last request.
    seen = 1.0 if router == "prefix" else share
    arrivals, begun = workload.arrivals(rate * share, count, random, seen)
    environment = simpy.Environment()
    pool = [Replica(environment, costs, settings) for _ in range(simulated)]
    chooser = Router(router, pool, random)
    if workload.cached:
        _fill_caches(arrivals, begun, pool, chooser)

    def arrive() -> Generator[simpy.Event, None, None]:
        for request in arrivals:
            yield environment.timeout(max(request.sent - environment.now, 0.0))
            chooser.choose(request.chat).submit(request)
        for request in arrivals:
            yield request.done

    environment.run(environment.process(arrive()))
    counted = arrivals[int(WARM_UP * count) :]
    busy, in_batch = sum(one.busy for one in pool), sum(one.in_batch for one in pool)
    seconds = float(environment.now)
    return Served(counted, busy / (seconds * simulated), in_batch / busy if busy else 0.0, seconds)


def _fill_caches(
    arrivals: Sequence[SimulatedRequest], begun: set[int], pool: Sequence[Replica], chooser: Router
) -> None:
    """Fill the prefix caches with the beginnings of the chats that have `begun` before; all replicas know chat 0."""
    first: dict[int, SimulatedRequest] = {}
    for request in arrivals:
        first.setdefault(request.chat, request)
    for chat in sorted(begun & set(first)):
        for replica in pool if chat == 0 else [chooser.choose(chat)]:
            replica.remember(chat, first[chat].shared)


class ClosedLoop:
    """Clients that each send their next request when they have an answer, as the load benchmarks have them; the
    replicas keep what they have learned from one run to the next."""

    def __init__(
        self, costs: Costs, settings: Settings, workload: Workload, seed: int, replicas: int = 1,
        router: RouterName = "balanced",
    ):  # fmt: skip
        self._environment = simpy.Environment()
        self.replicas = [Replica(self._environment, costs, settings) for _ in range(replicas)]
        self._random = np.random.default_rng(seed)
        self._router = Router(router, self.replicas, self._random)
        self._workload = workload

    def run(self, clients: int, seconds: float, first: int) -> Span:
        """As `Load.run`: the simulated records of `clients` clients for `seconds`."""
        begin = float(self._environment.now)
        records: list[RequestRecord] = []

        def client() -> Generator[simpy.Event, None, None]:
            while self._environment.now < begin + seconds:
                request = self._workload.draw(self._random)
                yield self._router.choose(request.chat).submit(request)
                records.append(record(first + len(records), request))
                if request.refused:
                    yield self._environment.timeout(RETRY)

        done = [self._environment.process(client()) for _ in range(clients)]
        self._environment.run(simpy.AllOf(self._environment, done))
        return Span(records, begin, begin + seconds)


def record(number: int, request: SimulatedRequest) -> RequestRecord:
    """A simulated request in the form of a measured one."""
    if request.refused:
        return RequestRecord(number, request.sent, end=request.end, error="the queue is full")
    return RequestRecord(
        number, request.sent, request.first, request.end, tokens=request.output, accepted=request.accepted,
        rejected=request.proposed - request.accepted, finish_reason="length", whole=True,
    )  # fmt: skip
