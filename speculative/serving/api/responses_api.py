"""Requests of /v1/responses, OpenAI's Responses API; `ResponsesRequest.chat` is the equivalent chat completion.

The server stores nothing: a request has all earlier messages in `input`, and `store` is reported as false.
"""

from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    FailFast,
    Field,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from speculative.serving.api.api_object import LABEL, ApiObject
from speculative.serving.api.base_request import TopK
from speculative.serving.api.chat_completions import ChatCompletionRequest
from speculative.serving.api.errors import describe_error
from speculative.serving.api.messages import REFUSAL_PART, RefusalPart, is_refusal
from speculative.serving.api.structured_output import Schema, Structure
from speculative.serving.api.template_variables import ReasoningEffort, TemplateVariables
from speculative.serving.api.tool_calls import ToolFormat
from speculative.serving.api.tools import CHOICES, MAX_TOOLS, NAME, Function, check_choice, check_names

PART = {
    "type": "object",
    "properties": {"type": {"enum": ["input_text", "output_text"]}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
PARTS = {"type": "array", "items": {"anyOf": [PART, REFUSAL_PART]}}
MESSAGE = {
    "type": "object",
    "properties": {
        "type": {"const": "message"},
        "role": {"enum": ["system", "developer", "user", "assistant"]},
        "content": {"anyOf": [{"type": "string"}, PARTS]},
    },
    "required": ["role", "content"],
}
CALL = {
    "type": "object",
    "properties": {
        "type": {"const": "function_call"},
        **{name: {"type": "string"} for name in ("call_id", "name", "arguments")},
    },
    "required": ["type", "call_id", "name", "arguments"],
}
CALL_OUTPUT = {
    "type": "object",
    "properties": {
        "type": {"const": "function_call_output"},
        "call_id": {"type": "string"},
        "output": {"anyOf": [{"type": "string"}, {"type": "array", "items": PART}]},
    },
    "required": ["type", "call_id", "output"],
}
REASONING_PART = {
    "type": "object",
    "properties": {"type": {"const": "reasoning_text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
REASONING = {
    "type": "object",
    "properties": {"type": {"const": "reasoning"}, "content": {"type": "array", "items": REASONING_PART}},
    "required": ["type"],
}
ITEMS = {"type": "array", "items": {"anyOf": [MESSAGE, CALL, CALL_OUTPUT, REASONING]}, "minItems": 1}
INPUT = {"anyOf": [{"type": "string"}, ITEMS]}
MAX_METADATA = 16
METADATA = {"type": "object", "additionalProperties": {"type": "string"}, "maxProperties": MAX_METADATA}
NAMED = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
    "required": ["type", "name"],
}


class Part(ApiObject):
    no_effect: ClassVar[dict[str, tuple]] = {"annotations": LABEL, "logprobs": LABEL}

    type: Literal["input_text", "output_text"]
    text: str


class ReasoningPart(ApiObject):
    type: Literal["reasoning_text"]
    text: str


def join_parts(kind: type[Part] | type[ReasoningPart], content: Any) -> str:
    """Validate a text or a list of text parts, and return it as a text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError("should be a string or a list of text parts")
    return "".join(
        validate_part(RefusalPart if is_refusal(part) else kind, part, f"part {i}").text
        for i, part in enumerate(content)
    )


Content = Annotated[str, BeforeValidator(partial(join_parts, Part))]


class Item(ApiObject):
    no_effect: ClassVar[dict[str, tuple]] = {"id": LABEL, "status": LABEL, "phase": LABEL}


class InputMessage(Item):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content

    def add_to(self, to_messages: list[dict[str, Any]]) -> None:
        """Add the item to messages of chat completions; an answer to the message with its reasoning."""
        message = {"role": self.role, "content": self.content}
        last = to_messages[-1] if to_messages else {}
        if self.role == "assistant" and last.keys() == {"role", "reasoning_content"}:
            last.update(message)
        else:
            to_messages.append(message)


class InputCall(Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str

    def add_to(self, to_messages: list[dict[str, Any]]) -> None:
        """Add the call to the assistant's message before it, or to a new one."""
        if not to_messages or to_messages[-1]["role"] != "assistant":
            to_messages.append({"role": "assistant"})
        function = {"name": self.name, "arguments": self.arguments}
        to_messages[-1].setdefault("tool_calls", []).append(
            {"id": self.call_id, "type": "function", "function": function}
        )


class InputCallOutput(Item):
    type: Literal["function_call_output"]
    call_id: str
    output: Content

    def add_to(self, to_messages: list[dict[str, Any]]) -> None:
        to_messages.append({"role": "tool", "tool_call_id": self.call_id, "content": self.output})


class InputReasoning(Item):
    no_effect: ClassVar[dict[str, tuple]] = Item.no_effect | {"summary": LABEL}

    type: Literal["reasoning"]
    content: Annotated[str, BeforeValidator(partial(join_parts, ReasoningPart))] = ""

    def add_to(self, to_messages: list[dict[str, Any]]) -> None:
        """Begin the assistant's message that the next items complete."""
        if self.content:
            to_messages.append({"role": "assistant", "reasoning_content": self.content})


KINDS: dict[str, type[InputMessage | InputCall | InputCallOutput | InputReasoning]] = {
    "message": InputMessage,
    "reasoning": InputReasoning,
    "function_call": InputCall,
    "function_call_output": InputCallOutput,
}


def validate_part(kind: type, data: Any, name: str) -> Any:
    """Validate a part of the input. Raises ValueError for its first problem."""
    try:
        return kind.model_validate(data)  # type: ignore[attr-defined]
    except ValidationError as error:
        place, problem = describe_error(error.errors(include_url=False)[0])
        raise ValueError(f"{name}{'.' if place else ''}{place}: {problem}") from None


def to_messages(items: Any) -> list[dict[str, Any]]:
    """Validate the input, a text or a list of items, and return it as messages of chat completions."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise ValueError("should be a string or a list of items")
    if not items:
        raise ValueError("the list is empty: send a message")
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        kind = item.get("type") if isinstance(item, dict) else None
        kind = kind if isinstance(kind, str) else "message"
        if kind == "item_reference":
            raise ValueError(f"item {i}.type: this server stores no items to refer to: send the item itself")
        if kind not in KINDS:
            raise ValueError(f"item {i}.type: is {kind[:64]!r}, but only {', '.join(KINDS)} are supported")
        validate_part(KINDS[kind], item, f"item {i}").add_to(messages)
    if not messages:
        raise ValueError("has no message: send one")
    return messages


class ResponsesTool(ApiObject):
    type: Literal["function"]
    name: str = Field(pattern=NAME)
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None  # forced calls follow their schemas in any case, others in none

    @property
    def plain(self) -> dict[str, Any]:
        """The tool in the notation of chat completions."""
        return {"type": "function", "function": {name: getattr(self, name) for name in Function.model_fields}}


class NamedFunction(ApiObject):
    type: Literal["function"]
    name: str


def validate_tool_choice(choice: Any) -> Any:
    """Validate a choice of tools; return the word or the `NamedFunction`."""
    if isinstance(choice, str) and choice in CHOICES:
        return choice
    if not isinstance(choice, dict):
        raise ValueError('should be "none", "auto", "required", or an object that names a function')
    return NamedFunction.model_validate(choice)


def validate_metadata(metadata: Any) -> Any:
    """Validate metadata, with one error for all of them."""
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("should be an object whose values are strings")
    if len(metadata) > MAX_METADATA:
        raise ValueError(f"at most {MAX_METADATA} values are allowed, not {len(metadata)}")
    return metadata


class TextFormat(ApiObject):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool | None = None  # the schema is followed in any case

    @model_validator(mode="after")
    def check_schema(self) -> "TextFormat":
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("schema is required for the type json_schema, and only allowed with it")
        return self

    @property
    def response_format(self) -> dict[str, Any]:
        """The format in the notation of chat completions."""
        if self.schema_ is None:
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"name": self.name or "answer", "schema": self.schema_}}


class TextOptions(ApiObject):
    no_effect: ClassVar[dict[str, tuple]] = {"verbosity": ("medium",)}

    format: TextFormat | None = None


class ResponsesStreamOptions(ApiObject):
    include_obfuscation: bool | None = None  # accepted, but nothing is obfuscated


class ReasoningOptions(ApiObject):
    no_effect: ClassVar[dict[str, tuple]] = {"generate_summary": LABEL, "summary": LABEL}  # none is ever made

    effort: ReasoningEffort | None = None


class ResponsesChat(ChatCompletionRequest):
    """A request of /v1/responses as a chat completion, whose errors name the parameters of the former."""

    prompt_name: ClassVar[str] = "input"
    effort_name: ClassVar[str] = "reasoning.effort"
    parameters_name: ClassVar[str] = "tools[{}].parameters"

    @property
    def limit_name(self) -> str:
        return "max_output_tokens"

    def structure(self, tool_format: ToolFormat | None) -> Structure | None:
        structure = super().structure(tool_format)
        return (
            structure
            if structure is None or structure.parameter == "tools"
            else structure._replace(parameter="text.format")
        )


class ResponsesRequest(ApiObject):
    no_effect: ClassVar[dict[str, tuple]] = {
        "background": (False,),
        "include": ([], ["reasoning.encrypted_content"]),  # reasoning is returned as text
        "prompt_cache_retention": LABEL,
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }

    model: str
    input: Annotated[list, BeforeValidator(to_messages), WithJsonSchema(INPUT)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=2**31)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[ResponsesTool], FailFast()] = Field([], max_length=MAX_TOOLS)
    tool_choice: Annotated[
        str | NamedFunction,
        BeforeValidator(validate_tool_choice),
        WithJsonSchema({"anyOf": [{"enum": list(CHOICES)}, NAMED]}),
    ] = "auto"
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    # returned, but without effect
    metadata: Annotated[dict[str, str], BeforeValidator(validate_metadata), WithJsonSchema(METADATA)] = Field({})
    user: str | None = None
    safety_identifier: str | None = None
    max_tool_calls: int | None = Field(None, ge=1, le=2**31)  # of OpenAI's own tools, which are not served
    service_tier: str | None = None
    # extensions
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    top_k: TopK = None
    chat_template_kwargs: TemplateVariables = Field({})

    @field_validator("store")
    @classmethod
    def reject_store(cls, store: bool) -> bool:
        if store:
            raise ValueError("this server stores no responses: send false, or omit it")
        return store

    @field_validator("previous_response_id")
    @classmethod
    def reject_previous_response_id(cls, response_id: str) -> str:
        raise ValueError("this server stores no responses: send the earlier messages in input")

    @field_validator("tools")
    @classmethod
    def check_tool_names(cls, tools: list[ResponsesTool]) -> list[ResponsesTool]:
        check_names([tool.name for tool in tools])
        return tools

    @field_validator("tool_choice")
    @classmethod
    def check_tool_choice(cls, choice: str | NamedFunction, info: ValidationInfo) -> str | NamedFunction:
        names = [tool.name for tool in info.data.get("tools", ())]
        check_choice(choice.name if isinstance(choice, NamedFunction) else None, choice == "required", names)
        return choice

    @property
    def text_format(self) -> TextFormat | None:
        return self.text.format if self.text else None

    @property
    def chat(self) -> ResponsesChat:
        developer_messages = [] if self.instructions is None else [{"role": "developer", "content": self.instructions}]
        common_fields = (
            "model",
            "temperature",
            "top_p",
            "stream",
            "prompt_cache_key",
            "seed",
            "top_k",
            "parallel_tool_calls",
            "chat_template_kwargs",
        )
        choice = self.tool_choice
        if isinstance(choice, NamedFunction):
            choice = {"type": "function", "function": {"name": choice.name}}  # type: ignore[assignment]
        return ResponsesChat.model_validate(
            {
                **{name: getattr(self, name) for name in common_fields},
                "messages": [*developer_messages, *self.input],
                "max_completion_tokens": self.max_output_tokens,
                "response_format": self.text_format.response_format if self.text_format else None,
                "tools": [tool.plain for tool in self.tools],
                "tool_choice": choice,
                "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            }
        )
