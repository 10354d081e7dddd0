"""verify_lossless.py: its statistics against independent computations, and the script with correct and broken engines.

The script runs with a pair of tiny models, and with --long with the embedded pair, whose roles are swapped, so that the
main model is the fast one.
"""

import json
import signal
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from openvino_genai import GenerationConfig

from speculative.bench import genai
from speculative.bench.lossless.methods import PATHS, CheckedMethod, Draw
from speculative.bench.lossless.verdicts import ALPHA, judge_texts
from speculative.bench.result import LosslessResult
from speculative.decoder import Decoder
from speculative.drafting.proposers import DraftModelProposer
from speculative.drafting.suffix import SuffixProposer
from speculative.models import cached_model
from speculative.models.spec import ModelSpec
from speculative.sampling import lossless_check
from speculative.sampling.lossless_check import OTHER, cell_of, compare, exact_joint
from speculative.sampling.params import SamplingParams
from speculative.sampling.rejection_sampling import Acceptance, draw
from speculative.sequence.sequence import Sequence
from tests.support.paths import DRAFT, MAIN, ROOT
from tests.support.tiny_llama import save_tiny_pair
from tests.support.typed import problems
from tests.support.waiting import PATIENCE, wait_until_loaded

SCRIPT = "scripts/verify_lossless.py"
NO_DIFFERENCE = "no difference found"
FEW = ("--max-new-tokens", "16", "-k", "2")


# ---- statistics -----------------------------------------------------------------------------------------------------


def markov_chain(size, seed=0):
    """A language model that looks at the last token only: a function from tokens to the next one's distribution."""
    table = np.random.default_rng(seed).dirichlet(np.full(size, 0.4), size + 1)
    return lambda tokens: table[tokens[-1] if tokens else size]


def draw_texts(next_token, length, number, seed=1):
    random = np.random.default_rng(seed)
    texts = []
    for _ in range(number):
        text = ()
        while len(text) < length:
            p = next_token(text)
            text += (int(random.choice(len(p), p=p)),)
        texts.append(text)
    return texts


def test_joint_distribution_is_product_of_all_steps():
    p = markov_chain(4)
    cells = exact_joint(p, 3)
    assert len(cells) == 64
    assert cells[2, 0, 3] == pytest.approx(p(())[2] * p((2,))[0] * p((0,))[3])


@pytest.mark.parametrize("resolution", [0, 0.01, 0.2])
def test_every_text_belongs_to_one_cell_at_any_resolution(resolution):
    p = markov_chain(4)
    cells = exact_joint(p, 3, resolution)
    assert sum(cells.values()) == pytest.approx(1)
    assert all(probability >= resolution for cell, probability in cells.items() if cell[-1] != OTHER)
    added_up = Counter()
    for text, probability in exact_joint(p, 3).items():
        added_up[cell_of(text, cells)] += probability
    assert added_up == pytest.approx({cell: probability for cell, probability in cells.items() if cell in added_up})
    assert sum(added_up.values()) == pytest.approx(1)


def test_stop_token_ends_a_text():
    p = markov_chain(3)
    cells = exact_joint(p, 3, stop_token_ids={2})
    assert cells[2,] == pytest.approx(p(())[2])
    assert (0, 2) in cells and (0, 2, 1) not in cells
    assert sum(cells.values()) == pytest.approx(1)


def test_too_many_prefixes_are_rejected_before_computation(monkeypatch):
    monkeypatch.setattr(lossless_check, "MAX_PREFIXES", 10)
    with pytest.raises(ValueError, match="16 prefixes"):
        exact_joint(markov_chain(4), 3)


def test_token_of_probability_zero_is_impossible():
    cells = exact_joint(lambda tokens: np.array([0.5, 0.5, 0.0]), 2)
    comparison = compare([(0, 1)] * 99 + [(0, 2)], cells)
    assert (comparison.impossible, comparison.p_value) == (1, 0.0)


