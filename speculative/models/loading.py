"""Loads a main model with its draft, which is a model of its own or an EAGLE-3 head."""

from typing import NamedTuple, TypeAlias

from speculative.models import cached_model, eagle3_head, huge_pages
from speculative.models.cached_model import CachedModel
from speculative.models.eagle3_graph import is_head
from speculative.models.eagle3_head import EagleHead
from speculative.models.spec import ModelSpec
from speculative.models.vocabulary import SharedTokens, shared_tokens

DraftModel: TypeAlias = CachedModel | EagleHead


class LoadedModels(NamedTuple):
    """The main model, the draft if there is one, and what they share if the draft has another tokenizer."""

    main: CachedModel
    draft: DraftModel | None
    shared: SharedTokens | None


def load_models(
    main: ModelSpec,
    draft: ModelSpec | None,
    *,
    capacity: int | None = None,
    draft_capacity: int | None = None,
    use_huge_pages: bool = False,
) -> LoadedModels:
    """Compile both. Capacities are in tokens of the main model; see `cached_model.load`, and `decoder.load` for
    `use_huge_pages`."""
    before = huge_pages.allocated() if use_huge_pages else []
    model: CachedModel
    draft_model: DraftModel | None = None
    shared: SharedTokens | None = None
    if draft and is_head(draft.folder):
        model, draft_model = eagle3_head.load(main, draft, capacity=capacity, head_capacity=draft_capacity)
    else:
        model = cached_model.load(main, capacity=capacity)
        if draft:
            shared = shared_tokens(main.folder, draft.folder)
            if shared and draft_capacity:
                draft_capacity = shared.draft_length(draft_capacity)
            draft_model = cached_model.load(draft, capacity=draft_capacity)
            if shared:
                shared.fit(model.vocab_size, draft_model.vocab_size)
    if use_huge_pages:
        huge_pages.move(before)
    return LoadedModels(model, draft_model, shared)
