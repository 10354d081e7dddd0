"""Every response is one that the OpenAPI document describes: the server fuzzed with schemathesis."""

import functools
import json
from collections import Counter

import httpx
import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from speculative.serving.http import request_body
from speculative.serving.http.middleware import digest
from tests.support.later import schemathesis
from tests.support.serving import PLAIN, Api

RULES = settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
POSTS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "def f("},
    "/v1/responses": {"input": "Hi"},
    "/tokenize": {"prompt": "def f("},
    "/detokenize": {"tokens": [5]},
}
FEW = {
    "/v1/chat/completions": {"max_tokens": 2, "max_completion_tokens": None},
    "/v1/completions": {"max_tokens": 2},
    "/v1/responses": {"max_output_tokens": 2},
}
STREAMED = {
    path: {"stream_options": {"include_draft_tokens": True}} for path in ("/v1/chat/completions", "/v1/completions")
}
KINDS = ["generated", "served", "answered", "streamed", "of another model"]


@pytest.fixture(scope="module")
def api(decoder):
    with Api(decoder, max_output_tokens=10) as api:  # schemathesis reads 20 events of a stream
        yield api


@pytest.fixture(scope="module")
def document(api):
    return httpx.get(f"{base(api)}/openapi.json", **PLAIN).json()


@pytest.fixture(scope="module")
def described(document):
    config = schemathesis.config.SchemathesisConfig.from_dict(
        {"generation": {"deterministic": True, "database": "none"}}
    )
    return schemathesis.openapi.from_dict(document, config=config)


def base(api):
    return api.url.removesuffix("/v1")


@functools.cache
def checked():
    """The checks of a response."""
    schemathesis.checks.load_all_checks()
    names = ("status_code", "content_type", "response_headers", "response_schema")
    return [schemathesis.checks.CHECKS.get_one(f"{name}_conformance") for name in names]


def ask(api, case, document):
    """The response to a schemathesis case, checked against the document; a server error fails the test."""
    answer = case.call(base_url=base(api), timeout=60)
    assert answer.status_code < 500 or answer.status_code == 503, answer.text
    case.validate_response(answer, checks=checked())
    content = case.operation.definition.raw["responses"][str(answer.status_code)]["content"]
    kind = answer.headers["content-type"][0].partition(";")[0]
    if kind == "text/event-stream":
        check_events(answer.text, content[kind]["itemSchema"]["properties"]["data"]["anyOf"][0], document)
    return f"{answer.status_code} {kind}"


def check_events(text, data, document):
    """schemathesis treats the JSON in events as text."""
    *events, last, nothing = text.split("\n\n")
    assert nothing == ""
    if last.startswith("event: response."):
        events.append(last)
    else:
        assert last == "data: [DONE]"
    for event in events:
        chunk = json.loads(event.partition("data: ")[2])
        jsonschema.validate(chunk, {**data["contentSchema"], "components": document["components"]})
        assert "error" not in chunk


# ---- bodies that the document describes -----------------------------------------------------------------------------


@pytest.mark.parametrize("method_path", ["GET /health", "GET /v1/models", "GET /v1/models/{name}",
                                         "POST /v1/chat/completions", "POST /v1/completions", "POST /v1/responses",
                                         "POST /tokenize", "POST /detokenize"])  # fmt: skip
def test_responses_conform_to_openapi_document(api, document, described, method_path):
    method, path = method_path.split()
    kinds = Counter()

    def fuzz(kind):
        """Many generated bodies name another model or exceed a limit: most of them are corrected."""

        @RULES
        @given(described[path][method].as_strategy())
        def check(case):
            kinds[ask(api, corrected(case, kind), document)] += 1

        check()

    def corrected(case, kind):
        if kind != "generated" and path in POSTS and isinstance(case.body, dict):
            generated = case.body if kind == "served" else POSTS[path]
            case.body = {**generated, "model": api.model, **FEW.get(path, {})}
            if kind == "streamed" and path in FEW:
                case.body |= {"stream": True, **STREAMED.get(path, {})}
            elif kind == "of another model":
                case.body["model"] = "another"
        return case

    for kind in KINDS if path in POSTS else ["generated"]:
        fuzz(kind)
    wanted = {"200 application/json"}
    if path in POSTS:
        wanted |= {"400 application/json", "404 application/json"}
    if path in FEW:
        wanted |= {"200 text/event-stream"}
    if path == "/v1/models/{name}":
        wanted = {"404 application/json"}
    assert wanted <= set(kinds), kinds  # all of them occurred


