"""A real server for tests: `samples/serve/serve_pair.py` in a process of its own, at ports of its own.

    with Server() as server:
        server.client().chat.completions.create(model=server.model, ...)

It is stopped by its own process id; Ray's processes end with it. `Api` is its HTTP application alone, over the real
engine, in a thread of the tests: without Ray, which is slow to start.
"""

import asyncio
import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest
import uvicorn

from speculative.bench.load.server import free_port
from speculative.cli.processes import interrupt_group, own_group
from speculative.serving.engine.engine_thread import Engine
from speculative.serving.http.endpoint import Endpoint
from speculative.serving.settings import Limits
from tests.support.later import openai
from tests.support.paths import DRAFT, MAIN, ROOT
from tests.support.waiting import PATIENCE, wait_until

READY_SECONDS = 180
# For httpx without TLS, which by default loads certificates for each request, in 27 ms, and gives up after 5 s.
PLAIN = {"verify": False, "timeout": PATIENCE}
# As where only requirements-serve.txt is installed: Ray Serve imports pandas if it can, half a second in each process.
AS_SERVED = os.pathsep.join(filter(None, [str(ROOT / "tests/support/served"), os.environ.get("PYTHONPATH")]))
METRICS_EXPORTED = {"RAY_metrics_report_interval_ms": "500"}  # by Ray's agent; every 10 seconds by default


