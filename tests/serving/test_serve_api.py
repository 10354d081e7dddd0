"""The server's HTTP application over the real engine, without Ray: requests of real clients, bodies of any shape and
size, limits, errors, tenants."""

import asyncio
import contextlib
import dataclasses
import json
import socket
import sys
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from http.server import HTTPServer, SimpleHTTPRequestHandler

import httpx
import numpy as np
import openvino as ov
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from speculative.drafting.latency_curve import LatencyCurve
from speculative.drafting.proposers import DraftModelProposer
from speculative.models import cached_model
from speculative.models.block_pool import OutOfBlocks
from speculative.sampling.distribution import InvalidLogits
from speculative.serving import arguments
from speculative.serving.api.chat_completions import ChatCompletionRequest
from speculative.serving.api.completions import CompletionRequest
from speculative.serving.api.errors import ApiError
from speculative.serving.api.messages import Message
from speculative.serving.api.responses import ResponseBuilder
from speculative.serving.engine import health
from speculative.serving.engine.engine_thread import EngineFailed
from speculative.serving.http import request_body
from speculative.serving.http.middleware import Guard, digest
from speculative.serving.ray_serve import connections, ray_runtime
from speculative.serving.settings import API_KEY_VARIABLE, Limits
from tests.support.later import Later
from tests.support.paths import DRAFT, MAIN
from tests.support.serving import PLAIN, Api
from tests.support.waiting import PATIENCE, wait_until

application = Later("speculative.serving.ray_serve.application")  # with Ray Serve
ONE = {"model": "embedded", "prompt": "def f(", "max_tokens": 1, "temperature": 0}
HI = {"role": "user", "content": "Hi"}
LONG_PROMPT = "def is_prime(n):\n    for i in range(2, n):\n" * 4


def post(api, body, path="/completions", **headers):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(api.url + path, content=content, headers={"Content-Type": "application/json", **headers}, **PLAIN)


def chat(client, messages, **params):
    return client.chat.completions.create(
        **{"model": "embedded", "messages": messages, "temperature": 0, "max_tokens": 8, **params}
    )


# ---- what clients send ----------------------------------------------------------------------------------------------


def test_assistant_message_can_be_sent_back(client):
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
        (  # as litellm 1.106.2 sends them, captured at a server that logs requests
            {"messages": [HI, LITELLM, CACHED], "max_completion_tokens": 5, "n": 1, "seed": 1, "stop": ["a"],
             "top_p": 1},
            {"messages": [HI, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "again"}],
             "stop": "a"},
        ),
        (  # vLLM's sampling parameters with their default values
            {"messages": [HI], "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "stop_token_ids": [],
             "min_tokens": 0, "skip_special_tokens": True, "use_beam_search": False,
             "include_stop_str_in_output": False, "best_of": 1,
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
        (
            {"messages": [HI, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, HI]},
            {"messages": [HI, {"role": "assistant", "content": "No."}, HI]},
        ),
    ],
    ids=["litellm", "vllm", "openai", "empty assistant message", "refusal"],
)  # fmt: skip
def test_parameters_without_effect_are_accepted(api, sent, same):
    base = {"model": "embedded", "max_tokens": 5, "temperature": 0}
    answers = [post(api, {**base, **body}, "/chat/completions") for body in (sent, same)]
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    one, other = (answer.json()["choices"][0]["message"] for answer in answers)
    assert one == other


def test_langchain_chats_and_streams(api):
    from langchain_openai import ChatOpenAI, OpenAI

    settings = {"base_url": api.url, "api_key": "none", "model": "embedded", "temperature": 0, "max_tokens": 8}
    model = ChatOpenAI(**settings)
    first = model.invoke([("user", "Hi")])
    second = model.invoke([("user", "Hi"), first, ("user", "Go on.")])
    assert second.content and second.response_metadata["finish_reason"] in ("stop", "length")
    assert "".join(piece.content for piece in model.stream("Hi")) == first.content
    assert OpenAI(**settings).invoke("def f(")


def test_null_stream_options_are_accepted(api):
    answer = post(api, {**ONE, "stream": True, "stream_options": {"include_usage": None}})
    assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")


