"""Cores of its own for each replica of a machine: OpenVINO's threads of two replicas must not wait for the same core.

    cores = own_cores.take(2)  # before the models are loaded

Each core has a lock file in the temporary folder. The system unlocks it when the process that has it ends, however that
ends. So replicas of all Ray clusters of a user share the cores of a machine.
"""

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from speculative.models.cores import usable

_locks: list[int] = []  # file descriptors, open until this process ends


def take(number: int) -> list[int]:
    """Confine this process to `number` cores that no other replica has, if there are so many; returns them, or none."""
    if sys.platform != "linux":
        return []
    import fcntl

    folder = Path(tempfile.gettempdir(), f"speculative-cores-{os.getuid()}")
    cores: dict[int, int] = {}  # with the file descriptors of their locks
    with suppress(OSError):  # of a read-only folder
        folder.mkdir(mode=0o700, exist_ok=True)
        for core in usable():
            if len(cores) == number:
                break
            file = os.open(folder / str(core), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                cores[core] = file
            except BlockingIOError:
                os.close(file)
    if len(cores) < number:
        for file in cores.values():
            os.close(file)
        return []
    _locks.extend(cores.values())
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            os.sched_setaffinity(int(thread.name), cores)
    return list(cores)
