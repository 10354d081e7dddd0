"""The smoke test and the benchmark as a user runs them, on the embedded pair."""

import _thread
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts import benchmark
from speculative import decoder
from speculative.bench.result import BenchmarkResult, CostsResult, SmokeFailure, SmokeResult
from speculative.models.spec import ModelSpec
from speculative.sampling import rejection_sampling
from speculative.sequence import output, sequence
from tests.support.paths import DRAFT, MAIN, ROOT
from tests.support.progress import EACH_STEP
from tests.support.typed import problems
from tests.support.useless_draft import save_useless_draft
from tests.support.waiting import PATIENCE, wait_until, wait_until_loaded


def last_line(process):
    return json.loads(process.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def useless(tmp_path_factory):
    return save_useless_draft(tmp_path_factory.mktemp("useless") / "draft")


def test_single_category_has_no_range():
    best, main, row = {"name": "K = 4", "ttft": 0.0}, {"ttft": 0.0}, {"category": "code", "speedup": 1.5}
    assert benchmark.detail_sentences(best, main, [row]) == []
    assert "from 1.50x (code) to 2.00x (chat)" in benchmark.detail_sentences(
        best, main, [{"category": "chat", "speedup": 2.0}, row]
    )[0]  # fmt: skip


def test_draft_gets_no_credit_for_a_faster_engine():
    common = {"sampled": False, "repetition": 0.0, "forward_speedup": 2.0, "throughputs": [1.0, 1.0]}
    rows = [
        {**common, "name": name, "draft_length": k, "speedup": speedup, "speedup_range": [speedup, speedup]}
        for name, k, speedup in (("GenAI, main alone", 0, 1.0), ("ours, main alone", 0, 1.2), ("ours, K = 2", 2, 1.1))
    ]
    best = benchmark.fastest(rows, sampled=False)
    assert best == rows[2] and benchmark.faster_alone(rows, best) == rows[1]
    (words,) = benchmark.gain_sentences(best, "greedy", rows[1])
    assert "ours, K = 2, reaches 1.10x (1.10-1.10), and ours, main alone, 1.20x. Do not draft here." in words
    assert benchmark.faster_alone([rows[0], rows[2]], best) is None
    slow = {**best, "speedup": 0.9}
    assert benchmark.faster_alone([rows[0], slow], slow) == rows[0]
    assert "0.90x (1.10-1.10). Do not draft here." in benchmark.gain_sentences(slow, "greedy", rows[0])[0]


def test_methods_as_fast_as_the_best_are_named():
    row = {"sampled": False, "draft_length": 2, "repetition": 0.0, "forward_speedup": 2.0, "gain_percent": 20.0}
    speeds = {"K = 2": [9.0, 12.0], "K = 4": [10.0, 11.0], "K = 8": [8.0, 9.0], "main alone": [20.0, 20.0]}
    rows = [
        {**row, "name": name, "throughputs": rounds, "speedup": rounds[1], "speedup_range": rounds}
        for name, rounds in speeds.items()
    ]
    rows[-1]["draft_length"] = 0
    best = benchmark.fastest(rows, sampled=False)
    others = benchmark.as_fast(rows, best)
    assert best == rows[0] and others == ["K = 4"]
    words = " ".join(benchmark.gain_sentences(best, "greedy", None, others))
    assert "K = 2 is the fastest greedy method" in words and "(as fast in at least one round): K = 4." in words


def test_ratio_of_few_prompts_has_no_interval():
    fact = {"what": "ours / GenAI", "ratio": 1.1, "range": [1.0, 1.2], "interval": None, "prompts": 2}
    assert benchmark.compared(fact) == "ours / GenAI: 1.10 (rounds 1.00-1.20, few prompts)"


@pytest.mark.posix("POSIX signals")
def test_ctrl_c_during_token_view_keeps_the_result(run_here, monkeypatch):
    view = benchmark.DecodingProcess.token_view

    def interrupted(*arguments):
        _thread.interrupt_main()  # a signal's stack is too small in a process with torch, AMX and faulthandler
        return view(*arguments)

    monkeypatch.setattr(benchmark.DecodingProcess, "token_view", interrupted)
    kept = signal.getsignal(signal.SIGINT)
    try:
        few = ["--max-prompts", "1", "--max-new-tokens", "8", "--rounds", "1", "--no-starts"]
        process = run_here("scripts/benchmark.py", MAIN, DRAFT, "--paths", "engine", "-k", "2", *few)
    finally:
        signal.signal(signal.SIGINT, kept)
    assert process.returncode == 130, process.stderr
    result = last_line(process)
    assert result["environment"]["rounds"] == 1 and "token_view" not in result
    assert result["environment"]["temperature"] is None  # nothing was sampled


def test_smoke_passes_on_embedded_pair(run):
    process = run("scripts/smoke.py", "--max-new-tokens", "16")
    result = last_line(process)
    assert problems(result, SmokeResult) == []
    assert (process.returncode, result["ok"], result["problems"]) == (0, True, [])
    assert process.stdout.count("\n") == 1 and process.stderr == ""
    assert 1 < result["block_efficiency"] <= 5 and result["streamed_pieces"] > 3
    assert 1 < result["engine"]["block_efficiency"] <= 5 and result["engine"]["streamed_pieces"] > 3
    assert result["engine"]["acceptance_rate"] == pytest.approx(result["acceptance_rate"], abs=0.05)


def test_smoke_fails_below_acceptance_floor(run_here, useless):
    """The floor is 0.3 by default. The embedded draft serves as the main model, because it is fast."""
    process = run_here("scripts/smoke.py", DRAFT, useless)
    assert process.returncode == 1
    assert "acceptance rate" in last_line(process)["problems"][0] and "below 0.3" in process.stdout


def test_smoke_names_the_reason_if_nothing_was_drafted(run_here):
    process = run_here("scripts/smoke.py", DRAFT, DRAFT, "--prompt", "def area(", "--max-new-tokens", "1")
    assert process.returncode == 1 and "no draft token was proposed" in process.stdout + process.stderr


def test_smoke_accepts_own_prompt_and_main_model_as_draft(run_here):
    process = run_here("scripts/smoke.py", DRAFT, DRAFT, "--prompt", "def area(", "--min-acceptance", "1", "-k", "3")
    result = last_line(process)
    assert process.returncode == 0, process.stdout
    assert result["acceptance_rate"] == result["engine"]["acceptance_rate"] == 1.0 and result["draft_length"] == 3


@pytest.mark.parametrize("rate", ["1.5", "high"])
def test_smoke_rejects_invalid_acceptance_rate(run_here, rate):
    process = run_here("scripts/smoke.py", DRAFT, DRAFT, "--min-acceptance", rate)
    assert process.returncode == 2 and f"'{rate}' is not a number from 0 to 1" in process.stderr.splitlines()[-1]


def accept_everything(drafted, q, p, random):
    return rejection_sampling.Acceptance(len(drafted), rejection_sampling.draw(p(len(drafted)), random))


def take_without_text(self, step, add_step=output.OutputProcessor.add_step):
    return add_step(self, step)[0], ""


def fail_to_load(*_):
    raise RuntimeError("planted")


BROKEN = {  # the replacement of a part of this project's engine, and the problem that smoke.py reports
    "accepts everything": (
        (sequence, "verify", accept_everything),
        "this engine: the output for 'def read_notes(path):' differs from the main model's at new token",
    ),
    "streams no text": (
        (output.OutputProcessor, "add_step", take_without_text),
        "this engine: the streamed text for 'def read_notes(path):' differs from the returned text",
    ),
    "does not load": ((decoder, "load", fail_to_load), "planted"),
}


@pytest.mark.parametrize(("planted", "problem"), BROKEN.values(), ids=BROKEN)
def test_smoke_fails_with_broken_engine_even_if_genai_works(run_here, monkeypatch, useless, planted, problem):
    monkeypatch.setattr(*planted)
    prompt = ("--prompt", "def read_notes(path):", "--min-acceptance", "0")
    process = run_here("scripts/smoke.py", DRAFT, useless, *prompt)
    result = last_line(process)
    assert process.returncode == 1 and not result["ok"], process.stderr
    assert problems(result, SmokeResult | SmokeFailure) == []
    assert len(result["problems"]) == 1 and result["problems"][0].startswith(problem)


@pytest.mark.parametrize("program", ["scripts/smoke.py", "scripts/benchmark.py"])
@pytest.mark.parametrize(
    ("arguments", "status", "word"),
    [
        (["no/such/folder", DRAFT], 2, "no/such/folder"),
        ([MAIN, DRAFT, "-k", "0"], 2, "0"),
        ([MAIN, DRAFT, "-k", "many"], 2, "many"),
        ([MAIN, DRAFT, "--max-new-tokens", "-5"], 2, "-5"),
        ([MAIN, DRAFT, "--device", "GPX"], 2, "there is no GPX: it is not an OpenVINO device"),
    ],
)
def test_bad_input_gives_one_sentence_error(run_here, tmp_path, program, arguments, status, word):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def f(x):\n", encoding="utf-8")
    extra = ["--prompts", prompts] if "benchmark" in program else []
    process = run_here(program, *arguments, *extra)
    output = process.stdout + process.stderr
    assert process.returncode == status, output
    assert word in output and "Traceback" not in output


@pytest.mark.parametrize(
    ("content", "word"), [(None, "not a file"), ("\n", "no prompts"), ('{"prompt": "x"}\n{"prompt"\n', "line 2")]
)
def test_benchmark_names_the_error_in_a_prompts_file(run_here, tmp_path, content, word):
    prompts = tmp_path / "prompts.jsonl"
    if content is not None:
        prompts.write_text(content, encoding="utf-8")
    process = run_here("scripts/benchmark.py", MAIN, DRAFT, "--prompts", prompts)
    assert process.returncode == 2 and word in process.stderr and "prompts.jsonl" in process.stderr
    assert "Traceback" not in process.stderr


TOKENS = 12


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """One benchmark of all paths in exact arithmetic: the finished process, and the folder with its files."""
    folder = tmp_path_factory.mktemp("benchmark")
    # the sampled text differs from run to run, but repeats a token of the longer prompt
    area = "def area(width, height):\n    return width * height\n\n\ndef volume(width, height, depth):\n    return"
    prompts = [("class Ball:", "class"), (area, "function")]
    lines = [json.dumps({"prompt": text, "category": category}) for text, category in prompts]
    (folder / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    files = [part for kind in ("json", "csv", "html") for part in (f"--{kind}", str(folder / f"result.{kind}"))]
    command = [
        sys.executable, "scripts/benchmark.py", str(MAIN), str(DRAFT), "--prompts", str(folder / "prompts.jsonl"),
        "-k", "2,4", "--max-new-tokens", str(TOKENS), "--rounds", "1", "--no-starts",
        "--property", "EXECUTION_MODE_HINT=ACCURACY", *files,
    ]  # fmt: skip
    process = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", timeout=300)
    assert process.returncode == 0, process.stderr
    return process, folder


def test_benchmark_measures_every_method(measured):
    result = last_line(measured[0])
    assert problems(result, BenchmarkResult) == []
    rows = {(row["engine"], row["sampled"], row["draft_length"]): row for row in result["rows"][2:]}
    alone, draft_alone = result["rows"][:2]
    assert (alone["name"], draft_alone["name"]) == ("GenAI, main alone", "GenAI, draft alone")
    ours = [0, 2, 4, "adaptive", "adaptive, two sources"]
    assert set(rows) == {
        *(("genai", False, k) for k in (2, 4, "lookup 5")),
        *(("native", False, k) for k in (*ours, "lookup 5", "lookup adaptive")),
        *(("native", True, k) for k in (*ours, "lookup 5", "lookup adaptive")),
    }
    assert alone["speedup"] == 1 and alone["acceptance_rate"] is None and alone["block_efficiency"] == 1
    for (engine, sampled, k), row in rows.items():
        if "adaptive" in str(k) and row["acceptance_rate"] is None:  # drafting gains nothing on this machine
            assert row["block_efficiency"] == 1
        elif k and (engine, k) != ("genai", "lookup 5"):  # which GenAI does not report
            assert row["acceptance_rate"] is not None, row
            assert 0 <= row["acceptance_rate"] <= 1 <= row["block_efficiency"]
            assert len(row["position_acceptance"]) >= 1 and all(0 <= x <= 1 for x in row["position_acceptance"])
        if k in (2, 4):
            assert row["block_efficiency"] <= k + 1 and row["mean_draft_length"] <= k
        if not sampled:  # exact arithmetic: the same tokens
            assert row["output_sha256"] == alone["output_sha256"] and row["same_text"] == row["texts"] == 2
    for row in result["rows"]:
        assert 0 < row["tpot"] < row["ttft"] * TOKENS and row["gain_percent"] == pytest.approx(
            100 * row["speedup"] - 100
        )
        new, inferences = TOKENS * 2, (TOKENS - 1) * 2 / row["block_efficiency"] + 2
        assert row["forward_speedup"] == pytest.approx(new / inferences)
    assert draft_alone["throughput"] > alone["throughput"]  # sixteen times smaller


def test_benchmark_follows_json_schemas(tmp_path, run_here):
    """Every method writes the same text; drafting what the schema forces saves forward passes of the main model, which
    is the embedded draft, because it is fast."""
    properties = {"name": {"enum": ["read_file", "write_file"]}, "binary": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": ["name", "binary"], "additionalProperties": False}
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "def read_file(path):", "json_schema": schema}), encoding="utf-8")
    process = run_here(
        "scripts/benchmark.py", DRAFT, DRAFT, "--prompts", prompts, "--paths", "genai,lookup,engine", "-k", "2",
        "--max-new-tokens", "40", "--rounds", "1", "--no-starts", "--property", "EXECUTION_MODE_HINT=ACCURACY",
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    rows = {row["name"]: row for row in last_line(process)["rows"]}
    assert all(row["same_text"] == row["texts"] == 1 for row in rows.values())
    assert rows["ours, main alone"]["block_efficiency"] == 1 < rows["ours, forced tokens"]["block_efficiency"]


def test_benchmark_reports_categories_and_iterations(measured):
    process, _ = measured
    result = last_line(process)
    counted = {(part["category"], part["prompts"]) for part in result["categories"]}
    assert counted == {("function", 1), ("class", 1)}
    drafting = {row["name"] for row in result["rows"] if row["draft_length"]}
    assert {part["name"] for part in result["categories"]} == drafting
    assert {part["name"] for part in result["iteration"]} == {name for name in drafting if name.startswith("ours")}
    compared = [comparison["what"] for comparison in result["comparisons"]]
    assert "ours / GenAI, greedy, K = 4" in compared and any("adaptive / best fixed" in what for what in compared)
    assert "ours / GenAI, greedy, K = 4, per iteration" in compared
    assert sum(what.startswith("draft and suffix decoding / ") for what in compared) == 2  # greedy, sampled
    assert not any("texts that differ" in what for what in compared)  # in exact arithmetic
    for fact in result["comparisons"]:
        assert fact["range"][0] <= fact["ratio"] <= fact["range"][1] and fact["prompts"] == 2
        assert 0 < fact["interval"][0] <= fact["interval"][1]
    assert [(one["name"], one["start"]) for one in result["processes"]] == [
        ("GenAI, main alone", 1), ("GenAI, draft alone", 1), ("GenAI with the draft", 1), ("GenAI, prompt lookup", 1),
        ("ours with the draft", 1),
    ]  # fmt: skip
    assert any("on identical texts" in line for line in result["summary"])
    assert any(line.startswith("Each process was started only once") for line in result["summary"])
    facts = result["environment"]
    assert facts["processor"] and facts["openvino_genai"].startswith("20") and "ACCURACY" in facts["command"]
    assert facts["main_precision"].startswith("int8") and 0 <= facts["other_load"] <= 1
    printed = process.stdout.splitlines()
    assert "acceptance" in printed[0] and all(sentence in printed for sentence in result["summary"])
    assert ("Other programs used" in process.stdout) == (facts["other_load"] >= 0.1)


def test_token_view_tokens_join_to_the_greedy_text(measured):
    """Accepted draft tokens and main-model tokens, in order, are the greedy text; each step ends with the latter."""
    import openvino_genai

    view = last_line(measured[0])["token_view"]
    assert view["prompt"] == "class Ball:"
    assert view["steps"][0]["accepted"] == view["steps"][0]["rejected"] == []  # the prompt's inference has no draft
    pipe = openvino_genai.LLMPipeline(str(MAIN), "CPU", EXECUTION_MODE_HINT="ACCURACY")
    text = pipe.generate(view["prompt"], max_new_tokens=TOKENS, ignore_eos=True)
    assert "".join("".join(step["accepted"]) + step["main"] for step in view["steps"]) == text
    assert any(step["accepted"] for step in view["steps"]) and any(step["rejected"] for step in view["steps"])


def test_benchmark_writes_requested_files(measured):
    process, folder = measured
    assert json.loads((folder / "result.json").read_text(encoding="utf-8")) == last_line(process)
    assert len((folder / "result.csv").read_text(encoding="utf-8").splitlines()) > 10
    assert "</html>" in (folder / "result.html").read_text(encoding="utf-8")
    assert len(list(folder.iterdir())) == 4


def test_prompts_are_reprocessed_unless_caches_are_kept():
    """Both engines process a repeated prompt again. The test would detect a cache that is kept."""
    import numpy as np

    from speculative.bench.methods import genai_method, genai_pipeline, our_method
    from speculative.models.pass_width import PassWidth

    ids = np.arange(300) * 7919 % 4000
    engine = decoder.load(DRAFT, draft=DRAFT)
    engine.main.pass_width = PassWidth(np.ones(2), 0.0, pads=False)  # passes have the tokens that are processed
    read: list[int] = []
    backend_run = engine.main.backend.run
    engine.main.backend.run = lambda start, tokens, last: (read.append(len(tokens)), backend_run(start, tokens, last))[
        1
    ]
    for keep, expected in ((False, 300), (True, 1)):
        one = our_method("ours", engine, [], 4, 0.0, 8, keep)
        one.decode(ids)
        read.clear()
        one.decode(ids)
        assert read[0] == expected
    ids, seconds = np.arange(1500) * 7919 % 4000, {}
    for keep in (False, True):
        one = genai_method("GenAI", genai_pipeline(ModelSpec(DRAFT), ModelSpec(DRAFT), keep_caches=keep), 4, 2)
        one.decode(ids)
        times = []
        for _ in range(5):  # processor time: the only external sign of the cache, and the least affected by load
            begin = time.process_time()
            one.decode(ids)
            times.append(time.process_time() - begin)
        seconds[keep] = min(times)
    assert seconds[False] > 3 * seconds[True]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a full disk is a device of Linux")
def test_full_disk_keeps_the_result(run, tmp_path):
    process = run(
        "scripts/benchmark.py", MAIN, DRAFT, "--paths", "draft", "--max-prompts", "1", "--max-new-tokens", "8",
        "--rounds", "1", "--no-starts", "--json", "/dev/full", "--csv", tmp_path / "rows.csv",
    )  # fmt: skip
    assert process.returncode == 1 and "Traceback" not in process.stderr
    assert process.stderr.splitlines()[-1].endswith(
        "error: /dev/full was not written: No space left on device; the last line of the output has the full result"
    )
    assert last_line(process)["program"] == "benchmark" and (tmp_path / "rows.csv").exists()


@pytest.mark.posix("POSIX signals")
def test_ctrl_c_keeps_complete_rounds(tmp_path):
    arguments = [
        "--paths", "genai,engine", "-k", "2", "--max-prompts", "2", "--max-new-tokens", "16", "--rounds", "500",
        "--no-starts",
    ]  # fmt: skip
    command = [*EACH_STEP, "scripts/benchmark.py", str(DRAFT), str(DRAFT), *arguments]
    progress = tmp_path / "progress"
    with progress.open("wb") as stderr:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, encoding="utf-8")
    runs_a_round = 2 * 5

    def enough():
        """The warm-up and one round are complete and the next round has started."""
        done = re.findall(r" (\d+)/\d+ ", progress.read_text(encoding="utf-8", errors="replace"))
        return process.poll() is not None or (done and int(done[-1]) > 2 * runs_a_round)

    wait_until(enough, "a round is complete")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and "Traceback" not in progress.read_text(encoding="utf-8")
    result = json.loads(out.splitlines()[-1])
    assert problems(result, BenchmarkResult) == []
    kept = result["environment"]["rounds"]
    assert 1 <= kept < 500 and all(len(row["throughputs"]) == kept for row in result["rows"])
    assert any(sentence.startswith(f"Interrupted: {kept} of 500 rounds") for sentence in result["summary"])


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--paths", "genai,magic"], "magic"),
        (["--temperature", "0"], "'0'"),
        (["--temperature", "0.5", "--paths", "genai,engine"], "--temperature is that of the path sampled"),
        (["--branching-factor", "2"], "add --tree-depth"),
        (["--csv", "no/such/folder/rows.csv"], "no/such/folder"),
        (["--html", MAIN], "is a folder"),
        (["--prompts", "scripts/prompts/long.jsonl"], "context of 1,024"),
        (["--context", "1000"], "context of 1,024"),
    ],
)
def test_benchmark_rejects_invalid_arguments_before_measuring(run_here, arguments, word):
    process = run_here("scripts/benchmark.py", MAIN, DRAFT, *arguments)
    assert process.returncode == 2 and word in process.stderr and process.stdout == ""
    assert "Traceback" not in process.stderr


