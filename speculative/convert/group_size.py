"""Group size of 4-bit weights: the number of neighbouring inputs of a matrix that share a scale.

It must divide the number of inputs of every matrix, or nncf fails. Its default, 128, does not divide the 576 of
SmolLM2-135M.
"""

from pathlib import Path
from typing import TypeGuard

from speculative.convert.errors import ConvertError

DEFAULT = 128  # nncf's
SIZES = (128, 64, 32)
PER_CHANNEL = -1  # one scale per output channel: fits every matrix
GROUPED = ("int4", "nf4", "cb4")  # formats with a configurable group size
WIDTHS = (
    *("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"),
    *("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    *("moe_intermediate_size", "shared_expert_intermediate_size"),
)


def choose(folder: Path, config: dict, options: list[str]) -> tuple[int | None, str]:
    """The group size to add to the optimum-cli `options` for the checkpoint in `folder` with this config, and why.

    None if the default fits, or `options` set the size. Raises ConvertError for a --group-size in `options` that does
    not fit.
    """
    widths = input_widths(config)
    requested = _option(options, "--group-size")
    if not widths or _option(options, "--group-size-fallback") in ("adjust", "ignore"):
        return None, ""
    if requested is not None:
        _refuse_misfit(requested, widths, folder)
        return None, ""
    name = _misfit(DEFAULT, widths)
    if not name:
        return None, ""
    size = next((size for size in SIZES if not _misfit(size, widths)), PER_CHANNEL)
    return size, f"--group-size {size} added: the default, {DEFAULT}, does not divide {name} {widths[name]}"


def input_widths(config: dict) -> dict[str, int]:
    """Input widths of a checkpoint's matrices, by their names in config.json."""
    widths = {name: config[name] for name in WIDTHS if _is_width(config.get(name))}
    heads, head_dim = config.get("num_attention_heads"), config.get("head_dim")
    if _is_width(heads) and _is_width(head_dim):
        widths["num_attention_heads x head_dim"] = heads * head_dim
    return widths


def fits(size: int, config: dict) -> bool:
    """Whether groups of this size divide all matrices of the checkpoint with this config."""
    return not _misfit(size, input_widths(config))


def _refuse_misfit(requested: str, widths: dict[str, int], folder: Path) -> None:
    try:
        size = int(requested)
    except ValueError:
        raise ConvertError(
            f"--group-size {requested} is not a whole number; give 128, 64 or -1, for example", 2
        ) from None
    name = "" if size == PER_CHANNEL else _misfit(size, widths)
    if name:
        fitting = [str(size) for size in SIZES if not _misfit(size, widths)]
        raise ConvertError(
            f"--group-size {size} does not divide {name} {widths[name]} of {folder}; give "
            f"{', '.join([*fitting, str(PER_CHANNEL)])} (-1: one group per output channel)",
            2,
        )


def _misfit(size: int, widths: dict[str, int]) -> str:
    """The name of a width that this group size does not divide, or ""."""
    return next((name for name, width in widths.items() if size < 1 or width % size), "")


def _option(options: list[str], name: str) -> str | None:
    """The value of the last `name VALUE` or `name=VALUE` among options, or None."""
    value = None
    for i, word in enumerate(options):
        if word == name and i + 1 < len(options):
            value = options[i + 1]
        elif word.startswith(f"{name}="):
            value = word.partition("=")[2]
    return value


def _is_width(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and value > 0
