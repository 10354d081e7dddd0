"""The main model in training, from its IR: sizes, embeddings, hidden states and probabilities."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from speculative.convert.errors import ConvertError
from speculative.models.config import context_length, read_config, rope, text_config
from speculative.models.eagle3_graph import find_embedding, is_head
from speculative.models.spec import ModelSpec

PADDING = 32  # token counts are rounded up to multiples: OpenVINO keeps compiled kernels for each
F16_MAX = 65504.0


class Shape(NamedTuple):
    """Sizes of a draft's layers and special tokens, taken from the main model's own."""

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
    """For each token of a text: the hidden states that the draft reads float16 [n, size], and of the main model's
    next-token distribution the most likely ids int32 [n, top] and log-probabilities float16 [n, top], in order."""

    states: np.ndarray
    ids: np.ndarray
    log_probabilities: np.ndarray


class MainModel:
    """The main model of a draft; nobody changes its `graph`."""

    def __init__(self, spec: ModelSpec):
        """Raises ConvertError if the folder has no model that can have a draft."""
        self.spec = spec
        file = spec.folder / "openvino_model.xml"
        if not file.is_file():
            raise ConvertError(f"{spec.folder} holds no OpenVINO model; give the folder of an exported main model", 2)
        if is_head(spec.folder):
            raise ConvertError(f"{spec.folder} is an EAGLE-3 head, a draft for another model; give that model", 2)
        if not (spec.folder / "openvino_tokenizer.xml").is_file():
            raise ConvertError(f"{spec.folder} has no tokenizer (openvino_tokenizer.xml); export the model again", 2)
        try:
            self.graph = ov.Core().read_model(file)
        except RuntimeError as error:
            raise ConvertError(f"{file} or .bin is corrupt or truncated; export or copy it again") from error
        try:
            gather = find_embedding(self.graph)
        except ValueError as error:
            raise ConvertError(f"{spec.folder}: {error}") from error
        weights = gather.input_value(0).partial_shape
        self.vocabulary, self.hidden = weights[0].get_length(), weights[1].get_length()

    @property
    def shape(self) -> Shape:
        return shape_of(self.spec.folder, self.hidden)

    def embeddings(self) -> np.ndarray:
        """float16 [vocabulary, hidden]"""
        weights = find_embedding(self.graph.clone()).input_value(0)
        return evaluate([_rows(weights, np.arange(self.vocabulary))])[0].astype(np.float16)

    def output_layer(self, ids: np.ndarray) -> OutputLayer | None:
        """The LM head for the tokens `ids`; None if the graph ends in another way."""
        graph = self.graph.clone()
        node = last_product(graph)
        if node is None:
            return None
        shape = node.input_value(1).partial_shape
        if shape.is_dynamic or list(shape.to_shape()) != [self.vocabulary, self.hidden]:
            return None
        norm = norm_weight(node.input_value(0).get_node())
        rows = evaluate([_rows(node.input_value(1), ids)])[0]
        return OutputLayer(rows, np.ones(self.hidden, np.float32) if norm is None else norm)

    def reader(self, top: int, states: Callable[[ov.Model], ov.Node] | None = None) -> "Reader":
        """Compile the model to give the `top` most likely tokens, and the hidden states that `states` finds in its
        graph [batch, tokens, size]."""
        graph = self.graph.clone()
        logits = graph.output("logits").get_node().input_value(0)
        best = ops.topk(ops.log_softmax(ops.convert(logits, "f32"), -1), np.int64(top), -1, "max", "value")
        outputs = [ops.convert(best.output(1), "i32"), ops.convert(best.output(0), "f16")]
        if states:
            clamped = ops.clamp(ops.convert(states(graph), "f32"), -F16_MAX, F16_MAX)
            outputs.append(ops.convert(clamped, "f16"))
        return Reader(Forward(graph, outputs, self.spec))


class Reader:
    """The compiled main model, which reads one text at a time."""

    def __init__(self, forward: "Forward"):
        self._forward = forward

    def read(self, tokens: np.ndarray) -> Reading:
        """Read a text, int64 [n]."""
        ids, log_probabilities, *states = self._forward(tokens)
        return Reading(states[0] if states else np.zeros((len(tokens), 0), np.float16), ids, log_probabilities)


class Forward:
    """Computes what `outputs`, nodes of `graph`, give for a text, instead of what the graph gave."""

    def __init__(self, graph: ov.Model, outputs: Sequence[ov.Node], spec: ModelSpec, **properties: str):
        for result in graph.get_results():
            graph.remove_result(result)
        graph.add_results([ops.result(output) for output in outputs])
        compiled = ov.Core().compile_model(graph, spec.device, {**spec.properties, **properties})
        self._request = compiled.create_infer_request()
        self._names = {name for port in compiled.inputs for name in port.names}
        self._count = len(outputs)

    def __call__(self, tokens: np.ndarray, step: int = 1) -> list[np.ndarray]:
        """For a text int64 [n] each output [n, size]. Its tokens are `step` positions apart."""
        n = len(tokens)
        padded = np.zeros((1, -(-n // PADDING) * PADDING), np.int64)  # later tokens do not change earlier ones
        padded[0, :n] = tokens
        inputs: dict[str, Any] = {
            "input_ids": padded,
            "attention_mask": np.ones_like(padded),
            "position_ids": step * np.arange(padded.shape[1])[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        self._request.reset_state()
        results = self._request.infer({name: value for name, value in inputs.items() if name in self._names})
        return [results[i][0, :n].copy() for i in range(self._count)]


def shape_of(folder: Path, hidden: int) -> Shape:
    """The sizes in the config.json of an IR folder, of a model with the hidden size `hidden`."""
    config = {**read_config(folder), **text_config(read_config(folder))}
    heads = config.get("num_attention_heads") or max(1, hidden // 64)
    return Shape(
        hidden,
        config.get("intermediate_size") or 4 * hidden,
        heads,
        config.get("num_key_value_heads") or heads,
        config.get("head_dim") or hidden // heads,
        config.get("rms_norm_eps") or 1e-6,
        rope(config)[0] or 10000.0,
        context_length(config) or 4096,
        config.get("bos_token_id"),
        config.get("eos_token_id"),
    )


def last_product(graph: ov.Model) -> ov.Node | None:
    """The MatMul that gives the logits; None if the graph ends in another way."""
    node = graph.output("logits").get_node()
    while node.get_type_name() != "MatMul":
        if not node.inputs() or node.get_type_name() in ("Gather", "Parameter", "Constant"):
            return None
        node = node.input_value(0).get_node()
    return node


def norm_weight(node: ov.Node) -> np.ndarray | None:
    """The weight float32 [hidden] of the norm that ends with `node`; None if it does not end with one."""
    for value in node.input_values() if node.get_type_name() == "Multiply" else ():
        while value.get_node().get_type_name() == "Convert":
            value = value.get_node().input_value(0)
        if value.get_node().get_type_name() == "Constant" and [1, *value.get_node().data.shape][-1] > 1:
            return np.array(value.get_node().data, np.float32).ravel()
    return None


def evaluate(outputs: Sequence[ov.Output]) -> list[np.ndarray]:
    """Constant parts of a graph, float32."""
    model = ov.Model([ops.result(ops.convert(output, "f32")) for output in outputs], [])
    results = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})({})
    return [results[i] for i in range(len(outputs))]


def _rows(weights: ov.Output, ids: np.ndarray) -> ov.Output:
    return ops.gather(weights, ops.constant(ids.astype(np.int64)), np.int64(0)).output(0)
