"""The CPU cores of this process."""

import os


def usable() -> list[int]:
    """The numbers of the CPU cores this process may use: fewer than the machine has under taskset, numactl or in a
    container."""
    if not hasattr(os, "sched_getaffinity"):
        return list(range(os.cpu_count() or 1))
    return sorted(
        os.sched_getaffinity(os.getpid())
    )  # of the main thread: OpenVINO pins some of its own to one core each


def usable_cores() -> int:
    """The number of CPU cores this process may use."""
    return len(usable())
