"""The CPU: the cores of this process, and the instruction sets."""

import os
import re
from pathlib import Path

SETS = {"avx2": "AVX2", "avx512f": "AVX-512", "avx_vnni": "VNNI", "avx512_vnni": "VNNI", "amx_tile": "AMX"}  # by flag


def usable_cores() -> int:
    """CPU cores this process may use: fewer than the machine has under taskset, numactl or in a container."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    return len(os.sched_getaffinity(os.getpid()))  # of the main thread: OpenVINO pins some of its own to one core each


def instruction_sets(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The instruction sets of an x86 CPU that determine how fast OpenVINO computes, like "AVX2, AVX-512, VNNI"; "" on
    systems without the file `cpuinfo`. Virtual machines often hide the CPU's model, so its name says little."""
    try:
        found = re.search(r"^flags\s*:(.*)", cpuinfo.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return ""
    flags = found[1].split() if found else []
    return ", ".join(dict.fromkeys(name for flag, name in SETS.items() if flag in flags))
