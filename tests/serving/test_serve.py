"""The real server and the real `openai` client: responses, streams, limits, errors, shutdown."""

import contextlib
import json
import resource
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openvino_genai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speculative.serving.api.completions import CompletionRequest
from speculative.serving.http import request_limits
from speculative.serving.ray_serve import connections
from speculative.serving.settings import Limits
from tests.support.dashboard import expressions, metrics_in
from tests.support.later import openai
from tests.support.paths import DRAFT, MAIN, ROOT
from tests.support.serving import PLAIN, small_server
from tests.support.waiting import PATIENCE, wait_until

KEY = "a key that only tests know"
PROMPTS = ["def is_prime(n):", "class Stack:", "def read_file(path):", "import os\n"]
PROGRAM = "samples/serve/serve_pair.py"


@pytest.fixture(scope="module")
def server(shared_server):
    return shared_server()


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def guarded():
    """A server that requires a key, at an IPv6 address, with a short time limit."""
    with small_server("--host", "::1", "--timeout", 4, env={"SPECULATIVE_API_KEY": KEY}) as server:
        server.url = server.lines[-1].removeprefix("ready: ")
        yield server


@pytest.fixture(scope="module")
def main_alone():
    """Greedy text of the main model by GenAI's pipeline, without a draft."""
    pipe = openvino_genai.LLMPipeline(str(MAIN), "CPU", EXECUTION_MODE_HINT="ACCURACY")

    def main_alone(prompt, max_new_tokens):
        config = openvino_genai.GenerationConfig(max_new_tokens=max_new_tokens, apply_chat_template=False)
        return pipe.generate(prompt, config)

    return main_alone


def complete(client, prompt=PROMPTS[0], **params):
    return client.completions.create(
        **{"model": "embedded", "prompt": prompt, "temperature": 0, "max_tokens": 60, **params}
    )


def chat(client, *messages, **params):
    messages = [{"role": role, "content": content} for role, content in messages]
    return client.chat.completions.create(**{"model": "embedded", "messages": messages, "temperature": 0, **params})


def long_answer(client, **params):
    """A request of many tokens, few of which the draft predicts: it takes seconds."""
    return complete(client, **{"max_tokens": 300, "temperature": 2, "extra_body": {"ignore_eos": True}, **params})


def load(server, **options):
    return httpx.get(server.url.replace("/v1", "/health"), **{**PLAIN, **options}).json()


# ---- answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", PROMPTS[:2])
def test_greedy_completion_equals_main_model_text(client, main_alone, prompt):
    answer = complete(client, prompt)
    assert answer.choices[0].text == main_alone(prompt, 60)
    assert answer.object == "text_completion" and answer.model == "embedded"


def test_chat_equals_completion_of_rendered_template(client):
    question = "Write code to count the words of a text."
    tokenizer = openvino_genai.Tokenizer(str(MAIN))
    turns = [("user", question), ("assistant", "def f():"), ("user", "Now a class.")]
    history = [{"role": role, "content": content} for role, content in turns]
    prompt = tokenizer.encode(
        tokenizer.apply_chat_template(history, add_generation_prompt=True), add_special_tokens=False
    )
    answer = chat(client, *turns, max_completion_tokens=40)
    assert answer.choices[0].message.role == "assistant"
    ids = prompt.input_ids.data[0].tolist()
    assert answer.choices[0].message.content == complete(client, ids, max_tokens=40).choices[0].text
    assert answer.usage.prompt_tokens == len(ids)


def test_usage_reports_accepted_and_rejected_draft_tokens(client):
    usage = complete(client).usage
    details = usage.completion_tokens_details
    assert 0 < details.accepted_prediction_tokens < usage.completion_tokens
    assert details.rejected_prediction_tokens >= 0
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_finish_reason_distinguishes_truncation_from_end_of_text(client):
    cut, whole = complete(client, max_tokens=5), complete(client, max_tokens=300)
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 5)
    assert whole.choices[0].finish_reason == "stop"


def test_default_max_tokens_is_16_for_completions_and_limit_for_chat(client):
    extra = {"extra_body": {"ignore_eos": True}}
    assert complete(client, max_tokens=None, **extra).usage.completion_tokens == 16
    assert chat(client, ("user", "Write a class."), **extra).usage.completion_tokens == 300


