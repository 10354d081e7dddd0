"""Shared harness of the benchmarks: interleaved timing of decoding methods, background load, environment, output.

    method = Method("ours, K = 4", NATIVE, 4, 0.0, lambda ids: engine.generate(ids, config))
    with BackgroundLoad() as load:
        interleave([alone, method], prompts, rounds=3)
    print(row(method, alone)["speedup"], load.sentence)

Each round runs each prompt with every method, one after another, so that background load affects all equally. The order
varies, so that no method always follows the same predecessor in the processor's caches. A warm-up comes first; results
are the median and range over the rounds.
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import openvino as ov
import openvino_genai
import psutil

from speculative.atomic_write import atomic_write
from speculative.bench.genai import Run
from speculative.bench.result import Environment, IterationSplit, MethodRow, Result
from speculative.cli.processes import print_or_exit, signals_raise
from speculative.cli.progress import tqdm
from speculative.decoder import GenerationResult
from speculative.error_text import one_line
from speculative.models.cached_model import CachedModel
from speculative.models.cores import instruction_sets, usable_cores
from speculative.models.eagle3_head import EagleHead
from speculative.models.spec import ModelSpec
from speculative.pair import devices, weights
from speculative.sequence import metrics

Item = TypeVar("Item")
MIN_REPORTED_LOAD = 0.1  # background share of processor time above which it is reported


# ---- decoding methods, interleaved ----------------------------------------------------------------------------------


@dataclass
class Method:
    """One decoding method. Per-round lists have one entry for each complete round after the warm-up."""

    name: str  # "GenAI, K = 4"
    engine: str  # genai or native
    draft_length: int | str  # 0: none; K; "adaptive"; "confidence 0.4"; "lookup 5"; "lookup adaptive"; "tree ..."
    temperature: float  # 0: greedy
    decode: Callable[..., Run | GenerationResult]  # token ids [n], and a JSON schema if there is one -> the run
    seconds: list[list[float]] = field(default_factory=list)  # per forward pass of main and draft, if timed
    rounds: list[list[Run | GenerationResult]] = field(default_factory=list)  # one run per prompt
    outside: list[float] = field(default_factory=list)  # seconds outside forward passes, per round
    drafting: list[float] = field(default_factory=list)  # seconds in the draft's forward passes, per round
    verifying: list[float] = field(default_factory=list)  # in the main model's after the prompt, per round

    def throughput(self, round_: int, prompts: Sequence[int] | None = None) -> float:
        """New tokens per second in a round, decode only, over all prompts or those with these indices."""
        runs = self.rounds[round_]
        runs = runs if prompts is None else [runs[i] for i in prompts]
        tokens = sum(len(run.tokens) - 1 for run in runs)
        if not tokens:
            raise ValueError(f"all answers of {self.name} have a single token: give prompts with longer ones")
        return tokens / sum(run.decode_seconds for run in runs)

    def decodes(self, prompts: Sequence[int]) -> bool:
        """Whether an answer to these prompts has more than one token, in every round."""
        return all(any(len(runs[i].tokens) > 1 for i in prompts) for runs in self.rounds)

    def runs(self) -> list[Run | GenerationResult]:
        return [run for round_ in self.rounds for run in round_]


def time_in(model: CachedModel | EagleHead) -> list[float]:
    """Time every forward pass of `model` from now on; the returned list grows by its seconds."""
    seconds: list[float] = []
    run = model.backend.run

    def timed(*arguments: Any, **options: Any) -> np.ndarray:
        begin = time.perf_counter()
        logits = run(*arguments, **options)
        seconds.append(time.perf_counter() - begin)
        return logits

    model.backend.run = timed  # type: ignore[method-assign]
    return seconds


def interleave(
    methods: list[Method],
    prompts: list[np.ndarray],
    rounds: int,
    warm_up: int = 1,
    describe: str = "",
    before_round: Callable[[], None] = lambda: None,
    json_schemas: Sequence[str] = (),
) -> bool:
    """Add `rounds` rounds to every method after `warm_up` discarded rounds. `before_round` is called before each.
    `json_schemas`, if given, has one for each prompt, or "".

    Returns False after Ctrl-C; complete rounds are kept. Raises KeyboardInterrupt if there are none.
    """
    before = len(methods[0].rounds)
    total = (warm_up + rounds) * len(prompts) * len(methods)
    try:
        with signals_raise(), tqdm(total=total, unit="run", desc=describe or None, leave=False) as bar:
            for number in range(warm_up + rounds):
                before_round()
                results = _one_round(methods, prompts, bar, (before + number) * len(prompts), json_schemas)
                if number >= warm_up:
                    _add_round(results)
    except KeyboardInterrupt:
        for method in methods:  # the signal can arrive at any point
            for per_round in (method.rounds, method.outside, method.drafting, method.verifying):
                del per_round[min(len(method.rounds) for method in methods) :]
        if len(methods[0].rounds) == before:
            raise
        return False
    return True


def shuffled(items: Sequence[Item], turn: int) -> list[Item]:
    """`items` in the pseudo-random order number `turn`, which is the same in every program."""
    return [items[i] for i in np.random.default_rng(turn).permutation(len(items))]


def _one_round(
    methods: list[Method], prompts: list[np.ndarray], bar: tqdm, turn: int, json_schemas: Sequence[str]
) -> list[tuple]:
    """Run each prompt with each method. Per method: itself, its runs, and seconds outside, drafting and verifying."""
    runs: list[list[Run | GenerationResult]] = [[] for _ in methods]
    seconds_spent = np.zeros((len(methods), 3))
    for number, ids in enumerate(prompts):
        inputs = (ids, json_schemas[number]) if json_schemas and json_schemas[number] else (ids,)
        for i, method in shuffled(list(enumerate(methods)), turn + number):
            before = [len(seconds) for seconds in method.seconds]
            run = method.decode(*inputs)
            runs[i].append(run)
            if method.seconds:
                main, *draft = [sum(seconds[n:]) for seconds, n in zip(method.seconds, before, strict=True)]
                verify = sum(method.seconds[0][-len(run.gained) :]) if run.gained else 0.0
                seconds_spent[i] += run.seconds - main - sum(draft), sum(draft), verify
            bar.update()
    return list(zip(methods, runs, seconds_spent.tolist(), strict=True))


def _add_round(results: list[tuple]) -> None:
    for method, runs, (outside, drafting, verifying) in results:
        method.outside.append(outside)
        method.drafting.append(drafting)
        method.verifying.append(verifying)
        method.rounds.append(runs)


# ---- results of a method --------------------------------------------------------------------------------------------


def row(method: Method, baseline: Method) -> MethodRow:
    """A method's results over its rounds; `baseline` decodes without a draft in the same rounds."""
    rounds = range(len(method.rounds))
    speedups = [method.throughput(i) / baseline.throughput(i) for i in rounds]
    runs = method.runs()
    proposed = [n for run in runs for n in run.proposed]
    accepted = [n for run in runs for n in run.accepted]
    gained = [n for run in runs for n in run.gained]
    texts = [run.tokens for run in method.rounds[0]]
    speedup = statistics.median(speedups)
    same = sum(a == b.tokens for a, b in zip(texts, baseline.rounds[0], strict=True))
    # with the prompts' forward passes, which give one token each
    forward_speedup = metrics.block_efficiency([*gained, *[1] * len(runs)])
    assert forward_speedup is not None  # there is a run
    is_tree = str(method.draft_length).startswith("tree")  # which has several tokens at a position
    return {
        "name": method.name,
        "engine": method.engine,
        "sampled": method.temperature > 0,
        "temperature": method.temperature,
        "draft_length": method.draft_length,
        "throughput": statistics.median(method.throughput(i) for i in rounds),
        "throughputs": [method.throughput(i) for i in rounds],
        "speedup": speedup,
        "speedup_range": [min(speedups), max(speedups)],
        "gain_percent": 100 * (speedup - 1),
        "forward_speedup": forward_speedup,
        "acceptance_rate": metrics.acceptance_rate(proposed, accepted),
        "position_acceptance": [] if is_tree else metrics.position_acceptance(proposed, accepted),
        "block_efficiency": metrics.block_efficiency(gained),
        "mean_draft_length": sum(proposed) / len(proposed) if proposed else None,
        "ttft": statistics.median(run.ttft for run in runs),
        "tpot": statistics.median(run.decode_seconds / (len(run.tokens) - 1) for run in runs if len(run.tokens) > 1),
        "outside": sum(method.outside) / sum(run.seconds for run in runs) if method.seconds else None,
        "repetition": statistics.mean(metrics.repetition(run.tokens) for run in runs),
        "same_text": None if method.temperature else same,
        "texts": len(texts),
        "output_sha256": hashlib.sha256(str(texts).encode()).hexdigest()[:16],
        "why": getattr(runs[-1], "draft_length", "") if "adaptive" in str(method.draft_length) else "",
    }


