"""benchmark_serving.py as users run it; the counts and summaries of the load benchmarks."""

import json
import signal
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from speculative import batch_decoder
from speculative.bench.load.clients import Target, ask, closed_loop
from speculative.bench.load.metrics import Load, RequestRecord, Span, break_even, outcomes, row, table, take_turns
from speculative.bench.load.processor_time import Meter
from speculative.bench.result import ServingResult
from tests.support import load_benchmarks
from tests.support.paths import DRAFT, MAIN, ROOT
from tests.support.serving import AS_SERVED, Api
from tests.support.typed import problems
from tests.support.waiting import PATIENCE, wait_until

SERVING = "scripts/benchmark_serving.py"
STRUCTURED = "scripts/prompts/structured.jsonl"


def test_every_method_is_measured_at_every_concurrency(tmp_path):
    env = {"PYTHONPATH": AS_SERVED, "SPECULATIVE_API_KEY": "of another server"}
    result = load_benchmarks.measure(SERVING, tmp_path, "--seconds", 1, env=env)
    load_benchmarks.check(result, ServingResult, ["main model alone", "with draft"], tmp_path)
    assert (result["environment"]["replicas"], result["environment"]["threads"]) == (1, 1)
    assert 0 < result["environment"]["round_trip"] < 5
    for one in result["rows"]:
        time = one["processor_time"]
        assert time["requests"] == one["requests"] and one["requests"] <= time["pieces"] <= 12 * one["requests"]
        assert time["seconds"] > 1 and min(time["engines"], time["servers"], time["clients"]) > 0
        assert time["engines"] <= 2.2 * time["seconds"]  # two threads
    assert any("the engines used" in line for line in result["summary"])


def test_json_schema_requests_are_measured_separately(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "Why?", "json_schema": {"enum": ["yes", "no"]}}), encoding="utf-8")
    with Api(batch_decoder.load(DRAFT)) as drafting, Api(batch_decoder.load(DRAFT)) as alone:
        command = [SERVING, "--url", drafting.url, "--baseline-url", alone.url, "--chat", "--prompts", prompts]
        command += ["--max-concurrency", "2", "--seconds", "0.5", "--rounds", "1", "--max-new-tokens", "12"]
        command = [sys.executable, *map(str, command)]
        process = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", timeout=300)
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout.splitlines()[-1])
    assert problems(result, ServingResult) == []
    methods = ["main model alone", "main model alone, JSON schema", "with draft", "with draft, JSON schema"]
    assert [row["method"] for row in result["rows"]] == methods
    assert all(row["answered"] == row["requests"] >= 2 for row in result["rows"])
    assert [row["speedup"] is None for row in result["rows"]] == [True, True, False, False]
    assert any(line.startswith("With JSON schemas: throughput with a draft") for line in result["summary"])
    for api in (drafting, alone):  # what the schema allows is short; other answers are cut off
        assert {"stop", "length"} <= set(api.counts.outcomes)


@pytest.mark.parametrize(
    ("arguments", "status", "word"),
    [
        ([], 2, "--url"),
        ([MAIN], 2, "no draft"),
        (["--url", "http://127.0.0.1:9", "--suffix-decoding"], 2, "leave out --url"),
        (["--url", "http://127.0.0.1:9", "--replicas", "2"], 2, "leave out --url"),
        (["--url", "http://127.0.0.1:9", "--draft-device", "GPU"], 2, "leave out --url"),
        (["--url", "http://127.0.0.1:9", "--property", "INFERENCE_NUM_THREADS=1"], 2, "leave out --url"),
        ([MAIN, DRAFT, "--past-answers", "100"], 2, "requires --suffix-decoding"),
        ([MAIN, DRAFT, "--url", "http://127.0.0.1:1/v1"], 2, "either"),
        ([MAIN, DRAFT, "--baseline-url", "http://127.0.0.1:1/v1"], 2, "--baseline-url"),
        ([MAIN, DRAFT, "--max-concurrency", "4,2"], 2, "4,2"),
        ([MAIN, DRAFT, "--seconds", "0"], 2, "0"),
        ([MAIN, DRAFT, "--prompts", "no/such/file.jsonl"], 2, "no/such/file.jsonl"),
        ([MAIN, DRAFT, "--prompts", STRUCTURED], 2, "add --chat"),
        ([MAIN, DRAFT, "--max-new-tokens", "5000"], 2, "5,0"),
        (["--url", "http://127.0.0.1:1/v1"], 1, "127.0.0.1:1"),
        (["--url", "127.0.0.1:8000/v1"], 2, "is not a URL"),
    ],
)
def test_bad_input_gives_one_sentence_error(run_here, arguments, status, word):
    process = run_here(SERVING, *arguments)
    assert process.returncode == status, process.stderr
    assert word in process.stderr and "Traceback" not in process.stderr and process.stdout == ""


