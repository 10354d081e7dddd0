"""The folder of a draft: what training keeps in OUT/work, and the finished files in OUT, installed all at once."""

import json
import shutil
from pathlib import Path

from speculative.atomic_write import atomic_write
from speculative.convert.errors import ConvertError
from speculative.convert.work_folder import WorkFolder

MADE = ("checkpoint", "openvino_model.xml", "openvino_model.bin", "config.json", "README.md", "draft.json")


class DraftFolder(WorkFolder):
    """OUT, locked while it is open. `work` survives every end of the program, and a later run continues with it."""

    def __init__(self, target: Path, files: tuple[str, ...] = ()):
        """`files` are the names of what is made beside `MADE`."""
        work = target / "work"
        super().__init__(target, work, new=work / "new", into=target)
        self._files = files

    def open(self) -> None:
        """Create and lock OUT/work, and undo an interrupted install. Raises ConvertError if OUT holds anything else."""
        if self.target.exists() and not self.target.is_dir():
            raise ConvertError(f"{self.target} is a file; choose another folder for the draft", 2)
        if (self.target / "draft.json").exists() and not self.work.exists():
            raise ConvertError(
                f"{self.target} holds a finished draft without the folder work; choose another folder, or remove it", 2
            )
        if foreign := self._foreign_name():
            raise ConvertError(
                f"{self.target} holds {foreign}, which this program did not make; choose a new folder for the draft", 2
            )
        super().open()
        begun = [name for name in self.new_names() if (self.target / name).exists()]
        if begun and not (self.target / "draft.json").exists():  # nothing was installed yet
            self.close()
            raise ConvertError(
                f"{self.target} holds {begun[0]}, which this program did not make; move it elsewhere to continue", 2
            )
        for leftover in (self.new, self.work / "replaced"):
            shutil.rmtree(leftover, ignore_errors=True)

    def _foreign_name(self) -> str:
        """The name of something in OUT, or in its `work`, if no training was begun there; else ""."""
        if self.keeps_something():
            return ""
        in_target, in_work = (
            sorted(folder.iterdir()) if folder.is_dir() else [] for folder in (self.target, self.work)
        )
        foreign = [path for path in [*in_target, *in_work] if path not in (self.work, self.work / "lock")]
        return foreign[0].relative_to(self.target).as_posix() if foreign else ""

    def new_names(self) -> list[str]:
        return [*MADE, *self._files]

    def keeps_something(self) -> bool:
        return (self.work / "settings.json").exists()

    def settle(self, settings: dict) -> None:
        """Record what the training depends on. Raises ConvertError if OUT/work was made with other settings."""
        file = self.work / "settings.json"
        if file.exists():
            recorded = json.loads(file.read_text(encoding="utf-8"))
            for name, value in settings.items():
                if name not in recorded and value is not None:
                    raise ConvertError(
                        f"{self.target} was begun by an earlier version, which did not record its {name}; choose "
                        f"another folder for the draft, or remove {self.work}",
                        2,
                    )
                if recorded.get(name) != value:
                    raise ConvertError(
                        f"{self.target} was begun with another {name} ({recorded.get(name)}, not {value}); choose "
                        f"another folder for the draft, or remove {self.work}",
                        2,
                    )
        else:
            atomic_write(file, json.dumps(settings, indent=1))
