"""Messages of a chat: roles, content in one text or in parts, tool calls and their results."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, FailFast, Field, ValidationError, WithJsonSchema, model_validator

from speculative.serving.api.api_object import LABEL, ApiObject
from speculative.serving.api.errors import describe_error
from speculative.serving.api.tools import ToolCall

TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
REFUSAL_PART = {
    "type": "object",
    "properties": {"type": {"const": "refusal"}, "refusal": {"type": "string"}},
    "required": ["type", "refusal"],
}
PARTS = {"type": "array", "items": {"anyOf": [TEXT_PART, REFUSAL_PART]}}
TEXT_OR_PARTS = {"anyOf": [{"type": "string"}, PARTS]}


class TextPart(ApiObject):
    no_effect: ClassVar[dict[str, tuple]] = {"cache_control": LABEL}

    type: Literal["text"]
    text: str


class RefusalPart(ApiObject):
    """A part of an answer of OpenAI's models, whose text the chat template gets like that of others."""

    type: Literal["refusal"]
    text: str = Field(alias="refusal")


def is_refusal(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "refusal"


def join_text_parts(content: Any) -> Any:
    """Concatenate the texts of a list of content parts. Raises ValueError if a part is not a text part."""
    if not isinstance(content, list):
        return content
    texts = []
    for i, part in enumerate(content):
        try:
            texts.append((RefusalPart if is_refusal(part) else TextPart).model_validate(part).text)
        except ValidationError as error:
            place, problem = describe_error(error.errors(include_url=False)[0])
            raise ValueError(f"part {i} is not a text part: {place}{': ' if place else ''}{problem}") from None
    return "".join(texts)


class Message(ApiObject):
    no_effect: ClassVar[dict[str, tuple]] = {
        "refusal": ("",),
        "function_call": ({},),
        "audio": ({},),
        "annotations": LABEL,  # sources of an earlier response
        "parsed": LABEL,  # `content` again, as the openai package parsed it
        "provider_specific_fields": LABEL,  # LiteLLM's
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(join_text_parts), WithJsonSchema(TEXT_OR_PARTS)]
    name: str | None = None
    tool_calls: Annotated[list[ToolCall] | None, FailFast()] = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's name of `reasoning_content`

    @model_validator(mode="before")
    @classmethod
    def check_role(cls, data: Any) -> Any:
        """Only an answer may be empty and have calls; only the result of a call has its id."""
        if not isinstance(data, dict):
            return data
        role = data.get("role")  # other calls would add to the time of a message
        if role != "assistant" and "tool_calls" in data and data["tool_calls"]:
            raise ValueError("only messages of the role assistant have tool_calls")
        if role != "assistant" and (data.get("reasoning_content") or data.get("reasoning")):
            raise ValueError("only messages of the role assistant have reasoning_content")
        if ("tool_call_id" in data and data["tool_call_id"] is not None) != (role == "tool"):
            raise ValueError("messages of the role tool, and no others, need a tool_call_id")
        if role == "assistant" and ("content" not in data or data["content"] is None):
            return {**data, "content": ""}
        return data

    def plain(self) -> dict[str, Any]:
        """Return the message in the format of chat templates."""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        if reasoning := self.reasoning_content or self.reasoning:
            message["reasoning_content"] = reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.role == "tool":
            message |= {"tool_call_id": self.tool_call_id} | ({"name": self.name} if self.name else {})
        return message
