"""Reads and builds IR of EAGLE-3 heads with int8 weights, without torch: the same graph as optimum-cli exports."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from speculative.modelgen import llama_ir
from speculative.modelgen.llama_ir import Matrix


@dataclass
class Head:
    """Weights of an EAGLE-3 head. All matrices are [outputs, inputs]; q, k and v read twice the hidden size."""

    fc: Matrix  # [hidden, the main model's hidden states]
    q: Matrix
    k: Matrix
    v: Matrix
    o: Matrix
    gate: Matrix
    up: Matrix
    down: Matrix
    lm_head: Matrix  # [draft vocabulary, hidden]
    hidden_norm: np.ndarray  # float32 [hidden], as all norms
    input_norm: np.ndarray
    feed_forward_norm: np.ndarray
    norm: np.ndarray
    targets: np.ndarray  # int64 [draft vocabulary], the main model's token ids
    layers: list[int]  # of the main model, whose hidden states the head reads; [] for GenAI's own choice
    heads: int
    kv_heads: int
    frequencies: np.ndarray  # float32 [head_dim / 2], of the rotary position embedding
    epsilon: float
    attention_scale: float = 0.0  # by default 1 / sqrt(head_dim)
    logits_bias: np.ndarray | None = None  # float32 [draft vocabulary]

    def __post_init__(self) -> None:
        self.attention_scale = self.attention_scale or self.head_dim**-0.5

    @property
    def head_dim(self) -> int:
        return 2 * len(self.frequencies)


MATRICES = {
    "fc": "fc",
    **{key: f"midlayer.{name}" for key, name in llama_ir.MATRICES.items()},
    "lm_head": "lm_head",
}


def read(folder: Path) -> Head:
    """Read a head of convert/make_draft.py from its IR folder. Raises ValueError for anything else, also for one with a
    bias of the logits, whose attention may have another scale."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = ov.Core().read_model(folder / "openvino_model.xml")
    nodes = {node.get_friendly_name(): node for node in model.get_ordered_ops()}

    def reader(node: ov.Node) -> ov.Node:
        return next(iter(node.output(0).get_target_inputs())).get_node()

    def source(node: ov.Node, *inputs: int) -> ov.Node:
        """The node reached from `node` by its input of this number, that node's input of the next, and so on."""
        for i in inputs:
            node = node.input_value(i).get_node()
        return node

    def scaled(name: str) -> ov.Node:
        """The last operation of the graph that `llama_ir.weights` builds, but for the conversion to f32."""
        return reader(reader(reader(nodes[f"self.model.{name}.weight"])))

    def matrix(name: str) -> Matrix:
        parts = ((0, 0, 0), (0, 1, 0), (1,))  # values, zero points, scales
        return Matrix(*(np.array(source(scaled(name), *part).data) for part in parts))

    def read_by(key: str) -> ov.Node:
        """What the product with a matrix reads."""
        return source(reader(reader(scaled(MATRICES[key]))), 0)

    def norm(normed: ov.Node) -> np.ndarray:
        return np.array(source(normed, 0).data).ravel()

    try:
        if reader(reader(reader(scaled("lm_head")))).get_type_name() != "Result":
            raise ValueError(
                f"{folder} is an EAGLE-3 head with a bias of its logits: give one of convert/make_draft.py"
            )
        cos = next(node for node in nodes.values() if node.get_type_name() == "Cos")
        d2t = np.array(nodes["self.model.d2t"].data)
        parts: dict[str, Any] = {key: matrix(name) for key, name in MATRICES.items()}
        return Head(
            **parts,
            hidden_norm=norm(source(read_by("q"), 1)),
            input_norm=norm(source(read_by("q"), 0)),
            feed_forward_norm=norm(read_by("gate")),
            norm=norm(read_by("lm_head")),
            targets=d2t + np.arange(len(d2t)),
            layers=[int(layer) for layer in model.get_rt_info("hidden_layers_list").astype(str).split()],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            frequencies=np.array(source(cos, 0, 0, 0, 0).data).ravel(),  # through a concat, a transpose and a product
            epsilon=config["rms_norm_eps"],
        )
    except (KeyError, AttributeError, StopIteration, RuntimeError) as error:
        raise ValueError(f"{folder} is not an EAGLE-3 head written by this project ({error})") from error


def no_embeddings(vocabulary: int, hidden: int) -> ov.Output:
    """Stands for embeddings [vocabulary, hidden] without a byte of weights: engines put the main model's there."""
    row = ops.constant(np.zeros((1, hidden), np.float32))
    return ops.broadcast(row, np.array([vocabulary, hidden])).output(0)


