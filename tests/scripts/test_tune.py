"""Tuning as users run it: its recommendation works and applies to these weights only.

The embedded draft serves as both models, because it is fast. No test depends on a speed: which setting is fastest
depends on the machine and its load.
"""

import json
import os
import pickle
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from scripts import tune
from speculative.bench import quality as text_quality
from speculative.bench.cluster.child_process import ChildFailed
from speculative.bench.cluster.hosts import Place
from speculative.bench.cluster.ray_nodes import Machine
from speculative.bench.cluster.worker_process import WorkerProcess
from speculative.bench.devices.matrix import Device
from speculative.bench.genai import Run
from speculative.bench.methods import ADAPTIVE_LOOKUP, TWO_SOURCES
from speculative.bench.quality import Quality, ReferenceText
from speculative.bench.result import Recommendation, TuneResult
from speculative.bench.tuning import exhaustive, tables
from speculative.bench.tuning.choice import choose, to_remeasure
from speculative.bench.tuning.finals import Finals
from speculative.bench.tuning.lengths import LengthStage
from speculative.bench.tuning.properties import PropertyStage
from speculative.bench.tuning.session import Candidate
from speculative.bench.tuning.settings import EXACT, SCHEDULERS, PropertySet, Setting
from speculative.bench.tuning.stages import Tuning
from speculative.bench.tuning.verdict import judge
from speculative.cli import pipeline_arguments
from speculative.cli.parser import Parser
from speculative.drafting.policy import Costs
from speculative.models import cached_model
from speculative.models.spec import ModelSpec
from speculative.pair import recommendation
from speculative.pair.engines import GENAI, NATIVE
from speculative.pair.recommendation import SUFFIX as SUFFIX_KEY
from speculative.serving import arguments as serving_arguments
from tests.support.in_process import run_here as run_in_process
from tests.support.paths import DRAFT, MAIN, ROOT
from tests.support.progress import EACH_STEP
from tests.support.typed import problems
from tests.support.useless_draft import make_useless

PROMPT = "def read_file(path):"
SHORT = ("--max-new-tokens", 16, "--devices", "CPU")
NAME = recommendation.FILE


def last_line(done):
    result = json.loads(done.stdout.splitlines()[-1])
    assert problems(result, TuneResult) == []
    return result


@pytest.fixture(scope="module")
def tune_pair(tmp_path_factory):
    """Run tune.py on a pair, or on a main model alone, with a small time budget; return the finished process."""

    def tune_pair(main, draft, *options, prompts=("def area(width, height):", "class Box:", "import os", "x = [")):
        file = tmp_path_factory.mktemp("prompts") / "prompts.txt"
        file.write_text("\n".join(prompts), encoding="utf-8")
        models = [main, draft] if draft else [main]
        return run_in_process("scripts/tune.py", *models, "--minutes", 0.05, "--prompts", file, *SHORT, *options)

    return tune_pair


def copy_pair(folder):
    shutil.copytree(DRAFT, folder / "main")
    shutil.copytree(DRAFT, folder / "draft")
    return folder


@pytest.fixture(scope="module")
def tuned(tune_pair, tmp_path_factory):
    """A pair and the result of tuning it."""
    pair = copy_pair(tmp_path_factory.mktemp("pair"))
    done = tune_pair(pair / "main", pair / "draft", "--csv", pair / "tune.csv", "--json", pair / "tune.json")
    assert done.returncode == 0, done.stderr
    return SimpleNamespace(pair=pair, done=done, result=last_line(done))


@pytest.fixture(scope="module")
def useless(tune_pair, tmp_path_factory):
    pair = copy_pair(tmp_path_factory.mktemp("useless"))
    make_useless(pair / "draft")
    done = tune_pair(pair / "main", pair / "draft")
    assert done.returncode == 0, done.stderr
    return SimpleNamespace(pair=pair, done=done, result=last_line(done))


@pytest.fixture(scope="module")
def without_draft(tune_pair, tmp_path_factory):
    pair = copy_pair(tmp_path_factory.mktemp("without"))
    done = tune_pair(pair / "main", None, "--exhaustive", 0.02, "--html", pair / "tune.html")
    assert done.returncode == 0, done.stderr
    return SimpleNamespace(pair=pair, done=done, result=last_line(done))


# ---- the program ----------------------------------------------------------------------------------------------------


def test_recommendation_is_printed_and_saved(tuned):
    result, found = tuned.result, tuned.result["recommendation"]
    assert result["program"] == "tune"
    assert result["summary"][0] in tuned.done.stdout and found["reason"] in result["summary"]
    assert {"GenAI, main alone, default properties", "GenAI, K = 5, default properties"} <= {
        row["name"] for row in result["rows"]
    }
    kept = json.loads((tuned.pair / NAME).read_text(encoding="utf-8"))
    assert kept == {"format": recommendation.FORMAT, **found}
    assert json.loads((tuned.pair / "tune.json").read_text(encoding="utf-8")) == result
    assert (tuned.pair / "tune.csv").read_text(encoding="utf-8").count("\n") > len(result["rows"])
    assert found["best"] in found["settings"] and found["settings"]["alone"]["throughput"] > 0
    assert found["use_draft"] == (found["best"] in (GENAI, NATIVE))


def test_every_candidate_reports_text_quality(tuned):
    decoded = [one for one in tuned.result["candidates"] if one.get("throughput")]
    assert len(decoded) >= 5
    for one in decoded:
        assert 0 <= one["agreement"] <= 1 and one["mean_kl"] >= 0 and one["grade"] in text_quality.GRADES
    assert "mean KL" in " ".join(tuned.result["summary"])


def test_printed_commands_and_python_code_run(tuned, run):
    summary = tuned.result["summary"]
    spelled_out = next(line for line in summary if line.startswith("or, with explicit options: "))
    recommended = next(line for line in summary if line.startswith("Run it: "))
    texts = []
    for line in (spelled_out, recommended):
        command = line.partition(": ")[2].replace("python ", f"{sys.executable} ", 1) + " --max-new-tokens 12"
        done = subprocess.run(command, shell=os.name != "nt", cwd=ROOT, capture_output=True, encoding="utf-8")
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout)
    assert texts[0] == texts[1] != ""
    assert "recommended by " in done.stderr
    program = "\n".join(line.strip() for line in summary if line.startswith("    "))
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(texts[0])


def test_time_budget_is_kept(tuned):
    """A load or run that has begun is completed, and no comparison is shorter than its minimum. Others are left out."""
    assert any("the budget had no time for all" in line for line in tuned.result["summary"])
    assert shlex.split(tuned.result["environment"]["command"])[:2] == ["python", str(ROOT / "scripts/tune.py")]


