"""Least squares without negative coefficients: costs are never below 0."""

import math
from itertools import combinations

import numpy as np


def non_negative(columns: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The x >= 0 float64 [m] with the least |columns x - values|, for few `columns` [n, m] and `values` [n]."""
    m = columns.shape[1]
    best, best_error = np.zeros(m), math.inf
    for n in range(1, m + 1):
        for columns_used in map(list, combinations(range(m), n)):
            solution = np.zeros(m)
            solution[columns_used] = np.linalg.lstsq(columns[:, columns_used], values, rcond=None)[0]
            error = float(np.square(columns @ solution - values).sum())
            if solution.min() >= 0 and error < best_error:
                best, best_error = solution, error
    return best
