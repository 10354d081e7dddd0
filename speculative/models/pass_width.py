"""The size of a forward pass in tokens: padding it to the size of the last pass can be faster than changing the size.

OpenVINO prepares a forward pass again if its number of tokens differs from that of the pass before: 2 ms for a model of
16 M parameters that takes 3 ms for a token, 6 to 9 ms for SmolLM2-135M. Draft lengths vary, so nearly every pass would
be prepared again.
"""

import numpy as np

PADDED = 0.5  # most time spent on padding before the size is changed, relative to the time that a change takes


class PassWidth:
    """Pads a pass to the size of the last one, until padding has cost half as much as a change of the size."""

    def __init__(self, seconds: np.ndarray, change: float):
        """`seconds` [n] are those of a forward pass over 0, 1, ... tokens, `change` the additional ones of a pass with
        another number of tokens than the last."""
        self._seconds = seconds
        self._change = change
        self.reset()

    def reset(self) -> None:
        """Forget the last pass."""
        self._width, self._spent = 0, 0.0

    def of(self, n: int) -> int:
        """The number of tokens of a pass in which n are needed, n or more."""
        if n < self._width:
            spent = self._spent + float(self._seconds[self._width] - self._seconds[n])
            if spent <= PADDED * self._change:
                self._spent = spent
                return self._width
        self._width, self._spent = (n if n < len(self._seconds) else 0), 0.0
        return n
