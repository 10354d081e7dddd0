"""Machines of a Ray cluster, with their devices, for exclusive measurements: one job at a time on each.

    with ray_nodes.connect("10.0.0.1:6379") as machines:
        answer = machines[0].run("speculative.bench.devices.cell", {"look_up": ["CPU"]}, timeout=60)

Each machine gets an actor that reserves all of its CPUs and declared devices, so that Ray schedules no other work on
it; several Ray nodes on one computer take turns. Measurements therefore run alone. This project's code is shipped with
the job. Models are not: they must be at the same path on each machine, with the same weights.

A machine's devices are those OpenVINO finds, or, if the node was started with device resources, the CPU and those: `ray
start --address=HEAD:6379 --resources='{"intel_gpu": 1, "intel_npu": 1}'`, the same names as in samples/serve. Nodes
without CPUs (`--num-cpus=0`, common for heads) are ignored. Ray is imported only when `connect` is called.
"""

import contextlib
import logging
import platform
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from speculative.bench.cluster import child_process, worker_process
from speculative.bench.cluster.child_process import ChildFailed, OutOfTime
from speculative.bench.cluster.worker_process import RAISABLE, RAISED, WorkerProcess
from speculative.cli.processes import no_sigpipe
from speculative.cli.ray_cluster import DEVICE_RESOURCES, ping
from speculative.error_text import one_line

PACKAGE = Path(__file__).resolve().parents[2]  # shipped with the job
RESOURCES = {name: kind for kind, name in DEVICE_RESOURCES.items()}  # Ray resource: device type
WAIT_SECONDS = 60  # seconds to wait for a machine to become free
EXTRA_ANSWER_SECONDS = 30  # seconds beyond a job's own time limit


M = TypeVar("M")  # a machine, or its client


class NodeLost(Exception):
    """A machine no longer answers; the message names it and gives Ray's error."""


class Host:
    """Ray actor on a machine of the cluster: runs modules of this package in child processes."""

    def facts(self, folders: list[str]) -> dict:
        """The computer's identity, and the fingerprints of the models in these folders, if present."""
        from speculative.models.cores import usable_cores
        from speculative.pair import recommendation

        fingerprints = {}
        for folder in folders:
            with contextlib.suppress(OSError):
                fingerprints[folder] = recommendation.fingerprint(Path(folder))
        boot = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of a computer
        computer = boot.read_text(encoding="ascii").strip() if boot.is_file() else platform.node()
        return {"computer": computer, "prints": fingerprints, "cores": usable_cores()}

    def run(self, program: str, job: dict, timeout: float) -> tuple[str, object]:
        try:
            return "ok", child_process.run([sys.executable, "-m", program], job, timeout)
        except ChildFailed as error:
            return "timeout" if isinstance(error, OutOfTime) else "failed", str(error)

    def worker(self, what: str, program: str, *arguments: object) -> tuple[str, object]:
        """Invoke `what` ("call" or "remember") of this machine's WorkerProcess. Returns the error's name, the
        answer."""
        self._worker = getattr(self, "_worker", None) or WorkerProcess([sys.executable, "-m", program])
        try:
            return "", getattr(self._worker, what)(*arguments)
        except (ChildFailed, *RAISABLE) as error:
            return type(error).__name__, str(error)


@dataclass
class Machine:
    """One node. `declared`: the device types it was started with, empty to let OpenVINO detect them. `alone`: a lock
    shared by all nodes on one computer."""

    name: str
    declared: list[str]
    actor: Any  # Ray's handle of a `Host`
    cores: int = 0
    alone: contextlib.AbstractContextManager = field(default_factory=contextlib.nullcontext)

    def run(self, program: str, job: dict, timeout: float) -> dict | list:
        """Like child_process.run, on that machine. Raises ChildFailed, or NodeLost if the machine is lost."""
        state, answer = self.ask(self.actor.run.remote, program, job, timeout, timeout=timeout)
        if state != "ok":
            raise (OutOfTime if state == "timeout" else ChildFailed)(answer)
        return answer

    def worker(self, what: str, program: str, *arguments: object) -> Any:
        """Like the methods of WorkerProcess, on that machine; its errors are raised here."""
        method = self.actor.worker.remote
        error, answer = self.ask(method, what, program, *arguments, timeout=worker_process.CALL_SECONDS)
        if error:
            raise RAISED.get(error, ChildFailed)(answer)
        return answer

    def ask(self, method: Callable, *arguments: object, timeout: float) -> Any:
        """The result of an actor method, called while nothing else runs on its computer."""
        import ray

        with self.alone:
            try:
                return ray.get(method(*arguments), timeout=timeout + EXTRA_ANSWER_SECONDS)
            except (ray.exceptions.RayError, ConnectionError) as error:
                raise NodeLost(f"machine {self.name} was lost ({_reason(error)})") from None


