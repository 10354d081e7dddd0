"""Fit check: whether a pair suits this machine's devices and memory, and what a draft step should cost.

    for finding in check_fit(Path("models/embedded/main"), Path("models/embedded/draft"), "CPU", "CPU"):
        ...

Like the pair check, which the pair must have passed, it takes seconds and compiles nothing.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openvino as ov

from speculative.byte_size import byte_size
from speculative.error_text import one_line
from speculative.models import cached_model, kv_cache
from speculative.models.cached_model import CAPACITY
from speculative.models.cores import cores_within_limit, usable_cores
from speculative.models.eagle3_graph import HeadGraph, is_head
from speculative.models.kv_cache import KvCache
from speculative.models.npu_model import DEFAULT_PROMPT, DEFAULT_RESPONSE
from speculative.models.spec import ModelSpec
from speculative.pair import devices as device_facts
from speculative.pair import weights
from speculative.pair.check import ALPHA, Finding
from speculative.pair.devices import MAIN_MEMORY, DeviceFacts, Memory
from speculative.pair.draft_limits import genai_limit, native_limit
from speculative.pair.model_info import ModelFacts, config_facts, read_graph, require_ir
from speculative.pair.weights import Weights
from speculative.sequence import metrics

CHANNEL_WISE = 4e9  # parameters above which an NPU needs channel-wise int4 (openvino#34450)
ROLLBACK_TOKENS = 256  # cache capacity for the rollback check
LONGEST = 16  # longest draft length considered for the expected speedup
WORTH_IT = 1.2  # expected speedup below which an average draft is too large


@dataclass
class PairMember:
    """One model of the pair, its device and properties; `cache` is an error message if there is no usable cache."""

    role: str  # main, draft
    device: str
    facts: ModelFacts
    devices: list[DeviceFacts]
    weights: Weights
    cache: KvCache | str

    @property
    def on_npu(self) -> bool:
        return any(device.name.partition(".")[0] == "NPU" for device in self.devices)

    @property
    def tokens(self) -> int:
        """The longest sequence that the engine allocates a cache for."""
        context = self.facts.context_length or CAPACITY
        return min(context, DEFAULT_PROMPT + DEFAULT_RESPONSE if self.on_npu else CAPACITY)


def check_fit(main: Path, draft: Path, device: str, draft_device: str) -> list[Finding]:
    """Check two IR folders, each on its device. Raises UnusableFolder if one is incomplete."""
    core = ov.Core()
    named = (("main", Path(main), device), ("draft", Path(draft), draft_device))
    members = [_read(role, folder, name, core) for role, folder, name in named]
    engines: list[Finding] = []
    with contextlib.suppress(ValueError):  # a head that does not fit, as the pair check says
        for member, weights_read in zip(members, weights.read_pair(Path(main), Path(draft)), strict=True):
            member.weights = weights_read
        engines += _judge_engines(*members)
    return [
        *_judge_devices(members),
        *_judge_cores(members),
        *engines,
        *_judge_npu(members),
        *_judge_weights(members),
        *_judge_caches(members, core),
        *_judge_memory(members, core),
        *_judge_cost(*members),
    ]


def check_rollback(main: Path, draft: Path, device: str, draft_device: str) -> Iterator[Finding]:
    """Compile both models as `speculative.decoder` does, seconds each, and check the rollback of rejected tokens."""
    head = HeadGraph(draft) if is_head(draft) else None
    for role, folder, name in (("main", main, device), ("draft", draft, draft_device)):
        spec = ModelSpec(folder, name)
        try:
            if head and role == "draft":
                note = cached_model.compile_graph(head.model, spec, capacity=ROLLBACK_TOKENS).note
            else:
                prepare = head.attach if head else None
                note = cached_model.load(spec, capacity=ROLLBACK_TOKENS, prepare=prepare).note
        except (ValueError, RuntimeError) as error:
            yield Finding("error", "rollback", f"{role}: {one_line(error)}")
        else:
            yield Finding("ok", "rollback", f"{role}: {note or 'rejected tokens leave no traces beyond rounding'}")


def _read(role: str, folder: Path, device: str, core: ov.Core) -> PairMember:
    require_ir(folder, standalone=role == "main")
    model = read_graph(folder)
    cache: KvCache | str
    try:
        cache = kv_cache.read(model)
    except ValueError as error:
        cache = str(error)
    return PairMember(
        role, device, config_facts(folder), device_facts.look_up(device, core), weights.read(model), cache
    )


def _judge_devices(members: list[PairMember]) -> Iterator[Finding]:
    for member in members:
        if not member.devices:
            yield Finding("error", "device", f"{member.role}: {member.device!r} excludes every device; name one")
        missing = [device for device in member.devices if device.missing]
        for device in missing:
            yield Finding("error", "device", f"{member.role}: there is no {device.name!r}: {device.missing}")
        if member.devices and not missing:
            description = " and ".join(f"{device.name} ({device.full_name})" for device in member.devices)
            yield Finding("ok", "device", f"{member.role} on {description}")


def _judge_cores(members: list[PairMember]) -> Iterator[Finding]:
    """A limit of a container that OpenVINO ignores."""
    limit, usable = cores_within_limit(), usable_cores()
    if limit < usable and any(device.name == "CPU" for member in members for device in member.devices):
        message = (
            f"this container may use the time of {limit} cores, but OpenVINO computes on {usable}, which are then "
            f"stopped again and again; use --property INFERENCE_NUM_THREADS={limit}"
        )
        yield Finding("warning", "cores", message)


def _judge_engines(main: PairMember, draft: PairMember) -> Iterator[Finding]:
    """Which engine cannot run an EAGLE-3 draft here."""
    limits = {
        "this project's engine": native_limit(draft.facts.folder, main.device, draft.device),
        "GenAI's pipeline": genai_limit(main.facts.folder, draft.facts.folder, main.device, draft.device),
    }
    for engine, limit in limits.items():
        if limit:
            yield Finding("error" if all(limits.values()) else "warning", "engine", f"not in {engine}: {limit}")


def _judge_npu(members: list[PairMember]) -> Iterator[Finding]:
    """Requirements of static shapes and NPUW's kernels, which engine and export would report only later."""
    for member in members:
        if not member.on_npu:
            continue
        role, grouped = member.role, member.weights.group_size not in (None, -1)
        if "int4" in member.weights.asymmetric:
            message = f"{role} has asymmetric int4 weights, which an NPU cannot run; export it again with --for NPU"
            yield Finding("error", "NPU weights", message)
        elif "int4" in member.weights.formats and grouped and member.weights.parameters > CHANNEL_WISE:
            message = (
                f"{role} has {_count(member.weights.parameters)} parameters in int4 groups of "
                f"{member.weights.group_size}, but above 4 B an NPU needs them channel-wise; export it again with "
                "--for NPU"
            )
            yield Finding("warning", "NPU weights", message)
        elif "int8" in member.weights.asymmetric and "int4" not in member.weights.formats:
            message = (
                f"{role} has asymmetric int8 weights, but an NPU is built for symmetric ones; export with --for NPU"
            )
            yield Finding("warning", "NPU weights", message)
        else:
            yield Finding("ok", "NPU weights", f"{role} has {member.weights}")
        if 0 < member.facts.sliding_window < member.tokens:
            message = (
                f"{role} has a sliding window of {member.facts.sliding_window:,} tokens, which cannot be rolled back "
                "on an NPU; use a CPU or GPU, or MAX_PROMPT_LEN + MIN_RESPONSE_LEN up to that"
            )
            yield Finding("error", "NPU shapes", message)
        else:
            message = (
                f"{role} has static shapes: prompts up to {DEFAULT_PROMPT:,} tokens and answers up to "
                f"{DEFAULT_RESPONSE}, unless the properties MAX_PROMPT_LEN and MIN_RESPONSE_LEN raise these limits"
            )
            yield Finding("warning", "NPU shapes", message)


