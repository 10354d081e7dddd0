"""The committed embedded pair has the properties that its model card states."""

import ast
import json

import numpy as np
import openvino
import openvino_genai
import pytest

from speculative import load
from speculative.bench import genai
from speculative.models.spec import ModelSpec
from speculative.pair.check import check_pair
from speculative.sequence import metrics
from tests.support.paths import DRAFT, MAIN, ROOT

HEAD = ROOT / "models/embedded/eagle3"
EXACT = {"EXECUTION_MODE_HINT": "ACCURACY"}
PROMPTS = [
    json.loads(line)["prompt"]
    for line in (ROOT / "scripts/prompts/embedded_code.jsonl").read_text(encoding="utf-8").splitlines()
]


def parameters(folder):
    """The number of weights of an IR, counted from its int8 constants."""
    model = openvino.Core().read_model(folder / "openvino_model.xml")
    constants = (node for node in model.get_ops() if node.get_type_name() == "Constant")
    return sum(
        int(np.prod(node.shape))
        for node in constants
        if node.get_element_type() in (openvino.Type.u8, openvino.Type.i8)
    )


@pytest.fixture(scope="module")
def runs(pytestconfig):
    """Every fourth of the 20 held-out prompts, all with --long, 100 tokens each at K = 4, in the engine's default
    precision."""
    pipe = genai.load(ModelSpec(MAIN), ModelSpec(DRAFT))
    prompts = PROMPTS if pytestconfig.getoption("--long") else PROMPTS[::4]
    return [genai.generate(pipe, genai.encode(pipe.get_tokenizer(), prompt), 100, 4) for prompt in prompts]


def test_parameter_counts_and_file_size_are_within_limits():
    assert 20e6 <= parameters(MAIN) <= 40e6
    assert parameters(DRAFT) <= parameters(MAIN) / 10
    assert sum(path.stat().st_size for folder in (MAIN, DRAFT) for path in folder.rglob("*")) <= 40e6


def test_pair_check_finds_no_warnings():
    check = check_pair(MAIN, DRAFT)
    assert check.sound and check.fingerprint
    assert not [finding for finding in check.findings if finding.level == "warning"]


def test_eagle3_head_is_sound_and_beats_prompt_lookup():
    """In exact arithmetic, greedy, on every fifth of the held-out prompts."""
    check = check_pair(MAIN, HEAD)
    assert check.sound and not [finding for finding in check.findings if finding.level == "warning"]
    main, head = ModelSpec(MAIN, "CPU", EXACT), ModelSpec(HEAD, "CPU", EXACT)
    config = openvino_genai.GenerationConfig(max_new_tokens=64, ignore_eos=True, num_assistant_tokens=3)
    tokens, passes = [], []
    for decoder in (load(main, head), load(main, max_ngram_size=3)):
        results = [decoder.generate(prompt, config) for prompt in PROMPTS[::5]]
        tokens.append([result.tokens for result in results])
        passes.append(sum(len(result.accepted) for result in results))
    assert tokens[0] == tokens[1]
    assert passes[0] < 0.7 * passes[1]


def test_eagle3_head_records_its_training_command():
    record = json.loads((HEAD / "draft.json").read_text(encoding="utf-8"))
    assert record["command"].startswith("python convert/make_draft.py models/embedded/main models/embedded/eagle3")
    assert sum(path.stat().st_size for path in HEAD.iterdir()) <= 12e6


def test_pair_json_records_the_export_commands():
    record = json.loads((ROOT / "models/embedded/pair.json").read_text(encoding="utf-8"))
    for half in ("main", "draft"):
        assert record[half]["command"].startswith("optimum-cli export openvino")
        assert "int8" in record[half]["command"]


def test_prompts_are_not_in_the_training_text():
    """The training text is built from this Python's standard library and the recipes."""
    from speculative.modelgen.text import training_documents

    text = "\0".join(training_documents())
    assert len(PROMPTS) == 20
    assert "def read_file(path" in text  # the search finds what is there
    assert not [prompt for prompt in PROMPTS if prompt.strip() in text]


def test_acceptance_rate_on_held_out_prompts(runs):
    proposed = [n for run in runs for n in run.proposed]
    accepted = [n for run in runs for n in run.accepted]
    assert metrics.acceptance_rate(proposed, accepted) >= 0.55


def test_most_texts_do_not_loop(runs):
    assert sum(metrics.repetition(run.tokens) > 0.5 for run in runs) < len(runs) / 2


@pytest.mark.parametrize(
    "prompt",
    [
        "def read_file(path):",
        *(pytest.param(it, marks=pytest.mark.long) for it in ("def is_prime(n):", "class Stack:")),
    ],
)
def test_main_model_writes_valid_python(prompt, run_here):
    process = run_here("samples/greedy_causal_lm.py", MAIN, prompt, "--max-new-tokens", "200")
    assert process.returncode == 0, process.stderr
    ast.parse(prompt + process.stdout)


def test_main_model_follows_an_instruction(run_here):
    process = run_here("samples/greedy_causal_lm.py", MAIN, "Write code to reverse a string.")
    assert process.returncode == 0, process.stderr
    assert "def " in process.stdout and "return" in process.stdout
    ast.parse(process.stdout)
