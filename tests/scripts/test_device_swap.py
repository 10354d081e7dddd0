"""device_swap.py as users run it, on this machine's CPU under different device strings.

The embedded draft serves as both models, because it is fast. No test depends on a speed.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from openvino_genai import GenerationConfig

from scripts import device_swap
from speculative.bench import genai
from speculative.bench.cluster.child_process import how_it_ended
from speculative.bench.devices import cell as device_cell
from speculative.bench.devices import matrix
from speculative.bench.devices.matrix import Cell, Device, device_list
from speculative.bench.devices.results import ResultsFile
from speculative.bench.methods import genai_pipeline
from speculative.bench.result import SwapResult
from speculative.models.spec import ModelSpec
from tests.support.in_process import run_here as run_in_process
from tests.support.paths import DRAFT, MAIN, ROOT
from tests.support.typed import problems
from tests.support.waiting import PATIENCE, wait_until

PROGRAM = "scripts/device_swap.py"
EXACT = {"EXECUTION_MODE_HINT": "ACCURACY"}
QUICK = ["--max-prompts", "2", "--max-new-tokens", "12", "--rounds", "1", "--property", "EXECUTION_MODE_HINT=ACCURACY"]
EMULATED = ["--devices", "CPU,GPU,NPU", "--emulate-npu", "-k", "9", "--property", "NPU:MAX_PROMPT_LEN=128", *QUICK]
posix = pytest.mark.posix("POSIX signals")


def result_of(stdout):
    result = json.loads(stdout.splitlines()[-1])
    assert problems(result, SwapResult) == []
    return result


def cells_of(result):
    return {(cell["main_device"], cell["draft_device"]): cell for cell in result["matrix"]["cells"]}


def start(results, *arguments):
    command = [sys.executable, PROGRAM, DRAFT, DRAFT, "--results", results, *QUICK, *arguments]
    return subprocess.Popen(
        [str(word) for word in command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


def second_cell(process, results):
    """The process of the second cell, once the first cell's result is in the file."""
    wait_until(lambda: results.exists() and results.read_bytes().count(b"\n") == 1)
    return wait_until(psutil.Process(process.pid).children)[0]


@pytest.fixture(scope="module")
def swapped(tmp_path_factory):
    """The results file, the finished process and what it wrote, of a matrix with an emulated NPU and an absent GPU."""
    folder = tmp_path_factory.mktemp("swap")
    files = ["--json", folder / "a.json", "--csv", folder / "a.csv", "--html", folder / "a.html"]
    process = run_in_process(PROGRAM, DRAFT, DRAFT, *EMULATED, "--results", folder / "cells.jsonl", *files)
    assert process.returncode == 0, process.stderr
    return folder, process


def test_every_cell_is_measured_compared_and_labelled(swapped):
    _, process = swapped
    result = result_of(process.stdout)
    emulated = "NPU (emulated)"
    assert result["program"] == "device_swap"
    assert result["matrix"]["main_devices"] == ["CPU", "GPU", emulated]
    assert result["matrix"]["draft_devices"] == ["none", "CPU", "GPU", emulated]
    cells = cells_of(result)
    assert len(cells) == 12
    for (main, draft), cell in cells.items():
        if "GPU" in (main, draft):
            assert cell["status"] == "absent" and "no GPU" in cell["reason"] and "throughput" not in cell
            continue
        assert cell["status"] == ("emulated" if emulated in (main, draft) else "ok"), cell["reason"]
        assert cell["same_text"] and cell["first_difference"] is None  # exact arithmetic
        assert cell["throughput"] > 0 and cell["speedup"] > 0
        assert cell["draft_length"] == (0 if draft == "none" else 7 if main == emulated else 9)
        if cell["status"] == "emulated":
            assert "not representative of an NPU" in cell["reason"]
        if draft == "none":
            assert cell["speedup"] == 1
        if draft != "none" and cell["status"] == "ok":  # the draft is the main model
            assert cell["acceptance_rate"] == 1 and cell["block_efficiency"] > 5
        if draft == emulated:
            assert cell["properties"]["draft"]["NPUW_DEVICES"] == "CPU"
            assert cell["properties"]["draft"]["MAX_PROMPT_LEN"] == 128
        assert "MAX_PROMPT_LEN" not in (cell["properties"]["main"] if main != emulated else {})
    assert len([row for row in result["rows"] if row["draft_device"] == "none"]) == 2
    summary = " ".join(result["summary"])
    assert summary.startswith("Fastest here: main on CPU") and "(emulated)" not in result["summary"][0]
    assert (
        "the same greedy text" in summary and "GPU is absent" in summary and "not representative of an NPU" in summary
    )


