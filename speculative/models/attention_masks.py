"""Attention masks that OpenVINO's paged attention drops.

The transformation to paged attention replaces each attention's mask by a causal one, with the sliding window or the
ALiBi slopes (Press et al. 2022, arXiv 2108.12409) that it recognizes in the graph. It drops all others without an
error, and the logits are wrong: ALiBi of MPT and Falcon, windows of GPT-Neo (2026.4.1; docs/upstream.md).
"""

from pathlib import Path

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino._offline_transformations import paged_attention_transformation

from speculative.models.config import context_length, read_config, text_config

KEPT = {  # model types whose tokens with paged attention equal those without (tests/speculative/models, with --long)
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi", "phi3", "gemma2", "gemma3_text"),
    *("glm", "glm4", "granite", "smollm3", "olmo2", "cohere", "cohere2", "exaone4", "stablelm", "starcoder2"),
    *("gpt2", "gpt_neox", "gpt_oss", "gptj", "codegen", "opt", "persimmon"),
}
TOKENS = 512  # of the text whose last token's mask is examined: windows are smaller where they are not recognized
MASK, WINDOW, SLOPES = 3, 10, 11  # inputs of ScaledDotProductAttention and PagedAttentionExtension
HIDDEN = -1e4  # lower values hide a token
ALIKE = 1e-3  # difference of mask values that changes nothing


def dropped(graph: ov.Model, config: dict) -> list[int]:
    """The layers, from 0, whose mask paged attention drops. `config` is the model's config.json.

    These are the layers whose last token does not attend to all tokens alike, and for which the transformation found
    neither a window nor slopes. Empty, too, if the graph cannot be transformed or its masks cannot be computed.
    """
    if _is_kept(config):
        return []
    try:
        rows = _last_rows(graph.clone(), min(TOKENS, context_length(config) or TOKENS))
        paged = graph.clone()
        paged_attention_transformation(paged)
    except RuntimeError:
        return []
    replaced = [node for node in paged.get_ordered_ops() if node.get_type_name() == "PagedAttentionExtension"]
    if len(replaced) != len(rows):
        return []
    return [
        layer
        for layer, (node, row) in enumerate(zip(replaced, rows, strict=True))
        if np.ptp(row) > ALIKE and _is_zero(node, WINDOW) and _is_zero(node, SLOPES)
    ]


def dropped_of(folder: Path) -> list[int]:
    """`dropped` for the model in an IR folder, which is not read if its type is known."""
    config = read_config(folder)
    return [] if _is_kept(config) else dropped(ov.Core().read_model(folder / "openvino_model.xml"), config)


def _is_kept(config: dict) -> bool:
    return text_config(config).get("model_type", config.get("model_type")) in KEPT


def _last_rows(graph: ov.Model, tokens: int) -> list[np.ndarray]:
    """For each attention, the mask of the last of `tokens` tokens. Changes `graph`."""
    attentions = []
    for node in graph.get_ordered_ops():
        if node.get_type_name() == "ScaledDotProductAttention":
            attentions.append(node)
        if node.get_type_name() == "ReadValue":  # an empty KV cache
            batch, *others = (size.get_length() if size.is_static else -1 for size in node.get_output_partial_shape(0))
            shape = [abs(batch), *(max(size, 0) for size in others)]
            empty = ops.convert(np.zeros(shape, np.float32), node.get_output_element_type(0).get_type_name())
            for reader in node.output(0).get_target_inputs():
                reader.replace_source_output(empty.output(0))
    masks = [node.input_value(MASK) for node in attentions if len(node.inputs()) > MASK]
    if len(masks) < len(attentions):
        return []
    last = [ops.convert(ops.gather(mask, np.array([-1]), np.int64(-2)), "f32") for mask in masks]
    model = ov.Model([ops.result(row) for row in last], graph.get_parameters(), "masks")
    compiled = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    inputs = {
        "input_ids": np.zeros((1, tokens), np.int64),
        "attention_mask": np.ones((1, tokens), np.int64),
        "position_ids": np.arange(tokens)[None],
        "beam_idx": np.zeros(1, np.int32),
    }
    known = {name for port in compiled.inputs for name in port.names}
    rows = compiled({name: value for name, value in inputs.items() if name in known})
    return [np.maximum(rows[i], HIDDEN) for i in range(len(last))]


def _is_zero(node: ov.Node, index: int) -> bool:
    """Whether an input of a node is a constant that is empty or 0."""
    given = node.input_value(index).get_node()
    return given.get_type_name() == "Constant" and not given.data.any()
