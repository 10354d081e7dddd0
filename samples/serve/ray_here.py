"""Ray, around the application: one of its own on this machine, or a cluster that is there.

A Ray of its own listens on this machine only, wants a token from whoever speaks to it, reports nothing to anybody, has
its files in a folder of its own, and ends with this process, however that ends.
"""

import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from samples.serve import resources

OBJECT_STORE = 128 << 20  # bytes; what goes between processes here is small
ALWAYS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing leaves the machine
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # devices are OpenVINO's business
}
OWN = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # no cluster: on Linux, too, it listens at 127.0.0.1 only
    "RAY_AUTH_MODE": "token",
    "RAY_SERVE_LOG_TO_STDERR": "0",  # to files
}


@contextmanager
def joined(address: str | None, metrics_port: int) -> Iterator[None]:
    """Ray is there inside, and what was started for it is gone afterwards. Raises ConnectionError.

    Ray reads its settings when it is imported: not before.
    """
    os.environ.update(ALWAYS if address else {**ALWAYS, **OWN, "RAY_AUTH_TOKEN": secrets.token_hex(32)})
    import ray

    logging.getLogger("ray.serve").addFilter(lambda record: record.levelno >= logging.ERROR)
    folder = None if address else tempfile.mkdtemp(prefix="serve-")
    try:
        if address:
            ray.init(address, log_to_driver=False, logging_level="ERROR")
        else:
            ray.init(
                "local", include_dashboard=False, log_to_driver=False, logging_level="ERROR",
                object_store_memory=OBJECT_STORE, resources=resources.here(), _metrics_export_port=metrics_port,
                _temp_dir=folder,
            )  # fmt: skip
        yield
    finally:
        ray.shutdown()
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def lacking(replicas: int, each: dict[str, float]) -> str | None:
    """Of what Ray has too little for so many replicas, in words."""
    import ray

    there = ray.cluster_resources()
    for name, amount in each.items():
        if amount * replicas > there.get(name, 0):
            return f"{replicas} x {amount:g} {name}, and Ray has {there.get(name, 0):g}"
    return None
