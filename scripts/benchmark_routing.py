"""Compare routing policies of a server with several replicas on multi-turn chats: prefix-cache hits and TTFT.

    python scripts/benchmark_routing.py models/embedded/main models/embedded/draft

starts samples/serve/serve_pair.py twice, with --routing balanced and with --routing prefix, and stops both. In each
round both get new chats, one server after the other. All chats send their first turn, then all send their second, and
so on. A turn repeats the chat so far and adds `--added` lines. `--clients` requests run at a time. All turns but the
first are counted. Hits: share of the prompt tokens that came from the prefix cache. TTFT: median and 95th percentile.
Output: a table, then one JSON object on the last line. Ctrl-C keeps the complete rounds.
"""

from speculative.cli.program import exit_on, prepare_output

import argparse
import json
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from speculative.bench.harness import BackgroundLoad, environment
from speculative.bench.load.clients import Target, ask, only_model
from speculative.bench.load.metrics import RequestRecord
from speculative.bench.load.server import StartedServer
from speculative.cli.arguments import refuse_unsound
from speculative.cli.number_types import positive_int, two_or_more
from speculative.cli.parser import Parser
from speculative.cli.processes import ctrl_c_waits, signals_raise
from speculative.cli.progress import tqdm

ROUTINGS = ("balanced", "prefix")
SETTINGS = {"max_tokens": 16, "temperature": 0, "ignore_eos": True}


def parse_arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("main", type=Path, help="main model (IR folder)")
    parser.add_argument("draft", type=Path, help="draft model (IR folder)")
    for name, kind, default, meaning in (
        ("--replicas", two_or_more, 2, "replicas of each server"),
        ("--chats", positive_int, 16, "chats in a round"),
        ("--turns", two_or_more, 5, "turns of a chat"),
        ("--added", positive_int, 12, "lines that a turn adds to its chat"),
        ("--clients", positive_int, 2, "requests at a time"),
        ("--rounds", positive_int, 3, "interleaved rounds after a warm-up"),
    ):
        parser.add_argument(name, type=kind, default=default, metavar="N", help=f"{meaning} (default: %(default)s)")
    return parser.parse_args()


def play(server: Target, arguments: argparse.Namespace, first: int) -> list[RequestRecord]:
    """Let chats, numbered from `first`, take their turns; returns the answers to all turns but the first."""
    chats = [f"# chat {first + i}\n" for i in range(arguments.chats)]
    counted: list[RequestRecord] = []
    with ThreadPoolExecutor(arguments.clients) as clients:
        for turn in range(arguments.turns):

            def take_turn(i: int, turn: int = turn) -> RequestRecord:
                chats[i] += "".join(f"value_{first + i}_{turn}_{line} = {line}\n" for line in range(arguments.added))
                answer = ask(server.connect(), server, i, chats[i], SETTINGS)
                chats[i] += answer.text + "\n"
                return answer

            answers = list(clients.map(take_turn, range(arguments.chats)))
            counted += answers if turn else []
    if lost := [answer for answer in counted if answer.outcome != "answered"]:
        raise RuntimeError(f"{len(lost)} of {len(counted)} requests were not answered: {lost[0].error or 'cut off'}")
    return counted


def measure(targets: dict[str, Target], arguments: argparse.Namespace) -> list[dict[str, list[RequestRecord]]]:
    """The answers of each complete round, by routing policy. Ctrl-C ends the measurement.

    Raises KeyboardInterrupt if no round is complete, and RuntimeError for a request without an answer.
    """
    rounds: list[dict[str, list[RequestRecord]]] = []
    try:
        with tqdm(total=(1 + arguments.rounds) * len(targets), unit="run", leave=False) as bar:
            for number in range(1 + arguments.rounds):
                answers = {}
                for routing, target in targets.items():
                    bar.set_description(f"{routing} routing")
                    answers[routing] = play(target, arguments, number * arguments.chats)
                    bar.update()
                if number:  # the first is the warm-up
                    rounds.append(answers)
    except KeyboardInterrupt:
        if not rounds:
            raise
    return rounds


def row(routing: str, answers: list[RequestRecord]) -> dict:
    ttft = np.percentile([answer.ttft for answer in answers if answer.ttft], [50, 95])
    hits = sum(answer.cached_tokens for answer in answers) / sum(answer.prompt_tokens for answer in answers)
    return {"routing": routing, "requests": len(answers), "hits": hits, "ttft_50": ttft[0], "ttft_95": ttft[1]}


def table(rows: list[dict]) -> str:
    lines = ["| routing | prefix-cache hits | TTFT, median | TTFT, 95th percentile |", "|---|---|---|---|"]
    for one in rows:
        times = " | ".join(f"{1000 * one[name]:.0f} ms" for name in ("ttft_50", "ttft_95"))
        lines.append(f"| {one['routing']} | {one['hits']:.0%} | {times} |")
    return "\n".join(lines)


def main() -> int:
    prepare_output()
    arguments = parse_arguments()
    with exit_on(ValueError, status=2):
        refuse_unsound(arguments.main, arguments.draft)
    with exit_on(RuntimeError, ValueError), signals_raise(), ExitStack() as stack:
        targets = {}
        for routing in ROUTINGS:  # the start of a server takes all cores
            with ctrl_c_waits():
                options = ["--replicas", arguments.replicas, "--num-cpus", 1, "--routing", routing]
                server = StartedServer([arguments.main, arguments.draft, *options])
                stack.callback(server.end)
            target = Target(server.url(), "")
            targets[routing] = target._replace(model=only_model(target))
        with BackgroundLoad() as other:
            rounds = measure(targets, arguments)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # keep the rounds while the servers stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # and do not interrupt the output
    rows = [row(routing, [answer for answers in rounds for answer in answers[routing]]) for routing in ROUTINGS]
    facts = {**environment(arguments, other), "rounds": len(rounds)}
    is_complete = len(rounds) == arguments.rounds
    print(*filter(None, (table(rows), other.sentence)), sep="\n")
    if not is_complete:
        print(f"Interrupted: {len(rounds)} of {arguments.rounds} rounds completed; only these are shown.")
    print(json.dumps({"program": "benchmark_routing", "environment": facts, "rows": rows}))
    return 0 if is_complete else 130


if __name__ == "__main__":
    raise SystemExit(main())
