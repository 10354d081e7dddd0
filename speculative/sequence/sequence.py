"""The text of one request as it grows: what was drafted, what the main model makes of it, where it ends.

    while not text.is_finished:
        while text.can_draft and ...:
            text.draft(source.propose(text.token_ids, text.distribution, text.random))
        step = text.verify(main.logits(text.token_ids, last=text.num_logits))

Which models, how many texts at a time and how long a draft should be are the caller's business.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from openvino_genai import GenerationConfig, Tokenizer

from speculative.drafting.proposers import Proposal
from speculative.sampling.distribution import Distribution, check_supported
from speculative.sampling.rejection_sampling import OneHot, verify
from speculative.sequence.result import Step

UNSET = GenerationConfig().max_new_tokens


@dataclass(frozen=True)
class ModelLimits:
    """What is the same for all texts of a model."""

    width: int  # tokens it knows
    capacity: int  # longest text, in tokens
    stop_token_ids: frozenset[int] = frozenset()  # where a GenerationConfig names none
    subtract_penalties: bool = False  # as `Distribution` has it


class Sequence:
    """A prompt (token ids int64 [n]) and what is generated behind it, as `config` says, with its own random numbers.

    Raises ValueError for a prompt that is empty or too long and for a config that asks for what speculative decoding of
    one text cannot do.
    """

    def __init__(self, prompt: np.ndarray, config: GenerationConfig, limits: ModelLimits, random: np.random.Generator):
        check_supported(config)
        if not len(prompt):
            raise ValueError("the prompt has no tokens: give some text to go on from")
        if prompt.min() < 0 or prompt.max() >= limits.width:
            raise ValueError(
                f"the prompt's token ids go from {prompt.min()} to {prompt.max()}, the model knows 0 to "
                f"{limits.width - 1}: encode it with the model's tokenizer"
            )
        room = limits.capacity - len(prompt)
        if room < 1:
            raise ValueError(f"the prompt has {len(prompt)} tokens and the context room for {limits.capacity - 1}")
        asked = config.max_new_tokens  # which goes before max_length, as in GenAI
        if asked == UNSET:
            asked = config.max_length - len(prompt)
        if asked < 1:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens and max_length is {config.max_length}: nothing may follow; raise "
                "it, or say max_new_tokens"
            )
        self.random = random
        self.stops = stop_ids(config, limits.stop_token_ids)
        self.num_prompt_tokens = self.n = len(prompt)  # n: of prompt and generated tokens, without drafted ones
        self._tokens = np.empty(self.n + min(asked, room), np.int64)  # prompt, generated, drafted
        self._tokens[: self.n] = prompt
        self._transform = Distribution(config, limits.stop_token_ids, limits.subtract_penalties)
        self._q: list[np.ndarray | OneHot] = []  # what the drafted tokens were drawn from
        self.is_finished = False

    @property
    def max_length(self) -> int:
        """Tokens of the longest text this can become."""
        return len(self._tokens)

    @property
    def token_ids(self) -> np.ndarray:
        """Prompt, generated and drafted tokens."""
        return self._tokens[: self.n + len(self._q)]

    @property
    def drafted(self) -> int:
        """Tokens drafted and not yet verified."""
        return len(self._q)

    @property
    def num_logits(self) -> int:
        """Logits that `verify` needs: after the text, and after each drafted token."""
        return len(self._q) + 1

    @property
    def is_prefill(self) -> bool:
        """Nothing generated yet. The prompt's inference comes alone, so that the first token is soon there."""
        return self.n == self.num_prompt_tokens

    @property
    def can_draft(self) -> bool:
        """Whether one more draft token could be of use: not behind the last but one, nor behind an end."""
        if self.is_prefill or len(self.token_ids) >= self.max_length - 1:
            return False
        return not (self._q and int(self.token_ids[-1]) in self.stops)

    def distribution(self, logits: np.ndarray, tokens: np.ndarray) -> np.ndarray | OneHot:
        """What follows `tokens`, a beginning of this text: `logits` float32 [V] as the config has them."""
        return self._transform(logits, tokens[: self.num_prompt_tokens], tokens[self.num_prompt_tokens :])

    def draft(self, proposal: Proposal) -> None:
        """Put a draft token behind the text. It has to be verified, or the text is no longer the main model's."""
        self._tokens[self.n + len(self._q)] = proposal.token
        self._q.append(proposal.q)

    def drop_draft(self) -> None:
        """Where the main model failed, whatever was drafted."""
        self._q.clear()

    def verify(self, logits: np.ndarray) -> Step:
        """Take what the main model accepts, and its own token behind; `logits` are its last `num_logits` ones."""
        drafted = self._tokens[self.n : self.n + len(self._q)].tolist()
        accepted, token = verify(
            drafted, self._q, lambda i: self.distribution(logits[i], self._tokens[: self.n + i]), self.random
        )
        self._q.clear()
        gained = [*drafted[:accepted], token]
        end = next((i for i, token in enumerate(gained) if token in self.stops), None)
        if end is not None:  # the main model's own token behind an accepted end is not part of the text
            gained = gained[: end + 1]
        self._tokens[self.n : self.n + len(gained)] = gained
        self.n += len(gained)
        self.is_finished = end is not None or self.n == self.max_length
        return Step(gained, accepted, len(drafted))


def stop_ids(config: GenerationConfig, usual: frozenset[int]) -> frozenset[int]:
    """The tokens that end a text: those that `config` names, else the `usual` ones."""
    if config.ignore_eos:
        return frozenset()
    named = {*config.stop_token_ids, *({config.eos_token_id} if config.eos_token_id >= 0 else ())}
    return frozenset(named) or usual


def stop_ids_of(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that end a text of the model in `folder`, as its generation_config.json or its tokenizer says."""
    file = Path(folder, "generation_config.json")
    named = GenerationConfig(file).stop_token_ids if file.exists() else set()
    return frozenset(named or {tokenizer.get_eos_token_id()})
