"""Reads an EAGLE-3 head from its IR, whatever its precision, so that its training can go on."""

from pathlib import Path

import numpy as np
import openvino as ov

from speculative.convert.draft_training import llama_weights
from speculative.convert.draft_training.main_model import MainModel, last_product, norm_weight, shape_of
from speculative.convert.errors import ConvertError
from speculative.models.config import read_config, rope
from speculative.models.eagle3_graph import HeadGraph


class TrainedHead:
    """The head of a main model: its sizes `shape`, the main model's token ids int64 [draft vocabulary] that it drafts,
    and the three `layers` of the main model that it reads."""

    def __init__(self, folder: Path, main: MainModel):
        """Raises ConvertError if the IR folder holds no head of `main`, or one of another architecture."""
        if not (folder / "openvino_model.xml").is_file():
            raise ConvertError(
                f"{folder} holds no OpenVINO model; convert the head with export_pair.py, and give its folder", 2
            )
        try:
            head = HeadGraph(folder)
            graph = head.model.clone()
            head.attach(main.graph.clone())
        except (ValueError, OSError, RuntimeError) as error:
            raise ConvertError(f"--init-from is no head of the main model: {error}", 2) from error
        try:
            self._matrices, self._norms = _parts(graph)
        except ValueError as error:
            raise ConvertError(f"--init-from {folder} has not the published architecture: {error}", 2) from error
        config = read_config(folder)
        if rope(config)[1] or config.get("attention_bias"):
            raise ConvertError(
                f"--init-from {folder} has scaled rotary positions or biases (rope_scaling, attention_bias), which "
                "this program cannot train; leave it out",
                2,
            )
        self.shape, self.vocabulary, self.layers = shape_of(folder, main.hidden), head.targets, head.taps

    def weights(self) -> dict[str, np.ndarray]:
        """The weights float32 by the names of the published checkpoints."""
        return self._norms | llama_weights.read_matrices(self._matrices)


def _parts(graph: ov.Model) -> tuple[dict[str, ov.Node], dict[str, np.ndarray]]:
    """The products with matrices, MatMul nodes, and the weights of the norms, by name."""
    attentions = [node for node in graph.get_ops() if node.get_type_name() == "ScaledDotProductAttention"]
    lm_head = last_product(graph)
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
    norms_found = {name: weight for name, weight in weights.items() if weight is not None}
    if len(norms_found) < len(norms):
        raise ValueError("it lacks a norm with weights that the published architecture has")
    matrices = {f"midlayer.{name}": node for name, node in layer.by_name.items()}
    return {"fc.weight": layer.before, "lm_head.weight": lm_head, **matrices}, norms_found
