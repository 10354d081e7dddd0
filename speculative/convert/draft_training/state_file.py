"""Training data in memory-mapped files: tokens of each text, with the main model's hidden states and probabilities."""

from pathlib import Path

import numpy as np

from speculative.convert.draft_training.main_model import Reading

TextStates = tuple[np.ndarray, Reading]
"""Tokens of a text int64 [n], and what the main model computes for them."""


class StateFile:
    """Append-only files in a folder; `len` is the number of texts. A text that a killed run wrote half is dropped."""

    def __init__(self, folder: Path, states: int, top: int):
        """`states` numbers and `top` ids and probabilities for each token."""
        folder.mkdir(parents=True, exist_ok=True)
        columns = {"tokens": ("i4", 1), "states": ("f2", states), "ids": ("i4", top), "log_probabilities": ("f2", top)}
        self._lengths = folder / "lengths"
        self._columns = {name: (folder / name, np.dtype(kind), width) for name, (kind, width) in columns.items()}
        content = self._lengths.read_bytes() if self._lengths.exists() else b""
        self.lengths = np.frombuffer(content[: len(content) // 4 * 4], np.int32).tolist()
        self._write = {name: path.open("ab") for name, (path, _, _) in self._columns.items()}
        for name, (_, kind, width) in self._columns.items():
            self._write[name].truncate(sum(self.lengths) * width * kind.itemsize)
        self._index = self._lengths.open("ab")
        self._index.truncate(4 * len(self.lengths))

    def __len__(self) -> int:
        return len(self.lengths)

    @staticmethod
    def bytes_each(states: int, top: int) -> int:
        """Bytes on disk for a token."""
        return 4 + 2 * states + 6 * top

    def add(self, tokens: np.ndarray, reading: Reading) -> None:
        """Append a text; it counts when all parts of it are written."""
        for name, values in {"tokens": tokens, **reading._asdict()}.items():
            file = self._write[name]
            file.write(np.ascontiguousarray(values, self._columns[name][1]).tobytes())
            file.flush()
        self._index.write(np.int32(len(tokens)).tobytes())
        self._index.flush()
        self.lengths.append(len(tokens))

    def close(self) -> None:
        for file in (*self._write.values(), self._index):
            file.close()

    def texts(self) -> list[TextStates]:
        """Tokens and reading of each text, as views of the memory-mapped files."""
        rows, columns = sum(self.lengths), {}
        for name, (path, kind, width) in self._columns.items():
            shape = (rows, width)
            columns[name] = np.memmap(path, kind, "r", shape=shape) if rows * width else np.zeros(shape, kind)
        ends = np.cumsum(self.lengths)
        spans = [slice(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]
        return [
            (columns["tokens"][s, 0], Reading(columns["states"][s], columns["ids"][s], columns["log_probabilities"][s]))
            for s in spans
        ]
