"""Child process of device_swap.py for everything that touches a device, so that a driver crash ends only this process.

The job is one line of JSON on standard input: devices to look up, one cell to measure (main model and draft, each on
its device), or differences between texts to judge. The answer is the last line of standard output: the result, or
{"failed": reason in one sentence}. If standard input closes earlier, the parent is gone and this process exits too.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import BinaryIO

import numpy as np
import openvino as ov
import openvino_genai

from speculative import decoder
from speculative.bench.harness import BackgroundLoad, Method, interleave, precision, row
from speculative.bench.methods import engine_alone, genai_method, genai_pipeline, our_method
from speculative.bench.result import CellAnswer
from speculative.cli.processes import utf8_output
from speculative.error_text import engine_lines, is_out_of_memory
from speculative.models import cached_model
from speculative.models.spec import ModelSpec
from speculative.pair import devices as device_facts
from speculative.pair.engines import GENAI

EXACT = {"EXECUTION_MODE_HINT": "ACCURACY"}  # f32
KINDS = ("CPU", "GPU", "NPU")  # Intel device types, all of which are looked up


def look_up(names: list[str] | None) -> dict:
    """Each device string with its devices or why it is missing, plus what else a measurement depends on. None: all
    devices present and the types that are absent."""
    core = ov.Core()
    if names is None:
        available = core.available_devices
        kinds = {name.partition(".")[0] for name in available}
        names = sorted({*available, *(kind for kind in KINDS if kind not in kinds)}, key=_cpu_first)
    devices = []
    for name in names:
        facts = device_facts.look_up(name, core)
        devices.append(
            {
                "name": name,
                "full_name": ", ".join(fact.full_name for fact in facts if fact.full_name),
                "missing": device_facts.why_not(name, facts),
                "stands_for": [fact.name for fact in facts],
            }
        )
    processor = str(core.get_property("CPU", "FULL_DEVICE_NAME")).strip() if "CPU" in core.available_devices else ""
    return {"devices": devices, "processor": processor, "openvino_genai": openvino_genai.__version__}


def _cpu_first(name: str) -> tuple[int, str]:
    kind = name.partition(".")[0]
    return (KINDS.index(kind) if kind in KINDS else len(KINDS)), name


def measure(job: dict) -> CellAnswer:
    """The rows of main alone and of each draft length, interleaved in this process, and the tokens of each text.

    Prompts are never served from a cache: each method gets a prompt the previous one has just read, and the time to
    first token would be that of a single token."""
    begin = time.perf_counter()
    methods = (_genai_methods if job["engine"] == GENAI else _native_methods)(job)
    load_seconds = time.perf_counter() - begin
    prompts = [np.array(ids, np.int64) for ids in job["prompts"]]
    with BackgroundLoad() as load:
        interleave(methods, prompts, job["rounds"])
    rows = [row(method, methods[0]) for method in methods]
    if job["engine"] == GENAI and "NPU" in (job["main_device"], job["draft_device"]):
        for item in rows:  # there GenAI varies K and does not report the drafted tokens
            item["acceptance_rate"], item["position_acceptance"], item["mean_draft_length"] = None, [], None
    answer: CellAnswer = {
        "rows": rows,
        "tokens": [[run.tokens for run in method.rounds[0]] for method in methods],
        "load_seconds": load_seconds,
        "other_load": load.share,
        "main_precision": precision(_spec(job, "main")),
    }
    if job["draft_device"]:
        answer["draft_precision"] = precision(_spec(job, "draft"))
    return answer


def _spec(job: dict, role: str) -> ModelSpec:
    return ModelSpec(job[role], job[f"{role}_device"], job[f"{role}_properties"])


def _genai_methods(job: dict) -> list[Method]:
    main, n = _spec(job, "main"), job["max_new_tokens"]
    methods = [genai_method("alone", genai_pipeline(main), 0, n)]
    if job["draft_device"]:
        pair = genai_pipeline(main, _spec(job, "draft"))
        methods += [genai_method(f"K = {k}", pair, k, n) for k in job["draft_lengths"]]
    return methods


def _native_methods(job: dict) -> list[Method]:
    draft = _spec(job, "draft") if job["draft_device"] else None
    engine = decoder.load(_spec(job, "main"), draft)
    alone = engine_alone(engine, _spec(job, "main"), draft)
    return [
        our_method(f"K = {k}" if k else "alone", engine if k else alone, [], k, 0.0, job["max_new_tokens"])
        for k in [0, *(job["draft_lengths"] if draft else [])]
    ]


def margins(job: dict) -> list[float]:
    """The margin, in nats, by which the main model in f32 prefers its own token to each given one."""
    texts = [np.array(item["text"], np.int64) for item in job["differences"]]
    model = cached_model.load(ModelSpec(job["main"], "CPU", EXACT), capacity=max(map(len, texts)) + 2)
    rows = [model.logits(text)[0].copy() for text in texts]
    return [float(row.max() - row[item["token"]]) for row, item in zip(rows, job["differences"], strict=True)]


def sentence(error: Exception) -> str:
    """The last line of an OpenVINO error, which is the cause; earlier lines are its call stack."""
    text = engine_lines(error)[-1]
    if is_out_of_memory(error):
        text += "; probably out of memory: --engine native holds the main model once instead of twice"
    return text[:300]


def _end_with(stream: BinaryIO) -> None:
    stream.read()
    os._exit(1)


def main() -> None:
    utf8_output()
    line = sys.stdin.buffer.readline()
    if not line:
        sys.exit("no job on standard input: this program is started by device_swap.py")
    job = json.loads(line)
    threading.Thread(target=_end_with, args=(sys.stdin.buffer,), daemon=True).start()
    answer: Mapping[str, object]
    try:
        if "look_up" in job:
            answer = look_up(job["look_up"])
        else:
            answer = {"margins": margins(job)} if "differences" in job else measure(job)
    except (RuntimeError, ValueError, KeyError, MemoryError) as error:
        answer = {"failed": sentence(error)}
    print("\n" + json.dumps(answer, ensure_ascii=False), flush=True)
    os._exit(0)  # the answer is written; a crash while the driver unloads no longer matters


if __name__ == "__main__":
    main()
