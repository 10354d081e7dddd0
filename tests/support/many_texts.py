"""Texts of many kinds, to compare tokenizers with: code, digits, twelve scripts, emoji, spaces and newlines."""

import os
import random
from pathlib import Path

SCRIPTS = [
    *((0x20, 0x7F), (0xA0, 0x24F), (0x370, 0x3FF), (0x400, 0x4FF), (0x590, 0x5FF), (0x600, 0x6FF), (0x900, 0x97F)),
    *((0xE00, 0xE7F), (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x1F300, 0x1F64F)),
]


def many_texts(count: int) -> list[str]:
    """`count` texts of up to 300 characters, always the same on one Python version."""
    chance = random.Random(0)
    sources = [path.read_text(encoding="utf-8") for path in sorted(Path(os.__file__).parent.glob("*.py"))]
    return [chance.choice((_code, _code, _script, _numbers))(chance, sources) for _ in range(count)]


def _code(chance: random.Random, sources: list[str]) -> str:
    source = chance.choice(sources)
    start = chance.randrange(len(source) or 1)
    return source[start : start + chance.randrange(1, 300)]


def _script(chance: random.Random, _: list[str]) -> str:
    low, high = chance.choice(SCRIPTS)
    letters = (chr(chance.randrange(low, high)) for _ in range(chance.randrange(1, 60)))
    return "".join(chance.choice((letter, letter, letter, " ", "\n", f"{letter} ")) for letter in letters)


def _numbers(chance: random.Random, _: list[str]) -> str:
    numbers = (chance.randrange(10 ** chance.randrange(1, 12)) for _ in range(chance.randrange(1, 12)))
    return " ".join(f"{number}{chance.choice(('', '.', '%', ' km', ',', chr(10)))}" for number in numbers)
