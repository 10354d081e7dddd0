"""Configuration of the served pair: models, devices, draft length, caches."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Pair:
    """`main` and `draft` are folders present on every machine; without a draft the main model decodes alone."""

    name: str  # model name in the API
    main: Path
    draft: Path | None
    device: str = "CPU"
    draft_device: str = "CPU"
    properties: dict = field(default_factory=dict)
    draft_properties: dict = field(default_factory=dict)
    draft_length: int | float = 0  # tokens per iteration; below 1: confidence threshold; 0: adaptive
    cache_tokens: int = 16_384  # for all texts together
    prefix_cache: bool = True  # share the KV cache of common prefixes
