"""Token-by-token view of one text: accepted draft tokens, rejected draft tokens, and the main model's own tokens."""

from itertools import pairwise

import numpy as np
import openvino_genai
from openvino_genai import GenerationConfig

from speculative.bench.result import TokenStep, TokenView
from speculative.decoder import Decoder
from speculative.drafting.proposers import Proposer, Transform
from speculative.sampling.proposal import Proposal


class RecordingProposer:
    """A proposer that records its proposals."""

    def __init__(self, source: Proposer):
        self.source = source
        self.tokens: list[int] = []

    def propose(self, tokens: np.ndarray, transform: Transform, random: np.random.Generator) -> Proposal | None:
        proposal = self.source.propose(tokens, transform, random)
        if proposal:
            self.tokens.append(proposal.token)
        return proposal

    def reset(self) -> None:
        self.source.reset()


def token_view(engine: Decoder, prompt: np.ndarray, draft_length: int | str, max_new_tokens: int) -> TokenView:
    """A greedy text, token by token.

    `draft_length` is K; any other value selects the engine's default policy.
    """
    config = GenerationConfig(max_new_tokens=max_new_tokens, ignore_eos=True)
    if isinstance(draft_length, int):
        config.num_assistant_tokens = draft_length
    assert engine.draft is not None and engine.tokenizer is not None
    noted = RecordingProposer(engine.draft)
    decoder = Decoder(engine.main, noted, engine.draft_length)
    text: list[int] = []
    steps: list[TokenStep] = []
    for step in decoder.stream(prompt, config):
        *accepted, own = step.tokens
        rejected = noted.tokens[len(accepted) - step.ends_in_leaf :]
        shown: TokenStep = {
            "accepted": pieces(engine.tokenizer, text, accepted),
            "rejected": pieces(engine.tokenizer, text + accepted, rejected),
            "main": pieces(engine.tokenizer, text + accepted, [own])[0],
        }
        steps.append(shown)
        text += step.tokens
        noted.tokens.clear()
    return {"prompt": engine.tokenizer.decode(prompt.tolist()), "steps": steps}


def pieces(tokenizer: openvino_genai.Tokenizer, before: list[int], tokens: list[int]) -> list[str]:
    """The text added by each token; a character spanning several tokens is attributed to the last of them."""
    texts = [tokenizer.decode([*before, *tokens[:n]]).rstrip("\ufffd") for n in range(len(tokens) + 1)]
    return [text[len(shorter) :] for shorter, text in pairwise(texts)]
