"""Waiting for what other processes do. The limits only make failures end: on a busy machine anything may take long."""

import contextlib
import time

import psutil

PATIENCE = 120  # seconds


def wait_until(true, what="it comes true", seconds=PATIENCE, passing=()):
    """What `true` returns as soon as that is something; errors of the classes `passing` may pass."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(*passing):
            if found := true():
                return found
        time.sleep(0.02)
    raise AssertionError(f"{what}: not within {seconds} seconds")


def wait_until_loaded(library, process):
    """Until the process has it: "libopenvino" when it imports that, "intel_cpu_plugin" when it compiles a model."""
    maps = psutil.Process(process.pid).memory_maps
    wait_until(lambda: any(library in map.path for map in maps()), f"the process loads {library}")