def iteration_split(method: Method) -> IterationSplit | None:
    """Milliseconds per iteration in the draft, in the main model and outside both; None if nothing was timed."""
    runs = method.runs()
    iterations = sum(len(run.gained) for run in runs)
    if not method.seconds or not iterations:
        return None
    drafting, verifying = sum(method.drafting), sum(method.verifying)
    overhead = max(0.0, sum(run.decode_seconds for run in runs) - drafting - verifying)
    return {
        "name": method.name,
        "draft_length": method.draft_length,
        "draft_ms": 1000 * drafting / iterations,
        "verify_ms": 1000 * verifying / iterations,
        "overhead_ms": 1000 * overhead / iterations,
    }


# ---- the machine ----------------------------------------------------------------------------------------------------


class BackgroundLoad:
    """The share of the machine's processor time used by other programs while this context was open.

    Other means not this process or its children. Time taken by a virtual machine's host (steal) counts as other.
    """

    def __init__(self) -> None:
        self.share = 0.0

    def __enter__(self) -> "BackgroundLoad":
        self._begin = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        total, busy, own = (now - then for now, then in zip(self._now(), self._begin, strict=True))
        self.share = min(1.0, max(0.0, busy - own) / total) if total > 0 else 0.0

    @property
    def sentence(self) -> str:
        """A warning, empty if the load was small."""
        if self.share < MIN_REPORTED_LOAD:
            return ""
        return (
            f"Other programs used {self.share:.0%} of the machine's processor time during the measurement: "
            "the results are lower and less reliable than on an idle machine."
        )

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """Processor seconds so far: total, busy, and busy for this process and its children."""
        times = psutil.cpu_times()._asdict()
        for counted_twice in ("guest", "guest_nice"):
            times.pop(counted_twice, None)
        idle = times["idle"] + times.get("iowait", 0.0)
        own = 0.0
        me = psutil.Process()
        for process in (me, *me.children(recursive=True)):
            try:
                used = process.cpu_times()
            except psutil.Error:  # the process has just ended
                continue
            own += used.user + used.system + used.children_user + used.children_system
        total = sum(times.values())
        return total, total - idle, own


