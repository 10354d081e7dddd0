"""/v1/responses with OpenAI's own client, over the real engine."""

from typing import Literal

import httpx
import pytest
from pydantic import BaseModel

from speculative.sequence.output import OutputProcessor
from speculative.serving.http.middleware import digest
from tests.support.serving import PLAIN, Api

PARAMS = {"model": "embedded", "temperature": 0, "max_output_tokens": 40}
QUESTION = "Write a class for a stack."


@pytest.fixture(scope="module", autouse=True)
def drafting(api):
    api.endpoint.draft_length = 4  # the adaptive draft length depends on this machine


def post(api, body, **headers):
    return httpx.post(f"{api.url}/responses", json={**PARAMS, **body}, headers=headers, **PLAIN)


def chat(client, messages, tokens=40):
    params = {"model": "embedded", "temperature": 0, "max_tokens": tokens}
    return client.chat.completions.create(messages=messages, **params)


def test_response_equals_chat_completion_of_same_messages(client):
    response = client.responses.create(input=QUESTION, instructions="Be brief.", **PARAMS)
    same = chat(client, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}])
    assert response.output_text == same.choices[0].message.content != ""
    assert (response.usage.input_tokens, response.usage.output_tokens) == (
        same.usage.prompt_tokens,
        same.usage.completion_tokens,
    )
    assert response.usage.total_tokens == same.usage.total_tokens
    assert response.usage.output_tokens_details.accepted_prediction_tokens > 0
    assert type(response).model_validate(response.model_dump()) == response  # it has every field of the API's
    assert response.object == "response" and response.store is False and response.instructions == "Be brief."


def test_truncated_response_is_marked_incomplete(client):
    cut = client.responses.create(input=QUESTION, **{**PARAMS, "max_output_tokens": 3})
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert cut.output[0].status == "incomplete" and cut.usage.output_tokens == 3
    whole = client.responses.create(input=QUESTION, **{**PARAMS, "max_output_tokens": 400})
    assert (whole.status, whole.incomplete_details, whole.output[0].status) == ("completed", None, "completed")


def test_output_can_be_sent_back_as_input(client):
    first = client.responses.create(input=QUESTION, **PARAMS)
    parts = [{"type": "input_text", "text": "And a "}, {"type": "input_text", "text": "queue."}]
    history = [{"role": "user", "content": QUESTION}, *first.output, {"role": "user", "content": parts}]
    second = client.responses.create(input=history, **PARAMS)
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And a queue."},
    ]
    assert second.output_text == chat(client, messages).choices[0].message.content


def test_refusal_in_input_is_text(client):
    answers = [
        {"role": "assistant", "content": content} for content in ("No.", [{"type": "refusal", "refusal": "No."}])
    ]
    outputs = [
        client.responses.create(input=[answer, {"role": "user", "content": "Hi"}], **PARAMS) for answer in answers
    ]
    assert outputs[0].output_text == outputs[1].output_text
    assert outputs[0].usage.input_tokens == outputs[1].usage.input_tokens


def test_stream_events_follow_the_api_order(client):
    whole = client.responses.create(input=QUESTION, **PARAMS)
    events = list(client.responses.create(input=QUESTION, stream=True, **PARAMS))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * len(deltas),
        *("output_text.done", "content_part.done", "output_item.done", whole.status),
    ]
    assert "".join(deltas) == events[-4].text == events[-3].part.text == whole.output_text
    assert events[0].response.status == "in_progress" and events[0].response.output == []
    last = events[-1].response
    assert last.output[0].id == events[2].item.id == events[4].item_id and last.id == events[0].response.id
    assert (last.output_text, last.usage.output_tokens) == (whole.output_text, whole.usage.output_tokens)


def test_openai_stream_helper_returns_the_response(client):
    with client.responses.stream(input=QUESTION, **{**PARAMS, "max_output_tokens": 400}) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text != ""


def test_response_returns_the_labels_of_the_request(client):
    labels = {"metadata": {"session": "7"}, "user": "u", "safety_identifier": "s", "prompt_cache_key": "k",
              "max_tool_calls": 3, "service_tier": "default"}  # fmt: skip
    response = client.responses.create(input=QUESTION, **labels, **PARAMS)
    streamed = [*client.responses.create(input=QUESTION, stream=True, **labels, **PARAMS)]
    for found in (response, streamed[0].response, streamed[-1].response):
        assert {name: getattr(found, name) for name in labels} == labels


class Verdict(BaseModel):
    language: Literal["Python", "C"]
    is_class: bool