REFUSED = [
    ({"messages": [HI, {"role": "assistant", "content": "x", "refusal": "no"}]}, "messages[1].refusal", "refusal"),
    (
        {"messages": [HI, {"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]},
        "messages[1].tool_calls[0].function",
        "required",
    ),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]", "tool_call_id"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "'user'"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "required"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages[0].content", "part 0 is not a text part: type: is 'image_url', but only 'text' is supported"),
    ({"messages": [HI], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice.type",
     "is 'allowed_tools', but only 'function' is supported"),
    ({"messages": [0, 0, 0]}, "messages[0]", "object"),
    ({"messages": []}, "messages", "messages: should have at least 1 item."),
    ({"messages": [HI], "bad_words": ["x"]}, "bad_words", "only [] is supported: omit it"),
    ({"messages": [HI], "best_of": 2}, "best_of", "only 1 is supported"),
    ({"messages": [HI], "max_tool_calls": 3}, "max_tool_calls", "unknown parameter"),  # of /v1/responses
    ({"messages": [{**HI, "user": "me"}]}, "messages[0].user", "unknown parameter"),  # of requests
    ({"messages": [HI], "tool_choice": "required"}, "tool_choice", "no tools"),
    ({"messages": [HI], "temperatur": 1, "other": 2}, "temperatur", "unknown parameter"),
    ({"messages": [HI], "repetition_penalty": 1e-38}, "repetition_penalty", "0.01"),
    ({"messages": [HI], "stream": True, "stream_options": {"include_usag": True}}, "stream_options.include_usag", ""),
]  # fmt: skip


@pytest.mark.parametrize(("params", "param", "words"), REFUSED, ids=[param for _, param, _ in REFUSED])
def test_unsupported_parameter_returns_400_with_param_name(api, params, param, words):
    answer = post(api, {"model": "embedded", **params}, "/chat/completions")
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, "invalid_request")
    assert error["message"].startswith(f"{param}: ") and words in error["message"]


NAME = "x" * 5_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completions", {**ONE, "model": NAME}),
        ("/completions", {**ONE, "model": "\0" * 5_000}),
        ("/completions", {**ONE, NAME: 1}),
        ("/completions", {**ONE, "stream": True, "stream_options": {NAME: True}}),
        ("/chat/completions", {"model": "embedded", "messages": [{**HI, NAME: 1}]}),
        ("/chat/completions", {"model": "embedded", "messages": [{"role": NAME, "content": "Hi"}]}),
        ("/chat/completions", {"model": "embedded", "messages": [{"role": "user", "content": [{NAME: 1}]}]}),
        (f"/models/{NAME}", None),
        (f"/{NAME}", None),
    ],
    ids=["a model", "a model of nulls", "a field", "an option", "a message's field", "a role", "a part's field",
         "a model's path", "a path"],
)  # fmt: skip
def test_error_repeats_at_most_100_characters_of_input(api, path, body):
    answer = post(api, body, path) if body else httpx.get(api.url + path, **PLAIN)
    error = answer.json()["error"]
    assert answer.status_code in (400, 404) and len(error["param"] or "") <= 100
    assert error["message"].count("x") <= 110 and len(error["message"]) < 300


def test_stream_events_escape_unicode_line_separators():
    """Clients that split lines at Unicode line separators would split one event into several."""
    ends = "a\u2028b\u2029c\u0085d"
    answer = ResponseBuilder(CompletionRequest.model_validate({**ONE, "stream": True}), "embedded")
    (line,) = filter(None, answer.piece(0, ends).decode().splitlines())
    assert json.loads(line.removeprefix("data: "))["choices"][0]["text"] == ends


# ---- bodies ---------------------------------------------------------------------------------------------------------


def filled(beginning, element, end, size):
    """A body of about `size` bytes, filled with copies of `element`."""
    room = (size - len(beginning) - len(end)) // len(element)
    return beginning + element * room + end


COMPLETION, CHAT = b'{"model": "embedded", "max_tokens": 1, ', b'{"model": "embedded", "max_tokens": 1, "messages": '
HELLO = b'[{"role": "user", "content": "Hi"}], '
SHAPES = {
    "a prompt of fractions": (COMPLETION + b'"prompt": [', b"0.5,", b"1]}"),
    "a prompt of flags": (COMPLETION + b'"prompt": [1,', b"true,", b"1]}"),
    "a prompt of prompts": (COMPLETION + b'"prompt": [', b"[],", b"[1]]}"),
    "a prompt of texts": (COMPLETION + b'"prompt": [', b'"ab",', b'"a"]}'),
    "a prompt of tokens": (COMPLETION + b'"prompt": [', b"5,", b"5]}"),
    "a prompt of large numbers": (COMPLETION + b'"prompt": [', b"1" * 4000 + b",", b"5]}"),
    "a long text": (COMPLETION + b'"prompt": "', b"word ", b'"}'),
    "a text of escapes": (COMPLETION + b'"prompt": "', b"\\n", b'"}'),
    "a text of escaped letters": (COMPLETION + b'"prompt": "', b"\\u0416", b'"}'),
    "a text of halves": (COMPLETION + b'"prompt": "', b"\\ud83d", b'"}'),
    "a text of wide characters": (COMPLETION + b'"prompt": "', "\U0001f600".encode(), b'"}'),
    "a text of commas and brackets": (COMPLETION + b'"prompt": "', b",[{", b'"}'),
    "messages that are numbers": (CHAT + b"[", b"0,", b"0]}"),
    "messages that are empty": (CHAT + b"[", b"{},", b"{}]}"),
    "messages without a text": (CHAT + b"[", b'{"role":"user"},', b"{}]}"),
    "many messages": (CHAT + b"[", b'{"role":"user","content":""},', b"{}]}"),
    "parts that are numbers": (CHAT + b'[{"role": "user", "content": [', b"0,", b"0]}]}"),
    "parts that are lists": (CHAT + b'[{"role": "user", "content": [', b"[],", b"0]}]}"),
    "nested lists": (CHAT + b"[", b"[", b""),
    "nested objects": (CHAT, b'{"a":', b""),
    "nested in a label": (CHAT + HELLO + b'"user": ', b"[", b"]" * 10 + b"}"),
    "stop strings that are numbers": (CHAT + HELLO + b'"stop": [', b"0,", b"0]}"),
    "a bias": (CHAT + HELLO + b'"logit_bias": {', b'"5": 1,', b'"6": 1}}'),
    "tools": (CHAT + HELLO + b'"tools": [', b"{},", b"{}]}"),
    "a label of objects": (CHAT + HELLO + b'"metadata": [', b'{"a":0},', b"0]}"),
    "a label of texts": (CHAT + HELLO + b'"metadata": [', b'"ab",', b"0]}"),
}


