"""The benchmark pair: the embedded main model at another shape, and a draft with the requested acceptance rate."""

import hashlib
import json
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import openvino as ov
import pytest
from openvino._offline_transformations import paged_attention_transformation

from scripts import make_benchmark_pair as program
from speculative.modelgen import eagle3_ir, expansion, llama_ir
from speculative.modelgen.expansion import Shape
from speculative.models import eagle3_head
from speculative.models.spec import ModelSpec
from tests.support.in_process import run_here as run_in_process
from tests.support.killing import killed_at_rename
from tests.support.paths import MAIN, ROOT
from tests.support.waiting import PATIENCE, wait_until, wait_until_loaded

PROGRAM = "scripts/make_benchmark_pair.py"
SMALL = Shape(11, 640, 10, 5, 64, 1500, 5000, 0)
SMALL_TEXT = "layers=11,hidden=640,heads=10,kv_heads=5,head_dim=64,intermediate=1500,vocabulary=5000,tied=0"
TOKENS = np.array([[5, 9, 100, 300, 4000, 17, 18, 2048, 77, 1]])
SHORT = replace(SMALL, layers=3)
SAME = 2e-4  # of logits up to 16: f32 sums in another order differ by 2e-5


@pytest.fixture(scope="module")
def source():
    return llama_ir.read(MAIN)


@pytest.fixture(scope="module")
def short(source):
    """The source's first two layers, which OpenVINO compiles in a fifth of the time, and their logits."""
    llama = replace(source, layers=source.layers[:2])
    return llama, run_model(llama_ir.build(llama))


def grow(source, shape, seed=0):
    return expansion.expand(source, shape, np.random.default_rng(seed), lambda: None)


