"""Reads IR of Llama models with int8 weights, and builds it, also that of Qwen2 and Qwen3, without torch.

The graph is the same as optimum-cli exports (stateful, uint8 weights with a zero point and a scale per row, nncf's
int8_asym), so that OpenVINO and OpenVINO GenAI treat both the same way.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino.op.util import Variable, VariableInfo


class Matrix(NamedTuple):
    """Weights [outputs, inputs] as (values - zero_points) * scales."""

    values: np.ndarray  # uint8 [outputs, inputs]
    zero_points: np.ndarray  # uint8 [outputs, 1]
    scales: np.ndarray  # float16 [outputs, 1]


@dataclass
class Layer:
    """One decoder layer: norms and matrices of attention and feed-forward."""

    attention_norm: np.ndarray  # float32 [hidden]
    q: Matrix  # [heads * head_dim, hidden]
    k: Matrix  # [kv_heads * head_dim, hidden]
    v: Matrix
    o: Matrix  # [hidden, heads * head_dim]
    feed_forward_norm: np.ndarray
    gate: Matrix  # [intermediate, hidden]
    up: Matrix
    down: Matrix  # [hidden, intermediate]
    biases: dict[str, np.ndarray] = field(default_factory=dict)  # Qwen2: of "q", "k", "v", float32 [outputs]
    head_norms: dict[str, np.ndarray] = field(default_factory=dict)  # Qwen3: of "q", "k", float32 [head_dim]


MATRICES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


@dataclass
class Llama:
    """The whole model. `head` is None if the embedding is also the LM head."""

    embedding: Matrix  # [vocabulary, hidden]
    layers: list[Layer]
    norm: np.ndarray  # float32 [hidden]
    head: Matrix | None
    heads: int
    kv_heads: int
    frequencies: np.ndarray  # float32 [head_dim / 2], of the rotary position embedding
    attention_scale: float
    epsilon: float  # of the norms
    logits_bias: np.ndarray | None = None  # float32 [vocabulary]

    @property
    def head_dim(self) -> int:
        return 2 * len(self.frequencies)


class Heads(Protocol):
    """The attention heads of a model."""

    heads: int
    kv_heads: int

    @property
    def head_dim(self) -> int: ...


def read(folder: Path) -> Llama:
    """Read the model from an IR folder that optimum-cli exported with int8 weights.

    Raises ValueError for anything else.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = ov.Core().read_model(folder / "openvino_model.xml")
    nodes = {node.get_friendly_name(): node for node in model.get_ordered_ops()}

    def matrix(name: str) -> Matrix:
        parts = (nodes[f"{name}.weight{part}"] for part in ("", "/zero_point", "/scale"))
        return Matrix(*(np.array(node.data) for node in parts))

    def norm(name: str) -> np.ndarray:
        inputs = nodes[f"__module.model.{name}/aten::mul/Multiply_1"].input_values()
        return next(np.array(v.get_node().data) for v in inputs if v.get_node().get_type_name() == "Constant").ravel()

    try:
        layers = [
            Layer(
                attention_norm=norm(f"layers.{i}.input_layernorm"),
                feed_forward_norm=norm(f"layers.{i}.post_attention_layernorm"),
                **{key: matrix(f"self.model.layers.{i}.{name}") for key, name in MATRICES.items()},
                biases={},
                head_norms={},
            )
            for i in range(config["num_hidden_layers"])
        ]
        return Llama(
            embedding=matrix("self.model.embed_tokens"),
            layers=layers,
            norm=norm("norm"),
            head=None if config["tie_word_embeddings"] else matrix("self.lm_head"),
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            frequencies=np.array(nodes["__module.model.rotary_emb/aten::to/Convert"].data).ravel(),
            attention_scale=config["head_dim"] ** -0.5,
            epsilon=config["rms_norm_eps"],
        )
    except (KeyError, AttributeError, StopIteration) as error:
        raise ValueError(f"{folder} is not a Llama exported by optimum-cli with int8 weights ({error})") from error


