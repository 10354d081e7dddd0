"""Rejection sampling for speculative decoding, as functions on arrays.

Leviathan et al. 2023 (arXiv 2211.17192), Algorithm 1, and Chen et al. 2023 (arXiv 2302.01318), Algorithm 2, which was
found independently: `verify_tokens`. Sun et al. 2024 (arXiv 2403.10444), Algorithm 2, which accepts more tokens of the
same draft: `verify_block`. The engine calls `verify`.

Notation of the papers: p is the main model's next-token distribution, q the draft's, K the draft length; V is the
vocabulary size. A distribution is an array [V] of probabilities, float32 or float64, that sum to 1 within its
precision. Greedy decoding is not a special case: its distributions are 1 at one token and 0 elsewhere; `OneHot`
represents them without an array. `Sparse` holds those of few tokens only: of a truncated distribution, or of a draft
with a smaller vocabulary.

Draft tokens are accepted in order, each with probability min(1, p / q) of that token. The first rejected one is
replaced by the recovered token, sampled from norm(max(0, p - q)), and those after it are discarded. If all are
accepted, the bonus token is sampled from p. So every iteration adds one token of the main model to the accepted ones.

The output has exactly the distribution p, regardless of q (Leviathan et al., appendix A.1): q only affects the speed.
There are no models, timings, counters or prints in this module.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import numpy as np

BLOCK = 512  # probabilities per block sum in `draw`


class OneHot:
    """A distribution over `size` tokens that is 1 at `token`: greedy decoding, or prompt lookup."""

    __slots__ = ("size", "token")

    def __init__(self, token: int, size: int):
        self.token = int(token)
        self.size = size

    def __getitem__(self, token: int) -> float:
        return 1.0 if token == self.token else 0.0

    def __len__(self) -> int:
        return self.size

    def __array__(self, dtype: type | None = None, copy: bool | None = None) -> np.ndarray:
        array: np.ndarray = np.zeros(self.size, dtype or np.float32)
        array[self.token] = 1
        return array


class Sparse:
    """A distribution over `size` tokens that is 0 outside `tokens` (int64 [n], ascending), which have `probabilities`
    (float32 [n]): truncated by `top_k`, `top_p` or `min_p`, or of a draft with a smaller vocabulary."""

    __slots__ = ("probabilities", "size", "tokens")

    def __init__(self, tokens: np.ndarray, probabilities: np.ndarray, size: int):
        self.tokens = tokens
        self.probabilities = probabilities
        self.size = size

    def __getitem__(self, token: int) -> float:
        index = int(self.tokens.searchsorted(token))
        return float(self.probabilities[index]) if index < len(self.tokens) and self.tokens[index] == token else 0.0

    def __len__(self) -> int:
        return self.size

    def __array__(self, dtype: type | None = None, copy: bool | None = None) -> np.ndarray:
        array: np.ndarray = np.zeros(self.size, dtype or np.float32)
        array[self.tokens] = self.probabilities
        return array


Probabilities: TypeAlias = np.ndarray | OneHot | Sparse


class Acceptance(NamedTuple):
    """The result of one iteration: keep the first `accepted` draft tokens, then add the recovered or bonus `token`."""

    accepted: int
    token: int


def draw(probabilities: Probabilities, random: np.random.Generator) -> int:
    """Sample a token from `probabilities` [V] with one random number; a token of probability 0 is never sampled.

    Inverse transform sampling in two levels: block sums select the block, and only that block is summed token by
    token, at a tenth of the cost of summing a vocabulary of 150,000.

    Raises ValueError if the probabilities are all 0 or contain NaN.
    """
    if isinstance(probabilities, OneHot):
        return probabilities.token
    if isinstance(probabilities, Sparse):
        return int(probabilities.tokens[draw(probabilities.probabilities, random)])
    sums = np.add.reduceat(probabilities, _block_starts(len(probabilities))).tolist()
    ends = list(accumulate(sums))
    if not ends[-1] > 0:
        raise ValueError(f"cannot sample a token from probabilities that sum to {ends[-1]}")
    position = random.random() * ends[-1]
    block = bisect_right(ends, position)
    before = ends[block - 1] if block else 0.0
    cumulative = probabilities[block * BLOCK : (block + 1) * BLOCK].cumsum(dtype=np.float64)
    token = int(cumulative.searchsorted(position - before, side="right"))
    if token == len(cumulative):  # a float32 block sum exceeds the sum of its tokens: take the last one above 0
        token = int(cumulative.searchsorted(cumulative[-1], side="left"))
    return block * BLOCK + token


@cache
def _block_starts(size: int) -> np.ndarray:
    return np.arange(0, size, BLOCK)


def residual(p: Probabilities, q: Probabilities) -> Probabilities:
    """Return norm(max(0, p - q)) [V], the distribution of the recovered token that replaces a rejected one.

    Returns p if p exceeds q nowhere, which happens only when equal distributions differ by rounding.
    """
    if isinstance(p, OneHot):  # p exceeds q at that token only
        return p
    excess = _excess(p, q)
    values = _values(excess)
    total = values.sum()
    if not total > 0:
        return p
    values /= total
    return excess


def _excess(p: Probabilities, q: Probabilities, weight: float = 1.0) -> np.ndarray | Sparse:
    """max(0, weight * p - q) [V], a new array."""
    if isinstance(p, Sparse):
        return Sparse(p.tokens, np.maximum(p.probabilities * weight - _at(q, p.tokens), 0), p.size)
    p = np.asarray(p) * weight
    if isinstance(q, OneHot):
        p[q.token] = 0  # a probability does not exceed 1
    elif isinstance(q, Sparse):
        p[q.tokens] = np.maximum(p[q.tokens] - q.probabilities, 0)
    else:
        p -= q
        np.maximum(p, 0, out=p)
    return p


def _values(excess: np.ndarray | Sparse) -> np.ndarray:
    """The numbers of which some exceed 0, as a view."""
    return excess.probabilities if isinstance(excess, Sparse) else excess


def _at(q: Probabilities, tokens: np.ndarray) -> np.ndarray:
    """The probabilities of `tokens` (int64 [n], ascending) in `q`."""
    if isinstance(q, OneHot):
        return (tokens == q.token).astype(np.float32)
    if isinstance(q, Sparse):
        places = np.minimum(q.tokens.searchsorted(tokens), len(q.tokens) - 1)
        return np.where(q.tokens[places] == tokens, q.probabilities[places], np.float32(0))
    return q[tokens]


def verify_tokens(
    drafted: Sequence[int],
    q: Sequence[Probabilities],
    p: Callable[[int], Probabilities],
    random: np.random.Generator,
) -> Acceptance:
    """Accept or reject the draft tokens in order, then sample the recovered or bonus token from the main model.

    `q[i]` [V] is the distribution that the draft sampled `drafted[i]` from. `p(i)` returns the main model's
    distribution [V] after the first i draft tokens; it is called in order, up to the first rejection. Drafting
    may stop because of the tokens drafted so far, the last one included, but every token that was sampled must be
    verified here: discarding one would change the distribution of the output.

    Raises ValueError if a draft token has probability 0 in the draft's distribution.
    """
    for i, (x, q_i) in enumerate(zip(drafted, q, strict=True)):
        p_i = p(i)
        p_x, q_x = float(p_i[x]), float(q_i[x])
        if not q_x > 0:
            raise ValueError(f"draft token {x} at index {i} has probability {q_x} in the draft's distribution")
        if random.random() >= min(1.0, p_x / q_x):
            return Acceptance(i, draw(residual(p_i, q_i), random))
    return Acceptance(len(drafted), draw(p(len(drafted)), random))


def verify_block(
    drafted: Sequence[int],
    q: Sequence[Probabilities],
    p: Callable[[int], Probabilities],
    random: np.random.Generator,
) -> Acceptance:
    """As `verify_tokens`, but decide on the draft tokens together: the same distribution of the output, from as many
    draft tokens or more.

    Sun et al. 2024, Algorithm 2. `verify_tokens` accepts the first i tokens with the probability w(i) = w(i - 1)
    min(1, p / q); here it is min(1, w(i - 1) p / q), so a token that the main model prefers makes up for one that it
    does not. That holds for drafts of any length that depends on their tokens, too (by induction from the last token).

    `p` is called in order, for all draft tokens unless the main model excludes one: its weight, and those after it, are
    0. Raises ValueError if a draft token has probability 0 in the draft's distribution.
    """
    rows: list[Probabilities] = []
    weights = [1.0]
    for i, (x, q_i) in enumerate(zip(drafted, q, strict=True)):
        q_x = float(q_i[x])
        if not q_x > 0:
            raise ValueError(f"draft token {x} at index {i} has probability {q_x} in the draft's distribution")
        rows.append(p(i))
        weights.append(min(1.0, weights[i] * float(rows[i][x]) / q_x))
        if not weights[-1]:
            break
    n = len(drafted)
    if len(weights) > n and (weights[n] == 1 or random.random() < weights[n]):
        return Acceptance(n, draw(p(n), random))
    i = len(rows) - 1
    while weights[i] < 1:  # the longest first; weights[0] is 1
        number = random.random()
        if number < weights[i]:  # otherwise rejected, whatever the sum is
            excess = _excess(rows[i], q[i], weights[i])
            total = float(_values(excess).sum())
            if number * (total + 1 - weights[i]) < total:
                return Acceptance(i, draw(excess, random))
        i -= 1
    return Acceptance(i, draw(residual(rows[i], q[i]), random))


def verify_match(drafted: Sequence[int], p: Callable[[int], Probabilities], random: np.random.Generator) -> Acceptance:
    """As `verify_tokens` for draft tokens that are not random: sample from the main model as long as that gives them.

    The text is that of plain decoding with the same random numbers, and each token is accepted with the same
    probability p(x) as by rejection sampling.
    """
    for i, x in enumerate(drafted):
        token = draw(p(i), random)
        if token != x:
            return Acceptance(i, token)
    return Acceptance(len(drafted), draw(p(len(drafted)), random))


def verify(
    drafted: Sequence[int],
    q: Sequence[Probabilities],
    p: Callable[[int], Probabilities],
    random: np.random.Generator,
) -> Acceptance:
    """Verify by `verify_match` if no draft token is random, else by `verify_block`; arguments as in `verify_tokens`."""
    if all(isinstance(q_i, OneHot) for q_i in q):
        return verify_match(drafted, p, random)
    return verify_block(drafted, q, p, random)


def speculative_decoding(
    main: Callable[[list[int]], np.ndarray],
    draft: Callable[[list[int]], np.ndarray],
    tokens: Sequence[int],
    new_tokens: int,
    K: int,
    random: np.random.Generator,
) -> Iterator[tuple[list[int], int]]:
    """Yield (new tokens, number accepted from the draft) for each iteration, `new_tokens` tokens in total.

    The whole method in ten lines, for models that are functions from tokens to the next-token distribution [V]. It
    recomputes everything each time; `decoder.py` does the same with a KV cache.
    """
    tokens, length = list(tokens), len(tokens) + new_tokens
    while len(tokens) < length:
        drafted: list[int] = []
        q: list[np.ndarray] = []
        for _ in range(min(K, length - len(tokens) - 1)):  # the main model adds one more
            q.append(draft(tokens + drafted))
            drafted.append(draw(q[-1], random))

        accepted, token = verify_tokens(drafted, q, lambda i: main(tokens + drafted[:i]), random)  # noqa: B023
        gained = [*drafted[:accepted], token]
        tokens += gained
        yield gained, accepted
