"""Latency of a forward pass by its number of tokens: measured once, then updated while decoding."""

import functools
from bisect import bisect_right
from collections.abc import Mapping
from typing import overload

import numpy as np

TIME_WEIGHT = 0.1  # weight of the newest time: load, heat and longer contexts change the costs
MIN_TIME_WEIGHT = 0.02  # least weight for other numbers of tokens; more for near ones
KNOTS = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048])
BOUNDS = [0, *KNOTS.tolist()]
SIZES = np.arange(KNOTS[-1] + 1)


def excess(seen: float, expected: float) -> float:
    """Relative excess of the measured time over the expected one; outliers count as at most twice as long."""
    return min(max(seen / expected, 0.5), 2.0) - 1 if expected else 0.0


def time_weights(nearness: np.ndarray, weight: float = TIME_WEIGHT) -> np.ndarray:
    """The weights of a measured time for costs, by their `nearness` to it, from 0 to 1 (its own)."""
    return np.maximum(weight * nearness, MIN_TIME_WEIGHT)


def monotone(measured: Mapping[int, float]) -> tuple[list[int], np.ndarray]:
    """The measured numbers of tokens and their seconds, in ascending order.

    More tokens never cost less. If they seem to, the smaller size was measured under load, and is lowered.
    """
    n = sorted(measured)
    return n, np.minimum.accumulate([measured[i] for i in reversed(n)])[::-1]


class LatencyTable:
    """Seconds of a forward pass over 0, 1, ... tokens, for one request: the sizes are few, and each recurs soon.

    Each size is learned by itself, and a time corrects those of fewer tokens at once. `LatencyCurve` is for batches,
    where most sizes never recur. It learns by knots, and a slowdown that does not recur fades.
    """

    def __init__(self, seconds: np.ndarray, spread: float):
        """`spread`: weight of a time for the next number of tokens, relative to its own; 1: equal weights."""
        self.seconds = seconds
        sizes = np.arange(len(seconds))
        self._nearness = spread ** np.abs(sizes - sizes[:, None])

    def update(self, n: int, seconds: float, weight: float = TIME_WEIGHT) -> None:
        """Record the time of n tokens. Outliers count as at most twice the expected time."""
        self.seconds *= 1 + time_weights(self._nearness[n], weight) * excess(seconds, float(self.seconds[n]))
        # Fewer tokens never cost more: lowers sizes that were measured under load and have not been seen since.
        np.minimum(self.seconds[:n], self.seconds[n], out=self.seconds[:n])


class LatencyCurve:
    """Seconds of a forward pass over n tokens; `update` tracks changes through load, heat and longer contexts."""

    DECAY = 0.002  # decay of the slowdown of other sizes that this one does not show, so that they are tried again

    def __init__(self, measured: Mapping[int, float]):
        """`measured` maps numbers of tokens, including 1, to seconds; extrapolated linearly beyond the largest."""
        n, seconds = monotone(measured)
        measured_knots = np.interp(KNOTS, n, seconds)
        if len(n) > 1:
            slope = (seconds[-1] - seconds[-2]) / (n[-1] - n[-2])
            measured_knots += slope * np.maximum(KNOTS - n[-1], 0)
        self._measured: list[float] = measured_knots.tolist()
        self._change = [1.0] * len(KNOTS)  # learned / measured
        self._table: np.ndarray | None = None  # of SIZES, computed when it is needed
        self._learn()

    @overload
    def __call__(self, n: int) -> float: ...

    @overload
    def __call__(self, n: np.ndarray) -> np.ndarray: ...

    def __call__(self, n: np.ndarray | int) -> np.ndarray | float:
        """Seconds of forward passes over n tokens; 0 for n = 0."""
        if isinstance(n, np.ndarray):
            return np.interp(n, BOUNDS, self._learned)
        return _interpolate(n, self._learned)

    @property
    def seconds(self) -> np.ndarray:
        """Seconds of forward passes over 0, 1, ... tokens."""
        if self._table is None:
            self._table = np.interp(SIZES, BOUNDS, self._learned)
        return self._table

    def measured(self, n: int) -> float:
        """Seconds of a forward pass over n tokens as measured, before any update."""
        return _interpolate(n, [0.0, *self._measured])

    def update(self, n: int, seconds: float) -> None:
        """Record a forward pass over n tokens. Outliers count as at most twice the expected time.

        Plain numbers instead of arrays: the main model has evicted the code of numpy's functions from the CPU caches.
        """
        expected = self(n)
        if expected > 0:
            here, relative = _interpolate(n, [1.0, *self._change]), excess(seconds, expected)
            self._change = [
                (change - self.DECAY * max(change - here, 0.0)) * (1 + weight * relative)
                for change, weight in zip(self._change, _weights(n), strict=True)
            ]
            self._learn()

    def max_tokens(self, seconds: float, other_tokens: int) -> int:
        """Number of tokens that fit into a forward pass of `seconds` besides `other_tokens` tokens."""
        return int(np.count_nonzero(self.seconds[other_tokens + 1 :] <= seconds))

    def _learn(self) -> None:
        learned = [seconds * change for seconds, change in zip(self._measured, self._change, strict=True)]
        self._learned = [0.0, *learned]  # of BOUNDS
        self._table = None


def _interpolate(n: int, values: list[float]) -> float:
    """The value at n between those of BOUNDS; beyond the last one, that of the last one."""
    right = bisect_right(BOUNDS, n)
    if right == len(BOUNDS):
        return values[-1]
    left = BOUNDS[right - 1]
    return values[right - 1] + (values[right] - values[right - 1]) * (n - left) / (BOUNDS[right] - left)


@functools.cache
def _weights(n: int) -> list[float]:
    """The weights of a pass over n tokens for KNOTS: by their nearness to n."""
    weights: list[float] = time_weights(0.25 ** np.abs(np.log2(KNOTS / n))).tolist()
    return weights
