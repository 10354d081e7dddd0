"""Prompt files: the included ones match their README, and errors in a file name the line."""

import json
import re
from collections import Counter

import jsonschema
import openvino_genai
import pytest

from speculative.bench.prompts import read_prompts, shown_name, token_ids
from speculative.sequence.metrics import repetition
from tests.support.paths import DRAFT, MAIN, ROOT

FOLDER = ROOT / "scripts/prompts"
BUNDLED = {path.name: read_prompts(path) for path in sorted(FOLDER.glob("*.jsonl"))}


def test_bundled_prompts_are_many_and_distinct():
    prompts = [prompt for file in BUNDLED.values() for prompt in file]
    assert len(prompts) >= 100
    assert len({prompt.id for prompt in prompts}) == len({prompt.text for prompt in prompts}) == len(prompts)
    assert all(prompt.category for prompt in prompts)


def test_readme_statistics_match_the_bundled_prompts():
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|(?: `(\S+)`)? \| ([\w -]+) \| (\d+) \| ([\d,]+) \(([\d,]+)-([\d,]+)\)", readme, re.MULTILINE)
    documented, file = {}, ""
    for name, category, *numbers in rows:
        file = name or file
        documented[file, category] = tuple(int(number.replace(",", "")) for number in numbers)
    tokenizer = openvino_genai.Tokenizer(str(MAIN))
    seen: dict[tuple[str, str], list[int]] = {}
    for name, prompts in BUNDLED.items():
        for prompt in prompts:
            category = "code" if name == "embedded_code.jsonl" else prompt.category
            seen.setdefault((name, category), []).append(tokenizer.encode(prompt.text).input_ids.shape[1])
    assert documented == {key: (len(n), sorted(n)[len(n) // 2], min(n), max(n)) for key, n in seen.items()}


def test_conversations_have_turns():
    chats = [prompt for prompt in BUNDLED["instructions.jsonl"] if prompt.category == "multi-turn"]
    assert all(len(prompt.turns) == 2 and prompt.text == prompt.turns[0] for prompt in chats)
    others = Counter(len(prompt.turns) for prompt in BUNDLED["instructions.jsonl"] if prompt not in chats)
    assert others == {1: 70}


def test_long_prompts_are_long_and_not_repetitive():
    tokenizer = openvino_genai.Tokenizer(str(MAIN))
    for prompt in BUNDLED["long.jsonl"]:
        assert 1000 <= tokenizer.encode(prompt.text).input_ids.shape[1] <= 4000
        assert repetition(prompt.text.split()) < 0.35, prompt.id


def test_repeats_prompts_are_many_in_each_category_and_not_loops():
    prompts = BUNDLED["repeats.jsonl"]
    assert len(prompts) >= 60 and min(Counter(prompt.category for prompt in prompts).values()) >= 12
    assert max(repetition(prompt.text.split()) for prompt in prompts) < 0.35


def test_structured_prompts_have_valid_json_schemas():
    prompts = BUNDLED["structured.jsonl"]
    assert len(prompts) == 16 and not any(prompt.json_schema for prompt in BUNDLED["repeats.jsonl"])
    for prompt in prompts:
        jsonschema.validators.validator_for({}).check_schema(json.loads(prompt.json_schema))


def test_text_files_have_one_prompt_per_line(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffdef größe(x):\r\n\r\n  class A:\u2028 pass\n".encode())
    first, second = read_prompts(path)
    assert (first.text, first.id, first.category) == ("def größe(x):", "1", "")
    assert (second.text, second.id) == ("  class A:\u2028 pass", "3")


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.json", "PROMPTS.JSONL"])
def test_json_lines_allow_any_suffix_case_and_nulls(tmp_path, name):
    rows = [
        {"prompt": "a", "category": "x", "id": 7, "turns": None},
        {"prompt": None, "turns": ["b", "c"], "category": None, "id": None, "json_schema": None},
    ]
    (tmp_path / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    first, second = read_prompts(tmp_path / name)
    assert first == ("a", "x", "7", ("a",), "") and second == ("b", "", "2", ("b", "c"), "")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "a"', "line 2 .* is not JSON"),
        ('["a"]', "line 2 .* is not a JSON object"),
        ('{"text": "a"}', 'line 2 .* has neither a string "prompt"'),
        ('{"prompt": 7}', 'line 2 .* has neither a string "prompt"'),
        ('{"prompt": " "}', 'line 2 .* has neither a string "prompt"'),
        ('{"turns": []}', 'line 2 .* has neither a string "prompt"'),
        ('{"prompt": "a", "turns": ["b"]}', "line 2 .* differs"),
        ('{"prompt": "first"}', "line 2 .* repeats the prompt of line 1"),
        (b'{"prompt": "\xff"}', "line 2 .* is not UTF-8"),
        ('{"turns": ["a", "cut \\ud83d"]}', r"line 2 .* has an unpaired surrogate, '\\ud83d': fix or remove"),
    ],
)
def test_invalid_line_is_named(tmp_path, line, reason):
    path = tmp_path / "broken.jsonl"
    line = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(json.dumps({"prompt": "first"}).encode() + b"\n" + line + b"\n")
    with pytest.raises(ValueError, match=reason) as caught:
        read_prompts(path)
    assert "broken.jsonl" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_file_without_prompts_is_rejected(tmp_path, content):
    path = tmp_path / "empty.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="has no prompts"):
        read_prompts(path)


def test_table_is_not_read_as_lines_of_text(tmp_path):
    path = tmp_path / "prompts.csv"
    path.write_text('prompt,category\n"hello, world",x\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"prompts.csv is a table: convert it to JSON lines"):
        read_prompts(path)


@pytest.mark.parametrize("source", ["none.jsonl", "none", "no/such/folder", "some where", ":", ""])
def test_source_that_is_neither_file_nor_data_set_is_rejected(source):
    with pytest.raises(ValueError, match="is not a file"):
        read_prompts(source)


def test_limited_prompts_are_taken_evenly_from_categories():
    prompts = read_prompts(FOLDER / "instructions.jsonl", 12)
    assert Counter(prompt.category for prompt in prompts) == dict.fromkeys({p.category for p in prompts}, 2)
    assert len({prompt.category for prompt in prompts}) == 6
    assert len(read_prompts(FOLDER / "long.jsonl", 1000)) == len(BUNDLED["long.jsonl"])


def test_several_files_are_read_in_order():
    names = ["repeats.jsonl", "instructions.jsonl"]
    several = ",".join(str(FOLDER / name) for name in names)
    assert read_prompts(several) == [prompt for name in names for prompt in BUNDLED[name]]
    assert shown_name(several) == "repeats.jsonl, instructions.jsonl"
    with pytest.raises(ValueError, match=r"none.jsonl is not a file"):
        read_prompts(f"{several},none.jsonl")


def test_prompt_repeated_in_another_file_is_rejected():
    first, second = FOLDER / "repeats.jsonl", FOLDER / "../prompts/repeats.jsonl"
    with pytest.raises(ValueError, match=r"line 1 of .*\.\./prompts/repeats.jsonl repeats the prompt of line 1 of"):
        read_prompts(f"{first},{second}")


def test_prompt_beyond_context_is_named():
    assert len(token_ids(BUNDLED["embedded_code.jsonl"], MAIN, 100)) == 20
    with pytest.raises(ValueError, match=r"prompt long-summary has [\d,]+ tokens, .* context of 1,024"):
        token_ids(BUNDLED["long.jsonl"], MAIN, 100)


def test_missing_datasets_package_gives_one_sentence_error(run, tmp_path):
    (tmp_path / "datasets.py").write_text("raise ImportError('not here')\n", encoding="utf-8")
    process = run(
        "scripts/benchmark.py", MAIN, DRAFT, "--prompts", "owner/name:prompt", env={"PYTHONPATH": str(tmp_path)}
    )
    assert process.returncode == 2 and "pip install datasets" in process.stderr and "owner/name" in process.stderr
    assert process.stderr.count("\n") == 1 and process.stdout == ""


@pytest.fixture
def data_set(tmp_path, monkeypatch):
    """A folder that the package `datasets` reads as a data set, by itself and without the network."""
    pytest.importorskip("datasets")
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "asked"
    folder.mkdir()
    rows = [("What is a stack?", "a"), ("", "a"), ("What is a queue?", "b"), ("What is a stack?", "b")]
    lines = [json.dumps({"question": question, "category": category, "stars": 3}) for question, category in rows]
    (folder / "test.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.mark.parametrize("named", ["", ":question", ":question:test"])
def test_data_set_has_one_prompt_per_row(data_set, named):
    first, second = read_prompts(f"{data_set}{named}")  # no empty one, none twice
    assert (first.text, first.category, first.id) == ("What is a stack?", "a", "0")
    assert (second.text, second.category, second.id) == ("What is a queue?", "b", "2")


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        (":answer", "has no column answer, only question, category, stars: specify one as"),
        (":stars", "row 0 of the data set .* has no text in stars"),
        (":question:train", "cannot read the data set .*train"),
        ("@other:question", "cannot read the data set .*other"),
    ],
)
def test_missing_parts_of_a_data_set_are_named(data_set, named, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        read_prompts(f"{data_set}{named}")
    assert "\n" not in str(caught.value)
