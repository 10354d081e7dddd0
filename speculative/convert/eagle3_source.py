"""EAGLE-3 heads as sources: which checkpoints are supported, whether one fits its main model, which layers it reads.

Formats: that of EAGLE, SpecForge and AngelSlim, and that of vLLM's speculators. Both are staged for optimum-cli as
config.json and weights only, so that no code of a checkpoint can run.
"""

import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from speculative.convert.errors import ConvertError
from speculative.convert.source import Source
from speculative.error_text import one_line
from speculative.models import gguf_file
from speculative.models.config import read_config, rope, text_config

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
MAIN_MODEL = "LlamaForCausalLM"  # some heads give that of their main model
SPECULATORS = "Eagle3Speculator"
UNSUPPORTED = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")  # optimum-intel ignores them
REQUIRED = {  # the tensors that optimum-intel loads, and starts at random if they are missing
    *("fc.weight", "norm.weight", "lm_head.weight"),
    *(f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    *(f"midlayer.{name}.weight" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")),
}
OPTIONAL = {"embed_tokens.weight", "d2t", "t2d", "midlayer.self_attn.rotary_emb.inv_freq"}
CODES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}  # of embeddings in safetensors files
COMPARED = 64  # rows of the embeddings
ROUNDING = 0.01  # largest difference of embeddings in other number formats: more than that of bfloat16
FEWEST_LAYERS = 7  # of a main model, for 1 < N/2 - 1 < N - 4
LAYER = re.compile(r"^(model\.)?layers\.0\.")  # the name of the only layer in speculators' format


def command(model: str, output: str, arguments: list[str]) -> list[str]:
    """The command that converts a head, as typed in a shell."""
    return ["python", "-m", "speculative.convert.eagle3_to_ir", model, output, *arguments]


def check_fit(head: Source, main: Source) -> list[int]:
    """The layers of the main model whose outputs a head reads; [] if the main model's config does not tell, or if the
    head is IR. Raises ConvertError if the head is not supported or belongs to another main model.
    """
    if head.is_ir:
        return []
    config, target = head_config(head), _config_of(main)
    if names := tensor_names(head.folder):
        refuse_incomplete(names, config, head.name)
    sizes = [config.get("target_hidden_size") or config.get("hidden_size"), config.get("hidden_size")]
    for what, head_value, main_value in (
        *(("hidden states of size", size, target.get("hidden_size")) for size in sizes),
        ("a vocabulary of", config.get("vocab_size"), target.get("vocab_size")),
    ):
        if head_value and main_value and head_value != main_value:
            raise ConvertError(
                f"{head.name} was trained for {what} {head_value}, but {main.name} has {main_value}: it is the head "
                "of another model"
            )
    if not (main.is_gguf or main.is_ir):
        _refuse_own_embeddings(head, main)
    return _layers(head, main, target.get("num_hidden_layers"))


def head_config(head: Source) -> dict:
    """config.json of a head in the format of EAGLE, without anything that loads code. Raises ConvertError if
    optimum-intel would export another model than this, or none."""
    config_read = read_config(head.folder)
    architecture = (config_read.get("architectures") or [""])[0]
    config = config_read
    if architecture == SPECULATORS:
        config = {**config_read, **(config_read.get("transformer_layer_config") or {})}
        config.pop("transformer_layer_config", None)
    elif architecture not in (*ARCHITECTURES, MAIN_MODEL):
        raise ConvertError(
            f"{head.name} is an EAGLE-3 head of the architecture {architecture}, which optimum-cli does not export; "
            f"use one of {', '.join((*ARCHITECTURES, SPECULATORS))}"
        )
    kind, layers = config.get("model_type"), config.get("num_hidden_layers", 1)
    # some call the layer by the type of their main model; one with the norms of Qwen3 has further tensors
    if kind not in ("llama", "qwen3"):
        raise ConvertError(
            f"{head.name} has a layer of the type {kind}, but optimum-cli exports the type llama; use another head"
        )
    if layers != 1:
        raise ConvertError(f"{head.name} has {layers} layers, but optimum-cli exports one; use another head")
    if config_read.get("modal_type") == "VLM" or "_vl" in str(config_read.get("target_model_type")):
        raise ConvertError(f"{head.name} is the head of a vision-language model; use that of a text model")
    nested = config_read.get("eagle_config") or {}  # NVIDIA's checkpoints
    if unsupported := [key for key in UNSUPPORTED if config_read.get(key) or nested.get(key)]:
        raise ConvertError(f"{head.name} has {unsupported[0]}, which optimum-cli ignores; use a head without it")
    if config_read.get("embed_requires_grad"):
        raise ConvertError(
            f"{head.name} was trained with embeddings of its own (embed_requires_grad), but a head gets those of the "
            "main model; use another head"
        )
    base, scaling = rope(config)
    config = {**config, "rope_theta": base, "rope_scaling": scaling}
    config_kept = {
        key: value
        for key, value in config.items()
        if key not in ("auto_map", "attn_implementation", "rope_parameters")
        and not key.startswith("_")
        and value is not None  # which optimum-intel computes with
    }
    config_kept.setdefault("draft_vocab_size", config_kept.get("vocab_size"))
    return {**config_kept, "architectures": [ARCHITECTURES[0]], "model_type": "llama", "num_hidden_layers": 1}


def refuse_incomplete(names: set[str], config: dict, config_read: str) -> None:
    """Raise ConvertError if a checkpoint with tensors of these `names` lacks one, which would be exported at random, or
    has one that would be left out."""
    tensor_names = {name.removeprefix("model.") for name in names}
    reduced = config["draft_vocab_size"] != config.get("vocab_size")
    if missing := sorted((REQUIRED | ({"d2t"} if reduced else set())) - tensor_names):
        raise ConvertError(
            f"{config_read} lacks {', '.join(missing)}, so it is not a complete EAGLE-3 head; download it again"
        )
    if extra := sorted(name for name in tensor_names - REQUIRED - OPTIONAL if not name.startswith("verifier_")):
        raise ConvertError(
            f"{config_read} has {', '.join(extra)}, which optimum-cli leaves out; use a head of the published "
            "architecture"
        )


def stage(head: Source, folder: Path, base: float | None = None) -> None:
    """Write a checkpoint that optimum-cli exports to a new folder: config.json, and links to the weights. `base` is the
    head's rotary base, by default that of its config."""
    folder.mkdir(parents=True)
    config = head_config(head) | ({"rope_theta": base} if base else {})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8", newline="\n")
    patterns = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model*.bin.index.json")
    for path in sorted(path for pattern in patterns for path in head.folder.glob(pattern)):
        if path.suffix == ".json":
            _rename_index(path, folder / path.name)
            continue
        if any(LAYER.match(name) for name in _header(path)[0]):
            _rename_tensors(path, folder / path.name)
            continue
        try:
            (folder / path.name).symlink_to(path.resolve())
        except OSError:  # Windows without the permission to create links
            shutil.copyfile(path, folder / path.name)


def tensor_names(folder: Path) -> set[str]:
    """The names of all tensors in a checkpoint, as in EAGLE's format; none if its files need torch, and it is not
    installed."""
    names = {name for path in folder.glob("*.safetensors") for name in _header(path)[0]}
    if not names and find_spec("torch"):
        import torch

        for path in folder.glob("pytorch_model*.bin"):
            try:
                names |= torch.load(path, map_location="meta", weights_only=True).keys()
            except Exception as error:  # torch has no class for these
                raise ConvertError(f"{path} cannot be read ({one_line(error)[:100]}); download it again") from error
    return {LAYER.sub("midlayer.", name) for name in names}


def _refuse_own_embeddings(head: Source, main: Source) -> None:
    """Raise ConvertError if the checkpoint of a head has other embeddings than its main model's, which it will get."""
    own, of_main = _embeddings(head.folder), _embeddings(main.folder)
    if own is None or of_main is None or own.shape[1] != of_main.shape[1]:
        return
    ids = np.linspace(0, min(len(own), len(of_main)) - 1, COMPARED).astype(int)
    values, expected = (_float32(embeddings[ids]) for embeddings in (own, of_main))
    difference = np.linalg.norm(values - expected) / np.linalg.norm(expected)
    if difference > ROUNDING:
        raise ConvertError(
            f"{head.name} has embeddings of its own (embed_tokens.weight), which differ from those of {main.name} by "
            f"{difference:.0%}, but a head gets those of the main model; use another head"
        )


def _embeddings(folder: Path) -> np.ndarray | None:
    """The embeddings in a checkpoint, mapped from the file, bfloat16 as uint16; None if safetensors files have none."""
    for path in sorted(folder.glob("*.safetensors")):
        tensors, start = _header(path)
        for name, entry in tensors.items():
            if name.endswith("embed_tokens.weight") and entry["dtype"] in CODES:
                code, offset = CODES[entry["dtype"]], start + entry["data_offsets"][0]
                return np.memmap(path, code, "r", offset, tuple(entry["shape"]))
    return None


def _float32(values: np.ndarray) -> np.ndarray:
    if values.dtype == np.uint16:  # bfloat16
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def _layers(head: Source, main: Source, count: int | None) -> list[int]:
    """Layers count from 0. SpecForge and SGLang write the layers whose outputs are read, in `eagle_config`; vLLM's
    speculators those whose inputs are read, at the top, unless a converter copied them from there."""
    config = read_config(head.folder)
    published = [1, count // 2 - 1, count - 4] if count else []
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    top_level = config.get("eagle_aux_hidden_state_layer_ids")
    layers = nested or (top_level if top_level == published else [layer - 1 for layer in top_level or []]) or published
    if not nested and not top_level and count and count < FEWEST_LAYERS:
        raise ConvertError(
            f"{head.name} does not say which layers of the main model it reads, and {main.name} has only {count}; "
            "add eagle_config with eagle_aux_hidden_state_layer_ids (three layer numbers) to its config.json"
        )
    if layers and (len(layers) != 3 or min(layers) < 0):
        embeddings = "; -1: the embeddings" if min(layers) < 0 else ""
        raise ConvertError(
            f"{head.name} reads {len(layers)} layers ({', '.join(map(str, layers))}{embeddings}), but only heads that "
            "read the outputs of three layers are supported; use another head"
        )
    if layers and count and max(layers) >= count:
        raise ConvertError(
            f"{head.name} reads the outputs of layers {', '.join(map(str, layers))}, but {main.name} has only layers 0 "
            f"to {count - 1}: it is the head of another model"
        )
    return layers


def _config_of(model: Source) -> dict:
    if model.is_gguf:
        return gguf_file.configs(gguf_file.read(model.gguf))[0] if model.gguf else {}
    config = read_config(model.folder)
    return {**config, **text_config(config)}


def _header(path: Path) -> tuple[dict, int]:
    """The tensors of a safetensors file by name, and the position of its data; ({}, 0) of other files."""
    if path.suffix != ".safetensors":
        return {}, 0
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return header, 8 + size


def _rename_index(path: Path, target: Path) -> None:
    """Copy an index of weight shards with the names of EAGLE's format, by which transformers loads the tensors."""
    index = json.loads(path.read_text(encoding="utf-8"))
    index["weight_map"] = {LAYER.sub("midlayer.", name): file for name, file in index["weight_map"].items()}
    target.write_text(json.dumps(index), encoding="utf-8", newline="\n")


def _rename_tensors(path: Path, target: Path) -> None:
    """Copy a safetensors file with the names of EAGLE's format."""
    tensors, start = _header(path)
    renamed = {LAYER.sub("midlayer.", name): entry for name, entry in tensors.items()}
    header = json.dumps({"__metadata__": {"format": "pt"}, **renamed}).encode()
    header += b" " * (-len(header) % 8)
    with path.open("rb") as source, target.open("wb") as file:
        source.seek(start)
        file.write(len(header).to_bytes(8, "little") + header)
        shutil.copyfileobj(source, file, 1 << 22)
