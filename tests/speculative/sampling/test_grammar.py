"""The tokens that a grammar allows, compared with sets of words, while texts are extended and rolled back as drafts."""

import json
import sys
import weakref

import numpy as np
import openvino_genai
import pytest
from openvino_genai import StructuredOutputConfig

from speculative.decoder import grammars_of
from speculative.sampling import grammar
from speculative.sampling.grammar import Grammars, NothingAllowed, Tokens
from tests.support.languages import PIECES, REGEXES, STOP, allowed_after, grammars, spelled, words
from tests.support.paths import MAIN

EBNF = 'root ::= "a" b? "e"\nb ::= "b" | "c"'
EBNF_WORDS = {"ae", "abe", "ace"}


def ids(*tokens):
    return np.array(tokens, np.int64)


def state_of(stop=(STOP,), special=(STOP,), **kind):
    return grammars().compile(StructuredOutputConfig(**kind)).state(stop, special)


def allowed(state, *tokens):
    mask = state.mask(ids(*tokens))
    assert len(mask.ids) <= 4
    return [token for token in range(8) if token in mask]


def check_walks(state, language, stop, walks=60):
    """Compare random texts that are extended and sometimes rolled back, as drafts are."""
    random = np.random.default_rng(0)
    for _ in range(walks):
        text: list[int] = []
        while len(spelled(text)) < 6 and (expected := allowed_after(language, text, stop)) not in ([], [STOP]):
            if random.random() < 0.5:  # whether a token is allowed is also known without a mask
                assert [token for token in range(8) if state.allows(ids(*text), token)] == expected
            assert allowed(state, *text) == expected
            assert [token for token in range(8) if state.allows(ids(*text), token)] == expected
            assert not state.is_over(ids(*text))
            token = int(random.choice(expected))
            if token == STOP:
                assert state.is_over(ids(*text, token)) and state.mask(ids(*text, token)) is None
                break
            text.append(token)
            if random.random() < 0.3:
                text = text[: int(random.integers(len(text) + 1))]
        else:
            assert state.is_over(ids(*text)) == (allowed_after(language, text, stop) in ([], [STOP]))


@pytest.mark.parametrize("stop", [True, False], ids=["may end", "no stop token"])
@pytest.mark.parametrize("name", REGEXES)
def test_allowed_tokens_continue_some_word_of_the_language(name, stop):
    check_walks(state_of([STOP] * stop, regex=REGEXES[name]), words(REGEXES[name]), stop)


def test_ebnf_grammar_is_read_as_by_genai():
    check_walks(state_of(grammar=EBNF), EBNF_WORDS, stop=True)


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('root ::= "a"\n  b?\n  "e"  # the end\nb ::=\n  "b"\n  | "c"', EBNF_WORDS),
        ('A ::= "a"\na ::= "b"\nroot ::= A a', {"ab"}),
        ('a-b ::= "a"\na_b ::= "b"\nr.c ::= "c"\nstart ::= a-b a_b\nroot ::= start r.c', {"abc"}),
        (r'root ::= [\u0061-\u0062\]\-\^]{2} "\u0063d\x65"', {"aacde", "abcde", "bacde", "bbcde"}),
        (r"root ::= [^\^a\U00000062]{2}", {f"{one}{other}" for one in "cde" for other in "cde"}),
    ],
)
def test_ebnf_has_rules_of_any_name_and_layout_and_escapes(grammar, words):
    """As in GenAI: each rule and each character is the one that is written."""
    check_walks(state_of(grammar=grammar), words, stop=True)


def test_errors_of_ebnf_name_the_rules_as_written():
    for source, message in (("root ::= Item-1", "Rule 'Item-1' not found"), (r'root ::= "\q"', "invalid escape \\\\q")):
        with pytest.raises(ValueError, match=message):
            state_of(grammar=source)


S = StructuredOutputConfig
B_OR_C = S.Tag("a", S.Union([S.ConstString("b"), S.ConstString("c")]), "d")


