"""How much faster one way to decode is than another: the ratio, its range over the rounds, its interval over prompts.

Timings of the same few texts, again and again, agree well and say nothing about other texts: the interval is that of
a bootstrap over the prompts (Efron 1979), 95 %. Two engines are compared by the prompts to which both gave the same
tokens, as another text has another acceptance; what the others say stands apart.
"""

import statistics
from collections.abc import Callable, Sequence

import numpy as np

from speculative.bench.genai import Run
from speculative.bench.harness import Way

RESAMPLES = 2000
Units = Callable[[Run], int]


def tokens(run: Run) -> int:
    """New tokens of the timed part: all but the first."""
    return len(run.tokens) - 1


def iterations(run: Run) -> int:
    """Inferences of the main model after the prompt's."""
    return len(run.gained)


def ratio(what: str, one: Way, other: Way, prompts: Sequence[int] | None = None, units: Units = tokens) -> dict:
    """Units a second of `one` over those of `other`, on the prompts with these numbers (default: all).

    `ratio`: the median over the rounds; `range`: of the rounds; `interval`: over prompts, None where there is one only.
    """
    chosen = list(range(len(one.rounds[0]))) if prompts is None else list(prompts)
    measured = [_measured(way, chosen, units) for way in (one, other)]
    counts, seconds = (np.stack(part) for part in zip(*measured, strict=True))
    speeds = counts.sum(-1) / seconds.sum(-1)  # [way, round]
    ratios = (speeds[0] / speeds[1]).tolist()
    return {
        "what": what,
        "ratio": statistics.median(ratios),
        "range": [min(ratios), max(ratios)],
        "interval": _interval(counts.sum(1), seconds.sum(1)),
        "prompts": len(chosen),
    }


def same_tokens(one: Way, other: Way) -> list[int]:
    """The numbers of the prompts to which both ways gave the same tokens in every round."""
    rounds = list(zip(one.rounds, other.rounds, strict=True))
    return [i for i in range(len(one.rounds[0])) if all(a[i].tokens == b[i].tokens for a, b in rounds)]


def engines(where: str, ours: Way, genai: Way) -> list[dict]:
    """Our engine over GenAI's pipeline: per token and per iteration over the same texts, and over the others."""
    same = same_tokens(ours, genai)
    others = [i for i in range(len(ours.rounds[0])) if i not in same]
    what, found = f"ours / GenAI, greedy, {where}", []
    if same:
        found.append({**ratio(what, ours, genai, same), "where": where})
        found.append(ratio(f"{what}, per iteration", ours, genai, same, iterations))
    if others:
        found.append(ratio(f"{what}, texts that differ", ours, genai, others))
    return found


def verdict(facts: list[dict], starts: int) -> list[str]:
    """Who is faster, and where, in words. Faster is who is so in every round and at both ends of the interval."""
    compared = [fact for fact in facts if fact.get("where")]
    if not compared:
        return []
    kinds: dict[str, list[str]] = {"faster": [], "level": [], "slower": []}
    for fact in compared:
        bounds = [*fact["range"], *(fact["interval"] or [])]
        kind = "faster" if min(bounds) > 1 else "slower" if max(bounds) < 1 else "level"
        kinds[kind].append(f"{fact['where']} {fact['ratio']:.2f}x")
    said = "; ".join(f"{kind}: {', '.join(where)}" for kind, where in kinds.items() if where)
    lines = [f"Our engine against GenAI's pipeline, tokens a second over the same texts: {said}."]
    if starts == 1:
        lines.append(
            "Each process was started once, and a start moves its speed by 5 to 10 %: --starts 3 is surer of who is "
            "faster."
        )
    return lines


def _measured(way: Way, prompts: list[int], units: Units) -> tuple[np.ndarray, np.ndarray]:
    """Units and seconds, [round, prompt] each."""
    runs = [[round_[i] for i in prompts] for round_ in way.rounds]
    counts = [[units(run) for run in round_] for round_ in runs]
    return np.array(counts, float), np.array([[run.decode_seconds for run in round_] for round_ in runs])


def _interval(counts: np.ndarray, seconds: np.ndarray) -> list[float] | None:
    """95 % of the ratios of resampled prompts; `counts` and `seconds` are [way, prompt]."""
    n = counts.shape[1]
    if n < 2:
        return None
    drawn = np.random.default_rng(0).integers(0, n, (RESAMPLES, n))
    speeds = counts[:, drawn].sum(-1) / seconds[:, drawn].sum(-1)  # [way, resample]
    return np.quantile(speeds[0] / speeds[1], (0.025, 0.975)).tolist()
