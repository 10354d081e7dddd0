"""The paged backend by itself, on a tiny model."""

import numpy as np
import openvino as ov
import pytest
from openvino import opset13

from speculative.models.paged_model import PagedModel, SequenceInput
from speculative.models.stateful_model import StatefulModel
from tests.support.tiny_llama import HEAD_DIM, HEADS, VOCABULARY, save_tiny_llama

EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}


@pytest.fixture(scope="module")
def backend(tmp_path_factory):
    folder = save_tiny_llama(tmp_path_factory.mktemp("paged") / "main", seed=1)
    return PagedModel(ov.Core().read_model(folder / "openvino_model.xml"), "CPU", dict(EXACT), capacity=128)


def test_single_and_joint_forward_passes_can_alternate(backend):
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


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_logits_of_16_bits_are_converted(kind, stateful, backend, tmp_path):
    """Sums over a vocabulary need 32 bits, and numpy has no bf16."""
    folder = save_tiny_llama(tmp_path / "main", seed=1)
    graph = ov.Core().read_model(folder / "openvino_model.xml")
    result = graph.get_results()[0]
    logits = result.input_value(0)
    logits.set_names(set())
    converted = opset13.convert(logits, kind).output(0)
    converted.set_names({"logits"})
    result.input(0).replace_source_output(converted)
    graph.validate_nodes_and_infer_types()
    of_kind = StatefulModel(graph, "CPU", dict(EXACT), 64, 0) if stateful else PagedModel(graph, "CPU", dict(EXACT), 64)
    tokens = np.arange(6) % VOCABULARY
    found = of_kind.run(0, tokens, 6)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, backend.run(0, tokens, 6), rtol=0.02, atol=0.02)


class RemoteTensor:
    """As ov.RemoteTensor: not an ov.Tensor, and without most of its attributes."""

    def __init__(self, element_type, shape):
        self.memory = ov.Tensor(element_type, shape)
        self.memory.data[:] = 0

    def get_byte_size(self):
        return self.memory.get_byte_size()


class CompiledModel:
    """The CPU's, with requests that take remote tensors as those of a GPU do: only by name."""

    def __init__(self, compiled):
        self._compiled = compiled

    def __getattr__(self, name):
        return getattr(self._compiled, name)

    def create_infer_request(self):
        class Request(ov.InferRequest):
            def set_tensor(self, name, tensor):
                super().set_tensor(name, tensor.memory if isinstance(tensor, RemoteTensor) else tensor)

        return Request(self._compiled.create_infer_request())


class CpuAsGpu(ov.Core):
    def compile_model(self, model, device, properties):
        assert device == "GPU"
        return CompiledModel(super().compile_model(model, "CPU", properties))

    def get_default_context(self, device):
        assert device == "GPU"
        return self

    def create_tensor(self, element_type, shape, properties):
        return RemoteTensor(element_type, shape)


def test_cache_of_a_gpu_is_in_remote_tensors(backend, tmp_path, monkeypatch):
    """On a CPU that takes the place of a GPU. OpenVINO's own types have what it has, and no more of this."""
    assert not issubclass(ov.RemoteTensor, ov.Tensor) and hasattr(ov.RemoteTensor, "get_byte_size")
    assert "tensor: openvino._pyopenvino.RemoteTensor" in ov.InferRequest.set_tensor.__doc__
    folder = save_tiny_llama(tmp_path / "main", seed=1)
    graph = ov.Core().read_model(folder / "openvino_model.xml")
    monkeypatch.setattr(ov, "Core", CpuAsGpu)
    on_gpu = PagedModel(graph, "GPU", dict(EXACT), capacity=128)
    tokens = np.arange(12) % VOCABULARY
    expected = backend.run(0, tokens, 12).copy()
    np.testing.assert_allclose(on_gpu.run(0, tokens, 12), expected, rtol=1e-4, atol=1e-4)
    together = on_gpu.run_together([SequenceInput(np.array([3], np.int32), 0, tokens, 12)])
    np.testing.assert_allclose(together, expected, rtol=1e-4, atol=1e-4)
    assert on_gpu.cache_bytes >= backend.cache_bytes