def test_expected_noise_matches_simulation():
    probabilities = np.random.default_rng(0).dirichlet(np.full(100, 0.3))
    for draws in (20, 300, 5000):
        counts = np.random.default_rng(1).multinomial(draws, probabilities, 4000)
        simulated = np.abs(counts / draws - probabilities).sum(1) / 2
        expected = lossless_check.expected_total_variation(probabilities, draws)
        assert expected == pytest.approx(simulated.mean(), abs=5 * simulated.std() / 4000**0.5)


def test_p_values_of_correct_samples_are_uniform():
    probabilities = np.random.default_rng(0).dirichlet(np.full(200, 0.3))
    for draws in (200, 3000):
        counts = np.random.default_rng(1).multinomial(draws, probabilities, 4000)
        p_values = np.array([lossless_check.chi_square_p_value(seen, probabilities) for seen in counts])
        for level in (0.5, 0.1, 0.01):
            assert np.mean(p_values < level) == pytest.approx(level, abs=0.03)


@pytest.mark.parametrize("draws", [300, 3000])
@pytest.mark.parametrize("likeliest", [0.9995, 0.999, 0.99])
def test_nearly_certain_texts_cause_no_false_alarms(likeliest, draws):
    """Of so few expected draws in all other cells, a chi-square test raised 0.1 to 1 % instead of 0.01 %."""
    rest = (1 - likeliest) * np.array([0.6, 0.3, 0.1, 0.0])
    cells = {(i,): p for i, p in enumerate([likeliest, *rest])}
    p = np.array(list(cells.values()))
    tails = np.array([lossless_check._binomial_p_value(k, draws, 1 - likeliest) for k in range(60)])
    chances = np.diff([lossless_check._binomial_below(k, draws, 1 - likeliest) for k in range(61)])
    assert chances[tails < ALPHA].sum() < ALPHA
    counts = np.random.default_rng(0).multinomial(draws, p, 200)
    p_values = [lossless_check.chi_square_p_value(seen, p) for seen in counts]
    expected = [lossless_check._binomial_p_value(int(seen[1:].sum()), draws, 1 - likeliest) for seen in counts]
    if draws * (1 - likeliest) < lossless_check.EXPECTED:
        assert p_values == pytest.approx(expected)
        stated = lossless_check.detectable_total_variation(cells, draws, ALPHA)
        wrong = np.random.default_rng(1).binomial(draws, 1 - likeliest + 1.02 * stated, 1000)
        found = [lossless_check._binomial_p_value(int(seen), draws, 1 - likeliest) < ALPHA for seen in wrong]
        assert 0.87 < np.mean(found) < 0.99


@pytest.mark.filterwarnings("error")
def test_certain_text_is_compared_without_a_warning():
    cells = {(0,): 1.0, (1,): 0.0}
    right, wrong = compare([(0,)] * 100, cells), compare([(0,)] * 99 + [(1,)], cells)
    assert (right.p_value, wrong.p_value) == (1.0, 0.0)
    assert lossless_check.detectable_total_variation(cells, 100, ALPHA) < 0.05


@pytest.mark.parametrize(
    ("statistic", "degrees", "p"),
    [
        (3.841, 1, 0.05),
        (10.828, 1, 0.001),
        (5.991, 2, 0.05),
        (7.815, 3, 0.05),
        (29.588, 10, 0.001),
        (149.449, 100, 0.001),
    ],
)
def test_chi_square_distribution_matches_tables(statistic, degrees, p):
    assert lossless_check._chi_square_above(statistic, degrees) == pytest.approx(p, rel=2e-3)


def test_comparison_detects_wrong_distribution_and_passes_right_one():
    cells = exact_joint(markov_chain(4), 3, resolution=0.002)
    assert compare(draw_texts(markov_chain(4), 3, 3000), cells).p_value > 1e-4
    wrong = compare(draw_texts(markov_chain(4, seed=2), 3, 3000), cells)
    assert wrong.p_value < 1e-9 and wrong.total_variation > 3 * wrong.noise


SHAPES = [(3, 2), (40, 0.3), (400, 0.1)]  # few cells, some, and many of which most are merged


