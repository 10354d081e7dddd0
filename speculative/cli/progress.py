"""Progress of long work: a bar in a terminal, a line every 30 seconds in a log."""

import sys
import time

import tqdm as bars

SECONDS_PER_LINE = 30.0


class tqdm(bars.tqdm):
    """tqdm's bar. If stderr is not a terminal, it prints whole lines instead of drawing one line again and again: one
    line every 30 seconds at most, over all bars of the process, and none for work that takes less."""

    leave: bool
    _last_line = time.monotonic()

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        if sys.stderr.isatty():
            return super().display(msg, pos)
        if msg != "" and time.monotonic() - tqdm._last_line >= SECONDS_PER_LINE:  # "" clears the bar at its end
            tqdm._last_line = time.monotonic()
            print(msg or str(self), file=sys.stderr, flush=True)
        return False  # nothing to clear

    def close(self) -> None:
        self.leave = self.leave and sys.stderr.isatty()
        super().close()
