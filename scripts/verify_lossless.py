"""Verify that speculative decoding with a pair is lossless, in this project's engine and in GenAI's pipeline.

    python scripts/verify_lossless.py models/embedded/main models/embedded/draft

Greedy: every path's tokens are compared with those of the main model alone in GenAI (or, if that fails, in this
project's engine) for each prompt. The first difference is shown with its logit margin: a near-tie, decided by rounding,
or a real difference. Without either reference nothing is compared, which counts as a failure.

Sampled: many samples of the first tokens after the first prompt are compared with their exact joint distribution,
computed from the main model's logits. The table shows the total-variation distance (TV; 0: identical, 1: disjoint), its
noise (the expected TV of exact samples at this sample size) and p, the p-value of the test. No number of samples proves
that there is no difference: `finds` is the TV detected with 90 % power at this sample size, however it is spread over
the cells; a cell is a token sequence, or many rare ones together. More samples (`--draws 20000`) detect smaller
differences. The defaults are 3,000 for this project's engine and 300 for GenAI, whose defect is large.

Crashes of requests are counted. GenAI's pipeline is reloaded after a crash, as it otherwise continues without drafting;
after 5 crashes the path ends. Everything runs in execution mode ACCURACY unless `--property` is given: in the default
mode, the rounding of u8 caches and quantized activations depends on the number of tokens in a forward pass. Output:
tables, then one JSON object on the last line. Exit status: 0 if the engine's paths pass, 1 if one does not (with
`--strict`: or one of GenAI's), 2 for bad usage.
"""

from speculative.cli.program import exit_on, prepare_output

import argparse
import json
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import openvino as ov
import openvino_genai
from openvino_genai import GenerationConfig

from speculative import decoder
from speculative.bench import genai
from speculative.bench.prompts import read_prompts
from speculative.bench.result import ComparedRow, GreedyRow, SampledRow
from speculative.cli.arguments import above_zero, lengths, model_specs, refuse_missing_devices, refuse_unsound, whole
from speculative.cli.progress import tqdm
from speculative.cli.properties import PROPERTY
from speculative.decoder import Decoder
from speculative.drafting.policy import LONGEST
from speculative.drafting.proposers import NgramProposer
from speculative.models.cached_model import CachedModel
from speculative.models.cores import usable_cores
from speculative.models.spec import ModelSpec
from speculative.sampling import lossless_check
from speculative.sampling.params import SamplingParams

PROMPTS = (
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return",
    "def read_notes(path):",
    "Count the words of a text.",
)
EXACT = {"EXECUTION_MODE_HINT": "ACCURACY"}  # f32 inference and KV cache, no quantized activations
GREEDY_K, SAMPLED_K = [1, 4, 8], [2]
NGRAM = 3  # maximum n-gram length of prompt lookup
CONFIDENCE = 0.4  # draft confidence threshold of the path that uses one
FINEST = 0.002  # minimum probability of a sequence to be counted separately
ALPHA = 1e-4  # p-value below which samples are called wrong: one false alarm in 10,000 paths
POWER = 0.9  # probability of detecting the reported distance
DRAWS, GENAI_DRAWS = 3_000, 300  # samples per path of our engine and of GenAI
NEAR_TIE = 0.03  # fraction of the logits' standard deviation by which rounding in a u8 cache may change them
MOST_CRASHES = 5  # per path
FEWEST_DRAWS = 100  # with fewer, even GenAI's defect may go undetected


class Draw(NamedTuple):
    """The new tokens of one request, and the numbers of proposed and accepted draft tokens, if known."""

    tokens: list[int]
    proposed: int = 0
    accepted: int = 0


class NativeRunner:
    """This project's decoder; its random number generator continues from request to request."""

    def __init__(self, decoder: Decoder, seed: int):
        self._decoder = decoder
        decoder.reset(seed)

    def request(self, prompt: np.ndarray, config: GenerationConfig, wanted: int) -> Draw:
        """The first `wanted` tokens after `prompt`. Raises RuntimeError on a crash."""
        tokens, proposed, accepted = [], 0, 0
        steps = self._decoder.stream(prompt, config)
        for step in steps:
            tokens += step.tokens
            proposed += step.proposed
            accepted += step.accepted
            if len(tokens) >= wanted:
                steps.close()
        return Draw(tokens[:wanted], proposed, accepted)

    def close(self) -> None: ...


