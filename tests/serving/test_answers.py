"""Parameters of one request: several choices, several prompts, log-probabilities, logit biases, stop tokens."""

import asyncio
import json
import threading

import httpx
import numpy as np
import pytest

from speculative.models import cached_model
from speculative.models.spec import ModelSpec
from speculative.sampling.logprobs import token_logprobs
from speculative.sequence.result import GenerationResult
from speculative.sequence.sequence import Sequence
from speculative.serving.api.logprobs import AlignedTokens, TokenTexts, completion_logprobs, prompt_logprob_entries
from speculative.serving.engine.engine_thread import QueueFull
from tests.support.changed_tokenizer import ChangedTokenizer
from tests.support.paths import DRAFT
from tests.support.serving import PLAIN, Api
from tests.support.waiting import PATIENCE, wait_until

EXACT = {"EXECUTION_MODE_HINT": "ACCURACY"}
ONE = {"model": "embedded", "prompt": "def f(", "max_tokens": 12, "temperature": 0}
CHAT = {"model": "embedded", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12}
LONG = {**ONE, "max_tokens": 400, "ignore_eos": True}


def post(api, body):
    path = "/chat/completions" if "messages" in body else "/completions"
    return httpx.post(api.url + path, json=body, **PLAIN)


def answered(api, body):
    answer = post(api, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(api, body):
    answer = post(api, body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def text_of(choice):
    return choice["text"] if "text" in choice else choice["message"]["content"]


def texts(answer):
    assert [choice["index"] for choice in answer["choices"]] == [*range(len(answer["choices"]))]
    return [text_of(choice) for choice in answer["choices"]]


def streamed(api, body):
    """The chunks of a stream, without the last event."""
    *events, last, nothing = post(api, {**body, "stream": True}).text.split("\n\n")
    assert (last, nothing) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


# ---- several choices ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [ONE, CHAT], ids=["completions", "chat"])
def test_seeded_choices_are_distinct_and_reproducible(api, body):
    params = {**body, "temperature": 2, "seed": 7, "max_tokens": 24}
    first, again = (answered(api, {**params, "n": 4}) for _ in range(2))
    assert texts(first) == texts(again) and len(set(texts(first))) == 4
    assert texts(answered(api, params)) == texts(first)[:1]
    neighbour = answered(api, {**params, "n": 4, "seed": 8})
    assert not set(texts(neighbour)) & set(texts(first))


def test_usage_sums_tokens_of_all_choices_and_counts_prompt_once(api):
    one, several = (answered(api, {**LONG, "max_tokens": 9, "n": n})["usage"] for n in (1, 3))
    assert several["prompt_tokens"] == one["prompt_tokens"] and several["completion_tokens"] == 27
    assert several["total_tokens"] == several["prompt_tokens"] + 27
    accepted = [usage["completion_tokens_details"]["accepted_prediction_tokens"] for usage in (one, several)]
    assert accepted[0] < accepted[1] <= 27


def test_usage_counts_cached_prompt_tokens_once(api):
    params = {**ONE, "prompt": "def is_prime(n):\n    for i in range(2, n):\n" * 5, "max_tokens": 1}
    cached = [answered(api, {**params, "n": n})["usage"]["prompt_tokens_details"]["cached_tokens"] for n in (1, 1, 3)]
    assert 0 == cached[0] < cached[1] == cached[2]


@pytest.mark.parametrize("body", [ONE, CHAT], ids=["completions", "chat"])
def test_streaming_interleaves_chunks_of_all_choices(api, body):
    params = {**body, "temperature": 1, "seed": 7, "n": 3, "max_tokens": 60, "ignore_eos": True}
    whole = answered(api, params)
    *chunks, last = streamed(api, {**params, "stream_options": {"include_usage": True}})
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 180
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert len(choices) == len(chunks) and len({chunk["id"] for chunk in chunks}) == 1
    for index, text in enumerate(texts(whole)):
        own = [choice for choice in choices if choice["index"] == index]
        pieces = [choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in own]
        assert "".join(pieces) == text
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["length"]
    order = [choice["index"] for choice in choices if choice["finish_reason"] is None]
    assert order != sorted(order)


@pytest.mark.parametrize("body", [ONE, CHAT], ids=["completions", "chat"])
def test_chunks_have_the_usage_of_their_choice_so_far(api, body):
    options = {"include_usage": True, "continuous_usage_stats": True}
    params = {**body, "temperature": 1, "seed": 7, "n": 2, "max_tokens": 30, "ignore_eos": True}
    *chunks, last = streamed(api, {**params, "stream_options": options})
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {last["usage"]["prompt_tokens"]}
    for index in range(2):
        own = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == index]
        counts = [usage["completion_tokens"] for usage in own]
        assert counts == sorted(counts) and counts[-1] == 30
        assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in own)
    assert last["usage"]["completion_tokens"] == 60


