"""What is served: two models, where they run, how much is drafted."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Pair:
    """`main` and `draft` are folders that every machine has; without a draft the main model decodes alone."""

    name: str  # as clients call it
    main: Path
    draft: Path | None
    device: str = "CPU"
    draft_device: str = "CPU"
    properties: dict = field(default_factory=dict)
    draft_properties: dict = field(default_factory=dict)
    draft_length: int | float = 0  # tokens for each inference; below 1 the confidence to stop at; 0: as many as pay
    cache_tokens: int = 16_384  # of all texts together
    prefix_cache: bool = True  # whether texts that begin alike share that part of the cache
