"""The sampled distribution has GenAI's meaning: it is compared with samples of GenAI's main model alone.

The logits are known: most models here are a lookup table for the last token, in the smallest IR that LLMPipeline runs;
one is the embedded draft, with the paged-attention backend. Seeds are fixed, and thus the p-values.
"""

import json
import shutil
from statistics import NormalDist

import numpy as np
import openvino as ov
import openvino_genai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openvino import opset13
from openvino_genai import GenerationConfig

from speculative.sampling.distribution import FEW, Distribution, InvalidLogits, largest, nucleus
from speculative.sampling.params import SamplingParams
from tests.support.paths import DRAFT

NOTHING = np.empty(0, np.int64)
LIKELY, UNLIKELY = 1e-3, 1e-9  # p-values: what GenAI does is above, what it does not do is below


def save_table(table, folder):
    """Write an IR whose next-token logits are the row of `table` [V, V] of the last token."""
    types = {"input_ids": np.int64, "attention_mask": np.int64, "position_ids": np.int64, "beam_idx": np.int32}
    inputs = []
    for name, dtype in types.items():
        inputs.append(opset13.parameter([-1] if name == "beam_idx" else [-1, -1], dtype, name=name))
        inputs[-1].output(0).set_names({name})
    logits = opset13.gather(opset13.constant(table.astype(np.float32)), inputs[0], opset13.constant(0))
    logits.output(0).set_names({"logits"})
    ov.save_model(ov.Model([logits], inputs), folder / "openvino_model.xml", compress_to_fp16=False)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    for part in DRAFT.glob("openvino_*tokenizer.*"):
        shutil.copy(part, folder)
    return openvino_genai.LLMPipeline(folder, "CPU", ATTENTION_BACKEND="SDPA")


def tokens(pipe, prompt, **config):
    """Return the tokens of each sequence that GenAI generates after the tokens `prompt`."""
    config = GenerationConfig(**{"ignore_eos": True, **config})
    return pipe.generate(ov.Tensor(np.array([prompt])), config).tokens


def p_value(counts, probabilities):
    """Chi-square: how often as many draws from `probabilities` are at least as far from them as `counts` are."""
    if counts[probabilities == 0].any():
        return 0.0
    expected = counts.sum() * probabilities[probabilities > 0]
    statistic = ((counts[probabilities > 0] - expected) ** 2 / expected).sum()
    degrees = max(len(expected) - 1, 1)
    # Wilson and Hilferty 1931: the cube root of chi-square / degrees of freedom is close to normal.
    variance = 2 / (9 * degrees)
    return NormalDist(1 - variance, variance**0.5).cdf(2 * (1 - variance) - (statistic / degrees) ** (1 / 3))


# The first token of many samples: which tokens are possible, and their probabilities.

PROMPT = [3, 4, 3, 6, 1]
STEPS = np.log([0.4, 0.3, 0.15, 0.08, 0.04, 0.02, 0.008, 0.002])
HALVES = np.log([1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 128])
MIXED = np.array([1, -1, 0.5, -0.5, 0, 2, -2, 0.3])
FIRST = [
    (STEPS, {}, 8),
    (MIXED, dict(temperature=0.5), 8),
    (MIXED, dict(temperature=1.5), 8),
    (STEPS, dict(top_k=3), 3),
    (STEPS, dict(top_k=0), 8),
    (STEPS, dict(top_k=8), 8),
    (STEPS, dict(top_k=1, temperature=2), 1),
    (STEPS, dict(top_p=0.69), 2),
    (STEPS, dict(top_p=0.71), 3),
    (STEPS, dict(top_p=0.01), 1),
    (HALVES, dict(top_p=0.749), 2),
    (HALVES, dict(top_p=0.751), 3),
    (STEPS, dict(top_p=0.71, temperature=2), 4),  # of the flattened probabilities
    (STEPS, dict(min_p=0.3), 3),
    (HALVES, dict(min_p=0.24), 3),
    (STEPS, dict(min_p=0.3, temperature=2), 5),
    (STEPS, dict(top_k=3, top_p=0.8), 2),  # top_p of what top_k leaves; of everything it would be 3
    (STEPS, dict(min_p=0.3, top_p=0.8), 3),  # top_p of what was there before min_p; of what it leaves it would be 2
    (STEPS, dict(top_k=5, min_p=0.15, top_p=0.9, temperature=0.8), 3),
    (MIXED, dict(repetition_penalty=1.5), 8),
    (MIXED, dict(repetition_penalty=0.7), 8),
    (MIXED, dict(presence_penalty=1.0, frequency_penalty=1.0), 8),  # the prompt does not count
]


