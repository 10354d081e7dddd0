"""Does a draft help this main model here, and with which K, engine, devices and properties is it fastest?

    python scripts/tune.py models/embedded/main models/embedded/draft --minutes 5

Ends with one recommendation, greedy: the command and the lines of Python, or "do not use this draft", each with the
measured reason. It is written to recommended.json beside the two folders; the samples take it with --recommended.

Successive halving under a time budget. First devices and plugin properties, by the time of one iteration (K draft steps
and one check), K guessed from costs and a trial of each draft; then engine, draft, K, confidence threshold and adaptive
length for the sets that are left, by decoding. All are measured a little, the better half more, all in turns, beside
the main model alone with its defaults. The last ones decode longer, in several rounds; the main model alone is among
them with each engine and scheduler, so that a draft is credited with nothing that these gain without it. What is
chosen then decodes in new rounds: their medians and ranges are reported, as the fastest of many is partly the luckiest.
A draft is recommended if it gains 5 % in the median of these rounds, and something in the worst of them.

Speed never hides what a setting does to the text (speculative/bench/quality.py says how that is judged, and where the
limit is): a set of properties beyond it is shown and marked, and recommended only with --allow-quality-loss.

Ctrl-C ends it early with the best so far. Several drafts may be given: the best one is found. All models are in a
process of their own: a driver's crash costs the candidate that was tried just then, which is listed as failed; the
others are loaded again and go on, with what was measured of them so far.

    python scripts/tune.py MAIN DRAFT --address HOST:PORT

shares the work among the equal machines of a Ray cluster (same processor, cores, devices, versions); the others are
left out, as what is fastest on one kind of machine says nothing about another: --machine NAME tunes for that one and
its equals. The models must be at the same path on each machine. Ratios stay fair because each machine measures the main
model alone beside its share of the candidates, in turns with them, and compares with that; the last ones are measured
on all machines, each round on one of them. A machine that is lost costs its share a retry on another one.

--exhaustive MINUTES checks the choice afterwards: it decodes with every set of properties, engine and draft length, and
says how near to the fastest of them the choice comes. Nobody needs that to tune; it is how to see what tuning is worth.
"""

from speculative.cli.program import prepare_output

import argparse
import contextlib
import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

from speculative.bench import harness
from speculative.bench.cluster import child_process, hosts, ray_nodes
from speculative.bench.cluster.child_process import Failed
from speculative.bench.cluster.hosts import Place
from speculative.bench.devices.matrix import device_list
from speculative.bench.prompts import read_prompts, token_ids
from speculative.bench.tuning import exhaustive as tune_exhaustive
from speculative.bench.tuning import verdict as tune_verdict
from speculative.bench.tuning.settings import Setting, kind
from speculative.bench.tuning.stages import Ended, Tuning
from speculative.cli.arguments import add_prompt_arguments, refuse_unsound, whole
from speculative.cli.properties import key_value
from speculative.pair import recommendation

signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # until something is measured

KINDS = ["CPU", "GPU", "NPU"]  # of devices that are tried unless others are named


def minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0
    if 0 < value <= 1440:
        return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes above 0 and up to 1440")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("main", type=Path, help="main model (IR folder)")
    parser.add_argument("drafts", type=Path, nargs="+", metavar="draft", help="draft (IR folder), or several")
    parser.add_argument("--minutes", type=minutes, default=10.0, metavar="M", help="time budget (default: 10)")
    parser.add_argument(
        "--devices",
        type=device_list,
        metavar="CPU,GPU",
        help="for main and draft (default: those of CPU, GPU, NPU here); as in OpenVINO, the names behind AUTO: or "
        "HETERO: belong to it",
    )
    parser.add_argument(
        "--address",
        type=ray_nodes.ray_address,
        metavar="HOST:PORT",
        help="head of a Ray cluster whose equal machines share the work: HOST:PORT, ray://HOST:PORT or auto",
    )
    parser.add_argument("--machine", metavar="NAME", help="with --address: tune for this machine and its equals")
    add_prompt_arguments(parser, max_prompts=40)
    parser.add_argument(
        "--max-new-tokens", type=whole, default=100, metavar="N", help="new tokens of the longest runs (default: 100)"
    )
    parser.add_argument(
        "--property",
        type=key_value,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="OpenVINO property that everything has, main and draft",
    )
    parser.add_argument(
        "--allow-quality-loss", action="store_true", help="recommend what changes the text beyond the limits, too"
    )
    parser.add_argument(
        "--exhaustive",
        type=minutes,
        metavar="M",
        help="afterwards take so many minutes more to compare the choice with all settings, decoding with each",
    )
    parser.add_argument(
        "--out", type=harness.output_file, metavar="FILE", help="write the recommendation here, not beside the pair"
    )
    harness.add_output_arguments(parser)
    arguments = parser.parse_args()
    if arguments.max_new_tokens < 8:
        parser.error(f"--max-new-tokens {arguments.max_new_tokens} leaves too little to time: take 8 or more")
    arguments.drafts = list(dict.fromkeys(arguments.drafts))
    arguments.draft = arguments.drafts[0]
    if arguments.machine and not arguments.address:
        parser.error("--machine is for a cluster: add --address")
    if arguments.address:  # where the other machines have them, too
        arguments.main, arguments.drafts = arguments.main.resolve(), [one.resolve() for one in arguments.drafts]
    return arguments


def run_here(job: dict, timeout: float) -> dict:
    return child_process.run([sys.executable, "-m", "speculative.bench.devices.cell"], job, timeout)


def this_machine(names: list[str] | None) -> list[Place]:
    try:
        return [hosts.of(None, run_here, names or KINDS, False)]
    except Failed as error:
        raise ValueError(f"looking the devices up failed ({error}): name those that work with --devices") from None


def in_cluster(machines: list, arguments: argparse.Namespace) -> list[Place]:
    """The equal machines that are to be tuned for; the others are noted."""
    note = lambda text: print(f"note: {text}", file=sys.stderr)  # noqa: E731
    places = hosts.in_cluster(machines, arguments.devices or KINDS, False, note)
    if not places:
        raise ValueError("no machine of the Ray cluster can be measured on: all are left out")
    equal = hosts.equal_machines(places, arguments.machine)
    for place in places:
        if place not in equal:
            note(f"machine {place.name} is left out, as it is another kind ({place.kind}): --machine tunes for it")
    return equal


def choose_devices(arguments: argparse.Namespace, place: Place) -> None:
    """Those that were named, if they are there, or all that are."""
    for name in arguments.devices or []:
        if place.devices[name].missing and kind(name) != "NPU":  # which NPUW_DEVICES=CPU stands in for
            raise ValueError(f"--devices names {name!r}, but {place.devices[name].missing}")
    if not arguments.devices:
        arguments.devices = [one.name for one in place.devices.values() if not one.missing]
    arguments.device = arguments.draft_device = arguments.devices[0]  # for the environment


@contextmanager
def nothing_lost():
    """Yields a list; Ctrl-C ends the block and leaves True in it."""
    interrupted: list[bool] = []
    try:
        with harness.ctrl_c_raises():
            yield interrupted
    except KeyboardInterrupt:
        interrupted.append(True)


def tune(tuning: Tuning) -> tuple[harness.BackgroundLoad, list[bool], str]:
    """Run it: the other load, whether Ctrl-C came, and why it could not go on."""
    ended = ""
    with harness.BackgroundLoad() as load, nothing_lost() as interrupted:
        try:
            tuning.run()
        except (Ended, Failed, ray_nodes.Lost, RuntimeError, ValueError, KeyError, MemoryError) as error:
            ended = " ".join(str(error).split())
        finally:
            tuning.clock.bar.close()
    if tuning.machines:
        load.share = tuning.other_load
    return load, interrupted, ended