def build(llama: Llama) -> ov.Model:
    """Build the stateful model: input_ids, attention_mask, position_ids [batch, tokens], beam_idx [batch] to logits."""
    inputs = {name: ops.parameter([-1, -1], np.int64) for name in ("input_ids", "attention_mask", "position_ids")}
    inputs["beam_idx"] = ops.parameter([-1], np.int32)
    for name, node in inputs.items():
        node.set_friendly_name(name)  # the paged attention transformation looks nodes up by it
        node.output(0).set_names({name})

    embedding = weights(llama.embedding, "self.model.embed_tokens")
    hidden = ops.gather(embedding, ops.convert(inputs["input_ids"], "i32"), np.int32(0))
    cos, sin = rotation(llama.frequencies, inputs["position_ids"])
    batch = ops.gather(ops.shape_of(inputs["input_ids"]), np.array([0]), np.int64(0))
    mask, sinks = None, list[ov.Node]()
    for i, layer in enumerate(llama.layers):
        name = f"self.model.layers.{i}."
        x = rms_norm(hidden, layer.attention_norm, llama.epsilon)
        parts = {key: linear(x, getattr(layer, key), name + MATRICES[key]) for key in "qkv"}
        parts |= {key: ops.add(parts[key], bias) for key, bias in layer.biases.items()}
        heads = {"q": llama.heads, "k": llama.kv_heads, "v": llama.kv_heads}
        parts = {key: split_heads(part, heads[key], llama.head_dim) for key, part in parts.items()}
        parts |= {key: rms_norm(parts[key], weight, llama.epsilon) for key, weight in layer.head_norms.items()}
        q, k = (rotate(parts[key], cos, sin, llama.head_dim) for key in "qk")
        v = parts["v"]
        past_k, k = cached(k, f"{i}.key", inputs["beam_idx"], batch, llama, sinks)
        _, v = cached(v, f"{i}.value", inputs["beam_idx"], batch, llama, sinks)
        if mask is None:
            mask = causal_mask(past_k, inputs["input_ids"], inputs["attention_mask"])
        k, v = (repeat_heads(cache, llama) for cache in (k, v))
        scale = ops.constant(np.float32(llama.attention_scale))
        attended = ops.transpose(ops.scaled_dot_product_attention(q, k, v, mask, scale), np.array([0, 2, 1, 3]))
        attended = ops.reshape(attended, np.array([0, 0, llama.heads * llama.head_dim]), special_zero=True)
        hidden = ops.add(hidden, linear(attended, layer.o, name + MATRICES["o"]))
        x = rms_norm(hidden, layer.feed_forward_norm, llama.epsilon)
        gate = ops.swish(linear(x, layer.gate, name + MATRICES["gate"]))
        x = ops.multiply(gate, linear(x, layer.up, name + MATRICES["up"]))
        hidden = ops.add(hidden, linear(x, layer.down, name + MATRICES["down"]))
        hidden.set_friendly_name(f"__module.model.layers.{i}/aten::add/Add_1")  # EAGLE-3 drafts look it up by its name
    head = embedding if llama.head is None else weights(llama.head, "self.lm_head")
    logits = ops.matmul(rms_norm(hidden, llama.norm, llama.epsilon), head, False, True)
    if llama.logits_bias is not None:
        logits = ops.add(logits, llama.logits_bias)
    logits.output(0).set_names({"logits"})
    model = ov.Model([ops.result(logits)], sinks, list(inputs.values()), "main_graph")
    model.set_rt_info("8.0", ["runtime_options", "ACTIVATIONS_SCALE_FACTOR"])  # as optimum-cli: f16 on GPUs
    return model


def in_int8(weights: np.ndarray) -> Matrix:
    """Round float32 weights to 8 bits with a scale and a zero point for each row, as nncf's int8_asym."""
    low, high = weights.min(1, keepdims=True).clip(max=0), weights.max(1, keepdims=True).clip(min=0)
    scales = ((high - low) / 255).clip(min=1e-7).astype(np.float16)
    zero_points = np.round(-low / scales).clip(0, 255)
    values = np.round(weights / scales + zero_points).clip(0, 255)
    return Matrix(values.astype(np.uint8), zero_points.astype(np.uint8), scales)


def weights(matrix: Matrix, name: str) -> ov.Node:
    values = ops.constant(matrix.values, shared_memory=True)
    values.set_friendly_name(f"{name}.weight")
    centred = ops.subtract(ops.convert(values, "f16"), ops.convert(ops.constant(matrix.zero_points), "f16"))
    return ops.convert(ops.multiply(centred, ops.constant(matrix.scales)), "f32")


def linear(x: ov.Node, matrix: Matrix, name: str) -> ov.Node:
    return ops.matmul(x, weights(matrix, name), False, True)


