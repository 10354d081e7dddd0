"""Statistical test of losslessness: sampled sequences compared with the exact joint distribution of the main model.

The first token is always distributed correctly, because the main model samples it without a draft. The errors of a
wrong sampler are in the later tokens and in their dependence. So whole sequences are counted and compared with

    P(x1, x2, x3) = p(x1) p(x2 | x1) p(x3 | x1, x2),

each factor computed from the main model's logits, without a draft and without a cache.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, Protocol

import numpy as np

from speculative.sampling.distribution import Distribution
from speculative.sampling.params import SamplingParams
from speculative.sampling.rejection_sampling import Probabilities

OTHER = -1
"""Stands for all next tokens that are too rare to be listed individually."""

EXPECTED = 10  # least expected draws in a cell of the chi-square test; rarer cells are merged
MAX_PREFIXES = 20_000  # most prefixes whose next-token distribution is computed

Cells = dict[tuple[int, ...], float]
"""Probabilities of mutually exclusive sequences, which sum to 1. A sequence that ends in OTHER stands for all with that
prefix whose next token is not listed after it."""

NextToken = Callable[[tuple[int, ...]], Probabilities]
"""The distribution [V] of the token after those generated so far."""


class Comparison(NamedTuple):
    """Comparison of draws with an exact distribution."""

    draws: int
    cells: int
    total_variation: float  # half the sum of |share of the draws - probability|, from 0 to 1
    noise: float  # expected total variation of as many draws from the exact distribution
    impossible: int  # draws that have probability 0
    p_value: float  # of a chi-square test against the exact distribution


class Model(Protocol):
    def reset(self) -> None:
        """Clear the KV cache."""

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Logits float32 [1, V] after `tokens` (int64 [n])."""


def main_alone(main: Model, prompt: np.ndarray, params: SamplingParams) -> NextToken:
    """Return the `next_token` for `exact_joint`: the main model's distribution after `prompt` (token ids int64 [n]) and
    the tokens generated so far, processed as `params` say and computed without a cache."""
    transform = Distribution(params)

    def next_token(generated: tuple[int, ...]) -> Probabilities:
        main.reset()
        tokens = np.array(generated, np.int64)
        logits = main.logits(np.concatenate([prompt, tokens]))[0]
        return transform(logits, prompt, tokens)

    return next_token


def exact_joint(
    next_token: NextToken,
    length: int,
    resolution: float = 0.0,
    stop_token_ids: Collection[int] = (),
) -> Cells:
    """Return the joint distribution of the first `length` tokens, or fewer if a stop token ends the sequence.

    `next_token(tokens)` is the distribution [V] after the tokens generated so far. Sequences less probable than
    `resolution` are merged into an OTHER, so that the number of cells, and of calls to `next_token`, does not grow with
    the vocabulary: at most length / resolution sequences are listed.

    Raises ValueError if more than 20,000 calls to `next_token` would be needed.
    """
    cells: Cells = {}
    unfinished: Cells = {(): 1.0}
    for _ in range(length):
        if len(unfinished) > MAX_PREFIXES:
            raise ValueError(
                f"{len(unfinished)} prefixes would have to be computed, more than {MAX_PREFIXES}: "
                "use fewer tokens, a smaller top_k or top_p, or a coarser resolution"
            )
        longer: Cells = {}
        for prefix, probability in unfinished.items():
            p = np.asarray(next_token(prefix), np.float64)
            joint = p * (probability / p.sum())
            is_listed = (joint > 0) & (joint >= resolution)
            for token in np.flatnonzero(is_listed).tolist():
                ends = token in stop_token_ids
                tokens = (*prefix, token)
                (cells if ends else longer)[tokens] = float(joint[token])
            if not is_listed.all():
                others = (*prefix, OTHER)
                cells[others] = float(joint[~is_listed].sum())
        unfinished = longer
    return cells | unfinished


