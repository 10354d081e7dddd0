"""What an inference costs by the number of tokens in it, whosever they are: measured once, then learnt by the clock."""

import time
from collections.abc import Mapping

import numpy as np

from speculative.batch_model import BatchModel, Part

MEASURED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # tokens in one inference
CONTEXT = 64  # tokens in the cache meanwhile, where it has room for them
TIMES, LEAST_SECONDS = 3, 0.5  # small models are timed more often, for as long
KNOTS = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048])


class CostCurve:
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


def measure(models: list[BatchModel]) -> list[CostCurve]:
    """Time the models (a few seconds for a 1 B model), in turns: a large model leaves nothing in the processor's caches
    for a small one."""
    times: list[dict[int, list[float]]] = [{n: [] for n in MEASURED} for _ in models]
    slots = [model.slot(CONTEXT + max(MEASURED)) for model in models]
    started = time.perf_counter()
    while len(times[0][1]) <= TIMES or time.perf_counter() - started < LEAST_SECONDS:
        for n in MEASURED:
            for model, slot, of_model in zip(models, slots, times, strict=True):
                if n >= slot.capacity:
                    continue
                tokens = (np.arange(min(slot.capacity, CONTEXT + n), dtype=np.int64) * 7919 + 1) % model.width
                slot.keep(len(tokens) - n)
                begin = time.perf_counter()
                model.logits([Part(slot, tokens, n)])
                of_model[n].append(time.perf_counter() - begin)
    for slot in slots:
        slot.give_back()
    # The first of a shape is slower. The lower quartile: what other programs take of the machine is none of the costs.
    return [
        CostCurve({n: sorted(of_n[1:])[(len(of_n) - 1) // 4] for n, of_n in of_model.items() if of_n})
        for of_model in times
    ]