def test_useless_draft_is_rejected_with_measured_reason(useless, run_here):
    found = useless.result["recommendation"]
    best = found["best"]
    assert not found["use_draft"] and best in ("alone", SUFFIX_KEY) and set(found["settings"]) == {"alone", best}
    assert useless.result["summary"][0] == found["reason"]
    assert found["reason"].startswith("Do not use this draft: hardly any of its tokens are accepted (probability 0.")

    main, draft = useless.pair / "main", useless.pair / "draft"
    done = run_here("samples/speculative_greedy_lm.py", main, draft, PROMPT, "--recommended")
    assert done.returncode == 2 and done.stdout == ""
    assert (
        done.stderr.count("\n") == 1
        and f"{recommendation.SAMPLE_OF[best]} --recommended instead: Do not" in done.stderr
    )
    done = run_here("samples/greedy_causal_lm.py", main, PROMPT, "--recommended", "--max-new-tokens", 4)
    assert done.returncode == 0 and f"recommended by {useless.pair / NAME}" in done.stderr


def test_exhaustive_search_is_compared_with_the_choice(tune_pair, tmp_path):
    done = tune_pair(DRAFT, DRAFT, "--exhaustive", 0.02, "--out", tmp_path / NAME, prompts=("class Box:", "import os"))
    assert done.returncode == 0, done.stderr
    result = last_line(done)
    checked, tried = result["exhaustive"], {one["name"] for one in result["candidates"]}
    assert checked["choice"] in tried and checked["choice"] in checked["last"]
    assert checked["decoded"] > 2 * 2 * len(exhaustive.LENGTHS)  # two property sets, two engines, and more settings
    assert len(checked["last"]) < 10
    assert checked["fastest"] in checked["last"] and checked["rounds"] >= 1
    assert 0 < checked["spread"][0] <= checked["ratio"] <= min(1, checked["spread"][1])
    assert checked["fastest"] in result["summary"][-1] or "the choice is the fastest" in result["summary"][-1]
    assert json.loads((tmp_path / NAME).read_text(encoding="utf-8"))["best"] == result["recommendation"]["best"]


def test_suffix_decoding_is_tuned_without_a_draft(without_draft, run_here):
    result, pair = without_draft.result, without_draft.pair
    found = result["recommendation"]
    assert {"GenAI, main alone, default properties", "ours, suffix decoding, default properties"} <= {
        row["name"] for row in result["rows"]
    }
    assert not any("draft: " in one["name"] or "num_assistant_tokens" in str(one) for one in result["candidates"])
    assert not {"draft", "draft_device"} & set(result["environment"])
    assert found["draft"] is None and not found["use_draft"] and found["best"] in found["settings"]
    begins = {
        SUFFIX_KEY: "Use suffix decoding: ours, suffix",
        "alone": "Run the main model alone: suffix decoding gains",
    }
    assert result["summary"][0].startswith(begins[found["best"]]) and "draft model" not in result["summary"][0]
    assert result["exhaustive"]["choice"] in result["exhaustive"]["last"]
    assert "recommended: " in (pair / "tune.html").read_text(encoding="utf-8")

    kept = json.loads((pair / NAME).read_text(encoding="utf-8"))
    assert kept == {"format": recommendation.FORMAT, **found}
    done = run_here("samples/greedy_causal_lm.py", pair / "main", PROMPT, "--recommended", "--max-new-tokens", 4)
    assert done.returncode == 0 and f"recommended by {pair / NAME}" in done.stderr
    done = run_here("samples/speculative_greedy_lm.py", pair / "main", pair / "draft", PROMPT, "--recommended")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "was measured without a draft: tune with `python scripts/tune.py MAIN DRAFT`" in done.stderr


@pytest.mark.posix("signals")
@pytest.mark.parametrize(("seen", "decoded"), [("f32 reference", False), ("finalists", True)])
def test_ctrl_c_keeps_measured_candidates(tmp_path, seen, decoded):
    pair = copy_pair(tmp_path)
    command = [*EACH_STEP, "scripts/tune.py", pair / "main", pair / "draft", "--minutes", 0.1, *SHORT]
    with subprocess.Popen(
        list(map(str, command)), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8"
    ) as process:
        stderr = ""
        while seen not in stderr:
            stderr += (piece := process.stderr.read(1))
            assert piece, stderr
        process.send_signal(signal.SIGINT)
        out, rest = process.communicate(timeout=120)
    assert process.returncode == 130, rest
    assert "Traceback" not in stderr + rest
    assert not (pair / NAME).exists()
    result = json.loads(out.splitlines()[-1])
    assert problems(result, TuneResult) == []
    assert "Interrupted" in result["summary"][-1]
    assert bool(result["recommendation"]) == decoded
    if decoded:
        assert result["recommendation"]["settings"]["alone"]["throughput"] > 0
    else:
        assert "before anything was decoded" in result["summary"][0]


def test_draft_properties_do_not_create_another_main_model_alone():
    arguments = SimpleNamespace(main=MAIN, drafts=[DRAFT], minutes=1, devices=["CPU"], property=[])
    arguments.allow_quality_loss = False
    here = Place({}, None, [], machine=Machine("here", [], None))
    tuning = Tuning(arguments, [], [here])
    threads, group = (("INFERENCE_NUM_THREADS", 1),), (("DYNAMIC_QUANTIZATION_GROUP_SIZE", 128),)
    sets = [tuning.default, tuning.default.with_draft_properties(threads), tuning.default.with_properties(group)]
    found = [Candidate(one, 1.0, alone) for one, alone in zip(sets, (1.0, 1.3, 1.1), strict=True)]
    assert PropertyStage(tuning).best_alone(found) == sets[2]
    assert (
        PropertyStage(tuning).best_alone(found[:2])
        == PropertyStage(tuning).best_alone(found, above=1.2)
        == tuning.default
    )


def test_settings_of_several_drafts_have_names_of_their_own():
    """A draft that fails must not drop another one with the same settings."""
    arguments = SimpleNamespace(main=MAIN, drafts=[DRAFT, MAIN], minutes=1, devices=["CPU"], property=[])
    arguments.allow_quality_loss = False
    tuning = Tuning(arguments, [], [Place({}, None, [], machine=Machine("here", [], None))])
    names = [str(tuning.with_draft(tuning.default, NATIVE, draft, 4)) for draft in (DRAFT, MAIN)]
    assert names == [f"ours, K = 4 with {draft}, default properties" for draft in (DRAFT, MAIN)]
    arguments.drafts = [DRAFT]
    one = Tuning(arguments, [], [Place({}, None, [], machine=Machine("here", [], None))])
    assert str(one.with_draft(one.default, NATIVE, DRAFT, 4)) == "ours, K = 4, default properties"


# ---- the verdict, on made-up figures --------------------------------------------------------------------------------

GROUP = (("DYNAMIC_QUANTIZATION_GROUP_SIZE", 256),)
SCHEDULER = SCHEDULERS[0]


