"""Results of decoding: a `Step` per forward pass of the main model, a `GenerationResult` per request."""

from dataclasses import dataclass, field
from typing import NamedTuple

from speculative.sampling.logprobs import TokenLogprobs
from speculative.sequence import metrics


class Step(NamedTuple):
    """The new `tokens` of one forward pass of the main model; the first `accepted` are draft tokens.

    `proposed` tokens were drafted one after another, and `leaves` beside them (see drafting/tree.py); with
    `ends_in_leaf` the last accepted token is a leaf. The first step of a request is the prefill, which has no draft.
    """

    tokens: list[int]
    accepted: int
    proposed: int
    is_complete: bool = False  # the text's grammar allows nothing more
    logprobs: tuple[TokenLogprobs, ...] = ()  # of the tokens, if asked for
    leaves: int = 0
    ends_in_leaf: bool = False


@dataclass
class GenerationResult:
    """The generated tokens and text of a request, with its statistics."""

    tokens: list[int] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)  # for each token
    text: str = ""
    finish_reason: str = "length"  # or "stop", or "cancelled"
    is_cut: bool = False  # the text ends at a stop string, before its last tokens do
    proposed: list[int] = field(default_factory=list)  # for each forward pass of the main model after the prompt
    accepted: list[int] = field(default_factory=list)  # likewise, of the proposed tokens
    gained: list[int] = field(default_factory=list)  # likewise: accepted + 1, except at the end and after a leaf
    ttft: float = 0.0  # seconds from the call to the first token, prompt processing included
    seconds: float = 0.0  # of the whole call
    draft_length: str = ""  # what the draft-length policy did last, and why
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of each token, if asked for
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the prompt's tokens but the first, likewise
    kv_cache: str = ""  # findings about the models' caches at load, if any

    @property
    def decode_seconds(self) -> float:
        """Seconds for all tokens after the first."""
        return self.seconds - self.ttft

    @property
    def acceptance_rate(self) -> float | None:
        return metrics.acceptance_rate(self.proposed, self.accepted)

    @property
    def block_efficiency(self) -> float | None:
        return metrics.block_efficiency(self.gained)

    @property
    def position_acceptance(self) -> list[float]:
        return metrics.position_acceptance(self.proposed, self.accepted)
