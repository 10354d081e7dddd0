"""SamplingParams: defaults for what a GenerationConfig leaves open, and rejected configs."""

import dataclasses
import re
import shutil

import numpy as np
import openvino_genai
import pytest
from openvino_genai import GenerationConfig, Tokenizer

from speculative.sampling.distribution import Distribution
from speculative.sampling.params import SamplingParams, stop_ids_of
from tests.support.paths import MAIN


def resolve(config, *arguments, **defaults):
    return SamplingParams.resolve(GenerationConfig(**config), *arguments, **defaults)


def test_empty_config_is_greedy_and_unlimited():
    params = resolve({})
    assert params.greedy and not params.do_sample and params.seed is None
    assert params.max_new_tokens > 2**60 and params.min_new_tokens == 0
    assert params.stop_token_ids == params.all_stop_token_ids == params.stop_strings == frozenset()
    assert (params.temperature, params.top_p, params.min_p) == (1, 1, 0)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1, 0, 0)
    assert not params.subtract_penalties and not params.include_stop_str_in_output
    assert params.num_assistant_tokens == params.assistant_confidence_threshold == params.tree_depth == 0


def test_options_keep_their_names_and_values():
    options = dict(do_sample=True, temperature=0.5, top_k=7, top_p=0.75, min_p=0.125, repetition_penalty=1.5)
    options |= dict(presence_penalty=0.25, frequency_penalty=-0.5, min_new_tokens=3, max_new_tokens=9)
    options |= dict(stop_strings={"a", "b"}, include_stop_str_in_output=True, assistant_confidence_threshold=0.25)
    params = resolve(options)
    assert {name: getattr(params, name) for name in options} == options
    assert resolve(dict(num_assistant_tokens=4)).num_assistant_tokens == 4
    assert resolve({}, subtract_penalties=True).subtract_penalties


@pytest.mark.parametrize(
    ("config", "ids", "all_ids"),
    [
        ({}, {5}, {5}),
        (dict(eos_token_id=0), {0}, {0}),
        (dict(stop_token_ids={3}), {3, 5}, {3, 5}),
        (dict(eos_token_id=0, stop_token_ids={3, 4}), {0, 3, 4}, {0, 3, 4}),
        (dict(ignore_eos=True), set(), {5}),
        (dict(ignore_eos=True, stop_token_ids={3}), set(), {3, 5}),
    ],
    ids=str,
)
def test_eos_token_of_config_replaces_the_models_stop_tokens(config, ids, all_ids):
    """Further stop tokens do not. With ignore_eos none ends the output; `min_new_tokens` still suppresses them."""
    params = resolve(config, default_stop_token_ids=frozenset({5}))
    assert params.stop_token_ids == ids and params.all_stop_token_ids == all_ids


def test_default_stop_tokens_come_from_generation_config_or_tokenizer(tmp_path):
    tokenizer = Tokenizer(str(MAIN))
    assert stop_ids_of(tmp_path, tokenizer) == {tokenizer.get_eos_token_id()}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [6, 7]}', encoding="utf-8")
    assert stop_ids_of(tmp_path, tokenizer) == {6, 7}


def test_tokenizer_without_eos_id_has_no_stop_token(tmp_path):
    """Its id -1 would be the last entry of the vocabulary, which `min_new_tokens` would suppress."""
    for part in ("openvino_tokenizer", "openvino_detokenizer"):
        for suffix in (".xml", ".bin"):
            shutil.copy(MAIN / f"{part}{suffix}", tmp_path)
    xml = tmp_path / "openvino_tokenizer.xml"
    xml.write_text(re.sub(r"<eos_token_id .*?/>", "", xml.read_text(encoding="utf-8")), encoding="utf-8")
    tokenizer = Tokenizer(str(tmp_path))
    assert tokenizer.get_eos_token_id() == -1
    stop_token_ids = stop_ids_of(tmp_path, tokenizer)
    assert stop_token_ids == frozenset()
    config = dict(do_sample=True, min_new_tokens=2, max_new_tokens=4)
    probabilities = Distribution(resolve(config, default_stop_token_ids=stop_token_ids))
    nothing = np.array([], np.int64)
    assert probabilities(np.zeros(4, np.float32), nothing, nothing).tolist() == [0.25] * 4


@pytest.mark.parametrize(
    ("config", "num_prompt_tokens", "context_length", "max_new_tokens"),
    [
        ({}, 4, 10, 6),
        ({}, 9, 10, 1),
        (dict(max_new_tokens=5), 4, 10, 5),
        (dict(max_new_tokens=5), 9, 10, 1),
        (dict(max_new_tokens=5), 9, None, 5),
        (dict(max_length=7), 4, 10, 3),
        (dict(max_length=5), 4, 10, 1),
        (dict(max_length=12), 4, 10, 6),
        (dict(max_length=12), 4, None, 8),
        (dict(max_length=4, max_new_tokens=2), 3, 10, 2),
        (dict(max_length=3, max_new_tokens=2), 3, 10, 2),
    ],
    ids=str,
)
def test_max_new_tokens_overrides_max_length_within_the_context(
    config, num_prompt_tokens, context_length, max_new_tokens
):
    assert resolve(config, num_prompt_tokens, context_length).max_new_tokens == max_new_tokens


