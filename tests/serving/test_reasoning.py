"""Reasoning of thinking models: found in any pieces of a text, separated in responses and streams, counted, left free
by grammars, and set by variables of the chat template."""

import http.client
import json
import re
from urllib.parse import urlsplit

import httpx
import numpy as np
import openvino_genai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculative import batch_decoder
from speculative.bench.load import clients as load_clients
from speculative.bench.load.clients import Target
from speculative.convert import thinking
from speculative.serving.api.answer_parser import AnswerParser
from speculative.serving.api.reasoning import BEGIN, END, Reasoning, ReasoningFormat, ReasoningParser
from speculative.serving.api.responses import ChatChoiceBuilder
from speculative.serving.api.tool_calls import HERMES, SPACE, Call, Text, ToolParser
from tests.support.changed_tokenizer import ChangedTokenizer
from tests.support.paths import DRAFT
from tests.support.serving import PLAIN
from tests.support.thinking_model import save_model, save_thinking_model

HI = {"role": "user", "content": "Write code to count the words of a text."}
OFF = {"enable_thinking": False}


# ---- texts ----------------------------------------------------------------------------------------------------------


def parsed(parser, pieces):
    """The reasoning and the answer in a text."""
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.end()
    assert all(event.text for event in events)
    return tuple("".join(event.text for event in events if isinstance(event, kind)) for kind in (Reasoning, Text))