def made_up(choosing, remeasured=None, gained=4, drafts=(DRAFT,)):
    """A finished tuning session with these tokens/s per round, of the final settings and of those measured again. A
    forward pass of the main model yields `gained` tokens with the draft."""
    arguments = SimpleNamespace(
        main=MAIN, drafts=list(drafts), minutes=1, devices=["CPU"], property=[], allow_quality_loss=False, out=None
    )
    arguments.max_new_tokens = 60
    here = Place({"CPU": Device("CPU", "a processor")}, None, ["1"], machine=Machine("here", [], None))
    tuning = Tuning(arguments, [], [here])
    tuning.clock.bar.close()
    tuning.alpha[tuning.drafts[0]] = 0.8
    for models in (tuning.default, tuning.default.with_properties(GROUP)):
        tuning.costs[models, tuning.drafts[0]] = Costs(0.1, {1: 1.0, 2: 1.1, 6: 1.2})
    for contest, found in ((tuning.choosing, choosing), (tuning.remeasured, remeasured or {})):
        for (engine, k, *more), throughputs in found.items():
            properties, scheduler = (*more, (), ())[:2]
            models = tuning.default.with_properties(properties)
            setting = Setting(models, engine, None if k in (0, ADAPTIVE_LOOKUP) else DRAFT, k, scheduler)
            method = contest.methods[setting] = Finals(tuning).method(setting)
            proposed = k if isinstance(k, int) else 4
            method.rounds += [[made_up_run(throughput, proposed, gained if k else 1)] for throughput in throughputs]
        contest.prompts += [np.array([7])] * len(next(iter(found.values()), ()))
    return tuning


def made_up_run(throughput, k, gained):
    n = 60 // gained
    return Run([1] * (n * gained + 1), [k] * n, [gained] * n, 1.0, 1.0 + n * gained / throughput)


ALONE, OURS_ALONE, SCHEDULED_ALONE = (GENAI, 0), (NATIVE, 0), (GENAI, 0, (), SCHEDULER)
USUAL, OURS, SUFFIX = (GENAI, 5), (NATIVE, 4), (NATIVE, ADAPTIVE_LOOKUP)
WINS = {  # tokens/s by round; the draft has to be recommended, at what it gains over the fastest without one
    "over GenAI, the fastest alone": ({ALONE: [20, 21], OURS_ALONE: [19, 20], USUAL: [40, 40], OURS: [50, 51]}, 2.46),
    "over our engine, the fastest alone": (
        {ALONE: [20, 20], OURS_ALONE: [25, 25], USUAL: [26, 26], OURS: [30, 30]},
        1.2,
    ),
    "over another scheduler, the fastest alone": (
        {ALONE: [20, 20], SCHEDULED_ALONE: [24, 24], OURS_ALONE: [21, 21], OURS: [30, 30]},
        1.25,
    ),
    "a little in every round": ({ALONE: [20, 20, 20], OURS: [21.6, 21.2, 20.2]}, 1.06),
}
LOSES = {
    "slower": {ALONE: [20, 20], OURS_ALONE: [19, 19], USUAL: [12, 12], OURS: [15, 15]},
    "a tie": {ALONE: [20, 20], OURS_ALONE: [20, 20], USUAL: [20, 20], OURS: [20, 20]},
    "only our engine gains": {ALONE: [20, 20], OURS_ALONE: [22, 22], USUAL: [19, 19], OURS: [21.5, 21.5]},
    "only the scheduler gains": {ALONE: [20, 20], SCHEDULED_ALONE: [30, 30], USUAL: [25, 25], OURS: [30.5, 30.5]},
    "only suffix decoding gains": {ALONE: [20, 20], SUFFIX: [30, 30], USUAL: [25, 25], OURS: [30.5, 30.5]},
    "gain below the threshold": {ALONE: [20, 20, 20], OURS: [20.8, 20.8, 20.8]},
    "loss in the worst round": {ALONE: [20, 20, 20], OURS: [30, 30, 19.5]},
}


@pytest.mark.parametrize(("figures", "gain"), WINS.values(), ids=WINS)
def test_draft_with_gain_is_recommended(figures, gain):
    verdict = judge(made_up(figures, figures))
    found = verdict.as_dict()
    assert problems(found, Recommendation) == []
    assert found["use_draft"] and found["best"] == NATIVE and found["settings"][NATIVE]["num_assistant_tokens"] == 4
    assert verdict.choice.draft == DRAFT and verdict.sentences[0].startswith("Use this draft: ours, K = 4,")
    line = next(
        (line for line in verdict.sentences if line.startswith("Speedup over the fastest method without")), None
    )
    if line:
        assert float(re.search(r": ([\d.]+)x", line)[1]) == pytest.approx(gain, abs=0.006)
        assert str(choose(made_up(figures)).alone.setting) in line
    else:  # the defaults are the fastest without a draft
        assert re.search(rf" {gain:.2f}x \([^)]*\) the main model alone with its defaults", verdict.sentences[0])
    assert "Why: " in verdict.reason and verdict.reason in verdict.sentences
    assert found["settings"]["alone"].get("scheduler") is None  # samples/greedy_causal_lm.py has no such option


@pytest.mark.parametrize("figures", LOSES.values(), ids=LOSES)
def test_draft_without_gain_of_its_own_is_not_recommended(figures):
    verdict = judge(made_up(figures, figures))
    found = verdict.as_dict()
    best = SUFFIX_KEY if verdict.choice.copies else "alone"
    assert not found["use_draft"] and found["best"] == best and set(found["settings"]) == {"alone", best}
    assert verdict.choice.draft is None and verdict.sentences[0] == verdict.reason
    assert verdict.reason.startswith("Do not use this draft: even its best setting gains too little")
    fastest = max(figures, key=lambda method: figures[method][0] if method[1] in (0, ADAPTIVE_LOOKUP) else 0)
    assert (verdict.choice.engine, verdict.choice.scheduler) == (fastest[0], (*fastest, (), ())[3])


def test_draft_without_accepted_tokens_never_gains():
    figures = {ALONE: [20, 20], OURS: [30, 30]}
    verdict = judge(made_up(figures, figures, gained=1))
    assert not verdict.as_dict()["use_draft"] and "hardly any of its tokens are accepted" in verdict.reason


def test_gain_of_devices_is_not_called_a_change_of_the_machines_speed():
    """The gain over the main model's defaults includes that of devices and properties: a draft bounds only its own."""
    figures = {ALONE: [10, 10], SCHEDULED_ALONE: [40, 40], OURS: [60, 62]}
    assert not any("machine's speed changed" in line for line in judge(made_up(figures, figures)).sentences)
    figures = {ALONE: [10, 10], SCHEDULED_ALONE: [10, 10], OURS: [60, 62]}
    lines = [line for line in judge(made_up(figures, figures)).sentences if "machine's speed changed" in line]
    assert lines[0].startswith(
        "A speedup of 6.10x over the fastest method without a draft model is more than 4.0 tokens"
    )


@pytest.mark.parametrize(
    ("rounds", "different", "words"),
    [
        (5, 5, "(5 prompts in 5 rounds; measured after the choice)"),
        (2, 2, "(2 prompts in 2 rounds, too few to rely on: give more --minutes, or more --prompts; "),
        (6, 1, "(1 prompt in 6 rounds, too few to rely on: "),
        (1, 1, "(1 prompt in 1 round, too few to rely on: "),
    ],
)
def test_few_prompts_are_reported(rounds, different, words):
    figures = {ALONE: [20] * rounds, OURS: [40] * rounds}
    tuning = made_up(figures, figures)
    tuning.remeasured.prompts[:] = [np.array([i % different]) for i in range(rounds)]
    assert words in judge(tuning).sentences[0]