def test_list_of_prompts_returns_n_choices_per_prompt(api):
    params = {**ONE, "temperature": 1, "seed": 7, "n": 2}
    prompts = ["def f(", "class A:", "import "]
    alone = [answered(api, {**params, "prompt": prompt}) for prompt in prompts]
    together = answered(api, {**params, "prompt": prompts})
    assert texts(together) == [text for answer in alone for text in texts(answer)]
    assert together["usage"]["prompt_tokens"] == sum(answer["usage"]["prompt_tokens"] for answer in alone)
    ids = [[5, 6, 7], [8, 9]]
    assert texts(answered(api, {**ONE, "prompt": ids})) == [
        text for one in ids for text in texts(answered(api, {**ONE, "prompt": one}))
    ]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([0.5, 1], "should be a string or a list of token ids"),
        ({}, "should be a string"),
        ([[True]], "prompt 0 should be a string or a list of token ids"),
        (["a", ""], "prompt 1 is empty"),
        (["a", 5], "prompt 1 should be a string"),
        ("", "the prompt is empty"),
        (["a"] * 129, "at most 128 prompts per request are allowed, not 129"),
        (["a"] * 9, "9 prompts with n=1 are 9 texts, but at most 8 are allowed"),
    ],
)
def test_invalid_prompt_returns_400(api, prompt, words):
    error = refused(api, {**ONE, "prompt": prompt})
    assert error["param"] == "prompt" and words in error["message"]


def test_n_above_limit_returns_400(api):
    error = refused(api, {**ONE, "n": 5})
    assert error["param"] == "n" and error["message"] == "n: is 5, but at most 4 are allowed."
    assert refused(api, {**ONE, "n": 0})["param"] == "n"
    assert "4 texts of" not in refused(api, {**ONE, "n": 4, "prompt": ["a"] * 3})["message"]


async def disconnected(app, body, when):
    """Send a request to the application, and disconnect as soon as `when()` is true: Ray Serve cancels."""

    async def receive():
        return {"type": "http.request", "body": json.dumps(body).encode()}

    async def send(message):
        pass

    path = {"path": "/v1/completions", "raw_path": b"", "query_string": b"", "method": "POST"}
    headers = [(b"content-type", b"application/json")]
    request = asyncio.create_task(app({"type": "http", "headers": headers, **path}, receive, send))
    while not when():
        await asyncio.sleep(0.01)
    request.cancel()
    await asyncio.wait([request])


@pytest.mark.parametrize("stream", [False, True])
def test_each_choice_occupies_a_slot_until_the_request_ends(decoder, monkeypatch, stream):
    step, going = decoder.step, threading.Event()
    monkeypatch.setattr(decoder, "step", lambda: step() if going.wait(PATIENCE) else [])
    with Api(decoder, max_num_seqs=2, max_queue=3) as api:
        app = api.endpoint.application(None)

        def full():
            return api.engine.running == 2 and api.engine.waiting == 2

        def refused_for_two():
            if not full():
                return False
            with pytest.raises(QueueFull):
                api.engine.check_queue(2)
            api.engine.check_queue(1)
            return True

        api.run(disconnected(app, {**LONG, "n": 2, "prompt": ["a", "b"], "stream": stream}, refused_for_two))
        going.set()
        wait_until(lambda: api.engine.idle)
        assert api.counts.outcomes == ["disconnected"] * 4 and not api.endpoint.open_requests
        assert len(answered(api, {**ONE, "n": 2, "prompt": ["a", "b"]})["choices"]) == 4


