"""Smoke test of a pair for CI: load, stream, compare with the main model alone, check the acceptance rate.

    python scripts/smoke.py models/embedded/main models/embedded/draft --min-acceptance 0.3

Decoding is greedy in execution mode ACCURACY (f32 throughout), where the output with a draft must equal the output
without one, token by token. GenAI's pipeline and this project's engine (`speculative.decoder`) are both compared with
the main model alone in GenAI. Prints one JSON line. Exit status: 0 if all checks pass, 1 if one fails (listed in
`problems`), 2 for bad usage.
"""

from speculative.cli.program import prepare_output

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import openvino_genai

from speculative import decoder
from speculative.bench import genai
from speculative.bench.result import EngineCheck, SmokeResult
from speculative.cli.arguments import add_device_arguments, model_specs, refuse_unusable
from speculative.cli.number_types import positive_int, share
from speculative.cli.parser import Parser
from speculative.error_text import one_line
from speculative.pair.engines import GENAI, NATIVE
from speculative.sequence import metrics

ROOT = Path(__file__).resolve().parent.parent

PROMPTS = ("def read_notes(path):", "class Triangle:", "Count the words of a text.")


def parse_arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "main", type=Path, nargs="?", default=ROOT / "models/embedded/main", help="main model (IR folder)"
    )
    parser.add_argument(
        "draft", type=Path, nargs="?", default=ROOT / "models/embedded/draft", help="draft model (IR folder)"
    )
    add_device_arguments(parser)
    parser.add_argument(
        "-k", "--num-assistant-tokens", type=positive_int, default=4, metavar="K", help="draft length (default: 4)"
    )
    parser.add_argument(
        "--max-new-tokens", type=positive_int, default=48, metavar="N", help="new tokens per prompt (default: 48)"
    )
    parser.add_argument(
        "--min-acceptance", type=share, default=0.3, metavar="RATE", help="minimum acceptance rate (default: 0.3)"
    )
    parser.add_argument(
        "--prompt", action="append", help="prompt to use instead of the three built-in ones (repeatable)"
    )
    return parser.parse_args()


def smoke(arguments: argparse.Namespace) -> SmokeResult:
    """Run the test and return its result; `problems` is empty if all checks pass."""
    exact = {"EXECUTION_MODE_HINT": "ACCURACY"}  # f32 inference and KV cache, no quantized activations
    prompts = arguments.prompt or PROMPTS
    references = main_alone(arguments, prompts, exact)
    genai_result, problems = check("GenAI", genai_outputs(arguments, prompts, exact), prompts, references)
    rate = genai_result["acceptance_rate"]
    if rate is None:
        problems.append("no draft token was proposed, so nothing was checked: give more --max-new-tokens")
    elif rate < arguments.min_acceptance:
        problems.append(f"the acceptance rate is {rate}, below {arguments.min_acceptance}")
    engine_result, engine_problems = check(
        "this engine", engine_outputs(arguments, prompts, exact), prompts, references
    )
    problems += engine_problems
    return {
        "ok": not problems,
        "problems": problems,
        **genai_result,
        "engine": engine_result,
        "draft_length": arguments.num_assistant_tokens,
        "new_tokens": arguments.max_new_tokens * len(prompts),
        "main": str(arguments.main),
        "draft": str(arguments.draft),
        "device": arguments.device,
        "draft_device": arguments.draft_device,
        "openvino_genai": openvino_genai.__version__,
    }


def main_alone(arguments: argparse.Namespace, prompts: Sequence[str], exact: dict) -> list[list[int]]:
    """The greedy tokens of the main model alone in GenAI after each prompt."""
    main, _ = model_specs(arguments, exact)
    pipe = genai.load(main)
    encoded = [genai.encode(pipe.get_tokenizer(), prompt) for prompt in prompts]
    return [genai.generate(pipe, inputs, arguments.max_new_tokens).tokens for inputs in encoded]


@dataclass
class Output:
    """One text decoded with the draft: the fields of `GenerationResult` and the pieces it was streamed in."""

    tokens: list[int]
    proposed: list[int]
    gained: list[int]
    text: str
    pieces: list[str]


def genai_outputs(arguments: argparse.Namespace, prompts: Sequence[str], exact: dict) -> Iterator[Output]:
    """Decode each prompt with GenAI's pipeline and the draft."""
    pipe = genai.load(*model_specs(arguments, exact))
    tokenizer = pipe.get_tokenizer()
    for prompt in prompts:
        pieces: list[str] = []
        inputs = genai.encode(tokenizer, prompt)
        run = genai.generate(pipe, inputs, arguments.max_new_tokens, arguments.num_assistant_tokens, pieces.append)
        yield Output(run.tokens, run.proposed, run.gained, tokenizer.decode(run.tokens), pieces)


def engine_outputs(arguments: argparse.Namespace, prompts: Sequence[str], exact: dict) -> Iterator[Output]:
    """Decode each prompt with this project's engine and the draft."""
    engine = decoder.load(*model_specs(arguments, exact))
    for prompt in prompts:
        pieces: list[str] = []
        result = engine.generate(prompt, greedy(arguments), pieces.append)
        yield Output(result.tokens, result.proposed, result.gained, result.text, pieces)


def check(
    engine: str, outputs: Iterable[Output], prompts: Sequence[str], references: list[list[int]]
) -> tuple[EngineCheck, list[str]]:
    """The metrics of an engine's outputs, and a sentence for each difference from the reference or the stream."""
    problems, proposed, gained, streamed = [], [], [], 0
    for output, prompt, reference in zip(outputs, prompts, references, strict=True):
        proposed += output.proposed
        gained += output.gained
        streamed += len(output.pieces)
        problems += difference(engine, prompt, output.tokens, reference)
        problems += stream_difference(engine, prompt, output.pieces, output.text)
    metrics_of_engine: EngineCheck = {
        "acceptance_rate": metrics.acceptance_rate(proposed, [n - 1 for n in gained]),
        "block_efficiency": metrics.block_efficiency(gained),
        "streamed_pieces": streamed,
    }
    return metrics_of_engine, problems


def greedy(arguments: argparse.Namespace) -> openvino_genai.GenerationConfig:
    return openvino_genai.GenerationConfig(
        max_new_tokens=arguments.max_new_tokens,
        num_assistant_tokens=arguments.num_assistant_tokens,
        ignore_eos=True,
    )


def difference(engine: str, prompt: str, tokens: list[int], reference: list[int]) -> list[str]:
    """A sentence naming the first token that differs from the reference, if any."""
    if tokens == reference:
        return []
    pairs = zip(tokens, reference, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(reference)))
    return [f"{engine}: the output for {prompt!r} differs from the main model's at new token {place + 1}"]


def stream_difference(engine: str, prompt: str, pieces: list[str], text: str) -> list[str]:
    return (
        []
        if "".join(pieces) == text
        else [f"{engine}: the streamed text for {prompt!r} differs from the returned text"]
    )


def main() -> int:
    prepare_output()
    arguments = parse_arguments()
    refuse_unusable(arguments, NATIVE, GENAI)
    try:
        result = smoke(arguments)
    except (RuntimeError, ValueError) as error:  # from loading: a broken file, a missing device
        result = {"ok": False, "problems": [one_line(error)]}
    print(json.dumps(result, ensure_ascii=False))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