@contextlib.contextmanager
def ray_cluster(**head):
    """Ray's cluster for tests. Its nodes may take as long to start as a busy machine needs: Ray gives them 30 s."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray._private import services
    from ray.cluster_utils import Cluster

    get_node = services.get_node

    def patient(*arguments):
        return wait_until(lambda: get_node(*arguments), "the node starts", READY_SECONDS, passing=(RuntimeError,))

    short = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)  # the path of sockets
    with short as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(services, "get_node", patient)
        patch.setenv("RAY_TMPDIR", folder)  # with `temp_dir`, Ray writes the address to /tmp/ray, there or not
        patch.setenv("PYTHONPATH", AS_SERVED)
        patch.setenv("RAY_worker_niceness", "0")  # by default 15: other test processes would come first
        patch.setenv("RAY_health_check_period_ms", "500")  # by default 3 s: a node is lost when it misses five
        bare = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}  # each takes a process
        cluster = Cluster(initialize_head=True, head_node_args={**bare, **head})
        yield cluster
        cluster.shutdown()


class Server:
    """`options` are those of serve_pair.py; `draft=None` serves the main model alone."""

    model = "embedded"

    def __init__(self, *options: object, main: Path = MAIN, draft: Path | None = DRAFT, env: dict | None = None):
        self.port, self.metrics_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.lines: list[str] = []  # of stderr, so far
        self._new_lines: queue.Queue[str | None] = queue.Queue()
        ports = ("--port", self.port, "--metrics-port", self.metrics_port)
        ports += ("--num-cpus", 1)  # the threads of small models mostly wait for each other
        folders = [main, draft] if draft else [main]
        self.process = subprocess.Popen(
            [sys.executable, ROOT / "samples/serve/serve_pair.py", *map(str, (*folders, *ports, *options))],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            encoding="utf-8",
            errors="replace",
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": AS_SERVED, **(env or {})},
            **own_group(),  # Ctrl-C is then for the tests alone, and `interrupt` for it
        )
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> "Server":
        self.wait_for("ready: ")
        return self

    def __exit__(self, *_) -> None:
        self.end()

    def wait_for(self, beginning: str, seconds: float = READY_SECONDS) -> str:
        """Wait for a new line on stderr with this beginning, and return it."""
        with contextlib.suppress(queue.Empty):
            while (line := self._new_lines.get(timeout=seconds)) is not None:
                if line.startswith(beginning):
                    return line
        self.end()
        raise AssertionError(f"the server printed no line that begins with {beginning!r}:\n" + "\n".join(self.lines))

    def client(self, **options) -> "openai.OpenAI":
        """A client without retries: a test should see the first response."""
        return openai.OpenAI(base_url=self.url, **{"api_key": "none", "max_retries": 0, "timeout": 120, **options})

    def metrics(self) -> Counter:
        """The sums of its metrics so far, by name; those by reason or error also by (name, reason or error)."""
        sums: Counter = Counter()
        for line in httpx.get(f"http://127.0.0.1:{self.metrics_port}/metrics", **PLAIN).text.splitlines():
            if line.startswith(("ray_speculative_", "ray_vllm_")):
                name, value = line.partition("{")[0].removeprefix("ray_"), float(line.rsplit(" ", 1)[1])
                sums[name] += value
                if kind := re.search(r'(?:finished_reason|error)="(\w+)"', line):
                    sums[name, kind[1]] += value
        return sums

    def settled_metrics(self) -> Counter:
        """The metrics once all finished requests are counted."""

        def settled():
            before = self.metrics()
            time.sleep(2.5)  # a replica updates them every second
            return before if before == self.metrics() else None

        return wait_until(settled, "the metrics do not change any more")

    def interrupt(self) -> None:
        """Ctrl-C as a terminal sends it: to Ray's processes, too."""
        interrupt_group(self.process)

    def end(self, how: int = signal.SIGTERM, seconds: float = 60) -> int:
        """Stop it with Ctrl-C, or kill it if that fails; return the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(how)
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()

    def _read(self) -> None:
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            self._new_lines.put(self.lines[-1])
        self._new_lines.put(None)


def small_server(*options: object, **more) -> Server:
    """A server that starts fast, for tests that need one of their own: the embedded draft alone."""
    return Server("--model-name", Server.model, *options, main=DRAFT, draft=None, **more)


class Counts:
    """The metrics interface of the endpoint, without Ray."""

    def __init__(self):
        self.outcomes = []

    def count_rejected(self, status: int) -> None:
        self.outcomes.append(f"refused_{status}")

    def count_finished(self, job, outcome: str) -> None:
        self.outcomes.append(outcome)


class Api:
    """The application of `decoder` at a port of its own: what a replica is, without Ray. `limits` as `Limits` has them,
    `draft_length` and `traces` as `Endpoint` has them; `http` is uvicorn's protocol.
    """

    model = "embedded"

    def __init__(self, decoder, keys=None, http="auto", cors_origins=(), draft_length=0, traces=None, **limits):
        defaults = {"max_prompt_tokens": 10**6, "max_output_tokens": 400, "max_num_seqs": 4, "max_queue": 4}
        self.limits = Limits(**{**defaults, "timeout": 60, **limits})
        self.counts, self._draft_length, self._traces = Counts(), draft_length, traces
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self._ready = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=[self._serve(decoder, keys, http, cors_origins)])

    async def _serve(self, decoder, keys, http, cors_origins) -> None:
        self.loop = asyncio.get_running_loop()
        self.engine = Engine(decoder, self.limits.max_num_seqs, self.limits.max_queue)
        self.endpoint = Endpoint(self.model, self.engine, self.limits, self.counts, self._draft_length, self._traces)
        app = self.endpoint.application(keys, cors_origins)
        config = uvicorn.Config(app, port=self.port, http=http, lifespan="off", log_config=None)
        self.uvicorn = uvicorn.Server(config)
        serving = asyncio.create_task(self.uvicorn.serve())
        while not self.uvicorn.started:
            await asyncio.sleep(0.01)
        self._ready.set()
        await serving
        self.engine.close()

    def __enter__(self) -> "Api":
        self._thread.start()
        assert self._ready.wait(READY_SECONDS), "the application does not listen"
        return self

    def __exit__(self, *_) -> None:
        self.uvicorn.should_exit = True
        self._thread.join(READY_SECONDS)

    def run(self, coroutine):
        """The result of a coroutine in the loop of the application."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(READY_SECONDS)

    client = Server.client
