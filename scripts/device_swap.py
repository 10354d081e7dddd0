"""Benchmark a model pair on every combination of main and draft device, alone and speculative.

    python scripts/device_swap.py models/embedded/main models/embedded/draft
    python scripts/device_swap.py models/embedded/main models/embedded/draft --devices CPU,AUTO:CPU,NPU --emulate-npu

Each cell of the matrix runs in a separate process with a time limit: a driver crash costs one cell. Within a cell, the
main model alone and with the draft are interleaved on the same prompts. The speedup is over the same main model alone
on the same device; values are medians over the rounds. Throughput is decode only. With several K, the best is shown.
Cells are measured minutes apart. The throughput shown is therefore the speedup times the median throughput of the main
model alone over all cells of its device.

Each cell's tokens are compared with those of the first cell, the main model alone on the CPU. Near-ties can resolve
differently in low precision. At a text's first difference, the main model in f32 (on the CPU) gives the margin by which
it prefers its own token. Within 0.5 nats it is a near-tie (~), beyond that a real difference (!), as in
speculative/bench/quality.py.

Finished cells are appended to a results file; rerun the command to resume. A cell is measured again only if the pair,
devices, properties, prompts, K, engine or versions changed. `--emulate-npu` runs the NPU code path on the CPU. It shows
whether the pair works there, not the speed of an NPU.

    python scripts/device_swap.py MAIN DRAFT --address HOST:PORT

measures on the machines of a Ray cluster, one cell at a time per machine. A machine needs the cell's devices: OpenVINO
detects them, or they are given when starting the node (--resources='{"intel_gpu": 1, "intel_npu": 1}'). The models must
be at the same path on each machine; this project's code is shipped with the job. Identical machines share the cells.
Different ones measure only cells whose devices the others lack, as tokens/s are not comparable between them. The cells
of a lost machine are retried on another.

Output: a table, then one JSON object on the last line. Exit status:

    0    a cell was measured
    1    no cell was measured, a file could not be written, or no machine could take the cells of a lost one
    2    bad usage
    130  Ctrl-C; the table shows the finished cells
"""

from speculative.cli.program import exit_on, prepare_output

import argparse
import hashlib
import json
import sys
from datetime import datetime, timezone
from pathlib import Path

import openvino_genai

from speculative.bench import harness
from speculative.bench.cluster import child_process, hosts
from speculative.bench.cluster.child_process import ChildFailed, OutOfTime
from speculative.bench.cluster.hosts import Place
from speculative.bench.cluster.ray_nodes import NodeLost, connect, distribute
from speculative.bench.devices import matrix
from speculative.bench.devices.matrix import ALONE, MEASURED, Cell, Device, device_list
from speculative.bench.devices.results import ResultsFile
from speculative.bench.prompts import read_prompts, token_ids
from speculative.bench.result import SwapEnvironment
from speculative.cli import former_options
from speculative.cli.arguments import add_run_arguments, lengths, refuse, refuse_unsound
from speculative.cli.number_types import positive_float
from speculative.cli.parser import Parser
from speculative.cli.processes import signals_raise
from speculative.cli.progress import tqdm
from speculative.cli.properties import key_value
from speculative.cli.ray_cluster import ray_address
from speculative.models import npu_model
from speculative.pair.draft_limits import genai_limit, native_limit
from speculative.pair.engines import GENAI, NATIVE, engine_id

LONGEST_ON_NPU = 7  # maximum K with main on an NPU, which takes 16 tokens at once: GenAI may grow K to twice its value
JUDGE_SECONDS = 600
# of devices/cell.py: incremented when results change meaning, so that kept cells are not mixed in (2: no cache)
METHOD = 2
CELL_PROGRAM = [sys.executable, "-m", "speculative.bench.devices.cell"]


# ---- devices and cells ----------------------------------------------------------------------------------------------


def device_property(text: str) -> tuple[str, str, str | int]:
    """An argparse type: KEY=VALUE for all devices, or DEVICE:KEY=VALUE for one (GPU stands for GPU.0 and GPU.1 too)."""
    key, value = key_value(text)
    device, _, key = key.rpartition(":")
    return device, key, value