def unknown_fields(size):
    fields = b"".join(b'"f%05d":0,' % i for i in range((size - 100) // 12))
    return CHAT + HELLO + fields + b'"seed": 1}'


def bodies(size):
    found = {name: filled(*shape, size) for name, shape in SHAPES.items()}
    return {**found, "unknown fields": unknown_fields(size)}


FULL = {  # by the objects and lists, and the commas, of an element
    "messages": (1, 2, CHAT + b"[", b'{"role":"user","content":""},', b'{"role":"user","content":""}]}'),
    "messages of which the last is wrong": (1, 2, CHAT + b"[", b'{"role":"user","content":""},', b"0]}"),
    "empty answers": (2, 4, CHAT + b"[", b'{"role":"assistant","refusal":null,"audio":null,"tool_calls":[]},',
                      b'{"role":"user","content":"Hi"}]}'),
    "messages with labels": (1, 8, CHAT + b"[",
                             b'{"role":"assistant","refusal":"","reasoning_content":"","annotations":0,'
                             b'"provider_specific_fields":1,"function_call":null,"name":null,"content":"a"},',
                             b'{"role":"user","content":"Hi"}]}'),
    "parts": (1, 2, CHAT + b'[{"role": "user", "content": [', b'{"type":"text","text":""},',
              b'{"type":"text","text":"a"}]}]}'),
    "tokens": (0, 1, COMPLETION + b'"prompt": [', b"5,", b"5]}"),
    "texts": (0, 1, COMPLETION + b'"prompt": [', b'"ab",', b'"a"]}'),
    "a label": (1, 1, CHAT + HELLO + b'"metadata": [', b"{},", b"{}]}"),
    "a label of commas and brackets": (0, 1, CHAT + HELLO + b'"metadata": [', b'"{[,\\"\\\\",', b"{}]}"),
}  # fmt: skip


def full_bodies(tokens):
    """Bodies with the largest number of elements that is accepted."""
    values = request_body.max_values(tokens) - 50  # without what is beside the elements
    for name, (objects, commas, *shape) in FULL.items():
        most = values // (objects + commas)
        if objects:
            most = min(most, (request_body.MAX_OBJECTS - 10) // objects)
        beginning, element, end = shape
        yield name, beginning + element * most + end


MOST_CALLS = 80_000  # for a body that is read


def calls_of(function, *arguments):
    """The number of calls of Python and C functions in `function`."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return calls


def errors_of(body, tokens):
    """The number of errors when the body is parsed and validated as FastAPI does it."""
    model = ChatCompletionRequest if b"messages" in body else CompletionRequest
    try:
        model.model_validate(request_body.parse(body, tokens))
    except ApiError as error:
        assert error.status_code == 400
        return 1
    except ValidationError as error:
        return error.error_count()
    return 0


@pytest.mark.parametrize("tokens", [1_023, 32_768])
def test_parsing_any_body_within_limit_uses_little_memory(tokens):
    """At most two errors are collected, however many elements are invalid: validation costs no more than parsing."""
    for name, body in [*bodies(request_body.max_bytes(tokens)).items(), *full_bodies(tokens)]:
        tracemalloc.start()
        errors = errors_of(body, tokens)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert errors <= 2 and peak < 20e6, (name, errors, peak)


@pytest.mark.parametrize("tokens", [1_023, 32_768])
def test_parsing_any_body_within_limit_makes_few_calls(tokens):
    """Function calls stand for time: a few per message or part, none for other values or rejected bodies."""
    for name, body in full_bodies(tokens):
        assert request_body.is_within_limits(body, request_body.max_values(tokens)), name
        assert (calls := calls_of(errors_of, body, tokens)) < MOST_CALLS, (name, calls)
    for name, body in bodies(request_body.max_bytes(tokens)).items():
        assert (calls := calls_of(errors_of, body, tokens)) < 500, (name, calls)


ELEMENTS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([10**4000, "\U0001f600", "\0", ',"{[', "x" * 9_000])
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(
        st.sampled_from([*Message.model_fields, *Message.no_effect, "type", "text"]) | st.text(max_size=9),
        inner, max_size=9)
    | st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": inner},
                            optional={name: st.sampled_from(off or (1,)) for name, off in Message.no_effect.items()}),
    max_leaves=12,
)  # fmt: skip
PLACES = [  # where many elements can be: the body before and after them
    (COMPLETION + b'"prompt": [', b"]}"),
    (COMPLETION + b'"prompt": [[', b"]]}"),
    (COMPLETION + b'"prompt": "x", "stop": [', b"]}"),
    (CHAT + b"[", b"]}"),
    (CHAT + b'[{"role": "user", "content": [', b"]}]}"),
    (CHAT + b'[{"role": "user", "content": "x", "tool_calls": [', b"]}]}"),
    *((CHAT + HELLO + b'"%s": [' % name, b"]}") for name in (b"metadata", b"tools", b"response_format", b"new", b"n")),
]
FIELDS_OF = [  # and where many fields of an object can be
    (COMPLETION, b"}"),
    (CHAT + HELLO, b"}"),
    (CHAT + b"[{", b"}]}"),
    (CHAT + b'[{"role": "user", "content": [{', b"}]}]}"),
    (CHAT + HELLO + b'"stream": true, "stream_options": {', b"}}"),
    *((CHAT + HELLO + b'"%s": {' % name, b"}}") for name in (b"metadata", b"logit_bias", b"new")),
]


@st.composite
def any_bodies(draw, tokens):
    """A body that repeats one element up to the limit of bytes or of values, or somewhat beyond it."""
    value = draw(ELEMENTS)
    element = json.dumps(value, ensure_ascii=draw(st.booleans()), separators=draw(SEPARATORS)).encode()
    depth = draw(st.sampled_from([0, 0, 0, 1, 3, 30, 900]))
    opening, closing = draw(st.sampled_from([(b"[", b"]"), (b'{"a":', b"}"), (b'{"content":[', b"]}")]))
    element = opening * depth + element + closing * depth + b","
    element += draw(st.sampled_from([b"", b" ", b"\n" * 100]))
    fields = draw(st.booleans())
    beginning, end = draw(st.sampled_from(FIELDS_OF if fields else PLACES))
    key = draw(st.sampled_from([b'"%09d":', b'"a":'])) if fields else b""
    numbered = 5 if b"%" in key else 0  # bytes that a number adds
    element = key + element
    objects, commas = (max(sum(element.count(mark) for mark in marks), 1) for marks in (b"[{", b","))
    limits = {
        "bytes": (request_body.max_bytes(tokens) - 200) // (len(element) + numbered),
        "objects": (request_body.MAX_OBJECTS - 10) // objects,
        "values": (request_body.max_values(tokens) - 50) // (objects + commas),
    }
    times = min(draw(st.sampled_from([limits["bytes"], min(limits.values()), min(limits.values()) + 99])),
                limits["bytes"])  # fmt: skip
    elements = [element.replace(b"%09d", b"%09d" % i, 1) for i in range(times)] if numbered else [element] * times
    return beginning + b"".join(elements).rstrip(b", \n") + end


SEPARATORS = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", ":\t")])


@pytest.mark.parametrize("tokens", [1_023, 32_768])
def test_parsing_random_bodies_within_limit_is_cheap(tokens, request):
    """The limits count objects and values of any kind, anywhere in the body."""
    read, examples = 0, 150 if request.config.getoption("--long") else 50

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    @given(any_bodies(tokens))
    def check(body):
        nonlocal read
        assert len(body) <= request_body.max_bytes(tokens)
        fits = request_body.is_within_limits(body, request_body.max_values(tokens))
        read += fits
        calls = calls_of(errors_of, body, tokens)
        assert calls < (MOST_CALLS if fits else 500), body[:200]
        tracemalloc.start()
        errors = errors_of(body, tokens)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert errors <= 10 and peak < 20e6, (errors, peak, body[:200])  # those of one message

    check()
    assert read > examples / 5  # the others are rejected


marks = st.text('",[{\\a\n', max_size=4)  # what is counted, and what ends a string


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    st.dictionaries(
        marks,
        st.recursive(
            st.integers(0, 9) | marks,
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(marks, inner, max_size=3),
            max_leaves=6,
        ),
        max_size=5,
    )
)
def test_brackets_and_commas_inside_strings_are_not_counted(data):
    def size(data):
        """The number of its objects and lists, and of the commas between their elements."""
        if not isinstance(data, list | dict):
            return 0
        inner = data if isinstance(data, list) else data.values()
        return 1 + max(len(data) - 1, 0) + sum(map(size, inner))

    body = json.dumps(data).encode()
    assert request_body.is_within_limits(body, size(data)) and not request_body.is_within_limits(body, size(data) - 1)


def test_any_body_within_limit_gets_a_response(api):
    statuses = {}
    for name, body in bodies(request_body.max_bytes(api.endpoint.longest_prompt)).items():
        path = "/chat/completions" if b"messages" in body else "/completions"
        statuses[name] = post(api, body, path).status_code
    assert set(statuses.values()) <= {200, 400}, statuses
    assert post(api, {**ONE, "prompt": "x" * 200_000}).json()["error"]["code"] == "body_too_large"


@pytest.mark.parametrize("opening", [b"[", b'{"a":'], ids=["lists", "objects"])
def test_nesting_of_any_depth_gets_a_response(api, opening):
    """Nesting just below the parser's limit could exceed that of a later stage."""
    closing = {b"[": b"]", b'{"a":': b"}"}[opening]
    for depth in [*range(1, 1100, 50), *range(900, 1010)]:
        nested = opening * depth + b"1" + closing * depth
        half = b'"\\ud83d\\ude00"'  # so that the whole text is scanned
        body = CHAT + HELLO + b'"user": ' + nested + b', "safety_identifier": ' + half + b"}"
        assert errors_of(body, 1_000) <= 1
        if depth in (1, 951, 958, 960, 962, 1051):
            assert post(api, body, "/chat/completions").status_code in (200, 400), depth


def test_longest_prompt_is_accepted_in_any_encoding(api):
    """The limits admit every valid request."""
    longest = api.endpoint.longest_prompt
    for prompt in ([5] * longest, "\u0416" * longest, [["a,{["] * 1][0]):
        answer = post(api, json.dumps({**ONE, "prompt": prompt}).encode())  # escaped
        assert answer.status_code == 200 or answer.json()["error"]["code"] == "context_length_exceeded", answer.text
    messages = [{"role": "user", "content": "[{,"}] * 300
    answer = post(api, {"model": "embedded", "messages": messages, "max_tokens": 1}, "/chat/completions")
    assert answer.json()["error"]["code"] == "context_length_exceeded"


# ---- slots and timeouts ---------------------------------------------------------------------------------------------


def half_a_request(api):
    """A connection that announces a body and never sends it."""
    connection = socket.create_connection(("127.0.0.1", api.port), timeout=PATIENCE)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n"
    connection.sendall(head + b"{")
    return connection


def get_health(api):
    return httpx.get(api.url.replace("/v1", "/health"), **PLAIN)


def test_slow_bodies_fill_their_slots_but_health_still_responds(decoder):
    with Api(decoder, body_timeout=PATIENCE) as api, contextlib.ExitStack() as slow:
        for _ in range(api.limits.max_open_requests):
            slow.enter_context(half_a_request(api))
        refused = wait_until(lambda: answer if (answer := post(api, ONE)).status_code == 429 else None)
        assert refused.json()["error"]["code"] == "queue_full" and refused.headers["retry-after"]
        assert get_health(api).json()["status"] == "ok"
        slow.close()
        wait_until(lambda: post(api, ONE).status_code == 200, "their slots are free")


def test_incomplete_body_times_out_with_408(decoder):
    with Api(decoder, body_timeout=0.5) as api, half_a_request(api) as slow:
        answer = ""
        while "body_too_slow" not in answer:
            piece = slow.recv(4096).decode()
            assert piece, answer
            answer += piece
        assert "408" in answer.splitlines()[0]
        assert post(api, ONE).status_code == 200


def test_connections_are_limited_in_number_and_idle_time(decoder):
    def is_closed(connection):
        try:
            return not connection.recv(1)
        except ConnectionError:
            return True

    protocol = connections.limit_connections(AutoHTTPProtocol, max_connections=3, idle_seconds=0.3)
    with Api(decoder, http=protocol) as api, contextlib.ExitStack() as several:
        idle = [several.enter_context(socket.create_connection(("127.0.0.1", api.port), PATIENCE)) for _ in range(4)]
        half = b"GET /health HTTP/1.1\r\n"
        for connection in idle:
            with contextlib.suppress(ConnectionError):
                connection.sendall(half)
        assert all(is_closed(connection) for connection in idle)
        wait_until(lambda: not api.uvicorn.server_state.connections)
        with api.client(max_retries=5) as client:  # longer than that under way is not idle; before it sends, it is
            answer = client.completions.create(**{**ONE, "max_tokens": 400}, extra_body={"ignore_eos": True})
        assert answer.usage.completion_tokens == 400


def test_connection_above_limit_is_refused_at_once(decoder):
    protocol = connections.limit_connections(AutoHTTPProtocol, max_connections=2, idle_seconds=PATIENCE)
    with Api(decoder, http=protocol) as api, contextlib.ExitStack() as several:
        open_ = [several.enter_context(socket.create_connection(("127.0.0.1", api.port), PATIENCE)) for _ in range(2)]
        wait_until(lambda: len(api.uvicorn.server_state.connections) == 2)
        with pytest.raises(httpx.TransportError):
            get_health(api)
        open_[0].close()
        wait_until(lambda: get_health(api).status_code == 200, passing=(httpx.TransportError,))


class Gate:
    """A gate before a function; `calls` are the threads that reached it, without the decoding thread."""

    def __init__(self, monkeypatch, owner, name):
        function = getattr(owner, name)
        self.calls, self.open = [], threading.Event()

        def gated(*arguments, **options):
            if (thread := threading.current_thread().name) != "decoding":
                self.calls.append(thread)
            assert self.open.wait(PATIENCE)
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, gated)

    def __enter__(self) -> "Gate":
        return self

    def __exit__(self, *_) -> None:
        self.open.set()  # a failed test does not wait for the threads that wait here


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as pool:
        yield pool


def test_rejected_request_is_not_tokenized(decoder, monkeypatch, pool):
    encode = Gate(monkeypatch, decoder, "encode")
    with Api(decoder, max_num_seqs=1, max_queue=1) as api, encode:
        futures = [pool.submit(post, api, ONE) for _ in range(2)]
        wait_until(lambda: api.endpoint.open_requests == 2)
        assert post(api, ONE).json()["error"]["code"] == "queue_full"
        encode.open.set()
        assert [future.result().status_code for future in futures] == [200, 200]
    assert len(encode.calls) == 2


def test_prompts_are_tokenized_by_one_thread(decoder, monkeypatch, pool):
    """Chat templates are not known to be thread-safe."""
    encode = Gate(monkeypatch, decoder, "encode")
    with Api(decoder) as api, encode:
        futures = [pool.submit(post, api, ONE) for _ in range(4)]
        wait_until(lambda: api.endpoint.open_requests == 4)
        encode.open.set()
        assert {future.result().status_code for future in futures} == {200}
    assert len(encode.calls) == 4 and len(set(encode.calls)) == 1


def test_shutdown_waits_for_prompts_being_tokenized(decoder, monkeypatch, pool):
    encode = Gate(monkeypatch, decoder, "encode")
    with Api(decoder) as api, encode:
        future = pool.submit(post, api, ONE)
        wait_until(lambda: encode.calls)
        stopping = pool.submit(api.run, api.endpoint.drain(PATIENCE))
        wait_until(lambda: api.endpoint.draining)
        assert post(api, ONE).json()["error"]["code"] == get_health(api).json()["error"]["code"] == "draining"
        assert api.endpoint.open_requests == 1 and not stopping.done()
        encode.open.set()
        assert future.result().status_code == 200 and stopping.result() == 0


@pytest.mark.parametrize("name", ["encode", "step"])
def test_request_unfinished_at_shutdown_returns_503(decoder, monkeypatch, pool, name):
    gate = Gate(monkeypatch, decoder, name)
    with Api(decoder) as api, gate:
        future = pool.submit(post, api, ONE)
        wait_until(lambda: gate.calls if name == "encode" else api.engine.stepping_since)
        assert api.run(api.endpoint.drain(0.05)) == 1
        gate.open.set()
        answer = future.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
        assert answer.headers["retry-after"]


# ---- engine errors --------------------------------------------------------------------------------------------------


def test_engine_failure_returns_503_to_all_requests(decoder, monkeypatch, pool):
    step = Gate(monkeypatch, decoder, "step")
    with Api(decoder, max_num_seqs=1) as api, step:
        futures = [pool.submit(post, api, {**ONE, "stream": stream}) for stream in (False, False, True)]
        wait_until(lambda: api.engine.running + api.engine.waiting == 3)
        monkeypatch.setattr(decoder.main, "logits", planted)
        monkeypatch.setattr(decoder, "_finalize", planted)
        step.open.set()
        whole, other, streamed = (future.result() for future in futures)
        for answer in (whole, other, post(api, ONE), get_health(api)):
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["type"]) == (503, "engine_failed", "server_error")
            assert int(answer.headers["retry-after"]) > 0
        assert "planted" in get_health(api).json()["error"]["message"]
        assert json.loads(streamed.text.removeprefix("data: "))["error"]["code"] == "engine_failed"


def planted(*_):
    raise ValueError("a planted fault")


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ValueError("a grammar that allows no token"), 400, "invalid_request"),
        (OutOfBlocks("a text of up to 9 tokens needs more"), 400, "invalid_request"),
        (EngineFailed(RuntimeError("x")), 503, "engine_failed"),
        (RuntimeError("x"), 500, "decoding_failed"),
        (InvalidLogits("x"), 500, "decoding_failed"),
    ],
)
def test_errors_map_to_status_and_code(api, error, status, code):
    answer = api.endpoint._api_error(error)
    assert (answer.status_code, answer.body["error"]["code"]) == (status, code)
    assert (status == 503) == ("retry-after" in (answer.headers or {}))


