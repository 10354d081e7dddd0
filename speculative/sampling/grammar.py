"""Grammars: masks of the tokens allowed next by a JSON schema, a regular expression or an EBNF grammar.

    grammar = Grammars(tokens, vocab_size).compile(StructuredOutputConfig(regex="[0-9]+"))
    state = grammar.state(stop_token_ids, stop_token_ids)
    state.mask(generated)  # the tokens that may follow

`GrammarState.mask` gets the whole generated text and rolls back to the first difference from the previous call.
Callers thus need not handle rejected draft tokens. llguidance checks the tokens as bytes. It is imported with the first
grammar.

Grammars come from clients, so time and memory are bounded: by checks before compilation, and by llguidance's limits
during compilation and the computation of masks. A text that reaches one of these limits ends with an error.
"""

import json
import math
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import numpy as np
from openvino_genai import StructuredOutputConfig

from speculative.error_text import one_line
from speculative.sampling import ebnf

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")

KINDS = ("json_schema", "regex", "grammar", "structural_tags_config")
OTHER_KINDS = ("compound_grammar",)
OPTIONS = '%llguidance { "no_forcing": true }'  # all tokens that spell the same bytes are allowed, not only the usual
KEPT_GRAMMARS, KEPT_TEXTS = 16, 1000  # compiled grammars that nobody uses; tokens of texts
MAX_SOURCE = 100_000  # characters of a grammar
MAX_RULES = 500  # of EBNF; the time to compile grows with the square
MAX_PROPERTIES = 1000  # of an object of a JSON schema, likewise
MAX_ROW = 5 * MAX_PROPERTIES  # of llguidance's parser, which has 4 items for each optional property that may follow
MAX_MULTIPLE = 1000  # the least common multiple of all multipleOf: each remainder is a state
MAX_LEXER_STATES = 20_000  # kept as long as the grammar, 1 to 2 kB each
LEXER_FUEL = 200_000  # to compile; llguidance's default is 1,000,000, which takes seconds
# Those that llguidance follows; it refuses others, which JSON Schema counts as annotations.
FORMATS = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid")
INSTANCES = ("const", "default", "enum", "examples")  # keywords of a JSON schema whose values are no schemas
NAMED_SCHEMAS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")  # schemas by name
STACK = 256 << 20  # bytes: llguidance overflows 8 MB on long chains of rules or references, which ends the process
_stack_size_lock = threading.Lock()  # the size is that of all new threads of the process
MAX_ERROR = 200  # characters of an error message
MAX_FORCED_TEXT = 1000  # characters of a forced text that are encoded at once
INSTALL = "structured_output_config needs llguidance; install it: pip install llguidance==1.9.1"


class NothingAllowed(ValueError):
    """The grammar allows no token of the model."""


class TooComplex(ValueError):
    """The texts of a grammar have reached a limit of its lexer."""


class Tokens(NamedTuple):
    """A tokenizer, as grammars use it."""

    pieces: dict[int, bytes]  # what each token adds to a text
    special: frozenset[int]  # tokens that a text leaves out, as "</s>"
    encode: Callable[[str], np.ndarray]  # a text's token ids, int64 [n]


