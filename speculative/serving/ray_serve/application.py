"""Lifecycle of the Ray Serve application: start, drain, stop."""

import io
import os
import time
import urllib.request
from contextlib import redirect_stderr, suppress
from pathlib import Path

import ray
from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.config import BackpressureConfig, RequestRouterConfig
from ray.serve.deployment import Application
from ray.serve.handle import DeploymentHandle

from speculative.serving import arguments
from speculative.serving.arguments import in_url
from speculative.serving.http import tracing
from speculative.serving.ray_serve import ray_runtime
from speculative.serving.ray_serve.deployment import Replica
from speculative.serving.ray_serve.prefix_routing import PrefixRouter
from speculative.serving.settings import Settings

NAME = "speculative"
ROOT = str(Path(__file__).resolve().parents[3])
PYTHONPATH = (
    f"{ROOT}{os.pathsep}${{PYTHONPATH}}"  # Ray puts in what a machine has; without any, this adds Ray's working folder
)
ATTEMPTS = 3  # to load the models
CLUSTER_OPTIONS = ("--host", "--port", "--address", "--metrics-port", "--drain")  # a config file sets these itself
DIRECT_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # ignores HTTP_PROXY
deployed = False  # whether this process has deployed the application
DRAIN_MARGIN = 20  # seconds, also for the last traces to a collector that does not answer
TIMEOUT_MARGIN = 60  # seconds beyond the request timeout, for receiving the body and transport


class ServeFailed(Exception):
    """The application did not start; the message says why."""


def start(settings: Settings) -> DeploymentHandle:
    """Start the application; returns when every replica is ready. Raises ServeFailed."""
    try:
        serve.start(
            proxy_location="EveryNode" if settings.address else "HeadOnly",
            http_options={
                "host": settings.host,
                "port": settings.port,
                "request_timeout_s": settings.limits.timeout + TIMEOUT_MARGIN,
            },
        )
    except RayTaskError as error:
        raise ServeFailed(f"Ray Serve cannot listen: {error.cause} Choose another --port or --host.") from error
    except RayActorError as error:  # the controller replaced the proxy before its error was read
        address = f"{in_url(settings.host)}:{settings.port}"
        raise ServeFailed(
            f"Ray Serve cannot listen: its proxy for {address} ended. Choose another --port or --host."
        ) from error
    except TimeoutError as error:
        raise ServeFailed(f"Ray Serve did not start: {error} Try again when the machine is less busy.") from error
    if NAME in serve.status().applications and not ray_runtime.is_restarted():
        raise ServeFailed(
            f"the cluster already runs an application {NAME!r}: stop its serve_pair.py or, if that has ended, run "
            "`serve shutdown`"
        )
    global deployed
    deployed = True
    try:
        handle = serve.run(bind_deployment(settings), name=NAME, route_prefix="/")
    except RuntimeError as error:
        raise ServeFailed(_startup_error() or str(error)) from error
    url = f"http://{in_url(settings.host)}:{settings.port}/health"
    if _has_proxy(settings) and not is_reachable(url):
        raise ServeFailed(f"{url} does not answer: is Ray Serve already running with another host or port?")
    return handle


def build(args: dict[str, list[str]]) -> Application:
    """The application for a config file of Ray Serve. `args["options"]` are arguments of serve_pair.py without
    `CLUSTER_OPTIONS`. Raises ValueError."""
    options = list(map(str, args.get("options", [])))
    if invalid := [option for option in CLUSTER_OPTIONS if any(word.partition("=")[0] == option for word in options)]:
        raise ValueError(f"{invalid[0]} is an option of serve_pair.py: use the config file and Ray's own settings here")
    error = io.StringIO()
    try:
        with redirect_stderr(error):  # the host is the config file's: as on any network, a key is needed
            settings = arguments.parse("", [*options, "--host", "0.0.0.0"], elsewhere=True)
    except SystemExit:
        raise ValueError(error.getvalue().strip()) from None
    return bind_deployment(settings)


def bind_deployment(settings: Settings) -> Application:
    """The application: the deployment of the replicas with its arguments."""
    deployment = Replica.options(**deployment_options(settings))  # type: ignore[attr-defined]
    return deployment.bind(settings.pair, settings.limits, settings.keys, settings.cors_origins)


def deployment_options(settings: Settings) -> dict:
    """The options of the Ray Serve deployment."""
    replicas: dict[str, object] = {"num_replicas": settings.replicas}
    if settings.max_replicas:
        target = {"target_ongoing_requests": settings.limits.max_num_seqs}
        replicas = {
            "autoscaling_config": {"min_replicas": settings.replicas, "max_replicas": settings.max_replicas, **target}
        }
    routing: dict[str, object] = {}
    if settings.routing == "prefix":
        tolerance = max(settings.limits.max_num_seqs // 4, 1)
        router = RequestRouterConfig(
            request_router_class=PrefixRouter, request_router_kwargs={"tolerance": tolerance}
        )  # fmt: skip
        routing = {"request_router_config": router}
    return {
        **replicas,
        **routing,
        "max_ongoing_requests": settings.limits.max_ongoing_requests,
        "max_queued_requests": settings.limits.max_ongoing_requests,  # in a proxy, beyond those at the replicas
        "backpressure_config": BackpressureConfig(status_code=429, retry_after_s=1),
        "health_check_period_s": 5,
        "health_check_timeout_s": 30,
        # for a replica removed by autoscaling; when the server stops, `drain` has already finished all replicas
        "graceful_shutdown_timeout_s": settings.limits.timeout + TIMEOUT_MARGIN,
        "max_constructor_retry_count": ATTEMPTS,
        "ray_actor_options": {
            "num_cpus": settings.num_cpus or 1,
            "resources": settings.resources,
            "runtime_env": {"env_vars": {"PYTHONPATH": PYTHONPATH, **tracing.variables()}},
        },
    }


def drain(handle: DeploymentHandle, seconds: float) -> int:
    """Reject new requests and wait for running ones; returns how many are unfinished after `seconds`."""
    return sum(handle.broadcast("drain", seconds).results(timeout_s=seconds + DRAIN_MARGIN))


def stop() -> None:
    """Stop the application if this process deployed it, and Ray Serve too unless it serves others."""
    with suppress(RuntimeError, TimeoutError):  # nothing was started, or requests of others keep it
        if deployed:
            serve.delete(NAME)
    if not serve.status().applications:
        serve.shutdown()


def _startup_error() -> str | None:
    """Why the replicas do not start: the last line of their error."""
    deployments = serve.status().applications[NAME].deployments.values()
    lines = [line.strip() for deployment in deployments for line in deployment.message.splitlines() if line.strip()]
    return lines[-1] if lines else None


def _has_proxy(settings: Settings) -> bool:
    """Whether this machine has a proxy of Ray Serve: in a cluster, only the head node and those with replicas have."""
    return not settings.address or ray.get_runtime_context().get_node_id() in serve.status().proxies


def is_reachable(url: str) -> bool:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            with DIRECT_OPENER.open(url, timeout=5):
                return True
        except OSError:  # also an HTTP error: a proxy may not have the application's route yet
            time.sleep(0.1)
    return False