def test_failing_sequence_ends_request_and_frees_its_slots(decoder, monkeypatch):
    with Api(decoder) as api:
        add = decoder.add_request
        added = []

        def add_failing_request(*arguments, **options):
            added.append(add(*arguments, **options))
            if len(added) == 3:  # the last: its failure cancels those that wait
                monkeypatch.setattr(added[-1].sequence, "verify", failing)
            return added[-1]

        def failing(logits):
            raise RuntimeError("a planted fault")

        monkeypatch.setattr(decoder, "add_request", add_failing_request)
        answer = post(api, {**LONG, "n": 3})
        assert answer.status_code == 500 and "a planted fault" in answer.json()["error"]["message"]
        wait_until(lambda: api.engine.idle)
        assert len(added) == 3 and max(len(request.result.tokens) for request in added) < 400


def test_best_of_returns_texts_with_highest_mean_logprob(api):
    params = {**ONE, "temperature": 2, "seed": 7, "logprobs": 0}
    every = answered(api, {**params, "n": 4})
    best = answered(api, {**params, "n": 2, "best_of": 4})

    def mean(choice):
        return np.mean(choice["logprobs"]["token_logprobs"])

    ranked = sorted(every["choices"], key=mean, reverse=True)
    assert texts(best) == [choice["text"] for choice in ranked[:2]] and mean(ranked[0]) > mean(ranked[-1])
    assert best["usage"] == every["usage"]
    without_logprobs = answered(api, {**params, "best_of": 4, "logprobs": None})
    assert texts(without_logprobs) == texts(best)[:1] and without_logprobs["choices"][0]["logprobs"] is None


# ---- log-probabilities ----------------------------------------------------------------------------------------------


def ids_of(decoder, text):
    return decoder.tokenizer.encode(text, add_special_tokens=False).input_ids.data[0].astype(np.int64)


@pytest.fixture(scope="module")
def reference():
    """A function: the log-softmax of the main model's logits for each of `tokens` after `prompt`: float64 [n, V]."""
    model = cached_model.load(ModelSpec(DRAFT, properties=EXACT), capacity=1024)

    def reference(prompt, tokens):
        model.reset()
        text = np.concatenate([prompt, tokens]).astype(np.int64)
        logits = model.logits(text, last=len(tokens) + 1)[:-1].astype(float)
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    return reference


@pytest.mark.parametrize("top", [0, 3])
def test_completion_logprobs_match_main_model(api, decoder, reference, top):
    body = {**ONE, "prompt": "def café(", "logprobs": top, "temperature": 0.7, "seed": 3, "max_tokens": 30}
    (choice,) = answered(api, body)["choices"]
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"]
    assert found["text_offset"] == [len("".join(found["tokens"][:i])) for i in range(30)]
    pieces = TokenTexts(decoder.tokenizer)
    names = {pieces.text(token): token for token in range(4096)}
    tokens = np.array([names[name] for name in found["tokens"]])
    exact = reference(ids_of(decoder, body["prompt"]), tokens)
    assert np.allclose(found["token_logprobs"], exact[range(30), tokens], atol=2e-3)
    if not top:
        assert found["top_logprobs"] is None
        return
    for row, best in zip(exact, found["top_logprobs"], strict=True):
        expected = {pieces.text(token): row[token] for token in np.argsort(-row)[:top]}
        assert {name: best[name] for name in expected} == pytest.approx(expected, abs=2e-3)
        assert len(best) in (top, top + 1)


def test_chat_logprobs_include_token_bytes(api):
    (choice,) = answered(api, {**CHAT, "temperature": 0, "logprobs": True, "top_logprobs": 2})["choices"]
    content = choice["logprobs"]["content"]
    assert bytes(byte for one in content for byte in one["bytes"]).decode() == choice["message"]["content"]
    for one in content:
        first, second = one["top_logprobs"]
        assert (one["token"], one["logprob"], one["bytes"]) == tuple(first.values())  # greedy
        assert first["logprob"] >= second["logprob"] and bytes(one["bytes"]).decode() == one["token"]
    seeded = {**CHAT, "temperature": 1, "seed": 1, "logprobs": True}  # passes of the same sizes, which round alike
    content, bare = (
        answered(api, {**seeded, **more})["choices"][0]["logprobs"]["content"] for more in ({"top_logprobs": 2}, {})
    )
    assert [one["logprob"] for one in bare] == [one["logprob"] for one in content]
    assert all(one["top_logprobs"] == [] for one in bare)


