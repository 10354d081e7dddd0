"""Machines for device_swap.py and tune.py: this machine, or those of a Ray cluster with the required devices.

A cell is measured on a machine that has both of its devices. Machines of one kind (same processor, cores, devices and
versions) take as many cells as possible, as tokens/s are not comparable between kinds, and share them.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from speculative.bench.cluster.child_process import ChildFailed
from speculative.bench.cluster.ray_nodes import Machine, NodeLost
from speculative.bench.devices.matrix import Cell, Device

LOOK_UP_SECONDS = 60


@dataclass
class Place:
    """A machine to measure on: `machine` of a cluster, or this one if that is None."""

    devices: dict[str, Device]
    run: Callable  # as child_process.run, with a job of devices/cell.py
    versions: list[str]  # of openvino_genai, and the processor's name
    kind: str = ""
    machine: Machine | None = None

    @property
    def name(self) -> str:
        return self.machine.name if self.machine else ""

    def has(self, cell: Cell) -> bool:
        devices = [self.devices.get(device.name) for device in cell.devices]
        return all(device and not device.missing for device in devices)

    def take(self, cell: Cell) -> None:
        """Add the facts about this machine that its measurements depend on to the cell."""
        cell.job["versions"] = self.versions
        cell.job["device_names"] = [self.devices[device.name].full_name for device in cell.devices]
        cell.machine, cell.machine_kind = self.name, self.kind
        if self.kind:
            cell.job["machine"] = self.kind


def look_up(machine: Machine | None, run: Callable, names: list[str] | None, emulate_npu: bool) -> Place:
    """Look up the devices, in a separate process because even that may crash a driver. Raises ChildFailed."""
    facts_found = run({"look_up": names}, LOOK_UP_SECONDS)
    devices = [_device(facts, machine) for facts in facts_found["devices"]]
    if emulate_npu:
        devices = [_emulated() if device.name == "NPU" else device for device in devices]
    versions = [
        facts_found["openvino_genai"],
        next((device.full_name for device in devices if device.name == "CPU"), ""),
    ]
    kind = ""
    if machine:
        others = [
            device.full_name for device in devices if device.full_name and device.full_name != facts_found["processor"]
        ]
        kind = ", ".join([facts_found["processor"], f"{machine.cores} cores", *others, f"OpenVINO GenAI {versions[0]}"])
    return Place({device.name: device for device in devices}, run, versions, kind, machine)


def without_detection(names: list[str] | None, run: Callable, versions: list[str], emulate_npu: bool) -> Place:
    """This machine if device detection failed: each device is tried in its own cells."""
    devices = [Device(name) for name in names or ("CPU", "GPU", "NPU")]
    if emulate_npu:
        devices = [_emulated() if device.name == "NPU" else device for device in devices]
    return Place({device.name: device for device in devices}, run, versions)


def _emulated() -> Device:
    return Device("NPU", "emulated on the CPU", emulated=True)


def _device(facts: dict, machine: Machine | None) -> Device:
    device = Device(**{**facts, "stands_for": tuple(facts["stands_for"])})
    declared = machine.declared if machine else []
    others = [name for name in device.stands_for if name.partition(".")[0] not in declared]
    if declared and others and not device.missing:
        return dataclasses.replace(device, missing=f"its node was started with {', '.join(declared)} only")
    return device


def in_cluster(
    machines: list[Machine], names: list[str] | None, emulate_npu: bool, note: Callable[[str], None]
) -> list[Place]:
    """The machines whose devices could be looked up; a note gives the reason for each of the others."""
    places = []
    for machine in machines:

        def run(
            job: dict, timeout: float, waiting: Callable[[], None] | None = None, machine: Machine = machine
        ) -> dict | list:
            return machine.run("speculative.bench.devices.cell", job, timeout)

        try:
            places.append(look_up(machine, run, names, emulate_npu))
        except (ChildFailed, NodeLost) as error:
            note(f"machine {machine.name} is skipped: {error}")
    if (
        names is None and len({tuple(place.devices) for place in places}) > 1
    ):  # look up every known device on all of them
        all_names = dict.fromkeys(name for place in places for name in place.devices)
        return in_cluster([place.machine for place in places if place.machine], list(all_names), emulate_npu, note)
    return places


def all_devices(places: list[Place]) -> list[Device]:
    """The devices of all places; a device is missing if no place has it."""
    if len(places) == 1 and not places[0].machine:
        return list(places[0].devices.values())
    devices = []
    for name in dict.fromkeys(name for place in places for name in place.devices):
        places_with_device = [(place.name, place.devices[name]) for place in places if name in place.devices]
        full_names = dict.fromkeys(device.full_name for _, device in places_with_device if not device.missing)
        reasons: dict[str, list[str]] = {}
        for machine, device in places_with_device:
            reasons.setdefault(device.missing, []).append(machine)
        if full_names:
            devices.append(dataclasses.replace(places_with_device[0][1], full_name=" or ".join(full_names), missing=""))
        else:
            missing = "; ".join(f"{why} (on {' and '.join(machines)})" for why, machines in reasons.items())
            devices.append(Device(name, missing=missing))
    return devices


def assign(cells: list[Cell], places: list[Place]) -> dict[int, str]:
    """The kind of machine that measures each cell, by id(cell), using few kinds; cells nobody can measure are
    absent."""
    chosen: dict[int, str] = {}
    unassigned = list(cells)
    while unassigned:
        cells_of_kind = {
            place.kind: [cell for cell in unassigned if any(one.has(cell) for one in places if one.kind == place.kind)]
            for place in places
        }
        kind = max(cells_of_kind, key=lambda kind: len(cells_of_kind[kind]), default=None)
        if kind is None or not cells_of_kind[kind]:
            break
        chosen |= {id(cell): kind for cell in cells_of_kind[kind]}
        unassigned = [cell for cell in unassigned if id(cell) not in chosen]
    return chosen


def equal_machines(places: list[Place], wanted: str | None) -> list[Place]:
    """The machines identical to the one named `wanted`; by default the most numerous kind, then the most devices."""
    if wanted:
        named = [place for place in places if place.name == wanted]
        if not named:
            raise ValueError(
                f"no machine is named {wanted!r}: choose one of {', '.join(place.name for place in places)}"
            )
        kind = named[0].kind
    else:
        kinds = [place.kind for place in places]
        devices = {place.kind: sum(not device.missing for device in place.devices.values()) for place in places}
        kind = max(kinds, key=lambda kind: (kinds.count(kind), devices[kind]))
    return [place for place in places if place.kind == kind]
