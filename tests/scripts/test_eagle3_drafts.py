"""The programs with an EAGLE-3 head as draft: they run, report what they skip, or exit with a one-sentence error.

The pair is tiny: nothing depends on a speed, and hardly any draft token is accepted.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import openvino
import pytest

from convert import export_model_server
from scripts import benchmark, benchmark_batching, benchmark_costs, device_swap, sweep_draft_length, verify_lossless
from speculative.bench.cluster.hosts import Place
from speculative.bench.decoding_worker import WorkerPipeline
from speculative.bench.devices import cell as device_cell
from speculative.bench.devices.matrix import Device
from speculative.bench.load.batch_methods import Batch
from speculative.bench.tuning.finals import Finals
from speculative.bench.tuning.lengths import LengthStage
from speculative.bench.tuning.session import Session
from speculative.bench.tuning.settings import PropertySet, Setting
from speculative.bench.tuning.worker import TuningWorker
from speculative.convert.model_server_graph import read_graph
from speculative.drafting.policy import Costs
from speculative.models.cached_model import CachedModel
from speculative.models.eagle3_head import EagleHead
from speculative.pair import weights
from speculative.pair.engines import GENAI, NATIVE
from speculative.serving import arguments as serving_arguments
from tests.support.paths import DRAFT, MAIN
from tests.support.tiny_eagle3 import EXACT, KNOWN, save_head, save_tiny_eagle3_pair, tiny_head

PROMPT = "def f(x):"
IDS = np.arange(1, 9)
IN_F32 = ("--property", "EXECUTION_MODE_HINT=ACCURACY", "--max-new-tokens", 8)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return save_tiny_eagle3_pair(tmp_path_factory.mktemp("eagle3"))


@pytest.fixture(scope="module")
def layerless(tmp_path_factory):
    """A pair whose head does not say which layers it reads, and whose main model has too few for GenAI to choose."""
    return save_tiny_eagle3_pair(tmp_path_factory.mktemp("layerless"), layers=[])


def parsed(program, monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", [program.__name__, *map(str, arguments)])
    return program.parse_arguments()


def last_line(process):
    return json.loads(process.stdout.splitlines()[-1])


# ---- benchmark.py ---------------------------------------------------------------------------------------------------


def test_benchmark_skips_draft_alone_and_hidden_states_of_main_alone(pair, monkeypatch):
    arguments = parsed(benchmark, monkeypatch, *pair, "-k", 4, "--tree-depth", 3, *IN_F32)
    (sentence,) = benchmark.leave_out_paths(arguments)
    assert sentence == f"Path draft is left out: {pair[1]} is an EAGLE-3 draft, which cannot decode alone."
    jobs = {job.name: job for job in benchmark.jobs(arguments)}
    assert list(jobs) == [
        "GenAI, main alone", "GenAI with the draft", "GenAI, prompt lookup", "ours, main alone", "ours with the draft",
    ]  # fmt: skip
    assert [name for name, *_ in jobs["GenAI with the draft"].methods] == [
        "GenAI, K = 4", "GenAI, K = 4, tree 3 x 4",
    ]  # fmt: skip
    methods = []
    for job in jobs.values():
        worker = WorkerPipeline()
        worker.load(job)
        if job.engine == NATIVE:
            assert len(worker.engine.models) == (2 if job.draft else 1)
            assert (worker.engine.main.hidden_states is not None) == bool(job.draft)
        for name, *_ in job.methods:
            method = worker.methods[name]
            method.rounds.append([method.decode(IDS)])
            methods.append(method)
    rows = {row["name"]: row for row in benchmark.summarise(methods, keeps_caches=False)}
    assert len(rows) == 16 and {"ours, draft and suffix decoding", "ours, sampled, draft and suffix decoding"} <= set(
        rows
    )
    assert all(row["same_text"] == 1 for row in rows.values() if not row["sampled"])
    chain, tree = rows["GenAI, K = 4"], rows["GenAI, K = 4, tree 3 x 4"]
    assert len(chain["position_acceptance"]) == 4 and tree["position_acceptance"] == []  # several tokens per position
    assert tree["acceptance_rate"] is not None
    arguments.paths = ["lookup"]
    assert [job.name for job in benchmark.jobs(arguments)] == [
        "GenAI, main alone", "GenAI, prompt lookup", "ours, main alone",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--paths", "draft"), "is an EAGLE-3 draft, which cannot decode alone"),
        (("--paths", "engine", "--draft-device", "NPU"), "run both on a CPU or GPU, not on NPU"),
        (("--tree-depth", "9"), "--tree-depth 9 needs the path genai and a -k that is not less"),
    ],
)
def test_benchmark_without_possible_path_is_rejected(options, words, pair, monkeypatch, capsys):
    arguments = parsed(benchmark, monkeypatch, *pair, *options)
    with pytest.raises(SystemExit, match="2"):
        benchmark.leave_out_paths(arguments)
    assert words in capsys.readouterr().err


def test_tree_benchmark_requires_eagle3_draft(monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        benchmark.leave_out_paths(parsed(benchmark, monkeypatch, MAIN, DRAFT, "--tree-depth", 3))
    assert "GenAI drafts trees with EAGLE-3 drafts only" in capsys.readouterr().err


def test_genai_is_skipped_if_it_cannot_find_the_layers(layerless, monkeypatch):
    arguments = parsed(benchmark, monkeypatch, *layerless)
    sentences = benchmark.leave_out_paths(arguments)
    assert arguments.paths == ["lookup", "engine", "sampled"]
    assert "needs a main model of 10 layers or more for a head without hidden_layers_list" in sentences[1]

    arguments = parsed(benchmark_batching, monkeypatch, *layerless)
    names = [job["name"] for job in benchmark_batching.jobs(arguments, [PROMPT])]
    assert names == ["GenAI, main alone", "ours, main alone", "ours, draft"]

    arguments = parsed(verify_lossless, monkeypatch, *layerless)
    (sentence,) = verify_lossless.leave_out(arguments)
    assert arguments.paths == ["engine", "lookup"] and "10 layers or more" in sentence


# ---- the other measuring programs -----------------------------------------------------------------------------------


def test_sweep_baseline_has_no_hidden_states(pair, monkeypatch):
    arguments = parsed(sweep_draft_length, monkeypatch, *pair, "-k", "2", *IN_F32)
    methods, ours = sweep_draft_length.load(arguments, [])
    sweep_draft_length.MeasuredCosts(ours.main, ours.draft.model, [2], 20).measure()
    alone, drafted = methods
    assert alone.decode(IDS).tokens == drafted.decode(IDS).tokens
    assert [len(seconds) for seconds in alone.seconds] == [8] and len(drafted.seconds) == 2
    row = benchmark_costs.inference_costs(64, ours.main, ours.draft.model, 1)
    assert row["draft"] > 0


def test_hidden_state_projection_is_counted_with_main_model(pair):
    apart = [weights.read(openvino.Core().read_model(folder / "openvino_model.xml")) for folder in pair]
    main, head = weights.read_pair(*pair)
    moved = main.bytes_per_step - apart[0].bytes_per_step
    table = 8 * len(KNOWN)  # of token ids, which no forward pass reads
    assert moved == apart[1].bytes_per_step - head.bytes_per_step - table > 32 * 3 * 32


def test_devices_without_paged_attention_are_absent_cells(pair, monkeypatch):
    arguments = parsed(device_swap, monkeypatch, *pair, "--engine", "native", "-k", 2, *IN_F32)
    devices = {name: Device(name, name) for name in ("CPU", "NPU")}
    cells = device_swap.plan(arguments, [Place(devices, None, [])], [[1, 2, 3]])
    absent = {cell.name for cell in cells if cell.status == "absent"}
    assert absent == {f"main on {a}, draft on {b}" for a, b in (("CPU", "NPU"), ("NPU", "CPU"), ("NPU", "NPU"))}
    assert "run both on a CPU or GPU, not on NPU" in next(cell.reason for cell in cells if cell.status == "absent")
    job = next(cell.job for cell in cells if cell.draft and cell.status != "absent")
    arguments.engine = GENAI
    cells = device_swap.plan(arguments, [Place(devices, None, [])], [[1, 2, 3]])
    reasons = {cell.name: cell.reason for cell in cells if cell.status == "absent"}
    assert set(reasons) == {"main on CPU, draft on NPU", "main on NPU, draft on CPU"}
    assert "both on an NPU or neither, not on CPU and NPU" in reasons["main on CPU, draft on NPU"]
    alone, drafted = device_cell._native_methods(job)
    assert alone.decode(IDS).tokens == drafted.decode(IDS).tokens


def test_verify_lossless_supports_eagle3_head(pair, run_here):
    small = ("--draws", 100, "--tokens", 1, "--max-new-tokens", 8, "-k", 2, "--paths", "engine")
    done = run_here("scripts/verify_lossless.py", *pair, *small)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row for kind in ("greedy", "sampled") for row in last_line(done)[kind] if "draft" in row["path"]]
    assert len(rows) == 6 and all(row["holds"] for row in rows)
    assert rows[0]["path"] == "engine draft, K = 2" and rows[0]["acceptance_rate"] is not None


def test_batching_supports_eagle3_head(pair):
    job = {"main": str(pair[0]), "draft": str(pair[1]), "device": "CPU", "draft_device": "CPU", "properties": EXACT}
    job |= {"prompts": [PROMPT], "max_new_tokens": 8, "cache_tokens": 512, "huge_pages": False, "texts": 2}
    texts = []
    for engine, k in ((NATIVE, 0), (GENAI, 2)):
        batch = Batch()
        batch.load({**job, "engine": engine})
        span = batch.run(k, 2, 0.1, 0)
        texts.append({answer.number: answer.text for answer in span.answers})
    common = texts[0].keys() & texts[1].keys()
    assert common and all(texts[0][number] == texts[1][number] for number in common)


def test_smoke_supports_eagle3_head(pair, run_here):
    done = run_here("scripts/smoke.py", *pair, "--min-acceptance", 0, "--max-new-tokens", 8, "--prompt", PROMPT)
    assert done.returncode == 0, done.stdout
    assert last_line(done)["engine"]["acceptance_rate"] is not None


# ---- tune.py --------------------------------------------------------------------------------------------------------


def test_tuning_loads_main_model_with_hidden_states_for_head(pair):
    """Property sets that differ only in the head's properties share one main model."""
    worker = TuningWorker(pair[0], 128)
    usual = PropertySet("CPU", "CPU", tuple(EXACT.items()), tuple(EXACT.items()))
    other = usual.with_draft_properties((("INFERENCE_NUM_THREADS", "2"),))
    assert worker.load_models(usual, [pair[1]]) and worker.load_models(other, [pair[1]])
    assert sorted(type(model).__name__ for model in worker.models._loaded.values()) == ["CachedModel"] + 2 * [
        "EagleHead"
    ]
    main, head = worker.models.pair(usual, pair[1])
    assert isinstance(main, CachedModel) and isinstance(head, EagleHead)
    width, capacity = worker.room(usual, pair[1])
    assert (width, capacity) == (main.vocab_size, 128)
    tokens = (np.arange(30) * 7919 + 1) % width
    for models in (usual, other, usual):
        assert min(worker.iteration(models, pair[1], tokens, 3)) > 0
    worker.forget(usual, pair[1])

    costs = Costs(0.001, {1: 1.0, 2: 1.1, 6: 1.2, 17: 2.0})
    settings = [Setting(usual, NATIVE), *(Setting(usual, NATIVE, pair[1], k) for k in (3, 0.5, "adaptive"))]
    texts = [worker.decode(one, IDS, 12, costs if one.draft_length == "adaptive" else None) for one in settings]
    assert all(run.tokens == texts[0].tokens for run in texts) and sum(texts[1].proposed) > 12
    assert worker.models.pair(usual, None)[0].hidden_states is None  # what the draft is compared with
    worker.keep([settings[0]], [])
    assert len(worker.models._loaded) == 1
    with pytest.raises(ValueError, match="run both on a CPU or GPU, not on NPU"):
        worker.load_models(PropertySet("CPU", "NPU"), [pair[1]])


