"""Latency of a forward pass by its number of tokens: measured once, then updated while decoding.

In plain numbers instead of arrays: the main model's forward pass evicts the code of numpy's functions from the CPU
caches, so that the first call of each takes longer than the whole calculation.
"""

import functools
import math
from bisect import bisect_right
from collections.abc import Mapping

import numpy as np

TIME_WEIGHT = 0.1  # weight of the newest time: load, heat and longer contexts change the costs
MIN_TIME_WEIGHT = 0.02  # least weight for other numbers of tokens; more for near ones
KNOTS = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048])
BOUNDS = [0, *KNOTS.tolist()]


def excess(seen: float, expected: float) -> float:
    """Relative excess of the measured time over the expected one; outliers count as at most twice as long."""
    return min(max(seen / expected, 0.5), 2.0) - 1 if expected else 0.0


def time_weight(nearness: float, weight: float = TIME_WEIGHT) -> float:
    """The weight of a measured time for a cost, by the `nearness` of the two, from 0 to 1 (its own)."""
    return max(weight * nearness, MIN_TIME_WEIGHT)


def monotone(measured: Mapping[int, float]) -> tuple[list[int], np.ndarray]:
    """The measured numbers of tokens and their seconds, in ascending order.

    More tokens never cost less. If they seem to, the smaller size was measured under load, and is lowered.
    """
    n = sorted(measured)
    return n, np.minimum.accumulate([measured[i] for i in reversed(n)])[::-1]


class DraftSteps:
    """Seconds of 0, 1, ... draft steps of an iteration.

    The main model's forward pass evicts the draft's weights, and the code that calls it, from the CPU caches: the first
    step is the slowest, and the second is slower than those after it. Each of the three is learned by itself.
    """

    LEARNED = 3  # the first, the second, and any further one

    def __init__(self, seconds: np.ndarray):
        """`seconds` are those measured before, of 0, 1, ..., 3 or more steps."""
        self._each: list[float] = np.diff(seconds)[: self.LEARNED].tolist()
        self.seconds: list[float] = seconds.tolist()

    def update(self, step: int, seconds: float) -> None:
        """Record the time of a `step`, 0 for the first one. Outliers count as at most twice the expected time."""
        step = min(step, self.LEARNED - 1)
        relative = excess(seconds, self._each[step])
        for i in range(self.LEARNED):
            self._each[i] *= 1 + (TIME_WEIGHT if i == step else MIN_TIME_WEIGHT) * relative
        first, second, further = self._each
        self.seconds = [0.0, first, *(first + second + i * further for i in range(len(self.seconds) - 2))]


class LatencyTable:
    """Seconds of a forward pass over 0, 1, ... tokens, for one request: the sizes are few, and each recurs soon.

    Each size is learned by itself, and a time corrects those of fewer tokens at once. `LatencyCurve` is for batches,
    where most sizes never recur. It learns by knots, and a slowdown that does not recur fades.
    """

    SPREAD = 0.9  # weight of a time for one token more or less, relative to that for its own number

    def __init__(self, seconds: np.ndarray, change: float):
        self.seconds: list[float] = seconds.tolist()
        self.change = change  # additional seconds of a forward pass of another size than the last
        self._nearness = [self.SPREAD**distance for distance in range(len(seconds))]

    def update(self, n: int, seconds: float, weight: float = TIME_WEIGHT) -> None:
        """Record the time of n tokens. Outliers count as at most twice the expected time."""
        relative = excess(seconds, self.seconds[n])
        weights = [time_weight(nearness, weight) for nearness in self._nearness]
        self.seconds = [of_size * (1 + weights[abs(size - n)] * relative) for size, of_size in enumerate(self.seconds)]
        # Fewer tokens never cost more: lowers sizes that were measured under load and have not been seen since.
        self.seconds[:n] = [min(of_fewer, self.seconds[n]) for of_fewer in self.seconds[:n]]

    def update_change(self, n: int, seconds: float, plain: float) -> None:
        """Record the time of n tokens after another number. What a change takes counts as at most the time of a `plain`
        pass."""
        seen = min(max(seconds - self.seconds[n], -plain), plain)
        self.change = max(self.change + TIME_WEIGHT * (seen - self.change), 0.0)


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
        self._learn()

    def __call__(self, n: int) -> float:
        """Seconds of a forward pass over n tokens; 0 for n = 0."""
        return _interpolate(n, self._learned)

    def between(self, start: int, end: int) -> list[float]:
        """Seconds of forward passes over `start`, `start` + 1, ... `end` tokens."""
        values: list[float] = []
        for i in range(bisect_right(BOUNDS, start) - 1, bisect_right(BOUNDS[:-1], end)):
            left, right, seconds = BOUNDS[i], BOUNDS[i + 1], self._learned[i]
            slope = (self._learned[i + 1] - seconds) / (right - left)
            values += [seconds + slope * (n - left) for n in range(max(left, start), min(right, end + 1))]
        return values + [self._learned[-1]] * (end + 1 - max(start, BOUNDS[-1]))

    def measured(self, n: int) -> float:
        """Seconds of a forward pass over n tokens as measured, before any update."""
        return _interpolate(n, [0.0, *self._measured])

    def update(self, n: int, seconds: float) -> None:
        """Record a forward pass over n tokens. Outliers count as at most twice the expected time."""
        expected = self(n)
        if expected > 0:
            here, relative = _interpolate(n, [1.0, *self._change]), excess(seconds, expected)
            self._change = [
                (change - self.DECAY * max(change - here, 0.0)) * (1 + weight * relative)
                for change, weight in zip(self._change, _weights(n), strict=True)
            ]
            self._learn()

    def max_tokens(self, seconds: float, other_tokens: int, most: int) -> int:
        """Number of tokens, up to `most`, that fit into a forward pass of `seconds` besides `other_tokens` tokens."""
        return bisect_right(range(other_tokens + 1, other_tokens + most + 1), seconds, key=self)

    def _learn(self) -> None:
        learned = [seconds * change for seconds, change in zip(self._measured, self._change, strict=True)]
        self._learned = [0.0, *learned]  # of BOUNDS


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
    return [time_weight(0.25 ** abs(math.log2(knot / n))) for knot in BOUNDS[1:]]
