"""Tools in the server, as real clients use them: forced calls always match the schema, the chat template renders
results for the model, and streams carry the same calls as whole responses."""

import json
import re
import shutil
from typing import Literal

import httpx
import jsonschema
import pytest
from pydantic import BaseModel

from speculative import batch_decoder
from speculative.serving.api import tools
from speculative.serving.api.answer_parser import AnswerParser
from speculative.serving.api.chat_completions import ChatCompletionRequest
from speculative.serving.api.response_events import ResponsesBuilder
from speculative.serving.api.responses import ChatChoiceBuilder
from speculative.serving.api.responses_api import ResponsesRequest
from speculative.serving.api.tool_calls import GENERIC, HERMES, LLAMA, MISTRAL, SMOLLM3, ToolParser
from tests.support.later import openai
from tests.support.paths import DRAFT
from tests.support.serving import PLAIN

# Qwen's, shortened
TEMPLATE = """{%- if tools %}{{ '<|system|>\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' ~ (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\nAnswer with <tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call>\\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|tool|>' ~ message.content if message.role == 'tool' else '<|' ~ message.role ~ '|>' ~ message.content }}
{%- for call in message.tool_calls %}
{{- '\\n<tool_call>\\n' ~ (call.function | tojson) ~ '\\n</tool_call>' }}{%- endfor %}
{{- '\\n' }}{%- endfor %}{{ '<|assistant|>' if add_generation_prompt else '' }}"""
HI = {"role": "user", "content": "What is the weather?"}
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"enum": [1, 2]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time"}},
]
SCHEMAS = {"weather": WEATHER, "time": {"const": {}}}
NAMED = {"type": "function", "function": {"name": "weather"}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome", "days": 2}'}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "Rain."}
CALLED = [HI, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT]


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    days: Literal[1, 2]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    """A model whose chat template supports tools. OpenVINO's tokenizer also contains the template."""
    folder = tmp_path_factory.mktemp("tools") / "main"
    shutil.copytree(DRAFT, folder)
    tokenizer = folder / "openvino_tokenizer.xml"
    without = re.sub('<\\w*chat_template value="[^"]*" ?/>', "", tokenizer.read_text(encoding="utf-8"))
    for name, text in (("openvino_tokenizer.xml", without), ("chat_template.jinja", TEMPLATE)):
        (folder / name).unlink()
        (folder / name).write_text(text, encoding="utf-8")
    return batch_decoder.load(folder)


def request_params(**params):
    return {"model": "embedded", "messages": [HI], "tools": TOOLS, "temperature": 0, "max_tokens": 120, **params}


def ask(api, **params):
    return httpx.post(f"{api.url}/chat/completions", json=request_params(**params), **PLAIN)


def checked(calls):
    """The names of calls whose arguments are valid."""
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    return [call.function.name for call in calls]


# ---- /v1/responses --------------------------------------------------------------------------------------------------

FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]


