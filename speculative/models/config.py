"""Reads facts about a model from config.json, under the keys of every architecture, and from the end of its IR."""

import json
from pathlib import Path

# Llama and most; GPT-2; ChatGLM; MPT and DBRX; others
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len", "max_sequence_length")
HIDDEN_STATE_DRAFTS = {"eagle3_mode": "EAGLE-3", "dflash_mode": "DFlash"}  # optimum-intel's marks in the IR


def read_config(folder: Path) -> dict:
    """The content of config.json, or {} if there is none. Raises ValueError if it is no JSON object."""
    file = Path(folder, "config.json")
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}); copy or download it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} does not hold a JSON object; copy or download it again")
    return content


def context_length(config: dict) -> int | None:
    """The longest sequence in tokens; None if the config does not give it. Raises ValueError if it is no number."""
    given = ((key, part[key]) for part in (text_config(config), config) for key in CONTEXT_KEYS if part.get(key))
    key, tokens = next(given, ("", None))
    if tokens is not None and (type(tokens) is not int or tokens < 1):
        raise ValueError(f"{key} of config.json is {tokens!r}, but must be a whole number of tokens from 1")
    return tokens


def rope(config: dict) -> tuple[float | None, dict | None]:
    """The base of rotary position embeddings, None if the config does not give it, and their scaling, None without."""
    parameters = config.get("rope_parameters") or {}  # transformers 5; version 4 has rope_theta and rope_scaling
    scaling = config.get("rope_scaling") or {key: value for key, value in parameters.items() if key != "rope_theta"}
    is_scaled = scaling.get("rope_type", scaling.get("type", "default")) != "default"
    return config.get("rope_theta") or parameters.get("rope_theta"), scaling if is_scaled else None


def sliding_window(config: dict) -> int:
    """The sliding attention window in tokens, 0 without one."""
    known = {**config, **text_config(config)}
    return (known.get("use_sliding_window", True) and known.get("sliding_window")) or 0


def hidden_state_draft(folder: Path) -> str:
    """EAGLE-3 or DFlash if a folder's IR is marked as one, near its end; "" otherwise."""
    xml = folder / "openvino_model.xml"
    if not xml.is_file():
        return ""
    with xml.open("rb") as file:
        file.seek(max(0, xml.stat().st_size - 65_536))
        end = file.read().decode("utf-8", errors="replace")
    return next((name for mark, name in HIDDEN_STATE_DRAFTS.items() if f'<{mark} value="True"' in end), "")


def text_config(config: dict) -> dict:
    """The language model's part of a multimodal config."""
    part = config.get("text_config")
    return part if isinstance(part, dict) else {}
