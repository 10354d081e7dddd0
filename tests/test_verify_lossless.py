"""verify_lossless: its statistics checked by other means, then the script, with right and with broken engines.

The embedded pair changes roles, so that the main model is the quick one.
"""

import json
import os
import signal
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from conftest import DRAFT, MAIN, ROOT
from waiting import PATIENCE, wait_until_loaded

from speculative import lossless_check
from speculative.lossless_check import OTHER, cell_of, compare, exact_joint

SCRIPT = "scripts/verify_lossless.py"
QUICK = (DRAFT, MAIN, "--draws", "100", "--max-new-tokens", "16", "-k", "2")


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


def test_the_joint_distribution_is_the_product_of_all_steps():
    p = markov_chain(4)
    cells = exact_joint(p, 3)
    assert len(cells) == 64
    assert cells[2, 0, 3] == pytest.approx(p(())[2] * p((2,))[0] * p((0,))[3])


@pytest.mark.parametrize("resolution", [0, 0.01, 0.2])
def test_every_text_has_one_cell_at_any_resolution_and_cells_have_their_texts_probability(resolution):
    p = markov_chain(4)
    cells = exact_joint(p, 3, resolution)
    assert sum(cells.values()) == pytest.approx(1)
    assert all(probability >= resolution for cell, probability in cells.items() if cell[-1] != OTHER)
    added_up = Counter()
    for text, probability in exact_joint(p, 3).items():
        added_up[cell_of(text, cells)] += probability
    assert added_up == pytest.approx({cell: probability for cell, probability in cells.items() if cell in added_up})
    assert sum(added_up.values()) == pytest.approx(1)


def test_a_stop_token_ends_a_text():
    p = markov_chain(3)
    cells = exact_joint(p, 3, stop_token_ids={2})
    assert cells[2,] == pytest.approx(p(())[2])
    assert (0, 2) in cells and (0, 2, 1) not in cells
    assert sum(cells.values()) == pytest.approx(1)


def test_too_many_beginnings_are_refused_before_they_are_computed(monkeypatch):
    monkeypatch.setattr(lossless_check, "MOST_PREFIXES", 10)
    with pytest.raises(ValueError, match="16 beginnings"):
        exact_joint(markov_chain(4), 3)


def test_a_token_that_cannot_come_is_impossible():
    cells = exact_joint(lambda tokens: np.array([0.5, 0.5, 0.0]), 2)
    comparison = compare([(0, 1)] * 99 + [(0, 2)], cells)
    assert (comparison.impossible, comparison.p_value) == (1, 0.0)


def test_the_noise_is_what_perfect_draws_have():
    probabilities = np.random.default_rng(0).dirichlet(np.full(100, 0.3))
    for draws in (20, 300, 5000):
        counts = np.random.default_rng(1).multinomial(draws, probabilities, 4000)
        simulated = np.abs(counts / draws - probabilities).sum(1) / 2
        expected = lossless_check.expected_total_variation(probabilities, draws)
        assert expected == pytest.approx(simulated.mean(), abs=5 * simulated.std() / 4000**0.5)


def test_p_values_of_perfect_draws_are_uniform():
    probabilities = np.random.default_rng(0).dirichlet(np.full(200, 0.3))
    for draws in (200, 3000):
        counts = np.random.default_rng(1).multinomial(draws, probabilities, 4000)
        p_values = np.array([lossless_check.chi_square_p_value(seen, probabilities) for seen in counts])
        for level in (0.5, 0.1, 0.01):
            assert np.mean(p_values < level) == pytest.approx(level, abs=0.03)


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
def test_the_chi_square_distribution_is_that_of_the_tables(statistic, degrees, p):
    assert lossless_check._chi_square_above(statistic, degrees) == pytest.approx(p, rel=2e-3)


def test_comparing_finds_a_wrong_distribution_and_passes_the_right_one():
    cells = exact_joint(markov_chain(4), 3, resolution=0.002)
    assert compare(draw_texts(markov_chain(4), 3, 3000), cells).p_value > 1e-4
    wrong = compare(draw_texts(markov_chain(4, seed=2), 3, 3000), cells)
    assert wrong.p_value < 1e-9 and wrong.total_variation > 3 * wrong.noise


# ---- the script -----------------------------------------------------------------------------------------------------


def by_path(process):
    document = json.loads(process.stdout.splitlines()[-1])
    return document, *({row["path"]: row for row in document[mode]} for mode in ("greedy", "sampled"))


def test_the_engine_is_lossless_and_genai_is_not_with_a_draft(run):
    """A failure here may mean that GenAI has changed: then the README and the facts about it are to change, too."""
    process = run(SCRIPT, *QUICK)
    assert process.returncode == 0, process.stdout + process.stderr
    document, greedy, sampled = by_path(process)
    assert document["ok"]
    for way in ("draft, K = 2", "draft, by confidence", "draft, adaptive", "lookup, K = 2"):
        assert greedy[f"engine {way}"]["verdict"] == "equal" and greedy[f"engine {way}"]["same"] == 3
        assert sampled[f"engine {way}"]["verdict"] == "exact" and sampled[f"engine {way}"]["draws"] == 100
    for way in ("draft, K = 2", "draft, by confidence"):
        assert 0 < sampled[f"engine {way}"]["acceptance_rate"] < 1
    for way in ("main alone", "lookup, K = 2"):
        assert greedy[f"GenAI {way}"]["verdict"] == "equal" and sampled[f"GenAI {way}"]["verdict"] == "exact"
    assert greedy["GenAI draft, K = 2"]["verdict"] == "equal"
    assert sampled["GenAI draft, K = 2"]["verdict"] in ("crashes", "NOT lossless")
    assert sampled["GenAI draft, K = 2"]["crashes"] <= 5
    wrong = sampled["GenAI draft, K = 2, no prefix cache"]
    assert wrong["verdict"] == "NOT lossless" and wrong["crashes"] == 0
    lines = process.stdout.splitlines()
    assert any(line.startswith("engine draft, adaptive") and line.endswith("exact") for line in lines)


