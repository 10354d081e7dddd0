"""The kind eagle3: a head that drafts from the main model's hidden states, with a vocabulary of its own."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from speculative.convert.draft_training.head_weights import TrainedHead
from speculative.convert.draft_training.kind import SAVED, Kind
from speculative.convert.draft_training.main_model import MainModel, Reader
from speculative.convert.errors import ConvertError
from speculative.models.eagle3_graph import last_dimension, residual_adds

if TYPE_CHECKING:
    from speculative.convert.draft_training.head import HeadTraining

COVERAGE, MAX_DRAFT_VOCABULARY = 0.995, 8192  # of the draft vocabulary, by default
OUTDATED = 0.01  # share of the text that a new choice of the draft vocabulary must add to be worth a message
FURTHER_RATE = 5e-4  # highest learning rate for a head that is trained already, except online


class Eagle3(Kind):
    """A head that reads the hidden states of `layers`."""

    name = "eagle3"

    def __init__(
        self,
        main: MainModel,
        layers: list[int] | None = None,
        draft_vocabulary: int | None = None,
        init_from: Path | None = None,
    ):
        """Trains the head in the folder `init_from` further, or a new one. Raises ConvertError if the main model has no
        such layers, or the head is not one of this main model."""
        self.main = main
        self.initial = TrainedHead(init_from, main) if init_from else None
        adds = {layer: node for layer, node in residual_adds(main.graph).items() if layer is not None}
        layers_given = self.initial.layers if self.initial else layers
        self.layers = layers_given or published_layers(len(adds), main.spec.folder)
        if any(layer not in adds for layer in self.layers) or len(set(self.layers)) != 3:
            raise ConvertError(
                f"a head reads three different layers of 0 to {len(adds) - 1}, not {self.layers}; give --layers", 2
            )
        self.states = sum(last_dimension(adds[layer]) for layer in self.layers)
        self._draft_vocabulary = draft_vocabulary
        self.settings = {"--layers": self.layers, "--draft-vocabulary": draft_vocabulary}
        shape, drafted = (self.initial or main).shape, draft_vocabulary or MAX_DRAFT_VOCABULARY
        heads = 3 * shape.num_attention_heads + 4 * shape.num_key_value_heads  # q and o; k and v; of two inputs each
        numbers = self.states + heads * shape.head_dim + 3 * shape.intermediate_size + drafted
        self.space += SAVED * shape.hidden_size * numbers

    def check(self) -> None:
        pass  # done, without computing anything

    def put_main_on(self, device: str) -> None:
        from speculative.convert.draft_training.torch_main import TorchMain

        self.online = TorchMain(self.main, self.layers, device)

    def reader(self, top: int) -> Reader:
        def states(graph: ov.Model) -> ov.Node:
            adds = residual_adds(graph)
            return ops.concat([adds[layer] for layer in self.layers], -1)

        return self.main.reader(top, states)

    def training(self, file: Path, texts: list[Any], device: str) -> "HeadTraining":
        from speculative.convert.draft_training.head import Beginning, HeadTraining

        counts = np.zeros(self.main.vocabulary, np.int64)
        for tokens, answer in texts:
            counts += np.bincount(tokens[answer:] if self.online else tokens, minlength=len(counts))

        def beginning() -> Beginning:
            if self.initial and not self._draft_vocabulary:
                return Beginning(self.initial.vocabulary, self.initial.weights())
            vocabulary = choose_vocabulary(counts, self._draft_vocabulary, COVERAGE, MAX_DRAFT_VOCABULARY)
            output = self.main.output_layer(vocabulary)
            weights = {"lm_head.weight": output.rows, "norm.weight": output.norm} if output else {}
            if self.initial:
                known = self.initial.weights()
                rows = output.rows if output else np.zeros((len(vocabulary), self.main.hidden), np.float32)
                _, new, old = np.intersect1d(vocabulary, self.initial.vocabulary, return_indices=True)
                rows[new] = known["lm_head.weight"][old]  # other tokens begin with the main model's rows
                weights = known | {"lm_head.weight": rows}
            return Beginning(vocabulary, weights)

        shape = self.initial.shape if self.initial else self.main.shape
        arguments = (file, shape, self.states, self.main.embeddings(), device, beginning)
        if self.online:
            from speculative.convert.draft_training.online import OnlineHeadTraining

            training: HeadTraining = OnlineHeadTraining(self.online, *arguments)
        else:
            training = HeadTraining(*arguments)
            if self.initial:
                training.rate = FURTHER_RATE
        known = training.vocabulary
        self._coverage = float(counts[known].sum() / counts.sum())
        print(f"draft vocabulary: {len(known):,} of {len(counts):,} tokens, {self._coverage:.1%} of the text")
        better = choose_vocabulary(counts, self._draft_vocabulary, COVERAGE, MAX_DRAFT_VOCABULARY)
        gain = float(counts[better].sum() / counts.sum()) - self._coverage
        if gain > OUTDATED:
            print(
                f"it was chosen from earlier texts; one of {len(better):,} tokens would cover {gain:.1%} more: train "
                f"the head further in another folder, with --init-from OUT --draft-vocabulary {len(better)}"
            )
        return training

    def save(self, training: "HeadTraining", folder: Path) -> None:
        from speculative.convert.draft_training import export

        export.save_checkpoint(training, self.main, self.layers, folder / "checkpoint")
        export.save_ir(training, self.main, self.layers, folder)

    def record(self, training: "HeadTraining") -> dict[str, Any]:
        return {
            "layers": self.layers,
            "draft_vocabulary": len(training.vocabulary),
            "vocabulary": self.main.vocabulary,
            "coverage": round(self._coverage, 4),
        }


def published_layers(count: int, folder: Path) -> list[int]:
    """The layers of a model with `count` layers that published heads read, by EAGLE's code, SpecForge and AngelSlim."""
    if count < 3:
        raise ConvertError(
            f"{folder}: number of layers that can be found by name: {count}, but an EAGLE-3 draft reads three; export "
            "the model again with optimum-cli, or use --kind pruned",
            2,
        )
    return [1, count // 2 - 1, count - 4] if count >= 10 else [0, count // 2, count - 1]


def choose_vocabulary(counts: np.ndarray, size: int | None, coverage: float, maximum: int) -> np.ndarray:
    """The ids, sorted, of the `size` most frequent tokens; by default as many as have a share of `coverage`, a multiple
    of 64 of at most `maximum`. `counts` [vocabulary] is each token's frequency."""
    order = np.argsort(-counts, kind="stable")
    if not size:
        needed = int(np.searchsorted(np.cumsum(counts[order]), coverage * counts.sum())) + 1
        size = min(-(-needed // 64) * 64, maximum)
    return np.sort(order[: min(size, len(counts))])
