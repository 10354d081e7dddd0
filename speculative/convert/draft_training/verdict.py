"""Measures a draft on held-out prompts through this project's engine: acceptance by position, and speed."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from openvino_genai import GenerationConfig

from speculative.decoder import Decoder, load
from speculative.models.spec import ModelSpec
from speculative.sequence import metrics
from speculative.sequence.result import GenerationResult

K = 4  # draft length for acceptance by position
MODES: dict[str, dict] = {"greedy": {}, "temperature 1": {"do_sample": True, "temperature": 1.0}}
FIXED = f"fixed draft length {K}"
NGRAM = 3
NEW_TOKENS = 128


@dataclass
class Run:
    """Results of one way to decode, over all prompts."""

    results: list[GenerationResult] = field(default_factory=list)

    @property
    def tokens_per_pass(self) -> float:
        """Tokens of a forward pass of the main model."""
        return metrics.block_efficiency([n for result in self.results for n in result.gained]) or 1.0

    @property
    def tokens_per_second(self) -> float:
        seconds = sum(result.decode_seconds for result in self.results)
        return sum(len(result.tokens) - 1 for result in self.results) / seconds if seconds else 0.0

    @property
    def position_acceptance(self) -> list[float]:
        proposed = [n for result in self.results for n in result.proposed]
        return metrics.position_acceptance(proposed, [n + 1 for result in self.results for n in result.accepted])


def judge(
    main: ModelSpec, draft: Path, prompts: list[list[int]], longest: int, seconds: float, progress: Callable[[], None]
) -> dict:
    """The verdict, for draft.json. Goes through the prompts, at least one, until they or the time are over; texts get
    up to `longest` tokens. Calls `progress` after each."""
    end = time.monotonic() + seconds
    with_draft = load(main, ModelSpec(draft, main.device, main.properties))
    lookup = load(main, max_ngram_size=NGRAM)
    alone = Decoder(lookup.main, stop_token_ids=lookup.stop_token_ids)
    ways: dict[str, tuple[Decoder, dict]] = {
        FIXED: (with_draft, {"num_assistant_tokens": K}),
        "draft": (with_draft, {}),
        "prompt lookup": (lookup, {}),
        "main alone": (alone, {}),
    }
    runs = {mode: {way: Run() for way in ways} for mode in MODES}
    done = 0
    for prompt in prompts:
        if done and time.monotonic() > end:
            break
        for mode, options in MODES.items():
            for way, (decoder, length) in ways.items():
                config = GenerationConfig(max_new_tokens=min(NEW_TOKENS, longest - len(prompt)), **options, **length)
                runs[mode][way].results.append(decoder.generate(prompt, config))
        done += 1
        progress()
    return {"held_out_prompts": done, **{mode: _figures(runs[mode]) for mode in MODES}}


def _figures(runs: dict[str, Run]) -> dict:
    return {
        "acceptance_by_position": [round(share, 3) for share in runs[FIXED].position_acceptance],
        "tokens_per_main_pass": {way: round(run.tokens_per_pass, 2) for way, run in runs.items()},
        "tokens_per_second": {way: round(run.tokens_per_second, 1) for way, run in runs.items()},
    }


def lines(verdict: dict) -> list[str]:
    """The verdict in words, one line for each way to decode."""
    said = [f"on {verdict['held_out_prompts']} held-out prompts:"]
    for mode in MODES:
        figures = verdict[mode]
        positions = ", ".join(f"{share:.2f}" for share in figures["acceptance_by_position"])
        said.append(f"  {mode}: acceptance by position {positions}")
        alone = figures["tokens_per_second"]["main alone"]
        for way, speed in figures["tokens_per_second"].items():
            passes = figures["tokens_per_main_pass"][way]
            times = f", {speed / alone:.2f} times the main model alone" if alone and way != "main alone" else ""
            said.append(f"    {way:21} {passes:.2f} tokens per main pass, {speed:.0f} tokens/s{times}")
    return said
