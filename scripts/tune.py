"""Tune speculative decoding for a model pair: find the fastest K, engine, devices and properties, if a draft helps.

    python scripts/tune.py models/embedded/main models/embedded/draft --minutes 5
    python scripts/tune.py models/embedded/main --prompts scripts/prompts/repeats.jsonl  # does suffix decoding help?

Prints one recommendation for greedy decoding, with the measured reason: a command and the equivalent Python, or "do not
use this draft". It is saved as recommended.json next to the model folders; samples load it with --recommended. With
several drafts, the best one is chosen. Without a draft, suffix decoding or the main model alone is recommended, by the
same rule.

The search is successive halving within a time budget.

1. Devices and plugin properties are ranked by the time of one iteration (K draft steps and one verification). K is
   estimated from costs and a trial of each draft.
2. For the remaining property sets, engine, draft, K, confidence threshold and adaptive length are ranked by decoding.
   All candidates get a short measurement and the better half a longer one, always interleaved with the main model alone
   with its defaults.
3. Finalists decode longer, in several rounds. They include the main model alone with each engine and scheduler, suffix
   decoding, and suffix decoding with a draft. A draft thus gets no credit for gains available without it.
4. The choice is measured again in new rounds, because the fastest of many candidates is partly the luckiest. The
   medians and ranges of these rounds are reported. Default settings that are faster in each of them are recommended.

A draft is recommended if its median gain in the new rounds is at least 5 % and even the worst round gains.

The effect on the text is always reported (speculative/bench/quality.py defines the measure and its limit). A property
set beyond the limit is listed and marked. It is recommended only with --allow-quality-loss.

Ctrl-C stops early with the best result so far. The models run in a separate process. If a driver crashes, only the
current candidate is listed as failed; the others are reloaded and keep their measurements.

    python scripts/tune.py MAIN DRAFT --address HOST:PORT

distributes the work over the identical machines of a Ray cluster (same processor, cores, devices, versions). Results do
not transfer between kinds of machine, so other machines are skipped: --machine NAME tunes for that machine and those
identical to it. The models must be at the same path on each machine. Each machine measures the main model alone
interleaved with its share of the candidates, so ratios stay comparable. Finalists are measured on all machines, each
round on one of them. If a machine is lost, its share is retried on another.

--exhaustive MINUTES validates the choice afterwards: it decodes with every combination of properties, engine and draft
length, and reports the distance of the choice from the fastest. Tuning does not need it.
"""

from speculative.cli.program import exit_on, prepare_output

import argparse
import contextlib
import os
import signal
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from speculative.bench import harness
from speculative.bench.cluster import child_process, hosts, ray_nodes
from speculative.bench.cluster.child_process import ChildFailed
from speculative.bench.cluster.hosts import Place
from speculative.bench.devices.matrix import device_list
from speculative.bench.prompts import read_prompts, token_ids
from speculative.bench.result import ExhaustiveCheck, Recommendation
from speculative.bench.tuning import exhaustive as tune_exhaustive
from speculative.bench.tuning import tables
from speculative.bench.tuning.session import Ended
from speculative.bench.tuning.settings import Setting, kind
from speculative.bench.tuning.stages import Tuning
from speculative.bench.tuning.verdict import Verdict, judge
from speculative.cli.arguments import add_prompt_arguments, refuse_unsound
from speculative.cli.number_types import decimal, positive_int
from speculative.cli.parser import Parser
from speculative.cli.processes import signals_raise
from speculative.cli.properties import PROPERTY
from speculative.cli.ray_cluster import ray_address
from speculative.pair import recommendation

signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # until something is measured

KINDS = ["CPU", "GPU", "NPU"]  # device types tried by default
minutes = decimal(lambda value: 0 < value <= 1440, "of minutes above 0 and up to 1440")


