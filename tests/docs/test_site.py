"""The documentation as a site: `make docs` builds it without a warning."""

import subprocess
import sys

import pytest

from tests.support.paths import ROOT


def test_site_is_built_without_warnings(tmp_path):
    pytest.importorskip("material", reason="mkdocs-material needs Python 3.11")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert "Getting started" in (tmp_path / "site/index.html").read_text(encoding="utf-8")
