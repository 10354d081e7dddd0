"""Configuration of the served pair: models, devices, draft length, caches."""

from dataclasses import dataclass

from speculative.models.spec import ModelSpec


@dataclass(frozen=True)
class Pair:
    """The folders of `main` and `draft` are present on every machine; without a draft the main model decodes alone."""

    name: str  # model name in the API
    main: ModelSpec
    draft: ModelSpec | None
    draft_length: int | float = 0  # tokens per iteration; below 1: confidence threshold; 0: adaptive
    cache_tokens: int = 16_384  # for all texts together
    prefix_cache: bool = True  # share the KV cache of common prefixes