def test_refused_requests_are_an_error(run_here):
    """Of a server that answers nothing, there is nothing to report."""
    with Api(batch_decoder.load(DRAFT), max_output_tokens=5) as api:
        command = ["--url", api.url, "--max-concurrency", "1", "--seconds", "0.2", "--rounds", "1"]
        process = run_here(SERVING, *command, "--max-new-tokens", "12")
        assert process.returncode == 1 and process.stdout == ""
        assert "no request was answered (with draft): max_tokens is 12, but at most 5 are allowed" in process.stderr
        for _ in range(2):  # no run gets prompts that the server has kept from an earlier one
            process = run_here(SERVING, *command, "--max-new-tokens", "4")
            assert process.returncode == 0, process.stderr
        assert api.engine.cached_tokens < 0.1 * api.engine.prompt_tokens


def test_server_start_failure_gives_one_sentence_error(run):
    process = run(SERVING, MAIN, DRAFT, "--device", "GPX")
    assert process.returncode == 1 and "did not become ready" in process.stderr and "GPX" in process.stderr
    assert process.stderr.count("\n") == 1


# ---- responses ------------------------------------------------------------------------------------------------------

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
PIECE = b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n'
STOP = b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\n'
USAGE = (
    b'data: {"choices": [], "usage": {"completion_tokens": 3, "completion_tokens_details": '
    b'{"accepted_prediction_tokens": 1, "rejected_prediction_tokens": 4}}}\n\n'
)
DONE, FAILED = b"data: [DONE]\n\n", b'data: {"error": {"message": "Decoding failed."}}\n\n'
WHOLE = (PIECE, STOP, USAGE, DONE)
FULL = b'{"error": {"message": "The queue is full."}}'


def chunks(*parts):
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)


