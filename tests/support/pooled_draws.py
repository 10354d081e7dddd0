"""Pooled comparisons of samples: they detect a small error in all cases that no single case shows."""

import math
from statistics import NormalDist

import numpy as np

from speculative.sampling.lossless_check import chi_square_p_value

FALSE_ALARM = 1e-5  # the probability that correct samples fail the pooled test


def pooled(p_values):
    """The p-value of all of them together: the sum of their z-values (Stouffer et al. 1949)."""
    z = [-NormalDist().inv_cdf(min(max(p, 1e-15), 1 - 1e-15)) for p in p_values]
    return NormalDist().cdf(-sum(z) / math.sqrt(len(z)))


def distance(right, wrong):
    """The total variation distance between two distributions."""
    return sum(abs(right.get(cell, 0.0) - wrong.get(cell, 0.0)) for cell in {*right, *wrong}) / 2


def times_found(right, drawn_from, draws, repetitions=50, below=FALSE_ALARM):
    """How often samples from each of the cells `drawn_from` fail the pooled comparison with the correct cells."""
    random = np.random.default_rng(0)
    pairs = list(zip(right, drawn_from, strict=True))
    return sum(pooled(_p_value_of_draws(*pair, draws, random) for pair in pairs) < below for _ in range(repetitions))


def _p_value_of_draws(right, drawn_from, draws, random):
    probabilities = np.array([drawn_from.get(cell, 0.0) for cell in right])
    seen = random.multinomial(draws, probabilities / probabilities.sum())
    return chi_square_p_value(seen, np.array(list(right.values())))
