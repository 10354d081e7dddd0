"""Block manager of a paged KV cache: allocates blocks to sequences and shares full blocks of common prefixes.

A sequence reserves the blocks of its maximum length when it starts, so that it never runs out, and takes them one by
one as it grows.

Full blocks can be shared by sequences with a common prefix. Blocks that are no longer in use are kept and evicted least
recently used first (Kwon et al. 2023, arXiv 2309.06180, section 4.4). A shared block is looked up by its tokens and the
shared block before it, and so by every token up to its end; tokens are compared, not only hashed, so collisions cannot
occur.
"""

import threading
from dataclasses import dataclass

import numpy as np


class OutOfBlocks(RuntimeError):
    """More blocks were requested than are available."""


@dataclass(eq=False)
class SharedBlock:
    """A full, immutable block: `tokens` (their bytes) after those of the block `parent`."""

    block: int
    parent: "SharedBlock | bytes"  # for the first block: the salt of its sequence
    tokens: bytes
    ref_count: int = 0  # reference count: sequences that use it


class BlockPool:
    """`blocks` blocks of `block_size` tokens each. Thread-safe."""

    def __init__(self, blocks: int, block_size: int):
        self.blocks = blocks
        self.block_size = block_size
        self._empty = list(range(blocks - 1, -1, -1))  # the lowest is taken first
        self._shared: dict[tuple[SharedBlock | bytes, bytes], SharedBlock] = {}  # by the block before and the tokens
        self._unused: dict[SharedBlock, None] = {}  # unused shared blocks, least recently used first
        self._reserved = 0  # blocks reserved but not allocated yet
        self._lock = threading.Lock()

    @property
    def free(self) -> int:
        """Blocks that no sequence uses; some may be reserved, some may hold a cached prefix."""
        return len(self._empty) + len(self._unused)

    @property
    def reserved(self) -> int:
        """Blocks that sequences use or have reserved; a shared block counts once."""
        return self.blocks - self.free + self._reserved

    def needed(self, tokens: int) -> int:
        """Number of blocks for a sequence of `tokens` tokens."""
        return -(-tokens // self.block_size)

    def has_room(self, tokens: int) -> bool:
        """Whether the blocks for a sequence of up to `tokens` tokens can be reserved now."""
        return self.needed(tokens) <= self.blocks - self.reserved

    def reserve(self, tokens: int, salt: bytes = b"") -> "BlockTable":
        """Reserve blocks for a sequence of up to `tokens` tokens. It shares blocks only with sequences that have the
        same `salt`. Raises OutOfBlocks."""
        with self._lock:
            if not self.has_room(tokens):
                raise OutOfBlocks(
                    f"a request of up to {tokens} tokens needs {self.needed(tokens)} cache blocks of {self.block_size} "
                    f"tokens, but only {self.blocks - self.reserved} of {self.blocks} are available: wait for other "
                    "requests to end, request fewer tokens, or load the models with a larger cache"
                )
            self._reserved += self.needed(tokens)
        return BlockTable(self, self.needed(tokens), salt)

    def _allocate(self) -> int:
        """Take an empty block, or evict the least recently used shared one."""
        if self._empty:
            return self._empty.pop()
        oldest = next(iter(self._unused))
        del self._unused[oldest], self._shared[oldest.parent, oldest.tokens]
        return oldest.block

    def _release(self, shared: SharedBlock) -> None:
        shared.ref_count -= 1
        if not shared.ref_count:
            self._unused[shared] = None


class BlockTable:
    """The blocks of one sequence, in token order: first shared ones, then its own."""

    def __init__(self, pool: BlockPool, max_blocks: int, salt: bytes = b""):
        self._pool = pool
        self._max_blocks = max_blocks
        self.salt = salt
        self._blocks = np.zeros(max_blocks, np.int32)
        self._allocated = 0
        self._shared: list[SharedBlock] = []

    @property
    def shared(self) -> int:
        """Number of tokens in shared blocks, which must not be written to."""
        return len(self._shared) * self._pool.block_size

    def blocks(self, tokens: int) -> np.ndarray:
        """Block numbers int32 for `tokens` tokens; takes new blocks as needed."""
        n = self._pool.needed(tokens)
        if n > self._max_blocks:
            raise OutOfBlocks(f"a sequence that reserved {self._max_blocks} cache blocks requested {n}")
        with self._pool._lock:
            while self._allocated < n:
                self._append_block(self._pool._allocate())
        return self._blocks[:n]

    def cache_full_blocks(self, tokens: np.ndarray) -> None:
        """Share the blocks that `tokens` (int64 [n]) fill; their content must be final."""
        with self._pool._lock:
            while self.shared + self._pool.block_size <= len(tokens):
                key = self._next_key(tokens)
                own = SharedBlock(int(self._blocks[len(self._shared)]), *key)
                self._append_shared(self._pool._shared.setdefault(key, own))

    def match_prefix(self, tokens: np.ndarray) -> int:
        """Use the shared blocks that match a prefix of `tokens` (int64 [n]) instead of this sequence's own blocks.

        Returns the number of tokens in shared blocks.
        """
        with self._pool._lock:
            while self.shared + self._pool.block_size <= len(tokens):
                match = self._pool._shared.get(self._next_key(tokens))
                if match is None:
                    break
                self._append_shared(match)
        return self.shared

    def free_blocks(self) -> None:
        """Free all blocks of the sequence."""
        with self._pool._lock:
            for shared in reversed(self._shared):  # so that a block is evicted before the one it follows
                self._pool._release(shared)
            self._pool._empty += self._blocks[len(self._shared) : self._allocated].tolist()
            self._pool._reserved -= self._max_blocks - self._allocated
            self._allocated = self._max_blocks = 0
            self._shared = []

    def _next_key(self, tokens: np.ndarray) -> tuple[SharedBlock | bytes, bytes]:
        """The lookup key of the next block to share."""
        parent = self._shared[-1] if self._shared else self.salt
        return parent, tokens[self.shared : self.shared + self._pool.block_size].tobytes()

    def _append_shared(self, shared: SharedBlock) -> None:
        """Append a shared block to the shared ones, in place of the sequence's own block if it has one there."""
        index = len(self._shared)
        if index == self._allocated:
            self._append_block(shared.block)
        elif self._blocks[index] != shared.block:
            self._pool._empty.append(int(self._blocks[index]))
            self._blocks[index] = shared.block
        self._pool._unused.pop(shared, None)
        shared.ref_count += 1
        self._shared.append(shared)

    def _append_block(self, block: int) -> None:
        self._blocks[self._allocated] = block
        self._allocated += 1
        self._pool._reserved -= 1
