"""What an inference costs by the number of tokens in it, whosever they are: measured once, then learnt by the clock."""

from collections.abc import Mapping

import numpy as np

KNOTS = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048])


class LatencyCurve:
    """Seconds of an inference on n tokens. Load, heat and longer contexts change them: `learn` follows."""

    CLOCK = 0.1  # weight of the newest time
    CLOCK_OTHERS = 0.02  # at least, for inferences on other numbers of tokens; more for those near
    FADE = 0.002  # of a slowness that others had and this one has not: so that they are tried again

    def __init__(self, measured: Mapping[int, float]):
        """`measured`: seconds by tokens, for some numbers from 1 on. Beyond them a straight line.

        More tokens never cost less: where they seem to, the machine was busy with other things at the fewer ones.
        """
        n = sorted(measured)
        seconds = np.minimum.accumulate([measured[i] for i in reversed(n)])[::-1]
        self._measured = np.interp(KNOTS, n, seconds)
        if len(n) > 1:
            slope = (seconds[-1] - seconds[-2]) / (n[-1] - n[-2])
            self._measured += slope * np.maximum(KNOTS - n[-1], 0)
        self._change = np.ones(len(KNOTS))  # as learnt / as measured
        self._of = self._table()

    def __call__(self, n: np.ndarray | int) -> np.ndarray:
        """Seconds of inferences on n tokens; nothing for none."""
        return self._of[np.minimum(n, KNOTS[-1])]

    def measured(self, n: int) -> float:
        """Seconds of an inference on n tokens as they were before anything was learnt."""
        return float(np.interp(n, KNOTS, self._measured))

    def learn(self, n: int, seconds: float) -> None:
        """An inference on n tokens took so long. A hiccup counts as twice as long, not more."""
        expected = self(n)
        if expected > 0:
            self._change -= self.FADE * np.maximum(self._change - np.interp(n, KNOTS, self._change), 0)
            weight = np.maximum(self.CLOCK * 0.25 ** np.abs(np.log2(KNOTS / n)), self.CLOCK_OTHERS)
            self._change *= 1 + weight * (min(max(seconds / expected, 0.5), 2.0) - 1)
            self._of = self._table()

    def most(self, seconds: float, beside: int) -> int:
        """How many tokens fit into an inference of so many seconds, beside those that are in it already."""
        return int(np.count_nonzero(self._of[beside + 1 :] <= seconds))

    def _table(self) -> np.ndarray:
        """Seconds of inferences on 0, 1, ... tokens."""
        return np.concatenate(([0.0], np.interp(np.arange(1, KNOTS[-1] + 1), KNOTS, self._measured * self._change)))
