"""Figures of a server under load: throughput, TTFT and TPOT by the number of clients, several ways in turns.

    ways = [Load("alone", ask_one), Load("with draft", ask_other)]
    take_turns(ways, clients=[1, 4, 16], seconds=8, rounds=3)
    rows = [row(way, n, ways[0]) for way in ways for n in way.rounds]

A way is put under load by `run(clients, seconds, first)`: so many clients in a closed loop for so long, with prompts
numbered from `first` on. Ways take turns at every number of clients, in changing order, so that whatever else the
machine does falls on all alike; all get the same prompts, none twice; after a warm-up of a text for each client;
medians over the rounds and their range.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tqdm import tqdm

from speculative.bench.harness import ctrl_c_raises, shuffled
from speculative.sequence import metrics

OUTCOMES = ("answered", "refused", "cut off", "lost")
EACH = 100_000  # numbers of prompts set apart for one measurement
WARM_UP = 0.2  # seconds of load at most: each client has one text at least
MIDDLE = (0.05, 0.95)  # quantiles between which the spread of TTFT and TPOT is shown


@dataclass
class Answer:
    """What became of one request. Times are those of `time.perf_counter`."""

    number: int  # of the prompt
    sent: float
    first: float = 0.0  # piece of text
    end: float = 0.0
    text: str = ""
    tokens: int = 0
    accepted: int | None = None  # draft tokens; None where it is not told
    rejected: int | None = None
    finish_reason: str = ""
    status: int = 0  # of HTTP; 0: none came
    error: str = ""  # that of the API's error object
    retry_after: float = 0.0
    whole: bool = False  # it came to its end
    cut: bool = False  # the connection broke, or was not to be had, or there came an error that is not the API's

    @property
    def outcome(self) -> str:
        """Of OUTCOMES. Who is cut off knows it; lost is who waits in vain, or takes a part for the whole."""
        if self.error:
            return "refused"
        if self.whole and self.finish_reason:
            return "answered"
        return "cut off" if self.cut else "lost"

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token, prompt included."""
        return self.first - self.sent if self.first else None

    @property
    def tpot(self) -> float | None:
        """Seconds for each further token."""
        return (self.end - self.first) / (self.tokens - 1) if self.first and self.tokens > 1 else None

    def tokens_between(self, begin: float, end: float) -> float:
        """Those that came in a span of time, as if they had come evenly."""
        if self.end <= self.first:
            return self.tokens * (begin <= self.end < end)
        return self.tokens * max(0.0, min(end, self.end) - max(begin, self.first)) / (self.end - self.first)


class Span(NamedTuple):
    """What was asked in a span of time; some answers came later."""

    answers: list[Answer]
    begin: float
    end: float

    @property
    def throughput(self) -> float:
        """New tokens a second, of all clients together, waiting and prompts included."""
        return sum(answer.tokens_between(self.begin, self.end) for answer in self.answers) / (self.end - self.begin)


@dataclass
class Load:
    """A way to serve, and what it did under load."""

    name: str
    run: Callable[[int, float, int], Span]  # (clients, seconds, number of the first prompt)
    rounds: dict[int, list[Span]] = field(default_factory=dict)  # by the number of clients


def take_turns(ways: Sequence[Load], clients: Sequence[int], seconds: float, rounds: int, warm_up: int = 1) -> bool:
    """Add `rounds` rounds to every way, after `warm_up` rounds that are not kept.

    False: Ctrl-C came, and the full rounds before it are kept. Raises KeyboardInterrupt where there are none.
    """
    total = (warm_up + rounds) * len(clients) * len(ways)
    before = kept = len(ways[0].rounds.get(clients[0], ()))
    try:
        with ctrl_c_raises(), tqdm(total=total, unit="run", leave=False) as bar:
            for number in range(warm_up + rounds):
                done = []
                for place, n in enumerate(clients):
                    turn = (before + number) * len(clients) + place
                    lasting = seconds if number >= warm_up else min(WARM_UP, seconds)
                    for way in shuffled(ways, turn):
                        bar.set_description(f"{way.name}, {n} at once")
                        done.append((way, n, way.run(n, lasting, EACH * turn)))
                        bar.update()
                if number >= warm_up:
                    for way, n, span in done:
                        way.rounds.setdefault(n, []).append(span)
                    kept += 1
    except KeyboardInterrupt:
        for way in ways:  # the signal may come anywhere
            for n in clients:
                del way.rounds.get(n, [])[kept:]
        if kept == before:
            raise
        return False
    return True