def test_hang_detection_allows_longer_steps_for_slower_models(api, decoder, monkeypatch):
    """If the model takes three minutes for 64 tokens, a step counts as hanging only after an hour."""
    wait_until(lambda: not api.engine.stepping_since, "no step runs")
    monkeypatch.setattr(api.engine, "stepping_since", time.monotonic() - 3600)
    hanging = get_health(api)
    assert hanging.status_code == 503 and "running for more than 120 s" in hanging.json()["error"]["message"]
    monkeypatch.setattr(decoder.draft_length, "main", LatencyCurve({1: 60.0, 64: 180.0}))
    assert get_health(api).status_code == 200
    assert health.step_timeout(api.engine) > 3600


# ---- tenants --------------------------------------------------------------------------------------------------------


def cached(api, prompt, key="none", cache_key=None):
    body = {**ONE, "prompt": prompt, "prompt_cache_key": cache_key}
    answer = post(api, body, Authorization=f"Bearer {key}")
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_cached_tokens_do_not_reveal_prompts_of_other_clients(api):
    assert cached(api, LONG_PROMPT) == 0
    assert cached(api, LONG_PROMPT) > 0  # the same client
    assert cached(api, LONG_PROMPT, key="another") == 0
    assert cached(api, LONG_PROMPT, cache_key="mine") == 0
    assert cached(api, LONG_PROMPT, cache_key="mine") > 0
    assert cached(api, LONG_PROMPT, cache_key="yours") == 0


