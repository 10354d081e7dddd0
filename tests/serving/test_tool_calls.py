"""Parsing of tool calls in each model family's format: the result does not depend on the chunks of the text."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speculative.serving.api import tool_calls
from speculative.serving.api.tool_calls import (
    GENERIC,
    HERMES,
    LLAMA,
    MISTRAL,
    Arguments,
    Call,
    Text,
    ToolParser,
    detect_tool_format,
)

NAMES = {"weather", "add"}
PARIS, ADD = ("weather", {"city": "Paris", "days": [1, {"a": "}"}]}), ("add", {"a": 1, "b": 2})
RULES = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def parse(form, *pieces):
    """The text outside of calls, and the calls with their arguments as text."""
    parser = ToolParser(form, NAMES)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.end()
    calls = [event for event in events if isinstance(event, Call)]
    assert [call.number for call in calls] == list(range(len(calls))) and parser.calls == len(calls)
    assert len({call.id for call in calls}) == len(calls)
    for i, event in enumerate(events):
        if isinstance(event, Arguments):
            assert any(isinstance(e, Call) and e.number == event.number for e in events[:i])
    arguments = [
        "".join(e.text for e in events if isinstance(e, Arguments) and e.number == call.number) for call in calls
    ]
    text = "".join(event.text for event in events if isinstance(event, Text))
    return text, list(zip([call.name for call in calls], arguments, strict=True))


def parse_json(form, *pieces):
    text, calls = parse(form, *pieces)
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


HERMES_PARIS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": [1, {"a": "}"}]}}\n</tool_call>'
HERMES_ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
LIST = (
    '[{"name": "weather", "arguments": {"city": "Paris", "days": [1, {"a": "}"}]}}, '
    '{"name": "add", "arguments": {"a": 1, "b": 2}}]'
)
CALLS = [  # the format, a text, its content, its calls
    (HERMES, HERMES_PARIS, "", [PARIS]),
    (HERMES, f"\n\n{HERMES_PARIS}\n{HERMES_ADD}\n", "", [PARIS, ADD]),
    (HERMES, f"Let me see.\n{HERMES_ADD}", "Let me see.\n", [ADD]),
    (HERMES, f"<think>\nI add.\n</think>\n\n{HERMES_ADD}", "<think>\nI add.\n</think>\n\n", [ADD]),
    (HERMES, f"{HERMES_ADD} That is all.", " That is all.", [ADD]),
    (HERMES, HERMES_ADD.removesuffix("</tool_call>"), "", [ADD]),
    (HERMES, HERMES_ADD.replace("}}", "}"), "", [ADD]),  # a brace is missing
    (HERMES, f"{HERMES_ADD.replace('}}', '}')}\n{HERMES_PARIS}", "", [ADD, PARIS]),
    (HERMES, f"<tool_call>{LIST}</tool_call>", "", [PARIS, ADD]),  # SmolLM2's
    (HERMES, '<tool_call>{"arguments": {"a": 1, "b": 2}, "name": "add"}</tool_call>', "", [ADD]),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "1}"}</tool_call>', "", [ADD]),
    (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>', "", [ADD]),
    (HERMES, '<tool_call>{"name": "add"}</tool_call>', "", [("add", {})]),
    (HERMES, '<tool_call>{"name": "add", "id": "1", "arguments": null}</tool_call>', "", [("add", {})]),
    (
        HERMES,
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": \\"\\ud83d\\"}"}</tool_call>',
        "",
        [("add", {"a": "?"})],
    ),
    (HERMES, '{"name": "add", "arguments": {}}', "", [("add", {})]),  # Qwen2.5-Coder's
    (HERMES, ' {"name": "add", "arguments": {"a": 1, "b": 2}}', "", [ADD]),
    (HERMES, '```json\n{\n  "name": "add",\n  "arguments": {\n    "a": 1,\n    "b": 2\n  }\n}\n```', "", [ADD]),
    (HERMES, '```\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n```\nDone.', "\nDone.", [ADD]),
    (HERMES, f'{{"name": "add", "arguments": {{"a": 1, "b": 2}}}}\n{HERMES_PARIS}', "", [ADD, PARIS]),
    (LLAMA, '{"name": "add", "parameters": {"a": 1, "b": 2}}', "", [ADD]),
    (LLAMA, '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}', "", [ADD]),
    (LLAMA, ' {"type": "function", "name": "add", "parameters": {"a": 1, "b": 2}}', "", [ADD]),
    (
        LLAMA,
        '{"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": "add", "arguments": {}}',
        "",
        [ADD, ("add", {})],
    ),
    (MISTRAL, f"[TOOL_CALLS] {LIST}", "", [PARIS, ADD]),
    (MISTRAL, f"[TOOL_CALLS]{LIST}", "", [PARIS, ADD]),
    (MISTRAL, f" {LIST}", "", [PARIS, ADD]),  # the marker is a special token, which the text omits
    (MISTRAL, f"Yes.[TOOL_CALLS] {LIST}", "Yes.", [PARIS, ADD]),
    (GENERIC, f'{{\n  "tool_calls": {LIST}\n}}', "", [PARIS, ADD]),
    (GENERIC, '{"tool_calls": [{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "call_1___"}]}', "", [ADD]),
]
TEXTS = [  # with no call
    *(
        (form, text)
        for form in (HERMES, LLAMA, MISTRAL, GENERIC)
        for text in ("", " \n", "Hello", "a < b [TOOL] {", "{", "[")
    ),
    (HERMES, "<tool_call>"),
    (HERMES, "<tool_cal"),
    (HERMES, "<tool_call></tool_call>"),
    (HERMES, "<tool_call>\nadd(1, 2)\n</tool_call> and more"),
    (HERMES, '<tool_call>\n{"name": "add", "argu'),
    (HERMES, "<tool_call>\n{'name': 'add'}\n</tool_call>"),
    (HERMES, '<tool_call>{"name": "other", "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": ["add"], "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
    (HERMES, '<tool_call>{"name": "add", "args": {"a": 1, "b": 2}}</tool_call>'),  # nothing is dropped
    (LLAMA, '{"name": "add", "age": 3}'),
    (HERMES, 'Call {"name": "add", "arguments": {}}'),
    (HERMES, '{"name": "other", "arguments": {}}'),
    (HERMES, '```json\n{"name": "add", "age": 3}\n```'),
    (HERMES, "```python\nadd(1, 2)\n```"),
    (LLAMA, '{"name": "other", "parameters": {}}'),
    (LLAMA, '{"type": "function" "name": "add"}'),
    (LLAMA, '{"type": "function", "name": "add", 1: {}}'),
    (LLAMA, '{"answer": {"name": "add", "parameters": {}}} is the answer'),
    (LLAMA, 'Call {"name": "add", "parameters": {}}'),
    (MISTRAL, "[1, 2, 3]"),
    (MISTRAL, "[{1: 2}]"),
    (MISTRAL, "[TOOL_CALLS] none"),
    (GENERIC, '{"tool_calls": []}'),
    (GENERIC, '{"tool_calls": "none"}'),
    (GENERIC, '{"answer": 1}'),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CALLS)
def test_calls_are_parsed(form, text, content, calls):
    assert parse_json(form, text) == (content, calls)
    assert parse_json(form, *text) == (content, calls)


@pytest.mark.parametrize(
    "arguments", ['{"a":"\\ud83d"}', '{ "a" : 1e999 }', '{"a": "two\nlines"}', '{"\\u00e9": [{}, null]}']
)
def test_arguments_are_passed_through_verbatim(arguments):
    """Even if another key precedes the name. Half a surrogate pair, for example, cannot be encoded again."""
    first = f'{{"type": "function", "name": "add", "parameters": {arguments}}}'
    last = f'{{"parameters" : {arguments} , "name":"add"}}'
    for text in (first, last):
        assert parse(LLAMA, text) == parse(LLAMA, *text) == ("", [("add", arguments)])


@pytest.mark.parametrize(("form", "text"), TEXTS)
def test_text_without_tool_call_stays_text(form, text):
    assert parse(form, text) == parse(form, *text) == (text, [])


@RULES
@given(st.sampled_from([one[:2] for one in CALLS] + TEXTS), st.data())
def test_parsing_does_not_depend_on_chunk_boundaries(case, data):
    """Even if the text is truncated anywhere."""
    form, text = case
    text = text[: data.draw(st.integers(0, len(text)))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert parse(form, *pieces) == parse(form, text)


PARTS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", '{"tool_calls": [', '{"name": "add", ',
         '"arguments": {', '"parameters": {', '"a": "\\"}', '"', "{", "}", "[", "]", ",", ";", " ", "\n", "a", "\\",
         "<", "```", "```json"]  # fmt: skip


@RULES
@given(st.sampled_from([HERMES, LLAMA, MISTRAL, GENERIC]), st.lists(st.sampled_from(PARTS), max_size=14), st.data())
def test_random_text_is_parsed_without_loss(form, parts, data):
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    content, calls = parse(form, *(text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])))
    assert (content, calls) == parse(form, text)
    if not calls:
        assert content == text


def test_call_is_streamed_incrementally():
    parser = ToolParser(HERMES, NAMES)
    assert parser.feed("Yes <tool") == [Text("Yes ")]
    assert parser.feed('_call>{"name": "add", "arguments": ') == []
    (call, arguments) = parser.feed('{"a": ')
    assert (call.name, arguments) == ("add", Arguments(0, '{"a": '))
    assert parser.feed("1}}</tool_call> or <tool") == [Arguments(0, "1}"), Text(" or ")]
    assert parser.feed("box>") == [Text("<toolbox>")]


def test_json_answer_is_streamed_where_only_calls_in_order_are_recognized():
    parser = ToolParser(HERMES, NAMES)
    assert parser.feed('{"name": "Tom", "a') == []  # may become "arguments"
    assert parser.feed("ge") == [Text('{"name": "Tom", "age')]
    assert parser.feed('": 3') == [Text('": 3')]


TWO = '{{"name": "add", "{0}": {{"a": 1}}}}', '{{"name": "add", "{0}": {{"a": 2}}}}'


@pytest.mark.parametrize("form", [HERMES, MISTRAL, GENERIC])
@pytest.mark.parametrize("forced", [True, False])
@pytest.mark.parametrize("multiple", [True, False])
def test_truncated_call_after_another_leaves_no_text(form, forced, multiple):
    """Nor does a truncated first call if calls are forced."""
    first, second = (f"{form.around[0]}{call.format(form.arguments)}{form.around[1]}" for call in TWO)
    begin, between = len(form.frame[0] + first), len(form.separator + form.around[0] + "{")
    text = f"{form.frame[0]}{first}{form.separator}{second}{form.frame[1]}"
    for length in range(0 if forced else begin, len(text) + 1):
        parser = ToolParser(form, NAMES, multiple, forced)
        events = parser.feed(text[:length]) + parser.end()
        assert not [event for event in events if isinstance(event, Text)], text[:length]
        assert multiple or parser.drops_calls or length < begin + between
    assert parser.calls == 2 and sum(isinstance(event, Call) for event in events) == 1 + multiple


def test_truncated_call_keeps_partial_arguments():
    assert parse(HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1, "b') == ("", [("add", '{"a": 1, "b')])


QWEN = (
    "{%- if tools %}...<tools>...</tools>... within <tool_call></tool_call> XML tags:\n<tool_call>\n{{...}}</tool_call>"
)
TEMPLATES = [
    (QWEN, HERMES),
    ("{%- if tools is not none %}Environment: ipython{% endif %}...{{ '\"parameters\": ' }}", LLAMA),
    ("{%- if tools %}...<|python_tag|>...", LLAMA),
    ("{%- if message.tool_calls %}[TOOL_CALLS] [...", MISTRAL),
    ("{% for message in messages %}{{ message['content'] }}{% endfor %}", GENERIC),
    ("{%- if tools %}<tool_call>\n<function=example_function_name>\n<parameter=...", None),  # Qwen3-Coder
    ("{%- if tools %}<tool_call>{function-name}\n<arg_key>...", None),  # GLM-4.5
    ("[AVAILABLE_TOOLS]...[TOOL_CALLS]{{ name }}[ARGS]", None),  # Mistral's from version 11 on
    ("{%- if tools %}<｜tool▁calls▁begin｜>", None),  # DeepSeek
]


@pytest.mark.parametrize(("template", "form"), TEMPLATES)
def test_call_format_is_detected_from_chat_template(template, form):
    assert detect_tool_format(template) == form


def test_mistral_call_ids_have_nine_alphanumerics():
    assert all(len(name) == 9 and name.isalnum() for name in (tool_calls.new_id(MISTRAL) for _ in range(20)))
