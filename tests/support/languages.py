"""Small languages as sets of words, to compare grammars with: without a parser; tokens have one letter or several."""

import itertools
import re

import numpy as np

from speculative.sampling.grammar import Grammars, Tokens

PIECES = ["a", "b", "ab", "c", "bc", "d", "e", "."]  # of the models of eight tokens; "ab" and "bc" can be split
STOP = 7
REGEXES = {
    "forced tokens": "abcd(abc|abd)e",
    "forbidden tokens": "[acd][abce][bcd][ae]",
    "optional end": "a?b?(c|d)?e?",
    "single continuation": "(abc|ad|b)",
    "unbounded": "(ab|c)*",
}


def words(regex: str, longest: int = 8) -> set[str]:
    """All words of a language up to this length."""
    letters = sorted({*regex} & {*"abcde"})
    every = ("".join(word) for n in range(longest + 1) for word in itertools.product(letters, repeat=n))
    return {word for word in every if re.fullmatch(regex, word)}


def spelled(tokens) -> str:
    return "".join(PIECES[token] for token in tokens)


def allowed_after(language: set[str], tokens, stop: bool = True) -> list[int]:
    """The tokens that may follow `tokens`; with `stop`, the last one where the text may end."""
    text = spelled(tokens)
    found = [i for i, piece in enumerate(PIECES[:STOP]) if any(word.startswith(text + piece) for word in language)]
    return [*found, STOP] if stop and text in language else found


def grammars() -> Grammars:
    """The compiler for the models of eight tokens."""

    def encode(text: str) -> np.ndarray:
        ids = []
        while text:
            found = max((piece for piece in PIECES if text.startswith(piece)), key=len, default="")
            ids += [PIECES.index(found)] if found else []
            text = text[len(found) or 1 :]
        return np.array(ids, np.int64)

    return Grammars(lambda: Tokens({i: piece.encode() for i, piece in enumerate(PIECES)}, frozenset(), encode), 8)
