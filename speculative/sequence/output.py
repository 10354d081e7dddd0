"""Output processor: turns the steps of a sequence into its `GenerationResult` and text to stream."""

import time
from collections.abc import Callable

from speculative.sampling.params import SamplingParams
from speculative.sequence.detokenizer import IncrementalDetokenizer
from speculative.sequence.result import GenerationResult, Step


class OutputProcessor:
    """Collects steps: `result` grows with each `add_step` and is complete after `end`.

    `decode` turns token ids into text, and `cleans_up` is that of the tokenizer (`detokenizer.cleans_up`); None without
    a tokenizer, and then there is no text. With `piecewise`, `add_step` returns text to stream. The text is that behind
    the tokens of `context`. With `hides_stop_token`, the stop token at the end has no text, unless the text may end
    with a stop string. Times are measured from `begin` (a time.perf_counter() value, by default now)."""

    def __init__(
        self,
        params: SamplingParams,
        decode: Callable[[list[int]], str] | None,
        piecewise: bool = False,
        begin: float | None = None,
        cleans_up: bool = False,
        context: list[int] | None = None,
        hides_stop_token: bool = False,
    ):
        if params.stop_strings and not decode:
            raise ValueError("stop_strings need text, but this decoder has no tokenizer: pass one")
        self.result = GenerationResult()
        self._stop_token_ids = params.stop_token_ids
        self._hides_stop_token = hides_stop_token and not params.include_stop_str_in_output
        self._decode = decode
        self._text: IncrementalDetokenizer | None = None  # only if text is needed before the end
        if decode and (params.stop_strings or piecewise or context):
            self._text = IncrementalDetokenizer(
                decode, params.stop_strings, params.include_stop_str_in_output, cleans_up, context or ()
            )
        self._begin = time.perf_counter() if begin is None else begin

    def add_step(self, step: Step) -> tuple[list[int], str]:
        """Add a step; return the tokens that belong to the text, up to the end of a stop string, and the text that is
        final now. Sets `finish_reason` to "stop" at a stop token, a stop string or the end of a grammar."""
        text_tokens = self._text_tokens(step.tokens)
        piece, used = self._text.push(text_tokens) if self._text else ("", len(text_tokens))
        if not (self._text and self._text.stopped):
            used = len(step.tokens)
        result, new_tokens = self.result, step.tokens[:used]
        result.tokens += new_tokens
        result.logprobs += step.logprobs[:used]
        result.from_draft += [i < step.accepted for i in range(used)]
        result.seconds = time.perf_counter() - self._begin
        if result.ttft:
            result.proposed.append(step.proposed)
            result.accepted.append(min(step.accepted - step.ends_in_leaf, used))
            result.gained.append(used)
        else:
            result.ttft = result.seconds
        self._update_is_cut()
        if result.is_cut or new_tokens[-1] in self._stop_token_ids or step.is_complete:
            result.finish_reason = "stop"
        return new_tokens, piece

    def end(self) -> str:
        """Complete the result and return the rest of the text."""
        rest = ""
        if self._text:
            rest = self._text.end()
            self.result.text = self._text.text
            self._update_is_cut()
            if self.result.is_cut and self.result.finish_reason == "length":
                self.result.finish_reason = "stop"
        elif self._decode:
            self.result.text = self._decode(self._text_tokens(self.result.tokens))
        return rest

    def _text_tokens(self, tokens: list[int]) -> list[int]:
        """The tokens without a stop token that has no text."""
        hides_last = self._hides_stop_token and tokens and tokens[-1] in self._stop_token_ids
        return tokens[:-1] if hides_last else tokens

    def _update_is_cut(self) -> None:
        self.result.is_cut = self._text is not None and self._text.stopped
