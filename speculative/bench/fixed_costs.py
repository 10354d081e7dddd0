"""Sources of draft tokens and draft lengths compared without the clock: texts are decoded with the models, and each
forward pass counts as many seconds as the cost model has for its size.

    engine = decoder.load(main, draft)
    forward_passes = [time_in(model) for model in engine.models]
    texts = decode_all(with_source(engine, "adaptive"), config, ids, categories, costs, forward_passes, seed=0)
    speedup(texts, costs)

So the load of the machine, and its varying speed, change neither what a policy decides nor the result.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from openvino_genai import GenerationConfig

from speculative.bench.result import Range
from speculative.decoder import Decoder
from speculative.drafting.policy import LONGEST, Costs

RESAMPLES = 2000  # of the texts, for a confidence interval
MIDDLE = (2.5, 97.5)  # percentiles of a 95 % confidence interval


class DecodedText(NamedTuple):
    """A decoded text, without the prompt's forward pass and its token."""

    category: str
    tokens: int
    passes: int  # forward passes of the main model
    draft_passes: int
    seconds: float  # by the cost model


def decode_all(
    decoder: Decoder, config: GenerationConfig, ids: Sequence[np.ndarray], categories: Sequence[str], costs: Costs,
    forward_passes: Sequence[list[float]], seed: int, done: Callable[[], object] = lambda: None,
) -> list[DecodedText]:  # fmt: skip
    """Decode a text after each of `ids`, one after another, with what the policy learned from those before.

    `forward_passes` are lists that grow by each forward pass of the decoder's models (`harness.time_in`). `done` is
    called after each text. The same `seed` gives the same texts.
    """
    decoder.main.pass_width = None  # of another policy
    decoder.reset(seed)
    texts = []
    for prompt, category in zip(ids, categories, strict=True):
        texts.append(_decode(decoder, config, prompt, category, costs, forward_passes))
        done()
    return texts


def _decode(
    decoder: Decoder, config: GenerationConfig, ids: np.ndarray, category: str, costs: Costs,
    forward_passes: Sequence[list[float]],
) -> DecodedText:  # fmt: skip
    verify, drafting = costs.verify(), np.append(costs.drafting(), np.inf)
    tokens = passes = draft_passes = last = 0
    seconds = 0.0
    for i, step in enumerate(decoder.stream(ids, config)):
        steps = sum(map(len, forward_passes[1:]))
        for of_model in forward_passes:
            of_model.clear()
        if i == 0:
            continue
        width = decoder.main.pass_width
        size = min(width.last if width and width.last else step.proposed + step.leaves + 1, LONGEST + 1)
        seconds += float(verify[size] + drafting[min(steps, LONGEST)])
        seconds += costs.main_change * (size != last and last > 0)  # the first pass after a prompt changes in any case
        last = size
        tokens, passes, draft_passes = tokens + len(step.tokens), passes + 1, draft_passes + steps
    return DecodedText(category, tokens, passes, draft_passes, seconds)


def speedup(texts: Sequence[DecodedText], costs: Costs) -> float:
    """Tokens per second relative to plain decoding."""
    seconds = sum(text.seconds for text in texts)
    return sum(text.tokens for text in texts) * plain_seconds(costs) / seconds if seconds else 1.0


def plain_seconds(costs: Costs) -> float:
    """Seconds for a token of plain decoding."""
    return float(costs.verify()[costs.fastest()])


def interval(
    texts: Sequence[DecodedText], others: Sequence[DecodedText] | None = None, seed: int = 0
) -> tuple[float, Range]:
    """The tokens per second of `texts`, relative to those of `others` after the same prompts if given, and a 95 %
    confidence interval: the bootstrap over texts (Efron 1979)."""
    both = [_sums(texts), _sums(others)] if others else [_sums(texts)]
    chosen = np.random.default_rng(seed).integers(len(texts), size=(RESAMPLES, len(texts)))
    rates, resampled = [], []
    for tokens, seconds in both:
        rates.append(tokens.sum() / seconds.sum())
        resampled.append(tokens[chosen].sum(axis=1) / seconds[chosen].sum(axis=1))
    if others:
        rates, resampled = [rates[0] / rates[1]], [resampled[0] / resampled[1]]
    low, high = np.percentile(resampled[0], MIDDLE).tolist()
    return float(rates[0]), [low, high]


def _sums(texts: Sequence[DecodedText]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([text.tokens for text in texts], float), np.array([text.seconds for text in texts])
