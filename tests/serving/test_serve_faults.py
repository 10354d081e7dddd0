"""Faults as seen by clients of the real server: each request is answered, rejected with an API error, or cut off in a
way that its client notices; none is lost. The server's metrics agree with the clients' counts.
"""

import concurrent.futures
import contextlib
import functools
import http.client
import json
import signal
import socket
import threading
import time
import urllib.request
from collections import Counter

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from speculative.bench.load.clients import Target, ask
from speculative.bench.load.metrics import outcomes
from tests.support import waiting
from tests.support.serving import Server
from tests.support.waiting import PATIENCE

LONG = {"max_tokens": 300, "ignore_eos": True, "temperature": 0}  # seconds of text
SHORT = {"max_tokens": 8, "ignore_eos": True, "temperature": 0}
RUNNING, WAITING = 4, 4  # of a replica
STREAMS = 2


def endpoint(server):
    return Target(server.url, server.model)


def one(server, settings=SHORT, number=0, piece=lambda text: None):
    return ask(endpoint(server).connect(), endpoint(server), number, f"def f{number}(x):", settings, piece)


class Clients:
    """Concurrent requests, one per thread: `answers` waits for all to end, `streaming` for `number` to receive text."""

    def __init__(self, server, number, settings=LONG):
        self._first = threading.Semaphore(0)
        self._pool = concurrent.futures.ThreadPoolExecutor(number)
        self._futures = [self._pool.submit(self._ask, server, settings, i) for i in range(number)]

    def _ask(self, server, settings, number):
        began = []

        def piece(text):
            if not began:
                began.append(self._first.release())

        return one(server, settings, number, piece)

    def wait_until_streaming(self, number):
        for _ in range(number):
            assert self._first.acquire(timeout=PATIENCE), "no text was received"

    def are_done(self):
        return all(future.done() for future in self._futures)

    def answers(self):
        found = [future.result(timeout=2 * PATIENCE) for future in self._futures]
        self._pool.shutdown()
        return found


wait_until = functools.partial(waiting.wait_until, passing=(OSError,))


def health(server):
    with urllib.request.urlopen(server.url.replace("/v1", "/health"), timeout=10) as answer:
        return json.load(answer)


def is_idle(server):
    return health(server) == {"status": "ok", "running": 0, "waiting": 0}


def counted(sums):
    """The server's request counts by finish reason and error."""
    return Counter({name[1]: count for name, count in sums.items() if isinstance(name, tuple)})


