"""`ApiObject`: base class of the JSON objects in a request."""

import json
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

NOT_SERVED = "not_served"  # type of the error for an unknown or unsupported field, whose context has its name
LABEL = ()  # `off` of a field that labels a request or message without effect on the output: any value is accepted


class ApiObject(BaseModel):
    """A JSON object of the API. Nulls, and unsupported fields with one of their `off` values, count as omitted."""

    model_config = ConfigDict(extra="forbid", strict=True)
    off: ClassVar[dict[str, tuple]] = {}  # unsupported fields, with the values that change nothing
    names: ClassVar[frozenset[str]]  # of the fields, in the API

    @classmethod
    def __pydantic_init_subclass__(cls, **_: object) -> None:
        cls.names = frozenset(field.alias or name for name, field in cls.model_fields.items())

    @model_validator(mode="before")
    @classmethod
    def drop_omitted(cls, data: Any) -> Any:
        """Remove omitted fields."""
        if not isinstance(data, dict):
            return data
        for name, value in data.items():
            if value is None or name in cls.names:
                continue
            off = cls.off.get(name)
            if off is None or (off != LABEL and value not in off):
                raise PydanticCustomError(NOT_SERVED, "{problem}", {"name": name, "problem": _problem(off)})
        return {name: value for name, value in data.items() if name in cls.names and value is not None}


def _problem(off: tuple | None) -> str:
    if off is None:
        return "unknown parameter: omit it"
    return f"only {' or '.join(map(json.dumps, off))} is supported: omit it"