def test_responses_api_runs_a_tool_loop(client):
    """The model calls, the client answers, the model goes on, as in chat completions."""
    params = {"model": "embedded", "tools": FLAT, "temperature": 0, "max_output_tokens": 120}
    history = [{"role": "user", "content": HI["content"]}]
    first = client.responses.create(input=history, tool_choice={"type": "function", "name": "weather"}, **params)
    (call,) = first.output
    assert (call.type, call.name, call.status, first.status) == ("function_call", "weather", "completed", "completed")
    jsonschema.validate(json.loads(call.arguments), WEATHER)
    history += [call, {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}]
    second = client.responses.create(input=history, tool_choice="none", **params)
    chat_call = {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    messages = [HI, {"role": "assistant", "tool_calls": [chat_call]}, {**RESULT, "tool_call_id": call.call_id}]
    same = client.chat.completions.create(**request_params(messages=messages, tool_choice="none"))
    assert second.output_text == same.choices[0].message.content
    assert second.usage.input_tokens == same.usage.prompt_tokens


def test_responses_api_streams_tool_calls(client):
    params = {"model": "embedded", "input": "Hi", "tools": FLAT, "temperature": 0, "max_output_tokens": 60}
    events = list(client.responses.create(stream=True, tool_choice="required", parallel_tool_calls=False, **params))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert kinds == [
        *("created", "in_progress", "output_item.added"),
        *["function_call_arguments.delta"] * len(deltas),
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]
    (item,) = events[-1].response.output
    assert events[2].item.arguments == "" and events[2].item.id == deltas[0].item_id == item.id
    assert "".join(event.delta for event in deltas) == events[-3].arguments == item.arguments
    jsonschema.validate(json.loads(item.arguments), SCHEMAS[item.name])
    with client.responses.stream(tool_choice="required", parallel_tool_calls=False, **params) as stream:
        assert stream.get_final_response().output[0].arguments == item.arguments


def test_text_and_calls_are_separate_output_items():
    """Even if the last call is truncated. If `parallel_tool_calls` excludes that call, the response is complete."""
    calls = ["function_call"] * 2
    first, second = '{"name": "time", "arguments": {}}', '{"name": "weather", "arguments": {"ci'
    text = f"Well. <tool_call>{first}</tool_call> <tool_call>{second}"
    for several, kinds in ((True, ["message", *calls]), (False, ["message", *calls[:1]])):
        request = ResponsesRequest(model="x", input="Hi", tools=FLAT, parallel_tool_calls=several)
        builder = ResponsesBuilder(request, "x", [], AnswerParser(request.chat.tool_parser(HERMES)))
        for piece in (text[:20], text[20:45], text[45:]):
            builder.piece(0, piece)
        end = builder.end_choice(0, "length") + builder.end()
        assert (b"response.incomplete" in end) is several and (b"response.completed" in end) is not several
        items = builder._items
        assert [item["type"] for item in items] == kinds
        assert items[0]["content"][0]["text"].strip() == "Well."
        assert items[1]["arguments"] == "{}"
        last = "incomplete" if several else "completed"
        assert [item["status"] for item in items] == ["completed"] * (len(items) - 1) + [last]


# ---- forced calls ---------------------------------------------------------------------------------------------------


def test_stop_string_does_not_cut_forced_call(client):
    params = request_params(tool_choice="required", parallel_tool_calls=False, temperature=1, seed=1)
    (answer,) = client.chat.completions.create(stop=["\n", '"'], **params).choices
    assert answer.finish_reason == "tool_calls" and len(checked(answer.message.tool_calls)) == 1


@pytest.mark.parametrize("form", [HERMES, LLAMA, MISTRAL, GENERIC], ids=["hermes", "llama", "mistral", "generic"])
def test_forced_calls_are_valid_in_each_format(api, client, monkeypatch, form):
    monkeypatch.setattr(api.endpoint, "_tool_format", form)
    for choice, temperature in (("required", 1.5), (NAMED, 0)):
        params = request_params(tool_choice=choice, parallel_tool_calls=False, temperature=temperature, seed=1)
        (answer,) = client.chat.completions.create(**params).choices
        assert answer.finish_reason == ("stop" if choice == NAMED else "tool_calls")  # as OpenAI and vLLM
        assert answer.message.content is None
        (name,) = checked(answer.message.tool_calls)
        assert choice == "required" or name == "weather"


OTHERS = {"type": "object", "properties": {"days": {"const": 1}}, "required": ["days"]}


@pytest.mark.parametrize(
    "schema",
    [
        {**OTHERS, "allOf": [{"properties": {"city": {"const": "Rome"}}, "required": ["city"]}]},
        {
            "properties": {"days": {"const": 1}},
            "anyOf": [{"properties": {"city": {"type": "string"}}, "required": ["city"]}],
        },
        {**OTHERS, "required": ["days", "city"]},
    ],
)
def test_required_properties_can_be_declared_outside_properties(client, schema):
    params = request_params(
        tools=function(name="weather", parameters=schema), tool_choice="required", temperature=1, seed=1
    )
    (call,) = client.chat.completions.create(**params, parallel_tool_calls=False).choices[0].message.tool_calls
    if call.function.arguments.endswith("}"):
        jsonschema.validate(json.loads(call.function.arguments), schema)
    assert "city" in call.function.arguments


def test_several_calls_can_be_forced(client):
    """The last one may be truncated."""
    found = client.chat.completions.create(**request_params(tool_choice="required", temperature=2, seed=3, n=3)).choices
    calls = [choice.message.tool_calls for choice in found]
    assert all(checked(each[:-1]) for each in calls)
    ids = [call.id for each in calls for call in each]
    assert len(set(ids)) == len(ids)


def test_truncated_call_has_finish_reason_length(client):
    for max_tokens in (8, 20):  # before the arguments, and in them
        (answer,) = client.chat.completions.create(**request_params(tool_choice=NAMED, max_tokens=max_tokens)).choices
        assert answer.finish_reason == "length" and not answer.message.content


def test_answer_follows_response_format_or_calls_a_tool(client):
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"enum": ["Rain.", "Sun."]}}}
    for seed in range(3):
        answer = client.chat.completions.create(**request_params(response_format=form, temperature=2, seed=seed))
        message = answer.choices[0].message
        assert checked(message.tool_calls or []) or json.loads(message.content) in ("Rain.", "Sun.")


