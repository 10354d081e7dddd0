"""The paged backend by itself, on a tiny model."""

import numpy as np
import openvino as ov
import pytest

from speculative.models.paged_model import PagedModel, SequenceInput
from tests.support.tiny_llama import HEAD_DIM, HEADS, VOCABULARY, save_tiny_llama

EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}


@pytest.fixture(scope="module")
def backend(tmp_path_factory):
    folder = save_tiny_llama(tmp_path_factory.mktemp("paged") / "main", seed=1)
    return PagedModel(ov.Core().read_model(folder / "openvino_model.xml"), "CPU", dict(EXACT), capacity=128)


def test_single_and_joint_forward_passes_take_turns(backend):
    """Each sets inputs that the other replaces, of the same shapes and of others."""
    random = np.random.default_rng(0)
    one, other = random.integers(0, VOCABULARY, (2, 6))
    blocks = np.arange(2, 4, dtype=np.int32)
    alone = {name: backend.run(0, text, 6).copy() for name, text in (("one", one), ("other", other))}
    for _ in range(3):
        together = backend.run_together([SequenceInput(blocks, 0, other, 6)])
        np.testing.assert_allclose(together, alone["other"], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(backend.run(0, one, 6), alone["one"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(backend.run(4, one[4:], 2), alone["one"][4:], rtol=1e-4, atol=1e-4)
    assert not np.allclose(alone["one"][-1], alone["other"][-1], atol=0.01)


def test_cache_bytes_count_every_layers_keys_and_values(backend):
    tokens = (backend.blocks + 1) * backend.block_size  # one block is for padding
    assert backend.cache_bytes == tokens * HEADS * HEAD_DIM * 4 * 2
