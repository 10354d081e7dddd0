"""Plan of a cluster: the smallest number of replicas that meets goals for TTFT and TPOT, and the load at which drafting
stops helping.

    planner = Planner(costs, workload, Goals(ttft=1.0, tpot=0.1))
    plan = planner.plan(rate=10.0, settings=Settings(with_draft=True))
    plan.choice  # the row of the smallest number of replicas, or None
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from speculative.bench.capacity.cluster import MAX_SIMULATED, ClosedLoop, Routing, serve
from speculative.bench.capacity.costs import Costs
from speculative.bench.capacity.replica import Settings
from speculative.bench.capacity.sharing import MEASURED_SERVERS
from speculative.bench.capacity.workload import Workload, lengths
from speculative.bench.load.metrics import Load, RequestRecord, Span, first_number, row
from speculative.bench.result import CapacityCheck, CapacityRow, Drawn, LoadRow

STEP_DIVISOR = 8  # replicas up to which each number is tried; beyond, an eighth more each time
FINE = 32  # the smallest number of replicas is found to one in so many
MAX_REPLICAS = 1_000_000
REQUESTS_PER_REPLICA = 50  # requests that each replica serves at least, so that its load becomes steady
MAX_REQUESTS = 5000  # of a simulation, unless more are asked for
MAX_SINGLE_REQUESTS = 300  # most requests, one at a time
INSTANT = 1e-9  # seconds in which each client sends one request
LASTING = 8.0  # duration of a closed loop, in those of a request alone, for each client
LASTING_LOAD = 16.0  # duration of a simulated load, in goals for TTFT or requests alone
IDLE = 0.02  # share of the time: where replicas compute so little, more of them are no faster
MIN_SPEEDUP = 1.02  # speedup from which a draft helps
ALONE, DRAFT = "main model alone", "with draft"
METHODS = {  # of the load benchmarks: whether they have a draft
    "ours, main alone": False,
    "main model alone": False,
    "ours, adaptive draft": True,
    "with draft": True,
}


@dataclasses.dataclass(frozen=True)
class Goals:
    """Goals in seconds for a percentile of the requests."""

    ttft: float
    tpot: float
    percentile: float = 95.0


class Plan(NamedTuple):
    """The numbers of replicas that were tried for a rate and settings, in ascending order."""

    rate: float
    settings: Settings
    rows: list[CapacityRow]
    why_not: str  # why no number of replicas meets the goals; "" if one does

    @property
    def choice(self) -> CapacityRow | None:
        return next((row for row in self.rows if row["holds"]), None)


class Planner:
    """Costs, workload and goals, which all plans share."""

    def __init__(
        self, costs: Costs, workload: Workload, goals: Goals, routing: Routing = "balanced", count: int = 300,
        seed: int = 0,
    ):  # fmt: skip
        """`count` requests are simulated for each number of replicas; more if `REQUESTS_PER_REPLICA` per replica are
        more, or if more arrive in `LASTING_LOAD` goals for TTFT, up to `MAX_REQUESTS`."""
        self.costs = costs
        self.workload = workload
        self.goals = goals
        self.routing: Routing = routing
        self.count = count
        self.seed = seed
        self._single_requests: dict[Settings, list[RequestRecord]] = {}

    def plan(self, rate: float, settings: Settings) -> Plan:
        """The smallest number of replicas for `rate` requests per second, and others that were tried."""
        if reason := self._unmet_goal(settings):
            return Plan(rate, settings, [], reason)
        holds = MAX_REPLICAS + 1
        rows: dict[int, CapacityRow] = {}
        needed = self._needed(rate, settings)
        n = min(math.ceil(needed), MAX_REPLICAS)
        fails = n - 1  # their queue would grow without end
        while holds - fails > max(holds // FINE if holds <= MAX_REPLICAS else 1, 1):
            rows[n] = self.row(rate, settings, n)
            if not rows[n]["holds"] and rows[n]["utilisation"] < IDLE:
                reason = self._missed(rows[n]["ttft_percentile"], rows[n]["tpot_percentile"], "a nearly idle")
                return Plan(rate, settings, [rows[n] for n in sorted(rows)], reason)
            if rows[n]["holds"]:
                holds = n
                n = (fails + holds) // 2 if fails in rows else max(n - max(n // STEP_DIVISOR, 1), fails + 1)
            else:
                fails = n
                more = n + max(n // STEP_DIVISOR, 1)
                n = min(more, MAX_REPLICAS) if holds > MAX_REPLICAS else (fails + holds) // 2
        reason = "" if holds <= MAX_REPLICAS else f"more than {MAX_REPLICAS:,} would be needed"
        return Plan(rate, settings, [rows[n] for n in sorted(rows)], reason)

    def row(self, rate: float, settings: Settings, replicas: int) -> CapacityRow:
        """Simulate `replicas` replicas."""
        simulated = min(replicas, MAX_SIMULATED)
        lasting = LASTING_LOAD * max(self.goals.ttft, self._seconds_alone(settings))
        arriving = math.ceil(min(rate * simulated / replicas * lasting, MAX_REQUESTS))
        count = max(self.count, REQUESTS_PER_REPLICA * simulated, arriving)
        served = serve(self.costs, settings, replicas, self.workload, rate, count, self.routing, self.seed)
        goals, requests = self.goals, served.requests
        answered = [one for one in requests if not one.refused]
        iterations, prompts = sum(one.iterations for one in answered), sum(one.prompt for one in answered)
        ttft, tpot = percentiles(served.ttft(), goals.percentile), percentiles(served.tpot(), goals.percentile)
        return {
            "rate": rate,
            "with_draft": settings.with_draft,
            "max_num_seqs": settings.max_num_seqs,
            "replicas": replicas,
            "ttft": ttft[0],
            "ttft_percentile": ttft[1],
            "tpot": tpot[0],
            "tpot_percentile": tpot[1],
            "throughput": served.throughput,
            "utilisation": served.utilisation,
            "batch": served.batch,
            "requests": len(requests),
            "refused": len(requests) - len(answered),
            "cached": sum(one.cached for one in answered) / prompts if prompts else 0.0,
            "mean_draft_length": sum(one.proposed for one in answered) / iterations if iterations else 0.0,
            "holds": _within(ttft[1], goals.ttft) and _within(tpot[1], goals.tpot),
        }

    def _unmet_goal(self, settings: Settings) -> str:
        """The reason why a replica with a single request misses the goals; "" if it meets them."""
        span = self._requests_alone(settings)
        if not span:
            return f"the requests do not fit in a KV cache of {settings.cache_tokens:,} tokens"
        ttft, tpot = (
            percentiles([value for value in seconds if value is not None], self.goals.percentile)[1]
            for seconds in ([one.ttft for one in span], [one.tpot for one in span])
        )
        return self._missed(ttft, tpot, "an idle")

    def _missed(self, ttft: float | None, tpot: float | None, replica: str) -> str:
        """The goal that the percentiles miss, in words; "" if they meet both."""
        for name, goal, seconds in (("TTFT", self.goals.ttft, ttft), ("TPOT", self.goals.tpot, tpot)):
            if seconds is None:
                return "the requests are refused"
            if not _within(seconds, goal):
                p = f"p{self.goals.percentile:g}"
                return f"the {p} {name} of {replica} replica is {seconds:.3g} s, above the goal of {goal:g} s"
        return ""

    def _requests_alone(self, settings: Settings) -> list[RequestRecord]:
        """The answered requests of some that are sent one at a time."""
        if settings not in self._single_requests:
            loop = ClosedLoop(self.costs, settings, self.workload, self.seed)
            spans = [loop.run(1, INSTANT, i) for i in range(min(self.count, MAX_SINGLE_REQUESTS))]
            self._single_requests[settings] = [
                one for span in spans for one in span.answers if one.outcome == "answered"
            ]
        return self._single_requests[settings]

    def _seconds_alone(self, settings: Settings) -> float:
        """The mean duration of a request alone."""
        requests_alone = self._requests_alone(settings)
        return max(sum(one.end - one.sent for one in requests_alone) / max(len(requests_alone), 1), 1e-6)

    def _needed(self, rate: float, settings: Settings) -> float:
        """The replicas, 1 or more, that have the throughput of `rate` requests per second with full batches. With
        fewer, the queue grows without end, which a simulation shows only after a while."""
        clients = settings.max_num_seqs
        seconds = 4 * LASTING * clients * self._seconds_alone(settings)  # many requests, as their lengths differ
        full_batch = self.closed_loop(settings, [clients], "", seconds)
        per_second = _requests_per_second(full_batch.rounds[clients][0])
        return max(rate / per_second, 1.0) if per_second else 1.0

    # ---- closed loop --------------------------------------------------------------------------------------------

    def closed_loop(
        self, settings: Settings, clients: Sequence[int], name: str, seconds: float = 0.0, rounds: int = 1,
        replicas: int = 1,
    ) -> Load:  # fmt: skip
        """Simulate clients that send one request after another, after a warm-up, as the load benchmarks do. `seconds`:
        by default, long enough for several requests of each client, which take longer the more there are."""
        each = LASTING * self._seconds_alone(settings) if not seconds else 0.0
        loop = ClosedLoop(self.costs, settings, self.workload, self.seed, replicas, self.routing)
        load = Load(name, loop.run)
        for number in range(rounds + 1):
            for place, n in enumerate(clients):
                first = first_number(number * len(clients) + place)
                span = loop.run(n, (seconds or each * n) if number else INSTANT, first)
                if number:
                    load.rounds.setdefault(n, []).append(span)
        return load

    def drafting(self, settings: Settings) -> list[LoadRow]:
        """Throughput of a replica with and without drafting, by number of clients, up to a full batch; empty if no
        request fits."""
        clients = [1 << i for i in range(settings.max_num_seqs.bit_length())]
        alone, draft = (
            self.closed_loop(dataclasses.replace(settings, with_draft=with_draft), clients, name)
            for name, with_draft in ((ALONE, False), (DRAFT, True))
        )
        rows = [row(method, n, alone) for method in (alone, draft) for n in clients]
        return rows if all(one["throughput"] for one in rows) else []

    def compare_with(self, measured: Sequence[Drawn], settings: Settings, replicas: int = 1) -> list[CapacityCheck]:
        """Compare the rows of a load benchmark, the medians of several results, with simulations of the same clients.

        TTFT and TPOT are means over the requests. Where prompts arrive nearly as fast as they can be processed, small
        differences in cost change the median TTFT by half, but the mean by a tenth.

        Raises ValueError if the results have no rows of this project's engine, other clients or texts, or no means.
        """
        environment = measured[0].get("environment", {})
        rows = [one for result in measured for one in result.get("rows", []) if one.get("method") in METHODS]
        try:
            tokens, seconds, rounds = environment["max_new_tokens"], environment["seconds"], environment["rounds"]
            clients = sorted({one["clients"] for one in rows})
        except KeyError:
            rows = []
        if not rows:
            raise ValueError("it has no rows of this project's engine: give a result of benchmark_serving.py or "
                             "benchmark_batching.py")  # fmt: skip
        compared = [
            ([result.get("environment", {}).get(key) for key in ("max_new_tokens", "seconds", "prompts")],
             [(one.get("method"), one.get("clients")) for one in result["rows"]])
            for result in measured
        ]  # fmt: skip
        if compared[1:] != compared[:-1]:
            raise ValueError("the results are of other loads: give results of the same command")
        if any("ttft_mean" not in one for one in rows):
            raise ValueError("results of earlier versions lack the means of TTFT and TPOT: measure the load again")
        workload = dataclasses.replace(
            self.workload, prompt=self.costs.prompt_tokens, output=lengths(str(tokens)), trace=(), cached=0.0
        )
        in_process = measured[0].get("program") == "benchmark_batching"
        full = dataclasses.replace(settings, max_num_seqs=max(clients), in_process=in_process)
        costs = self.costs
        if costs.server:
            costs = dataclasses.replace(costs, server=dataclasses.replace(costs.server, servers=MEASURED_SERVERS))
        planner = Planner(costs, workload, self.goals, self.routing, self.count, self.seed)
        checks: list[CapacityCheck] = []
        for method in dict.fromkeys(one["method"] for one in rows):
            with_draft = METHODS[method]
            if with_draft and not self.costs.draft:
                continue
            load = planner.closed_loop(
                dataclasses.replace(full, with_draft=with_draft), clients, method, seconds, rounds, replicas
            )
            for n in clients:
                measured_rows = [one for one in rows if (one["method"], one["clients"]) == (method, n)]
                if not measured_rows:
                    continue
                simulated = row(load, n, None)
                checks.append(
                    {
                        "method": method,
                        "clients": n,
                        "throughput": _median(measured_rows, "throughput"),
                        "throughput_simulated": simulated["throughput"],
                        "ttft": _median(measured_rows, "ttft_mean"),
                        "ttft_simulated": simulated["ttft_mean"],
                        "tpot": _median(measured_rows, "tpot_mean"),
                        "tpot_simulated": simulated["tpot_mean"],
                        "mean_draft_length": _median(measured_rows, "mean_draft_length"),
                        "mean_draft_length_simulated": simulated["mean_draft_length"],
                    }
                )
        return checks


def break_even_point(rows: Sequence[LoadRow], output: float) -> tuple[int, float] | None:
    """The number of clients and requests per second at which a draft stops helping; None if it helps up to the
    last one. `output` is the mean number of tokens of an answer."""
    drafted = [one for one in rows if one["speedup"] is not None]
    alone = {one["clients"]: one["throughput"] for one in rows if one["speedup"] is None}
    break_even = None
    for one in reversed(drafted):
        if one["speedup"] is not None and one["speedup"] >= MIN_SPEEDUP:
            break
        break_even = one["clients"], alone[one["clients"]] / output
    return break_even


def percentiles(values: Sequence[float], percentile: float) -> tuple[float | None, float | None]:
    """Median and a percentile; None if infinite, or without values."""
    if not values:
        return 0.0, 0.0
    quantiles = np.quantile(values, [0.5, percentile / 100], method="higher").tolist()
    return tuple(value if math.isfinite(value) else None for value in quantiles)  # type: ignore[return-value]


def _within(seconds: float | None, goal: float) -> bool:
    return seconds is not None and seconds <= goal


def _median(rows: Sequence[Drawn], key: str) -> Any:
    """The median of the rows that have a value; None if none has."""
    values = [one[key] for one in rows if one[key] is not None]
    return statistics.median(values) if values else None


def _requests_per_second(span: Span) -> float:
    answered = [one for one in span.answers if one.outcome == "answered"]
    tokens = sum(one.tokens for one in answered)
    return span.throughput * len(answered) / tokens if tokens else 0.0
