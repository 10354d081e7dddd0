"""Tools in requests: function definitions, `tool_choice`, and the calls of earlier answers."""

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from speculative.serving.api.api_object import LABEL, ApiObject
from speculative.serving.api.structured_output import Schema, with_whitespace

MAX_TOOLS = 128
NAME = r"^[a-zA-Z0-9_-]{1,64}$"
OTHER_PROPERTIES = {"$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "patternProperties"}  # may name some
# The arguments of a call are not meant to be read: a space behind "," and ":", as templates write calls, or none.
WHITESPACE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


class Function(ApiObject):
    name: str = Field(pattern=NAME)
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None  # forced calls follow their schemas in any case, others in none

    @property
    def schema_text(self) -> str:
        """The JSON schema of the arguments, which are an object. It has no properties but those that are named, unless
        the schema allows or names others elsewhere: small models invent some."""
        parameters = {"properties": {}} if self.parameters is None else self.parameters
        named, required = parameters.get("properties"), parameters.get("required", [])
        closed = {}
        if isinstance(named, dict) and isinstance(required, list) and not OTHER_PROPERTIES & parameters.keys():
            closed = {"additionalProperties": False} if all(str(name) in named for name in required) else {}
        return with_whitespace({"type": "object", **closed, **parameters}, WHITESPACE)


class Tool(ApiObject):
    type: Literal["function"]
    function: Function


class FunctionName(ApiObject):
    name: str


class NamedTool(ApiObject):
    type: Literal["function"]
    function: FunctionName


class FunctionCall(ApiObject):
    no_effect: ClassVar[dict[str, tuple]] = {
        "parsed_arguments": LABEL
    }  # `arguments` again, as the openai package parsed them

    name: str
    arguments: str

    @property
    def as_object(self) -> dict[str, Any] | str:
        """The arguments for chat templates. What a model wrote need not be a JSON object: other arguments stay text,
        and none are an empty object."""
        try:
            arguments = json.loads(self.arguments or "{}")
            json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()  # as the templates need it
        except (ValueError, RecursionError):
            return self.arguments
        return arguments if isinstance(arguments, dict) else self.arguments


class ToolCall(ApiObject):
    no_effect: ClassVar[dict[str, tuple]] = {"index": LABEL}  # of a streamed call

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall

    def plain(self) -> dict[str, Any]:
        """Return the call in the format of chat templates."""
        function = {"name": self.function.name, "arguments": self.function.as_object}
        return {"id": self.id, "type": self.type, "function": function}


CHOICES = ("none", "auto", "required")


def validate_tool_choice(choice: Any) -> Any:
    """Validate a choice of tools, which is one of CHOICES or names a tool; return the word or the `NamedTool`."""
    if isinstance(choice, str) and choice in CHOICES:
        return choice
    if not isinstance(choice, dict):
        raise ValueError('should be "none", "auto", "required", or an object that names a function')
    return NamedTool.model_validate(choice)


def check_names(names: list[str]) -> None:
    """Raise ValueError if two tools have the same name."""
    if len(set(names)) < len(names):
        raise ValueError("two of them have the same name")


def check_choice(named: str | None, is_required: bool, names: list[str]) -> None:
    """Raise ValueError if no tool has the name that a choice of tools `named`, or `is_required` but there are none."""
    if named is not None and named not in names:
        raise ValueError(f"names {named[:64]!r}, which is not among the tools")
    if is_required and not names:
        raise ValueError("is required, but there are no tools")


FUNCTION = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
NAMED_TOOL = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "function": FUNCTION},
    "required": ["type", "function"],
}
ToolChoice = Annotated[
    str | NamedTool,
    BeforeValidator(validate_tool_choice),
    WithJsonSchema({"anyOf": [{"enum": list(CHOICES)}, NAMED_TOOL]}),
]
