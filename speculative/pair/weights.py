"""Weight information from a model's IR, without loading the weights: formats, parameters and bytes read per step."""

import math
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import openvino as ov

from speculative.models.eagle3_graph import HeadGraph, is_head

FORMATS = {"u4": "int4", "i4": "int4", "u8": "int8", "i8": "int8", "f16": "fp16", "bf16": "bf16", "f32": "fp32"}
UNPACKING = {"Convert", "Subtract", "Multiply", "Reshape"}  # between a packed constant and its use
SHOWN = 0.1  # formats with a smaller share of the bytes are scales and norms


class Weights(NamedTuple):
    """Summary of a model's constants."""

    formats: list[str]  # by descending bytes
    asymmetric: list[str]  # those of them with zero points, which nncf packs unsigned
    group_size: int | None  # weights per scale, -1: one scale per output channel; None if nncf did not record it
    parameters: int  # elements of all matrices
    bytes_per_step: int  # bytes read per token: all constants except embedding tables

    def __str__(self) -> str:
        return " + ".join(f"{name} asymmetric" if name in self.asymmetric else name for name in self.formats)


def read(model: ov.Model) -> Weights:
    """Summarize the constants of `model` from `ov.Core().read_model`, which maps the .bin file without reading it."""
    sizes: Counter[str] = Counter()  # bytes by element type
    parameters = bytes_per_step = 0
    for node in model.get_ops():
        if node.get_type_name() != "Constant":
            continue
        shape, size = node.get_output_shape(0), node.get_byte_size()
        sizes[node.get_output_element_type(0).to_string()] += size
        if len(shape) > 1 and shape[-1] > 1:  # scales and zero points end in 1
            parameters += math.prod(shape)
        if _uses(node) != {"Gather"}:
            bytes_per_step += size
    large = [name for name, size in sizes.most_common() if size > SHOWN * sizes.total()]
    return Weights(
        formats=list(dict.fromkeys(FORMATS.get(name, name) for name in large)),
        asymmetric=[FORMATS[name] for name in large if name in ("u4", "u8")],
        group_size=_group_size(model),
        parameters=parameters,
        bytes_per_step=bytes_per_step,
    )


def read_pair(main: Path, draft: Path) -> tuple[Weights, Weights]:
    """Summaries of two IR folders. The bytes read per step are those of both together: the layer `fc` of an EAGLE-3
    draft counts as the main model's, whose forward passes include it."""
    core = ov.Core()
    graph = core.read_model(main / "openvino_model.xml")
    if not is_head(draft):
        return read(graph), read(core.read_model(draft / "openvino_model.xml"))
    head = HeadGraph(draft)
    own = read(head.model)
    head.attach(graph)
    return read(graph), own._replace(bytes_per_step=read(head.model).bytes_per_step)


def _uses(node: ov.Node) -> set[str]:
    """The types of the operations that use a constant, after unpacking."""
    names: set[str] = set()
    for taken in node.output(0).get_target_inputs():
        user = taken.get_node()
        name = user.get_type_name()
        names |= _uses(user) if name in UNPACKING else {name}
    return names


def _group_size(model: ov.Model) -> int | None:
    path = ["nncf", "weight_compression", "group_size"]
    return int(model.get_rt_info(path).astype(str)) if model.has_rt_info(path) else None
