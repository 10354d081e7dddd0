"""Moves a model's weights into huge pages on Linux, which OpenVINO does not request itself.

A step of a large model reads all its weights once. A gigabyte is 262,144 pages of 4 KiB, and translating their
addresses takes time; huge pages have 2 MiB. Moving takes seconds per gigabyte, so it suits long-running processes. If
the kernel cannot do it (before Linux 6.1, or fragmented memory), nothing happens.
"""

import ctypes
import mmap
import sys
from pathlib import Path

import numpy as np

SIZE = 2**21  # bytes of a huge page
MADV_COLLAPSE = 25  # Linux 6.1: move this memory into huge pages now (man 2 madvise)

Ranges = list[tuple[int, int]]
"""Address ranges (start included, end excluded), ascending."""


def allocated() -> Ranges:
    """The address ranges of this process's anonymous memory."""
    if sys.platform != "linux":
        return []
    lines = (line.split() for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines())
    owned = (fields[0] for fields in lines if fields[1].startswith("rw") and fields[5:] in ([], ["[heap]"]))
    return [(int(begin, 16), int(end, 16)) for begin, _, end in (name.partition("-") for name in owned)]


def in_use() -> int | None:
    """Bytes of this process in huge pages; None if the system does not report it."""
    if sys.platform != "linux":
        return None
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages")), None)


def move(before: Ranges) -> None:
    """Move memory allocated since `before` into huge pages."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    for begin, end in _without(allocated(), before):
        begin, end = -(-begin // SIZE) * SIZE, end // SIZE * SIZE
        for start in _mostly_used(begin, end) if begin < end else ():  # what cannot be moved stays where it is
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(SIZE), MADV_COLLAPSE)


def _mostly_used(begin: int, end: int) -> list[int]:
    """Addresses of the blocks of SIZE bytes from `begin` to `end` with more than half of their pages in use.

    A huge page allocates all its memory at once, so a block with few used pages would make the process larger. Returns
    all blocks if the system does not report which pages are used.
    """
    page = mmap.PAGESIZE
    try:
        with Path("/proc/self/pagemap").open("rb") as file:  # man 5 proc: 64 bits a page, the highest: present
            file.seek(begin // page * 8)
            entries = np.frombuffer(file.read((end - begin) // page * 8), np.uint64)
    except OSError:
        return list(range(begin, end, SIZE))
    used = (entries >> np.uint64(63)).reshape(-1, SIZE // page).mean(axis=1)
    return [begin + int(i) * SIZE for i in np.flatnonzero(used > 0.5)]


def _without(ranges: Ranges, others: Ranges) -> Ranges:
    """`ranges` without the parts that `others` cover."""
    remaining = []
    for begin, end in ranges:
        for other_begin, other_end in others:
            if other_begin < end and begin < other_end:
                if begin < other_begin:
                    remaining.append((begin, other_begin))
                begin = other_end
        if begin < end:
            remaining.append((begin, end))
    return remaining