def run_with(patch, *arguments):
    """Run the script with a line of Python before it that breaks the engine."""
    start = (
        f"import runpy, sys; sys.path[:0] = ['.', 'scripts']; {patch}; runpy.run_path('{SCRIPT}', run_name='__main__')"
    )
    command = [sys.executable, "-c", start, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", timeout=300)


ACCEPT_ALL = (
    "import speculative.growing_text as d, speculative.rejection_sampling as r; "
    "d.verify = lambda drafted, q, p, random: r.Verdict(len(drafted), r.draw(p(len(drafted)), random))"
)
CRASH = (
    "import speculative.draft_source as d; "
    "d.ModelDraft.propose = lambda *_: (_ for _ in ()).throw(RuntimeError('the planted crash'))"
)


NO_GENAI = (
    "import speculative.genai_runs as g; load = g.load; "
    "g.load = lambda *a: load(*a) if a[2] is None else (_ for _ in ()).throw(RuntimeError('a planted failure'))"
)


def test_an_engine_that_accepts_everything_fails():
    process = run_with(ACCEPT_ALL, *QUICK)
    assert process.returncode == 1, process.stderr
    document, greedy, sampled = by_path(process)
    assert not document["ok"]
    assert sampled["engine draft, K = 2"]["verdict"] == "NOT lossless"
    wrong = greedy["engine draft, K = 2"]
    assert wrong["verdict"] == "NOT equal"
    assert any(difference["margin"] > 0.1 and not difference["near_tie"] for difference in wrong["differences"])
    assert greedy["engine main alone"]["verdict"] == "equal"


def test_a_crash_of_the_engine_fails_and_ends_nothing_else():
    process = run_with(CRASH, *QUICK, "--top-k", "3", "--top-p", "0.9", "--temperature", "0.7")
    assert process.returncode == 1, process.stderr
    document, greedy, sampled = by_path(process)
    assert document["environment"]["sampling"] == {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 3}
    crashed = sampled["engine draft, K = 2"]
    assert (crashed["crashes"], crashed["requests"]) == (5, 5)
    assert "the planted crash" in crashed["crash"]
    assert greedy["engine draft, K = 2"]["verdict"] == "crashes"
    assert sampled["engine lookup, K = 2"]["verdict"] == "exact"
    assert sampled["GenAI main alone"]["verdict"] == "exact"


def test_what_is_wrong_in_genai_fails_if_strict():
    """Played by a pipeline that does not load, so that this does not rest on what GenAI does today."""
    process = run_with(NO_GENAI, *QUICK, "--strict")
    document, _, sampled = by_path(process)
    assert (process.returncode, document["ok"]) == (1, False), process.stderr
    assert all(row["holds"] for row in (*document["greedy"], *document["sampled"]) if row["ours"])
    assert sampled["GenAI draft, K = 2"]["crash"] == "a planted failure"


@pytest.mark.parametrize(
    ("arguments", "status", "word"),
    [
        (["no/such/folder", DRAFT], 2, "no/such/folder"),
        ([MAIN, DRAFT, "--draws", "0"], 2, "0"),
        ([MAIN, DRAFT, "--draws", "99"], 2, "99"),
        ([MAIN, DRAFT, "--temperature", "0"], 2, "--temperature"),
        ([MAIN, DRAFT, "--top-p", "1.5"], 2, "1.5"),
        ([MAIN, DRAFT, "--top-k", "few"], 2, "few"),
        ([MAIN, DRAFT, "--prompts", "no/such/file"], 2, "no/such/file"),
        ([MAIN, DRAFT, "--property", "THREADS"], 2, "KEY=VALUE"),
        ([MAIN, DRAFT, "--device", "GPX"], 2, "there is no GPX: it is no device of OpenVINO"),
    ],
)
def test_bad_input_is_one_sentence(run, arguments, status, word):
    process = run(SCRIPT, *arguments)
    said = process.stdout + process.stderr
    assert process.returncode == status, said
    assert word in said and "Traceback" not in said and process.stdout == ""


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.parametrize("loaded", ["libopenvino", "intel_cpu_plugin"])
def test_ctrl_c_ends_at_once_without_a_trace(loaded):
    command = [sys.executable, SCRIPT, str(MAIN), str(DRAFT)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8")
    wait_until_loaded(loaded, process)
    process.send_signal(signal.SIGINT)
    out, said = process.communicate(timeout=PATIENCE)
    assert process.returncode in (-signal.SIGINT, 130), said
    assert "Traceback" not in said and out == ""
