"""Measure what a draft gains: main model alone and with the draft, in GenAI's pipeline and in this project's engine.

    python scripts/benchmark.py models/embedded/main models/embedded/draft

Paths (`--paths`): `genai`, GenAI's pipeline, greedy, for each K; `engine`, ours, greedy, for each K and adaptive;
`sampled`, ours at `--temperature`, lossless. GenAI's own sampled mode with a draft is not (scripts/verify_lossless.py).

The same number of new tokens everywhere (`ignore_eos`). Every round runs each prompt on every path, one after another,
so that whatever else the machine does falls on all alike. Throughput is decode only (prompt excluded); speedup is over
the main model alone in GenAI (sampled: alone in the engine), in the same round; shown are the median over the rounds
and their range. `outside` is the share of the decoding that is not spent in the models. Repeated 4-grams inflate
acceptance: their share stands beside. A table for people on standard output, then one JSON object on its last line.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import sys
from pathlib import Path

signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is written, so Ctrl-C may end it anywhere
if hasattr(signal, "SIGPIPE"):  # `| head` ends it quietly
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import measuring  # noqa: E402
import numpy as np  # noqa: E402
import openvino_genai  # noqa: E402
from arguments import key_value, lengths, refuse_unsound, whole  # noqa: E402
from measuring import Way, interleave, time_in  # noqa: E402
from prompt_files import read_prompts  # noqa: E402

from speculative import decoder, genai_runs  # noqa: E402
from speculative.decoder import Decoder  # noqa: E402
from speculative.draft_length import AdaptiveDraftLength  # noqa: E402

PROMPTS = Path(__file__).parent / "prompts/embedded_code.jsonl"
OTHER_TEXT = Path(__file__).parent / "embedded_recipes.txt"  # for --context
PATHS = ("genai", "engine", "sampled")


def names(text: str) -> list[str]:
    if not set(text.split(",")) <= set(PATHS):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of {', '.join(PATHS)}")
    return text.split(",")


def temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("main", type=Path, help="main model (IR folder)")
    parser.add_argument("draft", type=Path, help="draft (IR folder)")
    parser.add_argument(
        "--prompts", type=Path, default=PROMPTS, help='JSON lines with "prompt", or one prompt a line (default: code)'
    )
    parser.add_argument(
        "-k", "--num-assistant-tokens", type=lengths, default="1-8", metavar="K", help="1-8 or 2,4 (default: 1-8)"
    )
    parser.add_argument("--paths", type=names, default="genai,engine", help="of genai,engine,sampled (default: two)")
    parser.add_argument(
        "--temperature", type=temperature, default=1.0, metavar="T", help="of the sampled paths (default: 1)"
    )
    parser.add_argument(
        "--max-new-tokens", type=whole, default=100, metavar="N", help="new tokens a run (default: 100)"
    )
    parser.add_argument("--max-prompts", type=whole, default=20, metavar="N", help="prompts to take (default: 20)")
    parser.add_argument("--rounds", type=whole, default=3, help="interleaved rounds after the warm-up (default: 3)")
    parser.add_argument(
        "--context", type=whole, metavar="N", help="put prompts behind N tokens of other text (their cache is kept)"
    )
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
    arguments = parser.parse_args()
    if arguments.max_new_tokens < 2:
        parser.error("--max-new-tokens 1 leaves nothing to time behind the first token: take 2 or more")
    return arguments


def load(arguments: argparse.Namespace) -> list[Way]:
    """The ways to compare, the main model alone first. Each engine loads each model once."""
    main, device, draft, draft_device = arguments.main, arguments.device, arguments.draft, arguments.draft_device
    properties, n = dict(arguments.property), arguments.max_new_tokens
    ways = []

    alone = genai_runs.load(main, device, None, "", properties, {})
    ways.append(Way("GenAI, alone", "GenAI", 0, 0.0, lambda ids: genai_runs.generate(alone, genai_runs.inputs(ids), n)))
    if "genai" in arguments.paths:
        pair = genai_runs.load(main, device, draft, draft_device, properties, properties)
        for k in arguments.num_assistant_tokens:
            decode = lambda ids, k=k: genai_runs.generate(pair, genai_runs.inputs(ids), n, k)  # noqa: E731
            ways.append(Way(f"GenAI, K = {k}", "GenAI", k, 0.0, decode))
    if {"engine", "sampled"} & set(arguments.paths):
        ours = decoder.load(main, device, draft, draft_device, properties, properties)
        models = [ours.main, ours.draft.model]
        seconds = [time_in(model) for model in models]
        for sampled in [name == "sampled" for name in ("engine", "sampled") if name in arguments.paths]:
            for k in (0, *arguments.num_assistant_tokens, "adaptive"):
                config = openvino_genai.GenerationConfig(max_new_tokens=n, ignore_eos=True)
                config.do_sample, config.temperature = sampled, arguments.temperature
                if k in arguments.num_assistant_tokens:
                    config.num_assistant_tokens = k
                # adaptive lengths learn from one run for the next, each way for itself
                one = Decoder(ours.main, ours.draft if k else None, AdaptiveDraftLength(ours.draft_length.costs))
                decode = lambda ids, one=one, config=config: one.generate(ids, config)  # noqa: E731
                temperature = arguments.temperature if sampled else 0.0
                name = (
                    f"ours, {'sampled, ' if sampled else ''}{f'K = {k}' if isinstance(k, int) and k else k or 'alone'}"
                )
                ways.append(Way(name, "ours", k, temperature, decode, seconds))
    return ways


def encode(arguments: argparse.Namespace) -> list[np.ndarray]:
    """The prompts' token ids, each behind the same `--context` tokens of other text."""
    tokenizer = openvino_genai.Tokenizer(str(arguments.main))
    prompts = read_prompts(arguments.prompts)[: arguments.max_prompts]
    ids = [genai_runs.encode(tokenizer, prompt.text).input_ids.data[0] for prompt in prompts]
    if arguments.context:
        text = tokenizer.encode(OTHER_TEXT.read_text(encoding="utf-8")).input_ids.data[0]
        before = np.resize(text, arguments.context)
        ids = [np.concatenate([before, one]) for one in ids]
    return ids


