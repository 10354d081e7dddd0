"""What a training needs of the main model's IR: sizes, embeddings, hidden states of three layers, and probabilities."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from speculative.convert.errors import ConvertError
from speculative.models.config import context_length, read_config, text_config
from speculative.models.eagle3_graph import _embedding, _last_dimension, _residual_adds
from speculative.models.spec import ModelSpec

PADDING = 32  # token counts are rounded up to multiples: OpenVINO keeps compiled kernels for each
F16_MAX = 65504.0


class HeadShape(NamedTuple):
    """Sizes of a head and special tokens, taken from the main model's own layers."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_id: int | list[int] | None


class OutputLayer(NamedTuple):
    """The main model's LM head for some tokens, float32 [n, hidden], and the weight of the norm before it [hidden]."""

    rows: np.ndarray
    norm: np.ndarray


class Reading(NamedTuple):
    """For each token of a text: three layers' hidden states float16 [n, 3 * hidden], and of the main model's next-token
    distribution the most likely ids int32 [n, top] and log-probabilities float16 [n, top], in order."""

    states: np.ndarray
    ids: np.ndarray
    log_probabilities: np.ndarray


class MainModel:
    """The main model of a draft; `layers` are those whose hidden states the head reads."""

    def __init__(self, spec: ModelSpec, layers: list[int] | None = None):
        """Raises ConvertError if the folder has no model that can have an EAGLE-3 draft."""
        self.spec = spec
        file = spec.folder / "openvino_model.xml"
        if not file.is_file():
            raise ConvertError(f"{spec.folder} holds no OpenVINO model; give the folder of an exported main model", 2)
        if not (spec.folder / "openvino_tokenizer.xml").is_file():
            raise ConvertError(f"{spec.folder} has no tokenizer (openvino_tokenizer.xml); export the model again", 2)
        try:
            self._graph = ov.Core().read_model(file)
        except RuntimeError as error:
            raise ConvertError(f"{file} or .bin is corrupt or truncated; export or copy it again") from error
        self._adds = {layer: node for layer, node in _residual_adds(self._graph).items() if layer is not None}
        self.layers = layers or published_layers(len(self._adds), spec.folder)
        missing = [layer for layer in self.layers if layer not in self._adds]
        if missing or len(set(self.layers)) != 3:
            raise ConvertError(
                f"a head reads three different layers of 0 to {len(self._adds) - 1}, not {self.layers}; give --layers",
                2,
            )
        try:
            gather = _embedding(self._graph)
        except ValueError as error:
            raise ConvertError(f"{spec.folder}: {error}") from error
        weights = gather.input_value(0).partial_shape
        self.vocabulary, self.hidden = weights[0].get_length(), weights[1].get_length()
        self.states = sum(_last_dimension(self._adds[layer]) for layer in self.layers)  # size for each token

    @property
    def shape(self) -> HeadShape:
        config = {**read_config(self.spec.folder), **text_config(read_config(self.spec.folder))}
        heads = config.get("num_attention_heads") or max(1, self.hidden // 64)
        return HeadShape(
            self.hidden,
            config.get("intermediate_size") or 4 * self.hidden,
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or self.hidden // heads,
            config.get("rms_norm_eps") or 1e-6,
            config.get("rope_theta") or 10000.0,
            context_length(config) or 4096,
            config.get("bos_token_id"),
            config.get("eos_token_id"),
        )

    def embedding(self) -> ov.Output:
        """The embedding weights, as nodes for another graph."""
        return _embedding(self._graph.clone()).input_value(0)

    def embeddings(self) -> np.ndarray:
        """float16 [vocabulary, hidden]"""
        return _evaluate(self.embedding(), np.arange(self.vocabulary)).astype(np.float16)

    def output_layer(self, ids: np.ndarray) -> OutputLayer | None:
        """The LM head for the tokens `ids`; None if the graph ends in another way."""
        node = self._graph.clone().output("logits").get_node()
        while node.get_type_name() != "MatMul":
            if not node.inputs() or node.get_type_name() in ("Gather", "Parameter", "Constant"):
                return None
            node = node.input_value(0).get_node()
        shape = node.input_value(1).partial_shape
        if shape.is_dynamic or list(shape.to_shape()) != [self.vocabulary, self.hidden]:
            return None
        norm, before = np.ones(self.hidden, np.float32), node.input_value(0).get_node()
        if before.get_type_name() == "Multiply":
            for value in before.input_values():
                while value.get_node().get_type_name() == "Convert":
                    value = value.get_node().input_value(0)
                if value.get_node().get_type_name() == "Constant" and value.get_partial_shape().to_shape()[-1] > 1:
                    norm = np.array(value.get_node().data, np.float32).ravel()
        return OutputLayer(_evaluate(node.input_value(1), ids), norm)

    def reader(self, top: int) -> "Reader":
        """Compile the model to give the `top` most likely tokens."""
        graph = self._graph.clone()
        adds = _residual_adds(graph)
        states = ops.concat([adds[layer] for layer in self.layers], -1)
        logits = graph.output("logits").get_node().input_value(0)
        best = ops.topk(ops.log_softmax(ops.convert(logits, "f32"), -1), np.int64(top), -1, "max", "value")
        outputs = (
            ops.convert(ops.clamp(ops.convert(states, "f32"), -F16_MAX, F16_MAX), "f16").output(0),
            ops.convert(best.output(1), "i32").output(0),
            ops.convert(best.output(0), "f16").output(0),
        )
        for result in graph.get_results():
            graph.remove_result(result)
        graph.add_results([ops.result(output) for output in outputs])
        return Reader(ov.Core().compile_model(graph, self.spec.device, self.spec.properties))


class Reader:
    """The compiled main model, which reads one text at a time."""

    def __init__(self, compiled: ov.CompiledModel):
        self._request = compiled.create_infer_request()
        self._names = {name for port in compiled.inputs for name in port.names}

    def read(self, tokens: np.ndarray) -> Reading:
        """Read a text, int64 [n]."""
        n = len(tokens)
        padded = np.zeros((1, -(-n // PADDING) * PADDING), np.int64)  # later tokens do not change earlier ones
        padded[0, :n] = tokens
        inputs: dict[str, Any] = {
            "input_ids": padded,
            "attention_mask": np.ones_like(padded),
            "position_ids": np.arange(padded.shape[1])[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        self._request.reset_state()
        found = self._request.infer({name: value for name, value in inputs.items() if name in self._names})
        return Reading(*(found[i][0, :n] for i in range(3)))


def published_layers(count: int, folder: Path) -> list[int]:
    """The layers of a model with `count` layers that published heads read, by EAGLE's code, SpecForge and AngelSlim."""
    if count < 3:
        raise ConvertError(
            f"{folder} has {count} layers that can be found by name, but an EAGLE-3 draft reads three; export it again "
            "with optimum-cli, or use another kind of draft",
            2,
        )
    return [1, count // 2 - 1, count - 4] if count >= 10 else [0, count // 2, count - 1]


def _evaluate(weights: ov.Output, ids: np.ndarray) -> np.ndarray:
    """Rows of a constant part of a graph."""
    rows = ops.gather(weights, ops.constant(ids.astype(np.int64)), np.int64(0))
    model = ov.Model([ops.result(ops.convert(rows, "f32"))], [])
    return ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})({})[0]