def test_tuning_tries_genai_only_if_it_supports_the_head(pair, layerless, monkeypatch):
    for (main, head), engines in ((pair, {GENAI, NATIVE}), (layerless, {NATIVE})):
        arguments = argparse.Namespace(main=main, drafts=[head], minutes=1, devices=["CPU"], property=[])
        session = Session(arguments, [], [SimpleNamespace(machine=None, name="here")])
        session.clock.bar.close()
        session.fastest = [session.default]
        session.costs[session.default, head] = Costs(0.0001, {1: 0.0001, 17: 0.0002})
        monkeypatch.setattr(LengthStage, "lengths", lambda *_: [3])
        settings = [*LengthStage(session).settings(), *Finals(session).finalists()]
        assert {one.engine for one in settings if one.draft} == engines
        assert any(one.engine == GENAI for one in settings)
        assert ["10 layers or more" in why for why in session.failed.values()] == [True] * (engines == {NATIVE})


# ---- errors of programs, and samples --------------------------------------------------------------------------------


def test_unsupported_draft_or_device_is_rejected_before_loading(pair, layerless, run_here):
    on_npu = "paged attention: run both on a CPU or GPU, not on AUTO"
    for words, program, *arguments in (
        ("is an EAGLE-3 draft, which cannot decode alone", "scripts/cache_precision.py", pair[1]),
        (on_npu, "scripts/sweep_draft_length.py", *pair, "--draft-device", "AUTO"),
        (on_npu, "samples/speculative_sampling_lm.py", *pair, PROMPT, "--device", "AUTO"),
        ("GenAI drafts trees with EAGLE-3", "samples/speculative_greedy_lm.py", MAIN, DRAFT, PROMPT, "--tree-depth", 3),
        ("-k 5 is less than --tree-depth 6", "samples/speculative_greedy_lm.py", *pair, PROMPT, "--tree-depth", 6),
        ("10 layers or more", "samples/speculative_greedy_lm.py", *layerless, PROMPT),
        ("10 layers or more", "scripts/device_swap.py", *layerless),
        ("10 layers or more", "scripts/sweep_draft_length.py", *layerless, "--engine", "genai"),
        ("10 layers or more", "scripts/smoke.py", *layerless),
    ):  # fmt: skip
        done = run_here(program, *arguments)
        assert done.returncode == 2 and words in done.stderr, (program, done.stderr)
        assert done.stderr.count("\n") == 1 and done.stdout == ""


