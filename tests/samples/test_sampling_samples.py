"""speculative_sampling_lm.py passes options to the engine, prints its results, and fails with one-sentence errors.

The distribution of the samples is tested with the engine (test_lossless_draws.py).
"""

import argparse
import re

import openvino_genai
import pytest

from speculative import decoder
from speculative.models.spec import ModelSpec
from tests.samples.test_sample_errors import assert_one_sentence
from tests.samples.test_samples import figures
from tests.support.paths import DRAFT
from tests.support.tiny_checkpoints import save_ir, train_tokenizer
from tests.support.useless_draft import save_useless_draft

SAMPLE = "samples/speculative_sampling_lm.py"
SMALL = DRAFT  # the embedded draft serves as the main model, because it is fast
PROMPT = "def read_file(path):"
TOKENS = 40
ACCURACY = "EXECUTION_MODE_HINT=ACCURACY"
SHORT = ("--max-new-tokens", TOKENS, "--property", ACCURACY)


@pytest.fixture(scope="module")
def mediocre(tmp_path_factory):
    """A draft that has half of the small model's tokens right."""
    return save_useless_draft(tmp_path_factory.mktemp("mediocre") / "draft", share=0.05)


@pytest.fixture(scope="module")
def engine(mediocre):
    return decoder.load(ModelSpec(SMALL, properties=dict([ACCURACY.split("=")])), mediocre)


def sampled_config(temperature):
    return openvino_genai.GenerationConfig(
        max_new_tokens=TOKENS, num_assistant_tokens=3, do_sample=True, temperature=temperature
    )


def test_text_and_summary_match_the_engine(run_here, engine, mediocre):
    result = engine.generate(PROMPT, sampled_config(2.0), seed=5)
    done = run_here(SAMPLE, SMALL, mediocre, PROMPT, "-k", 3, "--temperature", 2, "--seed", 5, *SHORT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == result.text
    shown = figures(done.stderr)
    accepted, proposed = sum(result.from_draft), sum(result.proposed)
    assert 0 < accepted < proposed
    assert shown["new tokens"] == str(len(result.tokens))
    assert shown["forward passes"] == f"{len(result.gained)} of the main model after the prompt"
    assert shown["block efficiency"] == f"{result.block_efficiency:.2f} tokens per forward pass"
    assert shown["acceptance rate"] == f"{accepted / proposed:.2f} ({accepted} of {proposed} draft tokens)"
    assert shown["draft length"] == "always 3 draft tokens"
    assert shown["sampling"] == "temperature 2, top-k all, top-p 1, seed 5"


def test_printed_seed_reproduces_the_text(run_here):
    options = ("--temperature", 2, *SHORT)
    first = run_here(SAMPLE, SMALL, DRAFT, PROMPT, *options)
    assert first.returncode == 0, first.stderr
    seed = int(re.search(r"seed (\d+)$", figures(first.stderr)["sampling"])[1])
    assert run_here(SAMPLE, SMALL, DRAFT, PROMPT, "--seed", seed, *options).stdout == first.stdout
    assert run_here(SAMPLE, SMALL, DRAFT, PROMPT, "--seed", seed ^ 1, *options).stdout != first.stdout
    assert re.match(r"(about \d+ draft tokens?|plain decoding).* ms for ", figures(first.stderr)["draft length"])


@pytest.mark.parametrize(
    "option",
    [
        ("--temperature", 0),
        ("--temperature", 0, "--suffix-decoding"),
        ("--top-k", 1),
        ("--top-p", 1e-6),
        ("--temperature", 1e-4),
    ],
)
def test_options_that_leave_one_token_give_greedy_text(run_here, engine, option):
    alone = decoder.Decoder(engine.main, tokenizer=engine.tokenizer, stop_token_ids=engine.stop_token_ids)
    done = run_here(SAMPLE, SMALL, DRAFT, PROMPT, *SHORT, *option)
    assert done.stdout == alone.generate(PROMPT, openvino_genai.GenerationConfig(max_new_tokens=TOKENS)).text
    sampling = figures(done.stderr)["sampling"]
    assert ("greedy" in sampling) == (option[:2] == ("--temperature", 0))
    assert f"{option[0][2:]} {option[1]:g}" in sampling


def test_unicode_text_on_any_console_and_device(run, engine, mediocre):
    prompt = "naïve 你好 🙂 Σ"
    options = ("--draft-device", "HETERO:CPU", "--draft-property", ACCURACY, "-k", 3, "--temperature", 2, "--seed", 1)
    done = run(SAMPLE, SMALL, mediocre, "-", *SHORT, *options, stdin=prompt, env={"PYTHONIOENCODING": "cp1252"})
    assert done.returncode == 0, done.stderr
    assert done.stdout == engine.generate(prompt, sampled_config(2.0), seed=1).text


# ---- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "range_"),
    [
        ("--temperature", "-1", "of 0 or more"),
        ("--top-p", "0", "above 0 and at most 1"),
        ("--top-p", "2", "above 0 and at most 1"),
        ("--top-k", "0", "from 1 to"),
        ("--seed", "one", "from 0 to"),
        ("-k", "0", "from 1 to 64, nor auto"),
    ],
)
def test_argument_out_of_range_gives_one_sentence_error(run_here, option, value, range_):
    assert_one_sentence(run_here(SAMPLE, SMALL, DRAFT, PROMPT, option, value), 2, option, repr(value), range_)


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--temperature", ["inf", "nan", "hot", "", "-0.1"]),
        ("--top-p", ["nan", "-0.5", "1.01", ""]),
        ("--top-k", ["-1", "1.5", "all"]),
        ("--seed", ["-1", "1.5", "4294967296"]),
        ("-k", ["65", "-1", "AUTO", ""]),
    ],
)
def test_argument_types_reject_out_of_range_values(option, values):
    from samples import console

    for value in values:
        with pytest.raises(argparse.ArgumentTypeError, match=re.escape(repr(value))):
            console.ARGUMENTS[option]["type"](value)


