"""Benchmark every decoding method for a model pair, interleaved, on your prompts and devices.

    python scripts/benchmark.py models/embedded/main models/embedded/draft
    python scripts/benchmark.py models/embedded/main --prompts scripts/prompts/repeats.jsonl

The main model alone is always measured. `--paths` adds:

    draft    the draft model alone
    genai    GenAI's pipeline with the draft, greedy, for each K
    lookup   draft tokens copied from the text: GenAI's prompt lookup; suffix decoding, with fixed and adaptive K
    engine   this project's engine ("ours" in the tables), greedy, for each K and adaptive
    sampled  this project's engine at `--temperature`, lossless

With `lookup` and one of the last two, this project's engine also combines the draft with suffix decoding. With
`lookup` and `sampled`, suffix decoding is sampled, too. Without DRAFT, the path is `lookup`. GenAI's own sampled mode
with a draft is not lossless (scripts/verify_lossless.py).

Each GenAI path and this project's engine run in processes of their own, each with a copy of the main model. Choose
fewer paths if memory is short. The memory that a model is loaded into changes its speed by 5 to 10 %: `--starts 3`
starts the processes three times.

With an EAGLE-3 head, the `draft` path is skipped, because a head cannot decode alone. Plain decoding in this project's
engine then runs in a separate process, in which the main model computes no hidden states. `--tree-depth` adds GenAI's
trees to the `genai` path; their acceptance rate counts all tokens of a tree.

All methods get the same token ids and generate the same number of new tokens (`ignore_eos`), except for prompts with a
"json_schema" in the file. Their answers follow the schema and end with it. One more method drafts only the tokens that
the schema forces; the other methods of this project's engine draft these, too.

In every round, each prompt runs with every method, one after another and in varying order: background load affects all
of them equally. No prompt is served from a cache (except with `--context`). Throughput is decode only (prompt
excluded). Speedup is over the main model alone in the same round, in GenAI (sampled: in this project's engine). The
table shows the median and range over the rounds. Engines are compared on the prompts for which both gave the same text,
with a 95 % confidence interval over them (speculative/bench/ratios.py). More columns:

    tok/pass    new tokens / main-model forward passes
    outside     share of the decoding time spent outside the models
    repetition  share of repeated 4-grams, which inflate acceptance

Standard output is a table followed by one JSON object on the last line. Ctrl-C keeps the complete rounds. For the
effect of K, see scripts/sweep_draft_length.py.
"""

from speculative.cli.program import exit_on, prepare_output

import argparse
import math
import signal
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import ge
from pathlib import Path

import numpy as np
import openvino_genai

from speculative.bench.cluster.child_process import ChildFailed
from speculative.bench.decoding_process import Closing, DecodingProcess, ProcessJob, measure
from speculative.bench.harness import (
    BackgroundLoad,
    Method,
    add_output_arguments,
    environment,
    iteration_split,
    row,
    write_outputs,
)
from speculative.bench.methods import ADAPTIVE_LOOKUP, FORCED, LOOKUP, TREE, TWO_SOURCES
from speculative.bench.prompts import Prompt, read_prompts, shown_name, token_ids
from speculative.bench.ratios import engines, ratio, verdict
from speculative.bench.result import BenchmarkResult, CategoryRow, MethodRow, Ratio, StartCost
from speculative.bench.startup import Start, start_costs
from speculative.cli.arguments import (
    add_huge_pages_argument,
    add_pair_arguments,
    add_paths_argument,
    add_run_arguments,
    add_starts_argument,
    choose_paths,
    lengths,
    limit_in_genai,
    model_specs,
    refuse,
    refuse_unusable,
    require_draft_for,
)
from speculative.cli.number_types import positive_float, positive_int
from speculative.cli.parser import Parser
from speculative.cli.processes import signals_raise
from speculative.models.eagle3_graph import is_head
from speculative.pair.draft_limits import alone_limit, genai_tree_limit, native_limit, tokenizer_limit
from speculative.pair.engines import GENAI, NATIVE
from speculative.sequence import metrics

OTHER_TEXT = Path(__file__).resolve().parent.parent / "speculative/modelgen/recipes.txt"  # for --context
PATHS = ("draft", "genai", "lookup", "engine", "sampled")
REPEATS_ITSELF = 0.25  # repetition above which the summary warns