def test_server_rejects_head_without_paged_attention(pair, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["serve_pair.py", *map(str, pair), "--draft-device", "AUTO"])
    with pytest.raises(SystemExit, match="2"):
        serving_arguments.parse("")
    assert "run both on a CPU or GPU, not on AUTO" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["serve_pair.py", *map(str, pair)])
    assert serving_arguments.parse("").pair.draft.folder == pair[1]


def test_sample_supports_tree_drafting(pair, run_here):
    options = ("--max-new-tokens", 12, "--property", "EXECUTION_MODE_HINT=ACCURACY")
    chain = run_here("samples/speculative_greedy_lm.py", *pair, PROMPT, *options)
    tree = run_here(
        "samples/speculative_greedy_lm.py", *pair, PROMPT, *options, "--tree-depth", 2, "--branching-factor", 2, "-k", 5
    )
    assert tree.returncode == 0, tree.stderr
    assert tree.stdout == chain.stdout and "draft tokens)" in tree.stderr and tree.stderr != chain.stderr


def test_chat_supports_eagle3_head(pair, run_here):
    done = run_here("samples/speculative_chat.py", *pair, "--max-new-tokens", 8, "-k", 2, stdin="Hello\n/k\n/quit\n")
    assert done.returncode == 0, done.stderr
    assert "acceptance rate" in done.stderr and "K = 2: always 2 draft tokens" in done.stderr