def _judge_weights(members: list[PairMember]) -> Iterator[Finding]:
    description = "; ".join(
        f"{member.role} {member.weights}, {_count(member.weights.parameters)} parameters" for member in members
    )
    main, draft = members
    if main.weights.formats[0] in ("int4", "int8") and draft.weights.formats[0] in ("fp16", "bf16", "fp32"):
        message = f"{description}; compress the draft too (--draft-weight-format int8), so that its steps are cheap"
        yield Finding("warning", "weight formats", message)
    else:
        yield Finding("ok", "weight formats", description)


def _judge_caches(members: list[PairMember], core: ov.Core) -> Iterator[Finding]:
    for member in members:
        if isinstance(member.cache, str):
            yield Finding("error", "KV cache", f"{member.role}: {member.cache}")
            continue
        cache, precision = member.cache, _precision(member, core)
        message = (
            f"{member.role} {cache.layers} layers x {cache.heads} heads x {cache.head_size}: "
            f"{cache.bytes_per_token(precision):,} bytes per token in {precision.to_string()}, "
            f"{byte_size(_cache_bytes(member, core))} for {member.tokens:,} tokens"
        )
        yield Finding("ok", "KV cache", message)


def _judge_memory(members: list[PairMember], core: ov.Core) -> Iterator[Finding]:
    """Check memory use per memory. A model spread over several devices counts for the first of them."""
    members_by_memory: dict[str, list[PairMember]] = {}
    for member in members:
        if member.devices and not any(device.missing for device in member.devices):
            members_by_memory.setdefault(member.devices[0].memory, []).append(member)
    for memory_name, members_in_memory in members_by_memory.items():
        needed = [_weight_bytes(member) + _cache_bytes(member, core) for member in members_in_memory]
        parts = " and ".join(
            f"{member.role} {byte_size(size)}" for member, size in zip(members_in_memory, needed, strict=True)
        )
        memory = (
            device_facts.main_memory() if memory_name == MAIN_MEMORY else device_facts.device_memory(memory_name, core)
        )
        yield _judge_one_memory(memory_name, f"{parts} with weights and full cache", sum(needed), memory)