def cell_of(tokens: Iterable[int], cells: Cells) -> tuple[int, ...]:
    """The cell that a sampled sequence belongs to."""
    tokens = tuple(tokens)
    if tokens in cells:
        return tokens
    ends = ((*tokens[:i], OTHER) for i in range(len(tokens) - 1, -1, -1))
    return next(end for end in ends if end in cells)


def compare(drawn: Collection[Iterable[int]], cells: Cells) -> Comparison:
    """Compare sampled sequences with the exact distribution, at the same length. There must be at least one."""
    counts = Counter(cell_of(tokens, cells) for tokens in drawn)
    probabilities = np.array(list(cells.values()))
    observed = np.array([counts[cell] for cell in cells])
    draws = int(observed.sum())
    impossible = int(observed[probabilities == 0].sum())
    return Comparison(
        draws=draws,
        cells=len(cells),
        total_variation=float(np.abs(observed / draws - probabilities).sum() / 2),
        noise=expected_total_variation(probabilities, draws),
        impossible=impossible,
        p_value=0.0 if impossible else chi_square_p_value(observed, probabilities),
    )


def expected_total_variation(probabilities: np.ndarray, draws: int) -> float:
    """The expected total-variation distance between `draws` draws and the distribution [n] they come from.

    Exact: De Moivre's mean absolute deviation of a binomial count, 2 m (1 - p) C(N, m) p^m (1 - p)^(N - m) with
    m = floor(N p) + 1 (Diaconis and Zabell 1991, "Closed form summation for classical distributions").
    """
    total = 0.0
    for p in probabilities[(probabilities > 0) & (probabilities < 1)].tolist():
        m = math.floor(draws * p) + 1
        if m <= draws:
            log_chance = _log_choose(draws, m) + m * math.log(p) + (draws - m) * math.log1p(-p)
            total += 2 * m * (1 - p) * math.exp(log_chance)
    return total / draws / 2


def chi_square_p_value(observed: np.ndarray, probabilities: np.ndarray) -> float:
    """The p-value of Pearson's chi-square test that the counts `observed` [n] are draws from `probabilities` [n].

    The rarest cells are merged until each has 10 expected draws, which the chi-square approximation needs. If all but
    the likeliest have fewer together, the p-value is that of an exact binomial test, twice the smaller tail.
    """
    draws = int(observed.sum())
    order, starts = _cells_of_test(probabilities, draws)
    observed, probabilities = (np.add.reduceat(each[order], starts) for each in (observed, probabilities))
    if (rare := _rare_cell(probabilities, draws)) is not None:
        return _binomial_p_value(int(observed[rare]), draws, float(probabilities[rare]))
    expected = probabilities * draws
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return _chi_square_above(statistic, len(expected) - 1)


def detectable_total_variation(cells: Cells, draws: int, alpha: float, power: float = 0.9) -> float | None:
    """The smallest total-variation distance at which the test detects any wrong distribution: with `draws` draws, the
    p-value is below `alpha` with probability `power` or more. The distance is between cells of the test: differences
    within a cell, among the rarest sequences, go undetected. None if there is only one cell, so nothing to compare.

    The test's noncentrality for draws from q is N sum (q - p)^2 / p, for a distance d at least 4 N d^2 (Cauchy-Schwarz;
    as little where |q - p| is proportional to p).
    """
    probabilities = np.array(list(cells.values()))
    order, starts = _cells_of_test(probabilities, draws)
    of_test = np.add.reduceat(probabilities[order], starts)
    degrees = len(of_test) - 1
    if not degrees:
        return None
    if (rare := _rare_cell(of_test, draws)) is not None:
        return _detectable_by_binomial(float(of_test[rare]), draws, alpha, power)
    critical = _smallest(lambda x: _chi_square_above(x, degrees) <= alpha)
    noncentrality = _smallest(lambda x: _noncentral_chi_square_above(critical, degrees, x) >= power)
    return min(1.0, math.sqrt(noncentrality / (4 * draws)))