# ---- figures --------------------------------------------------------------------------------------------------------


def row(way: Load, clients: int, baseline: Load | None, counts: str = "client") -> dict:
    """The figures of a way with so many clients; speedups over `baseline` in the same rounds, where there is one."""
    spans = way.rounds[clients]
    answers = [answer for span in spans for answer in span.answers]
    answered = [answer for answer in answers if answer.outcome == "answered"]
    throughputs = [span.throughput for span in spans]
    ratios, same = [], []
    if baseline and baseline is not way:
        others = baseline.rounds[clients]
        ratios = [a / b.throughput for a, b in zip(throughputs, others, strict=True) if b.throughput]
        texts = {answer.number: answer.text for span in others for answer in span.answers if answer.whole}
        same = [answer.text == texts[answer.number] for answer in answered if answer.number in texts]
    return {
        "name": f"{way.name}, {counted(clients, counts)}",
        "way": way.name,
        "clients": clients,
        "counted": counts,
        "throughput": statistics.median(throughputs),
        "throughputs": throughputs,
        "speedup": statistics.median(ratios) if ratios else None,
        "speedup_range": [min(ratios), max(ratios)] if ratios else None,
        **_median_and_spread("ttft", [answer.ttft for answer in answered]),
        **_median_and_spread("tpot", [answer.tpot for answer in answered]),
        **_drafting(answered),
        "same_text": sum(same) if same else None,
        "texts": len(same),
        "requests": len(answers),
        **outcomes(answers),
    }


def outcomes(answers: Sequence[Answer]) -> dict[str, int]:
    """How many requests ended how."""
    return {outcome: sum(answer.outcome == outcome for answer in answers) for outcome in OUTCOMES}


def _median_and_spread(name: str, values: list[float | None]) -> dict:
    known = sorted(value for value in values if value is not None)
    if not known:
        return {name: None, f"{name}_range": None}
    low, high = (known[min(int(share * len(known)), len(known) - 1)] for share in MIDDLE)
    return {name: statistics.median(known), f"{name}_range": [low, high]}


def _drafting(answers: list[Answer]) -> dict:
    """From the counts that come with each answer: every inference of the main model yields one token that is not
    drafted."""
    told = [answer for answer in answers if answer.accepted is not None and answer.rejected is not None]
    accepted, drafted = sum(a.accepted for a in told), sum(a.accepted + a.rejected for a in told)
    inferences = sum(answer.tokens - 1 - answer.accepted for answer in told)
    return {
        "acceptance_rate": metrics.acceptance_rate([drafted], [accepted + 1]) if drafted else None,
        "block_efficiency": (accepted + inferences) / inferences if inferences > 0 else None,
        "mean_draft_length": drafted / inferences if inferences > 0 else None,
    }


def counted(n: int, what: str = "client") -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


# ---- in words -------------------------------------------------------------------------------------------------------


