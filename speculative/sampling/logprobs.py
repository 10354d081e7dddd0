"""Log-probabilities of tokens: the log-softmax of a model's raw logits, before bias, penalties, grammar and
temperature, as vLLM's `raw_logprobs`."""

from typing import NamedTuple

import numpy as np

from speculative.sampling.distribution import InvalidLogits, largest


class TokenLogprobs(NamedTuple):
    """The log-probability of a token at its place, and those of the most probable tokens there."""

    logprob: float
    rank: int  # 1 for the most probable token
    top_ids: np.ndarray  # int64 [k], the most probable first
    top_logprobs: np.ndarray  # float32 [k]


def token_logprobs(logits: np.ndarray, token: int, top: int) -> TokenLogprobs:
    """The log-probabilities of `token` and of the `top` (1 or more) most probable tokens, from `logits` float32 [V].

    Raises InvalidLogits if the logits contain NaN or their maximum is infinite."""
    best = logits.max()
    if not np.isfinite(best):
        raise InvalidLogits(f"the model's highest logit is {best}, so no token has a log-probability")
    total = np.float32(best + np.log(np.exp(logits - best).sum(dtype=np.float64)))
    ids = largest(logits, top) if top < len(logits) else np.argsort(-logits, kind="stable")
    rank = 1 + int(np.count_nonzero(logits > logits[token]))
    return TokenLogprobs(float(logits[token] - total), rank, ids, logits[ids] - total)