@pytest.mark.parametrize(("row", "config", "left"), FIRST, ids=lambda value: str(value) if type(value) is dict else "")
def test_first_token_distribution_matches_genai(row, config, left, tmp_path):
    config = dict(do_sample=True, **config)
    pipe = save_table(np.tile(row, (8, 1)), tmp_path)
    drawn = tokens(pipe, PROMPT, max_new_tokens=1, num_return_sequences=20_000, rng_seed=1, **config)
    counts = np.bincount([token for (token,) in drawn], minlength=8)
    probabilities = distribution(config)(row.astype(np.float32), np.array(PROMPT), NOTHING)
    assert np.count_nonzero(probabilities) == np.count_nonzero(counts) == left
    assert p_value(counts, probabilities) > LIKELY


def test_comparison_detects_a_temperature_off_by_3_percent(tmp_path):
    """The test above can fail: it detects a temperature that is off by 3 %."""
    pipe = save_table(np.tile(MIXED, (8, 1)), tmp_path)
    drawn = tokens(pipe, PROMPT, max_new_tokens=1, num_return_sequences=20_000, do_sample=True, temperature=0.7)
    counts = np.bincount([token for (token,) in drawn], minlength=8)
    for temperature, possible in ((0.7, True), (0.74, False), (0.66, False)):
        row = distribution(dict(do_sample=True, temperature=temperature))(MIXED.astype(np.float32), NOTHING, NOTHING)
        assert (p_value(counts, row) > LIKELY) == possible and (p_value(counts, row) < UNLIKELY) != possible


# Whole texts: the distribution depends on the tokens before.


@pytest.mark.parametrize(
    "config",
    [
        {},
        dict(do_sample=True),
        dict(do_sample=True, temperature=0.6, top_k=4),
        dict(do_sample=True, top_p=0.7),
        dict(do_sample=True, min_p=0.2),
        dict(do_sample=True, repetition_penalty=1.4),
        dict(do_sample=True, presence_penalty=0.5),
        dict(do_sample=True, frequency_penalty=-0.3, top_k=3),
        dict(do_sample=True, min_new_tokens=9, stop_token_ids={11}),
    ],
    ids=str,
)
def test_logits_of_some_tokens_equal_masking_the_others(config):
    random = np.random.default_rng(0)
    some, prompt, text = np.arange(1, 40, 2), np.array([3, 11, 8]), np.array([9, 9, 20])
    logits, all_logits = random.normal(0, 2, 20).astype(np.float32), np.full(40, -np.inf, np.float32)
    all_logits[some] = logits
    target = distribution(config)
    row = target(logits, prompt, text, some, 40)
    assert len(row) == 40
    np.testing.assert_allclose(row, target(all_logits, prompt, text), atol=1e-6)


def distribution(config, **defaults):
    transform = transform_of(config, **defaults)
    return lambda *inputs: np.asarray(transform(*inputs))


def transform_of(config, **defaults):
    return Distribution(SamplingParams.resolve(GenerationConfig(**config), **defaults))


def each_token(texts, prompt, model, target):
    """Yield (token, its logits, their probabilities, tokens before) for each token of `texts` after `prompt`.

    `model(tokens)` returns the logits [n, V] after each of n tokens, `target(logits, prompt, text so far)` the
    probabilities.
    """
    for text in texts:
        rows = model([*prompt, *text])[len(prompt) - 1 :]
        for i, token in enumerate(text):
            yield token, rows[i], target(rows[i], np.array(prompt), np.array(text[:i], np.int64)), [*prompt, *text[:i]]


def text_p_value(*what):
    """p-value of texts. A number drawn within a token's own share of [0, 1) is uniform if the shares are right. The
    tokens that penalties move lie side by side in it: negative logits before others, often seen tokens before others.
    """
    random, numbers = np.random.default_rng(0), []
    for token, logits, shares, before in each_token(*what):
        if shares[token] == 0:
            return 0.0
        order = np.lexsort((-np.bincount(before, minlength=len(shares)), logits >= 0))
        place = np.flatnonzero(order == token)[0]
        numbers.append(shares[order[:place]].sum() + random.random() * shares[token])
    return p_value(np.histogram(numbers, bins=20, range=(0, 1 + 1e-6))[0], np.full(20, 1 / 20))