def parse_arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    add_pair_arguments(parser, without_draft="the path lookup is measured")
    add_run_arguments(parser, max_prompts=20)
    parser.add_argument(
        "-k",
        "--num-assistant-tokens",
        type=lengths,
        default="2,4,8",
        metavar="K",
        help="draft lengths, 1-8 or 2,4 (default: 2,4,8)",
    )
    parser.add_argument(
        "--tree-depth",
        type=positive_int,
        metavar="D",
        help="also GenAI's trees of this depth with K tokens (EAGLE-3 drafts)",
    )
    parser.add_argument(
        "--branching-factor", type=positive_int, metavar="B", help="branching factor of GenAI's trees (default: 4)"
    )
    add_paths_argument(parser, PATHS)
    parser.add_argument(
        "--temperature", type=positive_float, metavar="T", help="temperature of the sampled path (default: 1)"
    )
    parser.add_argument(
        "--context",
        type=positive_int,
        metavar="N",
        help="prepend N tokens of other text to every prompt (kept in the KV cache)",
    )
    add_starts_argument(parser)
    add_huge_pages_argument(parser)
    parser.add_argument("--no-starts", action="store_true", help="skip measuring load time and peak memory")
    add_output_arguments(parser)
    arguments = parser.parse_args()
    choose_paths(parser, arguments, PATHS)
    require_draft_for(parser, arguments, "--draft-device", "--num-assistant-tokens", "--tree-depth")
    if arguments.temperature and "sampled" not in arguments.paths:
        parser.error("--temperature is that of the path sampled, which --paths does not include: add it")
    if arguments.branching_factor and not arguments.tree_depth:
        parser.error("--branching-factor is that of trees: add --tree-depth")
    arguments.temperature = arguments.temperature or 1.0
    arguments.branching_factor = arguments.branching_factor or 4
    return arguments


def leave_out_paths(arguments: argparse.Namespace) -> list[str]:
    """Remove the paths that the draft or the devices do not allow, and return why, in sentences.

    Exits with status 2 if no path is left, or GenAI cannot draft the trees asked for.
    """
    draft = arguments.draft
    if not draft:
        return []
    native = native_limit(draft, arguments.device, arguments.draft_device)
    alone = alone_limit(draft) or tokenizer_limit(arguments.main, draft)
    limits = {"draft": alone, "genai": limit_in_genai(arguments), "engine": native, "sampled": native}
    left_out = [path for path in arguments.paths if limits.get(path)]
    arguments.paths = [path for path in arguments.paths if path not in left_out]
    refuse("" if arguments.paths else limits[left_out[0]])
    if arguments.tree_depth:
        refuse(genai_tree_limit(draft))
        if not trees(arguments):
            refuse(f"--tree-depth {arguments.tree_depth} needs the path genai and a -k that is not less")
    return [f"Path {path} is left out: {limits[path]}." for path in left_out]


def leave_out_genai(arguments: argparse.Namespace, prompts: list[Prompt]) -> list[str]:
    """Remove the path genai if it cannot follow the JSON schemas of `prompts`, and return why, in sentences."""
    if "genai" not in arguments.paths or not is_head(arguments.draft) or not any(one.json_schema for one in prompts):
        return []
    arguments.paths.remove("genai")
    words = "GenAI 2026.4.1 fails on a JSON schema with an EAGLE-3 draft, as the draft has no tokenizer"
    refuse("" if arguments.paths else words)
    return [f"Path genai is left out: {words}."]


def trees(arguments: argparse.Namespace) -> list[tuple[str, str, float]]:
    """(name, draft length, temperature) of each method with GenAI's trees."""
    depth, branching_factor = arguments.tree_depth, arguments.branching_factor
    ks = [k for k in arguments.num_assistant_tokens if depth and k >= depth and "genai" in arguments.paths]
    return [
        (f"GenAI, K = {k}, tree {depth} x {branching_factor}", TREE.format(depth, branching_factor, k), 0.0) for k in ks
    ]


# ---- measuring ------------------------------------------------------------------------------------------------------