def test_table_is_printed_before_json_and_files_are_written(swapped):
    folder, process = swapped
    lines = process.stdout.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("main \\ draft"))
    assert lines[head].split("   ")[1].strip() == "none"
    assert [line.split("  ")[0] for line in lines[head + 1 : head + 3]] == ["CPU", "NPU (emulated)"]
    assert json.loads((folder / "a.json").read_text(encoding="utf-8")) == result_of(process.stdout)
    assert "NPU (emulated)" in (folder / "a.csv").read_text(encoding="utf-8")
    assert "NPU (emulated)" in (folder / "a.html").read_text(encoding="utf-8")
    assert len((folder / "cells.jsonl").read_text(encoding="utf-8").splitlines()) == 6


def test_device_that_changes_text_is_flagged_with_first_difference(swapped, run_here, tmp_path):
    """One token of a saved cell is changed, as if that device had chosen a different token."""
    folder, _ = swapped
    changed = "NPU (emulated)", "CPU"
    kept = [json.loads(line) for line in (folder / "cells.jsonl").read_text(encoding="utf-8").splitlines()]
    for line in kept:
        if (line["result"]["main_device"], line["result"]["draft_device"]) == changed:
            line["result"]["answer"]["tokens"][1][1][4] = 300
    results = tmp_path / "cells.jsonl"
    results.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    process = run_here(PROGRAM, DRAFT, DRAFT, *EMULATED, "--results", results)
    assert process.returncode == 0 and "6 of 6 cells" in process.stderr
    result = result_of(process.stdout)
    cells = cells_of(result)
    flagged = cells[changed]
    assert flagged["same_text"] is False and flagged["first_difference"] == 5
    assert [key for key, cell in cells.items() if cell.get("same_text") is False] == [changed]
    found = flagged["difference"]
    assert found["different_texts"] == 1 and found["texts"] == 2 and not found["already_alone"]
    assert found["expected"] != found["seen"]
    assert found["expected_continuation"].startswith(found["expected"])
    assert found["continuation"].startswith(found["seen"])
    assert found["margins"][0] > 0.5 and flagged["difference_is"] == f"real, {found['margins'][0]:.1f} nats"
    sentence = "The greedy text really differs from that of main on CPU, alone in: main on NPU (emulated), draft on CPU"
    assert f"{sentence} ({flagged['difference_is']})." in result["summary"]
    assert len(results.read_text(encoding="utf-8").splitlines()) == 7  # the verdict is kept, too
    assert f"{found['seen']!r} instead of {found['expected']!r}" in process.stdout and " !" in process.stdout


@pytest.mark.parametrize(
    ("margins", "mark", "words"),
    [
        (
            [0.1, 0.4],
            "~",
            "only at near-ties (about equal in f32) in: main on GPU, alone (near-ties, up to 0.40",
        ),
        (
            [0.1, 2.0],
            "!",
            "really differs from that of main on CPU, alone in: main on GPU, alone (1 of 2 real, up to",
        ),
        ([], "!", "(near-tie or real not judged) in: main on GPU, alone."),
    ],
)
def test_near_ties_are_distinguished_from_real_differences(margins, mark, words):
    devices = ("CPU", "GPU")
    cells = [cell(main, draft, 10.0, 1.0, 1.0, 1.0) for main in devices for draft in (None, *devices)]
    changed = cells[3]  # main alone on GPU
    changed.job, changed.answer["tokens"] = {"prompts": [[7]]}, [[[1, 3]]]
    matrix.compare(cells, ["1"], SimpleNamespace(decode=str))
    assert changed.difference["places"] == [{"text": [7, 1], "token": 3}]
    changed.difference["margins"] = margins
    assert any(words in line for line in matrix.summary(cells))
    assert f"10.0 {mark} " in matrix.table(cells)


