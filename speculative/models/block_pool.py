"""Whose are the blocks of a paged cache: bounded memory, shared by sequences that come and go.

A sequence is promised the blocks of its longest possible text when it starts, so that it never runs out halfway, and
takes them one by one as it grows.

Full blocks can be shared: sequences that begin alike have them in common, and what nobody has any more is kept until
its room is needed, the least recently used first (Kwon et al. 2023, arXiv 2309.06180, section 4.4). A shared block is
found by its tokens and the shared block before it, thus by every token up to its end; they are compared, not hashed
alone, so that none is ever taken for another.
"""

import threading
from dataclasses import dataclass

import numpy as np


class OutOfBlocks(RuntimeError):
    """More blocks were asked for than there are to promise."""


@dataclass(eq=False)
class SharedBlock:
    """A block that is full and does not change: `tokens` (their bytes) behind those of the block `before`."""

    block: int
    before: "SharedBlock | bytes"  # of the first block: the salt of its sequence
    tokens: bytes
    holders: int = 0  # sequences that have it


class BlockPool:
    """`blocks` blocks of `block_size` tokens each. Thread-safe."""

    def __init__(self, blocks: int, block_size: int):
        self.blocks = blocks
        self.block_size = block_size
        self._empty = list(range(blocks - 1, -1, -1))  # the lowest is taken first
        self._shared: dict[tuple[SharedBlock | bytes, bytes], SharedBlock] = {}  # by what is before and their tokens
        self._idle: dict[SharedBlock, None] = {}  # those that nobody has, the least recently used first
        self._owed = 0  # promised and not taken yet
        self._lock = threading.Lock()

    @property
    def free(self) -> int:
        """Blocks that nobody has; some of them may be promised, and some kept for whoever begins alike."""
        return len(self._empty) + len(self._idle)

    @property
    def promised(self) -> int:
        """Blocks that sequences have or may still take; one that several have counts once."""
        return self.blocks - self.free + self._owed

    def needed(self, tokens: int) -> int:
        """Blocks that a sequence of so many tokens takes."""
        return -(-tokens // self.block_size)

    def has_room(self, tokens: int) -> bool:
        """Whether a sequence of up to so many tokens can be promised its blocks now."""
        return self.needed(tokens) <= self.blocks - self.promised

    def promise(self, tokens: int, salt: bytes = b"") -> "BlockTable":
        """Room for a sequence of up to `tokens` tokens. It shares blocks only with sequences of the same `salt`.
        Raises OutOfBlocks."""
        with self._lock:
            if not self.has_room(tokens):
                raise OutOfBlocks(
                    f"a text of up to {tokens} tokens needs {self.needed(tokens)} blocks of {self.block_size} tokens "
                    f"of the cache, and {self.blocks - self.promised} of {self.blocks} are to be had: wait for other "
                    "texts to end, ask for fewer tokens, or load the models with a larger cache"
                )
            self._owed += self.needed(tokens)
        return BlockTable(self, self.needed(tokens), salt)

    def _take(self) -> int:
        """An empty block, or the one that was shared and used least recently."""
        if self._empty:
            return self._empty.pop()
        oldest = next(iter(self._idle))
        del self._idle[oldest], self._shared[oldest.before, oldest.tokens]
        return oldest.block

    def _release(self, shared: SharedBlock) -> None:
        shared.holders -= 1
        if not shared.holders:
            self._idle[shared] = None


class BlockTable:
    """The blocks of one sequence, in the order of its tokens: first shared ones, then its own."""

    def __init__(self, pool: BlockPool, most: int, salt: bytes = b""):
        self._pool = pool
        self._most = most
        self._salt = salt
        self._blocks = np.zeros(most, np.int32)
        self._taken = 0
        self._shared: list[SharedBlock] = []

    @property
    def shared(self) -> int:
        """Tokens in the blocks that are shared, and not to be written to."""
        return len(self._shared) * self._pool.block_size

    def blocks(self, tokens: int) -> np.ndarray:
        """Block numbers int32 for so many tokens: those taken before and, as far as they do not suffice, new ones."""
        n = self._pool.needed(tokens)
        if n > self._most:
            raise OutOfBlocks(f"a sequence that was promised {self._most} cache blocks asks for {n}")
        with self._pool._lock:
            while self._taken < n:
                self._append(self._pool._take())
        return self._blocks[:n]

    def share(self, tokens: np.ndarray) -> None:
        """Share the blocks that `tokens` (int64 [n]) fill: they hold nothing else, and nobody will change them."""
        with self._pool._lock:
            while self.shared + self._pool.block_size <= len(tokens):
                key = self._next(tokens)
                own = SharedBlock(int(self._blocks[len(self._shared)]), *key)
                self._have(self._pool._shared.setdefault(key, own))

    def adopt(self, tokens: np.ndarray) -> int:
        """Have in common with others the shared blocks that `tokens` (int64 [n]) fill, as far as there are any.

        Returns how many tokens they hold. What this sequence had there instead is given up.
        """
        with self._pool._lock:
            while self.shared + self._pool.block_size <= len(tokens):
                same = self._pool._shared.get(self._next(tokens))
                if same is None:
                    break
                self._have(same)
        return self.shared

    def give_back(self) -> None:
        """All of them; the sequence is gone."""
        with self._pool._lock:
            for shared in reversed(self._shared):  # so that no block is kept longer than the one before it
                self._pool._release(shared)
            self._pool._empty += self._blocks[len(self._shared) : self._taken].tolist()
            self._pool._owed -= self._most - self._taken
            self._taken = self._most = 0
            self._shared = []

    def _next(self, tokens: np.ndarray) -> tuple[SharedBlock | bytes, bytes]:
        """What the next block to be shared is found by."""
        before = self._shared[-1] if self._shared else self._salt
        return before, tokens[self.shared : self.shared + self._pool.block_size].tobytes()

    def _have(self, shared: SharedBlock) -> None:
        """Put it behind those that are shared already, in place of a block of our own if there is one."""
        place = len(self._shared)
        if place == self._taken:
            self._append(shared.block)
        elif self._blocks[place] != shared.block:
            self._pool._empty.append(int(self._blocks[place]))
            self._blocks[place] = shared.block
        self._pool._idle.pop(shared, None)
        shared.holders += 1
        self._shared.append(shared)

    def _append(self, block: int) -> None:
        self._blocks[self._taken] = block
        self._taken += 1
        self._pool._owed -= 1