def test_tool_choice_none_leaves_tools_out_of_prompt(api):
    answers = [ask(api, max_tokens=5, **more).json() for more in ({"tool_choice": "none"}, {"tools": []})]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]
    assert ask(api, max_tokens=5).json()["usage"]["prompt_tokens"] > 2 * answers[0]["usage"]["prompt_tokens"]


# ---- calls that a model makes by itself -----------------------------------------------------------------------------

TEXT = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n' * 2


class Generation:
    text, finish_reason = TEXT, "stop"


@pytest.mark.parametrize("several", [True, False])
def test_streamed_calls_equal_those_of_whole_response(several):
    whole = ChatChoiceBuilder(0, AnswerParser(ToolParser(HERMES, {"weather"}, several))).full_choice(Generation())
    builder = ChatChoiceBuilder(0, AnswerParser(ToolParser(HERMES, {"weather"}, several)))
    chunks = [chunk for piece in TEXT for chunk in builder.piece(piece)] + builder.end("stop")
    calls = {}
    for chunk in chunks:
        for call in chunk["delta"].get("tool_calls", ()):
            assert ("id" in call) == ("name" in call["function"]) == (call["index"] not in calls)
            calls[call["index"]] = calls.get(call["index"], "") + call["function"]["arguments"]
    assert list(calls.values()) == [call["function"]["arguments"] for call in whole["message"]["tool_calls"]]
    assert len(calls) == 1 + several
    assert whole["message"]["content"] == "".join(chunk["delta"].get("content", "") for chunk in chunks)
    assert whole["finish_reason"] == chunks[-1]["finish_reason"] == "tool_calls"


def test_choice_is_complete_if_only_a_dropped_call_is_truncated():
    class Cut(Generation):
        text, finish_reason = TEXT[:-30], "length"

    for several, reason in ((True, "length"), (False, "tool_calls")):
        parsed = [ChatChoiceBuilder(0, AnswerParser(ToolParser(HERMES, {"weather"}, several))) for _ in range(2)]
        chunks = [chunk for piece in Cut.text for chunk in parsed[0].piece(piece)] + parsed[0].end("length")
        assert chunks[-1]["finish_reason"] == parsed[1].full_choice(Cut())["finish_reason"] == reason


# ---- prompts --------------------------------------------------------------------------------------------------------

