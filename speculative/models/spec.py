"""Model to load: an IR folder with the device and the OpenVINO properties to compile it for."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class ModelSpec:
    """An IR folder, the OpenVINO device to compile it for, and the OpenVINO properties to compile it with.

        main = ModelSpec("models/embedded/main", "GPU", {"INFERENCE_PRECISION_HINT": "f16"})

    `folder` may also be given as text. `properties` are copied; specs that differ only in them have the same hash.
    """

    folder: Path
    device: str = "CPU"
    properties: dict = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))
        object.__setattr__(self, "properties", dict(self.properties))

    @classmethod
    def of(cls, model: "ModelSpec | str | Path", like: "ModelSpec | None" = None) -> "ModelSpec":
        """`model` itself if it is a ModelSpec; for a path, a spec with the device and properties of `like`, by default
        the CPU without properties."""
        if isinstance(model, ModelSpec):
            return model
        return cls(Path(model), like.device, like.properties) if like else cls(Path(model))
