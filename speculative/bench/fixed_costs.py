"""Sources of draft tokens and draft lengths compared without the clock: texts are decoded with the models, and each
forward pass counts as many seconds as the cost model has for its size.

    engine = decoder.load(main, draft)
    forward_passes = [time_in(model) for model in engine.models]
    texts = decode_all(with_source(engine, "adaptive"), config, ids, categories, costs, forward_passes, seed=0)
    speedup = rate(texts) / rate(plain(texts, costs))

So the load of the machine, and its varying speed, change neither what a policy decides nor the result.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from openvino_genai import GenerationConfig

from speculative.bench import ratios
from speculative.bench.result import Range
from speculative.decoder import Decoder
from speculative.drafting.policy import LONGEST, Costs


class DecodedText(NamedTuple):
    """A decoded text, or several after the same prompt, without the prompt's forward pass and its token."""

    category: str
    tokens: int
    passes: int  # forward passes of the main model
    draft_passes: int
    seconds: float  # by the cost model


def decode_all(
    decoder: Decoder, config: GenerationConfig, ids: Sequence[np.ndarray], categories: Sequence[str], costs: Costs,
    forward_passes: Sequence[list[float]], seed: int, done: Callable[[], object] = lambda: None,
) -> list[DecodedText]:  # fmt: skip
    """Decode a text after each of `ids`, in random order, with what the policy learned from those before.

    `forward_passes` are lists that grow by each forward pass of the decoder's models (`harness.time_in`). `done` is
    called after each text. The same `seed` gives the same texts, in the order of `ids`.
    """
    decoder.main.pass_width = None  # of another policy
    decoder.reset(seed)
    prompts, texts = list(zip(ids, categories, strict=True)), {}
    for i in np.random.default_rng(seed).permutation(len(prompts)):
        prompt, category = prompts[i]
        texts[i] = _decode(decoder, config, prompt, category, costs, forward_passes)
        done()
    return [texts[i] for i in range(len(prompts))]


def _decode(
    decoder: Decoder, config: GenerationConfig, ids: np.ndarray, category: str, costs: Costs,
    forward_passes: Sequence[list[float]],
) -> DecodedText:  # fmt: skip
    verify, drafting = costs.verify(), costs.drafting()
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


def total(texts: Sequence[DecodedText]) -> DecodedText:
    """Several texts after the same prompt, as one."""
    counts = (sum(getattr(text, name) for text in texts) for name in ("tokens", "passes", "draft_passes", "seconds"))
    return DecodedText(texts[0].category, *counts)


def plain(texts: Sequence[DecodedText], costs: Costs) -> list[DecodedText]:
    """The same texts without a draft."""
    seconds = float(costs.verify()[costs.fastest()])  # for a token
    return [text._replace(passes=text.tokens, draft_passes=0, seconds=text.tokens * seconds) for text in texts]


def rate(texts: Sequence[DecodedText]) -> float:
    """Tokens per second."""
    return sum(text.tokens for text in texts) / sum(text.seconds for text in texts)


def interval(texts: Sequence[DecodedText], others: Sequence[DecodedText]) -> Range | None:
    """A 95 % confidence interval of the rate of `texts` relative to that of `others`, after the same prompts; None of
    fewer than two."""
    counts, seconds = (
        np.array([[getattr(text, name) for text in one] for one in (texts, others)], float)
        for name in ("tokens", "seconds")
    )
    return ratios.interval(counts, seconds)
