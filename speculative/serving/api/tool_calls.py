"""Tool calls in generated text: the format of a chat template, the structural tag of forced calls, and an incremental
parser.

    parser = ToolParser(detect_tool_format(chat_template), names={"add"})
    for piece in pieces:
        parser.feed(piece)  # Text, Call and Arguments
    parser.end()

The formats are those of vLLM's tool parsers (hermes, llama3_json, mistral) and the generic one of minja, which
GenAI uses for chat templates without tool support.
"""

import json
import random
import re
import string
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from openvino_genai import StructuredOutputConfig

Tags = StructuredOutputConfig
SPACE = " \t\r\n"
BETWEEN = SPACE + "[],;}"  # what may be between calls
KEYS = ("arguments", "parameters")
LABELS = ("name", "type", "id")  # other keys of a call
JSON = json.JSONDecoder(strict=False)  # which allows line breaks in strings
STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
NO_MATCH = -1


class Text(NamedTuple):
    """Text outside calls."""

    text: str


class Call(NamedTuple):
    """The beginning of call `number`, from 0 on."""

    number: int
    id: str
    name: str


class Arguments(NamedTuple):
    """A piece of the arguments (JSON) of call `number`."""

    number: int
    text: str


class ToolFormat(NamedTuple):
    """The format of tool calls of a family of models."""

    marker: str = ""  # begins calls
    end: str = ""  # ends them
    openings: tuple[tuple[str, ...], ...] = ()  # begin calls at the beginning of a text, without marker; space may be
    # between their parts
    arguments: str = "arguments"  # the key of the arguments
    frame: tuple[str, str] = ("", "")  # around all calls that a grammar forces
    around: tuple[str, str] = ("", "")  # around each of them
    separator: str | None = None  # between them; None: one call only
    short_ids: bool = False  # of nine letters and digits, as Mistral's templates require
    variable: str = "tools"  # of the chat template, with the tools


FENCE = "```"
HERMES = ToolFormat(
    "<tool_call>",
    "</tool_call>",
    openings=(("{",), (FENCE, "{"), (f"{FENCE}json", "{")),  # as Qwen2.5-Coder writes most calls
    around=("<tool_call>\n", "\n</tool_call>"),
    separator="\n",
)
SMOLLM3 = HERMES._replace(variable="xml_tools")
LLAMA = ToolFormat("<|python_tag|>", openings=(("{",),), arguments="parameters")
MISTRAL = ToolFormat("[TOOL_CALLS]", openings=(("[", "{"),), frame=("[", "]"), separator=", ", short_ids=True)
# for templates without tool support
GENERIC = ToolFormat(openings=(("{", '"tool_calls"', ":", "["),), frame=('{"tool_calls": [', "]}"), separator=", ")


def detect_tool_format(chat_template: str) -> ToolFormat | None:
    """The format of calls in a chat template; None if it is not supported."""
    if "<tool_call>" in chat_template:
        other = ("<function=", "<arg_key>")  # Qwen3-Coder's, GLM's
        if any(mark in chat_template for mark in other):
            return None
        return SMOLLM3 if "xml_tools" in chat_template else HERMES
    if "[TOOL_CALLS]" in chat_template:
        return None if "[ARGS]" in chat_template else MISTRAL  # from tokenizer version 11 on
    if "<|python_tag|>" in chat_template or "Environment: ipython" in chat_template:
        return LLAMA
    return None if "tools" in chat_template else GENERIC


def forced_calls_tag(
    tool_format: ToolFormat, functions: Mapping[str, str], multiple: bool, answer: str | None = None
) -> Any:
    """The structural tag of a call or, if `multiple`, one or more, of `functions`: the JSON schemas of their arguments
    by name. With `answer`, a JSON schema, an answer that follows it is allowed, too."""
    (begin, end), key = tool_format.around, tool_format.arguments
    tags = [
        Tags.Tag(f'{begin}{{"name": {json.dumps(name)}, "{key}": ', Tags.JSONSchema(schema), f"}}{end}")
        for name, schema in functions.items()
    ]
    single = not multiple or tool_format.separator is None
    calls = Tags.TagsWithSeparator(tags, tool_format.separator or "", at_least_one=True, stop_after_first=single)
    framed = Tags.Concat([Tags.ConstString(tool_format.frame[0]), calls, Tags.ConstString(tool_format.frame[1])])
    return Tags.Union([framed, Tags.JSONSchema(answer)]) if answer else framed


def new_id(tool_format: ToolFormat) -> str:
    if tool_format.short_ids:
        return "".join(random.choices(string.ascii_letters + string.digits, k=9))
    return f"call_{uuid.uuid4().hex}"


Event = Text | Call | Arguments


