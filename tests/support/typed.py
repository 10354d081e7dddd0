"""Check of a JSON value against a type: a TypedDict, as in speculative/bench/result.py, or what it is made of."""

from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

SCALARS = {str: str, int: int, bool: bool, NoneType: NoneType, float: (float, int)}  # JSON may write 1 for 1.0


def problems(value: object, expected: object, where: str = "result") -> list[str]:
    """How `value` differs from the type, one sentence each: unknown and missing keys, and values of other types.

    Empty if it has the type. Raises TypeError for a type that this check does not know.
    """
    origin, arguments = get_origin(expected), get_args(expected)
    if origin in (Union, UnionType):
        return min((problems(value, one, where) for one in arguments), key=len)
    if is_typeddict(expected) and isinstance(value, dict):
        return _problems_of_keys(value, expected, where)
    if origin is list and isinstance(value, list):
        return [one for i, part in enumerate(value) for one in problems(part, arguments[0], f"{where}[{i}]")]
    if origin is dict and isinstance(value, dict):
        key, item = arguments
        found = [f"{where} has the key {name!r}, not a number" for name in value if key is int and not name.isdecimal()]
        return found + [one for name, part in value.items() for one in problems(part, item, f"{where}[{name!r}]")]
    if origin is Literal:
        has_type = value in arguments
    elif expected in SCALARS:
        has_type = isinstance(value, SCALARS[expected]) and isinstance(value, bool) == (expected is bool)
    elif is_typeddict(expected) or origin in (list, dict):
        has_type = False
    else:
        raise TypeError(f"{expected} is not a type that tests/support/typed.py can check: add it there")
    return [] if has_type else [f"{where} is {value!r}, not {_name_of(expected)}"]


def _problems_of_keys(value: dict, expected: type, where: str) -> list[str]:
    types = get_type_hints(expected)
    found = [f"{where} lacks {key!r} of {expected.__name__}" for key in sorted(expected.__required_keys__ - set(value))]
    found += [f"{where} has {key!r}, unlike {expected.__name__}" for key in sorted(set(value) - set(types))]
    for key in set(types) & set(value):
        found += problems(value[key], types[key], f"{where}[{key!r}]")
    return found


def _name_of(expected: object) -> str:
    if get_origin(expected) is Literal:
        return f"one of {', '.join(map(repr, get_args(expected)))}"
    return getattr(expected, "__name__", str(expected))
