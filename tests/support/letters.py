"""Two small vocabularies, of a main model and of a draft with another tokenizer, for models of eight tokens."""

import numpy as np

from speculative.models.vocabulary import SharedTokens, Vocabulary

MAIN = ["a", "b", "c", "d", "e", "f", "g", "h"]
DRAFT = ["c", "a", "ab", "e", "b", "h", "d", "g"]  # other ids, a token of two letters, and no f


def letters(tokens: list[str]) -> Vocabulary:
    """Encodes the longest token first; letters without a token are left out."""

    def encode(text: str) -> np.ndarray:
        ids = []
        while text:
            found = max((token for token in tokens if text.startswith(token)), key=len, default="")
            ids += [tokens.index(found)] if found else []
            text = text[len(found) or 1 :]
        return np.array(ids, np.int64)

    spelled = {i: token.encode() for i, token in enumerate(tokens)}
    return Vocabulary(spelled, None, None, encode, np.zeros(0, np.int64))


def shared_letters() -> SharedTokens:
    return SharedTokens(letters(MAIN), letters(DRAFT))
