"""`speculation` in the chunks of a stream: which tokens are accepted draft tokens, and their texts."""

import json
from types import SimpleNamespace

import httpx
import openvino_genai
import pytest

from speculative import batch_decoder
from speculative.sequence.result import GenerationResult
from speculative.serving.api.token_sources import TokenSources, draft_source
from tests.support.paths import DRAFT, MAIN
from tests.support.serving import PLAIN

PARAMS = {"model": "embedded", "temperature": 0, "max_tokens": 60, "stream": True}
PATHS = {
    "/completions": {"prompt": "def is_prime(n):"},
    "/chat/completions": {"messages": [{"role": "user", "content": "Write a class for a stack."}]},
}


@pytest.fixture(scope="module", autouse=True)
def drafting(api):
    api.endpoint.draft_length = 4  # the adaptive draft length depends on this machine


def chunks(api, path, options, **params):
    body = {**PARAMS, **PATHS[path], **params, "stream_options": {"include_usage": True, **options}}
    answer = httpx.post(api.url + path, json=body, **PLAIN)
    return [json.loads(event.removeprefix("data: ")) for event in answer.text.split("\n\n")[:-2]]


def choices_of(chunks):
    return [choice for chunk in chunks for choice in chunk["choices"]]


@pytest.mark.parametrize("path", PATHS)
def test_each_streamed_token_has_text_and_source(api, path):
    events = chunks(api, path, {"include_draft_tokens": True})
    choices = choices_of(events)
    blocks = [choice["speculation"] for choice in choices if "speculation" in choice]
    tokens = [token for one in blocks for token in one["tokens"]]
    text = "".join(choice.get("text") or choice.get("delta", {}).get("content", "") for choice in choices)
    assert "".join(token["text"] for token in tokens) == text != ""
    usage = events[-1]["usage"]
    details = usage["completion_tokens_details"]
    assert len(tokens) == usage["completion_tokens"]
    accepted, rejected = (details[f"{kind}_prediction_tokens"] for kind in ("accepted", "rejected"))
    assert sum(token["from_draft"] for token in tokens) == accepted > 0
    assert sum(one["draft_tokens"] for one in blocks) == accepted + rejected
    passes = len(tokens) - 1 - accepted  # each adds one token of the main model's own, except perhaps the last
    assert passes <= sum(one["iterations"] for one in blocks) <= passes + 1


def test_token_sources_are_streamed_only_on_request(api):
    def blocks(options):
        return [{**choice, "speculation": None} for choice in choices_of(chunks(api, "/completions", options))]

    plain = choices_of(chunks(api, "/completions", {"include_draft_tokens": False}))
    assert not any("speculation" in choice for choice in plain)
    texts = ["".join(choice["text"] for choice in blocks(options)) for options in ({}, {"include_draft_tokens": True})]
    assert texts[0] == texts[1] == "".join(choice["text"] for choice in plain)


def test_multi_token_character_is_sent_when_complete():
    tokenizer = openvino_genai.Tokenizer(str(MAIN))
    ids = tokenizer.encode("a é 😀").input_ids.data[0].tolist()
    job = SimpleNamespace(result=GenerationResult(), context=[])
    sources = TokenSources(job, tokenizer.decode)
    blocks = []
    for i, token in enumerate(ids):
        job.result.tokens.append(token)
        job.result.from_draft.append(i % 2 == 1)
        blocks.append(sources.take(last=False)["tokens"])
    assert "".join(token["text"] for one in blocks for token in one) == "a é 😀"
    assert [len(one) for one in blocks][-4:] == [0, 0, 0, 4]  # an emoji has four bytes, each a token here
    assert [token["from_draft"] for one in blocks for token in one] == [i % 2 == 1 for i in range(len(ids))]


def test_last_chunk_includes_incomplete_character():
    tokenizer = openvino_genai.Tokenizer(str(MAIN))
    half = tokenizer.encode("😀").input_ids.data[0].tolist()[:2]
    job = SimpleNamespace(result=GenerationResult(tokens=half, from_draft=[True, False]), context=[])
    sources = TokenSources(job, tokenizer.decode)
    assert sources.take(last=False)["tokens"] == []
    assert [token["text"].count("\ufffd") > 0 for token in sources.take(last=True)["tokens"]] == [False, True]


def test_model_card_names_draft_source(api):
    card = httpx.get(f"{api.url}/models", **PLAIN).json()["data"][0]
    assert card["draft"] == "draft_model" and card["chat_template"]
    both = batch_decoder.load(DRAFT, DRAFT, max_ngram_size=8)
    assert draft_source(both) == "draft_model_and_suffix_decoding"
    both.draft = None
    assert draft_source(both) == "suffix_decoding"
    both.suffix = None
    assert draft_source(both) is None
