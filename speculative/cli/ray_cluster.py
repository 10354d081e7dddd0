"""Ray clusters: the address of the head, whether anything listens there, and device types as Ray resources."""

import argparse
import socket

DEVICE_RESOURCES = {"GPU": "intel_gpu", "NPU": "intel_npu"}  # device type: Ray resource; Ray counts CPUs itself


def ray_address(text: str) -> str:
    """An argparse type: HOST:PORT, ray://HOST:PORT or auto."""
    host, _, port = text.removeprefix("ray://").rpartition(":")
    if text == "auto" or (host and port.isdecimal()):
        return text
    raise argparse.ArgumentTypeError(
        f"{text!r} is not the address of a Ray cluster: use HOST:PORT, ray://HOST:PORT or auto"
    )


def ping(address: str) -> None:
    """Raise OSError if nothing listens at the address; Ray itself would take a minute to report it."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdecimal():  # not "auto"
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