def starts(arguments: argparse.Namespace) -> list[StartCost]:
    """Load time and peak memory of the pipelines that the paths need."""
    kinds = [Start("GenAI, main alone", GENAI, with_draft=False)]
    if "genai" in arguments.paths:
        kinds.append(Start("GenAI with the draft", GENAI, with_draft=True))
    if {"engine", "sampled"} & set(arguments.paths):
        kinds.append(Start("ours with the draft", NATIVE, with_draft=True))
    return start_costs(kinds, arguments, arguments.starts)


def jobs(arguments: argparse.Namespace, constrained: bool = False) -> list[ProcessJob]:
    """The methods to compare, one job per process: main model alone first, our engine (if requested) last. Prompts have
    JSON schemas if `constrained`."""
    ks, paths = arguments.num_assistant_tokens, arguments.paths
    main, draft = model_specs(arguments)
    alone = ProcessJob(
        name="GenAI, main alone",
        engine=GENAI,
        main=main,
        draft=None,
        max_new_tokens=arguments.max_new_tokens,
        methods=(("GenAI, main alone", 0, 0.0),),
        keep_caches=bool(arguments.context),
        huge_pages=arguments.huge_pages,
    )
    pair = replace(alone, name="GenAI with the draft", draft=draft)
    jobs = [alone]
    if "draft" in paths:
        name = "GenAI, draft alone"
        jobs.append(replace(alone, name=name, main=draft, methods=((name, 0, 0.0),)))
    if "genai" in paths:
        chains = tuple((f"GenAI, K = {k}", k, 0.0) for k in ks)
        jobs.append(replace(pair, methods=(*chains, *trees(arguments))))
    if "lookup" in paths:
        name = "GenAI, prompt lookup"
        jobs.append(replace(alone, name=name, lookup=True, methods=((name, f"lookup {LOOKUP}", 0.0),)))
    ours = list(our_methods(ks, paths, arguments.temperature, constrained))
    drafted = [one for one in ours if one[1] in (*ks, "adaptive", TWO_SOURCES)]
    if ours and (not drafted or is_head(draft.folder)):
        others = tuple(one for one in ours if one not in drafted)
        jobs.append(replace(alone, name="ours, main alone", engine=NATIVE, methods=others))
        ours = drafted
    if ours:
        jobs.append(replace(pair, name="ours with the draft", engine=NATIVE, methods=tuple(ours)))
    return jobs


def our_methods(ks: list[int], paths: list[str], temperature: float, constrained: bool):
    """(name, draft length, temperature) of each method of our engine."""
    if {"engine", "lookup"} & set(paths):
        yield "ours, main alone", 0, 0.0
        if constrained:
            yield "ours, forced tokens", FORCED, 0.0
    for kind, path, t in (("ours", "engine", 0.0), ("ours, sampled", "sampled", temperature)):
        if path in paths:
            if t:
                yield f"{kind}, main alone", 0, t
                if constrained:
                    yield f"{kind}, forced tokens", FORCED, t
            for k in ks:
                yield f"{kind}, K = {k}", k, t
            yield f"{kind}, adaptive", "adaptive", t
            if "lookup" in paths:
                yield f"{kind}, draft and suffix decoding", TWO_SOURCES, t
        if "lookup" in paths and (path in paths or not t):
            yield f"{kind}, suffix decoding", f"lookup {LOOKUP}", t
            yield f"{kind}, suffix decoding, adaptive", ADAPTIVE_LOOKUP, t


def behind_other_text(prompts: list[np.ndarray], arguments: argparse.Namespace) -> list[np.ndarray]:
    """The prompts, each preceded by the same `--context` tokens of other text."""
    if not arguments.context:
        return prompts
    tokenizer = openvino_genai.Tokenizer(str(arguments.main))
    text = tokenizer.encode(OTHER_TEXT.read_text(encoding="utf-8")).input_ids.data[0]
    before = np.resize(text, arguments.context)
    return [np.concatenate([before, one]) for one in prompts]


# ---- results --------------------------------------------------------------------------------------------------------


def baselines(methods: list[Method]) -> dict[bool, Method]:
    """The main model alone: greedy in GenAI, sampled in our engine."""
    return {method.temperature > 0: method for method in reversed(methods) if method.name.endswith("main alone")}


