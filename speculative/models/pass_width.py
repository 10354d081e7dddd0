"""The size of a forward pass in tokens: padding it to the size of the last pass can be faster than changing the size.

OpenVINO prepares a forward pass again if its number of tokens differs from that of the pass before. For a model
of 16 M parameters, whose pass over one token takes 3 ms, that costs 2 ms; docs/draft-length.md has SmolLM2-135M. Draft
lengths vary, so nearly every pass would be prepared again.
"""

from collections.abc import Sequence

MAX_PADDING = 0.5  # most time spent on padding before the size is changed, relative to the time that a change takes
# advantage of another size for which a planned size is changed: a change is often followed by one back
CHANGE_FACTOR = 2.0


class PassWidth:
    """Pads a pass to the planned size, or to that of the last one until padding has cost half as much as a change."""

    def __init__(self, seconds: Sequence[float], change: float, pads: bool = True, plain_size: int = 1):
        """`seconds` are those of a forward pass over 0, 1, ... tokens, `change` the additional ones of a pass with
        another number of tokens than the last. Passes without draft tokens are padded to `plain_size` tokens, where
        that takes less time than a single one. Without `pads`, passes have the size that is needed."""
        self.plain_size = plain_size if pads else 1
        self._seconds = list(seconds)
        self._change = change
        self._pads = pads
        self.reset()

    def reset(self) -> None:
        """Forget the last pass and the plan for the next one."""
        self.last = 0  # tokens of the last pass, padding included; 0: it was a prompt's, or wider than any to plan
        self._size = 0  # tokens of the last pass, also of a wide one
        self.is_changed = True  # whether the last pass had another size than the one before
        self.is_first = True  # whether the last pass was the first one after a prompt: its size changes in any case
        self._spent = 0.0  # seconds, on padding since the last change
        self.planned = 0  # size of the next pass; 0 without a plan
        # of sizes 1, 2, ... over the present one, since the last change
        self._advantages = [0.0] * (len(self._seconds) - 1)

    def plan(self, worth: Sequence[float], change: float) -> int:
        """Plan the size of the next pass; `worth` is that of passes over 1, 2, ... tokens, in the unit of `change`.

        Another size is chosen once its advantages over the present one add up to `CHANGE_FACTOR` times the cost of a
        change. So what is lost by not changing stays in proportion to what a change costs (Page 1954, cumulative sums).
        """
        current = self.last or self.plain_size
        of_current = worth[current - 1]
        self._advantages = [
            max(advantage + of_size - of_current, 0.0)
            for advantage, of_size in zip(self._advantages, worth, strict=True)
        ]
        most = max(self._advantages)
        self.planned = self._advantages.index(most) + 1 if most > CHANGE_FACTOR * change else current
        return self.planned

    def seconds_of_planned(self, seconds: Sequence[float], change: float) -> tuple[list[float], float]:
        """Seconds of the planned pass, changes of size included, by the tokens that it will need, from 0 to the planned
        number; and the additional seconds of a pass that needs more. `seconds` are those of passes over 0, 1, ...
        tokens; a change of size takes `change` more."""
        padded, avoided = seconds[self.planned], self._changes() * change
        fitting = [min(padded, of_size + avoided) for of_size in seconds[: self.planned + 1]]
        return fitting, change * (self.planned == self.last)

    def _changes(self) -> float:
        """The changes of size that padding to the planned size avoids."""
        return CHANGE_FACTOR if self.planned == self.last else 1.0

    def plan_one(self) -> None:
        """Plan a pass without draft tokens."""
        self.planned = self.plain_size

    def width_for(self, n: int) -> int:
        """The number of tokens of a pass in which n are needed, n or more."""
        width = max(n, self.plain_size, self._planned_width(n) or self._last_width(n)) if self._pads else n
        self.planned = 0
        self.is_changed, self.is_first = width != self._size, not self.last
        if width != (self.last or self.plain_size):
            self._spent = 0.0
            self._advantages = [0.0] * len(self._advantages)
        self.last, self._size = width if width < len(self._seconds) else 0, width
        return width

    def _planned_width(self, n: int) -> int:
        """The planned size, or n if so much padding takes longer than the changes that it avoids; 0 without a plan."""
        padding = self._seconds[self.planned] - self._seconds[n] if n < self.planned else 0.0
        return n if padding > self._changes() * self._change else self.planned

    def _last_width(self, n: int) -> int:
        """The size of the last pass, if padding to it costs little enough, else n."""
        if n < self.last:
            spent = self._spent + self._seconds[self.last] - self._seconds[n]
            if spent <= MAX_PADDING * self._change:
                self._spent = spent
                return self.last
        return n
