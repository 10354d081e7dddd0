"""Ray, around the application: one of its own on this machine, or a cluster that is there.

A Ray of its own listens on this machine only, wants a token from whoever speaks to it, reports nothing to anybody, has
its files in a folder of its own, and ends with this process, however that ends.
"""

import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import psutil

from speculative.cli import console
from speculative.serving import resources

TOKEN = "If it wants a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN, on every machine of the cluster"
EVERY, MISSES = 2.0, 3  # seconds between looks at Ray's head, and how often it has to be missed
ANEW = "SPECULATIVE_ANEW"  # in the environment of a process that follows one whose Ray was lost
STARTS, MOST_STARTS = "SPECULATIVE_RAY_STARTS", 3  # Ray gives its processes 30 s to start, too few on a busy machine
ORIGINAL_ENV = dict(os.environ)  # Ray adds to it
OBJECT_STORE = 128 << 20  # bytes; what goes between processes here is small
ALWAYS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing leaves the machine
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # devices are OpenVINO's business
}
ROOT = str(Path(__file__).resolve().parents[2])
PROXIES = {  # they find this there, and call it
    "PYTHONPATH": os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")])),
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "speculative.serving.connections.bound",
}
OWN = {
    **PROXIES,
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # no cluster: on Linux, too, it listens at 127.0.0.1 only
    "RAY_AUTH_MODE": "token",
    "RAY_SERVE_LOG_TO_STDERR": "0",  # to files
    "RAY_worker_niceness": "0",  # serving is no background work; Ray's own choice is 15
}


class Lost(Exception):
    """Ray's head is gone."""


@contextmanager
def joined(address: str | None, metrics_port: int) -> Iterator[None]:
    """Ray is there inside, and what was started for it is gone afterwards. Raises ConnectionError.

    Where Lost is raised inside, this program begins anew. Ray reads its settings when it is imported: not before.
    """
    os.environ.update(ALWAYS if address else {**ALWAYS, **OWN, "RAY_AUTH_TOKEN": secrets.token_hex(32)})
    import ray

    logging.getLogger("ray.serve").addFilter(lambda record: record.levelno >= logging.ERROR)
    folder = None if address else tempfile.mkdtemp(prefix="serve-")
    try:
        if address:
            _join(address)
        else:
            _start(metrics_port, folder)
        yield
    except Lost:
        _begin_anew(folder, {ANEW: "1", STARTS: "0"})
    finally:
        ray.shutdown()
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def wait_until_lost() -> NoReturn:
    """Raises Lost once nobody has listened where Ray's head was for some seconds, or another head does."""
    import ray
    from ray._raylet import GcsClient  # nothing public tells a head that was started again from the one before
    from ray.exceptions import AuthenticationError, RayError

    address = ray.get_runtime_context().gcs_address
    known, missed = None, 0
    while missed < MISSES:
        try:
            _ping(address)
            cluster = GcsClient(address=address).cluster_id
            known = known or cluster
            if cluster != known:
                break
            missed = 0
        except (ConnectionRefusedError, AuthenticationError):
            missed += 1
        except (OSError, RayError):
            pass  # slow, or far
        time.sleep(EVERY)
    raise Lost


def _join(address: str) -> None:
    import ray

    while True:
        try:
            _ping(address)
            ray.init(address, log_to_driver=False, logging_level="ERROR")
            return
        except (OSError, RuntimeError) as error:  # of OSErrors, ConnectionError is Ray's own
            if ANEW not in os.environ:  # a head that was lost may come back, one that never was will not
                raise ConnectionError(getattr(error, "strerror", None) or f"{error}. {TOKEN}") from error
            time.sleep(EVERY)


def _ping(address: str) -> None:
    """Raises OSError where nobody listens: Ray itself would take a minute to say so."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdecimal():  # not "auto"
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def _start(metrics_port: int, folder: str) -> None:
    import ray

    try:
        ray.init(
            "local", include_dashboard=False, log_to_driver=False, logging_level="ERROR",
            object_store_memory=OBJECT_STORE, resources=resources.here(), _metrics_export_port=metrics_port,
            _temp_dir=folder,
        )  # fmt: skip
    except Exception as error:  # Ray raises no class of its own here
        starts = int(os.environ.get(STARTS, 0)) + 1
        if starts == MOST_STARTS:
            raise ConnectionError(f"tried {starts} times: {error}") from error
        console.say(f"Ray did not start ({error}): once more ...")
        _begin_anew(folder, {STARTS: str(starts)})


def _begin_anew(folder: str | None, environment: dict[str, str]) -> NoReturn:
    """This program from its beginning: what Ray has in this process does not outlive its head."""
    children = psutil.Process().children(recursive=True)
    for child in children:
        with suppress(psutil.Error):
            child.kill()
    psutil.wait_procs(children, timeout=10)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    os.execve(sys.executable, [sys.executable, *sys.argv], {**ORIGINAL_ENV, **environment})


def lacking(replicas: int, each: dict[str, float]) -> str | None:
    """Of what Ray has too little for so many replicas, in words."""
    import ray

    there = ray.cluster_resources()
    for name, amount in each.items():
        if amount * replicas > there.get(name, 0):
            return f"{replicas} x {amount:g} {name}, and Ray has {there.get(name, 0):g}"
    return None
