"""The types of results: recorded results and those of the code match them, and other values do not."""

import argparse
import dataclasses
import json
import shlex
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import get_args, get_origin, get_type_hints, is_typeddict

import numpy as np
import pytest

from scripts import figures
from speculative.bench import harness, ratios, result
from speculative.bench.devices import matrix
from speculative.bench.devices.matrix import Cell, Device
from speculative.bench.genai import Run
from speculative.bench.harness import Method
from speculative.bench.load.metrics import Load, RequestRecord, Span, row
from speculative.bench.tuning.settings import PropertySet, Setting
from tests.support.paths import DRAFT, MAIN, ROOT
from tests.support.typed import problems

pytestmark = pytest.mark.usefixtures("kept_signals")
RECORDED = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (ROOT / "docs/figures").glob("*.json")}


def type_of(command):
    """The type of the result of the program in scripts/ that a recorded command runs."""
    return result.RESULTS[next(Path(word).stem for word in shlex.split(command) if word.endswith(".py"))]


def as_json(value):
    return json.loads(json.dumps(value))


# ---- recorded results -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_result_matches_its_programs_type(name):
    recorded = RECORDED[name]
    assert problems(recorded["result"], type_of(recorded["command"])) == []
    assert problems(recorded, result.RecordedResult) == []


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_objects_reject_missing_extra_and_wrong_values(name):
    """Only the first item of each list is checked."""
    parts = list(objects_in(RECORDED[name]["result"], type_of(RECORDED[name]["command"])))
    assert len(parts) > 2
    for part, expected in parts:
        assert problems(part, expected) == []
        assert problems({**part, "unheard of": 1}, expected)
        for key in part:
            assert problems({**part, key: object()}, expected)
        for key in expected.__required_keys__:
            assert problems({name: value for name, value in part.items() if name != key}, expected)


def objects_in(value, expected):
    """Every object with a type of its own, with that type."""
    if get_origin(expected) is UnionType:
        expected = next(one for one in get_args(expected) if not problems(value, one))
    if is_typeddict(expected):
        yield value, expected
        for key, part in get_type_hints(expected).items():
            if key in value:
                yield from objects_in(value[key], part)
    elif get_origin(expected) is list and value:
        yield from objects_in(value[0], get_args(expected)[0])


def test_every_recorded_program_has_a_result_type():
    assert all(type_of(figure.command) for figure in figures.FIGURES.values())
    assert all((ROOT / "scripts" / f"{program}.py").is_file() for program in result.RESULTS)
    for program, expected in result.RESULTS.items():
        if "program" in getattr(expected, "__required_keys__", ()):
            assert get_args(get_type_hints(expected)["program"]) == (program,)


# ---- results of the code --------------------------------------------------------------------------------------------


def method(name="a method", draft_length=0, temperature=0.0, seconds=1.0):
    """Two rounds of two texts, with the seconds of the forward passes."""
    drafted = ([3, 3], [2, 2]) if draft_length else ([0] * 4, [1] * 4)
    run = Run([1, 2, 3, 4, 5], *drafted, 0.1, seconds)
    times = {"seconds": [[0.1], [0.1]], "drafting": [0.1] * 2, "verifying": [0.2] * 2, "outside": [0.1] * 2}
    return Method(name, "an engine", draft_length, temperature, None, rounds=[[run, run]] * 2, **times)


@pytest.mark.parametrize(("draft_length", "temperature"), [(0, 0.0), (4, 0.0), ("adaptive", 0.7), ("lookup 5", 0.0)])
def test_method_rows_match_their_type(draft_length, temperature):
    one = method("a draft", draft_length, temperature)
    assert problems(as_json(harness.row(one, method())), result.MethodRow) == []
    assert problems(as_json(harness.iteration_split(one)), result.IterationSplit) == []


def test_comparisons_match_their_type():
    found = ratios.engines("K = 4", method(draft_length=4), method(draft_length=4, seconds=2.0))
    assert problems(as_json(found), list[result.Ratio]) == []
    assert ["where" in fact for fact in found] == [True, False]
    assert problems(as_json(ratios.ratio("x", method(), method(), [0])), result.Ratio) == []  # without an interval


def test_ratio_is_within_its_interval_after_a_slow_round():
    runs = [[Run([1, 2, 3, 4, 5], [], [], 0.1, seconds + i / 100) for i in range(3)] for seconds in (1.0, 1.0, 9.0)]
    slow = dataclasses.replace(method(), rounds=runs)
    fact = ratios.ratio("x", slow, dataclasses.replace(method(), rounds=[runs[0]] * 3))
    assert fact["ratio"] == 1 and fact["interval"][0] <= 1 <= fact["interval"][1]


@pytest.mark.parametrize("prompts", [2, 3, 5, 16])
def test_interval_over_prompts_covers_95_percent(prompts):
    """Of differing texts whose speeds and speedups vary; a bootstrap over three prompts would cover 76 %."""
    random, covered = np.random.default_rng(1), 0
    for _ in range(1000):
        tokens = random.integers(40, 129, (2, prompts)).astype(float)
        seconds = tokens * np.exp(random.normal(0, 0.3, prompts))  # of both methods
        seconds[0] *= np.exp(random.normal(0, 0.2, prompts))
        least, most = ratios.interval(tokens, seconds)
        covered += least <= np.exp(-(0.2**2) / 2) <= most  # 1 / the mean time per token
    assert 925 <= covered <= 975