class GenAIRunner:
    """GenAI's LLMPipeline, loaded on first use and reloaded after a crash."""

    def __init__(self, load: Callable[[], openvino_genai.LLMPipeline]):
        self._load = load
        self._pipe: openvino_genai.LLMPipeline | None = None

    def request(self, prompt: np.ndarray, config: GenerationConfig, wanted: int) -> Draw:
        """The first `wanted` tokens after `prompt`. Raises RuntimeError on a crash."""
        try:
            self._pipe = self._pipe or self._load()
            result = self._pipe.generate(ov.Tensor(prompt[None]), config)
        except RuntimeError:
            self._pipe = None
            raise
        drafting = result.extended_perf_metrics  # excludes the last iteration
        counts = (drafting.get_num_draft_tokens(), drafting.get_num_accepted_tokens()) if drafting else (0, 0)
        return Draw(list(result.tokens[0][:wanted]), *counts)

    def close(self) -> None:
        """Free the memory; the next request reloads the pipeline."""
        self._pipe = None


@dataclass
class CheckedMethod:
    """One decoding path and the results of its requests; None stands for a crash."""

    name: str
    ours: bool
    runner: NativeRunner | GenAIRunner
    settings: dict  # of the GenerationConfig
    is_greedy: bool = True  # generate greedy texts
    is_sampled: bool = True  # generate samples
    is_alone: bool = False  # plain decoding: a possible reference
    texts: list[Draw | None] = field(default_factory=list)  # greedy, one per prompt
    draws: list[Draw | None] = field(default_factory=list)
    crash: str = ""

    def request(self, prompt: np.ndarray, wanted: int, settings: dict) -> Draw | None:
        # Leave room for a full draft after the last wanted token: no path drafts more than max_new_tokens allows.
        room = self.settings.get("num_assistant_tokens", LONGEST if self.ours else 0)
        config = GenerationConfig(max_new_tokens=wanted + room, ignore_eos=True, **settings, **self.settings)
        try:
            draw = self.runner.request(prompt, config, wanted)
            if len(draw.tokens) < wanted:
                raise RuntimeError(f"generation ended after {len(draw.tokens)} of {wanted} tokens")
            return draw
        except RuntimeError as error:
            self.crash = " ".join(str(error).split())
            return None


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("main", type=Path, help="main model (IR folder)")
    parser.add_argument("draft", type=Path, help="draft model (IR folder)")
    parser.add_argument(
        "--prompts", type=Path, help='JSON lines with "prompt", or one prompt per line (default: three built-in ones)'
    )
    parser.add_argument(
        "-k",
        "--num-assistant-tokens",
        type=lengths,
        metavar="K",
        help="draft lengths, like 1-4 or 2,8 (default: 1,4,8 greedy, 2 sampled)",
    )
    parser.add_argument(
        "--max-new-tokens", type=whole, default=64, metavar="N", help="new tokens per greedy text (default: 64)"
    )
    add_sample_arguments(parser)
    parser.add_argument("--device", default="CPU", help="device of the main model (default: CPU)")
    parser.add_argument("--draft-device", help="device of the draft model (default: the main model's)")
    parser.add_argument(
        "--property",
        **PROPERTY,
        help="OpenVINO property for both models, replaces EXECUTION_MODE_HINT=ACCURACY (repeatable)",
    )
    parser.add_argument("--strict", action="store_true", help="also fail if one of GenAI's paths does not pass")
    arguments = parser.parse_args()
    if arguments.draws is not None and arguments.draws < FEWEST_DRAWS:
        parser.error(f"--draws {arguments.draws} is too few for a result: use {FEWEST_DRAWS} or more")
    if arguments.top_p > 1:
        parser.error(f"--top-p {arguments.top_p:g} is above 1: give a probability")
    arguments.genai_draws = arguments.draws or GENAI_DRAWS
    arguments.draws = arguments.draws or DRAWS
    return arguments


def add_sample_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--draws",
        type=whole,
        metavar="N",
        help=f"samples per path (default: {DRAWS} for this project's engine, {GENAI_DRAWS} for GenAI)",
    )
    parser.add_argument("--tokens", type=whole, default=4, metavar="N", help="tokens per sample (default: 4)")
    parser.add_argument("--temperature", type=above_zero, default=1.0, help="sampling temperature (default: 1)")
    parser.add_argument("--top-k", type=whole, metavar="N", help="top-k of the samples (default: off)")
    parser.add_argument(
        "--top-p", type=above_zero, default=1.0, metavar="P", help="top-p of the samples (default: off)"
    )
    parser.add_argument("--seed", type=int, default=1, help="random seed (default: 1)")