def test_draft_beside_suffix_decoding_is_explained_by_both():
    both = (NATIVE, TWO_SOURCES)
    figures = {ALONE: [20, 20], both: [60, 60]}
    reason = judge(made_up(figures, figures)).reason
    assert reason.startswith("Why: draft and suffix decoding draft 4.00 tokens per main-model forward pass, of which 7")
    assert "a draft step costs 0.10 of a main-model step, a copied token nothing" in reason
    tuning = made_up(figures, figures)
    tuning.costs.clear()
    assert judge(tuning).reason.endswith("their costs could not be measured.")


def test_rarely_used_draft_is_not_called_rejected():
    """As with the adaptive draft length, if a draft step costs as much as a main-model step."""
    tuning = made_up({ALONE: [20, 20], OURS: [20, 20]}, gained=1)
    method = next(one for setting, one in tuning.choosing.methods.items() if setting.draft)
    for (run,) in method.rounds:
        run.proposed[1:] = [0] * (len(run.proposed) - 1)
    reason = judge(tuning).reason
    assert "hardly any" not in reason and "drafts only 0.07 tokens per main-model forward pass" in reason
    assert "accepted with probability 0.80" in reason and "break-even" in reason


def test_engine_without_gain_has_no_recommended_settings():
    figures = {ALONE: [20, 20], OURS_ALONE: [22, 22], USUAL: [22.5, 22.5], OURS: [40, 40]}
    assert set(judge(made_up(figures, figures)).settings) == {"alone", NATIVE}


def test_reported_speedup_comes_from_new_rounds_not_the_selection():
    """The luckiest of many settings that are no faster than the main model alone gains nothing when remeasured."""
    lucky = {ALONE: [20, 20], OURS_ALONE: [20, 20], USUAL: [20, 20], OURS: [23, 23]}
    sober = {ALONE: [20, 20], OURS_ALONE: [20, 20], USUAL: [20, 20], OURS: [20.1, 19.9]}
    assert judge(made_up(lucky)).as_dict()["use_draft"]
    verdict = judge(made_up(lucky, sober))
    assert not verdict.as_dict()["use_draft"] and "K = 4, default properties decodes at 1.00x" in verdict.reason

    better = {ALONE: [20, 20], OURS_ALONE: [20, 20], USUAL: [30, 30], OURS: [33, 35]}
    luckier = {ALONE: [20, 20], OURS_ALONE: [20, 20], USUAL: [30, 30], OURS: [50, 50]}
    verdict = judge(made_up(luckier, better))
    kept = verdict.as_dict()["settings"][NATIVE]
    assert [kept["throughput"], kept["speedup"], *kept["speedup_range"]] == pytest.approx([34, 1.7, 1.65, 1.75])
    assert "34.0 tokens/s" in verdict.sentences[0] and "measured after the choice" in verdict.sentences[0]
    unmeasured = judge(made_up(luckier))
    assert "50.0 tokens/s" in unmeasured.sentences[0] and "which overestimate it" in unmeasured.sentences[0]
    table = tables.table(made_up(luckier, better))
    assert "1.70x (1.65-1.75)" in table.partition("new rounds after the choice")[2]


def test_defaults_are_recommended_if_faster_in_every_new_round():
    alone = {ALONE: [20, 20], OURS_ALONE: [20, 20]}
    choosing = {**alone, USUAL: [30, 30], OURS: [33, 35]}
    faster = judge(made_up(choosing, {**alone, USUAL: [36, 40], OURS: [33, 35]}))
    assert (faster.choice.engine, faster.choice.draft_length) == USUAL and faster.best == GENAI
    assert faster.settings[GENAI]["num_assistant_tokens"] == 5
    assert not any("with its defaults (K = 5)" in line for line in faster.sentences)
    once = judge(made_up(choosing, {**alone, USUAL: [36, 34], OURS: [33, 35]}))
    assert (once.choice.engine, once.choice.draft_length) == OURS
    note = "GenAI, K = 5, default properties was faster in the new rounds (1.75x)"
    assert any(line.startswith(note) for line in once.sentences)
    assert not any("was faster" in line for line in faster.sentences)


def test_only_reported_settings_are_remeasured():
    figures = {
        ALONE: [20, 20], OURS_ALONE: [25, 25], SCHEDULED_ALONE: [19, 19], USUAL: [30, 30], (GENAI, 8): [29, 29],
        (NATIVE, 4, GROUP): [50, 50], (GENAI, 5, GROUP): [40, 40], (GENAI, 7, GROUP): [41, 41],
    }  # fmt: skip
    tuning = made_up(figures)
    wanted = {str(setting) for setting in to_remeasure(tuning)}
    group = "DYNAMIC_QUANTIZATION_GROUP_SIZE=256"
    assert wanted == {
        "GenAI, main alone, default properties", "ours, main alone, default properties",
        f"ours, K = 4, {group}", f"GenAI, K = 7, {group}", f"GenAI, K = 5, {group}", "GenAI, K = 5, default properties",
    }  # fmt: skip
    tuning.failed[f"ours, K = 4, {group}"] = "its process was killed"
    assert choose(tuning).drafted.throughputs == pytest.approx([41, 41])


def test_fewest_properties_win_among_equally_fast_settings():
    figures = {ALONE: [20, 20], (NATIVE, 4, GROUP): [50.2, 50.2], OURS: [50, 50]}
    assert choose(made_up(figures)).drafted.throughputs == pytest.approx([50, 50])
    figures[(NATIVE, 4, GROUP)] = [51, 51]
    assert choose(made_up(figures)).drafted.throughputs == pytest.approx([51, 51])


def test_printed_python_code_of_native_engine_alone_runs():
    figures = {ALONE: [20, 20], OURS_ALONE: [30, 30], OURS: [20, 20]}
    verdict = judge(made_up(figures, figures))
    sentence = (
        "The fastest method without a draft model, ours, main alone, default properties, is the Python code below: "
        "1.50x (1.50-1.50)"
    )
    assert any(line.startswith(f"{sentence} samples/greedy_causal_lm.py") for line in verdict.sentences)
    assert any("samples/greedy_causal_lm.py" in line and "with explicit options" in line for line in verdict.sentences)
    program = "\n".join(line.strip() for line in verdict.sentences if line.startswith("    "))
    assert "draft" not in program
    assert_decodes(program)


