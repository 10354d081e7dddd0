"""The sweep over draft lengths as users run it, on the embedded pair. No test depends on a time."""

import json
import re
import signal
import subprocess
import sys

import pytest

from speculative.bench.result import SweepResult
from speculative.sequence import metrics
from tests.support.paths import DRAFT, MAIN, ROOT
from tests.support.progress import EACH_STEP
from tests.support.typed import problems
from tests.support.waiting import PATIENCE, wait_until

PROGRAM = "scripts/sweep_draft_length.py"
SMALL = ("--max-prompts", "2", "--max-new-tokens", "16", "--rounds", "1")


def last_line(process):
    return json.loads(process.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """One sweep with everything it writes, and the folder it wrote to."""
    folder = tmp_path_factory.mktemp("sweep")
    files = [part for kind in ("json", "csv", "html", "png") for part in (f"--{kind}", str(folder / f"sweep.{kind}"))]
    command = [sys.executable, PROGRAM, str(MAIN), str(DRAFT), "-k", "1-3", "--temperature", "0,0.7", *SMALL, *files]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", timeout=300)
    assert process.returncode == 0, process.stderr
    return process, folder


def test_every_temperature_has_its_points_and_one_best(swept):
    process, _ = swept
    result = last_line(process)
    assert problems(result, SweepResult) == []
    points = result["sweep"]
    assert [(point["temperature"], point["k"]) for point in points] == [(t, k) for t in (0, 0.7) for k in (1, 2, 3)]
    for t in (0, 0.7):
        of_t = [point for point in points if point["temperature"] == t]
        best = [point for point in of_t if point["best"]]
        assert len(best) == 1 and best[0]["speedup"] == max(point["speedup"] for point in of_t)
        assert process.stdout.count("<- best") == 2


def test_prediction_follows_leviathan_formula(swept):
    result = last_line(swept[0])
    for point in result["sweep"]:
        k, c, v, alpha = (point[name] for name in ("k", "cost_ratio", "verify_ratio", "alpha"))
        assert 0 < c < 1 and v > 0.1 and 0 <= alpha < 1
        cost = v + k * c  # of an iteration, in main steps
        assert point["predicted"] == pytest.approx(point["block_efficiency"] / cost)
        assert point["predicted_from_alpha"] == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha) / cost)
    errors = [abs(point["predicted"] / point["speedup"] - 1) for point in result["sweep"]]
    assert result["prediction_error"] == pytest.approx(sum(errors) / len(errors))
    summary = " ".join(result["summary"])
    assert f"off by {result['prediction_error']:.1%} on average" in summary
    assert ("Reason, averaged over K" in summary) == (result["prediction_error"] > 0.1)
    assert all(sentence in swept[0].stdout for sentence in result["summary"])


