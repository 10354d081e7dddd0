"""The headers of responses: a request id on each, and those that let the web pages of an origin use the server."""

import gzip
import json
import re

import httpx
import pytest

from speculative import batch_decoder
from speculative.serving import arguments
from speculative.serving.api.errors import ApiError
from speculative.serving.http import request_body
from speculative.serving.http.middleware import digest
from tests.support.paths import DRAFT, MAIN
from tests.support.serving import PLAIN, Api

ONE = {"model": "embedded", "prompt": "def f(", "max_tokens": 1}
PAGE = "https://example.org"


@pytest.fixture(scope="module")
def decoder():
    return batch_decoder.load(DRAFT)


@pytest.fixture(scope="module")
def api(decoder):
    with Api(decoder, keys=frozenset([digest("one")]), cors_origins=(PAGE,)) as api:
        yield api


def ask(api, method="POST", path="/v1/completions", body=None, key="one", **headers):
    headers |= {"authorization": f"Bearer {key}"}
    url = api.url.removesuffix("/v1") + path
    return httpx.request(method, url, json=body, headers=headers, **PLAIN)


REQUESTS = {  # by the status of the response
    "200": {"body": ONE},
    "200 as a stream": {"body": {**ONE, "stream": True}},
    "400": {"body": {**ONE, "temperature": -1}},
    "401": {"body": ONE, "key": "two"},
    "404": {"method": "GET", "path": "/nothing"},
    "405": {"method": "GET"},
    "413": {"body": {**ONE, "prompt": "x" * 200_000}},
    "500": {"path": "/tokenize", "body": {"prompt": "x"}},
}


@pytest.mark.parametrize("status", REQUESTS)
def test_every_response_has_a_request_id(api, decoder, monkeypatch, status):
    if status == "500":
        monkeypatch.setattr(decoder, "tokenizer", None)
    sent = "a1_B.2:c/d+e=f@g-h"
    answers = [ask(api, **REQUESTS[status], **({"x-request-id": sent} if known else {})) for known in (True, False)]
    assert {answer.status_code for answer in answers} == {int(status[:3])}
    known, made = (answer.headers.get_list("x-request-id") for answer in answers)
    assert known == [sent] and len(made) == 1 and re.fullmatch("[0-9a-f]{32}", made[0])


@pytest.mark.parametrize("invalid", ["", "a b", "x" * 129, "caf\u00e9".encode(), '"', "<b>", "a,b"])
def test_invalid_request_id_is_replaced(api, invalid):
    found = ask(api, body=ONE, **{"x-request-id": invalid}).headers.get_list("x-request-id")
    assert len(found) == 1 and re.fullmatch("[0-9a-f]{32}", found[0])


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "text/plain", "application/jsonl"])
def test_missing_json_content_type_returns_400(api, kind):
    """curl -d sends application/x-www-form-urlencoded."""
    headers = {"authorization": "Bearer one"} | ({"content-type": kind} if kind else {})
    answer = httpx.post(f"{api.url}/completions", content=json.dumps(ONE), headers=headers, **PLAIN)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        f"The body has Content-Type '{kind or ''}', so it is not read as JSON: "
        "send the header Content-Type: application/json."
    )


@pytest.mark.parametrize("coding", ["gzip", "BR"])
def test_compressed_body_returns_400(api, coding):
    content = gzip.compress(json.dumps(ONE).encode())
    headers = {"authorization": "Bearer one", "content-type": "application/json", "content-encoding": coding}
    answer = httpx.post(f"{api.url}/completions", content=content, headers=headers, **PLAIN)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        f"The body has Content-Encoding '{coding}', which is not supported: send plain JSON."
    )
    headers["content-encoding"] = "identity"
    assert httpx.post(f"{api.url}/completions", json=ONE, headers=headers, **PLAIN).status_code == 200


def test_body_may_begin_with_a_byte_order_mark():
    assert request_body.parse(b"\xef\xbb\xbf[1]", tokens=1) == [1]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"9" * 5_000, "The body has an integer of more than 4,300 digits."),
        (b"[NaN]", "The body is not JSON: NaN is not a number."),
    ],
)
def test_number_that_is_not_read_is_named(body, sentence):
    with pytest.raises(ApiError) as refusal:
        request_body.parse(body, tokens=1)
    assert refusal.value.body["error"]["message"] == sentence


PREFLIGHT = {"origin": PAGE, "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type"}  # fmt: skip


def test_allowed_origin_passes_cors_preflight_without_key(api):
    preflight = httpx.options(f"{api.url}/completions", headers=PREFLIGHT, **PLAIN)
    assert preflight.status_code == 200 and preflight.headers["access-control-allow-origin"] == PAGE
    assert (
        preflight.headers["access-control-allow-headers"].replace(" ", "")
        == PREFLIGHT["access-control-request-headers"]
    )
    for status in ("200", "200 as a stream", "400", "401"):
        answer = ask(api, **REQUESTS[status], origin=PAGE)
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in answer.headers["access-control-expose-headers"]


def test_allowed_origin_can_read_internal_errors(api, decoder, monkeypatch):
    monkeypatch.setattr(decoder, "tokenizer", None)
    assert ask(api, **REQUESTS["500"], origin=PAGE).headers["access-control-allow-origin"] == PAGE


def test_other_origins_are_not_allowed(api, decoder):
    preflight = httpx.options(f"{api.url}/completions", headers={**PREFLIGHT, "origin": "https://example.com"}, **PLAIN)
    assert preflight.status_code == 400 and "access-control-allow-origin" not in preflight.headers
    assert "access-control-allow-origin" not in ask(api, body=ONE, origin="https://example.com").headers
    with Api(decoder) as closed:  # by default there is no such origin
        assert httpx.options(f"{closed.url}/completions", headers=PREFLIGHT, **PLAIN).status_code == 405
        assert "access-control-allow-origin" not in ask(closed, body=ONE, origin=PAGE).headers


def test_cors_origin_option_is_parsed_and_validated(monkeypatch, capsys):
    def parsed(*given):
        monkeypatch.setattr("sys.argv", ["serve_pair.py", str(MAIN), *given])
        return arguments.parse("").cors_origins

    assert parsed() == () and parsed("--cors-origin", "*") == ("*",)
    assert parsed("--cors-origin", PAGE, "--cors-origin", "http://localhost:3000") == (PAGE, "http://localhost:3000")
    for wrong in ("example.org", f"{PAGE}/", f"{PAGE}/page", "https://", "", "ftp://example.org"):
        with pytest.raises(SystemExit):
            parsed("--cors-origin", wrong)
        assert "is not an origin" in capsys.readouterr().err
