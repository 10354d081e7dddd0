"""Write a file whole or not at all: what stood there before is replaced when its new content is complete."""

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Raises OSError where it cannot be written; then nothing has changed and nothing is left beside it."""
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():  # a pipe or a device has nothing to keep
        path.write_bytes(data)
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
