"""Metrics of speculative decoding, one definition each.

After Leviathan et al. 2023 (arXiv 2211.17192) and Spec-Bench. A run has three numbers for each forward pass of the main
model after the prompt: `proposed[i]` draft tokens, `accepted[i]` of them, and `gained[i]` new tokens. Leaves of a draft
tree (drafting/tree.py) count as gained only.
"""

from collections.abc import Sequence


def acceptance_rate(proposed: Sequence[int], accepted: Sequence[int]) -> float | None:
    """Accepted draft tokens / proposed draft tokens, over all iterations, the last one included."""
    drafted = sum(proposed)
    return sum(accepted) / drafted if drafted else None


def per_token_acceptance(proposed: Sequence[int], accepted: Sequence[int]) -> float | None:
    """Leviathan's alpha: accepted / (accepted + iterations that ended in a rejection)."""
    judged = sum(accepted) + sum(n < k for k, n in zip(proposed, accepted, strict=True))
    return sum(accepted) / judged if judged else None


def position_acceptance(proposed: Sequence[int], accepted: Sequence[int]) -> list[float]:
    """For i = 1, 2, ...: the share of iterations that proposed an i-th draft token and accepted it."""
    shares = []
    for i in range(1, max(proposed, default=0) + 1):
        is_accepted = [n >= i for k, n in zip(proposed, accepted, strict=True) if k >= i]
        shares.append(sum(is_accepted) / len(is_accepted))
    return shares


def block_efficiency(gained: Sequence[int]) -> float | None:
    """New tokens per forward pass of the main model after the prompt: tau, from 1 to K + 1."""
    return sum(gained) / len(gained) if gained else None


def repetition(tokens: Sequence[int], n: int = 4) -> float:
    """1 - distinct n-grams / n-grams of the output: repetitive text inflates the acceptance rate."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def block_efficiency_at(alpha: float, draft_length: int) -> float:
    """tau for i.i.d. acceptance: (1 - alpha^(K+1)) / (1 - alpha) (Leviathan et al. 2023, equation 1)."""
    return float(sum(alpha**i for i in range(draft_length + 1)))


def predicted_speedup(tau: float, draft_length: int, cost_ratio: float, verify_ratio: float) -> float:
    """tau / (v(K) + K c): Leviathan et al. 2023, theorem 3.8, with a verification cost v(K)."""
    return tau / (verify_ratio + draft_length * cost_ratio)
