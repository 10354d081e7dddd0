"""Log-probabilities in the API: tokens as texts and bytes, aligned with the text of a choice."""

import codecs
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
        known = vocabulary.of(tokenizer)
        if not known:
            raise ValueError("logprobs need a detokenizer that names its tokens: convert the model again")
        self._decode, self._cleans_up = tokenizer.decode, cleans_up(tokenizer)
        self._bytes = known.tokens()
        self._special = vocabulary.special(tokenizer, known)

    def spelled(self, token: int) -> bytes:
        """The token's UTF-8 bytes; for a special token, the bytes of its name."""
        return self._bytes.get(token, b"")

    def added(self, token: int) -> bytes:
        """The bytes that the token adds to a text."""
        return b"" if self.is_special(token) else self.spelled(token)

    def is_special(self, token: int) -> bool:
        """Whether the token is no text, as the end of text."""
        return token in self._special

    def detokenizer(self, context: Sequence[int]) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(self._decode, cleans_up=self._cleans_up, context=context)

    def text(self, token: int) -> str:
        """The token as text, or `bytes:` and its bytes if they are incomplete characters."""
        try:
            return self.spelled(token).decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.spelled(token))


class TokenEntry(NamedTuple):
    """A token of a choice: the offset of its text and its log-probability (None for the first token of a prompt)."""

    token: int
    offset: int
    logprobs: TokenLogprobs | None


class AlignedTokens:
    """Hands out the tokens of a choice with their text: those whose text begins within the text so far.

    `top` is the number of most probable tokens wanted at each place. `context` are the tokens before the choice, if its
    text continues theirs.
    """

    def __init__(self, texts: TokenTexts, top: int, context: Sequence[int] = ()):
        self.texts, self.top = texts, top
        self._read = 0  # generated tokens handed out
        self._sent = self._chars = 0  # characters of the text, and of the tokens handed out
        self._text = texts.detokenizer(context)

    def of_prompt(
        self, tokens: list[int], logprobs: list[TokenLogprobs], text: str, has_names: bool = False
    ) -> list[TokenEntry]:
        """The entries of an echoed prompt, which may be long: its tokens are not decoded one by one. `has_names`: the
        text is the client's own, in which special tokens are spelled."""
        decoder, entries, chars = codecs.getincrementaldecoder("utf-8")("replace"), [], 0
        for token, one in zip(tokens, [None, *logprobs], strict=True):
            entries.append(TokenEntry(token, chars, one))
            piece = decoder.decode(self.texts.spelled(token))
            if not self.texts.is_special(token):
                chars += len(piece) - (piece.startswith(" ") and not text.startswith(" ", chars))  # as SentencePiece
            elif has_names and text.startswith(piece, chars):  # not so the beginning of text, which a tokenizer adds
                chars += len(piece)
        self._sent = self._chars = len(text)
        return entries

    def take(self, generation: GenerationResult, text: str, last: bool = False) -> list[TokenEntry]:
        """The entries that belong to `text`, which follows the text so far; with `last`, all that remain, except behind
        a stop string."""
        entries: list[TokenEntry] = []
        self._sent += len(text)
        count = min(len(generation.tokens), len(generation.logprobs))  # another thread appends to both
        while self._read < count:
            token = generation.tokens[self._read]
            begins = self._chars < self._sent or not self.texts.added(token)
            if not begins and (generation.is_cut or not last):
                break
            entries.append(TokenEntry(token, self._chars, generation.logprobs[self._read]))
            self._chars += len(self._text.push([token])[0])
            self._read += 1
        return entries


def of_completion(tokens: AlignedTokens, entries: list[TokenEntry]) -> dict:
    """The `logprobs` of a text completion, with the most probable tokens at each position and the token itself."""
    texts, top = tokens.texts, tokens.top
    found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, offset, one in entries:
        found["tokens"].append(texts.text(token))
        found["text_offset"].append(offset)
        if one is None:
            found["token_logprobs"].append(None)
            found["top_logprobs"].append(None)
            continue
        found["token_logprobs"].append(_number(one.logprob))
        best = {texts.text(other): _number(value) for other, value in _top(one, top)}
        found["top_logprobs"].append(best | {texts.text(token): _number(one.logprob)})
    return found if top else found | {"top_logprobs": None}


def of_chat(tokens: AlignedTokens, entries: list[TokenEntry]) -> dict:
    """The `logprobs` of a chat completion, with the most probable tokens at each position."""
    texts = tokens.texts

    def of_token(token: int, value: float) -> dict:
        return {"token": texts.text(token), "logprob": _number(value), "bytes": list(texts.spelled(token))}

    content = []
    for token, _, one in entries:
        assert one is not None  # only the first token of a prompt has none
        best = [of_token(other, value) for other, value in _top(one, tokens.top)]
        content.append({**of_token(token, one.logprob), "top_logprobs": best})
    return {"content": content, "refusal": None}


def of_prompt(texts: TokenTexts, prompt: Sequence[int], found: list[TokenLogprobs], top: int) -> list[dict | None]:
    """vLLM's `prompt_logprobs`: for each token of the prompt but the first, itself and the `top` most probable ones."""
    entries: list[dict | None] = [None]
    for token, one in zip(prompt[1:], found, strict=True):
        ranked = [(other, value, rank) for rank, (other, value) in enumerate(_top(one, top), start=1)]
        entries.append(
            {
                str(other): {"logprob": _number(value), "rank": rank, "decoded_token": texts.text(other)}
                for other, value, rank in [(int(token), one.logprob, one.rank), *ranked]
            }
        )
    return entries


def mean(generation: GenerationResult) -> float:
    """The mean log-probability of a token."""
    return sum(one.logprob for one in generation.logprobs) / max(len(generation.logprobs), 1)


def _top(one: TokenLogprobs, count: int) -> list[tuple[int, float]]:
    return list(zip(one.top_ids[:count].tolist(), one.top_logprobs[:count].tolist(), strict=True))


def _number(logprob: float) -> float:
    return max(logprob, LOWEST)