class Grammars:
    """Compiles the grammars of requests for a model with `vocab_size` logits. The first one calls `tokens`."""

    def __init__(self, tokens: Callable[[], Tokens], vocab_size: int):
        self._tokens = tokens
        self._vocab_size = vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._compiled: WeakValueDictionary[str, Grammar] = WeakValueDictionary()
        self._kept_text = lru_cache(KEPT_GRAMMARS)(_text)  # to convert a long one takes a tenth of a second
        self._latest: deque[Grammar] = deque(maxlen=KEPT_GRAMMARS)  # references that keep them compiled
        self._lock = threading.Lock()

    def compile(self, config: StructuredOutputConfig) -> "Grammar":
        """The grammar of `config`. One that is still referenced is not compiled again. Raises ValueError if it is
        invalid or of an unsupported kind, and RuntimeError without llguidance."""
        kind, source = _single_kind(config)
        key = str(source)
        if (length := len(key)) > MAX_SOURCE:
            raise ValueError(
                f"structured_output_config.{kind} has {length:,} characters, but may have at most {MAX_SOURCE:,}"
            )
        try:
            text = self._kept_text(_Source(kind, key, source))
        except ImportError:
            raise RuntimeError(INSTALL) from None
        except (ValueError, RecursionError) as error:
            raise _invalid(kind, str(error)) from None
        return self._get(kind, text)

    def _get(self, kind: str, text: str) -> "Grammar":
        """The compiled grammar; a new one if its lexer is full."""
        grammar = self._compiled.get(text)
        if not grammar or grammar.is_exhausted:
            grammar = self._compiled[text] = self._new(kind, text)
            self._latest.append(grammar)
        return grammar

    def _new(self, kind: str, text: str) -> "Grammar":
        from llguidance import LLMatcher, LLParserLimits

        with self._lock:
            if not self._tokenizer:
                tokens = self._tokens()
                self._tokenizer, self._encoder = _tokenizer(tokens, self._vocab_size), _Encoder(tokens.encode)
        tokenizer = self._tokenizer
        limits = LLParserLimits(
            max_lexer_states=MAX_LEXER_STATES, initial_lexer_fuel=LEXER_FUEL, max_items_in_row=MAX_ROW
        )
        matcher = _on_large_stack(lambda: LLMatcher(tokenizer, text, log_level=0, limits=limits))
        if matcher.is_error():
            raise _invalid(kind, matcher.get_error())
        grammar = Grammar(matcher, self._vocab_size, self._encoder, partial(self._get, kind, text))
        try:
            state = grammar.state()
            first_mask = state.first_mask()
            state.check_beginning()
        except ValueError as error:
            raise _invalid(kind, str(error)) from None
        if first_mask is None or (first_mask.are_allowed and not len(first_mask.ids)):
            raise _invalid(kind, "it allows no text, or none that the model's tokens can spell")
        return grammar


class Grammar:
    """A compiled grammar. All its texts share a lexer, whose states add up; `renewed` gives one with a new lexer."""

    def __init__(
        self,
        matcher: "LLMatcher",
        vocab_size: int,
        encode: Callable[[str], list[int]],
        renewed: Callable[[], "Grammar"],
    ):
        self._matcher = matcher
        self.vocab_size = vocab_size
        self.encode = encode
        self.renewed = renewed  # compiles it again once it is exhausted
        self.is_exhausted = False  # whether a text has reached a limit of the lexer
        self._lock = threading.Lock()

    def matcher(self) -> "LLMatcher":
        """A matcher at the beginning of a text."""
        with self._lock:
            return self._matcher.deep_copy()

    def state(self, stop: Iterable[int] = (), special: Iterable[int] = ()) -> "GrammarState":
        """The state of a text that a token in `stop` ends. Tokens in `special` are not text."""
        return GrammarState(self, frozenset(stop), frozenset(special))


@dataclass(frozen=True)
class Mask:
    """The tokens that may follow a text: those in `ids` (int64 [n], ascending), or all others; whichever are fewer."""

    ids: np.ndarray
    are_allowed: bool

    @classmethod
    def of(cls, allowed: np.ndarray) -> "Mask":
        """The mask of `allowed` bool [V]."""
        are_allowed = 2 * int(np.count_nonzero(allowed)) <= len(allowed)
        return cls(np.flatnonzero(allowed if are_allowed else ~allowed), are_allowed)

    def __contains__(self, token: int) -> bool:
        place = int(self.ids.searchsorted(token))
        return (place < len(self.ids) and int(self.ids[place]) == token) == self.are_allowed


