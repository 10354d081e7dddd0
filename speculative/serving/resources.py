"""Devices as Ray's resources: cores it counts itself, Intel GPUs and NPUs have names of their own here.

A machine joins a cluster with `ray start --address HEAD:6379 --resources '{"intel_gpu": 1}'`; a Ray of its own is told
what OpenVINO finds.
"""

import openvino

NAMES = {"GPU": "intel_gpu", "NPU": "intel_npu"}


def here() -> dict[str, float]:
    """What this machine has."""
    kinds = [device.partition(".")[0] for device in openvino.Core().available_devices]
    return {name: float(kinds.count(kind)) for kind, name in NAMES.items() if kind in kinds}


def taken_by(*devices: str) -> dict[str, float]:
    """What models on these OpenVINO devices take: one of each kind."""
    return {name: 1.0 for kind, name in NAMES.items() if any(kind in device for device in devices)}
