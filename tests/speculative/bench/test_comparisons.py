"""Comparison of decoding methods: interleaving, ratios with their intervals, and the timing of each engine."""

import math
from dataclasses import replace

import numpy as np
import pytest

from speculative.bench import genai as genai_runs
from speculative.bench import startup
from speculative.bench.genai import Run
from speculative.bench.harness import Method, interleave
from speculative.bench.methods import genai_method
from speculative.bench.ratios import engines, interval, iterations, ratio, same_tokens, verdict
from speculative.models.spec import ModelSpec
from speculative.pair.engines import GENAI, NATIVE
from tests.speculative.models.test_huge_pages import HAS_COLLAPSE
from tests.support.paths import DRAFT, MAIN


def run_of(seconds, tokens=(1, 2, 3, 4, 5), gained=(2, 2)):
    """A run that took `seconds` after its first token."""
    return Run(list(tokens), [3] * len(gained), list(gained), 1.0, 1.0 + seconds)


def method(*rounds, engine=NATIVE):
    return Method("a method", engine, 4, 0.0, None, rounds=[list(runs) for runs in rounds])


# ---- order ----------------------------------------------------------------------------------------------------------


def test_methods_alternate_in_changing_order():
    calls = []
    methods = [Method(name, NATIVE, 0, 0.0, lambda ids, name=name: calls.append(name) or run_of(1)) for name in "abc"]
    assert interleave(methods, [np.arange(3)] * 4, rounds=5, warm_up=1)
    rounds = [calls[i : i + 3] for i in range(0, len(calls), 3)]
    assert len(rounds) == 6 * 4 and all(set(turn) == set("abc") for turn in rounds)
    for name in "abc":  # none has always the same method before it, or the same place
        before = {calls[i - 1] for i in range(1, len(calls)) if calls[i] == name}
        assert before >= set("abc") - {name} and {turn.index(name) for turn in rounds} == {0, 1, 2}
    assert [len(one.rounds) for one in methods] == [5] * 3


@pytest.mark.parametrize(("complete", "kept"), [(2, 1), (1, 0)])
def test_complete_rounds_are_kept_on_ctrl_c(complete, kept):
    """The first round is the warm-up."""
    calls = []

    def decode(ids):
        calls.append(ids)
        if len(calls) > 2 * complete:
            raise KeyboardInterrupt
        return run_of(1)

    methods = [Method(name, NATIVE, 0, 0.0, decode) for name in "ab"]
    if kept:
        assert interleave(methods, [np.arange(3)], rounds=3) is False
    else:
        with pytest.raises(KeyboardInterrupt):
            interleave(methods, [np.arange(3)], rounds=3)
    assert [len(one.rounds) for one in methods] == [len(one.outside) for one in methods] == [kept] * 2


# ---- ratios ---------------------------------------------------------------------------------------------------------


def test_ratio_has_range_over_rounds_and_interval_over_prompts():
    ours = method([run_of(1), run_of(2)], [run_of(1), run_of(1)])
    other = method([run_of(2), run_of(2)], [run_of(1), run_of(2)])
    fact = ratio("x", ours, other)
    assert fact["ratio"] == pytest.approx((4 / 3 + 3 / 2) / 2) and fact["range"] == pytest.approx([4 / 3, 3 / 2])
    low, high = fact["interval"]  # wide, of two prompts
    assert low < 4 / 3 < 3 / 2 < high and low * high == pytest.approx(fact["ratio"] ** 2)
    assert ratio("x", ours, other, [0])["interval"] is None
    assert ratio("x", method([run_of(1, gained=(1, 1, 1, 1))]), method([run_of(1)]), units=iterations)["ratio"] == 2


def test_single_token_output_is_left_out_of_the_interval():
    """It takes no time to decode."""
    one = run_of(0, tokens=(1,), gained=())
    fact = ratio("x", method([one, run_of(1), run_of(2)]), method([one, run_of(2), run_of(2)]))
    low, high = fact["interval"]
    assert 0 < low < 1 and 2 < high < math.inf and low * high == pytest.approx((4 / 3) ** 2)
    assert verdict([{**fact, "where": "alone"}], 2)[0].count("no difference shown")
    assert ratio("x", method([one, run_of(1)]), method([one, run_of(2)]))["interval"] is None