def test_response_is_parsed_into_pydantic_object(client):
    params = {"input": QUESTION, "text_format": Verdict, **PARAMS, "max_output_tokens": 400}
    parsed = client.responses.parse(**params)
    assert isinstance(parsed.output_parsed, Verdict) and parsed.text.format.name == "Verdict"
    with client.responses.stream(**params) as stream:
        assert stream.get_final_response().output_parsed == parsed.output_parsed


@pytest.mark.parametrize("more", [{"reasoning": None}, {"reasoning": {"effort": None, "summary": None}, "top_k": 0},
                                  {"reasoning": {}, "top_k": -1}])  # fmt: skip
def test_parameters_without_effect_are_accepted(api, more):
    labels = {"metadata": {"a": "b"}, "user": "u", "store": False, "include": [], "tools": [], "truncation": "disabled",
              "background": False, "previous_response_id": None, "text": {}, "service_tier": "auto",
              "parallel_tool_calls": True, "tool_choice": "auto", "top_logprobs": 0}  # fmt: skip
    answers = [post(api, {"input": QUESTION, **sent}) for sent in ({**labels, **more}, {})]
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    assert len({answer.json()["output"][0]["content"][0]["text"] for answer in answers}) == 1


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the earlier messages in input"),
        ({"store": True}, "store", "stores no responses"),
        ({"input": []}, "input", "send a message"),
        ({"input": None}, "input", "is required"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input", "item 0.role: "),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "item 0.type: this server stores no items"),
        (
            {"input": [{"type": "web_search_call", "id": "x"}]},
            "input",
            "item 0.type: is 'web_search_call', but only message, reasoning, function_call, function_call_output are",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input",
            "part 0.type: is 'input_image', but only 'input_text' or 'output_text' is supported",
        ),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input", "item 0.call_id: is required"),
        (
            {"input": [{"type": "function_call", "call_id": "1", "name": "f", "index": 0}]},
            "input",
            "item 0.index: unknown",
        ),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort", 'no effort "low"'),
        ({"max_output_tokens": 401}, "max_output_tokens", "at most 400 are allowed"),
        ({"max_tokens": 5}, "max_tokens", "unknown parameter"),
        ({"background": True}, "background", "only false is supported"),
        ({"metadata": {"a": 1}}, "metadata", "values are strings"),
        ({"metadata": {str(i): "a" for i in range(17)}}, "metadata", "at most 16 values are allowed, not 17"),
        ({"tools": [{"type": "web_search", "name": "x"}]}, "tools[0].type", "'function'"),
        ({"tools": [{"type": "function", "name": "f"}] * 2}, "tools", "the same name"),
        (
            {"tools": [{"type": "function", "name": "f", "parameters": {"not": {}}}], "tool_choice": "required"},
            "tools[0].parameters",
            "not",
        ),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "not among the tools"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", "schema is required"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "what"}}}}, "text.format", ""),
    ],
)
def test_unsupported_parameter_returns_400_with_param_name(api, body, param, words):
    answer = post(api, {"input": QUESTION, **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param) and words in error["message"]


def test_cached_tokens_require_the_same_prompt_cache_key(api):
    def cached(key):
        answer = post(api, {"input": QUESTION * 9, "max_output_tokens": 1, "prompt_cache_key": key})
        return answer.json()["usage"]["input_tokens_details"]["cached_tokens"]

    assert cached("mine") == 0 < cached("mine")
    assert cached("yours") == 0


def test_prompt_beyond_context_returns_400_for_input(api):
    error = post(api, {"input": "word " * 2_000}).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")


def test_failing_stream_ends_with_error_event(client, monkeypatch):
    add_step, steps = OutputProcessor.add_step, []

    def failing_take(output, step):
        steps.append(step)
        if len(steps) > 3:
            raise ValueError("planted")
        return add_step(output, step)

    monkeypatch.setattr(OutputProcessor, "add_step", failing_take)
    events = list(client.responses.create(input=QUESTION, stream=True, **PARAMS))
    assert events[-1].type == "error" and "planted" in events[-1].message


def test_responses_endpoint_checks_api_key_and_model(api, decoder):
    assert post(api, {"input": QUESTION, "model": "another"}).status_code == 404
    with Api(decoder, keys=frozenset([digest("one")])) as guarded:
        assert post(guarded, {"input": QUESTION}).status_code == 401
        assert post(guarded, {"input": QUESTION}, Authorization="Bearer one").status_code == 200
