"""Markdown tables of the results in README and docs, from the recorded results: all, of both pairs, and by category."""

import re
from collections.abc import Callable
from typing import Any, cast

from speculative.bench.result import (
    BatchingResult,
    BenchmarkResult,
    LoadRow,
    LosslessResult,
    Machine,
    MethodRow,
    RecordedResult,
    ServingResult,
)
from speculative.pair.engines import GENAI, NATIVE, engine_id

PAIRS = {
    "embedded": "embedded pair (31.6 M + 2.0 M)",
    "benchmark-pair": "benchmark pair (1.1 B int8 + 34 M, TinyLlama's shape)",
}
SOURCES = {
    "sources-smollm2": "SmolLM2-135M (fp16 weights) with its EAGLE-3 head",
    "sources-benchmark-pair": "Benchmark pair (1.1 B with int8 weights, draft of 34 M)",
}
STRUCTURED = "structured-smollm2"
Cell = Callable[[Any], str]  # of the result of the program that `figures` come from


def gains(recorded: dict[str, RecordedResult]) -> str:
    """The Markdown table of both pairs. A cell says so if its result was not measured."""
    lines = [f"| | {' | '.join(PAIRS.values())} |", f"|---|{'---|' * len(PAIRS)}"]
    for words, figures, cell in ROWS:
        names = [figures.format(pair) for pair in PAIRS]
        cells = [cell(recorded[name]["result"]) if name in recorded else "not measured" for name in names]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    used = sorted({figures.format(pair) for _, figures, _ in ROWS for pair in PAIRS} & set(recorded))
    commits = dict.fromkeys((recorded[name]["commit"], recorded[name]["machine"]["date"][:10]) for name in used)
    commits_text = ", ".join(f"commit {commit} ({day})" for commit, day in commits)
    note = f"Measured at {commits_text}." if used else "Not measured yet: `make figures`."
    return "\n".join([*lines, "", note]) + "\n"


def summary(recorded: dict[str, RecordedResult]) -> str:
    """The README's Markdown table: a column per pair, one number and its range per result."""
    used = [name for name in SUMMARY_PAIRS if name in recorded]
    if not used:
        return "Not measured yet at this version: `make figures`. [Earlier figures](docs/figures.md).\n"
    lines = [f"| speedup (range) | {' | '.join(SUMMARY_PAIRS.values())} |", f"|---|{'---|' * len(SUMMARY_PAIRS)}"]
    for words, cell, figures in SUMMARY:
        cells = [
            "" if figure is None else cell(recorded[figure]["result"]) if figure in recorded else "not measured"
            for figure in figures
        ]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    measured = "; ".join(
        f"{SUMMARY_PAIRS[name].split(' (')[0]}: {_where(recorded[name]['machine'])}, commit {recorded[name]['commit']}"
        for name in used
    )
    note = (
        "Speedup over the main model alone (greedy: in GenAI's pipeline), median and range; decode only, except for "
        "the server, whose throughput includes prompts and waiting. Speedups [differ by category of "
        f"prompt](docs/benchmarks.md#all-sources-of-draft-tokens). {measured}. OpenVINO GenAI "
        f"{recorded[used[0]]['machine']['openvino_genai']}. Measured with [`make figures`](docs/benchmarks.md)."
    )
    return "\n".join([*lines, "", note]) + "\n"


def overview(recorded: dict[str, RecordedResult]) -> str:
    """The first Markdown table of the benchmarks: a row per recorded result, with its machine and its section."""
    lines = ["| | greedy | temperature 1 | measured on | details |", "|---|---|---|---|---|"]
    for words, figure, greedy, sampled, section in OVERVIEW:
        link = f"[{section}](#{section.lower().replace(' ', '-')})"
        if figure not in recorded:
            lines.append(f"| {words} | not measured | | | {link} |")
            continue
        result, machine = recorded[figure]["result"], recorded[figure]["machine"]
        # without the range of a single round, "1.66x (1.66-1.66)"
        cells = [re.sub(r" \(([\d.]+)-\1\)", "", cell(result)) if cell else "" for cell in (greedy, sampled)]
        lines.append(f"| {words} | {cells[0]} | {cells[1]} | {_where(machine)} | {link} |")
    return "\n".join(lines) + "\n"


def sources(recorded: dict[str, RecordedResult]) -> str:
    """The Markdown tables of all sources of draft tokens by category of prompts, greedy and sampled."""
    parts = []
    for name in SOURCES:
        for sampled in (False, True) if name in recorded else ():
            result = cast(BenchmarkResult, recorded[name]["result"])
            title = f"**{SOURCES[name]}, {'temperature 1' if sampled else 'greedy'}**"
            parts.append(f"{title}\n\n{by_category(result, sampled)}")
    return "\n".join(parts) or f"Not measured yet: `make figures FIGURES={','.join(SOURCES)}`.\n"


