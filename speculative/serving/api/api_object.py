"""`ApiObject`: base class of the JSON objects in a request."""

import json
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

NOT_SERVED = "not_served"  # type of the error for an unknown or unsupported field, whose context has its name
LABEL = ()  # `no_effect` of a field that only labels a request or message: any value is accepted


class ApiObject(BaseModel):
    """A JSON object of the API. Nulls, and unsupported fields with a value in `no_effect`, count as omitted."""

    model_config = ConfigDict(extra="forbid", strict=True)
    no_effect: ClassVar[dict[str, tuple]] = {}  # unsupported fields, with the values that do not change the output
    names: ClassVar[frozenset[str]]  # API names of the fields
    types: ClassVar[tuple[str, ...]]  # values of the field `type`; none without it

    @classmethod
    def __pydantic_init_subclass__(cls, **_: object) -> None:
        cls.names = frozenset(field.alias or name for name, field in cls.model_fields.items())
        cls.types = get_args(cls.model_fields["type"].annotation) if "type" in cls.model_fields else ()

    @model_validator(mode="before")
    @classmethod
    def drop_omitted(cls, data: Any) -> Any:
        """Remove omitted fields. An object of another type has other fields, so its type is the problem."""
        if not isinstance(data, dict):
            return data
        if cls.types and isinstance(kind := data.get("type"), str) and kind not in cls.types:
            problem = f"is {kind[:64]!r}, but only {' or '.join(map(repr, cls.types))} is supported"
            raise PydanticCustomError(NOT_SERVED, "{problem}", {"name": "type", "problem": problem})
        for name, value in data.items():
            if value is None or name in cls.names:
                continue
            no_effect = cls.no_effect.get(name)
            if no_effect is None or (no_effect != LABEL and value not in no_effect):
                raise PydanticCustomError(NOT_SERVED, "{problem}", {"name": name, "problem": _problem(no_effect)})
        return {name: value for name, value in data.items() if name in cls.names and value is not None}


def _problem(no_effect: tuple | None) -> str:
    if no_effect is None:
        return "unknown parameter: omit it"
    return f"only {' or '.join(map(json.dumps, no_effect))} is supported: omit it"
