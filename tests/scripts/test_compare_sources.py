"""compare_sources.py as users run it, and the times that its cost model gives. No test depends on a measured time."""

import dataclasses
import html
import json

import numpy as np
import pytest
from openvino_genai import GenerationConfig

from speculative import decoder
from speculative.bench import fixed_costs
from speculative.bench.fixed_costs import DecodedText
from speculative.bench.harness import time_in
from speculative.bench.methods import ADAPTIVE_LOOKUP, TWO_SOURCES, with_source
from speculative.bench.reporting.page import html_text
from speculative.bench.result import SourcesResult
from speculative.drafting.policy import Costs
from tests.support.paths import DRAFT, MAIN
from tests.support.typed import problems

PROGRAM = "scripts/compare_sources.py"
SMALL = ("--max-prompts", "3", "--max-new-tokens", "16", "-k", "2,4")
COSTS = Costs(0.1, {1: 1.0, 2: 1.25, 5: 1.5, 17: 3.0}, 0.05, 0.25)
SOURCES = ["suffix decoding", "draft, K = 2", "draft, K = 4", "draft, adaptive", "draft and suffix decoding"]


def as_result(process):
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout.splitlines()[-1])
    assert problems(result, SourcesResult) == []
    return result


@pytest.fixture
def costs(tmp_path):
    (tmp_path / "costs.json").write_text(json.dumps({"costs": dataclasses.asdict(COSTS)}), encoding="utf-8")
    return tmp_path / "costs.json"


def test_every_source_is_compared_reproducibly_with_saved_costs(run_here, costs, tmp_path):
    command = [PROGRAM, MAIN, DRAFT, *SMALL, "--seed", "3", "--samples", "2"]
    process = run_here(*command, "--costs", costs, "--json", tmp_path / "sources.json")
    result = as_result(process)
    assert [(row["source"], row["temperature"]) for row in result["rows"]] == [(s, t) for t in (0, 1) for s in SOURCES]
    for row in result["rows"]:
        low, high = row["speedup_range"]
        assert low <= row["speedup"] <= high and row["tokens_per_forward"] >= 1
        assert row["texts"] == (6 if row["temperature"] else 3)
        assert (row["draft_passes"] > 0) == (row["source"] != "suffix decoding")
    assert {row["source"] for row in result["categories"]} == set(SOURCES)
    assert [one["what"].partition(" / ")[0] for one in result["ratios"]] == 2 * ["draft, adaptive", *2 * SOURCES[-1:]]
    assert "category, T = 1" in process.stdout and "Fastest at temperature 0: " in process.stdout
    again = as_result(run_here(*command, "--costs", tmp_path / "sources.json"))
    for key in ("rows", "categories", "ratios", "costs", "summary"):
        assert again[key] == result[key]


def test_each_sample_of_a_prompt_has_its_own_seed(run_here, costs):
    def speedup(*options: str) -> float:
        process = run_here(PROGRAM, MAIN, DRAFT, *SMALL, "--costs", costs, "--temperature", "1", *options)
        return as_result(process)["rows"][SOURCES.index("draft, K = 4")]["speedup"]

    third, fourth = speedup("--seed", "3"), speedup("--seed", "4")
    assert third != fourth
    assert speedup("--seed", "3", "--samples", "2") == pytest.approx(2 / (1 / third + 1 / fourth))


def test_lowest_category_of_combined_sources_is_named(run_here, costs):
    prompts = ("--prompts", "scripts/prompts/repeats.jsonl", "--max-prompts", "2", "--samples", "1")
    result = as_result(run_here(PROGRAM, MAIN, DRAFT, *SMALL, *prompts, "--costs", costs))
    for temperature in (0, 1):
        rows = [row for row in result["categories"] if row["temperature"] == temperature]
        speedups = {(row["category"], row["source"]): row["speedup"] for row in rows}
        ratios = {
            category: speedups[category, SOURCES[-1]] / max(speedups[category, source] for source in SOURCES[:-1])
            for category, _ in speedups
        }
        category = min(ratios, key=ratios.__getitem__)
        assert len(ratios) > 1
        (lowest,) = [one for one in result["ratios"] if f"{temperature}, lowest category ({category})" in one["what"]]
        assert lowest["ratio"] == pytest.approx(ratios[category])
        assert f"{lowest['what']}: {lowest['ratio']:.2f}" in "\n".join(result["summary"])
        assert lowest["range"] is None  # of one prompt
    page = html.unescape(html_text(result))
    assert "Sources of draft tokens" in page and "(1 prompt)" in page and "95 % intervals over prompts" in page
    assert "draft steps per forward pass" in page and lowest["what"] in page and "interleaved" not in page


