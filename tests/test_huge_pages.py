"""Huge pages: the weights are in them, and every logit stays what it was."""

import mmap
import platform
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import MAIN

from speculative import cached_model, huge_pages

PRIVATE = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
KERNEL = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))


def in_huge_pages() -> int:
    """Bytes."""
    return smaps("AnonHugePages")


def resident_bytes() -> int:
    return smaps("Rss")


def smaps(key: str) -> int:
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


@pytest.mark.skipif(sys.platform != "linux" or KERNEL < (6, 1), reason="Linux has MADV_COLLAPSE since 6.1")
def test_what_was_allocated_since_is_moved_and_stays_the_same():
    tokens = np.arange(1, 60)
    before = huge_pages.allocated()
    model = cached_model.load(MAIN, "CPU")
    logits = model.logits(tokens, last=8).copy()
    were = in_huge_pages()
    huge_pages.move(before)
    assert in_huge_pages() > were + 15_000_000  # half of the weights, at least
    model.forget()
    assert np.array_equal(model.logits(tokens, last=8), logits)


@pytest.mark.skipif(sys.platform != "linux" or KERNEL < (6, 1), reason="Linux has MADV_COLLAPSE since 6.1")
def test_memory_that_is_hardly_used_stays_small():
    """One page touched in each of 32 blocks, and 8 blocks touched as a whole: only these become huge pages."""
    before = huge_pages.allocated()
    sparse, dense = (
        mmap.mmap(-1, 33 * huge_pages.SIZE, flags=PRIVATE),
        mmap.mmap(-1, 9 * huge_pages.SIZE, flags=PRIVATE),
    )
    for memory in (sparse, dense):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    for start in range(0, len(sparse), huge_pages.SIZE):
        sparse[start] = 1
    for start in range(0, len(dense), mmap.PAGESIZE):
        dense[start] = 1
    for memory in (sparse, dense):
        memory.madvise(mmap.MADV_HUGEPAGE)
    were, resident = in_huge_pages(), resident_bytes()
    huge_pages.move(before)
    assert in_huge_pages() - were >= 8 * huge_pages.SIZE
    assert resident_bytes() - resident < 4 * huge_pages.SIZE
    assert sparse[0] == dense[-mmap.PAGESIZE] == 1


def test_only_what_is_new_is_moved():
    assert huge_pages._without([(0, 10)], []) == [(0, 10)]
    assert huge_pages._without([(0, 10), (20, 30)], [(0, 10)]) == [(20, 30)]
    assert huge_pages._without([(0, 30)], [(5, 10), (20, 40)]) == [(0, 5), (10, 20)]
    assert huge_pages._without([(10, 20)], [(0, 30)]) == []
    assert huge_pages._without([(10, 20), (30, 40)], [(0, 10), (15, 35)]) == [(10, 15), (35, 40)]


def test_nowhere_but_on_linux_does_anything_happen(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    assert huge_pages.allocated() == []
    huge_pages.move([])
