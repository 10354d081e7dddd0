"""Hostile grammars: rejected in one sentence, or compiled in bounded time and memory; and small random schemas, whose
texts a validator accepts."""

import json
import string
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openvino_genai import StructuredOutputConfig

from speculative.sampling import grammar
from speculative.sampling.grammar import Grammars, Tokens
from tests.support.languages import grammars
from tests.support.paths import ROOT

NESTED = '{"type": "array", "items": '
REFUSED = [
    ("json_schema", '{"$ref": "#"}', "it allows no text"),
    (
        "json_schema",
        '{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}',
        "no text",
    ),
    ("json_schema", '{"allOf": [{"$ref": "#"}, {"type": "object"}]}', "circular references"),
    ("json_schema", NESTED * 200 + "true" + "}" * 200, "recursion limit exceeded"),
    ("json_schema", NESTED * 3000 + "true" + "}" * 3000, "it is nested too deeply"),
    ("json_schema", NESTED * 10_000 + "true" + "}" * 10_000, "280,004 characters, but may have at most 100,000"),
    ("json_schema", json.dumps({"enum": ["x" * 1000] * 1000}), "characters, but may have at most 100,000"),
    ("json_schema", json.dumps({"properties": {f"{i}": {} for i in range(3000)}}), "an object has 3,000 properties"),
    ("json_schema", '{"type": "integer", "multipleOf": 1000003}', "least common multiple of all multipleOf"),
    ("json_schema", '{"allOf": [{"multipleOf": 97}, {"multipleOf": 89}]}', "least common multiple of all multipleOf"),
    ("json_schema", '{"allOf": [{"enum": ["a"]}, {"enum": ["b"]}]}', "is invalid"),
    ("json_schema", '{"const": "\\ud800"}', "unexpected end of hex escape"),
    ("regex", "(a|b" * 500 + ")" * 500, "invalid regex"),
    ("regex", "a?" * 40_000, "too big"),
    ("grammar", 'root ::= root "a"', "it allows no text"),
    ("grammar", "root ::= a\na ::= b\nb ::= a", "it allows no text"),
    ("grammar", "root ::= " + "(" * 10_000 + '"a"' + ")" * 10_000, "recursion"),
    ("grammar", "root ::= a\n" + 'a ::= "b"\n' * 600, "it has 601 rules, but may have at most 500"),
    ("grammar", 'start: %json {"multipleOf": 1000003}', "is invalid"),
    ("grammar", 'root ::= "a\x00b"', "is invalid"),
]


def chain(length, link):
    """A schema of `length` definitions that refer to the next one."""
    definitions = {str(i): link({"$ref": f"#/$defs/{i + 1}"}) for i in range(length)}
    return json.dumps({"$defs": definitions | {str(length): {"type": "null"}}, "$ref": "#/$defs/0"})


LONG = {
    "references": chain(2000, lambda next_one: next_one),
    "properties": chain(800, lambda next_one: {"properties": {"a": next_one}, "required": ["a"]}),
    "rules": "root ::= r0\n" + "".join(f'r{i} ::= "a" r{i + 1}\n' for i in range(490)) + 'r490 ::= "b"',
}
COMPILE = (
    "import sys; from openvino_genai import StructuredOutputConfig; from tests.support.languages import grammars; "
    "grammars().compile(StructuredOutputConfig(**{sys.argv[1]: sys.stdin.read()}))"
)


