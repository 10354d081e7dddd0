"""Splits a generated text into reasoning, answer and tool calls, piece by piece."""

from collections.abc import Iterable

import numpy as np

from speculative.serving.api.reasoning import Reasoning, ReasoningFormat, ReasoningParser
from speculative.serving.api.tool_calls import Event, Text, ToolParser


class AnswerParser:
    """Parses one text, generated for `prompt` (token ids, int64 [n]). `tools` finds calls after the reasoning."""

    def __init__(
        self,
        tools: ToolParser | None = None,
        reasoning: ReasoningFormat | None = None,
        prompt: np.ndarray | None = None,
    ):
        self._tools, self._format = tools, reasoning
        self._reasoning_tokens: int | None = None
        self._reasoning = ReasoningParser(reasoning.opening(prompt) if reasoning and prompt is not None else None)

    def feed(self, piece: str) -> list[Event | Reasoning]:
        """The events that this piece of the text completes."""
        return self._parse_calls(self._reasoning.feed(piece))

    def end(self) -> list[Event | Reasoning]:
        """The events after the last piece."""
        return self._parse_calls(self._reasoning.end()) + (self._tools.end() if self._tools else [])

    def count_reasoning(self, tokens: list[int]) -> int:
        """The number of the text's `tokens` that are reasoning."""
        if not self._format or not self._reasoning.found:
            return 0
        if self._reasoning.is_open:
            return len(tokens)
        if self._reasoning_tokens is None:  # counted once, as each chunk of a stream may report them
            self._reasoning_tokens = self._format.count_tokens(tokens)
        return self._reasoning_tokens

    @property
    def calls(self) -> int:
        """The number of calls so far."""
        return self._tools.calls if self._tools else 0

    @property
    def drops_calls(self) -> bool:
        """Whether the text so far ends in a call that is dropped."""
        return self._tools is not None and self._tools.drops_calls

    def _parse_calls(self, events: Iterable[Text | Reasoning]) -> list[Event | Reasoning]:
        parsed: list[Event | Reasoning] = []
        for event in events:
            parsed += self._tools.feed(event.text) if self._tools and isinstance(event, Text) else [event]
        return parsed
