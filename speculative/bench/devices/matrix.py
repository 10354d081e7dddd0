"""Matrix of main device x draft device: the cells, their comparison, and the summary and table of the results."""

import argparse
import hashlib
import json
import statistics
from dataclasses import dataclass, field
from typing import cast

import openvino_genai

from speculative.bench.harness import BackgroundLoad
from speculative.bench.load.metrics import counted
from speculative.bench.quality import NEAR_TIE
from speculative.bench.result import CellResult, Drawn, MethodRow, SwapRow
from speculative.pair.devices import VIRTUAL
from speculative.pair.engines import NATIVE

KINDS = ("CPU", "GPU", "NPU", *VIRTUAL)
ALONE = "none"  # the draft device of the main model alone
MEASURED = ("ok", "emulated")
SHOWN = 12  # tokens shown before and after a difference


@dataclass(frozen=True)
class Device:
    """A device string; `missing` says in one sentence why it is unusable, and is empty if it is usable."""

    name: str
    full_name: str = ""
    missing: str = ""
    stands_for: tuple[str, ...] = ()  # the single devices in the string
    emulated: bool = False

    @property
    def label(self) -> str:
        return f"{self.name} (emulated)" if self.emulated else self.name

    @property
    def is_npu(self) -> bool:
        return self.name.partition(".")[0] == "NPU"


def device_list(text: str) -> list[str]:
    """An argparse type. As in OpenVINO, AUTO: and HETERO: take the names that follow: CPU,GPU,AUTO:GPU,CPU is CPU, GPU
    and AUTO:GPU,CPU."""
    devices: list[str] = []
    for part in text.split(","):
        name = part.strip()
        kind = name.lstrip("-").partition(":")[0].partition(".")[0].partition("(")[0]
        if kind not in KINDS:
            raise argparse.ArgumentTypeError(
                f"{name!r} in {text!r} is not a device: give a list of CPU, GPU, GPU.1, NPU, AUTO:GPU,CPU, "
                "HETERO:GPU,CPU"
            )
        if ":" not in name and kind not in VIRTUAL and devices and ":" in devices[-1]:
            devices[-1] += f",{name}"
        else:
            devices.append(name)
    return list(dict.fromkeys(devices))


@dataclass
class Cell:
    """A main device with a draft device (None: alone), the job for devices/cell.py, and its result."""

    main: Device
    draft: Device | None
    job: dict = field(default_factory=dict)
    status: str = "not run"  # ok, emulated, failed, timeout, absent
    reason: str = ""
    measured: str = ""  # time, UTC
    timeout: float = 0.0
    machine: str = ""  # the cluster machine that measured it
    machine_kind: str = ""  # results are comparable between machines of the same kind
    answer: dict = field(default_factory=dict)  # cell.py's
    alone: list[float] = field(default_factory=list)  # tokens/s of main alone in each cell with this main device
    difference: dict | None = None  # from the first cell's text

    @property
    def devices(self) -> list[Device]:
        return [self.main, *([self.draft] if self.draft else [])]

    @property
    def name(self) -> str:
        devices = f"main on {self.main.label}, " + (f"draft on {self.draft.label}" if self.draft else "alone")
        return devices + (f", at {self.machine}" if self.machine else "")

    @property
    def has_figures(self) -> bool:
        return self.status in MEASURED

    @property
    def best(self) -> int:
        """Index of the row shown: main alone, or the K with the highest throughput."""
        rows = self.rows
        return max(range(1, len(rows)), key=lambda i: rows[i]["throughput"]) if self.draft else 0

    @property
    def rows(self) -> list[MethodRow]:
        return self.answer["rows"]

    @property
    def row(self) -> MethodRow:
        return self.rows[self.best]

    @property
    def margins(self) -> list[float]:
        """Those of the differences from the first cell's text; empty: none, or not judged."""
        return self.difference["margins"] if self.difference else []

    @property
    def throughput(self) -> float:
        """Comparable between cells measured minutes apart: the speedup times the median of main alone over all cells
        of the device."""
        return statistics.median(self.alone) * self.row["speedup"]

    @property
    def throughput_range(self) -> tuple[float, float]:
        low, high = self.row["speedup_range"]
        return min(self.alone) * low, max(self.alone) * high

    @property
    def draft_length(self) -> str:
        length = self.row["draft_length"]
        return f" with {length if isinstance(length, str) else f'K = {length}'}" if length else ""

    def key(self) -> str:
        """Hash of everything the measurement depends on: a cell with a known key is not measured again."""
        job = {**self.job, "engine": "ours"} if self.job.get("engine") == NATIVE else self.job  # as in earlier files
        return hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()[:32]

    def outcome(self) -> dict:
        """The part saved in the results file."""
        names = {"main_device": self.main.label, "draft_device": self.draft.label if self.draft else ALONE}
        return {**names, **{name: getattr(self, name) for name in OUTCOME}}

    def take(self, outcome: dict) -> None:
        for name in OUTCOME:
            setattr(self, name, outcome.get(name, ""))

    def is_like(self, other: "Cell") -> bool:
        """Whether their tokens/s are comparable: the same main device on identical machines."""
        return (self.main, self.machine_kind) == (other.main, other.machine_kind)


