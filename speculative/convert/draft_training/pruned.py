"""The kind pruned: the main model without the layers that matter least, for engines and devices without EAGLE-3.

Which layers: the block of consecutive ones that turns the hidden states by the least angle (Gromov et al. 2024, arXiv
2403.17887).
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from speculative.convert.draft_training import llama_weights
from speculative.convert.draft_training.kind import SAVED, Kind
from speculative.convert.draft_training.main_model import Forward, MainModel, Reader
from speculative.convert.draft_training.state_file import TextStates
from speculative.convert.errors import ConvertError
from speculative.models.config import read_config
from speculative.models.eagle3_graph import last_dimension

if TYPE_CHECKING:
    from speculative.convert.draft_training.pruned_model import PrunedTraining

COMPARED = 16  # texts by which layers are chosen
KEPT_SHARE = 0.25  # of the layers, by default
TOKENIZER_FILES = (  # of the main model, that the draft gets, too
    *("openvino_tokenizer.xml", "openvino_tokenizer.bin", "openvino_detokenizer.xml", "openvino_detokenizer.bin"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json"),
)


class Choice(NamedTuple):
    """The layers that stay, and the angle in units of pi by which the others turn the hidden states, on average."""

    layers: list[int]
    distance: float


class Pruned(Kind):
    """The main model with `kept` of its layers."""

    name = "pruned"

    def __init__(self, main: MainModel, kept: int | None):
        """Raises ConvertError if the main model's graph is no Llama's, or has too few layers."""
        self.main = main
        try:
            self.layers = llama_weights.find_layers(main.graph)
        except ValueError as error:
            raise self._unsupported(str(error)) from error
        count = len(self.layers)
        self.kept = kept or max(1, round(KEPT_SHARE * count))
        if not self.kept < count:
            raise ConvertError(
                f"{main.spec.folder} has {count} layers, so a pruned draft cannot keep {self.kept}; give a smaller "
                "--keep-layers, or use --kind eagle3",
                2,
            )
        self.settings = {"--keep-layers": self.kept}
        self.files = tuple(name for name in TOKENIZER_FILES if (main.spec.folder / name).is_file())
        shape = main.shape
        layer = 4 * shape.hidden_size**2 + 3 * shape.hidden_size * shape.intermediate_size
        parameters = self.kept * layer + 2 * main.vocabulary * main.hidden
        self.space += SAVED * parameters

    def _unsupported(self, why: str) -> ConvertError:
        return ConvertError(
            f"{self.main.spec.folder} cannot be pruned, as only models of the Llama architecture can ({why}); use "
            "--kind eagle3",
            2,
        )

    def check(self) -> None:
        from speculative.convert.draft_training import pruned_model

        if problem := pruned_model.difference(self):
            raise self._unsupported(problem)

    def reader(self, top: int) -> Reader:
        return self.main.reader(top)

    def hidden_states(self, **properties: str) -> Forward:
        """Compile the main model to give the embeddings of a text, the hidden states after each layer, and logits."""
        graph = self.main.graph.clone()
        layers = llama_weights.find_layers(graph)
        logits = graph.output("logits").get_node().input_value(0).get_node()
        outputs = [layers[0].before, *(layer.after for layer in layers), logits]
        return Forward(graph, outputs, self.main.spec, **properties)

    def config(self) -> dict[str, Any]:
        """Its config for transformers, but for the number of layers."""
        first = self.layers[0]
        sizes = {name: last_dimension(node) for name, node in first.matrices.items()}
        return self.main.shape._asdict() | {
            "vocab_size": self.main.vocabulary,
            "head_dim": first.head_dim,
            "num_attention_heads": sizes["self_attn.q_proj.weight"] // first.head_dim,
            "num_key_value_heads": sizes["self_attn.k_proj.weight"] // first.head_dim,
            "intermediate_size": sizes["mlp.gate_proj.weight"],
            "rope_scaling": read_config(self.main.spec.folder).get("rope_scaling"),
        }

    def choose(self, texts: Iterable[np.ndarray]) -> Choice:
        """The layers to keep, by the main model's hidden states of `texts`, token ids."""
        compute, removed = self.hidden_states(), len(self.layers) - self.kept
        angles, tokens = np.zeros(self.kept + 1), 0
        for text in texts:
            states = np.stack(compute(text)[:-1]).astype(np.float32)
            states /= np.linalg.norm(states, axis=-1, keepdims=True).clip(min=1e-9)
            cosines = (states[:-removed] * states[removed:]).sum(-1)  # [kept + 1, tokens]
            angles += np.arccos(cosines.clip(-1, 1)).sum(-1) / np.pi
            tokens += len(text)
        start = int(angles.argmin())
        kept_layers = [*range(start), *range(start + removed, len(self.layers))]
        return Choice(kept_layers, float(angles[start] / tokens))

    def training(self, file: Path, texts: list[TextStates], device: str) -> "PrunedTraining":
        from speculative.convert.draft_training.pruned_model import PrunedTraining

        training = PrunedTraining(file, self, lambda: self.choose(tokens for tokens, _ in texts[:COMPARED]), device)
        layers = ", ".join(map(str, training.choice.layers))
        print(
            f"layers: {layers} of 0 to {len(self.layers) - 1} stay; the others turn hidden states by "
            f"{training.choice.distance:.2f} pi, less than any as many in a row"
        )
        return training

    def save(self, training: "PrunedTraining", folder: Path) -> None:
        from speculative.convert.draft_training import pruned_model

        pruned_model.save(training, folder, [self.main.spec.folder / name for name in self.files])

    def record(self, training: "PrunedTraining") -> dict[str, Any]:
        return {
            "kept_layers": training.choice.layers,
            "main_layers": len(self.layers),
            "angular_distance": round(training.choice.distance, 3),
        }
