"""A model's weights in huge pages, which Linux gives to a program that asks for them, and OpenVINO does not ask.

A step of a large model reads all its weights once. In pages of 4 KiB a gigabyte is 262,144 of them, and looking up
where each one lies takes time; huge pages have 2 MiB. Moving costs seconds for a gigabyte: it pays where a model stays.
Where the kernel cannot (before Linux 6.1, no memory in one piece) nothing happens.
"""

import ctypes
import mmap
import sys
from pathlib import Path

import numpy as np

SIZE = 2**21  # bytes of a huge page
MADV_COLLAPSE = 25  # Linux 6.1: move what lies here into huge pages, now (man 2 madvise)

Ranges = list[tuple[int, int]]
"""Addresses from (included) and to (excluded), ascending."""


def allocated() -> Ranges:
    """Where this process has memory of its own that no file is behind."""
    if sys.platform != "linux":
        return []
    lines = (line.split() for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines())
    owned = (fields[0] for fields in lines if fields[1].startswith("rw") and fields[5:] in ([], ["[heap]"]))
    return [(int(begin, 16), int(end, 16)) for begin, _, end in (name.partition("-") for name in owned)]


def in_use() -> int | None:
    """Bytes of this process in huge pages; None where the system does not tell."""
    if sys.platform != "linux":
        return None
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages")), None)


def move(before: Ranges) -> None:
    """Move what was allocated since `before` into huge pages."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    for begin, end in _without(allocated(), before):
        begin, end = -(-begin // SIZE) * SIZE, end // SIZE * SIZE
        for start in _mostly_used(begin, end) if begin < end else ():  # what cannot be moved stays where it is
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(SIZE), MADV_COLLAPSE)


def _mostly_used(begin: int, end: int) -> list[int]:
    """Addresses of the blocks of SIZE bytes from `begin` to `end` most of whose pages hold something.

    A huge page takes all its memory at once, so a block with few used pages would make the process larger. All blocks
    where the system does not tell which pages are used.
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
    """`ranges` less what `others` cover."""
    left = []
    for begin, end in ranges:
        for other_begin, other_end in others:
            if other_begin < end and begin < other_end:
                if begin < other_begin:
                    left.append((begin, other_begin))
                begin = other_end
        if begin < end:
            left.append((begin, end))
    return left