OUTCOME = ("status", "reason", "measured", "timeout", "machine", "machine_kind", "answer")


# ---- comparing cells ------------------------------------------------------------------------------------------------


def compare(cells: list[Cell], ids: list[str], tokenizer: openvino_genai.Tokenizer) -> None:
    """Fill in the fields that depend on other cells: main alone on the same main device, and the first difference from
    the first measured cell's text. `ids` are the prompt names."""
    measured = [cell for cell in cells if cell.has_figures]
    for cell in measured:
        cell.alone = [other.answer["rows"][0]["throughput"] for other in measured if other.is_like(cell)]
        cell.difference = _difference(measured[0], cell, ids, tokenizer)


def _difference(first: Cell, cell: Cell, ids: list[str], tokenizer: openvino_genai.Tokenizer) -> dict | None:
    texts, expected = cell.answer["tokens"], first.answer["tokens"][0]
    differences = [_first_difference(a, b) for a, b in zip(expected, texts[cell.best], strict=True)]
    different = [(i, position) for i, position in enumerate(differences) if position is not None]
    if not different:
        return None
    number, at = different[0]
    ours, theirs = expected[number], texts[cell.best][number]
    already = any(_first_difference(a, b) is not None for a, b in zip(expected, texts[0], strict=True))
    return {
        "prompt": ids[number],
        "position": at + 1,  # among the new tokens, from 1
        "expected": tokenizer.decode([ours[at]]),
        "seen": tokenizer.decode([theirs[at]]),
        "before": tokenizer.decode(ours[max(0, at - SHOWN) : at]),
        "expected_continuation": tokenizer.decode(ours[at : at + SHOWN]),
        "continuation": tokenizer.decode(theirs[at : at + SHOWN]),
        "different_texts": len(different),
        "texts": len(expected),
        "already_alone": already,  # main alone on this device differs, too
        "margins": [],  # in nats, at the first difference of each differing text; empty: not judged
        "places": [
            {"text": cell.job["prompts"][i] + expected[i][:position], "token": texts[cell.best][i][position]}
            for i, position in different
        ],
    }


def _first_difference(expected: list[int], seen: list[int]) -> int | None:
    """Index of the first token that differs."""
    return next((i for i, (a, b) in enumerate(zip(expected, seen, strict=False)) if a != b), None)


def verdict(difference: dict) -> str:
    """Whether a difference is real or a near-tie, with its margin in f32."""
    margins = difference["margins"]
    if not margins:
        return "not judged"
    real = [margin for margin in margins if margin > NEAR_TIE]
    if not real:
        return (
            f"near-tie, {max(margins):.2f} nats" if len(margins) == 1 else f"near-ties, up to {max(margins):.2f} nats"
        )
    return (
        f"{len(real)} of {len(margins)} real, up to {max(real):.1f} nats"
        if len(margins) > 1
        else f"real, {real[0]:.1f} nats"
    )


def is_real(difference: dict | None) -> bool:
    return difference is not None and max(difference["margins"], default=0.0) > NEAR_TIE