def log_likelihood(*what):
    return sum(np.log(float(shares[token])) for token, _, shares, _ in each_token(*what))


TEXT = [
    dict(repetition_penalty=1.3),
    dict(presence_penalty=1.2),
    dict(frequency_penalty=0.6),
    dict(presence_penalty=-0.6, frequency_penalty=-0.1),
    dict(repetition_penalty=1.2, presence_penalty=0.8, frequency_penalty=0.4, temperature=0.8),
    dict(repetition_penalty=1.2, presence_penalty=0.8, frequency_penalty=0.4, top_k=9, top_p=0.9, min_p=0.02),
]


@pytest.fixture(scope="module")
def table():
    """Logits [16, 16] of both signs, read-only as an engine's output should be."""
    table = (np.random.default_rng(1).standard_normal((16, 16)) * 1.5).astype(np.float32)
    table.flags.writeable = False
    return table


@pytest.fixture(scope="module")
def table_pipe(table, tmp_path_factory):
    return save_table(table, tmp_path_factory.mktemp("table"))


def texts(pipe, prompt, count, length, **config):
    return [tokens(pipe, prompt, max_new_tokens=length, rng_seed=seed, **config)[0] for seed in range(count)]


@pytest.mark.parametrize("config", TEXT, ids=str)
def test_text_distribution_matches_genai(config, table, table_pipe):
    config = dict(do_sample=True, **config)
    drawn = texts(table_pipe, PROMPT, 150, 30, **config)
    assert text_p_value(drawn, PROMPT, table.__getitem__, distribution(config)) > LIKELY


OTHER_MEANINGS = {
    "no penalty": lambda target: lambda logits, prompt, text: target(logits, NOTHING, NOTHING),
    "the prompt counts": lambda target: lambda logits, prompt, text: target(logits, NOTHING, np.append(prompt, text)),
    "the prompt does not count": lambda target: lambda logits, prompt, text: target(logits, NOTHING, text),
    "subtracted always": lambda target: lambda logits, prompt, text: target(logits + 50, prompt, text),  # none below 0
    "without the last token": lambda target: lambda logits, prompt, text: target(logits, prompt, text[:-1]),
    "tokens count once": lambda target: lambda logits, prompt, text: target(logits, prompt, np.unique(text)),
}


@pytest.mark.parametrize(
    ("config", "meanings"),
    [
        (dict(presence_penalty=1.2), ["the prompt counts", "subtracted always", "without the last token"]),
        (dict(frequency_penalty=0.6), ["the prompt counts", "subtracted always", "tokens count once"]),
        (dict(repetition_penalty=1.5), ["the prompt does not count", "subtracted always"]),
    ],
    ids=str,
)
def test_other_meanings_of_penalties_do_not_match_genai(config, meanings, table, table_pipe):
    """If the other meaning were right, its likelihood would be that much lower with a probability of 1e-9 at most."""
    drawn = texts(table_pipe, PROMPT, 150, 30, do_sample=True, **config)
    target = distribution(dict(do_sample=True, **config))
    likelihood = log_likelihood(drawn, PROMPT, table.__getitem__, target)
    for meaning in ["no penalty", *meanings]:
        other = OTHER_MEANINGS[meaning](target)
        assert likelihood - log_likelihood(drawn, PROMPT, table.__getitem__, other) > -np.log(UNLIKELY), meaning


@pytest.mark.parametrize("config", [dict(presence_penalty=1.2), dict(presence_penalty=-0.5, frequency_penalty=0.6)])
def test_openai_penalties_are_subtracted(config):
    """Logits shifted by -50, so that all are negative, give the same probabilities."""
    logits, text = MIXED.astype(np.float32), np.array([0, 3, 3, 5, 6])
    config = dict(do_sample=True, **config)
    seen = np.bincount(text, minlength=8)
    penalties = config["presence_penalty"] * (seen > 0) + config.get("frequency_penalty", 0) * seen
    expected = np.exp(logits - penalties) / np.exp(logits - penalties).sum()
    subtracted = distribution(config, subtract_penalties=True)
    for shift in (0, -50):
        drawn = subtracted(logits + np.float32(shift), PROMPT, text)
        assert np.allclose(drawn, expected, atol=1e-5)
    assert not np.allclose(distribution(config)(logits - 50, PROMPT, text), expected, atol=1e-2)


