"""Prompt reader for files and Hugging Face data sets.

A file has JSON lines like scripts/prompts/*.jsonl, or is plain text with one prompt per line. A JSON line has "prompt"
or "turns" (a conversation whose first turn is the prompt), and optionally "id", "category" and "json_schema", which the
answer follows. Several files are given with commas between them.

A data set is OWNER/NAME[@SUBSET][:COLUMN[:SPLIT]], like openai/openai_humaneval:prompt:test, or a folder containing
one. This requires the package `datasets`, which downloads only the named data set.
"""

import json
import logging
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import openvino_genai

from speculative.bench.genai import encode
from speculative.error_text import lone_surrogate, one_line
from speculative.pair.model_info import config_facts

DATA_SET = re.compile(r"(?P<name>[^:@]+?)(@(?P<subset>[\w.+-]+))?(:(?P<column>[^:/\\]+)(:(?P<split>[\w.\[\]%:-]+))?)?")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
COLUMNS = ("prompt", "turns", "instruction", "question", "text", "article")  # tried in this order by default
SPLITS = ("test", "validation", "train")
JSON_LINES = (".jsonl", ".json")
TABLES = (".csv", ".tsv", ".parquet", ".xlsx")
FILES = (*JSON_LINES, *TABLES, ".txt", ".md")


class Prompt(NamedTuple):
    """One prompt. `turns` are all user turns of a conversation, starting with the prompt."""

    text: str
    category: str  # "" if not given
    id: str  # the line number if not given
    turns: tuple[str, ...]
    json_schema: str = ""  # that the answer follows


def read_prompts(source: Path | str, max_prompts: int | None = None) -> list[Prompt]:
    """Read prompts from files (.jsonl or text) or a data set; with `max_prompts`, at most that many, evenly from all.

    Raises ValueError naming the line for an invalid or repeated prompt.
    """
    path = Path(source)
    match = DATA_SET.fullmatch(str(source))
    files = _files(source)
    missing = next((file for file in files if not Path(file).is_file()), None)
    if missing is None:
        prompts = _read_files(map(Path, files))
    elif match and path.suffix not in FILES and (HUB_NAME.fullmatch(match["name"]) or Path(match["name"]).is_dir()):
        prompts = _read_data_set(**match.groupdict())
    else:
        raise ValueError(
            f"{missing} is not a file: give JSON lines (.jsonl), a text file with one prompt per line or a data set "
            "(OWNER/NAME)"
        )
    if not prompts:
        raise ValueError(f"{source} has no prompts: give JSON lines (.jsonl) or a text file with one prompt per line")
    count = min(max_prompts or len(prompts), len(prompts))
    return [prompts[i * len(prompts) // count] for i in range(count)]


def shown_name(source: str) -> str:
    """The source's name, without the folders of files."""
    return ", ".join(Path(file).name if Path(file).is_file() else file for file in _files(source))


def token_ids(prompts: Iterable[Prompt], main: Path, room: int) -> list[np.ndarray]:
    """The prompts as the main model's token ids [n], with its chat template if it has one.

    Raises ValueError naming the prompt if the context has no room for `room` tokens after it.
    """
    tokenizer = openvino_genai.Tokenizer(str(main))
    context = config_facts(main).context_length
    all_ids = []
    for prompt in prompts:
        ids = encode(tokenizer, prompt.text).input_ids.data[0]
        if context and len(ids) + room > context:
            raise ValueError(
                f"prompt {prompt.id} has {len(ids):,} tokens, which with {room:,} more do not fit in the main "
                f"model's context of {context:,}: use shorter prompts or fewer new tokens"
            )
        all_ids.append(ids)
    return all_ids


def _files(source: Path | str) -> list[str]:
    """One name, or the names between commas."""
    return [str(source)] if Path(source).exists() else str(source).split(",")


def _read_files(paths: Iterable[Path]) -> list[Prompt]:
    prompts: list[Prompt] = []
    places: dict[tuple[str, ...], str] = {}  # the line of each prompt
    for path in paths:
        if path.suffix.lower() in TABLES:
            raise ValueError(f'{path} is a table: convert it to JSON lines (.jsonl) with "prompt" in each line')
        for number, raw in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
            place = f"line {number} of {path}"
            try:
                line = raw.decode().rstrip("\r")
            except UnicodeDecodeError:
                raise ValueError(f"{place} is not UTF-8: save the file as UTF-8") from None
            if not line.strip():
                continue
            try:
                is_json = path.suffix.lower() in JSON_LINES
                prompt = _json_prompt(line, number) if is_json else Prompt(line, "", str(number), (line,))
            except ValueError as error:
                raise ValueError(f"{place} {error}: fix or remove it") from None
            if prompt.turns in places:
                raise ValueError(f"{place} repeats the prompt of {places[prompt.turns]}: remove one")
            places[prompt.turns] = place
            prompts.append(prompt)
    return prompts


def _json_prompt(line: str, number: int) -> Prompt:
    try:
        content = json.loads(line)
    except ValueError:
        raise ValueError('is not JSON like {"prompt": "..."}') from None
    if not isinstance(content, dict):
        raise ValueError('is not a JSON object like {"prompt": "..."}')
    turns = content.get("turns") or [content.get("prompt")]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError('has neither a string "prompt" nor a list of strings "turns"')
    if content.get("prompt") not in (None, turns[0]):
        raise ValueError('has a "prompt" that differs from its first turn')
    if surrogate := lone_surrogate("\n".join(turns)):
        raise ValueError(f"has an unpaired surrogate, {surrogate}")
    schema = content.get("json_schema")
    if not isinstance(schema, (dict, type(None))):
        raise ValueError('has a "json_schema" that is no object')
    category, name = (content.get(key) for key in ("category", "id"))
    category, name = "" if category is None else str(category), str(number if name is None else name)
    return Prompt(turns[0], category, name, tuple(turns), json.dumps(schema) if schema else "")


def _read_data_set(name: str, subset: str | None, column: str | None, split: str | None) -> list[Prompt]:
    """Prompts from one column of texts or lists of texts (turns); empty and repeated ones are skipped."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{name} is not a file, and reading it as a Hugging Face data set requires the package `datasets` "
            f"({one_line(error)}): name a file, or `pip install datasets`"
        ) from None
    datasets.disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it reports each of its retries
    print(f"reading the data set {name} ...", file=sys.stderr, flush=True)
    try:
        if not split:
            splits = datasets.get_dataset_split_names(name, subset)
            split = next((name for name in SPLITS if name in splits), splits[0])
        rows = datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # from the hub, the network or the files, each with its reason
        raise ValueError(f"cannot read the data set {name}: {one_line(error)[:300]}") from None
    column = column or next((name for name in COLUMNS if name in rows.column_names), None)
    if column not in rows.column_names:
        raise ValueError(
            f"the data set {name} has no column {column or 'with a known prompt name'}, only "
            f"{', '.join(rows.column_names)}: specify one as {name}:{rows.column_names[0]}"
        )
    categories = rows["category"] if "category" in rows.column_names else [""] * len(rows)
    prompts: dict[tuple[str, ...], Prompt] = {}
    for number, (value, category) in enumerate(zip(rows[column], categories, strict=True)):
        turns = value if isinstance(value, list) else [value]
        if not all(isinstance(turn, str) for turn in turns):
            raise ValueError(f"row {number} of the data set {name} has no text in {column}: specify a column of texts")
        if turns and turns[0].strip():
            prompts.setdefault(tuple(turns), Prompt(turns[0], str(category or ""), str(number), tuple(turns)))
    return list(prompts.values())