@pytest.mark.parametrize(
    "more", [{}, {"stop": ["True", "\n\n"]}, {"stop": ["eturn"], "include_stop_str_in_output": True}], ids=str
)
@pytest.mark.parametrize("body", [ONE, CHAT], ids=["completions", "chat"])
def test_stream_chunks_carry_their_logprobs(api, decoder, body, more):
    end = TokenTexts(decoder.tokenizer).text(decoder.tokenizer.get_eos_token_id())
    logprobs = {"logprobs": 1} if body is ONE else {"logprobs": True, "top_logprobs": 1}
    params = {**body, **more, **logprobs, "n": 2, "seed": 1, "temperature": 1, "max_tokens": 60}
    whole = answered(api, params)["choices"]
    chunks = [choice for chunk in streamed(api, params) for choice in chunk["choices"]]
    for one in whole:
        own = [choice for choice in chunks if choice["index"] == one["index"]]
        if body is CHAT:
            entries = [entry for choice in own if choice["logprobs"] for entry in choice["logprobs"]["content"]]
            assert entries == one["logprobs"]["content"]
            continue
        for name, values in one["logprobs"].items():
            assert [value for choice in own if choice["logprobs"] for value in choice["logprobs"][name]] == values
        tokens = [token for token in one["logprobs"]["tokens"] if token != end]
        assert "".join(tokens).startswith(one["text"])
        assert len("".join(tokens[:-1])) < max(len(one["text"]), 1)


def test_empty_completion_has_empty_logprobs(api):
    """A client that requested logprobs reads the object, so it is empty rather than null."""
    stopped = {"stop": ["\n"], "logit_bias": {"201": 100}, "temperature": 0}
    (choice,) = answered(api, {**CHAT, **stopped, "logprobs": True})["choices"]
    assert (choice["message"]["content"], choice["logprobs"]) == ("", {"content": [], "refusal": None})
    (choice,) = answered(api, {**ONE, **stopped, "logprobs": 2})["choices"]
    nothing = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    assert (choice["text"], choice["logprobs"]) == ("", nothing)
    assert all(choice["logprobs"] is None for one in streamed(api, {**CHAT, **stopped, "logprobs": True})
               for choice in one["choices"])  # fmt: skip


def test_partial_character_tokens_are_shown_as_bytes(decoder):
    pieces = TokenTexts(decoder.tokenizer)
    parts = ids_of(decoder, "é🦉").tolist()
    result = GenerationResult(tokens=parts, logprobs=[token_logprobs(np.zeros(4096, np.float32), t, 1) for t in parts])
    aligned = AlignedTokens(pieces, 1)
    first = aligned.take(result, "é")
    entries = [*first, *aligned.take(result, "🦉", last=True)]
    assert [entry.token for entry in entries] == parts and {entry.offset for entry in entries[len(first) :]} == {1}
    assert b"".join(map(pieces.text_bytes, parts)).decode() == "é🦉"
    names = completion_logprobs(aligned, entries)["tokens"]
    assert all(name.startswith("bytes:\\x") or name in "é🦉" for name in names) and any("\\x" in name for name in names)


def test_text_offsets_skip_token_without_text(decoder):
    """For example the BOS token: the leading space that is stripped is that of the next token."""
    (one,), (two,) = (ids_of(decoder, text).tolist() for text in (" a", " b"))
    tokens = [0, one, two]
    first, *others = [token_logprobs(np.zeros(4096, np.float32), token, 1) for token in tokens]
    texts = TokenTexts(ChangedTokenizer(decoder.tokenizer, lambda text: text.removeprefix(" ")))  # as SentencePiece
    result = GenerationResult(tokens=tokens, logprobs=[first, *others])
    for entries in (
        AlignedTokens(texts, 1).prompt_entries(tokens, others, "a b"),
        AlignedTokens(texts, 1).take(result, "a b", last=True),
    ):
        assert [entry.offset for entry in entries] == [0, 0, 1]