def rms_norm(x: ov.Node, weight: np.ndarray, epsilon: float) -> ov.Node:
    def scalar(value: float) -> ov.Node:
        return ops.constant(np.full((1, 1, 1), value, np.float32))

    mean = ops.reduce_mean(ops.power(x, scalar(2)), np.array([-1]), keep_dims=True)
    normed = ops.multiply(x, ops.divide(scalar(1), ops.sqrt(ops.add(mean, scalar(epsilon)))))
    return ops.multiply(ops.constant(weight.reshape(1, 1, -1)), normed)


def rotation(frequencies: np.ndarray, position_ids: ov.Node) -> list[ov.Node]:
    """cos and sin of the rotary angles, [batch, 1, tokens, head_dim]."""
    positions = ops.convert(ops.unsqueeze(position_ids, np.int64(1)), "f32")
    angles = ops.transpose(ops.matmul(frequencies.reshape(1, -1, 1), positions, False, False), np.array([0, 2, 1]))
    angles = ops.concat([angles, angles], -1)
    return [ops.unsqueeze(part, np.int64(1)) for part in (ops.cos(angles), ops.sin(angles))]


def split_heads(x: ov.Node, heads: int, head_dim: int) -> ov.Node:
    """[batch, tokens, heads * head_dim] to [batch, heads, tokens, head_dim]."""
    x = ops.reshape(x, np.array([0, 0, heads, head_dim]), special_zero=True)
    return ops.transpose(x, np.array([0, 2, 1, 3]))


def rotate(x: ov.Node, cos: ov.Node, sin: ov.Node, head_dim: int) -> ov.Node:
    half, end, one, axis = (np.array([n]) for n in (head_dim // 2, np.iinfo(np.int64).max, 1, 3))
    second = ops.multiply(ops.slice(x, half, end, one, axis), np.float32(-1))
    turned = ops.concat([second, ops.slice(x, np.array([0]), half, one, axis)], -1)
    return ops.add(ops.multiply(x, cos), ops.multiply(turned, sin))


def cached(x: ov.Node, name: str, beam_idx: ov.Node, batch: ov.Node, llama: Heads, sinks: list[ov.Node]) -> tuple:
    """The cached tensor, and the same with x appended; the new state is added to `sinks`."""
    info = VariableInfo()
    info.data_shape = ov.PartialShape([-1, llama.kv_heads, -1, llama.head_dim])
    info.data_type = ov.Type.f32
    info.variable_id = f"past_key_values.{name}present.{name}"
    variable = Variable(info)
    shape = ops.concat([batch, np.array([llama.kv_heads]), np.array([0]), np.array([llama.head_dim])], 0)
    past = ops.gather(ops.read_value(ops.broadcast(np.float32(0), shape), variable), beam_idx, np.int64(0))
    whole = ops.concat([past, x], 2)
    sinks.append(ops.assign(whole, variable))
    return past, whole


def causal_mask(past: ov.Node, input_ids: ov.Node, attention_mask: ov.Node) -> ov.Node:
    """0 where a token may attend, -65504 elsewhere, [batch, 1, tokens, past + tokens]."""
    zero, one = np.int64(0), np.int64(1)
    length = ops.gather(ops.shape_of(past), np.int64(2), zero)
    total = ops.add(length, ops.gather(ops.shape_of(input_ids), np.int64(1), zero))
    keys = ops.unsqueeze(ops.range(zero, total, one, "i64"), np.array([0, 1, 2]))
    queries = ops.unsqueeze(ops.range(length, total, one, "i64"), np.array([0, 1, 3]))
    given = ops.unsqueeze(ops.convert(attention_mask, "boolean"), np.array([1, 2]))
    seen = ops.logical_and(ops.less_equal(keys, queries), given)
    return ops.select(seen, np.float32(0), np.float32(-65504))


def repeat_heads(cache: ov.Node, llama: Heads) -> ov.Node:
    """Repeat each key or value head for every query head that reads it."""
    group = llama.heads // llama.kv_heads
    if group == 1:
        return cache
    times = np.array([1, 1, group, 1, 1])
    repeated = ops.broadcast(ops.unsqueeze(cache, np.int64(2)), times, broadcast_spec="BIDIRECTIONAL")
    return ops.reshape(repeated, np.array([0, llama.heads, -1, llama.head_dim]), special_zero=True)