def test_every_operation_is_fuzzed(document):
    tested = {(path, method) for path, operations in document["paths"].items() for method in operations}
    assert tested == {("/health", "get"), ("/v1/models", "get"), ("/v1/models/{name}", "get"),
                      *((path, "post") for path in POSTS)}  # fmt: skip


# ---- bodies of any size and depth -----------------------------------------------------------------------------------

leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@st.composite
def bodies(draw, path, fields, most):
    """A body as bytes: a valid one with one more field that is random, deeply nested or long, up to and beyond the
    limit."""
    body = {"model": "embedded", **FEW.get(path, {}), **POSTS[path]}
    value = json.dumps(draw(values)).encode()
    depth = draw(st.sampled_from([0, 0, 1, 10, 100, 900, 1_000, 10_000, 100_000]))
    opening, closing = draw(st.sampled_from([(b"[", b"]"), (b'{"a":', b"}"), (b'[{"content":[', b"]}]")]))
    times = draw(st.sampled_from([0, 1, 100, 4_000, most // (len(value) + 1), most]))
    element = draw(st.sampled_from([value, b"0", b'"a"', b"{}", b'{"role":"user","content":"a"}']))
    repeated = b"[" + b",".join([element] * min(times, 2 * most // (len(element) + 1))) + b"]"
    inner = draw(st.sampled_from([value, repeated, b'"' + b"a" * min(times, 2 * most) + b'"']))
    field = draw(st.sampled_from(fields) | st.text(max_size=200))
    content = json.dumps(body).encode()[:-1] + b", " + json.dumps(field).encode() + b": "
    content += opening * depth + inner + closing * depth + b"}"
    cut = draw(st.sampled_from([None, None, None, -1, len(content) // 2, 0]))
    return content[:cut]


@pytest.mark.parametrize("path", POSTS)
def test_bodies_of_any_size_and_depth_conform_to_openapi_document(api, document, described, path):
    kinds = Counter()
    model = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    fields = [*document["components"]["schemas"][model.rpartition("/")[2]]["properties"], "user", "tools", "logit_bias"]

    @RULES
    @given(bodies(path, fields, request_body.max_bytes(api.endpoint.longest_prompt)))
    def check(body):
        case = described[path]["POST"].Case(body=body, media_type="application/json")
        kinds[ask(api, case, document)] += 1

    check()
    assert {f"{status} application/json" for status in (400, 413)} <= set(kinds), kinds


# ---- the document ---------------------------------------------------------------------------------------------------


def test_document_declares_error_responses(api, document):
    for path, operations in document["paths"].items():
        for operation in operations.values():
            responses = operation["responses"]
            assert "422" not in responses and "401" not in responses
            for status, response in responses.items():
                (kind, *_) = response["content"].values()
                reference = kind["schema"]["$ref"].rpartition("/")[2]
                assert (reference == "Error") == (status != "200"), (path, status)
    names = set(document["components"]["schemas"])
    assert {"Error", "ChatCompletionChunk", "CompletionChunk"} <= names and "HTTPValidationError" not in names


def test_document_declares_401_only_with_api_keys(api):
    application = api.endpoint.application(frozenset([digest("key")])).openapi()
    found = {path: "401" in operation["responses"] for path, operations in application["paths"].items()
             for operation in operations.values()}  # fmt: skip
    assert found == {path: path != "/health" for path in found}
