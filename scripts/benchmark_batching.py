"""Compare this project's batch decoder with GenAI's ContinuousBatchingPipeline: 1 to 16 concurrent greedy requests.

    python scripts/benchmark_batching.py models/embedded/main models/embedded/draft

A server can run greedy requests with either engine: this measures which is faster here, and with how much memory. Each
method runs in its own process; as the memory a model is loaded into changes its speed, `--starts 3` starts the
processes three times. Methods are interleaved at every concurrency, in varying order: each decodes that many
requests at once for `--seconds`, and a new one joins when one ends. All get the same token ids, none twice, and each
answer is `--max-new-tokens` long. GenAI always drafts K tokens (`-k`); this project's engine adapts its draft length to
the batch. GenAI alone uses its default scheduler; with a draft, prompts are not split (dynamic_split_fuse=False), as
its output is otherwise wrong. Its prefix cache is off. `--suffix-decoding` also measures this project's engine with
suffix decoding, which needs no DRAFT, and with both. Sampled requests are not compared: GenAI's are not lossless with a
draft (scripts/verify_lossless.py).

Throughput: new tokens per second of all texts together, prompts and queueing included; median and range over the
rounds. TTFT and TPOT: median and 5th to 95th percentile over the texts. Memory: peak of each process, weights and
caches included, up to the largest number of texts. Output: a table, then one JSON object on the last line. Ctrl-C keeps
the complete rounds. For the same over HTTP: scripts/benchmark_serving.py.
"""

from speculative.cli.program import exit_on, prepare_output

import argparse
import math
import signal
import statistics
import sys

from speculative.bench.cluster.child_process import ChildFailed
from speculative.bench.decoding_process import Closing
from speculative.bench.harness import BackgroundLoad, environment, shuffled, write_outputs
from speculative.bench.load.arguments import add_load_arguments
from speculative.bench.load.batch_methods import CACHE_TOKENS, BatchingProcess
from speculative.bench.load.metrics import Load, break_even, counted, row, table, take_turns
from speculative.bench.prompts import Prompt, read_prompts, shown_name, token_ids
from speculative.bench.result import LoadRatio, LoadRow, ProcessMemory
from speculative.cli.arguments import (
    add_huge_pages_argument,
    add_pair_arguments,
    add_starts_argument,
    lengths,
    limit_in_genai,
    refuse_unusable,
    require_draft_for,
)
from speculative.cli.number_types import positive_int
from speculative.cli.parser import Parser
from speculative.cli.processes import signals_raise
from speculative.pair.engines import GENAI, NATIVE

NUMBER_TOKENS = 16  # maximum length of the number before a prompt
DRAFT, SUFFIX, BOTH = "ours, adaptive draft", "ours, suffix decoding", "ours, draft and suffix decoding"


def parse_arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    add_pair_arguments(parser, without_draft="--suffix-decoding is measured")
    add_load_arguments(parser)
    add_starts_argument(parser)
    add_huge_pages_argument(parser)
    parser.add_argument(
        "-k",
        "--num-assistant-tokens",
        type=lengths,
        default="4",
        metavar="K",
        help="GenAI's draft lengths, 4 or 2,4,8 (default: 4)",
    )
    parser.add_argument(
        "--suffix-decoding",
        action="store_true",
        help="also measure this project's engine with suffix decoding, without and with the draft",
    )
    parser.add_argument(
        "--cache-tokens",
        type=positive_int,
        default=CACHE_TOKENS,
        metavar="N",
        help="KV-cache size of this project's engine, in tokens (default: %(default)s); GenAI's grows as needed",
    )
    arguments = parser.parse_args()
    if not arguments.draft and not arguments.suffix_decoding:
        parser.error(f"no draft given for {arguments.main}: add its folder, or --suffix-decoding")
    require_draft_for(parser, arguments, "--draft-device", "--num-assistant-tokens")
    return arguments


