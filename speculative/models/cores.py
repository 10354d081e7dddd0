"""The CPU cores of this process."""

import os


def usable_cores() -> int:
    """CPU cores this process may use: fewer than the machine has under taskset, numactl or in a container."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    return len(os.sched_getaffinity(os.getpid()))  # of the main thread: OpenVINO pins some of its own to one core each
