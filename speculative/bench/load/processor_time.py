"""Processor time of servers under load: of their engines, of all their other work, and of the clients.

    meter = Meter(servers, threads=1)
    before = meter.read()
    span = closed_loop(...)
    span = span._replace(processor_time=meter.since(before, span))

A server's other work is HTTP in the replicas, Ray's proxies and its other processes. Where they have no cores of their
own, they take those of the engines.
"""

import contextlib
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import psutil

from speculative.bench.load.metrics import Span
from speculative.bench.load.server import StartedServer
from speculative.bench.result import ProcessorTime

REPLICA = "ray::ServeReplica"  # begins the title of a replica's process


class Reading(NamedTuple):
    """Processor seconds so far."""

    time: float  # time.perf_counter
    servers: float  # of all processes
    clients: float  # of this process
    threads: dict[int, dict[int, float]]  # of each thread, by replica's process


class Meter:
    """Reads the processor time of servers and of this process."""

    def __init__(self, servers: Sequence[StartedServer], threads: int):
        """The engine of each replica runs inference on `threads` threads, and a thread of its own."""
        self._servers = servers
        self._threads = threads + 1

    def read(self) -> Reading | None:
        """The processor time so far; None where a program may not look at others (macOS)."""
        servers, threads = 0.0, {}
        for process in self._processes():
            try:
                servers += _used(process)
                if "".join(process.cmdline()[:1]).startswith(REPLICA):
                    threads[process.pid] = {
                        thread.id: thread.user_time + thread.system_time for thread in process.threads()
                    }
            except psutil.NoSuchProcess:  # it has just ended
                continue
            except psutil.AccessDenied:
                return None
        return Reading(time.perf_counter(), servers, _used(psutil.Process()), threads)

    def since(self, before: Reading | None, span: Span) -> ProcessorTime | None:
        """The processor time of a `span` that began after `before` and has ended."""
        now = self.read()
        if not before or not now:
            return None
        engines = 0.0
        for process, threads in now.threads.items():
            earlier = before.threads.get(process, {})
            engines += sum(
                sorted(used - earlier.get(thread, 0.0) for thread, used in threads.items())[-self._threads :]
            )
        return {
            "seconds": now.time - before.time,
            "engines": engines,
            "servers": max(now.servers - before.servers - engines, 0.0),
            "clients": now.clients - before.clients,
            "requests": len(span.answers),
            "pieces": sum(answer.pieces for answer in span.answers),
        }

    def _processes(self) -> Iterable[psutil.Process]:
        for server in self._servers:
            with contextlib.suppress(psutil.NoSuchProcess):  # it crashed
                leader = psutil.Process(server.process.pid)
                yield from (leader, *leader.children(recursive=True))


def _used(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