def test_costs_are_in_main_model_steps(kept_signals, monkeypatch):
    """Medians: a draft step of 2 s, a main step of 10 s, and 12 s for the check of three draft tokens."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from scripts.sweep_draft_length import MeasuredCosts

    costs = MeasuredCosts(None, None, [3], 8, steps=[2.0, 1.0, 9.0], verifies={0: [10.0, 8.0, 30.0], 3: [12.0]})
    assert costs.cost_ratio == 0.2 and costs.verify_ratio(3) == 1.2 and costs.verify_ratio(0) == 1
    assert metrics.predicted_speedup(tau=2.7, draft_length=3, cost_ratio=0.2, verify_ratio=1.2) == pytest.approx(1.5)
    assert metrics.block_efficiency_at(0.5, 3) == 1.875


def test_iteration_parts_sum_to_decoding_time(swept):
    """The times of draft, main model and overhead add up to the decoding time."""
    result = last_line(swept[0])
    rows = {row["name"]: row for row in result["rows"]}
    assert len(result["iteration"]) == 6
    for part in result["iteration"]:
        assert min(part["draft_ms"], part["verify_ms"]) > 0 and part["overhead_ms"] >= 0
        row = rows[part["name"]]
        whole = part["draft_ms"] + part["verify_ms"] + part["overhead_ms"]
        assert whole == pytest.approx(1000 / row["throughput"] * row["block_efficiency"], rel=0.05)


def test_all_files_are_written(swept):
    process, folder = swept
    assert json.loads((folder / "sweep.json").read_text(encoding="utf-8")) == last_line(process)
    assert "predicted" in (folder / "sweep.csv").read_text(encoding="utf-8").splitlines()[0]
    assert "<svg" in (folder / "sweep.html").read_text(encoding="utf-8")
    assert (folder / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(folder.iterdir())) == 4


def test_genai_engine_is_swept(run_here):
    process = run_here(PROGRAM, DRAFT, DRAFT, "-k", "2,4", "--engine", "genai", *SMALL)
    assert process.returncode == 0, process.stderr
    result = last_line(process)
    assert problems(result, SweepResult) == []
    assert [(point["engine"], point["k"]) for point in result["sweep"]] == [("genai", 2), ("genai", 4)]
    assert all(point["predicted"] > 0 and point["block_efficiency"] <= point["k"] + 1 for point in result["sweep"])
    assert result["iteration"] == []


@pytest.mark.parametrize(
    ("arguments", "status", "word"),
    [
        ([MAIN, DRAFT, "-k", "0-3"], 2, "0-3"),
        ([MAIN, DRAFT, "-k", "5-2"], 2, "5-2"),
        ([MAIN, DRAFT, "--temperature", "0,-1"], 2, "0,-1"),
        ([MAIN, DRAFT, "--temperature", "hot"], 2, "hot"),
        ([MAIN, DRAFT, "--engine", "genai", "--temperature", "0,0.7"], 2, "--temperature 0.7"),
        ([MAIN, DRAFT, "--json", "no/such/folder/a.json"], 2, "no/such/folder"),
        ([MAIN, DRAFT, "--png", MAIN], 2, "is a folder"),
        (["no/such/model", DRAFT], 2, "no/such/model"),
        ([MAIN, DRAFT, "--prompts", "scripts/prompts/long.jsonl"], 2, "context of 1,024"),
        ([MAIN, DRAFT, "--draft-device", "GPX"], 2, "there is no GPX: it is not an OpenVINO device"),
    ],
)
def test_bad_input_gives_one_sentence_error(run_here, arguments, status, word):
    process = run_here(PROGRAM, *arguments)
    output = process.stdout + process.stderr
    assert process.returncode == status, output
    assert word in output and "Traceback" not in output and process.stdout == ""


def test_missing_matplotlib_is_reported(run, tmp_path):
    """Python runs `sitecustomize` first: this one hides the package."""
    hidden = "import sys, importlib.util as u; real = u.find_spec\n"
    hidden += "u.find_spec = lambda name, *rest: None if name == 'matplotlib' else real(name, *rest)\n"
    (tmp_path / "sitecustomize.py").write_text(hidden, encoding="utf-8")
    process = run(PROGRAM, MAIN, DRAFT, "--png", tmp_path / "a.png", env={"PYTHONPATH": str(tmp_path)})
    assert process.returncode == 2 and "matplotlib" in process.stderr and "pip install" in process.stderr
    assert not (tmp_path / "a.png").exists()


@pytest.mark.posix("POSIX signals")
def test_ctrl_c_keeps_complete_rounds(tmp_path):
    arguments = ["-k", "2,4", "--max-prompts", "2", "--max-new-tokens", "16", "--rounds", "500"]
    command = [*EACH_STEP, PROGRAM, str(DRAFT), str(DRAFT), *arguments, "--json", str(tmp_path / "kept.json")]
    progress = tmp_path / "progress"
    with progress.open("wb") as stderr:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, encoding="utf-8")
    runs_a_round = 6
    wait_for_runs(progress, process, 3 * runs_a_round)  # the warm-up, one complete round, and the start of another
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and "Traceback" not in progress.read_text(encoding="utf-8")
    result = json.loads(out.splitlines()[-1])
    kept = result["environment"]["rounds"]
    assert 1 <= kept < 500 and all(len(row["throughputs"]) == kept for row in result["rows"])
    assert any(sentence.startswith(f"Interrupted: {kept} of 500 rounds") for sentence in result["summary"])
    assert json.loads((tmp_path / "kept.json").read_text(encoding="utf-8")) == result


def wait_for_runs(progress, process, runs):
    def enough():
        done = re.findall(r" (\d+)/\d+ ", progress.read_text(encoding="utf-8", errors="replace"))
        return process.poll() is not None or (done and int(done[-1]) >= runs)

    wait_until(enough, f"{runs} runs are done")


@pytest.mark.posix("a POSIX pipe")
def test_closed_pipe_loses_no_file(tmp_path):
    arguments = ["-k", "2", "--max-prompts", "1", "--max-new-tokens", "8", "--rounds", "1"]
    command = [sys.executable, PROGRAM, str(DRAFT), str(DRAFT), *arguments, "--json", str(tmp_path / "kept.json")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    _, stderr = process.communicate(timeout=120)
    assert b"Traceback" not in stderr and b"error" not in stderr
    assert json.loads((tmp_path / "kept.json").read_text(encoding="utf-8"))["program"] == "sweep_draft_length"