def save(head: Head, vocabulary: int, folder: Path) -> None:
    """Write the IR of the head of a main model with that `vocabulary` to `folder`, without embeddings."""
    model = build(head, no_embeddings(vocabulary, len(head.norm)))
    ov.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)


def build(head: Head, embedding: ov.Output) -> ov.Model:
    """Build the stateful model: input_ids, attention_mask, position_ids [batch, tokens], hidden_states [batch, tokens,
    size], beam_idx [batch] to logits and d2t. `embedding` gives the main model's embeddings [vocabulary, hidden]."""
    inputs = {name: ops.parameter([-1, -1], np.int64) for name in ("input_ids", "attention_mask", "position_ids")}
    inputs["hidden_states"] = ops.parameter([-1, -1, -1], np.float32)  # GenAI gives it another size
    inputs["beam_idx"] = ops.parameter([-1], np.int32)
    for name, node in inputs.items():
        node.set_friendly_name(name)
        node.output(0).set_names({name})

    def linear(x: ov.Node, matrix: Matrix, name: str) -> ov.Node:
        return llama_ir.linear(x, matrix, f"self.model.{name}")

    hidden = linear(inputs["hidden_states"], head.fc, "fc")
    embedded = ops.gather(embedding, ops.convert(inputs["input_ids"], "i32"), np.int32(0))
    embedded.set_friendly_name("__module.model.embed_tokens/aten::embedding/Gather")
    norms = ((embedded, head.input_norm), (hidden, head.hidden_norm))
    x = ops.concat([llama_ir.rms_norm(part, weight, head.epsilon) for part, weight in norms], -1)
    cos, sin = llama_ir.rotation(head.frequencies, inputs["position_ids"])
    batch = ops.gather(ops.shape_of(inputs["input_ids"]), np.array([0]), np.int64(0))
    sinks: list[ov.Node] = []
    q, k, v = (
        llama_ir.split_heads(linear(x, getattr(head, name), MATRICES[name]), count, head.head_dim)
        for name, count in (("q", head.heads), ("k", head.kv_heads), ("v", head.kv_heads))
    )
    q, k = (llama_ir.rotate(part, cos, sin, head.head_dim) for part in (q, k))
    past, k = llama_ir.cached(k, "0.key", inputs["beam_idx"], batch, head, sinks)
    _, v = llama_ir.cached(v, "0.value", inputs["beam_idx"], batch, head, sinks)
    mask = llama_ir.causal_mask(past, inputs["input_ids"], inputs["attention_mask"])
    k, v = (llama_ir.repeat_heads(cache, head) for cache in (k, v))
    scale = ops.constant(np.float32(head.attention_scale))
    attended = ops.transpose(ops.scaled_dot_product_attention(q, k, v, mask, scale), np.array([0, 2, 1, 3]))
    attended = ops.reshape(attended, np.array([0, 0, head.heads * head.head_dim]), special_zero=True)
    hidden = ops.add(hidden, linear(attended, head.o, MATRICES["o"]))
    x = llama_ir.rms_norm(hidden, head.feed_forward_norm, head.epsilon)
    gate = ops.swish(linear(x, head.gate, MATRICES["gate"]))
    x = ops.multiply(gate, linear(x, head.up, MATRICES["up"]))
    hidden = ops.add(hidden, linear(x, head.down, MATRICES["down"]))
    hidden.set_friendly_name("__module.model.midlayer/aten::add/Add_1")  # engines look it up by its name
    logits = linear(llama_ir.rms_norm(hidden, head.norm, head.epsilon), head.lm_head, "lm_head")
    if head.logits_bias is not None:
        logits = ops.add(logits, head.logits_bias)
    d2t = ops.constant(head.targets - np.arange(len(head.targets)))
    d2t.set_friendly_name("self.model.d2t")
    results = []
    for name, node in (("logits", logits), ("d2t", d2t)):
        node.output(0).set_names({name})
        results.append(ops.result(node))
    model = ov.Model(results, sinks, list(inputs.values()), "main_graph")
    model.set_rt_info("True", ["eagle3_mode"])
    if head.layers:
        model.set_rt_info(head.layers, "hidden_layers_list")
    model.set_rt_info("8.0", ["runtime_options", "ACTIVATIONS_SCALE_FACTOR"])  # as optimum-cli: f16 on GPUs
    return model
