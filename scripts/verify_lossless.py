"""Verify that speculative decoding with a pair is lossless, in this project's engine and in GenAI's pipeline.

    python scripts/verify_lossless.py models/embedded/main models/embedded/draft

takes about half an hour on two cores. `--draws 300` takes less time, and detects larger differences only.

The main model alone always runs, in both engines. `--paths` adds:

    engine  this project's engine with the draft
    genai   GenAI's pipeline with the draft
    lookup  GenAI's prompt lookup, and suffix decoding in this project's engine; they need no DRAFT

Greedy: every path's tokens are compared with those of the main model alone in GenAI for each prompt (or, if that fails,
in this project's engine). The first difference is shown with its logit margin: a near-tie, decided by rounding, or a
real difference. Without either reference nothing is compared, which counts as a failure.

Sampled: many samples of the first tokens after the first prompt are compared with their exact joint distribution,
computed from the main model's logits. The table shows:

    TV     total-variation distance (0: identical, 1: disjoint)
    noise  expected TV of exact samples at this sample size
    p      p-value of the test
    finds  TV detected with 90 % power at this sample size, for any spread over the cells

A cell is a token sequence, or many rare ones together. No number of samples proves that there is no difference. More
samples (`--draws 20000`) detect smaller differences. The defaults are 3,000 for this project's engine and 300 for
GenAI, whose defect is large.

Crashes of requests are counted. GenAI's pipeline is reloaded after a crash, as it otherwise continues without drafting.
After 5 crashes the path ends. Everything runs in execution mode ACCURACY unless `--property` is given. In the default
mode, the rounding of u8 caches and quantized activations depends on the number of tokens in a forward pass.

Output: tables, then one JSON object on the last line. Exit status:

    0  the engine's paths pass
    1  one of them does not (with `--strict`: or one of GenAI's)
    2  bad usage
"""

from speculative.cli.program import exit_on, prepare_output

import argparse
import json
import platform
import sys
from pathlib import Path

import openvino_genai

from speculative import decoder
from speculative.bench.lossless.methods import PATHS, Requests, checked_methods, exact_cells, run
from speculative.bench.lossless.tables import tables
from speculative.bench.lossless.verdicts import POWER, judge
from speculative.bench.prompts import read_prompts
from speculative.bench.result import LosslessEnvironment
from speculative.cli.arguments import (
    add_device_arguments,
    add_paths_argument,
    choose_paths,
    lengths,
    limit_in_genai,
    model_specs,
    refuse,
    refuse_unusable,
    require_draft_for,
)
from speculative.cli.number_types import positive_float, positive_int, seed_number
from speculative.cli.parser import Parser
from speculative.cli.properties import PROPERTY
from speculative.models.cores import usable_cores
from speculative.pair.engines import NATIVE

PROMPTS = (
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return",
    "def read_notes(path):",
    "Count the words of a text.",
)
EXACT = {"EXECUTION_MODE_HINT": "ACCURACY"}  # f32 inference and KV cache, no quantized activations
DRAWS, GENAI_DRAWS = 3_000, 300  # samples per path of our engine and of GenAI
FEWEST_DRAWS = 100  # with fewer, even GenAI's defect may go undetected


def parse_arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("main", type=Path, help="main model (IR folder)")
    parser.add_argument(
        "draft", type=Path, nargs="?", help="draft model (IR folder); without one, the path lookup is checked"
    )
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
        "--max-new-tokens", type=positive_int, default=64, metavar="N", help="new tokens per greedy text (default: 64)"
    )
    add_paths_argument(parser, PATHS)
    add_sample_arguments(parser)
    add_device_arguments(parser)
    parser.add_argument(
        "--property",
        **PROPERTY,
        help="OpenVINO property for both models, replaces EXECUTION_MODE_HINT=ACCURACY (repeatable)",
    )
    parser.add_argument("--strict", action="store_true", help="also fail if one of GenAI's paths does not pass")
    arguments = parser.parse_args()
    choose_paths(parser, arguments, PATHS)
    require_draft_for(parser, arguments, "--draft-device")
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
        type=positive_int,
        metavar="N",
        help=f"samples per path (default: {DRAWS} for this project's engine, {GENAI_DRAWS} for GenAI)",
    )
    parser.add_argument("--tokens", type=positive_int, default=4, metavar="N", help="tokens per sample (default: 4)")
    parser.add_argument("--temperature", type=positive_float, default=1.0, help="sampling temperature (default: 1)")
    parser.add_argument("--top-k", type=positive_int, metavar="N", help="top-k of the samples (default: off)")
    parser.add_argument(
        "--top-p", type=positive_float, default=1.0, metavar="P", help="top-p of the samples (default: off)"
    )
    parser.add_argument("--seed", type=seed_number, default=1, help="random seed (default: 1)")


def environment(arguments: argparse.Namespace, requests: Requests, properties: dict, cells: int) -> LosslessEnvironment:
    draft = {"draft": str(arguments.draft), "draft_device": arguments.draft_device}
    return {
        "main": str(arguments.main),
        "device": arguments.device,
        **(draft if arguments.draft else {}),
        "properties": properties,
        "paths": arguments.paths,
        "sampling": requests.sampling,
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


def leave_out(arguments: argparse.Namespace) -> list[str]:
    """Remove GenAI's path if its pipeline cannot run the pair; say why, in a sentence."""
    limit = limit_in_genai(arguments)
    if "genai" not in arguments.paths or not limit:
        return []
    arguments.paths.remove("genai")
    refuse("" if arguments.paths else limit)
    return [f"Path genai is left out: {limit}."]


def main() -> int:
    prepare_output()
    arguments = parse_arguments()
    refuse_unusable(arguments, *([NATIVE] if "engine" in arguments.paths else []))
    left_out = leave_out(arguments)
    with exit_on(ValueError, status=2):
        texts = [prompt.text for prompt in read_prompts(arguments.prompts)] if arguments.prompts else PROMPTS
    properties = dict(arguments.property) if arguments.property else EXACT
    sampling = {"do_sample": True, "temperature": arguments.temperature, "top_p": arguments.top_p}
    if arguments.top_k:
        sampling["top_k"] = arguments.top_k
    with exit_on(RuntimeError, ValueError, KeyError):
        main, draft = model_specs(arguments, properties)
        engine = decoder.load(main, draft if "engine" in arguments.paths else None)
        amounts = {name: vars(arguments)[name] for name in ("max_new_tokens", "tokens", "draws", "genai_draws", "seed")}
        requests = Requests([engine.encode(text) for text in texts], sampling=sampling, **amounts)
        cells = exact_cells(engine.main, requests)
        methods = checked_methods(engine, main, draft, arguments.paths, arguments.num_assistant_tokens, arguments.seed)
        run(methods, requests)
    verdicts = judge(methods, engine.main, requests.prompts, cells)
    print(tables(verdicts, methods[0], arguments.max_new_tokens, arguments.tokens, len(cells)))
    for sentence in left_out:
        print(sentence)
    document = {
        "ok": verdicts.hold(arguments.strict),
        "reference": verdicts.reference and verdicts.reference.name,
        "environment": environment(arguments, requests, properties, len(cells)),
        "greedy": verdicts.greedy,
        "sampled": verdicts.sampled,
    }
    print(json.dumps(document, ensure_ascii=False))
    return 0 if document["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
