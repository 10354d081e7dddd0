"""A tiny main model that texts can be written with: a Llama with a tokenizer, in a second."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import openvino
import openvino_tokenizers

from speculative.modelgen import llama_ir
from speculative.modelgen.llama_ir import Llama, in_int8
from tests.support.tiny_checkpoints import train_tokenizer
from tests.support.tiny_llama import HEAD_DIM, HEADS, HIDDEN, tiny_llama

TURN = "{% for message in messages %}{{ 'def ' + message['content'] }}{% endfor %}{{ 'return ' }}"


def tiny_main(vocabulary: int, layers: int = 4) -> Llama:
    """Random weights; the next token depends mostly on the last one, as the LM head reads the embeddings turned by one
    place, so that a draft can learn something in a second."""
    embedding = np.random.default_rng(0).normal(size=(vocabulary, HIDDEN)) * 6
    head = in_int8(np.roll(embedding, 1, 0) / 8)
    return replace(tiny_llama(0, layers=layers), embedding=in_int8(embedding), head=head)


def of_architecture(model: Llama, architecture: str) -> Llama:
    """`model` with what "qwen2" and "qwen3" have beyond "llama": random biases, or norms of each attention head."""
    random = np.random.default_rng(1)

    def some(keys: str, around: float, size: int) -> dict[str, np.ndarray]:
        return {key: (around + random.normal(size=size) / 2).astype(np.float32) for key in keys}

    def extra() -> dict[str, dict[str, np.ndarray]]:
        if architecture == "qwen2":
            return {"biases": some("qkv", 0, HIDDEN)}
        return {"head_norms": some("qk", 1, HEAD_DIM)} if architecture == "qwen3" else {}

    return replace(model, layers=[replace(layer, **extra()) for layer in model.layers])


def save_tiny_main(
    folder: Path, layers: int = 4, chat_template: str | None = TURN, architecture: str = "llama"
) -> Path:
    """The IR of a tiny main model, with its tokenizer."""
    tokenizer = train_tokenizer()
    tokenizer.chat_template = chat_template
    folder.mkdir(parents=True)
    model = llama_ir.build(of_architecture(tiny_main(len(tokenizer), layers), architecture))
    openvino.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)
    parts = openvino_tokenizers.convert_tokenizer(tokenizer, with_detokenizer=True)
    for part, name in zip(parts, ("openvino_tokenizer", "openvino_detokenizer"), strict=True):
        openvino.save_model(part, folder / f"{name}.xml", compress_to_fp16=False)
    sizes = {"num_attention_heads": HEADS, "num_key_value_heads": 1, "head_dim": HEAD_DIM, "intermediate_size": 48}
    config = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 128, "eos_token_id": 0, **sizes}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def logits_of(graph: openvino.Model, tokens: np.ndarray) -> np.ndarray:
    """Logits float32 [tokens, vocabulary] after each of the tokens, computed in f32."""
    n = len(tokens)
    inputs = {"input_ids": tokens[None], "attention_mask": np.ones((1, n), np.int64)}
    inputs |= {"position_ids": np.arange(n)[None], "beam_idx": np.zeros(1, np.int32)}
    compiled = openvino.Core().compile_model(graph, "CPU", {"EXECUTION_MODE_HINT": "ACCURACY"})
    return compiled(inputs)["logits"][0]
