"""Measure and render the benchmark results in README and docs: `make figures`. All take four hours; can be resumed.

    python scripts/figures.py                     measure missing results, one after another
    python scripts/figures.py embedded,lossless   measure only these
    python scripts/figures.py --again             also measure results of other commits again
    python scripts/figures.py --list              list names, minutes, and the commit of each result
    python scripts/figures.py --render            only render the pages from the saved results

Each result is the output of a command (the table FIGURES), saved as docs/figures/NAME.json with machine, versions,
commit and date. It is rendered between the lines `<!-- figures:NAME -->` and `<!-- /figures -->` of README.md,
docs/benchmarks.md and docs/structured-output.md; figures:gains, figures:overview, figures:sources, figures:structured
and figures:summary are tables of one or several results. Large pairs are generated in build/ first. The machine must be
idle.
"""

import argparse
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from speculative.atomic_write import atomic_write
from speculative.bench.reporting.gains_table import gains, overview, processor, sources, structured, summary
from speculative.bench.result import Machine, RecordedResult
from speculative.cli.parser import Parser
from speculative.cli.processes import prepare_output

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "docs/figures"
PAGES = (ROOT / "README.md", ROOT / "docs/benchmarks.md", ROOT / "docs/structured-output.md")
BLOCK = re.compile(r"(<!-- figures:([\w-]+) -->\n).*?(<!-- /figures -->)", re.DOTALL)
CODE = ("scripts", "speculative", "samples", "convert", "models/embedded")  # paths that results depend on
MACHINE = ("date", "processor", "instruction_sets", "cores", "memory", "os", "python", "openvino", "openvino_genai")
LEFT_OUT = ("token_view",)  # not saved: only for the HTML report

EMBEDDED = "models/embedded/main models/embedded/draft"
LARGE = "build/tinyllama/main build/tinyllama/draft"
LARGE_HEAD = "build/qwen3-1.7b-eagle3/main build/qwen3-1.7b-eagle3/draft"
FAST = "--huge-pages --property DYNAMIC_QUANTIZATION_GROUP_SIZE=128"
CHAT = "models/smollm2-135m/main models/smollm2-135m/draft"
MIXED = "--prompts scripts/prompts/repeats.jsonl,scripts/prompts/instructions.jsonl"
PAIRS = {  # made when needed; the second one needs the first
    "build/tinyllama": "scripts/make_benchmark_pair.py build/tinyllama --shape TinyLlama-1.1B --acceptance 0.75",
    "build/tinyllama-useless": (
        "scripts/make_benchmark_pair.py build/tinyllama-useless --main-of build/tinyllama --acceptance 0"
    ),
    "build/qwen3-1.7b-eagle3": "scripts/make_benchmark_pair.py build/qwen3-1.7b-eagle3 --shape Qwen3-1.7B --eagle3",
    "models/smollm2-135m": "convert/export_pair.py --pair smollm2-135m",
}


class Figure(NamedTuple):
    """A command, without "python", and its duration in minutes on two cores."""

    command: str
    minutes: float


