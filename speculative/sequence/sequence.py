"""Sequence state of one request: prompt, generated and draft tokens, their verification and the stop conditions.

    while not text.is_finished:
        while text.can_draft and ...:
            text.draft(source.propose(text.token_ids, text.distribution, text.random))
        step = text.verify(main.logits(text.token_ids, last=text.num_logits))

The caller chooses the models, the batch and the draft length.
"""

from typing import NamedTuple

import numpy as np

from speculative.sampling.distribution import Distribution
from speculative.sampling.logprobs import TokenLogprobs, token_logprobs
from speculative.sampling.params import SamplingParams
from speculative.sampling.proposal import Leaf, Proposal
from speculative.sampling.rejection_sampling import OneHot, Probabilities, draw, verify
from speculative.sequence.result import Step

PROMPT_LOGITS = 64  # of a prompt, in one forward pass: bounds the memory, 40 MB for a vocabulary of 150,000
MAX_FORCED = 32  # draft tokens that the grammar forces, in one forward pass


class AcceptedLeaf(NamedTuple):
    """The accepted leaf `token` at `position` in the sequence, which is number `leaf` of the leaves."""

    position: int
    token: int
    leaf: int


class Sequence:
    """A prompt (token ids int64 [n]) and its continuation according to `params`, with its own random generator.

    Raises ValueError for an empty prompt, and for token ids that the model's vocabulary of `vocab_size` does not have.
    """

    def __init__(self, prompt: np.ndarray, params: SamplingParams, vocab_size: int, random: np.random.Generator):
        if not len(prompt):
            raise ValueError("the prompt has no tokens: it needs at least one")
        if prompt.min() < 0 or prompt.max() >= vocab_size:
            raise ValueError(
                f"the prompt's token ids range from {prompt.min()} to {prompt.max()}, the model's from 0 to "
                f"{vocab_size - 1}: encode it with the model's tokenizer"
            )
        if unknown := [token for token, _ in params.logit_bias if not 0 <= token < vocab_size]:
            raise ValueError(f"logit_bias has token {unknown[0]}, but the model's token ids are 0 to {vocab_size - 1}")
        self.params = params
        self.random = random
        self.prompt_logprobs: list[TokenLogprobs] = []  # of the prompt's tokens but the first, if asked for
        self.num_prompt_tokens = self.n = len(prompt)  # n: prompt and generated tokens, without draft tokens
        self._tokens = np.empty(self.n + params.max_new_tokens, np.int64)  # prompt, generated, draft
        self._tokens[: self.n] = prompt
        self._transform = Distribution(params)
        self._grammar = self._transform.grammar
        self._q: list[Probabilities] = []  # the distributions that the draft tokens were sampled from
        self.leaves: list[Leaf] = []  # of the draft tree
        self.accepted_leaf: AcceptedLeaf | None = None  # by the last `verify`
        self.forced = 0  # draft tokens that the grammar forces
        self._max_forced = MAX_FORCED // 4  # in the next forward pass; less after one that was rejected
        self.is_finished = False
        self._vocab_size = vocab_size

    @property
    def max_length(self) -> int:
        """Longest length in tokens that this sequence can reach."""
        return len(self._tokens)

    @property
    def token_ids(self) -> np.ndarray:
        """Prompt, generated and draft tokens."""
        return self._tokens[: self.n + len(self._q)]

    @property
    def verified_ids(self) -> np.ndarray:
        """Token ids of prompt and generated tokens, without draft tokens: int64 [n]."""
        return self._tokens[: self.n]

    @property
    def drafted(self) -> int:
        """Number of draft tokens not yet verified."""
        return len(self._q)

    @property
    def num_logits(self) -> int:
        """Number of logits that `verify` needs: one after the verified tokens, one after each draft token. Those of the
        leaves follow."""
        return len(self._q) + 1

    @property
    def is_prefill(self) -> bool:
        """Whether no token is generated yet. The prefill is never combined with a draft, to keep TTFT short."""
        return self.n == self.num_prompt_tokens

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether `add_prompt_logprobs` must be called, before anything else."""
        return self.params.prompt_logprobs > 0 and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def prompt_part(self) -> tuple[np.ndarray, int]:
        """The tokens whose last logits `add_prompt_logprobs` needs, and the number of logits."""
        start = len(self.prompt_logprobs)
        end = min(start + PROMPT_LOGITS, self.num_prompt_tokens - 1)
        return self._tokens[:end], end - start

    def add_prompt_logprobs(self, logits: np.ndarray) -> None:
        """Compute log-probabilities of the prompt from its next `logits` float32 [n, V]."""
        begin = len(self.prompt_logprobs) + 1
        tokens = self._tokens[begin : begin + len(logits)].tolist()
        top = self.params.prompt_logprobs
        self.prompt_logprobs += [token_logprobs(row, token, top) for row, token in zip(logits, tokens, strict=True)]

    @property
    def can_draft(self) -> bool:
        """Whether another draft token can be useful: not if only one token may follow, nor after a stop token."""
        if self.is_prefill or len(self.token_ids) >= self.max_length - 1:
            return False
        if self._grammar:
            return not self._grammar.is_over(self._generated)
        return not (self._q and int(self.token_ids[-1]) in self.params.stop_token_ids)

    @property
    def has_grammar(self) -> bool:
        return self._grammar is not None

    @property
    def _generated(self) -> np.ndarray:
        """Generated and draft tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    def distribution(self, logits: np.ndarray, tokens: np.ndarray, targets: np.ndarray | None = None) -> Probabilities:
        """The next-token distribution after `tokens`, a prefix of this sequence, from `logits` float32 [V], or [n] if
        they are those of the tokens `targets` int64 [n], ascending, only."""
        prompt, generated = tokens[: self.num_prompt_tokens], tokens[self.num_prompt_tokens :]
        return self._transform(logits, prompt, generated, targets, self._vocab_size)

    def if_allowed(self, proposal: Proposal | None) -> Proposal | None:
        """The proposal of the next token, None if the grammar forbids it."""
        if proposal and self._grammar and not self._grammar.allows(self._generated, proposal.token):
            return None
        return proposal

    def draft(self, proposal: Proposal) -> None:
        """Append a draft token. Every draft token must be verified, or the output is not lossless."""
        self._tokens[self.n + len(self._q)] = proposal.token
        self._q.append(proposal.q)

    @property
    def supports_leaves(self) -> bool:
        """Whether the draft may have leaves: not with a grammar, whose masks for them would take time."""
        return self._grammar is None

    def draft_leaves(self, leaves: list[Leaf]) -> None:
        """Add alternatives to the draft tokens. They must not depend on what `verify` will draw."""
        self.leaves = [leaf for leaf in leaves if leaf.token not in self.params.stop_token_ids]

    @property
    def leaf_positions(self) -> list[tuple[int, int]]:
        """The leaves with their places in `token_ids`."""
        return [(self.n + leaf.position, leaf.token) for leaf in self.leaves]

    def draft_forced(self) -> bool:
        """Draft the tokens whose bytes the grammar forces. Returns whether there are any. They are verified as any
        others, as the main model may prefer other tokens with these bytes."""
        count = self.drafted
        most = self._max_forced - self.forced if self._grammar and self.can_draft else 0
        for token in self._grammar.forced(self._generated, most) if self._grammar and most > 0 else ():
            if not self.can_draft:
                break
            self.draft(Proposal(token, OneHot(token, self._vocab_size), lambda: 1.0))
            self.forced += 1
        return self.drafted > count

    def compute_masks(self) -> None:
        """Compute which tokens the grammar allows wherever `verify` may ask, so that it need not."""
        if self._grammar:
            for end in range(self.n, self.n + self.num_logits):
                self._grammar.mask(self._tokens[self.num_prompt_tokens : end])

    def drop_draft(self) -> None:
        """Discard all draft tokens, after the main model has failed."""
        self._q.clear()
        self.leaves = []
        self.forced = 0

    def verify(self, logits: np.ndarray) -> Step:
        """Append the accepted draft tokens and the recovered or bonus token, after a leaf also the next one.

        `logits` are the last `num_logits`, then those of the leaves.
        """
        drafted = self._tokens[self.n : self.n + len(self._q)].tolist()
        accepted, token = verify(
            drafted, self._q, lambda i: self.distribution(logits[i], self._tokens[: self.n + i]), self.random
        )
        new_tokens = [*drafted[:accepted], token]
        rows, leaves = list(range(accepted + 1)), len(self.leaves)  # rows: of the logits that gave the new tokens
        self.accepted_leaf = None
        if (leaf := Leaf(accepted, token)) in self.leaves:
            leaf_index, position = self.leaves.index(leaf), self.n + accepted
            self.accepted_leaf = AcceptedLeaf(position, token, leaf_index)
            self._tokens[position] = token
            rows.append(len(drafted) + 1 + leaf_index)
            new_tokens.append(draw(self.distribution(logits[rows[-1]], self._tokens[: position + 1]), self.random))
            accepted += 1
        larger, smaller = min(2 * self._max_forced, MAX_FORCED), min(accepted + 3, self._max_forced)
        self._max_forced = smaller if self.forced and accepted < len(drafted) else larger
        self.drop_draft()
        if (
            self._grammar
            and accepted
            and self._grammar.is_over(self._tokens[self.num_prompt_tokens : self.n + accepted])
        ):
            new_tokens = drafted[:accepted]  # nothing follows
        end = next((i for i, token in enumerate(new_tokens) if token in self.params.stop_token_ids), None)
        if end is not None:  # tokens after an accepted stop token are not part of the output
            new_tokens = new_tokens[: end + 1]
        self._tokens[self.n : self.n + len(new_tokens)] = new_tokens
        self.n += len(new_tokens)
        is_complete = end is None and self._grammar is not None and self._grammar.is_over(self._generated)
        if self._grammar:
            self._grammar.forget(before=self.n - self.num_prompt_tokens)
        self.is_finished = end is not None or is_complete or self.n == self.max_length
        logprobs: tuple[TokenLogprobs, ...] = ()
        if top := self.params.logprobs:
            logprobs = tuple(
                token_logprobs(logits[row], token, top) for row, token in zip(rows, new_tokens, strict=False)
            )
        return Step(new_tokens, accepted, len(drafted), is_complete, logprobs, leaves, self.accepted_leaf is not None)