@pytest.mark.parametrize("draws", [300, 3000])
@pytest.mark.parametrize(("size", "evenness"), SHAPES)
def test_detectable_distance_is_found_with_90_percent_power(size, evenness, draws):
    """The hardest wrong sampler of that distance to detect: all probabilities are off by the same factor."""
    random = np.random.default_rng(0)
    p = random.dirichlet(np.full(size, evenness))
    cells = {(i,): float(probability) for i, probability in enumerate(p)}
    stated = lossless_check.detectable_total_variation(cells, draws, ALPHA)
    order, starts = lossless_check._cells_of_test(p, draws)
    of_test = np.add.reduceat(p[order], starts)  # rare cells are merged: differences among them are not detected
    goes_up = np.zeros(len(of_test), bool)
    for cell in np.argsort(of_test)[:-1]:
        goes_up[cell] = of_test[goes_up].sum() + of_test[cell] <= 0.5
    up = np.empty(size, bool)
    up[order] = np.repeat(goes_up, np.diff([*starts, size]))  # about half of the probability; the other half goes down
    toward = np.where(up, p / p[up].sum(), -p / p[~up].sum())
    q = p + 1.02 * stated * toward
    assert (q > 0).all() and np.abs(q - p).sum() / 2 == pytest.approx(1.02 * stated)
    p_values = [lossless_check.chi_square_p_value(seen, p) for seen in random.multinomial(draws, q, 1000)]
    assert np.mean(np.array(p_values) < ALPHA) > 0.87


def test_detectable_distance_matches_chi_square_tables():
    """From the noncentralities of the published tables (Haynam, Govindarajulu and Leone 1962)."""
    known = [(2, 0.05, 0.8, 7.849), (2, 0.05, 0.9, 10.507), (2, 0.01, 0.9, 14.879), (3, 0.05, 0.9, 12.654)]
    for alternatives, alpha, power, noncentrality in known:
        cells = {(i,): 1 / alternatives for i in range(alternatives)}
        stated = lossless_check.detectable_total_variation(cells, 1000, alpha, power)
        assert stated == pytest.approx((noncentrality / 4000) ** 0.5, rel=1e-4)


def test_single_cell_gives_no_comparison():
    cells = exact_joint(lambda tokens: np.full(1000, 0.001), 2, resolution=0.01)
    assert list(cells) == [(OTHER,)]
    assert compare([(1, 2)] * 500, cells).p_value == 1  # whatever was drawn
    assert lossless_check.detectable_total_variation(cells, 500, ALPHA) is None


# ---- greedy texts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("margin", "verdict"), [(0.02, "equal except near-ties"), (0.1, "NOT equal"), (-0.1, "NOT equal")]
)
def test_near_tie_margin_is_relative_to_logits_spread(margin, verdict):
    """The margin of the reference's second token, 5, over that of the other text, 6."""
    logits = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    logits[6] = logits[5] - margin * logits.std()
    main = SimpleNamespace(reset=lambda: None, logits=lambda tokens: logits[None])
    reference = CheckedMethod("alone", True, None, is_alone=True, texts=[Draw([1, 5, 2])])
    method = CheckedMethod("draft", True, None, texts=[Draw([1, 6, 2])])
    assert judge_texts(method, reference, main, [np.arange(3)])["verdict"] == verdict


# ---- the script -----------------------------------------------------------------------------------------------------


def test_default_number_of_draws_detects_small_differences(kept_signals, monkeypatch):
    from scripts import verify_lossless

    monkeypatch.setattr("sys.argv", [SCRIPT, str(MAIN), str(DRAFT)])
    usual = verify_lossless.parse_arguments().draws
    cells = {(i,): 1 / 8 for i in range(8)}
    assert lossless_check.detectable_total_variation(cells, usual, ALPHA) < 0.06


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny_pair(tmp_path_factory.mktemp("tiny"))


def by_path(process):
    document = json.loads(process.stdout.splitlines()[-1])
    assert problems(document, LosslessResult) == []
    return document, *({row["path"]: row for row in document[mode]} for mode in ("greedy", "sampled"))


