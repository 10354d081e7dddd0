"""Atomic replacement on disk: new content is created in a hidden folder and installed completely or not at all.

A process that is killed halfway leaves the hidden folder behind; the next process on the same target finds it, restores
the old content and continues. A lock in the hidden folder keeps other processes out.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from speculative.convert.errors import ConvertError


class WorkFolder:
    """A hidden folder `work` with new entries (in `new`) that replace those of the same names in `into`: all of them,
    or none.
    """

    def __init__(self, target: Path, work: Path, new: Path, into: Path):
        self.target = target  # what the user named; for messages
        self.work = work
        self.new = new
        self.into = into
        self.old = work / "old"  # the replaced entries, during an install
        self._lock_file: TextIO | None = None

    def open(self) -> None:
        """Create the folder, lock it, and undo an interrupted install.

        Raises ConvertError if the disk cannot be written or another process holds the lock, or if files cannot be moved
        from the folder to the target, which is the root of another disk.
        """
        root = self.target.resolve()
        if os.path.ismount(root) and not self.work.resolve().is_relative_to(root):
            raise ConvertError(f"{self.target} is the root of a disk; choose a folder inside it", 2)
        try:
            self._lock_file = self._lock()
            self._put_back()
        except OSError as error:
            self.close()
            raise ConvertError(
                f"{self.target} cannot be written ({error.strerror or error}); choose another folder"
            ) from error

    def _lock(self) -> TextIO:
        """Return the locked lock file. The system releases the lock when this process ends, however it ends, and its
        `Child`, if one outlives it."""
        while True:
            self.work.mkdir(parents=True, exist_ok=True)
            try:
                lock_file = (self.work / "lock").open("w")
            except FileNotFoundError:
                continue  # another process has just finished, and removed the folder
            try:
                _lock_now(lock_file)
                if os.path.samestat(os.fstat(lock_file.fileno()), (self.work / "lock").stat()):
                    return lock_file
            except (BlockingIOError, PermissionError):
                lock_file.close()
                raise ConvertError(
                    f"another process is writing {self.target}; wait for it, or choose another folder"
                ) from None
            except FileNotFoundError:
                pass
            lock_file.close()  # another process removed this file before it was locked: retry with the current one

    def new_names(self) -> list[str]:
        """Names of the entries that an install moves, before and after it has moved them."""
        return [self.target.name]

    def install(self) -> None:
        """Move the new entries into place; on any failure, restore all old ones."""
        names = self.new_names()
        try:
            self.into.mkdir(parents=True, exist_ok=True)
            self.old.mkdir()
            for name in names:
                if (self.into / name).exists():
                    (self.into / name).rename(self.old / name)
            for name in names:
                (self.new / name).rename(self.into / name)
            self.old.rename(self.work / "replaced")  # from here on the new entries count
        except BaseException:
            self._put_back()
            raise

    def _put_back(self) -> None:
        """Undo an install: move new entries back to the hidden folder and old ones back into place."""
        if not self.old.is_dir():
            return
        for name in self.new_names():
            if not (self.new / name).exists() and (self.into / name).exists():
                (self.into / name).rename(self.new / name)
        for path in list(self.old.iterdir()):
            path.rename(self.into / path.name)
        self.old.rmdir()

    def keeps_something(self) -> bool:
        """Whether the folder must be kept for a later run."""
        return self.old.exists()

    def close(self) -> None:
        """Release the lock, and remove the folder unless it must be kept."""
        if self._lock_file is None:
            return
        if not self.keeps_something():
            self.empty()
            if os.name == "nt":
                self._lock_file.close()  # Windows cannot remove an open file
            with contextlib.suppress(OSError):
                (self.work / "lock").unlink()  # while locked: a process that has opened it notices the removal
                self.work.rmdir()
        self._lock_file.close()
        self._lock_file = None

    def empty(self) -> None:
        """Remove everything but the lock."""
        for path in list(self.work.iterdir()):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != "lock":
                path.unlink(missing_ok=True)


def recover(target: Path) -> None:
    """Undo an interrupted replacement of `target` and clean up. Raises ConvertError as `open` does."""
    folder = _beside(target)
    if folder.work.exists():
        folder.open()
        folder.close()


@contextlib.contextmanager
def replacement(target: Path) -> Iterator[Path]:
    """An empty hidden folder next to `target` to write to; it replaces `target` when the block ends without error.

    Raises ConvertError as `WorkFolder.open` does.
    """
    folder = _beside(target)
    folder.open()
    try:
        folder.empty()
        new_folder = folder.new / target.name
        new_folder.mkdir(parents=True)
        yield new_folder
        folder.install()
    finally:
        folder.close()


def _beside(target: Path) -> WorkFolder:
    work = target.parent / f".{target.name}.replacement"
    return WorkFolder(target, work, new=work / "new", into=target.parent)


def _lock_now(file: TextIO) -> None:
    """Lock an open file. Raises BlockingIOError or PermissionError if another process holds the lock."""
    if os.name == "nt":
        import msvcrt

        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.set_inheritable(file.fileno(), True)  # a child that outlives this process still writes here
