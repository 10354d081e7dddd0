"""plan_capacity.py as users run it."""

import csv
import dataclasses
import json
import math

import pytest

from speculative.bench.capacity import measuring
from speculative.bench.capacity.costs import Costs, Draft, ModelCosts, Outside
from speculative.bench.result import CapacityResult
from tests.support.paths import DRAFT, MAIN
from tests.support.typed import problems

PROGRAM = "scripts/plan_capacity.py"
COSTS = Costs(
    ModelCosts({1: 0.1, 4: 0.12, 16: 0.2, 64: 0.6}), ModelCosts({1: 0.006, 64: 0.03}), Outside(0.001),
    [[Draft([0.9, 0.7, 0.5], 2)] * 3] * 2, [30, 50],
)  # fmt: skip
QUICK = ["--requests", "20", "--ttft-goal", "5", "--tpot-goal", "0.5", "--max-num-seqs", "2"]
LINE = '{"arrival": 0, "prompt_tokens": 9, "output_tokens": 9}\n'


def as_result(process):
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout.splitlines()[-1])
    assert problems(result, CapacityResult) == []
    return result


@pytest.fixture
def costs(tmp_path):
    COSTS.save(tmp_path / "costs.json", {"max_new_tokens": 16, "main": str(MAIN)})
    return tmp_path / "costs.json"


def test_saved_costs_give_the_same_plan_as_measured_costs(run_here, tmp_path, monkeypatch):
    for name, value in (
        ("DRAFT_LENGTHS", {1: 8, 2: 4}),
        ("RUN_SECONDS", 0.0),
        ("REPETITIONS", 4),
        ("SIZES", (1, 4, 16, 64)),
    ):
        monkeypatch.setattr(measuring, name, value)
    saved, arguments = tmp_path / "costs.json", ["--rate", "2", *QUICK]
    few = ["--max-prompts", "4", "--max-new-tokens", "12"]
    measured = as_result(run_here(PROGRAM, MAIN, DRAFT, *few, *arguments, "--save-costs", saved))
    read = as_result(run_here(PROGRAM, "--costs", saved, *arguments))
    for key in ("rows", "plans", "drafting", "workload", "goals", "summary"):
        assert read[key] == measured[key]
    assert read["environment"]["measured"] == measured["environment"]["measured"]
    assert read["environment"]["measured"]["context"] == 1024
    several = as_result(run_here(PROGRAM, "--costs", saved, saved, *arguments))
    assert several["rows"] == measured["rows"]
    kept, _ = Costs.read(saved)
    assert list(kept.main.passes) == list(kept.draft.passes) == [1, 4, 16, 64]
    assert all(seconds > 0 for model in (kept.main, kept.draft) for seconds in model.passes.values())
    assert kept.acceptance > 0.3 and [len(drafts) for drafts in kept.drafts] == [10] * 4
    assert len(kept.prompt_tokens) == 4
    assert kept.main.attention >= 0 and kept.outside.iteration + kept.outside.request > 0
    factors = [(one.plain_factors[1], one.prompt_factors[1]) for one in (kept.outside, kept.outside_alone)]
    assert all(factor > 0 and factor != 1 for both in factors for factor in both)  # 1 is that of passes not seen


@pytest.mark.parametrize(
    "changed",
    [
        {"drafts": [[[["x"], 1]]]},
        {"drafts": [[[[1.5], 1]]]},
        {"drafts": [[[[math.nan], 0]]]},
        {"drafts": [[[[0.5], 2]]]},
        {"drafts": [[[[0.5]]]]},
        {"drafts": [[[0.5, True]]]},
        {"main": {"passes": {"0": 0.1, "1": 0.1}, "further": None}},
        {"outside": {"plain_factors": {}, "draft_factors": {"1": 1.0}, "prompt_factors": {"1": 1.0}}},
        {"outside": {"iteration": 0.1}},
        {"main": {"passes": {}, "further": None}},
        {"main": None},
    ],
)
def test_costs_with_strange_content_are_rejected(costs, changed):
    costs.write_text(json.dumps(json.loads(costs.read_text(encoding="utf-8")) | changed), encoding="utf-8")
    with pytest.raises(ValueError, match="has no costs: give a file"):
        Costs.read(costs)


