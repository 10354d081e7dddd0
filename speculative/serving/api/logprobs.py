"""Log-probabilities in the API: tokens as texts and bytes, aligned with the text of a choice."""

import codecs
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import openvino_genai

from speculative.models import vocabulary
from speculative.sampling.logprobs import TokenLogprobs
from speculative.sequence.detokenizer import IncrementalDetokenizer, cleans_up
from speculative.sequence.result import GenerationResult

LOWEST = -9999.0  # instead of -infinity, which JSON does not have; as OpenAI and vLLM


class TokenTexts:
    """The bytes of each token of a tokenizer. Raises ValueError if its detokenizer does not name the tokens."""

    def __init__(self, tokenizer: openvino_genai.Tokenizer):
        vocab = vocabulary.of(tokenizer)
        if not vocab:
            raise ValueError("logprobs need a detokenizer that names its tokens: convert the model again")
        self._decode, self._cleans_up = tokenizer.decode, cleans_up(tokenizer)
        self._bytes = vocab.tokens()
        self._special = vocabulary.special(tokenizer, vocab)

    def token_bytes(self, token: int) -> bytes:
        """The token's UTF-8 bytes; for a special token, the bytes of its name."""
        return self._bytes.get(token, b"")

    def text_bytes(self, token: int) -> bytes:
        """The bytes that the token adds to a text."""
        return b"" if self.is_special(token) else self.token_bytes(token)

    def is_special(self, token: int) -> bool:
        """Whether the token has no text, like the end of text."""
        return token in self._special

    def detokenizer(self, context: Sequence[int]) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(self._decode, cleans_up=self._cleans_up, context=context)

    def text(self, token: int) -> str:
        """The token as text, or `bytes:` and its bytes if they are incomplete characters."""
        try:
            return self.token_bytes(token).decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.token_bytes(token))


@functools.lru_cache(maxsize=1)
def texts_of(tokenizer: openvino_genai.Tokenizer) -> TokenTexts:
    """The `TokenTexts` of a tokenizer, read once: it takes a moment with a large vocabulary."""
    return TokenTexts(tokenizer)


class TokenEntry(NamedTuple):
    """A token of a choice: the offset of its text and its log-probability (None for the first token of a prompt)."""

    token: int
    offset: int
    logprobs: TokenLogprobs | None


class AlignedTokens:
    """Returns the tokens of a choice together with their text: those whose text begins within the text so far.

    `top` is the number of most probable tokens wanted at each place. `context` are the tokens before the choice, if its
    text continues theirs.
    """

    def __init__(self, texts: TokenTexts, top: int, context: Sequence[int] = ()):
        self.texts, self.top = texts, top
        self._next_token = 0  # index of the first generated token not returned yet
        self._text_chars = self._token_chars = 0  # characters of the text so far, and of the returned tokens
        self._text = texts.detokenizer(context)

    def prompt_entries(
        self, tokens: list[int], logprobs: list[TokenLogprobs], text: str, has_names: bool = False
    ) -> list[TokenEntry]:
        """The entries of an echoed prompt, which may be long: its tokens are not decoded one by one. `has_names`: the
        text is the client's own, which may contain the names of special tokens."""
        decoder, entries, chars = codecs.getincrementaldecoder("utf-8")("replace"), [], 0
        for token, token_logprobs in zip(tokens, [None, *logprobs], strict=True):
            entries.append(TokenEntry(token, chars, token_logprobs))
            piece = decoder.decode(self.texts.token_bytes(token))
            if not self.texts.is_special(token):
                chars += len(piece) - (piece.startswith(" ") and not text.startswith(" ", chars))  # as SentencePiece
            elif has_names and text.startswith(piece, chars):  # not the added beginning-of-text token
                chars += len(piece)
        self._text_chars = self._token_chars = len(text)
        return entries

    def take(self, generation: GenerationResult, text: str, last: bool = False) -> list[TokenEntry]:
        """The entries that belong to `text`, which follows the text so far; with `last`, all that remain, except behind
        a stop string."""
        entries: list[TokenEntry] = []
        self._text_chars += len(text)
        count = min(len(generation.tokens), len(generation.logprobs))  # another thread appends to both
        while self._next_token < count:
            token = generation.tokens[self._next_token]
            text_begins = self._token_chars < self._text_chars or not self.texts.text_bytes(token)
            if not text_begins and (generation.is_cut or not last):
                break
            entries.append(TokenEntry(token, self._token_chars, generation.logprobs[self._next_token]))
            self._token_chars += len(self._text.push([token])[0])
            self._next_token += 1
        return entries


def completion_logprobs(tokens: AlignedTokens, entries: list[TokenEntry]) -> dict:
    """The `logprobs` of a text completion, with the most probable tokens at each position and the token itself."""
    texts, top = tokens.texts, tokens.top
    fields: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, offset, token_logprobs in entries:
        fields["tokens"].append(texts.text(token))
        fields["text_offset"].append(offset)
        if token_logprobs is None:
            fields["token_logprobs"].append(None)
            fields["top_logprobs"].append(None)
            continue
        fields["token_logprobs"].append(_finite(token_logprobs.logprob))
        best = {texts.text(other): _finite(value) for other, value in _top(token_logprobs, top)}
        fields["top_logprobs"].append(best | {texts.text(token): _finite(token_logprobs.logprob)})
    return fields if top else fields | {"top_logprobs": None}


def chat_logprobs(tokens: AlignedTokens, entries: list[TokenEntry]) -> dict:
    """The `logprobs` of a chat completion, with the most probable tokens at each position."""
    texts = tokens.texts

    def token_fields(token: int, value: float) -> dict:
        return {"token": texts.text(token), "logprob": _finite(value), "bytes": list(texts.token_bytes(token))}

    content = []
    for token, _, token_logprobs in entries:
        assert token_logprobs is not None  # only the first token of a prompt has none
        best = [token_fields(other, value) for other, value in _top(token_logprobs, tokens.top)]
        content.append({**token_fields(token, token_logprobs.logprob), "top_logprobs": best})
    return {"content": content, "refusal": None}


def prompt_logprob_entries(
    texts: TokenTexts, prompt: Sequence[int], logprobs: list[TokenLogprobs], top: int
) -> list[dict | None]:
    """vLLM's `prompt_logprobs`: for each token of the prompt but the first, itself and the `top` most probable ones."""
    entries: list[dict | None] = [None]
    for token, token_logprobs in zip(prompt[1:], logprobs, strict=True):
        ranked = [(other, value, rank) for rank, (other, value) in enumerate(_top(token_logprobs, top), start=1)]
        entries.append(
            {
                str(other): {"logprob": _finite(value), "rank": rank, "decoded_token": texts.text(other)}
                for other, value, rank in [(int(token), token_logprobs.logprob, token_logprobs.rank), *ranked]
            }
        )
    return entries


def mean_logprob(generation: GenerationResult) -> float:
    """The mean log-probability of a token."""
    return sum(one.logprob for one in generation.logprobs) / max(len(generation.logprobs), 1)


def _top(one: TokenLogprobs, count: int) -> list[tuple[int, float]]:
    return list(zip(one.top_ids[:count].tolist(), one.top_logprobs[:count].tolist(), strict=True))


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
