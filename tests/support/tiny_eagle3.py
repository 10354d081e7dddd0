"""Minimal EAGLE-3 heads for the models of tiny_llama.py: as optimum-cli exports them, and recomputed in numpy.

Random weights; only the LM head is fitted to the main model's next tokens, so that drafts are accepted now and then.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from speculative.modelgen import llama_ir
from speculative.modelgen.llama_ir import Llama, Matrix
from tests.support.tiny_llama import HEAD_DIM, HEADS, HIDDEN, VOCABULARY, in_int8, tiny_llama

TAPS = (0, 1, 2)  # of a main model with 4 layers, the layers whose outputs the head reads
KNOWN = np.array([0, 1, 2, 4, 5, 6])  # the main model's token ids in the draft vocabulary
ONES = np.ones(HIDDEN, np.float32)
EPSILON = 1e-6
EXACT = {"EXECUTION_MODE_HINT": "ACCURACY", "INFERENCE_NUM_THREADS": "1", "ENABLE_CPU_PINNING": "NO"}


@dataclass
class Head:
    """Weights of an EAGLE-3 head, with the names of the published checkpoints."""

    fc: Matrix  # [hidden, 3 * hidden]
    q: Matrix  # [heads * head_dim, 2 * hidden]
    k: Matrix
    v: Matrix
    o: Matrix
    gate: Matrix
    up: Matrix
    down: Matrix
    lm_head: Matrix  # [draft vocabulary, hidden]
    targets: np.ndarray  # the main model's token ids [draft vocabulary]


def tiny_head(seed: int) -> Head:
    random = np.random.default_rng(seed)

    def matrix(outputs: int, inputs: int, size: float = 1.0) -> Matrix:
        return in_int8(random.normal(size=(outputs, inputs)) * size / np.sqrt(inputs))

    attention = [matrix(HIDDEN, 2 * HIDDEN, 2) for _ in range(3)]
    feed_forward = [matrix(HIDDEN, HIDDEN) for _ in range(4)]
    lm_head = matrix(len(KNOWN), HIDDEN, 2)
    return Head(matrix(HIDDEN, 3 * HIDDEN), *attention, *feed_forward, lm_head=lm_head, targets=KNOWN)


def build(head: Head) -> ov.Model:
    """The graph of `head` with random embeddings, as those of checkpoints without embeddings are."""
    llama = tiny_llama(seed=99)
    names = ("input_ids", "attention_mask", "position_ids")
    inputs = {name: ops.parameter([-1, -1], np.int64) for name in names}
    inputs["hidden_states"] = ops.parameter([-1, -1, -1], np.float32)
    inputs["beam_idx"] = ops.parameter([-1], np.int32)
    for name, node in inputs.items():
        node.set_friendly_name(name)
        node.output(0).set_names({name})

    def linear(x: ov.Node, name: str) -> ov.Node:
        return llama_ir._linear(x, getattr(head, name), name)

    weights = llama_ir._weights(llama.embedding, "embed_tokens")
    embedded = ops.gather(weights, ops.convert(inputs["input_ids"], "i32"), np.int32(0))
    hidden = linear(inputs["hidden_states"], "fc")
    both = [llama_ir._rms_norm(part, ONES, EPSILON) for part in (embedded, hidden)]
    cos, sin = llama_ir._rotation(llama.frequencies, inputs["position_ids"])
    batch = ops.gather(ops.shape_of(inputs["input_ids"]), np.array([0]), np.int64(0))
    sinks: list[ov.Node] = []
    q, k, v = (llama_ir._split_heads(linear(ops.concat(both, -1), name), HEADS, HEAD_DIM) for name in "qkv")
    q, k = (llama_ir._rotate(x, cos, sin, HEAD_DIM) for x in (q, k))
    past, k = llama_ir._cached(k, "0.key", inputs["beam_idx"], batch, llama, sinks)
    _, v = llama_ir._cached(v, "0.value", inputs["beam_idx"], batch, llama, sinks)
    mask = llama_ir._causal_mask(past, inputs["input_ids"], inputs["attention_mask"])
    scale = ops.constant(np.float32(HEAD_DIM**-0.5))
    attended = ops.transpose(ops.scaled_dot_product_attention(q, k, v, mask, scale), np.array([0, 2, 1, 3]))
    attended = ops.reshape(attended, np.array([0, 0, HIDDEN]), special_zero=True)
    hidden = ops.add(hidden, linear(attended, "o"))
    x = llama_ir._rms_norm(hidden, ONES, EPSILON)
    x = linear(ops.multiply(ops.swish(linear(x, "gate")), linear(x, "up")), "down")
    hidden = ops.add(hidden, x)
    hidden.set_friendly_name("__module.model.midlayer/aten::add/Add_1")
    logits = linear(llama_ir._rms_norm(hidden, ONES, EPSILON), "lm_head")
    d2t = ops.constant(head.targets - np.arange(len(head.targets)))
    results = []
    for name, node in (("logits", logits), ("d2t", d2t)):
        node.output(0).set_names({name})
        results.append(ops.result(node))
    return ov.Model(results, sinks, list(inputs.values()))


def save_head(folder: Path, head: Head, layers: tuple[int, ...] | None = TAPS) -> Path:
    model = build(head)
    model.set_rt_info("True", ["eagle3_mode"])
    if layers:
        model.set_rt_info(list(layers), "hidden_layers_list")
    folder.mkdir(parents=True)
    ov.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)
    return folder


class HiddenStates:
    """The outputs [n, 3 * hidden] of three layers of `main` for tokens [n], and its logits [n, V], without a cache."""

    def __init__(self, main: Llama, layers: tuple[int, ...] = TAPS):
        model = llama_ir.build(main)
        self._of_layer = {layer: i for i, layer in enumerate(dict.fromkeys(layers))}
        self._layers = layers
        for layer in self._of_layer:
            model.add_outputs((f"__module.model.layers.{layer}/aten::add/Add_1", 0))
        self._request = ov.Core().compile_model(model, "CPU", EXACT).create_infer_request()

    def __call__(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        n = len(tokens)
        inputs = {"input_ids": tokens[None], "attention_mask": np.ones((1, n), np.int64)}
        inputs |= {"position_ids": np.arange(n)[None], "beam_idx": np.zeros(1, np.int32)}
        self._request.reset_state()
        logits, *states = self._request.infer(inputs).values()
        return np.concatenate([states[self._of_layer[layer]][0] for layer in self._layers], -1), logits[0].copy()


def recompute(head: Head, main: Llama, states: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The head's normed hidden state [n - 1, hidden] of each entry, in float64: the first entries come from the main
    model's hidden `states`, the others from the head's own."""
    embedding = _values(main.embedding)
    q, k, v, o, fc = (_values(matrix) for matrix in (head.q, head.k, head.v, head.o, head.fc))
    gate, up, down = (_values(matrix) for matrix in (head.gate, head.up, head.down))
    keys, values, hidden, normed = [], [], None, []
    for entry, token in enumerate(tokens[1:]):
        hidden = fc @ states[entry] if entry < len(states) else hidden
        x = np.concatenate([_norm(embedding[token]), _norm(hidden)])
        angles = np.tile(main.frequencies * entry, 2)
        query, key, value = (part @ x for part in (q, k, v))
        keys.append(_rotate(key, angles))
        values.append(value.reshape(HEADS, HEAD_DIM))
        scores = np.einsum("hd,thd->ht", _rotate(query, angles), np.array(keys)) / np.sqrt(HEAD_DIM)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        hidden = hidden + o @ np.einsum("ht,thd->hd", weights, np.array(values)).ravel()
        x = _norm(hidden)
        opened = gate @ x
        hidden = hidden + down @ (opened / (1 + np.exp(-opened)) * (up @ x))
        normed.append(_norm(hidden))
    return np.array(normed)


