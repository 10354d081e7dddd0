"""Serve a speculative pair: an OpenAI-compatible endpoint on Ray Serve, many clients on one copy of the weights.

    python samples/serve/serve_pair.py models/embedded/main models/embedded/draft

and, from another terminal, with any client of that API:

    curl http://127.0.0.1:8000/v1/chat/completions -H "Content-Type: application/json" \\
      -d '{"model": "embedded", "messages": [{"role": "user", "content": "Write a stack."}], "temperature": 0}'

Without DRAFT the main model answers alone. Greedy or sampled, every text is what the main model alone would have
written: the draft makes it faster, and is used as far as that pays for all texts under way. On one machine Ray starts
inside; with --address the same application joins a cluster, whose machines have this checkout and the models at the
same paths. Ctrl-C lets answers under way end, then all of it; twice, at once.
"""

import signal
import socket
from importlib.util import find_spec

from speculative.cli import console


def refuse_without(*modules):
    """End with exit status 1 where one of these is not installed."""
    for name in modules:
        if not find_spec(name):
            console.fail(
                f"{name} is not installed: `pip install -r requirements-serve.txt` brings what serving needs.", 1
            )


def main():
    refuse_without("ray", "fastapi")
    from speculative.serving import arguments, ray_runtime

    args = arguments.parse(__doc__)
    for port, name in ((args.port, "--port"), (args.metrics_port, "--metrics-port")):
        check_port(args.host, port, name)
    listen()
    try:
        with ray_runtime.joined(args.address, args.metrics_port):
            listen()  # Ray has handlers of its own
            serve(args)
    except ConnectionError as error:
        failed = f"Ray at {args.address} cannot be joined" if args.address else "Ray does not start on this machine"
        console.fail(f"{failed}: {error}", status=1)


def serve(args):
    """On the Ray that is there, until Ctrl-C."""
    from speculative.serving import (
        application,  # imports Ray, which takes seconds
        ray_runtime,
    )

    each = {"CPU": args.num_cpus or 1, **args.resources}
    if lacking := ray_runtime.lacking(args.replicas, each):
        console.fail(f"the replicas need {lacking}: ask for less, or give Ray more.", status=1)
    try:
        run(args, application)
    except ray_runtime.Lost:
        console.say("Ray's head is gone: starting again ...")
        raise
    except BaseException:
        if args.address:  # a Ray of its own ends with this process
            application.stop()
        raise


def run(args, application):
    """Start the application; in the end let its answers end."""
    from speculative.serving import ray_runtime

    try:
        handle = application.start(args)
    except application.Failed as error:
        console.fail(str(error), status=1)
    say_ready(args, handle.cache_bytes.remote().result() / 1e6)
    try:
        ray_runtime.wait_until_lost()
    except (KeyboardInterrupt, Terminated):
        console.say(f"stopping: answers under way have {args.drain:g} s to end (Ctrl-C: none)")
        if left := application.drain(handle, args.drain):
            console.say(f"{left} answers did not end in time")
        raise


def say_ready(args, cache):
    from speculative.serving import arguments

    url = f"http://{arguments.in_url(args.host)}:{args.port}/v1"
    console.say(f"model {args.pair.name}, {args.replicas} replicas, {cache:.0f} MB for the cache of each")
    if not args.address:
        console.say(f"metrics: http://127.0.0.1:{args.metrics_port}/metrics")
    console.say(f"ready: {url}")


def check_port(host, port, name):
    """Refuse a port that another program listens at."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        reason = error.strerror.partition(" (while")[0]
        console.fail(f"{name} {port} at {host} cannot be had ({reason}): choose another.", status=1)


class Terminated(SystemExit):
    """A service manager asks for the end, which is then a success."""


def listen():
    """Ctrl-C and SIGTERM are raised where this program is: there is much to end in order."""
    signal.set_wakeup_fd(-1)  # console's, which would end the process at once
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, terminate)


def terminate(*_):
    raise Terminated(0)


if __name__ == "__main__":
    console.run(main)
