"""Serve a speculative pair: an OpenAI-compatible server on Ray Serve, with many clients on one copy of the weights.

    python samples/serve/serve_pair.py models/embedded/main models/embedded/draft

and, from another terminal, with any OpenAI client:

    curl http://127.0.0.1:8000/v1/chat/completions -H "Content-Type: application/json" \\
      -d '{"model": "embedded", "messages": [{"role": "user", "content": "Write a stack."}], "temperature": 0}'

Without DRAFT the main model is served alone. --suffix-decoding copies draft tokens from the text, with or without a
draft. Greedy and sampled output has the main model's distribution, and the draft length adapts to the load. By default
Ray starts on this machine; with --address the application joins a cluster, whose machines need this checkout and the
models at the same paths.
Ctrl-C finishes running answers and then stops; a second Ctrl-C stops at once.
"""

import signal
import socket
from importlib.util import find_spec

from speculative.cli import console


def refuse_without(*modules):
    """End with exit status 1 if one of these modules is not installed."""
    for name in modules:
        if not find_spec(name):
            console.fail(
                f"{name} is not installed: `pip install -r requirements-serve.txt` installs what serving needs.", 1
            )


def main():
    refuse_without("ray", "fastapi")
    from speculative.serving import arguments
    from speculative.serving.ray_serve import ray_runtime

    settings = arguments.parse(__doc__)
    if not settings.address:  # a cluster may serve at the port already, and has a metrics port of its own
        check_port(settings.host, settings.port, "--port")
        check_port("127.0.0.1", settings.metrics_port, "--metrics-port")  # Ray's, whatever --host is
    listen()
    console.say(f"joining Ray at {settings.address} ..." if settings.address else "starting Ray ...")
    try:
        with ray_runtime.joined(settings.address, settings.metrics_port, settings.routing):
            listen()  # Ray installs its own handlers
            serve(settings)
    except ConnectionError as error:
        failed = (
            f"Ray at {settings.address} cannot be joined" if settings.address else "Ray does not start on this machine"
        )
        console.fail(f"{failed}: {error}", status=1)


def serve(settings):
    """Serve on the connected Ray until Ctrl-C."""
    from speculative.serving.ray_serve import application, ray_runtime  # they import Ray, which takes seconds

    if lacking := ray_runtime.lacking(settings.replicas, settings.resources_per_replica):
        console.fail(f"a replica needs {lacking}: request less, or give Ray more.", status=1)
    try:
        run(settings, application)
    except ray_runtime.HeadLost:
        console.say("lost the Ray head node: restarting ...")
        raise
    except BaseException:
        if settings.address:  # a local Ray ends with this process
            application.stop()
        raise


def run(settings, application):
    """Start the application; when stopped, let running answers finish."""
    from speculative.serving.ray_serve import ray_runtime

    console.say(f"loading {settings.pair.name} ...")
    try:
        handle = application.start(settings)
    except application.ServeFailed as error:
        console.fail(str(error), status=1)
    say_ready(settings, handle.cache_bytes.remote().result() / 1e6)
    try:
        ray_runtime.wait_until_lost()
    except (KeyboardInterrupt, Terminated):
        console.say(f"stopping: running answers have {settings.drain:g} s to finish (Ctrl-C: stop at once)")
        try:
            left = application.drain(handle, settings.drain)
        except KeyboardInterrupt:
            left = application.drain(handle, 0)
        if left:
            console.say(f"{left} answers did not finish in time")
        raise


def say_ready(settings, cache):
    from speculative.serving import arguments

    url = f"http://{arguments.in_url(settings.host)}:{settings.port}/v1"
    replicas = "1 replica" if settings.replicas == 1 else f"{settings.replicas} replicas"
    console.say(f"model {settings.pair.name}, {replicas} with {cache:.0f} MB of KV cache")
    if not settings.address:
        console.say(f"metrics: http://127.0.0.1:{settings.metrics_port}/metrics")
    console.say(f"ready: {url}")


def check_port(host, port, name):
    """End with an error if another program uses the port."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        reason = error.strerror.partition(" (while")[0]
        console.fail(f"{name} {port} at {host} is not available ({reason}): choose another.", status=1)


class Terminated(SystemExit):
    """SIGTERM from a service manager: a normal end, with exit status 0."""


def listen():
    """Raise Ctrl-C and SIGTERM in the main thread, so that the server shuts down in order."""
    signal.set_wakeup_fd(-1)  # disables console's handler, which would end the process at once
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, terminate)


def terminate(*_):
    raise Terminated(0)


if __name__ == "__main__":
    console.run(main)
