"""Beginnings of the training texts: user turns that the main model writes itself, given prompts, or nothing.

A model with a chat template writes the user's turn when it is given the template up to that turn (Magpie: Xu et al.
2024, arXiv 2406.08464). A model without one writes the first words of a text.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import openvino_genai

from speculative.convert.errors import ConvertError
from speculative.error_text import lone_surrogate

PLACEHOLDER = "user-turn-goes-here"
MIN_PROMPTS = 10
TURN, OPENING = 96, 12  # most tokens of a user turn, and of the first words of a text


class Opening(NamedTuple):
    """How a prompt is written: the model continues `lead` and `prefix` up to a stop token or `longest` tokens. The
    prompt is `prefix`, what it wrote, and `suffix`."""

    lead: list[int]
    prefix: list[int]
    longest: int
    stop_ids: set[int]
    suffix: list[int]


def opening(tokenizer: openvino_genai.Tokenizer, vocabulary: int, random: np.random.Generator) -> Opening:
    """The opening of the model's own texts."""
    bos, eos = tokenizer.get_bos_token_id(), tokenizer.get_eos_token_id()
    if not tokenizer.chat_template:
        starts = [token for token in (bos, eos) if token >= 0]
        return Opening([], [starts[0] if starts else int(random.integers(vocabulary))], OPENING, set(), [])
    turn = [{"role": "user", "content": PLACEHOLDER}]
    before, separator, after = tokenizer.apply_chat_template(turn, add_generation_prompt=True).partition(PLACEHOLDER)
    if not separator:
        raise ConvertError("the main model's chat template leaves out the user's text; give prompts with --prompts", 2)
    prefix, suffix = (tokenizer.encode(part, add_special_tokens=False).input_ids.data[0] for part in (before, after))
    # A model without BOS saw the end of another text before each beginning; without it some write nonsense.
    lead = [eos] if bos < 0 <= eos else []
    return Opening(lead, prefix.tolist(), TURN, set(suffix[:1].tolist()), suffix.tolist())


def next_turn(tokenizer: openvino_genai.Tokenizer) -> list[int]:
    """The token ids between an answer and the user's next turn; [] if the chat template has none."""
    if not tokenizer.chat_template:
        return []
    roles = ("user", "assistant", "user")
    turns = [{"role": role, "content": f"{PLACEHOLDER}-{i}"} for i, role in enumerate(roles)]
    _, _, later = tokenizer.apply_chat_template(turns, add_generation_prompt=True).partition(f"{PLACEHOLDER}-1")
    between, separator, _ = later.partition(f"{PLACEHOLDER}-2")
    return tokenizer.encode(between, add_special_tokens=False).input_ids.data[0].tolist() if separator else []


class Prompt(NamedTuple):
    """A user turn, and its category, "" if it has none."""

    text: str
    category: str


def read_prompts(file: Path) -> list[Prompt]:
    """The different prompts of a JSONL file. Raises ConvertError if there are fewer than MIN_PROMPTS."""
    try:
        lines = [line for line in file.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
        rows = [json.loads(line) for line in lines]
        if not all(isinstance(row["prompt"], str) for row in rows):
            raise TypeError
        rows_read = [Prompt(row["prompt"], str(row.get("category") or "")) for row in rows]
        prompts = list({prompt.text: prompt for prompt in rows_read}.values())
    except OSError as error:
        raise ConvertError(f"{file} cannot be read ({error.strerror}); give a file with --prompts", 2) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConvertError(
            f'{file} is not a JSONL file of prompts; each line must be like {{"prompt": "Write a poem."}}', 2
        ) from error
    if surrogate := lone_surrogate("\n".join(prompt.text for prompt in prompts)):
        raise ConvertError(f"{file} has a prompt with an unpaired surrogate, {surrogate}; fix or remove the line", 2)
    if len(prompts) < MIN_PROMPTS:
        raise ConvertError(
            f"{file} has {len(prompts)} different prompts, of which a part is held out; give at least {MIN_PROMPTS}",
            2,
        )
    return prompts


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """A hash of the prompts, whatever their order."""
    return hashlib.sha256(json.dumps(sorted(prompts)).encode()).hexdigest()[:16]
