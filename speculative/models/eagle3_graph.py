"""Graph transformations for EAGLE-3 heads: the main model also returns hidden states, the head reads them.

An EAGLE-3 head (Li et al. 2025, arXiv 2503.01840) is a single decoder layer that drafts from the main model's hidden
states: those of three layers, concatenated and projected by the head's `fc`. As in OpenVINO GenAI, `fc` becomes part of
the main model, so it runs once for each verified token and never for a draft token, and the head takes the embeddings
from the main model, as checkpoints of heads seldom contain them.
"""

import re
from pathlib import Path

import numpy as np
import openvino as ov
from openvino import opset13

from speculative.error_text import engine_lines
from speculative.models.config import hidden_state_draft, read_config

HIDDEN_STATE = "last_hidden_state"  # the name of the added output, in both models; GenAI's
RESIDUAL = re.compile(r"(.*\.)?(layers\.(?P<layer>\d+)|midlayer)/aten::add/Add(_\d+)?")  # an Add directly in a layer


def is_head(folder: Path) -> bool:
    """Whether an IR folder holds an EAGLE-3 head, by optimum-intel's mark in the IR or a readable config.json."""
    if hidden_state_draft(folder) == "EAGLE-3":
        return True
    try:
        config = read_config(folder)
    except (ValueError, OSError):  # reported by whoever needs the folder
        return False
    architectures = config.get("architectures") or []
    # the first published heads name the architecture of their main model, which has no vocabulary of a draft
    has_name = any("eagle3" in str(name).lower() for name in architectures)
    return has_name or ("draft_vocab_size" in config and config.get("num_hidden_layers") == 1)


def check_head(head: Path, main: Path) -> "HeadGraph":
    """The EAGLE-3 head in one IR folder, attached to the main model in the other. Raises ValueError if it does not fit
    that model."""
    graph = HeadGraph(head)
    graph.attach(ov.Core().read_model(main / "openvino_model.xml"))
    return graph