def run_model(model):
    """Logits float32 [10, V] in f32: of seven tokens in one pass, then of three with the KV cache."""
    request = ov.Core().compile_model(model, "CPU", {"EXECUTION_MODE_HINT": "ACCURACY"}).create_infer_request()
    rows = []
    for begin, end in ((0, 7), (7, 10)):
        inputs = {
            "input_ids": TOKENS[:, begin:end],
            "attention_mask": np.ones((1, end), np.int64),
            "position_ids": np.arange(begin, end)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        rows.append(request.infer(inputs)["logits"][0].copy())
    return np.concatenate(rows)


WHOLE = {"the same": Shape(10, 512, 8, 4, 64, 1408, 4096, 1), "wider, deeper, untied": SMALL}
SHAPES = {  # of the short source
    "larger heads": Shape(2, 576, 12, 4, 80, 1408, 4096, 1),
    "a key head for every query head": Shape(2, 512, 9, 9, 64, 1408, 4097, 1),
    "more query heads for each key head": Shape(4, 512, 16, 4, 64, 1600, 4200, 1),
}


@pytest.mark.parametrize("shape", WHOLE.values(), ids=WHOLE.keys())
def test_expanded_model_computes_the_same_logits(source, shape):
    assert_same_function(grow(source, shape), shape, run_model(ov.Core().read_model(MAIN / "openvino_model.xml")))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_any_expanded_shape_computes_the_same_logits(short, shape):
    assert_same_function(grow(short[0], shape), shape, short[1])


def assert_same_function(grown, shape, expected):
    assert expansion.shape_of(grown) == shape
    logits = run_model(llama_ir.build(grown))
    assert np.abs(logits[:, :4096] - expected).max() < SAME
    assert logits[:, 4096:].max(initial=-1e9) < -1000  # ids beyond the tokenizer's


def test_errors_of_added_layers_stay_small(short):
    """Rounding makes the zeros that they compute small numbers."""
    grown = grow(short[0], replace(SMALL, layers=12))
    for layer in grown.layers[2:]:
        layer.v.values[:] = np.minimum(layer.v.values, 254) + 1
    assert np.abs(run_model(llama_ir.build(grown))[:, :4096] - short[1]).max() < SAME


@pytest.fixture(scope="module")
def small_head():
    return eagle3_ir.read(ROOT / "models/embedded/eagle3")


def test_head_that_is_read_and_written_again_is_the_same(small_head, tmp_path):
    program.write_head(small_head, tmp_path / "head", 4096)
    for name in ("openvino_model.bin", "config.json"):
        ours, original = (folder / name for folder in (tmp_path / "head", ROOT / "models/embedded/eagle3"))
        if name == "config.json":
            assert json.loads(ours.read_text()) == json.loads(original.read_text()) | {"max_position_embeddings": 8192}
        else:
            assert ours.read_bytes() == original.read_bytes()


HEAD_SHAPES = {
    "same head size": replace(SMALL, layers=1, vocabulary=3000),
    "larger heads": Shape(1, 576, 12, 4, 80, 1408, 5000, 0),
}


@pytest.mark.parametrize("shape", HEAD_SHAPES.values(), ids=HEAD_SHAPES.keys())
def test_expanded_head_computes_the_same_logits(source, small_head, tmp_path, shape):
    """Beside an expanded main model: after verified tokens, and after two draft tokens."""
    deep = replace(shape, layers=10, vocabulary=5000)
    program.write_model(grow(source, deep), tmp_path / "main")
    grown = expansion.expand_head(small_head, shape, 5000, np.random.default_rng(1))
    program.write_head(grown, tmp_path / "head", 5000)
    assert expansion.shape_of_head(grown) == shape
    expected, targets = draft_logits(MAIN, ROOT / "models/embedded/eagle3")
    logits, grown_targets = draft_logits(tmp_path / "main", tmp_path / "head")
    assert len(set(grown_targets)) == shape.vocabulary
    places = grown_targets.searchsorted(targets)
    assert (grown_targets[places] == targets).all()
    assert np.abs(logits[:, places] - expected).max() < SAME
    assert np.delete(logits, places, axis=1).max() < -1000  # added tokens


def draft_logits(main, head):
    """Logits of the draft vocabulary after 8, 9 and 10 of the tokens, of which the main model knows 7; their tokens."""
    exact = {"EXECUTION_MODE_HINT": "ACCURACY"}
    model, draft = eagle3_head.load(ModelSpec(main, properties=exact), ModelSpec(head, properties=exact), capacity=64)
    model.logits(TOKENS[0, :7])
    return np.concatenate([draft.logits(TOKENS[0, :n]).copy() for n in (8, 9, 10)]), draft.targets


@pytest.mark.parametrize("key", ["q", "k", "v", "o", "gate", "up", "down"])
def test_misplaced_weight_changes_the_logits(short, key):
    grown = grow(short[0], SHORT)
    values = getattr(grown.layers[1], key).values
    values[:64, :64] = np.random.default_rng(1).permutation(values[:64, :64].ravel()).reshape(64, 64)
    assert np.abs(run_model(llama_ir.build(grown))[:, :4096] - short[1]).max() > 10 * SAME


@pytest.mark.parametrize("part", ["epsilon", "norm scale", "attention scale", "frequencies", "new rows"])
def test_uncorrected_parameter_changes_the_logits(short, part):
    grown = grow(short[0], SHORT)
    if part == "epsilon":
        grown = replace(grown, epsilon=1e-2)
    elif part == "norm scale":
        grown = replace(grown, norm=grown.norm * np.float32(np.sqrt(640 / 512)))
    elif part == "attention scale":
        grown = replace(grown, attention_scale=80**-0.5)
    elif part == "frequencies":
        grown = replace(grown, frequencies=grown.frequencies[::-1].copy())
    else:
        grown.layers[0].down.values[512:] = 90  # something written to the new hidden channels
    assert np.abs(run_model(llama_ir.build(grown))[:, :4096] - short[1]).max() > 10 * SAME


def matrices(model):
    named = {"embedding": model.embedding, "head": model.head}
    for i, layer in enumerate(model.layers):
        named |= {f"{key} {i}": getattr(layer, key) for key in llama_ir.MATRICES}
    return {name: matrix for name, matrix in named.items() if matrix is not None}


def test_free_weights_are_random_and_matrices_differ(source):
    one, other = (matrices(grow(source, SMALL, seed)) for seed in (0, 1))
    hashes = {hashlib.sha256(matrix.values.tobytes()).digest() for matrix in one.values()}
    assert len(hashes) == len(one) == 2 + 7 * 11
    for name, matrix in one.items():
        if not name.startswith(("embedding", "o ", "down ")):  # these read the hidden channels, the new ones always 0
            new = matrix.values[:, 512:] == matrix.zero_points
            assert new.mean() < 0.02, name
            assert (matrix.values[:, 512:] != other[name].values[:, 512:]).mean() > 0.9, name
    for name in ("q 10", "gate 10", "o 10", "down 10", "head"):  # and these of the added layer are free as a whole
        rows = slice(4096, None) if name == "head" else slice(None)
        assert (one[name].values[rows] == one[name].zero_points[rows]).mean() < 0.02, name
    zero = sum((matrix.values == matrix.zero_points).sum() for matrix in one.values())
    assert zero / SMALL.parameters < 0.2


@pytest.mark.parametrize("shape", [SHORT, SHAPES["a key head for every query head"]], ids=["grouped", "one to one"])
def test_openvino_fuses_ops_and_supports_paged_attention(short, shape):
    def kinds(model):
        runtime = ov.Core().compile_model(model, "CPU").get_runtime_model()
        return Counter(node.get_rt_info()["layerType"].value for node in runtime.get_ordered_ops())

    model = llama_ir.build(grow(short[0], shape))
    fused = kinds(model.clone())
    assert (fused["ScaledDotProductAttention"], fused["RMS"]) == (shape.layers, 2 * shape.layers + 1)
    assert fused["RoPE"] == 2 * shape.layers and fused["FullyConnected"] == 7 * shape.layers + 1
    paged_attention_transformation(model)
    names = [port.any_name for port in model.inputs]
    assert names.count("position_ids") == 1 and "beam_idx" not in names and "attention_mask" not in names
    assert {"past_lens", "block_indices", f"value_cache.{shape.layers - 1}"} <= set(names)
    assert kinds(model)["PagedAttention"] == shape.layers


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = (ROOT / "scripts/prompts/embedded_code.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[:2]), encoding="utf-8")
    return path


def make(out, *arguments, tokens=24):
    process = run_in_process(PROGRAM, out, *arguments, "--max-new-tokens", tokens)
    assert process.returncode == 0, process.stderr
    return process


@pytest.fixture(scope="module")
def made(tmp_path_factory, prompts):
    """A pair of a small shape with a medium draft, and what the program printed."""
    out = tmp_path_factory.mktemp("pairs") / "medium"
    return out, make(out, "--shape", SMALL_TEXT, "--acceptance", "0.5", "--prompts", prompts)


def test_pair_matches_its_description(made):
    from speculative.pair.check import check_pair

    out, process = made
    assert [path.name for path in sorted(out.parent.iterdir())] == ["medium"]  # no temporary folder left
    pair = json.loads((out / "pair.json").read_text(encoding="utf-8"))
    assert json.loads(process.stdout.splitlines()[-1]) == pair
    assert pair["kind"] == "benchmark pair"
    assert "benchmark pair" in process.stdout.splitlines()[0] and "benchmark pair" in (out / "README.md").read_text()
    assert pair["same_greedy_tokens"] == {"equal": 48, "compared": 48}
    assert pair["main"]["shape"] == vars(SMALL)
    for role in ("main", "draft"):
        size = (out / role / "openvino_model.bin").stat().st_size
        assert pair[role]["bytes"] == size
        assert pair[role]["parameters"] <= size < 1.02 * pair[role]["parameters"]
    config = json.loads((out / "main/config.json").read_text(encoding="utf-8"))
    assert (config["vocab_size"], config["hidden_size"], config["head_dim"]) == (5000, 640, 64)
    assert config["max_position_embeddings"] == 8192
    check = check_pair(out / "main", out / "draft")
    assert all(finding.level == "ok" for finding in check.findings)


def test_medium_draft_has_requested_acceptance_rate(made):
    pair = json.loads((made[0] / "pair.json").read_text(encoding="utf-8"))
    assert pair["acceptance"]["asked"] == 0.5
    assert abs(pair["acceptance"]["measured"] - 0.5) < 0.1


def test_useless_and_good_drafts_reuse_the_main_model(made, prompts, tmp_path):
    useless, good, sampled = (tmp_path / name for name in ("useless", "good", "sampled"))
    process = make(useless, "--main-of", made[0], "--acceptance", "0", "--prompts", prompts)
    measured = json.loads(process.stdout.splitlines()[-1])["acceptance"]["measured"]
    assert measured < 0.05
    weights = "main/openvino_model.bin"
    assert (useless / weights).stat().st_size == (made[0] / weights).stat().st_size
    process = make(good, "--main-of", useless, "--acceptance", "1", "--prompts", prompts, tokens=32)
    measured = json.loads(process.stdout.splitlines()[-1])["acceptance"]["measured"]
    assert measured > 0.75
    assert "layers=10" in process.stderr  # the shape needed for a higher rate
    sampling = ("--acceptance", "1", "--temperature", "1.5", "--prompts", prompts)
    process = make(sampled, "--main-of", useless, *sampling, tokens=32)
    acceptance = json.loads(process.stdout.splitlines()[-1])["acceptance"]
    assert acceptance["temperature"] == 1.5 and 0.2 < acceptance["measured"] != measured


def test_eagle3_heads_draft_for_the_main_model(made, prompts, tmp_path):
    eagle3 = ("--main-of", made[0], "--eagle3", "--prompts", prompts)
    best, noisy = (
        json.loads(make(tmp_path / name, *eagle3, *acceptance, tokens=48).stdout.splitlines()[-1])
        for name, acceptance in (("best", ()), ("noisy", ("--acceptance", "0.4")))
    )
    assert best["draft"]["noise"] == 0 and best["acceptance"]["asked"] is None
    assert noisy["draft"]["noise"] > 0 and abs(noisy["acceptance"]["measured"] - 0.4) < 0.1
    assert best["acceptance"]["measured"] > noisy["acceptance"]["measured"] + 0.05
    assert noisy["draft"]["kind"] == "EAGLE-3 head"
    assert noisy["draft"]["shape"] == vars(replace(SMALL, layers=1))
    assert noisy["draft"]["parameters"] <= (tmp_path / "noisy/draft/openvino_model.bin").stat().st_size


def test_eagle3_head_has_the_vocabulary_of_published_heads(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [PROGRAM, str(tmp_path / "out"), "--shape", "Qwen3-1.7B", "--eagle3"])
    arguments = program.parse_arguments()
    assert arguments.draft_shape == replace(program.SHAPES["Qwen3-1.7B"], layers=1, vocabulary=32_000, tied=0)
    assert arguments.acceptance is None


def test_head_of_a_benchmark_pair_is_not_expanded_again(small_head, tmp_path):
    grown = expansion.expand_head(small_head, replace(SMALL, layers=1), 5000, np.random.default_rng(0))
    program.write_head(grown, tmp_path / "head", 5000)
    with pytest.raises(ValueError, match="bias of its logits"):
        eagle3_ir.read(tmp_path / "head")
    with pytest.raises(ValueError, match="draft vocabulary of 5000 tokens exceeds the main model's 4999"):
        expansion.expand_head(small_head, replace(SMALL, layers=1), 4999, np.random.default_rng(0))


def test_long_texts_are_not_truncated(made):
    import openvino_genai

    tokenizer = openvino_genai.Tokenizer(str(made[0] / "main"))
    assert tokenizer.encode("def area(radius):\n" * 500).input_ids.shape[1] > 2000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shape", "TinyLama"], "unknown shape 'TinyLama': choose from TinyLlama-1.1B"),
        (["--shape", "layers=4,hidden=1024"], "does not specify heads, kv_heads"),
        (["--shape", "TinyLlama-1.1B,depth=3"], "'depth=3' is not one of layers"),
        (["--shape", "TinyLlama-1.1B,layers=many"], "'layers=many' is not one of layers"),
        (["--shape", "TinyLlama-1.1B,layers=9"], "--shape: layers=9 is too small to hold the function"),
        (["--shape", "TinyLlama-1.1B,kv_heads=2"], "give at least kv_heads=4"),
        (["--shape", "TinyLlama-1.1B,heads=30"], "heads must be a multiple of kv_heads"),
        (["--draft-shape", "TinyLlama-1.1B,layers=3"], "--draft-shape: layers=3 is too small"),
        (["--draft-shape", "Llama-3.2-1B", "--eagle3"], "--draft-shape and --eagle3 exclude each other"),
        (["--draft-shape", "Llama-3.2-1B"], "vocabulary=128256 differs from the main model's 32000"),
        (["--acceptance", "1.5"], "'1.5' is not a number from 0 to 1"),
        (["--acceptance", "high"], "'high' is not a number from 0 to 1"),
        (["--temperature", "-1"], "'-1' is not a number above 0"),
        (["--seed", "-1"], "'-1' is not a whole number from 0"),
        (["--max-new-tokens", "2"], "'2' new tokens leave none to draft: use 3 or more"),
        (["--main-of", "models"], "models is not a benchmark pair"),
        (["--main-of", "{pair}", "--shape", "Llama-3.2-1B"], "exclude each other"),
        (["--prompts", "no/such/file"], "no/such/file is not a file: give JSON lines"),
    ],
)
def test_invalid_arguments_give_one_sentence_error(run_here, made, tmp_path, arguments, words):
    process = run_here(PROGRAM, tmp_path / "out", *(text.replace("{pair}", str(made[0])) for text in arguments))
    assert process.returncode == 2
    assert words in process.stderr.splitlines()[-1] and "Traceback" not in process.stderr
    assert not list(tmp_path.iterdir())


