"""Ray, around the application: one of its own on this machine, or a cluster that is there.

A Ray of its own listens on this machine only, reports nothing to anybody, keeps its files in a folder of its own, and
ends with this process, however that ends.
"""

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

os.environ.update(
    RAY_USAGE_STATS_ENABLED="0",  # nothing leaves the machine
    RAY_SERVE_LOG_TO_STDERR="0",  # to Ray's files
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
)

import ray

from samples.serve import resources

OBJECT_STORE = 128 << 20  # bytes; what goes between processes here is small


@contextmanager
def joined(address: str | None, metrics_port: int) -> Iterator[None]:
    """Ray is there inside, and what was started for it is gone afterwards. Raises ConnectionError."""
    folder = None if address else tempfile.mkdtemp(prefix="serve-")
    try:
        if address:
            ray.init(address, log_to_driver=False, logging_level="ERROR")
        else:
            ray.init(
                "local", include_dashboard=False, log_to_driver=False, logging_level="ERROR",
                object_store_memory=OBJECT_STORE, resources=resources.here(), _node_ip_address="127.0.0.1",
                _metrics_export_port=metrics_port, _temp_dir=folder,
            )  # fmt: skip
        yield
    finally:
        ray.shutdown()
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def lacking(replicas: int, each: dict[str, float]) -> str | None:
    """Of what the cluster has too little for so many replicas, in words."""
    there = ray.cluster_resources()
    for name, amount in each.items():
        if amount * replicas > there.get(name, 0):
            return f"{replicas} x {amount:g} {name}, and Ray has {there.get(name, 0):g}"
    return None


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