def summarise(methods: list[Method], keeps_caches: bool) -> list[MethodRow]:
    """One row per method."""
    alone = baselines(methods)
    rows = [row(method, alone[method.temperature > 0]) for method in methods]
    for one in rows:
        if one["name"] == "GenAI, draft alone":
            one["same_text"] = None
        if keeps_caches:
            one["ttft"] = None
    return rows


def by_category(methods: list[Method], prompts: list[Prompt]) -> list[CategoryRow]:
    """Speedup and acceptance rate of each drafting method, per prompt category that has answers of several tokens."""
    alone, category_rows = baselines(methods), []
    categories: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        categories.setdefault(prompt.category or "other", []).append(i)
    for category, chosen in categories.items() if len(categories) > 1 else ():
        if not all(method.decodes(chosen) for method in methods):
            continue
        for method in methods:
            if not method.draft_length:
                continue
            baseline = alone[method.temperature > 0]
            rounds = range(len(method.rounds))
            runs = [method.rounds[r][i] for r in rounds for i in chosen]
            proposed, accepted = [n for run in runs for n in run.proposed], [n for run in runs for n in run.accepted]
            speedups = [method.throughput(r, chosen) / baseline.throughput(r, chosen) for r in rounds]
            category_rows.append(
                {
                    "category": category,
                    "name": method.name,
                    "speedup": statistics.median(speedups),
                    "acceptance_rate": metrics.acceptance_rate(proposed, accepted),
                    "repetition": statistics.mean(metrics.repetition(run.tokens) for run in runs),
                    "prompts": len(chosen),
                }
            )
    return category_rows


def compare(methods: list[Method]) -> list[Ratio]:
    """The comparisons readers ask for: ours against GenAI at the same K, adaptive against the best fixed K."""

    def find(engine: str, sampled: bool) -> dict[int | str, Method]:
        chosen = [method for method in methods if method.name != "GenAI, draft alone"]
        return {
            method.draft_length: method
            for method in chosen
            if (method.engine, method.temperature > 0) == (engine, sampled)
        }

    def throughput(method: Method) -> float:
        return statistics.median(method.throughput(i) for i in range(len(method.rounds)))

    facts, genai, ours = [], find(GENAI, False), find(NATIVE, False)
    for k in [k for k in genai if k in ours]:
        where = {0: "alone", f"lookup {LOOKUP}": "prompt lookup"}.get(k, f"K = {k}")
        facts += engines(where, ours[k], genai[k])
    for sampled in (False, True):
        table, kind = find(NATIVE, sampled), "sampled" if sampled else "greedy"
        fixed = [method for k, method in table.items() if isinstance(k, int) and k]
        if fixed:
            best = max(fixed, key=throughput)
            k = best.draft_length
            facts.append(ratio(f"best fixed K = {k} / ours alone, {kind}", best, table[0]))
            facts.append(ratio(f"adaptive / best fixed K = {k}, {kind}", table["adaptive"], best))
            facts.append(ratio(f"adaptive / ours alone, {kind}", table["adaptive"], table[0]))
        if FORCED in table:
            facts.append(ratio(f"forced tokens / ours alone, {kind}", table[FORCED], table[0]))
        if ADAPTIVE_LOOKUP in table:
            facts.append(ratio(f"suffix decoding, adaptive / ours alone, {kind}", table[ADAPTIVE_LOOKUP], table[0]))
        if TWO_SOURCES in table:
            others = [table[key] for key in ("adaptive", ADAPTIVE_LOOKUP) if key in table]
            better = max(others, key=throughput)
            name = better.name.removeprefix("ours, ").removeprefix("sampled, ")
            facts.append(ratio(f"draft and suffix decoding / {name}, {kind}", table[TWO_SOURCES], better))
    return facts


def fastest(rows: list[MethodRow], sampled: bool) -> MethodRow | None:
    """The fastest method that drafts."""
    drafted = [row for row in rows if row["sampled"] == sampled and row["draft_length"]]
    return max(drafted, key=lambda row: row["speedup"], default=None)


def faster_alone(rows: list[MethodRow], best: MethodRow | None) -> MethodRow | None:
    """The main model alone, in the engine in which it is faster, if it is faster than the `best` method that drafts."""
    alone = [row for row in rows if best and row["sampled"] == best["sampled"] and row["name"].endswith("main alone")]
    fast = max(alone, key=lambda row: row["speedup"], default=None)
    return fast if fast and best and fast["speedup"] > best["speedup"] else None


