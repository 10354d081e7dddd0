"""Speed ratios between two decoding methods, with the range over the rounds and a confidence interval over prompts.

Repeated timings of the same few texts agree well and say nothing about other texts; the interval is therefore a 95 %
confidence interval over the prompts: Student's t of the logarithm of a ratio of sums (delta method; Cochran 1977,
Sampling Techniques, section 6.4). A bootstrap over three to eight prompts covers only 75 to 90 %. Engines are compared
on the prompts for which both gave the same tokens, as a different text has a different acceptance rate; the other
prompts are reported separately.
"""

import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from speculative.bench.genai import Run
from speculative.bench.harness import Method
from speculative.bench.result import Ratio
from speculative.sequence.result import GenerationResult

T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)  # of 1, 2, ... degrees of freedom, 97.5 %
Units = Callable[[Run | GenerationResult], int]


def tokens(run: Run | GenerationResult) -> int:
    """New tokens in the timed part: all but the first."""
    return len(run.tokens) - 1


def iterations(run: Run | GenerationResult) -> int:
    """Forward passes of the main model after the prompt."""
    return len(run.gained)


def ratio(what: str, one: Method, other: Method, prompts: Sequence[int] | None = None, units: Units = tokens) -> Ratio:
    """Units per second of `one` over those of `other`, on the prompts with these indices (default: all).

    `ratio`: median over the rounds; `range`: over the rounds; `interval`: over prompts, around the median, None if
    there is only one.
    """
    indices = list(range(len(one.rounds[0]))) if prompts is None else list(prompts)
    measured = [_measured(method, indices, units) for method in (one, other)]
    counts, seconds = (np.stack(part) for part in zip(*measured, strict=True))
    speeds = counts.sum(-1) / seconds.sum(-1)  # [method, round]
    ratios = (speeds[0] / speeds[1]).tolist()
    middle = statistics.median(ratios)
    return {
        "what": what,
        "ratio": middle,
        "range": [min(ratios), max(ratios)],
        "interval": interval(counts.sum(1), seconds.sum(1), middle),
        "prompts": len(indices),
    }


def same_tokens(one: Method, other: Method) -> list[int]:
    """Indices of the prompts for which both methods gave the same tokens in every round."""
    rounds = list(zip(one.rounds, other.rounds, strict=True))
    return [i for i in range(len(one.rounds[0])) if all(a[i].tokens == b[i].tokens for a, b in rounds)]


def engines(where: str, ours: Method, genai: Method) -> list[Ratio]:
    """Our engine over GenAI's pipeline: per token and per iteration on identical texts, and on the others."""
    same = same_tokens(ours, genai)
    others = [i for i in range(len(ours.rounds[0])) if i not in same]
    what = f"ours / GenAI, greedy, {where}"
    results: list[Ratio] = []
    if same:
        results.append({**ratio(what, ours, genai, same), "where": where})
        results.append(ratio(f"{what}, per iteration", ours, genai, same, iterations))
    if others:
        results.append(ratio(f"{what}, texts that differ", ours, genai, others))
    return results


def verdict(facts: list[Ratio], starts: int) -> list[str]:
    """Which engine is faster where, in sentences. Faster means in every round and at both ends of the interval."""
    compared = [fact for fact in facts if fact.get("where")]
    if not compared:
        return []
    kinds: dict[str, list[str]] = {"faster": [], "no difference shown": [], "slower": []}
    for fact in compared:
        bounds = [*fact["range"], *(fact["interval"] or [0, math.inf])]  # of a single prompt, no engine is known faster
        least, most = round(min(bounds), 2), round(max(bounds), 2)  # as printed: 0.998 is no difference
        kind = "faster" if least > 1 else "slower" if most < 1 else "no difference shown"
        kinds[kind].append(f"{fact['where']} {fact['ratio']:.2f}x")
    by_outcome = "; ".join(f"{kind}: {', '.join(where)}" for kind, where in kinds.items() if where)
    lines = [f"Our engine relative to GenAI's pipeline, tokens/s on identical texts: {by_outcome}."]
    if starts == 1:
        lines.append(
            "Each process was started only once, and speed varies by 5 to 10 % between starts: use --starts 3 for a "
            "reliable comparison."
        )
    return lines


def _measured(method: Method, prompts: list[int], units: Units) -> tuple[np.ndarray, np.ndarray]:
    """Units and seconds, each [round, prompt]."""
    runs = [[round_[i] for i in prompts] for round_ in method.rounds]
    counts = [[units(run) for run in round_] for round_ in runs]
    return np.array(counts, float), np.array([[run.decode_seconds for run in round_] for round_ in runs])


def interval(counts: np.ndarray, seconds: np.ndarray, ratio: float | None = None) -> list[float] | None:
    """95 % confidence interval, over prompts, of the ratio of two methods; `counts` and `seconds` are [method, prompt].
    It is around `ratio`, by default that of the sums. Prompts whose answer is one token, which took no time to decode,
    are left out. None without two others."""
    timed = (seconds > 0).all(axis=0)
    counts, seconds = counts[:, timed], seconds[:, timed]
    n = counts.shape[1]
    if n < 2 or not counts.sum(-1).all():
        return None
    shares = n * (counts / counts.sum(-1, keepdims=True) - seconds / seconds.sum(-1, keepdims=True))
    error = float(np.std(shares[0] - shares[1], ddof=1)) / math.sqrt(n)  # of the ratio's logarithm
    speeds = counts.sum(-1) / seconds.sum(-1)
    middle, factor = ratio or float(speeds[0] / speeds[1]), math.exp(student_t(n - 1) * error)
    return [middle / factor, middle * factor]


def student_t(degrees: int) -> float:
    """The 97.5 % quantile of Student's t distribution; beyond the table by its expansion (Fisher and Cornish 1960)."""
    return T[degrees - 1] if degrees <= len(T) else 1.96 + 2.372 / degrees + 2.823 / degrees**2
