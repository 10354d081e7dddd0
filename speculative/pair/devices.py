"""Device lookup: which devices an OpenVINO device string names, why one is unavailable, and their memory."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import openvino as ov

from speculative.models.cores import CGROUP

VIRTUAL = ("AUTO", "HETERO", "MULTI", "BATCH")  # spread a model over the devices named after the colon
MAIN_MEMORY = "main memory"
CGROUPS = (  # limit, usage and statistics of the container's memory, in version 2 and 1 of cgroups
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)


class DeviceFacts(NamedTuple):
    """One device. `missing` says in one clause why it is unavailable and what to do; empty if it is available."""

    name: str  # CPU, GPU.1, NPU
    full_name: str
    missing: str
    memory: str  # MAIN_MEMORY, or the name of a device with its own memory


class Memory(NamedTuple):
    """Memory in bytes; None if the system does not report it."""

    total: int | None
    available: int | None


def look_up(device: str, core: ov.Core | None = None) -> list[DeviceFacts]:
    """The devices that a device string names: "CPU", "GPU.1", "AUTO:GPU,-CPU" (all but CPU), "HETERO:GPU,CPU"."""
    core = core or ov.Core()
    return [_facts(name, core) for name in names(device, core.available_devices)]


def why_not(device: str, facts: list[DeviceFacts]) -> str:
    """Why `device`, looked up as `facts`, is unavailable; empty if it is available."""
    if not facts:
        return f"{device} excludes every device: name one"
    return next((f"there is no {fact.name or repr('')}: {fact.missing}" for fact in facts if fact.missing), "")


def require(device: str, properties: Mapping[str, object]) -> None:
    """Raise ValueError with the reason if `device` is unavailable. With NPUW_DEVICES in its OpenVINO `properties`, the
    NPU code path runs on another device."""
    facts = look_up(device)
    if "NPUW_DEVICES" in properties:
        facts = [fact._replace(missing="") if fact.name == "NPU" else fact for fact in facts]
    if reason := why_not(device, facts):
        raise ValueError(reason)


def names(device: str, available: list[str]) -> list[str]:
    """The single devices in a device string, in its order; `available` is used if the string lists none."""
    kind, _, listed = device.partition(":")
    if kind not in VIRTUAL:
        return [device]
    named = [name.strip().partition("(")[0] for name in listed.split(",") if name.strip()]
    excluded = {name[1:] for name in named if name.startswith("-")}
    selected = [name for name in named if not name.startswith("-")] or available
    return [name for name in selected if name not in excluded]


def main_memory() -> Memory:
    """This machine's memory, or the container's limit if that is lower."""
    if os.name == "nt":
        return _windows_memory()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    file = Path("/proc/meminfo")
    match = re.search(r"^MemAvailable:\s+(\d+) kB", file.read_text(), re.MULTILINE) if file.is_file() else None
    available = int(match[1]) * 1024 if match else None
    for files in CGROUPS:
        limit, usage, statistics = (_read(CGROUP / name) for name in files)
        if limit.isdecimal() and int(limit) < total:
            total = int(limit)
            reclaimable = re.search(r"^inactive_file (\d+)", statistics, re.MULTILINE)  # file cache, freed when needed
            used = max(0, int(usage or 0) - int(reclaimable[1] if reclaimable else 0))
            available = min(available, max(0, total - used)) if available else None
    return Memory(total, available)


def _read(file: Path) -> str:
    return file.read_text().strip() if file.is_file() else ""


def device_memory(name: str, core: ov.Core) -> Memory:
    """A GPU's own memory; OpenVINO does not report how much of it is in use."""
    try:
        return Memory(int(core.get_property(name, "GPU_DEVICE_TOTAL_MEM_SIZE")), None)
    except RuntimeError:
        return Memory(None, None)


def _facts(name: str, core: ov.Core) -> DeviceFacts:
    kind, _, number = name.partition(".")
    available = core.available_devices
    is_available = (
        name in available or (kind in available and number == "0") or (not number and f"{kind}.0" in available)
    )
    if not is_available:
        return DeviceFacts(name, "", _why_missing(name, core), MAIN_MEMORY)
    has_own_memory = kind == "GPU" and "INTEGRATED" not in str(core.get_property(name, "DEVICE_TYPE")).upper()
    memory = name if has_own_memory else MAIN_MEMORY  # integrated GPUs and NPUs share main memory
    return DeviceFacts(name, str(core.get_property(name, "FULL_DEVICE_NAME")), "", memory)


def _why_missing(name: str, core: ov.Core) -> str:
    available = f"OpenVINO finds {', '.join(core.available_devices)} here"
    kind, _, number = name.partition(".")
    if number and any(device.partition(".")[0] == kind for device in core.available_devices):
        return f"{available}; use one of these"
    if kind not in ("CPU", "GPU", "NPU"):
        return f"it is not an OpenVINO device; {available}; use one of these"
    try:
        core.get_property(name, "FULL_DEVICE_NAME")
        detail = ""
    except RuntimeError as error:  # names a missing driver library; not helpful for a missing NPU
        library = re.search(r"([\w.-]+\.(?:so[.\d]*|dll))[^/\\:]*: cannot open shared object", str(error))
        detail = f" ({library[1]} is missing)" if library else ""
    if kind == "GPU":
        advice = (
            "install the OpenCL runtime of the Intel graphics compute stack, in a container also pass --device /dev/dri"
        )
    else:
        advice = "install the Intel NPU driver, in a container also pass --device /dev/accel"
    return f"{available}{detail}; {advice}, or use another device"


def _windows_memory() -> Memory:
    import ctypes

    class Status(ctypes.Structure):  # MEMORYSTATUSEX
        _fields_ = (
            ("length", ctypes.c_uint32),
            ("load", ctypes.c_uint32),
            ("total", ctypes.c_uint64),
            ("available", ctypes.c_uint64),
            ("unused", ctypes.c_uint64 * 5),
        )

    status = Status(length=ctypes.sizeof(Status))
    if not ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):  # type: ignore[attr-defined]
        return Memory(None, None)
    return Memory(status.total, status.available)