def test_method_without_tokens_has_no_interval():
    """Its answers are one token and the end of the text, which takes time."""
    assert interval(np.array([[0, 0], [3, 4]]), np.ones((2, 2))) is None


def test_interval_over_prompts_shows_variance_hidden_in_rounds():
    """Ten prompts, three times as fast on one, a tenth slower on nine, the same in every round."""
    ours = [[run_of(3 if i == 0 else 1.1) for i in range(10)]] * 5
    other = [[run_of(9 if i == 0 else 1.0) for i in range(10)]] * 5
    fact = ratio("x", method(*ours), method(*other))
    assert fact["range"][0] == fact["range"][1] > 1.3
    assert fact["interval"][0] < 1 < fact["interval"][1]


def test_differing_texts_are_compared_separately():
    other_text = run_of(0.1, tokens=(1, 2, 3, 4, 9))
    ours = method([run_of(1), other_text], [run_of(1), run_of(1)])
    genai = method([run_of(2), run_of(1)], [run_of(2), run_of(1)], engine=GENAI)
    assert same_tokens(ours, genai) == [0]
    alike, per_iteration, rest = engines("K = 4", ours, genai)
    assert alike["what"] == "ours / GenAI, greedy, K = 4" and alike["ratio"] == 2 and alike["prompts"] == 1
    assert per_iteration["ratio"] == 2 and per_iteration["what"].endswith("per iteration")
    assert rest["what"].endswith("texts that differ") and rest["range"][1] == pytest.approx(10)


@pytest.mark.parametrize(
    ("range_", "interval", "words"),
    [
        ([1.02, 1.05], [1.01, 1.06], "faster: alone"),
        ([1.02, 1.05], [0.99, 1.06], "no difference shown: alone"),
        ([0.98, 1.05], [1.01, 1.06], "no difference shown: alone"),
        ([0.90, 0.98], [0.91, 0.99], "slower: alone"),
        ([0.97, 0.998], [0.98, 0.999], "no difference shown: alone"),
        ([1.001, 1.02], [1.002, 1.03], "no difference shown: alone"),
        ([1.02, 1.05], None, "no difference shown: alone"),
        ([0.90, 0.98], None, "no difference shown: alone"),
    ],
)
def test_verdict_names_the_faster_engine(range_, interval, words):
    fact = {"what": "x", "where": "alone", "ratio": sum(range_) / 2, "range": range_, "interval": interval}
    sentences = verdict([fact, {"what": "x, per iteration"}], starts=3)
    assert len(sentences) == 1 and f": {words}" in sentences[0]
    assert "--starts 3" in verdict([fact], starts=1)[1]
    assert verdict([{"what": "no engine compared"}], starts=1) == []


# ---- seconds --------------------------------------------------------------------------------------------------------


class Metrics:
    """As GenAI reports them: time points in ms, here with three of an earlier call."""

    def __init__(self, times):
        self.m_new_token_times = times

    raw_metrics = property(lambda self: self)
    mean = property(lambda self: 50.0)

    def get_ttft(self):
        return self


def test_genai_seconds_end_with_its_last_token():
    first, last = genai_runs.seconds(Metrics([1.0, 2.0, 3.0, 1000.0, 1100.0, 1250.0]), 2)
    assert (first, last) == (0.05, pytest.approx(0.3))


@pytest.mark.parametrize("draft", [None, DRAFT])
def test_genai_decode_seconds_exclude_work_after_the_last_token(draft):
    pipe = genai_runs.load(ModelSpec(DRAFT), draft and ModelSpec(draft))
    ids, found = np.arange(5, 25), []
    generate = pipe.generate
    kept = type("Kept", (), {"generate": lambda self, *given: found.append(generate(*given)) or found[-1]})()
    run = genai_runs.generate(kept, genai_runs.inputs(ids), 20, 4 if draft else None)
    raw = found[0].perf_metrics.raw_metrics
    assert run.decode_seconds == pytest.approx((raw.m_new_token_times[-1] - raw.m_new_token_times[0]) / 1000)
    assert len(raw.m_new_token_times) == len(run.gained) + 1
    assert 0 < run.decode_seconds < found[0].perf_metrics.get_generate_duration().mean / 1000 - run.ttft


