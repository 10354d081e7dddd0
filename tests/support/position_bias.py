"""Models whose attention masks paged attention drops: a position bias that the transformation does not recognize."""

import json
import shutil
from pathlib import Path

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from tests.support.paths import DRAFT


def add_position_bias(graph: ov.Model, layers: list[int], slope: float = 0.5) -> ov.Model:
    """Give later tokens more attention in these layers, by another slope for each head. Changes and returns `graph`."""
    attentions = [node for node in graph.get_ordered_ops() if node.get_type_name() == "ScaledDotProductAttention"]
    for layer in layers:
        mask, heads = attentions[layer].input_value(3), attentions[layer].get_output_partial_shape(0)[1].get_length()
        keys = ops.gather(ops.shape_of(mask), np.int64(3), np.int64(0))
        slopes = slope * np.arange(1, heads + 1, dtype=np.float32).reshape(1, heads, 1, 1)
        bias = ops.multiply(slopes, ops.range(np.int64(0), keys, np.int64(1), "f32"))
        attentions[layer].input(3).replace_source_output(ops.add(mask, bias).output(0))
    return graph


def save_with_position_bias(folder: Path) -> Path:
    """The embedded draft with such a bias in its first layer, as a model of an unknown type."""
    shutil.copytree(DRAFT, folder)
    graph = add_position_bias(ov.Core().read_model(DRAFT / "openvino_model.xml"), [0])
    ov.save_model(graph, folder / "openvino_model.xml", compress_to_fp16=False)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "biased"}), encoding="utf-8")
    return folder
