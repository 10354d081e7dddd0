"""Latency of a forward pass by its number of tokens: measured once, then updated while decoding."""

from collections.abc import Mapping
from typing import overload

import numpy as np

KNOTS = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048])


def excess(seen: float, expected: float) -> float:
    """By which share the measured time exceeds the expected one; outliers count as at most twice as long."""
    return min(max(seen / expected, 0.5), 2.0) - 1 if expected else 0.0


class LatencyCurve:
    """Seconds of a forward pass over n tokens; `update` tracks changes through load, heat and longer contexts."""

    CLOCK = 0.1  # weight of the newest time
    CLOCK_OTHERS = 0.02  # least weight for other numbers of tokens; more for near ones
    FADE = 0.002  # decay of the slowdown of other sizes that this one does not show, so that they are tried again

    def __init__(self, measured: Mapping[int, float]):
        """`measured` maps numbers of tokens, 1 included, to seconds; extrapolated linearly beyond the largest.

        More tokens never cost less: if they seem to, the smaller size was measured under load, and is lowered.
        """
        n = sorted(measured)
        seconds = np.minimum.accumulate([measured[i] for i in reversed(n)])[::-1]
        self._measured = np.interp(KNOTS, n, seconds)
        if len(n) > 1:
            slope = (seconds[-1] - seconds[-2]) / (n[-1] - n[-2])
            self._measured += slope * np.maximum(KNOTS - n[-1], 0)
        self._change = np.ones(len(KNOTS))  # learned / measured
        self._of = self._table()

    @overload
    def __call__(self, n: int) -> np.float64: ...
    @overload
    def __call__(self, n: np.ndarray) -> np.ndarray: ...
    def __call__(self, n: np.ndarray | int) -> np.ndarray | np.float64:
        """Seconds of forward passes over n tokens; 0 for n = 0."""
        return self._of[np.minimum(n, KNOTS[-1])]

    def measured(self, n: int) -> float:
        """Seconds of a forward pass over n tokens as measured, before any update."""
        return float(np.interp(n, KNOTS, self._measured))

    def update(self, n: int, seconds: float) -> None:
        """Record a forward pass over n tokens. Outliers count as at most twice the expected time."""
        expected = self(n)
        if expected > 0:
            self._change -= self.FADE * np.maximum(self._change - np.interp(n, KNOTS, self._change), 0)
            weight = np.maximum(self.CLOCK * 0.25 ** np.abs(np.log2(KNOTS / n)), self.CLOCK_OTHERS)
            self._change *= 1 + weight * excess(seconds, expected)
            self._of = self._table()

    def most(self, seconds: float, beside: int) -> int:
        """How many more tokens fit into a forward pass of `seconds` that already has `beside` tokens."""
        return int(np.count_nonzero(self._of[beside + 1 :] <= seconds))

    def _table(self) -> np.ndarray:
        """Seconds of forward passes over 0, 1, ... tokens."""
        return np.concatenate(([0.0], np.interp(np.arange(1, KNOTS[-1] + 1), KNOTS, self._measured * self._change)))
