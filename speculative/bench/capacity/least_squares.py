"""Least squares without negative coefficients: costs are never below 0."""

import math
from itertools import combinations

import numpy as np


def non_negative(columns: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The x >= 0 float64 [m] with the least |columns x - values|, for few `columns` [n, m] and `values` [n]."""
    m = columns.shape[1]
    best, least = np.zeros(m), math.inf
    for n in range(1, m + 1):
        for chosen in map(list, combinations(range(m), n)):
            found = np.zeros(m)
            found[chosen] = np.linalg.lstsq(columns[:, chosen], values, rcond=None)[0]
            error = float(np.square(columns @ found - values).sum())
            if found.min() >= 0 and error < least:
                best, least = found, error
    return best