def cell_result(cell: Cell) -> CellResult:
    """The cell in the JSON result."""
    result: dict[str, object] = {
        "main_device": cell.main.label,
        "draft_device": cell.draft.label if cell.draft else ALONE,
        "status": cell.status,
        "reason": cell.reason,
    }
    if cell.has_figures:
        names = (
            *("draft_length", "throughputs", "speedup", "speedup_range", "acceptance_rate", "block_efficiency"),
            *("ttft", "tpot", "repetition"),
        )
        result["throughput"], result["throughput_range"] = cell.throughput, cell.throughput_range
        row: Drawn = cell.row
        result |= {name: row[name] for name in names}
        result |= {name: value for name, value in cell.answer.items() if name not in ("rows", "tokens")}
        result["same_text"] = cell.difference is None
        result["first_difference"] = cell.difference["position"] if cell.difference else None
        result["difference"] = cell.difference and {k: v for k, v in cell.difference.items() if k != "places"}
        result["difference_is"] = verdict(cell.difference) if cell.difference else None
    if cell.machine:
        result["machine"], result["machine_kind"] = cell.machine, cell.machine_kind
    if cell.measured:
        result["measured"] = cell.measured
        result["properties"] = {"main": cell.job["main_properties"], "draft": cell.job["draft_properties"]}
    return cast(CellResult, result)


def rows(cells: list[Cell]) -> list[SwapRow]:
    """Every row of every cell."""
    return [
        {
            **row,
            "name": f"{cell.name}, {row['name']}" if cell.draft else cell.name,
            "main_device": cell.main.label,
            "draft_device": cell.draft.label if cell.draft else ALONE,
            "status": cell.status,
        }
        for cell in cells
        if cell.has_figures
        for row in cell.rows
    ]


# ---- summary and table ----------------------------------------------------------------------------------------------


def summary(cells: list[Cell]) -> list[str]:
    """Summary sentences: the answer first, then its limitations."""
    measured = [cell for cell in cells if cell.has_figures]
    lines = _fastest([cell for cell in cells if cell.status == "ok"])
    if not measured:
        lines.append("Nothing was measured.")
    lines += _changed_texts(measured)
    if any(device.emulated for cell in measured for device in cell.devices):
        lines.append("Emulated cells run the NPU code path on the CPU; their speed is not representative of an NPU.")
    troubled = [cell for cell in cells if cell.status in ("failed", "timeout") or (not cell.measured and cell.reason)]
    lines += [f"{cell.name}: {cell.status}, {cell.reason}." for cell in troubled if cell.status != "absent"]
    lines += [f"{cell.name} is absent: {cell.reason}." for cell in troubled if _are_on_different_machines(cell)]
    lines += [f"{device.name} is absent: {device.missing}." for device in main_devices(cells) if device.missing]
    if waiting := sum(cell.status == "not run" for cell in cells):
        verb = "is" if waiting == 1 else "are"
        lines.append(f"{counted(waiting, 'cell')} {verb} not measured yet: rerun the command to continue.")
    kinds = {cell.machine_kind: cell.machine for cell in measured}
    if len(kinds) > 1:
        machines = "; ".join(f"{machine} ({kind})" for kind, machine in kinds.items())
        lines.append(f"Measured on different machines; compare speedups between them, not tokens/s: {machines}.")
    load = BackgroundLoad()
    load.share = statistics.median([cell.answer["other_load"] for cell in measured] or [0.0])
    return [*lines, *([f"{load.sentence} Use --fresh to measure again."] if load.sentence else [])]


def _are_on_different_machines(cell: Cell) -> bool:
    """Whether its devices exist, but on different machines."""
    return cell.status == "absent" and not any(device.missing for device in cell.devices)


def _changed_texts(measured: list[Cell]) -> list[str]:
    """Which cells change the greedy text: real differences, near-ties and unjudged ones."""
    changed = [cell for cell in measured if cell.difference]
    if not changed:
        return ["All cells generate the same greedy text, token by token."] if len(measured) > 1 else []
    lines, first = [], measured[0].name
    listed = lambda cells: "; ".join(f"{cell.name} ({verdict(cell.difference)})" for cell in cells)  # noqa: E731
    if real := [cell for cell in changed if is_real(cell.difference)]:
        lines.append(f"The greedy text really differs from that of {first} in: {listed(real)}.")
    if ties := [cell for cell in changed if cell.margins and cell not in real]:
        lines.append(
            f"The greedy text differs from that of {first} only at near-ties (about equal in f32) in: {listed(ties)}."
        )
    if unknown := [cell.name for cell in changed if not cell.margins]:
        lines.append(
            f"The greedy text differs from that of {first} (near-tie or real not judged) in: {'; '.join(unknown)}."
        )
    return lines