@pytest.mark.parametrize("drafts", [[[], []], [], [[[[], 0]]]])
def test_costs_without_drafts_have_no_acceptance(costs, drafts):
    content = json.loads(costs.read_text(encoding="utf-8")) | {"drafts": drafts}
    costs.write_text(json.dumps(content), encoding="utf-8")
    assert Costs.read(costs)[0].acceptance is None


def test_plan_is_complete_and_written_to_files(run_here, costs, tmp_path):
    files = [part for kind in ("json", "csv", "png") for part in (f"--{kind}", tmp_path / f"plan.{kind}")]
    arguments = [*QUICK, "--rate", "0.5,2", "--max-num-seqs", "2,4", "--prompt-tokens", "uniform:10:90"]
    process = run_here(PROGRAM, "--costs", costs, *arguments, *files)
    result = as_result(process)
    plans = [(r, n, d) for r in (0.5, 2.0) for n in (2, 4) for d in (False, True)]
    assert [(one["rate"], one["max_num_seqs"], one["with_draft"]) for one in result["plans"]] == plans
    for plan in result["plans"]:
        rows = [
            row
            for row in result["rows"]
            if all(row[key] == plan[key] for key in ("rate", "max_num_seqs", "with_draft"))
        ]
        assert next(row["replicas"] for row in rows if row["holds"]) == plan["replicas"]
    assert "*" in process.stdout and "Drafting" in " ".join(result["summary"])
    assert [row["clients"] for row in result["drafting"]] == [1, 2, 4] * 2
    assert json.loads((tmp_path / "plan.json").read_text(encoding="utf-8")) == result
    assert len(list(csv.DictReader((tmp_path / "plan.csv").open(encoding="utf-8")))) == len(result["rows"])
    plot = (tmp_path / "plan.png").read_bytes()
    assert plot.startswith(b"\x89PNG")
    assert run_here("scripts/report.py", tmp_path / "plan.json", tmp_path / "again.png").returncode == 0
    assert (tmp_path / "again.png").read_bytes() == plot


def test_simulation_is_compared_with_load_benchmark(run_here, costs, tmp_path):
    rows = [
        {
            "method": method,
            "clients": n,
            "throughput": 20.0,
            "ttft_mean": 0.2,
            "tpot_mean": 0.1,
            "mean_draft_length": 0.0,
        }
        for method in ("GenAI, main alone", "ours, main alone", "ours, adaptive draft")
        for n in (1, 4)
    ]
    facts, files = {"max_new_tokens": 16, "seconds": 5.0, "rounds": 1}, []
    for i, slower in enumerate((1, 9, 2)):
        found = {"rows": [{**row, "tpot_mean": slower * row["tpot_mean"]} for row in rows], "environment": facts}
        files.append(tmp_path / f"load-{i}.json")
        files[-1].write_text(json.dumps(found), encoding="utf-8")
    result = as_result(run_here(PROGRAM, "--costs", costs, "--against", *files))
    assert {one["tpot"] for one in result["checks"]} == {0.2}
    assert [(one["method"], one["clients"]) for one in result["checks"]] == [
        (method, n) for method in ("ours, main alone", "ours, adaptive draft") for n in (1, 4)
    ]
    lone, four, drafted, _ = (one["throughput_simulated"] for one in result["checks"])
    assert 5 < lone < 10 and lone < four < 4 * lone and drafted > 1.3 * lone
    assert result["plans"] == [] and "Mean error" in result["summary"][-1]
    without_means = [{key: value for key, value in row.items() if key != "ttft_mean"} for row in rows]
    files[0].write_text(json.dumps({"rows": without_means, "environment": facts}), encoding="utf-8")
    process = run_here(PROGRAM, "--costs", costs, "--against", files[0])
    assert process.returncode == 2 and "lack the means of TTFT and TPOT: measure" in process.stderr.splitlines()[-1]