def test_stop_tokens_are_excluded_before_min_new_tokens(tmp_path):
    row = np.array([2, 1, 0, -1, 1, 0, -1, 2], np.float32)
    pipe = save_table(np.tile(row, (8, 1)), tmp_path)
    config = dict(do_sample=True, min_new_tokens=3, eos_token_id=0, stop_token_ids={0, 7})
    drawn, target = texts(pipe, PROMPT, 500, 6, ignore_eos=False, **config), distribution(config)
    assert {len(text) for text in drawn} >= {4, 5, 6}
    assert text_p_value(drawn, PROMPT, lambda tokens: [row] * len(tokens), target) > LIKELY
    assert not target(row, NOTHING, np.array([1, 1]))[[0, 7]].any()
    assert target(row, NOTHING, np.array([1, 1, 1]))[[0, 7]].all()

    models_own = distribution(dict(do_sample=True, min_new_tokens=3), default_stop_token_ids=frozenset({0, 7}))
    assert models_own(row, NOTHING, NOTHING).tolist() == target(row, NOTHING, NOTHING).tolist()


# A real model, over the backend LLMPipeline takes by itself.


@pytest.fixture(scope="module")
def real_pipe():
    return openvino_genai.LLMPipeline(DRAFT, "CPU", EXECUTION_MODE_HINT="ACCURACY")


@pytest.fixture(scope="module")
def real_logits():
    """Return a function from tokens [n] to the logits [n, V] after each of them."""
    request = ov.Core().compile_model(DRAFT / "openvino_model.xml", "CPU", {"EXECUTION_MODE_HINT": "ACCURACY"})
    request = request.create_infer_request()

    def logits(tokens):
        request.reset_state()
        n = len(tokens)
        inputs = {"input_ids": [tokens], "attention_mask": [[1] * n], "position_ids": [list(range(n))], "beam_idx": [0]}
        names = {name for port in request.model_inputs for name in port.names}
        dtypes = {"beam_idx": np.int32}
        request.infer({k: np.array(v, dtypes.get(k, np.int64)) for k, v in inputs.items() if k in names})
        return request.get_tensor("logits").data[0].copy()

    return logits


REAL_PROMPT = [300, 45, 801, 12, 300, 77, 5]


@pytest.mark.parametrize(
    "config",
    [
        {},
        dict(repetition_penalty=1.2),
        dict(repetition_penalty=1.1, presence_penalty=0.7, frequency_penalty=0.5),
    ],
    ids=str,
)
def test_greedy_tokens_of_real_model_match_genai(config, real_pipe, real_logits):
    (text,) = tokens(real_pipe, REAL_PROMPT, max_new_tokens=150, **config)
    target, rows = distribution(config), real_logits(REAL_PROMPT + text)[len(REAL_PROMPT) - 1 :]
    for i, token in enumerate(text):
        row = np.asarray(target(rows[i], np.array(REAL_PROMPT), np.array(text[:i], np.int64)))
        assert row[token] == row.sum() == 1


@pytest.mark.parametrize(
    "config",
    [
        dict(temperature=1.5),
        dict(temperature=0.8, top_p=0.9, repetition_penalty=1.1),
        dict(top_k=40, top_p=0.95, min_p=0.01, presence_penalty=0.5, frequency_penalty=0.2),
    ],
    ids=str,
)
def test_texts_of_real_model_match_genai(config, real_pipe, real_logits):
    config = dict(do_sample=True, **config)
    drawn = texts(real_pipe, REAL_PROMPT, 12, 80, **config)
    assert text_p_value(drawn, REAL_PROMPT, real_logits, distribution(config)) > LIKELY


# The two filters, compared with their definitions.

weights = st.lists(st.integers(0, 20), min_size=2, max_size=60).filter(any)
many_weights = st.lists(st.integers(0, 20), min_size=2, max_size=3 * FEW).filter(any)


