"""The installed package: it has the files that its modules read."""

import shutil
import subprocess
import sys
import zipfile

from tests.support.paths import ROOT


def files_of(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_wheel_has_all_files_of_the_package(tmp_path):
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("__pycache__", ".*")
    shutil.copytree(ROOT / "speculative", source / "speculative", ignore=ignored)
    files = {f"speculative/{name}" for name in files_of(source / "speculative")}
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, source]
    done = subprocess.run(command, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("speculative/")} == files
