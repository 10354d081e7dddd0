"""Load time and peak memory of a pipeline, with an empty and a filled model cache, each in a new process.

    python -m speculative.bench.startup '{"main": "models/embedded/main", "device": "CPU", "engine": "genai"}'

This is one start, as run by `start_costs`: loading and a text of 32 tokens, reported as JSON. All model files are read
once beforehand, so that no start has to wait for the disk, and kinds of start alternate.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
from openvino_genai import GenerationConfig

from speculative import decoder
from speculative.bench import genai
from speculative.bench.result import OneStart, StartCost
from speculative.cli.processes import signals_raise
from speculative.error_text import one_line
from speculative.models.spec import ModelSpec
from speculative.pair.engines import NATIVE

TOKENS = 32
PIECE = 2**24  # bytes per read


class Start(NamedTuple):
    """A pipeline to start."""

    name: str
    engine: str  # genai or native
    with_draft: bool


def start_costs(kinds: list[Start], arguments: argparse.Namespace, repeats: int) -> list[StartCost]:
    """Start each kind twice with a shared model cache (CACHE_DIR) that is empty the first time, all `repeats` times.
    Returns medians and ranges of the seconds, and the largest peak memory. Raises RuntimeError with the reason if a
    start fails."""
    starts: dict[Start, list[list[OneStart]]] = {kind: [] for kind in kinds}
    read_files(*filter(None, (arguments.main, arguments.draft)))
    with signals_raise():  # do not leave a temporary folder behind
        for _ in range(repeats):
            for kind, pairs in starts.items():
                with tempfile.TemporaryDirectory() as folder:
                    job_of_start = job(kind, arguments, CACHE_DIR=folder)
                    pairs.append([run(job_of_start) for _ in range(2)])
    return [_row(kind, pairs) for kind, pairs in starts.items()]


def _row(kind: Start, pairs: list[list[OneStart]]) -> StartCost:
    first, second = zip(*pairs, strict=True)
    first_seconds, second_seconds = ([start["seconds"] for start in starts] for starts in (first, second))
    peak, second_peak = (max((start["peak_bytes"] or 0) for start in starts) for starts in (first, second))
    return {
        "name": kind.name,
        "first_seconds": statistics.median(first_seconds),
        "first_range": [min(first_seconds), max(first_seconds)],
        "second_seconds": statistics.median(second_seconds),
        "second_range": [min(second_seconds), max(second_seconds)],
        "peak_bytes": peak or None,
        "second_peak_bytes": second_peak or None,
    }


def read_files(*folders: Path) -> None:
    """Read the files in these folders, so that they are in the system's page cache if they fit."""
    for folder in folders:
        for path in filter(Path.is_file, folder.iterdir()):
            with path.open("rb", buffering=0) as file:
                while file.read(PIECE):
                    pass


def job(kind: Start, arguments: argparse.Namespace, **extra_properties: str) -> dict:
    """The job of a child process; `extra_properties` are additional properties."""
    draft = (str(arguments.draft), arguments.draft_device) if kind.with_draft else (None, "")
    return {
        "engine": kind.engine,
        "main": str(arguments.main),
        "device": arguments.device,
        "draft": draft[0],
        "draft_device": draft[1],
        "properties": {**dict(arguments.property), **extra_properties},
    }


def run(job_of_start: dict) -> OneStart:
    """One start in a new process. Raises RuntimeError with the reason if it fails."""
    command = [sys.executable, "-m", "speculative.bench.startup", json.dumps(job_of_start)]
    process = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
    if process.returncode:
        lines = process.stderr.strip().splitlines() or [f"the process exited with status {process.returncode}"]
        raise RuntimeError(lines[-1].removeprefix("error: "))
    return json.loads(process.stdout.splitlines()[-1])


def one_start(job_of_start: dict) -> OneStart:
    properties = job_of_start.get("properties", {})
    main = ModelSpec(job_of_start["main"], job_of_start["device"], properties)
    draft = (
        ModelSpec(job_of_start["draft"], job_of_start["draft_device"], properties)
        if job_of_start.get("draft")
        else None
    )
    prompt, cache_bytes = np.arange(1, 9), None
    begin = time.perf_counter()
    if job_of_start["engine"] == NATIVE:
        native_decoder = decoder.load(main, draft)
        seconds = time.perf_counter() - begin
        native_decoder.generate(prompt, GenerationConfig(max_new_tokens=TOKENS, ignore_eos=True))
        cache_bytes = sum(model.backend.cache_bytes for model in native_decoder.models)
    else:
        pipe = genai.load(main, draft)
        seconds = time.perf_counter() - begin
        genai.generate(pipe, genai.inputs(prompt), TOKENS, 4 if draft else None)
    return {"seconds": seconds, "peak_bytes": peak_memory(), "cache_bytes": cache_bytes}


def peak_memory() -> int | None:
    """Peak memory of this process so far, in bytes; None if the system does not report it."""
    status = Path("/proc/self/status")
    if status.is_file():
        lines = [line for line in status.read_text().splitlines() if line.startswith("VmHWM")]
        return int(lines[0].split()[1]) * 1024 if lines else None
    return getattr(psutil.Process().memory_info(), "peak_wset", None)  # Windows


if __name__ == "__main__":
    try:
        print(json.dumps(one_start(json.loads(sys.argv[1]))))
    except (RuntimeError, ValueError, KeyError) as error:
        sys.exit(f"error: {one_line(error)}")