def test_default_of_completions_is_within_the_limits():
    """It must not be refused like a number that the client has sent."""
    request = CompletionRequest(model="m", prompt="a")
    assert request_limits.max_new_tokens(request, 5, Limits(max_output_tokens=10), 1024) == 10
    assert request_limits.max_new_tokens(request, 1020, Limits(), 1024) == 4
    assert request_limits.max_new_tokens(request, 5, Limits(), 1024) == 16


def test_several_prompts_of_token_ids_are_as_many_values_as_needed(client):
    prompts = [[5 + (i + j) % 90 for j in range(1000)] for i in range(6)]
    assert len(complete(client, prompt=prompts, max_tokens=1).choices) == 6


def test_default_values_are_accepted(client):
    extra = {"extra_body": {"continue_final_message": False}}
    assert chat(client, ("user", "Hi"), verbosity="medium", max_tokens=1, **extra).choices


def test_streamed_text_equals_whole_text_with_usage_last(client):
    whole = complete(client, max_tokens=300)
    events = list(complete(client, max_tokens=300, stream=True, stream_options={"include_usage": True}))
    texts = [event for event in events if event.choices]
    assert "".join(event.choices[0].text for event in texts) == whole.choices[0].text
    assert [event.choices[0].finish_reason for event in texts][-2:] == [None, "stop"]
    assert len(texts) > 3
    assert events[-1].usage.total_tokens == whole.usage.total_tokens
    assert len({event.id for event in events}) == 1


def test_streamed_chat_starts_with_the_role(client):
    events = list(chat(client, ("user", "Write a class."), max_tokens=50, stream=True))
    assert events[0].choices[0].delta.role == "assistant"
    text = "".join(event.choices[0].delta.content or "" for event in events)
    assert text == chat(client, ("user", "Write a class."), max_tokens=50).choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_text_ends_before_first_stop_string(client, stream):
    text = complete(client).choices[0].text
    assert "return" in text and "for" in text
    answer = complete(client, stop=["return", "for"], stream=stream)
    found = "".join(event.choices[0].text for event in answer) if stream else answer.choices[0].text
    assert found == text[: min(text.index("return"), text.index("for"))]


def test_same_seed_gives_same_text_in_any_batch(client):
    def drawn(seed):
        params = {"temperature": 1.5, "top_p": 0.95, "max_tokens": 30, "seed": seed}
        return complete(client, PROMPTS[3], **params).choices[0].text

    alone = [drawn(seed) for seed in (1, 2, -3)]
    assert len(set(alone)) == 3
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(drawn, (1, 2, -3, 1, 2, -3))) == 2 * alone


def test_default_temperature_samples(client):
    texts = {complete(client, PROMPTS[3], temperature=None).choices[0].text for _ in range(4)}
    assert len(texts) > 1  # 60 tokens at temperature 1: four equal texts are practically impossible


def test_concurrent_streams_equal_their_texts_alone(client, main_alone):
    def talk(prompt):
        return "".join(event.choices[0].text for event in complete(client, prompt, max_tokens=30, stream=True))

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(talk, PROMPTS * 2))
    assert texts == 2 * [main_alone(prompt, 30) for prompt in PROMPTS]


def test_models_endpoint_lists_the_model(client):
    assert [model.id for model in client.models.list()] == ["embedded"]
    assert client.models.retrieve("embedded").object == "model"


# ---- errors ---------------------------------------------------------------------------------------------------------

REFUSED = [
    ({"model": "gpt-5"}, 404, "model_not_found", "gpt-5"),
    ({"prompt": ""}, 400, "invalid_request", "empty"),
    ({"prompt": ["a", ""]}, 400, "invalid_request", "prompt 1 is empty"),
    ({"prompt": [1, 99999]}, 400, "invalid_request", "99999"),
    ({"prompt": "a " * 1100}, 400, "context_length_exceeded", "1023"),
    ({"max_tokens": 301}, 400, "max_tokens_exceeded", "300"),
    ({"prompt": "a " * 900, "max_tokens": 300}, 400, "context_length_exceeded", "1024"),
    ({"max_tokens": 0}, 400, "invalid_request", "max_tokens"),
    ({"n": 1000}, 400, "invalid_request", "n: "),
    ({"best_of": 1000}, 400, "invalid_request", "best_of"),
    ({"logprobs": 21}, 400, "invalid_request", "logprobs"),
    ({"temperature": 2.5}, 400, "invalid_request", "temperature"),
    ({"top_p": -0.1}, 400, "invalid_request", "top_p"),
    ({"stop": ["a", "b", "c", "d", "e"]}, 400, "invalid_request", "4 stop strings"),
    ({"logit_bias": {"5": 101}}, 400, "invalid_request", "logit_bias"),
    ({"extra_body": {"temperatur": 1}}, 400, "invalid_request", "temperatur"),
    ({"extra_body": {"temperature": "0"}}, 400, "invalid_request", "temperature"),
    ({"prompt": "a" * 5_000_000}, 413, "body_too_large", "bytes"),
]


