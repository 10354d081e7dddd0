"""`response_format` and `structured_outputs`, as real clients send them, over the real engine: the text follows them,
hostile schemas are refused, and no grammar is compiled in the decoding thread."""

import json
import re
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import httpx
import jsonschema
import pytest
from pydantic import BaseModel

from speculative.sampling.grammar import Grammars
from tests.support.serving import PLAIN

HI = {"role": "user", "content": "Write code to count the words of a text."}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "n": {"type": "integer", "minimum": 0, "maximum": 9},
        "kinds": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 2},
    },
    "required": ["name", "n", "kinds"],
    "additionalProperties": False,
}


class Answer(BaseModel):
    kind: Literal["yes", "no"]
    number: Literal[1, 20, 300]
    why: Literal["because", ""]


def ask(api, path="/chat/completions", **params):
    if "prompt" not in params:
        params = {"messages": [HI], **params}
    body = {"model": "embedded", "temperature": 0, "max_tokens": 200, **params}
    return httpx.post(api.url + path, json=body, **PLAIN)


def text(answer):
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "stop"
    return choice["message"]["content"] if "message" in choice else choice["text"]


def of_schema(schema, **more):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


# ---- texts follow the requested structure ---------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_text_follows_json_schema(api, temperature):
    form = of_schema(SCHEMA, strict=True, description="An answer.")
    answer = text(ask(api, response_format=form, temperature=temperature, seed=1))
    jsonschema.validate(json.loads(answer), SCHEMA)
    assert max(map(len, re.findall(r"\s+", answer)), default=0) <= 22


def test_schema_can_set_whitespace_options(api):
    for options, expected in (({"whitespace_flexible": False}, r"\{\}"), ({"whitespace_pattern": " +"}, r"\{ *\}")):
        schema = {"type": "object", "additionalProperties": False, "x-guidance": options}
        assert re.fullmatch(expected, text(ask(api, response_format=of_schema(schema))))


def test_formats_that_no_grammar_checks_are_ignored(api):
    """Pydantic's schemas of Path, SecretStr and bytes have them."""
    values = {name: {"type": "string", "format": name, "maxLength": 3} for name in ("path", "password", "binary")}
    schema = {"type": "object", "properties": values, "required": [*values], "additionalProperties": False}
    jsonschema.validate(json.loads(text(ask(api, response_format=of_schema(schema)))), schema)


def test_json_object_format_returns_json_object(api):
    assert isinstance(json.loads(text(ask(api, response_format={"type": "json_object"}))), dict)


def test_text_format_is_unconstrained(api):
    form = {"type": "text"}
    answers = [ask(api, max_tokens=5, **more).json() for more in ({"response_format": form}, {})]
    assert answers[0]["choices"] == answers[1]["choices"]


@pytest.mark.parametrize(
    ("structure", "expected"),
    [
        ({"choice": ["maybe so", "a.b|c", "maybe not"]}, r"maybe so|a\.b\|c|maybe not"),
        ({"regex": "[0-9]{4}-[0-9]{2}"}, r"\d{4}-\d{2}"),
        ({"grammar": 'root ::= ("x" | "yz") "!"'}, r"(x|yz)!"),
        ({"json": {"enum": [1, "a"]}}, r'1|"a"'),
        ({"json": '{"enum": [true]}'}, "true"),
        ({"json_object": True}, r"\{[^\0]*\}"),
    ],
    ids=["choice", "regex", "grammar", "json", "json as a string", "json_object"],
)
def test_text_follows_vllm_structured_outputs(api, structure, expected):
    assert re.fullmatch(expected, text(ask(api, structured_outputs=structure)))


def test_completions_support_structured_outputs(api):
    answer = ask(api, "/completions", prompt="def f(", structured_outputs={"choice": ["a", "b"]})
    assert text(answer) in ("a", "b")


# ---- clients --------------------------------------------------------------------------------------------------------


