"""Texts that a tokenizer would cut."""

import pytest

from speculative.sequence.prompt import TextTooLong, encode, encode_text
from tests.support.cutting_tokenizer import cutting_tokenizer
from tests.support.paths import DRAFT


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return cutting_tokenizer(DRAFT, tmp_path_factory.mktemp("cutting") / "draft", 64)


@pytest.mark.parametrize("special", [False, True])
def test_text_truncated_by_the_tokenizer_is_rejected(tokenizer, special):
    text = "a = b\n" * 50
    assert tokenizer.encode(text, add_special_tokens=special).input_ids.shape == [1, 64]
    with pytest.raises(TextTooLong, match=r"^the text has 64 tokens or more.*: shorten the text, or convert"):
        encode_text(text, tokenizer, special)
    with pytest.raises(TextTooLong):
        encode([{"role": "user", "content": text}], tokenizer)


def test_shorter_texts_are_encoded_completely(tokenizer):
    text = "a = b\n" * 10
    assert tokenizer.decode(encode_text(text, tokenizer).tolist()) == text
    assert encode_text("", tokenizer).tolist() == []
