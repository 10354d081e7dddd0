"""Arguments shared by the load benchmarks."""

import argparse

from speculative.bench.harness import add_output_arguments
from speculative.cli import former_options
from speculative.cli.arguments import add_prompt_arguments
from speculative.cli.number_types import positive_float, positive_int, two_or_more


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    add_prompt_arguments(parser, max_prompts=20)
    concurrency = parser.add_argument(
        "--max-concurrency",
        type=numbers,
        default="1,2,4,8,16",
        metavar="N",
        help="numbers of concurrent clients, or requests (default: 1,2,4,8,16)",
    )
    former_options.accept(parser, concurrency, "--clients")
    parser.add_argument(
        "--max-new-tokens", type=two_or_more, default=64, metavar="N", help="new tokens per text, at most (default: 64)"
    )
    parser.add_argument(
        "--seconds",
        type=positive_float,
        default=8.0,
        metavar="S",
        help="duration of each measurement in a round (default: 8)",
    )
    parser.add_argument(
        "--rounds", type=positive_int, default=3, metavar="N", help="interleaved rounds after the warm-up (default: 3)"
    )
    add_output_arguments(parser, with_plot=True)


def numbers(text: str) -> list[int]:
    """An argparse type: increasing whole numbers."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1 or values != sorted(set(values)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an increasing list of whole numbers above 0, like 1,2,4,8,16"
        )
    return values
