"""Encodes prompts, and refuses texts that a tokenizer would silently cut."""

import json
from typing import TypeAlias

import numpy as np
import openvino_genai
from openvino_genai import ChatHistory, GenerationConfig

from speculative.error_text import lone_surrogate

Prompt: TypeAlias = str | ChatHistory | list | np.ndarray
"""A text (the chat template is applied if there is one), a chat history (list of dict or ChatHistory), or token ids."""
EXTRA_TEXT = " one two three four"  # of which no tokenizer makes less than a token, behind any text


class TextTooLong(ValueError):
    """A text has as many tokens as its tokenizer ever returns, or more."""


def encode(
    prompt: Prompt, tokenizer: openvino_genai.Tokenizer | None, config: GenerationConfig | None = None
) -> np.ndarray:
    """The prompt's token ids int64 [n], the same as `LLMPipeline.generate` computes. Raises ValueError for anything but
    token ids if there is no tokenizer, and TextTooLong."""
    is_list_of_dict = isinstance(prompt, list) and prompt and isinstance(prompt[0], dict)
    if isinstance(prompt, (str, ChatHistory)) or is_list_of_dict:
        if not tokenizer:
            raise ValueError("this decoder has no tokenizer: pass token ids, not text")
        _check_text(prompt)
        if isinstance(prompt, str):
            if not tokenizer.chat_template or (config and not config.apply_chat_template):
                return encode_text(prompt, tokenizer)
            prompt = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True)
        return encode_text(text, tokenizer, add_special_tokens=False)
    try:
        ids = np.asarray(prompt, None if len(prompt) else np.int64)
    except (ValueError, TypeError):  # lists of different lengths, or no list at all
        ids = np.zeros(0)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"a prompt is text, a chat history or a flat list of token ids, not {str(prompt)[:50]}")
    return ids.astype(np.int64)


def _check_text(prompt: Prompt) -> None:
    """Raise ValueError for a chat without messages, and for text that is not valid Unicode."""
    if isinstance(prompt, ChatHistory):
        if not len(prompt):
            raise ValueError("the chat history has no message")
        return
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False, default=str)
    if surrogate := lone_surrogate(text):
        raise ValueError(f"the prompt is not valid Unicode: it has the lone surrogate {surrogate}")


def encode_text(text: str, tokenizer: openvino_genai.Tokenizer, add_special_tokens: bool = True) -> np.ndarray:
    """The text's token ids int64 [n]. Raises TextTooLong where the tokenizer's IR has a limit, as GenAI's GGUF reader
    sets one: it keeps the last tokens only, and says so nowhere."""
    ids, extended = (
        tokenizer.encode(part, add_special_tokens=add_special_tokens).input_ids.data[0]
        for part in (text, text + EXTRA_TEXT)
    )
    if len(ids) == len(extended):
        raise TextTooLong(
            f"the text has {len(ids)} tokens or more, but the model's tokenizer keeps only so many: shorten the text, "
            "or convert the model again"
        )
    return ids
