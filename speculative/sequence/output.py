"""Output processor: turns the steps of a sequence into its `GenerationResult` and text to stream."""

import time
from collections.abc import Callable

from openvino_genai import GenerationConfig

from speculative.sequence.detokenizer import IncrementalDetokenizer
from speculative.sequence.result import GenerationResult, Step


class OutputProcessor:
    """Collects steps: `result` grows with each `take` and is complete after `end`.

    `decode` turns token ids into text; None without a tokenizer, and then there is no text. With `piecewise`, `take`
    returns text to stream.
    """

    def __init__(
        self,
        config: GenerationConfig,
        stops: frozenset[int],
        decode: Callable[[list[int]], str] | None,
        piecewise: bool = False,
    ):
        if config.stop_strings and not decode:
            raise ValueError("stop_strings need text, but this decoder has no tokenizer: pass one")
        self.result = GenerationResult()
        self._stops = stops
        self._decode = decode
        self._watched = bool(config.stop_strings) or (piecewise and decode is not None)
        self._text = IncrementalDetokenizer(decode, config.stop_strings, config.include_stop_str_in_output)
        self._begin = time.perf_counter()

    def take(self, step: Step) -> tuple[list[int], str]:
        """Add a step; return the tokens that belong to the text, up to the end of a stop string, and the text that is
        final now. Sets `finish_reason` to "stop" at a stop token or stop string."""
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
        """Complete the result and return the rest of the text."""
        rest = ""
        if self._watched:
            rest = self._text.end()
            self.result.text = self._text.text
        elif self._decode:
            self.result.text = self._decode(self.result.tokens)
        return rest