# ---- the cluster ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def connect(address: str, folders: list[Path], note: Callable[[str], None]) -> Iterator[list[Machine]]:
    """Connect to the cluster for the block and yield the usable machines. `note` is called for each skipped one.

    Raises ValueError, in one sentence, if there is no cluster or a machine lacks the models in `folders`.
    """
    try:
        import ray
    except ImportError:
        raise ValueError("--address requires Ray: install it with `pip install -r requirements-serve.txt`") from None
    try:
        ping(address)
    except OSError as error:
        raise ValueError(
            f"no Ray cluster at {address} ({error.strerror or error}): give HOST:PORT of its head, as printed by "
            "`ray start --head`"
        ) from None
    actors: list = []
    with no_sigpipe():
        try:
            _join(ray, address)
            machines = _machines(ray, actors, note)
            _check_models(machines, [str(folder.resolve()) for folder in folders])
            yield machines
        finally:
            for actor in actors:  # their child processes end with them
                with contextlib.suppress(Exception):
                    ray.kill(actor)
            with contextlib.suppress(Exception):
                ray.shutdown()


def _reason(error: Exception) -> str:
    """Why a call failed: of an error in Ray's actor, which is a traceback, its cause."""
    return one_line(getattr(error, "cause", None) or error)[:200]


def _join(ray: ModuleType, address: str) -> None:
    runtime = {"py_modules": [str(PACKAGE)]}
    try:
        ray.init(address, runtime_env=runtime, log_to_driver=False, logging_level=logging.ERROR, namespace="measuring")
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise ValueError(f"cannot connect to the Ray cluster at {address}: {one_line(error)[:200]}") from None


