"""Whose are the blocks of a paged cache: bounded memory, shared by sequences that come and go.

A sequence is promised the blocks of its longest possible text when it starts, so that it never runs out halfway, and
takes them one by one as it grows.
"""

import numpy as np


class NoRoom(RuntimeError):
    """More blocks were asked for than there are to promise."""


class BlockPool:
    """`blocks` blocks of `block_size` tokens each. Not thread-safe."""

    def __init__(self, blocks: int, block_size: int):
        self.blocks = blocks
        self.block_size = block_size
        self.promised = 0
        self._free = list(range(blocks - 1, -1, -1))  # the lowest is taken first

    @property
    def free(self) -> int:
        """Blocks that nobody has; some of them may be promised."""
        return len(self._free)

    def needed(self, tokens: int) -> int:
        """Blocks that a sequence of so many tokens takes."""
        return -(-tokens // self.block_size)

    def has_room(self, tokens: int) -> bool:
        """Whether a sequence of up to so many tokens can be promised its blocks now."""
        return self.needed(tokens) <= self.blocks - self.promised

    def promise(self, tokens: int) -> "Lease":
        """Room for a sequence of up to `tokens` tokens. Raises NoRoom."""
        if not self.has_room(tokens):
            raise NoRoom(
                f"a text of up to {tokens} tokens needs {self.needed(tokens)} blocks of {self.block_size} tokens of "
                f"the cache, and {self.blocks - self.promised} of {self.blocks} are to be had: wait for other texts to "
                "end, ask for fewer tokens, or load the models with a larger cache"
            )
        self.promised += self.needed(tokens)
        return Lease(self, self.needed(tokens))


class Lease:
    """The blocks of one sequence, in the order of its tokens."""

    def __init__(self, pool: BlockPool, most: int):
        self._pool = pool
        self._most = most
        self._blocks = np.zeros(most, np.int32)
        self._taken = 0

    def blocks(self, tokens: int) -> np.ndarray:
        """Block numbers int32 for so many tokens: those taken before and, as far as they do not suffice, new ones."""
        n = self._pool.needed(tokens)
        if n > self._most:
            raise NoRoom(f"a sequence that was promised {self._most} cache blocks asks for {n}")
        while self._taken < n:
            self._blocks[self._taken] = self._pool._free.pop()
            self._taken += 1
        return self._blocks[:n]

    def give_back(self) -> None:
        """All of them; the sequence is gone."""
        self._pool._free += self._blocks[: self._taken].tolist()
        self._pool.promised -= self._most
        self._taken = self._most = 0
