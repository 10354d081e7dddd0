"""Prefix-aware routing: returning chats, an overloaded replica, and the hashes by which the router knows a body."""

import asyncio
import contextlib
import http.client
import json
from types import SimpleNamespace

import pytest

from speculative.bench.load.clients import Target
from speculative.serving.ray_serve import body_hashes
from speculative.serving.ray_serve.body_hashes import CHUNK, HEADER, PREFIX_BYTES, BeginningReader, chunk_hashes
from speculative.serving.ray_serve.internal_headers import WithoutInternalHeaders
from tests.support.later import Later
from tests.support.serving import small_server
from tests.support.waiting import wait_until

CHATS, TURNS = 6, 3
benchmark_routing = Later("scripts.benchmark_routing")
prefix_routing = Later("speculative.serving.ray_serve.prefix_routing")


@pytest.fixture(scope="module")
def server():
    with small_server("--replicas", 2, "--routing", "prefix", "--max-num-seqs", 4) as server:
        yield server


def post(server, body):
    """The connection of a request whose body is `body`, or its first `PREFIX_BYTES` bytes."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(len(body) + (len(body) > PREFIX_BYTES)))
    connection.endheaders(body)
    return connection


def cached_tokens(server, prompt):
    """Prompt tokens of a completion that came from the prefix cache of its replica."""
    body = {"model": server.model, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    with contextlib.closing(post(server, json.dumps(body).encode())) as connection:
        answer = json.load(connection.getresponse())
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_returning_chats_are_routed_to_the_replica_with_their_prefix(server):
    chats = [f"# chat {i}\n" + f"value_{i} = {i}\n" * 30 for i in range(CHATS)]
    for turn in range(TURNS):
        for i in range(CHATS):
            cached = cached_tokens(server, chats[i])
            assert bool(cached) == bool(turn), (turn, i, cached)
            chats[i] += f"other_{turn} = {turn}\n" * 20


def test_routing_benchmark_counts_cache_hits_after_first_turn(server):
    arguments = SimpleNamespace(chats=2, turns=3, added=12, clients=2)
    answers = benchmark_routing.play(Target(server.url, server.model), arguments, first=100)
    found = benchmark_routing.row("prefix", answers)
    assert found["requests"] == 4 and 0.4 < found["hits"] < 1
    assert "| prefix |" in benchmark_routing.table([found])


def test_overloaded_replica_is_skipped(server):
    """Two requests with unfinished bodies load it: more than a quarter of its batch above the idle replica."""
    prompt = "name = 'overloaded'\n" * 30
    assert not cached_tokens(server, prompt) and cached_tokens(server, prompt)
    beginning = json.dumps({"model": server.model, "prompt": prompt})[:-2].encode()
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(contextlib.closing(post(server, beginning.ljust(PREFIX_BYTES + 1, b"x"))))
        wait_until(lambda: not cached_tokens(server, prompt), "the other replica gets it", seconds=20)
        assert cached_tokens(server, prompt)  # which has it from now on


@pytest.mark.parametrize("session", ["x" * 100_000, "," * 128, "0" * 16 + ",forged", ",".join(["0" * 16] * 129)])
def test_router_ignores_session_ids_of_clients(session):
    """On a cluster whose proxies do not remove them."""
    hashes = chunk_hashes(b"b" * PREFIX_BYTES, b"key")
    request = SimpleNamespace(metadata=SimpleNamespace(session_id=",".join(hashes)))
    assert prefix_routing.PrefixRouter._hashes(request) == hashes
    request.metadata.session_id = session
    assert prefix_routing.PrefixRouter._hashes(request) == []


def test_body_hashes_match_up_to_first_difference_in_body_or_key():
    body = bytes(range(256)) * 5
    other = body[: 3 * CHUNK] + b"other" + body[3 * CHUNK :]
    assert len(chunk_hashes(body, b"")) == 5 and len(set(chunk_hashes(body, b""))) == 5
    pairs = zip(chunk_hashes(body, b""), chunk_hashes(other, b""), strict=True)
    assert [x == y for x, y in pairs] == [True] * 3 + [False] * 2
    assert not set(chunk_hashes(body, b"")) & set(chunk_hashes(body, b"a key"))


def test_hash_table_finds_replica_with_longest_prefix(monkeypatch):
    monkeypatch.setattr("speculative.serving.ray_serve.prefix_routing.MAX_HASHES", 3)
    table = prefix_routing.HashTable()
    table.add(["a", "b"], "first")
    table.add(["a"], "second")
    assert table.longest_match(["a", "b", "c"], {"first", "second"}) == {"first"}
    assert table.longest_match(["a", "b", "c"], {"second"}) == {"second"}
    assert table.longest_match(["a", "x"], {"first", "second"}) == {"first", "second"}
    assert table.longest_match(["x"], {"first", "second"}) == set()
    table.add(["d", "e"], "second")  # "b" was the oldest
    assert table.longest_match(["b"], {"first", "second"}) == set()


def read(parts, more_after=False, method="POST"):
    """The header and body that the application behind Ray's proxy receives of a request with these parts."""
    got = {}

    async def application(scope, receive, send):
        got["header"] = [value for name, value in scope["headers"] if name != b"authorization"]
        got["body"] = b""
        for _ in parts:
            got["body"] += (await receive())["body"]

    async def client():
        left = [{"body": part, "more_body": more_after or i < len(parts) - 1} for i, part in enumerate(parts)]

        async def receive():
            if not left:
                await asyncio.sleep(600)
            return left.pop(0)

        headers = [(HEADER, b"forged"), (b"x_session_id", b"forged"), (b"authorization", b"key")]
        scope = {"type": "http", "method": method, "headers": headers}
        await WithoutInternalHeaders(BeginningReader(application))(scope, receive, None)

    asyncio.run(client())
    return got["header"], got["body"]


def test_application_receives_body_and_prefix_hashes(monkeypatch):
    monkeypatch.setattr(body_hashes, "READ_SECONDS", 0.1)
    parts = [b"x" * CHUNK, b"y" * PREFIX_BYTES, b"z"]
    wanted = ",".join(chunk_hashes(b"".join(parts)[:PREFIX_BYTES], b"key")).encode()
    assert read(parts) == ([wanted], b"".join(parts))
    slow_client = read(parts[:1], more_after=True)
    assert slow_client == ([chunk_hashes(parts[0], b"key")[0].encode()], parts[0])
    assert read([b"y" * CHUNK], method="GET") == ([], b"y" * CHUNK)