def test_each_configured_key_is_accepted(decoder):
    with Api(decoder, keys=frozenset(map(digest, ("one", "two")))) as api:
        found = [post(api, ONE, Authorization=f"Bearer {key}").status_code for key in ("one", "two", "three")]
        assert [*found, post(api, ONE).status_code] == [200, 200, 401, 401]


# ---- tokens ---------------------------------------------------------------------------------------------------------


def test_no_draft_after_token_outside_draft_vocabulary(api, decoder, monkeypatch):
    """The draft's embedding table has no row for this token."""
    monkeypatch.setattr(api.endpoint, "draft_length", 4)  # the adaptive length may be 0 on a busy machine
    body = {**ONE, "prompt": [5, 100, 5], "max_tokens": 20, "ignore_eos": True}
    usual = post(api, body).json()
    monkeypatch.setattr(decoder.draft, "vocab_size", 100)
    narrow = post(api, body).json()
    assert narrow["choices"] == usual["choices"]
    details = [answer["usage"]["completion_tokens_details"] for answer in (usual, narrow)]
    assert [sum(d[f"{kind}_prediction_tokens"] for kind in ("accepted", "rejected")) > 0 for d in details] == [
        True,
        False,
    ]
    draft = DraftModelProposer(cached_model.load(DRAFT), decoder.main.vocab_size + 9)
    assert draft.propose(np.array([5, draft.model.vocab_size]), None, None) is None