def test_joint_forward_passes_of_the_same_sizes_read_what_is_given(backend):
    """Other tokens, positions and blocks than in the pass before; passes of other sizes in between."""
    random = np.random.default_rng(1)
    texts = random.integers(0, VOCABULARY, (2, 40))
    expected = [backend.run(0, text, 40).copy() for text in texts]
    blocks = {0: np.array([1, 0], np.int32), 1: np.array([3, 2], np.int32)}

    def together(parts, width=0):
        """Logits after the tokens from `start` to `end` of each text, compared with those of the text alone."""
        runs = [SequenceInput(blocks[i], start, texts[i][start:end], end - start) for i, start, end in parts]
        rows = backend.run_together(runs, width=width)
        alone = [expected[i][start:end] for i, start, end in parts]
        np.testing.assert_allclose(rows, np.concatenate(alone), rtol=1e-4, atol=1e-4)

    together([(0, 0, 20), (1, 0, 20)])
    together([(1, 0, 20), (0, 0, 20)])
    for start in (20, 23, 26, 29):
        together([(0, start, start + 2), (1, start, start + 3)], width=8)
        together([(0, start + 2, start + 3)])
    for i in (1, 0):
        together([(i, 30, 32)], width=4)  # the end of a block
        together([(i, 32, 34)], width=4)
        together([(i, 34, 36)], width=4)


def test_padding_has_no_logits_and_does_not_change_others(backend):
    """Passes of one size, of which more and fewer tokens are padding: tokens of earlier passes."""
    text = np.array([1, 5, 2, 6, 3, 0])
    expected = backend.run(0, text, 6).copy()
    for n, last in ((1, 1), (3, 1), (2, 2), (4, 2), (4, 4)):
        backend.run(0, np.full(4, 7), 1)
        logits = backend.run(0, text[:n], last, padding=4 - n)
        np.testing.assert_allclose(logits, expected[n - last : n], rtol=1e-4, atol=1e-4)


def test_leaves_attend_only_to_their_parents(backend):
    """The logits after leaves are those of the texts that end in them, before and after passes of other kinds."""
    text, leaves = np.array([1, 5, 2, 6, 3, 0]), [(0, 4), (1, 2), (1, 7), (2, 1)]  # parents of tokens 3 to 5, tokens
    backend.run(0, text[:3], 1)
    for _ in range(2):
        tokens = np.append(text[3:], [token for _, token in leaves])
        tree = backend.run(3, tokens, 7, None, [parent for parent, _ in leaves]).copy()
        np.testing.assert_allclose(tree[:3], backend.run(3, text[3:], 3), rtol=1e-4, atol=1e-4)
        for row, (parent, token) in zip(tree[3:], leaves, strict=True):
            expected = backend.run(3, np.append(text[3 : 4 + parent], token), 1)[0]
            np.testing.assert_allclose(row, expected, rtol=1e-4, atol=1e-4)
        expected = backend.run(0, text, 6).copy()
        backend.run(0, text[:3], 1)
        backend.run(3, tokens, 7, None, [parent for parent, _ in leaves])
        together = backend.run_together([SequenceInput(np.arange(2, 4, dtype=np.int32), 0, text, 6)])
        np.testing.assert_allclose(together, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["qq_bias", "qq_bias_begins"])
def test_interrupted_tree_does_not_change_later_passes(backend, monkeypatch, name):
    text = np.array([1, 5, 2, 6, 3, 0])
    expected = backend.run(0, text, 6).copy()
    set_input = backend._set_shared_input

    def interrupted(*arguments):
        set_input(*arguments)
        if arguments[0] == name:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(backend, "_set_shared_input", interrupted)
        backend.run(0, text, 6, None, [0, 1])
    np.testing.assert_allclose(backend.run(0, text, 6), expected, rtol=1e-4, atol=1e-4)


def test_cache_bytes_count_keys_and_values_of_every_layer(backend):
    tokens = (backend.blocks + 1) * backend.block_size  # one block is for padding
    assert backend.cache_bytes == tokens * HEADS * HEAD_DIM * 4 * 2
