"""Huge pages: the weights are moved into them, and no logit changes."""

import mmap
import platform
import re
import subprocess
import sys

import psutil
import pytest

from speculative.models import huge_pages
from tests.support.paths import MAIN, ROOT

KERNEL = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
HAS_COLLAPSE = sys.platform == "linux" and KERNEL >= (6, 1)


MOVE = """
import ctypes, mmap, sys
import numpy as np
from speculative.models import cached_model, huge_pages

block = mmap.mmap(-1, 4 * huge_pages.SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
block[:] = b"1" * len(block)
start = -(-ctypes.addressof(ctypes.c_char.from_buffer(block)) // huge_pages.SIZE) * huge_pages.SIZE
if ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(huge_pages.SIZE), huge_pages.MADV_COLLAPSE):
    sys.exit("no huge page is free")
tokens = np.arange(1, 60)
before = huge_pages.allocated()
model = cached_model.load(sys.argv[1])
logits = model.logits(tokens, last=8).copy()
were = huge_pages.in_use()
huge_pages.move(before)
model.reset()
print(huge_pages.in_use() - were, np.array_equal(model.logits(tokens, last=8), logits))
"""


@pytest.mark.skipif(not HAS_COLLAPSE, reason="Linux has MADV_COLLAPSE since 6.1")
def test_newly_allocated_memory_is_moved_unchanged():
    """In a separate process, where no memory freed by other tests is reused."""
    done = subprocess.run([sys.executable, "-c", MOVE, str(MAIN)], cwd=ROOT, capture_output=True, encoding="utf-8")
    if "no huge page is free" in done.stderr:
        pytest.skip("no huge page is free")
    assert done.returncode == 0, done.stderr
    moved, same = done.stdout.split()
    assert int(moved) > 15_000_000 and same == "True"  # half of the weights, at least


def test_only_new_memory_is_moved():
    assert huge_pages._without([(0, 10)], []) == [(0, 10)]
    assert huge_pages._without([(0, 10), (20, 30)], [(0, 10)]) == [(20, 30)]
    assert huge_pages._without([(0, 30)], [(5, 10), (20, 40)]) == [(0, 5), (10, 20)]
    assert huge_pages._without([(10, 20)], [(0, 30)]) == []
    assert huge_pages._without([(10, 20), (30, 40)], [(0, 10), (15, 35)]) == [(10, 15), (35, 40)]


@pytest.mark.skipif(sys.platform != "linux" or KERNEL < (6, 1), reason="Linux has MADV_COLLAPSE since 6.1")
def test_sparsely_used_memory_stays_small():
    """One page is touched in each of 33 blocks: as huge pages they would hold 66 MB more."""
    before = huge_pages.allocated()
    memory = mmap.mmap(-1, 33 * huge_pages.SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    for start in range(0, len(memory), huge_pages.SIZE):
        memory[start] = 1
    memory.madvise(mmap.MADV_HUGEPAGE)
    resident = psutil.Process().memory_info().rss
    huge_pages.move(before)
    assert psutil.Process().memory_info().rss - resident < 4 * huge_pages.SIZE
    assert memory[huge_pages.SIZE] == 1


def test_huge_pages_are_a_no_op_outside_linux(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    assert huge_pages.allocated() == [] and huge_pages.in_use() is None
    huge_pages.move([])