@pytest.mark.parametrize(("at_least_one", "words"), [(True, {"eabda", "eacda"}), (False, {"ea", "eabda", "eacda"})])
def test_structural_tags_are_read_as_by_genai(at_least_one, words):
    tags = S.TagsWithSeparator([B_OR_C], "e", at_least_one=at_least_one, stop_after_first=True)
    tag = S.Concat([S.ConstString("e"), tags, S.ConstString("a")])
    check_walks(state_of(structural_tags_config=tag), words, stop=True)


def test_structural_tags_may_follow_each_other():
    state = state_of(structural_tags_config=S.TagsWithSeparator([B_OR_C], "e", at_least_one=True))
    assert allowed(state, 0, 1, 5) == allowed(state, 0, 3, 5, 6, 0, 1, 5) == [6, STOP]


def test_structural_tags_contain_regular_expressions_and_grammars():
    tag = S.Concat([S.Regex("d?a"), S.EBNF(EBNF), S.ConstString("c")])
    found = {f"{first}{word}c" for first in ("a", "da") for word in EBNF_WORDS}
    check_walks(state_of(structural_tags_config=tag), found, stop=True)


def test_any_text_in_a_tag_ends_at_the_first_end():
    state = state_of(structural_tags_config=S.Tag("a", S.AnyText(), "d"))
    check_walks(state, words("a[abce]*d"), stop=True)


def test_text_after_the_end_of_any_text_follows_its_grammar():
    """Also where one token has the end and the beginning of what follows, as "bc" here."""
    state = state_of(structural_tags_config=S.Concat([S.Tag("", S.AnyText(), "b"), S.Regex("ce|d")]))
    check_walks(state, words("[acde]*b(ce|d)"), stop=True)


def test_unsupported_structural_tag_is_rejected():
    with pytest.raises(ValueError, match="AnyText is not supported"):
        state_of(structural_tags_config=S.Concat([S.Regex("a"), S.AnyText()]))


def test_stop_token_is_not_part_of_the_text():
    """ "c" is a stop token here: it may not be written where the grammar has a c."""
    state = state_of([3], [3], regex="a(c|b)?")
    assert allowed(state, 0) == [1, 3]
    assert state.is_over(ids(0, 3))
    assert allowed(state_of([3], [3], regex="(ac|ab)e"), 0) == [1]


def test_forced_tokens_use_tokenizer_spelling_and_others_are_allowed():
    state = state_of(regex="abcd(a|b)")
    assert state.forced(ids(), 8) == [2, 3, 5]
    assert allowed(state) == [0, 2]
    assert state.forced(ids(0), 8) == [4, 5]
    assert state.forced(ids(2, 3, 5), 8) == [] and state.forced(ids(2, 3, 5, 0), 8) == []
    assert allowed(state, 0) == [1, 4]


def test_dead_end_allows_nothing_and_other_texts_continue():
    state = state_of(regex="ab(x|y)|ac")
    assert allowed(state, 0, 1) == [] and not state.is_over(ids(0, 1))
    assert allowed(state, 0) == [1, 3]
    assert state.is_over(ids(0, 3))


def test_disallowed_token_is_an_error_and_other_texts_continue():
    state = state_of(regex="abc")
    with pytest.raises(ValueError, match="the grammar does not allow token 5 after 1 others"):
        state.mask(ids(0, 5))
    assert allowed(state, 0) == [1, 4]


def test_special_tokens_are_not_text():
    """A text may contain "<|user|>", but not the token of that name."""
    tokenizer = openvino_genai.Tokenizer(str(MAIN))
    compiler = grammars_of(tokenizer, 4096)
    state = compiler.compile(StructuredOutputConfig(regex="<[|]user[|]>")).state([0], [0])
    named = tokenizer.get_vocab()[b"<|user|>"]
    assert named not in state.mask(ids())
    assert 0 not in compiler.compile(StructuredOutputConfig(regex="(.|\n)*")).state([], [0]).mask(ids())


