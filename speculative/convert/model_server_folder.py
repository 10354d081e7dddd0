"""Writes a model repository to OUT atomically, with hard-linked weights that take no extra disk space."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from speculative.byte_size import byte_size
from speculative.cli.progress import tqdm
from speculative.convert.errors import ConvertError
from speculative.convert.source import ir_files
from speculative.convert.work_folder import replacement

PIECE = 1 << 22  # bytes copied at a time


def refuse_occupied(target: Path, overwrite: bool) -> None:
    """Raise ConvertError if `target` is not empty; with `overwrite`, a repository made by this program is allowed."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not _is_repository(target):
        raise ConvertError(f"{target} holds files that this program did not make; choose another OUT", 2)
    if not overwrite:
        raise ConvertError(f"{target} is a model repository already; --overwrite replaces it", 2)


@contextmanager
def new_repository(target: Path, overwrite: bool) -> Iterator[Path]:
    """A temporary folder next to `target` to write to; it replaces `target` when the block ends without error.

    Raises ConvertError as refuse_occupied does, or if the disk cannot be written.
    """
    try:
        with replacement(target) as folder:
            refuse_occupied(target, overwrite)
            yield folder
    except OSError as error:
        raise ConvertError(
            f"{target} cannot be written ({error.strerror or error}); make room, or choose another OUT"
        ) from error


def place_model(source: Path, target: Path, copy: bool) -> str:
    """Put the `ir_files` of a model into `target`: small files are copied, weights (.bin) hard-linked or copied.

    Returns why weights were copied although `copy` is False (another disk, for example), or "".
    """
    target.mkdir(parents=True)
    reason, large = "", []
    for path in ir_files(source):
        target_path = target / path.name
        if path.suffix != ".bin":
            shutil.copyfile(path, target_path)
            continue
        try:
            if not copy:
                os.link(path.resolve(), target_path)
        except OSError as error:
            reason = error.strerror or str(error)
        if not target_path.exists():
            large.append((path, target_path))
    _copy(large)
    return reason


def _copy(pairs: list[tuple[Path, Path]]) -> None:
    needed = sum(source.stat().st_size for source, _ in pairs)
    free = shutil.disk_usage(pairs[0][1].parent).free if pairs else needed
    if needed > free:
        raise ConvertError(
            f"a copy of the weights takes {byte_size(needed)}, but the disk has only {byte_size(free)} free; make "
            "room, or choose an OUT on the same disk as the pair, where they are hard-linked"
        )
    with tqdm(total=needed, unit="B", unit_scale=True, desc="copying weights", leave=False, disable=None) as bar:
        for source, target_path in pairs:
            with source.open("rb") as read, target_path.open("wb") as write:
                while piece := read.read(PIECE):
                    bar.update(write.write(piece))


def _is_repository(folder: Path) -> bool:
    """Whether the folder holds exactly the files that this program writes."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (served,) = (entry["name"] for entry in config["mediapipe_config_list"])
        names = {path.name for path in folder.iterdir()}
        return names == {"config.json", "README.md", served} and (folder / served / "graph.pbtxt").is_file()
    except (OSError, ValueError, KeyError, TypeError):
        return False
