"""Writes a trained head as a checkpoint in the published format, and as OpenVINO IR."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from speculative.atomic_write import atomic_write
from speculative.convert.draft_training.head import HeadTraining
from speculative.convert.draft_training.main_model import MainModel
from speculative.modelgen import eagle3_ir, llama_ir

NORMS = {
    "hidden_norm": "midlayer.hidden_norm",
    "input_norm": "midlayer.input_layernorm",
    "feed_forward_norm": "midlayer.post_attention_layernorm",
    "norm": "norm",
}


def save_checkpoint(training: HeadTraining, main: MainModel, layers: list[int], folder: Path) -> None:
    """Write config.json and model.safetensors, as EAGLE, SGLang and vLLM read them (without embeddings: they take the
    main model's). The config names the `layers` of the main model whose outputs the head reads."""
    folder.mkdir(parents=True)
    tensors = {name: weight.detach().cpu().contiguous() for name, weight in training.head.named_parameters()}
    targets = torch.from_numpy(training.vocabulary)
    tensors["d2t"] = targets - torch.arange(len(targets))
    tensors["t2d"] = torch.zeros(main.vocabulary, dtype=torch.bool)
    tensors["t2d"][targets] = True
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_config(training, layers, folder)


def save_config(training: HeadTraining, layers: list[int], folder: Path) -> None:
    config = {**training.config.to_diff_dict(), **{name: getattr(training.config, name) for name in WRITTEN}}
    read = {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True}
    config |= {"torch_dtype": "float32", "eagle_config": read}  # read by SGLang
    config |= {"eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in layers]}  # by vLLM, which counts inputs
    atomic_write(folder / "config.json", json.dumps(config, indent=2, sort_keys=True))


WRITTEN = (  # also where they are transformers' defaults
    *("architectures", "model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "hidden_act", "num_hidden_layers", "vocab_size", "draft_vocab_size", "rms_norm_eps", "rope_theta"),
    *("max_position_embeddings", "tie_word_embeddings", "attention_bias", "mlp_bias", "bos_token_id"),
    "eos_token_id",
)


def save_ir(training: HeadTraining, main: MainModel, layers: list[int], folder: Path) -> None:
    """Write the IR with int8 weights, marked with the `layers` of the main model that the head was trained on."""
    weights = {name: weight.detach().float().cpu().numpy() for name, weight in training.head.named_parameters()}
    parts: dict[str, Any] = {
        key: llama_ir.in_int8(weights[f"{name}.weight"]) for key, name in eagle3_ir.MATRICES.items()
    }
    parts |= {key: weights[f"{name}.weight"] for key, name in NORMS.items()}
    head = eagle3_ir.Head(
        **parts,
        targets=training.vocabulary.astype(np.int64),
        layers=layers,
        heads=training.config.num_attention_heads,
        kv_heads=training.config.num_key_value_heads,
        frequencies=training.head.rotation.inv_freq.float().cpu().numpy(),
        epsilon=training.config.rms_norm_eps,
    )
    folder.mkdir(parents=True, exist_ok=True)
    eagle3_ir.save(head, main.vocabulary, folder)
    save_config(training, layers, folder)