def draft_lengths(text: str) -> list[int | str]:
    return ["adaptive"] if text == "adaptive" else lengths(text)


def parse_arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("main", type=Path, help="main model (IR folder)")
    parser.add_argument("draft", type=Path, help="draft model (IR folder)")
    add_cell_arguments(parser)
    add_results_arguments(parser)
    harness.add_output_arguments(parser)
    arguments = parser.parse_args()
    if arguments.num_assistant_tokens == ["adaptive"] and arguments.engine == GENAI:
        parser.error("-k adaptive requires --engine native")
    if arguments.emulate_npu and arguments.devices and "NPU" not in arguments.devices:
        parser.error("--emulate-npu requires NPU in --devices")
    return arguments


def add_cell_arguments(parser: argparse.ArgumentParser) -> None:
    """Devices, and the measurement in each cell."""
    parser.add_argument(
        "--devices",
        type=device_list,
        metavar="LIST",
        help="for example CPU,GPU.0,GPU.1,NPU,AUTO:GPU,CPU; AUTO: and HETERO: take the names that follow (default: all "
        "on this machine)",
    )
    parser.add_argument(
        "--engine",
        type=engine_id,
        choices=(GENAI, NATIVE),
        default=GENAI,
        help="GenAI's pipeline or this project's engine (default: genai)",
    )
    draft_length = parser.add_argument(
        "-k",
        "--num-assistant-tokens",
        type=draft_lengths,
        default="4",
        metavar="K",
        help="draft lengths: 4, 2,4,6 or 2-6, with --engine native also adaptive; a cell shows the best (default: 4)",
    )
    former_options.accept(parser, draft_length, "--k")
    add_run_arguments(parser, max_prompts=4)
    parser.add_argument(
        "--property",
        type=device_property,
        action="append",
        default=[],
        metavar="[DEVICE:]KEY=VALUE",
        help="OpenVINO property for both models, on all devices or one (repeatable)",
    )
    parser.add_argument(
        "--emulate-npu", action="store_true", help="run the NPU code path on the CPU in place of an NPU"
    )
    parser.add_argument(
        "--timeout",
        type=positive_float,
        default=600,
        metavar="SECONDS",
        help="time limit per cell, loading included (default: 600)",
    )


def add_results_arguments(parser: argparse.ArgumentParser) -> None:
    """Where cells are saved and measured, and which are measured again."""
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("device_swap.jsonl"),
        metavar="FILE",
        help="file for finished cells (default: device_swap.jsonl in the current folder)",
    )
    parser.add_argument(
        "--address",
        type=ray_address,
        metavar="HOST:PORT",
        help="head of a Ray cluster to measure on: HOST:PORT, ray://HOST:PORT or auto",
    )
    parser.add_argument("--fresh", action="store_true", help="measure all cells again")
    parser.add_argument("--retry", action="store_true", help="measure cells again that failed or timed out")


def run_here(job: dict, timeout: float, waiting=lambda: None) -> dict:
    return child_process.run(CELL_PROGRAM, job, timeout, waiting)


def this_machine(arguments: argparse.Namespace) -> Place:
    try:
        return hosts.look_up(None, run_here, arguments.devices, arguments.emulate_npu)
    except ChildFailed as error:
        note(f"device detection failed ({error}), so each device is tried in its own cells")
        versions = [openvino_genai.__version__, ""]
        return hosts.without_detection(arguments.devices, run_here, versions, arguments.emulate_npu)


