"""Measure every figure of README and docs, and write it where it is shown: `make figures`. An hour; may be interrupted.

    python scripts/figures.py                     measure what is missing, one after another
    python scripts/figures.py embedded,lossless   these only
    python scripts/figures.py --again             also what another commit measured
    python scripts/figures.py --list              names, minutes, and the commit that measured each
    python scripts/figures.py --render            measure nothing, write the pages from what is kept

Each figure is a command of this project (the table FIGURES). What it printed is kept as docs/figures/NAME.json, with
machine, versions, commit and date, which stand beside it on the page: between the lines `<!-- figures:NAME -->` and
`<!-- /figures -->` of README.md and docs/benchmarks.md; figures:gains and figures:summary are tables of several. Large
pairs are made in build/ first. The machine must be quiet.
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

from speculative.bench.reporting.gains_table import gains, summary
from speculative.cli.processes import prepare_output
from speculative.cli.whole_file import write_whole

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "docs/figures"
PAGES = (ROOT / "README.md", ROOT / "docs/benchmarks.md")
BLOCK = re.compile(r"(<!-- figures:([\w-]+) -->\n).*?(<!-- /figures -->)", re.DOTALL)
CODE = ("scripts", "speculative", "samples", "convert", "models/embedded")  # what a figure depends on
MACHINE = ("date", "processor", "cores", "memory", "os", "python", "openvino", "openvino_genai")
LEFT_OUT = ("token_view",)  # of a result: for the HTML page

EMBEDDED = "models/embedded/main models/embedded/draft"
LARGE = "build/tinyllama/main build/tinyllama/draft"
FAST = "--huge-pages --property DYNAMIC_QUANTIZATION_GROUP_SIZE=128"
PAIRS = {  # made where a figure needs one and it is not there; the first one before the others
    "build/tinyllama": "scripts/make_benchmark_pair.py build/tinyllama --shape TinyLlama-1.1B --acceptance 0.75",
    "build/tinyllama-useless": (
        "scripts/make_benchmark_pair.py build/tinyllama-useless --main-of build/tinyllama --acceptance 0"
    ),
    "build/tinyllama-medium": (
        "scripts/make_benchmark_pair.py build/tinyllama-medium --main-of build/tinyllama --acceptance 0.5"
    ),
}


class Figure(NamedTuple):
    """A command, without "python", and the minutes that it takes on two cores."""

    command: str
    minutes: float


FIGURES = {
    "embedded": Figure(
        f"scripts/benchmark.py {EMBEDDED} -k 2,4,8 --max-prompts 8 --starts 3 --rounds 1 --huge-pages", 5
    ),
    "benchmark-pair": Figure(
        f"scripts/benchmark.py {LARGE} --paths genai,engine,sampled -k 4,8 --max-prompts 4 --max-new-tokens 48 "
        f"--starts 3 --rounds 1 {FAST}",
        8,
    ),
    "lookup": Figure(
        f"scripts/benchmark.py {LARGE} --paths lookup --max-prompts 3 --max-new-tokens 48 --starts 2 --rounds 1 "
        f"--no-starts {FAST}",
        3,
    ),
    "server-embedded": Figure(
        f"scripts/benchmark_serving.py {EMBEDDED} --clients 1,4,16 --seconds 5 --png docs/load.png", 3
    ),
    "server-benchmark-pair": Figure(
        f"scripts/benchmark_serving.py {LARGE} --clients 1,4,16 --seconds 8 --rounds 2 --max-new-tokens 48", 5
    ),
    "batch-embedded": Figure(
        f"scripts/benchmark_batching.py {EMBEDDED} --clients 1,4,16 --seconds 4 --starts 3 --rounds 1 --huge-pages", 4
    ),
    "batch-benchmark-pair": Figure(
        f"scripts/benchmark_batching.py {LARGE} --clients 1,4,16 --seconds 8 --starts 2 --rounds 1 --max-new-tokens 32 "
        f"{FAST}",
        7,
    ),
    "draft-length": Figure(
        f"scripts/sweep_draft_length.py {LARGE} --k 1-10 --temperature 0,1 --max-prompts 3 --max-new-tokens 48 "
        "--rounds 2 --property DYNAMIC_QUANTIZATION_GROUP_SIZE=128 --png docs/speedup.png",
        5,
    ),
    "useless-draft": Figure(
        "scripts/benchmark.py build/tinyllama-useless/main build/tinyllama-useless/draft --paths engine,sampled -k 1 "
        f"--max-prompts 3 --max-new-tokens 48 --no-starts {FAST}",
        5,
    ),
    "medium-draft": Figure(
        "scripts/benchmark.py build/tinyllama-medium/main build/tinyllama-medium/draft --paths engine,sampled -k 3 "
        f"--max-prompts 3 --max-new-tokens 48 --no-starts {FAST}",
        4,
    ),
    "instructions": Figure(
        f"scripts/benchmark.py {LARGE} --prompts scripts/prompts/instructions.jsonl --paths engine,sampled -k 3 "
        f"--max-prompts 6 --max-new-tokens 48 --rounds 2 --no-starts {FAST}",
        4,
    ),
    "context": Figure(
        f"scripts/benchmark.py {LARGE} --context 2000 --paths genai,engine -k 4 --max-prompts 3 --max-new-tokens 48 "
        f"--starts 1 --rounds 3 --no-starts {FAST}",
        5,
    ),
    "costs": Figure(f"scripts/benchmark_costs.py {LARGE} --repeat 5 --max-new-tokens 100 {FAST}", 5),
    "tuning": Figure(f"scripts/tune.py {LARGE} --minutes 5", 6),
    "devices": Figure(
        f"scripts/device_swap.py {EMBEDDED} --devices CPU,NPU,AUTO:CPU --emulate-npu --property NPU:MAX_PROMPT_LEN=128 "
        "--max-prompts 3 --max-new-tokens 48 --results build/device_swap.jsonl --fresh",
        4,
    ),
    "lossless": Figure(f"scripts/verify_lossless.py {EMBEDDED}", 5),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", type=names, nargs="?", default=list(FIGURES), help="of figures: a,b (default: all)")
    parser.add_argument("--again", action="store_true", help="measure also what another commit measured")
    parser.add_argument("--render", action="store_true", help="measure nothing, write the pages")
    parser.add_argument("--list", action="store_true", help="print names, minutes and commits")
    return parser.parse_args()


def names(text: str) -> list[str]:
    unknown = [name for name in text.split(",") if name not in FIGURES]
    if unknown:
        raise argparse.ArgumentTypeError(f"there is no figure {unknown[0]!r}: take of {', '.join(FIGURES)}")
    return text.split(",")


# ---- what is kept ---------------------------------------------------------------------------------------------------


def read_kept() -> dict[str, dict]:
    """What is kept of each figure that was measured."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(KEPT.glob("*.json"))}