@settings(deadline=None)
@given(weights, st.integers(1, 59))
def test_largest_returns_the_first_k_tokens_by_logit(values, k):
    logits, k = np.array(values, np.float32) - 7, min(k, len(values) - 1)
    assert largest(logits, k).tolist() == sorted(range(len(values)), key=lambda token: (-values[token], token))[:k]


@settings(deadline=None)
@given(many_weights, st.integers(1, 4000))
def test_nucleus_is_the_smallest_set_that_exceeds_the_mass(values, mass):
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    inside = nucleus(np.array(values, np.float32), mass)
    expected, reached = [], 0
    for token in order:
        expected.append(token)
        reached += values[token]
        if reached > mass:
            break
    assert inside.tolist() == sorted(expected)


@pytest.mark.parametrize("seed", range(8))
def test_nucleus_keeps_all_tokens_despite_rounding(seed):
    """A probability mass below the sum in float32, but perhaps not in float64."""
    weights = np.random.default_rng(seed).random(1000, np.float32) + np.float32(1)
    assert len(nucleus(weights, np.nextafter(float(weights.sum()), 0))) == 1000


@pytest.mark.parametrize("flatness", [0.0, 0.01, 1.0, 6.0])
@pytest.mark.parametrize("top_p", [0.1, 0.9, 0.999])
def test_filters_in_a_large_vocabulary(flatness, top_p):
    logits = (np.random.default_rng(0).standard_normal(151_936) * flatness).astype(np.float32)
    descending = np.sort(logits)[::-1]
    assert logits[largest(logits, 1000)].tolist() == descending[:1000].tolist()

    row = distribution(dict(do_sample=True, top_p=top_p))(logits, NOTHING, NOTHING)
    everything = np.exp(descending.astype(np.float64) - descending[0])
    size = np.searchsorted(everything.cumsum(), top_p * everything.sum(), side="right") + 1
    assert abs(np.count_nonzero(row) - size) <= 1 + 1e-5 * size  # float32
    assert row.dtype == np.float32 and abs(row.sum(dtype=np.float64) - 1) < 1e-5
    assert row[row > 0].min() >= row[logits < logits[row > 0].min()].max(initial=0)


# Greedy, and rejected logits.


@pytest.mark.parametrize("config", [{}, dict(do_sample=True, temperature=0), dict(do_sample=True, temperature=1e-6)])
def test_greedy_is_one_hot_at_the_first_largest_logit(config):
    target = transform_of({**config, "temperature": config.get("temperature", 0.7)})
    assert target.greedy
    assert np.asarray(target(np.array([1, 3, -2, 3], np.float32), NOTHING, NOTHING)).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("config", [dict(do_sample=True, temperature=1e-5), dict(do_sample=True, top_k=2, top_p=0.9)])
def test_sampled_is_not_greedy(config):
    target = transform_of(config)
    assert not target.greedy
    assert np.asarray(target(np.array([1, 3, -2, 3], np.float32), NOTHING, NOTHING)).tolist() == [0, 0.5, 0, 0.5]


def test_tokens_excluded_by_the_model_stay_excluded():
    row = distribution(dict(do_sample=True, repetition_penalty=1.5))(
        np.array([0, -np.inf, 0], np.float32), np.array([1]), NOTHING
    )
    assert row.tolist() == [0.5, 0, 0.5]


@pytest.mark.parametrize("config", [{}, dict(do_sample=True), dict(do_sample=True, top_k=1)])
@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_non_finite_logits_are_an_error(config, broken):
    with pytest.raises(InvalidLogits, match=r"^the model's highest logit is (nan|inf): run it with \S+, or check it$"):
        distribution(config)(np.array([0, broken, 1], np.float32), NOTHING, NOTHING)


def test_unknown_stop_tokens_are_ignored():
    config = dict(do_sample=True, min_new_tokens=2, stop_token_ids={2, 5, 99})
    logits, none = np.zeros(5, np.float32), np.zeros(0, np.int64)
    assert np.allclose(distribution(config)(logits, none, none), [0.25, 0.25, 0, 0.25, 0.25])


def test_min_p_keeps_tokens_exactly_at_the_threshold():
    logits = np.array([0, -1, -2], np.float32)
    share = float(np.exp(logits)[1])
    row = distribution(dict(do_sample=True, min_p=share))(logits, NOTHING, NOTHING)
    assert (row > 0).tolist() == [True, True, False]
