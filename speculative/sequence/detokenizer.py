"""Incremental detokenizer: streams text in whole characters and holds back what may be part of a stop string."""

import re
from collections.abc import Callable, Collection, Sequence

import openvino_genai

CONTEXT_TOKENS = 16  # tokens decoded again as context for the next ones (spaces, bytes of one character)
UNCERTAIN = re.compile(r" (?:'[rv]?|n'?)?$")  # an end of a text that a clean-up may change when more text follows


def cleans_up(tokenizer: openvino_genai.Tokenizer) -> bool:
    """Whether decoding removes the space before punctuation and contractions (clean_up_tokenization_spaces)."""
    return tokenizer.decode(tokenizer.encode("a .", add_special_tokens=False).input_ids.data[0].tolist()) == "a."


class IncrementalDetokenizer:
    """Converts a growing list of tokens to text.

    `text` is the whole text so far. `stopped` is set once a stop string is complete; the text then ends before the stop
    string or, with `include_stop`, after it. `cleans_up`: whether `decode` cleans up spaces (see the function of that
    name). The text is that behind the tokens of `context`, because SentencePiece leaves out the space before the first
    token that it decodes. A `decode` that cleans up gets none, as it would change their end."""

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        stop_strings: Collection[str] = (),
        include_stop: bool = False,
        cleans_up: bool = False,
        context: Sequence[int] = (),
    ):
        self._decode = decode
        self._cleans_up = cleans_up
        self._stops = [stop for stop in stop_strings if stop]
        self._matches = [_Match(stop) for stop in self._stops]
        self._matched = 0  # characters of `text` that `_matches` have seen
        self._include_stop = include_stop
        self._ids = [] if cleans_up else [*context][-CONTEXT_TOKENS:]
        self._begin, self._decoded = 0, len(self._ids)  # first token decoded again, end of the tokens decoded so far
        # characters of the text of the tokens from `_begin` on that `text` already has
        self._known_chars = len(decode(self._ids)) if self._ids else 0
        self._emitted = 0  # characters returned so far
        self.text = ""
        self.stopped = False

    def push(self, tokens: Sequence[int]) -> tuple[str, int]:
        """Add tokens; return the text that is final now and how many of `tokens` belong to the text.

        That is all of them, or those up to the one that completes a stop string.
        """
        if not self._stops:  # all at once: decoding takes about 0.1 ms
            self._ids += tokens
            self._extend(last=False)
            return self._emit(len(self.text)), len(tokens)
        for used, token in enumerate(tokens, start=1):
            self._ids.append(token)
            self._extend(last=False)
            if self.stopped:
                return self._emit(len(self.text)), used
        return self._emit(len(self.text) - self._held_back()), len(tokens)

    def end(self) -> str:
        """Return the text held back, at the end of the tokens."""
        if not self.stopped:
            self._extend(last=True)
        return self._emit(len(self.text))

    def _extend(self, last: bool) -> None:
        decoded = self._decode(self._ids[self._begin :])
        if decoded.endswith("\ufffd") and not last:  # the bytes of a character that more tokens will complete
            return
        uncertain = UNCERTAIN.search(decoded) if self._cleans_up and not last else None
        # a clean-up may have shortened it
        final = max(uncertain.start(), self._known_chars) if uncertain else len(decoded)
        searched = len(self.text)
        self.text += decoded[self._known_chars : final]
        window = self._decode(self._ids[self._decoded :]) if len(self._ids) - self._begin > CONTEXT_TOKENS else ""
        can_move = not self._cleans_up or (decoded.endswith(window) and not uncertain and not UNCERTAIN.search(window))
        if window and can_move:
            self._begin, self._known_chars = self._decoded, len(window)
        else:
            self._known_chars = final
        self._decoded = len(self._ids)
        self._cut_at_stop(searched)

    def _cut_at_stop(self, searched: int) -> None:
        begins = ((self.text.find(stop, max(0, searched - len(stop) + 1)), stop) for stop in self._stops)
        matches = [(position, stop) for position, stop in begins if position >= 0]
        if matches:
            position, stop = min(matches)
            self.text = self.text[: position + len(stop) * self._include_stop]
            self.stopped = True

    def _held_back(self) -> int:
        """The length of the longest suffix of the text that is a prefix of a stop string."""
        new = self.text[self._matched :]
        self._matched = len(self.text)
        return max(match.extend(new) for match in self._matches)

    def _emit(self, until: int) -> str:
        new = self.text[self._emitted : until]
        self._emitted = until
        return new


class _Match:
    """The longest prefix of a stop string that a growing text ends with (Knuth, Morris and Pratt 1977): the time per
    character of the text does not depend on the length of the stop string."""

    def __init__(self, stop: str):
        self._stop = stop
        self._length = 0  # of the match, below that of the stop string
        self._shorter = [0, 0]  # [n]: length of the next shorter match when the first n characters match
        for character in stop[1:]:
            self._shorter.append(self._next(self._shorter[-1], character))

    def extend(self, text: str) -> int:
        """Return the length of the match after `text` is appended, which must not complete the stop string."""
        for character in text:
            self._length = self._next(self._length, character)
        return self._length

    def _next(self, length: int, character: str) -> int:
        while length and self._stop[length] != character:
            length = self._shorter[length]
        return length + (self._stop[length] == character)
