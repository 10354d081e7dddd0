"""HTML and SVG builder, escaped by construction: anything not made by `tag` is treated as text."""

from collections.abc import Iterable
from html import escape


class Markup(str):
    """A string that is already markup."""


def text(value: object) -> Markup:
    """`value` as markup; lone surrogates, which a partial token may contain, become question marks."""
    if isinstance(value, Markup):
        return value
    return Markup(escape(str(value)).encode("utf-8", "replace").decode())


def tag(name: str, *content: object, **attributes: object) -> Markup:
    """An element. `class_` becomes class and `stroke_width` stroke-width; an attribute that is None is omitted."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{written}>{join(content)}</{name}>")


def join(parts: Iterable[object]) -> Markup:
    return Markup("".join(text(part) for part in parts))
