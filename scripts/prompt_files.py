"""Prompts from a file: JSON lines like scripts/prompts/*.jsonl, or plain text with one prompt a line.

A JSON line has "prompt", or "turns" (a conversation, of which the first turn is the prompt), and may have "id" and
"category".
"""

import json
from pathlib import Path
from typing import NamedTuple


class Prompt(NamedTuple):
    """One prompt. `turns` are all user turns of a conversation, the prompt itself first."""

    text: str
    category: str  # "" where the file names none
    id: str  # the line number where the file names none
    turns: tuple[str, ...]


def read_prompts(path: Path) -> list[Prompt]:
    """Read JSON lines (.jsonl) or text. Empty lines are skipped.

    Raises ValueError, which names the line, for a broken one, and for a prompt that stood before: the engine would
    answer that one from its caches.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is not a file: give JSON lines (.jsonl) or a text file with one prompt a line")
    prompts: list[Prompt] = []
    lines: dict[tuple[str, ...], int] = {}  # the line of each prompt
    for number, raw in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            line = raw.decode().rstrip("\r")
        except UnicodeDecodeError:
            raise ValueError(f"line {number} of {path} is not UTF-8: save the file as UTF-8") from None
        if not line.strip():
            continue
        try:
            prompt = _json_prompt(line, number) if path.suffix == ".jsonl" else Prompt(line, "", str(number), (line,))
        except ValueError as error:
            raise ValueError(f"line {number} of {path} {error}: mend or remove it") from None
        if prompt.turns in lines:
            raise ValueError(f"line {number} of {path} repeats the prompt of line {lines[prompt.turns]}: remove one")
        lines[prompt.turns] = number
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{path} has no prompts: give JSON lines (.jsonl) or a text file with one prompt a line")
    return prompts


def _json_prompt(line: str, number: int) -> Prompt:
    try:
        content = json.loads(line)
    except ValueError:
        raise ValueError('is not JSON like {"prompt": "..."}') from None
    if not isinstance(content, dict):
        raise ValueError('is not a JSON object like {"prompt": "..."}')
    turns = content.get("turns", [content.get("prompt")])
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError('has no text as "prompt" and no list of texts as "turns"')
    if content.get("prompt", turns[0]) != turns[0]:
        raise ValueError('has another "prompt" than its first turn')
    return Prompt(turns[0], str(content.get("category", "")), str(content.get("id", number)), tuple(turns))
