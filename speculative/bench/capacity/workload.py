"""Simulated workload: arrivals, lengths and common prefixes of requests, and the acceptance of their draft tokens.

    workload = Workload(lengths("lognormal:500:1.0"), lengths("128"), acceptance=0.7)
    arrivals = workload.arrivals(rate=3.0, count=300, random=np.random.default_rng(0))

A trace gives arrivals and lengths instead: JSON lines, or CSV as Azure and BurstGPT publish it.
"""

import csv
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from speculative.bench.capacity.costs import Draft, Drafts
from speculative.bench.capacity.replica import SimulatedRequest

DISTRIBUTIONS = {"fixed": 1, "uniform": 2, "exponential": 1, "lognormal": 2}  # number of parameters
COLUMNS = {  # of a trace: names in JSON lines, Azure's LLM inference traces and BurstGPT
    "arrival": ("arrival", "TIMESTAMP", "Timestamp"),
    "prompt_tokens": ("prompt_tokens", "ContextTokens", "Request tokens"),
    "output_tokens": ("output_tokens", "GeneratedTokens", "Response tokens"),
}
MAX_TOKENS = 1_000_000  # tokens


class Lengths(NamedTuple):
    """A distribution of numbers of tokens."""

    text: str  # as given
    kind: str
    parameters: tuple[float, ...]

    @property
    def maximum(self) -> int:
        """The largest number of tokens; of a distribution without one, its mean or median."""
        return int(self.parameters[1 if self.kind == "uniform" else 0])

    def draw(self, random: np.random.Generator) -> int:
        """A number of tokens, at least 1."""
        first, *rest = self.parameters
        if self.kind == "uniform":
            drawn = float(random.integers(int(first), int(rest[0]) + 1))
        elif self.kind == "exponential":
            drawn = random.exponential(first)
        elif self.kind == "lognormal":
            drawn = random.lognormal(math.log(first), rest[0])
        else:
            drawn = first
        return min(max(round(drawn), 1), MAX_TOKENS)


def lengths(text: str) -> Lengths:
    """The distribution named by `text`: 512, uniform:LOW:HIGH, exponential:MEAN or lognormal:MEDIAN:SIGMA. Raises
    ValueError."""
    kind, *numbers = text.split(":")
    if not numbers:
        kind, numbers = "fixed", [text]
    try:
        parameters = tuple(map(float, numbers))
    except ValueError:
        parameters = ()
    counts = parameters[:1] if kind == "lognormal" else parameters
    if (
        len(parameters) != DISTRIBUTIONS.get(kind, -1)
        or not all(1 <= count <= MAX_TOKENS for count in counts)
        or not all(0 <= value <= MAX_TOKENS for value in parameters)
        or list(counts) != sorted(counts)
    ):
        raise ValueError(
            f"{text!r} is not a number of tokens like 512, nor uniform:LOW:HIGH, exponential:MEAN or "
            "lognormal:MEDIAN:SIGMA with at least 1 token"
        )
    return Lengths(text, kind, parameters)


class Traced(NamedTuple):
    """A request of a trace."""

    arrival: float  # seconds
    prompt: int  # tokens
    output: int


