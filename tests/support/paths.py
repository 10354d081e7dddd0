"""Paths that all tests use."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
MAIN = ROOT / "models/embedded/main"
DRAFT = ROOT / "models/embedded/draft"


def everything_in(folder: Path) -> dict[Path, bytes]:
    """The content of every file by its path in `folder`, to check that nothing changed."""
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
