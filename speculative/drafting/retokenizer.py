"""Retokenization: converts the main model's tokens to those of a draft with another tokenizer."""

import codecs

import numpy as np

from speculative.models.vocabulary import SharedTokens

MAX_TAIL = 2000  # characters that are encoded in each iteration; encoding them takes 0.3 ms
MIN_TAIL = 500  # characters that later ones may change the tokens of, by far
CUT_ATTEMPTS = 8  # places at which a long tail may be cut


class Retokenizer:
    """Follows one text. Draft tokens are read as the draft wrote them; once verified, they are encoded as text."""

    def __init__(self, shared: SharedTokens):
        self.shared = shared
        self.reset()

    def reset(self) -> None:
        """Forget the text."""
        self._verified = np.zeros(0, np.int64)  # main model's tokens encoded so far
        self._final_ids = self.shared.draft.prefix  # their ids, up to where `_tail` begins
        self._tail = b""  # the end of their text
        self._limit = MAX_TAIL
        self._last_tokens = np.zeros(0, np.int64)  # main model's tokens read last, draft tokens included
        self._last_ids: np.ndarray | None = None  # the draft's ids of `_last_tokens`
        self._drafted: int | None = None  # the main model's id of the token that was drafted then

    def ids(self, tokens: np.ndarray) -> np.ndarray | None:
        """The draft's token ids int64 [n] of the main model's `tokens` (int64 [m]); None if the draft cannot read them,
        as half a character."""
        if np.array_equal(tokens, self._last_tokens):
            return self._last_ids
        continues = self._drafted == tokens[-1] and np.array_equal(tokens[:-1], self._last_tokens)
        if continues and self._last_ids is not None:
            self._last_ids = np.append(self._last_ids, self.shared.pairs[int(tokens[-1])])
        else:
            self._last_ids = self._encode(tokens)
        self._last_tokens, self._drafted = tokens.copy(), None
        return self._last_ids

    @property
    def final_ids(self) -> np.ndarray:
        """The draft's ids that no later token of the text changes: int64 [n]."""
        return self._final_ids

    def draft(self, token: int) -> None:
        """Note that the draft proposed `token` (main model's id) after the tokens read last."""
        self._drafted = token

    def _encode(self, tokens: np.ndarray) -> np.ndarray | None:
        num_verified = len(self._verified)
        if not np.array_equal(tokens[:num_verified], self._verified):
            self.reset()
            num_verified = 0
        begin = num_verified or int(
            tokens[0] == self.shared.main.bos and len(self._final_ids)
        )  # the draft has its own bos
        self._tail += b"".join(self.shared.pieces.get(token, b"") for token in tokens[begin:].tolist())
        self._verified = tokens.copy()
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(self._tail)
        unfinished = decoder.getstate()[0]  # bytes of a character
        encoded = self.shared.draft.encode(text)
        rest = [self.shared.byte_ids[byte] for byte in unfinished]
        ids = np.concatenate([self._final_ids, encoded])
        if len(text) > self._limit:
            self._cut_tail(text, encoded, unfinished)
        if None in rest or not len(ids) + len(rest):
            return None
        return np.append(ids, np.array(rest, np.int64))

    def _cut_tail(self, text: str, encoded: np.ndarray, unfinished: bytes) -> None:
        """Keep the end of the text only, from a place where the tokens before do not depend on it."""
        position = len(text) - MIN_TAIL
        for _ in range(CUT_ATTEMPTS):
            position = max(text.rfind(" ", 0, position), position - MIN_TAIL // CUT_ATTEMPTS, 1)
            for start in (position, position + 1):  # SentencePiece adds the space itself
                tail = self.shared.draft.encode(text[start:])
                if np.array_equal(encoded[len(encoded) - len(tail) :], tail):
                    self._final_ids = np.concatenate([self._final_ids, encoded[: len(encoded) - len(tail)]])
                    self._tail = text[start:].encode() + unfinished
                    self._limit = MAX_TAIL
                    return
        self._limit = 2 * len(text)
