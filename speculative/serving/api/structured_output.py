"""Structured output in the API: `response_format`, and vLLM's `structured_outputs`, as a grammar of the engine."""

import json
import re
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple

from openvino_genai import StructuredOutputConfig
from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from speculative.serving.api.api_object import ApiObject
from speculative.serving.api.reasoning import END, MAX_NEWLINES

Tags = StructuredOutputConfig

MAX_CHARACTERS = 65_536  # of a schema as JSON, of a regular expression, of a grammar
# Between the parts of JSON: nothing, a space, or one or two line ends and indentation, as in llama.cpp. Small models
# fill what is unlimited with whitespace until max_tokens.
WHITESPACE = {"whitespace_pattern": r" |\n{1,2}[ \t]{0,20}"}
JSON_OBJECT = {"type": "object"}


class Structure(NamedTuple):
    """A constraint on the output, and the request parameter that sets it."""

    parameter: str
    config: StructuredOutputConfig
    forces_calls: bool = False  # of tools: nothing else is allowed
    parts: "tuple[Structure, ...]" = ()  # the schemas in it, with their own parameters

    def after_reasoning(self, opening: str) -> "Structure":
        """The constraint on the answer alone, after free reasoning, which `opening` opens (`ReasoningFormat.opening`).
        The reasoning may be left out, unless the prompt opens it."""
        newlines = Tags.Regex(rf"\n{{0,{MAX_NEWLINES}}}")
        reasoning = Tags.Concat([Tags.Tag(opening, Tags.AnyText(), END), newlines])
        if opening:
            reasoning = Tags.Union([reasoning, Tags.ConstString("")])
        tag = Tags.Concat([reasoning, self._tag])
        return self._replace(config=StructuredOutputConfig(structural_tags_config=tag))

    @classmethod
    def of_schema(cls, parameter: str, schema: str) -> "Structure":
        return cls(parameter, StructuredOutputConfig(json_schema=schema))

    @property
    def _tag(self) -> Any:
        """The constraint as a structural tag."""
        kinds = {"json_schema": Tags.JSONSchema, "regex": Tags.Regex, "grammar": Tags.EBNF}
        sources = ((kind, getattr(self.config, name)) for name, kind in kinds.items())
        return next((kind(source) for kind, source in sources if source), self.config.structural_tags_config)


def check_size(value: Any) -> Any:
    """Validate the size of a JSON schema or of a list of texts."""
    try:
        size = len(json.dumps(value))
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if size > MAX_CHARACTERS:
        raise ValueError(f"has {size} characters as JSON, but at most {MAX_CHARACTERS} are allowed")
    return value


def parse_schema(schema: Any) -> Any:
    """Parse a schema that is a string."""
    try:
        return json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError):
        raise ValueError("is not a JSON schema") from None


def with_whitespace(schema: dict[str, Any], options: dict[str, Any] = WHITESPACE) -> str:
    """Return the schema as JSON, with the `options` unless it has llguidance's itself."""
    return json.dumps({"x-guidance": options, **schema})


Schema = Annotated[dict[str, Any], AfterValidator(check_size)]
SchemaOrText = Annotated[
    Schema | None, BeforeValidator(parse_schema), WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]})
]
Source = Annotated[str | None, Field(max_length=MAX_CHARACTERS)]


class JsonSchema(ApiObject):
    name: str
    description: str | None = None
    schema_: Schema = Field(alias="schema")
    strict: bool | None = None  # the schema is followed in any case


class ResponseFormat(ApiObject):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def check_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is required for the type json_schema, and only allowed with it")
        return self

    @property
    def schema_text(self) -> str | None:
        """The JSON schema of the answer."""
        schema = self.json_schema.schema_ if self.json_schema else JSON_OBJECT
        return None if self.type == "text" else with_whitespace(schema)

    @cached_property
    def structure(self) -> Structure | None:
        parameter = "response_format.json_schema.schema" if self.json_schema else "response_format"
        text = self.schema_text
        return Structure.of_schema(parameter, text) if text else None


class StructuredOutputs(ApiObject):
    """vLLM's extension."""

    json_: SchemaOrText = Field(None, alias="json")
    json_object: bool | None = None
    regex: Source = None
    choice: Annotated[list[str] | None, AfterValidator(check_size)] = Field(None, min_length=1)
    grammar: Source = None

    @model_validator(mode="after")
    def check_one_kind(self) -> "StructuredOutputs":
        kinds = [self.json_, self.json_object or None, self.regex, self.choice, self.grammar]
        if sum(kind is not None for kind in kinds) != 1:
            raise ValueError("needs one of json, json_object, regex, choice and grammar")
        return self

    @cached_property
    def structure(self) -> Structure:
        if self.grammar is not None:
            return Structure("structured_outputs.grammar", StructuredOutputConfig(grammar=self.grammar))
        if self.regex is not None:
            return Structure("structured_outputs.regex", StructuredOutputConfig(regex=self.regex))
        if self.choice is not None:
            regex = "|".join(re.escape(text) for text in self.choice)
            return Structure("structured_outputs.choice", StructuredOutputConfig(regex=regex))
        kind = "json_object" if self.json_ is None else "json"
        schema = JSON_OBJECT if self.json_ is None else self.json_
        return Structure.of_schema(f"structured_outputs.{kind}", with_whitespace(schema))
