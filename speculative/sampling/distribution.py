"""Logits processing: the distribution of the next token, with the rules of OpenVINO GenAI's sampler.

Settings have the names and the meaning of `openvino_genai.GenerationConfig`. The meaning was verified against samples
of GenAI 2026.4.1 (tests/speculative/sampling/test_distribution.py). They apply in this order:

0. `logit_bias` is added to the logits, as in OpenAI's API; GenAI has no such option.
1. `min_new_tokens`: stop tokens have probability 0 until that many tokens are generated.
2. `repetition_penalty` divides positive logits of tokens in prompt or output and multiplies negative ones: both sink.
3. `presence_penalty` (once) and `frequency_penalty` (times the count) move the logits of generated tokens, not of
   prompt tokens, towards 0 and past it. So negative logits rise: GenAI "reduces the absolute log prob". OpenAI's API
   and other tools subtract, as `subtract_penalties` does.
4. Tokens that the grammar of `structured_output_config` forbids have probability 0; stop tokens, unless it may end.
5. `top_k` keeps the k largest logits; the softmax of logits / `temperature` is taken over these.
6. `min_p` keeps tokens with at least that share of the largest probability.
7. `top_p` keeps the smallest set of most probable tokens whose sum exceeds top_p of the sum in step 5.

Main and draft use the same transform, so speculative decoding is lossless for the transformed main model.
"""

from math import isfinite

import numpy as np

from speculative.sampling.grammar import NothingAllowed
from speculative.sampling.params import SamplingParams
from speculative.sampling.rejection_sampling import OneHot, Probabilities, Sparse

FEW = 64  # most probable tokens among which `nucleus` looks first


class InvalidLogits(RuntimeError):
    """The model's logits contain NaN, or their maximum is infinite."""


class Distribution:
    """Maps logits to probabilities according to `params`; `greedy` is True if one token has probability 1."""

    def __init__(self, params: SamplingParams):
        self.greedy = params.greedy
        self._params = params
        self._biased = np.array([token for token, _ in params.logit_bias], np.int64)
        self._bias = np.array([bias for _, bias in params.logit_bias], np.float32)
        self._stop_token_ids = sorted(params.all_stop_token_ids)
        stop = params.stop_token_ids
        self.grammar = params.grammar.state(stop, params.all_stop_token_ids) if params.grammar else None

    def __call__(
        self,
        logits: np.ndarray,
        prompt: np.ndarray,
        generated: np.ndarray,
        targets: np.ndarray | None = None,
        size: int = 0,
    ) -> Probabilities:
        """Return the probabilities float32 [V] of the token that follows `prompt` and `generated` (token ids, int64).

        `logits` float32 [V] are not modified. With `targets` int64 [n], ascending, there are logits for these of all
        `size` tokens only, float32 [n]; the others have probability 0. Raises InvalidLogits if logits contain NaN
        or their maximum is infinite, and NothingAllowed if the grammar allows no token that has a logit. After the end
        of the text, all are allowed.
        """
        params = self._params
        needs_processing = self._needs_processing(generated)
        if targets is not None and (self.grammar or needs_processing):
            logits, targets = _scatter(logits, targets, size, -np.inf), None
        if needs_processing:
            logits = self._processed(logits, prompt, generated)
        size, mask = size or len(logits), self.grammar.mask(generated) if self.grammar else None
        allowed = mask.ids if mask and mask.are_allowed else None
        if allowed is not None:
            logits = logits[allowed]
        elif mask:
            logits = logits.copy()
            logits[mask.ids] = -np.inf
        best = int(logits.argmax()) if len(logits) else 0
        if mask and (not len(logits) or logits[best] == -np.inf):
            raise NothingAllowed("no token of the model can continue the text as the grammar demands")
        if not isfinite(logits[best]):  # argmax returns the first NaN, if any
            raise InvalidLogits(
                f"the model's highest logit is {logits[best]}: run it with INFERENCE_PRECISION_HINT=f32, or check it"
            )
        if self.greedy:
            ids = targets if allowed is None else allowed
            return OneHot(best if ids is None else int(ids[best]), size)

        kept = np.sort(largest(logits, params.top_k)) if 0 < params.top_k < len(logits) else None
        weights = (logits if kept is None else logits[kept]) - logits[best]
        if params.temperature != 1:
            weights *= np.float32(1 / params.temperature)
        np.exp(weights, out=weights)  # unnormalized softmax; the largest is 1
        total = weights.sum()
        mass = params.top_p * total
        if params.min_p > 0:
            likely = np.flatnonzero(weights >= params.min_p)
            kept, weights = likely if kept is None else kept[likely], weights[likely]
        if params.top_p < 1:
            inside = nucleus(weights, mass)
            kept, weights = inside if kept is None else kept[inside], weights[inside]
        weights /= weights.sum() if params.min_p > 0 or params.top_p < 1 else total
        for ids in (allowed, targets):
            if ids is not None:
                kept = ids if kept is None else ids[kept]
        return weights if kept is None else Sparse(kept, weights, size)

    def _needs_processing(self, generated: np.ndarray) -> bool:
        """Whether steps 0 to 3 change anything."""
        params = self._params
        has_penalties = params.presence_penalty != 0 or params.frequency_penalty != 0
        too_short = len(generated) < params.min_new_tokens
        return (
            too_short
            or (has_penalties and len(generated) > 0)
            or params.repetition_penalty != 1
            or len(self._biased) > 0
        )

    def _processed(self, logits: np.ndarray, prompt: np.ndarray, generated: np.ndarray) -> np.ndarray:
        params = self._params
        too_short = len(generated) < params.min_new_tokens
        applies_penalties = len(generated) and (params.presence_penalty != 0 or params.frequency_penalty != 0)
        logits = logits.copy()
        logits[self._biased] += self._bias
        if too_short:
            logits[[token for token in self._stop_token_ids if token < len(logits)]] = -np.inf
        if params.repetition_penalty != 1:
            tokens_seen = np.concatenate((prompt, generated))
            values = logits[tokens_seen]
            logits[tokens_seen] = np.where(
                values < 0, values * params.repetition_penalty, values / params.repetition_penalty
            )
        if applies_penalties:
            tokens, times = np.unique(generated, return_counts=True)
            values = logits[tokens]
            for penalty in (params.presence_penalty, params.frequency_penalty * times):
                values -= np.where((values < 0) & (not params.subtract_penalties), -penalty, penalty)
            logits[tokens] = values
        return logits