def logits(head: Head, main: Llama, states: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The logits [V] after `tokens`, over the main model's vocabulary."""
    everywhere = np.full(VOCABULARY, -np.inf)
    everywhere[head.targets] = _values(head.lm_head) @ recompute(head, main, states, tokens)[-1]
    return everywhere


def fitted(head: Head, main: Llama, layers: tuple[int, ...] = TAPS, tokens: int = 400) -> Head:
    """`head` with an LM head fitted to the next-token distributions of `main` by least squares."""
    text = np.random.default_rng(0).integers(0, VOCABULARY, tokens)
    states, main_logits = HiddenStates(main, layers)(text)
    inputs = recompute(head, main, states[:-1], text)
    wanted = main_logits[1:][:, head.targets]
    weights = np.linalg.lstsq(inputs, wanted - wanted.mean(1, keepdims=True), rcond=None)[0]
    return replace(head, lm_head=in_int8(np.ascontiguousarray(weights.T)))


def _values(matrix: Matrix) -> np.ndarray:
    return (matrix.values.astype(np.float64) - matrix.zero_points) * matrix.scales.astype(np.float64)


def _norm(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean() + EPSILON)


def _rotate(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    x = x.reshape(HEADS, HEAD_DIM)
    half = HEAD_DIM // 2
    return x * np.cos(angles) + np.concatenate([-x[:, half:], x[:, :half]], 1) * np.sin(angles)
