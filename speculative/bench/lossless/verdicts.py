"""Verdicts on the methods: do the greedy texts equal the reference's, and have the samples the exact distribution?"""

from dataclasses import dataclass
from typing import cast

import numpy as np

from speculative.bench.lossless.methods import CheckedMethod, Draw
from speculative.bench.result import ComparedRow, GreedyRow, SampledRow, TextDifference
from speculative.models.cached_model import CachedModel
from speculative.sampling import lossless_check

ALPHA = 1e-4  # p-value below which samples are called wrong: one false alarm in 10,000 methods
POWER = 0.9  # probability of detecting the reported distance
NEAR_TIE = 0.03  # fraction of the logits' standard deviation by which rounding in a u8 cache may change them


@dataclass
class Verdicts:
    """One row per method, and the method whose texts the others are compared with."""

    greedy: list[GreedyRow]
    sampled: list[SampledRow | ComparedRow]
    reference: CheckedMethod | None

    def hold(self, strict: bool) -> bool:
        """Whether all methods of our engine pass, with `strict` GenAI's, too."""
        return all(row["holds"] for row in (*self.greedy, *self.sampled) if row["ours"] or strict)


def judge(
    methods: list[CheckedMethod], main: CachedModel, prompts: list[np.ndarray], cells: lossless_check.Cells
) -> Verdicts:
    """Judge the methods' results: their texts for `prompts` (token ids int64 [n] each), their samples for the first."""
    reference = reference_of(methods)
    greedy = [judge_texts(method, reference, main, prompts) for method in methods if method.is_greedy]
    sampled = [judge_draws(method, cells) for method in methods if method.is_sampled]
    return Verdicts(greedy, sampled, reference)


def reference_of(methods: list[CheckedMethod]) -> CheckedMethod | None:
    """The first method of the main model alone without a crash."""
    return next((method for method in methods if method.is_alone and method.texts and None not in method.texts), None)


def judge_texts(
    method: CheckedMethod, reference: CheckedMethod | None, main: CachedModel, prompts: list[np.ndarray]
) -> GreedyRow:
    """One row: whether the greedy texts equal the reference's. Without a reference nothing passes."""
    differences, same = [], 0
    for i, (text, expected) in enumerate(zip(method.texts, reference.texts, strict=True) if reference else ()):
        assert expected  # the reference has no crash
        if text and text.tokens == expected.tokens:
            same += 1
        elif text:
            differences.append(first_difference(main, i, prompts[i], expected.tokens, text.tokens))
    crashes = method.texts.count(None)
    if crashes:
        verdict = "crashes"
    elif not reference:
        verdict = "not compared"
    elif method is reference:
        verdict = "reference"
    elif all(difference["near_tie"] for difference in differences):
        verdict = "equal except near-ties" if differences else "equal"
    else:
        verdict = "NOT equal"
    return {
        "path": method.name,
        "ours": method.ours,
        "prompts": len(prompts),
        "same": same,
        "crashes": crashes,
        "acceptance_rate": acceptance_rate(method.texts),
        "differences": differences,
        "verdict": verdict,
        "holds": verdict.startswith("equal") or verdict == "reference",
    }


def first_difference(
    main: CachedModel, number: int, prompt: np.ndarray, expected: list[int], tokens: list[int]
) -> TextDifference:
    """Position of the first difference of two greedy texts, and the main model's logit margin there."""
    position = next(i for i, (a, b) in enumerate(zip(expected, tokens, strict=True)) if a != b)
    main.reset()
    logits = main.logits(np.concatenate([prompt, np.array(expected[:position], np.int64)]))[0]
    margin = float(logits[expected[position]] - logits[tokens[position]])
    near_tie = abs(margin) < NEAR_TIE * float(logits.std())
    return {"prompt": number + 1, "token": position + 1, "margin": margin, "near_tie": near_tie}


def judge_draws(method: CheckedMethod, cells: lossless_check.Cells) -> SampledRow | ComparedRow:
    """One row: whether the samples have the exact distribution."""
    drawn = [draw.tokens for draw in method.draws if draw]
    crashes = method.draws.count(None)
    verdict, compared = "crashes", {}
    if drawn:
        comparison = lossless_check.compare(drawn, cells)
        finds = lossless_check.detectable_total_variation(cells, len(drawn), ALPHA, POWER)
        compared = {**comparison._asdict(), "detectable_total_variation": finds}
        if comparison.p_value < ALPHA:
            verdict = "NOT lossless"
        elif not crashes:
            verdict = "not compared" if finds is None else "no difference found"
    row: SampledRow = {
        "path": method.name,
        "ours": method.ours,
        "requests": len(method.draws),
        "crashes": crashes,
        "crash": method.crash,
        "acceptance_rate": acceptance_rate(method.draws),
        "verdict": verdict,
        "holds": verdict == "no difference found",
    }
    return cast(ComparedRow, {**row, **compared}) if compared else row


def acceptance_rate(draws: list[Draw | None]) -> float | None:
    """Accepted / proposed draft tokens, None if none were proposed."""
    proposed = sum(draw.proposed for draw in draws if draw)
    return sum(draw.accepted for draw in draws if draw) / proposed if proposed else None
