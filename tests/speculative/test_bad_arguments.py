"""Wrong arguments of the Python API: each error says what is wrong with which value."""

import numpy as np
import openvino_genai
import pytest
from openvino_genai import GenerationConfig, StreamingStatus

from speculative import load, load_batch
from tests.support.paths import DRAFT, ROOT

CONFIG = GenerationConfig(max_new_tokens=8)
EAGLE3 = ROOT / "models/embedded/eagle3"
CHAT = [{"role": "user", "content": "\ud83d"}]


@pytest.fixture(scope="module")
def decoder():
    return load(DRAFT)


@pytest.mark.parametrize("loads", [load, load_batch])
@pytest.mark.parametrize(
    ("folders", "words"),
    [
        (["no/such"], "there is no folder no/such"),
        ([EAGLE3], "is an EAGLE-3 draft, which writes no text"),
        ([ROOT / "docs"], "has no openvino_model.xml"),
        ([DRAFT / "openvino_model.xml"], "openvino_model.xml is a file; give the folder"),
        ([DRAFT.parent], r"embedded is the folder of a pair; give .*main or .*draft"),
        ([DRAFT, "no/such"], "there is no folder no/such"),
        ([DRAFT, ""], "has no openvino_model.xml"),
    ],
)
def test_unusable_folder_is_named(loads, folders, words):
    with pytest.raises(ValueError, match=words):
        loads(*folders)


@pytest.mark.parametrize("tokens", [0, -1, 3, 100.5, "8"])
def test_capacity_is_a_number_of_tokens(tokens):
    for loads, name in ((load, "capacity"), (load_batch, "cache_tokens")):
        with pytest.raises(ValueError, match=f"{name} is .*, but must be a whole number of tokens from 4"):
            loads(DRAFT, **{name: tokens})


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        *((status, "cancelled") for status in (True, 1, np.True_, StreamingStatus.STOP, StreamingStatus.CANCEL)),
        *((status, "length") for status in (None, False, 0, np.False_, StreamingStatus.RUNNING)),
    ],
)
def test_streamer_stops_with_any_true_value(decoder, status, reason):
    assert decoder.generate("def f(", CONFIG, lambda text: status).finish_reason == reason


def test_streamer_returns_a_status_or_nothing(decoder):
    with pytest.raises(TypeError, match="the streamer returned 'x'"):
        decoder.generate("def f(", CONFIG, lambda text: "x")
    assert decoder.generate("def f(", CONFIG).text  # the decoder is free again


def test_seeds_and_numbers_of_logprobs_are_whole_numbers(decoder):
    for seed in (-1, 1.5):
        for call in (
            lambda seed=seed: decoder.generate("a", CONFIG, seed=seed),
            lambda seed=seed: decoder.stream("a", CONFIG, seed=seed),
            lambda seed=seed: decoder.reset(seed),
        ):
            with pytest.raises(ValueError, match=f"seed is {seed}, but must be a whole number from 0"):
                call()
        with pytest.raises(ValueError, match=f"prompt_logprobs is {seed}, but"):
            decoder.generate("a", CONFIG, prompt_logprobs=seed)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("\ud83d", "lone surrogate"),
        (CHAT, "lone surrogate"),
        (None, "not None"),
        (openvino_genai.ChatHistory([]), "has no message"),
        ([], "the prompt has no tokens"),
    ],
)
def test_prompt_is_text_messages_or_tokens(decoder, prompt, words):
    with pytest.raises(ValueError, match=words):
        decoder.generate(prompt, CONFIG)
