"""Text of errors, as programs and the server report them."""

MEMORY_SIGNS = (
    *("bad_alloc", "out of memory", "out_of_", "cannot allocate", "resource temporarily unavailable"),
    *("exceeded max size", "resource exhausted"),
)


def one_line(error: BaseException | None) -> str:
    """Return the whole message on one line, or the exception's type if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


def engine_lines(error: BaseException | None) -> list[str]:
    """Return the lines of an OpenVINO error without its source locations; the exception's type if none is left."""
    lines = (line.strip() for line in str(error).splitlines())
    kept = [line for line in lines if line and not line.startswith(("Exception from", "Check '"))]
    return kept or [one_line(error)]


def lone_surrogate(text: str) -> str:
    """The first lone surrogate in `text`, half of a character, as Python writes it; "" if the text is valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return ascii(error.object[error.start])
    return ""


def is_out_of_memory(error: BaseException | None) -> bool:
    text = f"{getattr(error, 'strerror', None) or ''} {error}".lower()
    return isinstance(error, MemoryError) or any(sign in text for sign in MEMORY_SIGNS)