def check(tuning: Tuning, choice: Setting, budget: float) -> dict | None:
    """What an exhaustive sweep makes of the choice. None: Ctrl-C, or what is to be compared failed."""
    every = tune_exhaustive.Exhaustive(tuning, choice, budget)
    _, interrupted, ended = tune(every)
    there = {choice, every.baseline} <= set(every.choosing.ways)
    return every.result() if there and not interrupted and not ended else None


def write_recommendation(arguments: argparse.Namespace, found: dict, draft: Path) -> str:
    """Where it was written, or why it was not, in one sentence."""
    file = arguments.out or recommendation.place(arguments.main, [draft])
    if not file:
        return (
            f"{arguments.main} and {draft} share no folder, so no recommended.json was written: --out FILE says where."
        )
    try:
        recommendation.write(file, found)
    except OSError as error:
        return f"{file} was not written ({error.strerror}): --out FILE writes it elsewhere."
    return f"Written to {file}."


def main() -> int:
    prepare_output()
    arguments = parse_arguments()
    for draft in arguments.drafts:
        refuse_unsound(arguments.main, draft)
    try:
        chosen = read_prompts(arguments.prompts, arguments.max_prompts)
        prompts = token_ids(chosen, arguments.main, arguments.max_new_tokens)
        with contextlib.ExitStack() as stack:
            if arguments.address:
                note = lambda text: print(f"note: {text}", file=sys.stderr)  # noqa: E731
                folders = [arguments.main, *arguments.drafts]
                places = in_cluster(stack.enter_context(ray_nodes.connect(arguments.address, folders, note)), arguments)
            else:
                places = this_machine(arguments.devices)
            choose_devices(arguments, places[0])
            tuning = Tuning(arguments, prompts, places)
            stack.callback(lambda: [bench.close() for bench in tuning.benches])
            load, interrupted, ended = tune(tuning)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # what is known is printed whole
            verdict, checked = tune_verdict.judge(tuning), None
            if wanted := arguments.exhaustive and verdict and not (interrupted or ended):
                checked = check(tuning, verdict.choice, arguments.exhaustive)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if verdict:
        sentences = verdict.sentences
    elif interrupted:
        sentences = ["Nothing was decoded with the draft yet, so there is nothing to recommend."]
    else:
        reasons = [ended] if ended else list(tuning.failed.values())
        print(f"error: nothing could be decoded: {'; '.join(reasons)}", file=sys.stderr)
        return 1
    sentences = [*sentences, *([load.sentence] if load.sentence else [])]
    left = [bench.machine.name for bench in tuning.benches if bench.machine]
    if lost := [name for name in tuning.machines if name not in left]:
        sentences.append(f"Lost on the way, so that others measured their share: {', '.join(lost)}.")
    if ended:
        sentences.append(f"It ended early: {ended}; recommended.json is only written at the end.")
    elif interrupted:
        sentences.append("Interrupted: recommended.json is only written at the end.")
    else:
        sentences.append(write_recommendation(arguments, verdict.as_dict(), verdict.draft))
    if wanted:
        sentences.append(tune_exhaustive.sentence(checked))
    print(tune_verdict.table(tuning), "", *sentences, "", sep="\n")
    result = {
        "program": "tune",
        "summary": sentences,
        "environment": harness.environment(arguments, load),
        "rows": tune_verdict.rows(tuning),
        "candidates": tune_verdict.candidates(tuning),
        "recommendation": verdict.as_dict() if verdict else None,
        "exhaustive": checked,
    }
    if tuning.machines:
        result["environment"]["machines"] = dict.fromkeys(tuning.machines, tuning.place.kind)
    harness.write_outputs(arguments, result)
    return 130 if interrupted else 1 if ended else 0


if __name__ == "__main__":
    sys.exit(main())
