"""HTML and SVG from Python values, escaped by construction: what `tag` did not make is text."""

from html import escape


class Markup(str):
    """Text that is markup already."""


def text(value: object) -> Markup:
    """`value` as markup; lone surrogates, which a cut token may hold, become question marks."""
    if isinstance(value, Markup):
        return value
    return Markup(escape(str(value)).encode("utf-8", "replace").decode())


def tag(name: str, *content: object, **attributes: object) -> Markup:
    """An element. `class_` is written class, `stroke_width` stroke-width; None leaves an attribute out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{written}>{join(content)}</{name}>")


def join(parts) -> Markup:
    return Markup("".join(text(part) for part in parts))