def test_pair_with_npu_continues_past_end_of_text():
    """GenAI stops despite ignore_eos if the end-of-text token is the last of the accepted tokens."""
    draft = ModelSpec(DRAFT, "NPU", {**EXACT, "NPUW_DEVICES": "CPU", "MAX_PROMPT_LEN": 128})
    pair = genai.load(ModelSpec(MAIN, "CPU", EXACT), draft)
    prompt = json.loads((ROOT / "scripts/prompts/embedded_code.jsonl").open(encoding="utf-8").readline())["prompt"]
    ids = pair.get_tokenizer().encode(prompt).input_ids.data[0]
    config = GenerationConfig(max_new_tokens=60, ignore_eos=True, num_assistant_tokens=2)
    assert len(pair.generate(genai.inputs(ids), config).tokens[0]) < 60  # fails once GenAI fixes it
    run = genai.generate(pair, genai.inputs(ids), 60, 2)
    assert len(run.tokens) == sum(run.gained) + 1 == 60


JOB = {
    "main": str(DRAFT),
    "draft": str(DRAFT),
    **{f"{role}_device": "CPU" for role in ("main", "draft")},
    **{f"{role}_properties": EXACT for role in ("main", "draft")},
    "draft_lengths": [2, 4],
    "max_new_tokens": 8,
}


def count_tokens(model):
    """A list that grows by the number of tokens of each forward pass of `model`."""
    counts, run = [], model.backend.run
    model.backend.run = lambda start, tokens, last: (counts.append(len(tokens)), run(start, tokens, last))[1]
    return counts


def test_native_engine_reprocesses_prompt_for_every_method(monkeypatch):
    """Otherwise the prompt would be cached by the run without a draft, and TTFT would be the time of one token."""
    engines = []
    load = device_cell.decoder.load
    monkeypatch.setattr(device_cell.decoder, "load", lambda *given: engines.append(load(*given)) or engines[-1])
    methods = device_cell._native_methods(JOB)
    read = [count_tokens(model) for model in (engines[0].main, engines[0].draft.model)]
    ids = np.arange(300) * 7919 % 4000
    for method in (*methods, *methods):
        method.decode(ids)
        mains, drafts = ([lengths.pop(0) for _ in range(len(lengths))] for lengths in read)
        assert mains[0] == 300 and (drafts[0] >= 300 if method.draft_length else not drafts), method.name


def test_genai_reprocesses_prompt_for_every_method(monkeypatch):
    """GenAI does not report cache hits, so the test checks the options its pipelines are loaded with."""
    given = []
    load = genai.load
    monkeypatch.setattr(genai, "load", lambda *arguments: given.append(arguments) or load(*arguments))
    methods = device_cell._genai_methods(JOB)
    assert [method.name for method in methods] == ["alone", "K = 2", "K = 4"]
    assert all(len(method.decode(np.arange(40, 50)).tokens) == 8 for method in methods)
    assert [draft for _, draft in given] == [None, ModelSpec(DRAFT, "CPU", EXACT)]
    for main, _ in given:
        assert main.properties["scheduler_config"].enable_prefix_caching is False
        assert main.properties["EXECUTION_MODE_HINT"] == "ACCURACY"
    monkeypatch.setattr(genai, "load", lambda *arguments: given.append(arguments))
    main, draft = ModelSpec(MAIN, "CPU", EXACT), ModelSpec(DRAFT, "NPU")
    genai_pipeline(main, draft)
    assert given[-1] == (main, draft)  # pipelines with an NPU have no prefix cache