def test_draft_with_suffix_decoding_is_recommended_if_faster():
    both = (NATIVE, TWO_SOURCES)
    figures = {ALONE: [20, 20], OURS_ALONE: [21, 21], SUFFIX: [24, 24], OURS: [25, 25], both: [33, 33]}
    verdict = judge(made_up(figures, figures))
    assert verdict.as_dict()["use_draft"] and verdict.choice.is_combined
    assert verdict.settings[NATIVE]["max_ngram_size"] == 16
    assert any(
        line.startswith("or, with explicit") and line.endswith("--suffix-decoding") for line in verdict.sentences
    )
    program = "\n".join(line.strip() for line in verdict.sentences if line.startswith("    "))
    assert "max_ngram_size=16" in program and str(DRAFT) in program
    assert_decodes(program)


def test_suffix_decoding_is_recommended_if_faster_than_draft():
    figures = {ALONE: [20, 20], OURS_ALONE: [21, 21], SUFFIX: [30, 30], OURS: [25, 25]}
    verdict = judge(made_up(figures, figures))
    assert not verdict.as_dict()["use_draft"] and verdict.choice.copies
    fastest = "The fastest method without a draft model, ours, suffix decoding, default properties, decodes at 1.50x"
    assert any(line.startswith(fastest) for line in verdict.sentences)
    command = f'samples/suffix_decoding_lm.py {MAIN} "def fib(n):" --recommended'
    assert any(command in line.replace("'", '"') for line in verdict.sentences)
    assert verdict.settings[SUFFIX_KEY]["max_ngram_size"] == 16
    program = "\n".join(line.strip() for line in verdict.sentences if line.startswith("    "))
    assert "max_ngram_size=16" in program
    assert_decodes(program)
    figures[SUFFIX] = [21.1, 21.1]  # no faster than without a draft
    assert not judge(made_up(figures, figures)).choice.copies


@pytest.mark.parametrize(
    ("suffix", "gained", "gains", "words"),
    [
        ([33, 36], 4, True, "it copies 4.00 tokens per main-model forward pass, of which 75% are accepted"),
        ([25.9, 25.9], 4, False, "decodes at 1.04x (1.04-1.04 over 2 rounds) the fastest method without suffix"),
        ([33, 24], 4, False, "suffix decoding gains too little: ours, suffix decoding"),
        ([33, 36], 1, False, "of which 0% are accepted, so a pass yields 1.00 tokens; verifying two tokens costs 1.10"),
    ],
)
def test_suffix_decoding_without_draft_follows_the_rule_for_drafts(suffix, gained, gains, words):
    figures = {ALONE: [20, 20], OURS_ALONE: [25, 25], SUFFIX: suffix}
    tuning = made_up(figures, figures, gained, drafts=[])
    verdict = judge(tuning)
    found = verdict.as_dict()
    assert problems(found, Recommendation) == []
    best = SUFFIX_KEY if gains else "alone"
    assert verdict.choice.copies == gains and found["draft"] is None and not found["use_draft"]
    assert found["best"] == best and set(found["settings"]) == {"alone", best}
    begin = "Use suffix decoding: ours, suffix decoding, " if gains else "Run the main model alone: suffix decoding"
    assert verdict.sentences[0].startswith(begin) and words in verdict.reason
    fastest = "he fastest method without suffix decoding"
    assert any(fastest in line and "ours, main alone, default properties" in line for line in verdict.sentences)
    command = f"samples/{recommendation.SAMPLE_OF[best]} {MAIN} 'def fib(n):' --recommended"
    assert f"Run it: python {command}" in verdict.sentences


def test_suffix_decoding_is_tried_with_each_remaining_property_set():
    tuning = made_up({ALONE: [20, 20], SUFFIX: [30, 30]}, drafts=[])
    models = tuning.default.with_properties(GROUP)
    tuning.fastest, tuning.fastest_alone = [models], models
    alone = {Setting(models, GENAI), Setting(models, NATIVE), *(Setting(models, GENAI, None, 0, s) for s in SCHEDULERS)}
    suffix = {Setting(one, NATIVE, draft_length=ADAPTIVE_LOOKUP) for one in (models, tuning.default)}
    assert set(LengthStage(tuning).settings()) == alone | suffix
    for setting in (*alone, *suffix):
        tuning.candidates[setting] = Candidate(setting, 1.0, throughput=20.0)
    assert set(Finals(tuning).finalists()) == {tuning.baseline, *alone, *suffix}


@pytest.mark.parametrize("fastest", [USUAL, OURS], ids=[GENAI, NATIVE])
def test_printed_python_code_with_draft_runs(fastest):
    figures = {ALONE: [20, 20], OURS_ALONE: [20, 20], USUAL: [30, 30], OURS: [30, 30], fastest: [40, 40]}
    verdict = judge(made_up(figures, figures))
    program = "\n".join(line.strip() for line in verdict.sentences if line.startswith("    "))
    assert str(DRAFT) in program and ("speculative" in program) == (fastest == OURS)
    assert_decodes(program)


def assert_decodes(program):
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, encoding="utf-8")
    assert done.returncode == 0 and len(done.stdout) > 20, done.stderr


def test_main_model_alone_is_tried_with_each_engine_and_scheduler():
    tuning = made_up({ALONE: [20, 20], OURS: [30, 30]})
    models = tuning.default.with_properties(GROUP)
    tuning.fastest, tuning.fastest_alone, tuning.k = [tuning.default], models, 4
    alone = {
        Setting(models, GENAI),
        Setting(models, NATIVE),
        Setting(models, NATIVE, draft_length=ADAPTIVE_LOOKUP),
        *(Setting(models, GENAI, scheduler=one) for one in SCHEDULERS),
    }
    tuning.clock.begin -= 3600  # no time is left for optional settings
    stage = LengthStage(tuning)
    stage.lengths = lambda *_: [4]
    assert alone <= set(stage.settings())
    for setting in (*alone, Setting(tuning.default, NATIVE, DRAFT, 4)):
        tuning.candidates[setting] = Candidate(setting, 1.0, throughput=20.0)
    assert {tuning.baseline, *alone} <= set(Finals(tuning).finalists())


CRASHES = """
import os, signal, sys
from speculative.bench.tuning import worker as tune_worker
decode = tune_worker.TuningWorker.decode

def crash(self, setting, *arguments):
    if setting.draft_length == "adaptive":
        os.kill(os.getpid(), signal.SIGSEGV)
    return decode(self, setting, *arguments)

tune_worker.TuningWorker.decode = crash
tune_worker.main()
"""


@pytest.mark.posix("signals")
def test_crashing_driver_fails_only_one_candidate(tmp_path):
    """Here the adaptive draft length crashes the model process."""
    pair = copy_pair(tmp_path)
    (tmp_path / "crashing_worker.py").write_text(CRASHES, encoding="utf-8")
    program = "import sys; from scripts import tune; from speculative.bench.tuning import client; "
    program += "client.WORKER = sys.argv.pop(1); sys.exit(tune.main())"
    command = [sys.executable, "-c", program, "crashing_worker", pair / "main", pair / "draft"]
    done = subprocess.run(
        list(map(str, [*command, "--minutes", 0.05, "--max-prompts", 2, *SHORT])),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, tmp_path)))},
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    result = last_line(done)
    failed = {one["name"]: one["failed"] for one in result["candidates"] if "failed" in one}
    assert all("adaptive" in name and "killed by SIGSEGV" in reason for name, reason in failed.items()) and failed
    names = {row["name"] for row in result["rows"]}
    assert "GenAI, main alone, default properties" in names and not names & set(failed)
    assert result["recommendation"]["settings"]["alone"]["throughput"] > 0
    assert "failed: its process was killed by SIGSEGV" in done.stdout and (pair / NAME).exists()