@pytest.mark.parametrize(("params", "status", "code", "words"), REFUSED)
def test_invalid_request_returns_api_error(client, params, status, code, words):
    with pytest.raises(openai.APIStatusError) as refused:
        complete(client, **params)
    error = refused.value.body
    assert (refused.value.status_code, error["code"]) == (status, code)
    assert words in error["message"] and error["type"] in ("invalid_request_error", "not_found_error")


@pytest.mark.parametrize(
    "params",
    [
        {"tools": [{"type": "web_search"}]},
        {"response_format": {"type": "json_schema"}},
        {"top_logprobs": 21},
        {"messages": []},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"max_tokens": 301},
        {"max_completion_tokens": 301, "max_tokens": 5},
        {"verbosity": "high"},
    ],
)
def test_unsupported_chat_parameter_returns_400(client, params):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            **{"model": "embedded", "messages": [{"role": "user", "content": "Hi"}], **params}
        )
    assert refused.value.body["param"].startswith(next(iter(params)))


@pytest.mark.parametrize("key", ["wrong", KEY + "x", KEY[:-1], "ключ"])
def test_wrong_key_gives_access_to_health_only(guarded, key):
    for path in ("/v1/models", "/v1/nothing", "/openapi.json"):
        url = guarded.url.replace("/v1", path)
        answer = httpx.get(url, headers={"Authorization": f"Bearer {key}".encode()}, **PLAIN)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert load(guarded)["status"] == "ok"


HALF = b'{"model": "embedded", "prompt": "\\ud800"}'  # of a character


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"[" * 90_000,
        b'{"model": "embedded", "prompt": "\\ud800"}',
        b'{"seed": 1' + b"0" * 5000,
    ],
)
def test_malformed_body_returns_400_with_error_object(server, body):
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{server.url}/completions", content=body, headers=headers, **PLAIN)
    assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_unknown_path_or_method_returns_error_object(server):
    for method, path, status in (("GET", "/v1/embeddings", 404), ("GET", "/v1/completions", 405)):
        answer = httpx.request(method, f"http://127.0.0.1:{server.port}{path}", **PLAIN)
        assert answer.status_code == status and answer.json()["error"]["message"]


def test_response_has_exactly_one_request_id(server):
    """Ray's proxy would add the request's id a second time."""
    for sent, kept in (("mine", True), ("x" * 5_000, False)):
        answer = httpx.get(f"{server.url}/models", headers={"x-request-id": sent}, **PLAIN)
        (found,) = answer.headers.get_list("x-request-id")
        assert (found == sent) is kept and len(found) <= 128


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
FIELDS = ["messages", "prompt", "max_tokens", "temperature", "top_p", "seed", "stop", "stream", "n", "stream_options"]


def test_fuzzed_bodies_never_cause_a_500(server, request):
    """The response is always valid or the API's error object."""

    @settings(max_examples=150 if request.config.getoption("--long") else 50, deadline=None)
    @given(
        path=st.sampled_from(["chat/completions", "completions"]),
        valid=st.booleans(),
        fields=st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=8), json_values, max_size=4),
    )
    def check(path, valid, fields):
        body = {"model": "embedded", "max_tokens": 2} if valid else {}
        if valid:
            body |= {"prompt": "a"} if path == "completions" else {"messages": [{"role": "user", "content": "a"}]}
        headers = {"Content-Type": "application/json"}
        content = json.dumps({**body, **fields}).encode()
        answer = httpx.post(f"{server.url}/{path}", content=content, headers=headers, **PLAIN)
        assert answer.status_code in (200, 400, 404), answer.text
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert error["message"] and set(error) == {"message", "type", "param", "code"}
        elif "text/event-stream" in answer.headers["content-type"]:
            assert answer.text.endswith("data: [DONE]\n\n")
        else:
            assert answer.json()["choices"][0]["finish_reason"] in ("stop", "length")

    check()