def test_openai_client_parses_answer_with_pydantic(client):
    params = {"model": "embedded", "messages": [HI], "response_format": Answer, "temperature": 0, "max_tokens": 100}
    answer = client.chat.completions.parse(**params)
    assert isinstance(answer.choices[0].message.parsed, Answer)
    with client.chat.completions.stream(**params) as stream:
        assert [event.type for event in stream][-1] == "content.done"
        assert stream.get_final_completion().choices[0].message.content == answer.choices[0].message.content


@pytest.mark.parametrize("method", ["json_schema", "json_mode"])
def test_langchain_returns_structured_output(api, method):
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(base_url=api.url, api_key="none", model="embedded", temperature=0, max_tokens=200)
    kind = Answer if method == "json_schema" else None
    assert isinstance(model.with_structured_output(kind, method=method).invoke("Yes?"), kind or dict)


def test_pydantic_ai_returns_structured_output(api):
    pytest.importorskip("pydantic_ai")  # from Python 3.11 on
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("embedded", provider=OpenAIProvider(base_url=api.url, api_key="none"))
    agent = Agent(model, output_type=NativeOutput(Answer), model_settings={"temperature": 0, "max_tokens": 100})
    assert isinstance(agent.run_sync("Yes?").output, Answer)


# ---- invalid structures ---------------------------------------------------------------------------------------------


def nested(levels):
    schema = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def product(factors):
    """A schema that has 2 ** `factors` cases."""
    return {"allOf": [{"anyOf": [{"properties": {f"{x}{i}": {"const": 1}}} for x in "ab"]} for i in range(factors)]}


FORMAT, OUTPUTS = "response_format", "structured_outputs"
SCHEMA_OF = f"{FORMAT}.json_schema.schema"
REFUSED = [
    ({FORMAT: of_schema({"type": "strin"})}, SCHEMA_OF, "strin"),
    ({FORMAT: of_schema({"not": {"type": "string"}})}, SCHEMA_OF, '"not"'),
    ({FORMAT: of_schema({"$ref": "https://example.com/a.json"})}, SCHEMA_OF, "example.com"),
    ({FORMAT: of_schema({"$ref": "#"})}, SCHEMA_OF, "no text"),
    ({FORMAT: of_schema({"enum": ["x" * 70_000]})}, SCHEMA_OF, "at most 65536"),
    ({FORMAT: of_schema(nested(80))}, SCHEMA_OF, "recursion limit"),
    ({FORMAT: of_schema(nested(250))}, SCHEMA_OF, "recursion limit"),
    ({FORMAT: of_schema(product(20))}, SCHEMA_OF, "too large"),
    ({FORMAT: of_schema({"properties": {f"p{i}": {} for i in range(1_500)}})}, SCHEMA_OF, "1,500 properties"),
    ({FORMAT: of_schema([])}, SCHEMA_OF, "dictionary"),
    ({FORMAT: {"type": "json_schema", "json_schema": {"name": "a"}}}, SCHEMA_OF, "required"),
    ({FORMAT: {"type": "json_schema"}}, FORMAT, "json_schema is required"),
    ({FORMAT: {"type": "xml"}}, f"{FORMAT}.type", "'json_object'"),
    ({OUTPUTS: {"regex": "("}}, f"{OUTPUTS}.regex", "unclosed"),
    ({OUTPUTS: {"regex": "a" * 70_000}}, f"{OUTPUTS}.regex", "65536"),
    ({OUTPUTS: {"grammar": "root ::= other"}}, f"{OUTPUTS}.grammar", "other"),
    ({OUTPUTS: {"grammar": "root ::= " + "(" * 5_000}}, f"{OUTPUTS}.grammar", "recursion"),
    ({OUTPUTS: {"json": "{"}}, f"{OUTPUTS}.json", "not a JSON schema"),
    ({OUTPUTS: {"choice": []}}, f"{OUTPUTS}.choice", "at least 1"),
    ({OUTPUTS: {"regex": "a", "choice": ["a"]}}, OUTPUTS, "needs one of"),
    ({OUTPUTS: {"structural_tag": "{}"}}, f"{OUTPUTS}.structural_tag", "unknown parameter"),
]