def as_fast(rows: list[MethodRow], best: MethodRow | None) -> list[str]:
    """Other methods that draft and were as fast as the `best` one in at least one round."""
    if not best:
        return []
    others = [row for row in rows if row != best and row["sampled"] == best["sampled"] and row["draft_length"]]
    return [row["name"] for row in others if any(map(ge, row["throughputs"], best["throughputs"]))]


def summary(
    rows: list[MethodRow],
    categories: list[CategoryRow],
    compared: list[str],
    costs: list[StartCost],
    load: BackgroundLoad,
    asked_rounds: int,
    left_out: Sequence[str] = (),
) -> list[str]:
    """The result in sentences; `compared` holds those that say which engine is faster, `left_out` those that say what
    was not measured."""
    greedy, sampled, n = fastest(rows, False), fastest(rows, True), len(rows[0]["throughputs"])
    lines = [
        *gain_sentences(greedy, "greedy", faster_alone(rows, greedy), as_fast(rows, greedy)),
        *gain_sentences(sampled, "sampled", faster_alone(rows, sampled), as_fast(rows, sampled)),
        *compared,
    ]
    if greedy:
        lines += detail_sentences(greedy, rows[0], [part for part in categories if part["name"] == greedy["name"]])
    draft = next((row for row in rows if row["name"] == "GenAI, draft alone"), None)
    if draft:
        lines.append(f"The draft model alone is {draft['speedup']:.1f}x as fast as the main model.")
    lines += [
        f"{sentence(cost['name'])}: {cost['first_seconds']:.1f} s to load, "
        f"{cost['second_seconds']:.1f} s with a model cache, {memory(cost['peak_bytes'])}."
        for cost in costs
    ]
    if n < asked_rounds:
        lines.append(f"Interrupted: {n} of {asked_rounds} rounds completed; only these are shown.")
    lines += left_out
    return [*lines, load.sentence] if load.sentence else lines


def gain_sentences(best: MethodRow | None, kind: str, alone: MethodRow | None, others: Sequence[str] = ()) -> list[str]:
    """The gain of the fastest method that drafts, if there is one, and what makes it uncertain; `alone` is the main
    model alone if that is faster, `others` are methods that are `as_fast`."""
    if not best:
        return []
    low, high = best["speedup_range"]
    if alone:
        other = "" if alone["speedup"] == 1 else f", and {alone['name']}, {alone['speedup']:.2f}x"
        return [
            f"No {kind} method that drafts is faster than the main model alone: the best, {best['name']}, reaches "
            f"{best['speedup']:.2f}x ({low:.2f}-{high:.2f}){other}. Do not draft here."
        ]
    lines = [
        f"{sentence(best['name'])} is the fastest {kind} method: {best['speedup']:.2f}x the main model alone "
        f"({low:.2f}-{high:.2f} over {rounds(len(best['throughputs']))}), a gain of {best['gain_percent']:.0f} %, and "
        f"{best['forward_speedup']:.2f} tokens per main-model forward pass."
    ]
    if others:
        lines.append(f"Within measurement noise of it (as fast in at least one round): {'; '.join(others)}.")
    if low < 1:
        lines.append(f"In at least one round {best['name']} was slower than the main model alone: measure longer.")
    if best["repetition"] > REPEATS_ITSELF:
        lines.append(
            f"The text of {best['name']} is repetitive ({best['repetition']:.0%} of its 4-grams are repeated), "
            "which inflates acceptance rate and speedup."
        )
    return lines


def detail_sentences(best: dict, main: dict, categories: list[dict]) -> list[str]:
    """The fastest method's range over the prompt categories, and its time to first token."""
    lines = []
    if len(categories) > 1:
        low, *_, high = sorted(categories, key=lambda part: part["speedup"])
        lines.append(
            f"By category, {best['name']} ranges from {low['speedup']:.2f}x ({low['category']}) to "
            f"{high['speedup']:.2f}x ({high['category']})."
        )
    if best["ttft"]:
        lines.append(
            f"Time to first token: {1000 * main['ttft']:.0f} ms alone, {1000 * best['ttft']:.0f} ms with "
            f"{best['name']}."
        )
    return lines


def sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def rounds(n: int) -> str:
    return "1 round" if n == 1 else f"{n} rounds"


def memory(size: int | None) -> str:
    return f"{size / 1e6:,.0f} MB at peak" if size else "memory: n/a"


# ---- tables ---------------------------------------------------------------------------------------------------------


def table(result: BenchmarkResult) -> str:
    """All tables of the result, then its summary."""
    rows = result["rows"]
    drafting = [fastest(rows, False), fastest(rows, True)]
    best = [faster_alone(rows, one) or one for one in drafting]
    shown = {one["name"] for one in drafting if one}
    tables = (
        table_of_methods(rows, best),
        table_of_positions([one for one in rows if one["position_acceptance"]]),
        table_of_iterations(result["iteration"]),
        table_of_categories([part for part in result["categories"] if part["name"] in shown]),
        table_of_starts(result["starts"]),
    )
    lines = [line for one in tables if one for line in (*one, "")]
    lines += map(compared, result["comparisons"])
    lines += [f"{one['name'].removeprefix('ours, ')}: {one['why']}" for one in rows if one["why"]]
    return "\n".join([*lines, "", *result["summary"]])


def table_of_methods(rows: list[MethodRow], best: list[MethodRow | None]) -> list[str]:
    width = width_of(rows)
    lines = [
        f"{'method':<{width}}  tokens/s   speedup (range)      gain   tok/pass   TTFT, ms   TPOT, ms   acceptance"
        "   block eff.   outside   repetition       same text"
    ]
    for one in rows:
        low, high = one["speedup_range"]
        ttft = "" if one["ttft"] is None else f"{1000 * one['ttft']:.1f}"
        same = "" if one["same_text"] is None else f"{one['same_text']}/{one['texts']}"
        lines.append(
            f"{one['name']:<{width}}{one['throughput']:10.1f}   {one['speedup']:5.2f}x ({low:.2f}-{high:.2f})"
            f"{one['gain_percent']:+8.0f} %   {one['forward_speedup']:8.2f}   {ttft:>8}   {1000 * one['tpot']:8.2f}"
            f"   {formatted(one['acceptance_rate'], '.2f'):>10}   {one['block_efficiency']:10.2f}"
            f"   {formatted(one['outside'], '.1%'):>7}   {one['repetition']:10.2f}"
            f"   {same:>13}{'   <- best' if one in best else ''}"
        )
    return lines


def table_of_positions(rows: list[dict]) -> list[str]:
    if not rows:
        return []
    longest, width = max(len(one["position_acceptance"]) for one in rows), width_of(rows)
    return [
        f"{'per-position acceptance':<{width}}" + "".join(f"{i:>6}" for i in range(1, longest + 1)),
        *(f"{one['name']:<{width}}" + "".join(f"{x:6.2f}" for x in one["position_acceptance"]) for one in rows),
    ]


def table_of_iterations(parts: list[dict]) -> list[str]:
    width = width_of(parts)
    lines = [
        f"{part['name']:<{width}}{part['draft_ms']:8.2f} {part['verify_ms']:8.2f} {part['overhead_ms']:10.2f}"
        for part in parts
    ]
    return lines and [f"{'one iteration, ms':<{width}}   draft   verify   overhead", *lines]


def table_of_categories(parts: list[dict]) -> list[str]:
    width = width_of(parts)
    lines = [
        f"{part['category']:<22} {part['prompts']:>7}   {part['name']:<{width}} {part['speedup']:7.2f}x"
        f"   {formatted(part['acceptance_rate'], '.2f'):>10}   {part['repetition']:10.2f}"
        for part in parts
    ]
    title = f"category               prompts   {'method':<{width}}  speedup   acceptance   repetition"
    return lines and [title, *lines]


def table_of_starts(costs: list[dict]) -> list[str]:
    lines = [
        f"{cost['name']:<24}{cost['first_seconds']:9.1f} {cost['second_seconds']:13.1f}   {memory(cost['peak_bytes'])}"
        for cost in costs
    ]
    return lines and ["load time, s                first    with cache   peak memory", *lines]


def width_of(rows: list[dict]) -> int:
    """The width of a column with the names of `rows`."""
    return max([len("per-position acceptance"), *(len(one["name"]) for one in rows)]) + 1


