"""Texts that the main model wrote, as token ids, on disk. A part of them is held out from the training."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

MIN_TEXTS, MIN_HELD_OUT = 8, 2  # texts to train on, held-out texts


class Text(NamedTuple):
    """Token ids of a prompt and of what the main model wrote after it, at `temperature` (0: greedy).

    All texts with the same prompt are `held_out`, or none. `category` is the prompt's, "" if it has none.
    """

    prompt: list[int]
    answer: list[int]
    temperature: float
    held_out: bool
    category: str = ""

    @property
    def tokens(self) -> np.ndarray:
        """int64 [n]"""
        return np.array(self.prompt + self.answer, np.int64)


class TextFile:
    """Append-only file with one text per line; an incomplete last line, of a run that was killed, is dropped."""

    def __init__(self, path: Path):
        content = path.read_bytes() if path.exists() else b""
        complete = content[: content.rfind(b"\n") + 1]
        self.texts: list[Text] = []
        self._token_ids: set[tuple[int, ...]] = set()
        self._held_out_count = self.token_count = 0
        for line in complete.splitlines():
            self._count(Text(*json.loads(line)))
        self._file = path.open("ab")
        self._file.truncate(len(complete))

    def add(self, text: Text) -> None:
        """Append a text, unless it is there already."""
        if (*text.prompt, *text.answer) not in self._token_ids:
            self._count(text)
            self._file.write(json.dumps(text).encode() + b"\n")
            self._file.flush()

    def _count(self, text: Text) -> None:
        self.texts.append(text)
        self._token_ids.add((*text.prompt, *text.answer))
        self._held_out_count += text.held_out
        self.token_count += len(text.prompt) + len(text.answer)

    def close(self) -> None:
        self._file.close()

    @property
    def training(self) -> list[Text]:
        return [text for text in self.texts if not text.held_out]

    @property
    def held_out(self) -> list[Text]:
        return [text for text in self.texts if text.held_out]

    @property
    def is_enough(self) -> bool:
        """Whether there are enough texts for any training."""
        return self.is_enough_with([])

    def is_enough_with(self, more: Sequence[Text]) -> bool:
        """Whether there would be enough of them if `more` were added."""
        held_out = {(*text.prompt, *text.answer): text.held_out for text in more}
        new = [is_held_out for ids, is_held_out in held_out.items() if ids not in self._token_ids]
        held_out_count = self._held_out_count + sum(new)
        return held_out_count >= MIN_HELD_OUT and len(self.texts) + len(new) - held_out_count >= MIN_TEXTS

    @property
    def has_held_out(self) -> bool:
        """Whether there are enough held-out texts for any training."""
        return self._held_out_count >= MIN_HELD_OUT