def structured(recorded: dict[str, RecordedResult]) -> str:
    """The Markdown table of all sources of draft tokens by category of JSON schemas."""
    if STRUCTURED not in recorded:
        return f"Not measured yet: `make figures FIGURES={STRUCTURED}`.\n"
    facts, machine = recorded[STRUCTURED], recorded[STRUCTURED]["machine"]
    result = cast(BenchmarkResult, facts["result"])
    return (
        f"{by_category(result, sampled=False)}\n"
        f"`{facts['command']}`, {machine['cores']} cores of {processor(machine)}, OpenVINO GenAI "
        f"{machine['openvino_genai']}, {machine['date'][:10]}, commit {facts['commit']}.\n"
    )


def by_category(result: BenchmarkResult, sampled: bool) -> str:
    """A row per category, with the speedup of each method; the best of a row is bold."""
    methods = [row for row in result["rows"] if row["sampled"] == sampled and row["draft_length"]]
    names = [row["name"] for row in methods]
    speedups: dict[str, dict[str, float]] = {}
    prompts = {row["category"]: row["prompts"] for row in result["categories"]}
    for row in result["categories"]:
        speedups.setdefault(row["category"], {})[row["name"]] = row["speedup"]
    lines = [f"| | prompts | {' | '.join(names)} |", f"|---|---|{'---|' * len(names)}"]
    for category, speedups_of_category in speedups.items():
        lines.append(
            f"| {category} | {prompts[category]} | {_best_in_bold([speedups_of_category[name] for name in names])} |"
        )
    speeds = [row["speedup"] for row in methods]
    lines.append(f"| all prompts | {sum(prompts.values())} | {_best_in_bold(speeds)} |")
    each = [f"{row['block_efficiency']:.2f}" if row["block_efficiency"] else "" for row in methods]
    lines.append(f"| tokens per forward pass | | {' | '.join(each)} |")
    return "\n".join(lines) + "\n"


def processor(machine: Machine) -> str:
    """The processor's short name, with its instruction sets; results of before 2026-11-28 lack them."""
    name = machine["processor"].replace("(R)", "").removesuffix(" Processor")
    return f"{name} ({sets})" if (sets := machine.get("instruction_sets")) else name


def _where(machine: Machine) -> str:
    """Processor, cores and day of a measurement."""
    return f"{processor(machine)}, {machine['cores']} cores, {machine['date'][:10]}"


def _best_in_bold(speedups: list[float]) -> str:
    best = max(speedups, default=0.0)
    return " | ".join(f"**{speed:.2f}x**" if speed == best else f"{speed:.2f}x" for speed in speedups)


def best_fixed(engine: str, sampled: bool) -> Cell:
    def cell(result: BenchmarkResult) -> str:
        rows = [row for row in method_rows(result, engine, sampled) if isinstance(row["draft_length"], int)]
        drafted = [row for row in rows if row["draft_length"]]
        if not drafted:
            return ""
        best = max(drafted, key=lambda row: row["speedup"])
        return f"{times(best)} at K = {best['draft_length']}"

    return cell


def named(engine: str, sampled: bool, begin: str) -> Cell:
    """The cell of the method whose draft length starts with `begin`."""

    def cell(result: BenchmarkResult) -> str:
        rows = [row for row in method_rows(result, engine, sampled) if str(row["draft_length"]).startswith(begin)]
        return times(rows[0]) if rows else ""

    return cell


def greedy_and_sampled(begin: str) -> tuple[Cell, Cell]:
    """The cells of such a method of this project's engine; empty where it was not measured."""
    return named(NATIVE, False, begin), named(NATIVE, True, begin)


def method_rows(result: BenchmarkResult, engine: str, sampled: bool) -> list[MethodRow]:
    chosen = [row for row in result["rows"] if row["name"] != "GenAI, draft alone"]
    return [row for row in chosen if (engine_id(row["engine"]), row["sampled"]) == (engine, sampled)]


def same_texts(result: BenchmarkResult) -> str:
    """Our engine over GenAI's with the interval over prompts, where both gave the same texts."""
    comparisons = [fact for fact in result["comparisons"] if fact.get("where")]
    return "; ".join(
        f"{fact['where']} {fact['ratio']:.2f}{span(fact['interval'] or fact['range'])}" for fact in comparisons
    )


def without_difference(kind: str) -> Cell:
    """Of this project's engine: the paths without a difference to the main model alone, of "greedy" or "sampled"."""

    def cell(result: LosslessResult) -> str:
        rows = [row for row in cast(dict[str, Any], result)[kind] if row["ours"]]
        held = [row for row in rows if row["holds"]]
        return f"no difference in {len(held)} of {len(rows)} decoding paths" if rows else ""

    return cell


def under_load(result: ServingResult) -> str:
    rows = [row for row in result["rows"] if row["method"] == "with draft" and row["speedup"] is not None]
    return "; ".join(f"{row['clients']}: {times(row)}" for row in rows)


def under_load_of(clients: int) -> Cell:
    def cell(result: ServingResult) -> str:
        rows = [row for row in result["rows"] if row["method"] == "with draft" and row["clients"] == clients]
        return times(rows[0]) if rows and rows[0]["speedup"] is not None else ""

    return cell