def environment(arguments: argparse.Namespace, load: BackgroundLoad | None = None) -> Environment:
    """What every published result must state: date, command, hardware, versions. With a pair in `arguments` and `load`,
    it is a PairEnvironment."""
    core = ov.Core()
    properties = dict(getattr(arguments, "property", None) or [])
    memory = devices.main_memory()
    facts: dict[str, Any] = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["python", *sys.argv]),
        "processor": str(core.get_property("CPU", "FULL_DEVICE_NAME")).strip(),
        "instruction_sets": instruction_sets(),
        "cores": usable_cores(),
        "memory": f"{memory.total / 2**30:.0f} GiB" if memory.total else "unknown",
        "os": platform.platform(),
        "python": platform.python_version(),
        "openvino": importlib.metadata.version("openvino"),
        "openvino_genai": openvino_genai.__version__,
    }
    for role, device_name in (("main", "device"), ("draft", "draft_device")):
        folder, device = getattr(arguments, role, None), getattr(arguments, device_name, None) or "CPU"
        if isinstance(folder, Path):
            full_names = [fact.full_name for fact in devices.look_up(device, core) if fact.full_name]
            facts[role] = str(folder)
            facts[device_name] = device
            facts[f"{device_name}_name"] = ", ".join(full_names)
            facts[f"{role}_precision"] = precision(ModelSpec(folder, device, properties))
    facts["properties"] = properties
    if load:
        facts["other_load"] = load.share
    return cast(Environment, facts)