def _machines(ray: ModuleType, actors: list, note: Callable[[str], None]) -> list[Machine]:
    """Start an actor on each node with CPUs; nodes in use by others are skipped."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    names = [_name(node) for node in nodes]
    waiting = {}
    for node, name in zip(nodes, names, strict=True):
        declared = {key: n for key, n in node["Resources"].items() if key in RESOURCES}
        actor = (
            ray.remote(Host)
            .options(
                num_cpus=node["Resources"]["CPU"],
                resources=declared,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            )
            .remote()
        )
        actors.append(actor)
        unique = name if names.count(name) == 1 else f"{name}/{node['NodeID'][:6]}"
        devices = ["CPU", *(RESOURCES[key] for key in declared)] if declared else []
        waiting[actor.facts.remote([])] = Machine(unique, devices, actor)
    ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=WAIT_SECONDS) if waiting else ([], [])
    locks: dict[str, threading.Lock] = {}
    machines = []
    for facts_call, machine in waiting.items():
        try:
            if facts_call not in ready:
                raise TimeoutError(f"its CPUs or devices were in use by other work for {WAIT_SECONDS} seconds")
            facts = ray.get(facts_call)
        except (ray.exceptions.RayError, TimeoutError) as error:
            note(f"machine {machine.name} is skipped: {_reason(error)}")
            continue
        machine.cores = facts["cores"]
        machine.alone = locks.setdefault(facts["computer"], threading.Lock())
        machines.append(machine)
    if not machines:
        raise ValueError("no machine of the Ray cluster is usable: all were skipped or have no CPUs")
    if len(locks) < len(machines):
        note(f"{len(machines)} Ray nodes are on {len(locks)} computer{'s' * (len(locks) > 1)}: these take turns")
    return machines


def _name(node: dict) -> str:
    name, address = node.get("NodeName"), node["NodeManagerAddress"]
    return name if name and name != address else node.get("NodeManagerHostname") or address


def _check_models(machines: list[Machine], folders: list[str]) -> None:
    """Check that all machines have the same models at the same paths."""
    local = Host().facts(folders)["prints"]
    for machine in machines:
        try:
            fingerprints = machine.ask(machine.actor.facts.remote, folders, timeout=WAIT_SECONDS)["prints"]
        except NodeLost as error:
            raise ValueError(f"{error}: try again, or remove that machine") from None
        for folder in folders:
            fingerprint = fingerprints.get(folder)
            if fingerprint is None:
                raise ValueError(f"machine {machine.name} has no model in {folder}: copy it to the same path there")
            if fingerprint != local.get(folder):
                raise ValueError(f"machine {machine.name} has different weights in {folder}: copy this machine's there")


# ---- distributing jobs ----------------------------------------------------------------------------------------------


class WorkQueue:
    """Jobs for machines that each have a thread. `can_run` and `done` are those of `distribute`."""

    def __init__(self, jobs: list, can_run: Callable, done: Callable):
        self.waiting = list(jobs)
        self.reasons: dict[int, str] = {}  # by the id of a job: how its last machine was lost
        self.lost: set[int] = set()  # ids of lost machines
        self._can_run, self._done = can_run, done
        self._running: list = []
        self._stopped = False
        self._condition = threading.Condition()

    def take(self, machine: object) -> object | None:
        """The next job for a machine. Waits while another machine runs one that it could do, as that may be lost.

        None if there is nothing left to do.
        """
        with self._condition:
            while not self._stopped:
                job = next((job for job in self.waiting if self._can_run(job, machine)), None)
                if job is not None:
                    self.waiting.remove(job)
                    self._running.append(job)
                    return job
                if not any(self._can_run(job, machine) for job in self._running):
                    break
                self._condition.wait()
        return None

    def finish(self, job: object, machine: object, answer: object) -> None:
        """End a job with its result. After `stop` the result is dropped."""
        with self._condition:
            self._running.remove(job)
            self._condition.notify_all()
            if not self._stopped:
                self._done(job, machine, answer)

    def lose(self, job: object, machine: object, reason: str) -> None:
        """Return the job of a lost machine to the queue, as the next one."""
        with self._condition:
            self._running.remove(job)
            self._condition.notify_all()
            self.waiting.insert(0, job)
            self.reasons[id(job)] = reason
            self.lost.add(id(machine))

    def stop(self) -> None:
        """Give out no more jobs."""
        self._stopped = True
        with contextlib.suppress(RuntimeError), self._condition:
            self._condition.notify_all()


def distribute(jobs: list, machines: list[M], can_run: Callable, work: Callable, done: Callable) -> list[tuple]:
    """Give each free machine the next job it can do, one at a time.

    `can(job, machine)` says whether it can; `work(job, machine)` runs in the machine's thread; its result is passed to
    `done(job, machine, answer)`, of which only one call runs at a time. If a machine is lost, its job goes to another.
    Returns the jobs for which no machine is left, each with the reason. After Ctrl-C the caller must kill the actors.
    """
    queue = WorkQueue(jobs, can_run, done)
    problems: list[BaseException] = []

    def serve(machine: M) -> None:
        while (job := queue.take(machine)) is not None:
            try:
                answer = work(job, machine)
            except NodeLost as error:
                queue.lose(job, machine, str(error))
                return
            except BaseException as error:
                problems.append(error)
                queue.stop()
                return
            queue.finish(job, machine, answer)

    threads = [threading.Thread(target=serve, args=(machine,), daemon=True) for machine in machines]
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) and not problems:
            for thread in threads:
                thread.join(0.05)
    finally:
        queue.stop()
    if problems:
        raise problems[0]
    machines[:] = [machine for machine in machines if id(machine) not in queue.lost]
    return [(job, queue.reasons.get(id(job), "")) for job in queue.waiting]