@posix
def test_interrupted_run_resumes_and_fresh_starts_over(run_here, tmp_path):
    results = tmp_path / "cells.jsonl"
    process = start(results, "--devices", "AUTO:CPU")
    child = second_cell(process, results)
    process.send_signal(signal.SIGINT)
    out, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert psutil.wait_procs([child], timeout=PATIENCE)[1] == []
    first = cells_of(result_of(out))
    assert first["AUTO:CPU", "none"]["status"] == "ok" and first["AUTO:CPU", "AUTO:CPU"]["status"] == "not run"
    assert "1 cell is not measured yet" in out and "main \\ draft" in out

    again = (PROGRAM, DRAFT, DRAFT, "--results", results, *QUICK, "--devices", "AUTO:CPU")
    process = run_here(*again)
    assert process.returncode == 0, process.stderr
    assert "1 of 2 cells are already in" in process.stderr
    second = cells_of(result_of(process.stdout))
    assert second["AUTO:CPU", "none"]["measured"] == first["AUTO:CPU", "none"]["measured"]
    assert second["AUTO:CPU", "AUTO:CPU"]["measured"] > first["AUTO:CPU", "none"]["measured"]

    process = run_here(*again, "--fresh")
    assert process.returncode == 0, process.stderr
    newest = max(cell["measured"] for cell in second.values())
    assert all(cell["measured"] > newest for cell in cells_of(result_of(process.stdout)).values())
    assert len(results.read_text(encoding="utf-8").splitlines()) == 2


@posix
def test_crash_fails_only_one_cell(run_here, tmp_path):
    results = tmp_path / "cells.jsonl"
    process = start(results, "--devices", "HETERO:CPU")
    second_cell(process, results).send_signal(signal.SIGSEGV)
    out, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    cells = cells_of(result_of(out))
    assert cells["HETERO:CPU", "none"]["status"] == "ok"
    assert (
        cells["HETERO:CPU", "HETERO:CPU"]["status"] == "failed"
        and "SIGSEGV" in cells["HETERO:CPU", "HETERO:CPU"]["reason"]
    )
    assert (
        "main on HETERO:CPU, draft on HETERO:CPU: failed, its process was killed by SIGSEGV" in out
        and "Traceback" not in stderr
    )

    command = (PROGRAM, DRAFT, DRAFT, "--results", results, *QUICK, "--devices", "HETERO:CPU")
    assert cells_of(result_of(run_here(*command).stdout)) == cells
    again = cells_of(result_of(run_here(*command, "--retry").stdout))
    assert again["HETERO:CPU", "HETERO:CPU"]["status"] == "ok"
    assert again["HETERO:CPU", "none"]["measured"] == cells["HETERO:CPU", "none"]["measured"]


@posix
def test_cell_ends_when_program_is_killed(tmp_path):
    results = tmp_path / "cells.jsonl"
    process = start(results, "--devices", "CPU", "--max-new-tokens", "900")
    child = second_cell(process, results)
    process.kill()
    process.communicate(timeout=PATIENCE)
    assert psutil.wait_procs([child], timeout=PATIENCE)[1] == []


def test_timed_out_cell_is_retried_with_longer_timeout(run_here, tmp_path):
    common = [DRAFT, DRAFT, "--devices", "CPU", "--engine", "ours", "--results", tmp_path / "cells.jsonl", *QUICK]
    process = run_here(PROGRAM, *common, "--timeout", "0.3", "-k", "adaptive")
    assert process.returncode == 1, process.stderr
    result = result_of(process.stdout)
    assert {cell["status"] for cell in result["matrix"]["cells"]} == {"timeout"}
    assert "timed out after 0.3 seconds" in result["matrix"]["cells"][0]["reason"]
    assert "Nothing was measured." in result["summary"]

    process = run_here(PROGRAM, *common, "--timeout", "100", "-k", "adaptive")
    assert process.returncode == 0, process.stderr
    cells = cells_of(result_of(process.stdout))
    assert {cell["status"] for cell in cells.values()} == {"ok"}
    assert cells["CPU", "CPU"]["draft_length"] == "adaptive"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
