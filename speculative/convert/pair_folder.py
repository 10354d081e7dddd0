"""Pair folder: atomic installation of OUT_DIR/main, OUT_DIR/draft and OUT_DIR/pair.json.

Everything is created in a hidden folder next to OUT_DIR (`.NAME.unfinished`; next to what OUT_DIR links to) and then
renamed. A completed half stays there until the pair is complete, so that a second run can resume; other files in
OUT_DIR are not touched.
"""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import TypedDict, TypeGuard

from speculative.atomic_write import atomic_write
from speculative.convert.errors import ConvertError
from speculative.convert.work_folder import WorkFolder
from speculative.pair.model_info import is_ir

HALVES = ("main", "draft")
SAME = ("source", "revision", "content", "arguments", "thinking")  # a half is reused if these are equal


class Record(TypedDict):
    """What `_foreign` reads in the record of a half."""

    source: str
    bytes: int


class PairFolder(WorkFolder):
    """OUT_DIR and the hidden folder next to it."""

    def __init__(self, target: Path):
        place = target.resolve() if target.is_symlink() else target  # its disk may be another one than the link's
        work = place.parent / f".{place.name}.unfinished"
        super().__init__(target, work, new=work, into=place)
        self.temporary = self.work / "tmp"

    def open(self) -> None:
        """Create and lock the hidden folder, undo an interrupted install, and reject a target that is not writable."""
        super().open()
        try:
            if self.target.exists():
                tempfile.TemporaryFile(dir=self.target).close()
        except OSError as error:
            self.close()
            raise ConvertError(f"{self.target} cannot be written ({error.strerror}); choose another OUT_DIR") from error
        for leftover in (self.temporary, self.work / "replaced", *(self._part(half) for half in HALVES)):
            shutil.rmtree(leftover, ignore_errors=True)

    def refuse_foreign(self, sources: dict[str, str], overwrite: bool) -> None:
        """Raise ConvertError if the target holds files that this program did not make, or made from other sources.

        `sources` names the source of each half to make. With `overwrite`, other models may be replaced, nothing else.
        """
        records = _read(self.target / "pair.json")
        foreign = {half: self._foreign(half, records.get(half), source) for half, source in sources.items()}
        if (self.target / "pair.json").exists() and not any(_is_record(records.get(half)) for half in HALVES):
            foreign["pair.json"] = "was not made by this program"
        for name, reason in foreign.items():
            if reason and not overwrite:
                raise ConvertError(
                    f"{self.target / name} {reason}; choose another OUT_DIR, or replace it with --overwrite", 2
                )

    def _foreign(self, half: str, record: object, source: str) -> str:
        """Why an export from `source` must not replace this half of the target without --overwrite; "" if it may."""
        folder = self.target / half
        if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
            return ""
        if not is_ir(folder):
            raise ConvertError(
                f"{folder} exists and is not an OpenVINO model, so it will not be replaced; choose another OUT_DIR", 2
            )
        if not _is_record(record):
            return "was not made by this program (pair.json does not record it)"
        if not _same_source(record["source"], source):
            return f"was made from {record['source']}, not from {source}"
        return "contains files that this program did not write" if folder_bytes(folder) > record["bytes"] else ""

    def finished(self, half: str, expected: dict) -> dict | None:
        """The record of this half if the target or the hidden folder has it complete and as requested."""
        record = _read(self.target / "pair.json").get(half)
        if _matches(self.target / half, record, expected):
            self._forget(half)
            return record
        record = _read(self._record(half))
        return record if _matches(self.work / half, record, expected) else None

    def other_records(self, halves: list[str]) -> dict:
        """The records of the target's halves except those given."""
        records = _read(self.target / "pair.json")
        return {half: records[half] for half in HALVES if half not in halves and half in records}

    def place(self, half: str) -> Path:
        """Where this half is now: made by an unfinished run, or in the target from an earlier one."""
        return self.work / half if (self.work / half).is_dir() else self.target / half

    def start(self, half: str) -> Path:
        """A path for a new half, which does not exist yet; removes an earlier unfinished one."""
        self._forget(half)
        shutil.rmtree(self._part(half), ignore_errors=True)
        return self._part(half)

    def discard(self, half: str) -> None:
        """Remove the files of a failed export."""
        for folder in (self._part(half), self.temporary):
            shutil.rmtree(folder, ignore_errors=True)

    def complete(self, half: str, record: dict) -> None:
        """Mark a half as complete: move its files, then write its record."""
        self._part(half).rename(self.work / half)
        _write(self._record(half), record)

    def forget_others(self, halves: Collection[str]) -> None:
        """Remove what an unfinished run left of all halves except `halves`."""
        for half in {*HALVES}.difference(halves):
            self._forget(half)
            self.log(half).unlink(missing_ok=True)

    def _forget(self, half: str) -> None:
        self._record(half).unlink(missing_ok=True)
        shutil.rmtree(self.work / half, ignore_errors=True)

    def log(self, half: str) -> Path:
        return self.work / f"{half}.log"

    def has_new_halves(self) -> bool:
        """Whether there is anything to install."""
        return any((self.work / half).is_dir() for half in HALVES)

    def new_names(self) -> list[str]:
        return [*(half for half in HALVES if self._record(half).exists()), "pair.json"]

    def install_pair(self, pair: dict) -> None:
        """Move the new halves into the target, pair.json last; on any failure the old pair is restored."""
        _write(self.work / "pair.json", pair)
        self.install()
        for half in HALVES:
            if self.log(half).exists():
                self.log(half).replace(self.target / f"{half}.log")

    def _put_back(self) -> None:
        if self.old.is_dir():
            super()._put_back()
            with contextlib.suppress(OSError):  # remove the target if the install created it
                self.into.rmdir()

    def keeps_something(self) -> bool:
        """Whether the folder has anything to resume from, or a log to read."""
        return super().keeps_something() or self.has_new_halves() or any(self.work.glob("*.log"))

    def _part(self, half: str) -> Path:
        return self.work / f"{half}.part"

    def _record(self, half: str) -> Path:
        return self.work / f"{half}.json"


def folder_bytes(folder: Path) -> int:
    """Total size of all files in a folder, in bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _matches(folder: Path, record: dict | None, expected: dict) -> bool:
    """Whether the folder is complete and was made from the requested source with the requested arguments."""
    if not record or any(record.get(key) != expected.get(key) for key in SAME):
        return False
    return is_ir(folder) and folder_bytes(folder) == record.get("bytes")


def _is_record(record: object) -> TypeGuard[Record]:
    """Whether this is a valid record of a half in pair.json."""
    return isinstance(record, dict) and isinstance(record.get("source"), str) and isinstance(record.get("bytes"), int)


def _same_source(first: str, other: str) -> bool:
    """Whether both name the same hub repository or local folder."""
    return first == other or (Path(other).exists() and Path(first).resolve() == Path(other).resolve())


def _read(path: Path) -> dict:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        content = json.loads(path.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    return {}


def _write(path: Path, content: dict) -> None:
    atomic_write(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
