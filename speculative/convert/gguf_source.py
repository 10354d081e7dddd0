"""GGUF files as sources of models: which of them GenAI's reader converts to OpenVINO IR correctly.

It reads three architectures, and ignores what it does not know: scaled rotary positions, for example. Everything is
checked here from the file's metadata, before anything is converted.
"""

import math
import re
from pathlib import Path

from speculative.convert.errors import ConvertError
from speculative.models import gguf_file
from speculative.models.gguf_file import ARCHITECTURES, BrokenFile, GgufFile

MATRICES = ("F16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
ENDS = ("token_embd.weight", "output.weight")  # may also be of these types:
ENDS_ONLY = ("F32", "BF16")
NEEDED_KEYS = ("block_count", "attention.head_count", "embedding_length", "attention.layer_norm_rms_epsilon")
NEEDED_TOKENIZER = ("model", "pre", "tokens", "token_type", "merges")
NEEDED_IN_LAYER = (
    *("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output"),
    *("ffn_norm", "ffn_gate", "ffn_up", "ffn_down"),
)
SIZES = (
    *("embedding_length", "feed_forward_length"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length"),
)
REORDERED = re.compile(r"attn_[qk]\.bias$")  # in llama's files by pairs of neighbours, like the rows of the weights
SPLITS_KNOWN = ("qwen2", "smollm", "default")  # rules of splitting text that GenAI's reader has
FORMATS = {"fp16": "F16", "int8": "Q8_0", "int4": "Q4_0"}  # weight format -> tensor type, which is read exactly
INSTEAD = "convert the model's original checkpoint instead"


def find(given: str) -> Path | None:
    """The GGUF file that a path names: itself, or the only one in a folder; None if it is or holds none.

    Raises ConvertError for a folder with several, or a file that does not exist.
    """
    path = Path(given)
    if gguf_file.is_named(path) and not path.is_dir():
        if not path.is_file():
            raise ConvertError(f"there is no file {given}; check its spelling", 2)
        return path
    files = sorted(file for file in path.glob("*") if gguf_file.is_named(file))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ConvertError(f"{given} holds several GGUF files ({names}); give the path of one", 2)
    return files[0] if files else None


def open_file(path: Path) -> GgufFile:
    """Read a file's metadata. Raises ConvertError if it is damaged, or GenAI's reader cannot convert it faithfully."""
    try:
        file = gguf_file.read(path)
    except BrokenFile as error:
        raise ConvertError(str(error)) from error
    try:
        reason = _unsupported(file)
    except TypeError as error:  # a text in place of a number
        raise ConvertError(f"{path} is corrupt: its metadata has a wrong type ({error}); download it again") from error
    if reason:
        raise ConvertError(f"{path} {reason}", 2)
    return file


def notes(file: GgufFile) -> list[str]:
    """Settings of the file that GenAI's reader does not apply, in sentences."""
    found = []
    splitting = file.metadata["tokenizer.ggml.pre"]
    if splitting not in SPLITS_KNOWN:
        found.append(
            f"GenAI's reader does not have the rules {splitting!r} for splitting text into words, and takes "
            "llama.cpp's default: some texts get other tokens than in training"
        )
    if file.metadata.get("tokenizer.ggml.add_bos_token"):
        found.append("GenAI's tokenizer does not put the token that begins a text before it, as this file asks")
    return found


def matrix_types(file: GgufFile) -> list[str]:
    """The types of the matrices, most frequent first: ["Q4_1", "Q8_0"]."""
    types = [tensor.type for tensor in file.tensors.values() if len(tensor.shape) > 1]
    return sorted(set(types), key=types.count, reverse=True)


def bits(file: GgufFile) -> int:
    """Bits of the most frequent type of the matrices: 4 for "Q4_1"."""
    return int(re.search(r"\d+", matrix_types(file)[0])[0])  # type: ignore[index]


def arguments(file: GgufFile, weight_format: str | None) -> list[str]:
    """The options of `gguf_to_ir` that give the weight format asked for; None keeps that of the file.

    Raises ConvertError if GenAI's reader does not know that of the file, or nothing gives the one asked for.
    """
    types = matrix_types(file)
    if weight_format is None:
        for name, tensor in file.tensors.items():
            known = (*MATRICES, *ENDS_ONLY) if name in ENDS else MATRICES
            if len(tensor.shape) > 1 and tensor.type not in known:
                raise ConvertError(
                    f"{file.path} has {tensor.type} weights ({name}), but GenAI's reader knows {', '.join(MATRICES)}; "
                    f"give a weight format ({', '.join(FORMATS)}), for which the weights are decoded first",
                    2,
                )
        return []
    if weight_format not in FORMATS:
        raise ConvertError(
            f"the weights of a GGUF file are kept or become {', '.join(FORMATS)}, not {weight_format}; {INSTEAD}", 2
        )
    return [] if types == [FORMATS[weight_format]] else ["--weight-format", weight_format]


def peak_bytes(file: GgufFile, options: list[str]) -> int:
    """Peak disk space of a conversion in bytes: the IR and a second file with its weights, which are corrected in it or
    were decoded into it."""
    if not options:
        return 2 * file.path.stat().st_size
    bytes_each = {"fp16": 2, "int8": 1.1, "int4": 0.6}[options[-1]]
    return int(2 * bytes_each * sum(math.prod(tensor.shape) for tensor in file.tensors.values()))


def command(path: str, output: str, arguments: list[str]) -> list[str]:
    """The command that converts a file, as typed in a shell."""
    return ["python", "-m", "speculative.convert.gguf_to_ir", path, output, *arguments]


def _unsupported(file: GgufFile) -> str:
    """Why GenAI's reader cannot convert a file, as the rest of a sentence; "" if it can."""
    metadata = file.metadata
    if (parts := metadata.get("split.count", 0)) > 1:
        number = metadata.get("split.no", 0) + 1
        return f"is part {number} of {parts} of a model; join the parts: llama-gguf-split --merge FIRST_PART WHOLE.gguf"
    if file.architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        return f"has the architecture {file.architecture!r}, but GenAI's reader knows {known}; {INSTEAD}"
    if file.get("expert_count"):
        return f"is a mixture of experts, which GenAI's reader does not know; {INSTEAD}"
    if scaled := _scaled_positions(file):
        return f"has rotary positions ({scaled}) that GenAI's reader ignores, so its text would be wrong; {INSTEAD}"
    if file.architecture == "llama" and (biases := [name for name in file.tensors if REORDERED.search(name)]):
        return f"has {biases[0]}, whose values GenAI's reader leaves in another order than the weights'; {INSTEAD}"
    tokenizer = metadata.get("tokenizer.ggml.model", "gpt2")
    if tokenizer != "gpt2":
        return f"has a tokenizer of kind {tokenizer!r}, but GenAI's reader knows 'gpt2' (byte-level BPE); {INSTEAD}"
    keys = [f"{file.architecture}.{key}" for key in NEEDED_KEYS]
    keys += ["general.file_type", *(f"tokenizer.ggml.{key}" for key in NEEDED_TOKENIZER)]
    if missing := [key for key in keys if key not in metadata]:
        return f"has no {', '.join(missing)} in its metadata, which GenAI's reader needs; {INSTEAD}"
    if (layers := file.get("block_count")) > len(file.tensors):
        return f"says that it has {layers:,} layers, but it has {len(file.tensors)} tensors; copy or download it again"
    tensors = ["token_embd.weight", "output_norm.weight"]
    tensors += [f"blk.{i}.{name}.weight" for i in range(layers) for name in NEEDED_IN_LAYER]
    if missing := [name for name in tensors if name not in file.tensors]:
        return f"has no tensor {missing[0]} ({len(missing)} are missing); {INSTEAD}"
    return _misshapen(file, layers)


def _misshapen(file: GgufFile, layers: int) -> str:
    """The first matrix of the `layers` that has not the shape of the metadata, as the rest of a sentence; "" if all
    have."""
    config = gguf_file.configs(file)[0]
    hidden, head_dim = config["hidden_size"], config.get("head_dim", 0)
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    inner = config.get("intermediate_size", file.tensors["blk.0.ffn_up.weight"].shape[0]) if layers else 0
    shapes = {
        **{"attn_q": (queries, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden)},
        **{"attn_output": (hidden, queries), "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden)},
        "ffn_down": (hidden, inner),
    }
    for layer in range(layers):
        for name, expected in shapes.items():
            shape = file.tensors[f"blk.{layer}.{name}.weight"].shape
            if shape != expected:
                return (
                    f"has blk.{layer}.{name}.weight of the shape {_shown(shape)}, but according to its metadata "
                    f"({', '.join(SIZES)}) it is {_shown(expected)}; {INSTEAD}"
                )
    return ""


def _shown(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _scaled_positions(file: GgufFile) -> str:
    """The metadata or tensor that makes a model's rotary positions differ from the plain ones; "" if they are plain."""
    if "rope_freqs.weight" in file.tensors:
        return "rope_freqs.weight"
    kind, factor = file.get("rope.scaling.type"), file.get("rope.scaling.factor", file.get("rope.scale_linear", 0))
    if kind not in (None, "none") and factor != 1:
        return f"rope.scaling.type {kind}"
    if kind is None and factor not in (0, 1):  # llama.cpp: linear
        return f"rope.scaling.factor {factor}"
    rotated = file.get("rope.dimension_count")
    head_dim = gguf_file.configs(file)[0].get("head_dim")
    return f"rope.dimension_count {rotated} of {head_dim}" if rotated not in (None, head_dim) else ""
