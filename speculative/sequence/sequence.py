"""Sequence state of one request: prompt, generated and draft tokens, their verification and the stop conditions.

    while not text.is_finished:
        while text.can_draft and ...:
            text.draft(source.propose(text.token_ids, text.distribution, text.random))
        step = text.verify(main.logits(text.token_ids, last=text.num_logits))

The caller chooses the models, the batch and the draft length.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from openvino_genai import GenerationConfig, Tokenizer

from speculative.sampling.distribution import Distribution, check_supported
from speculative.sampling.proposal import Proposal
from speculative.sampling.rejection_sampling import OneHot, verify
from speculative.sequence.result import Step

UNSET = GenerationConfig().max_new_tokens


@dataclass(frozen=True)
class ModelLimits:
    """Limits and defaults shared by all sequences of a model."""

    width: int  # vocabulary size: number of logits
    capacity: int  # longest sequence, in tokens
    stop_token_ids: frozenset[int] = frozenset()  # used if a GenerationConfig sets none
    subtract_penalties: bool = False  # see `Distribution`


class Sequence:
    """A prompt (token ids int64 [n]) and its continuation according to `config`, with its own random generator.

    Raises ValueError for an empty or too long prompt and for config options that are not supported.
    """

    def __init__(self, prompt: np.ndarray, config: GenerationConfig, limits: ModelLimits, random: np.random.Generator):
        check_supported(config)
        if not len(prompt):
            raise ValueError("the prompt has no tokens: it needs at least one")
        if prompt.min() < 0 or prompt.max() >= limits.width:
            raise ValueError(
                f"the prompt's token ids range from {prompt.min()} to {prompt.max()}, the model's from 0 to "
                f"{limits.width - 1}: encode it with the model's tokenizer"
            )
        room = limits.capacity - len(prompt)
        if room < 1:
            raise ValueError(f"the prompt has {len(prompt)} tokens, but the context only fits {limits.capacity - 1}")
        asked = config.max_new_tokens  # takes precedence over max_length, as in GenAI
        if asked == UNSET:
            asked = config.max_length - len(prompt)
        if asked < 1:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens and max_length is {config.max_length}, which leaves no room for "
                "new tokens: raise it, or set max_new_tokens"
            )
        self.random = random
        self.stops = stop_ids(config, limits.stop_token_ids)
        self.num_prompt_tokens = self.n = len(prompt)  # n: prompt and generated tokens, without draft tokens
        self._tokens = np.empty(self.n + min(asked, room), np.int64)  # prompt, generated, draft
        self._tokens[: self.n] = prompt
        self._transform = Distribution(config, limits.stop_token_ids, limits.subtract_penalties)
        self._q: list[np.ndarray | OneHot] = []  # the distributions that the draft tokens were sampled from
        self.is_finished = False

    @property
    def max_length(self) -> int:
        """Longest length in tokens that this sequence can reach."""
        return len(self._tokens)

    @property
    def token_ids(self) -> np.ndarray:
        """Prompt, generated and draft tokens."""
        return self._tokens[: self.n + len(self._q)]

    @property
    def drafted(self) -> int:
        """Number of draft tokens not yet verified."""
        return len(self._q)

    @property
    def num_logits(self) -> int:
        """Number of logits that `verify` needs: one after the verified tokens, one after each draft token."""
        return len(self._q) + 1

    @property
    def is_prefill(self) -> bool:
        """Whether no token is generated yet. The prefill is never combined with a draft, to keep TTFT short."""
        return self.n == self.num_prompt_tokens

    @property
    def can_draft(self) -> bool:
        """Whether another draft token can be useful: not if only one token may follow, nor after a stop token."""
        if self.is_prefill or len(self.token_ids) >= self.max_length - 1:
            return False
        return not (self._q and int(self.token_ids[-1]) in self.stops)

    def distribution(self, logits: np.ndarray, tokens: np.ndarray) -> np.ndarray | OneHot:
        """The next-token distribution after `tokens`, a prefix of this sequence, from `logits` float32 [V]."""
        return self._transform(logits, tokens[: self.num_prompt_tokens], tokens[self.num_prompt_tokens :])

    def draft(self, proposal: Proposal) -> None:
        """Append a draft token. Every draft token must be verified, or the output is not lossless."""
        self._tokens[self.n + len(self._q)] = proposal.token
        self._q.append(proposal.q)

    def drop_draft(self) -> None:
        """Discard all draft tokens, after the main model has failed."""
        self._q.clear()

    def verify(self, logits: np.ndarray) -> Step:
        """Append the accepted draft tokens and the recovered or bonus token; `logits` are the last `num_logits`."""
        drafted = self._tokens[self.n : self.n + len(self._q)].tolist()
        accepted, token = verify(
            drafted, self._q, lambda i: self.distribution(logits[i], self._tokens[: self.n + i]), self.random
        )
        self._q.clear()
        gained = [*drafted[:accepted], token]
        end = next((i for i, token in enumerate(gained) if token in self.stops), None)
        if end is not None:  # tokens after an accepted stop token are not part of the output
            gained = gained[: end + 1]
        self._tokens[self.n : self.n + len(gained)] = gained
        self.n += len(gained)
        self.is_finished = end is not None or self.n == self.max_length
        return Step(gained, accepted, len(drafted))


def stop_ids(config: GenerationConfig, usual: frozenset[int]) -> frozenset[int]:
    """The stop tokens: those that `config` sets, else the `usual` ones."""
    if config.ignore_eos:
        return frozenset()
    named = {*config.stop_token_ids, *({config.eos_token_id} if config.eos_token_id >= 0 else ())}
    return frozenset(named) or usual


def stop_ids_of(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """The stop tokens of the model in `folder`, from its generation_config.json or its tokenizer."""
    file = Path(folder, "generation_config.json")
    named = GenerationConfig(file).stop_token_ids if file.exists() else set()
    return frozenset(named or {tokenizer.get_eos_token_id()})
