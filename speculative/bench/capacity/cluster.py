"""Simulated cluster: replicas behind a router, with requests that arrive (open loop) or clients (closed loop).

served = serve(costs, Settings(), replicas=4, workload=workload, rate=3.0, count=300, routing="balanced", seed=0)
span = ClosedLoop(costs, Settings(), workload, seed=0).run(clients=8, seconds=10.0, first=0)
"""

import itertools
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import simpy

from speculative.bench.capacity.costs import Costs
from speculative.bench.capacity.replica import BLOCK, Replica, Settings, SimulatedRequest
from speculative.bench.capacity.sharing import SharedCores
from speculative.bench.capacity.workload import Workload
from speculative.bench.load.metrics import RequestRecord, Span

Routing = Literal["balanced", "prefix"]
ROUTINGS: tuple[Routing, ...] = ("balanced", "prefix")
MAX_SIMULATED = 8  # replicas; more are simulated as this many, with their share of the requests
RETRY_SECONDS = 0.1  # until a client whose request was refused sends the next
# shares of the requests between which they are counted: the load is not steady before and after
COUNTED_SHARES = (0.2, 0.9)


class Router:
    """Chooses a replica for each request, as the server's routings do.

    "balanced" takes the less loaded of two random replicas, as Ray Serve does by default (Mitzenmacher 2001, "The power
    of two choices"); "prefix" prefers the replicas that have had the beginning of the request, unless they have over a
    quarter of a batch more requests than the least loaded one.
    """

    def __init__(self, name: Routing, replicas: Sequence[Replica], random: np.random.Generator):
        self._by_prefix = name == "prefix"
        self._replicas = replicas
        self._random = random
        self._tolerance = max(replicas[0].settings.max_num_seqs // 4, 1)
        self._replicas_of_chat: dict[int, set[int]] = {}  # indices of replicas by chat

    def choose(self, request: SimulatedRequest) -> Replica:
        loads = [replica.load for replica in self._replicas]
        if len(loads) == 1:
            return self._replicas[0]
        max_load = min(loads) + self._tolerance
        chat = request.chat
        matching = sorted(self._replicas_of_chat.get(chat, ())) if self._by_prefix and request.shared >= BLOCK else []
        eligible = [i for i in matching if loads[i] <= max_load]
        candidates = eligible or self._random.choice(len(loads), 2, replace=False).tolist()
        chosen = min(candidates, key=lambda i: loads[i])
        self._replicas_of_chat.setdefault(chat, set()).add(chosen)
        return self._replicas[chosen]


@dataclass(frozen=True)
class Served:
    """The outcomes of the counted requests."""

    requests: list[SimulatedRequest]
    utilisation: float  # share of the time that a replica runs iterations, from 0 to 1
    batch: float  # mean number of requests in an iteration
    throughput: float  # tokens per second of all replicas together
    seconds: float  # until the last answer

    def ttft(self) -> list[float]:
        """Seconds to the first token of each request; infinite for a refused one."""
        return [request.first - request.sent if not request.refused else float("inf") for request in self.requests]

    def tpot(self) -> list[float]:
        """Seconds per output token after the first, of each request that has others; of a refused one infinitely
        many."""
        return [
            float("inf") if request.refused else (request.end - request.first) / (request.output - 1)
            for request in self.requests
            if request.refused or request.output > 1
        ]


def serve(
    costs: Costs, settings: Settings, replicas: int, workload: Workload, rate: float, count: int, routing: Routing,
    seed: int,
) -> Served:  # fmt: skip
    """Simulate `count` requests, `rate` per second for all replicas together, until all are answered or refused.

    Of more than `MAX_SIMULATED` replicas, so many are simulated with their share of the requests: comparing
    two random replicas does not work otherwise with more of them.
    """
    simulated = min(replicas, MAX_SIMULATED)
    share = simulated / replicas
    random = np.random.default_rng(seed)
    # Routing by prefix keeps a chat on these replicas; otherwise any replica may have had its last request.
    seen = 1.0 if routing == "prefix" else share
    arrivals, ongoing_chats = workload.arrivals(rate * share, count, random, seen)
    environment = simpy.Environment()
    simulated_replicas = _replicas(environment, costs, settings, simulated)
    router = Router(routing, simulated_replicas, random)
    if workload.cached:
        _fill_caches(arrivals, ongoing_chats, simulated_replicas, router)

    def arrive() -> Generator[simpy.Event, None, None]:
        for request in arrivals:
            yield environment.timeout(max(request.sent + costs.latency - environment.now, 0.0))
            router.choose(request).submit(request, costs.latency)
        for request in arrivals:
            yield request.done

    environment.run(environment.process(arrive()))
    counted = arrivals[int(COUNTED_SHARES[0] * count) : math.ceil(COUNTED_SHARES[1] * count)]
    busy = sum(replica.busy for replica in simulated_replicas)
    batch_seconds = sum(replica.in_batch for replica in simulated_replicas)
    seconds = float(environment.now)
    begin, end = counted[0].sent, counted[-1].sent
    tokens = sum(request.output for request in arrivals if not request.refused and begin <= request.end < end)
    throughput = tokens / (end - begin) / share if end > begin else 0.0
    return Served(counted, busy / (seconds * simulated), batch_seconds / busy if busy else 0.0, throughput, seconds)


def _replicas(environment: simpy.Environment, costs: Costs, settings: Settings, n: int) -> list[Replica]:
    cores = SharedCores(environment, costs.server, n) if costs.server else None
    return [Replica(environment, costs, settings, cores=cores) for _ in range(n)]


def _fill_caches(
    arrivals: Sequence[SimulatedRequest], ongoing_chats: set[int], simulated_replicas: Sequence[Replica], router: Router
) -> None:
    """Fill the prefix caches with the prefixes of `ongoing_chats`; all replicas have that of chat 0."""
    first: dict[int, SimulatedRequest] = {}
    for request in arrivals:
        first.setdefault(request.chat, request)
    for chat in sorted(ongoing_chats & set(first)):
        for replica in simulated_replicas if chat == 0 else [router.choose(first[chat])]:
            replica.remember(chat, first[chat].shared)


class ClosedLoop:
    """Clients that each send the next request when they have an answer, as in the load benchmarks; the
    replicas keep what they have learned from one run to the next."""

    def __init__(
        self, costs: Costs, settings: Settings, workload: Workload, seed: int, replicas: int = 1,
        routing: Routing = "balanced",
    ):  # fmt: skip
        self._environment = simpy.Environment()
        self.replicas = _replicas(self._environment, costs, settings, replicas)
        self._seed, self._num_spans = seed, 0  # the same requests, whatever the settings and the order of their answers
        self._router = Router(routing, self.replicas, np.random.default_rng(seed))
        self._workload = workload
        self._latency = 0.0 if settings.in_process else costs.latency

    def run(self, clients: int, seconds: float, first: int) -> Span:
        """As `Load.run`: the simulated records of `clients` clients for `seconds`."""
        begin, numbers = float(self._environment.now), itertools.count(first)
        records: list[RequestRecord] = []
        self._num_spans += 1

        def client() -> Generator[simpy.Event, None, None]:
            while self._environment.now < begin + seconds:
                number = next(numbers)
                request = self._workload.numbered(number, np.random.default_rng([self._seed, self._num_spans, number]))
                if self._latency:
                    yield self._environment.timeout(self._latency)
                yield self._router.choose(request).submit(request, self._latency)
                records.append(record(number, request))
                if request.refused:
                    yield self._environment.timeout(RETRY_SECONDS)

        done = [self._environment.process(client()) for _ in range(clients)]
        self._environment.run(simpy.AllOf(self._environment, done))
        return Span(records, begin, begin + seconds)


def record(number: int, request: SimulatedRequest) -> RequestRecord:
    """A simulated request in the form of a measured one."""
    if request.refused:
        return RequestRecord(number, request.sent, end=request.end, error="the queue is full")
    return RequestRecord(
        number, request.sent, request.first, request.end, tokens=request.output, accepted=request.accepted,
        rejected=request.proposed - request.accepted, finish_reason="length", is_complete=True,
    )  # fmt: skip