def test_existing_folders_are_not_overwritten(run_here, made, tmp_path):
    process = run_here(PROGRAM, made[0])
    assert process.returncode == 2 and "exists: choose another folder, or use --overwrite" in process.stderr
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").touch()
    process = run_here(PROGRAM, tmp_path / "mine", "--overwrite")
    assert process.returncode == 2 and "is not a benchmark pair and is not overwritten" in process.stderr
    assert (tmp_path / "mine/file").exists()


@pytest.mark.parametrize(
    "content", ["[]", "1", "null", '"benchmark pair"', "{}", '{"kind": []}', "[" * 100_000, "{", ""]
)
def test_foreign_pair_json_is_not_overwritten(run_here, tmp_path, content):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/pair.json").write_text(content, encoding="utf-8")
    process = run_here(PROGRAM, tmp_path / "mine", "--overwrite")
    assert process.returncode == 2 and "is not a benchmark pair and is not overwritten" in process.stderr
    assert (tmp_path / "mine/pair.json").read_text(encoding="utf-8") == content


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"format": program.FORMAT, "main": {"shape": [1]}}, "lacks the main model's shape"),
        ({"format": 1, "main": {"shape": vars(SMALL)}}, "was generated by another version: generate it again"),
    ],
)
def test_unusable_benchmark_pair_is_rejected(run_here, tmp_path, content, words):
    (tmp_path / "pair.json").write_text(json.dumps({"kind": "benchmark pair", **content}), encoding="utf-8")
    process = run_here(PROGRAM, tmp_path / "out", "--main-of", tmp_path)
    assert process.returncode == 2 and words in process.stderr.splitlines()[-1]