FIGURES = {
    "embedded": Figure(
        f"scripts/benchmark.py {EMBEDDED} -k 2,4,8 --max-prompts 8 --starts 3 --rounds 1 --huge-pages", 3
    ),
    "eagle3-embedded": Figure(
        "scripts/benchmark.py models/embedded/main models/embedded/eagle3 --paths genai,engine,sampled -k 2,3,4 "
        "--max-prompts 8 --starts 3 --rounds 1 --huge-pages --no-starts",
        2,
    ),
    "eagle3-smollm2": Figure(
        f"scripts/benchmark.py {CHAT} --paths genai,engine,sampled -k 3,5 --prompts scripts/prompts/instructions.jsonl "
        "--max-prompts 16 --starts 2 --rounds 1 --huge-pages --no-starts",
        12,
    ),
    "benchmark-pair": Figure(
        f"scripts/benchmark.py {LARGE} --paths genai,engine,sampled -k 4,8 --max-prompts 4 --max-new-tokens 48 "
        f"--starts 3 --rounds 1 {FAST}",
        5,
    ),
    "eagle3-benchmark-pair": Figure(
        f"scripts/benchmark.py {LARGE_HEAD} --paths genai,engine,sampled -k 3,4 --max-prompts 8 --max-new-tokens 64 "
        "--starts 3 --rounds 1 --huge-pages --no-starts",
        19,
    ),
    "lookup": Figure(
        f"scripts/benchmark.py {LARGE} --paths lookup --max-prompts 3 --max-new-tokens 48 --starts 2 --rounds 1 "
        f"--no-starts {FAST}",
        6,
    ),
    "sources-smollm2": Figure(
        f"scripts/benchmark.py {CHAT} {MIXED} --paths genai,lookup,engine,sampled -k 3 --max-prompts 33 "
        "--max-new-tokens 96 --rounds 1 --no-starts",
        14,
    ),
    "structured-smollm2": Figure(
        f"scripts/benchmark.py {CHAT} --prompts scripts/prompts/structured.jsonl --paths lookup,engine -k 3 "
        "--max-prompts 6 --max-new-tokens 64 --rounds 1 --no-starts",
        2,
    ),
    "sources-benchmark-pair": Figure(
        f"scripts/benchmark.py {LARGE} {MIXED} --paths genai,lookup,engine,sampled -k 4 --max-prompts 12 "
        f"--max-new-tokens 32 --rounds 1 --no-starts {FAST}",
        7,
    ),
    "fixed-costs-smollm2": Figure(
        f"scripts/compare_sources.py {CHAT} {MIXED} -k 2,3,4 --max-prompts 88 --samples 3", 36
    ),
    "fixed-costs-benchmark-pair": Figure(
        f"scripts/compare_sources.py {LARGE} {MIXED} -k 4,8 --max-prompts 44 --max-new-tokens 48 "
        "--samples 3 --property DYNAMIC_QUANTIZATION_GROUP_SIZE=128",
        25,
    ),
    "server-embedded": Figure(
        f"scripts/benchmark_serving.py {EMBEDDED} --max-concurrency 1,4,16 --seconds 5 --png docs/load.png", 2
    ),
    "server-benchmark-pair": Figure(
        f"scripts/benchmark_serving.py {LARGE} --max-concurrency 1,4,16 --seconds 8 --rounds 2 --max-new-tokens 48", 3
    ),
    "server-structured": Figure(
        f"scripts/benchmark_serving.py {EMBEDDED} --chat --prompts scripts/prompts/structured.jsonl "
        "--max-concurrency 1,4,16 --seconds 4 --rounds 2",
        3,
    ),
    "batch-embedded": Figure(
        f"scripts/benchmark_batching.py {EMBEDDED} --max-concurrency 1,4,16 --seconds 4 --starts 3 --rounds 1 "
        "--huge-pages",
        3,
    ),
    "batch-benchmark-pair": Figure(
        f"scripts/benchmark_batching.py {LARGE} --max-concurrency 1,4,16 --seconds 8 --starts 2 --rounds 1 "
        f"--max-new-tokens 32 {FAST}",
        9,
    ),
    "draft-length": Figure(
        f"scripts/sweep_draft_length.py {LARGE} -k 1-10 --temperature 0,1 --max-prompts 3 --max-new-tokens 48 "
        "--rounds 2 --property DYNAMIC_QUANTIZATION_GROUP_SIZE=128 --png docs/speedup.png",
        11,
    ),
    "useless-draft": Figure(
        "scripts/benchmark.py build/tinyllama-useless/main build/tinyllama-useless/draft --paths engine,sampled -k 1 "
        f"--max-prompts 3 --max-new-tokens 48 --no-starts {FAST}",
        8,
    ),
    "context": Figure(
        f"scripts/benchmark.py {LARGE} --context 2000 --paths genai,engine -k 4 --max-prompts 3 --max-new-tokens 48 "
        f"--starts 1 --rounds 3 --no-starts {FAST}",
        5,
    ),
    "costs": Figure(f"scripts/benchmark_costs.py {LARGE} --repeat 5 --max-new-tokens 100 {FAST}", 5),
    "tuning": Figure(f"scripts/tune.py {LARGE} --minutes 5", 8),
    "devices": Figure(
        f"scripts/device_swap.py {EMBEDDED} --devices CPU,NPU,AUTO:CPU --emulate-npu --property NPU:MAX_PROMPT_LEN=128 "
        "--max-prompts 3 --max-new-tokens 48 --results build/device_swap.jsonl --fresh",
        2,
    ),
    "lossless": Figure(f"scripts/verify_lossless.py {EMBEDDED}", 13),
}


def parse_arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "names", type=names, nargs="?", default=list(FIGURES), help="results to measure: a,b (default: all)"
    )
    parser.add_argument("--again", action="store_true", help="also measure results of other commits again")
    parser.add_argument("--render", action="store_true", help="only render the pages")
    parser.add_argument("--list", action="store_true", help="print names, minutes and commits")
    return parser.parse_args()


def names(text: str) -> list[str]:
    unknown = [name for name in text.split(",") if name not in FIGURES]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown result {unknown[0]!r}: choose from {', '.join(FIGURES)}")
    return text.split(",")


# ---- saved results --------------------------------------------------------------------------------------------------