def summarise(ways: list[Way]) -> list[dict]:
    """One row for each way."""
    baseline = {bool(way.temperature): way for way in reversed(ways) if not way.draft_length}
    return [measuring.row(way, baseline[bool(way.temperature)]) for way in ways]


def compare(rows: list[dict]) -> list[dict]:
    """What people ask of the table: ours against GenAI with the same K, adaptive against the best fixed K."""
    facts = []

    def ratio(what: str, one: dict, other: dict) -> None:
        ratios = [a / b for a, b in zip(one["throughputs"], other["throughputs"], strict=True)]
        facts.append({"what": what, "ratio": statistics.median(ratios), "range": [min(ratios), max(ratios)]})

    def find(engine: str, sampled: bool) -> dict[int | str, dict]:
        return {row["draft_length"]: row for row in rows if (row["engine"], row["sampled"]) == (engine, sampled)}

    genai, ours = find("GenAI", False), find("ours", False)
    for k in [k for k in genai if k in ours]:
        ratio(f"ours / GenAI, greedy, {f'K = {k}' if k else 'alone'}", ours[k], genai[k])
    for sampled in (False, True):
        table = find("ours", sampled)
        fixed = [row for k, row in table.items() if k not in (0, "adaptive")]
        if fixed:
            best = max(fixed, key=lambda row: row["throughput"])
            kind = "sampled" if sampled else "greedy"
            ratio(f"adaptive / best fixed K = {best['draft_length']}, {kind}", table["adaptive"], best)
            ratio(f"adaptive / ours alone, {kind}", table["adaptive"], table[0])
    return facts


def table(rows: list[dict], facts: list[dict], prompts: int) -> str:
    lines = [
        "engine   mode      K         tokens/s   speedup (range)     acceptance   block eff.   outside   "
        "repetition   text as alone"
    ]
    for row in rows:
        low, high = row["speedup_range"]
        acceptance = "" if row["acceptance_rate"] is None else f"{row['acceptance_rate']:.2f}"
        outside = "" if row["outside"] is None else f"{row['outside']:.1%}"
        same = "" if row["sampled"] else f"{row['same_text']}/{prompts}"
        best = max((r for r in rows if r["sampled"] == row["sampled"]), key=lambda r: r["throughput"])
        lines.append(
            f"{row['engine']:<8} {'sampled' if row['sampled'] else 'greedy':<8}  {row['draft_length'] or '-':<8}"
            f"{row['throughput']:10.1f}   {row['speedup']:.2f}x ({low:.2f}-{high:.2f})   {acceptance:>10}"
            f"   {row['block_efficiency']:10.2f}   {outside:>7}   {row['repetition']:10.2f}   {same:>13}"
            f"{'   <- best' if row is best else ''}"
        )
    lines.append("")
    lines += [f"{fact['what']}: {fact['ratio']:.2f} ({fact['range'][0]:.2f}-{fact['range'][1]:.2f})" for fact in facts]
    lines += [f"adaptive, {'sampled' if row['sampled'] else 'greedy'}: {row['why']}" for row in rows if row["why"]]
    return "\n".join(lines)


def main() -> int:
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8")
    arguments = parse_arguments()
    refuse_unsound(arguments.main, arguments.draft)
    try:
        prompts = encode(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        ways = load(arguments)
        interleave(ways, prompts, arguments.rounds)
    except KeyboardInterrupt:
        return 130
    except (RuntimeError, ValueError, KeyError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    rows = summarise(ways)
    facts = compare(rows)
    print(table(rows, facts, len(prompts)))
    environment = {
        "main": str(arguments.main),
        "draft": str(arguments.draft),
        "device": arguments.device,
        "draft_device": arguments.draft_device,
        "properties": dict(arguments.property),
        "prompts": len(prompts),
        "context": arguments.context or 0,
        "temperature": arguments.temperature,
        "max_new_tokens": arguments.max_new_tokens,
        "rounds": arguments.rounds,
        "openvino_genai": openvino_genai.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    print(json.dumps({"environment": environment, "rows": rows, "comparisons": facts}, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