@pytest.mark.parametrize("is_cut", [False, True])
def test_logprobs_cover_tokens_whose_spaces_the_detokenizer_strips(decoder, is_cut):
    """Only a stop string leaves tokens out: those after the end of the text."""
    parts = [ids_of(decoder, part).tolist() for part in ("x", " ,", " y", " .", " b", "STOP")]
    tokens = [token for part in parts for token in part]
    entries = [token_logprobs(np.zeros(4096, np.float32), token, 1) for token in tokens]
    result = GenerationResult(tokens=tokens, logprobs=entries, is_cut=is_cut)
    texts = TokenTexts(ChangedTokenizer(decoder.tokenizer, lambda text: text.replace(" .", ".").replace(" ,", ",")))
    taken = AlignedTokens(texts, 1).take(result, "x, y. b", last=True)
    assert [entry.token for entry in taken] == (tokens[: -len(parts[-1])] if is_cut else tokens)
    begins = np.cumsum([0, *map(len, parts[:-1])])
    assert [taken[begin].offset for begin in begins[:5]] == [0, 1, 2, 4, 5]


def test_echo_with_zero_max_tokens_returns_prompt_logprobs(api):
    params = {**ONE, "prompt": "def f(x):", "echo": True, "logprobs": 1}
    alone, more = answered(api, {**params, "max_tokens": 0}), answered(api, params)
    (choice,), count = alone["choices"], alone["usage"]["prompt_tokens"]
    assert choice["text"] == params["prompt"] and choice["finish_reason"] == "length"
    assert alone["usage"]["completion_tokens"] == 0 and alone["usage"]["total_tokens"] == count
    for name, values in choice["logprobs"].items():
        assert values == more["choices"][0]["logprobs"][name][:count]
    ends = answered(api, {**params, "max_tokens": 0, "n": 2, "logit_bias": {"0": 100}})  # the token that is left out
    assert [one["finish_reason"] for one in ends["choices"]] == ["length"] * 2
    assert [one["logprobs"] for one in ends["choices"]] == [choice["logprobs"]] * 2


def test_echo_of_prompt_without_text_has_logprobs(api):
    end = {**ONE, "prompt": [0], "echo": True, "logprobs": 1, "max_tokens": 2, "ignore_eos": True}
    found = answered(api, end)["choices"][0]["logprobs"]
    assert len(found["tokens"]) == 3 and found["token_logprobs"][0] is None and found["text_offset"][:2] == [0, 0]


@pytest.mark.parametrize("by_ids", [False, True])
def test_echo_shows_special_tokens_only_for_text_prompts(api, decoder, by_ids):
    prompt = "<|user|>hi<|endoftext|>\n<|assistant|>"
    ids = ids_of(decoder, prompt).tolist()
    (choice,) = answered(api, {**ONE, "prompt": ids if by_ids else prompt, "echo": True, "logprobs": 0})["choices"]
    tokens = choice["logprobs"]["tokens"]
    assert len(tokens) == len(ids) + 12 and tokens[0] == "<|user|>"
    pieces = ["" if by_ids and token.startswith("<|") else token for token in tokens]
    assert "".join(pieces) == choice["text"]
    assert choice["logprobs"]["text_offset"] == [len("".join(pieces[:i])) for i in range(len(pieces))]


def test_echo_returns_prompt_with_logprobs(api, decoder, reference):
    prompt = "def read_file(path):\n"
    params = {**ONE, "prompt": prompt, "logprobs": 2, "n": 2, "temperature": 1, "seed": 1}
    for choice in answered(api, {**params, "echo": True})["choices"]:
        found = choice["logprobs"]
        assert choice["text"].startswith(prompt) and "".join(found["tokens"]) == choice["text"]
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        assert found["text_offset"] == [len("".join(found["tokens"][:i])) for i in range(len(found["tokens"]))]
        tokens = ids_of(decoder, prompt)
        exact = reference(tokens[:1], tokens[1:])[range(len(tokens) - 1), tokens[1:]]
        assert np.allclose(found["token_logprobs"][1 : len(tokens)], exact, atol=2e-3)
    whole = answered(api, {**params, "echo": True})["choices"]
    chunks = [choice for chunk in streamed(api, {**params, "echo": True}) for choice in chunk["choices"]]
    for one in whole:
        own = [choice for choice in chunks if choice["index"] == one["index"]]
        assert "".join(choice["text"] for choice in own) == one["text"]
        tokens = [token for choice in own if choice["logprobs"] for token in choice["logprobs"]["tokens"]]
        assert tokens == one["logprobs"]["tokens"]
    ids = answered(api, {**params, "prompt": ids_of(decoder, prompt).tolist(), "echo": True, "logprobs": None})
    assert texts(ids) == [choice["text"] for choice in whole]


