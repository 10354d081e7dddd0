"""`ApiObject`: base class of the JSON objects in a request."""

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

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
        """Remove omitted fields. Keep at most one unsupported field, for pydantic's error to name."""
        if not isinstance(data, dict):
            return data
        fields = cls.names
        given = {name: value for name, value in data.items() if name in fields and value is not None}
        for name, value in data.items():
            if value is None or name in fields:
                continue
            off = cls.off.get(name)
            if off is None or (off != LABEL and value not in off):
                return given | {name: value}
        return given