def stops_paying(rows: list[dict]) -> list[str]:
    """Of rows of a way with a draft, by rising number of clients: where it pays, and what is drafted where not."""
    rows = [row for row in rows if row["speedup"] is not None]
    if not rows:
        return []
    first, last = rows[0], rows[-1]
    lines = [f"Tokens with a draft over those of the main model alone: {'; '.join(map(_times, rows))}."]
    unpaid = [one for one in rows if one["speedup_range"][0] <= 1]
    if not unpaid:
        lines.append(
            f"Speculation pays at every number of {last['counted']}s that was measured, up to {last['clients']}."
        )
    elif len(unpaid) == len(rows):
        lines.append(f"Speculation pays surely at no number of {last['counted']}s that was measured.")
    else:
        worst = min(one["speedup_range"][0] for one in unpaid)  # of all rounds: a median hides those that were slower
        cost = f"takes {1 - worst:.0%} at worst" if worst < 0.995 else "costs nothing"
        if unpaid == rows[-len(unpaid) :]:
            stop = counted(unpaid[0]["clients"], unpaid[0]["counted"])
            lines.append(f"Speculation stops paying at {stop}; from there on it {cost}.")
        else:
            others = "".join(f"{one['clients']}, " for one in unpaid[:-1])
            last_one = counted(unpaid[-1]["clients"], unpaid[-1]["counted"])
            lines.append(f"Speculation does not surely pay with {others}{last_one}; there it {cost}.")
    if first["mean_draft_length"] is not None and last["mean_draft_length"] is not None and last is not first:
        drafted = ", ".join(f"{row['mean_draft_length']:.2f} with {row['clients']}" for row in rows)
        shrinks = last["mean_draft_length"] < 0.8 * first["mean_draft_length"]
        lines.append(
            f"What the server does {'then: drafting shrinks' if shrinks else 'under load: drafting stays as it is'} "
            f"({drafted}: draft tokens of a text for each inference of the main model)."
        )
    return lines


def _times(row: dict) -> str:
    return f"{_speedup(row)} with {counted(row['clients'], row['counted'])}"


def losses(rows: list[dict]) -> str:
    """What became of the requests, in a sentence."""
    total = {what: sum(row[what] for row in rows) for what in ("requests", *OUTCOMES)}
    return (
        f"Of {total['requests']:,} requests {total['answered']:,} were answered, {total['refused']:,} refused with an "
        f"error of the API, {total['cut off']:,} cut off, {total['lost']:,} lost."
    )


def table(rows: list[dict]) -> str:
    """What people read."""
    columns = {
        "way": [one["way"] for one in rows],
        f"{rows[0]['counted']}s": [str(one["clients"]) for one in rows],
        "tokens/s": [f"{one['throughput']:.1f}" for one in rows],
        "speedup (range)": [_speedup(one) for one in rows],
        "TTFT, ms (5-95 %)": [_spread(one, "ttft") for one in rows],
        "TPOT, ms (5-95 %)": [_spread(one, "tpot") for one in rows],
        "acceptance": [_number(one["acceptance_rate"]) for one in rows],
        "drafted": [_number(one["mean_draft_length"]) for one in rows],
        "block eff.": [_number(one["block_efficiency"]) for one in rows],
        "text as alone": [_same(one) for one in rows],
        **{what: [str(one[what]) for one in rows] for what in OUTCOMES},
    }
    widths = [max(map(len, [name, *column])) for name, column in columns.items()]
    lines = []
    for cells in zip(*([name, *column] for name, column in columns.items()), strict=True):
        first, *others = zip(cells, widths, strict=True)
        lines.append("   ".join([f"{first[0]:<{first[1]}}", *(f"{cell:>{width}}" for cell, width in others)]))
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _speedup(row: dict) -> str:
    if row["speedup"] is None:
        return ""
    low, high = row["speedup_range"]
    return f"{row['speedup']:.2f}x ({low:.2f}-{high:.2f})"


def _same(row: dict) -> str:
    return "" if row["same_text"] is None else f"{row['same_text']}/{row['texts']}"


def _spread(row: dict, name: str) -> str:
    if row[name] is None:
        return ""
    low, high = row[f"{name}_range"]
    return f"{1000 * row[name]:.1f} ({1000 * low:.1f}-{1000 * high:.1f})"
