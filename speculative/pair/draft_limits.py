"""Limits of a draft, in one sentence each: why a program skips or refuses it. "" means no limit."""

from pathlib import Path

from speculative.models import vocabulary
from speculative.models.config import read_config, text_config
from speculative.models.eagle3_graph import HeadGraph, is_head
from speculative.models.eagle3_head import NEEDS_PAGED, has_paged_attention

MIN_LAYERS = 10  # of a main model whose layers GenAI chooses by itself


def tokenizer_limit(main: Path, draft: Path) -> str:
    """Why the draft cannot do what needs the main model's tokenizer."""
    differs = not is_head(draft) and vocabulary.differing(main, draft)
    return f"{draft} has another tokenizer than {main}" if differs else ""


def alone_limit(draft: Path) -> str:
    """Why the draft cannot decode alone."""
    return f"{draft} is an EAGLE-3 draft, which cannot decode alone" if is_head(draft) else ""


def native_limit(draft: Path, *devices: str) -> str:
    """Why this project's engine cannot run the pair on these devices."""
    unsupported = [device for device in devices if not has_paged_attention(device)]
    return f"{NEEDS_PAGED}, not on {unsupported[0]}" if unsupported and is_head(draft) else ""


def genai_limit(main: Path, draft: Path, *devices: str) -> str:
    """Why GenAI's pipeline cannot load the pair of IR folders on these devices."""
    if not is_head(draft):
        limit = tokenizer_limit(main, draft)
        return limit and f"{limit}, and GenAI needs the same: this project's engine drafts with it"
    if len({device.startswith("NPU") for device in devices}) > 1:
        return (
            f"GenAI runs an EAGLE-3 draft and its main model both on an NPU or neither, not on {' and '.join(devices)}"
        )
    if HeadGraph(draft).layers:
        return ""
    config = read_config(main)
    layers = config.get("num_hidden_layers") or text_config(config).get("num_hidden_layers") or 0
    if layers >= MIN_LAYERS:
        return ""
    description = f"has {layers} layers" if layers else "has no number of layers in its config.json"
    return (
        f"GenAI's pipeline needs a main model of {MIN_LAYERS} layers or more for a head without hidden_layers_list, "
        f"but {main} {description}: convert the head with convert/export_pair.py, which writes hidden_layers_list"
    )


def genai_tree_limit(draft: Path) -> str:
    """Why GenAI's pipeline cannot draft trees with it."""
    return "" if is_head(draft) else f"GenAI drafts trees with EAGLE-3 drafts only, and {draft} is another model"
