"""The folder of a pair: OUT_DIR/main, OUT_DIR/draft and OUT_DIR/pair.json, which get there whole or not at all.

Everything is made in a hidden folder beside OUT_DIR (`.NAME.unfinished`) and moved by renaming. A half that is complete
stays there until its pair is, so that a second run goes on from it; other files in OUT_DIR are left alone.
"""

import contextlib
import json
import shutil
from pathlib import Path

from speculative.convert.errors import ConvertError
from speculative.convert.work_folder import WorkFolder
from speculative.pair.model_info import is_ir

HALVES = ("main", "draft")
SAME = ("source", "revision", "content", "arguments")  # a half with equal values of these is not made again


class PairFolder(WorkFolder):
    """OUT_DIR and its hidden folder beside it."""

    def __init__(self, target: Path):
        work = target.parent / f".{target.name}.unfinished"
        super().__init__(target, work, new=work, into=target)
        self.temporary = self.work / "tmp"

    def open(self) -> None:
        """Make and lock the hidden folder, undo an interrupted install, refuse a target that cannot be written."""
        super().open()
        try:
            if self.target.exists():
                probe = self.target / ".writable"
                probe.touch()
                probe.unlink()
        except OSError as error:
            self.close()
            raise ConvertError(f"{self.target} cannot be written ({error.strerror}); choose another OUT_DIR") from error
        for leftover in (self.temporary, self.work / "replaced", *(self._part(half) for half in HALVES)):
            shutil.rmtree(leftover, ignore_errors=True)

    def refuse_foreign(self, sources: dict[str, str], overwrite: bool) -> None:
        """Raise ConvertError where the target holds what this program did not make, or made of other sources.

        `sources` names what each half is to be made of. `overwrite` allows other models to go, but nothing else.
        """
        records = _read(self.target / "pair.json")
        foreign = {half: self._foreign(half, records.get(half), sources[half]) for half in HALVES}
        if (self.target / "pair.json").exists() and not any(_is_record(records.get(half)) for half in HALVES):
            foreign["pair.json"] = "was not made by this program"
        for name, reason in foreign.items():
            if reason and not overwrite:
                raise ConvertError(
                    f"{self.target / name} {reason}; choose another OUT_DIR, or replace it with --overwrite", 2
                )

    def _foreign(self, half: str, record: object, source: str) -> str:
        """Why an export from `source` must not replace this half of the target unasked; "" where it may."""
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
        return "holds more than this program wrote" if folder_bytes(folder) > record["bytes"] else ""

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

    def new_names(self) -> list[str]:
        return [*(half for half in HALVES if self._record(half).exists()), "pair.json"]

    def install_pair(self, pair: dict) -> None:
        """Move the new halves into the target, pair.json last; on any failure the old pair comes back whole."""
        _write(self.work / "pair.json", pair)
        self.install()
        for half in HALVES:
            if self.log(half).exists():
                self.log(half).replace(self.target / f"{half}.log")

    def _put_back(self) -> None:
        if self.old.is_dir():
            super()._put_back()
            with contextlib.suppress(OSError):  # a target that the install made is empty again
                self.target.rmdir()

    def keeps_something(self) -> bool:
        """Whether a second run can go on from what is here, or a person wants to read it."""
        return super().keeps_something() or self.has_new_halves() or any(self.work.glob("*.log"))

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


def _is_record(record: object) -> bool:
    """Whether this is what pair.json says of a half that this program made."""
    return isinstance(record, dict) and isinstance(record.get("source"), str) and isinstance(record.get("bytes"), int)


def _same_source(one: str, other: str) -> bool:
    """Whether both name the same hub repository or local folder."""
    return one == other or (Path(other).exists() and Path(one).resolve() == Path(other).resolve())


def _read(path: Path) -> dict:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        content = json.loads(path.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    return {}


def _write(path: Path, content: dict) -> None:
    partial = path.with_name(f".{path.name}.part")
    partial.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n")
    partial.replace(path)
