"""Attention masks that paged attention drops: they are found, and such a model is decoded without paged attention."""

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from speculative.modelgen import llama_ir
from speculative.models import attention_masks, cached_model
from speculative.models.spec import ModelSpec
from speculative.pair.check import check_pair
from tests.support.paths import MAIN
from tests.support.position_bias import add_position_bias, save_with_position_bias
from tests.support.tiny_checkpoints import ARCHITECTURES
from tests.support.tiny_llama import save_tiny_llama, tiny_llama

EXACT = {"EXECUTION_MODE_HINT": "ACCURACY"}
TOKENS = np.arange(40) % 8


def with_position_bias(layers, slope=0.5):
    return add_position_bias(llama_ir.build(tiny_llama(0, layers=2)), layers, slope)


@pytest.mark.parametrize("layers", [[], [0], [1], [0, 1]])
def test_dropped_masks_are_found(layers):
    assert attention_masks.dropped(with_position_bias(layers), {}) == layers


def test_bias_that_changes_nothing_is_no_dropped_mask():
    assert attention_masks.dropped(with_position_bias([0], slope=1e-7), {}) == []


def test_graph_without_masks_is_left_to_paged_attention():
    graph = llama_ir.build(tiny_llama(0))
    attention = next(node for node in graph.get_ordered_ops() if node.get_type_name() == "ScaledDotProductAttention")
    causal = ops.scaled_dot_product_attention(*attention.input_values()[:3], causal=True)
    for reader in attention.output(0).get_target_inputs():
        reader.replace_source_output(causal.output(0))
    assert attention_masks.dropped(graph, {}) == []


def test_model_with_dropped_masks_is_decoded_with_states(tmp_path):
    """And rolled back by copying: rejected entries that are hidden would shift the bias of those before them."""
    folder = save_tiny_llama(tmp_path / "main", seed=0)
    ov.save_model(with_position_bias([1]), folder / "openvino_model.xml", compress_to_fp16=False)
    spec = ModelSpec(folder, "CPU", EXACT)
    default, stateful, paged = (cached_model.load(spec, stateful=chosen) for chosen in (None, True, False))
    expected = stateful.logits(TOKENS, last=8).copy()
    assert (default.logits(TOKENS, last=8) == expected).all()
    assert np.abs(paged.logits(TOKENS, last=8) - expected).max() > 0.1
    default.logits(np.concatenate([TOKENS[:30], TOKENS[:6] + 1]), last=6)  # rejected from the 31st token on
    assert np.abs(default.logits(TOKENS, last=8) - expected).max() < 1e-3


def test_known_model_types_are_not_examined():
    config = {"model_type": "llama", "text_config": {"model_type": "mistral"}}
    assert attention_masks.dropped(with_position_bias([0]), config) == []
    assert attention_masks.dropped(with_position_bias([0]), {"model_type": "unknown"}) == [0]


def test_known_model_types_are_tested():
    """test_architectures.py compares their tokens with and without paged attention."""
    assert {architecture["type"] for architecture in ARCHITECTURES.values()} >= attention_masks.KEPT


def test_dropped_masks_are_a_warning_of_the_pair_check(tmp_path):
    folder = save_with_position_bias(tmp_path / "biased")
    findings = [finding for finding in check_pair(MAIN, folder).findings if finding.what == "attention"]
    assert [finding.level for finding in findings] == ["warning"]
    assert "of draft from layer 0 on, so GenAI's pipeline drafts badly" in findings[0].message
    assert not [finding for finding in check_pair(MAIN, MAIN).findings if finding.what == "attention"]


@pytest.mark.parametrize("options", [[], ["--property", "ATTENTION_BACKEND=SDPA"]])
def test_sample_on_genai_warns_of_dropped_masks(run_here, tmp_path, options):
    folder = save_with_position_bias(tmp_path / "biased")
    done = run_here("samples/greedy_causal_lm.py", folder, "def f(x):", "--max-new-tokens", 2, *options)
    assert done.returncode == 0, done.stderr
    assert ("paged attention drops the position bias" in done.stderr) == (not options)
