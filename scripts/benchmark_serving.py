"""Load benchmark of a server with and without a draft: throughput, TTFT, TPOT and acceptance rate for 1 to 16 clients.

    python scripts/benchmark_serving.py models/embedded/main models/embedded/draft --html load.html

starts samples/serve/serve_pair.py twice, with the pair and with the main model alone, and stops both.
`--suffix-decoding` copies draft tokens from the text, with or without a draft. To measure running servers with the
OpenAI API:

    python scripts/benchmark_serving.py --url http://127.0.0.1:8000/v1 --baseline-url http://127.0.0.1:8001/v1

Prompts with a "json_schema" in the file (scripts/prompts/structured.jsonl) are measured twice on each server in the
same run: answered freely, and with the schema as `response_format`, which needs `--chat` and may end before
`--max-new-tokens`.

Clients run in a closed loop: each requests a streamed answer and sends the next request when it is complete. The
servers are interleaved at every number of clients (A B A B) and get the same prompts, none twice, so that nothing is
served from a cache. Answers are `--max-new-tokens` long (with --url: at most). Throughput: new tokens per second of all
clients together, queueing and prompts included; median and range over the rounds. TTFT and TPOT: median and 5th to 95th
percentile over the requests. The clients run on this machine and use some of its processor time. Output: a table, then
one JSON object on the last line. Ctrl-C keeps the complete rounds. For the same in process, compared with GenAI's
pipeline: scripts/benchmark_batching.py.
"""

from speculative.cli.program import exit_on, prepare_output

import argparse
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from speculative.bench.harness import BackgroundLoad, environment, write_outputs
from speculative.bench.load.arguments import add_load_arguments
from speculative.bench.load.clients import Target, closed_loop, only_model, round_trip
from speculative.bench.load.metrics import (
    PROMPTS_PER_RUN,
    Load,
    Span,
    break_even,
    counted,
    losses,
    row,
    table,
    take_turns,
)
from speculative.bench.load.processor_time import Meter
from speculative.bench.load.server import StartedServer
from speculative.bench.prompts import Prompt, read_prompts, shown_name, token_ids
from speculative.bench.result import LoadRow
from speculative.cli.arguments import add_device_arguments, refuse_in_native, refuse_unsound
from speculative.cli.number_types import decimal, positive_int
from speculative.cli.parser import Parser
from speculative.cli.processes import ctrl_c_waits, signals_raise
from speculative.cli.properties import PROPERTY
from speculative.models.cores import usable_cores
from speculative.serving.settings import Limits, Pair

BLOCK = 32  # tokens, in which a KV cache is allocated: 32 on a CPU, 16 on a GPU
NUMBER_TOKENS = 16  # maximum length of the number before a prompt
RUN = secrets.randbelow(10**4)  # a running server may still cache the prompts of other runs
DRAFT, ALONE = "with draft", "main model alone"
CONSTRAINED = ", JSON schema"  # at the end of a method's name


def parse_arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("main", type=Path, nargs="?", help="main model (IR folder), to start servers")
    parser.add_argument("draft", type=Path, nargs="?", help="draft model (IR folder)")
    parser.add_argument(
        "--suffix-decoding", action="store_true", help="copy draft tokens from the text, with or without a draft"
    )
    parser.add_argument(
        "--past-answers",
        type=positive_int,
        metavar="TOKENS",
        help="with --suffix-decoding: also copy from past answers, of which TOKENS tokens are kept (default: none)",
    )
    add_device_arguments(parser)
    parser.add_argument("--property", **PROPERTY, help="OpenVINO property for both models (repeatable)")
    parser.add_argument(
        "--replicas",
        type=positive_int,
        default=1,
        metavar="N",
        help="replicas of each server, which share the cores (default: 1)",
    )
    parser.add_argument("--url", help="a running server with a draft, like http://127.0.0.1:8000/v1")
    parser.add_argument("--baseline-url", metavar="URL", help="a running server without a draft, as the baseline")
    parser.add_argument("--model", help="model name on these servers (default: the first one listed)")
    parser.add_argument("--chat", action="store_true", help="use /chat/completions instead of /completions")
    parser.add_argument(
        "--temperature",
        type=decimal(lambda value: 0 <= value <= 2, "from 0 to 2"),
        default=0.0,
        metavar="T",
        help="sampling temperature; 0 is greedy (default: 0)",
    )
    add_load_arguments(parser)
    arguments = parser.parse_args()
    if bool(arguments.url) == bool(arguments.main):
        parser.error("give either MAIN and DRAFT, to start servers, or the --url of a running server")
    if arguments.main and not arguments.draft and not arguments.suffix_decoding:
        parser.error(f"no draft given for {arguments.main}: add its folder, or --suffix-decoding")
    if arguments.suffix_decoding and arguments.url:
        parser.error("--suffix-decoding is for servers that this program starts: leave out --url")
    if arguments.replicas > 1 and arguments.url:
        parser.error("--replicas is for servers that this program starts: leave out --url")
    for url in filter(None, (arguments.url, arguments.baseline_url)):
        if not url.startswith(("http://", "https://")):
            parser.error(f"{url} is not a URL: give it like http://127.0.0.1:8000/v1")
    if arguments.url and (arguments.device != "CPU" or arguments.draft_device != "CPU" or arguments.property):
        parser.error("devices and properties are those of servers that this program starts: leave out --url")
    if arguments.past_answers and not arguments.suffix_decoding:
        parser.error("--past-answers requires --suffix-decoding")
    if arguments.baseline_url and not arguments.url:
        parser.error("--baseline-url requires --url, the server with a draft")
    return arguments


