"""What a model's config.json says of its context, under the keys of every architecture."""

import json
from pathlib import Path

# Llama and most; GPT-2; ChatGLM; MPT and DBRX; others
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len", "max_sequence_length")


def read_config(folder: Path) -> dict:
    """The content of config.json; nothing where there is none. Raises ValueError where it is no JSON."""
    file = Path(folder, "config.json")
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def context_length(config: dict) -> int | None:
    """The longest sequence in tokens; None where the config does not say."""
    return next((part[key] for part in (text_config(config), config) for key in CONTEXT_KEYS if part.get(key)), None)


def sliding_window(config: dict) -> int:
    """Tokens that attention looks back, 0 for all."""
    known = {**config, **text_config(config)}
    return (known.get("use_sliding_window", True) and known.get("sliding_window")) or 0


def text_config(config: dict) -> dict:
    """The language model's own part of a multimodal config."""
    part = config.get("text_config")
    return part if isinstance(part, dict) else {}