def checked_methods(arguments: argparse.Namespace, properties: dict, engine: Decoder) -> list[CheckedMethod]:
    """All decoding paths, those without a draft first. Pipelines are loaded on use."""
    main, draft = model_specs(arguments, properties)
    no_prefix_cache = openvino_genai.SchedulerConfig()
    no_prefix_cache.enable_prefix_caching = False

    def pipeline(draft: ModelSpec | None, **more) -> GenAIRunner:
        return GenAIRunner(lambda: genai.load(replace(main, properties={**properties, **more}), draft))

    alone, lookup, pair = pipeline(None), pipeline(None, prompt_lookup=True), pipeline(draft)
    fresh_pair = pipeline(draft, scheduler_config=no_prefix_cache)
    our_pair = NativeRunner(engine, arguments.seed)
    our_lookup = NativeRunner(Decoder(engine.main, NgramProposer(engine.main.vocab_size, NGRAM)), arguments.seed)
    ks = arguments.num_assistant_tokens
    return [
        CheckedMethod("GenAI main alone", False, alone, {}, is_alone=True),
        CheckedMethod(
            "engine main alone",
            True,
            NativeRunner(Decoder(engine.main), arguments.seed),
            {},
            is_sampled=False,
            is_alone=True,
        ),
        *for_each_k("engine draft", True, our_pair, ks),
        CheckedMethod("engine draft, by confidence", True, our_pair, {"assistant_confidence_threshold": CONFIDENCE}),
        CheckedMethod("engine draft, adaptive", True, our_pair, {}),
        *for_each_k("engine lookup", True, our_lookup, ks),
        *for_each_k("GenAI lookup", False, lookup, ks, max_ngram_size=NGRAM),
        *for_each_k("GenAI draft", False, pair, ks),
        *(
            CheckedMethod(f"{method.name}, no prefix cache", False, fresh_pair, method.settings, is_greedy=False)
            for method in for_each_k("GenAI draft", False, fresh_pair, ks)
            if method.is_sampled
        ),
    ]


def for_each_k(
    name: str, ours: bool, runner: NativeRunner | GenAIRunner, asked: list[int] | None, **settings
) -> list[CheckedMethod]:
    """The path with each draft length: those asked for, or the default ones, which differ for texts and samples."""
    greedy, sampled = (asked or ks for ks in (GREEDY_K, SAMPLED_K))
    return [
        CheckedMethod(
            f"{name}, K = {k}", ours, runner, {"num_assistant_tokens": k, **settings}, k in greedy, k in sampled
        )
        for k in sorted({*greedy, *sampled})
    ]


def run(arguments: argparse.Namespace, methods: list[CheckedMethod], prompts: list[np.ndarray], sampling: dict) -> None:
    """Generate every path's greedy texts and samples."""
    wanted = {True: arguments.draws, False: arguments.genai_draws}
    total = sum(method.is_greedy * len(prompts) + method.is_sampled * wanted[method.ours] for method in methods)
    with tqdm(total=total, unit="request", dynamic_ncols=True) as bar:
        for method, following in zip(methods, [*methods[1:], None], strict=True):
            bar.set_description(method.name)
            for prompt in prompts if method.is_greedy else ():
                method.texts.append(method.request(prompt, arguments.max_new_tokens, {}))
                bar.update()
            for i in range(wanted[method.ours] if method.is_sampled else 0):
                if method.draws.count(None) < MOST_CRASHES:
                    settings = {**sampling, "rng_seed": arguments.seed + i}
                    method.draws.append(method.request(prompts[0], arguments.tokens, settings))
                bar.update()
            if following is None or following.runner is not method.runner:
                method.runner.close()


def exact_cells(arguments: argparse.Namespace, main: CachedModel, prompt: np.ndarray, sampling: dict):
    """The exact joint distribution of a sample; sequences with too few expected samples are pooled into one cell."""
    params = SamplingParams.resolve(GenerationConfig(**sampling))
    next_token = lossless_check.main_alone(main, prompt, params)
    resolution = max(lossless_check.EXPECTED / max(arguments.draws, arguments.genai_draws), FINEST)
    with tqdm(unit=" forward passes", desc="exact distribution", leave=False, dynamic_ncols=True) as bar:

        def counted(tokens: tuple[int, ...]) -> np.ndarray:
            bar.update()
            return next_token(tokens)

        return lossless_check.exact_joint(counted, arguments.tokens, resolution)