def jobs(arguments: argparse.Namespace, prompts: list[str]) -> list[dict]:
    """The job of each process; K is not part of it, as a pipeline takes it per request."""
    shared = {
        "main": str(arguments.main),
        "device": arguments.device,
        "draft_device": arguments.draft_device,
        "properties": dict(arguments.property),
        "prompts": prompts,
        "max_new_tokens": arguments.max_new_tokens,
        "cache_tokens": arguments.cache_tokens,
        "huge_pages": arguments.huge_pages,
        "texts": max(arguments.max_concurrency),
    }
    pair, suffix = {**shared, "draft": str(arguments.draft)}, {**shared, "suffix_decoding": True}
    both = {**pair, **suffix, "name": BOTH, "engine": NATIVE}
    in_genai = arguments.draft and not limit_in_genai(arguments)
    return [
        {**shared, "name": "GenAI, main alone", "engine": GENAI},
        *([{**pair, "name": "GenAI, draft", "engine": GENAI}] if in_genai else []),
        {**shared, "name": "ours, main alone", "engine": NATIVE},
        *([{**pair, "name": "ours, draft", "engine": NATIVE}] if arguments.draft else []),
        *([{**suffix, "name": SUFFIX, "engine": NATIVE}] if arguments.suffix_decoding else []),
        *([both] if arguments.suffix_decoding and arguments.draft else []),
    ]


def methods_of(processes: list[BatchingProcess], ks: list[int]) -> list[Load]:
    methods = []
    for process in processes:
        name = process.job["name"]
        if name == "GenAI, draft":
            methods += [process.method(f"GenAI, K = {k}", k) for k in ks]
        else:
            methods.append(process.method(DRAFT if name == "ours, draft" else name, 0))
    return methods


def measure(
    processes: list[BatchingProcess], methods: list[Load], arguments: argparse.Namespace
) -> tuple[bool, list[ProcessMemory]]:
    """Whether all rounds were measured, and each process's memory at the end of the first start, if that was reached.

    Raises KeyboardInterrupt if there is no complete round.
    """
    memory: list[dict] = []
    try:
        with signals_raise():
            for start in range(arguments.starts):
                for process in shuffled(processes, start):
                    process.start()
                if not take_turns(methods, arguments.max_concurrency, arguments.seconds, arguments.rounds):
                    return False, memory  # the process that was interrupted is gone
                memory = memory or [process.memory() for process in processes]
    except KeyboardInterrupt:
        if not memory:
            raise
        return False, memory
    return True, memory


# ---- results --------------------------------------------------------------------------------------------------------


def compare(methods: list[Load], clients: list[int]) -> list[LoadRatio]:
    """Per number of texts: our engine over GenAI's, both alone; ours with a draft, or without one by suffix decoding,
    over the best of GenAI's; both over ours alone. `same_text`: how many of the `texts` decoded by both are equal."""
    by_name = {method.name: method for method in methods}
    alone = by_name["ours, main alone"]
    drafting = {
        what: by_name[name]
        for what, name in (("ours, draft", DRAFT), (SUFFIX, SUFFIX), (BOTH, BOTH))
        if name in by_name
    }
    first = next(iter(drafting))
    genai = [method for method in methods if method.name.startswith("GenAI")]
    comparisons = []
    for n in clients:
        best = max(genai, key=lambda method: statistics.median(span.throughput for span in method.rounds[n]))
        for what, one, other in (
            ("ours, main alone / GenAI, main alone", alone, by_name["GenAI, main alone"]),
            (f"{first} / {best.name}, the best of GenAI", drafting[first], best),
            *((f"{name} / ours, main alone", method, alone) for name, method in drafting.items()),
        ):
            figures = row(one, n, other)
            if figures["speedup"] is not None:
                ratio, range_ = figures["speedup"], figures["speedup_range"]
                same = {"same_text": figures["same_text"], "texts": figures["texts"]}
                what = f"{what}, {counted(n, 'text')}"
                comparisons.append({"what": what, "ratio": ratio, "range": range_, "clients": n, **same})
    return comparisons


