"""Ctrl-C in a console program: at once while the engine is imported, heard by the streamer later."""

import os
import signal
import socket
import threading

signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # importing the engine takes a moment


# ---- streaming and Ctrl-C -------------------------------------------------------------------------------------------


class CtrlC:
    """Ctrl-C, heard while the engine holds the main thread.

    Python runs a signal handler between two bytecodes of the main thread, and loading or generating is one long call
    there. But the C-level handler writes to the wakeup socket at once, and a thread reads that: while text streams it
    sets `pressed`, which the streamer looks at; at any other time, and the second time, it ends the process.
    """

    def __init__(self):
        self.pressed = threading.Event()
        self.streaming = False  # a streamer will look at `pressed`

    def listen(self):
        self._socket, wakeup = socket.socketpair()
        wakeup.setblocking(False)
        signal.set_wakeup_fd(wakeup.detach())
        for name in ("SIGINT", "SIGBREAK"):  # Ctrl-Break exists on Windows
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), lambda *_: None)
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self):
        while self._socket.recv(1):
            if self.pressed.is_set() or not self.streaming:
                os._exit(130)
            self.pressed.set()

    def input(self, prompt):
        """Read a line as input() does, with Ctrl-C as KeyboardInterrupt."""
        wakeup = signal.set_wakeup_fd(-1)
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return input(prompt)
        finally:
            signal.signal(signal.SIGINT, handler)
            signal.set_wakeup_fd(wakeup)


ctrl_c = CtrlC()


def raise_keyboard_interrupt():
    """From here on Ctrl-C raises KeyboardInterrupt, so that what was begun can be tidied."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
