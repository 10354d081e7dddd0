"""The kind pruned: the main model without the layers that matter least, for engines and devices without EAGLE-3.

Which layers: the block of consecutive ones that turns the hidden states by the least angle (Gromov et al. 2024, arXiv
2403.17887).
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from speculative.convert.draft_training.kind import SAVED, Kind
from speculative.convert.draft_training.main_llama import MainLlama
from speculative.convert.draft_training.main_model import MainModel, Reader
from speculative.convert.draft_training.state_file import TextStates
from speculative.convert.errors import ConvertError

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
        """Raises ConvertError if the main model's graph is of another architecture, or has too few layers."""
        self.main = main
        try:
            self.llama = MainLlama(main)
        except ValueError as error:
            raise self._unsupported(str(error)) from error
        count = len(self.llama.layers)
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
            f"{self.main.spec.folder} cannot be pruned, as only models of the Llama, Qwen2 and Qwen3 architectures can "
            f"({why}); use --kind eagle3",
            2,
        )

    def check(self) -> None:
        from speculative.convert.draft_training import torch_llama

        if problem := torch_llama.difference(self.llama):
            raise self._unsupported(problem)

    def reader(self, top: int) -> Reader:
        return self.main.reader(top)

    def choose(self, texts: Iterable[np.ndarray]) -> Choice:
        """The layers to keep, by the main model's hidden states of `texts`, token ids."""
        compute, removed = self.llama.hidden_states(), len(self.llama.layers) - self.kept
        angles, tokens = np.zeros(self.kept + 1), 0
        for text in texts:
            states = np.stack(compute(text)[:-1]).astype(np.float32)
            states /= np.linalg.norm(states, axis=-1, keepdims=True).clip(min=1e-9)
            cosines = (states[:-removed] * states[removed:]).sum(-1)  # [kept + 1, tokens]
            angles += np.arccos(cosines.clip(-1, 1)).sum(-1) / np.pi
            tokens += len(text)
        start = int(angles.argmin())
        kept_layers = [*range(start), *range(start + removed, len(self.llama.layers))]
        return Choice(kept_layers, float(angles[start] / tokens))

    def training(self, file: Path, texts: list[TextStates], device: str) -> "PrunedTraining":
        from speculative.convert.draft_training.pruned_model import PrunedTraining

        training = PrunedTraining(file, self, lambda: self.choose(tokens for tokens, _ in texts[:COMPARED]), device)
        layers = ", ".join(map(str, training.choice.layers))
        print(
            f"layers: {layers} of 0 to {len(self.llama.layers) - 1} stay; the others turn hidden states by "
            f"{training.choice.distance:.2f} pi, less than any as many in a row"
        )
        return training

    def save(self, training: "PrunedTraining", folder: Path) -> None:
        from speculative.convert.draft_training import pruned_model

        pruned_model.save(training, folder, [self.main.spec.folder / name for name in self.files])

    def record(self, training: "PrunedTraining") -> dict[str, Any]:
        return {
            "kept_layers": training.choice.layers,
            "main_layers": len(self.llama.layers),
            "angular_distance": round(training.choice.distance, 3),
        }