def test_benchmark_without_draft_measures_main_model_and_lookup(run_here, tmp_path):
    """The embedded draft serves as the main model, because it is fast."""
    page, rows, plot = (tmp_path / name for name in ("page.html", "rows.csv", "speedup.png"))
    process = run_here(
        "scripts/benchmark.py", DRAFT, "--max-prompts", "1", "--max-new-tokens", TOKENS, "--rounds", "1",
        "--prompts", "scripts/prompts/repeats.jsonl", "--property", "EXECUTION_MODE_HINT=ACCURACY",
        "--json", tmp_path / "result.json",
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    result = last_line(process)
    assert problems(result, BenchmarkResult) == [] and "draft" not in result["environment"]
    assert [row["name"] for row in result["rows"]] == [
        "GenAI, main alone", "GenAI, prompt lookup", "ours, main alone", "ours, suffix decoding",
        "ours, suffix decoding, adaptive",
    ]  # fmt: skip
    assert all(row["same_text"] == row["texts"] == 1 for row in result["rows"])
    assert [start["name"] for start in result["starts"]] == ["GenAI, main alone"]
    assert run_here("scripts/report.py", tmp_path / "result.json", page, rows).returncode == 0
    assert f"<h1>Speedup of speculative decoding: {DRAFT}</h1>" in page.read_text(encoding="utf-8")
    assert rows.read_text(encoding="utf-8").count("\n") == 6
    process = run_here("scripts/report.py", tmp_path / "result.json", plot)
    assert process.returncode == 1 and process.stderr.endswith("or benchmark.py with a draft\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--paths", "genai,lookup,engine"],
            "--paths genai,engine requires a draft: add its folder, or measure",
        ),
        (["--draft-device", "GPU"], "--draft-device requires a draft: add its folder"),
        (["-k", "3"], "--num-assistant-tokens requires a draft: add its folder"),
        (["--tree-depth", "3"], "--tree-depth requires a draft: add its folder"),
        (["--device", "GPX"], "there is no GPX"),
    ],
)
def test_benchmark_without_draft_rejects_draft_options(run_here, arguments, words):
    process = run_here("scripts/benchmark.py", MAIN, *arguments)
    assert process.returncode == 2 and f"error: {words}" in process.stderr and process.stdout == ""