@pytest.mark.parametrize(
    ("config", "num_prompt_tokens", "words"),
    [
        ({}, 10, "^the prompt has 10 tokens, but the context only fits 9: shorten it, or"),
        (dict(max_new_tokens=5), 11, "^the prompt has 11 tokens, but the context only fits 9: shorten it, or"),
        (dict(max_length=3), 3, "^the prompt has 3 tokens and max_length is 3, which leaves no room for new tokens: "),
        (dict(max_length=3), 5, "^the prompt has 5 tokens and max_length is 3, which leaves no room for new tokens: "),
    ],
    ids=str,
)
def test_prompt_that_leaves_no_room_is_rejected(config, num_prompt_tokens, words):
    with pytest.raises(ValueError, match=words):
        resolve(config, num_prompt_tokens, 10)


@pytest.mark.parametrize(
    ("rng_seed", "seed", "resolved"),
    [(0, None, None), (7, None, 7), (7, 9, 9), (7, 0, 0), (0, 0, 0)],
)
def test_seed_argument_overrides_rng_seed(rng_seed, seed, resolved):
    assert resolve(dict(rng_seed=rng_seed), seed=seed).seed == resolved  # rng_seed 0: unset


@pytest.mark.parametrize(
    ("config", "greedy"),
    [
        (dict(temperature=0.7), True),
        (dict(do_sample=True, temperature=0), True),
        (dict(do_sample=True, temperature=1e-6), True),
        (dict(do_sample=True, temperature=1e-5), False),
        (dict(do_sample=True), False),
    ],
    ids=str,
)
def test_greedy_means_no_sampling_or_zero_temperature(config, greedy):
    assert resolve(config).greedy == greedy


def test_params_are_immutable():
    config = GenerationConfig(do_sample=True, stop_token_ids={3}, stop_strings={"a"})
    params, again = SamplingParams.resolve(config), SamplingParams.resolve(config)
    assert params == again and hash(params) == hash(again)
    config.temperature, config.stop_token_ids, config.stop_strings = 2.0, {4}, {"b"}
    assert params == again and params != SamplingParams.resolve(config)
    for field in dataclasses.fields(params):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(params, field.name, None)


# Rejected configs.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", 1.0),
        ("min_p", -0.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 3.0),
        ("frequency_penalty", -2.5),
    ],
)
def test_value_out_of_range_gives_one_sentence_error(name, value):
    with pytest.raises(ValueError, match=rf"^{name} is {value:g}, but must be [^\n]+$"):
        resolve(dict(do_sample=True, **{name: value}))


@pytest.mark.parametrize(
    "config",
    [
        dict(num_beams=4),
        dict(num_return_sequences=2),
        dict(echo=True),
        dict(branching_factor=3),
        dict(structured_output_config=openvino_genai.StructuredOutputConfig(regex="a+")),
    ],
    ids=lambda config: next(iter(config)),
)
def test_unsupported_option_is_rejected_by_name(config):
    resolve(dict(do_sample=True, temperature=0.7, num_assistant_tokens=3, stop_strings={"x"}))
    with pytest.raises(ValueError, match=rf"^{next(iter(config))}\S* is not supported here: leave it [^\n]+$"):
        resolve(config)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (dict(max_new_tokens=0), "max_new_tokens is 0"),
        (dict(max_new_tokens=3, min_new_tokens=4), "min_new_tokens 4 is above max_new_tokens 3"),
        (dict(num_assistant_tokens=3, assistant_confidence_threshold=0.4), "exclude each other"),
        (dict(assistant_confidence_threshold=1.5), "is 1.5, but must be from 0 to 1"),
        (dict(stop_token_ids={-3, 5}), "stop_token_ids has -3"),
        (dict(tree_depth=3, num_assistant_tokens=2), "tree_depth is 3, but must be at most num_assistant_tokens"),
        (dict(tree_depth=1), "tree_depth is 1, but must be at most num_assistant_tokens, all tokens of the tree: 0"),
    ],
    ids=str,
)
def test_options_that_genai_rejects_are_rejected(config, words):
    with pytest.raises(ValueError, match=words):
        resolve(config)


def test_values_at_range_limits_are_accepted():
    resolve(dict(max_new_tokens=3, min_new_tokens=3, stop_token_ids={0, 5}))
    resolve(dict(assistant_confidence_threshold=1.0))
    for penalty in (-2, 2):
        resolve(dict(do_sample=True, presence_penalty=penalty, frequency_penalty=penalty))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"seed": -1}, "seed is -1, but must be a whole number from 0"),
        ({"seed": 1.5}, "seed is 1.5, but must be a whole number from 0"),
        (
            {"logit_bias": {"5": 1.0}},
            "logit_bias has '5': 1.0, but maps token ids to numbers up to 1e\\+30, or -inf to ban them",
        ),
        (
            {"logit_bias": {5: float("nan")}},
            "logit_bias has 5: nan, but maps token ids to numbers up to 1e\\+30, or -inf to ban them",
        ),
        (
            {"logit_bias": {5: 1e39}},
            "logit_bias has 5: 1e\\+39, but maps token ids to numbers up to 1e\\+30, or -inf to ban them",
        ),
        (
            {"logit_bias": {5: float("inf")}},
            "logit_bias has 5: inf, but maps token ids to numbers up to 1e\\+30, or -inf to ban them",
        ),
    ],
)
def test_invalid_seed_or_bias_is_named(given, words):
    with pytest.raises(ValueError, match=f"^{words}$"):
        SamplingParams.resolve(GenerationConfig(max_new_tokens=4), **given)