@pytest.mark.parametrize("ask", [answered, streamed])
def test_logprobs_of_echoed_prompts_are_computed_once(api, decoder, monkeypatch, ask):
    prompts, computed = ["def read_file(path):\n" * 40, "class A:"], []  # the first takes several passes
    add = Sequence.add_prompt_logprobs
    monkeypatch.setattr(
        Sequence, "add_prompt_logprobs", lambda self, logits: computed.append(len(logits)) or add(self, logits)
    )
    ask(api, {**ONE, "prompt": prompts, "logprobs": 1, "echo": True, "n": 3, "temperature": 1, "seed": 1})
    assert sum(computed) == sum(len(ids_of(decoder, prompt)) - 1 for prompt in prompts)


@pytest.mark.parametrize("body", [ONE, CHAT], ids=["completions", "chat"])
def test_prompt_logprobs_follow_vllm_format(api, body):
    answer = answered(api, {**body, "prompt_logprobs": 2, "max_tokens": 1})
    place = answer if body is CHAT else answer["choices"][0]
    first, *others = place["prompt_logprobs"]
    assert first is None and len(others) == answer["usage"]["prompt_tokens"] - 1
    for one in others:
        ranks = sorted(entry["rank"] for entry in one.values())
        assert ranks[:2] == [1, 2] and len(one) in (2, 3) and all(key.isdigit() for key in one)
    none = answered(api, {**body, "prompt_logprobs": 0, "max_tokens": 1})
    assert all(len(one) == 1 for one in (none if body is CHAT else none["choices"][0])["prompt_logprobs"][1:])


def test_logprob_of_impossible_token_is_json_serializable(decoder):
    logits = np.array([0, -np.inf], np.float32)
    found = prompt_logprob_entries(TokenTexts(decoder.tokenizer), [0, 1], [token_logprobs(logits, 1, 1)], 1)
    assert found[1]["1"]["logprob"] == -9999
    json.dumps(found, allow_nan=False)


# ---- tokens ---------------------------------------------------------------------------------------------------------


def test_logit_bias_forces_and_bans_tokens(api, decoder):
    (token,) = ids_of(decoder, "a").tolist()
    (plain,) = texts(answered(api, ONE))
    assert texts(answered(api, {**ONE, "logit_bias": {str(token): 100}})) == ["a" * 12]
    begin = int(ids_of(decoder, f"def f({plain}")[len(ids_of(decoder, "def f("))])
    (other,) = texts(answered(api, {**ONE, "logit_bias": {str(begin): -100}}))
    assert other != plain


def test_prompt_plus_output_may_fill_the_context(api):
    """The context length is 1,024 tokens."""
    params = {**ONE, "prompt": [5] * 1000, "ignore_eos": True}
    assert answered(api, {**params, "max_tokens": 24})["usage"]["total_tokens"] == 1024
    assert refused(api, {**params, "max_tokens": 25})["code"] == "context_length_exceeded"


def test_min_p_just_below_1_keeps_only_most_probable_token(api):
    assert texts(answered(api, {**ONE, "temperature": 1, "min_p": 1 - 1e-12})) == texts(answered(api, ONE))


def test_stop_token_ids_end_the_text(api, decoder):
    tokens = ids_of(decoder, "def f(" + texts(answered(api, ONE))[0])[len(ids_of(decoder, "def f(")) :].tolist()
    params = {**ONE, "stop_token_ids": [tokens[3]], "ignore_eos": True}
    (choice,) = answered(api, params)["choices"]
    end = tokens.index(tokens[3]) + 1
    assert choice["finish_reason"] == "stop" and answered(api, params)["usage"]["completion_tokens"] == end
    longer = answered(api, {**params, "min_tokens": end + 1})
    assert longer["usage"]["completion_tokens"] > end


