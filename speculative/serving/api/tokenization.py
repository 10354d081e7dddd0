"""Request types of /tokenize and /detokenize, as in vLLM, and their responses."""

import functools
from typing import Annotated, Any, ClassVar

from openvino_genai import ChatHistory, Tokenizer
from pydantic import BeforeValidator, FailFast, Field, WithJsonSchema, model_validator

from speculative.batch_decoder import BatchDecoder
from speculative.sequence.prompt import TextTooLong, encode_text
from speculative.serving.api.api_object import ApiObject
from speculative.serving.api.errors import ApiError, prompt_too_long
from speculative.serving.api.logprobs import texts_of
from speculative.serving.api.messages import Message
from speculative.serving.api.template_variables import TemplateVariables

TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}


class TokenizeRequest(ApiObject):
    """A text, or the messages of a chat."""

    no_effect: ClassVar[dict[str, tuple]] = {
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "tools": ([],),
    }

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], FailFast()] = Field([], min_length=1)
    add_special_tokens: bool | None = None  # default: true for a prompt, false for messages, whose template adds them
    return_token_strs: bool | None = None
    chat_template_kwargs: TemplateVariables = Field({})

    @model_validator(mode="after")
    def check_one_input(self) -> "TokenizeRequest":
        if (self.prompt is None) == (not self.messages):
            raise ValueError("either prompt or messages is required")
        return self


def token_ids(tokens: Any) -> Any:
    if not isinstance(tokens, list) or not set(map(type, tokens)) <= {int}:
        raise ValueError("should be a list of token ids")
    return tokens


class DetokenizeRequest(ApiObject):
    model: str | None = None
    tokens: Annotated[Any, BeforeValidator(token_ids), WithJsonSchema(TOKEN_IDS)]


def tokenize(decoder: BatchDecoder, request: TokenizeRequest) -> dict:
    """The response with the token ids of the text. Raises ApiError for messages without a chat template, and for a
    text that the tokenizer would cut."""
    tokenizer, text, special = decoder.tokenizer, request.prompt or "", not request.messages
    assert tokenizer  # a server has one
    if request.messages:
        if not tokenizer.chat_template:
            raise ApiError(400, "The model has no chat template: send a prompt.", "invalid_request", "messages")
        messages = ChatHistory([message.plain() for message in request.messages])
        messages.set_extra_context(request.chat_template_kwargs)
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    if request.add_special_tokens is not None:
        special = request.add_special_tokens
    try:
        tokens = encode_text(text, tokenizer, special).tolist()
    except TextTooLong as error:
        raise prompt_too_long(error, "messages" if request.messages else "prompt") from None
    answer = {"count": len(tokens), "max_model_len": decoder.main.context, "tokens": tokens, "token_strs": None}
    if request.return_token_strs:
        answer["token_strs"] = [spellings(tokenizer).get(token, "") for token in tokens]
    return answer


@functools.lru_cache(maxsize=1)
def spellings(tokenizer: Tokenizer) -> dict[int, str]:
    """Each token as the vocabulary spells it. A token with a part of a character has U+FFFD there."""
    return {token_id: token.decode(errors="replace") for token, token_id in tokenizer.get_vocab().items()}


def detokenize(decoder: BatchDecoder, request: DetokenizeRequest) -> dict:
    """The response with the text of the tokens, special tokens included. Raises ApiError for an unknown token."""
    last = decoder.main.vocab_size - 1
    if any(not 0 <= token <= last for token in request.tokens):
        message = f"tokens: the ids of the model's tokens range from 0 to {last}, but one is not among them."
        raise ApiError(400, message, "invalid_request", "tokens")
    assert decoder.tokenizer  # a server has one
    return {"prompt": _decode(decoder.tokenizer, request.tokens) if request.tokens else ""}


def _decode(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """The text of the tokens, with U+FFFD for incomplete characters, which the detokenizer may drop, together with a
    space before them."""
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    try:
        texts = texts_of(tokenizer)
    except ValueError:  # its detokenizer does not name the tokens
        return text
    replaced = b"".join(map(texts.token_bytes, tokens)).decode(errors="replace")
    if replaced.count("\ufffd") <= text.count("\ufffd"):
        return text
    first = tokenizer.decode(tokens[:1], skip_special_tokens=False)  # SentencePiece's leaves out the space before it
    return replaced.removeprefix(" ") if first and not first.startswith(" ") else replaced
