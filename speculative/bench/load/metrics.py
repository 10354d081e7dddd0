"""Load metrics: throughput, TTFT and TPOT by number of clients, for several interleaved methods.

    methods = [Load("alone", ask_one), Load("with draft", ask_other)]
    take_turns(methods, clients=[1, 4, 16], seconds=8, rounds=3)
    rows = [row(method, n, methods[0]) for method in methods for n in method.rounds]

`run(clients, seconds, first)` puts a method under load: that many clients in a closed loop for that long, with prompts
numbered from `first`. Methods are interleaved at every number of clients, in varying order, so that background load
affects all of them equally. All get the same prompts, none twice, after a warm-up of one text per client. Results are
medians and ranges over the rounds.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, cast

from speculative.bench.harness import shuffled
from speculative.bench.result import Drafting, Drawn, LoadRow, Outcomes, ProcessorTime, Range
from speculative.cli.processes import signals_raise
from speculative.cli.progress import tqdm
from speculative.sequence import metrics

Outcome = Literal["answered", "refused", "cut off", "lost"]
OUTCOMES: tuple[Outcome, ...] = ("answered", "refused", "cut off", "lost")
PROMPTS_PER_RUN = 100_000  # prompt numbers reserved for each measurement
WARM_UP = 0.2  # maximum seconds of load; each client generates at least one text
SHOWN_QUANTILES = (0.05, 0.95)  # quantiles shown as the range of TTFT and TPOT


@dataclass
class RequestRecord:
    """The outcome of one request. Times are from `time.perf_counter`."""

    number: int  # of the prompt
    sent: float
    first: float = 0.0  # piece of text
    end: float = 0.0
    text: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt
    accepted: int | None = None  # draft tokens; None if not reported
    rejected: int | None = None
    finish_reason: str = ""
    status: int = 0  # HTTP status; 0: no response
    error: str = ""  # message of the API's error object
    retry_after: float = 0.0
    is_complete: bool = False  # the stream was complete
    cut_off: str = ""  # why, if the connection broke or could not be made, or the error was not an API error object
    pieces: int = 0  # of text, as they came

    @property
    def outcome(self) -> Outcome:
        """One of OUTCOMES. A client that is cut off notices; one that is lost waits in vain or mistakes a partial
        answer for a complete one."""
        if self.error:
            return "refused"
        if self.is_complete and self.finish_reason:
            return "answered"
        return "cut off" if self.cut_off else "lost"

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token, prompt included."""
        return self.first - self.sent if self.first else None

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first."""
        return (self.end - self.first) / (self.tokens - 1) if self.first and self.tokens > 1 else None

    def tokens_between(self, begin: float, end: float) -> float:
        """Number of tokens in an interval, assuming they arrived evenly."""
        if self.end <= self.first:
            return self.tokens * (begin <= self.end < end)
        return self.tokens * max(0.0, min(end, self.end) - max(begin, self.first)) / (self.end - self.first)


class Span(NamedTuple):
    """The requests sent in an interval; some answers arrived later."""

    answers: list[RequestRecord]
    begin: float
    end: float
    processor_time: ProcessorTime | None = None  # until the last answer; None if not measured

    @property
    def throughput(self) -> float:
        """New tokens per second of all clients together, queueing and prompts included."""
        return sum(answer.tokens_between(self.begin, self.end) for answer in self.answers) / (self.end - self.begin)


@dataclass
class Load:
    """A serving method and its measurements under load."""

    name: str
    run: Callable[[int, float, int], Span]  # (clients, seconds, number of the first prompt)
    rounds: dict[int, list[Span]] = field(default_factory=dict)  # by number of clients


def first_number(turn: int) -> int:
    """The number of the first prompt of a measurement; `turn`: how many measurements the method had before."""
    return PROMPTS_PER_RUN * turn


def take_turns(methods: Sequence[Load], clients: Sequence[int], seconds: float, rounds: int, warm_up: int = 1) -> bool:
    """Add `rounds` rounds to every method after `warm_up` discarded rounds.

    Returns False after Ctrl-C; complete rounds are kept. Raises KeyboardInterrupt if there are none.
    """
    total = (warm_up + rounds) * len(clients) * len(methods)
    before = kept = len(methods[0].rounds.get(clients[0], ()))
    try:
        with signals_raise(), tqdm(total=total, unit="run", leave=False) as bar:
            for number in range(warm_up + rounds):
                done = []
                for place, n in enumerate(clients):
                    turn = (before + number) * len(clients) + place
                    lasting = seconds if number >= warm_up else min(WARM_UP, seconds)
                    for method in shuffled(methods, turn):
                        bar.set_description(f"{method.name}, {n} at once")
                        done.append((method, n, method.run(n, lasting, first_number(turn))))
                        bar.update()
                if number >= warm_up:
                    for method, n, span in done:
                        method.rounds.setdefault(n, []).append(span)
                    kept += 1
    except KeyboardInterrupt:
        for method in methods:  # the signal can arrive at any point
            for n in clients:
                del method.rounds.get(n, [])[kept:]
        if kept == before:
            raise
        return False
    return True


# ---- metrics --------------------------------------------------------------------------------------------------------


def row(method: Load, clients: int, baseline: Load | None, counts: str = "client") -> LoadRow:
    """The metrics of a method with `clients` clients; speedups are over `baseline`, if any, in the same rounds."""
    spans = method.rounds[clients]
    answers = [answer for span in spans for answer in span.answers]
    answered = [answer for answer in answers if answer.outcome == "answered"]
    throughputs = [span.throughput for span in spans]
    ratios, same = [], []
    if baseline and baseline is not method:
        others = baseline.rounds[clients]
        ratios = [a / b.throughput for a, b in zip(throughputs, others, strict=True) if b.throughput]
        texts = {answer.number: answer.text for span in others for answer in span.answers if answer.is_complete}
        same = [answer.text == texts[answer.number] for answer in answered if answer.number in texts]
    ttft, ttft_mean, ttft_range = _summary([answer.ttft for answer in answered])
    tpot, tpot_mean, tpot_range = _summary([answer.tpot for answer in answered])
    result: LoadRow = {
        "name": f"{method.name}, {counted(clients, counts)}",
        "method": method.name,
        "clients": clients,
        "counted": counts,
        "throughput": statistics.median(throughputs),
        "throughputs": throughputs,
        "speedup": statistics.median(ratios) if ratios else None,
        "speedup_range": [min(ratios), max(ratios)] if ratios else None,
        "ttft": ttft,
        "ttft_mean": ttft_mean,
        "ttft_range": ttft_range,
        "tpot": tpot,
        "tpot_mean": tpot_mean,
        "tpot_range": tpot_range,
        **_drafting(answered),
        "same_text": sum(same) if same else None,
        "texts": len(same),
        "requests": len(answers),
        **outcomes(answers),
    }
    if times := [span.processor_time for span in spans if span.processor_time]:
        result["processor_time"] = _total(times)
    return result


def _total(values_known: Sequence[ProcessorTime]) -> ProcessorTime:
    return cast(ProcessorTime, {key: sum(one[key] for one in values_known) for key in values_known[0]})  # type: ignore[literal-required]


def outcomes(answers: Sequence[RequestRecord]) -> Outcomes:
    """Number of requests per outcome."""
    counts = Counter(answer.outcome for answer in answers)
    return {
        "answered": counts["answered"],
        "refused": counts["refused"],
        "cut off": counts["cut off"],
        "lost": counts["lost"],
    }


def _summary(values: list[float | None]) -> tuple[float | None, float | None, Range | None]:
    """Median, mean and shown quantiles."""
    values_known = sorted(value for value in values if value is not None)
    if not values_known:
        return None, None, None
    low, high = (values_known[min(int(share * len(values_known)), len(values_known) - 1)] for share in SHOWN_QUANTILES)
    return statistics.median(values_known), statistics.fmean(values_known), [low, high]


def _drafting(answers: list[RequestRecord]) -> Drafting:
    """Draft metrics from the token counts in each answer: every main-model forward pass yields one token that was not
    drafted."""
    counts = [(a.tokens, a.accepted, a.rejected) for a in answers if a.accepted is not None and a.rejected is not None]
    accepted, drafted = sum(kept for _, kept, _ in counts), sum(kept + rejected for _, kept, rejected in counts)
    inferences = sum(tokens - 1 - kept for tokens, kept, _ in counts)
    return {
        "acceptance_rate": metrics.acceptance_rate([drafted], [accepted]),
        "block_efficiency": (accepted + inferences) / inferences if inferences > 0 else None,
        "mean_draft_length": drafted / inferences if inferences > 0 else None,
    }


def counted(n: int, what: str = "client") -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


# ---- sentences and table --------------------------------------------------------------------------------------------


def break_even(rows: list[LoadRow]) -> list[str]:
    """Up to what concurrency the draft helps, and how the draft length changes, from the rows of a method with a draft
    by increasing number of clients."""
    rows = [row for row in rows if row["speedup"] is not None]
    if not rows:
        return []
    first, last = rows[0], rows[-1]
    lines = [f"Throughput with a draft relative to the main model alone: {'; '.join(map(_times, rows))}."]
    without_gain = [one for one in rows if _lowest(one) <= 1]
    if not without_gain:
        lines.append(f"The draft helps at every measured number of {last['counted']}s, up to {last['clients']}.")
    elif len(without_gain) == len(rows):
        lines.append(f"The draft does not reliably help at any measured number of {last['counted']}s.")
    else:
        worst = min(map(_lowest, without_gain))  # over all rounds: a median hides slower ones
        cost = f"costs up to {1 - worst:.0%} of the throughput" if worst < 0.995 else "costs nothing"
        if without_gain == rows[-len(without_gain) :]:
            stop = counted(without_gain[0]["clients"], without_gain[0]["counted"])
            lines.append(f"The draft stops helping at {stop}; from there on it {cost}.")
        else:
            others = "".join(f"{one['clients']}, " for one in without_gain[:-1])
            last_one = counted(without_gain[-1]["clients"], without_gain[-1]["counted"])
            lines.append(f"The draft does not reliably help with {others}{last_one}; there it {cost}.")
    if first["mean_draft_length"] is not None and last["mean_draft_length"] is not None and last is not first:
        drafted = ", ".join(f"{row['mean_draft_length']:.2f} with {row['clients']}" for row in rows)
        shrinks = last["mean_draft_length"] < 0.8 * first["mean_draft_length"]
        lines.append(
            f"Under load the draft length {'shrinks' if shrinks else 'stays about the same'} "
            f"({drafted}: draft tokens of a text per main-model forward pass)."
        )
    return lines


def _lowest(row: LoadRow) -> float:
    """The lowest speedup of a row that has one."""
    assert row["speedup_range"] is not None
    return row["speedup_range"][0]


def _times(row: LoadRow) -> str:
    return f"{_speedup(row)} with {counted(row['clients'], row['counted'])}"


def losses(rows: list[LoadRow]) -> str:
    """The outcomes of the requests, in one sentence."""
    requests, total = sum(row["requests"] for row in rows), {what: sum(row[what] for row in rows) for what in OUTCOMES}
    return (
        f"Of {requests:,} requests {total['answered']:,} were answered, {total['refused']:,} refused with an "
        f"API error, {total['cut off']:,} cut off, {total['lost']:,} lost."
    )


def table(rows: list[LoadRow]) -> str:
    """The table of the rows."""
    columns: dict[str, list[str]] = {
        "method": [one["method"] for one in rows],
        f"{rows[0]['counted']}s": [str(one["clients"]) for one in rows],
        "tokens/s": [f"{one['throughput']:.1f}" for one in rows],
        "speedup (range)": [_speedup(one) for one in rows],
        "TTFT, ms (5-95 %)": [_spread(one, "ttft") for one in rows],
        "TPOT, ms (5-95 %)": [_spread(one, "tpot") for one in rows],
        "acceptance": [_number(one["acceptance_rate"]) for one in rows],
        "drafted": [_number(one["mean_draft_length"]) for one in rows],
        "block eff.": [_number(one["block_efficiency"]) for one in rows],
        "same text": [_same(one) for one in rows],
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


def _speedup(row: LoadRow) -> str:
    if row["speedup"] is None or row["speedup_range"] is None:
        return ""
    low, high = row["speedup_range"]
    return f"{row['speedup']:.2f}x ({low:.2f}-{high:.2f})"


def _same(row: LoadRow) -> str:
    return "" if row["same_text"] is None else f"{row['same_text']}/{row['texts']}"


def _spread(row: Drawn, name: str) -> str:
    if row[name] is None:
        return ""
    low, high = row[f"{name}_range"]
    return f"{1000 * row[name]:.1f} ({1000 * low:.1f}-{1000 * high:.1f})"
