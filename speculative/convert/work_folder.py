"""Atomic replacement on disk: new content is made in a hidden folder and takes its place whole or not at all.

A process that is killed half-way leaves the hidden folder behind; the next one on the same target finds it, puts the
old content back and goes on. A lock in the hidden folder keeps a second process out meanwhile.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from speculative.convert.errors import ConvertError


class WorkFolder:
    """A hidden folder `work` in which entries are made (in `new`) that replace those of the same names in `into`: all
    of them, or none.
    """

    def __init__(self, target: Path, work: Path, new: Path, into: Path):
        self.target = target  # what the user named; for messages
        self.work = work
        self.new = new
        self.into = into
        self.old = work / "old"  # what an install replaces, while it runs
        self._lock_file: TextIO | None = None

    def open(self) -> None:
        """Make the folder, lock it, and undo an install that was interrupted.

        Raises ConvertError where the disk refuses, or another process holds the lock.
        """
        try:
            self._lock_file = self._lock()
            self._put_back()
        except OSError as error:
            self.close()
            raise ConvertError(
                f"{self.target} cannot be written ({error.strerror or error}); choose another folder"
            ) from error

    def _lock(self) -> TextIO:
        """The lock file, locked. The system frees the lock when this process ends, in any way."""
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
            lock_file.close()  # another process removed this file before it was locked: lock the one there is now

    def new_names(self) -> list[str]:
        """Names of the entries that an install moves, whether it has moved them or not."""
        return [self.target.name]

    def install(self) -> None:
        """Move the new entries to their place; on any failure the old ones come back, all of them."""
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
        """Undo an install: new entries return to the hidden folder, old ones to their place."""
        if not self.old.is_dir():
            return
        for name in self.new_names():
            if not (self.new / name).exists() and (self.into / name).exists():
                (self.into / name).rename(self.new / name)
        for path in list(self.old.iterdir()):
            path.rename(self.into / path.name)
        self.old.rmdir()

    def keeps_something(self) -> bool:
        """Whether the folder has to stay for a later run."""
        return self.old.exists()

    def close(self) -> None:
        """Release the lock, and remove the folder unless it keeps something."""
        if self._lock_file is None:
            return
        if not self.keeps_something():
            self.empty()
            if os.name == "nt":
                self._lock_file.close()  # Windows removes no open file
            with contextlib.suppress(OSError):
                (self.work / "lock").unlink()  # while it is locked: who opens it now sees that it is gone
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
    """Undo a replacement of `target` that was interrupted, and remove what it left. Raises ConvertError as `open`."""
    folder = _beside(target)
    if folder.work.exists():
        folder.open()
        folder.close()


@contextlib.contextmanager
def replacement(target: Path) -> Iterator[Path]:
    """An empty folder to write to, hidden beside `target`; it takes the place of `target` when the block ends well.

    Raises ConvertError as `WorkFolder.open` does.
    """
    folder = _beside(target)
    folder.open()
    try:
        folder.empty()
        made = folder.new / target.name
        made.mkdir(parents=True)
        yield made
        folder.install()
    finally:
        folder.close()


def _beside(target: Path) -> WorkFolder:
    work = target.parent / f".{target.name}.replacement"
    return WorkFolder(target, work, new=work / "new", into=target.parent)


def _lock_now(file: TextIO) -> None:
    """Lock an open file. Raises BlockingIOError or PermissionError where another process holds it."""
    if os.name == "nt":
        import msvcrt

        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