def post(server, body, path="/completions", headers=()):
    """Status and parsed JSON of the response to a raw body."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    with contextlib.closing(connection):
        connection.request("POST", f"/v1{path}", body, {"Content-Type": "application/json", **dict(headers)})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def runs(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def head_of(server):
    """The process of its Ray's head, or None."""
    for process in psutil.Process(server.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "gcs_server" in process.name() and runs(process):
                return process


# ---- one replica ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(shared_server):
    return shared_server()


@pytest.fixture(scope="module")
def before(server):
    """The requests that the server counted before the tests below, by outcome."""
    return counted(server.settled_metrics())


@pytest.fixture(scope="module")
def sent(before):
    """The requests that the tests below sent, by the outcome that the server should count."""
    return {}


def count(sent, **more):
    for outcome, number in more.items():
        sent[outcome] = sent.get(outcome, 0) + number


def test_full_queue_returns_429_and_accepted_requests_complete(server, sent):
    """Many requests arrive at once. The speed of this machine does not matter."""
    clients, in_flight = Clients(server, 4 * (RUNNING + WAITING), LONG), [0]
    while not clients.are_done():
        with contextlib.suppress(OSError):
            state = health(server)
            in_flight.append(state["running"] + state["waiting"])
        time.sleep(0.02)
    answers = clients.answers()
    found = outcomes(answers)
    assert max(in_flight) <= RUNNING + WAITING <= found["answered"] and found["refused"]
    assert found["answered"] + found["refused"] == len(answers), found
    for answer in answers:
        if answer.outcome == "refused":
            assert answer.status == 429 and answer.retry_after >= 1 and "queue" in answer.error
        else:
            assert answer.tokens == LONG["max_tokens"] and answer.finish_reason == "length"
    count(sent, length=found["answered"], refused_429=found["refused"])
    wait_until(lambda: is_idle(server), "every slot is free")


def test_disconnected_clients_free_their_slots(server, sent):
    """Some clients disconnect while streaming, some while queued; the next request is served at once."""
    while not (connections := some_running_some_waiting(server)):
        count(sent, length=RUNNING + WAITING)  # all were answered before the check
    for connection in connections:
        connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()
    wait_until(lambda: is_idle(server), "their slots are free")
    assert one(server).outcome == "answered"
    count(sent, abort=RUNNING + WAITING, length=1)


def some_running_some_waiting(server):
    """The connections of the clients, or None if their requests ended too soon."""
    clients = []
    for i in range(RUNNING + WAITING):
        path, body = endpoint(server).request(f"def f{i}(x):", LONG)
        connection = endpoint(server).connect()
        headers = {**endpoint(server).headers, "x-request-disconnect-disabled": "?1"}  # Ray's, which is ignored
        connection.request("POST", path, body, headers)
        clients.append(connection)
    streaming = clients[0].getresponse()
    assert streaming.readline().startswith(b"data: ")
    wait_until(lambda: is_idle(server) or health(server)["waiting"] == WAITING, "the others wait")
    return None if is_idle(server) else clients


def test_slow_reader_delays_nobody_and_gets_its_whole_text(server, sent):
    path, body = endpoint(server).request("class Stack:", LONG)
    request = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.settimeout(PATIENCE)
        slow.connect(("127.0.0.1", server.port))
        slow.sendall(request % (path.encode(), len(body)) + body)
        got = slow.recv(1)
        answers = [one(server, {**SHORT, "max_tokens": 100}, i) for i in range(5)]
        assert outcomes(answers)["answered"] == 5
        wait_until(lambda: health(server)["running"] == 0, "its text is decoded though it is not read")
        while b"data: [DONE]" not in got:
            got += slow.recv(1 << 16)
    usage = json.loads(got.rpartition(b"data: {")[2].partition(b"\n")[0].join([b"{", b""]))["usage"]
    assert usage["completion_tokens"] == LONG["max_tokens"]
    count(sent, length=6)


BODIES = {
    "not JSON": b"{",
    "no UTF-8": b'{"model": "embedded", "prompt": "\xff"}',
    "empty": b"",
    "a list": b"[]",
    "deep": b"[" * 90_000,
    "no prompt": b'{"model": "embedded"}',
    "unknown field": b'{"model": "embedded", "prompt": "x", "no_such_field": 1}',
    "wrong type": b'{"model": "embedded", "prompt": "x", "max_tokens": "5"}',
    "NaN": b'{"model": "embedded", "prompt": "x", "temperature": NaN}',
    "too many choices": b'{"model": "embedded", "prompt": "x", "n": 1000}',
    "a lone surrogate": b'{"model": "embedded", "prompt": "\\ud800"}',
    "unknown token id": b'{"model": "embedded", "prompt": [5, 99999999]}',
    "too many tokens": b'{"model": "embedded", "prompt": "x", "max_tokens": 100000}',
    "a prompt beyond the context": json.dumps({"model": "embedded", "prompt": "x = 1\n" * 2000}).encode(),
}


@pytest.mark.parametrize("name", BODIES)
def test_malformed_body_returns_api_error(server, name):
    status, answer = post(server, BODIES[name])
    assert status in (400, 422), answer
    assert answer["error"]["message"] and answer["error"]["type"] == "invalid_request_error"
    assert "Traceback" not in answer["error"]["message"] and "\n" not in answer["error"]["message"]


@pytest.mark.parametrize("with_length", [True, False], ids=["with its length", "in chunks"])
def test_oversized_body_is_rejected(server, with_length):
    body = json.dumps({"model": "embedded", "prompt": "x" * (8 << 20)}).encode()
    pieces = body if with_length else (body[i : i + 65536] for i in range(0, len(body), 65536))
    try:
        status, answer = post(server, pieces)
    except (BrokenPipeError, ConnectionResetError):
        pass  # it does not wait for the rest
    else:
        assert (status, answer["error"]["type"]) == (413, "invalid_request_error")
    assert one(server).outcome == "answered"


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
SENSIBLE = {
    "max_tokens": st.integers(1, 3),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "seed": st.integers(-9, 9),
    "stop": st.text(min_size=1, max_size=5) | st.lists(st.text(min_size=1, max_size=5), max_size=4),
    "n": st.integers(1, RUNNING),
    "logprobs": st.booleans() | st.integers(0, 5),
    "tools": st.lists(st.just({"type": "function", "function": {"name": "f", "parameters": {}}}), max_size=1),
    "tool_choice": st.sampled_from(["auto", "none", "required"]),
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}]),
    "structured_outputs": st.sampled_from([{"regex": "[a-c]+"}, {"json": {"enum": [1, "a"]}}, {"choice": ["a", "b"]}]),
    "frequency_penalty": st.floats(-2, 2),
    "presence_penalty": st.floats(-2, 2),
    "user": st.text(max_size=9),
    "repetition_penalty": st.floats(0.01, 10),
    "min_p": st.floats(0, 1, exclude_max=True),
}
OTHERS = ("prompt", "messages", "stream_options", "echo", "top_k", "model", "logit_bias", "top_logprobs")
fields = st.fixed_dictionaries({}, optional=SENSIBLE) | st.dictionaries(
    st.sampled_from([*SENSIBLE, *OTHERS]), anything, max_size=3
)