ANSWERS = {
    "whole": (HEAD + chunks(*WHOLE, b""), "answered"),
    "no space after the names of fields": (
        HEAD + chunks(*(part.replace(b": ", b":", 1) for part in WHOLE), b""),
        "answered",
    ),
    "an error in the stream": (HEAD + chunks(PIECE, FAILED, b""), "refused"),
    "full queue": (b"HTTP/1.1 429 No\r\nRetry-After: 3\r\nContent-Length: %d\r\n\r\n%s" % (len(FULL), FULL), "refused"),
    "error without JSON": (b"HTTP/1.1 500 No\r\nContent-Length: 4\r\n\r\nOops", "cut off"),
    "cut in the middle": (HEAD + chunks(PIECE), "cut off"),
    "empty response": (b"", "cut off"),
    "neither finish reason nor DONE": (HEAD + chunks(PIECE, b""), "lost"),
    "no finish reason": (HEAD + chunks(PIECE, DONE, b""), "lost"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_outcome_of_each_kind_of_response(name):
    answer, outcome = ANSWERS[name]
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            with listening.accept()[0] as connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        endpoint = Target(f"http://127.0.0.1:{listening.getsockname()[1]}/v1", "m")
        got = ask(endpoint.connect(), endpoint, 7, "x", {})
        thread.join()
    assert (got.outcome, got.number) == (outcome, 7)
    if name == "whole":
        assert (got.text, got.tokens, got.accepted, got.rejected) == ("a", 3, 1, 4) and got.ttft > 0
    if name == "full queue":
        assert (got.status, got.retry_after) == (429, 3)


def test_silent_server_is_lost_and_refused_connection_is_cut_off():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = Target(f"http://127.0.0.1:{silent.getsockname()[1]}/v1", "m")
        assert ask(endpoint.connect(timeout=0.2), endpoint, 0, "x", {}).outcome == "lost"
    span = closed_loop(endpoint, 2, 0.15, ["x"], {})
    assert outcomes(span.answers)["cut off"] == len(span.answers) >= 2


# ---- figures --------------------------------------------------------------------------------------------------------


def test_tokens_are_counted_in_their_time_interval():
    answer = RequestRecord(0, sent=0.0, first=1.0, end=3.0, tokens=20)
    assert answer.tokens_between(0, 4) == 20 and answer.tokens_between(2, 9) == 10
    assert answer.tokens_between(0, 1) == answer.tokens_between(3, 4) == 0
    assert answer.ttft == 1 and answer.tpot == pytest.approx(2 / 19)
    assert Span([answer, answer], 1.0, 3.0).throughput == 20


def spans(speed, drafted):
    """Two rounds of one answer: 1 + 5 tokens, of which two were drafted and accepted."""
    counts = {"accepted": 2 * (drafted > 0), "rejected": max(drafted - 2, 0)}
    return [
        Span([RequestRecord(0, 0, 0.1, 1, "t", 6 * speed, **counts, finish_reason="length", is_complete=True)], 0, 1)
    ] * 2


def test_break_even_concurrency_is_reported():
    alone, draft = (Load(name, lambda *_: None) for name in ("alone", "draft"))
    alone.rounds = {n: spans(10, 0) for n in (1, 4, 16)}
    draft.rounds = {1: spans(20, 100), 4: spans(11, 20), 16: spans(9, 2)}
    rows = [row(draft, n, alone) for n in draft.rounds]
    summary = " ".join(break_even(rows))
    assert "2.00x (2.00-2.00) with 1 client; 1.10x" in summary
    assert "stops helping at 16 clients; from there on it costs up to 10% of the throughput" in summary
    slow_once = [rows[0], {**rows[2], "speedup": 1.17, "speedup_range": [0.56, 1.31]}]  # the median hides a round
    assert "from there on it costs up to 44% of the throughput" in break_even(slow_once)[1]
    level = [rows[0], {**rows[2], "speedup": 1.05, "speedup_range": [0.998, 1.31]}]
    assert "from there on it costs nothing" in break_even(level)[1]
    assert "draft length shrinks" in summary
    assert "does not reliably help with 16, 17 clients" in break_even([rows[2], {**rows[2], "clients": 17}, rows[0]])[1]
    assert "does not reliably help with 1 client;" in break_even([{**rows[2], "clients": 1}, rows[1]])[1]
    assert break_even(rows[:2])[1] == "The draft helps at every measured number of clients, up to 4."
    assert "not reliably help at any" in break_even(rows[2:])[1]
    assert break_even([row(alone, 1, None)]) == []
    assert len({len(line) for line in table(rows).splitlines()}) == 1


def test_methods_alternate_on_the_same_prompts():
    calls = []
    methods = [
        Load(name, lambda n, s, first, name=name: calls.append((name, n, first)) or spans(1, 0)[0]) for name in "ab"
    ]
    assert take_turns(methods, [1, 2], 0.1, rounds=2, warm_up=1)
    rounds = [calls[i : i + 2] for i in range(0, len(calls), 2)]
    assert [{(name, n) for name, n, _ in turn} for turn in rounds] == [{("a", 1), ("b", 1)}, {("a", 2), ("b", 2)}] * 3
    assert {turn[0][0] for turn in rounds} == {"a", "b"}  # the order changes
    firsts = [first for _, _, first in calls]
    assert firsts[::2] == firsts[1::2] and len(set(firsts[::2])) == 6  # the same for both, none twice
    assert [len(method.rounds[n]) for method in methods for n in (1, 2)] == [2] * 4
    assert take_turns(methods, [1, 2], 0.1, rounds=1, warm_up=0)  # after another start
    assert [len(method.rounds[n]) for method in methods for n in (1, 2)] == [3] * 4


def test_processor_time_of_crashed_server_is_zero():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    meter = Meter([SimpleNamespace(process=process)], threads=1)
    before = meter.read()
    time = meter.since(before, Span([RequestRecord(0, 0.0, pieces=3)], 0.0, 1.0))
    assert before.servers == time["servers"] == time["engines"] == 0.0
    assert time["clients"] >= 0 and (time["requests"], time["pieces"]) == (1, 3)


def test_ctrl_c_in_later_start_keeps_earlier_rounds():
    def run(n, s, first):
        if run.calls == 2:
            raise KeyboardInterrupt
        run.calls += 1
        return spans(1, 0)[0]

    run.calls, methods = 0, [Load("a", run), Load("b", run)]
    assert take_turns(methods, [1], 0.1, rounds=1, warm_up=0)
    with pytest.raises(KeyboardInterrupt):
        take_turns(methods, [1], 0.1, rounds=1, warm_up=0)
    assert [len(method.rounds[1]) for method in methods] == [1, 1]


@pytest.mark.posix("Ctrl-C")
def test_ctrl_c_ends_started_servers(tmp_path):
    command = [sys.executable, SERVING, str(MAIN), str(DRAFT)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8")
    import psutil

    def both_servers():  # there are other, short-lived children
        children = psutil.Process(process.pid).children()
        found = [one for one in children if "serve_pair" in " ".join(one.cmdline())]
        return found if len(found) == 2 else None

    started = wait_until(both_servers, "both servers are started", passing=(psutil.Error,))
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130 and "Traceback" not in stderr
    assert not psutil.wait_procs(started, timeout=PATIENCE)[1]
