"""Soak test: 20 minutes of mixed load on the server; memory stays flat, and no slot or cache block leaks.

    python -m pytest tests/serving/test_serve_soak.py --long -s

SOAK_MINUTES=5 in the environment shortens it.
"""

import asyncio
import contextlib
import gc
import json
import os
import random
import sys
import threading
import time
import urllib.request
import weakref
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
from openvino_genai import GenerationConfig

from speculative import batch_decoder
from speculative.bench.load.clients import Target, ask
from speculative.bench.load.metrics import outcomes
from speculative.serving.engine.engine_thread import Engine
from tests.support.paths import DRAFT
from tests.support.serving import Server
from tests.support.waiting import wait_until

CONTEXT = 1024  # tokens, of the embedded pair
RUNNING, WAITING, CLIENTS = 6, 8, 10
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}, "words": {"type": "array", "minItems": 1}}}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
MANY_STATES = "(a|b)*a(a|b){18}"
GROWTH = 32_000_000  # bytes by which a process may grow between warm-up and the end
EVERY = 5.0  # seconds


def memory(server):
    """Bytes in memory, by the name of the process."""
    main = psutil.Process(server.process.pid)
    found = {}
    for process in (main, *main.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if words:
                found[f"{Path(words[0].split()[0]).name[:30]} {process.pid}"] = process.memory_info().rss
    return found


def features(chance, is_chat):
    """Parameters of one optional feature, or none. A grammar is either new or repeated."""
    word = {"enum": [f"word {chance.randrange(500)}"]}
    kinds = [
        {},
        {"n": 3},
        {"logit_bias": {"5": -100, "6": 2}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": word}},
        {"structured_outputs": {"regex": MANY_STATES}},
        {"structured_outputs": {"grammar": 'root ::= root "a"'}},  # allows no text: to be refused
        {"structured_outputs": {"json": {"enum": ["x" * 40_000]}}},
    ]
    of_chat = [
        {"logprobs": True, "top_logprobs": 5},
        {"response_format": {"type": "json_object"}},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "required"},
    ]
    of_completions = [{"logprobs": 5}, {"logprobs": 1, "echo": True}, {"best_of": 2, "n": 1}]
    return chance.choice([{}] * 4 + kinds + (of_chat if is_chat else of_completions))


def client(server, number, stop, answers, vanished):
    """A client that sends requests of all kinds and sometimes disconnects before the response."""
    chance = random.Random(number)
    completions, chats = (Target(server.url, server.model, chat=chat) for chat in (False, True))
    connection = completions.connect()
    while not stop.is_set():
        params = {"max_tokens": chance.choice([1, 5, 40, 200]), "temperature": chance.choice([0, 0, 0.7, 1.3])}
        if chance.random() < 0.3:
            params["seed"] = chance.randrange(100)
        if chance.random() < 0.3:
            params["stop"] = chance.sample(["\n\n", "return", "self", "def"], 2)
        if chance.random() < 0.1:
            params["temperature"] = 7  # to be refused
        prompt = "# some text\n" * chance.choice([0, 1, 20, 100]) + f"def f{chance.randrange(50)}(x):"
        endpoint = chance.choice([completions, chats])
        params |= features(chance, endpoint.chat)
        if chance.random() < 0.1:
            path, body = endpoint.request(prompt, {**params, "max_tokens": 500})
            other = endpoint.connect()
            other.request("POST", path, body, endpoint.headers)
            time.sleep(chance.random())
            other.close()
            vanished.append(number)
            continue
        answers.append(ask(connection, endpoint, number, prompt, params))
        if answers[-1].status == 429:
            time.sleep(min(answers[-1].retry_after, 2))


def health(server):
    with urllib.request.urlopen(server.url.replace("/v1", "/health"), timeout=10) as answer:
        return json.load(answer)


def test_finished_request_is_garbage_collected():
    """Long before its timeout."""

    async def ask_and_forget():
        engine = Engine(batch_decoder.load(DRAFT, cache_tokens=1024), max_num_seqs=1, max_queue=9)
        config = GenerationConfig(max_new_tokens=5, ignore_eos=True)
        jobs = [engine.submit(np.arange(1, 9), config, seed, seconds=600) for seed in range(4)]
        ended, streamed, unread, waiting = jobs
        await ended.wait()
        assert [piece async for piece in streamed.pieces()]
        for job in jobs:
            engine.cancel(job)  # as the endpoint does, however a request ends
        left = [weakref.ref(job) for job in jobs]
        del jobs, ended, streamed, unread, waiting, job
        while not engine.idle:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        gc.collect()
        assert not any(ref() for ref in left)
        engine.close()

    asyncio.run(ask_and_forget())


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux")
def test_long_use_leaks_no_memory_slots_or_blocks():
    seconds = 60 * float(os.environ.get("SOAK_MINUTES", "20"))
    options = ("--max-num-seqs", RUNNING, "--max-queue", WAITING, "--cache-tokens", 2 * CONTEXT)
    with Server(*options) as server:
        stop, answers, vanished, samples = threading.Event(), [], [], []
        clients = [
            threading.Thread(target=client, args=(server, i, stop, answers, vanished), daemon=True)
            for i in range(CLIENTS)
        ]
        for one in clients:
            one.start()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(EVERY)
            samples.append(memory(server))
        stop.set()
        for one in clients:
            one.join(120)
        assert not any(one.is_alive() for one in clients), "a client waits in vain"

        ended = outcomes(answers)
        statuses = Counter(answer.status for answer in answers)
        print(f"\n{len(answers)} requests: {ended}, by status {dict(statuses)}; {len(vanished)} clients vanished")
        third = len(samples) // 3
        for name in samples[-1]:
            warm, last = (
                max(sample.get(name, 0) for sample in part) for part in (samples[: third + 1], samples[-third:])
            )
            print(f"{name:40} {warm / 1e6:7.1f} MB when warm, {last / 1e6:7.1f} MB at the end")
            assert last - warm < GROWTH, name
        assert ended["lost"] == ended["cut off"] == 0 and set(statuses) <= {200, 400, 429}
        assert ended["answered"] > len(answers) / 3 and vanished
        assert {"stop", "length", "tool_calls"} <= {answer.finish_reason for answer in answers}

        wait_until(lambda: health(server) == {"status": "ok", "running": 0, "waiting": 0}, "every slot is free")
        endpoint = Target(server.url, server.model)
        whole = {"max_tokens": CONTEXT - 20, "ignore_eos": True, "temperature": 0}  # half of the cache
        last = []
        halves = [
            threading.Thread(target=lambda i=i: last.append(ask(endpoint.connect(), endpoint, i, f"# {i}", whole)))
            for i in range(2)
        ]
        for half in halves:
            half.start()
        wait_until(lambda: health(server)["running"] == 2, "both have room at once: no block is lost")
        for half in halves:
            half.join()
        assert outcomes(last)["answered"] == 2