def at_once(begin: str, end: str) -> Cell:
    def cell(result: BatchingResult) -> str:
        comparisons = [one for one in result["comparisons"] if one["what"].startswith(begin) and end in one["what"]]
        return "; ".join(f"{one['clients']}: {one['ratio']:.2f}{span(one['range'])}" for one in comparisons)

    return cell


def times(row: MethodRow | LoadRow) -> str:
    return f"{row['speedup']:.2f}x{span(row['speedup_range'])}"


def span(bounds: list[float] | None) -> str:
    """Bounds in parentheses; "" without them, as of a single prompt."""
    return f" ({bounds[0]:.2f}-{bounds[1]:.2f})" if bounds else ""


ROWS: list[tuple[str, str, Cell]] = [
    ("greedy, GenAI's pipeline, best K", "{}", best_fixed(GENAI, sampled=False)),
    ("greedy, this project's engine, best K", "{}", best_fixed(NATIVE, sampled=False)),
    ("greedy, this project's engine, adaptive K", "{}", named(NATIVE, False, "adaptive")),
    (
        "this project's engine / GenAI, greedy, tokens/s on identical texts (95 % interval over prompts)",
        "{}",
        same_texts,
    ),
    (
        "sampled at temperature 1, lossless, this project's engine, best K (over the same engine alone)",
        "{}",
        best_fixed(NATIVE, True),
    ),
    ("sampled, this project's engine, adaptive K", "{}", named(NATIVE, True, "adaptive")),
    ("server throughput with / without draft, by number of clients", "server-{}", under_load),
    (
        "batched greedy requests: this project's engine alone / GenAI alone",
        "batch-{}",
        at_once("ours, main alone /", "GenAI"),
    ),
    (
        "batched greedy requests: this project's engine with draft / best of GenAI",
        "batch-{}",
        at_once("ours, draft /", "best of"),
    ),
]

SUMMARY_PAIRS = {
    "eagle3-smollm2": "SmolLM2-135M-Instruct (EAGLE-3 head; chat prompts)",
    "benchmark-pair": "Benchmark pair (synthetic: 1.1 B int8 main model, 34 M draft; Python code)",
}
BOTH = tuple(SUMMARY_PAIRS)
# words, cell, and the recorded result for each of these pairs
SUMMARY: list[tuple[str, Cell, tuple[str | None, ...]]] = [
    ("greedy, GenAI's pipeline, best K", best_fixed(GENAI, sampled=False), BOTH),
    ("greedy, this project's engine, best K", best_fixed(NATIVE, sampled=False), BOTH),
    ("greedy, this project's engine, adaptive K", named(NATIVE, False, "adaptive"), BOTH),
    ("sampled at temperature 1, lossless, this project's engine", named(NATIVE, True, "adaptive"), BOTH),
    ("server with 4 clients", under_load_of(4), (None, "server-benchmark-pair")),
]

# words, recorded result, greedy cell, sampled cell, section of docs/benchmarks.md
OVERVIEW: list[tuple[str, str, Cell, Cell | None, str]] = [
    (
        "draft model (34 M) of a 1.1 B int8 main model, best K",
        "benchmark-pair",
        best_fixed(NATIVE, False),
        best_fixed(NATIVE, True),
        "The benchmark pair",
    ),
    ("the same, adaptive K", "benchmark-pair", *greedy_and_sampled("adaptive"), "The benchmark pair"),
    ("the same, after 2,000 tokens of context", "context", *greedy_and_sampled("adaptive"), "Long contexts"),
    (
        "draft model (2.0 M) of a 31.6 M main model, adaptive K",
        "embedded",
        *greedy_and_sampled("adaptive"),
        "The embedded pair",
    ),
    ("EAGLE-3 head of SmolLM2-135M, adaptive K", "eagle3-smollm2", *greedy_and_sampled("adaptive"), "EAGLE-3 heads"),
    (
        "EAGLE-3 head (137 M) of a synthetic 1.7 B int8 main model, adaptive K",
        "eagle3-benchmark-pair",
        *greedy_and_sampled("adaptive"),
        "A head at the size of published ones",
    ),
    (
        "suffix decoding with SmolLM2-135M, no draft model",
        "sources-smollm2",
        *greedy_and_sampled("lookup adaptive"),
        "All sources of draft tokens",
    ),
    (
        "EAGLE-3 head and suffix decoding with SmolLM2-135M",
        "sources-smollm2",
        *greedy_and_sampled("adaptive, two sources"),
        "All sources of draft tokens",
    ),
    (
        "the same, answers that follow a JSON schema",
        "structured-smollm2",
        *greedy_and_sampled("adaptive, two sources"),
        "JSON schemas",
    ),
    (
        "a draft with an acceptance near 0, adaptive K",
        "useless-draft",
        *greedy_and_sampled("adaptive"),
        "A useless draft",
    ),
    (
        "server with the 1.1 B pair, by number of clients",
        "server-benchmark-pair",
        under_load,
        None,
        "Under load",
    ),
    (
        "lossless: output of this project's engine compared with the main model alone",
        "lossless",
        without_difference("greedy"),
        without_difference("sampled"),
        "Losslessness",
    ),
]
