"""What decoding gives: steps while a text is under way, a `GenerationResult` when it is finished."""

from dataclasses import dataclass, field
from typing import NamedTuple

from speculative.sequence import metrics


class Step(NamedTuple):
    """What one inference of the main model gained: `tokens`, of which the first `accepted` are draft tokens.

    `proposed` tokens were drafted for it. The first step of a text is the prompt's inference; it has no draft.
    """

    tokens: list[int]
    accepted: int
    proposed: int


@dataclass
class GenerationResult:
    """A finished text and how it came about."""

    tokens: list[int] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)  # for each token
    text: str = ""
    finish_reason: str = "length"  # or "stop", or "cancelled"
    proposed: list[int] = field(default_factory=list)  # for each inference of the main model after the prompt's
    accepted: list[int] = field(default_factory=list)  # likewise
    gained: list[int] = field(default_factory=list)  # likewise: one more than accepted, but at an end of text
    ttft: float = 0.0  # from the call to the first token, prompt included
    seconds: float = 0.0  # the call
    draft_length: str = ""  # what the draft length rule did last, and why
    kv_cache: str = ""  # what was found out about the models' caches at load, if it matters

    @property
    def decode_seconds(self) -> float:
        """Time for all tokens but the first."""
        return self.seconds - self.ttft

    @property
    def acceptance_rate(self) -> float | None:
        return metrics.acceptance_rate(self.proposed, [n + 1 for n in self.accepted])

    @property
    def block_efficiency(self) -> float | None:
        return metrics.block_efficiency(self.gained)

    @property
    def position_acceptance(self) -> list[float]:
        return metrics.position_acceptance(self.proposed, [n + 1 for n in self.accepted])
