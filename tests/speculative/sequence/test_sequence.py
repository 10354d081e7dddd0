"""Limits, draft tokens and stop conditions of a sequence, with invented logits instead of a model."""

import weakref

import numpy as np
import pytest
from openvino_genai import GenerationConfig, StructuredOutputConfig

from speculative.sampling.params import SamplingParams
from speculative.sampling.proposal import Proposal
from speculative.sampling.rejection_sampling import OneHot
from speculative.sequence.result import Step
from speculative.sequence.sequence import Sequence
from tests.support.languages import grammars

WIDTH, CAPACITY = 8, 10
STOP = 0


def text_of(prompt, **config):
    config = GenerationConfig(**config)
    params = SamplingParams.resolve(config, len(prompt), CAPACITY, frozenset({STOP}), grammars=grammars())
    return Sequence(np.array(prompt, np.int64), params, WIDTH, np.random.default_rng(0))


def verify(text, *tokens):
    """The main model generates `tokens`."""
    return text.verify(np.eye(WIDTH, dtype=np.float32)[list(tokens)])


def draft(text, *tokens):
    for token in tokens:
        text.draft(Proposal(token, OneHot(token, WIDTH), lambda: 1.0))


@pytest.mark.parametrize(
    ("prompt", "config", "words"),
    [
        ([1, WIDTH], {}, "range from 1 to 8, the model's from 0 to 7"),
        ([-1, 1], {}, "range from -1 to 1"),
        ([1] * CAPACITY, {}, "10 tokens, but the context only fits 9"),
        ([1] * 3, {"max_length": 3}, "max_length is 3"),
    ],
    ids=str,
)
def test_prompt_beyond_the_limits_is_rejected(prompt, config, words):
    with pytest.raises(ValueError, match=words):
        text_of(prompt, **config)


@pytest.mark.parametrize(
    ("prompt", "config", "longest"),
    [
        ([0, WIDTH - 1], {}, CAPACITY),
        ([1] * (CAPACITY - 1), {"max_new_tokens": 5}, CAPACITY),
        ([1] * 3, {"max_length": 4}, 4),
        ([1] * 3, {"max_length": 4, "max_new_tokens": 2}, 5),
    ],
    ids=str,
)
def test_prompt_within_the_limits_can_grow_up_to_them(prompt, config, longest):
    text = text_of(prompt, **config)
    assert text.max_length == longest
    while not text.is_finished:
        verify(text, 1)
    assert len(text.token_ids) == longest


def test_drafting_is_possible_between_first_and_last_token_only():
    text = text_of([1, 2, STOP], max_new_tokens=4)
    assert not text.can_draft
    verify(text, 3)
    assert text.can_draft and text.num_logits == 1
    draft(text, 4)
    assert text.can_draft
    draft(text, 5)
    assert not text.can_draft and text.token_ids.tolist() == [1, 2, STOP, 3, 4, 5] and text.num_logits == 3
    text.drop_draft()
    draft(text, STOP)
    assert not text.can_draft
    text.drop_draft()
    assert text.can_draft and text.token_ids.tolist() == [1, 2, STOP, 3]


@pytest.mark.parametrize(
    ("main_tokens", "gained"),
    [
        ([4, 5, 6, 7], ([4, 5, 6, 7], 3)),
        ([4, 6, 1, 1], ([4, 6], 1)),
        ([7, 5, 6, 1], ([7], 0)),
        ([4, 5, STOP, 1], ([4, 5, STOP], 2)),
    ],
    ids=str,
)
def test_draft_tokens_equal_to_the_main_models_are_accepted(main_tokens, gained):
    text = text_of([1, 2], max_new_tokens=8)
    verify(text, 3)
    draft(text, 4, 5, 6)
    tokens, accepted = gained
    assert verify(text, *main_tokens) == Step(tokens, accepted, 3)
    assert text.token_ids.tolist() == [1, 2, 3, *tokens] and text.is_finished == (STOP in tokens) and not text.drafted


def test_sequence_ends_at_the_first_stop_token():
    text = text_of([1], max_new_tokens=8, stop_token_ids={4, 5})
    verify(text, STOP)  # the config names other stop tokens
    draft(text, 4, 5)
    assert verify(text, 4, 5, 6) == Step([4], 2, 2) and text.is_finished


def test_penalties_apply_to_generated_tokens_only():
    text = text_of([1, 1, 2], do_sample=True, presence_penalty=1.0)
    p = text.distribution(np.zeros(WIDTH, np.float32), np.array([1, 1, 2, 3, 4]))
    assert np.flatnonzero(p < p.max()).tolist() == [3, 4]


def test_masks_before_verified_tokens_are_freed():
    """A mask may list half of the vocabulary."""
    text = text_of([1], structured_output_config=StructuredOutputConfig(regex="b{8}"))
    verify(text, 1)
    draft(text, 1, 1)
    masks = [weakref.ref(text._grammar.mask(np.ones(n, np.int64))) for n in (1, 2, 3)]
    assert all(mask() for mask in masks) and verify(text, 1, 1, 1) == Step([1, 1, 1], 2, 2)
    assert not any(mask() for mask in masks)