@pytest.mark.parametrize(
    ("pair", "draws"), [("tiny", 300), pytest.param("embedded", 100, marks=pytest.mark.long)], ids=["tiny", "embedded"]
)
def test_engine_is_lossless_and_genai_with_draft_is_not(run, tiny, pair, draws):
    """A failure here may mean that GenAI has changed. Then update the README and the documented facts about GenAI."""
    process = run(SCRIPT, *(tiny if pair == "tiny" else (DRAFT, MAIN)), "--draws", draws, *FEW)
    assert process.returncode == 0, process.stdout + process.stderr
    document, greedy, sampled = by_path(process)
    assert document["ok"] and document["environment"]["paths"] == list(PATHS)
    adaptive = ("draft, adaptive", "lookup, adaptive", "draft and lookup, adaptive")
    for method in ("draft, K = 2", "draft, by confidence", "lookup, K = 2", *adaptive):
        assert greedy[f"engine {method}"]["verdict"] == "equal" and greedy[f"engine {method}"]["same"] == 3
        assert sampled[f"engine {method}"]["verdict"] == NO_DIFFERENCE and sampled[f"engine {method}"]["draws"] == draws
    for method in ("draft, K = 2", "draft, by confidence"):
        assert 0 < sampled[f"engine {method}"]["acceptance_rate"] < 1
    assert document["reference"] == "GenAI main alone" and greedy["GenAI main alone"]["verdict"] == "reference"
    assert greedy["engine main alone"]["verdict"] == greedy["GenAI lookup, K = 2"]["verdict"] == "equal"
    for method in ("main alone", "lookup, K = 2"):
        assert sampled[f"GenAI {method}"]["verdict"] == NO_DIFFERENCE
    assert greedy["GenAI draft, K = 2"]["verdict"] == "equal"
    assert sampled["GenAI draft, K = 2"]["verdict"] in ("crashes", "NOT lossless")
    assert sampled["GenAI draft, K = 2"]["crashes"] <= 5
    wrong = sampled["GenAI draft, K = 2, no prefix cache"]
    assert wrong["verdict"] == "NOT lossless" and wrong["crashes"] == 0
    lines = process.stdout.splitlines()
    assert any(line.startswith("engine draft, adaptive") and line.endswith(NO_DIFFERENCE) for line in lines)
    finds = sampled["engine draft, adaptive"]["detectable_total_variation"]
    assert 0.1 < finds < 0.5 and "exact" not in process.stdout.replace("exact distribution", "")
    sentence = f"No difference found in {draws} samples: a TV above {finds:.3f} would have been detected with 90%"
    assert f"{sentence} power." in lines


@pytest.fixture
def run_tiny(run_here, tiny):
    """Run some paths of the script with the tiny pair in this process, whose engine a test has broken."""

    def run_tiny(paths, *arguments):
        return run_here(SCRIPT, *tiny, "--draws", "100", *FEW, "--paths", paths, *arguments)

    return run_tiny


def raising(message):
    def fail(*_):
        raise RuntimeError(message)

    return fail


def accept_all(monkeypatch):
    def verify(drafted, q, p, random):
        return Acceptance(len(drafted), draw(p(len(drafted)), random))

    monkeypatch.setattr("speculative.sequence.sequence.verify", verify)


def load_only(monkeypatch, loads, message):
    """Let GenAI load only those pipelines for whose draft `loads(draft)` is true."""
    load = genai.load
    monkeypatch.setattr(genai, "load", lambda main, draft: (load if loads(draft) else raising(message))(main, draft))


def without_reference(monkeypatch):
    load_only(monkeypatch, lambda draft: draft is not None, "no reference")


@pytest.mark.parametrize("with_draft", [True, False])
def test_only_chosen_paths_run_with_or_without_draft(run_here, tiny, with_draft):
    given = (*tiny, "--paths", "lookup") if with_draft else tiny[:1]
    process = run_here(SCRIPT, *given, "--draws", "100", *FEW)
    assert process.returncode == 0, process.stderr
    document, greedy, sampled = by_path(process)
    assert ("draft" in document["environment"]) == ("draft_device" in document["environment"]) == with_draft
    methods = ["engine lookup, K = 2", "engine lookup, adaptive", "GenAI lookup, K = 2"]
    assert document["environment"]["paths"] == ["lookup"] and document["ok"]
    assert list(greedy) == ["GenAI main alone", "engine main alone", *methods]
    assert list(sampled) == ["GenAI main alone", *methods]


