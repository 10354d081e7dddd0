"""Ray runtime of the server: a local instance, or a connection to an existing cluster.

A local instance listens on this machine only, requires a token, sends no telemetry, keeps its files in a separate
folder, and ends with this process, however that ends.
"""

import ctypes
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import psutil

from speculative.cli import console
from speculative.cli.ray_cluster import ping
from speculative.serving import resources

TOKEN_HINT = "If it requires a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN on every machine of the cluster"
PING_SECONDS, MAX_MISSED_PINGS = 2.0, 3  # seconds between pings of Ray's head, and failures until it counts as lost
RESTARTED_VARIABLE = "SPECULATIVE_RESTARTED"  # set in the environment of a process restarted after losing Ray
STARTS_VARIABLE, MAX_STARTS = "SPECULATIVE_RAY_STARTS", 3  # Ray allows 30 s for a start, too little on a busy machine
ORIGINAL_ENV = dict(os.environ)  # before Ray adds to it
PR_SET_CHILD_SUBREAPER = 36  # Linux 3.4: orphans below this process become its children (man 2 prctl)
MAX_FOLDER = 22  # characters of the temporary folder
OBJECT_STORE = 128 << 20  # bytes; only small objects are passed between processes
COMMON_ENV = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing leaves the machine
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # OpenVINO manages the devices
}
ROOT = str(Path(__file__).resolve().parents[3])
PROXY_CALLBACKS = {  # what Ray's proxies import and call, by `Settings.routing`
    "balanced": "speculative.serving.ray_serve.connections.bound",
    "prefix": "speculative.serving.ray_serve.connections.bound_for_prefix_routing",
}
LOCAL_ENV = {
    "PYTHONPATH": os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")])),
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # no cluster: listen at 127.0.0.1 only, on Linux too
    "RAY_AUTH_MODE": "token",
    "RAY_SERVE_LOG_TO_STDERR": "0",  # log to files
    "RAY_worker_niceness": "0",  # serving is not a background task; Ray's default is 15
}


class HeadLost(Exception):
    """Ray's head is lost."""


@contextmanager
def joined(address: str | None, metrics_port: int, routing: str) -> Iterator[None]:
    """Connect to or start Ray for the block, and clean up afterwards. Raises ConnectionError.

    If HeadLost is raised in the block, this program restarts. Ray must not be imported earlier: it reads its settings
    on import.
    """
    os.environ.update(COMMON_ENV)
    if not address:
        callback = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": PROXY_CALLBACKS[routing]}
        os.environ.update({**LOCAL_ENV, **callback, "RAY_AUTH_TOKEN": secrets.token_hex(32)})
    import ray

    logging.getLogger("ray.serve").addFilter(lambda record: record.levelno >= logging.ERROR)
    folder = None if address else tempfile.mkdtemp(prefix="serve-", dir=_short_folder())
    try:
        if address:
            _join(address)
        else:
            _start(metrics_port, folder)
        yield
    except HeadLost:
        _restart(folder, {RESTARTED_VARIABLE: "1", STARTS_VARIABLE: "0"})
    finally:
        with suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # or processes of Ray would stay
        children = psutil.Process().children(recursive=True) if folder else []
        ray.shutdown()
        if folder:
            _kill(children)  # also what was started by an `init` that Ctrl-C interrupted
            shutil.rmtree(folder, ignore_errors=True)


def _short_folder() -> str | None:
    """Where Ray's files go, whose paths may have 107 characters; None: the usual temporary folder."""
    return "/tmp" if len(tempfile.gettempdir()) > MAX_FOLDER and os.access("/tmp", os.W_OK) else None


def wait_until_lost() -> NoReturn:
    """Raise HeadLost once Ray's head has been unreachable for some seconds or has been replaced by another."""
    import ray

    # no public API distinguishes a restarted head from the previous one
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.exceptions import AuthenticationError, RayError

    address = ray.get_runtime_context().gcs_address
    cluster, missed = None, 0
    while missed < MAX_MISSED_PINGS:
        try:
            ping(address)
            current = GcsClient(address=address).cluster_id
            cluster = cluster or current
            if current != cluster:
                break
            missed = 0
        except (ConnectionRefusedError, AuthenticationError):
            missed += 1
        except (OSError, RayError):
            pass  # slow or remote
        time.sleep(PING_SECONDS)
    raise HeadLost


def is_restarted() -> bool:
    """Whether this program was restarted after losing Ray, whose application may be its own."""
    return RESTARTED_VARIABLE in os.environ


def _join(address: str) -> None:
    import ray

    while True:
        try:
            ping(address)
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
            return
        except (OSError, RuntimeError) as error:  # Ray itself raises ConnectionError, an OSError
            if not is_restarted():  # a lost head may come back; one that never existed will not
                raise ConnectionError(getattr(error, "strerror", None) or f"{error}. {TOKEN_HINT}") from error
            time.sleep(PING_SECONDS)


def _start(metrics_port: int, folder: str | None) -> None:
    import ray

    _adopt_orphans()
    try:
        ray.init(
            "local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR,
            object_store_memory=OBJECT_STORE, resources=resources.local_resources(), _metrics_export_port=metrics_port,
            _temp_dir=folder,
        )  # fmt: skip
    except Exception as error:  # Ray has no specific exception class here
        starts = int(os.environ.get(STARTS_VARIABLE, 0)) + 1
        if starts == MAX_STARTS:
            raise ConnectionError(f"tried {starts} times: {error}") from error
        console.say(f"Ray did not start ({error}): retrying ...")
        _restart(folder, {STARTS_VARIABLE: str(starts)})


def _restart(folder: str | None, environment: dict[str, str]) -> NoReturn:
    """Restart this program: Ray's state in this process cannot be reused without its head."""
    _kill(_suspended_descendants())
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    command, environment = [sys.executable, *sys.argv], {**ORIGINAL_ENV, **environment}
    if os.name == "nt":  # where `execve` ends this process before the new one, and splits arguments at spaces
        sys.exit(subprocess.run(command, env=environment, check=False).returncode)
    os.execve(sys.executable, command, environment)


def _adopt_orphans() -> None:
    """Keep what a raylet that dies leaves below this process, so that it is found and killed with the rest."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))


def _suspended_descendants() -> list[psutil.Process]:
    """All processes below this one, suspended: one that runs may start another between being listed and killed."""
    suspended: list[psutil.Process] = []
    while started := [child for child in psutil.Process().children(recursive=True) if child not in suspended]:
        for process in started:
            with suppress(psutil.Error):
                process.suspend()
        suspended += started
    return suspended


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=10)


def lacking(replicas: int, per_replica: dict[str, float]) -> str | None:
    """A description of what Ray's machines have too little of for `replicas` replicas, or None. A replica runs on one
    machine."""
    import ray

    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fitting = sum(
        min(int(machine.get(name, 0) / amount + 1e-9) for name, amount in per_replica.items()) for machine in machines
    )
    if fitting >= replicas:
        return None
    needed = " and ".join(f"{amount:g} {name}" for name, amount in per_replica.items())
    return f"{needed} on one machine, and {fitting} of {replicas} replicas fit on Ray's machines"
