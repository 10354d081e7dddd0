"""Loads a main model with its draft, which is a model of its own or an EAGLE-3 head."""

from typing import TypeAlias

from speculative.models import cached_model, eagle3_head, huge_pages
from speculative.models.cached_model import CachedModel
from speculative.models.eagle3_graph import is_head
from speculative.models.eagle3_head import EagleHead
from speculative.models.spec import ModelSpec

DraftModel: TypeAlias = CachedModel | EagleHead


def load_models(
    main: ModelSpec,
    draft: ModelSpec | None,
    *,
    capacity: int | None = None,
    draft_capacity: int | None = None,
    use_huge_pages: bool = False,
) -> tuple[CachedModel, DraftModel | None]:
    """Compile both. Capacities are in tokens; see `cached_model.load`, and `decoder.load` for `use_huge_pages`."""
    before = huge_pages.allocated() if use_huge_pages else []
    model: CachedModel
    draft_model: DraftModel | None
    if draft and is_head(draft.folder):
        model, draft_model = eagle3_head.load(main, draft, capacity=capacity, head_capacity=draft_capacity)
    else:
        model = cached_model.load(main, capacity=capacity)
        draft_model = cached_model.load(draft, capacity=draft_capacity) if draft else None
    if use_huge_pages:
        huge_pages.move(before)
    return model, draft_model
