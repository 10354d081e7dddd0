"""Reads the metadata and the list of tensors of a GGUF file, but not its weights.

    file = gguf_file.read(Path("model.gguf"))
    file.metadata["general.architecture"], file.tensors["token_embd.weight"].shape
    config, generation_config = gguf_file.configs(file)

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

SUFFIX = ".gguf"
VERSIONS = (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_DIMENSIONS = 4  # dimensions of a tensor
CONTROL = 3  # token type of the tokens that are no text
UNUSED = 5  # token type of the ids without a token, which llama.cpp's converter names [PAD49152]


class TensorType(NamedTuple):
    """A ggml tensor type; weights are stored in blocks, with their scales."""

    name: str
    block: int  # weights per block
    size: int  # bytes per block


TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    30: TensorType("BF16", 1, 2),
}

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


class BrokenFile(ValueError):
    """Not a GGUF file, or a damaged one; the message is one sentence that says what, where, and what to do."""


@dataclass(frozen=True)
class Tensor:
    """A tensor in the list of a file."""

    shape: tuple[int, ...]  # as in numpy: [rows, columns]
    type: str  # F16, Q4_1, ...; "type 41" if TYPES does not have it


@dataclass(frozen=True)
class GgufFile:
    """Metadata of a GGUF file."""

    path: Path
    metadata: dict[str, Any]  # key -> number, text, bool, or list of them
    tensors: dict[str, Tensor]  # name -> tensor

    @property
    def architecture(self) -> str:
        """llama, qwen2, ...; empty if the file does not say."""
        return str(self.metadata.get("general.architecture", ""))

    def get(self, key: str, default: object = None) -> Any:
        """A value that belongs to the architecture: "block_count" is "llama.block_count"."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def tokens(self) -> dict[int, str]:
        """Token id -> token, without unused ids."""
        names = self.metadata.get("tokenizer.ggml.tokens") or []
        kinds = self.metadata.get("tokenizer.ggml.token_type") or [0] * len(names)
        return {i: name for i, (name, kind) in enumerate(zip(names, kinds, strict=False)) if kind != UNUSED}

    def token_id(self, name: str) -> int | None:
        """The id of the token bos, eos, eot, padding or unknown; None if the file names none."""
        return self.metadata.get(f"tokenizer.ggml.{name}_token_id")


def is_named(path: Path) -> bool:
    """Whether a path ends as those of GGUF files do, also in capitals."""
    return path.suffix.lower() == SUFFIX


def read(path: Path) -> GgufFile:
    """Read a file in a fraction of a second. Raises BrokenFile if it is damaged, truncated or no GGUF file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if not size:
                raise BrokenFile(f"{path} is empty; copy or download it again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _read(path, _Cursor(path, content))
    except OSError as error:
        raise BrokenFile(f"{path} cannot be read ({error.strerror}); copy or download it again") from error
    except (TypeError, ArithmeticError, MemoryError, RecursionError) as error:  # nonsense in place of a number
        raise BrokenFile(f"{path} is corrupt ({type(error).__name__}); copy or download it again") from error


class _Cursor:
    """A position in the content of a file."""

    def __init__(self, path: Path, content: mmap.mmap):
        self.path = path
        self.content = content
        self.position = 0

    def take(self, count: int) -> bytes:
        if self.position + count > len(self.content):
            raise BrokenFile(
                f"{self.path} is truncated or corrupt: it ends at {len(self.content):,} bytes, in the middle of its "
                "metadata; copy or download it again"
            )
        self.position += count
        return self.content[self.position - count : self.position]

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(code)))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode(errors="replace")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            kind, count = self.number("I"), self.number("Q")
            if kind in SCALARS:
                return list(
                    struct.unpack(f"<{count}{SCALARS[kind]}", self.take(count * struct.calcsize(SCALARS[kind])))
                )
            return [self.value(kind) for _ in range(count)]
        if kind not in SCALARS:
            raise BrokenFile(f"{self.path} is corrupt: its metadata has a value of type {kind}; download it again")
        return self.number(SCALARS[kind])


def _read(path: Path, cursor: _Cursor) -> GgufFile:
    if cursor.take(4) != b"GGUF":
        raise BrokenFile(f"{path} is not a GGUF file: it does not begin with GGUF; copy or download it again")
    version = cursor.number("I")
    if version not in VERSIONS:
        kind = "a big-endian file" if version >> 24 in VERSIONS else f"of GGUF version {version}"
        raise BrokenFile(
            f"{path} is {kind}, but only versions 2 and 3 are read, little-endian; convert the model again"
        )
    tensor_count, key_count = cursor.number("Q"), cursor.number("Q")
    metadata = {}
    for _ in range(key_count):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.number("I"))
    tensors, end = {}, 0
    for _ in range(tensor_count):
        name, dimensions = cursor.text(), cursor.number("I")
        if dimensions > MAX_DIMENSIONS:
            raise BrokenFile(
                f"{path} is corrupt: its tensor {name[:80]!r} has {dimensions} dimensions; download it again"
            )
        shape = tuple(cursor.number("Q") for _ in range(dimensions))[::-1]
        kind, offset = cursor.number("I"), cursor.number("Q")
        tensor_type = TYPES.get(kind)
        tensors[name] = Tensor(shape, tensor_type.name if tensor_type else f"type {kind}")
        if tensor_type:
            end = max(end, offset + math.prod(shape) // tensor_type.block * tensor_type.size)
    alignment = metadata.get("general.alignment", 32)
    needed = -(-cursor.position // alignment) * alignment + end
    if needed > len(cursor.content):
        raise BrokenFile(
            f"{path} is truncated ({len(cursor.content):,} of {needed:,} bytes); copy or download it again"
        )
    return GgufFile(path, metadata, tensors)


def configs(file: GgufFile) -> tuple[dict, dict]:
    """The content of config.json and of generation_config.json, under transformers' names."""
    embedding = file.tensors.get("token_embd.weight")
    heads, width = file.get("attention.head_count"), file.get("embedding_length")
    head_dim = width // heads if isinstance(width, int) and isinstance(heads, int) and heads else None
    eos, eot = file.token_id("eos"), file.token_id("eot")
    bos, pad = file.token_id("bos"), file.token_id("padding")
    ids = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": eos if pad is None else pad}
    config = {
        "architectures": [ARCHITECTURES[file.architecture]] if file.architecture in ARCHITECTURES else None,
        "model_type": file.architecture,
        "hidden_size": width,
        "intermediate_size": file.get("feed_forward_length"),
        "num_hidden_layers": file.get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.get("attention.head_count_kv", heads),
        "head_dim": file.get("attention.key_length", head_dim),
        "max_position_embeddings": file.get("context_length"),
        "rope_theta": file.get("rope.freq_base"),
        "rms_norm_eps": file.get("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "vocab_size": embedding.shape[0] if embedding else None,
        **ids,
    }
    stops = [token for token in dict.fromkeys((eos, eot)) if token is not None]
    generation = {**ids, "eos_token_id": stops if len(stops) > 1 else eos}
    return _without_none(config), _without_none(generation)


def _without_none(settings: dict) -> dict:
    return {key: value for key, value in settings.items() if value is not None}