def reference_of(methods: list[CheckedMethod]) -> CheckedMethod | None:
    """The first path of the main model alone without a crash."""
    return next((method for method in methods if method.is_alone and method.texts and None not in method.texts), None)


def judge_texts(
    method: CheckedMethod, reference: CheckedMethod | None, main: CachedModel, prompts: list[np.ndarray]
) -> GreedyRow:
    """One row: whether the greedy texts equal the reference's. Without a reference nothing passes."""
    differences, same = [], 0
    for i, text in enumerate(method.texts if reference else ()):
        expected = reference.texts[i]
        if text and text.tokens == expected.tokens:
            same += 1
        elif text:
            differences.append({"prompt": i + 1, **first_difference(main, prompts[i], expected.tokens, text.tokens)})
    crashes = method.texts.count(None)
    if crashes:
        verdict = "crashes"
    elif not reference:
        verdict = "not compared"
    elif method is reference:
        verdict = "reference"
    elif all(difference["near_tie"] for difference in differences):
        verdict = "equal except near-ties" if differences else "equal"
    else:
        verdict = "NOT equal"
    return {
        "path": method.name,
        "ours": method.ours,
        "prompts": len(prompts),
        "same": same,
        "crashes": crashes,
        "acceptance_rate": acceptance_rate(method.texts),
        "differences": differences,
        "verdict": verdict,
        "holds": verdict.startswith("equal") or verdict == "reference",
    }


def first_difference(main: CachedModel, prompt: np.ndarray, expected: list[int], tokens: list[int]) -> dict:
    """Position of the first difference of two greedy texts, and the main model's logit margin there."""
    place = next(i for i, (a, b) in enumerate(zip(expected, tokens, strict=True)) if a != b)
    main.reset()
    logits = main.logits(np.concatenate([prompt, np.array(expected[:place], np.int64)]))[0]
    margin = float(logits[expected[place]] - logits[tokens[place]])
    return {"token": place + 1, "margin": margin, "near_tie": abs(margin) < NEAR_TIE * float(logits.std())}


def judge_draws(method: CheckedMethod, cells: lossless_check.Cells) -> SampledRow | ComparedRow:
    """One row: whether the samples have the exact distribution."""
    drawn = [draw.tokens for draw in method.draws if draw]
    crashes = method.draws.count(None)
    row = {
        "path": method.name,
        "ours": method.ours,
        "requests": len(method.draws),
        "crashes": crashes,
        "crash": method.crash,
        "acceptance_rate": acceptance_rate(method.draws),
    }
    verdict = "crashes"
    if drawn:
        comparison = lossless_check.compare(drawn, cells)
        finds = lossless_check.detectable_total_variation(cells, len(drawn), ALPHA, POWER)
        row |= {**comparison._asdict(), "detectable_total_variation": finds}
        if comparison.p_value < ALPHA:
            verdict = "NOT lossless"
        elif not crashes:
            verdict = "not compared" if finds is None else "no difference found"
    return {**row, "verdict": verdict, "holds": verdict == "no difference found"}


def acceptance_rate(draws: list[Draw | None]) -> float | None:
    proposed = sum(draw.proposed for draw in draws if draw)
    return sum(draw.accepted for draw in draws if draw) / proposed if proposed else None


def table_of_texts(rows: list[GreedyRow], tokens: int) -> str:
    lines = [f"{f'greedy, {tokens} tokens':<42} same text   acceptance   verdict"]
    for row in rows:
        first = next(iter(sorted(row["differences"], key=lambda difference: difference["near_tie"])), None)
        where = ""
        if first:
            where = f" (prompt {first['prompt']}, token {first['token']}: logit margin {first['margin']:.2g})"
        same = f"{row['same']}/{row['prompts']}"
        lines.append(f"{row['path']:<42} {same:>9} {share(row['acceptance_rate']):>12}   {row['verdict']}{where}")
    return "\n".join(lines)


def table_of_draws(rows: list[SampledRow | ComparedRow], tokens: int, cells: int) -> str:
    title = f"sampled, {tokens} tokens in {cells} cells"
    lines = [f"{title:<42} requests  crashes  acceptance     TV  noise        p  finds   verdict"]
    for row in rows:
        numbers = " " * 29
        if "p_value" in row:
            finds = row["detectable_total_variation"]
            numbers = f"{row['total_variation']:6.3f} {row['noise']:6.3f} {row['p_value']:8.2g} "
            numbers += " " * 6 if finds is None else f"{finds:6.3f}"
        lines.append(
            f"{row['path']:<42} {row['requests']:>8} {row['crashes']:>8} {share(row['acceptance_rate']):>11} "
            f"{numbers}   {row['verdict']}"
        )
    return "\n".join([*lines, *power_sentences(rows)])