def test_environment_has_pair_keys_only_with_a_pair():
    given = [("INFERENCE_NUM_THREADS", 1), ("EXECUTION_MODE_HINT", "ACCURACY")]
    pair = argparse.Namespace(main=MAIN, draft=DRAFT, device="CPU", draft_device="CPU", property=given)
    facts = as_json(harness.environment(pair, harness.BackgroundLoad()))
    assert problems(facts, result.PairEnvironment) == []
    assert set(facts) == set(get_type_hints(result.PairEnvironment))
    pair.draft = None
    alone = as_json(harness.environment(pair, harness.BackgroundLoad()))
    assert problems(alone, result.MainEnvironment) == []
    assert problems(as_json(harness.environment(argparse.Namespace())), result.Environment) == []
    facts["properties"]["EXECUTION_MODE_HINT"] = 1.5
    assert problems(facts, result.PairEnvironment) == ["result['properties']['EXECUTION_MODE_HINT'] is 1.5, not str"]


def test_environment_memory_is_unknown_if_the_system_does_not_report_it(monkeypatch):
    monkeypatch.setattr(harness.devices, "main_memory", lambda: harness.devices.Memory(None, None))
    assert harness.environment(argparse.Namespace())["memory"] == "unknown"


@pytest.mark.parametrize("answered", [True, False])
def test_load_rows_match_their_type(answered):
    outcome = (
        {"accepted": 2, "rejected": 1, "finish_reason": "length", "is_complete": True}
        if answered
        else {"cut_off": "status 0"}
    )
    load = Load("a method", None, {4: [Span([RequestRecord(0, 0.0, 0.1, 1.0, "t", 6, **outcome)], 0.0, 1.0)] * 2})
    alone = Load("alone", None, load.rounds)
    assert [problems(as_json(row(one, 4, alone)), result.LoadRow) for one in (load, alone)] == [[], []]
    assert problems(as_json(row(load, 4, None, "text")), result.LoadRow) == []


def test_matrix_cells_match_their_type():
    rows = [harness.row(one, method()) for one in (method(), method("K = 4", 4))]
    facts = {"load_seconds": 1.0, "other_load": 0.0, "main_precision": "int8"}
    alone = {"rows": rows[:1], "tokens": [[[1, 2]]], **facts}
    drafted = {"rows": rows, "tokens": [[[1, 2]], [[1, 3]]], **facts, "draft_precision": "f32"}
    assert problems(as_json([alone, drafted]), list[result.CellAnswer]) == []

    cpu, gpu = Device("CPU", "a processor"), Device("GPU", missing="there is no GPU")
    tried = {"job": {"main_properties": {"A": 1}, "draft_properties": {}, "prompts": [[7]]}, "measured": "now"}
    machine = {"machine": "one", "machine_kind": "a kind"}
    cells = [
        Cell(cpu, None, status="ok", answer=alone, **tried),
        Cell(cpu, cpu, status="emulated", answer=drafted, **tried, **machine),
        Cell(cpu, cpu, status="failed", reason="a crash", **tried, **machine),
        Cell(gpu, cpu, status="absent", reason=gpu.missing),
        Cell(cpu, cpu, **machine),
    ]
    matrix.compare(cells, ["1"], SimpleNamespace(decode=str))
    described = as_json([matrix.cell_result(cell) for cell in cells])
    kinds = [result.MeasuredCell, result.MeasuredCell, result.FailedCell, result.AbsentCell, result.AbsentCell]
    assert [problems(one, kind) for one, kind in zip(described, kinds, strict=True)] == [[]] * 5
    assert problems(described, list[result.CellResult]) == []
    assert [one["same_text"] for one in described[:2]] == [True, False]
    assert problems(as_json(matrix.rows(cells)), list[result.SwapRow]) == []


@pytest.mark.parametrize("draft_length", [0, 4, 0.4, "adaptive"])
def test_method_settings_match_their_type(draft_length):
    models = PropertySet("CPU", "CPU", (("A", 1), ("B", "c")))
    setting = Setting(models, "an engine", DRAFT if draft_length else None, draft_length, (("cache_size", 1),))
    assert problems(as_json(setting.as_dict()), result.MethodSettings) == []


# ---- the check ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected", "problem"),
    [
        (1, float, ""),
        (1.0, int, "result is 1.0, not int"),
        (True, int, "result is True, not int"),
        (1, bool, "result is 1, not bool"),
        (None, float | None, ""),
        ("1", float | None, "result is '1', not float"),
        ([1.0, "2"], list[float], "result[1] is '2', not float"),
        ({"a": 1}, list[int], "result is {'a': 1}, not list"),
        ([1], dict[str, int], "result is [1], not dict"),
        ({"4": 1.0}, dict[int, float], ""),
        ({"a": 1.0}, dict[int, float], "result has the key 'a', not a number"),
        ({"a": "b"}, dict[str, int], "result['a'] is 'b', not int"),
        ({"main": 1, "draft": 2}, result.WeightBytes, ""),
        ({"main": 1}, result.WeightBytes, "result lacks 'draft' of WeightBytes"),
        ({"main": 1, "draft": 2, "other": 3}, result.WeightBytes, "result has 'other', unlike WeightBytes"),
        ({"main": 1, "draft": None}, result.WeightBytes, "result['draft'] is None, not int"),
        ([1], result.WeightBytes, "result is [1], not WeightBytes"),
        ({}, result.QualityFigures, ""),
        ({"grade": 1}, result.QualityFigures, "result['grade'] is 1, not str"),
        (
            {"level": "fine", "what": "", "message": ""},
            result.PairFinding,
            "result['level'] is 'fine', not one of 'ok', 'warning', 'error'",
        ),
    ],
)
def test_value_of_wrong_type_is_named(value, expected, problem):
    assert problems(value, expected) == ([problem] if problem else [])


def test_unsupported_type_is_an_error():
    with pytest.raises(TypeError, match="bytes"):
        problems(1, bytes)