def read_trace(path: Path) -> list[Traced]:
    """The requests of a trace, by arrival, the first one at 0. Raises ValueError naming the line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'not UTF-8'}") from None
    lines = text.splitlines()
    is_json = text.lstrip().startswith("{")
    rows: Iterable[Any] = lines if is_json else csv.DictReader(lines)
    requests = []
    for number, row in enumerate(rows, start=1 if is_json else 2):
        if is_json and not row.strip():
            continue
        try:
            request = _traced(json.loads(row) if is_json else row)
        except (ValueError, StopIteration, TypeError):
            raise ValueError(
                f"line {number} of {path} is not a request with {', '.join(COLUMNS)}: give JSON lines, or CSV with the "
                "columns of Azure's traces or BurstGPT"
            ) from None
        if request.prompt >= 1 and request.output >= 1:  # BurstGPT has failed requests without an answer
            requests.append(request)
    if len(requests) < 2:
        raise ValueError(f"{path} has {len(requests)} requests with an answer: a trace needs two or more")
    requests.sort()
    if requests[-1].arrival <= requests[0].arrival:
        raise ValueError(f"all requests of {path} arrive at the same time: give arrivals in seconds")
    return [request._replace(arrival=request.arrival - requests[0].arrival) for request in requests]


def _traced(row: dict) -> Traced:
    values = {name: next(row[column] for column in columns if column in row) for name, columns in COLUMNS.items()}
    arrival = _seconds(values["arrival"])
    prompt, output = (float(values[name]) for name in ("prompt_tokens", "output_tokens"))
    if not 0 <= prompt <= MAX_TOKENS or not 0 <= output <= MAX_TOKENS or not np.isfinite(arrival):
        raise ValueError
    return Traced(arrival, int(prompt), int(output))


def _seconds(value: object) -> float:
    """A number of seconds, or a time like 2023-11-16 18:15:46.6805900."""
    try:
        return float(str(value))
    except ValueError:
        six_decimals = re.sub(r"\.(\d+)", lambda found: f".{found[1][:6]:0<6}", str(value).removesuffix("Z"))
        time = datetime.fromisoformat(six_decimals)
        return (time if time.tzinfo else time.replace(tzinfo=timezone.utc)).timestamp()


@dataclass(frozen=True)
class Workload:
    """The requests of a plan. Without `trace`, they arrive at random (Poisson) and have lengths of `prompt` and
    `output` tokens."""

    prompt: Lengths | Sequence[int]  # a sequence: one of these at random
    output: Lengths
    acceptance: float | Sequence[Drafts]  # of each draft token, or the drafts of measured texts
    trace: Sequence[Traced] = ()
    cached: float = 0.0  # share of a prompt that an earlier request had, too: from 0 to 1
    turns: int = 0  # requests of a chat, each of which begins as the one before; 0: all requests begin alike
    think: float = 30.0  # seconds between the requests of a chat

    @property
    def trace_rate(self) -> float:
        """Requests per second of the trace."""
        return (len(self.trace) - 1) / self.trace[-1].arrival

    def check(self, context: int) -> None:
        """Raise ValueError if a server of a model with `context` tokens would refuse requests for their lengths."""
        prompt = self.prompt.maximum if isinstance(self.prompt, Lengths) else max(self.prompt)
        longest = max((request.prompt + request.output for request in self.trace), default=prompt + self.output.maximum)
        if longest > context:
            raise ValueError(
                f"prompt and answer have up to {longest} tokens, but the context of the main model only {context}: "
                "give shorter ones"
            )

    def arrivals(self, rate: float, count: int, random: np.random.Generator, seen: float = 1.0) -> "Arrivals":
        """`count` requests that arrive `rate` times per second; those of a trace, stretched to that rate. `seen`: the
        probability that the request before of the same chat is among these requests, too, if there was one."""
        if self.trace:
            first = int(random.integers(len(self.trace)))
            chosen = [self.trace[(first + i) % len(self.trace)] for i in range(count)]
            gaps = np.diff([request.arrival for request in chosen], prepend=chosen[0].arrival)
            gaps[gaps < 0] = 1 / self.trace_rate  # where the trace begins again
            times = gaps.cumsum() * self.trace_rate / rate
            sizes = [(request.prompt, request.output) for request in chosen]
        else:
            times = random.exponential(1 / rate, count).cumsum()
            sizes = [(self._prompt(random), self.output.draw(random)) for _ in range(count)]
        chats = _Chats(self.turns, max(round(rate * self.think), 1), random)
        requests = [self.request(prompt, output, random) for prompt, output in sizes]
        for request, time in zip(requests, times.tolist(), strict=True):
            request.sent, request.chat = time, chats.next(seen)
        return Arrivals(requests, chats.begun)

    def request(
        self, prompt: int, output: int, random: np.random.Generator, text: int | None = None
    ) -> SimulatedRequest:
        """A request of these lengths; its drafts begin as those of the measured `text`, by default at random."""
        drafts = answer_drafts(self.acceptance, output, random, text)
        return SimulatedRequest(prompt, output, shared=int(prompt * self.cached), drafts=drafts)

    def draw(self, random: np.random.Generator) -> SimulatedRequest:
        """A request of a random length."""
        if self.trace:
            request = self.trace[int(random.integers(len(self.trace)))]
            return self.request(request.prompt, request.output, random)
        return self.request(self._prompt(random), self.output.draw(random), random)

    def numbered(self, number: int, random: np.random.Generator) -> SimulatedRequest:
        """The request with this number in a load benchmark, which takes one measured prompt after another."""
        if self.trace or isinstance(self.prompt, Lengths):
            return self.draw(random)
        text = number % len(self.prompt)
        return self.request(self.prompt[text], self.output.draw(random), random, text)

    def mean_output(self, seed: int) -> float:
        """The mean number of tokens of an answer."""
        if self.trace:
            return float(np.mean([request.output for request in self.trace]))
        random = np.random.default_rng(seed)
        return float(np.mean([self.output.draw(random) for _ in range(1000)]))

    def _prompt(self, random: np.random.Generator) -> int:
        if isinstance(self.prompt, Lengths):
            return self.prompt.draw(random)
        return int(self.prompt[int(random.integers(len(self.prompt)))])


class Arrivals(NamedTuple):
    """Requests in the order of their arrival, which is their `sent`."""

    requests: list[SimulatedRequest]
    begun: set[int]  # chats that have had requests before


class _Chats:
    """Open chats, each of which has had some of its requests; a new one opens when one has had all."""

    def __init__(self, turns: int, number: int, random: np.random.Generator):
        self._turns, self._random, self._last = turns, random, number
        self._chats = [[i, int(random.integers(turns))] for i in range(1, number + 1)] if turns else []
        self.begun = {chat for chat, answered_turns in self._chats if answered_turns} or {0}

    def next(self, seen: float) -> int:
        """The chat of the next request; a new number if the request before was not `seen`."""
        if not self._turns:
            return 0
        chat = self._chats[int(self._random.integers(len(self._chats)))]
        if chat[1] >= self._turns or (seen < 1 and self._random.random() >= seen):
            self._last += 1
            chat[:] = self._last, 0 if chat[1] >= self._turns else chat[1]
        chat[1] += 1
        return chat[0]


def answer_drafts(
    acceptance: float | Sequence[Drafts], output: int, random: np.random.Generator, text: int | None = None
) -> Drafts:
    """The draft at each position of an answer of `output` tokens.

    With a number, draft tokens are accepted independently; otherwise as in measured texts, one after another: `text` as
    a whole first, if it was measured, or a random one from a random position on. The first token of an answer is not
    drafted.
    """
    if isinstance(acceptance, float):
        verdicts = [Draft([acceptance], accepted) for accepted in (0, 1)]
        return [verdicts[accepted] for accepted in (random.random(output) < acceptance).tolist()]
    measured = [one for one in acceptance if one]
    of_text = acceptance[text] if text is not None and text < len(acceptance) else []
    drafts = [*of_text[:1], *of_text]
    while measured and len(drafts) < output:
        drawn = measured[int(random.integers(len(measured)))]
        drafts += drawn if drafts else drawn[int(random.integers(len(drawn))) :]
    return drafts
