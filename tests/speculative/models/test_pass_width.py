"""Padded forward passes: what they cost is bounded, and they compute what passes without padding compute."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openvino_genai import GenerationConfig

from speculative import decoder
from speculative.drafting.policy import Costs
from speculative.models import cached_model, eagle3_head
from speculative.models.pass_width import MAX_PADDING, PassWidth
from speculative.models.spec import ModelSpec
from tests.support.paths import DRAFT, MAIN, ROOT

EXACT = {"EXECUTION_MODE_HINT": "ACCURACY", "KV_CACHE_PRECISION": "f32"}
SECONDS = np.cumsum([0.0, 10, *[1.0] * 16])  # 1 to 17 tokens
NEVER_CHANGED = 1e9


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), max_size=60), st.floats(0, 20))
def test_padding_costs_at_most_half_a_size_change(needed, change):
    width = PassWidth(SECONDS, change)
    last, spent = 0, 0.0
    for n in needed:
        size = width.width_for(n)
        assert size == n or size == last > n
        if size > n:
            spent += SECONDS[size] - SECONDS[n]
        else:
            spent = 0.0
        assert spent <= MAX_PADDING * change
        last = size if size < len(SECONDS) else 0


def test_size_only_grows_if_more_tokens_are_free():
    flat = PassWidth(np.ones(18), 0.5)
    assert [flat.width_for(n) for n in (1, 4, 1, 2, 5, 1)] == [1, 4, 4, 4, 5, 5]
    flat.reset()
    assert flat.width_for(2) == 2


def test_nothing_is_padded_if_size_changes_are_free():
    width = PassWidth(SECONDS, 0.0)
    assert [width.width_for(n) for n in (5, 3, 1)] == [5, 3, 1]


def test_plain_passes_are_padded_to_the_fastest_size():
    width = PassWidth(np.ones(18), 0.5, plain_size=3)
    assert [width.width_for(n) for n in (1, 2, 3, 5, 1)] == [3, 3, 3, 5, 5]
    width.plan_one()
    assert width.width_for(1) == 3 and width.is_changed
    assert width.plan(np.zeros(17), 0.1) == 3
    assert [PassWidth(np.ones(18), 0.5, pads=False, plain_size=3).width_for(n) for n in (1, 2)] == [1, 2]


def test_size_is_changed_once_the_advantages_of_another_exceed_two_changes():
    width, worth = PassWidth(SECONDS, 1.0), np.array([0.5, 1.0, 2.8, *[0.5] * 14])  # of passes over 1 to 17 tokens
    width.width_for(2)
    assert [width.plan(worth, 1.0) for _ in range(2)] == [2, 3]  # worth 1.8 more each time
    assert width.width_for(2) == 3
    assert width.plan(np.array([3.0, *[0.0] * 16]), 1.0) == 1  # earlier advantages of 3 no longer count
    assert PassWidth(SECONDS, 1.0, pads=False, plain_size=3).plan(worth, 9.0) == 1


def test_first_pass_after_a_prompt_and_changed_sizes_are_marked():
    width, marks = PassWidth(SECONDS, 0.0), []
    for n in (1, 1, 2, 20, 2):  # 20 are a prompt's
        width.width_for(n)
        marks.append((width.is_first, width.is_changed))
    assert marks == [(True, True), (False, False), (False, True), (False, True), (True, True)]


def test_time_spent_on_padding_is_counted_from_the_last_change():
    width = PassWidth(SECONDS, 4.0)
    assert [width.width_for(n) for n in (3, 1, 1, 3, 1, 1)] == [3, 3, 1, 3, 3, 1]


@pytest.mark.parametrize(
    ("seconds", "fastest"),
    [
        ({1: 16.1, 2: 16.5, 3: 14.1, 4: 14.1, 6: 13.8, 8: 16.1, 17: 21.9}, 6),  # SmolLM2-135M on AMD EPYC
        ({1: 16.1, 2: 16.5, 3: 13.9, 6: 13.8, 17: 21.9}, 3),
        ({1: 14.2, 3: 14.0, 6: 13.8, 17: 21.9}, 1),  # not clearly faster
        ({1: 21.0, 3: 26.0, 5: 30.0, 17: 58.0}, 1),
    ],
)
def test_fastest_size_is_one_unless_another_is_clearly_faster(seconds, fastest):
    assert Costs(1.0, seconds).fastest() == fastest


@pytest.fixture(scope="module")
def padded():
    model = cached_model.load(ModelSpec(DRAFT, properties=EXACT), capacity=96)
    model.pass_width = PassWidth(np.ones(18), NEVER_CHANGED)
    return model


@pytest.fixture(scope="module")
def plain():
    return cached_model.load(ModelSpec(DRAFT, properties=EXACT), capacity=96)


@pytest.fixture
def sizes(padded, monkeypatch):
    """(start, tokens) of each pass of `padded`."""
    found, run = [], padded.backend.run
    monkeypatch.setattr(
        padded.backend,
        "run",
        lambda start, tokens, last: found.append((start, len(tokens))) or run(start, tokens, last),
    )
    return found


def test_logits_equal_those_without_padding(padded, plain, sizes):
    """Over rejected tokens and up to the end of the cache, where no padding fits."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, padded.vocab_size, 20)
    for model in (padded, plain):
        model.logits(tokens)
    while len(tokens) < 90:
        n = int(random.integers(1, 7))
        tokens = np.append(tokens, random.integers(0, padded.vocab_size, n))
        np.testing.assert_allclose(padded.logits(tokens, last=n), plain.logits(tokens, last=n), atol=1e-4)
        tokens = tokens[: len(tokens) - int(random.integers(0, n))]  # the last ones are rejected
    assert {n for start, n in sizes if 60 < start < 80} == {6}
    assert all(start + n <= 96 for start, n in sizes)


def test_nothing_is_padded_after_a_prompt(padded, sizes):
    """The last pass had the prompt's size: padding to an earlier one would save nothing."""
    for end, last in ((10, 1), (14, 4), (15, 1), (40, 1), (41, 1)):
        padded.logits(np.arange(end), last=last)
    assert [n for _, n in sizes[1:]] == [4, 4, 25, 1]


def test_hidden_states_exclude_padding():
    """A head reads the hidden states of the tokens in the cache, which excludes padding."""
    head = ModelSpec(ROOT / "models/embedded/eagle3", properties=EXACT)
    models = [eagle3_head.load(ModelSpec(MAIN, properties=EXACT), head, capacity=64)[0] for _ in range(2)]
    models[1].pass_width = PassWidth(np.ones(18), NEVER_CHANGED)
    tokens = np.arange(100, 130)
    for model in models:
        for end, last in ((10, 1), (14, 4), (15, 1), (17, 2), (18, 1)):
            model.logits(tokens[:end], last=last)
    states = [model.hidden_states[:18] for model in models]
    np.testing.assert_allclose(*states, rtol=1e-4, atol=1e-2)  # up to 300: f32 sums in another order


def test_only_engines_that_draft_pad_passes():
    for draft, longest, pads in (DRAFT, None, True), (None, None, False), (None, 3, True):
        engine = decoder.load(MAIN, draft, max_ngram_size=longest)
        engine.generate(np.arange(100, 110), GenerationConfig(max_new_tokens=2))
        assert (engine.main.pass_width is not None) == pads
