"""The HTTP side of the server over the real engine, without Ray: what real clients send, bodies of any shape and size,
limits, errors, tenants."""

import asyncio
import contextlib
import json
import socket
import threading
import time
import tracemalloc

import httpx
import openai
import pytest
from conftest import DRAFT, MAIN
from serving import Api
from waiting import wait_until

from samples.serve import connections, health, request_body
from samples.serve.engine_thread import EngineFailed
from samples.serve.guard import digest
from samples.serve.openai_schema import ApiError, ChatAsked, CompletionAsked
from speculative import batch_decoder
from speculative.cost_curve import CostCurve

ONE = {"model": "embedded", "prompt": "def f(", "max_tokens": 1, "temperature": 0}
HI = {"role": "user", "content": "Hi"}
LONG_PROMPT = "def is_prime(n):\n    for i in range(2, n):\n" * 4


@pytest.fixture(scope="module")
def decoder():
    return batch_decoder.load(MAIN, draft=DRAFT, properties={"EXECUTION_MODE_HINT": "ACCURACY"})


@pytest.fixture(scope="module")
def api(decoder):
    with Api(decoder) as api:
        yield api


@pytest.fixture(scope="module")
def client(api):
    with api.client() as client:
        yield client


def post(api, body, path="/completions", **headers):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(api.url + path, content=content, headers={"Content-Type": "application/json", **headers}, timeout=60)


def chat(client, messages, **asked):
    return client.chat.completions.create(
        **{"model": "embedded", "messages": messages, "temperature": 0, "max_tokens": 8, **asked}
    )


# ---- what clients send ----------------------------------------------------------------------------------------------


def test_the_message_of_an_answer_can_be_sent_back(client):
    messages = [HI]
    for question in ("Go on.", "And now a class."):
        answer = chat(client, messages)
        messages += [answer.choices[0].message, {"role": "user", "content": question}]
    by_hand = [m if isinstance(m, dict) else {"role": "assistant", "content": m.content} for m in messages]
    assert chat(client, messages).choices[0].message.content == chat(client, by_hand).choices[0].message.content


LITELLM = {"role": "assistant", "content": "hi", "provider_specific_fields": {"refusal": None}}
CACHED = {"role": "user", "content": [{"type": "text", "text": "again", "cache_control": {"type": "ephemeral"}}]}


@pytest.mark.parametrize(
    ("sent", "same"),
    [
        (  # as litellm 1.106.2 sent them, captured at a server that wrote them down
            {"messages": [HI, LITELLM, CACHED], "max_completion_tokens": 5, "n": 1, "seed": 1, "stop": ["a"], "top_p": 1},
            {"messages": [HI, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "again"}], "stop": "a"},
        ),
        (  # vLLM's sampling parameters with which nothing is asked for
            {"messages": [HI], "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "stop_token_ids": [], "min_tokens": 0,
             "skip_special_tokens": True, "use_beam_search": False, "include_stop_str_in_output": False, "best_of": 1,
             "chat_template_kwargs": {}, "add_generation_prompt": True, "length_penalty": 1.0, "guided_json": None},
            {"messages": [HI]},
        ),
        (  # OpenAI's, and null for everything
            {"messages": [{**HI, "name": None}], "tools": [], "tool_choice": "auto", "functions": [], "logit_bias": {},
             "response_format": {"type": "text"}, "modalities": ["text"], "store": False, "logprobs": False,
             "top_logprobs": None, "reasoning_effort": None, "verbosity": None, "prediction": None, "audio": None,
             "stream_options": None, "stop": None, "seed": None, "top_p": None, "user": "u", "metadata": {"a": "b"},
             "service_tier": "auto", "safety_identifier": "s", "prompt_cache_retention": "24h", "temperature": 0},
            {"messages": [HI]},
        ),
        (
            {"messages": [HI, {"role": "assistant", "content": None, "tool_calls": [], "annotations": [], "audio": None,
                               "function_call": None, "reasoning_content": None, "refusal": None}, HI]},
            {"messages": [HI, {"role": "assistant", "content": ""}, HI]},
        ),
    ],
    ids=["litellm", "vllm", "openai", "an empty answer"],
)  # fmt: skip
def test_what_changes_no_text_passes(api, sent, same):
    base = {"model": "embedded", "max_tokens": 5, "temperature": 0}
    answers = [post(api, {**base, **body}, "/chat/completions") for body in (sent, same)]
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    one, other = (answer.json()["choices"][0]["message"] for answer in answers)
    assert one == other


def test_langchain_converses_and_streams(api):
    from langchain_openai import ChatOpenAI, OpenAI

    settings = {"base_url": api.url, "api_key": "none", "model": "embedded", "temperature": 0, "max_tokens": 8}
    model = ChatOpenAI(**settings)
    first = model.invoke([("user", "Hi")])
    second = model.invoke([("user", "Hi"), first, ("user", "Go on.")])
    assert second.content and second.response_metadata["finish_reason"] in ("stop", "length")
    assert "".join(piece.content for piece in model.stream("Hi")) == first.content
    assert OpenAI(**settings).invoke("def f(")


def test_a_stream_may_leave_its_options_null(api):
    answer = post(api, {**ONE, "stream": True, "stream_options": {"include_usage": None}})
    assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")


REFUSED = [
    ({"messages": [HI, {"role": "assistant", "content": "x", "refusal": "no"}]}, "messages[1].refusal", "refusal"),
    ({"messages": [HI, {"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]}, "messages[1].tool_calls", ""),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "'user'"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "required"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "part 0"),
    ({"messages": [0, 0, 0]}, "messages[0]", "object"),
    ({"messages": [HI], "logit_bias": {"5": 1}}, "logit_bias", "only {} is served here: leave it out"),
    ({"messages": [HI], "n": 2}, "n", "only 1 is served"),
    ({"messages": [HI], "tool_choice": "required"}, "tool_choice", '"none" or "auto"'),
    ({"messages": [HI], "stop_token_ids": [5]}, "stop_token_ids", "[]"),
    ({"messages": [HI], "temperatur": 1, "other": 2}, "temperatur", "no such parameter"),
    ({"messages": [HI], "repetition_penalty": 1e-38}, "repetition_penalty", "0.01"),
    ({"messages": [HI], "stream": True, "stream_options": {"include_usag": True}}, "stream_options.include_usag", ""),
]


@pytest.mark.parametrize(("asked", "param", "said"), REFUSED, ids=[param for _, param, _ in REFUSED])
def test_what_would_change_the_text_is_refused_by_its_name(api, asked, param, said):
    answer = post(api, {"model": "embedded", **asked}, "/chat/completions")
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, "invalid_request")
    assert error["message"].startswith(f"{param}: ") and said in error["message"]


def test_a_prompts_error_names_the_prompt(api):
    for prompt, said in (([0.5, 1], "token ids"), (["a", "b"], "one prompt"), ({}, "a text"), ([[True]], "token ids")):
        error = post(api, {**ONE, "prompt": prompt}).json()["error"]
        assert error["param"] == "prompt" and said in error["message"]


def test_streams_have_no_line_ends_of_unicode(api, decoder):
    """Clients that split lines as Unicode does would make three events of one."""
    ends = "a\u2028b\u2029c\u0085d"
    stop = [ends]
    event = list(api_events(ends))
    assert stop[0] == json.loads(event[0].removeprefix("data: "))["choices"][0]["text"] and len(event) == 1


def api_events(text):
    from samples.serve.openai_schema import Answer

    answer = Answer(CompletionAsked.model_validate({**ONE, "stream": True}), "embedded")
    return filter(None, answer.piece(text).decode().splitlines())
