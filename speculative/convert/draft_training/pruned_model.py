"""A pruned draft in torch, with weights of the main model's IR: its training, checkpoint and IR."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import torch
from transformers import PreTrainedModel

from speculative.convert.draft_training import torch_llama, training
from speculative.convert.draft_training.pruned import Choice, Pruned
from speculative.convert.draft_training.training import Batch, Training
from speculative.modelgen import llama_ir
from speculative.modelgen.llama_ir import in_int8


class PrunedTraining(Training):
    """A pruned model in training."""

    def __init__(self, file: Path, pruned: Pruned, choose: Callable[[], Choice], device: str):
        """Continues with the state in `file`, if it exists. Otherwise `choose` gives the layers to keep."""
        torch.manual_seed(0)
        if saved_state := training.load(file, device):
            self.choice = Choice(saved_state["layers"], saved_state["distance"])
            model = torch_llama.empty(pruned.llama, len(self.choice.layers), saved_state["is_tied"])
        else:
            self.choice = choose()
            model = torch_llama.build(pruned.llama, self.choice.layers)
        vocabulary = pruned.main.vocabulary
        super().__init__(file, saved_state, model, np.arange(vocabulary), vocabulary, device)
        self.llama = model

    def extra_state(self) -> dict[str, Any]:
        is_tied = self.llama.config.tie_word_embeddings
        return {"layers": self.choice.layers, "distance": self.choice.distance, "is_tied": is_tied}

    def forward(self, batch: Batch) -> Iterator[torch.Tensor]:
        yield self.llama(batch.tokens, use_cache=False).logits  # padding comes last, and nothing attends to it


def save(training: PrunedTraining, folder: Path, tokenizer_files: list[Path]) -> None:
    """Write the IR with int8 weights, and the checkpoint, each with its `tokenizer_files`."""
    checkpoint = folder / "checkpoint"
    training.llama.save_pretrained(checkpoint)
    ov.save_model(llama_ir.build(in_numbers(training.llama)), folder / "openvino_model.xml", compress_to_fp16=False)
    shutil.copyfile(checkpoint / "config.json", folder / "config.json")
    for file in tokenizer_files:
        shutil.copyfile(file, folder / file.name)
        if not file.name.startswith("openvino_"):
            shutil.copyfile(file, checkpoint / file.name)


def in_numbers(model: PreTrainedModel) -> llama_ir.Llama:
    """The same model with int8 weights, for an IR."""
    config = model.config
    weights = {name: weight.detach().float().cpu().numpy() for name, weight in model.state_dict().items()}

    def some(names: dict[str, str]) -> dict[str, np.ndarray]:
        return {key: weights[name] for key, name in names.items() if name in weights}

    return llama_ir.Llama(
        embedding=in_int8(weights["model.embed_tokens.weight"]),
        layers=[
            llama_ir.Layer(
                attention_norm=weights[f"model.layers.{i}.input_layernorm.weight"],
                feed_forward_norm=weights[f"model.layers.{i}.post_attention_layernorm.weight"],
                **{key: in_int8(weights[f"model.layers.{i}.{name}.weight"]) for key, name in llama_ir.MATRICES.items()},
                biases=some({key: f"model.layers.{i}.self_attn.{key}_proj.bias" for key in "qkv"}),
                head_norms=some({key: f"model.layers.{i}.self_attn.{key}_norm.weight" for key in "qk"}),
            )
            for i in range(config.num_hidden_layers)
        ],
        norm=weights["model.norm.weight"],
        head=None if config.tie_word_embeddings else in_int8(weights["lm_head.weight"]),
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        frequencies=model.model.rotary_emb.inv_freq.float().cpu().numpy(),
        attention_scale=config.head_dim**-0.5 * model.model.rotary_emb.attention_scaling**2,  # YaRN scales both factors
        epsilon=config.rms_norm_eps,
    )