def plan(arguments: argparse.Namespace, places: list[Place], prompts: list[list[int]]) -> list[Cell]:
    """All cells, starting with the reference: the main model alone, on the CPU if that is among the devices."""
    devices = hosts.all_devices(places)
    common = {
        "main": str(arguments.main.resolve()),
        "draft": str(arguments.draft.resolve()),
        "engine": arguments.engine,
        "prompts": prompts,
        "max_new_tokens": arguments.max_new_tokens,
        "rounds": arguments.rounds,
        "method": METHOD,
    }
    cells = []
    for main in devices:
        lengths = arguments.num_assistant_tokens
        if main.is_npu and arguments.engine == GENAI:
            lengths = sorted({min(k, LONGEST_ON_NPU) for k in lengths})
        for draft in [None, *devices]:
            cell = Cell(main, draft)
            missing = [device for device in cell.devices if device.missing]
            if missing:
                cell.status, cell.reason = "absent", missing[0].missing
            elif draft and (limit := limit_of(arguments, main.name, draft.name)):
                cell.status, cell.reason = "absent", limit
            elif not any(place.has(cell) for place in places):
                cell.status = "absent"
                cell.reason = f"no machine of the cluster has both {main.name} and {draft.name}"
            cell.job = {
                **common,
                "main_device": main.name,
                "main_properties": properties_of(main, arguments, prompts),
                "main_file": fingerprint(arguments.main),
                "draft": common["draft"] if draft else None,
                "draft_device": draft.name if draft else None,
                "draft_properties": properties_of(draft, arguments, prompts) if draft else {},
                "draft_file": fingerprint(arguments.draft) if draft else None,
                "draft_lengths": lengths if draft else [],
            }
            cells.append(cell)
    return sorted(cells, key=lambda cell: (cell.main.name, cell.draft) != ("CPU", None))


def limit_of(arguments: argparse.Namespace, *devices: str) -> str:
    """Why the engine cannot run the draft on these devices; "" if it can."""
    if arguments.engine == NATIVE:
        return native_limit(arguments.draft, *devices)
    return genai_limit(arguments.main, arguments.draft, *devices)


def names(device: Device) -> tuple[str, ...]:
    """The names a property may use for the device, most specific last; the last match wins."""
    kind = device.name.partition(".")[0] if ":" not in device.name else device.name
    return ("", kind, device.name)


