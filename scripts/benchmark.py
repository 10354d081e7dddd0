"""Measure what a draft gains: the main model alone against the main model with the draft, for several draft lengths K.

    python scripts/benchmark.py models/embedded/main models/embedded/draft --prompts scripts/prompts/embedded_code.jsonl

Greedy, the same number of new tokens everywhere (`ignore_eos`). Every round runs each prompt alone and with each K, one
after the other, so that whatever else the machine does falls on all alike. Speedup is decode throughput (prompt
excluded) with the draft / alone, in the same round; shown are the median over the rounds and their range. A table for
people on standard output, then one JSON object on its last line. Repeated 4-grams inflate acceptance: their share
stands beside.
"""

import argparse
import hashlib
import json
import os
import platform
import signal
import statistics
import sys
from pathlib import Path

signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is written, so Ctrl-C may end it anywhere

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import openvino_genai  # noqa: E402
from arguments import refuse_unsound, whole  # noqa: E402
from tqdm import tqdm  # noqa: E402

from speculative import genai_runs, metrics  # noqa: E402


def lengths(text: str) -> list[int]:
    """Parse "1-8" or "2,4,6"."""
    try:
        first, _, last = text.partition("-")
        values = list(range(int(first), int(last) + 1)) if last else [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1 or max(values) > 64:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a range like 1-8 or a list like 2,4,6 of draft lengths 1 to 64"
        )
    return values


def key_value(text: str) -> tuple[str, str]:
    key, found, value = text.partition("=")
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("main", type=Path, help="main model (IR folder)")
    parser.add_argument("draft", type=Path, help="draft (IR folder)")
    parser.add_argument("--prompts", type=Path, required=True, help='JSON lines with "prompt", or one prompt a line')
    parser.add_argument(
        "-k", "--num-assistant-tokens", type=lengths, default="1-8", metavar="K", help="1-8 or 2,4 (default: 1-8)"
    )
    parser.add_argument(
        "--max-new-tokens", type=whole, default=100, metavar="N", help="new tokens a run (default: 100)"
    )
    parser.add_argument("--rounds", type=whole, default=3, help="interleaved rounds after the warm-up (default: 3)")
    parser.add_argument("--device", default="CPU", help="device of the main model (default: CPU)")
    parser.add_argument("--draft-device", default="CPU", help="device of the draft (default: CPU)")
    parser.add_argument(
        "--property",
        type=key_value,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="OpenVINO property of both models",
    )
    return parser.parse_args()


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file: the "prompt" of each line for .jsonl, else the lines themselves."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [json.loads(line)["prompt"] for line in lines] if path.suffix == ".jsonl" else lines


def measure(arguments: argparse.Namespace) -> dict[int, list[list[genai_runs.Run]]]:
    """Runs by draft length (0: the main model alone), round and prompt."""
    properties = dict(arguments.property)
    alone = genai_runs.load(arguments.main, arguments.device, None, "", properties, {})
    pair = genai_runs.load(
        arguments.main, arguments.device, arguments.draft, arguments.draft_device, properties, properties
    )
    inputs = [genai_runs.encode(alone.get_tokenizer(), prompt) for prompt in read_prompts(arguments.prompts)]
    choices = [0, *arguments.num_assistant_tokens]
    runs: dict[int, list[list[genai_runs.Run]]] = {k: [] for k in choices}
    with tqdm(total=(arguments.rounds + 1) * len(inputs) * len(choices), unit="run") as bar:
        for _ in range(arguments.rounds + 1):
            for k in choices:
                runs[k].append([])
            for prompt in inputs:
                for k in choices:
                    pipe, draft_length = (pair, k) if k else (alone, None)
                    runs[k][-1].append(genai_runs.generate(pipe, prompt, arguments.max_new_tokens, draft_length))
                    bar.update()
    return {k: rounds[1:] for k, rounds in runs.items()}  # the first round warms up


def decode_throughput(runs: list[genai_runs.Run]) -> float:
    return sum(len(run.tokens) - 1 for run in runs) / sum(run.decode_seconds for run in runs)


def summarise(runs: dict[int, list[list[genai_runs.Run]]]) -> list[dict]:
    """One row for the main model alone (K = 0), one for each draft length."""
    rows = []
    for k, rounds in runs.items():
        ratios = [decode_throughput(a) / decode_throughput(b) for a, b in zip(rounds, runs[0], strict=True)]
        proposed = [n for run in rounds[0] for n in run.proposed]
        gained = [n for run in rounds[0] for n in run.gained]
        rows.append(
            {
                "draft_length": k,
                "throughput": statistics.median(decode_throughput(round_) for round_ in rounds),
                "speedup": statistics.median(ratios),
                "speedup_range": [min(ratios), max(ratios)],
                "acceptance_rate": metrics.acceptance_rate(proposed, gained),
                "block_efficiency": metrics.block_efficiency(gained),
                "repetition": statistics.mean(metrics.repetition(run.tokens) for run in rounds[0]),
                "ttft": statistics.median(run.seconds_to_first for round_ in rounds for run in round_),
                "same_text": sum(a.tokens == b.tokens for a, b in zip(rounds[0], runs[0][0], strict=True)),
                "output_sha256": hashlib.sha256(str([run.tokens for run in rounds[0]]).encode()).hexdigest()[:16],
            }
        )
    return rows


def table(rows: list[dict], prompts: int) -> str:
    lines = [" K   tokens/s   speedup (range)       acceptance   block eff.   repetition   TTFT ms   text as alone"]
    best = max(rows, key=lambda row: row["speedup"])
    for row in rows:
        low, high = row["speedup_range"]
        acceptance = "" if row["acceptance_rate"] is None else f"{row['acceptance_rate']:.2f}"
        lines.append(
            f"{row['draft_length'] or '-':>2} {row['throughput']:10.1f}   {row['speedup']:.2f}x ({low:.2f}-{high:.2f})"
            f"   {acceptance:>14}   {row['block_efficiency']:10.2f}   {row['repetition']:10.2f}"
            f"   {row['ttft'] * 1000:7.1f}   {row['same_text']}/{prompts}"
            f"{'   <- best' if row is best and row['draft_length'] else ''}"
        )
    return "\n".join(lines)


def main() -> int:
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8")
    arguments = parse_arguments()
    refuse_unsound(arguments.main, arguments.draft)
    if not arguments.prompts.is_file():
        print(f"error: {arguments.prompts} is not a file: give a file with one prompt a line.", file=sys.stderr)
        return 2
    try:
        runs = measure(arguments)
    except (RuntimeError, ValueError, KeyError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    rows = summarise(runs)
    print(table(rows, len(runs[0][0])))
    environment = {
        "main": str(arguments.main),
        "draft": str(arguments.draft),
        "device": arguments.device,
        "draft_device": arguments.draft_device,
        "properties": dict(arguments.property),
        "prompts": len(runs[0][0]),
        "max_new_tokens": arguments.max_new_tokens,
        "rounds": arguments.rounds,
        "openvino_genai": openvino_genai.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    print(json.dumps({"environment": environment, "rows": rows}, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
