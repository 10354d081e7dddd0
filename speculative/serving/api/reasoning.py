"""Reasoning of thinking models: the text between <think> and </think>, which precedes the answer.

    reasoning = ReasoningFormat.detect(tokenizer)  # None for a model that does not think
    parser = ReasoningParser(reasoning.opening(prompt))
    for piece in pieces:
        parser.feed(piece)  # Reasoning and Text
    parser.end()

The chat templates of Qwen3, QwQ, DeepSeek-R1, SmolLM3 and Phi-4-reasoning have this format. Some open the reasoning in
the prompt; after others, the model opens it itself, or answers at once.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from openvino_genai import Tokenizer

from speculative.pair import thinking_switch
from speculative.serving.api.tool_calls import SPACE, Text, held_back

BEGIN, END = "<think>", "</think>"
MAX_NEWLINES = 2  # between </think> and the answer
PROMPT_END = 8  # the last tokens of a prompt, which may spell one of them


class Reasoning(NamedTuple):
    """Text of the reasoning."""

    text: str


class ReasoningFormat:
    """The reasoning in texts of a model. `decode` returns the text of token ids, special tokens included. `default` is
    that of `enable_thinking`; None if the chat template does not know it, or this is not known."""

    def __init__(self, decode: Callable[[list[int]], str], default: bool | None = None):
        self._decode = decode
        self.default = default

    @classmethod
    def detect(cls, tokenizer: Tokenizer | None) -> "ReasoningFormat | None":
        """The format of a model; None if its chat template has no reasoning, or its texts leave out the tags."""
        if not tokenizer or END not in tokenizer.chat_template:
            return None
        ids = tokenizer.encode(END, add_special_tokens=False).input_ids.data[0].tolist()
        if END not in tokenizer.decode(ids):
            return None
        return cls(
            lambda tokens: tokenizer.decode(tokens, skip_special_tokens=False),
            thinking_switch.is_on_by_default(tokenizer),
        )

    def opening(self, prompt: np.ndarray) -> str | None:
        """The text that opens the reasoning in an answer to `prompt` (token ids, int64 [n]): "" if the prompt opens it,
        None if the prompt closes it."""
        end = self._decode(prompt[-PROMPT_END:].tolist()).rstrip()
        return None if end.endswith(END) else "" if end.endswith(BEGIN) else BEGIN

    def count_tokens(self, tokens: list[int]) -> int:
        """The number of tokens of the reasoning, </think> included, with which `tokens` begin."""
        before_end = range(1, len(tokens))
        return min(1 + bisect_left(before_end, True, key=lambda n: END in self._decode(tokens[:n])), len(tokens))


class ReasoningParser:
    """Finds the reasoning at the beginning of a text, which `opening` opens (`ReasoningFormat.opening`). The space
    around it, and newlines after </think>, are left out."""

    def __init__(self, opening: str | None):
        self.found = opening == ""  # whether the text has reasoning
        self._has_begun = False  # whether any of it has been passed on
        self._newlines = 0  # left out after its end
        self._rest = ""  # text that was fed but not yet passed on
        self._parse_state: Callable[[], Iterable[Text | Reasoning]] = (
            self._text if opening is None else self._reasoning if self.found else self._begin
        )

    @property
    def is_open(self) -> bool:
        """Whether the text so far is reasoning that has not ended."""
        return self.found and self._parse_state == self._reasoning

    def feed(self, piece: str) -> list[Text | Reasoning]:
        """The events that this piece of the text completes."""
        self._rest += piece
        events: list[Text | Reasoning] = []
        state = None
        while self._rest and state != self._parse_state:
            state = self._parse_state
            events += state()
        return events

    def end(self) -> list[Text | Reasoning]:
        """The events after the last piece."""
        rest, self._rest = self._rest, ""
        if self._parse_state == self._reasoning:
            return [Reasoning(rest)] if (rest := rest.rstrip(SPACE)) else []
        return [Text(rest)] if rest else []

    def _begin(self) -> Iterable[Text | Reasoning]:
        text = self._rest.lstrip(SPACE)
        if text.startswith(BEGIN):
            self.found, self._rest, self._parse_state = True, text.removeprefix(BEGIN), self._reasoning
        elif not BEGIN.startswith(text):
            self._parse_state = self._text
        return ()

    def _reasoning(self) -> Iterable[Text | Reasoning]:
        rest = self._rest if self._has_begun else self._rest.lstrip(SPACE)
        text, end, after = rest.partition(END)
        if not end:
            text = rest[: len(rest) - held_back(rest, END)]
        text = text.rstrip(SPACE)
        self._rest = after if end else rest[len(text) :]
        if end:
            self._parse_state = self._after_end
        if text:
            self._has_begun = True
            yield Reasoning(text)

    def _after_end(self) -> Iterable[Text | Reasoning]:
        while self._rest.startswith("\n") and self._newlines < MAX_NEWLINES:
            self._rest = self._rest.removeprefix("\n")
            self._newlines += 1
        if self._rest:
            self._parse_state = self._text
        return ()

    def _text(self) -> Iterable[Text | Reasoning]:
        text, self._rest = self._rest, ""
        return [Text(text)]
