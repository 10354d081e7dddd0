"""The smoke test and the benchmark as a user runs them, on the embedded pair. No test looks at a time."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import DRAFT, MAIN, ROOT


def last_line(process):
    return json.loads(process.stdout.splitlines()[-1])


def test_smoke_passes_on_the_embedded_pair(run):
    process = run("scripts/smoke.py")
    result = last_line(process)
    assert (process.returncode, result["ok"], result["problems"]) == (0, True, [])
    assert process.stdout.count("\n") == 1 and process.stderr == ""
    assert 1 < result["block_efficiency"] <= 5 and result["streamed_pieces"] > 3


def test_smoke_fails_below_the_acceptance_floor(run):
    process = run("scripts/smoke.py", MAIN, DRAFT, "--min-acceptance", "1", "--max-new-tokens", "40")
    assert process.returncode == 1
    assert "acceptance rate" in last_line(process)["problems"][0]


def test_smoke_takes_own_prompts_and_a_draft_that_is_the_main_model(run):
    process = run("scripts/smoke.py", MAIN, MAIN, "--prompt", "def area(", "--min-acceptance", "1", "-k", "3")
    result = last_line(process)
    assert process.returncode == 0, process.stdout
    assert result["acceptance_rate"] == 1.0 and result["draft_length"] == 3


@pytest.mark.parametrize("program", ["scripts/smoke.py", "scripts/benchmark.py"])
@pytest.mark.parametrize(
    ("arguments", "status", "word"),
    [
        (["no/such/folder", DRAFT], 2, "no/such/folder"),
        ([MAIN, DRAFT, "-k", "0"], 2, "0"),
        ([MAIN, DRAFT, "-k", "many"], 2, "many"),
        ([MAIN, DRAFT, "--max-new-tokens", "-5"], 2, "-5"),
        ([MAIN, DRAFT, "--device", "GPX"], 1, "GPX"),
    ],
)
def test_bad_input_is_one_sentence(run, tmp_path, program, arguments, status, word):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def f(x):\n", encoding="utf-8")
    extra = ["--prompts", prompts] if "benchmark" in program else []
    process = run(program, *arguments, *extra)
    said = process.stdout + process.stderr
    assert process.returncode == status, said
    assert word in said and "Traceback" not in said


def test_benchmark_without_prompts_file(run, tmp_path):
    process = run("scripts/benchmark.py", MAIN, DRAFT, "--prompts", tmp_path / "none.txt")
    assert process.returncode == 2 and "none.txt" in process.stderr


def test_benchmark_prints_a_table_and_one_json_line(run, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def area(width, height):"}\n{"prompt": "class Box:"}\n', encoding="utf-8")
    process = run(
        "scripts/benchmark.py", MAIN, DRAFT, "--prompts", prompts, "-k", "2,4", "--max-new-tokens", "24",
        "--rounds", "1", "--property", "EXECUTION_MODE_HINT=ACCURACY",
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    alone, two, four = last_line(process)["rows"]
    assert (alone["draft_length"], two["draft_length"], four["draft_length"]) == (0, 2, 4)
    assert alone["speedup"] == 1 and alone["acceptance_rate"] is None and alone["block_efficiency"] == 1
    for row in (two, four):
        assert 0 <= row["acceptance_rate"] <= 1 <= row["block_efficiency"] <= row["draft_length"] + 1
        assert row["output_sha256"] == alone["output_sha256"]  # exact arithmetic: the same tokens
    assert "acceptance" in process.stdout.splitlines()[0]


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.parametrize("seconds", [0.5, 4])
@pytest.mark.parametrize("program", ["scripts/smoke.py", "scripts/benchmark.py"])
def test_ctrl_c_ends_at_once_without_a_trace(program, seconds):
    """While loading and while measuring. The shell's status 130 is a process that ended by this signal."""
    prompts = (
        ["--prompts", "scripts/prompts/embedded_code.jsonl"] if "benchmark" in program else ["--max-new-tokens", "900"]
    )
    command = [sys.executable, program, str(MAIN), str(DRAFT), *prompts]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8")
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    out, said = process.communicate(timeout=20)
    assert process.returncode in (-signal.SIGINT, 130), said
    assert "Traceback" not in said and out == ""