# ---- slots and limits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_disconnected_client_frees_its_slot(server, client, stream):
    if stream:
        running = 0
        while not running:  # on a busy machine the request may end before the check
            answer = long_answer(client, stream=True)
            next(iter(answer))
            running = load(server)["running"]
        answer.close()
    else:
        with pytest.raises(openai.APITimeoutError):  # on a fast machine, one answer takes less than that
            long_answer(client, timeout=0.3, n=4)
    wait_until(lambda: load(server)["running"] == 0)
    assert complete(client).choices[0].finish_reason == "stop"


def test_full_queue_returns_429_with_retry_after_and_retries_succeed(server, client):
    """Eight clients keep all slots and the whole queue in use, so a ninth is rejected on any machine."""
    over = threading.Event()

    def send_long_requests():
        while not over.is_set():
            with contextlib.suppress(openai.RateLimitError), long_answer(client, stream=True) as answer:
                next((True for _ in answer if over.is_set()), None)

    def refusal():
        if load(server)["waiting"] < 4:  # it would wait, too
            return None
        try:
            complete(client, max_tokens=1)
        except openai.RateLimitError as refused:
            return refused

    with ThreadPoolExecutor(12) as pool:
        load_clients = [pool.submit(send_long_requests) for _ in range(8)]
        try:
            refused = wait_until(refusal)
            patient = [pool.submit(complete, client.with_options(max_retries=20)) for _ in range(4)]
            time.sleep(0.5)
        finally:
            over.set()
        assert refused.body["code"] == "queue_full" and "(4 requests)" in refused.body["message"]
        assert int(refused.response.headers["retry-after"]) >= 1
        assert {future.result().choices[0].text for future in patient} == {complete(client).choices[0].text}
        assert not any(future.exception() for future in load_clients)


def test_frequency_penalty_controls_repetition(client):
    def different_characters(penalty):
        params = {"max_tokens": 60, "frequency_penalty": penalty, "extra_body": {"ignore_eos": True}}
        return len(set(complete(client, "x = [0, 0, 0,", **params).choices[0].text))

    assert different_characters(-2) < different_characters(2)


def test_metrics_match_the_usage_of_a_request(server, client):
    complete(client)
    wait_until(lambda: server.metrics()["vllm_time_to_first_token_seconds_count"])
    before, completion = server.settled_metrics(), complete(client)
    usage, reason = completion.usage, completion.choices[0].finish_reason
    details = usage.completion_tokens_details
    wanted = {
        "vllm_generation_tokens_total": usage.completion_tokens,
        "vllm_spec_decode_num_accepted_tokens_total": details.accepted_prediction_tokens,
        "vllm_spec_decode_num_draft_tokens_total": (
            details.accepted_prediction_tokens + details.rejected_prediction_tokens
        ),
        ("vllm_request_success_total", reason): 1,
        "vllm_time_to_first_token_seconds_count": 1,
        "vllm_request_time_per_output_token_seconds_count": 1,
        "vllm_e2e_request_latency_seconds_count": 1,
        "vllm_request_queue_time_seconds_count": 1,
        "vllm_request_prompt_tokens_count": 1,
        "vllm_request_generation_tokens_count": 1,
        "vllm_prompt_tokens_total": usage.prompt_tokens,
        "vllm_prefix_cache_queries_total": usage.prompt_tokens,
        "vllm_prefix_cache_hits_total": usage.prompt_tokens_details.cached_tokens,
    }
    wait_until(lambda: {name: server.metrics()[name] - before[name] for name in wanted} == wanted)
    new = server.metrics() - before
    drafts, tokens = new["vllm_spec_decode_num_drafts_total"], new["vllm_spec_decode_num_draft_tokens_total"]
    assert drafts <= min(tokens, new["speculative_iterations_total"]) and bool(drafts) == bool(tokens)


def test_server_exports_every_dashboard_metric(server, client):
    for _ in range(2):  # the second finds the first one's prompt in the prefix cache
        complete(client, "def is_prime(n):\n    " * 10)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt="x")
    wanted = {name for expression in expressions() for name in metrics_in(expression)}
    assert len(wanted) > 10

    def exported():
        text = httpx.get(f"http://127.0.0.1:{server.metrics_port}/metrics", **PLAIN).text
        return {line.partition("{")[0] for line in text.splitlines()}

    wait_until(lambda: wanted <= exported(), f"{sorted(wanted)} are exported")


# ---- the command ----------------------------------------------------------------------------------------------------


def test_ipv6_address_has_brackets_in_the_url(guarded):
    assert guarded.lines[-1] == f"ready: http://[::1]:{guarded.port}/v1"
    assert complete(guarded.client(api_key=KEY), max_tokens=5).usage.completion_tokens == 5


