"""Reads an EAGLE-3 head from its IR, whatever its precision, so that its training can go on."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from speculative.convert.draft_training import llama_weights
from speculative.convert.draft_training.main_model import MainModel, Shape, last_product, norm_weight, shape_of
from speculative.convert.errors import ConvertError
from speculative.models.eagle3_graph import HeadGraph, check_head


class HeadWeights(NamedTuple):
    """A head's weights float32 by the names of the published checkpoints, its sizes, the main model's token ids int64
    [draft vocabulary] that it drafts, and the three layers of the main model that it reads."""

    by_name: dict[str, np.ndarray]
    shape: Shape
    vocabulary: np.ndarray
    layers: list[int]


def read_head(folder: Path, main: MainModel) -> HeadWeights:
    """Read the head of `main` in an IR folder. Raises ConvertError if it is none, or of another architecture."""
    if not (folder / "openvino_model.xml").is_file():
        raise ConvertError(
            f"{folder} holds no OpenVINO model; convert the head with export_pair.py, and give its folder", 2
        )
    try:
        layers = check_head(folder, main.spec.folder).taps
        head = HeadGraph(folder)
    except (ValueError, OSError, RuntimeError) as error:
        raise ConvertError(f"--init-from is no head of the main model: {error}", 2) from error
    try:
        weights = _read(head)
    except ValueError as error:
        raise ConvertError(f"--init-from {folder} has not the published architecture: {error}", 2) from error
    return HeadWeights(weights, shape_of(folder, main.hidden), head.targets, layers)


def _read(head: HeadGraph) -> dict[str, np.ndarray]:
    attentions = [node for node in head.model.get_ops() if node.get_type_name() == "ScaledDotProductAttention"]
    lm_head = last_product(head.model)
    if len(attentions) != 1 or lm_head is None:
        raise ValueError("its graph is not that of one decoder layer and an LM head")
    layer = llama_weights.find_matrices(attentions[0])
    q, gate = (
        layer.by_name[f"{name}.weight"].input_value(0).get_node() for name in ("self_attn.q_proj", "mlp.gate_proj")
    )
    if q.get_type_name() != "Concat" or len(q.inputs()) != 2:
        raise ValueError("its attention does not read embeddings beside hidden states")
    norms = {
        "midlayer.input_layernorm.weight": q.input_value(0).get_node(),
        "midlayer.hidden_norm.weight": q.input_value(1).get_node(),
        "midlayer.post_attention_layernorm.weight": gate,
        "norm.weight": lm_head.input_value(0).get_node(),
    }
    weights = {name: norm_weight(node) for name, node in norms.items()}
    found = {name: weight for name, weight in weights.items() if weight is not None}
    if len(found) < len(norms):
        raise ValueError("it lacks a norm with weights that the published architecture has")
    matrices = {f"midlayer.{name}": node for name, node in layer.by_name.items()}
    return found | llama_weights.read_matrices({"fc.weight": layer.before, "lm_head.weight": lm_head, **matrices})