def test_engine_that_accepts_everything_fails(run_tiny, monkeypatch):
    accept_all(monkeypatch)
    process = run_tiny("engine")
    assert process.returncode == 1, process.stderr
    document, greedy, sampled = by_path(process)
    assert not document["ok"]
    assert sampled["engine draft, K = 2"]["verdict"] == "NOT lossless"
    wrong = greedy["engine draft, K = 2"]
    assert wrong["verdict"] == "NOT equal"
    assert any(difference["margin"] > 0.1 and not difference["near_tie"] for difference in wrong["differences"])
    assert greedy["engine main alone"]["verdict"] == "equal"


def draws_of(decoder, prompt, config, number, seed):
    """The first two new tokens of `number` texts."""
    decoder.reset(seed)
    texts = []
    for _ in range(number):
        texts.append([token for step in decoder.stream(prompt, config) for token in step.tokens][:2])
    return texts


def test_engine_slightly_beyond_detectable_distance_is_found(tiny, monkeypatch):
    """One first token is too frequent, and all others, with their continuations, are too rare by the same factor. A
    distance a quarter above the one detected with 90% power is detected nearly always."""
    main = cached_model.load(ModelSpec(tiny[0], "CPU", {"EXECUTION_MODE_HINT": "ACCURACY"}), capacity=64)
    prompt, draws, alpha = np.arange(40, 50), 400, 1e-4
    config = GenerationConfig(do_sample=True, top_k=4, max_new_tokens=5, ignore_eos=True, num_assistant_tokens=2)
    next_token = lossless_check.main_alone(main, prompt, SamplingParams.resolve(config))
    cells, first = exact_joint(next_token, 2), np.asarray(next_token(()))
    stated = lossless_check.detectable_total_variation(cells, draws, alpha)
    decoder = Decoder(main, SuffixProposer(main.vocab_size))
    assert compare(draws_of(decoder, prompt, config, draws, 1), cells).p_value > alpha

    often = int(np.flatnonzero(first == first[first <= 0.5].max())[0])
    share = 1.25 * stated / (1 - first[often])
    assert share < 1
    verify = Sequence.verify

    def wrong(self, logits):
        if self.is_prefill and self.random.random() < share:
            logits = np.full_like(logits, -1e4)
            logits[0, often] = 0
        return verify(self, logits)

    monkeypatch.setattr(Sequence, "verify", wrong)
    found = compare(draws_of(decoder, prompt, config, draws, 1), cells)
    assert found.p_value < alpha
    assert found.total_variation == pytest.approx(1.25 * stated, abs=0.1)  # no gross bug


def test_native_reference_is_used_if_genai_fails(run_tiny, monkeypatch):
    without_reference(monkeypatch)
    process = run_tiny("engine")
    document, greedy, _ = by_path(process)
    assert (process.returncode, document["ok"]) == (0, True), process.stderr
    assert document["reference"] == "engine main alone" and greedy["engine main alone"]["verdict"] == "reference"
    assert greedy["GenAI main alone"]["verdict"] == "crashes"
    assert (greedy["engine draft, K = 2"]["verdict"], greedy["engine draft, K = 2"]["same"]) == ("equal", 3)
    assert "GenAI main alone failed (no reference): the texts are compared with engine main alone." in process.stdout


def test_wrong_engine_fails_without_genai_reference(run_tiny, monkeypatch):
    without_reference(monkeypatch)
    accept_all(monkeypatch)
    process = run_tiny("engine")
    assert process.returncode == 1, process.stderr
    assert by_path(process)[1]["engine draft, K = 2"]["verdict"] == "NOT equal"


def test_nothing_is_called_equal_without_a_reference(run_tiny, monkeypatch):
    without_reference(monkeypatch)
    steps = Decoder._steps
    monkeypatch.setattr(Decoder, "_steps", lambda self, *a: (steps if self.draft else raising("none"))(self, *a))
    process = run_tiny("engine")
    document, greedy, _ = by_path(process)
    assert (process.returncode, document["ok"], document["reference"]) == (1, False, None), process.stderr
    assert greedy["engine draft, K = 2"]["verdict"] == "not compared" and greedy["engine draft, K = 2"]["same"] == 0
    assert {row["verdict"] for row in greedy.values()} == {"crashes", "not compared"}
    assert "no text could be compared" in process.stdout


