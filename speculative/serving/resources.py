"""Devices as Ray resources: Ray counts cores itself; Intel GPUs and NPUs get resource names here.

A replica runs on the devices that its options name: all replicas of a machine with several GPUs would share the first.
So a machine has one of each kind, whatever their number.

A machine joins a cluster with `ray start --address HEAD:6379 --resources '{"intel_gpu": 1}'`; a local Ray instance gets
the devices OpenVINO finds.
"""

import openvino

from speculative.cli.ray_cluster import DEVICE_RESOURCES


def local_resources() -> dict[str, float]:
    """The resources of this machine."""
    kinds = {device.partition(".")[0] for device in openvino.Core().available_devices}
    return {name: 1.0 for kind, name in DEVICE_RESOURCES.items() if kind in kinds}


def required_by(*devices: str) -> dict[str, float]:
    """The resources used by models on these OpenVINO devices: one of each kind."""
    return {name: 1.0 for kind, name in DEVICE_RESOURCES.items() if any(kind in device for device in devices)}
