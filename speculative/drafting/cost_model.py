"""What draft steps and main inferences cost here: for one text measured once and kept on disk, for several measured at
every start."""

import hashlib
import json
import os
import platform
import time
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import openvino as ov

from speculative.drafting.latency_curve import LatencyCurve
from speculative.drafting.policy import LONGEST, Costs
from speculative.models.cached_model import CachedModel
from speculative.pair import devices

MEASURED = (1, 2, 3, 4, 5, 6, 8, 11, LONGEST + 1)  # tokens in one inference, of one text
MEASURED_TOGETHER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # of several
FORMAT = 2  # of the kept file; costs kept by an earlier version may be of a busy moment
CONTEXT = 64  # tokens in the cache meanwhile, where it has room for them
TIMES, LEAST_SECONDS = 3, 0.5  # small models are timed more often, for as long
TRIES = 5  # to measure on a machine that is busy with other things
DISORDER = 1.2  # an inference that takes so many times as long as one on more tokens was measured at a busy moment


class Seconds(NamedTuple):
    """Of an inference, by the number of tokens in it: the main model's, the draft's behind one of the main model's, and
    the draft's behind one of its own, when it is in the processor's caches."""

    main: dict[int, float]
    draft: dict[int, float]
    draft_further: dict[int, float]


def measure(main: CachedModel, draft: CachedModel | None) -> Costs:
    """What the draft length rule of one text has to know (a second or so for a 1 B model).

    Measured again, up to `TRIES` times, while the times are in disorder; the shortest of each count.
    """
    seconds = _clock(main, draft, [(n, 1) for n in MEASURED])
    for _ in range(TRIES - 1):
        if not _in_disorder(seconds.main):
            break
        again = _clock(main, draft, [(n, 1) for n in MEASURED])
        seconds = Seconds(
            *({n: min(of_n, new[n]) for n, of_n in old.items()} for old, new in zip(seconds, again, strict=True))
        )
    return Costs(seconds.draft.get(1, 0.0), seconds.main, seconds.draft_further.get(1, 0.0))


def _in_disorder(seconds: dict[int, float]) -> bool:
    """Whether an inference took clearly longer than one on more tokens."""
    times = [seconds[n] for n in sorted(seconds)]
    return any(fewer > DISORDER * more for i, fewer in enumerate(times) for more in times[i + 1 :])


def measure_together(main: CachedModel, draft: CachedModel | None) -> list[LatencyCurve]:
    """What the rule of several texts has to know (a few seconds for a 1 B model): a curve for each of `Seconds`."""
    seconds = _clock(main, draft, [(n, n) for n in MEASURED_TOGETHER])
    return [LatencyCurve(by_tokens or {1: 0.0}) for by_tokens in seconds]


def _clock(main: CachedModel, draft: CachedModel | None, counts: list[tuple[int, int]]) -> Seconds:
    """Time both models on so many tokens each, in turns: a large model leaves nothing in the processor's caches for a
    small one. Their own caches are empty afterwards."""
    models = [main, *([draft] if draft else [])]
    most = max(n for n, _ in counts)
    context = max(1, min(CONTEXT, *(model.capacity - most for model in models)))
    tokens = (np.arange(context + most, dtype=np.int64) * 7919 + 1) % min(model.width for model in models)
    for model in models:
        model.logits(tokens[:context])
    times = Seconds({}, {}, {})

    def time_one(model: CachedModel, n: int, of_model: dict[int, list[float]]) -> None:
        if context + n <= model.capacity:
            begin = time.perf_counter()
            model.backend.run(context, tokens[context : context + n], n)
            of_model.setdefault(n, []).append(time.perf_counter() - begin)

    started = time.perf_counter()
    while len(times.main.get(counts[0][0], ())) <= TIMES or time.perf_counter() - started < LEAST_SECONDS:
        for n, n_draft in counts:
            time_one(main, n, times.main)
            if draft:
                time_one(draft, n_draft, times.draft)
                time_one(draft, n_draft, times.draft_further)
    for model in models:
        model.forget()
    # The first of a shape is slower. The lower quartile: what other programs take of the machine is none of the costs.
    return Seconds(*({n: sorted(of_n[1:])[(len(of_n) - 1) // 4] for n, of_n in of_model.items()} for of_model in times))


def key(*models: tuple[Path | None, str, dict]) -> str:
    """What the costs depend on: the weights, their devices and the properties of both, the machine, and its cores that
    are ours."""
    named = [
        [str(Path(folder).resolve()), Path(folder, "openvino_model.bin").stat().st_mtime_ns, device, properties]
        for folder, device, properties in models
        if folder
    ]
    machine = [platform.node(), devices.usable_cores()]
    return json.dumps([FORMAT, ov.__version__, *machine, named], sort_keys=True, default=str)


def folder(properties: dict) -> Path:
    """Where costs are kept: beside the compiled models if there is a CACHE_DIR, else in the user's cache folder."""
    if "CACHE_DIR" in properties:
        return Path(properties["CACHE_DIR"])
    base = os.environ.get("LOCALAPPDATA") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "openvino-speculative")


def remembered(name: str, main: CachedModel, draft: CachedModel | None, folder: Path) -> Costs:
    """The costs kept in `folder` under `name`; measured and kept there if there are none.

    The same costs every time make the draft lengths, and with a seed the text, the same every time. So they stay even
    if the machine was busy when they were measured: without a seed, the clock corrects them while decoding.
    """
    file = folder / f"costs-{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"
    if costs := _kept(file):
        return costs
    costs = measure(main, draft)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps({**asdict(costs), "of": name}), encoding="utf-8")
        if earlier := _kept(file):  # of a process that measured at the same time
            partial.unlink()
            return earlier
        partial.replace(file)
    except OSError:
        pass  # a read-only home: measured again next time
    return costs


def _kept(file: Path) -> Costs | None:
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        main = {int(n): seconds for n, seconds in kept["main"].items()}
        return Costs(kept["draft"], main, kept["draft_further"])
    except (OSError, ValueError, KeyError):
        return None  # none yet, or a file that was cut off