class HeadGraph:
    """The graph of an EAGLE-3 head, `model`.

    `targets` int64 [draft vocabulary] are the main model's token ids; `layers` are the three layers whose outputs the
    head was trained on, [] if the IR does not say; `taps` are those that it reads, once attached. `attach` must be
    called before the head is compiled.
    """

    def __init__(self, folder: Path):
        """Raises ValueError if `folder` does not hold an EAGLE-3 head that optimum-cli exported."""
        self.folder = folder
        try:
            self.model = ov.Core().read_model(folder / "openvino_model.xml")
        except RuntimeError as error:
            reason = engine_lines(error)[-1]
            raise ValueError(f"{folder}/openvino_model.xml cannot be read ({reason}): export it again") from None
        self.targets = self._read_targets()
        self.layers = self._read_layers()
        self.taps: list[int] = []

    def attach(self, main: ov.Model) -> None:
        """Add the output `last_hidden_state` [batch, tokens, head's hidden size] to `main`, before any other
        transformation, and connect the head to it: its input `hidden_states` gets the same shape, and it returns its
        own hidden states under the same name.

        Raises ValueError if the head does not belong to a model like `main`.
        """
        taps = self._taps(main)
        source = self.model.clone()  # its nodes move to `main`
        fc = self._fc(source)
        embedding, own_embedding = find_embedding(main), find_embedding(self.model)
        sizes = [last_dimension(tap) for tap in taps]
        fc_size, vocabulary = last_dimension(fc.input_value(1).get_node()), main.output("logits").partial_shape[-1]
        if sum(sizes) != fc_size:
            raise ValueError(
                f"{self.folder} reads hidden states of size {fc_size // 3} from each layer, but the main model's have "
                f"size {sizes[0]}: it is the head of another model"
            )
        if embedding.output(0).partial_shape[-1] != own_embedding.output(0).partial_shape[-1]:
            raise ValueError(
                f"{self.folder} has embeddings of size {last_dimension(own_embedding)}, but the main model's have "
                f"size {last_dimension(embedding)}: it is the head of another model"
            )
        if vocabulary.is_static and self.targets.max() >= vocabulary.get_length():
            raise ValueError(
                f"{self.folder} drafts token ids up to {self.targets.max()}, but the main model has "
                f"{vocabulary.get_length()}: it is the head of another model"
            )
        fc.input(0).replace_source_output(opset13.concat(taps, -1).output(0))
        _add_output(main, fc)
        self._connect()
        _share_weights(find_embedding(main.clone()), own_embedding)  # the clone's constants share main's memory
        self.model.validate_nodes_and_infer_types()

    def _connect(self) -> None:
        """Replace the head's `fc` by its input, return its hidden states, and no longer its table of token ids."""
        fc = self._fc(self.model)
        hidden = fc.input_value(0).get_node()
        hidden.set_partial_shape(fc.output(0).partial_shape)
        for reader in fc.output(0).get_target_inputs():
            reader.replace_source_output(hidden.output(0))
        _add_output(self.model, residual_adds(self.model)[None])
        self.model.remove_result(self.model.output("d2t").get_node())

    def _fc(self, model: ov.Model) -> ov.Node:
        """The projection of the main model's hidden states, directly behind the input `hidden_states`."""
        readers = self._input(model).get_target_inputs()
        nodes = [reader.get_node() for reader in readers]
        if [node.get_type_name() for node in nodes] != ["MatMul"] or None not in residual_adds(model):
            raise ValueError(f"{self.folder} has no layer of an EAGLE-3 head: export it again with optimum-cli")
        return nodes[0]

    def _input(self, model: ov.Model) -> ov.Output:
        found = [port for port in model.inputs if "hidden_states" in port.names]
        if not found:
            raise ValueError(
                f"{self.folder} has no input for the main model's hidden states: export it again with optimum-cli, "
                "--task text-generation-with-past --trust-remote-code"
            )
        return found[0].get_node().output(0)

    def _read_targets(self) -> np.ndarray:
        tables = [port.get_node().input_value(0).get_node() for port in self.model.outputs if "d2t" in port.names]
        if not tables or tables[0].get_type_name() != "Constant":
            raise ValueError(f"{self.folder} has no table d2t of token ids: export it again with optimum-cli")
        offsets = np.array(tables[0].data, np.int64)
        targets = offsets + np.arange(len(offsets))
        vocabulary = read_config(self.folder).get("vocab_size") or _vocabulary(find_embedding(self.model))
        if not offsets.any() and len(offsets) < vocabulary:
            raise ValueError(
                f"{self.folder} has a table d2t of zeros, for {len(offsets)} of {vocabulary} tokens: its checkpoint "
                "lacks d2t, so which tokens it drafts is not known"
            )
        if targets.min() < 0 or len(set(targets.tolist())) < len(targets):
            raise ValueError(f"{self.folder} has a damaged table d2t: its token ids are negative or not distinct")
        return targets

    def _read_layers(self) -> list[int]:
        """The layers that the head was trained on, [] if the IR does not say."""
        if not self.model.has_rt_info("hidden_layers_list"):
            return []
        text = self.model.get_rt_info("hidden_layers_list").astype(str)
        layers = [int(number) for number in re.findall(r"-?\d+", text)]
        if len(layers) != 3:
            raise ValueError(f"{self.folder} has the hidden_layers_list {text!r}, which must be three layer numbers")
        return layers

    def _taps(self, main: ov.Model) -> list[ov.Node]:
        """The outputs of the three layers of `main` whose hidden states the head reads."""
        found = {layer: node for layer, node in residual_adds(main).items() if layer is not None}
        n = len(found)
        layers = self.layers or [2, n // 2, n - 3]  # GenAI's default
        if not n:
            raise ValueError(
                "the main model's layers are not found in its graph (an Add named layers.N/aten::add/Add), so it "
                "cannot have an EAGLE-3 draft: export it again with optimum-cli, or use another draft"
            )
        missing = [layer for layer in layers if layer not in found]
        if missing:
            raise ValueError(
                f"{self.folder} reads the hidden states of layers {', '.join(map(str, layers))}, but the main model "
                f"has only layers 0 to {n - 1}: it is the head of another model"
            )
        self.taps = layers
        return [found[layer] for layer in layers]


def residual_adds(model: ov.Model) -> dict[int | None, ov.Node]:
    """The last residual Add of each layer, whose output is that of the layer; of an EAGLE-3 head's layer under None."""
    adds = {}
    for node in model.get_ordered_ops():
        if node.get_type_name() == "Add" and (name := RESIDUAL.fullmatch(node.get_friendly_name())):
            adds[None if name["layer"] is None else int(name["layer"])] = node
    return adds


def find_embedding(model: ov.Model) -> ov.Node:
    """The Gather that looks up the embeddings of `input_ids`. Raises ValueError if there is none."""
    readers = model.input("input_ids").get_node().output(0).get_target_inputs()
    nodes = [reader.get_node() for reader in readers]
    nodes += [
        r.get_node() for node in nodes if node.get_type_name() == "Convert" for r in node.output(0).get_target_inputs()
    ]
    for node in nodes:
        if node.get_type_name() == "Gather" and node.input_value(0).partial_shape.rank == 2:
            return node
    raise ValueError("the model has no embeddings of its input_ids: export it again with optimum-cli")


def _share_weights(embedding: ov.Node, reader: ov.Node) -> None:
    reader.input(0).replace_source_output(embedding.input_value(0))


def _add_output(model: ov.Model, node: ov.Node) -> None:
    result = opset13.result(node if node.get_element_type() == ov.Type.f32 else opset13.convert(node, "f32"))
    result.output(0).set_names({HIDDEN_STATE})
    model.add_results([result])
    model.validate_nodes_and_infer_types()


def last_dimension(node: ov.Node) -> int:
    return node.output(0).partial_shape[-1].get_length()


def _vocabulary(embedding: ov.Node) -> int:
    return embedding.input_value(0).partial_shape[0].get_length()