def largest(logits: np.ndarray, k: int) -> np.ndarray:
    """Return the token ids of the k largest of `logits` [V], largest first, ties to the lower id. k must be below V.

    The k-th largest logit is never below the k-th largest block maximum, so only a few logits need sorting.
    """
    block = max(1, len(logits) // (8 * k))
    maxima = np.maximum.reduceat(logits, np.arange(0, len(logits), block))
    candidates = np.flatnonzero(logits >= np.partition(maxima, -k)[-k])
    return candidates[np.argsort(-logits[candidates], kind="stable")[:k]]


def nucleus(weights: np.ndarray, mass: float) -> np.ndarray:
    """Return the token ids, ascending, of the fewest largest `weights` [V] whose sum exceeds `mass`, or all; ties to
    the lower id.

    `weights` are float32, not negative. Holtzman et al. 2020 (arXiv 1904.09751), section 3.1, without sorting the
    vocabulary: mostly, a few of the largest suffice. Otherwise, weights below (sum - mass) / V cannot be in the
    nucleus. Of the others, only those within 1 % of its smallest are sorted. Sums of weights with the same exponent and
    first 7 mantissa bits find these.
    """
    if len(weights) > FEW:
        few = largest(weights, FEW)
        count = int(weights[few].cumsum(dtype=np.float64).searchsorted(mass, side="right")) + 1
        if count <= FEW:
            return np.sort(few[:count])
    rest = weights.sum() - mass
    if rest <= 0:
        return np.arange(len(weights))
    head = weights.compress(weights >= rest / len(weights))
    bucket = (head.view(np.int32) >> 16).astype(np.intp)
    bucket = bucket.max() - bucket  # 0 holds the largest
    reached = np.bincount(bucket, weights=head).cumsum()
    last = min(int(reached.searchsorted(mass, side="right")), len(reached) - 1)
    before = reached[last - 1] if last else 0.0

    edges = head.compress(bucket == last)
    edges[::-1].sort()
    index = min(int(edges.cumsum(dtype=np.float64).searchsorted(mass - before, side="right")), len(edges) - 1)
    inside = weights >= edges[index]
    surplus = np.count_nonzero(inside) - np.count_nonzero(bucket < last) - (index + 1)
    if surplus:
        inside[np.flatnonzero(weights == edges[index])[-surplus:]] = False
    return np.flatnonzero(inside)


def _scatter(values: np.ndarray, tokens: np.ndarray, size: int, others: float = 0.0) -> np.ndarray:
    full = np.full(size, others, np.float32)
    full[tokens] = values
    return full