def test_engine_crash_fails_only_its_method(run_tiny, monkeypatch):
    monkeypatch.setattr(DraftModelProposer, "propose", raising("the planted crash"))
    process = run_tiny("engine,lookup", "--top-k", "3", "--top-p", "0.9", "--temperature", "0.7")
    assert process.returncode == 1, process.stderr
    document, greedy, sampled = by_path(process)
    assert document["environment"]["sampling"] == {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 3}
    crashed = sampled["engine draft, K = 2"]
    assert (crashed["crashes"], crashed["requests"]) == (5, 5)
    assert "the planted crash" in crashed["crash"]
    assert greedy["engine draft, K = 2"]["verdict"] == "crashes"
    assert sampled["engine lookup, K = 2"]["verdict"] == NO_DIFFERENCE
    assert sampled["GenAI main alone"]["verdict"] == NO_DIFFERENCE


def test_strict_option_fails_on_genai_errors(run_tiny, monkeypatch):
    """A pipeline that does not load stands in for a GenAI error, so the test does not depend on GenAI's version."""
    load_only(monkeypatch, lambda draft: draft is None, "a planted failure")
    for strict, status in (((), 0), (("--strict",), 1)):
        process = run_tiny("engine,genai", *strict)
        document, _, sampled = by_path(process)
        assert (process.returncode, document["ok"]) == (status, not status), process.stderr
        assert all(row["holds"] for row in (*document["greedy"], *document["sampled"]) if row["ours"])
        assert sampled["GenAI draft, K = 2"]["crash"] == "a planted failure"


@pytest.mark.parametrize(
    ("arguments", "status", "word"),
    [
        (["no/such/folder", DRAFT], 2, "no/such/folder"),
        (["no/such/folder"], 2, "error: there is no folder no/such/folder"),
        ([MAIN, "--paths", "engine,lookup"], 2, "error: --paths engine requires a draft: add its folder, or measure"),
        ([MAIN, "--draft-device", "GPU"], 2, "error: --draft-device requires a draft: add its folder"),
        ([MAIN, DRAFT, "--draws", "0"], 2, "0"),
        ([MAIN, DRAFT, "--draws", "99"], 2, "99"),
        ([MAIN, DRAFT, "--temperature", "0"], 2, "--temperature"),
        ([MAIN, DRAFT, "--top-p", "1.5"], 2, "1.5"),
        ([MAIN, DRAFT, "--seed", "-1"], 2, "'-1' is not a whole number from 0"),
        ([MAIN, DRAFT, "--seed", "99999999999999999999"], 2, "is not a whole number from 0"),
        ([MAIN, DRAFT, "--top-k", "few"], 2, "few"),
        ([MAIN, DRAFT, "--prompts", "no/such/file"], 2, "no/such/file"),
        ([MAIN, DRAFT, "--property", "THREADS"], 2, "KEY=VALUE"),
        ([MAIN, DRAFT, "--paths", "engine,ours"], 2, "'engine,ours' is not a list of engine, genai, lookup"),
        ([MAIN, DRAFT, "--device", "GPX"], 2, "there is no GPX: it is not an OpenVINO device"),
    ],
)
def test_bad_input_gives_one_sentence_error(run_here, arguments, status, word):
    process = run_here(SCRIPT, *arguments)
    output = process.stdout + process.stderr
    assert process.returncode == status, output
    assert word in output and "Traceback" not in output and process.stdout == ""


@pytest.mark.posix("signals")
@pytest.mark.parametrize("loaded", ["libopenvino", "intel_cpu_plugin"])
def test_ctrl_c_exits_at_once_without_traceback(loaded):
    command = [sys.executable, SCRIPT, str(MAIN), str(DRAFT)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8")
    wait_until_loaded(loaded, process)
    process.send_signal(signal.SIGINT)
    out, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode in (-signal.SIGINT, 130), stderr
    assert "Traceback" not in stderr and out == ""