RENDERED = """<|system|>
<tools>
{"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": %s}}
{"type": "function", "function": {"name": "time"}}
</tools>
Answer with <tool_call>
{"name": <name>, "arguments": <object>}
</tool_call>
<|user|>What is the weather?
<|assistant|>
<tool_call>
{"name": "weather", "arguments": {"city": "Rome", "days": 2}}
</tool_call>
<|tool|>Rain.
<|assistant|>"""


def test_chat_template_renders_tools_calls_and_results(decoder):
    request = ChatCompletionRequest.model_validate(request_params(messages=CALLED))
    text = decoder.tokenizer.apply_chat_template(request.history(HERMES), add_generation_prompt=True)
    assert text == RENDERED % json.dumps(WEATHER)


def test_template_with_xml_tools_gets_xml_tools(decoder):
    """SmolLM3's template reads `xml_tools`."""
    request = ChatCompletionRequest.model_validate(request_params())
    template = "{% for tool in xml_tools %}{{ tool.function.name }} {% endfor %}{{ messages[0].content }}"
    rendered = decoder.tokenizer.apply_chat_template(request.history(SMOLLM3), False, template)
    assert rendered == "weather time What is the weather?"


def test_template_without_tools_uses_minja_polyfill(decoder):
    request = ChatCompletionRequest.model_validate(request_params(messages=CALLED))
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    rendered = decoder.tokenizer.apply_chat_template(request.history(GENERIC), True, template)
    assert '"description": "The weather."' in rendered and '"tool_calls": [' in rendered and "Rain." in rendered


# ---- clients --------------------------------------------------------------------------------------------------------


def test_openai_client_runs_a_tool_loop(client):
    messages = [HI]
    first = client.chat.completions.create(**request_params(messages=messages, tool_choice=NAMED)).choices[0].message
    messages += [first, {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "Rain."}]
    second = client.chat.completions.create(**request_params(messages=messages, max_tokens=8)).choices[0]
    assert second.message.content and second.finish_reason in ("stop", "length")


def test_openai_client_streams_and_parses_calls(client):
    tools = [openai.pydantic_function_tool(Weather, name="weather")]
    params = request_params(tools=tools, tool_choice="required", parallel_tool_calls=False)
    with client.chat.completions.stream(**params) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= set(kinds)
    assert final.choices[0].finish_reason == "tool_calls"
    for answer in (final, client.chat.completions.parse(**params)):
        (call,) = answer.choices[0].message.tool_calls
        assert isinstance(call.function.parsed_arguments, Weather)
        result = {"role": "tool", "tool_call_id": call.id, "content": "Rain."}
        history = [HI, answer.choices[0].message, result]
        parsed = client.chat.completions.parse(
            **request_params(messages=history, tools=openai.omit, response_format=Weather)
        ).choices[0].message  # fmt: skip
        assert isinstance(parsed.parsed, Weather)
        assert client.chat.completions.create(**request_params(messages=[*history, parsed, HI], max_tokens=2)).choices


def test_langchain_binds_tools(api):
    from langchain_core.messages import ToolMessage
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(base_url=api.url, api_key="none", model="embedded", temperature=0, max_tokens=120)
    bound = model.bind_tools([Weather], tool_choice="Weather")
    answer = bound.invoke("Hi")
    (call,) = answer.tool_calls
    assert Weather(**call["args"])
    first, *more = bound.stream("Hi")
    assert [one["args"] for one in sum(more, start=first).tool_calls] == [call["args"]]
    history = [("user", "Hi"), answer, ToolMessage("Rain.", tool_call_id=call["id"])]
    assert model.bind_tools([Weather]).invoke(history).content
    assert isinstance(model.with_structured_output(Weather, method="function_calling").invoke("Hi"), Weather)


def test_pydantic_ai_returns_call_arguments(api):
    pytest.importorskip("pydantic_ai")  # from Python 3.11 on
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("embedded", provider=OpenAIProvider(base_url=api.url, api_key="none"))
    settings = {"temperature": 0, "max_tokens": 120, "parallel_tool_calls": False}
    assert isinstance(Agent(model, output_type=Weather, model_settings=settings).run_sync("Hi").output, Weather)