class GrammarState:
    """Position of a text, from its first generated token on, in its grammar."""

    def __init__(self, grammar: Grammar, stop: frozenset[int], special: frozenset[int]):
        size = grammar.vocab_size
        self._grammar = grammar
        self._matcher = grammar.matcher()
        self._is_renewed = False  # whether this text has exhausted a lexer before
        self._stop = stop
        self._stop_ids = [token for token in stop if token < size]
        self._never_allowed = [token for token in stop | special if token < size]
        self._text = np.zeros(0, np.int64)  # the longest recent text; later calls may pass its prefixes
        self._consumed = 0  # tokens of it that the matcher has consumed
        self._bits = np.zeros((1, size // 32 + 1), np.int32)  # one more than `size`: llguidance's end of text
        self._masks: dict[int, Mask] = {}  # after the first tokens of the text, by their number

    def mask(self, generated: np.ndarray) -> Mask | None:
        """The mask of tokens that may follow `generated` (int64 [m]), empty if the vocabulary cannot continue the text;
        None after its end. Raises ValueError if `generated` is not allowed, and TooComplex."""
        return self._within_limits(lambda: self._mask(generated))

    def first_mask(self) -> Mask | None:
        """The mask of the first token. Raises TooComplex even if only other texts have filled the lexer."""
        return self._mask(np.zeros(0, np.int64))

    def check_beginning(self) -> None:
        """Raise ValueError if the place after the forced beginning, such as the "{" of an object, exceeds a limit."""
        forced = self._forced(np.zeros(0, np.int64), MAX_FORCED_TEXT)
        self._advance(np.array(forced, np.int64))
        self._check_limits()

    def _mask(self, generated: np.ndarray) -> Mask | None:
        self._drop_stale_masks(generated)
        if len(generated) not in self._masks:
            if not self._advance(generated) or self._is_over():
                return None
            self._masks[len(generated)] = self._compute_mask()
        return self._masks[len(generated)]

    def allows(self, generated: np.ndarray, token: int) -> bool:
        """Whether `token` may follow `generated`. Computes no mask."""
        return self._within_limits(lambda: self._allows(generated, token))

    def _allows(self, generated: np.ndarray, token: int) -> bool:
        self._drop_stale_masks(generated)
        if mask := self._masks.get(len(generated)):
            return token in mask
        if not self._advance(generated) or self._is_over():
            return False
        if token in self._stop:
            return bool(self._matcher.is_accepting())
        return token not in self._never_allowed and self._matcher.validate_tokens([token]) == 1

    def is_over(self, generated: np.ndarray) -> bool:
        """Whether no token can follow `generated`: the grammar is complete, or the last token ends the text."""
        return self._within_limits(lambda: not self._advance(generated) or self._is_over())

    def forced(self, generated: np.ndarray, most: int) -> list[int]:
        """The tokens, up to `most`, that follow `generated` if the next bytes are certain, in the tokenizer's encoding.
        Other tokens may spell the same bytes."""
        return self._within_limits(lambda: self._forced(generated, most))

    def _forced(self, generated: np.ndarray, most: int) -> list[int]:
        if not self._advance(generated) or self._is_over():
            return []
        text = self._matcher.compute_ff_bytes().decode("utf-8", "ignore")
        self._check_limits()
        tokens = self._grammar.encode(text[:MAX_FORCED_TEXT])[:most] if text else []
        usable = next((i for i, token in enumerate(tokens) if token in self._never_allowed), len(tokens))
        return tokens[: self._matcher.validate_tokens(tokens[:usable])] if usable else []

    def forget(self, before: int) -> None:
        """Free the results for texts of less than `before` tokens."""
        self._masks = {length: mask for length, mask in self._masks.items() if length >= before}

    def _within_limits(self, compute: Callable[[], T]) -> T:
        """What `compute` returns, with a new lexer if other texts have filled this one: each text may fill a lexer."""
        if self._grammar.is_exhausted:
            self._renew()
        try:
            return compute()
        except TooComplex:
            if self._is_renewed:
                raise
            self._is_renewed = True
            self._renew()
            return compute()

    def _renew(self) -> None:
        self._grammar = self._grammar.renewed()
        self._matcher, self._consumed = self._grammar.matcher(), 0

    def _is_over(self) -> bool:
        return bool(self._matcher.is_stopped() and self._matcher.is_accepting())  # otherwise a dead end

    def _drop_stale_masks(self, generated: np.ndarray) -> None:
        """Drop the masks computed after the common prefix of `generated` and the text of the previous call."""
        length = min(len(generated), len(self._text))
        differing = np.flatnonzero(generated[:length] != self._text[:length])
        common = int(differing[0]) if len(differing) else length
        if common < len(generated):
            self._text = generated.copy()
            self._masks = {length: mask for length, mask in self._masks.items() if length <= common}
            self._rollback(common)

    def _rollback(self, length: int) -> None:
        """Roll the matcher back to the first `length` tokens."""
        if length < self._consumed:
            rolled_back = self._matcher.rollback(self._consumed - length)  # not after a dead end
            self._matcher, self._consumed = (self._matcher, length) if rolled_back else (self._grammar.matcher(), 0)

    def _advance(self, generated: np.ndarray) -> bool:
        """Advance the matcher to `generated`. False if the text ended before."""
        self._drop_stale_masks(generated)
        self._rollback(len(generated))
        rest = generated[self._consumed :].tolist()
        end = next((i for i, token in enumerate(rest) if token in self._stop), len(rest))
        count = self._matcher.try_consume_tokens(rest[:end]) if end else 0
        self._consumed += count
        if count < end and not self._is_over():
            self._check_limits()
            raise ValueError(
                self._error() or f"the grammar does not allow token {rest[count]} after {self._consumed} others"
            )
        return self._consumed == len(generated)

    def _compute_mask(self) -> Mask:
        matcher, bits = self._matcher, self._bits
        accepting = matcher.is_accepting()
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self._is_dead_end:
            return Mask(np.zeros(0, np.int64), True)
        self._check_limits()
        size = self._grammar.vocab_size
        allowed = np.unpackbits(bits.view(np.uint8)[0], count=size, bitorder="little").view(bool)
        allowed[self._never_allowed] = False
        allowed[self._stop_ids] = accepting
        return Mask.of(allowed)

    @property
    def _is_dead_end(self) -> bool:
        return "NoExtensionBias" in self._matcher.get_error()

    def _check_limits(self) -> None:
        """Raise ValueError if the matcher has exceeded a limit, after which it is of no use: TooComplex for a limit of
        the lexer, which all texts share."""
        if self._matcher.is_error() and not self._is_dead_end:
            message = f"structured_output_config is too complex for this text: {self._error()}"
            if "lexer error" not in message:
                raise ValueError(message)
            self._grammar.is_exhausted = True
            raise TooComplex(message)

    def _error(self) -> str:
        message = self._matcher.get_error()
        return _first_sentence(message) if message else ""


class _Encoder:
    """Encodes a text as a part of another. A tokenizer may add a space at the beginning of a text: the text is encoded
    after a newline."""

    def __init__(self, encode: Callable[[str], np.ndarray]):
        self._encode = encode
        self._newline = encode("\n").tolist()
        self._encoded: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        if text not in self._encoded:
            if len(self._encoded) >= KEPT_TEXTS:
                self._encoded.clear()
            tokens, begin = self._encode(f"\n{text}").tolist(), len(self._newline)
            has_newline = tokens[:begin] == self._newline
            self._encoded[text] = tokens[begin:] if has_newline else self._encode(text).tolist()
        return self._encoded[text]


class _Tokenizer:
    """A tokenizer for llguidance. Its end of text is a token that the model does not have, as the tokens that end a
    text depend on the request."""

    bos_token_id = None

    def __init__(self, tokens: Tokens, vocab_size: int):
        pieces = tokens.pieces
        self.tokens = [pieces.get(token, b"") for token in range(vocab_size)] + [b"<end of text>"]
        self.eos_token_id = vocab_size
        self.special_token_ids = sorted({vocab_size, *(token for token in tokens.special if token < vocab_size)})
        self._encode = tokens.encode

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode("utf-8", "replace")).tolist()


def _tokenizer(tokens: Tokens, vocab_size: int) -> "LLTokenizer":
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Tokenizer(tokens, vocab_size)))


