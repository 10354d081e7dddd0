"""The engine on a real model, with default properties."""

import numpy as np
import openvino_genai
import pytest

from speculative import decoder
from speculative.models import cached_model
from speculative.models.paged_model import PagedModel
from speculative.models.spec import ModelSpec
from tests.speculative.models.test_cached_model import OneShort, OneTooFar
from tests.support.real_model import smollm2

EXACT = {"EXECUTION_MODE_HINT": "ACCURACY"}
PROMPTS = ["Write a list of five fruits, then write the same list again.", "Why is the sky blue?"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return smollm2(tmp_path_factory.mktemp("smollm2"))


def test_default_cache_passes_the_rollback_check(folder):
    assert cached_model.load(ModelSpec(folder, "CPU"), capacity=256).note == ""


@pytest.mark.long
@pytest.mark.parametrize("stateful", [False, True], ids=["paged", "stateful"])
@pytest.mark.parametrize("properties", [{}, {"INFERENCE_PRECISION_HINT": "f32"}], ids=str)
def test_default_caches_pass_the_rollback_check(folder, properties, stateful):
    assert cached_model.load(ModelSpec(folder, "CPU", properties), capacity=256, stateful=stateful).note == ""


@pytest.mark.long
@pytest.mark.parametrize("wrong", [OneTooFar, OneShort])
def test_wrong_rollback_is_detected_despite_rounding_noise(folder, wrong, monkeypatch):
    monkeypatch.setattr(cached_model, "PagedModel", wrong)
    with pytest.raises(ValueError, match="this model cannot be rolled back"):
        cached_model.load(folder, capacity=256)
    assert issubclass(wrong, PagedModel)


@pytest.mark.long
@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_equals_plain_decoding(folder, prompt):
    config = openvino_genai.GenerationConfig(max_new_tokens=80)
    main = ModelSpec(folder, properties=EXACT)
    plain = decoder.load(main, capacity=512).generate(prompt, config)
    looked_up = decoder.load(main, capacity=512, max_ngram_size=3)
    config.num_assistant_tokens = 4
    drafted = looked_up.generate(prompt, config)
    assert drafted.tokens == plain.tokens and sum(drafted.proposed) > 0


@pytest.mark.long
def test_main_model_as_its_own_draft_gives_greedy_text(folder):
    config = openvino_genai.GenerationConfig(max_new_tokens=60, num_assistant_tokens=4)
    main = ModelSpec(folder, properties=EXACT)
    both = decoder.load(main, draft=folder, capacity=512)
    drafted = both.generate(PROMPTS[1], config)
    plain = decoder.load(main, capacity=512).generate(PROMPTS[1], config)
    assert drafted.tokens == plain.tokens
    assert np.mean(drafted.from_draft) > 0.7