def _fastest(real: list[Cell]) -> list[str]:
    if not real:
        return []
    best = max(real, key=lambda cell: cell.throughput)
    alone = max((cell for cell in real if not cell.draft), key=lambda cell: cell.throughput, default=None)
    line = f"Fastest here: {best.name}{best.draft_length}, {best.throughput:.1f} tokens/s"
    if best.draft:
        low, high = best.row["speedup_range"]
        spread = f"{low:.2f}-{high:.2f}" if len(best.row["throughputs"]) > 1 else "one round"
        line += f", {best.row['speedup']:.2f}x ({spread}) the main model alone on {best.main.label}"
        if alone and alone.main != best.main:
            ratio = best.throughput / alone.throughput
            line += f" and {ratio:.2f}x the fastest main model alone, on {alone.main.label}"
    lines = [f"{line}."]
    near = [cell for cell in real if cell is not best and _may_be_as_fast(cell, best)]
    if not best.draft and any(cell.draft for cell in real):
        perhaps = any(cell.draft for cell in near)
        seen = "No draft on any device was faster, but some may be" if perhaps else "No draft on any device is faster"
        lines.append(f"{seen}: {'see the next line' if perhaps else 'use the main model alone'}.")
    if near:
        names = "; ".join(f"{cell.name}{cell.draft_length}" for cell in near)
        lines.append(f"Within measurement noise of it: {names}.")
    return lines


def _may_be_as_fast(cell: Cell, best: Cell) -> bool:
    """Whether the ranges overlap: of speedups over the same baseline, or of tokens/s if the main devices differ."""
    if cell.is_like(best):
        return cell.row["speedup_range"][1] >= best.row["speedup_range"][0]
    return cell.throughput_range[1] >= best.throughput_range[0]


def main_devices(cells: list[Cell]) -> list[Device]:
    return list(dict.fromkeys(cell.main for cell in cells))


def table(cells: list[Cell]) -> str:
    """The matrix of the available devices, and the texts that differ."""
    devices = [device for device in main_devices(cells) if not device.missing]
    if not devices:
        return ""
    cell_by_devices = {(cell.main, cell.draft): cell for cell in cells}
    lines = [["main \\ draft", ALONE, *(device.label for device in devices)]]
    lines += [[main.label, *(_figure(cell_by_devices[main, draft]) for draft in (None, *devices))] for main in devices]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["tokens/s, decode only; speedup over the main model alone on the same device", ""]
    for line in lines:
        text.append("   ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip())
    return "\n".join([*text, "", *(line for cell in cells for line in _difference_lines(cell))])


def _figure(cell: Cell) -> str:
    if not cell.has_figures:
        return cell.status
    speedup = f" {cell.row['speedup']:5.2f}x" if cell.draft else ""
    return f"{cell.throughput:7.1f}{speedup}{_mark(cell)}"


def _mark(cell: Cell) -> str:
    if not cell.difference:
        return ""
    return " !" if is_real(cell.difference) or not cell.margins else " ~"


def _difference_lines(cell: Cell) -> list[str]:
    difference = cell.difference
    if not difference:
        return []
    where = ", as with main alone on this device" if cell.draft and difference["already_alone"] else ""
    return [
        f"{_mark(cell).strip()} {cell.name}: {difference['different_texts']} of {difference['texts']} texts "
        f"differ{where} ({verdict(difference)}); first in prompt "
        f"{difference['prompt']}, new token {difference['position']}, after {difference['before']!r}: "
        f"{difference['seen']!r} instead of {difference['expected']!r}",
        f"    expected {difference['expected_continuation']!r}",
        f"    actual   {difference['continuation']!r}",
        "",
    ]