class ToolParser:
    """Finds the calls of functions called `names` in one text. A call is recognized once its name and the beginning of
    its arguments have been read; the arguments are then passed on piece by piece, valid or not. All else is text.
    Unless `multiple`, the calls after the first are dropped. If calls are `forced`, there is nothing else to find."""

    def __init__(self, tool_format: ToolFormat, names: Set[str], multiple: bool = True, forced: bool = False):
        self.calls = 0  # so far
        self.drops_calls = False  # whether the text so far ends in a call that is dropped
        self._allow_multiple, self._forced = multiple, forced
        self._format = tool_format
        self._names = names
        self._end = tool_format.end  # of the calls that are parsed
        self._rest = ""  # text that was fed but not yet passed on
        self._parse_state: Callable[[], Iterable[Event]] = self._begin  # parses `_rest`
        self._position = 0  # in `_rest`, from which `_parse_state` continues
        self._only_space = True  # since the beginning or the last call
        self._first_call = 0  # number of the first call since the last marker
        self._scan, self._scanned = _Scan(), 0

    def feed(self, piece: str) -> list[Event]:
        """The events that this piece of the text completes."""
        self._rest += piece
        events: list[Event] = []
        while True:
            state = self._parse_state, self._position, len(self._rest)
            events += filter(self._is_kept, self._parse_state())
            if state == (self._parse_state, self._position, len(self._rest)):
                return events

    def end(self) -> list[Event]:
        """The events after the last piece. The beginning of a call is text only if it may be an answer: if there are no
        calls before it, and none are forced."""
        in_call = self._parse_state not in (self._begin, self._text)
        is_dropped = self._forced or (self.calls and (in_call or self._only_space))
        rest, self._rest = "" if is_dropped else self._rest, ""
        begins_call = self._parse_state in (self._call, self._unordered_call)
        begins_call |= self._parse_state == self._between and self.calls == self._first_call
        self.drops_calls |= begins_call and self.calls > 0 and not self._allow_multiple
        return [Text(rest)] if rest else []

    def _is_kept(self, event: Event) -> bool:
        self.drops_calls = not self._allow_multiple and not isinstance(event, Text) and event.number > 0
        return not self.drops_calls

    def _begin(self) -> Iterable[Event]:
        ends = [(opening, _match(self._rest, 0, opening)) for opening in self._format.openings]
        found = [(opening, end) for opening, end in ends if end is not None and end != NO_MATCH]
        if not self._rest or (not found and any(end is None for _, end in ends)):
            return
        self._parse_state = self._text
        for opening, end in found:  # one at most
            self._position = end - (opening[-1] == "{")
            self._end = FENCE if opening[0].startswith(FENCE) else ""
            self._parse_state = self._between
        yield from ()

    def _text(self) -> Iterable[Event]:
        marker, at = self._format.marker, self._rest.find(self._format.marker) if self._format.marker else -1
        text = self._rest[:at] if at >= 0 else self._rest[: len(self._rest) - held_back(self._rest, marker)]
        is_space = self._only_space and not text.strip(SPACE)
        if at >= 0:
            self._end = self._format.end
            self._rest, self._position, self._first_call, self._parse_state = (
                self._rest[at:],
                len(marker),
                self.calls,
                self._between,
            )
        elif not is_space:
            self._rest = self._rest[len(text) :]
        if text and not is_space:
            self._only_space = False
            yield Text(text)

    def _between(self) -> Iterable[Event]:
        """Before a call, or after all of them."""
        rest, end = self._rest, self._end
        while self._position < len(rest) and rest[self._position] in BETWEEN:
            self._position += 1
        candidate = rest[self._position : self._position + len(end)]
        if self._position == len(rest) or (candidate != end and end.startswith(candidate)):
            return
        if rest[self._position] == "{":
            self._parse_state = self._call
        elif self.calls == self._first_call:
            yield from self._not_a_call()
        else:
            self._advance(self._position + (len(end) if candidate == end else 0), self._text)

    def _call(self) -> Iterable[Event]:
        found = _beginning_of_call(self._rest, self._position)
        if found is None:
            return
        name, at = found
        if name in self._names:
            self._advance(at, self._arguments)
            yield self._new_call(name)
        elif self._end != self._format.end:  # without the marks of this format, other JSON is an answer
            yield from self._not_a_call()
        else:
            self._scan, self._scanned, self._parse_state = _Scan(), self._position, self._unordered_call

    def _unordered_call(self) -> Iterable[Event]:
        """A call with other keys, or with its keys in another order."""
        end = self._scan.end(self._rest, self._scanned)
        self._scanned = len(self._rest)
        if end is None:
            return
        source = self._rest[self._position : end]
        try:
            call = {key: (value, source[slice(*place)]) for key, value, place in _members(source)}
        except (ValueError, RecursionError, IndexError):
            call = {}
        name: Any = call.get("name", (None,))[0]
        found = (call[key] for key in KEYS if key in call and call[key][0] is not None)
        none: tuple[Any, str] = ({}, "{}") if call.keys() <= {*LABELS, *KEYS} else (None, "")
        arguments, as_text = next(found, none)
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict | str):
            yield from self._not_a_call()
            return
        self._advance(end, self._between)
        yield self._new_call(name)
        as_text = arguments.encode("utf-8", "replace").decode() if isinstance(arguments, str) else as_text
        yield Arguments(self.calls - 1, as_text)

    def _arguments(self) -> Iterable[Event]:
        end = self._scan.end(self._rest)
        text = self._rest[:end]
        self._advance(len(text), self._arguments if end is None else self._after_arguments)
        if text:
            yield Arguments(self.calls - 1, text)

    def _after_arguments(self) -> Iterable[Event]:
        rest = self._rest.lstrip(SPACE)
        if rest.startswith(","):
            self._scan = _Scan(depth=1)
            self._parse_state = self._other_keys
        elif rest:
            self._advance(len(self._rest) - len(rest) + rest.startswith("}"), self._between)
        yield from ()

    def _other_keys(self) -> Iterable[Event]:
        end = self._scan.end(self._rest)
        self._advance(len(self._rest) if end is None else end, self._other_keys if end is None else self._between)
        yield from ()

    def _new_call(self, name: str) -> Call:
        self._scan, self._only_space = _Scan(), True
        self.calls += 1
        return Call(self.calls - 1, new_id(self._format), name)

    def _advance(self, at: int, parse_state: Callable[[], Iterable[Event]]) -> None:
        self._rest, self._position, self._parse_state = self._rest[at:], 0, parse_state

    def _not_a_call(self) -> Iterable[Event]:
        """Treat what looked like a call as text: all of it, or what follows the marker."""
        marker, self._only_space = self._format.marker, False
        length = len(marker) if marker and self._rest.startswith(marker) else 0
        text = self._rest[:length]
        self._advance(length, self._text)
        if text:
            yield Text(text)


