"""Cost model: measured latencies of draft steps and main forward passes on this machine.

Costs for one request at a time are measured once and cached on disk, those for batches at every start.
"""

import hashlib
import json
import math
import os
import platform
import time
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import openvino as ov

from speculative.atomic_write import atomic_write
from speculative.drafting.batch_policy import BatchDraftLength
from speculative.drafting.latency_curve import LatencyCurve
from speculative.drafting.policy import LONGEST, Costs
from speculative.models.cached_model import CachedModel
from speculative.models.cores import instruction_sets, usable_cores
from speculative.models.eagle3_head import EagleHead
from speculative.models.spec import ModelSpec

MEASURED = (1, 2, 3, 4, 5, 6, 8, 11, LONGEST + 1)  # tokens in one forward pass, for one request
MEASURED_BATCHED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # for batches
FORMAT = 4  # of the cached file; others may hold costs measured under load, or lack those of changes of size
CONTEXT = 64  # tokens in the KV cache while measuring, if they fit
MIN_REPETITIONS, MIN_SECONDS = 3, 0.5  # least repetitions, and least seconds: small models are timed more often
ENOUGH_SECONDS = 2.0  # of measuring for batches at every start: then two repetitions do
MAX_MEASUREMENTS = 5  # measurements on a busy machine
MAX_DISORDER = 1.2  # a forward pass this many times slower than one over more tokens was disturbed by other load


class Seconds(NamedTuple):
    """Seconds of a forward pass by its number of tokens: of the main model, of the draft after the main model, of the
    draft after itself (its weights are in the CPU caches), and of the main model after another number of tokens."""

    main: dict[int, float]
    draft: dict[int, float]
    draft_further: dict[int, float]
    main_changed: dict[int, float]

    @property
    def change(self) -> float:
        """The additional seconds of a forward pass of the main model over another number of tokens than the last."""
        return max(float(np.median([self.main_changed[n] - self.main[n] for n in self.main])), 0.0)


def measure(main: CachedModel, draft: CachedModel | EagleHead | None) -> Costs:
    """Measure the costs for `AdaptiveDraftLength` (about a second for a 1 B model).

    Measures up to `MAX_MEASUREMENTS` times while longer passes seem faster than shorter ones. Keeps the least time of
    each."""
    seconds = _measure_seconds(main, draft, [(n, 1) for n in MEASURED])
    for _ in range(MAX_MEASUREMENTS - 1):
        if not _is_disturbed(seconds.main):
            break
        second = _measure_seconds(main, draft, [(n, 1) for n in MEASURED])
        seconds = Seconds(
            *({n: min(of_n, new[n]) for n, of_n in old.items()} for old, new in zip(seconds, second, strict=True))
        )
    return Costs(seconds.draft.get(1, 0.0), seconds.main, seconds.draft_further.get(1, 0.0), seconds.change)


def _is_disturbed(seconds: dict[int, float]) -> bool:
    """Whether a forward pass took clearly longer than one over more tokens."""
    times = [seconds[n] for n in sorted(seconds)]
    return any(fewer > MAX_DISORDER * more for i, fewer in enumerate(times) for more in times[i + 1 :])


def measure_batched(main: CachedModel, draft: CachedModel | EagleHead | None) -> BatchDraftLength:
    """A `BatchDraftLength` with measured costs (takes a few seconds for a 1 B model)."""
    seconds = _measure_seconds(main, draft, [(n, n) for n in MEASURED_BATCHED], ENOUGH_SECONDS)
    main_curve, first, further = (LatencyCurve(by_tokens or {1: 0.0}) for by_tokens in seconds[:3])
    return BatchDraftLength(main_curve, first, further, seconds.change)


