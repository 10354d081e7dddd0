"""Vocabularies as bytes, and the tokens that two of them share.

A draft whose tokenizer is not the main model's proposes only tokens that both have: token-level intersection (Timor et
al. 2025, arXiv 2502.05202). Bytes are compared instead of printed strings, because tokenizers spell a
space as " " or "▁", and a single byte as itself or as "<0x0A>".
"""

import filecmp
import re
from collections.abc import Callable
from difflib import SequenceMatcher
from pathlib import Path
from typing import NamedTuple

import numpy as np
import openvino_genai

SPACE = "▁".encode()  # a space as SentencePiece spells it
BYTE = re.compile(rb"<0x([0-9A-F]{2})>")  # a byte as SentencePiece spells it, for characters that are no tokens
NUMBER = re.compile(rb'( names?="[A-Za-z]+_)[0-9]+')  # as in name="Parameter_42449"
SAMPLE = Path(__file__).read_text(encoding="utf-8")  # English and Python, to compare tokenizers on
MARGIN = 1.25  # for texts that a draft splits into more tokens than the sample


class Vocabulary(NamedTuple):
    """A tokenizer's tokens. Special tokens stand for their names, as "</s>"."""

    spelled: dict[int, bytes]  # as the tokenizer spells them
    bos: int | None
    eos: int | None
    encode: Callable[[str], np.ndarray]  # a text's token ids, int64 [n]
    prefix: np.ndarray  # the ids before those of any text, as bos: int64 [n]

    def tokens(self) -> dict[int, bytes]:
        """The bytes that each token adds to a text."""
        joined = SPACE if not any(b" " in token for token in self.spelled.values()) else None
        has_bytes = sum(bool(BYTE.fullmatch(token)) for token in self.spelled.values()) == 256
        tokens = {}
        for token_id, token in sorted(self.spelled.items()):
            if has_bytes and (byte := BYTE.fullmatch(token)):
                tokens[token_id] = bytes([int(byte[1], 16)])
            elif token:
                tokens[token_id] = token.replace(joined, b" ") if joined else token
        return tokens

    def ids(self) -> dict[bytes, int]:
        """The token of some bytes: the first of several, but a spelled byte only if there is no other."""
        tokens = self.tokens()
        order = sorted(tokens, key=lambda token_id: (not BYTE.fullmatch(self.spelled[token_id]), -token_id))
        return {tokens[token_id]: token_id for token_id in order}


def read(folder: Path) -> Vocabulary | None:
    """The vocabulary of an IR folder; None if it has no detokenizer, or one that does not name the tokens."""
    if not (folder / "openvino_detokenizer.xml").is_file():
        return None
    return of(openvino_genai.Tokenizer(str(folder)))


def of(tokenizer: openvino_genai.Tokenizer) -> Vocabulary | None:
    """The vocabulary of a tokenizer that has a detokenizer; None if that does not name the tokens."""
    spelled = {
        token_id: token
        for token, token_id in tokenizer.get_vocab().items()
        if token != f"[PAD{token_id}]".encode()  # of GGUF: the name of an unused id
    }
    if not spelled:
        return None

    def encode(text: str, special: bool = False) -> np.ndarray:
        ids = tokenizer.encode(text, add_special_tokens=special).input_ids.data
        return ids[0].copy() if text else np.zeros(0, np.int64)

    text, with_special = encode("a"), encode("a", special=True)
    return Vocabulary(
        spelled,
        valid_id(tokenizer.get_bos_token_id()),
        valid_id(tokenizer.get_eos_token_id()),
        encode,
        with_special[: len(with_special) - len(text)]
        if with_special[len(with_special) - len(text) :].tolist() == text.tolist()
        else with_special[:0],
    )


def special(tokenizer: openvino_genai.Tokenizer, vocabulary: Vocabulary) -> frozenset[int]:
    """The tokens that are no text, as "</s>"."""
    ids = [*vocabulary.spelled]
    one_by_one = [[token] for token in ids]
    with_them = tokenizer.decode(one_by_one, skip_special_tokens=False)
    without = tokenizer.decode(one_by_one, skip_special_tokens=True)
    return frozenset(token for token, one, other in zip(ids, with_them, without, strict=True) if one and not other)


