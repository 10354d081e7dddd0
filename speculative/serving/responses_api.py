"""Requests of /v1/responses, OpenAI's Responses API, as chat completions: `ResponsesRequest.chat` is what is decoded.

The server stores nothing: a request has all earlier messages in `input`, and `store` is reported as false.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationError, WithJsonSchema, field_validator, model_validator

from speculative.serving.given import LABEL, Given
from speculative.serving.protocol import ChatCompletionRequest, described
from speculative.serving.structured_output import Schema, Structure
from speculative.serving.tool_calls import ToolFormat

PART = {
    "type": "object",
    "properties": {"type": {"enum": ["input_text", "output_text"]}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
MESSAGE = {
    "type": "object",
    "properties": {
        "type": {"const": "message"},
        "role": {"enum": ["system", "developer", "user", "assistant"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": PART}]},
    },
    "required": ["role", "content"],
}
INPUT = {"anyOf": [{"type": "string"}, {"type": "array", "items": MESSAGE, "minItems": 1}]}


class Part(Given):
    off: ClassVar[dict[str, tuple]] = {"annotations": LABEL, "logprobs": LABEL}

    type: Literal["input_text", "output_text"]
    text: str


class InputMessage(Given):
    off: ClassVar[dict[str, tuple]] = {"id": LABEL, "status": LABEL, "phase": LABEL}

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Any

    @field_validator("content")
    @classmethod
    def joined(cls, content: Any) -> str:
        if isinstance(content, str):
            return content
        if not isinstance(content, list):
            raise ValueError("should be a string or a list of text parts")
        return "".join(checked(Part, part, f"part {i}").text for i, part in enumerate(content))

    def plain(self) -> dict[str, Any]:
        """Return the message as one of chat completions."""
        return {"role": self.role, "content": self.content}


def checked(kind: type, data: Any, name: str) -> Any:
    """Validate a part of the input. Raises ValueError for its first problem."""
    try:
        return kind.model_validate(data)  # type: ignore[attr-defined]
    except ValidationError as error:
        place, problem = described(error.errors(include_url=False)[0], kind.off)  # type: ignore[attr-defined]
        raise ValueError(f"{name}{'.' if place else ''}{place}: {problem}") from None


def messages(given: Any) -> list[dict[str, Any]]:
    """Validate the input, a text or a list of messages, and return it as messages of chat completions."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise ValueError("should be a string or a list of messages")
    if not given:
        raise ValueError("the list is empty: send a message")
    return [checked(InputMessage, one, f"item {i}").plain() for i, one in enumerate(given)]


class TextFormat(Given):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool | None = None  # the schema is followed in any case

    @model_validator(mode="after")
    def has_its_schema(self) -> "TextFormat":
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("the type json_schema, and no other, needs a schema")
        return self

    @property
    def response_format(self) -> dict[str, Any]:
        """The format in the notation of chat completions."""
        if self.schema_ is None:
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"name": self.name or "answer", "schema": self.schema_}}


class TextOptions(Given):
    off: ClassVar[dict[str, tuple]] = {"verbosity": ("medium",)}

    format: TextFormat | None = None


class ResponsesStreamOptions(Given):
    include_obfuscation: bool | None = None  # accepted, but nothing is obfuscated


class ResponsesChat(ChatCompletionRequest):
    """A request of /v1/responses as a chat completion, whose errors name the parameters of the former."""

    limit_name: ClassVar[str] = "max_output_tokens"
    prompt_name: ClassVar[str] = "input"

    def structure(self, form: ToolFormat | None) -> Structure | None:
        found = super().structure(form)
        return found and found._replace(parameter="text.format")


class ResponsesRequest(Given):
    off: ClassVar[dict[str, tuple]] = {
        "background": (False,),
        "include": ([],),
        "max_tool_calls": LABEL,  # without tools it has no effect
        "metadata": LABEL,
        "parallel_tool_calls": LABEL,
        "prompt_cache_retention": LABEL,
        "reasoning": ({},),
        "safety_identifier": LABEL,
        "service_tier": LABEL,
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
        "user": LABEL,
    }

    model: str
    input: Annotated[list, BeforeValidator(messages), WithJsonSchema(INPUT)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=2**31)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    text: TextOptions | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    # extensions
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    top_k: int | None = Field(None, ge=1, le=2**31)

    @field_validator("store")
    @classmethod
    def nothing_is_stored(cls, store: bool) -> bool:
        if store:
            raise ValueError("this server stores no responses: send false, or omit it")
        return store

    @field_validator("previous_response_id")
    @classmethod
    def nothing_was_stored(cls, response_id: str) -> str:
        raise ValueError("this server stores no responses: send the earlier messages in input")

    @property
    def text_format(self) -> TextFormat | None:
        return self.text.format if self.text else None

    @property
    def chat(self) -> ResponsesChat:
        first = [] if self.instructions is None else [{"role": "developer", "content": self.instructions}]
        same = ("model", "temperature", "top_p", "stream", "prompt_cache_key", "seed", "top_k")
        return ResponsesChat.model_validate(
            {
                **{name: getattr(self, name) for name in same},
                "messages": [*first, *self.input],
                "max_completion_tokens": self.max_output_tokens,
                "response_format": self.text_format.response_format if self.text_format else None,
            }
        )