def parse_arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("main", type=Path, help="main model (IR folder)")
    parser.add_argument(
        "drafts",
        type=Path,
        nargs="*",
        default=[],
        metavar="draft",
        help="draft models (IR folders), one or more; without any, suffix decoding is tried",
    )
    parser.add_argument("--minutes", type=minutes, default=10.0, metavar="M", help="time budget (default: 10)")
    add_machine_arguments(parser)
    add_prompt_arguments(parser, max_prompts=40)
    parser.add_argument(
        "--max-new-tokens",
        type=positive_int,
        default=100,
        metavar="N",
        help="new tokens in the longest runs (default: 100)",
    )
    parser.add_argument("--property", **PROPERTY, help="OpenVINO property for main and draft in every candidate")
    parser.add_argument(
        "--allow-quality-loss", action="store_true", help="also recommend settings that exceed the quality limits"
    )
    parser.add_argument(
        "--exhaustive",
        type=minutes,
        metavar="M",
        help="then spend M more minutes comparing the choice with every setting by decoding",
    )
    parser.add_argument(
        "--out",
        type=harness.output_file,
        metavar="FILE",
        help="write the recommendation here instead of next to the models",
    )
    harness.add_output_arguments(parser)
    arguments = parser.parse_args()
    if arguments.max_new_tokens < 8:
        parser.error(f"--max-new-tokens {arguments.max_new_tokens} is too few to time: use 8 or more")
    arguments.drafts = list(dict.fromkeys(arguments.drafts))
    arguments.draft = next(iter(arguments.drafts), None)
    if arguments.machine and not arguments.address:
        parser.error("--machine requires --address")
    if arguments.address:  # the same paths on the other machines
        arguments.main, arguments.drafts = arguments.main.resolve(), [one.resolve() for one in arguments.drafts]
    return arguments


def add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--devices",
        type=device_list,
        metavar="CPU,GPU",
        help="devices for main and draft (default: all available of CPU, GPU, NPU); as in OpenVINO, AUTO: and HETERO: "
        "take the names that follow",
    )
    parser.add_argument(
        "--address",
        type=ray_address,
        metavar="HOST:PORT",
        help="head of a Ray cluster whose identical machines share the work: HOST:PORT, ray://HOST:PORT or auto",
    )
    parser.add_argument(
        "--machine", metavar="NAME", help="with --address: tune for this machine and those identical to it"
    )


def run_here(job: dict, timeout: float) -> dict:
    return child_process.run([sys.executable, "-m", "speculative.bench.devices.cell"], job, timeout)


def this_machine(names: list[str] | None) -> list[Place]:
    try:
        return [hosts.look_up(None, run_here, names or KINDS, False)]
    except ChildFailed as error:
        raise ValueError(f"device detection failed ({error}): name working devices with --devices") from None


def note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def in_cluster(machines: list, arguments: argparse.Namespace) -> list[Place]:
    """The identical machines to tune for; a note is printed for each skipped one."""
    places = hosts.in_cluster(machines, arguments.devices or KINDS, False, note)
    if not places:
        raise ValueError("no machine of the Ray cluster is usable: all were skipped")
    equal = hosts.equal_machines(places, arguments.machine)
    for place in places:
        if place not in equal:
            note(
                f"machine {place.name} is skipped, as it is of another kind ({place.kind}): tune for it with --machine"
            )
    return equal


def choose_devices(arguments: argparse.Namespace, place: Place) -> None:
    """Set the named devices, if available, or all available ones."""
    for name in arguments.devices or []:
        if place.devices[name].missing and kind(name) != "NPU":  # NPUW_DEVICES=CPU can simulate an NPU
            raise ValueError(f"--devices names {name!r}, but {place.devices[name].missing}")
    if not arguments.devices:
        arguments.devices = [one.name for one in place.devices.values() if not one.missing]
    arguments.device = arguments.draft_device = arguments.devices[0]  # for environment()


@contextmanager
def nothing_lost():
    """Yield a list; Ctrl-C ends the block and appends True to it."""
    interrupted: list[bool] = []
    try:
        with signals_raise():
            yield interrupted
    except KeyboardInterrupt:
        interrupted.append(True)


def tune(tuning: Tuning | tune_exhaustive.Exhaustive) -> tuple[harness.BackgroundLoad, list[bool], str]:
    """Run it. Returns the background load, whether Ctrl-C was pressed, and the reason if it had to stop."""
    ended = ""
    with harness.BackgroundLoad() as load, nothing_lost() as interrupted:
        try:
            tuning.run()
        except (Ended, ChildFailed, ray_nodes.NodeLost, RuntimeError, ValueError, KeyError, MemoryError) as error:
            ended = " ".join(str(error).split())
        finally:
            tuning.clock.bar.close()
    if tuning.machines:
        load.share = tuning.other_load
    return load, interrupted, ended


def check(tuning: Tuning, choice: Setting, budget: float) -> ExhaustiveCheck | None:
    """Compare the choice with an exhaustive sweep. None after Ctrl-C or if a compared setting failed."""
    every = tune_exhaustive.Exhaustive(tuning, choice, budget)
    _, interrupted, ended = tune(every)
    there = {choice, every.baseline} <= set(every.choosing.methods)
    return every.result() if there and not interrupted and not ended else None


