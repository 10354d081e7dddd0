"""Requests and answers in the shapes of the OpenAI API: chat completions, completions, models, errors.

A field that would change the answer and is not served is refused by name, never ignored; a field of the wrong type is
refused, never converted. What only labels a request (`user`, `metadata`, ...) is taken and not used.
"""

import json
import time
import uuid
from typing import Any, Literal

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from openvino_genai import GenerationConfig
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from speculative.generation import Generation

COMPLETION_TOKENS = 16  # of /v1/completions where max_tokens is not given, as the API has it
SEED_BITS = 2**64 - 1  # seeds may be negative there, and are not here
Penalty = Field(None, ge=-2, le=2, allow_inf_nan=False)


class ApiError(HTTPException):
    """Becomes an error answer: `status`, and the API's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(status, message, None if retry_after is None else {"retry-after": str(retry_after)})
        self.body = {"error": {"message": message, "type": _type(status), "param": param, "code": code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status_code, self.headers)


def _type(status: int) -> str:
    if status >= 500:
        return "server_error"
    return {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(
        status, "invalid_request_error"
    )


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: bool | None = None  # nothing is obfuscated


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """As a chat template takes it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class TextFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]


class Asked(BaseModel):
    """What both kinds of completions may ask for."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, le=2**31)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    frequency_penalty: float | None = Penalty
    presence_penalty: float | None = Penalty
    n: Literal[1] | None = None
    logit_bias: dict[str, float] | None = Field(None, max_length=0)
    # beyond the API, as other servers have them
    top_k: int | None = Field(None, ge=1, le=2**31)
    min_p: float | None = Field(None, ge=0, lt=1, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, gt=0, le=10, allow_inf_nan=False)
    ignore_eos: bool | None = None
    # labels
    user: Any = None
    metadata: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @model_validator(mode="before")
    @classmethod
    def whole_characters(cls, data: Any) -> Any:
        """JSON can escape halves of characters, and tokenizers do not take them."""
        try:
            json.dumps(data, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])
            raise ValueError(f"the body holds half a character, {half} (a lone surrogate): send whole ones") from None
        return data

    @field_validator("stop")
    @classmethod
    def few_and_not_empty(cls, stop: str | list[str] | None) -> str | list[str] | None:
        stops = [stop] if isinstance(stop, str) else stop or []
        if len(stops) > 4:
            raise ValueError(f"there may be 4 stop strings, not {len(stops)}")
        if not all(stops):
            raise ValueError("a stop string may not be empty")
        if any(len(stop) > 1000 for stop in stops):
            raise ValueError("a stop string may have 1000 characters")
        return stop

    @model_validator(mode="after")
    def options_of_a_stream(self) -> "Asked":
        if self.stream_options and not self.stream:
            raise ValueError("stream_options go with stream=true only")
        return self

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens

    def config(self, max_new_tokens: int) -> GenerationConfig:
        """As the engine takes it. The defaults are the API's: temperature 1, all tokens."""
        config = GenerationConfig()
        config.max_new_tokens = max_new_tokens
        temperature = 1.0 if self.temperature is None else self.temperature
        config.do_sample = temperature > 0 and self.top_p != 0
        if config.do_sample:
            config.temperature = temperature
            config.top_p = max(1.0 if self.top_p is None else self.top_p, 1e-9)  # less is 0 in float32
            if self.top_k is not None:
                config.top_k = self.top_k
            config.min_p = self.min_p or 0.0
        config.repetition_penalty = self.repetition_penalty or 1.0
        config.frequency_penalty = self.frequency_penalty or 0.0
        config.presence_penalty = self.presence_penalty or 0.0
        config.stop_strings = {self.stop} if isinstance(self.stop, str) else set(self.stop or [])
        config.ignore_eos = bool(self.ignore_eos)
        config.apply_chat_template = False
        return config

    @property
    def random_seed(self) -> int | None:
        return None if self.seed is None else self.seed & SEED_BITS


class ChatAsked(Asked):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31)
    response_format: TextFormat | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    tools: list[Any] | None = Field(None, max_length=0)
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: Any = None  # of no tools
    modalities: list[Literal["text"]] | None = None
    store: Literal[False] | None = None

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def prompt(self) -> list[dict[str, str]]:
        return [message.plain() for message in self.messages]


class CompletionAsked(Asked):
    prompt: str | list[int] | list[str] | list[list[int]]
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: None = None
    suffix: Literal[""] | None = None

    @field_validator("prompt")
    @classmethod
    def one(cls, prompt: str | list) -> str | list[int]:
        """A prompt may be a list of one prompt."""
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise ValueError(f"there may be one prompt in a request, not {len(prompt)}")
            prompt = prompt[0]
        if not prompt:
            raise ValueError("the prompt is empty: give some text to go on from")
        return prompt

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens or COMPLETION_TOKENS


class Answer:
    """The answer to one request, whole or in chunks."""

    def __init__(self, asked: Asked, model: str):
        self._chat = isinstance(asked, ChatAsked)
        self._usage_last = bool(asked.stream_options and asked.stream_options.include_usage)
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, generation: Generation, usage: dict) -> dict:
        choice = {"index": 0, "logprobs": None, "finish_reason": generation.finish_reason}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": generation.text, "refusal": None}
        else:
            choice["text"] = generation.text
        name = "chat.completion" if self._chat else "text_completion"
        return {**self._head, "object": name, "choices": [choice], "usage": usage}

    def begin(self) -> bytes:
        """What comes before any text."""
        return self._event(self._chunk({"role": "assistant", "content": ""}, None)) if self._chat else b""

    def piece(self, text: str) -> bytes:
        return self._event(self._chunk({"content": text} if self._chat else text, None))

    def end(self, finish_reason: str, usage: dict) -> bytes:
        """What comes behind the text."""
        last = self._event(self._chunk({} if self._chat else "", finish_reason))
        if self._usage_last:
            last += self._event({**self._chunk_head(), "choices": [], "usage": usage})
        return last + b"data: [DONE]\n\n"

    def broken(self, error: ApiError) -> bytes:
        """The last event of a stream that fails half-way."""
        return self._event(error.body)

    def _chunk(self, content: dict | str, finish_reason: str | None) -> dict:
        choice = {"index": 0, ("delta" if self._chat else "text"): content, "logprobs": None}
        chunk = {**self._chunk_head(), "choices": [{**choice, "finish_reason": finish_reason}]}
        return {**chunk, "usage": None} if self._usage_last else chunk

    def _chunk_head(self) -> dict:
        return {**self._head, "object": "chat.completion.chunk" if self._chat else "text_completion"}

    @staticmethod
    def _event(data: dict) -> bytes:
        return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def usage(prompt_tokens: int, generation: Generation, cached_tokens: int) -> dict:
    """Token counts; `cached_tokens` of the prompt were not computed again.

    Draft tokens that were rejected are not part of the text, nor of `completion_tokens`.
    """
    accepted, proposed = sum(generation.from_draft), sum(generation.proposed)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(generation.tokens),
        "total_tokens": prompt_tokens + len(generation.tokens),
        "prompt_tokens_details": {"cached_tokens": cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": proposed - accepted,
            "reasoning_tokens": 0,
            "audio_tokens": 0,
        },
    }


def model_card(name: str, created: int) -> dict:
    return {"id": name, "object": "model", "created": created, "owned_by": "local"}
