"""Minimal Llama models: one layer or a few, a vocabulary of a few tokens, about 0.1 ms per forward pass.

Random weights, scaled so that next tokens vary, attention matters, and no token has a probability near 0 or 1.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import openvino

from speculative.modelgen import llama_ir
from speculative.modelgen.llama_ir import Layer, Llama, Matrix, in_int8
from tests.support.paths import DRAFT

VOCABULARY = 8
HIDDEN, HEADS, HEAD_DIM = 32, 2, 16


def tiny_llama(
    seed: int, noise: float = 0.0, bias: np.ndarray | None = None, vocabulary: int = VOCABULARY, layers: int = 1
) -> Llama:
    """A model of its own for each `seed`; with `noise` something like it. `bias` [vocabulary] is added to logits."""
    random, other = np.random.default_rng(seed), np.random.default_rng(seed + 1000)

    def matrix(outputs: int, inputs: int, size: float = 1.0) -> Matrix:
        weights = random.normal(size=(outputs, inputs)) + noise * other.normal(size=(outputs, inputs))
        return in_int8(weights * size / np.sqrt(inputs))

    ones = np.ones(HIDDEN, np.float32)
    embedding = matrix(vocabulary, HIDDEN, np.sqrt(HIDDEN))

    def layer() -> Layer:
        attention = [matrix(HIDDEN, HIDDEN, 2) for _ in range(4)]
        return Layer(ones, *attention, ones, *(matrix(HIDDEN, HIDDEN) for _ in range(3)))

    return Llama(
        embedding=embedding,
        layers=[layer() for _ in range(layers)],
        norm=ones,
        head=matrix(vocabulary, HIDDEN, 1.2),
        heads=HEADS,
        kv_heads=HEADS,
        frequencies=(10000.0 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)).astype(np.float32),
        attention_scale=HEAD_DIM**-0.5,
        epsilon=1e-6,
        logits_bias=bias,
    )


def save_tiny_llama(folder: Path, **options) -> Path:
    folder.mkdir(parents=True)
    openvino.save_model(llama_ir.build(tiny_llama(**options)), folder / "openvino_model.xml", compress_to_fp16=False)
    return folder


def save_tiny_pair(folder: Path) -> tuple[str, str]:
    """Main model and draft with the tokenizer of the embedded pair; only eight of its tokens are likely."""
    vocabulary = json.loads((DRAFT / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    bias = np.full(vocabulary, -30, np.float32)
    bias[300 : 300 + VOCABULARY] = 0
    for role, noise in (("main", 0.0), ("draft", 0.3)):
        save_tiny_llama(folder / role, seed=1, noise=noise, bias=bias, vocabulary=vocabulary)
        for file in DRAFT.iterdir():
            if not file.name.startswith("openvino_model"):
                shutil.copy(file, folder / role)
    return str(folder / "main"), str(folder / "draft")


def save_llama_with_outlier_keys(folder: Path, size: float) -> Path:
    """A tiny Llama some of whose tokens, all those that the rollback check rejects, have far larger keys than others,
    in a few channels: in a block of u8 keys by channel, what such a token leaves behind is a scale too coarse."""
    tokens = 64
    model = tiny_llama(0)
    random = np.random.default_rng(0)
    embedding = random.normal(size=(tokens, HIDDEN))
    embedding[:, 0] = 0
    rejected = (np.arange(18, 24) * 7919 + 1) % tokens
    embedding[rejected, 0] = 10
    keys = model.layers[0].k
    keys = (keys.values.astype(np.float32) - keys.zero_points) * keys.scales
    channels = np.arange(0, HIDDEN, 4)
    keys[channels] *= 2
    keys[channels, 0] = size
    model.layers[0] = replace(model.layers[0], k=in_int8(keys))
    model = replace(model, embedding=in_int8(embedding), head=in_int8(random.normal(size=(tokens, HIDDEN)) / 2))
    folder.mkdir()
    openvino.save_model(llama_ir.build(model), folder / "openvino_model.xml", compress_to_fp16=False)
    return folder