def _members(source: str) -> Iterator[tuple[str, Any, tuple[int, int]]]:
    """The keys and values of a JSON object, and where each value begins and ends. Raises ValueError."""
    at = _after_space(source, 1)
    while source[at] != "}":
        key, at = JSON.raw_decode(source, at)
        at = _after_space(source, at)
        if source[at] != ":" or not isinstance(key, str):
            raise ValueError("no member of an object")
        at = _after_space(source, at + 1)
        value, end = JSON.raw_decode(source, at)
        yield key, value, (at, end)
        at = _after_space(source, end)
        if source[at] == ",":
            at = _after_space(source, at + 1)
        elif source[at] != "}":
            raise ValueError("no end of a member")


def _after_space(source: str, at: int) -> int:
    return len(source) - len(source[at:].lstrip(SPACE))


class _Scan:
    """Looks for the end of a JSON object or list in pieces of a text."""

    def __init__(self, depth: int = 0):
        self._depth = depth
        self._in_string = self._escaped = False

    def end(self, text: str, begin: int = 0) -> int | None:
        """The end of the JSON in this piece, from `begin` on; None if it does not end here."""
        for i, character in enumerate(text[begin:], begin):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped, self._in_string = character == "\\", character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    return i + 1
        return None


def held_back(text: str, marker: str) -> int:
    """The length of the end of `text` that may begin `marker`."""
    return next((n for n in range(len(marker) - 1, 0, -1) if text.endswith(marker[:n])), 0)


def _match(text: str, at: int, tokens: Sequence[str]) -> int | None:
    """The end of `tokens`, each with optional space before it, in `text` from `at` on; NO_MATCH if `text` differs; None
    if it ends too early."""
    for token in tokens:
        while at < len(text) and text[at] in SPACE:
            at += 1
        part = text[at : at + len(token)]
        if part != token:
            return None if token.startswith(part) else NO_MATCH
        at += len(token)
    return at


def _beginning_of_call(text: str, at: int) -> tuple[str, int] | None:
    """The name of a call ("" if `text` begins otherwise) and where its arguments begin; None if `text` ends first."""
    begin = _match(text, at, ("{", '"name"', ":", '"'))
    if begin is None or begin == NO_MATCH:
        return None if begin is None else ("", at)
    name = STRING.match(text, begin - 1)
    if not name:
        return None
    ends = [_match(text, name.end(), (",", f'"{key}"', ":", "{")) for key in KEYS]
    arguments_begin = max((end for end in ends if end is not None), default=NO_MATCH)
    if arguments_begin == NO_MATCH:
        return None if None in ends else ("", at)
    return name[0][1:-1], arguments_begin - 1