def precision(model: ModelSpec) -> str:
    """The weight format, read from the IR, and the inference precision reported by the device."""
    core = ov.Core()
    formats = weights.read(core.read_model(model.folder / "openvino_model.xml"))
    try:
        core.set_property(model.device, model.properties)
        hint = core.get_property(model.device, "INFERENCE_PRECISION_HINT").to_string()
    except RuntimeError:  # AUTO, HETERO and a simulated NPU do not report it
        hint = "the device's default"
    return f"{formats} weights, inference in {hint.replace('dynamic', 'f32')}"  # dynamic: the model's own types


# ---- output ---------------------------------------------------------------------------------------------------------


def add_output_arguments(parser: argparse.ArgumentParser, with_plot: bool = False) -> None:
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the JSON of the last line to FILE")
    parser.add_argument("--csv", type=output_file, metavar="FILE", help="write the rows as CSV")
    parser.add_argument("--html", type=output_file, metavar="FILE", help="write an HTML report with charts")
    if with_plot:
        add_plot_argument(parser)
    else:
        parser.set_defaults(png=None)


def add_plot_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--png", type=png_file, metavar="FILE", help="write the plot (needs matplotlib)")


def output_file(text: str) -> Path:
    """An argparse type: a writable file; checked now, not after minutes of measuring."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder: give a file name")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: folder {str(path.parent)!r} does not exist")
    is_replaced = path.is_file() or not path.exists()  # by another file in its folder; not a pipe or a device
    if not os.access(path.parent if is_replaced else path, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: permission denied")
    return path


def png_file(text: str) -> Path:
    """An argparse type: a writable file for a plot."""
    if not importlib.util.find_spec("matplotlib"):
        raise argparse.ArgumentTypeError("requires matplotlib: `pip install matplotlib`")
    return output_file(text)


def _printable(text: str) -> str:
    """`text` with escapes for bytes of arguments that are not UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def write_outputs(arguments: argparse.Namespace, result: Result, table: str = "") -> None:
    """Write `result` to the requested files; print `table`, then `result` as JSON on the last line.

    If a file cannot be written, everything else is, and the program exits with status 1. Files are written first, as
    `| head` may end the program.
    """
    line = _printable(json.dumps(result, ensure_ascii=False))
    failed = False
    for path, content in _outputs(arguments, result, line):
        try:
            atomic_write(path, content())
        except (OSError, ValueError) as error:  # ValueError: there is nothing to plot
            reason = getattr(error, "strerror", None) or one_line(error)
            print(
                f"error: {path} was not written: {reason}; the last line of the output has the full result",
                file=sys.stderr,
            )
            failed = True
    print_or_exit("\n".join([*([table] if table else []), line]))
    if failed:
        sys.exit(1)


def _outputs(
    arguments: argparse.Namespace, result: Result, line: str
) -> Iterator[tuple[Path, Callable[[], str | bytes]]]:
    """The requested files, each with a function that gives its content."""
    if arguments.json:
        yield arguments.json, lambda: line + "\n"
    if arguments.csv or arguments.html or arguments.png:
        from speculative.bench.reporting import page as report

        if arguments.csv:
            yield arguments.csv, lambda: _printable(report.csv_text(result))
        if arguments.html:
            yield arguments.html, lambda: _printable(report.html_text(result))
        if arguments.png:
            yield arguments.png, lambda: report.png(result)
