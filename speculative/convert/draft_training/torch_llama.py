"""The main model in torch: transformers' Llama, Qwen2 or Qwen3 with the weights of the IR."""

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from speculative.convert.draft_training import llama_weights
from speculative.convert.draft_training.main_llama import MainLlama

CHECKED_TOKENS = 24  # tokens by which the weights that were read are checked
TOLERANCE = 0.02  # of the size of what a layer adds, and of the logits


def build(llama: MainLlama, layers: list[int]) -> PreTrainedModel:
    """The main model with some of its layers."""
    main = llama.main
    output = main.output_layer(np.arange(main.vocabulary))
    if output is None:
        raise ValueError("its graph ends in another way")
    embeddings = main.embeddings()
    is_tied = np.array_equal(output.rows.astype(np.float16), embeddings)
    model = empty(llama, len(layers), is_tied)
    _copy(model.model, {"embed_tokens.weight": embeddings, "norm.weight": output.norm})
    _copy(model, {"lm_head.weight": output.rows})
    for index, layer in enumerate(layers):  # one at a time: large models barely fit into the memory
        _copy(model.model.layers[index], llama_weights.read_layer(llama.layers[layer]))
    return model


@torch.no_grad()
def _copy(module: torch.nn.Module, weights: dict[str, np.ndarray]) -> None:
    for name, values in weights.items():
        parameter = module.get_parameter(name)
        if parameter.shape != values.shape:
            raise ValueError(f"{name} has the shape {values.shape}, not {tuple(parameter.shape)}")
        parameter.copy_(torch.from_numpy(np.require(values, requirements="W")))


def empty(llama: MainLlama, layers: int, is_tied: bool) -> PreTrainedModel:
    """A model of the same sizes, with `layers` layers and random weights."""
    architectures = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }
    config_of, model_of = architectures[llama.architecture]
    return model_of(config_of(**llama.config(), num_hidden_layers=layers, tie_word_embeddings=is_tied)).float()


@torch.no_grad()
def difference(llama: MainLlama) -> str:
    """What the main model computes otherwise than transformers' model with its weights, in its first or last layer or
    after it; "" if all is the same."""
    last = len(llama.layers) - 1
    try:
        model = build(llama, [0, last])
    except ValueError:
        return "its matrices have other sizes"
    tokens = np.linspace(0, llama.main.vocabulary - 1, CHECKED_TOKENS).astype(np.int64)
    step = max(1, llama.main.shape.max_position_embeddings // CHECKED_TOKENS)  # only late positions show some scalings
    compute = llama.hidden_states(EXECUTION_MODE_HINT="ACCURACY")
    *states, logits = (torch.from_numpy(computed)[None].float() for computed in compute(tokens, step))
    angles = model.model.rotary_emb(states[0], step * torch.arange(CHECKED_TOKENS)[None])
    pairs = {"logits": (model.lm_head(model.model.norm(states[-1])), logits)}
    for index, layer in enumerate((0, last)):
        computed = model.model.layers[index](states[layer], position_embeddings=angles)
        pairs[f"layer {layer}"] = (computed - states[layer], states[layer + 1] - states[layer])
    differing = [
        name
        for name, (computed, expected) in pairs.items()
        if (computed - expected).norm() > TOLERANCE * expected.norm()
    ]
    return f"it computes other {differing[0]}" if differing else ""
