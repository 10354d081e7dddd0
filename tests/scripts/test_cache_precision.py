"""The program that measures the effect of KV-cache precision: its table, and the errors it reports."""

import json
import shutil

import pytest

from tests.support.paths import DRAFT, MAIN

PROGRAM = "scripts/cache_precision.py"


def test_every_cache_precision_is_compared_with_one_forward_pass(run_here):
    done = run_here(PROGRAM, DRAFT, "--tokens", 40)
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.splitlines()
    result = json.loads(last)
    assert [line[:14].strip() for line in table] == list(result)
    assert list(result) == ["default", "u8 by channel", "u8 by token", "f16"]
    for name, cases in result.items():
        assert list(cases) == ["plain", "rejected"], name
        assert all(0 <= figures["tv"] < 0.1 and abs(figures["kl"]) < 0.1 for figures in cases.values()), name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "there is no folder nowhere"),
        (["scripts"], "scripts has no openvino_model.xml"),
        ([MAIN, "--text", "nowhere.txt"], "nowhere.txt"),
        ([MAIN, "--tokens", "16"], "16 tokens of"),
        ([MAIN, "--text", MAIN / "openvino_model.bin"], "'utf-8' codec can't decode"),
    ],
    ids=["no folder", "no model", "no text", "few tokens", "not UTF-8"],
)
def test_bad_usage_gives_one_sentence_error(run_here, arguments, words):
    done = run_here(PROGRAM, *arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and words in done.stderr and done.stderr.count("\n") == 1


def test_truncated_model_gives_one_sentence_error(run_here, tmp_path):
    shutil.copytree(MAIN, tmp_path / "model")
    (tmp_path / "model/openvino_model.bin").write_bytes(b"")
    done = run_here(PROGRAM, tmp_path / "model")
    assert done.returncode == 2 and "is truncated" in done.stderr and done.stderr.count("\n") == 1
