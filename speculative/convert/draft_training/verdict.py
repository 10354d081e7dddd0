"""Measures a draft on held-out prompts with this project's engine: acceptance by position and speed, overall and by
category, compared with other drafts."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from openvino_genai import GenerationConfig

from speculative.convert.errors import ConvertError
from speculative.decoder import Decoder, load
from speculative.drafting.suffix import LONGEST_MATCH
from speculative.models.spec import ModelSpec
from speculative.pair.check import check_pair
from speculative.sequence import metrics
from speculative.sequence.result import GenerationResult

K = 4  # draft length for acceptance by position
MODES: dict[str, dict] = {"greedy": {}, "temperature 1": {"do_sample": True, "temperature": 1.0}}
FIXED = f"fixed draft length {K}"
NEW_TOKENS = 128
WARM_UP = 8  # tokens


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
        return metrics.position_acceptance(proposed, [n for result in self.results for n in result.accepted])


def require_draft(main: Path, draft: Path) -> None:
    """Raise ConvertError unless `draft` is IR of a draft for the main model. Takes seconds."""
    if not (draft / "openvino_model.xml").is_file():
        raise ConvertError(f"{draft} holds no OpenVINO model; give the folder of an exported draft with --compare", 2)
    for finding in check_pair(main, draft).findings:
        if finding.level == "error":
            raise ConvertError(f"--compare {draft} is no draft of the main model: {finding.message}", 2)


def judge(
    main: ModelSpec,
    draft: Path,
    others: list[str],
    prompts: list[tuple[list[int], str]],
    longest: int,
    seconds: float,
    progress: Callable[[int, int], None],
) -> dict:
    """The verdict, for draft.json: of `draft`, beside the `others`. Goes through the prompts, token ids with a category
    ("": none), at least one, until they or the time are over; texts get up to `longest` tokens. Calls `progress` after
    each answer, with the number of answers to this prompt so far and in the end."""
    end = time.monotonic() + seconds
    methods: dict[str, tuple[Decoder, dict]] = {}
    for name, folder in {"": draft, **{other: Path(other) for other in others}}.items():
        decoder = load(main, ModelSpec(folder, main.device, main.properties))
        methods |= {_fixed(name): (decoder, {"num_assistant_tokens": K}), _adaptive(name): (decoder, {})}
    lookup = load(main, max_ngram_size=LONGEST_MATCH)
    alone = Decoder(lookup.main, stop_token_ids=lookup.stop_token_ids)
    methods |= {"suffix decoding": (lookup, {}), "main alone": (alone, {})}
    runs = {mode: {method: Run() for method in methods} for mode in MODES}
    categories: list[str] = []
    order = [*methods.items()]
    for decoder, length in methods.values():  # the first passes of a process are slower
        decoder.generate(prompts[0][0], GenerationConfig(max_new_tokens=WARM_UP, **length))
    for prompt, category in prompts:
        if categories and time.monotonic() > end:
            break
        order = [*order[1:], order[0]]
        answers = [(mode, *method) for mode in MODES for method in order]
        for done, (mode, method, (decoder, length)) in enumerate(answers, 1):
            config = GenerationConfig(max_new_tokens=min(NEW_TOKENS, longest - len(prompt)), **MODES[mode], **length)
            runs[mode][method].results.append(decoder.generate(prompt, config))
            progress(done, len(answers))
        categories.append(category)

    def figures(mode: str, chosen: set[str]) -> dict:
        """Of the prompts of some categories."""
        return _figures(
            {
                method: Run(
                    [result for result, category in zip(run.results, categories, strict=True) if category in chosen]
                )
                for method, run in runs[mode].items()
            },
            others,
        )

    names = dict.fromkeys(filter(None, categories))
    return {
        "held_out_prompts": len(categories),
        "compared": others,
        **{mode: figures(mode, {*categories}) for mode in MODES},
        "categories": {
            name: {"held_out_prompts": categories.count(name), **{mode: figures(mode, {name}) for mode in MODES}}
            for name in names
        },
    }


def _fixed(other: str) -> str:
    return f"--compare {other}, {FIXED}" if other else FIXED


def _adaptive(other: str) -> str:
    return f"--compare {other}" if other else "draft"


def _figures(runs: dict[str, Run], others: list[str]) -> dict:
    positions = {
        other: [round(share, 3) for share in runs[_fixed(other)].position_acceptance] for other in ("", *others)
    }
    return {
        "acceptance_by_position": positions.pop(""),
        "acceptance_by_position_of_others": positions,
        "tokens_per_main_pass": {method: round(run.tokens_per_pass, 2) for method, run in runs.items()},
        "tokens_per_second": {method: round(run.tokens_per_second, 1) for method, run in runs.items()},
    }


def lines(verdict: dict) -> list[str]:
    """The verdict in words, one line for each way to decode, and one for each category."""
    report = [f"on {_prompts(verdict['held_out_prompts'], 'held-out ')}:"]
    for mode in MODES:
        figures = verdict[mode]
        report.append(f"  {mode}: acceptance by position {_shares(figures['acceptance_by_position'])}")
        for other, shares in figures["acceptance_by_position_of_others"].items():
            report.append(f"    of {other}: {_shares(shares)}")
        width = max(map(len, figures["tokens_per_second"]))
        for method, speed in figures["tokens_per_second"].items():
            passes = figures["tokens_per_main_pass"][method]
            times = f", {_times(figures, method)}" if method != "main alone" else ""
            report.append(f"    {method:{width}} {passes:.2f} tokens per forward pass, {speed:.0f} tokens/s{times}")
        for name, part in verdict["categories"].items():
            shares = _shares(part[mode]["acceptance_by_position"])
            prompts = _prompts(part["held_out_prompts"])
            report.append(f"    {name} ({prompts}): acceptance {shares}; the draft {_times(part[mode], 'draft')}")
    return report


def _prompts(count: int, kind: str = "") -> str:
    return f"{count} {kind}prompt{'' if count == 1 else 's'}"


def _shares(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def _times(figures: dict, method: str) -> str:
    alone = figures["tokens_per_second"]["main alone"]
    return f"{figures['tokens_per_second'][method] / alone if alone else 1:.2f} times the main model alone"