def test_crashed_worker_restarts_and_replays_remembered_calls(tmp_path):
    program = tmp_path / "worker.py"
    program.write_text(
        "import os, sys\n"
        "from speculative.bench.cluster import worker_process\n"
        "kept = []\n"
        "functions = {'keep': kept.append, 'all': lambda: kept, 'end': lambda: os._exit(3), 'find': {}.__getitem__}\n"
        "print('noise')\n"
        "worker_process.serve(functions.__getitem__)\n",
        encoding="utf-8",
    )
    worker = WorkerProcess([sys.executable, str(program)])
    worker.remember("keep", "a")
    worker.remember("keep", "b")
    worker.call("keep", "c")
    assert worker.call("all") == ["a", "b", "c"]
    with pytest.raises(KeyError):
        worker.call("find", 0)
    with pytest.raises(ChildFailed, match="status 3"):
        worker.call("end")
    assert worker.call("all") == ["a", "b"] and worker.started == 2
    child = psutil.Process().children()[-1]
    worker.close()
    assert not child.is_running()


def test_worker_is_not_used_if_replaying_a_call_fails(tmp_path):
    """If a remembered call raises in a new process, that process is not used: the next call starts another one."""
    program = tmp_path / "worker.py"
    program.write_text(
        "import os, sys\n"
        "from pathlib import Path\n"
        "from speculative.bench.cluster import worker_process\n"
        "kept = []\n"
        "def keep(name):\n"
        "    if Path(name).exists():\n"
        "        raise ValueError(f'{name} is in the way')\n"
        "    kept.append(name)\n"
        "functions = {'keep': keep, 'all': lambda: kept, 'end': lambda: os._exit(3)}\n"
        "worker_process.serve(functions.__getitem__)\n",
        encoding="utf-8",
    )
    one, two, refused = (str(tmp_path / name) for name in ("one", "two", "worker.py"))
    worker = WorkerProcess([sys.executable, str(program)])
    try:
        with pytest.raises(ValueError, match="in the way"):
            worker.remember("keep", refused)
        worker.remember("keep", one)
        worker.remember("keep", two)
        with pytest.raises(ValueError, match="in the way"):
            worker.remember("keep", refused)
        assert worker.call("all") == [one, two]
        with pytest.raises(ChildFailed):
            worker.call("end")
        Path(one).touch()
        for _ in range(2):
            with pytest.raises(ValueError, match="in the way"):
                worker.call("all")
        Path(one).unlink()
        assert worker.call("all") == [one, two]
    finally:
        worker.close()


