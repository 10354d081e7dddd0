"""Load a server: 1 to 16 clients at once, with and without the draft, in turns: throughput, TTFT, TPOT, acceptance.

    python scripts/benchmark_serving.py models/embedded/main models/embedded/draft --html load.html

starts samples/serve/serve_pair.py twice, with the pair and with the main model alone, and ends both. For servers that
run already, of any make with OpenAI's API:

    python scripts/benchmark_serving.py --url http://127.0.0.1:8000/v1 --baseline-url http://127.0.0.1:8001/v1

Clients in a closed loop: each asks for a streamed answer, and for the next when it has it. The servers take turns at
every number of clients (A B A B); both get the same prompts, none twice, so that nothing comes from a cache; answers
are `--max-new-tokens` long (with --url: at most). Throughput: new tokens a second of all clients together, waiting and
prompts included; medians over the rounds and their range; TTFT and TPOT: medians over the requests, and from 5 to 95 %
of them. The clients run on this machine, and take some of it. A table for people, then one JSON object on the last
line. Ctrl-C keeps the full rounds. In process, and beside GenAI's pipeline: scripts/benchmark_batching.py.
"""

from speculative.cli.program import prepare_output

import argparse
import os
import sys
from contextlib import ExitStack
from pathlib import Path

from speculative.bench.harness import BackgroundLoad, ctrl_c_raises, environment
from speculative.bench.load.arguments import add_load_arguments, write_load_outputs
from speculative.bench.load.clients import Endpoint, closed_loop, only_model
from speculative.bench.load.metrics import Load, counted, losses, row, stops_paying, table, take_turns
from speculative.bench.load.server import StartedServer
from speculative.bench.prompts import read_prompts, shown_name, token_ids
from speculative.cli.arguments import refuse_unsound
from speculative.cli.properties import key_value

NUMBER_TOKENS = 16  # that the number before a prompt may take
DRAFT, ALONE = "with draft", "main model alone"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("main", type=Path, nargs="?", help="main model (IR folder) of servers to start")
    parser.add_argument("draft", type=Path, nargs="?", help="draft (IR folder)")
    parser.add_argument("--device", default="CPU", help="device of the main model (default: CPU)")
    parser.add_argument("--draft-device", default="CPU", help="device of the draft (default: CPU)")
    parser.add_argument(
        "--property", type=key_value, action="append", default=[], metavar="KEY=VALUE",
        help="OpenVINO property of both models; repeat for more",
    )  # fmt: skip
    parser.add_argument("--url", help="a server that runs: http://127.0.0.1:8000/v1")
    parser.add_argument("--baseline-url", metavar="URL", help="the same without a draft, to compare with")
    parser.add_argument("--model", help="name of the model there (default: the first one it has)")
    parser.add_argument("--chat", action="store_true", help="ask /chat/completions, not /completions")
    parser.add_argument(
        "--temperature", type=temperature, default=0.0, metavar="T", help="0 is greedy; sampled is lossless, too"
    )
    add_load_arguments(parser)
    arguments = parser.parse_args()
    if bool(arguments.url) == bool(arguments.main):
        parser.error("name either MAIN and DRAFT, whose servers are started, or --url of a server that runs")
    if arguments.main and not arguments.draft:
        parser.error(f"there is no draft for {arguments.main}: name its folder, too")
    if arguments.baseline_url and not arguments.url:
        parser.error("--baseline-url goes with --url, the server with a draft")
    return arguments


def temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value <= 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 2")
    return value


def endpoints(arguments: argparse.Namespace, stack: ExitStack) -> dict[str, Endpoint]:
    """Where to ask, by the name of the way; what is started ends with `stack`.

    Raises ValueError for what is no server, RuntimeError where one does not start.
    """
    if arguments.url:
        urls = {DRAFT: arguments.url} | ({ALONE: arguments.baseline_url} if arguments.baseline_url else {})
    else:
        options = ["--device", arguments.device, "--draft-device", arguments.draft_device]
        options += [part for key, value in arguments.property for part in ("--property", f"{key}={value}")]
        options += ["--max-running", str(max(arguments.clients)), "--max-waiting", str(max(arguments.clients))]
        folders = {DRAFT: [arguments.main, arguments.draft], ALONE: [arguments.main]}
        servers = {name: StartedServer([*pair, *options]) for name, pair in folders.items()}
        for server in servers.values():
            stack.callback(server.end)
        urls = {name: server.url() for name, server in servers.items()}
    key = os.environ.get("OPENAI_API_KEY", "") if arguments.url else ""
    found = {name: Endpoint(url.rstrip("/"), arguments.model or "", key, arguments.chat) for name, url in urls.items()}
    return {name: one._replace(model=one.model or only_model(one)) for name, one in found.items()}


def load(name: str, server: Endpoint, prompts: list[str], settings: dict) -> Load:
    return Load(name, lambda clients, seconds, first: closed_loop(server, clients, seconds, prompts, settings, first))


def summary(rows: list[dict], done: int, asked: int, other: BackgroundLoad) -> list[str]:
    """The answer in words."""
    lines = stops_paying([one for one in rows if one["way"] == DRAFT])
    for way in dict.fromkeys(one["way"] for one in rows):
        best = max((one for one in rows if one["way"] == way), key=lambda one: one["throughput"])
        lines.append(f"Most tokens {way}: {best['throughput']:.0f} a second, by {counted(best['clients'])}.")
    lines.append(losses(rows))
    if done < asked:
        lines.append(f"Interrupted: {done} of {asked} rounds were measured in full, and only these are shown.")
    return [*lines, other.sentence] if other.sentence else lines


def main() -> int:
    prepare_output()
    arguments = parse_arguments()
    try:
        prompts = read_prompts(arguments.prompts, arguments.max_prompts)
        if arguments.main:
            refuse_unsound(arguments.main, arguments.draft)
            token_ids(prompts, arguments.main, arguments.max_new_tokens + NUMBER_TOKENS)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    settings = {"max_tokens": arguments.max_new_tokens, "temperature": arguments.temperature}
    if arguments.main:
        settings["ignore_eos"] = True
    try:
        with ctrl_c_raises(), ExitStack() as stack:
            servers = endpoints(arguments, stack)
            texts = [prompt.text for prompt in prompts]
            ways = [load(name, servers[name], texts, settings) for name in (ALONE, DRAFT) if name in servers]
            with BackgroundLoad() as other:
                complete = take_turns(ways, arguments.clients, arguments.seconds, arguments.rounds)
    except KeyboardInterrupt:
        return 130
    except (RuntimeError, ValueError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    baseline = ways[0] if len(ways) == 2 else None
    rows = [row(way, n, baseline) for way in ways for n in arguments.clients]
    if arguments.temperature:
        for one in rows:
            one["same_text"] = None
    done = len(ways[0].rounds[arguments.clients[0]])
    facts = {
        **environment(arguments, other),
        **({"servers": ", ".join(server.url for server in servers.values())} if arguments.url else {}),
        "prompts": f"{len(prompts)} of {shown_name(arguments.prompts)}",
        "max_new_tokens": arguments.max_new_tokens,
        "temperature": arguments.temperature,
        "seconds": arguments.seconds,
        "rounds": done,
    }
    lines = summary(rows, done, arguments.rounds, other)
    result = {"program": "benchmark_serving", "summary": lines, "environment": facts, "rows": rows}
    written = write_load_outputs(arguments, result, "\n".join([table(rows), "", *lines]))
    return 1 if not written else 0 if complete else 130


if __name__ == "__main__":
    sys.exit(main())