def test_suffix_decoding_is_measured_without_a_draft(run_here):
    result = as_result(run_here(PROGRAM, MAIN, *SMALL, "--temperature", "0"))
    assert [row["source"] for row in result["rows"]] == ["suffix decoding"] and result["ratios"] == []
    assert result["costs"]["main"]["1"] > 0


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["no/such", DRAFT], "no/such"),
        ([MAIN, DRAFT, "--costs", "README.md"], "compare_sources.py"),
        ([MAIN, DRAFT, "--costs", "no/such.json"], "no/such.json"),
        ([MAIN, DRAFT, "--temperature", "-1"], "'-1'"),
        ([MAIN, DRAFT, "--seed", "-1"], "'-1' is not a whole number from 0"),
        ([MAIN, DRAFT, "--samples", "0"], "'0'"),
        ([MAIN, DRAFT, "-k", "0"], "'0'"),
        ([MAIN, DRAFT, "-k", "2,17"], "17"),
        ([MAIN, DRAFT, "--prompts", "no/such.jsonl"], "no/such.jsonl"),
    ],
)
def test_bad_input_gives_one_sentence_error(run_here, arguments, word):
    process = run_here(PROGRAM, *arguments)
    assert process.returncode == 2, process.stderr
    assert word in process.stderr and "Traceback" not in process.stderr and process.stdout == ""


# ---- counting -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine():
    return decoder.load(MAIN, DRAFT)


SEED = 3


def texts_of(engine, draft_length, k=0, tokens=40):
    engine.draft_length.costs = COSTS
    config = GenerationConfig(max_new_tokens=tokens, ignore_eos=True, num_assistant_tokens=k)
    ids = [engine.tokenizer.encode(text).input_ids.data[0] for text in ("def area(", "class Box:")]
    passes = [time_in(model) for model in engine.models]
    return fixed_costs.decode_all(with_source(engine, draft_length), config, ids, ["a", "b"], COSTS, passes, SEED)


def test_cost_of_fixed_draft_length_is_the_sum_of_its_passes(engine):
    """With 41 tokens and K = 4, only the last passes of a text have another size."""
    for text in texts_of(engine, 4, k=4, tokens=41):
        full = [0.1 + 3 * 0.05 + 1.5] * (text.passes - 1)
        assert text.tokens == 40 and 4 * (text.passes - 1) <= text.draft_passes <= 4 * text.passes
        left = text.draft_passes - 4 * (text.passes - 1)
        last = COSTS.drafting()[left] + COSTS.verify()[left + 1] + 0.25 * (left < 4)
        assert text.seconds == pytest.approx(sum(full) + last)


def test_texts_are_decoded_in_random_and_returned_in_prompt_order(engine):
    assert np.random.default_rng(SEED).permutation(2).tolist() == [1, 0]
    assert [text.category for text in texts_of(engine, 4, k=4)] == ["a", "b"]


def test_no_draft_source_costs_as_plain_decoding(engine):
    texts = texts_of(engine, 0)
    assert [(text.tokens, text.passes, text.draft_passes, text.seconds) for text in texts] == [(39, 39, 0, 39.0)] * 2
    assert fixed_costs.plain(texts, COSTS) == texts


@pytest.mark.parametrize("draft_length", ["adaptive", ADAPTIVE_LOOKUP, TWO_SOURCES])
def test_adaptive_draft_length_costs_at_least_its_passes(engine, draft_length):
    for text in texts_of(engine, draft_length):
        assert text.tokens == 39
        assert text.seconds >= text.passes * 1.0 + 0.05 * text.draft_passes
        assert (text.draft_passes == 0) == (draft_length == ADAPTIVE_LOOKUP)


def test_texts_of_a_prompt_are_summed():
    texts = [DecodedText("a", 10, 4, 7, 2.0), DecodedText("a", 6, 3, 0, 0.5)]
    assert fixed_costs.total(texts) == DecodedText("a", 16, 7, 7, 2.5)


def test_interval_contains_ratio_and_has_no_width_for_equal_texts():
    fast = [DecodedText("", 10 * n, n, 0, 2.0 * n) for n in range(1, 9)]
    slow = [text._replace(seconds=2 * text.seconds) for text in fast]
    plain = fixed_costs.plain(fast, COSTS)
    assert fixed_costs.rate(fast) / fixed_costs.rate(plain) == 5.0
    assert fixed_costs.interval(fast, plain) == pytest.approx([5.0, 5.0])
    assert fixed_costs.rate(fast) / fixed_costs.rate(slow) == 2.0
    assert fixed_costs.interval(fast, slow) == pytest.approx([2.0, 2.0])
    assert fixed_costs.interval(fast[:1], slow[:1]) is None
    mixed = [text._replace(seconds=text.seconds * (1 + i % 2)) for i, text in enumerate(fast)]
    ratio, (low, high) = fixed_costs.rate(mixed) / fixed_costs.rate(slow), fixed_costs.interval(mixed, slow)
    assert low < ratio < high
