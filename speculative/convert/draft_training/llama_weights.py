"""Finds the layers of a Llama in a graph by their form, whatever exported it, and reads their weights as float32.

Those of Qwen2 are a Llama's with biases for queries, keys and values; those of Qwen3, with a norm for each attention
head's queries and keys.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import pairwise, takewhile
from typing import NamedTuple

import numpy as np
import openvino as ov

from speculative.convert.draft_training.main_model import evaluate, norm_weight
from speculative.modelgen import llama_ir


class Layer(NamedTuple):
    """A decoder layer: the hidden states that it reads and gives [batch, tokens, hidden], and what holds its weights,
    under the names of Hugging Face checkpoints."""

    before: ov.Node
    after: ov.Node
    matrices: dict[str, ov.Node]  # MatMul
    biases: dict[str, ov.Node]  # added to the queries, keys or values
    norms: dict[str, np.ndarray]  # float32 [hidden], or [head_dim] for queries and keys
    head_dim: int


def find_layers(graph: ov.Model) -> list[Layer]:
    """The layers, in order. Raises ValueError if there are none, or others than a Llama's."""
    attentions = [node for node in graph.get_ordered_ops() if node.get_type_name() == "ScaledDotProductAttention"]
    if not attentions:
        raise ValueError("its graph has no ScaledDotProductAttention")
    layers = [_layer(attention) for attention in attentions]
    for first, second in pairwise(layers):
        if second.before.get_friendly_name() != first.after.get_friendly_name():
            raise ValueError(f"something is between its layers, {first.after.get_friendly_name()}")
    return layers


def read_layer(layer: Layer) -> dict[str, np.ndarray]:
    """Its weights by name, matrices [outputs, inputs]."""
    values = evaluate([node.output(0) for node in layer.biases.values()])
    biases = {name: value.ravel() for name, value in zip(layer.biases, values, strict=True)}
    return layer.norms | read_matrices(layer.matrices) | biases


def read_matrices(nodes: dict[str, ov.Node]) -> dict[str, np.ndarray]:
    """The weights float32 [outputs, inputs] of MatMul nodes, by name."""
    read = evaluate([node.input_value(1) for node in nodes.values()])
    return {
        name: values if node.get_attributes()["transpose_b"] else values.T
        for (name, node), values in zip(nodes.items(), read, strict=True)
    }


class Matrices(NamedTuple):
    """A decoder layer's products with matrices, MatMul nodes by the names of Hugging Face checkpoints, and the hidden
    states that it reads and gives."""

    before: ov.Node
    after: ov.Node
    by_name: dict[str, ov.Node]


def find_matrices(attention: ov.Node) -> Matrices:
    """The layer of a ScaledDotProductAttention. Raises ValueError if it is not a Llama's."""
    q, k, v = (_projection(attention.input_value(i).get_node()) for i in range(3))
    o = attention
    while o.get_type_name() != "MatMul":
        o = _only(_readers(o), "readers of an attention")
    attended = _only(
        (node for node in _readers(o) if node.get_type_name() == "Add"), "residual Adds after an attention"
    )
    before = _other(attended, o)
    after = _only((node for node in _readers(attended) if node.get_type_name() == "Add"), "residual Adds after an MLP")
    down = _other(after, attended)
    product = down.input_value(0).get_node()
    gates = [value.get_node() for value in product.input_values()]
    swish = _only((node for node in gates if node.get_type_name() == "Swish"), "Swish in an MLP")
    gate, up = swish.input_value(0).get_node(), _other(product, swish)
    nodes_found = {"q": q, "k": k, "v": v, "o": o, "gate": gate, "up": up, "down": down}
    matrices = {f"{name}.weight": nodes_found[key] for key, name in llama_ir.MATRICES.items()}
    for name, node in matrices.items():
        if not _is_projection(node):
            raise ValueError(f"its {name.removesuffix('.weight')} is no product with a matrix of weights")
    if len({node.get_friendly_name() for node in matrices.values()}) < len(matrices):
        raise ValueError("its matrices are fused")
    return Matrices(before, after, matrices)


def _layer(attention: ov.Node) -> Layer:
    before, after, matrices = find_matrices(attention)
    size = attention.input_value(0).partial_shape[-1]
    if size.is_dynamic:
        raise ValueError("the size of its attention heads is not known")
    readers = {
        "input_layernorm.weight": "self_attn.q_proj.weight",
        "post_attention_layernorm.weight": "mlp.gate_proj.weight",
    }
    norms = {norm: norm_weight(matrices[reader].input_value(0).get_node()) for norm, reader in readers.items()}
    weighted = {name: weight for name, weight in norms.items() if weight is not None}
    if len(weighted) < len(norms):
        raise ValueError("it has no norm with a weight before each part of a layer")
    biases, head_dim = {}, size.get_length()
    for index, key in enumerate("qkv"):
        name = llama_ir.MATRICES[key]
        if (bias := _bias(matrices[f"{name}.weight"])) is not None:
            biases[f"{name}.bias"] = bias
        if key != "v" and (weight := _head_norm(attention.input_value(index).get_node(), head_dim)) is not None:
            weighted[f"self_attn.{key}_norm.weight"] = weight
    return Layer(before, after, matrices, biases, weighted, head_dim)


def _projection(node: ov.Node) -> ov.Node:
    """The nearest product with a constant matrix before `node`."""
    for found in _nearest(node):
        if _is_projection(found):
            return found
    raise ValueError("its attention has no matrices of weights")


def _head_norm(node: ov.Node, head_dim: int) -> np.ndarray | None:
    """The weight of the norm of each head, between a projection and `node`; None if there is no norm."""
    for found in takewhile(lambda found: not _is_projection(found), _nearest(node)):
        weight = norm_weight(found)
        if weight is not None and len(weight) == head_dim:
            return weight
    return None


def _bias(product: ov.Node) -> ov.Node | None:
    """What is added to the product of a matrix; None if nothing is."""
    for node in _readers(product):
        if node.get_type_name() == "Add" and _is_constant(summand := _other(node, product)):
            return summand
    return None


def _nearest(node: ov.Node) -> Iterator[ov.Node]:
    """`node` and all that it is computed from, the nearest first."""
    queue, seen = deque([node]), {node.get_friendly_name()}
    while queue:
        node = queue.popleft()
        yield node
        for value in node.input_values():
            if (name := value.get_node().get_friendly_name()) not in seen:
                seen.add(name)
                queue.append(value.get_node())


def _is_projection(node: ov.Node) -> bool:
    return node.get_type_name() == "MatMul" and _is_constant(node.input_value(1).get_node())


def _is_constant(node: ov.Node) -> bool:
    """Whether `node` depends on no input and no state."""
    if node.get_type_name() in ("Parameter", "ReadValue", "ShapeOf"):
        return False
    return all(_is_constant(value.get_node()) for value in node.input_values())


def _readers(node: ov.Node) -> list[ov.Node]:
    return [reader.get_node() for reader in node.output(0).get_target_inputs()]


def _other(node: ov.Node, first: ov.Node) -> ov.Node:
    """The input of `node` beside `first`."""
    inputs = (value.get_node() for value in node.input_values())
    return _only(
        (i for i in inputs if i.get_friendly_name() != first.get_friendly_name()), "second summands or factors"
    )


def _only(nodes: Iterable[ov.Node], what: str) -> ov.Node:
    nodes_found = list(nodes)
    if len(nodes_found) != 1:
        raise ValueError(f"its graph has {len(nodes_found)} {what}, where a Llama's has one")
    return nodes_found[0]