def test_full_disk_is_reported_and_table_is_printed(run_here):
    process = run_here(PROGRAM, DRAFT, DRAFT, "--devices", "CPU", "--results", "/dev/full", *QUICK)
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1].startswith("error: /dev/full was not written: No space left on device")
    assert {cell["status"] for cell in result_of(process.stdout)["matrix"]["cells"]} == {"ok"}


@posix
def test_results_line_is_written_completely_or_not_at_all(tmp_path):
    """A separate process with a limit on file sizes: writing fails as on a full disk."""
    program = """
import resource, signal, sys
from pathlib import Path
from speculative.bench.devices.results import ResultsFile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
kept = ResultsFile(Path(sys.argv[1]))
kept.append("short", {"text": "x" * 1000})
assert not kept.problem
kept.append("long", {"text": "x" * 5000})
print(kept.problem)
"""
    path = tmp_path / "cells.jsonl"
    process = subprocess.run(
        [sys.executable, "-c", program, path], cwd=ROOT, capture_output=True, encoding="utf-8", timeout=60
    )
    assert process.stdout == "File too large\n", process.stderr
    assert list(ResultsFile(path).lines) == ["short"] and path.read_bytes().endswith(b"}\n")


def test_truncated_results_line_is_ignored(tmp_path):
    path = tmp_path / "cells.jsonl"
    ResultsFile(path).append("a", {"status": "ok"})
    with path.open("ab") as file:
        file.write(b'{"key": "b", "resu')
    kept = ResultsFile(path)
    kept.append("c", {"status": "failed"})
    assert ResultsFile(path).lines == {"a": {"status": "ok"}, "c": {"status": "failed"}}


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--devices", "CPU,GPX"], "'GPX'"),
        (["--devices", ""], "''"),
        (["-k", "adaptive"], "--engine native"),
        (["-k", "0"], "'0'"),
        (["--emulate-npu", "--devices", "CPU"], "requires NPU in --devices"),
        (["--timeout", "0"], "'0'"),
        (["--timeout", "soon"], "'soon'"),
        (["--property", "KEY"], "'KEY'"),
        (["--devices", "CPU", "--property", "NPU:KEY=1"], "'NPU'"),
        (["--prompts", "no/such/file.jsonl"], "no/such/file.jsonl"),
        (["--max-new-tokens", "5000"], "context"),
        (["--results", "LICENSE"], "line 1 of LICENSE"),
        (["--results", "tests"], "cannot write tests"),
        (["--results", "no/such/folder/a.jsonl"], "No such file"),
        (["--html", "tests"], "'tests'"),
    ],
)
def test_bad_usage_gives_one_sentence_error(run_here, tmp_path, arguments, word):
    before = (ROOT / "LICENSE").read_bytes()
    process = run_here(PROGRAM, DRAFT, DRAFT, "--results", tmp_path / "cells.jsonl", *arguments)
    assert process.returncode == 2, process.stderr
    assert word in process.stderr.splitlines()[-1] and "Traceback" not in process.stderr and process.stdout == ""
    assert (ROOT / "LICENSE").read_bytes() == before and not (tmp_path / "cells.jsonl").exists()


def test_missing_model_and_invalid_prompts_file_are_named(run_here, tmp_path):
    process = run_here(PROGRAM, "no/such/folder", DRAFT)
    assert process.returncode == 2 and "no/such/folder" in process.stderr and "Traceback" not in process.stderr
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def f():"}\n{"prompt"\n', encoding="utf-8")
    process = run_here(PROGRAM, MAIN, DRAFT, "--prompts", prompts, "--results", tmp_path / "cells.jsonl")
    assert process.returncode == 2 and "line 2" in process.stderr and not (tmp_path / "cells.jsonl").exists()


