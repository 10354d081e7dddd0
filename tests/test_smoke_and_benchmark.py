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


@pytest.mark.parametrize(
    ("content", "word"), [(None, "not a file"), ("\n", "no prompts"), ('{"prompt": "x"}\n{"prompt"\n', "line 2")]
)
def test_benchmark_names_what_is_wrong_with_a_prompts_file(run, tmp_path, content, word):
    prompts = tmp_path / "prompts.jsonl"
    if content is not None:
        prompts.write_text(content, encoding="utf-8")
    process = run("scripts/benchmark.py", MAIN, DRAFT, "--prompts", prompts)
    assert process.returncode == 2 and word in process.stderr and "prompts.jsonl" in process.stderr
    assert "Traceback" not in process.stderr


def test_benchmark_prints_a_table_and_one_json_line(run, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def area(width, height):"}\n{"prompt": "class Box:"}\n', encoding="utf-8")
    process = run(
        "scripts/benchmark.py", MAIN, DRAFT, "--prompts", prompts, "-k", "2,4", "--max-new-tokens", "24",
        "--rounds", "1", "--property", "EXECUTION_MODE_HINT=ACCURACY", "--paths", "genai,engine,sampled",
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    results = last_line(process)
    rows = {(row["engine"], row["sampled"], row["draft_length"]): row for row in results["rows"]}
    lengths = {"GenAI": [0, 2, 4], "ours": [0, 2, 4, "adaptive"]}
    assert set(rows) == {
        (engine, sampled, k) for engine in lengths for sampled in (False, True) for k in lengths[engine]
    } - {("GenAI", True, k) for k in (0, 2, 4)}
    alone = rows["GenAI", False, 0]
    assert alone["speedup"] == 1 and alone["acceptance_rate"] is None and alone["block_efficiency"] == 1
    for (_, sampled, k), row in rows.items():
        if k:
            assert 0 <= row["acceptance_rate"] <= 1 <= row["block_efficiency"]
        if k in (2, 4):
            assert row["block_efficiency"] <= k + 1 and row["mean_draft_length"] <= k
        if not sampled:  # exact arithmetic: the same tokens
            assert row["output_sha256"] == alone["output_sha256"] and row["same_text"] == 2
    assert "acceptance" in process.stdout.splitlines()[0]
    asked = [comparison["what"] for comparison in results["comparisons"]]
    assert "ours / GenAI, greedy, K = 4" in asked and any("adaptive / best fixed" in what for what in asked)


def test_benchmark_behind_other_text(run, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def area(width, height):\n", encoding="utf-8")
    process = run(
        "scripts/benchmark.py", MAIN, DRAFT, "--prompts", prompts, "-k", "3", "--max-new-tokens", "10",
        "--rounds", "1", "--paths", "engine", "--context", "300",
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert last_line(process)["environment"]["context"] == 300
    process = run("scripts/benchmark.py", MAIN, DRAFT, "--prompts", prompts, "--max-new-tokens", "1")
    assert process.returncode == 2 and "2 or more" in process.stderr


def test_benchmark_costs_prints_tables_and_one_json_line(run):
    process = run("scripts/benchmark_costs.py", MAIN, DRAFT, "--repeat", "1", "--max-new-tokens", "8")
    assert process.returncode == 0, process.stderr
    results = last_line(process)
    assert [row["context"] for row in results["inferences"]] == [256, 512]  # the pair's context is 1,024
    assert {row["vocabulary"] for row in results["sampling"]} == {4_096, 32_000, 151_936}
    assert [row["start"] for row in results["starts"]] == ["no cache", "first", "second"]
    assert 30e6 < results["limit"]["weight_bytes"]["main"] < 36e6 and results["limit"]["bandwidth"] > 1e8
    assert 0 < results["limit"]["draft"] < 1.5


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