def formatted(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def compared(fact: Ratio) -> str:
    rounds_, prompts = fact["range"], fact["interval"]
    interval = (
        f"95 % interval over {fact['prompts']} prompts {prompts[0]:.2f}-{prompts[1]:.2f}" if prompts else "few prompts"
    )
    return f"{fact['what']}: {fact['ratio']:.2f} (rounds {rounds_[0]:.2f}-{rounds_[1]:.2f}, {interval})"


# ---- the program ----------------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """The methods' rounds, whether all were completed, and what was measured besides."""

    methods: list[Method]
    rows: list[dict]
    complete: bool
    load: BackgroundLoad
    costs: list[dict]  # load time and peak memory, per pipeline
    starts: list[dict]  # of each process
    view: dict | None  # the tokens of the first prompt with our best greedy method


def run(arguments: argparse.Namespace, ids: list[np.ndarray], json_schemas: Sequence[str]) -> Measured:
    """Measure all methods. Raises KeyboardInterrupt without a complete round, ChildFailed, and what a
    rejected model raises."""
    costs = [] if arguments.no_starts else starts(arguments)
    constrained = any(json_schemas)
    with Closing([DecodingProcess(job) for job in jobs(arguments, constrained)]) as processes:
        methods = [method for process in processes for method in process.methods]
        with BackgroundLoad() as load:
            complete = measure(processes, methods, ids, arguments.rounds, arguments.starts, json_schemas)
        rows = summarise(methods, keeps_caches=bool(arguments.context))
        ks = (*arguments.num_assistant_tokens, "adaptive")
        drafting = [one for one in rows if one["engine"] == NATIVE and one["draft_length"] in ks]
        best = fastest(drafting, sampled=False)
        view = None
        try:
            with signals_raise():
                if complete and best and not constrained:
                    view = processes[-1].token_view(ids[0], best["draft_length"])
        except KeyboardInterrupt:
            complete = False
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # do not interrupt the output
        begun = [start for process in processes for start in process.starts]
    return Measured(methods, rows, complete, load, costs, begun, view)


def result_of(
    arguments: argparse.Namespace, prompts: list[Prompt], measured: Measured, left_out: Sequence[str] = ()
) -> dict:
    """The program's result, as written in JSON."""
    methods, rows = measured.methods, measured.rows
    starts_done = math.ceil(len(methods[0].rounds) / arguments.rounds)  # begun, if Ctrl-C was pressed in the last
    facts = {
        **environment(arguments, measured.load),
        "prompts": f"{len(prompts)} of {shown_name(arguments.prompts)}",
        "context": arguments.context or 0,
        "huge_pages": arguments.huge_pages,
        "temperature": arguments.temperature if "sampled" in arguments.paths else None,
        "max_new_tokens": arguments.max_new_tokens,
        "starts": starts_done,
        "rounds": len(methods[0].rounds),
    }
    categories, comparisons = by_category(methods, prompts), compare(methods)
    words, requested_rounds = verdict(comparisons, starts_done), arguments.rounds * arguments.starts
    return {
        "program": "benchmark",
        "summary": summary(rows, categories, words, measured.costs, measured.load, requested_rounds, left_out),
        "environment": facts,
        "rows": rows,
        "categories": categories,
        "iteration": [split for method in methods if method.draft_length and (split := iteration_split(method))],
        "starts": measured.costs,
        "comparisons": comparisons,
        "processes": measured.starts,
        **({"token_view": measured.view} if measured.view else {}),
    }


def main() -> int:
    prepare_output()
    arguments = parse_arguments()
    refuse_unusable(arguments)
    left_out = leave_out_paths(arguments)
    with exit_on(ValueError, status=2):
        prompts = read_prompts(arguments.prompts, arguments.max_prompts)
        left_out += leave_out_genai(arguments, prompts)
        room = arguments.max_new_tokens + (arguments.context or 0)
        ids = behind_other_text(token_ids(prompts, arguments.main, room), arguments)
    with exit_on(RuntimeError, ValueError, KeyError, ChildFailed):
        measured = run(arguments, ids, [prompt.json_schema for prompt in prompts])
    result = result_of(arguments, prompts, measured, left_out)
    write_outputs(arguments, result, table(result))
    return 0 if measured.complete else 130


if __name__ == "__main__":
    sys.exit(main())
