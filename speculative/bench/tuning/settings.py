"""The search space of scripts/tune.py (devices, plugin properties, engine, draft, draft length) and its model cache.

A `PropertySet` determines the compiled models and their numerics; a `Setting` adds options that need no reloading.
`Models` loads the models of a setting on first use and drops those no longer needed.
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import numpy as np
import openvino as ov
import openvino_genai

from speculative.bench import genai
from speculative.bench.methods import ADAPTIVE_LOOKUP, TWO_SOURCES
from speculative.bench.result import MethodSettings
from speculative.decoder import Decoder, GenerationResult
from speculative.drafting import cost_model
from speculative.drafting.combined import CombinedDraftLength, CombinedProposer
from speculative.drafting.lookup_policy import LookupDraftLength
from speculative.drafting.policy import AdaptiveDraftLength, Costs, DraftLengthPolicy
from speculative.drafting.proposers import DraftModelProposer, Proposer
from speculative.drafting.retokenizer import Retokenizer
from speculative.drafting.suffix import LONGEST_MATCH, SuffixProposer
from speculative.models import cached_model
from speculative.models.cached_model import CachedModel
from speculative.models.cores import cores_within_limit
from speculative.models.eagle3_graph import HeadGraph, check_head, is_head
from speculative.models.eagle3_head import EagleHead
from speculative.models.loading import DraftModel
from speculative.models.spec import ModelSpec
from speculative.models.vocabulary import SharedTokens, shared_tokens
from speculative.pair import devices
from speculative.pair.draft_limits import native_limit
from speculative.pair.engines import GENAI, NATIVE, shown_engine
from speculative.pair.recommendation import ALONE, SUFFIX

Value = str | int | bool
Properties = tuple[tuple[str, Value], ...]
"""Sorted by name, so that equal sets compare equal."""

EXACT: Properties = (("EXECUTION_MODE_HINT", "ACCURACY"),)  # f32 inference and cache, no quantized activations
NUMERICS = {  # properties that change the text
    *("EXECUTION_MODE_HINT", "INFERENCE_PRECISION_HINT", "DYNAMIC_QUANTIZATION_GROUP_SIZE"),
    *("KV_CACHE_PRECISION", "KEY_CACHE_PRECISION", "VALUE_CACHE_PRECISION"),
}
SHARE_OF_MEMORY = 0.6  # of the free memory, for models loaded at the same time
DRAFT_THREADS = (1, 4, 8)
SCHEDULERS: tuple[Properties, ...] = (  # of GenAI's paged backend, besides LLMPipeline's choice without a config
    (("enable_prefix_caching", False), ("max_num_batched_tokens", 2**31)),
    (("cache_size", 1), ("max_num_batched_tokens", 2**31)),  # allocate a cache of 1 GB at once instead of growing it
)


@dataclass(frozen=True)
class PropertySet:
    """The devices and plugin properties of main and draft."""

    device: str
    draft_device: str
    properties: Properties = ()
    draft_properties: Properties = ()

    def __str__(self) -> str:
        parts = [shown(self.properties) or "default properties"]
        if self.draft_properties != self.properties:
            parts.append(f"draft: {shown(self.draft_properties) or 'default properties'}")
        if (self.device, self.draft_device) != ("CPU", "CPU"):
            parts.insert(0, " + ".join(dict.fromkeys([self.device, self.draft_device])))
        return ", ".join(parts)

    def with_properties(self, added: Properties) -> "PropertySet":
        """The set with `added` for main and draft, or for main only if the draft is on another kind of device."""
        both = kind(self.device) == kind(self.draft_device)
        return PropertySet(
            self.device,
            self.draft_device,
            merged(self.properties, added),
            merged(self.draft_properties, added) if both else self.draft_properties,
        )

    @property
    def exact(self) -> "PropertySet":
        """The set for the reference in f32, whatever numerics this one has."""
        others, of_draft = (
            tuple(item for item in properties if item[0] not in NUMERICS)
            for properties in (self.properties, self.draft_properties)
        )
        return PropertySet(self.device, self.draft_device, others, of_draft).with_properties(EXACT)

    def with_draft_properties(self, added: Properties) -> "PropertySet":
        """The set with `added` for the draft only."""
        own = merged(self.draft_properties, added)
        return PropertySet(self.device, self.draft_device, self.properties, own)

    def added_to(self, other: "PropertySet") -> tuple[Properties, Properties]:
        """The properties of main and of draft that `other` lacks."""
        return (
            tuple(item for item in self.properties if item not in other.properties),
            tuple(item for item in self.draft_properties if item not in other.draft_properties),
        )


@dataclass(frozen=True)
class Setting:
    """One decoding method. `draft_length`: 0 is plain decoding, 1 or more K, a fraction a confidence threshold. Without
    a draft, ADAPTIVE_LOOKUP is suffix decoding; with one, TWO_SOURCES is both."""

    models: PropertySet
    engine: str  # GENAI or NATIVE
    draft: Path | None = None
    draft_length: int | float | str = 0  # or "adaptive", ADAPTIVE_LOOKUP or TWO_SOURCES
    scheduler: Properties = ()
    draft_name: str = field(default="", compare=False)  # to distinguish several drafts

    def __str__(self) -> str:
        method = self.length if self.draft else "suffix decoding" if self.copies else "main alone"
        method += f" with {self.draft_name}" if self.draft_name else ""
        parts = [shown_engine(self.engine), method, str(self.models)]
        return ", ".join(parts + ([shown(self.scheduler)] if self.scheduler else []))

    @property
    def copies(self) -> bool:
        """Whether all draft tokens are copied from the text, by suffix decoding."""
        return self.draft_length == ADAPTIVE_LOOKUP

    @property
    def is_combined(self) -> bool:
        """Whether draft tokens come from the draft and from suffix decoding."""
        return self.draft_length == TWO_SOURCES

    @property
    def kept_as(self) -> str:
        """Its name in recommended.json; see speculative/pair/recommendation.py."""
        return self.engine if self.draft else SUFFIX if self.copies else ALONE

    @property
    def how_many(self) -> int:
        """Number of properties of main and draft and of scheduler settings, and one for suffix decoding."""
        properties = {*self.models.properties, *self.models.draft_properties}
        return len(properties) + len(self.scheduler) + (self.copies or self.is_combined)

    @property
    def length(self) -> str:
        if isinstance(self.draft_length, float):
            return f"confidence {self.draft_length:g}"
        return f"K = {self.draft_length}" if isinstance(self.draft_length, int) else self.draft_length

    def as_dict(self) -> MethodSettings:
        """As in recommended.json; see speculative/pair/recommendation.py."""
        alone: MethodSettings = {"device": self.models.device, "properties": dict(self.models.properties)}
        if self.scheduler:
            alone["scheduler"] = dict(self.scheduler)
        if self.copies or self.is_combined:
            alone["max_ngram_size"] = LONGEST_MATCH
        if not self.draft:
            return alone
        return {
            **alone,
            "draft_device": self.models.draft_device,
            "draft_properties": dict(self.models.draft_properties),
            "num_assistant_tokens": self.draft_length if isinstance(self.draft_length, int) else 0,
            "assistant_confidence_threshold": self.draft_length if isinstance(self.draft_length, float) else 0.0,
        }


def shown(properties: Properties) -> str:
    return " ".join(f"{name}={value}" for name, value in properties)


def merged(properties: Properties, added: Properties) -> Properties:
    return tuple(sorted({**dict(properties), **dict(added)}.items()))


def kind(device: str) -> str:
    """CPU of CPU, GPU of GPU.1."""
    return device.partition(".")[0]


def property_values(device: str, core: ov.Core) -> list[Properties]:
    """Single properties of `device` that may beat its default, most promising first."""
    if kind(device) not in ("CPU", "GPU", "NPU"):
        return []  # AUTO and HETERO pass them to devices of their choice
    cores = cores_within_limit()
    precisions = {"BF16": "bf16", "FP16": "f16", "FP32": "f32"}
    capabilities = core.get_property(device, "OPTIMIZATION_CAPABILITIES") if kind(device) in available(core) else []
    tried: dict[str, Sequence[Value]] = {
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": [128, 256, 64],
        "INFERENCE_NUM_THREADS": sorted({cores, max(1, cores // 2)}, reverse=True),
        "KV_CACHE_PRECISION": ["u8", "bf16", "f16", "u4"],
        "INFERENCE_PRECISION_HINT": [precisions[name] for name in capabilities if name in precisions],
        "EXECUTION_MODE_HINT": ["ACCURACY"],
    }
    found: list[Properties] = []
    for name, values in tried.items():
        try:
            default = core.get_property(device, name)
        except RuntimeError:
            continue  # not a property of this device
        default = default.to_string() if isinstance(default, ov.Type) else str(default)
        found += [((name, value),) for value in values if str(value) != default]
    return found


def draft_property_values(device: str) -> list[Properties]:
    """Properties for the draft only: a small model's steps are short, and with more threads, synchronization costs
    more than it saves."""
    cores = cores_within_limit()
    return [(("INFERENCE_NUM_THREADS", n),) for n in DRAFT_THREADS if n < cores and kind(device) == "CPU"]


def available(core: ov.Core) -> set[str]:
    return {kind(name) for name in core.available_devices}


class Models:
    """The models that settings need, loaded on first use. `capacity` is the longest text in tokens."""

    def __init__(self, main: Path, capacity: int):
        self.main = main
        self.capacity = capacity
        self.costs: dict[tuple[PropertySet, Path | None], Costs] = {}  # for the adaptive length and suffix decoding
        self._rules: dict[Setting, DraftLengthPolicy] = {}
        self._shared: dict[Path, SharedTokens | None] = {}
        self._loaded: dict[tuple, Any] = {}  # CachedModel, and LLMPipeline of GenAI
        free = devices.main_memory().available
        self._room = SHARE_OF_MEMORY * free if free else float("inf")

    def cached(self, folder: Path, device: str, properties: Properties) -> CachedModel:
        """A model of our engine."""
        key = (folder, device, properties)
        if key not in self._loaded:
            capacity = None if kind(device) == "NPU" else self.capacity
            self._loaded[key] = cached_model.load(ModelSpec(folder, device, dict(properties)), capacity=capacity)
        return self._loaded[key]

    @overload
    def pair(self, models: PropertySet, draft: Path) -> tuple[CachedModel, DraftModel]: ...
    @overload
    def pair(self, models: PropertySet, draft: Path | None) -> tuple[CachedModel, DraftModel | None]: ...
    def pair(self, models: PropertySet, draft: Path | None) -> tuple[CachedModel, DraftModel | None]:
        if draft and is_head(draft):
            return self._with_head(models, draft)
        main = self.cached(self.main, models.device, models.properties)
        return main, self.cached(draft, models.draft_device, models.draft_properties) if draft else None

    def any_main(self, models: PropertySet) -> CachedModel:
        """The main model, with a head's additions if only that is loaded: its logits are the same."""
        for key, model in self._loaded.items():
            if key[:3] == (self.main, models.device, models.properties) and isinstance(model, CachedModel):
                return model
        return self.pair(models, None)[0]

    def _with_head(self, models: PropertySet, head: Path) -> tuple[CachedModel, EagleHead]:
        """The main model that also computes what the EAGLE-3 head reads, and the head."""
        if limit := native_limit(head, models.device, models.draft_device):
            raise ValueError(limit)
        main_key, head_key = self._head_keys(models, head)
        if main_key not in self._loaded:
            spec = ModelSpec(self.main, models.device, dict(models.properties))
            self._loaded[main_key] = cached_model.load(spec, capacity=self.capacity, prepare=HeadGraph(head).attach)
        main = self._loaded[main_key]
        if head_key not in self._loaded:
            spec = ModelSpec(head, models.draft_device, dict(models.draft_properties))
            graph = check_head(head, self.main)
            model = cached_model.compile_graph(graph.model, spec, capacity=self.capacity)
            self._loaded[head_key] = EagleHead(model, main, graph.targets)
        return main, self._loaded[head_key]

    def _head_keys(self, models: PropertySet, head: Path) -> tuple[tuple, tuple]:
        """The keys of both models of a pair with a head. The head belongs to one main model; without that it is not
        kept."""
        main = (models.device, models.properties)
        return (self.main, *main, str(head)), (head, models.draft_device, models.draft_properties, *main)

    def load(self, setting: Setting) -> None:
        """Raises RuntimeError or ValueError if a device or plugin rejects the setting."""
        if setting.engine == NATIVE:
            self.pair(setting.models, setting.draft)
        else:
            self._pipeline(setting)

    def decode(self, setting: Setting, ids: np.ndarray, new_tokens: int) -> genai.Run | GenerationResult:
        """Decode greedily, ignoring EOS."""
        if setting.engine == GENAI:
            k = setting.draft_length if setting.draft and isinstance(setting.draft_length, int) else None
            return genai.generate(self._pipeline(setting), genai.inputs(ids), new_tokens, k)
        main, draft = self.pair(setting.models, setting.draft)
        source: Proposer | None = SuffixProposer(main.vocab_size) if setting.copies else None
        if draft and setting.draft:
            shared = self._shared_tokens(setting.draft, main, draft)
            source = DraftModelProposer(draft, main.vocab_size, Retokenizer(shared) if shared else None)
            if setting.is_combined:
                source = CombinedProposer(SuffixProposer(main.vocab_size), source)
        rule = self._rule(setting, main) if isinstance(setting.draft_length, str) else None
        config = openvino_genai.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True)
        if isinstance(setting.draft_length, float):
            config.assistant_confidence_threshold = setting.draft_length
        elif isinstance(setting.draft_length, int):
            config.num_assistant_tokens = setting.draft_length
        return Decoder(main, source, rule).generate(ids, config)

    def _shared_tokens(self, folder: Path, main: CachedModel, draft: DraftModel) -> SharedTokens | None:
        """Tokens that a draft with another tokenizer shares with the main model; None for other drafts."""
        if folder not in self._shared:
            self._shared[folder] = shared = None if is_head(folder) else shared_tokens(self.main, folder)
            if shared:
                shared.fit(main.vocab_size, draft.vocab_size)
        return self._shared[folder]

    def _rule(self, setting: Setting, main: CachedModel) -> DraftLengthPolicy:
        """The adaptive length of a setting, which learns from one run for the next."""
        if setting not in self._rules:
            if setting.copies:
                known = (costs for (models, _), costs in self.costs.items() if models == setting.models)
                self._rules[setting] = LookupDraftLength(next(known, None) or cost_model.measure(main, None))
            elif setting.is_combined:
                self._rules[setting] = CombinedDraftLength(self.costs[setting.models, setting.draft])
            else:
                self._rules[setting] = AdaptiveDraftLength(self.costs[setting.models, setting.draft])
        return self._rules[setting]

    def groups(self, always: list, settings: list) -> list[list]:
        """Split `settings` (settings or property sets) into few groups that fit in memory, each including `always`."""
        groups, group = [], list(always)
        for setting in settings:
            if setting in always:
                continue
            if len(group) > len(always) and self._bytes([*group, setting]) > self._room:
                groups.append(group)
                group = list(always)
            group.append(setting)
        return [*groups, group]

    def keep(self, settings: list, drafts: list[Path | None]) -> None:
        """Drop all models that none of `settings` needs."""
        needed = {key for setting in settings for key in self._keys(setting, drafts)}
        for key in set(self._loaded) - needed:
            del self._loaded[key]
        gc.collect()

    def is_loaded(self, setting: Setting | PropertySet, drafts: list[Path | None]) -> bool:
        return set(self._keys(setting, drafts)) <= set(self._loaded)

    def _bytes(self, settings: list) -> float:
        keys = {key for setting in settings for key in self._keys(setting, [])}
        folders = [part for key in keys for part in key if isinstance(part, Path)]
        return sum((folder / "openvino_model.bin").stat().st_size for folder in folders)

    def _keys(self, setting: Setting | PropertySet, drafts: list[Path | None]) -> list[tuple]:
        """The models a setting loads; for a property set, our engine's main model with `drafts`."""
        models = setting if isinstance(setting, PropertySet) else setting.models
        if isinstance(setting, Setting):
            if setting.engine == GENAI:
                return [self._pipeline_key(setting)]
            drafts = [setting.draft]
        main = (self.main, models.device, models.properties)
        found = [draft for draft in drafts if draft]
        heads = [draft for draft in found if is_head(draft)]
        others = [(draft, models.draft_device, models.draft_properties) for draft in found if draft not in heads]
        with_heads = [key for head in heads for key in self._head_keys(models, head)]
        return [*([main] if others or not heads else []), *others, *with_heads]

    def _pipeline_key(self, setting: Setting) -> tuple:
        return (self.main, setting.draft, setting.models, setting.scheduler)

    def _pipeline(self, setting: Setting) -> openvino_genai.LLMPipeline:
        key = self._pipeline_key(setting)
        if key not in self._loaded:
            models = setting.models
            properties = dict(models.properties)
            if setting.scheduler:
                properties["scheduler_config"] = scheduler_config(setting.scheduler)
            draft = None
            if setting.draft:
                draft = ModelSpec(setting.draft, models.draft_device, dict(models.draft_properties))
            self._loaded[key] = genai.load(ModelSpec(self.main, models.device, properties), draft)
        return self._loaded[key]


def scheduler_config(settings: Properties) -> openvino_genai.SchedulerConfig:
    config = openvino_genai.SchedulerConfig()
    for name, value in settings:
        setattr(config, name, value)
    return config