# ---- prompt lookup --------------------------------------------------------------------------------------------------


class Called(Exception):
    pass


class Pipe:
    """Raises the requested lookup settings instead of generating."""

    def generate(self, inputs, config):
        raise Called(config.num_assistant_tokens, config.max_ngram_size)


def test_genai_lookup_uses_five_tokens_after_ngrams_of_three():
    with pytest.raises(Called) as call:
        genai_method("GenAI, lookup", Pipe(), "lookup 5", 8).decode(np.arange(3))
    assert call.value.args == (5, 3)


# ---- starts ---------------------------------------------------------------------------------------------------------


def test_starts_alternate_after_files_are_read(monkeypatch):
    done = []
    monkeypatch.setattr(startup, "read_files", lambda *folders: done.append(folders))
    monkeypatch.setattr(startup, "run", lambda start: done.append(start) or {"seconds": len(done), "peak_bytes": 1})
    kinds = [startup.Start("a", GENAI, False), startup.Start("b", NATIVE, True)]
    arguments = type("A", (), {"main": MAIN, "draft": DRAFT, "device": "CPU", "draft_device": "CPU", "property": []})
    first, second = startup.start_costs(kinds, arguments, 2)
    assert done[0] == (MAIN, DRAFT)
    assert [start["engine"] for start in done[1:]] == [GENAI, GENAI, NATIVE, NATIVE] * 2
    folders = [start["properties"]["CACHE_DIR"] for start in done[1:]]
    assert folders[::2] == folders[1::2] and len(set(folders)) == 4  # two starts share a cache, and no others do
    assert first["first_range"] == [2, 6] and first["first_seconds"] == 4 and first["second_range"] == [3, 7]
    assert second["name"] == "b" and done[3]["draft"] == str(DRAFT) and done[1]["draft"] is None


def test_files_are_read(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"x" * 100)
    (tmp_path / "folder").mkdir()
    startup.read_files(tmp_path)
    with pytest.raises(FileNotFoundError):
        startup.read_files(tmp_path / "nothing")


# ---- separate processes ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(not HAS_COLLAPSE, reason="Linux has MADV_COLLAPSE since 6.1")
def test_engines_run_in_own_processes_with_the_same_huge_pages():
    from speculative.bench.decoding_process import Closing, DecodingProcess, ProcessJob, measure

    genai = ProcessJob("GenAI", GENAI, ModelSpec(MAIN), None, 8, (("GenAI, main alone", 0, 0.0),), huge_pages=True)
    methods = (("ours, main alone", 0, 0.0), ("ours, K = 3", 3, 0.0))
    ours = replace(genai, name="ours", engine=NATIVE, draft=ModelSpec(DRAFT), methods=methods)
    small = replace(genai, name="usual pages", huge_pages=False)
    with Closing([DecodingProcess(job) for job in (genai, ours, small)]) as processes:
        methods = [one for process in processes for one in process.methods]
        assert measure(processes, methods, [np.arange(1, 30), np.arange(40, 60)], rounds=1, starts=2)
        assert [process._worker.started for process in processes] == [2, 2, 2]
    assert [len(one.rounds) for one in methods] == [2] * 4
    usual = max(start["huge_bytes"] for start in processes[2].starts)
    for process in processes[:2]:
        assert [start["start"] for start in process.starts] == [1, 2]
        for start in process.starts:
            assert start["huge_bytes"] > usual + 15e6 and start["load_seconds"] > 0  # half of the weights, at least
    assert methods[0].seconds == [] and all(one.seconds[0] for one in methods[1:3]) and methods[2].seconds[1]
    assert all(len(run.tokens) == 8 and run.decode_seconds > 0 for one in methods for run in one.runs())