# ---- the command's arguments ----------------------------------------------------------------------------------------


def parsed_arguments(monkeypatch, *given):
    monkeypatch.setattr("sys.argv", ["serve_pair.py", str(MAIN), *map(str, given)])
    return arguments.parse("")


@pytest.mark.parametrize("given", [["--device", "AUTO:CPU"], [DRAFT, "--draft-device", "HETERO:CPU"]])
def test_device_without_paged_attention_is_refused_before_ray_starts(monkeypatch, capsys, given):
    with pytest.raises(SystemExit) as end:
        parsed_arguments(monkeypatch, *given)
    assert end.value.code == 2
    assert f"paged attention, which {given[-1]} lacks: use CPU, GPU or GPU.1." in capsys.readouterr().err


def test_server_and_metrics_need_two_ports(monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        parsed_arguments(monkeypatch, "--port", 8001)
    assert end.value.code == 2 and "--port and --metrics-port are both 8001" in capsys.readouterr().err
    assert parsed_arguments(monkeypatch, "--port", 8001, "--metrics-port", 8002).port == 8001


@pytest.mark.parametrize(
    ("machines", "replicas", "words"),
    [
        ([{"CPU": 2, "intel_gpu": 1}], 1, None),
        ([{"CPU": 2, "intel_gpu": 1}], 2, "2 CPU and 1 intel_gpu on one machine, and 1 of 2 replicas fit"),
        ([{"CPU": 2, "intel_gpu": 1}] * 2, 2, None),
        ([{"CPU": 1, "intel_gpu": 1}] * 2, 1, "and 0 of 1 replicas fit"),  # no machine has two cores
        ([{"CPU": 8}, {"intel_gpu": 1}], 1, "and 0 of 1 replicas fit"),
    ],
)
def test_replica_has_to_fit_on_one_machine(monkeypatch, machines, replicas, words):
    nodes = [{"Alive": True, "Resources": one} for one in machines] + [{"Alive": False, "Resources": {"CPU": 64}}]
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    lacking = ray_runtime.lacking(replicas, {"CPU": 2, "intel_gpu": 1})
    assert words in lacking if words else lacking is None


def test_network_address_without_key_requires_insecure_option(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    for host in ("0.0.0.0", "::", "no..host"):
        with pytest.raises(SystemExit) as end:
            parsed_arguments(monkeypatch, "--host", host)
        assert end.value.code == 2 and "--insecure" in capsys.readouterr().err
        assert parsed_arguments(monkeypatch, "--host", host, "--insecure").keys is None
        assert f"warning: anyone who can reach {host} can use" in capsys.readouterr().err
    for host in ("127.0.0.1", "localhost", "::1"):
        parsed_arguments(monkeypatch, "--host", host)
    key = tmp_path / "key"
    key.write_text("one\n\n two\n", encoding="utf-8-sig")  # with a byte order mark, as Windows editors write it
    assert parsed_arguments(monkeypatch, "--host", "0.0.0.0", "--api-key-file", key).keys == {
        digest("one"),
        digest("two"),
    }
    assert "warning" not in capsys.readouterr().err


class Stripping:
    """A tokenizer that leaves out the space before the first token that it decodes, as SentencePiece does."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def decode(self, *arguments, **options):
        return self._tokenizer.decode(*arguments, **options).removeprefix(" ")


@pytest.mark.parametrize("stream", [False, True])
def test_completion_keeps_leading_space_of_first_token(api, monkeypatch, stream):
    params = {
        "model": "embedded",
        "prompt": "def f(x):\n    return",
        "max_tokens": 8,
        "temperature": 0,
        "stream": stream,
    }

    def text():
        answer = httpx.post(f"{api.url}/completions", json=params, **PLAIN).text
        if not stream:
            return json.loads(answer)["choices"][0]["text"]
        events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
        return "".join(choice["text"] for event in events for choice in event["choices"])

    before = text()
    assert before.startswith(" ")
    monkeypatch.setattr(api.engine.decoder, "tokenizer", Stripping(api.engine.decoder.tokenizer))
    assert text() == before


def test_proxies_in_front_find_health_and_do_not_collect_streams(api):
    health = httpx.head(f"{api.url.removesuffix('/v1')}/health", **PLAIN)
    assert (health.status_code, health.content) == (200, b"")
    assert post(api, {**ONE, "stream": True}).headers["x-accel-buffering"] == "no"


def test_health_and_page_need_no_key_behind_route_prefix():
    """Ray Serve keeps the route_prefix in the path."""
    passed, sent = [], []

    async def app(scope, receive, send):
        passed.append(scope["path"])

    async def send(message):
        sent.append(message.get("status"))

    guard = Guard(app, frozenset({digest("key")}), 100, Limits(), sent.append)
    for path in ("/health", "/", "/v1/models"):
        scope = {"type": "http", "path": f"/llm{path}", "root_path": "/llm", "headers": []}
        asyncio.run(guard(scope, None, send))
    assert passed == ["/llm/health", "/llm/"] and sent[:2] == [401, 401]


def test_failed_request_is_counted_once(api, monkeypatch):
    counted = []
    monkeypatch.setattr(api.endpoint.metrics, "count_rejected", lambda status: counted.append(status))
    monkeypatch.setattr(api.endpoint.metrics, "count_finished", lambda job, outcome: counted.append(outcome))
    monkeypatch.setattr(api.endpoint, "limits", dataclasses.replace(api.endpoint.limits, timeout=0.02))
    params = {"model": "embedded", "prompt": "def", "max_tokens": 400, "ignore_eos": True}
    assert httpx.post(f"{api.url}/completions", json=params, **PLAIN).status_code == 504
    assert counted == ["timeout"]


def test_readiness_probe_bypasses_environment_proxy(monkeypatch):
    """The proxy set in the environment cannot reach this machine."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        assert application.is_reachable(f"http://127.0.0.1:{server.server_port}/")


@pytest.mark.parametrize(
    ("host", "shown"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("localhost", "localhost")]
)
def test_server_url_can_be_opened_locally(host, shown):
    assert arguments.in_url(host) == shown


@pytest.mark.parametrize("key", ["schl\u00fcssel", "a\x07b"])
def test_key_with_invalid_header_characters_is_rejected(monkeypatch, capsys, tmp_path, key):
    file = tmp_path / "key"
    file.write_text(key, encoding="utf-8")
    for options, environment in ((("--api-key-file", file), ""), ((), key)):
        monkeypatch.setenv(API_KEY_VARIABLE, environment)
        with pytest.raises(SystemExit) as end:
            parsed_arguments(monkeypatch, *options)
        assert end.value.code == 2 and "ASCII" in capsys.readouterr().err


def test_draft_with_other_tokenizer_is_served_with_warning(monkeypatch, renumbered_draft, capsys):
    assert parsed_arguments(monkeypatch, renumbered_draft).pair.draft.folder == renumbered_draft.resolve()
    assert f"warning: {renumbered_draft} as a draft of {MAIN}: 4,092 of 4,096 token ids" in capsys.readouterr().err


def test_removed_replica_may_finish_its_requests(monkeypatch):
    settings = parsed_arguments(monkeypatch, "--max-replicas", 2, "--timeout", 300, "--drain", 5)
    options = application.deployment_options(settings)
    assert options["graceful_shutdown_timeout_s"] > settings.limits.timeout == 300
    assert options["max_queued_requests"] > 0 and settings.limits.max_open_requests < options["max_ongoing_requests"]
    assert application.Replica.options(**options).max_queued_requests == options["max_queued_requests"]


def test_replicas_with_own_cores_disable_cpu_pinning(monkeypatch):
    spec = parsed_arguments(monkeypatch, "--num-cpus", 1).pair.main
    compiled = ov.Core().compile_model(spec.folder / "openvino_model.xml", spec.device, dict(spec.properties))
    assert compiled.get_property("INFERENCE_NUM_THREADS") == 1
    assert compiled.get_property("ENABLE_CPU_PINNING") is False


def decoder_of_a_replica(pair):
    """The decoder that a replica created by Ray would have."""

    async def decoder():
        replica = object.__new__(application.Replica.func_or_class.__bases__[0])  # without what Ray wraps around it
        await replica.__init__(pair, Limits(100, 100, 1, 1, 60.0), None)
        replica._engine.close()
        return replica._engine.decoder

    return asyncio.run(decoder())


@pytest.mark.parametrize(("given", "prefix_cache"), [((), True), (("--no-prefix-cache",), False)])
def test_no_prefix_cache_option_disables_prefix_cache(monkeypatch, given, prefix_cache):
    """The option reaches the engine of the replica that Ray creates."""
    with Api(decoder_of_a_replica(parsed_arguments(monkeypatch, *given).pair)) as api:
        cached(api, LONG_PROMPT)
        assert (cached(api, LONG_PROMPT) > 0) is prefix_cache


EXACT_MODE = ("--property", "EXECUTION_MODE_HINT=ACCURACY")


def test_past_answers_are_reused_only_for_same_prompt_cache_key(monkeypatch):
    given = ("--suffix-decoding", "--past-answers", 300, *EXACT_MODE)
    with Api(decoder_of_a_replica(parsed_arguments(monkeypatch, *given).pair), draft_length=4) as api:

        def answered(key):
            body = {**ONE, "prompt": LONG_PROMPT, "max_tokens": 48, "ignore_eos": True, "prompt_cache_key": key}
            answer = post(api, body).json()
            return answer["choices"][0]["text"], answer["usage"]["completion_tokens_details"]

        first, again, another = answered("mine"), answered("mine"), answered("another's")
        assert first[0] == again[0] == another[0]
        copied, *others = (details["accepted_prediction_tokens"] for _, details in (again, first, another))
        assert copied > 24 > max(others)


def test_draft_model_and_suffix_decoding_draft_together(monkeypatch):
    sources = (DRAFT, "--suffix-decoding", "--past-answers", 300)
    with Api(decoder_of_a_replica(parsed_arguments(monkeypatch, *sources, *EXACT_MODE).pair), draft_length=8) as api:
        body = {**ONE, "prompt": "import os\n", "max_tokens": 48, "ignore_eos": True}
        first, again = (post(api, body).json() for _ in range(2))
    assert first["choices"][0]["text"] == again["choices"][0]["text"]
    accepted = [one["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] for one in (first, again)]
    assert 0 < accepted[0] < accepted[1] and accepted[1] > 36  # nearly all of the second answer is a copy of the first


@pytest.mark.parametrize("seconds", ["0", "2e6"])
def test_error_names_the_range_of_a_time_limit(monkeypatch, capsys, seconds):
    with pytest.raises(SystemExit) as end:
        parsed_arguments(monkeypatch, "--timeout", seconds)
    error = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and f"'{seconds}' is not a number above 0 and below 1,000,000" in error


@pytest.mark.parametrize(
    ("given", "word"),
    [
        (("--past-answers", 100), "add --suffix-decoding"),
        (("--suffix-decoding", "--past-answers", 0), "'0' is not a whole number from 1"),
        (("--cache-tokens", 3), "'3' is not a whole number from 4"),
    ],
)
def test_invalid_numbers_of_tokens_are_rejected(monkeypatch, capsys, given, word):
    with pytest.raises(SystemExit) as end:
        parsed_arguments(monkeypatch, *given)
    errors = capsys.readouterr().err
    assert end.value.code == 2 and word in errors and "Traceback" not in errors
