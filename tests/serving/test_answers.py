"""What one request may ask for: several texts of a prompt, several prompts."""

import asyncio
import json
import threading

import httpx
import pytest

from speculative import batch_decoder
from speculative.models.spec import ModelSpec
from speculative.serving.engine_thread import QueueFull
from tests.support.paths import DRAFT, MAIN
from tests.support.serving import PLAIN, Api
from tests.support.waiting import PATIENCE, wait_until

EXACT = {"EXECUTION_MODE_HINT": "ACCURACY"}
ONE = {"model": "embedded", "prompt": "def f(", "max_tokens": 12, "temperature": 0}
CHAT = {"model": "embedded", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12}
LONG = {**ONE, "max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def decoder():
    return batch_decoder.load(ModelSpec(MAIN, properties=EXACT), ModelSpec(DRAFT, properties=EXACT))


@pytest.fixture(scope="module")
def api(decoder):
    with Api(decoder) as api:
        yield api


def post(api, body):
    path = "/chat/completions" if "messages" in body else "/completions"
    return httpx.post(api.url + path, json=body, timeout=60, **PLAIN)


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


# ---- several texts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [ONE, CHAT], ids=["completions", "chat"])
def test_the_choices_of_a_seeded_request_differ_and_come_again(api, body):
    asked = {**body, "temperature": 2, "seed": 7, "max_tokens": 24}
    first, again = (answered(api, {**asked, "n": 4}) for _ in range(2))
    assert texts(first) == texts(again) and len(set(texts(first))) == 4
    assert texts(answered(api, asked)) == texts(first)[:1]
    neighbour = answered(api, {**asked, "n": 4, "seed": 8})
    assert not set(texts(neighbour)) & set(texts(first))


def test_usage_counts_the_tokens_of_all_choices_and_a_prompt_once(api):
    one, several = (answered(api, {**LONG, "max_tokens": 9, "n": n})["usage"] for n in (1, 3))
    assert several["prompt_tokens"] == one["prompt_tokens"] and several["completion_tokens"] == 27
    assert several["total_tokens"] == several["prompt_tokens"] + 27
    accepted = [usage["completion_tokens_details"]["accepted_prediction_tokens"] for usage in (one, several)]
    assert accepted[0] < accepted[1] <= 27


@pytest.mark.parametrize("body", [ONE, CHAT], ids=["completions", "chat"])
def test_a_stream_interleaves_its_choices(api, body):
    asked = {**body, "temperature": 1, "seed": 7, "n": 3, "max_tokens": 60, "ignore_eos": True}
    whole = answered(api, asked)
    *chunks, last = streamed(api, {**asked, "stream_options": {"include_usage": True}})
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


def test_several_prompts_have_choices_each(api):
    asked = {**ONE, "temperature": 1, "seed": 7, "n": 2}
    prompts = ["def f(", "class A:", "import "]
    alone = [answered(api, {**asked, "prompt": prompt}) for prompt in prompts]
    together = answered(api, {**asked, "prompt": prompts})
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
def test_what_is_no_prompt_is_refused(api, prompt, words):
    error = refused(api, {**ONE, "prompt": prompt})
    assert error["param"] == "prompt" and words in error["message"]


def test_more_texts_than_may_be_are_refused(api):
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
    asking = asyncio.create_task(app({"type": "http", "headers": headers, **path}, receive, send))
    while not when():
        await asyncio.sleep(0.01)
    asking.cancel()
    await asyncio.wait([asking])


@pytest.mark.parametrize("stream", [False, True])
def test_every_text_takes_a_place_which_the_end_of_the_request_frees(decoder, monkeypatch, stream):
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
        assert api.counts.outcomes == ["disconnected"] * 4 and not api.endpoint.asking
        assert len(answered(api, {**ONE, "n": 2, "prompt": ["a", "b"]})["choices"]) == 4


def test_a_text_that_fails_ends_the_request_and_frees_its_slots(decoder, monkeypatch):
    with Api(decoder) as api:
        add = decoder.add_request
        added = []

        def add_one_that_fails(*arguments, **options):
            added.append(add(*arguments, **options))
            if len(added) == 2:
                monkeypatch.setattr(added[-1].sequence, "verify", failing)
            return added[-1]

        def failing(logits):
            raise RuntimeError("a planted fault")

        monkeypatch.setattr(decoder, "add_request", add_one_that_fails)
        answer = post(api, {**LONG, "n": 3})
        assert answer.status_code == 500 and "a planted fault" in answer.json()["error"]["message"]
        wait_until(lambda: api.engine.idle)
        assert len(added) == 3 and max(len(request.result.tokens) for request in added) < 400
