"""Atomic file write: an existing file is replaced only when its new content is complete."""

import os
from pathlib import Path


def atomic_write(path: Path, content: str | bytes) -> None:
    """Write atomically. Raises OSError on failure; then nothing has changed and no temporary file is left."""
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():  # a pipe or a device has no content to preserve
        path.write_bytes(data)
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