def test_absent_devices_are_listed_with_reasons(run_here, tmp_path):
    process = run_here(PROGRAM, DRAFT, DRAFT, "--devices", "GPU,HETERO:GPU,CPU", "--results", tmp_path / "cells.jsonl")
    if process.returncode == 0:
        pytest.skip("this machine has a GPU")
    assert process.returncode == 1
    summary = result_of(process.stdout)["summary"]
    assert summary[0] == "Nothing was measured." and not (tmp_path / "cells.jsonl").exists()
    assert any(line.startswith("HETERO:GPU,CPU is absent: there is no GPU") for line in summary)


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("CPU", ["CPU"]),
        ("CPU, GPU.1,NPU", ["CPU", "GPU.1", "NPU"]),
        ("CPU,GPU,AUTO:GPU,CPU,HETERO:GPU,CPU", ["CPU", "GPU", "AUTO:GPU,CPU", "HETERO:GPU,CPU"]),
        ("AUTO:-CPU,AUTO,CPU,CPU", ["AUTO:-CPU", "AUTO", "CPU"]),
    ],
)
def test_device_list_keeps_auto_priorities_together(text, devices):
    assert device_list(text) == devices


def cell(device, draft_device, alone, speedup, low, high):
    rows = [{"throughput": alone, "speedup": 1.0, "speedup_range": [1.0, 1.0], "draft_length": 0}]
    if draft_device:
        one = {"throughput": alone * speedup, "speedup": speedup, "speedup_range": [low, high], "draft_length": 4}
        rows.append({**one, "throughputs": [alone * low, alone * high]})
    answer = {"rows": rows, "tokens": [[[1, 2]]] * len(rows), "other_load": 0.0}
    draft = Device(draft_device) if draft_device else None
    return Cell(Device(device), draft, status="ok", answer=answer)


def test_results_of_renamed_engine_are_reused():
    keys = [Cell(Device("CPU"), None, {"engine": engine, "rounds": 3}).key() for engine in ("ours", "native", "genai")]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize(
    ("speedup", "low", "high", "words"),
    [
        (2.0, 1.9, 2.1, ["Fastest here: main on CPU, draft on GPU with K = 4, 20.0 tokens/s, 2.00x (1.90-2.10)"]),
        (0.5, 0.4, 0.6, ["Fastest here: main on CPU, alone", "No draft on any device is faster: use the main model"]),
        (0.9, 0.8, 1.1, ["Fastest here: main on CPU, alone", "some may be", "noise of it: main on CPU, draft on GPU"]),
    ],
)
def test_summary_states_how_certain_the_speedup_is(speedup, low, high, words):
    cells = [cell("CPU", None, 10.0, 1.0, 1.0, 1.0), cell("CPU", "GPU", 10.0, speedup, low, high)]
    matrix.compare(cells, ["1"], tokenizer=None)
    lines = matrix.summary(cells)
    for word, line in zip(words, lines[: len(words)], strict=True):
        assert word in line


def test_slow_machine_phases_do_not_decide_the_fastest_device():
    """The machine was three times as fast during the second cell, whose speedup is lower nevertheless."""
    cells = [
        cell("CPU", None, 10.0, 1.0, 1.0, 1.0),
        cell("CPU", "NPU", 30.0, 1.5, 1.5, 1.5),
        cell("CPU", "GPU", 10.0, 2.0, 2.0, 2.0),
    ]
    matrix.compare(cells, ["1"], tokenizer=None)
    assert cells[2].throughput > cells[1].throughput
    lines = matrix.summary(cells)
    assert "draft on GPU" in lines[0] and not any("Within measurement noise" in line for line in lines)


def test_exit_status_is_described_in_words():
    assert "SIGSEGV" in how_it_ended(-signal.SIGSEGV)
    assert "0xC0000005" in how_it_ended(0xC0000005)
    assert "status 3" in how_it_ended(3)
    assert "memory" in how_it_ended(-9)


def test_remark_on_the_draft_length_is_for_shorter_ones_only():
    """Not for another order of the same ones."""
    npu = SimpleNamespace(emulated=False)
    for used, requested, limited in (([2, 6], [6, 2], False), ([7], [7, 7], False), ([2, 7], [2, 9], True)):
        cell = SimpleNamespace(devices=[npu], draft=npu, job={"draft_lengths": used})
        assert bool(device_swap.remark(cell, requested)) == limited
