"""The CPU: the cores of this process, and the instruction sets."""

import os
from pathlib import Path

SETS = {"avx2": "AVX2", "avx512f": "AVX-512", "avx_vnni": "VNNI", "avx512_vnni": "VNNI", "amx_tile": "AMX"}  # by flag
CGROUP = Path("/sys/fs/cgroup")
LIMITS = ("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")  # in version 2 and 1 of cgroups


def usable_cores() -> int:
    """CPU cores this process may use: fewer than the machine has under taskset or numactl, or in a container that is
    restricted to some of them."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    return len(os.sched_getaffinity(os.getpid()))  # of the main thread: OpenVINO pins some of its own to one core each


def instruction_sets(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The instruction sets of an x86 CPU that determine how fast OpenVINO computes, like "AVX2, AVX-512, VNNI"; "" on
    systems without the file `cpuinfo`. Virtual machines often hide the CPU's model, so its name says little."""
    try:
        with cpuinfo.open(encoding="utf-8") as lines:  # Linux writes them as they are read, slowly for many cores
            flags = next((line.split() for line in lines if line.startswith("flags")), [])
    except OSError:
        return ""
    return ", ".join(dict.fromkeys(name for flag, name in SETS.items() if flag in flags))


def thread_properties(threads: int | None) -> dict[str, int | str]:
    """OpenVINO's properties for so many CPU threads; None or 0: its own choice. The threads are not pinned: OpenVINO
    pins those of every process to the first cores, which several processes would then share."""
    return {"INFERENCE_NUM_THREADS": threads, "ENABLE_CPU_PINNING": "NO"} if threads else {}


def cores_within_limit() -> int:
    """The cores whose whole time this process may use: fewer than the usable ones in a container with a limit (docker
    run --cpus, a limit of Kubernetes). OpenVINO ignores the limit (2026.4.1): it computes on all usable cores, and the
    system stops all of its threads when the time is used up."""
    cores = usable_cores()
    for names in LIMITS:
        files = [CGROUP / name for name in names]
        if all(file.is_file() for file in files):
            quota, period = " ".join(file.read_text(encoding="ascii") for file in files).split()
            if quota.isdecimal():  # not "max" or -1
                cores = min(cores, max(1, int(quota) // int(period)))
    return cores