def missing(asked: list[str], kept: dict[str, dict], commit: str, again: bool) -> list[str]:
    """The figures to measure: those that nobody has, with `again` those of another commit, too."""
    return [name for name in asked if name not in kept or (again and kept[name]["commit"] != commit)]


def present_commit() -> str:
    """Of the code here, with "and changes" where it was changed since."""

    def git(*arguments: str) -> str:
        try:
            done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, encoding="utf-8")
        except OSError:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short=7", "HEAD") or "unknown"
    return f"{commit} and changes" if git("status", "--porcelain", "--", *CODE) else commit


# ---- measuring ------------------------------------------------------------------------------------------------------


def measure(name: str, command: str, commit: str) -> dict:
    """Run a figure's command; what is to be kept of it. Raises RuntimeError where it fails or gives no result."""
    begin = time.monotonic()
    *printed, last = run(command)
    try:
        result = json.loads(last)
    except ValueError:
        raise RuntimeError(f"the last line of `python {command}` is no JSON: {last[:100]!r}") from None
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
    """The lines that a command of this project prints; its progress goes to the terminal. Raises RuntimeError, and
    KeyboardInterrupt where it was interrupted."""
    (ROOT / "build").mkdir(exist_ok=True)
    arguments = [sys.executable, *shlex.split(command)]
    usual = signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is the command's, which ends what it started
    try:
        done = subprocess.run(arguments, cwd=ROOT, stdout=subprocess.PIPE, encoding="utf-8")
    finally:
        signal.signal(signal.SIGINT, usual)
    if done.returncode in (130, -2):
        raise KeyboardInterrupt
    if done.returncode or not done.stdout.strip():
        raise RuntimeError(f"`python {command}` ended with status {done.returncode}: run it to see why")
    return done.stdout.strip().split("\n")


