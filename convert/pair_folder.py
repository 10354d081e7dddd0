"""The folder of a pair: OUT_DIR/main, OUT_DIR/draft and OUT_DIR/pair.json, which get there whole or not at all.

Everything is made in a hidden folder beside OUT_DIR (`.NAME.unfinished`) and moved by renaming. A half that is complete
stays there until its pair is, so that a second run goes on from it; other files in OUT_DIR are left alone.
"""

import contextlib
import json
import os
import shutil
from pathlib import Path

from convert.errors import ConvertError
from speculative.model_facts import is_ir

HALVES = ("main", "draft")
SAME = ("source", "revision", "content", "arguments")  # a half with equal values of these is not made again


class PairFolder:
    """OUT_DIR and its hidden folder beside it."""

    def __init__(self, target: Path):
        self.target = target
        self.work = target.parent / f".{target.name}.unfinished"
        self.temporary = self.work / "tmp"
        self._lock_file = None
        self.old = self.work / "old"  # what an install replaces, while it runs

    def prepare(self) -> None:
        """Make the hidden folder, undo an install that was interrupted, and refuse a target that cannot be written."""
        for half in HALVES:
            folder = self.target / half
            if folder.exists() and not is_ir(folder) and (not folder.is_dir() or any(folder.iterdir())):
                raise ConvertError(
                    f"{folder} exists and is not an OpenVINO model, so it will not be replaced; choose another OUT_DIR",
                    2,
                )
        try:
            self.work.mkdir(parents=True, exist_ok=True)
            self._lock()
            if self.target.exists():
                probe = self.target / ".writable"
                probe.touch()
                probe.unlink()
        except OSError as error:
            self.clean()
            raise ConvertError(f"{self.target} cannot be written ({error.strerror}); choose another OUT_DIR") from error
        self._put_back()
        for leftover in (self.temporary, self.work / "replaced", *(self._part(half) for half in HALVES)):
            shutil.rmtree(leftover, ignore_errors=True)

    def _lock(self) -> None:
        """Keep a second export to the same target out. The system frees the lock when this process ends, in any way."""
        lock_file = (self.work / "lock").open("w")
        try:
            if os.name == "nt":
                import msvcrt

                msvcrt.locking(lock_file.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                import fcntl

                fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._lock_file = lock_file
        except OSError:
            lock_file.close()
            raise ConvertError(
                f"another export to {self.target} is running; wait for it, or choose another OUT_DIR"
            ) from None

    def finished(self, half: str, wanted: dict) -> dict | None:
        """The record of this half if the target or the hidden folder holds it complete and as wanted."""
        record = _read(self.target / "pair.json").get(half)
        if _as_wanted(self.target / half, record, wanted):
            self._forget(half)
            return record
        record = _read(self._record(half))
        return record if _as_wanted(self.work / half, record, wanted) else None

    def place(self, half: str) -> Path:
        """Where this half is now: made by an unfinished run, or in the target from an earlier one."""
        return self.work / half if (self.work / half).is_dir() else self.target / half

    def start(self, half: str) -> Path:
        """A folder that does not exist, for a new half to be written to; an older unfinished one goes."""
        self._forget(half)
        shutil.rmtree(self._part(half), ignore_errors=True)
        return self._part(half)

    def discard(self, half: str) -> None:
        """Drop what an export that did not end well has written."""
        for folder in (self._part(half), self.temporary):
            shutil.rmtree(folder, ignore_errors=True)

    def complete(self, half: str, record: dict) -> None:
        """Declare a half whole: its files first, its record last."""
        self._part(half).rename(self.work / half)
        _write(self._record(half), record)

    def _forget(self, half: str) -> None:
        self._record(half).unlink(missing_ok=True)
        shutil.rmtree(self.work / half, ignore_errors=True)

    def log(self, half: str) -> Path:
        return self.work / f"{half}.log"

    def has_new_halves(self) -> bool:
        """Whether there is anything to install."""
        return any((self.work / half).is_dir() for half in HALVES)

    def install(self, pair: dict) -> None:
        """Move the new halves into the target, pair.json last; on any failure the old pair comes back whole."""
        new = [half for half in HALVES if (self.work / half).is_dir()] + ["pair.json"]
        _write(self.work / "pair.json", pair)
        try:
            self.target.mkdir(parents=True, exist_ok=True)
            self.old.mkdir()
            for name in new:
                if (self.target / name).exists():
                    (self.target / name).rename(self.old / name)
            for name in new:
                (self.work / name).rename(self.target / name)
            self.old.rename(self.work / "replaced")  # from here on the new pair counts
        except BaseException:
            self._put_back()
            raise
        for half in HALVES:
            if self.log(half).exists():
                self.log(half).replace(self.target / f"{half}.log")
        self._remove()

    def _put_back(self) -> None:
        """Undo an install: new halves return to the hidden folder, old ones to the target."""
        if not self.old.is_dir():
            return
        for name in (*HALVES, "pair.json"):
            was_new = name == "pair.json" or self._record(name).exists()
            if was_new and not (self.work / name).exists() and (self.target / name).exists():
                (self.target / name).rename(self.work / name)
            if (self.old / name).exists():
                (self.old / name).rename(self.target / name)
        self.old.rmdir()
        with contextlib.suppress(OSError):  # a target that the install made is empty again
            self.target.rmdir()

    def clean(self) -> None:
        """Let go of the hidden folder, and remove it where nothing in it is worth a second run."""
        worth_keeping = self.has_new_halves() or self.old.exists() or any(self.work.glob("*.log"))
        if self._lock_file and not worth_keeping:
            self._remove()
        elif self._lock_file:
            self._lock_file.close()

    def _remove(self) -> None:
        self._lock_file.close()  # Windows removes no open file
        shutil.rmtree(self.work, ignore_errors=True)

    def _part(self, half: str) -> Path:
        return self.work / f"{half}.part"

    def _record(self, half: str) -> Path:
        return self.work / f"{half}.json"


def folder_bytes(folder: Path) -> int:
    """Size of all files in a folder, in bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _as_wanted(folder: Path, record: dict | None, wanted: dict) -> bool:
    """Whether the folder is complete and was made of what is wanted, the way it is wanted."""
    if not record or any(record.get(key) != wanted[key] for key in SAME):
        return False
    return is_ir(folder) and folder_bytes(folder) == record.get("bytes")


def _read(path: Path) -> dict:
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(path.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    return {}


def _write(path: Path, content: dict) -> None:
    partial = path.with_name(f".{path.name}.part")
    partial.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n")
    partial.replace(path)
