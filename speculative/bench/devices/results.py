"""A file of results that grows line by line, so that an interrupted run can go on: JSON, with a key for each result.

    kept = ResultsFile(Path("device_swap.jsonl"))
    if key not in kept.lines:
        kept.append(key, {"status": "ok"})

A line is written whole or not at all; the last line of a key counts.
"""

import contextlib
import json
import os
from pathlib import Path

from speculative.cli.whole_file import write_whole

START = b'{"key": '  # of every line


class ResultsFile:
    """`lines` has the result of each key. `problem` says why the last one could not be written, if it could not."""

    def __init__(self, path: Path):
        """Raises ValueError where the file is none of this kind, or cannot be written."""
        self.path = path
        self.problem = ""
        self.lines: dict[str, dict] = {}
        try:
            existed = path.exists()
            with path.open("ab"):  # seen now, not after minutes of measuring
                pass
            if not existed:
                path.unlink()  # made when there is something to keep
            elif path.is_file():
                self._read(path.read_bytes())
        except OSError as error:
            raise ValueError(f"{path} cannot be written ({error.strerror}): name another file with --results") from None

    def _read(self, content: bytes) -> None:
        complete, _, cut_off = content.rpartition(b"\n")
        for number, line in enumerate(complete.split(b"\n") if complete else [], start=1):
            try:
                kept = json.loads(line)
                self.lines[kept["key"]] = kept["result"]
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f"line {number} of {self.path} is no result of this program: name another file with --results"
                ) from None
        if cut_off:
            if not START.startswith(cut_off[: len(START)]):
                raise ValueError(f"{self.path} holds no results of this program: name another file with --results")
            os.truncate(self.path, len(content) - len(cut_off))  # the machine went down while it was written

    def forget(self, keys: set[str]) -> None:
        """Take these out of the file. Raises OSError, with nothing changed, where that cannot be written."""
        rest = {key: result for key, result in self.lines.items() if key not in keys}
        if rest != self.lines:
            write_whole(self.path, b"".join(_line(key, result) for key, result in rest.items()))
            self.lines = rest

    def append(self, key: str, result: dict) -> None:
        """Add a result. Where that fails nothing of it is left in the file, and `problem` says why."""
        self.lines[key] = result
        try:
            with self.path.open("ab", buffering=0) as file:  # a buffer would try again when it is closed
                before, rest = file.tell(), _line(key, result)
                try:
                    while rest:
                        rest = rest[file.write(rest) :]
                    os.fsync(file.fileno())
                except OSError:
                    with contextlib.suppress(OSError):  # a device cannot be cut
                        os.truncate(self.path, before)
                    raise
            self.problem = ""
        except OSError as error:
            self.problem = error.strerror or type(error).__name__


def _line(key: str, result: dict) -> bytes:
    return json.dumps({"key": key, "result": result}, ensure_ascii=False).encode() + b"\n"
