"""Prompts of every kind, and texts that a tokenizer would cut."""

import openvino_genai
import pytest
from openvino_genai import ChatHistory, GenerationConfig

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


def test_text_and_chat_are_encoded_as_the_template_writes_them():
    """With the beginning of the answer."""
    tokenizer = openvino_genai.Tokenizer(str(DRAFT))
    tokenizer.set_chat_template(
        "{% for message in messages %}[{{ message['content'] }}]{% endfor %}{{ 'x =' if add_generation_prompt }}"
    )
    chat = [{"role": "user", "content": "a"}]
    for prompt in ("a", chat, ChatHistory(chat)):
        assert tokenizer.decode(encode(prompt, tokenizer).tolist()) == "[a]x ="
    assert tokenizer.decode(encode("a", tokenizer, GenerationConfig(apply_chat_template=False)).tolist()) == "a"


def test_list_of_token_ids_is_a_prompt():
    assert encode([5, 0, 7], None).tolist() == [5, 0, 7]


@pytest.mark.parametrize("prompt", [5, [[1, 2]], [[1], [2, 3]], [1.5], ["a"]], ids=str)
def test_anything_but_text_chat_and_flat_token_ids_is_rejected(prompt):
    with pytest.raises(ValueError, match="a prompt is text, a chat history or a flat list of token ids, not "):
        encode(prompt, None)