@pytest.mark.parametrize("path", ["/completions", "/chat/completions"])
def test_fuzzed_fields_get_valid_response_or_api_error(server, path, request):
    """Hypothesis generates the bodies: a valid body with some fields replaced by any value."""
    valid = {"model": "embedded", "prompt": "x"} if path == "/completions" else {
        "model": "embedded", "messages": [{"role": "user", "content": "x"}]}  # fmt: skip
    statuses = {}

    @settings(
        max_examples=2000 if request.config.getoption("--long") else 60,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(fields)
    def check(fields):
        body = json.dumps({**valid, "max_tokens": 2, **fields}).encode()
        status, answer = post(server, body, path)
        statuses[status] = statuses.get(status, 0) + 1
        if status == 200:
            assert {choice["finish_reason"] for choice in answer["choices"]} <= {"stop", "length", "tool_calls"}
        else:
            assert 400 <= status < 500, (status, answer, body)
            assert answer["error"]["message"] and answer["error"]["type"]

    check()
    assert {200, 400} <= set(statuses), statuses  # both kinds occurred
    wait_until(lambda: is_idle(server), "every slot is free")


def test_metrics_match_client_side_counts(server, before, sent):
    """After all of the above, the counts match the requests sent: none is missing and none is extra."""
    if not {"abort", "refused_429"} <= sent.keys():
        pytest.skip("a test that sends requests to be counted did not run to its end")

    def new():
        return counted(server.metrics()) - before

    wait_until(lambda: all(new()[name] >= number for name, number in sent.items()), f"the server has counted {sent}")
    found = new()
    assert all(found[name] == sent[name] for name in ("abort", "refused_429")), found
    assert not [name for name in found if name.startswith("refused_5") or "failed" in name or "internal" in name], found


def test_server_restarts_ray_after_its_head_is_killed_even_twice(server):
    """Running streams are cut off; a retry is answered."""
    before = psutil.Process(server.process.pid).children(recursive=True)
    head = head_of(server)
    clients = Clients(server, STREAMS)
    clients.wait_until_streaming(STREAMS)
    head.kill()
    server.wait_for("lost the Ray head node: restarting")
    wait_until(lambda: not any(runs(process) for process in before), "none of the old processes is left")
    wait_until(lambda: head_of(server), "Ray's head starts").kill()
    server.wait_for("Ray did not start (")
    server.wait_for("ready: ")
    assert outcomes(clients.answers())["lost"] == 0
    assert one(server).outcome == "answered"


def test_port_taken_during_ray_startup_gives_one_sentence_error():
    server = Server()
    try:
        wait_until(lambda: head_of(server), "Ray's head starts")
        with socket.create_server(("127.0.0.1", server.port)):
            line = server.wait_for("error: Ray Serve cannot listen: ")  # its proxy's error, or that it ended
            assert f"127.0.0.1:{server.port}" in line and line.endswith("Choose another --port or --host.")
        assert server.process.wait(PATIENCE) == 1
    finally:
        server.end()


def test_shutdown_finishes_streams_and_rejects_new_requests(server):
    """Last: the server of the tests above is stopped while streaming."""
    before = psutil.Process(server.process.pid).children(recursive=True)
    clients = Clients(server, STREAMS)
    clients.wait_until_streaming(STREAMS)
    server.process.send_signal(signal.SIGTERM)
    refused = []
    while server.process.poll() is None and len(refused) < 1000:
        answer = one(server)
        if answer.outcome != "answered":
            refused.append(answer)
            time.sleep(0.1)
    assert server.end() == 0
    answers = clients.answers()
    assert outcomes(answers)["answered"] == STREAMS and {answer.tokens for answer in answers} == {LONG["max_tokens"]}
    assert refused and outcomes(refused)["lost"] == 0
    assert {answer.status for answer in refused if answer.outcome == "refused"} <= {503}
    wait_until(lambda: not any(runs(process) for process in before), "none of its processes is left")
    assert not any("Traceback" in line for line in server.lines), server.lines
