"""Output quality of a property set: token-by-token comparison with the main model's greedy text in f32.

The reference is the main model alone with EXECUTION_MODE_HINT=ACCURACY: its greedy text and logits. The model under
test reads that text in forward passes over a few tokens, as in verification, and its logits are compared:

- agreement: share of positions where its most likely token is the reference's;
- near-tie or real: at the other positions, the reference's preference for its own token (logit margin, in nats). Up to
  NEAR_TIE the exact model rated both tokens about equal; beyond that the text really differs;
- mean KL: divergence of its distribution from the reference's, in nats per token.

Grades: "exact" (same tokens), "near-ties" (no real difference), "slight" (real differences within the limits below),
"loss". Draft and draft length do not affect the grade, since the main model verifies every token.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from speculative.bench.result import QualityFigures
from speculative.models.cached_model import CachedModel

NEAR_TIE = 0.5  # nats: the other token was at least 0.6 times as likely
MAX_REAL_DIFFERENCES = 0.01  # largest share of real differences graded "slight"
MAX_KL = 0.01  # nats per token, likewise; bf16 with quantized activations has about 0.0005
TOKENS_PER_PASS = 5  # tokens per forward pass, as with K = 4
KEPT_TOKENS = 1024  # likeliest tokens whose probabilities a reference keeps
MIN_PROBABILITY = 1e-9  # combined probability of the other tokens below which it is rounding error
GRADES = ("exact", "near-ties", "slight", "loss")


@dataclass
class ReferenceText:
    """One greedy text in f32: prompt token ids [p], new tokens [n], and for each new token the KEPT likeliest tokens
    [n, k], likeliest first, with their log probabilities [n, k]. Of the other tokens only the total probability is
    known: full logits of eight texts would take hundreds of megabytes with a large vocabulary."""

    prompt: np.ndarray
    tokens: np.ndarray
    likeliest: np.ndarray
    log_probabilities: np.ndarray

    @classmethod
    def of(cls, prompt: np.ndarray, tokens: np.ndarray, logits: Iterable[np.ndarray]) -> "ReferenceText":
        """`logits` yields one row [V] per new token."""
        return cls(prompt, np.asarray(tokens), *map(np.array, zip(*map(_likeliest, logits), strict=True)))

    def margin(self, position: int, token: int) -> float:
        """Log-probability margin, in nats, of the reference's own token at `position` over `token`; a lower bound if
        `token` is not among the KEPT likeliest."""
        positions = np.flatnonzero(self.likeliest[position] == token)
        row = self.log_probabilities[position]
        return float(row[0] - row[positions[0] if len(positions) else -1])


@dataclass
class Quality:
    """The quality of a property set, compared at `tokens` positions."""

    tokens: int
    margins: list[float]  # at the positions where it prefers another token
    mean_kl: float

    @property
    def agreement(self) -> float:
        return 1 - len(self.margins) / self.tokens

    @property
    def real(self) -> int:
        """Number of differences that are not near-ties."""
        return sum(margin > NEAR_TIE for margin in self.margins)

    @property
    def grade(self) -> str:
        if self.mean_kl > MAX_KL or self.real > MAX_REAL_DIFFERENCES * self.tokens:
            return "loss"
        return "slight" if self.real else "near-ties" if self.margins else "exact"

    def fits(self, default: "Quality | None" = None) -> bool:
        """Whether it may be recommended: within the limits, or no worse than OpenVINO's own default for this model."""
        if self.grade != "loss":
            return True
        return default is not None and self.mean_kl <= default.mean_kl and self.real <= default.real

    def figures(self) -> QualityFigures:
        return {
            "agreement": self.agreement,
            "near_ties": len(self.margins) - self.real,
            "real_differences": self.real,
            "mean_kl": self.mean_kl,
            "grade": self.grade,
        }

    def __str__(self) -> str:
        differences = len(self.margins)
        if not differences:
            return f"all {self.tokens} tokens match f32, mean KL {self.mean_kl:.5f}"
        kind = "all near-ties" if not self.real else f"{self.real} of them real, up to {max(self.margins):.1f} nats"
        return f"{differences} of {self.tokens} tokens differ from f32 ({kind}), mean KL {self.mean_kl:.5f}"


def reference_text(model: CachedModel, prompt: np.ndarray, new_tokens: int) -> ReferenceText:
    """Decode greedily, ignoring EOS. `model` is the main model in f32 (EXECUTION_MODE_HINT=ACCURACY)."""
    text, rows = prompt, []
    for _ in range(new_tokens):
        logits = model.logits(text)[0]
        rows.append(_likeliest(logits))
        text = np.append(text, logits.argmax())
    return ReferenceText(prompt, text[len(prompt) :], *map(np.array, zip(*rows, strict=True)))


def judge(model: CachedModel, references: list[ReferenceText]) -> Quality:
    """Run the main model with other properties over the reference texts and compare its logits."""
    margins, divergences = [], []
    for reference in references:
        text = np.concatenate([reference.prompt, reference.tokens])
        before, n = len(reference.prompt), len(reference.tokens)
        for begin in range(0, n, TOKENS_PER_PASS):
            end = min(begin + TOKENS_PER_PASS, n)
            logits = model.logits(text[: before + end - 1], last=end - begin)
            divergences += _divergence(reference, slice(begin, end), logits).tolist()
            for position, token in enumerate(logits.argmax(axis=1).tolist(), start=begin):
                if token != reference.tokens[position]:
                    margins.append(reference.margin(position, token))
    return Quality(len(divergences), margins, float(np.mean(divergences)))


def first_difference(reference: ReferenceText, tokens: list[int]) -> tuple[int, float] | None:
    """Position and margin of the first difference from the reference; later tokens are not comparable."""
    for position, (theirs, ours) in enumerate(zip(reference.tokens.tolist(), tokens, strict=False)):
        if theirs != ours:
            return position, reference.margin(position, ours)
    return None


def _likeliest(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The (at most KEPT) likeliest tokens of logits [V], likeliest first, and their log probabilities."""
    log_probabilities = _log_softmax(logits[None])[0]
    kept = min(KEPT_TOKENS, len(logits))
    tokens = np.argpartition(-log_probabilities, kept - 1)[:kept]
    tokens = tokens[np.argsort(-log_probabilities[tokens], kind="stable")]
    return tokens.astype(np.int32), log_probabilities[tokens]


def _divergence(reference: ReferenceText, positions: slice, logits: np.ndarray) -> np.ndarray:
    """KL(reference || other) in nats at these positions, given the other's `logits` [n, V]: the likeliest tokens
    individually, all others as one. This is a lower bound on the full KL; the gap is the divergence within the others,
    which have hardly any probability."""
    p = reference.log_probabilities[positions]
    q = np.take_along_axis(_log_softmax(logits), reference.likeliest[positions], axis=1)
    listed = (np.exp(p) * (p - q)).sum(axis=1)
    p_others, q_others = (np.clip(1 - np.exp(one).sum(axis=1), MIN_PROBABILITY, 1) for one in (p, q))
    return listed + p_others * np.log(p_others / q_others)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