def _cells_of_test(probabilities: np.ndarray, draws: int) -> tuple[np.ndarray, np.ndarray]:
    """The cells [n] by descending probability, and where each cell of the test begins in that order."""
    order = np.argsort(-probabilities)
    expected = probabilities[order] * draws
    at_most = expected[::-1].cumsum()[::-1]  # a cell and all rarer ones
    separate = max(1, int(np.count_nonzero((expected >= EXPECTED) & (at_most - expected >= EXPECTED))))
    return order, np.arange(separate + 1) if separate < len(expected) else np.arange(separate)


def _rare_cell(of_test: np.ndarray, draws: int) -> int | None:
    """The index of the rarer of two cells of the test, which have the probabilities `of_test`, if it has too few
    expected draws for a chi-square test; else None."""
    rarer = int(of_test.argmin())
    return rarer if len(of_test) == 2 and of_test[rarer] * draws < EXPECTED else None


def _binomial_below(k: int, draws: int, p: float) -> float:
    """The probability of less than `k` of `draws` draws that each have the probability `p`."""
    if p <= 0 or p >= 1:
        return float(k > (draws if p >= 1 else 0))
    return min(
        1.0, sum(math.exp(_log_choose(draws, i) + i * math.log(p) + (draws - i) * math.log1p(-p)) for i in range(k))
    )


def _binomial_p_value(seen: int, draws: int, p: float) -> float:
    """Two-sided: twice the smaller tail."""
    upper = max(0.0, 1 - _binomial_below(seen, draws, p))
    return min(1.0, 2 * min(_binomial_below(seen + 1, draws, p), upper))


def _detectable_by_binomial(p: float, draws: int, alpha: float, power: float) -> float | None:
    """`detectable_total_variation` of a cell with probability `p` and the rest."""
    mean = math.ceil(draws * p)
    above = next((k for k in range(mean, draws + 1) if 2 * (1 - _binomial_below(k, draws, p)) <= alpha), None)
    below = max((k for k in range(mean) if 2 * _binomial_below(k + 1, draws, p) <= alpha), default=-1)
    if above is None:
        return None

    def is_detected(distance: float) -> bool:
        too_often = 1 - _binomial_below(above, draws, p + distance) >= power
        return too_often and (distance > p or _binomial_below(below + 1, draws, p - distance) >= power)

    return min(1.0, _smallest(is_detected))


def _smallest(holds: Callable[[float], bool]) -> float:
    """The smallest positive number for which `holds` is true; it must be true for all larger ones."""
    low, high = 0.0, 1.0
    while not holds(high):
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _chi_square_above(x: float, degrees: int) -> float:
    """The probability that a chi-square variable with `degrees` degrees of freedom is at least `x` (Abramowitz and
    Stegun 1964, 26.4.4 and 26.4.5)."""
    if x <= 0 or degrees == 0:
        return 1.0
    half = x / 2
    first = degrees % 2 / 2  # terms half^i e^-half / i! for i = 0, 1, ... or 1/2, 3/2, ...
    terms = (
        math.exp((first + i) * math.log(half) - half - math.lgamma(first + i + 1))
        for i in range((degrees + 1) // 2 - (degrees % 2))
    )
    tail = math.erfc(math.sqrt(half)) if degrees % 2 else 0.0
    return min(1.0, tail + math.fsum(terms))


def _noncentral_chi_square_above(x: float, degrees: int, noncentrality: float) -> float:
    """The probability that a noncentral chi-square variable is at least `x`: a Poisson mixture of central ones, each
    computed from the one with two degrees of freedom less (Abramowitz and Stegun 1964, 26.4.25 and 26.4.8)."""
    half, mean = x / 2, noncentrality / 2
    above, total = _chi_square_above(x, degrees), 0.0
    for j in range(int(mean + 10 * math.sqrt(mean)) + 30):
        total += above * math.exp(j * math.log(mean) - mean - math.lgamma(j + 1))
        shape = degrees / 2 + j
        above += math.exp(shape * math.log(half) - half - math.lgamma(shape + 1))
    return min(1.0, total)


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