class SharedTokens:
    """The tokens that a main model and a draft share, and how the draft reads the main model's tokens.

    `main_ids` and `draft_ids` (int64 [shared]) are pairs of tokens with the same bytes. The two end-of-text tokens are
    a pair, too, unless each is in one by its name.
    """

    def __init__(self, main: Vocabulary, draft: Vocabulary):
        self.main, self.draft = main, draft
        draft_ids_of = draft.ids()
        self.pairs = {main_id: draft_ids_of[token] for token, main_id in main.ids().items() if token in draft_ids_of}
        self.pieces = main.tokens()  # what each main token adds to the text that the draft reads
        if main.eos is not None and draft.eos is not None and main.eos not in self.pairs:
            self.pieces[main.eos] = draft.spelled.get(draft.eos, b"")
            if draft.eos not in self.pairs.values():
                self.pairs[main.eos] = draft.eos
        self._length_ratio = len(draft.encode(SAMPLE)) / len(main.encode(SAMPLE))
        self.byte_ids = [draft_ids_of.get(bytes([byte])) for byte in range(256)]
        self.fit(1 + max(main.spelled), 1 + max(draft.spelled))

    def fit(self, main_size: int, draft_size: int) -> None:
        """Leave out the tokens that the models have no logits for; the sizes are their numbers of logits."""
        self.pairs = {ours: theirs for ours, theirs in self.pairs.items() if ours < main_size and theirs < draft_size}
        self.main_ids = np.array(sorted(self.pairs), np.int64)
        self.draft_ids = np.array([self.pairs[token] for token in self.main_ids.tolist()], np.int64)

    def shared_split(self, text: str) -> tuple[float, float]:
        """The share of the main model's tokens of `text` that the draft shares, and of those that the draft's tokenizer
        writes there, too: no other token is likely to be proposed."""
        count = shared = same_split = 0
        ours, theirs = self.main.tokens(), self.draft.tokens()
        for line in text.splitlines(keepends=True):
            tokens = self.main.encode(line).tolist()
            pieces = [ours.get(token) for token in tokens]
            drafted = [theirs.get(token) for token in self.draft.encode(line).tolist()]
            count += len(tokens)
            shared += sum(token in self.pairs for token in tokens)
            matches = SequenceMatcher(None, pieces, drafted, autojunk=False).get_matching_blocks()
            same_split += sum(match.size for match in matches)
        return shared / max(count, 1), same_split / max(count, 1)

    def draft_length(self, tokens: int) -> int:
        """About how many tokens of the draft, at most, a text of `tokens` tokens of the main model has."""
        return int(tokens * max(1.0, self._length_ratio) * MARGIN)


def differing(main: Path, draft: Path) -> tuple[Vocabulary, Vocabulary] | None:
    """The vocabularies of two IR folders; None if they have the same tokens with the same ids, or a folder does not
    list its tokens."""
    if _same_ir(main / "openvino_tokenizer.xml", draft / "openvino_tokenizer.xml"):
        return None
    ours, theirs = read(main), read(draft)
    return (ours, theirs) if ours and theirs and ours.spelled != theirs.spelled else None


def shared_tokens(main: Path, draft: Path) -> SharedTokens | None:
    """Shared tokens of the vocabularies of two IR folders; None unless they are `differing`.

    Raises ValueError if they share no token.
    """
    vocabularies = differing(main, draft)
    if not vocabularies:
        return None
    shared = SharedTokens(*vocabularies)
    if not shared.pairs:
        raise ValueError(f"{draft} shares no token with {main}, so it cannot draft for it: choose another draft")
    return shared


def _same_ir(one: Path, other: Path) -> bool:
    """Whether two IRs compute the same, but for numbers in the names of nodes, which count what a process has made."""
    files = [(xml, xml.with_suffix(".bin")) for xml in (one, other)]
    if not all(file.is_file() for pair in files for file in pair):
        return False
    graphs = [NUMBER.sub(rb"\1", xml.read_bytes()) for xml, _ in files]
    return graphs[0] == graphs[1] and filecmp.cmp(files[0][1], files[1][1], shallow=False)


def valid_id(token_id: int) -> int | None:
    """A special token's id; None for -1, by which OpenVINO says that there is none."""
    return None if token_id == -1 else token_id
