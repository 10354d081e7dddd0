"""/tokenize and /detokenize: the prompt tokens of a request, and the text of tokens."""

import shutil

import httpx
import openvino_genai
import pytest

from speculative import batch_decoder
from speculative.serving.http.middleware import digest
from tests.support.cutting_tokenizer import cutting_tokenizer
from tests.support.paths import DRAFT
from tests.support.serving import PLAIN, Api

TEXT = "def f(x):\n    return 'é 😀'"
MESSAGES = [{"role": "user", "content": "Write a stack."}]


@pytest.fixture(scope="module")
def decoder():
    return batch_decoder.load(DRAFT)


@pytest.fixture(scope="module")
def api(decoder):
    with Api(decoder) as api:
        yield api


def post(api, path, body, **headers):
    return httpx.post(api.url.removesuffix("/v1") + path, json=body, headers=headers, **PLAIN)


def test_tokenize_and_detokenize_round_trip(api, decoder):
    answer = post(api, "/tokenize", {"model": "embedded", "prompt": TEXT, "return_token_strs": True}).json()
    assert (
        answer["tokens"]
        == decoder.encode([*answer["tokens"]]).tolist()
        == decoder.tokenizer.encode(TEXT).input_ids.data[0].tolist()
    )
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == decoder.main.context and answer["token_strs"][0] == "def"
    assert "".join(answer["token_strs"]).startswith("def f(x):\n    return '") and "\ufffd" in answer["token_strs"]
    assert post(api, "/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": TEXT}


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"messages": MESSAGES}, "/chat/completions"),
        ({"prompt": TEXT}, "/completions"),
    ],
)
def test_token_count_equals_prompt_tokens_of_a_request(api, body, path):
    counted = post(api, "/tokenize", body).json()["count"]
    answer = post(api, f"/v1{path}", {"model": "embedded", "max_tokens": 1, **body}).json()
    assert counted == answer["usage"]["prompt_tokens"]


def test_detokenize_keeps_special_tokens(api):
    answer = post(api, "/tokenize", {"messages": MESSAGES}).json()
    text = post(api, "/detokenize", {"tokens": answer["tokens"]}).json()["prompt"]
    assert text == "<|user|>Write a stack.<|assistant|>" and answer["token_strs"] is None


@pytest.mark.parametrize("drops", [True, False])
def test_incomplete_characters_are_replaced(api, decoder, monkeypatch, tmp_path, drops):
    """The detokenizer of SmolLM2, for example, drops them."""
    folder = tmp_path / "main"
    shutil.copytree(DRAFT, folder)
    detokenizer = folder / "openvino_detokenizer.xml"
    mode = 'replace_mode="{}"'.format
    text = detokenizer.read_text(encoding="utf-8")
    assert mode("true") in text
    detokenizer.unlink()
    detokenizer.write_text(text.replace(mode("true"), mode("false")) if drops else text, encoding="utf-8")
    monkeypatch.setattr(decoder, "tokenizer", openvino_genai.Tokenizer(str(folder)))
    tokens = post(api, "/tokenize", {"prompt": "é 😀"}).json()["tokens"]
    special = post(api, "/tokenize", {"prompt": "<|assistant|>"}).json()["tokens"]
    cut = [*tokens[:-1], *special, *tokens]
    assert post(api, "/detokenize", {"tokens": cut}).json()["prompt"] == "é \ufffd<|assistant|>é 😀"


def test_empty_text_has_no_tokens(api):
    assert post(api, "/tokenize", {"prompt": ""}).json()["tokens"] == []
    assert post(api, "/detokenize", {"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/tokenize", {}, 400, "either prompt or messages"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, 400, "either prompt or messages"),
        ("/tokenize", {"prompt": "x", "model": "another"}, 404, "use 'embedded'"),
        ("/tokenize", {"messages": MESSAGES, "continue_final_message": True}, 400, "only false is supported"),
        ("/detokenize", {}, 400, "tokens: is required"),
        ("/detokenize", {"tokens": [1.5]}, 400, "list of token ids"),
        ("/detokenize", {"tokens": [4096]}, 400, "from 0 to 4095"),
        ("/detokenize", {"tokens": [-1]}, 400, "from 0 to 4095"),
        ("/detokenize", {"tokens": [5], "model": "another"}, 404, "use 'embedded'"),
        ("/tokenize", {"prompt": "x" * 200_000}, 413, "send a shorter prompt"),
    ],
)
def test_invalid_request_returns_error(api, path, body, status, words):
    answer = post(api, path, body)
    assert answer.status_code == status and words in answer.json()["error"]["message"]


def test_messages_require_chat_template(api, decoder, monkeypatch):
    monkeypatch.setattr(decoder, "tokenizer", WithoutTemplate(decoder.tokenizer))
    assert "send a prompt" in post(api, "/tokenize", {"messages": MESSAGES}).json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "params"),
    [
        ("/tokenize", {"prompt": TEXT * 20}),
        ("/tokenize", {"messages": [{"role": "user", "content": TEXT * 20}]}),
        ("/v1/completions", {"prompt": ["x", TEXT * 20]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT * 20}]}),
        ("/v1/responses", {"input": TEXT * 20}),
    ],
)
def test_text_truncated_by_tokenizer_is_rejected(api, decoder, monkeypatch, tmp_path, path, params):
    monkeypatch.setattr(decoder, "tokenizer", cutting_tokenizer(DRAFT, tmp_path / "cutting", 64))
    (param,) = params
    answer = post(api, path, {"model": "embedded", **params})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, "context_length_exceeded")
    assert error["message"].startswith(f"{param}: the text has 64 tokens or more")


class WithoutTemplate:
    chat_template = ""

    def __init__(self, tokenizer):
        self.encode = tokenizer.encode


def test_tokenization_endpoints_require_key(decoder):
    with Api(decoder, keys=frozenset([digest("one")])) as api:
        for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})):
            assert post(api, path, body).status_code == 401
            assert post(api, path, body, Authorization="Bearer one").status_code == 200
