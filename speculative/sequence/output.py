"""Turns the steps of a sequence into its `GenerationResult` and the text to stream, up to a stop string."""

import time
from collections.abc import Callable

from openvino_genai import GenerationConfig

from speculative.sequence.detokenizer import IncrementalDetokenizer
from speculative.sequence.result import GenerationResult, Step


class OutputProcessor:
    """`result` grows with each `take`, and is whole after `end`.

    `decode` turns token ids into text; None where there is no tokenizer, and then no text. `piecewise`: `take` returns
    the text as it comes.
    """

    def __init__(
        self,
        config: GenerationConfig,
        stops: frozenset[int],
        decode: Callable[[list[int]], str] | None,
        piecewise: bool = False,
    ):
        if config.stop_strings and not decode:
            raise ValueError("stop_strings need the text, and this decoder has no tokenizer: give it one")
        self.result = GenerationResult()
        self._stops = stops
        self._decode = decode
        self._watched = bool(config.stop_strings) or (piecewise and decode is not None)
        self._text = IncrementalDetokenizer(decode, config.stop_strings, config.include_stop_str_in_output)
        self._begin = time.perf_counter()

    def take(self, step: Step) -> tuple[list[int], str]:
        """Take what an inference of the main model gained; return the tokens that belong to the text, up to a stop
        string's end, and the piece of text that is certain now. Sets `finish_reason` to "stop" at an end."""
        piece, used = self._text.push(step.tokens) if self._watched else ("", len(step.tokens))
        result, gained = self.result, step.tokens[:used]
        result.tokens += gained
        result.from_draft += [i < step.accepted for i in range(used)]
        result.seconds = time.perf_counter() - self._begin
        if result.ttft:
            result.proposed.append(step.proposed)
            result.accepted.append(min(step.accepted, used))
            result.gained.append(used)
        else:
            result.ttft = result.seconds
        if self._text.stopped or gained[-1] in self._stops:
            result.finish_reason = "stop"
        return gained, piece

    def end(self) -> str:
        """Return the rest of the text: no more steps come."""
        rest = ""
        if self._watched:
            rest = self._text.end()
            self.result.text = self._text.text
        elif self._decode:
            self.result.text = self._decode(self.result.tokens)
        return rest