def _single_kind(config: StructuredOutputConfig) -> tuple[str, Any]:
    """The kind of grammar in `config`, and the grammar."""
    for kind in OTHER_KINDS:
        if getattr(config, kind):
            raise ValueError(f"structured_output_config.{kind} is not supported here: use {', '.join(KINDS)}")
    kinds = [kind for kind in KINDS if getattr(config, kind) is not None]
    if len(kinds) != 1:
        raise ValueError(
            f"structured_output_config has {' and '.join(kinds) or 'no grammar'}, but needs one of {', '.join(KINDS)}"
        )
    return kinds[0], getattr(config, kinds[0])


@dataclass(frozen=True)
class _Source:
    """A grammar of some kind, equal to others with the same text."""

    kind: str
    text: str
    value: Any = field(compare=False)


def _text(source: _Source) -> str:
    """The grammar as llguidance compiles it. Raises ValueError."""
    parts: list[str] = []
    is_tag = source.kind == "structural_tags_config"
    start = f"start: {_tag(source.value, parts)}" if is_tag else _lark(source.kind, source.value)
    grammars = [{"lark_grammar": f"{OPTIONS}\n{start}"}]
    grammars += [{"name": f"part_{i}", "lark_grammar": f"{OPTIONS}\n{part}"} for i, part in enumerate(parts)]
    return json.dumps({"grammars": grammars})