def test_benchmark_with_context_reports_starts(run, run_here, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def area(width, height):\n", encoding="utf-8")
    process = run(
        "scripts/benchmark.py", DRAFT, DRAFT, "--prompts", prompts, "-k", "3", "--max-new-tokens", "10",
        "--rounds", "1", "--starts", "1", "--paths", "genai,engine", "--context", "300",
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    result = last_line(process)
    assert problems(result, BenchmarkResult) == []
    assert result["environment"]["context"] == 300
    assert all(row["ttft"] is None for row in result["rows"])  # the caches are kept
    assert [start["name"] for start in result["starts"]] == [
        "GenAI, main alone", "GenAI with the draft", "ours with the draft"
    ]  # fmt: skip
    for start in result["starts"]:
        assert min(start["first_seconds"], start["second_seconds"]) > 0
        assert start["peak_bytes"] is None if sys.platform == "darwin" else 50e6 < start["peak_bytes"] < 5e9
    process = run_here("scripts/benchmark.py", MAIN, DRAFT, "--prompts", prompts, "--max-new-tokens", "1")
    assert process.returncode == 2 and "2 or more" in process.stderr


def test_benchmark_costs_prints_tables_and_one_json_line(run):
    """The embedded draft serves as both models, because it is fast."""
    process = run("scripts/benchmark_costs.py", DRAFT, DRAFT, "--repeat", "1", "--max-new-tokens", "8")
    assert process.returncode == 0, process.stderr
    results = last_line(process)
    assert problems(results, CostsResult) == []
    assert [row["context"] for row in results["inferences"]] == [256, 512]  # the pair's context is 1,024
    assert {row["vocabulary"] for row in results["sampling"]} == {4_096, 32_000, 151_936}
    assert [row["start"] for row in results["starts"]] == ["no cache", "first", "second"]
    size = (DRAFT / "openvino_model.bin").stat().st_size
    assert results["limit"]["weight_bytes"] == {role: pytest.approx(size, rel=0.1) for role in ("main", "draft")}
    assert results["limit"]["bandwidth"] > 1e8 and 0 < results["limit"]["draft"] < 1.5


@pytest.mark.posix("POSIX signals")
@pytest.mark.parametrize("loaded", ["libopenvino", "intel_cpu_plugin"])
@pytest.mark.parametrize("program", ["scripts/smoke.py", "scripts/benchmark.py"])
def test_ctrl_c_exits_at_once_without_traceback(program, loaded, tmp_path):
    """During imports and during model compilation. A shell shows 130 for a process that this signal ended."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    prompts = (
        ["--prompts", "scripts/prompts/embedded_code.jsonl"] if "benchmark" in program else ["--max-new-tokens", "900"]
    )
    command = [sys.executable, program, str(MAIN), str(DRAFT), *prompts]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)
    wait_until_loaded(loaded, process)
    process.send_signal(signal.SIGINT)
    out, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode in (-signal.SIGINT, 130), stderr
    assert "Traceback" not in stderr and out == "" and not list(tmp_path.iterdir())


def test_columns_are_aligned_with_long_names():
    times = {"draft_ms": 1.0, "verify_ms": 12.0, "overhead_ms": 0.5}
    names = ("ours, K = 2", "ours, sampled, suffix decoding, adaptive")
    header, *lines = benchmark.table_of_iterations([{"name": name, **times} for name in names])
    assert header.startswith("one iteration, ms") and {len(line) for line in lines} == {len(header)}