def _measure_seconds(
    main: CachedModel,
    draft: CachedModel | EagleHead | None,
    counts: list[tuple[int, int]],
    enough_seconds: float = math.inf,
) -> Seconds:
    """Time both models on each of `counts` (main, draft), interleaved, because a large model evicts a small one from
    the CPU caches. Each pass follows one over as many tokens by the same model: after another number of tokens,
    OpenVINO prepares the pass again. After `enough_seconds` seconds, two repetitions suffice. Clears both KV caches."""
    models = [main, *([draft] if draft else [])]
    max_tokens = max(n for n, _ in counts)
    least = 2 if isinstance(draft, EagleHead) else 1  # a head has no logits after a single token
    context = max(least, min(CONTEXT, *(model.capacity - max_tokens for model in models)))
    tokens = (np.arange(context + max_tokens, dtype=np.int64) * 7919 + 1) % min(model.vocab_size for model in models)
    for model in models:
        model.logits(tokens[:context])
    times: list[dict[int, list[float]]] = [{}, {}, {}, {}]
    main_times, draft_times, further_times, changed_times = times

    def time_one(model: CachedModel | EagleHead, n: int, of_model: dict[int, list[float]] | None = None) -> None:
        if context + n <= model.capacity:
            begin = time.perf_counter()
            model.backend.run(context, tokens[context : context + n], n)
            if of_model is not None:
                of_model.setdefault(n, []).append(time.perf_counter() - begin)

    started, rounds, elapsed = time.perf_counter(), 0, 0.0
    while rounds < 2 or (rounds <= MIN_REPETITIONS and elapsed < enough_seconds) or elapsed < MIN_SECONDS:
        for n, n_draft in counts:
            time_one(main, n, changed_times)
            if draft:
                time_one(draft, n_draft)
            time_one(main, n, main_times)
            if draft:
                time_one(draft, n_draft, draft_times)
                time_one(draft, n_draft, further_times)
        rounds, elapsed = rounds + 1, time.perf_counter() - started
    for model in models:
        model.reset()
    # The lower quartile excludes the load of other programs, and of few repetitions a first one that is slower.
    return Seconds(*({n: sorted(of_n)[(len(of_n) - 1) // 4] for n, of_n in of_model.items()} for of_model in times))


def key(*models: ModelSpec | None) -> str:
    """The cache key of the costs: models (with their weights' mtime), devices, machine, processor and usable cores.

    A virtual machine or a container may start on another processor, with the same name and the same cache folder, and
    a machine may get another graphics card.
    """
    core = ov.Core()
    named = [
        [
            str(model.folder.resolve()),
            (model.folder / "openvino_model.bin").stat().st_mtime_ns,
            model.device,
            _device_name(core, model.device),
            model.properties,
        ]
        for model in models
        if model
    ]
    processor = [core.get_property("CPU", "FULL_DEVICE_NAME"), *core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")]
    machine = [platform.node(), *processor, instruction_sets(), usable_cores()]
    return json.dumps([FORMAT, ov.__version__, *machine, named], sort_keys=True, default=str)


def _device_name(core: ov.Core, device: str) -> str:
    """The name of the hardware; "" for devices that are missing or not a single one, like HETERO."""
    try:
        return str(core.get_property(device, "FULL_DEVICE_NAME"))
    except RuntimeError:
        return ""


def folder(properties: dict) -> Path:
    """The cache folder of costs: that of the compiled models if CACHE_DIR is set, else the user's."""
    if "CACHE_DIR" in properties:
        return Path(properties["CACHE_DIR"])
    base = os.environ.get("LOCALAPPDATA") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "openvino-speculative")


def load_or_measure(name: str, main: CachedModel, draft: CachedModel | EagleHead | None, folder: Path) -> Costs:
    """Load the costs cached in `folder` under `name`, or measure and cache them.

    Fixed costs make draft lengths, and with a seed the text, reproducible. Costs measured on a busy machine are
    therefore kept, too. Without a seed, decoding corrects them by its own timings.
    """
    if (capacity := min(model.capacity for model in (main, draft) if model)) < CONTEXT + max(MEASURED):
        name += f", {capacity} tokens"  # which leave no room for the longest passes
    file = folder / f"costs-{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"
    if costs := _read_cached(file):
        return costs
    costs = measure(main, draft)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if earlier := _read_cached(file):  # another process has measured at the same time
            return earlier
        atomic_write(file, json.dumps({**asdict(costs), "of": name}))
    except OSError:
        pass  # a read-only home: measured again next time
    return costs


def _read_cached(file: Path) -> Costs | None:
    try:
        cached = json.loads(file.read_text(encoding="utf-8"))
        main = {int(n): seconds for n, seconds in cached["main"].items()}
        return Costs(cached["draft"], main, cached["draft_further"], cached["main_change"])
    except (OSError, ValueError, KeyError):
        return None  # missing or truncated