@pytest.mark.parametrize(("kind", "source", "words"), REFUSED, ids=lambda text: text[:20])
def test_too_expensive_grammar_is_rejected_in_one_sentence(kind, source, words):
    with pytest.raises(ValueError, match=f"^structured_output_config[^\\n]*{words}[^\\n]*$") as caught:
        grammars().compile(StructuredOutputConfig(**{kind: source}))
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", LONG)
def test_long_reference_chain_does_not_crash_the_process(name):
    """llguidance recurses: without a larger stack the system kills the process."""
    kind = "grammar" if name == "rules" else "json_schema"
    command = [sys.executable, "-c", COMPILE, kind]
    done = subprocess.run(command, input=LONG[name], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode in (0, 1) and (not done.returncode or "ValueError: structured_output" in done.stderr)


def test_grammar_with_exhausted_lexer_is_compiled_again(monkeypatch):
    monkeypatch.setattr(grammar, "MAX_LEXER_STATES", 60)
    compiler, config = grammars(), StructuredOutputConfig(regex="(a|b|c|d)*a(a|b|c|d){12}")
    compiled, random, text = compiler.compile(config), np.random.default_rng(0), np.zeros(0, np.int64)
    state = compiled.state()
    with pytest.raises(ValueError, match=r"^structured_output_config is too complex for this text: [^\n]*$"):
        for _ in range(1000):
            state.mask(text)
            text = np.append(text, random.choice([0, 1, 3, 5]))
    assert compiler.compile(config) is not compiled
    assert compiler.compile(config).state().mask(text[:5]) is not None


LABELS = ["".join("abcd"[n // 4**place % 4] for place in range(6)) for n in range(0, 4**6, 41)]  # 100


def test_texts_of_a_grammar_do_not_fill_its_lexer_together(monkeypatch):
    """The lexer's states add up over all texts; one of these texts is half finished when others reach the limit."""
    monkeypatch.setattr(grammar, "MAX_LEXER_STATES", 80)
    compiler, config = grammars(), StructuredOutputConfig(regex="|".join(LABELS))
    tokens = {label: np.array([{"a": 0, "b": 1, "c": 3, "d": 5}[letter] for letter in label]) for label in LABELS}
    compiled, half = compiler.compile(config), compiler.compile(config).state()
    assert half.mask(tokens[LABELS[7]][:3]) is not None
    for label in LABELS:
        state = compiler.compile(config).state()
        for length in range(len(label)):
            assert tokens[label][length] in state.mask(tokens[label][:length]), label
        assert state.is_over(tokens[label])
    assert compiled.is_exhausted and compiler.compile(config) is not compiled
    assert half.allows(tokens[LABELS[7]][:3], int(tokens[LABELS[7]][3])) and half.is_over(tokens[LABELS[7]])


def test_grammar_too_complex_for_any_text_is_rejected_at_once(monkeypatch):
    monkeypatch.setattr(grammar, "MAX_LEXER_STATES", 3)
    with pytest.raises(ValueError, match=r"^structured_output_config\.regex is invalid: [^\n]*too complex"):
        grammars().compile(StructuredOutputConfig(regex="|".join(LABELS)))


def test_converted_grammar_is_kept(monkeypatch):
    """Converting 64 kB takes a tenth of a second, and a server compiles the grammar for each text."""
    compiler, calls = grammars(), []
    convert = grammar._lark
    monkeypatch.setattr(grammar, "_lark", lambda *source: calls.append(source) or convert(*source))
    config = StructuredOutputConfig(grammar='root ::= "a" "b"\n# a comment of this test')
    assert compiler.compile(config) is compiler.compile(config) and len(calls) == 1


def test_long_forced_text_is_encoded_in_part(monkeypatch):
    state = grammars().compile(StructuredOutputConfig(regex="ab" + "c" * 3000)).state()
    encoded = []
    monkeypatch.setattr(state._grammar, "encode", lambda text: encoded.append(text) or [0] * len(text))
    state.forced(np.zeros(0, np.int64), 8)
    assert [len(text) for text in encoded] == [grammar.MAX_FORCED_TEXT]


@pytest.mark.parametrize("regex", ["(a{1,1000}){1,1000}", "((a|b){1,1000}){1,1000}", "(.*a.{30}b.*)|(.*c.{40}d.*)"])
def test_exploding_expression_is_followed_or_ends_with_an_error(regex):
    state, text = grammars().compile(StructuredOutputConfig(regex=regex)).state(), np.zeros(0, np.int64)
    try:
        for _ in range(100):
            assert 0 in state.mask(text)
            text = np.append(text, 0)
    except ValueError as error:
        assert str(error).startswith("structured_output_config is too complex for this text: ")


# ---- random schemas -------------------------------------------------------------------------------------------------

LETTERS = [*string.printable[:95], '{"', '":', '",', "true", "ab", "12"]
END = len(LETTERS)
SCALARS = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.lists(st.sampled_from(["a", "ab", "b c", 1, 12, None, True]), min_size=1, max_size=3).map(lambda e: {"enum": e}),
    st.tuples(st.integers(-20, 20), st.integers(0, 100)).map(
        lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[0] + pair[1]}
    ),
    st.tuples(st.integers(0, 2), st.integers(0, 2)).map(
        lambda pair: {"type": "string", "minLength": pair[0], "maxLength": sum(pair)}
    ),
    st.just({"type": "string", "pattern": "^a+b?$", "maxLength": 4}),
)


def larger(schemas):
    lists = st.tuples(schemas, st.integers(0, 2)).map(
        lambda pair: {"type": "array", "items": pair[0], "minItems": pair[1], "maxItems": 2}
    )
    objects = st.dictionaries(st.sampled_from(["a", "b", "ab"]), schemas, max_size=3).flatmap(
        lambda properties: st.sets(st.sampled_from(["a", "b", "ab"])).map(
            lambda required: {
                "type": "object",
                "properties": properties,
                "required": sorted(required & properties.keys()),
                "additionalProperties": False,
            }
        )
    )
    return st.one_of(lists, objects, st.lists(schemas, min_size=1, max_size=2).map(lambda some: {"anyOf": some}))


def letters() -> Grammars:
    def encode(text: str) -> np.ndarray:
        return np.array([LETTERS.index(letter) for letter in text if letter in LETTERS], np.int64)

    pieces = {i: piece.encode() for i, piece in enumerate(LETTERS)}
    return Grammars(lambda: Tokens(pieces, frozenset({END}), encode), END + 1)


LETTER_GRAMMARS = letters()


def optional(letter):
    """An object with as many properties as are allowed."""
    properties = {f"{letter}{i}": {"type": "integer"} for i in range(grammar.MAX_PROPERTIES)}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def test_object_may_have_as_many_optional_properties_as_are_allowed():
    config = StructuredOutputConfig(json_schema=json.dumps(optional("a")))
    state, text = LETTER_GRAMMARS.compile(config).state(), '{"a7":1,"a900":2}'
    tokens = np.array([LETTERS.index(letter) for letter in text])
    for length, token in enumerate(tokens):
        assert token in state.mask(tokens[:length]), text[:length]
    assert state.is_over(tokens)


def test_schema_too_complex_after_its_forced_beginning_is_rejected_at_once():
    schema = json.dumps({"anyOf": [optional("a"), optional("b")]})
    with pytest.raises(ValueError, match=r"^structured_output_config\.json_schema is invalid: [^\n]*too complex"):
        LETTER_GRAMMARS.compile(StructuredOutputConfig(json_schema=schema))


@settings(max_examples=40, deadline=None)
@given(st.recursive(SCALARS, larger, max_leaves=4), st.integers(0, 2**32))
def test_random_schemas_give_valid_texts_and_rollback_restores_masks(schema, seed):
    source = json.dumps({**schema, "x-guidance": {"whitespace_flexible": False}})
    compiled = LETTER_GRAMMARS.compile(StructuredOutputConfig(json_schema=source))
    state, random, text = compiled.state({END}, {END}), np.random.default_rng(seed), np.zeros(0, np.int64)
    steps = 0
    while not state.is_over(text) and steps < 80:
        steps += 1
        mask = state.mask(text)
        allowed = [token for token in range(END + 1) if token in mask]
        assert allowed
        if END in allowed:
            jsonschema.validate(json.loads("".join(LETTERS[token] for token in text)), schema)
        text = np.append(text, random.choice(allowed))
        if random.random() < 0.2:  # as after a rejected draft
            text = text[: int(random.integers(len(text) + 1))]
            fresh = compiled.state({END}, {END}).mask(text)
            again = state.mask(text)
            assert (again is None) == (fresh is None)
            if again is not None:
                assert again.are_allowed == fresh.are_allowed and again.ids.tolist() == fresh.ids.tolist()
    if state.is_over(text):
        jsonschema.validate(json.loads("".join(LETTERS[token] for token in text if token != END)), schema)


def test_concurrent_compilation_restores_the_thread_stack_size():
    before = threading.stack_size()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(grammar._on_large_stack, lambda: time.sleep(0.2))
        time.sleep(0.1)
        second = pool.submit(grammar._on_large_stack, lambda: time.sleep(0.2))
        first.result(), second.result()
    assert threading.stack_size() == before