def write_recommendation(arguments: argparse.Namespace, found: Recommendation, draft: Path | None) -> str:
    """Write it; return a sentence saying where, or why not."""
    file = arguments.out or recommendation.place(arguments.main, draft)
    if not file:
        return (
            f"{arguments.main} and {draft} are in different folders, so no recommended.json was written: move them "
            "into one, where --recommended finds it, or keep the result with --out FILE."
        )
    try:
        recommendation.write(file, found)
    except OSError as error:
        return f"{file} was not written ({error.strerror}): choose another path with --out FILE."
    return f"Written to {file}."


# ---- the program ----------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """Result of tuning, and how it ended."""

    tuning: Tuning
    load: harness.BackgroundLoad
    interrupted: bool
    ended: str  # the reason if it had to stop, else ""
    verdict: Verdict | None  # None: nothing was decoded for comparison
    checked: dict | None  # the comparison with every setting

    @property
    def complete(self) -> bool:
        return bool(self.verdict) and not (self.interrupted or self.ended)


def open_machines(arguments: argparse.Namespace, stack: contextlib.ExitStack) -> list[Place]:
    """This machine, or those of the cluster; `stack` keeps the connection open."""
    if not arguments.address:
        return this_machine(arguments.devices)
    folders = [arguments.main, *arguments.drafts]
    return in_cluster(stack.enter_context(ray_nodes.connect(arguments.address, folders, note)), arguments)


def run(arguments: argparse.Namespace) -> Outcome:
    """Tune, judge and, if requested, compare with every setting. Raises ValueError for bad usage, in one sentence."""
    chosen = read_prompts(arguments.prompts, arguments.max_prompts)
    prompts = token_ids(chosen, arguments.main, arguments.max_new_tokens)
    with contextlib.ExitStack() as stack:
        places = open_machines(arguments, stack)
        choose_devices(arguments, places[0])
        tuning = Tuning(arguments, prompts, places)
        stack.callback(lambda: [bench.close() for bench in tuning.benches])
        load, interrupted, ended = tune(tuning)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # do not interrupt the output
        outcome = Outcome(tuning, load, bool(interrupted), ended, judge(tuning), None)
        if arguments.exhaustive and outcome.complete:
            outcome.checked = check(tuning, outcome.verdict.choice, arguments.exhaustive)
    return outcome


def conclude(arguments: argparse.Namespace, outcome: Outcome) -> list[str]:
    """The result in sentences. Writes the recommendation if tuning was complete."""
    tuning, verdict = outcome.tuning, outcome.verdict
    sentences = ["Interrupted before anything was decoded for comparison: no recommendation."]
    if verdict:
        sentences = [*verdict.sentences]
    if outcome.load.sentence:
        sentences.append(outcome.load.sentence)
    left = [bench.machine.name for bench in tuning.benches if bench.machine]
    if lost := [name for name in tuning.machines if name not in left]:
        sentences.append(f"Machines lost during tuning (others measured their share): {', '.join(lost)}.")
    if outcome.ended:
        sentences.append(f"Stopped early: {outcome.ended}; recommended.json was not written.")
    elif outcome.interrupted:
        sentences.append("Interrupted: recommended.json was not written.")
    else:
        sentences.append(write_recommendation(arguments, verdict.as_dict(), verdict.draft))
    if arguments.exhaustive and outcome.complete:
        sentences.append(tune_exhaustive.sentence(outcome.checked))
    return sentences


def result_of(arguments: argparse.Namespace, outcome: Outcome, sentences: list[str]) -> dict:
    """The program's result, as written in JSON."""
    tuning = outcome.tuning
    environment = harness.environment(arguments, outcome.load)
    if tuning.machines:
        environment["machines"] = dict.fromkeys(tuning.machines, tuning.place.kind)
    return {
        "program": "tune",
        "summary": sentences,
        "environment": environment,
        "rows": tables.rows(tuning),
        "candidates": tables.candidates(tuning),
        "recommendation": outcome.verdict.as_dict() if outcome.verdict else None,
        "exhaustive": outcome.checked,
    }


def main() -> int:
    prepare_output()
    arguments = parse_arguments()
    for draft in arguments.drafts or [None]:
        refuse_unsound(arguments.main, draft)
    with exit_on(ValueError, status=2):
        outcome = run(arguments)
    if not outcome.verdict and not outcome.interrupted:
        reasons = [outcome.ended] if outcome.ended else list(outcome.tuning.failed.values())
        print(f"error: all decoding failed: {'; '.join(reasons)}", file=sys.stderr)
        return 1
    sentences = conclude(arguments, outcome)
    shown = "\n".join([tables.table(outcome.tuning), "", *sentences, ""])
    harness.write_outputs(arguments, result_of(arguments, outcome, sentences), shown)
    return 130 if outcome.interrupted else 1 if outcome.ended else 0


if __name__ == "__main__":
    sys.exit(main())
