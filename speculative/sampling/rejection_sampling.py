"""Speculative sampling on arrays and functions: Leviathan et al. 2023 (arXiv 2211.17192), Algorithm 1, and
Chen et al. 2023 (arXiv 2302.01318), Algorithm 2, which found it at the same time.

The papers' letters: p is the main model's distribution of the next token, q the draft's, K how many tokens are drafted;
V is the size of the vocabulary. A distribution is an array [V] of probabilities, float32 or float64, that sum to 1 as
far as its precision goes. Greedy decoding is no special case: its distributions are 1 at one token and 0 elsewhere;
`OneHot` is such a one without the array.

What comes out is distributed exactly as if every token had been drawn from p, whatever q is (Leviathan et al.,
appendix A.1): q decides the speed only. Nothing here knows what a model is, keeps a clock, counts or prints.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

BLOCK = 512  # probabilities summed at once when drawing


class OneHot:
    """A distribution over `size` tokens that is 1 at `token`: greedy decoding, or a draft copied from the text."""

    __slots__ = ("size", "token")

    def __init__(self, token: int, size: int):
        self.token = int(token)
        self.size = size

    def __getitem__(self, token: int) -> float:
        return 1.0 if token == self.token else 0.0

    def __len__(self) -> int:
        return self.size

    def __array__(self, dtype: type | None = None, copy: bool | None = None) -> np.ndarray:
        array = np.zeros(self.size, dtype or np.float32)
        array[self.token] = 1
        return array


class Acceptance(NamedTuple):
    """What one iteration gains: the first `accepted` drafted tokens, and `token`, the main model's own, behind them."""

    accepted: int
    token: int


def draw(probabilities: np.ndarray | OneHot, random: np.random.Generator) -> int:
    """Draw a token from `probabilities` [V] with one random number; a token of probability 0 is never drawn.

    Inverse of the cumulative distribution, in two levels: block sums find the block, and only that block is added up
    token by token, which costs a tenth of adding up a vocabulary of 150,000.

    Raises ValueError if there is nothing to draw: probabilities that are all 0, or not numbers.
    """
    if isinstance(probabilities, OneHot):
        return probabilities.token
    blocks = np.add.reduceat(probabilities, np.arange(0, len(probabilities), BLOCK)).cumsum(dtype=np.float64)
    if not blocks[-1] > 0:
        raise ValueError(f"there is no token to draw from probabilities that sum to {blocks[-1]}")
    position = random.random() * blocks[-1]
    block = int(blocks.searchsorted(position, side="right"))
    before = blocks[block - 1] if block else 0.0
    inside = probabilities[block * BLOCK : (block + 1) * BLOCK].cumsum(dtype=np.float64)
    # A block sum in float32 may exceed what its tokens add up to: then it is the block's last possible token.
    token = min(inside.searchsorted(position - before, side="right"), inside.searchsorted(inside[-1], side="left"))
    return block * BLOCK + int(token)


def residual(p: np.ndarray | OneHot, q: np.ndarray | OneHot) -> np.ndarray | OneHot:
    """Return norm(max(0, p - q)) [V], what a rejected token is replaced from.

    Where p exceeds q nowhere, which only the rounding of equal distributions brings about, that is p itself.
    """
    if isinstance(p, OneHot):  # there alone p exceeds q
        return p
    excess = p - np.asarray(q)
    np.maximum(excess, 0, out=excess)
    total = excess.sum()
    return excess / total if total > 0 else p


def verify(
    drafted: Sequence[int],
    q: Sequence[np.ndarray | OneHot],
    p: Callable[[int], np.ndarray | OneHot],
    random: np.random.Generator,
) -> Acceptance:
    """Accept or reject the drafted tokens, one after the other, and draw the main model's own token behind them.

    `q[i]` [V] is what the draft drew `drafted[i]` from. `p(i)` returns the main model's distribution [V] after the
    first i drafted tokens; it is asked in order, and not beyond the first rejection. How many tokens are drafted may
    depend on what they are, the last one included, as long as none is taken back: once drawn, a token goes in here.

    Raises ValueError if the draft could not have drawn a token it is said to have drafted.
    """
    for i, (x, q_i) in enumerate(zip(drafted, q, strict=True)):
        p_i = p(i)
        p_x, q_x = float(p_i[x]), float(q_i[x])
        if not q_x > 0:
            raise ValueError(f"drafted token {x} at place {i} has the probability {q_x} in the draft's distribution")
        if random.random() >= min(1.0, p_x / q_x):
            return Acceptance(i, draw(residual(p_i, q_i), random))
    return Acceptance(len(drafted), draw(p(len(drafted)), random))


def speculative_decoding(
    main: Callable[[list[int]], np.ndarray],
    draft: Callable[[list[int]], np.ndarray],
    tokens: Sequence[int],
    new_tokens: int,
    K: int,
    random: np.random.Generator,
) -> Iterator[tuple[list[int], int]]:
    """Yield what each iteration gains: (tokens, how many of them the draft proposed), `new_tokens` in all.

    The whole method in ten lines, over models that are functions from tokens to the distribution [V] of the next one.
    It computes everything anew; `decoder.py` is the same over models with a cache.
    """
    tokens, length = list(tokens), len(tokens) + new_tokens
    while len(tokens) < length:
        drafted, q = [], []
        for _ in range(min(K, length - len(tokens) - 1)):  # the main model adds one
            q.append(draft(tokens + drafted))
            drafted.append(draw(q[-1], random))

        accepted, token = verify(drafted, q, lambda i: main(tokens + drafted[:i]), random)  # noqa: B023
        gained = [*drafted[:accepted], token]
        tokens += gained
        yield gained, accepted
