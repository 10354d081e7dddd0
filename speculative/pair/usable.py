"""Errors of loading a pair, in the words of whoever called it."""

from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path

from speculative.pair.model_info import require_runnable

MIN_CAPACITY = 4  # tokens, which the check of rollback takes


@contextmanager
def explained(main: Path, draft: Path | None) -> Iterator[None]:
    """Within the block, an error of OpenVINO becomes a ValueError that says what is wrong with a folder, if anything
    is."""
    try:
        yield
    except RuntimeError as error:
        require_runnable(main, writes_text=True)
        if draft:
            require_runnable(draft, writes_text=False)
        raise error


def check_capacity(name: str, tokens: int | None) -> None:
    """Raise ValueError for a capacity in which no model can be loaded; None stands for the default."""
    if tokens is not None and not (isinstance(tokens, Integral) and tokens >= MIN_CAPACITY):
        raise ValueError(f"{name} is {tokens!r}, but must be a whole number of tokens from {MIN_CAPACITY}")
