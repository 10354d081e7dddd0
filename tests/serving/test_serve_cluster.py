"""The smallest cluster: two Ray nodes on this machine with a replica each, under constant load from clients, while a
replica is killed, a node is removed, and the head restarts. The embedded draft is served alone, as it starts fast.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path

import httpx
import psutil
import pytest

from speculative.bench.load.clients import Target, ask
from speculative.bench.load.metrics import outcomes
from speculative.bench.load.server import free_port
from tests.support.later import openai
from tests.support.serving import AS_SERVED, Server, ray_cluster, small_server
from tests.support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Ray's clusters are for Linux")
ROOM = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
CLIENTS = 4
PAUSE = 0.3  # seconds between two requests of a client
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "for-this-test-only-" + "0" * 40}


@contextlib.contextmanager
def head_of_a_cluster(address, log):
    """`ray start --head` with a token, as an administrator runs it; killed with all its child processes."""
    ray, port = Path(sys.executable).with_name("ray"), address.rpartition(":")[2]
    command = [str(ray), "start", "--head", "--block", "--num-cpus=2", f"--port={port}", "--include-dashboard=false"]
    command += ["--no-monitor", "--include-log-monitor=false"]
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder, log.open("w") as output:
        process = psutil.Popen(
            [*command, f"--object-store-memory={ROOM['object_store_memory']}"],
            env={**os.environ, **TOKEN, "PYTHONPATH": AS_SERVED, "RAY_TMPDIR": folder, "RAY_worker_niceness": "0"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            wait_until(lambda: "Ray runtime started" in log.read_text(encoding="utf-8"), "a head starts")
            yield
        finally:
            processes = [*process.children(recursive=True), process]
            for child in processes:
                with contextlib.suppress(psutil.Error):
                    child.kill()
            psutil.wait_procs(processes, timeout=PATIENCE)


def test_server_rejoins_a_restarted_cluster_head(tmp_path):
    address, log = f"127.0.0.1:{free_port()}", tmp_path / "head.txt"
    params = {"model": Server.model, "prompt": "def f(", "max_tokens": 20, "temperature": 0}
    with contextlib.ExitStack() as last:
        with head_of_a_cluster(address, log):
            in_use = address.rpartition(":")[2]  # the cluster has a metrics port of its own
            server = small_server("--address", address, "--metrics-port", in_use, env=TOKEN)
            last.callback(server.end)
            with pytest.raises(AssertionError, match=r"cannot be joined: .*RAY_AUTH_TOKEN"):
                small_server("--address", address).wait_for("ready: ")
            server.wait_for("ready: ")
            with pytest.raises(AssertionError, match="already runs an application"):
                small_server("--address", address, env=TOKEN).wait_for("ready: ")
            text = server.client().completions.create(**params).choices[0].text
        with pytest.raises((openai.APIError, httpx.HTTPError)):
            server.client(timeout=10).completions.create(**params)
        with head_of_a_cluster(address, log):
            server.wait_for("ready: ")
            assert server.client().completions.create(**params).choices[0].text == text
            assert server.end() == 0


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster(**ROOM) as cluster:
        cluster.other = cluster.add_node(**ROOM)
        yield cluster


@pytest.fixture(scope="module")
def server(cluster):
    with small_server("--address", cluster.address, "--replicas", 2, "--drain", 5) as server:
        yield server


class Load:
    """Clients that send requests in a loop while the block runs; `answers` holds the responses so far."""

    def __init__(self, server):
        self.answers = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(server, i)) for i in range(CLIENTS)]

    def _ask(self, server, number):
        endpoint = Target(server.url, server.model)
        while not self._stop.is_set():
            number += CLIENTS
            connection = endpoint.connect()  # a new one each time: at either node
            settings = {"max_tokens": 40, "ignore_eos": True, "temperature": 0}
            self.answers.append(ask(connection, endpoint, number, f"def f{number}(x):", settings))
            connection.close()
            self._stop.wait(PAUSE)

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in self._threads), "a client waits in vain"

    def wait_for_answers(self, number):
        """Wait for `number` more responses."""
        enough = outcomes(self.answers)["answered"] + number
        wait_until(lambda: outcomes(self.answers)["answered"] >= enough, f"{number} answers more")


def replicas():
    """The processes of the replicas on both nodes, by pid: the pid of the node, which is a child of this process."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "ServeReplica" in "".join(process.cmdline()):
                found[process.pid] = process.ppid()
    return found


def wait_for_replicas(number, without=()):
    def enough():
        running = {pid: node for pid, node in replicas().items() if pid not in without}
        return running if len(running) >= number else None

    return wait_until(enough, f"there are {number} replicas", every=0.2)


def assert_only_pending_requests_were_lost(load):
    """Each client lost at most the pending response and the next one, sent before the routers were updated."""
    ended = outcomes(load.answers)
    print(ended)
    assert ended["lost"] == 0
    assert ended["cut off"] + ended["refused"] <= 2 * CLIENTS
    assert {answer.outcome for answer in load.answers[-2 * CLIENTS :]} == {"answered"}


def test_cluster_address_is_in_its_own_folder(cluster):
    """Not in /tmp/ray, which may belong to an earlier Ray and is read by programs of other users."""
    assert Path(os.environ["RAY_TMPDIR"], "ray/ray_current_cluster").read_text(encoding="ascii") == cluster.address


def test_replicas_run_on_both_nodes(server):
    nodes = wait_for_replicas(2).values()
    assert len(set(nodes)) == 2  # each replica is a child of a different node's raylet


def test_killed_replica_restarts_and_others_keep_serving(server):
    before = wait_for_replicas(2)

    def end(stream):
        """The outcome as the openai client reports it."""
        try:
            reasons = [chunk.choices[0].finish_reason for chunk in stream]
        except (openai.APIError, httpx.HTTPError):
            return "error"
        return reasons[-1]

    with Load(server) as load, server.client() as client:
        load.wait_for_answers(2 * CLIENTS)
        params = {"max_tokens": 1000, "temperature": 2, "stream": True, "extra_body": {"ignore_eos": True}}
        streams = [client.completions.create(model=server.model, prompt="def f(", **params) for _ in range(12)]
        for stream in streams:
            next(iter(stream))
        victim = next(iter(before))
        os.kill(victim, signal.SIGKILL)
        ends = Counter(map(end, streams))
        print(ends)
        assert ends["error"] and ends["error"] + ends["length"] == len(streams)
        load.wait_for_answers(2 * CLIENTS)  # from the other replica
        wait_for_replicas(2, without=[victim])
        load.wait_for_answers(4 * CLIENTS)
    assert_only_pending_requests_were_lost(load)


def test_removed_node_loses_only_its_own_requests(server, cluster):
    wait_for_replicas(2)
    with Load(server) as load:
        load.wait_for_answers(2 * CLIENTS)
        cluster.remove_node(cluster.other, allow_graceful=False)
        load.wait_for_answers(6 * CLIENTS)
    assert_only_pending_requests_were_lost(load)
    assert len(replicas()) == 1
    cluster.other = cluster.add_node(**ROOM)
    with Load(server) as load:
        wait_for_replicas(2)
        load.wait_for_answers(4 * CLIENTS)
    assert outcomes(load.answers)["answered"] == len(load.answers), outcomes(load.answers)
