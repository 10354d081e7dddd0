"""benchmark_batching.py as users run it. Its counts and summary are tested in test_benchmark_serving.py."""

import json
import time

import pytest

from scripts import benchmark_batching
from speculative import batch_decoder
from speculative.bench.harness import BackgroundLoad
from speculative.bench.load import batch_methods
from speculative.bench.result import BatchingResult
from speculative.models.spec import ModelSpec
from tests.support import load_benchmarks
from tests.support.paths import DRAFT, MAIN
from tests.support.typed import problems

PROGRAM = "scripts/benchmark_batching.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("load")


@pytest.fixture(scope="module")
def result(folder):
    return load_benchmarks.measure(PROGRAM, folder, "--suffix-decoding", "--seconds", 0.5)


def test_every_method_is_measured_at_every_batch_size(result, folder):
    methods = ["GenAI, main alone", "GenAI, K = 4", "ours, main alone", "ours, adaptive draft", "ours, suffix decoding"]
    methods.append("ours, draft and suffix decoding")
    load_benchmarks.check(result, BatchingResult, methods, folder)


def test_both_engines_receive_the_same_prompts(result):
    """In exact arithmetic the main model alone gives the same texts in GenAI and in our engine."""
    compared = result["comparisons"]
    engines = [one for one in compared if one["what"].startswith("ours, main alone / GenAI, main alone")]
    assert [one["clients"] for one in engines] == [1, 3]
    assert all(one["same_text"] == one["texts"] > 0 for one in engines)
    copied = [one for one in compared if one["what"].startswith("ours, suffix decoding / ours, main alone")]
    assert [one["clients"] for one in copied] == [1, 3] and all(one["same_text"] == one["texts"] for one in copied)


@pytest.mark.parametrize("engine", ["ours", "GenAI"])
def test_prompt_is_tokenized_before_its_request_is_sent(engine):
    class Noting(batch_methods.Prompts):
        def __getitem__(self, number):
            ids = super().__getitem__(number)
            tokenized[number] = time.perf_counter()
            return ids

    tokenized, prompts = {}, Noting(DRAFT, ["def f(x):"])
    if engine == "ours":
        method = batch_methods.our_method(engine, batch_decoder.load(DRAFT), prompts, 2)
    else:
        pipe = batch_methods.genai_pipeline(ModelSpec(DRAFT))
        method = batch_methods.genai_method(engine, pipe, 0, prompts, 2)
    answers = method.run(1, 0.05, 0).answers
    assert answers and all(tokenized[answer.number] <= answer.sent < answer.first for answer in answers)


def test_suffix_decoding_is_measured_without_a_draft(run_here):
    """The embedded draft serves as the main model, because it is fast."""
    short = ["--max-concurrency", "2", "--seconds", "0.1", "--rounds", "1", "--max-new-tokens", "8"]
    process = run_here(PROGRAM, DRAFT, "--suffix-decoding", *short)
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout.splitlines()[-1])
    assert problems(result, BatchingResult) == [] and "draft" not in result["environment"]
    methods = ["GenAI, main alone", "ours, main alone", "ours, suffix decoding"]
    assert [row["method"] for row in result["rows"]] == [start["name"] for start in result["starts"]] == methods
    assert [one["what"] for one in result["comparisons"]] == [
        "ours, main alone / GenAI, main alone, 2 texts",
        "ours, suffix decoding / GenAI, main alone, the best of GenAI, 2 texts",
        "ours, suffix decoding / ours, main alone, 2 texts",
    ]
    assert not any("draft" in line for line in result["summary"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no draft given for"),
        (["--suffix-decoding", "-k", "2"], "--num-assistant-tokens requires a draft: add its folder"),
        (["--suffix-decoding", "--draft-device", "GPU"], "--draft-device requires a draft: add its folder"),
    ],
)
def test_options_that_need_a_draft_are_rejected_without_one(run_here, arguments, words):
    process = run_here(PROGRAM, MAIN, *arguments)
    assert process.returncode == 2 and f"error: {words}" in process.stderr and process.stdout == ""


def test_genai_alone_uses_its_default_scheduler(monkeypatch):
    """GenAI needs unsplit prompts only with a draft."""
    from openvino_genai import SchedulerConfig

    from speculative.bench.load import batch_methods

    made = []
    monkeypatch.setattr(batch_methods, "ContinuousBatchingPipeline", lambda main, config, *rest: made.append(config))
    batch_methods.genai_pipeline(ModelSpec(MAIN), max_texts=16)
    batch_methods.genai_pipeline(ModelSpec(MAIN), ModelSpec(DRAFT), max_texts=16)
    names = ("dynamic_split_fuse", "max_num_batched_tokens", "max_num_seqs", "enable_prefix_caching", "cache_size")
    alone, draft = ([getattr(config, name) for name in names] for config in made)
    assert alone == [getattr(SchedulerConfig(), name) for name in names]
    assert draft[0] is False and draft[1] > alone[1] and draft[2:] == alone[2:]


def test_memory_is_reported_for_each_method(result):
    starts = {start["name"]: start for start in result["starts"]}
    assert len(starts) == 6
    for name, start in starts.items():
        assert 10_000_000 < start["peak_bytes"] < 4_000_000_000
        assert ("ours" in name) == bool(start["cache_bytes"])
    assert starts["ours, draft"]["cache_bytes"] > starts["ours, main alone"]["cache_bytes"]


def test_no_engine_is_called_faster_without_comparable_batches():
    """All first tokens arrived after --seconds."""
    lines = benchmark_batching.summary([], [], [], rounds=1, requested_rounds=1, load=BackgroundLoad())
    assert len(lines) == 1 and "could be compared" in lines[0]
