"""Interface between a kind of draft and the stages of its training."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculative.convert.draft_training.main_model import MainModel, Reader

if TYPE_CHECKING:  # torch takes seconds to import, and the first stages need none
    from speculative.convert.draft_training.torch_main import TorchMain
    from speculative.convert.draft_training.training import Training


SAVED = 29  # bytes of disk for each parameter: the training state twice, during its replacement; checkpoint, IR


class Kind(ABC):
    """A kind of draft, for one main model."""

    name: str  # of --kind
    main: MainModel
    settings: dict[str, Any]  # options with which alone a training can be continued
    files: tuple[str, ...] = ()  # names of what it makes beside the IR and the checkpoint
    online: "TorchMain | None" = None  # the main model, where it runs on torch's device
    states = 0  # size of the main model's hidden states that are kept for each token
    space = 200 << 20  # bytes of disk that everything but the states takes

    @abstractmethod
    def check(self) -> None:
        """Raise ConvertError if the main model cannot have such a draft. Takes seconds."""

    def put_main_on(self, device: str) -> None:
        """Run the main model in torch on `device`, for online training. Raises ConvertError if it cannot."""
        raise NotImplementedError(f"--kind {self.name} has no online training")

    @abstractmethod
    def reader(self, top: int) -> Reader:
        """Compile the main model to read texts."""

    @abstractmethod
    def training(self, file: Path, texts: list[Any], device: str) -> "Training":
        """The training kept in `file`, or a new one, of TextStates, or for online training of OnlineTexts; prints what
        was chosen for it."""

    @abstractmethod
    def save(self, training: Any, folder: Path) -> None:
        """Write the IR to `folder`, with all files beside it, and the checkpoint to its folder checkpoint."""

    @abstractmethod
    def record(self, training: Any) -> dict[str, Any]:
        """The chosen settings, for draft.json."""
