"""Ctrl-C handling for console programs: exits immediately during imports, stops the streamer during generation."""

import os
import signal
import socket
import threading

from speculative.cli.processes import raise_on_signals, signals_raise

__all__ = ["CtrlC", "ctrl_c", "raise_on_signals"]

signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # importing the engine takes a moment


# ---- streaming and Ctrl-C -------------------------------------------------------------------------------------------


class CtrlC:
    """Ctrl-C that works while the engine holds the main thread.

    Python runs a signal handler between two bytecodes of the main thread, but loading or generating is one long call
    there. The C-level handler, however, writes to the wakeup socket immediately, and a thread reads it: during
    streaming it sets `pressed`, which the streamer checks; otherwise, and on the second Ctrl-C, it ends the process.
    """

    def __init__(self) -> None:
        self.pressed = threading.Event()
        self.streaming = False  # a streamer is checking `pressed`

    def listen(self) -> None:
        self._socket, wakeup = socket.socketpair()
        wakeup.setblocking(False)
        signal.set_wakeup_fd(wakeup.detach())
        for name in ("SIGINT", "SIGBREAK"):  # Ctrl-Break exists on Windows
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), lambda *_: None)
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while self._socket.recv(1):
            if self.pressed.is_set() or not self.streaming:
                os._exit(130)
            self.pressed.set()

    def input(self, prompt: str) -> str:
        """Read a line as input() does, with Ctrl-C as KeyboardInterrupt."""
        wakeup = signal.set_wakeup_fd(-1)
        try:
            with signals_raise():
                return input(prompt)
        finally:
            signal.set_wakeup_fd(wakeup)


ctrl_c = CtrlC()