def machine() -> dict:
    from speculative.bench.harness import environment

    facts = environment(argparse.Namespace())
    return {key: facts[key] for key in MACHINE}


def pairs_for(command: str) -> list[str]:
    """The commands that make what a command needs and is not there yet."""
    needed = [pair for pair in PAIRS if f"{pair}/" in command]
    if needed and needed[0] != "build/tinyllama":
        needed.insert(0, "build/tinyllama")
    return [PAIRS[pair] for pair in needed if not (ROOT / pair / "pair.json").exists()]


# ---- the pages ------------------------------------------------------------------------------------------------------


def rendered(text: str, kept: dict[str, dict]) -> str:
    """A page's text, what stands between the marks made from what is kept."""

    def block(found: re.Match) -> str:
        begin, name, end = found.groups()
        tables = {"gains": gains, "summary": summary}
        return begin + (tables[name](kept) if name in tables else shown(name, kept.get(name))) + end

    return BLOCK.sub(block, text)


def shown(name: str, kept: dict | None) -> str:
    if kept is None:
        return f"Not measured yet: `make figures FIGURES={name}`.\n"
    facts = kept["machine"]
    return (
        f"```bash\n{kept['command']}\n```\n\n"
        + "```text\n" + "\n".join(kept["output"]) + "\n```\n\n"
        + f"Measured {facts['date']} at commit {kept['commit']} on {facts['processor']}, {facts['cores']} cores, "
        f"{facts['memory']}, {facts['os']}, Python {facts['python']}, OpenVINO {facts['openvino']}, OpenVINO GenAI "
        f"{facts['openvino_genai']}, in {kept['minutes']:g} minutes.\n"
    )  # fmt: skip


def write_pages() -> None:
    kept = read_kept()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if rendered(text, kept) != text:
            write_whole(page, rendered(text, kept))


# ---- the command ----------------------------------------------------------------------------------------------------


def list_figures(kept: dict[str, dict]) -> None:
    for name, figure in FIGURES.items():
        told = f"{kept[name]['machine']['date']} at commit {kept[name]['commit']}" if name in kept else "not measured"
        print(f"{name:<22} {figure.minutes:>3g} min   {told}")


def main() -> int:
    prepare_output()
    arguments = parse_arguments()
    kept, commit, failed = read_kept(), present_commit(), False
    if arguments.list:
        list_figures(kept)
        return 0
    to_do = [] if arguments.render else missing(arguments.names, kept, commit, arguments.again)
    KEPT.mkdir(exist_ok=True)
    for number, name in enumerate(to_do, start=1):
        command, minutes = FIGURES[name]
        print(f"{number} of {len(to_do)}: {name}, about {minutes:g} minutes", file=sys.stderr)
        try:
            for making in pairs_for(command):
                run(making)
            figure = measure(name, command, commit)
        except KeyboardInterrupt:
            print("Interrupted: what was measured is kept; the same command goes on from here.", file=sys.stderr)
            return 130
        except RuntimeError as error:
            print(f"error: {error}", file=sys.stderr)
            failed = True
            continue
        write_whole(KEPT / f"{name}.json", json.dumps(figure, ensure_ascii=False, indent=1) + "\n")
        write_pages()
    write_pages()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