def test_grammar_is_compiled_once():
    compiler = grammars()
    first = compiler.compile(StructuredOutputConfig(regex="a+"))
    assert compiler.compile(StructuredOutputConfig(regex="a+")) is first
    for n in range(grammar.KEPT_GRAMMARS):
        compiler.compile(StructuredOutputConfig(regex=f"a{{{n + 1}}}"))
    assert compiler.compile(StructuredOutputConfig(regex="a+")) is first  # as it is referenced
    kept = weakref.ref(first)
    del first
    for n in range(grammar.KEPT_GRAMMARS):
        compiler.compile(StructuredOutputConfig(regex=f"b{{{n + 1}}}"))
    assert kept() is None


@pytest.mark.parametrize(
    ("kind", "source", "words"),
    [
        ("regex", "a(", "unclosed group"),
        ("regex", "", "it allows no text"),
        ("regex", "x", "none that the model's tokens can spell"),
        ("json_schema", "{", "Expecting property name"),
        ("json_schema", "7", "schema must be an object or boolean"),
        ("json_schema", '{"type": "foo"}', "Invalid type: foo"),
        ("json_schema", '{"allOf": [{"type": "string"}, {"type": "integer"}]}', "incompatible types"),
        ("grammar", "", "No 'root' rule found"),
        ("grammar", "root ::= other", "Rule 'other' not found"),
    ],
)
def test_invalid_grammar_gives_one_sentence_error(kind, source, words):
    with pytest.raises(ValueError, match=rf"^structured_output_config.{kind} is invalid: [^\n]*{words}[^\n]*$"):
        grammars().compile(StructuredOutputConfig(**{kind: source}))


def test_unsupported_grammar_kind_gives_one_sentence_error():
    with pytest.raises(ValueError, match="has no grammar, but needs one of json_schema, regex, grammar"):
        grammars().compile(StructuredOutputConfig())
    two = StructuredOutputConfig(regex="a")
    two.json_schema = json.dumps({"type": "object"})
    with pytest.raises(ValueError, match="has json_schema and regex, but needs one of"):
        grammars().compile(two)
    tags = StructuredOutputConfig(compound_grammar=StructuredOutputConfig.Regex("a"))
    with pytest.raises(ValueError, match="compound_grammar is not supported here: use json_schema, regex, grammar"):
        grammars().compile(tags)


def test_missing_llguidance_names_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RuntimeError, match=r"install it: pip install llguidance==1\.9\.1$"):
        grammars().compile(StructuredOutputConfig(regex="a"))


def test_tokenizer_is_read_only_for_the_first_grammar():
    reads = []

    def tokens():
        reads.append(True)
        return Tokens({i: piece.encode() for i, piece in enumerate(PIECES)}, frozenset(), lambda text: ids())

    compiler = Grammars(tokens, 8)
    assert not reads
    for regex in ("a", "b"):
        compiler.compile(StructuredOutputConfig(regex=regex))
    assert len(reads) == 1


def test_nothing_allowed_is_a_value_error():
    assert issubclass(NothingAllowed, ValueError)


OTHER_FORMATS = ["binary", "byte", "double", "float", "idn-email", "idn-hostname", "int32", "int64", "iri",
                 "iri-reference", "json-pointer", "password", "path", "regex", "relative-json-pointer",
                 "uri-reference", "uri-template"]  # fmt: skip


def test_formats_are_those_of_llguidance():
    from llguidance import LLMatcher

    schemas = {name: {"type": "string", "format": name} for name in [*grammar.FORMATS, *OTHER_FORMATS]}
    problems = {
        name: LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
        for name, schema in schemas.items()
    }
    assert [name for name, problem in problems.items() if not problem] == list(grammar.FORMATS)


def test_unknown_format_of_json_schema_is_an_annotation():
    """In every subschema, but not in instances, nor in a property of that name."""
    path, uuid = {"type": "string", "format": "path"}, {"type": "string", "format": "uuid"}
    names = ["format", "const", "default", "enum", "examples", "properties"]

    def schema(part):
        instances = {"const": path, "default": path, "enum": [path], "examples": [path]}
        nested = {"items": part, "anyOf": [part, uuid], "$defs": {"properties": part, "x": {"properties": {"y": part}}}}
        return {"properties": dict.fromkeys(names, part), **instances, **nested, "format": part}

    assert grammar._schema(json.dumps(schema(path))) == schema({"type": "string"})