WITHOUT_MODELS = """
import make_benchmark_pair as program
program.make_pair = lambda arguments, folder: (folder / "new").touch() or {}
program.main()
"""


@pytest.mark.posix("signals")
@pytest.mark.parametrize("renames", range(3))
def test_killed_overwrite_restores_the_old_pair(run_here, tmp_path, renames):
    """The program is killed at each of its renames. Stand-ins replace the models, which take minutes to generate."""
    out = tmp_path / "pair"
    out.mkdir()
    (out / "pair.json").write_text('{"kind": "benchmark pair"}', encoding="utf-8")
    killed_at_rename(renames, PROGRAM, out, "--overwrite", prepare=WITHOUT_MODELS)
    process = run_here(PROGRAM, out, "--main-of", tmp_path)  # rejected at once if the old pair were missing
    assert process.returncode == 2 and "exists: choose another folder, or use --overwrite" in process.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["pair", "pair.json"]


@pytest.mark.posix("signals")
def test_ctrl_c_during_startup_prints_nothing(tmp_path):
    command = [sys.executable, str(ROOT / PROGRAM), str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8")
    wait_until_loaded("_multiarray_umath", process)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=PATIENCE) == ("", "")
    assert process.returncode == 130


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_leaves_no_files(tmp_path, sent):
    command = [sys.executable, str(ROOT / PROGRAM), str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8")
    wait_until(lambda: list(tmp_path.glob(".out.*/new/out/draft/config.json")), "the draft is being made")
    process.send_signal(sent)
    _, errors = process.communicate(timeout=PATIENCE)
    assert (
        process.returncode == 130 and "interrupted; partial files were removed" in errors and "Traceback" not in errors
    )
    assert not list(tmp_path.iterdir())


def test_failed_job_gives_one_sentence_error_and_leaves_no_files(run_here, tmp_path):
    (tmp_path / "file").touch()
    process = run_here(PROGRAM, tmp_path / "file/out")
    assert process.returncode == 1 and process.stderr.startswith("error: ") and process.stderr.count("\n") == 1
    process = run_here(PROGRAM, tmp_path / "file/out", "--debug")
    assert process.returncode == 1 and "Traceback" in process.stderr