def _judge_one_memory(memory_name: str, parts: str, needed: int, memory: Memory) -> Finding:
    advice = "convert to a smaller format (int4), use a shorter context, or put the draft on another device"
    if memory.total is None:
        return Finding("ok", "memory", f"{parts}; this system does not report the size of {memory_name}")
    if needed > memory.total:
        message = (
            f"{parts} need {byte_size(needed)}, but {memory_name} has {byte_size(memory.total)} in total; {advice}"
        )
        return Finding("error", "memory", message)
    if memory.available is None:
        return Finding("ok", "memory", f"{parts}, of {byte_size(memory.total)} in {memory_name}")
    if needed > memory.available:
        free = byte_size(memory.available)
        message = (
            f"{parts} need {byte_size(needed)}, but {memory_name} has only {free} free; close programs, or {advice}"
        )
        return Finding("warning", "memory", message)
    return Finding("ok", "memory", f"{parts}, of {byte_size(memory.available)} free in {memory_name}")


def _judge_cost(main: PairMember, draft: PairMember) -> Iterator[Finding]:
    """Decoding is bound by reading the weights, so their sizes give the cost ratio on equally fast devices."""
    ratio = draft.weights.bytes_per_step / main.weights.bytes_per_step
    speedups = {
        k: metrics.predicted_speedup(metrics.block_efficiency_at(ALPHA, k), k, ratio, 1) for k in range(1, LONGEST + 1)
    }
    best = max(speedups, key=speedups.__getitem__)
    cost = (
        f"a draft step reads {byte_size(draft.weights.bytes_per_step)} and a main step "
        f"{byte_size(main.weights.bytes_per_step)}, an estimated cost ratio of {ratio:.2f}"
    )
    if draft.device != main.device:
        cost += " on equally fast devices"
    if speedups[best] < WORTH_IT:
        message = (
            f"{cost}, which is too high: at most {speedups[best]:.2f}x at {ALPHA:.0%} acceptance (K = {best}); use a "
            "smaller draft or a smaller weight format for it"
        )
        yield Finding("warning", "cost ratio", message)
    else:
        message = f"{cost}: at most {speedups[best]:.1f}x at {ALPHA:.0%} acceptance (K = {best}); measure it"
        yield Finding("ok", "cost ratio", message)


def _precision(member: PairMember, core: ov.Core) -> ov.Type:
    """The device's KV-cache precision: u8 by default on CPUs. A GPU does not report its default, which is i8 for paged
    attention; f16 is assumed for other devices."""
    device = member.devices[0].name if member.devices else ""
    try:
        precision = core.get_property(device, "KV_CACHE_PRECISION") if device else None
    except RuntimeError:
        precision = None
    if isinstance(precision, ov.Type) and precision != ov.Type.dynamic:
        return precision
    return ov.Type.i8 if device.startswith("GPU") else ov.Type.f16


def _cache_bytes(member: PairMember, core: ov.Core) -> int:
    return (
        0 if isinstance(member.cache, str) else member.cache.bytes_per_token(_precision(member, core)) * member.tokens
    )


def _weight_bytes(member: PairMember) -> int:
    return (member.facts.folder / "openvino_model.bin").stat().st_size


def _count(number: int) -> str:
    return f"{number / 1e9:.1f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"