# ---- invalid tools --------------------------------------------------------------------------------------------------


def function(**more):
    return [{"type": "function", "function": {"name": "f", **more}}]


def calling(**call):
    return [HI, {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", **call}]}]


REFUSED = [
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0]", ""),
    ({"tools": function(name="a b")}, "tools[0].function.name", "pattern"),
    ({"tools": function() * 2}, "tools", "same name"),
    ({"tools": [*function(), 0]}, "tools[1]", "object"),
    ({"tools": function() * 129}, "tools", "128"),
    ({"tools": function(parameters={"type": "strin"}), "tool_choice": "required"},
     "tools[0].function.parameters", "strin"),
    ({"tools": [*TOOLS, *function(parameters={"not": {}})], "tool_choice": "required"},
     "tools[2].function.parameters", "not"),
    ({"tools": function(parameters={"enum": ["x" * 70_000]})}, "tools[0].function.parameters", "65536"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "no tools"),
    ({"tools": [], "tool_choice": NAMED}, "tool_choice", "'weather'"),
    ({"tools": function(), "tool_choice": NAMED}, "tool_choice", "'weather'"),
    ({"tool_choice": "any"}, "tool_choice", '"required"'),
    ({"tool_choice": {"type": "function"}}, "tool_choice", ""),
    ({"messages": calling(function={"name": "f", "arguments": {}})},
     "messages[1].tool_calls[0].function.arguments", "string"),
    ({"messages": calling(function={"name": "f", "arguments": "{}", "strict": True})},
     "messages[1].tool_calls[0].function.strict", "unknown parameter"),
    ({"messages": calling()}, "messages[1].tool_calls[0].function", "required"),
    ({"messages": [HI, {"role": "tool", "content": "7"}]}, "messages[1]", "tool_call_id"),
    ({"messages": [{**HI, "tool_call_id": "1"}]}, "messages[0]", "tool_call_id"),
    ({"messages": [{**HI, "tool_calls": [CALL]}]}, "messages[0]", "assistant"),
    ({"functions": [{"name": "f"}]}, "functions", "only [] is supported"),
]  # fmt: skip


@pytest.mark.parametrize(("params", "parameter", "words"), REFUSED)
def test_invalid_tools_return_400_with_param_name(api, params, parameter, words):
    answer = ask(api, **params)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "invalid_request")
    assert error["param"].startswith(parameter) and words in error["message"], error


@pytest.mark.parametrize(
    ("arguments", "in_template"),
    [
        ("", {}),
        ('{"a": 1}', {"a": 1}),
        *((other, other) for other in ("{a: 1}", "[1]", "[" * 9_000, '{"a": "\\ud83d"}', '{"a": 1e999}', '{"a": NaN}')),
    ],
)
def test_call_with_invalid_arguments_can_be_sent_back(api, arguments, in_template):
    """The server returns such calls, and the loop that runs tools sends them back with an error as the result."""
    function = {"name": "f", "arguments": arguments}
    assert tools.ToolCall(id="1", function=function).plain()["function"]["arguments"] == in_template
    if len(arguments) < 100:  # fits in the context
        result = {"role": "tool", "tool_call_id": "1", "content": "invalid arguments"}
        assert ask(api, messages=[*calling(function=function), result], max_tokens=2).status_code == 200


def test_tools_are_rejected_if_call_format_is_unknown(api, monkeypatch):
    monkeypatch.setattr(api.endpoint, "_tool_format", None)
    error = ask(api).json()["error"]
    assert error["param"] == "tools" and "chat template" in error["message"]
    assert ask(api, tool_choice="none", max_tokens=2).status_code == 200


def test_structured_outputs_and_tools_exclude_each_other(api):
    assert "exclude each other" in ask(api, structured_outputs={"regex": "a"}).json()["error"]["message"]