def threads_of(arguments: argparse.Namespace) -> int:
    """The inference threads of a replica."""
    threads = dict(arguments.property).get("INFERENCE_NUM_THREADS")
    return threads if isinstance(threads, int) and threads > 0 else max(usable_cores() // arguments.replicas, 1)


def endpoints(arguments: argparse.Namespace, stack: ExitStack) -> tuple[dict[str, Target], list[StartedServer]]:
    """The endpoints by method name, and the servers started for them, which `stack` stops.

    Raises ValueError if a URL is not a usable server, RuntimeError if a server does not start.
    """
    servers: dict[str, StartedServer] = {}
    if arguments.url:
        urls = {DRAFT: arguments.url} | ({ALONE: arguments.baseline_url} if arguments.baseline_url else {})
    else:
        options = ["--device", arguments.device, "--draft-device", arguments.draft_device]
        options += [part for key, value in arguments.property for part in ("--property", f"{key}={value}")]
        clients = max(arguments.max_concurrency)
        for option, value in (
            ("--max-num-seqs", clients),
            ("--max-queue", clients),
            ("--max-output-tokens", max(arguments.max_new_tokens, Limits.max_output_tokens)),
            ("--cache-tokens", max(clients * arguments.longest, Pair.cache_tokens)),
        ):
            options += [option, value]
        if arguments.replicas > 1:
            options += ["--replicas", arguments.replicas, "--num-cpus", threads_of(arguments)]
        draft = [arguments.draft] if arguments.draft else []
        draft += ["--suffix-decoding"] if arguments.suffix_decoding else []
        draft += ["--past-answers", arguments.past_answers] if arguments.past_answers else []
        with ctrl_c_waits():
            for name, its_draft in ((DRAFT, draft), (ALONE, [])):
                servers[name] = StartedServer([arguments.main, *its_draft, *options])
                stack.callback(servers[name].end)
        urls = {name: server.url() for name, server in servers.items()}
    key = os.environ.get("OPENAI_API_KEY", "") if arguments.url else ""
    targets_given = {
        name: Target(url.rstrip("/"), arguments.model or "", key, arguments.chat) for name, url in urls.items()
    }
    targets = {name: one._replace(model=one.model or only_model(one)) for name, one in targets_given.items()}
    return targets, list(servers.values())


def loads(
    name: str, server: Target, prompts: list[Prompt], settings: dict, meter: Meter | None, run_number: int
) -> list[Load]:
    """The methods to measure on a server: any answers, and answers that follow the prompts' JSON schemas. `meter` reads
    the processor time of all servers."""
    texts, schemas = [prompt.text for prompt in prompts], [prompt.json_schema for prompt in prompts]
    earlier = run_number * PROMPTS_PER_RUN * len(prompts)  # numbers; each run begins with the first prompt

    def run(clients: int, seconds: float, first: int, schemas: Sequence[str] = ()) -> Span:
        before = meter and meter.read()
        span = closed_loop(server, clients, seconds, texts, settings, earlier + first, schemas)
        return span._replace(processor_time=meter.since(before, span)) if meter else span

    def constrained(clients: int, seconds: float, first: int) -> Span:  # other numbers: the server caches prompts
        return run(clients, seconds, first + PROMPTS_PER_RUN // 2, schemas)

    return [Load(name, run), *([Load(name + CONSTRAINED, constrained)] if any(schemas) else [])]


def summary(rows: list[LoadRow], done: int, requested_rounds: int, other: BackgroundLoad) -> list[str]:
    """The result in sentences."""
    lines = break_even([one for one in rows if one["method"] == DRAFT])
    constrained = break_even([one for one in rows if one["method"] == DRAFT + CONSTRAINED])
    lines += [f"With JSON schemas: {line[0].lower()}{line[1:]}" for line in constrained]
    for method in dict.fromkeys(one["method"] for one in rows):
        best = max((one for one in rows if one["method"] == method), key=lambda one: one["throughput"])
        lines.append(f"Peak throughput {method}: {best['throughput']:.0f} tokens/s, with {counted(best['clients'])}.")
    lines += processor_use(rows)
    lines.append(losses(rows))
    if done < requested_rounds:
        lines.append(f"Interrupted: {done} of {requested_rounds} rounds completed; only these are shown.")
    return [*lines, other.sentence] if other.sentence else lines


def processor_use(rows: list[LoadRow]) -> list[str]:
    """The cores in use where the servers needed most of them beside their engines."""
    cores = {
        one["name"]: {key: time[key] / time["seconds"] for key in ("engines", "servers", "clients")}  # type: ignore[literal-required]
        for one in rows
        if (time := one.get("processor_time"))
    }
    if not cores:
        return []
    name, used = max(cores.items(), key=lambda one: one[1]["servers"] + one[1]["clients"])
    return [
        f"Of {counted(usable_cores(), 'core')}, the engines used {used['engines']:.2f}, HTTP, proxies and Ray "
        f"{used['servers']:.2f} and the clients {used['clients']:.2f} ({name})."
    ]


class Measured(NamedTuple):
    """What was measured."""

    methods: list[Load]  # with their rounds
    servers: dict[str, Target]
    round_trip: float | None  # seconds of a request without inference; None with --url
    other: BackgroundLoad
    complete: bool  # all rounds


def measure(arguments: argparse.Namespace, prompts: list[Prompt]) -> Measured:
    """Start the servers, if asked to, and put them under load.

    Raises KeyboardInterrupt without a complete round, and what `endpoints` raises.
    """
    settings = {"max_tokens": arguments.max_new_tokens, "temperature": arguments.temperature}
    if arguments.main:
        settings["ignore_eos"] = True
    with signals_raise(), ExitStack() as stack:
        servers, started = endpoints(arguments, stack)
        meter = Meter(started, threads_of(arguments)) if started else None
        served = [name for name in (ALONE, DRAFT) if name in servers]
        run = RUN if arguments.url else 0
        methods = [method for name in served for method in loads(name, servers[name], prompts, settings, meter, run)]
        latency = round_trip(servers[served[0]], [prompt.text for prompt in prompts]) if started else None
        with BackgroundLoad() as other:
            complete = take_turns(methods, arguments.max_concurrency, arguments.seconds, arguments.rounds)
        refuse_without_answers(methods)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # keep the rounds while the servers stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # and do not interrupt the output
    return Measured(methods, servers, latency, other, complete)


def refuse_without_answers(methods: list[Load]) -> None:
    """Raise RuntimeError if a method has no answer, or none whose tokens the server has counted."""
    for method in methods:
        records = [record for spans in method.rounds.values() for span in spans for record in span.answers]
        answered = [record for record in records if record.outcome == "answered"]
        if not answered:
            causes = (record.error or record.cut_off for record in records)
            error = next(filter(None, causes), "no request was complete in its time")
            raise RuntimeError(f"no request was answered ({method.name}): {error}")
        if not any(record.tokens for record in answered):
            raise RuntimeError(f"the server counts no tokens ({method.name}): its streams have no usage")


def result_of(arguments: argparse.Namespace, prompts: list[Prompt], measured: Measured) -> dict:
    """The program's result, as written in JSON."""
    methods, servers, latency, other, _ = measured
    by_name = {method.name: method for method in methods}
    rows = [
        row(method, n, by_name.get(method.name.replace(DRAFT, ALONE)))
        for method in methods
        for n in arguments.max_concurrency
    ]
    if arguments.temperature:
        for one in rows:
            one["same_text"] = None
    done = len(methods[0].rounds[arguments.max_concurrency[0]])
    facts = {
        **environment(arguments, other),
        **(
            {"servers": ", ".join(server.url for server in servers.values())}
            if arguments.url
            else {"replicas": arguments.replicas, "threads": threads_of(arguments), "round_trip": latency}
        ),
        "prompts": f"{len(prompts)} of {shown_name(arguments.prompts)}",
        "max_new_tokens": arguments.max_new_tokens,
        "temperature": arguments.temperature,
        "seconds": arguments.seconds,
        "rounds": done,
    }
    lines = summary(rows, done, arguments.rounds, other)
    return {"program": "benchmark_serving", "summary": lines, "environment": facts, "rows": rows}


def main() -> int:
    prepare_output()
    arguments = parse_arguments()
    with exit_on(ValueError, status=2):
        prompts = read_prompts(arguments.prompts, arguments.max_prompts)
        if not arguments.chat and any(prompt.json_schema for prompt in prompts):
            raise ValueError(
                f"{arguments.prompts} has prompts with a json_schema, which /completions does not take: add --chat"
            )
        if arguments.main:
            refuse_unsound(arguments.main, arguments.draft)
            refuse_in_native(arguments)
            room = arguments.max_new_tokens + NUMBER_TOKENS
            longest = room + max(map(len, token_ids(prompts, arguments.main, room)))
            arguments.longest = -(-longest // BLOCK) * BLOCK
    with exit_on(RuntimeError, ValueError):
        measured = measure(arguments, prompts)
    result = result_of(arguments, prompts, measured)
    write_outputs(arguments, result, "\n".join([table(result["rows"]), "", *result["summary"]]))
    return 0 if measured.complete else 130


if __name__ == "__main__":
    sys.exit(main())
