"""Minimal EAGLE-3 heads for the models of tiny_llama.py: as optimum-cli exports them, and recomputed in numpy.

Random weights; only the LM head is fitted to the main model's next tokens, so that drafts are accepted now and then.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import openvino as ov

from speculative.modelgen import eagle3_ir, llama_ir
from speculative.modelgen.eagle3_ir import Head
from speculative.modelgen.llama_ir import Llama, Matrix, in_int8
from tests.support.tiny_llama import HEAD_DIM, HEADS, HIDDEN, VOCABULARY, tiny_llama
from tests.support.tiny_main import save_tiny_main

TAPS = [0, 1, 2]  # of a main model with 4 layers, the layers whose outputs the head reads
KNOWN = np.array([0, 1, 2, 4, 5, 6])  # the main model's token ids in the draft vocabulary
EXACT = {"EXECUTION_MODE_HINT": "ACCURACY", "INFERENCE_NUM_THREADS": "1", "ENABLE_CPU_PINNING": "NO"}


def tiny_head(seed: int) -> Head:
    random = np.random.default_rng(seed)

    def matrix(outputs: int, inputs: int, size: float = 1.0) -> Matrix:
        return in_int8(random.normal(size=(outputs, inputs)) * size / np.sqrt(inputs))

    q, k, v = (matrix(HIDDEN, 2 * HIDDEN, 2) for _ in range(3))
    o, gate, up, down = (matrix(HIDDEN, HIDDEN) for _ in range(4))
    lm_head, fc = matrix(len(KNOWN), HIDDEN, 2), matrix(HIDDEN, 3 * HIDDEN)
    names = ("hidden_norm", "input_norm", "feed_forward_norm", "norm")
    norms = {name: random.uniform(0.7, 1.3, HIDDEN).astype(np.float32) for name in names}
    return Head(
        **{"fc": fc, "q": q, "k": k, "v": v, "o": o, "gate": gate, "up": up, "down": down, "lm_head": lm_head, **norms},
        targets=KNOWN,
        layers=TAPS,
        heads=HEADS,
        kv_heads=HEADS,
        frequencies=tiny_llama(seed).frequencies,
        epsilon=1e-6,
    )


def save_head(folder: Path, head: Head) -> Path:
    """The IR, with random embeddings, as those of checkpoints without embeddings are."""
    embedding = llama_ir.weights(tiny_llama(seed=99).embedding, "embed_tokens")
    folder.mkdir(parents=True)
    model = eagle3_ir.build(head, embedding.output(0))
    ov.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)
    return folder


class HiddenStates:
    """The outputs [n, 3 * hidden] of three layers of `main` for tokens [n], and its logits [n, V], without a cache."""

    def __init__(self, main: Llama, layers: list[int]):
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

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return weight * x / np.sqrt((x**2).mean() + head.epsilon)

    for entry, token in enumerate(tokens[1:]):
        hidden = fc @ states[entry] if entry < len(states) else hidden
        x = np.concatenate([norm(embedding[token], head.input_norm), norm(hidden, head.hidden_norm)])
        angles = np.tile(main.frequencies * entry, 2)
        query, key, value = (part @ x for part in (q, k, v))
        keys.append(_rotate(key, angles))
        values.append(value.reshape(HEADS, HEAD_DIM))
        scores = np.einsum("hd,thd->ht", _rotate(query, angles), np.array(keys)) / np.sqrt(HEAD_DIM)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        hidden = hidden + o @ np.einsum("ht,thd->hd", weights, np.array(values)).ravel()
        x = norm(hidden, head.feed_forward_norm)
        opened = gate @ x
        hidden = hidden + down @ (opened / (1 + np.exp(-opened)) * (up @ x))
        normed.append(norm(hidden, head.norm))
    return np.array(normed)


def logits(head: Head, main: Llama, states: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The logits [V] after `tokens`, over the main model's vocabulary."""
    everywhere = np.full(VOCABULARY, -np.inf)
    everywhere[head.targets] = _values(head.lm_head) @ recompute(head, main, states, tokens)[-1]
    return everywhere


def fitted(head: Head, main: Llama, tokens: int = 400) -> Head:
    """`head` with an LM head fitted to the next-token distributions of `main` by least squares."""
    text = np.random.default_rng(0).integers(0, VOCABULARY, tokens)
    states, main_logits = HiddenStates(main, head.layers)(text)
    inputs = recompute(head, main, states[:-1], text)
    wanted = main_logits[1:][:, head.targets]
    weights = np.linalg.lstsq(inputs, wanted - wanted.mean(1, keepdims=True), rcond=None)[0]
    return replace(head, lm_head=in_int8(np.ascontiguousarray(weights.T)))


def _values(matrix: Matrix) -> np.ndarray:
    return (matrix.values.astype(np.float64) - matrix.zero_points) * matrix.scales.astype(np.float64)


def _rotate(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    x = x.reshape(HEADS, HEAD_DIM)
    half = HEAD_DIM // 2
    return x * np.cos(angles) + np.concatenate([-x[:, half:], x[:, :half]], 1) * np.sin(angles)


def save_tiny_eagle3_pair(folder: Path, layers: list[int] | None = None) -> tuple[Path, Path]:
    """Folders of a main model with a tokenizer (see tiny_main.py) and a head for it, that GenAI runs, too. `layers` are
    those that the head names, by default TAPS."""
    main = save_tiny_main(folder / "main")
    head = save_head(folder / "draft", replace(tiny_head(seed=5), layers=TAPS if layers is None else layers))
    (main / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}), encoding="utf-8")
    config = {"architectures": ["LlamaForCausalLMEagle3"], "eos_token_id": 0}
    (head / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return main, head
