"""Waits for other processes. The limits only end failures: on a busy machine anything may take long."""

import contextlib
import time

import psutil

PATIENCE = 120  # seconds


def wait_until(condition, what="the condition is true", seconds=PATIENCE, passing=(), every=0.02):
    """Call `condition` until it returns something true, and return that; errors of the classes `passing` are ignored.
    `every`: seconds between two calls."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(*passing):
            if result := condition():
                return result
        time.sleep(every)
    raise AssertionError(f"{what}: not within {seconds} seconds")


def wait_until_loaded(library, process):
    """Wait until the process has loaded it: "libopenvino" on import, "intel_cpu_plugin" when it compiles a model."""
    maps = psutil.Process(process.pid).memory_maps
    wait_until(lambda: any(library in map.path for map in maps()), f"the process loads {library}")