def read_kept() -> dict[str, RecordedResult]:
    """The saved results by name."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(KEPT.glob("*.json"))}


def missing(requested: list[str], recorded: dict[str, RecordedResult], commit: str, again: bool) -> list[str]:
    """The results to measure: missing ones and, with `again`, those of another commit."""
    return [name for name in requested if name not in recorded or (again and recorded[name]["commit"] != commit)]


def present_commit() -> str:
    """The current commit, followed by "and changes" if there are uncommitted changes to the code."""

    def git(*arguments: str) -> str:
        try:
            done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, encoding="utf-8")
        except OSError:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short=7", "HEAD") or "unknown"
    return f"{commit} and changes" if git("status", "--porcelain", "--", *CODE) else commit


# ---- measuring ------------------------------------------------------------------------------------------------------


def measure(name: str, command: str, commit: str) -> RecordedResult:
    """Run a command and return the result to save. Raises RuntimeError if it fails or prints no result."""
    begin = time.monotonic()
    *printed, last = run(command)
    try:
        result = json.loads(last)
    except ValueError:
        raise RuntimeError(f"the last line of `python {command}` is not JSON: {last[:100]!r}") from None
    return {
        "name": name,
        "command": f"python {command}",
        "commit": commit,
        "machine": machine(),
        "minutes": round((time.monotonic() - begin) / 60, 1),
        "output": [line.rstrip() for line in printed],
        "result": {key: value for key, value in result.items() if key not in LEFT_OUT},
    }


def run(command: str) -> list[str]:
    """The lines printed by a command of this project, with paths relative to the checkout; its progress goes to the
    terminal. Raises RuntimeError if it fails, KeyboardInterrupt if it was interrupted."""
    (ROOT / "build").mkdir(exist_ok=True)
    arguments = [sys.executable, *shlex.split(command)]
    previous = signal.signal(signal.SIGINT, lambda *_: None)  # the command handles Ctrl-C and cleans up
    try:
        done = subprocess.run(arguments, cwd=ROOT, stdout=subprocess.PIPE, encoding="utf-8")
    finally:
        signal.signal(signal.SIGINT, previous)
    if done.returncode in (130, -2):
        raise KeyboardInterrupt
    if done.returncode or not done.stdout.strip():
        raise RuntimeError(f"`python {command}` exited with status {done.returncode}: run it to see why")
    return done.stdout.replace(f"{ROOT}/", "").strip().split("\n")


def machine() -> Machine:
    from speculative.bench.harness import environment

    facts = environment(argparse.Namespace())
    return {key: facts[key] for key in MACHINE}


def pairs_for(command: str) -> list[str]:
    """The commands that generate the missing pairs of a command."""
    needed = [pair for pair in PAIRS if f"{pair}/" in command]
    if needed == ["build/tinyllama-useless"]:
        needed.insert(0, "build/tinyllama")
    return [PAIRS[pair] for pair in needed if not (ROOT / pair / "pair.json").exists()]


# ---- the pages ------------------------------------------------------------------------------------------------------


def rendered(text: str, recorded: dict[str, RecordedResult]) -> str:
    """A page's text with the content between the markers generated from the saved results."""

    def block(match: re.Match) -> str:
        begin, name, end = match.groups()
        tables = {
            "gains": gains,
            "overview": overview,
            "sources": sources,
            "structured": structured,
            "summary": summary,
        }
        return begin + (tables[name](recorded) if name in tables else shown(name, recorded.get(name))) + end

    return BLOCK.sub(block, text)


def shown(name: str, recorded: RecordedResult | None) -> str:
    if recorded is None:
        return f"Not measured yet: `make figures FIGURES={name}`.\n"
    facts = recorded["machine"]
    return (
        f"```bash\n{recorded['command']}\n```\n\n"
        + "```text\n" + "\n".join(recorded["output"]) + "\n```\n\n"
        + f"Measured {facts['date']} at commit {recorded['commit']} on {processor(facts)}, {facts['cores']} cores, "
        f"{facts['memory']}, {facts['os']}, Python {facts['python']}, OpenVINO {facts['openvino']}, OpenVINO GenAI "
        f"{facts['openvino_genai']}, in {recorded['minutes']:g} minutes.\n"
    )  # fmt: skip


def write_pages() -> None:
    recorded = read_kept()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if rendered(text, recorded) != text:
            atomic_write(page, rendered(text, recorded))


# ---- the command ----------------------------------------------------------------------------------------------------


def list_figures(recorded: dict[str, RecordedResult]) -> None:
    for name, figure in FIGURES.items():
        state = (
            f"{recorded[name]['machine']['date']} at commit {recorded[name]['commit']}"
            if name in recorded
            else "not measured"
        )
        print(f"{name:<22} {figure.minutes:>3g} min   {state}")


def main() -> int:
    prepare_output()
    arguments = parse_arguments()
    recorded, commit, failed = read_kept(), present_commit(), False
    if arguments.list:
        list_figures(recorded)
        return 0
    to_do = [] if arguments.render else missing(arguments.names, recorded, commit, arguments.again)
    KEPT.mkdir(exist_ok=True)
    for number, name in enumerate(to_do, start=1):
        command, minutes = FIGURES[name]
        print(f"{number} of {len(to_do)}: {name}, about {minutes:g} minutes", file=sys.stderr)
        try:
            for making in pairs_for(command):
                run(making)
            figure = measure(name, command, commit)
        except KeyboardInterrupt:
            print("Interrupted: completed results are saved; rerun the command to resume.", file=sys.stderr)
            return 130
        except RuntimeError as error:
            print(f"error: {error}", file=sys.stderr)
            failed = True
            continue
        atomic_write(KEPT / f"{name}.json", json.dumps(figure, ensure_ascii=False, indent=1) + "\n")
        write_pages()
    write_pages()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