def test_replicas_share_cores_with_the_server(run_here, costs, tmp_path):
    time = {"seconds": 10.0, "engines": 8.0, "servers": 9.0, "clients": 1.0, "requests": 50, "pieces": 500}
    facts = {"cores": 2, "replicas": 2, "threads": 1, "round_trip": 0.01}
    served = tmp_path / "serving.json"
    served.write_text(json.dumps({"rows": [{"processor_time": time}], "environment": facts}), encoding="utf-8")
    arguments = [*QUICK, "--rate", "2", "--max-num-seqs", "4"]
    own = as_result(run_here(PROGRAM, "--costs", costs, *arguments))
    kept = tmp_path / "kept.json"
    shared = as_result(run_here(PROGRAM, "--costs", costs, *arguments, "--server", served, "--save-costs", kept))
    assert shared["drafting"][0]["tpot"] > 1.2 * own["drafting"][0]["tpot"]
    assert as_result(run_here(PROGRAM, "--costs", kept, *arguments))["drafting"] == shared["drafting"]


def test_trace_defines_the_request_rate(run_here, costs, tmp_path):
    lines = [LINE.replace('"arrival": 0', f'"arrival": {i / 4}') for i in range(40)]
    (tmp_path / "trace.jsonl").write_text("".join(lines), encoding="utf-8")
    result = as_result(run_here(PROGRAM, "--costs", costs, "--trace", tmp_path / "trace.jsonl", *QUICK))
    assert [plan["rate"] for plan in result["plans"]] == [4.0, 4.0]
    assert result["workload"]["output_tokens"] == "as in the trace"


@pytest.mark.parametrize("given", [("--prompt-tokens", "101"), ("--prompt-tokens", "uniform:9:101"), ("--trace", None)])
def test_requests_longer_than_context_are_rejected(run_here, tmp_path, given):
    """The server would reject them. Costs saved by the Python API may have no context."""
    (tmp_path / "trace.jsonl").write_text(
        LINE + '{"arrival": 1, "prompt_tokens": 58, "output_tokens": 59}', encoding="utf-8"
    )
    given = [part or tmp_path / "trace.jsonl" for part in given]
    for facts in ({}, {"context": 116}, {"context": 117}):
        COSTS.save(tmp_path / "costs.json", {"max_new_tokens": 16, **facts})
        process = run_here(PROGRAM, "--costs", tmp_path / "costs.json", "--rate", "1", *QUICK, *given)
        if facts.get("context") == 116:
            assert process.returncode == 2 and process.stdout == ""
            assert "tokens, but the context of the main model only 116: give shorter ones" in process.stderr
        else:
            as_result(process)


def test_unreachable_goals_are_no_error(run_here, costs):
    result = as_result(run_here(PROGRAM, "--costs", costs, "--rate", "1", "--ttft-goal", "0.001"))
    assert result["plans"][0]["replicas"] is None and "above the goal" in result["plans"][0]["why_not"]


def test_result_is_kept_if_there_is_no_plan_to_plot(run_here, tmp_path):
    Costs.save(dataclasses.replace(COSTS, draft=None, drafts=[]), tmp_path / "costs.json", {})
    files = ["--png", tmp_path / "plan.png", "--json", tmp_path / "plan.json"]
    process = run_here(PROGRAM, "--costs", tmp_path / "costs.json", "--rate", "1", "--ttft-goal", "0.001", *files)
    assert process.returncode == 1 and "no plan to plot" in process.stderr
    written = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert written == json.loads(process.stdout.splitlines()[-1])


