"""Append-only results file for resumable runs: JSON lines, one key and result each.

    kept = ResultsFile(Path("device_swap.jsonl"))
    if key not in kept.lines:
        kept.append(key, {"status": "ok"})

A line is written completely or not at all; the last line for a key wins.
"""

import contextlib
import json
import os
from pathlib import Path

from speculative.atomic_write import atomic_write

START = b'{"key": '  # of every line


class ResultsFile:
    """`lines` maps keys to results. `problem` says why the last append failed, and is empty if it did not."""

    def __init__(self, path: Path):
        """Raises ValueError if the file is of another kind or cannot be written."""
        self.path = path
        self.problem = ""
        self.lines: dict[str, dict] = {}
        try:
            existed = path.exists()
            with path.open("ab"):  # fail now, not after minutes of measuring
                pass
            if not existed:
                path.unlink()  # created with the first result
            elif path.is_file():
                self._read(path.read_bytes())
        except OSError as error:
            raise ValueError(f"cannot write {path} ({error.strerror}): use another file with --results") from None

    def _read(self, content: bytes) -> None:
        complete, _, cut_off = content.rpartition(b"\n")
        for number, line in enumerate(complete.split(b"\n") if complete else [], start=1):
            try:
                entry = json.loads(line)
                self.lines[entry["key"]] = entry["result"]
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f"line {number} of {self.path} is not a result of this program: use another file with --results"
                ) from None
        if cut_off:
            if not START.startswith(cut_off[: len(START)]):
                raise ValueError(f"{self.path} is not a results file of this program: use another file with --results")
            os.truncate(self.path, len(content) - len(cut_off))  # the machine went down during a write

    def forget(self, keys: set[str]) -> None:
        """Remove these keys from the file. Raises OSError, with nothing changed, if it cannot be written."""
        remaining = {key: result for key, result in self.lines.items() if key not in keys}
        if remaining != self.lines:
            atomic_write(self.path, b"".join(_line(key, result) for key, result in remaining.items()))
            self.lines = remaining

    def append(self, key: str, result: dict) -> None:
        """Append a result. On failure the file is left unchanged and `problem` says why."""
        self.lines[key] = result
        try:
            with self.path.open("ab", buffering=0) as file:  # a buffer would be flushed again on close
                size_before, remaining = file.tell(), _line(key, result)
                try:
                    while remaining:
                        remaining = remaining[file.write(remaining) :]
                    os.fsync(file.fileno())
                except OSError:
                    with contextlib.suppress(OSError):  # a device file cannot be truncated
                        os.truncate(self.path, size_before)
                    raise
            self.problem = ""
        except OSError as error:
            self.problem = error.strerror or type(error).__name__


def _line(key: str, result: dict) -> bytes:
    return json.dumps({"key": key, "result": result}, ensure_ascii=False).encode() + b"\n"