def test_check_pair_names_engines_that_cannot_run_the_head(layerless, run_here, tmp_path):
    done = run_here("scripts/check_pair.py", *layerless, "--json")
    found = {finding["what"]: finding for finding in last_line(done)["findings"]}
    assert done.returncode == 0 and found["engine"]["level"] == "warning"
    assert found["engine"]["message"].startswith("not in GenAI's pipeline: GenAI's pipeline needs a main model of 10")
    other = save_head(tmp_path / "other", replace(tiny_head(seed=5), layers=[0, 1, 9]))
    done = run_here("scripts/check_pair.py", layerless[0], other, "--json")
    found = {finding["what"]: finding for finding in last_line(done)["findings"]}
    assert done.returncode == 1 and "has only layers 0 to 3" in found["hidden states"]["message"]
    done = run_here("scripts/check_pair.py", *layerless, "--json", "--draft-device", "AUTO")
    findings = [one for one in last_line(done)["findings"] if one["what"] == "engine"]
    assert done.returncode == 1 and [one["level"] for one in findings] == ["error", "error"]


# ---- export_model_server.py -----------------------------------------------------------------------------------------


def test_model_server_export_limits_requests_and_skips_work_folder(pair, layerless, tmp_path, capsys):
    (pair[1] / "work").mkdir()
    (pair[1] / "work/large").write_text("of the training", encoding="utf-8")
    out = tmp_path / "served"
    assert export_model_server.main([str(pair[0].parent), str(out), "--name", "served"]) == 0
    options = read_graph((out / "served/graph.pbtxt").read_text(encoding="utf-8"))
    assert options.max_num_seqs == 1 and options.draft_models_path == "./draft" and not options.enable_prefix_caching
    assert (out / "served/draft/openvino_model.xml").is_file() and not (out / "served/draft/work").exists()
    assert "With an EAGLE-3 draft the server takes one request at a time" in (out / "README.md").read_text(
        encoding="utf-8"
    )
    for arguments, words in (
        ((pair[0].parent, tmp_path / "npu", "--device", "NPU"), "takes no EAGLE-3 draft on an NPU"),
        ((layerless[0].parent, tmp_path / "layerless"), "10 layers or more"),
    ):
        assert export_model_server.main(list(map(str, arguments))) == 2
        assert words in capsys.readouterr().err and not Path(arguments[1]).exists()