def power_sentences(rows: list[SampledRow | ComparedRow]) -> list[str]:
    """The meaning of "no difference found" at each sample size, and why a path was not compared."""
    found = {(row["draws"], row["detectable_total_variation"]) for row in rows if row["holds"]}
    lines = [
        f"No difference found in {draws} samples: a TV above {finds:.3f} would have been detected with {POWER:.0%} "
        "power."
        for draws, finds in sorted(found)
    ]
    if any(row["verdict"] == "not compared" for row in rows):
        lines.append(
            "Not compared: no token sequence is likely enough to be counted at this sample size: use more --draws, "
            "fewer --tokens or a lower --temperature."
        )
    return lines


def share(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


# ---- the program ----------------------------------------------------------------------------------------------------


@dataclass
class Verdicts:
    """One row per path, and the path whose texts the others are compared with."""

    greedy: list[dict]
    sampled: list[dict]
    reference: CheckedMethod | None

    def hold(self, strict: bool) -> bool:
        """Whether all paths of our engine pass, with `strict` GenAI's, too."""
        return all(row["holds"] for row in (*self.greedy, *self.sampled) if row["ours"] or strict)


def judge(
    methods: list[CheckedMethod], main: CachedModel, prompts: list[np.ndarray], cells: lossless_check.Cells
) -> Verdicts:
    reference = reference_of(methods)
    greedy = [judge_texts(method, reference, main, prompts) for method in methods if method.is_greedy]
    sampled = [judge_draws(method, cells) for method in methods if method.is_sampled]
    return Verdicts(greedy, sampled, reference)


def tables(arguments: argparse.Namespace, found: Verdicts, first: CheckedMethod, cells: int) -> str:
    """Both tables; between them a sentence if the `first` path could not be the reference."""
    lines = [table_of_texts(found.greedy, arguments.max_new_tokens)]
    if found.reference is not first:
        name = found.reference and found.reference.name
        instead = f"the texts are compared with {name}" if name else "no text could be compared"
        lines.append(f"{first.name} failed ({first.crash}): {instead}.")
    return "\n".join([*lines, "", table_of_draws(found.sampled, arguments.tokens, cells)])


def environment(arguments: argparse.Namespace, properties: dict, sampling: dict, cells: int) -> dict:
    return {
        "main": str(arguments.main),
        "draft": str(arguments.draft),
        "device": arguments.device,
        "draft_device": arguments.draft_device or arguments.device,
        "properties": properties,
        "sampling": sampling,
        "max_new_tokens": arguments.max_new_tokens,
        "draws": arguments.draws,
        "genai_draws": arguments.genai_draws,
        "power": POWER,
        "tokens": arguments.tokens,
        "cells": cells,
        "seed": arguments.seed,
        "openvino_genai": openvino_genai.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {usable_cores()} cores",
    }


def main() -> int:
    prepare_output()
    arguments = parse_arguments()
    refuse_unsound(arguments.main, arguments.draft)
    refuse_missing_devices(arguments)
    with exit_on(ValueError, status=2):
        texts = [prompt.text for prompt in read_prompts(arguments.prompts)] if arguments.prompts else PROMPTS
    properties = dict(arguments.property) if arguments.property else EXACT
    sampling = {"do_sample": True, "temperature": arguments.temperature, "top_p": arguments.top_p}
    if arguments.top_k:
        sampling["top_k"] = arguments.top_k
    with exit_on(RuntimeError, ValueError, KeyError):
        engine = decoder.load(*model_specs(arguments, properties))
        prompts = [engine.encode(text) for text in texts]
        cells = exact_cells(arguments, engine.main, prompts[0], sampling)
        methods = checked_methods(arguments, properties, engine)
        run(arguments, methods, prompts, sampling)
    found = judge(methods, engine.main, prompts, cells)
    ok = found.hold(arguments.strict)
    print(tables(arguments, found, methods[0], len(cells)))
    document = {
        "ok": ok,
        "reference": found.reference and found.reference.name,
        "environment": environment(arguments, properties, sampling, len(cells)),
        "greedy": found.greedy,
        "sampled": found.sampled,
    }
    print(json.dumps(document, ensure_ascii=False))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