def _lark(kind: str, source: str) -> str:
    """The grammar in llguidance's language. Raises ValueError."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if kind == "json_schema":
        return f"start: %json {json.dumps(_schema(source))}"
    if kind == "regex":
        return json.loads(LLMatcher.grammar_from_regex(source))["grammars"][0]["lark_grammar"]
    if (rules := source.count("::=")) > MAX_RULES:
        raise ValueError(f"it has {rules:,} rules, but may have at most {MAX_RULES:,}")
    rewritten, names = ebnf.rewrite(source)
    try:
        return gbnf_to_lark(rewritten)
    except Exception as error:  # llguidance raises no other
        raise ValueError(ebnf.RENAMED.sub(lambda found: names.get(found[0], found[0]), str(error))) from None


def _tag(tag: Any, parts: list[str]) -> str:
    """A structural tag in llguidance's language. Grammars in it are added to `parts`."""
    kinds = StructuredOutputConfig
    if isinstance(tag, kinds.ConstString):
        return _literal(tag.value)
    for kind, name in ((kinds.JSONSchema, "json_schema"), (kinds.Regex, "regex"), (kinds.EBNF, "grammar")):
        if isinstance(tag, kind):
            return _part(_lark(name, tag.value), parts)
    if isinstance(tag, kinds.Concat):
        return f"({' '.join(_tag(element, parts) for element in tag.elements)})"
    if isinstance(tag, kinds.Union):
        return f"({' | '.join(_tag(element, parts) for element in tag.elements)})"
    if isinstance(tag, kinds.Tag):
        any_text = isinstance(tag.content, kinds.AnyText) and tag.end
        content = _part(_text_until(tag.end), parts) if any_text else f"{_tag(tag.content, parts)} {_literal(tag.end)}"
        return f"({_literal(tag.begin)} {content})"
    if isinstance(tag, kinds.TagsWithSeparator):
        element = f"({' | '.join(_tag(element, parts) for element in tag.tags)})"
        more = "" if tag.stop_after_first else f" ({_literal(tag.separator)} {element})*"
        return f"({element}{more}){'' if tag.at_least_one else '?'}"
    raise ValueError(f"{type(tag).__name__} is not supported")


def _part(lark: str, parts: list[str]) -> str:
    """A reference to the grammar `lark`, which is added to `parts`."""
    parts.append(lark)
    return f"@part_{len(parts) - 1}"


def _text_until(end: str) -> str:
    """Any text up to the first `end`, included."""
    return f"start[lazy]: ANY {_literal(end)}\nANY: /(?s:.*)/"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") if text else ""


def _schema(source: str) -> object:
    """A JSON schema that llguidance compiles in bounded time. Raises ValueError."""
    multiples: list[Fraction] = []

    def check(part: dict) -> dict:
        number, properties = part.get("multipleOf"), part.get("properties")
        if isinstance(number, (int, float)) and number > 0:
            multiples.append(Fraction(repr(+number)))
        if isinstance(properties, dict) and len(properties) > MAX_PROPERTIES:
            raise ValueError(f"an object has {len(properties):,} properties, but may have at most {MAX_PROPERTIES:,}")
        return part

    try:
        schema = json.loads(source, object_hook=check)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _drop_unknown_formats(schema)
    scale = math.lcm(*(number.denominator for number in multiples))
    common = math.lcm(*(int(number * scale) for number in multiples))
    if common > MAX_MULTIPLE:
        raise ValueError(f"the least common multiple of all multipleOf is above {MAX_MULTIPLE:,} of their digits")
    return schema


def _drop_unknown_formats(schema: object) -> None:
    """Remove each `format` that llguidance does not know from a parsed JSON schema, which may be nested deeply."""
    parts = [(schema, False)]  # and whether the keys are names
    while parts:
        part, has_names = parts.pop()
        if isinstance(part, list):
            parts += [(element, False) for element in part]
        elif isinstance(part, dict):
            name = None if has_names else part.get("format")
            if isinstance(name, str) and name not in FORMATS:
                del part["format"]
            parts += [
                (value, key in NAMED_SCHEMAS and not has_names)
                for key, value in part.items()
                if has_names or key not in INSTANCES
            ]


def _on_large_stack(build: Callable[[], "LLMatcher"]) -> "LLMatcher":
    with _stack_size_lock:
        before = threading.stack_size(STACK)
        try:
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(build).result()
        finally:
            threading.stack_size(before)


def _invalid(kind: str, message: str) -> ValueError:
    return ValueError(f"structured_output_config.{kind} is invalid: {_first_sentence(message)}")


def _first_sentence(message: str) -> str:
    """The message in one line, without the parser state and grammar that llguidance appends."""
    message = re.sub(r"^at \d+\(\d+\): |failed to compile JSON schema: ", "", message.split("<state>")[0])
    return one_line(ValueError(re.split(r"\n +1 \| ", message)[0]))[:MAX_ERROR]