@pytest.mark.parametrize(("params", "parameter", "words"), REFUSED)
def test_invalid_structure_returns_400_with_param_name(api, params, parameter, words):
    answer = ask(api, **params)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, parameter, "invalid_request"), answer.text
    assert error["message"].startswith(f"{parameter}: ") and words in error["message"]
    assert len(error["message"]) < 400 and "\n" not in error["message"]


def test_response_format_and_structured_outputs_exclude_each_other(api):
    answer = ask(api, response_format={"type": "json_object"}, structured_outputs={"regex": "a"})
    assert answer.status_code == 400 and "exclude each other" in answer.json()["error"]["message"]


BOUNDED = {
    "a list of at least 100,000": {"type": "array", "items": {"type": "integer"}, "minItems": 100_000},
    "a long text": {"type": "string", "minLength": 100_000},
    "a pattern of many states": {"type": "string", "pattern": "(a|b)*a(a|b){18}"},
    "recursion": {"$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}, "minItems": 1}},
                  "$ref": "#/$defs/node"},
}  # fmt: skip


@pytest.mark.parametrize("schema", BOUNDED.values(), ids=BOUNDED)
def test_unbounded_structure_is_cut_by_max_tokens(api, schema):
    answer = ask(api, response_format=of_schema(schema), max_tokens=12)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] <= 12, answer.text


HOSTILE = {
    "a schema of 1 MB": ({FORMAT: of_schema({"enum": ["x" * 1_000_000]})}, 413),
    "many small properties": ({FORMAT: of_schema({"properties": {f"p{i}": {} for i in range(900)}})}, 200),
    "nothing is allowed": ({OUTPUTS: {"json": {"$ref": "#"}}}, 400),
    "rules that never end": ({OUTPUTS: {"grammar": 'root ::= "a" root'}}, 400),
    "a text that never ends": ({OUTPUTS: {"grammar": 'root ::= "a" root | "b"'}}, 200),
    "a string of quotes that is never closed": ({OUTPUTS: {"grammar": 'root ::= "' + r"\"" * 10_000}}, 400),
    "a regular expression of many states": ({OUTPUTS: {"regex": "(a|b)*a(a|b){18}"}}, 200),
    "repetitions of repetitions": ({OUTPUTS: {"regex": "((a{1,900}){1,900}){1,900}"}}, 200),
}


def test_hostile_grammars_do_not_delay_other_requests(api):
    """Each is rejected or ends by max_tokens within the timeout of `ask`; a concurrent request is complete."""
    with ThreadPoolExecutor(4) as threads:
        concurrent = threads.submit(ask, api, "/completions", prompt="def f(", max_tokens=300, ignore_eos=True)
        futures = {name: threads.submit(ask, api, max_tokens=9, **more) for name, (more, _) in HOSTILE.items()}
    assert concurrent.result().json().get("usage", {}).get("completion_tokens") == 300, concurrent.result().text
    answers = {name: answer.result() for name, answer in futures.items()}
    assert {name: answer.status_code for name, answer in answers.items()} == {
        name: status for name, (_, status) in HOSTILE.items()
    }
    assert all(len(answer.text) < 3_000 for answer in answers.values())


def test_grammars_are_not_compiled_in_decoding_thread(api, decoder, monkeypatch):
    """Even if more grammars wait than the decoder caches."""
    compiling, new = [], Grammars._new

    def noted(*arguments):
        compiling.append(threading.current_thread().name)
        return new(*arguments)

    monkeypatch.setattr(Grammars, "_new", noted)
    monkeypatch.setattr(decoder.grammars, "_latest", deque(maxlen=1))
    schemas = [{"enum": [f"word {i}"]} for i in range(8)]
    with ThreadPoolExecutor(8) as threads:
        answers = threads.map(lambda schema: text(ask(api, response_format=of_schema(schema))), schemas)
    assert list(answers) == [f'"word {i}"' for i in range(8)]
    assert len(compiling) == 8 and {name.partition("_")[0] for name in compiling} == {"encoding"}