def summary(
    rows: list[LoadRow],
    comparisons: list[LoadRatio],
    memory: list[ProcessMemory],
    rounds: int,
    requested_rounds: int,
    load: BackgroundLoad,
) -> list[str]:
    """The result in sentences."""
    alone = [one for one in comparisons if one["what"].startswith("ours, main alone /")]
    copied = [one for one in comparisons if one["what"].startswith(f"{SUFFIX} / ours")]
    over_best = [one for one in comparisons if "best of GenAI" in one["what"]]
    surely = [one for one in over_best if one["range"][0] > 1]
    slower = [one for one in over_best if one["range"][1] < 1]
    if not over_best:
        lines = ["No number of texts could be compared, as too few tokens came within --seconds: give more."]
    elif len(surely) == len(over_best):
        lines = ["Our engine is faster for greedy requests at every measured number of texts."]
    elif len(slower) == len(over_best):
        lines = ["GenAI's pipeline is faster for greedy requests at every measured number of texts."]
    else:
        lines = [
            f"Greedy requests: our engine is faster in every round at these numbers of texts: {_numbers(surely)}; "
            f"GenAI's pipeline at: {_numbers(slower)}; otherwise the difference is within measurement noise."
        ]
    for compared in filter(None, (alone, over_best, copied)):
        lines.append("; ".join(f"{one['what']}: {one['ratio']:.2f}x ({_range(one)})" for one in compared) + ".")
    lines += break_even([row for row in rows if row["method"] == DRAFT])
    lines += [
        f"{one['name']}, {counted(one['texts'], 'text')} at once: {one['peak_bytes'] / 1e6:,.0f} MB peak memory of its "
        "process" + (f", including {one['cache_bytes'] / 1e6:,.0f} MB of KV caches." if one["cache_bytes"] else ".")
        for one in memory
        if one["peak_bytes"]
    ]
    if rounds < requested_rounds:
        lines.append(f"Interrupted: {rounds} of {requested_rounds} rounds completed; only these are shown.")
    return [*lines, load.sentence] if load.sentence else lines


def _numbers(comparisons: list[LoadRatio]) -> str:
    return ", ".join(str(one["clients"]) for one in comparisons) or "none"


def _range(one: LoadRatio) -> str:
    return "-".join(f"{value:.2f}" for value in one["range"])


# ---- the program ----------------------------------------------------------------------------------------------------


def result_of(
    arguments: argparse.Namespace, prompts: list[Prompt], methods: list[Load], memory: list[dict], other: BackgroundLoad
) -> dict:
    """The program's result, as written in JSON."""
    clients = arguments.max_concurrency
    alone = {"GenAI": methods[0], "ours": next(method for method in methods if method.name == "ours, main alone")}
    rows = [row(method, n, alone[method.name.partition(",")[0]], "text") for method in methods for n in clients]
    comparisons, done = compare(methods, clients), len(methods[0].rounds[clients[0]])
    sentences = summary(rows, comparisons, memory, done, arguments.rounds * arguments.starts, other)
    if limit := limit_in_genai(arguments):
        sentences.append(f"GenAI with the draft is left out: {limit}.")
    facts = {
        **environment(arguments, other),
        "prompts": f"{len(prompts)} of {shown_name(arguments.prompts)}",
        "max_new_tokens": arguments.max_new_tokens,
        "seconds": arguments.seconds,
        "starts": math.ceil(done / arguments.rounds),
        "rounds": done,
        "huge_pages": arguments.huge_pages,
        "cache_tokens": arguments.cache_tokens,
    }
    return {
        "program": "benchmark_batching",
        "summary": sentences,
        "environment": facts,
        "rows": rows,
        "comparisons": comparisons,
        "starts": memory,
    }


def main() -> int:
    prepare_output()
    arguments = parse_arguments()
    refuse_unusable(arguments, NATIVE)
    with exit_on(ValueError, status=2):
        prompts = read_prompts(arguments.prompts, arguments.max_prompts)
        token_ids(prompts, arguments.main, arguments.max_new_tokens + NUMBER_TOKENS)
    with exit_on(RuntimeError, ValueError, KeyError, ChildFailed):
        texts = [prompt.text for prompt in prompts]
        with Closing([BatchingProcess(job) for job in jobs(arguments, texts)]) as processes:
            methods = methods_of(processes, arguments.num_assistant_tokens)
            with BackgroundLoad() as other:
                complete, memory = measure(processes, methods, arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # do not interrupt the output
    result = result_of(arguments, prompts, methods, memory, other)
    write_outputs(arguments, result, "\n".join([table(result["rows"]), "", *result["summary"]]))
    return 0 if complete else 130


if __name__ == "__main__":
    sys.exit(main())