def test_output_length_is_max_new_tokens(run_here, costs):
    for given, wanted in (([], "16"), (["--max-new-tokens", "40"], "40")):
        result = as_result(run_here(PROGRAM, "--costs", costs, "--rate", "1", *QUICK, *given))
        assert result["workload"]["output_tokens"] == wanted


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "--costs"),
        ([MAIN, "--costs", "x.json"], "--costs"),
        (["--costs", "no/such.json", "--rate", "1"], "no/such.json"),
        (["--costs", "README.md", "--rate", "1"], "--save-costs"),
        (["COSTS"], "--rate"),
        (["COSTS", "docs/capacity/embedded-0.json", "--rate", "1"], "another main"),
        (["COSTS", "--rate", "0"], "'0'"),
        (["COSTS", "--rate", "1,x"], "'x'"),
        (["COSTS", "--rate", "1", "--percentile", "100"], "'100'"),
        (["COSTS", "--rate", "1", "--acceptance", "1.5"], "'1.5'"),
        (["COSTS", "--rate", "1", "--prompt-tokens", "normal:5:1"], "'normal:5:1'"),
        (["COSTS", "--rate", "1", "--output-tokens", "uniform:9:3"], "'uniform:9:3'"),
        (["COSTS", "--rate", "1", "--turns", "4"], "--cached"),
        (["COSTS", "--rate", "1", "--think", "5"], "--turns"),
        (["COSTS", "--rate", "1", "--replicas", "2"], "--against"),
        (["COSTS", "--rate", "1", "--device", "GPU"], "--device is for measuring costs"),
        (["COSTS", "--rate", "1", "--property", "X=1"], "--property is for measuring costs"),
        (["COSTS", "--rate", "1", "--max-prompts", "3"], "--max-prompts is for measuring costs"),
        (["COSTS", "--rate", "1", "--routing", "random"], "random"),
        (["COSTS", "--trace", "README.md"], "line"),
        (["COSTS", "--trace", "TRACE"], "two or more"),
        (["COSTS", "--trace", "TWICE", "--rate", "1"], "same time"),
        (["COSTS", "--trace", "GOOD", "--prompt-tokens", "5"], "--prompt-tokens"),
        (["COSTS", "--against", "README.md"], "load benchmark"),
        (["COSTS", "--against", "OTHER"], "benchmark_serving.py"),
        (["COSTS", "--against", "docs/capacity/embedded-batching-0.json", "README.json"], "other loads"),
        (["COSTS", "--against", "docs/capacity/smollm2-batching-0.json"], "was measured with models/smollm2-135m/main"),
        (["COSTS", "--against", "docs/capacity/embedded-batching-0.json", "--replicas", "2"], "with 1: omit it"),
        (["UNKNOWN", "--rate", "1"], "no draft was verified"),
        (["COSTS", "--rate", "1", "--server", "OTHER"], "processor times"),
        (["COSTS", "--rate", "1", "--server", "no/such.json"], "no/such.json"),
        (["COSTS", "--rate", "1", "--png", "no/such/plan.png"], "no/such"),
        ([MAIN, "no/such", "--rate", "1"], "no/such"),
    ],
)  # fmt: skip
def test_bad_input_gives_one_sentence_error(run_here, costs, tmp_path, arguments, word):
    other = '{"rows": [{"method": "GenAI, main alone", "clients": 1}]}'
    for name, text in (
        ("TRACE", LINE),
        ("TWICE", LINE * 2),
        ("GOOD", LINE + LINE.replace("0", "1", 1)),
        ("OTHER", other),
        ("README.json", '{"rows": [{}]}'),
    ):
        (tmp_path / name).write_text(text, encoding="utf-8")
    named = {name: str(tmp_path / name) for name in ("TRACE", "TWICE", "GOOD", "OTHER", "README.json")}
    given = [named.get(str(one), one) for one in arguments]
    if given and given[0] == "COSTS":
        given[:1] = ["--costs", costs]
    elif given and given[0] == "UNKNOWN":
        unknown = json.loads(costs.read_text(encoding="utf-8")) | {"drafts": []}
        (tmp_path / "unknown.json").write_text(json.dumps(unknown), encoding="utf-8")
        given[:1] = ["--costs", tmp_path / "unknown.json"]
    process = run_here(PROGRAM, *given)
    assert process.returncode == 2, process.stderr
    assert word in process.stderr and "Traceback" not in process.stderr and process.stdout == ""