def properties_of(device: Device, arguments: argparse.Namespace, prompts: list[list[int]]) -> dict:
    """The properties given for the device, plus NPU emulation and the lengths an NPU's static shapes need."""
    properties = {
        key: value for device_name in names(device) for name, key, value in arguments.property if name == device_name
    }
    if device.emulated:
        properties["NPUW_DEVICES"] = "CPU"
    if device.is_npu:
        needed = {
            "MAX_PROMPT_LEN": (max(map(len, prompts)), npu_model.DEFAULT_PROMPT),
            "MIN_RESPONSE_LEN": (arguments.max_new_tokens, npu_model.DEFAULT_RESPONSE),
        }
        for key, (tokens, default) in needed.items():
            if tokens > default:
                properties.setdefault(key, -(-tokens // 128) * 128)
    return properties


def fingerprint(folder: Path) -> list[int]:
    return [n for part in ("xml", "bin") for n in _size_and_date(folder / f"openvino_model.{part}")]


def _size_and_date(file: Path) -> tuple[int, int]:
    facts = file.stat()
    return facts.st_size, facts.st_mtime_ns


# ---- measuring and saving -------------------------------------------------------------------------------------------


def measure(cells: list[Cell], results: ResultsFile, arguments: argparse.Namespace, places: list[Place]) -> bool:
    """Measure the cells that are not in the results file. Returns False after Ctrl-C."""
    present = [cell for cell in cells if cell.status != "absent"]
    for cell in present:
        for place in sorted(filter(lambda place: place.has(cell), places), key=lambda one: one.kind):
            place.take(cell)
            outcome = results.lines.get(cell.key())
            if outcome and still_counts(outcome, arguments):
                cell.take(outcome)
                break
    todo = [cell for cell in present if not cell.measured]
    done = len(present) - len(todo)
    if done:
        say(f"{done} of {len(present)} cells are already in {results.path}; use --fresh to measure them again")
    try:
        with signals_raise(), tqdm(total=len(present), initial=done, unit="cell") as bar:
            if arguments.address:
                measure_in_cluster(todo, results, arguments, places, bar)
                return True
            for cell in todo:
                bar.set_description(cell.name)
                measure_one(cell, places[0], arguments, bar)
                results.append(cell.key(), cell.outcome())
                bar.update()
    except KeyboardInterrupt:
        return False
    return True


def measure_in_cluster(
    todo: list[Cell], results: ResultsFile, arguments: argparse.Namespace, places: list[Place], bar: tqdm
) -> None:
    """Measure on all machines concurrently, one cell at a time each. Cells with no machine left are not run."""
    bar.set_description(f"on {len(places)} machine{'s' * (len(places) > 1)}")

    def done(cell: Cell, _: Place, __: None) -> None:
        results.append(cell.key(), cell.outcome())
        bar.update()

    while todo and places:
        kinds = hosts.assign(todo, places)
        before = len(places)
        can_measure = lambda cell, place, kinds=kinds: kinds.get(id(cell)) == place.kind and place.has(cell)  # noqa: E731
        unfinished = distribute(
            todo, places, can_measure, lambda cell, place: measure_one(cell, place, arguments, bar), done
        )
        for cell, reason in unfinished:
            cell.reason = f"{reason}, and no other machine could take its cells" if reason else "its machine was lost"
            cell.machine = cell.machine_kind = ""
        todo = [cell for cell, _ in unfinished]
        if len(places) == before:
            break


def still_counts(outcome: dict, arguments: argparse.Namespace) -> bool:
    if outcome["status"] in MEASURED:
        return True
    longer = outcome["status"] == "timeout" and arguments.timeout > outcome["timeout"]
    return not (arguments.retry or longer)


def measure_one(cell: Cell, place: Place, arguments: argparse.Namespace, bar: tqdm) -> None:
    waiting = bar.refresh if sys.stderr.isatty() else lambda: None
    place.take(cell)
    timeout = arguments.timeout
    try:
        answer = place.run(cell.job, timeout, waiting)
        emulated = any(device.emulated for device in cell.devices)
        status, reason = "emulated" if emulated else "ok", remark(cell, arguments.num_assistant_tokens)
    except ChildFailed as error:
        answer, status, reason = {}, "timeout" if isinstance(error, OutOfTime) else "failed", str(error)
    cell.status, cell.reason, cell.answer, cell.timeout = status, reason, answer, timeout
    cell.measured = datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def remark(cell: Cell, requested: list[int | str]) -> str:
    """Caveats of a measured cell."""
    notes = []
    if any(device.emulated for device in cell.devices):
        notes.append("NPU code path on the CPU: not representative of an NPU's speed")
    if cell.draft and not {*requested} <= {*cell.job["draft_lengths"]}:
        notes.append(f"K limited to {LONGEST_ON_NPU}, the maximum for a main model on an NPU")
    return "; ".join(notes)


def judge_differences(cells: list[Cell], results: ResultsFile, places: list[Place]) -> None:
    """Find the margin, in f32, at each text's first difference: one job for all cells."""
    differing = [cell for cell in cells if cell.difference]
    requested = [one for cell in differing for one in cell.difference["places"]]
    unique = [json.loads(text) for text in sorted({json.dumps(one, sort_keys=True) for one in requested})]
    place = next((one for one in places if "CPU" in one.devices and not one.devices["CPU"].missing), None)
    if not unique or not (place or places):
        return
    job = {"main": differing[0].job["main"], "main_file": differing[0].job["main_file"], "differences": unique}
    key = hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()[:32]
    if key not in results.lines:
        try:
            results.append(key, (place or places[0]).run(job, JUDGE_SECONDS))
        except (ChildFailed, NodeLost) as error:
            note(f"could not determine whether the differences are near-ties: {error}")
            return
    margins = results.lines[key]["margins"]
    for cell in differing:
        cell.difference["margins"] = [margins[unique.index(one)] for one in cell.difference["places"]]


# ---- the program ----------------------------------------------------------------------------------------------------


def environment(arguments: argparse.Namespace, devices: list[Device], cells: list[Cell]) -> SwapEnvironment:
    facts = harness.environment(argparse.Namespace())
    facts |= {"main": str(arguments.main), "draft": str(arguments.draft)}
    facts["devices"] = {device.label: device.full_name or device.missing for device in devices}
    facts["properties"] = [f"{device}:{key}={value}".lstrip(":") for device, key, value in arguments.property]
    facts |= {"engine": arguments.engine, "k": arguments.num_assistant_tokens, "prompts": len(cells[0].job["prompts"])}
    facts |= {"max_new_tokens": arguments.max_new_tokens, "rounds": arguments.rounds}
    facts["results"] = str(arguments.results)
    if kinds := {cell.machine: cell.machine_kind for cell in cells if cell.machine}:
        facts["machines"] = kinds
    facts["other_load"] = max((cell.answer.get("other_load", 0.0) for cell in cells), default=0.0)
    return facts


def note(text: str) -> None:
    say(f"note: {text}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    prepare_output()
    arguments = parse_arguments()
    refuse_unsound(arguments.main, arguments.draft)
    refuse(genai_limit(arguments.main, arguments.draft) if arguments.engine == GENAI else "")
    with exit_on(ValueError, status=2):
        prompts = read_prompts(arguments.prompts, arguments.max_prompts)
        ids = [one.tolist() for one in token_ids(prompts, arguments.main, arguments.max_new_tokens)]
        results = ResultsFile(arguments.results)
        if arguments.address:
            with connect(arguments.address, [arguments.main, arguments.draft], note) as machines:
                places = hosts.in_cluster(machines, arguments.devices, arguments.emulate_npu, note)
                devices, cells, finished = swap(arguments, prompts, ids, results, places)
        else:
            devices, cells, finished = swap(arguments, prompts, ids, results, [this_machine(arguments)])
    summary = matrix.summary(cells)
    labels = [device.label for device in devices]
    described = [matrix.cell_result(cell) for cell in cells]
    result = {
        "program": "device_swap",
        "summary": summary,
        "environment": environment(arguments, devices, cells),
        "matrix": {"main_devices": labels, "draft_devices": [ALONE, *labels], "cells": described},
        "rows": matrix.rows(cells),
    }
    if results.problem:
        say(f"error: {results.path} was not written: {results.problem}; free space or use another file with --results")
    harness.write_outputs(arguments, result, "\n".join([matrix.table(cells), *summary, ""]))
    if not finished:
        return 130
    unmeasured = any(cell.status == "not run" for cell in cells)
    return 1 if results.problem or unmeasured or not any(cell.has_figures for cell in cells) else 0


def swap(
    arguments: argparse.Namespace, prompts: list, ids: list[list[int]], results: ResultsFile, places: list[Place]
) -> tuple[list[Device], list[Cell], bool]:
    """Measure missing cells and compare all. Returns the devices, the cells, and False if Ctrl-C interrupted.

    Raises ValueError for bad usage, in one sentence.
    """
    if not places:
        raise ValueError("no machine of the Ray cluster is usable: all were skipped")
    devices = hosts.all_devices(places)
    known_names = {name for device in devices for name in names(device)}
    if unknown := [name for name, _, _ in arguments.property if name not in known_names]:
        raise ValueError(
            f"--property names {unknown[0]!r}, which is not one of the devices: {', '.join(sorted(known_names - {''}))}"
        )
    cells = plan(arguments, places, ids)
    if arguments.fresh:
        try:
            results.forget(
                {cell.key() for cell in cells for place in places if place.has(cell) and not place.take(cell)}
            )
        except OSError as error:
            raise ValueError(
                f"cannot write {results.path} ({error.strerror}): use another file with --results"
            ) from None
    finished = measure(cells, results, arguments, places)
    tokenizer = openvino_genai.Tokenizer(str(arguments.main))
    matrix.compare(cells, [prompt.id for prompt in prompts], tokenizer)
    try:
        with signals_raise():
            if finished:
                judge_differences(cells, results, places)
    except KeyboardInterrupt:
        finished = False
    return devices, cells, finished


if __name__ == "__main__":
    sys.exit(main())