@pytest.mark.parametrize(
    ("opening", "text", "reasoning", "answer"),
    [
        (BEGIN, "<think>\nOne.\n\nTwo.\n</think>\n\nYes.\n", "One.\n\nTwo.", "Yes.\n"),
        (BEGIN, "\n <think>Hm</think>Yes", "Hm", "Yes"),
        (BEGIN, "Yes. <think>No</think>", "", "Yes. <think>No</think>"),
        (BEGIN, "  <thin air>", "", "  <thin air>"),
        (BEGIN, "<thi", "", "<thi"),
        (BEGIN, "<think>\n\n</think>\n\nYes.", "", "Yes."),
        (BEGIN, "<think>a <b></thinker> </thin", "a <b></thinker> </thin", ""),
        (BEGIN, "<think>a</think>b</think>c", "a", "b</think>c"),
        ("", "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("", "Hm.</think> \n\n yes", "Hm.", " \n\n yes"),
        ("", "Hm.</think>\n\n\n yes", "Hm.", "\n yes"),
        ("", "\n\nHm. ", "Hm.", ""),
        ("", "", "", ""),
        (None, " <think>a</think>b", "", " <think>a</think>b"),
    ],
)
def test_reasoning_is_found_in_whole_texts_and_in_single_letters(opening, text, reasoning, answer):
    assert parsed(ReasoningParser(opening), [text]) == parsed(ReasoningParser(opening), text) == (reasoning, answer)


PIECES = st.lists(st.sampled_from([BEGIN, END, "<", "/think>", "a", " ", "\n", "b<"]), max_size=8)


@given(PIECES, st.sampled_from([BEGIN, "", None]))
def test_pieces_do_not_change_what_is_found(pieces, opening):
    whole = "".join(pieces)
    found = parsed(ReasoningParser(opening), pieces)
    assert found == parsed(ReasoningParser(opening), [whole]) == parsed(ReasoningParser(opening), whole)
    if opening == "":
        before, _, after = whole.partition(END)
        assert found == (before.strip(SPACE), re.sub("^\n{1,2}", "", after))


def test_calls_are_found_after_the_reasoning_only():
    call = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    parser = AnswerParser(ToolParser(HERMES, {"weather"}), ReasoningFormat(lambda tokens: "<think>\n"), np.zeros(1))
    events = [event for letter in f"I could {call}.\n</think>\n{call}" for event in parser.feed(letter)] + parser.end()
    assert "".join(event.text for event in events if isinstance(event, Reasoning)) == f"I could {call}."
    assert [event.name for event in events if isinstance(event, Call)] == ["weather"] and parser.calls == 1
    assert not any(isinstance(event, Text) for event in events)


def test_streamed_reasoning_equals_that_of_the_whole_response():
    class Generation:
        text, finish_reason = "<think>\nOne\ntwo\n</think>\n\nYes. <think>", "stop"

    def builder():
        return ChatChoiceBuilder(0, AnswerParser(None, ReasoningFormat(lambda tokens: "assistant:"), np.zeros(1)))

    message, streamed = builder().full_choice(Generation())["message"], builder()
    chunks = [chunk["delta"] for piece in Generation.text for chunk in streamed.piece(piece)]
    chunks += [chunk["delta"] for chunk in streamed.end("stop")]
    assert (message["reasoning_content"], message["content"]) == ("One\ntwo", "Yes. <think>")
    for name in ("reasoning_content", "content"):
        assert "".join(chunk.get(name, "") for chunk in chunks) == message[name]


@given(st.integers(0, 20), st.integers(0, 20))
def test_reasoning_tokens_are_counted_up_to_the_end(before, after):
    spellings = ["a", "</", "th", "ink", ">"]
    form = ReasoningFormat(lambda tokens: "".join(spellings[token] for token in tokens))
    assert form.count_tokens([0] * before + [1, 2, 3, 4] + [0] * after) == before + 4
    assert form.count_tokens([0] * before + [1, 2, 3]) == before + 3
    assert form.count_tokens([]) == 0


# ---- models ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return batch_decoder.load(save_thinking_model(tmp_path_factory.mktemp("thinking"), [HI]))


def test_format_is_detected_from_chat_template_and_texts(decoder, tmp_path):
    assert ReasoningFormat.detect(decoder.tokenizer).default is True
    thinking.disable(save_model(tmp_path / "main"), "it", is_required=True)
    assert ReasoningFormat.detect(openvino_genai.Tokenizer(str(tmp_path / "main"))).default is False
    assert not ReasoningFormat.detect(openvino_genai.Tokenizer(str(DRAFT))) and not ReasoningFormat.detect(None)
    without_tags = ChangedTokenizer(decoder.tokenizer, lambda text: text.replace(END, ""))
    assert not ReasoningFormat.detect(without_tags)


def test_template_that_refuses_a_chat_is_no_error(tmp_path):
    """Some need a system message."""
    template = save_model(tmp_path / "main") / "chat_template.jinja"
    refusal = "{% if messages[0].role != 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    template.write_text(refusal + template.read_text(encoding="utf-8"), encoding="utf-8")
    assert ReasoningFormat.detect(openvino_genai.Tokenizer(str(template.parent))).default is None


@pytest.mark.parametrize(("variables", "opening"), [({}, BEGIN), ({"opens": True}, ""), (OFF, None)])
def test_opening_depends_on_the_end_of_the_prompt(decoder, variables, opening):
    history = openvino_genai.ChatHistory([HI])
    history.set_extra_context(variables)
    assert ReasoningFormat.detect(decoder.tokenizer).opening(decoder.encode(history)) == opening


# ---- server ---------------------------------------------------------------------------------------------------------


def ask(api, path="/chat/completions", **params):
    body = {"model": "embedded", "messages": [HI], "temperature": 0, "max_tokens": 60, **params}
    return httpx.post(api.url + path, json=body, **PLAIN)


def choice(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


@pytest.mark.parametrize("variables", [{}, {"opens": True}], ids=["the model opens it", "the prompt opens it"])
def test_response_separates_reasoning(api, decoder, variables):
    answer = ask(api, chat_template_kwargs=variables, logprobs=True)
    message = choice(answer)["message"]
    assert message["reasoning_content"] and message["content"]
    texts = [entry["token"] for entry in choice(answer)["logprobs"]["content"]]  # of all tokens
    assert "".join(texts).removeprefix(BEGIN).partition(END)[0].strip() == message["reasoning_content"]
    counts = answer.json()["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert counts == texts.index(END) + 1 < len(texts)


def test_stream_has_deltas_of_reasoning_before_those_of_content(client, api):
    params = {"model": "embedded", "messages": [HI], "temperature": 0, "max_tokens": 60}
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.chat.completions.create(stream=True, stream_options=options, **params))
    deltas = [chunk.choices[0].delta.model_dump(exclude_unset=True) for chunk in chunks if chunk.choices]
    message, usage = choice(ask(api))["message"], ask(api).json()["usage"]
    for name in ("reasoning_content", "content"):
        assert "".join(delta.get(name, "") for delta in deltas) == message[name]
    kinds = [name for delta in deltas for name in delta if delta[name] and name != "role"]
    assert kinds == sorted(kinds, reverse=True) and {*kinds} == {"reasoning_content", "content"}
    counts = [chunk.usage.completion_tokens_details.reasoning_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == usage["completion_tokens_details"]["reasoning_tokens"]
    assert all(chunk.usage.completion_tokens >= count for chunk, count in zip(chunks, counts, strict=True))


def test_benchmark_counts_reasoning_as_text(api):
    """Also a text of reasoning alone: its time to first token is known."""
    server = Target(api.url, "embedded", chat=True)
    connection = http.client.HTTPConnection(urlsplit(api.url).netloc)
    for tokens in (3, 60):
        message = choice(ask(api, max_tokens=tokens))["message"]
        record = load_clients.ask(connection, server, 0, HI["content"], {"temperature": 0, "max_tokens": tokens})
        assert record.text == message["reasoning_content"] + message["content"] and record.first
    connection.close()


def test_truncated_reasoning_has_no_content(api):
    answer = ask(api, max_tokens=3)
    assert choice(answer)["finish_reason"] == "length" and choice(answer)["message"]["content"] == ""
    assert choice(answer)["message"]["reasoning_content"]
    assert answer.json()["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3


@pytest.mark.parametrize("off", [{"chat_template_kwargs": OFF}, {"reasoning_effort": "none"}])
def test_disabled_reasoning_is_not_looked_for(api, decoder, off):
    answer = ask(api, **off)
    assert "reasoning_content" not in choice(answer)["message"] and choice(answer)["message"]["content"]
    assert answer.json()["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    history = openvino_genai.ChatHistory([HI])
    history.set_extra_context(OFF)
    assert answer.json()["usage"]["prompt_tokens"] == len(decoder.encode(history))


@pytest.mark.parametrize("variables", [{}, {"opens": True}, OFF], ids=["optional", "open", "closed"])
@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes"]}}}},
        {"structured_outputs": {"regex": '"(yes|yes!)"'}},
        {"structured_outputs": {"grammar": 'root ::= "\\"yes" "!"? "\\""'}},
    ],
    ids=["JSON schema", "regex", "grammar"],
)
def test_grammars_leave_the_reasoning_free(api, form, variables):
    free = choice(ask(api, chat_template_kwargs=variables))["message"]
    found = choice(ask(api, chat_template_kwargs=variables, max_tokens=100, **form))
    assert found["finish_reason"] == "stop" and found["message"]["content"] in ('"yes"', '"yes!"')
    assert found["message"].get("reasoning_content") == free.get("reasoning_content")


@pytest.mark.parametrize("variables", [{}, {"opens": True}, OFF], ids=["optional", "open", "closed"])
def test_constrained_answer_keeps_its_space_and_may_be_long(api, variables):
    answer = choice(ask(api, chat_template_kwargs=variables, structured_outputs={"choice": [" yes", " no"]}))
    assert answer["message"]["content"] in (" yes", " no")
    schema = {"enum": ["yes", *(f"{i:060}" for i in range(900))]}  # nearly as long as the API allows
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = choice(ask(api, chat_template_kwargs=variables, max_tokens=200, response_format=form))
    assert json.loads(answer["message"]["content"]) in schema["enum"]


def test_forced_calls_follow_the_reasoning(api):
    tools = [{"type": "function", "function": {"name": "time"}}]
    found = choice(ask(api, tools=tools, tool_choice="required", parallel_tool_calls=False, max_tokens=200))
    assert found["finish_reason"] == "tool_calls" and found["message"]["reasoning_content"]
    (call,) = found["message"]["tool_calls"]
    assert call["function"] == {"name": "time", "arguments": "{}"} and found["message"]["content"] is None


def test_earlier_reasoning_reaches_the_chat_template(api, decoder):
    def count(**reasoning):
        messages = [HI, {"role": "assistant", "content": "Yes.", **reasoning}, HI]
        tokenized = httpx.post(f"{api.url.removesuffix('/v1')}/tokenize", json={"messages": messages}, **PLAIN).json()
        prompt = ask(api, messages=messages, max_tokens=1).json()["usage"]["prompt_tokens"]
        assert tokenized["count"] == prompt
        return prompt

    assert count() < count(reasoning_content="Hm.") == count(reasoning="Hm.")


def test_tokenize_takes_template_variables(api):
    url, body = f"{api.url.removesuffix('/v1')}/tokenize", {"messages": [HI]}
    plain, off = (httpx.post(url, json=body | more, **PLAIN) for more in ({}, {"chat_template_kwargs": OFF}))
    assert off.json()["count"] > plain.json()["count"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages is set by the server"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs", "dictionary"),
        ({"chat_template_kwargs": {"x": "x" * 70_000}}, "chat_template_kwargs", "at most 65536"),
        ({"reasoning_effort": "low"}, "reasoning_effort", 'no effort "low"'),
        ({"reasoning_effort": "most"}, "reasoning_effort", "'none'"),
        ({"messages": [{**HI, "reasoning_content": "x"}]}, "messages[0]", "only messages of the role assistant"),
    ],
)
def test_wrong_values_are_rejected_by_name(api, body, param, words):
    answer = ask(api, **body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param and words in error["message"]


# ---- /v1/responses --------------------------------------------------------------------------------------------------

ONE = {"model": "embedded", "temperature": 0, "max_output_tokens": 60}


def test_responses_have_an_item_for_the_reasoning(api, client):
    message = choice(ask(api))["message"]
    first = client.responses.create(input=[HI], **ONE)
    assert [item.type for item in first.output] == ["reasoning", "message"]
    assert first.output[0].content[0].text == message["reasoning_content"] and first.output[0].summary == []
    assert first.output_text == message["content"]
    assert first.usage.output_tokens_details.reasoning_tokens > 1
    second = client.responses.create(input=[HI, *first.output, HI], **ONE)
    same = ask(api, messages=[HI, {**message, "refusal": None}, HI]).json()
    assert second.usage.input_tokens == same["usage"]["prompt_tokens"]
    assert second.output_text == same["choices"][0]["message"]["content"]


def test_responses_stream_typed_events_of_reasoning(client):
    events = list(client.responses.create(input=[HI], stream=True, **ONE))
    reasoning = [event for event in events if getattr(event, "output_index", None) == 0]
    kinds = [event.type.removeprefix("response.") for event in reasoning]
    assert kinds[:2] == ["output_item.added", "content_part.added"]
    assert {*kinds[2:-3]} == {"reasoning_text.delta"}
    assert kinds[-3:] == ["reasoning_text.done", "content_part.done", "output_item.done"]
    text = "".join(event.delta for event in reasoning[2:-3])
    assert text == reasoning[-3].text == reasoning[-2].part.text == reasoning[-1].item.content[0].text
    form = {"format": {"type": "json_schema", "name": "x", "schema": {"enum": ["yes"]}}}
    with client.responses.stream(input=[HI], text=form, **ONE) as stream:
        response = stream.get_final_response()
    assert response.output[0].content[0].text == text and response.output_text == '"yes"'


def test_responses_disable_reasoning(client):
    for off in ({"reasoning": {"effort": "none"}}, {"extra_body": {"chat_template_kwargs": OFF}}):
        response = client.responses.create(input=[HI], **off, **ONE)
        assert [item.type for item in response.output] == ["message"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", 'no effort "high"'),
        ({"input": [{"type": "reasoning", "content": [{"type": "text", "text": "x"}]}]}, "input", "item 0.content: "),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input", "item 0.encrypted_content: unknown"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "has no message"),
    ],
)
def test_wrong_reasoning_items_are_rejected(api, body, param, words):
    answer = httpx.post(f"{api.url}/responses", json={**ONE, "input": "Hi", **body}, **PLAIN)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param and words in answer.json()["error"]["message"]


# ---- clients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai_reads_reasoning_and_sends_it_back(api, kind):
    pytest.importorskip("pydantic_ai")  # from Python 3.11 on
    from pydantic_ai import Agent
    from pydantic_ai.messages import TextPart, ThinkingPart
    from pydantic_ai.models import openai
    from pydantic_ai.providers.openai import OpenAIProvider

    model = getattr(openai, kind)("embedded", provider=OpenAIProvider(base_url=api.url, api_key="none"))
    agent = Agent(model, model_settings={"temperature": 0, "max_tokens": 60})
    first = agent.run_sync(HI["content"])
    reasoning, text = first.new_messages()[-1].parts
    assert isinstance(reasoning, ThinkingPart) and isinstance(text, TextPart)
    message = choice(ask(api))["message"]
    assert text.content.strip() == message["content"].strip()
    assert kind != "OpenAIChatModel" or reasoning.content == message["reasoning_content"]
    assert agent.run_sync("Go on.", message_history=first.all_messages()).output