def test_unwritable_recommendation_gives_one_sentence_error(tmp_path):
    (tmp_path / NAME).mkdir()
    arguments = SimpleNamespace(main=tmp_path / "main", out=None)
    assert "was not written" in tune.write_recommendation(arguments, {}, tmp_path / "draft")
    assert list(tmp_path.iterdir()) == [tmp_path / NAME]
    assert "are in different folders" in tune.write_recommendation(arguments, {}, tmp_path / "elsewhere/draft")
    arguments.out = tmp_path / "mine.json"
    assert tune.write_recommendation(arguments, {}, tmp_path / "elsewhere/draft") == f"Written to {arguments.out}."
    assert json.loads(arguments.out.read_text(encoding="utf-8")) == {"format": recommendation.FORMAT}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no/such/folder", DRAFT], ["no/such/folder"]),
        ([], ["required: main"]),
        (["models/embedded/eagle3"], ["EAGLE-3", "not a standalone model"]),
        (["no/such/folder"], ["no/such/folder"]),
        ([MAIN, DRAFT, "--minutes", "0"], ["'0'", "minutes"]),
        ([MAIN, DRAFT, "--minutes", "soon"], ["'soon'", "minutes"]),
        ([MAIN, DRAFT, "--devices", "GPX"], ["'GPX'", "is not a device"]),
        ([MAIN, DRAFT, "--devices", "CPU,GPU.7"], ["'GPU.7'", "there is no GPU.7"]),
        ([MAIN, DRAFT, "--machine", "one"], ["--machine", "--address"]),
        ([MAIN, DRAFT, "--max-new-tokens", "2"], ["2", "8 or more"]),
        ([MAIN, DRAFT, "--property", "fast"], ["'fast'", "KEY=VALUE"]),
        ([MAIN, DRAFT, "--out", "no/such/folder/x.json"], ["no/such/folder"]),
        ([MAIN, DRAFT, "--prompts", "README"], ["README"]),
    ],
)
def test_bad_usage_exits_with_2_and_names_the_value(run, run_here, arguments, words):
    one = run if "--prompts" in arguments else run_here  # the hub's client reads its variables when it is imported
    done = one("scripts/tune.py", *arguments, env={"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 2 and done.stdout == "", done.stderr
    assert all(word in done.stderr.splitlines()[-1] for word in words) and "Traceback" not in done.stderr


# ---- recommended.json and the samples -------------------------------------------------------------------------------


@pytest.fixture
def recommended(tmp_path):
    """A copy of the pair with a recommendation of its own; change and `write` it."""
    pair = copy_pair(tmp_path)
    alone = {"device": "CPU", "properties": {"EXECUTION_MODE_HINT": "ACCURACY"}}
    drafting = {**alone, "draft_device": "HETERO:CPU", "draft_properties": {}, "assistant_confidence_threshold": 0.0}
    content = {
        "use_draft": True,
        "best": NATIVE,
        "reason": "Why: it was made up.",
        "settings": {
            "alone": alone,
            GENAI: {**drafting, "num_assistant_tokens": 2, "scheduler": {"cache_size": 1}},
            NATIVE: {**drafting, "num_assistant_tokens": 0, "assistant_confidence_threshold": 0.25},
        },
        "main": {"folder": "main", "fingerprint": recommendation.fingerprint(pair / "main")},
        "draft": {"folder": "draft", "fingerprint": recommendation.fingerprint(pair / "draft")},
        "measured_on": {},
    }
    write = lambda: recommendation.write(pair / NAME, content)  # noqa: E731
    write()
    return SimpleNamespace(main=pair / "main", draft=pair / "draft", file=pair / NAME, content=content, write=write)


def test_samples_use_recommendation_and_options_override_it(run_here, recommended):
    main, draft, short = recommended.main, recommended.draft, ("--recommended", "--max-new-tokens", 12)
    done = run_here("samples/speculative_greedy_lm.py", main, draft, PROMPT, *short)
    assert done.returncode == 0, done.stderr
    assert f"\nsettings             recommended by {recommended.file}\n" in done.stderr
    assert "on HETERO:CPU" in done.stderr and "inference in f32" in done.stderr
    drafted = int(re.search(r"of (\d+) draft tokens", done.stderr)[1])
    inferences = int(re.search(r"(\d+) of the main model after the prompt", done.stderr)[1])
    assert inferences < drafted <= 2 * inferences  # K = 2

    done = run_here("samples/speculative_greedy_lm.py", main, draft, PROMPT, *short, "-k", 1, "--draft-device", "CPU")
    assert "except --draft-device, --num-assistant-tokens" in done.stderr and "HETERO" not in done.stderr
    alone = run_here("samples/greedy_causal_lm.py", main, PROMPT, *short)
    assert alone.stdout == done.stdout and "recommended by" in alone.stderr
    ours = run_here("samples/speculative_sampling_lm.py", main, draft, PROMPT, *short, "--temperature", 0)
    assert ours.stdout == done.stdout and "until the draft's confidence falls below 0.25" in ours.stderr
    ours = run_here("samples/speculative_sampling_lm.py", main, draft, PROMPT, *short, "--temperature", 0, "-k", "auto")
    assert "confidence falls below" not in ours.stderr and "except --num-assistant-tokens" in ours.stderr


def test_samples_read_recommendation_format_1(run_here, recommended):
    """Its engines are called GenAI and ours."""
    main, draft, options = recommended.main, recommended.draft, (PROMPT, "--recommended", "--max-new-tokens", 12)
    greedy, sampled = "samples/speculative_greedy_lm.py", "samples/speculative_sampling_lm.py"
    commands = [(greedy, main, draft, *options), (sampled, main, draft, *options, "--temperature", 0)]
    expected = [run_here(*command) for command in commands]
    content = json.loads(recommended.file.read_text(encoding="utf-8"))
    settings = content["settings"]
    former = {"alone": settings["alone"], "GenAI": settings[GENAI], "ours": settings[NATIVE]}
    content |= {"format": 1, "best": "ours", "settings": former}
    recommended.file.write_text(json.dumps(content), encoding="utf-8")
    for command, before in zip(commands, expected, strict=True):
        done = run_here(*command)
        assert done.returncode == before.returncode == 0 and done.stdout == before.stdout, done.stderr
        assert "on HETERO:CPU" in done.stderr and f"recommended by {recommended.file}" in done.stderr
    del former["GenAI"]
    recommended.file.write_text(json.dumps(content), encoding="utf-8")
    done = run_here(greedy, main, draft, *options)
    assert done.returncode == 2 and "samples/speculative_sampling_lm.py --recommended instead" in done.stderr


def test_recommendation_for_other_weights_is_rejected(run_here, recommended):
    make_useless(recommended.draft)
    sample = ("samples/speculative_greedy_lm.py", recommended.main, recommended.draft, PROMPT, "--recommended")
    done = run_here(*sample)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert "measured with other weights" in done.stderr and str(recommended.draft) in done.stderr
    with pytest.raises(ValueError, match="other weights than those of the draft model"):
        recommendation.check(recommendation.read(recommended.file), recommended.main, recommended.draft)
    done = run_here("samples/greedy_causal_lm.py", recommended.main, PROMPT, "--recommended", "--max-new-tokens", 2)
    assert done.returncode == 0  # the main model's are the same


def test_recommendation_of_other_version_is_noted(run_here, recommended):
    recommended.content["measured_on"] = {"openvino_genai": "1999.1", "CPU": "Abacus", "GPU.7": "elsewhere"}
    recommended.write()
    done = run_here("samples/greedy_causal_lm.py", recommended.main, PROMPT, "--recommended", "--max-new-tokens", 2)
    assert done.returncode == 0
    notes = [line for line in done.stderr.splitlines() if line.startswith("note: ")]
    assert len(notes) == 2 and "openvino_genai 1999.1, this is 20" in " ".join(notes) and "Abacus" in " ".join(notes)
    notes = recommendation.check(recommended.content, recommended.main, None, {"openvino_genai": "2026.4"})
    assert notes == ["the recommendation was measured with openvino_genai 1999.1, this is 2026.4"]


@pytest.mark.parametrize("content", [None, "{", "[]", '{"format": 0}'])
def test_missing_or_broken_recommendation_names_file_and_command(run_here, recommended, content):
    recommended.file.unlink()
    if content:
        recommended.file.write_text(content, encoding="utf-8")
    done = run_here("samples/greedy_causal_lm.py", recommended.main, PROMPT, "--recommended")
    assert done.returncode == (1 if content else 2) and done.stderr.count("\n") == 1
    assert str(recommended.file) in done.stderr and "python scripts/tune.py MAIN [DRAFT]" in done.stderr
    with pytest.raises(ValueError, match="python scripts"):
        recommendation.read(recommended.file)


def test_engine_without_gain_names_the_sample_to_use(run_here, recommended):
    del recommended.content["settings"][GENAI]
    recommended.write()
    done = run_here("samples/speculative_greedy_lm.py", recommended.main, recommended.draft, PROMPT, "--recommended")
    assert done.returncode == 2 and "samples/speculative_sampling_lm.py --recommended instead" in done.stderr


def test_suffix_decoding_uses_its_own_recommendation(run_here, recommended):
    sample = ("samples/suffix_decoding_lm.py", recommended.main, PROMPT, "--recommended", "--max-new-tokens", 4)
    done = run_here(*sample)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "samples/speculative_sampling_lm.py --recommended instead: for this pair, this method" in done.stderr
    alone = recommended.content["settings"]["alone"]
    recommended.content |= {"best": SUFFIX_KEY, "settings": {"alone": {**alone, "properties": {}}, SUFFIX_KEY: alone}}
    recommended.content |= {"use_draft": False, "draft": None}
    recommended.write()
    done = run_here(*sample)
    assert done.returncode == 0 and "inference in f32" in done.stderr and "recommended by " in done.stderr
    with pytest.raises(ValueError, match="without a draft"):
        recommendation.check(recommendation.read(recommended.file), recommended.main, recommended.draft)


def test_server_with_suffix_decoding_uses_its_or_main_alone_settings(recommended, monkeypatch):
    settings = recommended.content["settings"]
    monkeypatch.setattr(sys, "argv", ["serve_pair.py", str(recommended.main), "--suffix-decoding", "--recommended"])
    assert serving_arguments.parse("").pair.main.properties == settings["alone"]["properties"]
    settings[SUFFIX_KEY] = {"device": "CPU", "properties": {"KV_CACHE_PRECISION": "f32"}, "max_ngram_size": 16}
    recommended.write()
    assert serving_arguments.parse("").pair.main.properties == {"KV_CACHE_PRECISION": "f32"}


@pytest.mark.parametrize(
    ("engine", "given", "of_draft"),
    [
        (NATIVE, [], {"A": "1"}),
        (NATIVE, ["--draft-device", "GPU"], {}),
        (NATIVE, ["--device", "GPU.0", "--draft-device", "GPU.1"], {"A": "1"}),
        (NATIVE, ["--draft-device", "GPU", "--draft-property", "B=2"], {"B": "2"}),
        (GENAI, ["--draft-device", "GPU"], {"A": "1"}),
        (GENAI, ["--draft-device", "NPU"], {}),
    ],
)
def test_draft_inherits_main_model_properties_on_same_device(engine, given, of_draft):
    parser = Parser()
    for name in ("--device", "--draft-device", "--property", "--draft-property"):
        parser.add_argument(name, **pipeline_arguments.ARGUMENTS[name])
    args = parser.parse_args(["--property", "A=1", *given])
    args.property = {name: str(value) for name, value in args.property}
    found = pipeline_arguments.draft_properties(args, engine)
    assert {name: str(value) for name, value in found.items()} == of_draft


def test_recommended_draft_without_properties_inherits_none(recommended, monkeypatch):
    settings = recommended.content["settings"]
    settings[NATIVE] |= {"draft_device": "CPU"}
    recommended.write()
    argv = ["serve_pair.py", str(recommended.main), str(recommended.draft), "--recommended"]
    monkeypatch.setattr(sys, "argv", argv)
    pair = serving_arguments.parse("").pair
    assert pair.main.properties == {"EXECUTION_MODE_HINT": "ACCURACY"} and pair.draft.properties == {}
    settings[NATIVE] |= {"draft_device": "GPU", "draft_properties": settings[NATIVE]["properties"]}
    recommended.write()  # the same ones, on another kind of device
    assert serving_arguments.parse("", elsewhere=True).pair.draft.properties == {"EXECUTION_MODE_HINT": "ACCURACY"}


@pytest.mark.parametrize("with_suffix_decoding", [True, False])
def test_recommendation_can_combine_draft_and_suffix_decoding(run_here, recommended, monkeypatch, with_suffix_decoding):
    chosen = recommended.content["settings"][NATIVE]
    chosen |= {"num_assistant_tokens": 0, "assistant_confidence_threshold": 0.0, "draft_device": "CPU"}
    chosen |= {"max_ngram_size": 16} if with_suffix_decoding else {}
    recommended.write()
    pair = [str(recommended.main), str(recommended.draft)]
    done = run_here("samples/speculative_sampling_lm.py", *pair, "a = 1\n" * 20, "--temperature", 0, "--recommended")
    assert done.returncode == 0 and ("draft model and suffix decoding: " in done.stderr) == with_suffix_decoding
    for switch, expected in (
        ((), with_suffix_decoding),
        (["--no-suffix-decoding"], False),
        (["--suffix-decoding"], True),
    ):
        monkeypatch.setattr(sys, "argv", ["serve_pair.py", *pair, "--recommended", *switch])
        assert serving_arguments.parse("").pair.suffix_decoding == expected


def test_fingerprints_differ_and_each_engine_has_a_sample():
    assert recommendation.fingerprint(MAIN) == recommendation.fingerprint(MAIN) != recommendation.fingerprint(DRAFT)
    assert set(recommendation.SAMPLE_OF) == {"alone", SUFFIX_KEY, GENAI, NATIVE}
    for sample in recommendation.SAMPLE_OF.values():
        assert (ROOT / "samples" / sample).exists()


# ---- text quality of a setting --------------------------------------------------------------------------------------


def test_reference_drops_numeric_properties():
    given = (("INFERENCE_NUM_THREADS", 2), ("INFERENCE_PRECISION_HINT", "bf16"), ("KV_CACHE_PRECISION", "u4"))
    both, apart = PropertySet("CPU", "CPU", given, given), PropertySet("CPU", "NPU", given, given[:2])
    assert both.exact.properties == both.exact.draft_properties == (*EXACT, given[0])
    assert apart.exact == PropertySet("CPU", "NPU", (*EXACT, given[0]), given[:1])


@pytest.fixture(scope="module")
def exact():
    """The main model in f32 and one text of it."""
    model = cached_model.load(ModelSpec(MAIN, "CPU", {"EXECUTION_MODE_HINT": "ACCURACY"}), capacity=128)
    return model, text_quality.reference_text(model, np.arange(40, 50), 24)


def test_reference_against_itself_is_exact(exact):
    model, reference = exact
    quality = text_quality.judge(model, [reference])
    assert (quality.grade, quality.agreement, quality.tokens) == ("exact", 1, 24)
    assert quality.mean_kl < 1e-6
    assert text_quality.first_difference(reference, reference.tokens.tolist()) is None


def test_default_properties_fit_and_other_model_does_not(exact):
    default = text_quality.judge(cached_model.load(MAIN, capacity=128), [exact[1]])
    other = text_quality.judge(cached_model.load(DRAFT, capacity=128), [exact[1]])
    assert default.fits() and 0 < default.mean_kl < text_quality.MAX_KL
    assert other.grade == "loss" and not other.fits(default) and other.mean_kl > 10 * default.mean_kl
    assert f"{len(other.margins)} of 24 tokens differ" in str(other)


def test_reference_text_is_compact_and_judges_like_full_logits():
    random = np.random.default_rng(0)
    ids = np.arange(16)
    by_rank = -1.6 * np.log(np.arange(1, 151_937))  # the likeliest 1,024 tokens have 98 % of the probability
    logits = np.array([random.permutation(by_rank) for _ in ids], np.float32)
    tokens = logits.argmax(axis=1)
    reference = ReferenceText.of(ids, tokens, logits)
    assert len(pickle.dumps(reference)) < logits.nbytes / 40

    other = (logits + 0.2 * random.standard_normal(logits.shape)).astype(np.float32)
    model = SimpleNamespace(logits=lambda text, last: other[len(text) - 15 - last : len(text) - 15])
    p, q = (text_quality._log_softmax(one) for one in (logits, other))
    whole = float((np.exp(p) * (p - q)).sum(axis=1).mean())
    assert text_quality.judge(model, [reference]).mean_kl == pytest.approx(whole, rel=0.05) and whole > 0.001

    second = int(reference.likeliest[0, 1])
    assert reference.margin(0, second) == pytest.approx(float(logits[0].max() - logits[0, second]), abs=1e-4)
    assert reference.margin(0, int(logits[0].argmin())) > reference.margin(0, second)


def test_near_tie_is_not_a_real_difference():
    logits = np.array([[0, 1.0, 0.8, -3], [2.0, 0, 0, -3]])
    reference = ReferenceText.of(np.array([7]), np.array([1, 0]), logits)
    assert text_quality.first_difference(reference, [2, 0]) == (0, pytest.approx(0.2))
    assert text_quality.first_difference(reference, [1, 2]) == (1, 2.0)
    assert text_quality.first_difference(reference, [1]) is None
    grades = [Quality(100, margins, 0.001).grade for margins in ([], [0.2], [2.0], [2.0, 3.0])]
    assert grades == list(text_quality.GRADES)
    assert Quality(100, [], 0.02).grade == "loss"
    assert Quality(100, [2.0, 3.0], 0.02).fits(Quality(100, [2.0, 2.0], 0.02))  # no worse than the default