@pytest.mark.parametrize("more", [{}, {"stop": ["()"]}, {"stream": True}, {"logprobs": 0}], ids=str)
def test_stop_token_text_is_included_only_on_request(api, more):
    params = {**ONE, "logit_bias": {"5": 100}, "stop_token_ids": [5], **more}  # a "#"
    for include in (False, True):
        params["include_stop_str_in_output"] = include
        chunks = streamed(api, params) if "stream" in more else [answered(api, params)]
        assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == "#" * include
    if "logprobs" in more:
        assert answered(api, params)["choices"][0]["logprobs"]["tokens"] == ["#"]  # as the end-of-text token


def test_stop_string_is_included_in_text_on_request(api):
    (plain,) = texts(answered(api, ONE))
    stop = plain[5:9]
    kept = texts(answered(api, {**ONE, "stop": stop, "include_stop_str_in_output": True}))
    assert kept == [plain[: plain.index(stop) + 4]] and texts(answered(api, {**ONE, "stop": stop})) == [
        plain[: plain.index(stop)]
    ]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({**ONE, "logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({**ONE, "logprobs": True}, "logprobs", "valid integer"),
        ({**CHAT, "logprobs": 5}, "logprobs", "valid boolean"),
        ({**CHAT, "top_logprobs": 5}, None, "top_logprobs requires logprobs=true"),
        ({**CHAT, "best_of": 2}, "best_of", "only 1 is supported"),
        ({**CHAT, "echo": True}, "echo", "only false is supported"),
        ({**ONE, "n": 3, "best_of": 2}, None, "best_of should be at least n, which is 3"),
        ({**ONE, "best_of": 2, "stream": True}, None, "best_of above n requires stream=false"),
        ({**ONE, "best_of": 5}, "best_of", "is 5, but at most 4 are allowed"),
        ({**ONE, "prompt_logprobs": 1, "stream": True}, None, "prompt_logprobs requires stream=false"),
        ({**ONE, "logit_bias": {"x": 1}}, "logit_bias", "'x' is not a token id"),
        ({**ONE, "logit_bias": {"5": 101}}, "logit_bias", "the bias of token 5 should be a number from -100 to 100"),
        ({**ONE, "logit_bias": {"4096": 1}}, "logit_bias", "has token 4096, but the model's token ids are 0 to 4095"),
        ({**ONE, "logit_bias": {str(i): 0 for i in range(1025)}}, "logit_bias", "at most 1024 tokens"),
        ({**ONE, "logit_bias": [1]}, "logit_bias", "should be an object"),
        ({**ONE, "stop_token_ids": [-1]}, "stop_token_ids[0]", "greater than or equal to 0"),
        ({**ONE, "stop_token_ids": [5000]}, "stop_token_ids", "has token 5000"),
        ({**ONE, "prompt": [5, 4096], "stream": True}, "prompt", "has token 4096, but the model's token ids are 0 to"),
        ({**ONE, "prompt": [[5], [5, -1]]}, "prompt", "has token -1, but"),
        ({**ONE, "prompt": [5, 10**30], "echo": True}, "prompt", f"has token {10**30}, but"),
        ({**ONE, "max_tokens": 0}, None, "max_tokens=0 requires echo=true and stream=false"),
        ({**ONE, "max_tokens": 0, "echo": True, "stream": True}, None, "max_tokens=0 requires echo=true and"),
        ({**CHAT, "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({**ONE, "min_tokens": 13}, "min_tokens", "is 13, but at most 12 tokens are generated"),
        ({**ONE, "skip_special_tokens": False}, "skip_special_tokens", "only true is supported"),
        ({**ONE, "use_beam_search": True}, "use_beam_search", "only false is supported"),
    ],
    ids=lambda value: None,
)
def test_invalid_parameter_returns_400_with_param_name(api, body, param, words):
    error = refused(api, body)
    assert error["param"] == param and words in error["message"]