def test_draft_with_other_tokenizer_gives_same_text(run_here, renumbered_draft):
    """This draft gives the same tokens the same probabilities, so the text is that of the embedded draft."""
    options = [PROMPT, "-k", 3, "--temperature", 0, "--max-new-tokens", 12]
    done, same = (run_here(SAMPLE, SMALL, draft, *options) for draft in (renumbered_draft, DRAFT))
    assert done.returncode == 0 and done.stdout == same.stdout
    assert f"warning: {renumbered_draft} as a draft of {SMALL}: " in done.stderr and "warning" not in same.stderr


def test_invalid_models_and_prompts_give_one_sentence_error(run_here, tmp_path):
    assert_one_sentence(run_here(SAMPLE, SMALL, tmp_path / "nowhere", PROMPT), 2, f"no folder {tmp_path / 'nowhere'}")
    assert_one_sentence(run_here(SAMPLE, SMALL, DRAFT, "-", stdin="x = 1\n" * 3000), 2, "too long", "context", SMALL)


def test_engine_errors_are_one_sentence(run_here, tmp_path):
    done = run_here(SAMPLE, SMALL, DRAFT, PROMPT, "--property", "NO_SUCH=1")
    assert_one_sentence(done, 1, "Unsupported property NO_SUCH by CPU plugin", "--debug")
    table = save_ir(train_tokenizer(), tmp_path / "table")
    assert_one_sentence(run_here(SAMPLE, table, table, PROMPT), 1, table, "no KV cache")


def test_cache_smaller_than_context_limits_generation(run_here):
    npu = ["NPUW_DEVICES=CPU", ACCURACY, "MAX_PROMPT_LEN=64", "MIN_RESPONSE_LEN=32"]
    options = [
        "--device",
        "NPU",
        "--draft-device",
        "CPU",
        "--draft-property",
        ACCURACY,
        *(f"--property={setting}" for setting in npu),
    ]
    done = run_here(SAMPLE, SMALL, DRAFT, PROMPT, "--seed", 0, "--temperature", 20, "-k", 4, *options)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\d+ \(KV cache full\)", figures(done.stderr)["new tokens"])
    done = run_here(SAMPLE, SMALL, DRAFT, "x = 1\n" * 50, *options)
    assert_one_sentence(done, 1, "the prompt has", "only fits 95")