def test_timeout_returns_504_and_ctrl_c_shuts_down_cleanly(guarded):
    """Runs last of the tests that need this server."""
    children = descendants(guarded.process.pid)
    client = guarded.client(api_key=KEY)

    def code_of_a_long_answer(_):
        try:
            return long_answer(client, max_tokens=1000).choices[0].finish_reason
        except openai.APIStatusError as error:
            return error.status_code, error.body["code"]

    with ThreadPoolExecutor(64) as pool:  # more tokens than any machine makes in that time
        ends = set(pool.map(code_of_a_long_answer, range(64)))
    assert (504, "timeout") in ends and ends <= {"length", (504, "timeout")}

    answer = complete(client, max_tokens=300, extra_body={"ignore_eos": True}, stream=True)
    first = next(iter(answer)).choices[0].text
    guarded.interrupt()
    guarded.wait_for("stopping")
    assert first and list(answer)[-1].choices[0].finish_reason == "length"
    assert guarded.process.wait(60) == 130
    wait_until(lambda: not any(alive(child) for child in children))


@pytest.mark.posix("Windows has no process groups")
def test_ctrl_c_during_ray_startup_leaves_no_processes():
    server = small_server()
    wait_until(lambda: len(descendants(server.process.pid)) > 2, "Ray's processes start", every=0.05)
    children = descendants(server.process.pid)
    server.interrupt()
    assert server.process.wait(60) == 130
    wait_until(lambda: not any(alive(child) for child in children))
    assert not server.lines or not any("ready" in line for line in server.lines)


def descendants(pid):
    import psutil

    return psutil.Process(pid).children(recursive=True)


def alive(process):
    import psutil

    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_ray_proxy_limits_connections(server):
    def is_refused():
        try:
            return not load(server, timeout=5)
        except httpx.TimeoutException:
            return False
        except httpx.TransportError:
            return True

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * connections.MAX_CONNECTIONS)), hard))
    with contextlib.ExitStack() as several:
        for _ in range(connections.MAX_CONNECTIONS):
            several.enter_context(socket.create_connection(("127.0.0.1", server.port), PATIENCE))
        wait_until(is_refused, "one more is refused")
    wait_until(lambda: load(server)["status"] == "ok", "there is room again", passing=(httpx.TransportError,))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "required"),
        (("nowhere", DRAFT), "nowhere"),
        ((MAIN, "nowhere"), "nowhere"),
        ((MAIN, DRAFT, "--device", "GPU.7"), "GPU.7"),
        ((MAIN, DRAFT, "--port", "http"), "http"),
        ((MAIN, DRAFT, "--replicas", "3", "--max-replicas", "2"), "--max-replicas 2"),
        ((MAIN, DRAFT, "--resource", "gpu"), "NAME=AMOUNT"),
        ((MAIN, DRAFT, "--api-key-file", "nowhere.key"), "nowhere.key"),
        ((MAIN, DRAFT, "--recommended"), "recommended.json"),
    ],
)
def test_wrong_usage_prints_one_sentence_and_exits_with_2(run_here, arguments, words):
    done = run_here(PROGRAM, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and words in done.stderr


def test_port_in_use_is_reported_before_loading(run, server):
    done = run(PROGRAM, MAIN, DRAFT, "--port", server.port)
    assert done.returncode == 1 and "starting Ray" not in done.stderr
    assert f"--port {server.port} at 127.0.0.1 is not available (Address already in use): choose" in done.stderr


def test_metrics_port_in_use_is_reported_whatever_the_host(run, server):
    """Ray's exporter listens at 127.0.0.1."""
    done = run(PROGRAM, MAIN, DRAFT, "--host", "127.0.0.2", "--metrics-port", server.port)
    assert done.returncode == 1 and "starting Ray" not in done.stderr
    assert f"--metrics-port {server.port} at 127.0.0.1 is not available" in done.stderr


def test_missing_ray_names_the_install_command():
    program = f"""import runpy, sys
sys.modules["ray"] = None  # as if it were not there
sys.argv[1:] = [{str(MAIN)!r}]
runpy.run_path({PROGRAM!r}, run_name="__main__")"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, encoding="utf-8", cwd=ROOT)
    assert process.returncode == 1 and process.stderr == (
        "error: ray is not installed: `pip install -r requirements-serve.txt` installs what serving needs.\n"
    )
