"""Serving settings of a pair: recommendations of scripts/tune.py, command-line options and server requirements."""

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path

from speculative.convert.errors import ConvertError
from speculative.convert.model_server_guide import EAGLE3_NOTE, GREEDY_ONLY
from speculative.models.eagle3_graph import is_head
from speculative.pair import recommendation
from speculative.pair.draft_limits import genai_limit
from speculative.pair.engines import GENAI, NATIVE

DRAFT_LENGTH = 5  # GenAI's own
REQUESTS = 256  # concurrent requests; the server's default
UNLIMITED = 2**31  # tokens of a step
SPLIT_PROMPTS = (
    "With dynamic_split_fuse and a draft, greedy output of GenAI 2026.4.1 differs from the main model's if a prompt is "
    "split while several requests are served."
)
PREFIX_CACHE = (
    "With enable_prefix_caching and a draft, a sampled request can make the engine fail for all clients "
    "(openvino.genai#4190)."
)
THRESHOLD = "assistant_confidence_threshold"


@dataclass
class Serving:
    """Settings to serve a pair with. With neither a draft length nor a confidence threshold, the main model alone."""

    device: str = "CPU"
    properties: dict[str, object] = field(default_factory=dict)
    draft_device: str = ""
    draft_properties: dict[str, object] | None = None  # as recommended; the server does not support them
    draft_length: int = 0
    confidence_threshold: float = 0.0
    notes: list[str] = field(default_factory=list)
    eagle3: bool = False  # whether the draft is an EAGLE-3 head

    @property
    def drafting(self) -> dict[str, object]:
        """The fields of a generation config or request that set the draft length."""
        if self.confidence_threshold:
            return {THRESHOLD: self.confidence_threshold}
        return {"num_assistant_tokens": self.draft_length} if self.draft_length else {}

    @property
    def stateful(self) -> bool:
        """Whether an NPU is used: without paged attention the server runs another pipeline, one request at a time."""
        return any("NPU" in device for device in (self.device, self.draft_device))


def settings(options: argparse.Namespace, main: Path, draft: Path) -> Serving:
    """Settings from recommended.json, if there is one, overridden by the options."""
    file = options.pair / recommendation.FILE
    found = file.exists() and not options.ignore_recommendation
    serving = recommended(file, main, draft) if found else Serving(draft_length=DRAFT_LENGTH)
    if not serving.drafting and (options.num_assistant_tokens or options.draft_device):
        raise ConvertError(
            f"{file} recommends serving the main model alone, so -k and --draft-device have no effect; "
            "--ignore-recommendation serves the draft anyway",
            2,
        )
    serving.device = options.device or serving.device
    serving.properties.update(options.property)
    if not serving.drafting:
        return serving

    serving.draft_device = options.draft_device or serving.draft_device or serving.device
    if options.num_assistant_tokens:
        serving.draft_length, serving.confidence_threshold = options.num_assistant_tokens, 0.0
    if limit := genai_limit(main, draft):
        raise ConvertError(limit, 2)
    serving.eagle3 = is_head(draft)
    if serving.eagle3:
        _require_eagle3(serving)
    serving.notes[:0] = [GREEDY_ONLY, *([EAGLE3_NOTE] if serving.eagle3 else [])]
    expected = serving.draft_properties
    if expected is None or options.property:
        expected = serving.properties if serving.draft_device == serving.device else {}
    if serving.properties != expected:
        serving.notes.append(
            f"The server has no separate properties for the draft: on {serving.draft_device} it gets "
            f"{shown(serving.properties)}, like the main model, instead of {shown(expected)}."
        )
    if serving.stateful:
        serving.notes.append("With an NPU the server handles one request at a time and adapts the draft length itself.")
    return serving


def _require_eagle3(serving: Serving) -> None:
    """Raise ConvertError if the server cannot draft with an EAGLE-3 head on its device; replace a confidence threshold,
    which its engine rejects with one."""
    if serving.stateful:
        raise ConvertError("the server takes no EAGLE-3 draft on an NPU; give a CPU or GPU as --device", 2)
    if serving.confidence_threshold:
        serving.draft_length, serving.confidence_threshold = DRAFT_LENGTH, 0.0
        serving.notes.append(f"An EAGLE-3 draft takes no confidence threshold, so it drafts {DRAFT_LENGTH} tokens.")


def shown(properties: dict[str, object]) -> str:
    return " ".join(f"{key}={value}" for key, value in properties.items()) or "the defaults"


def recommended(file: Path, main: Path, draft: Path) -> Serving:
    """The best settings of scripts/tune.py that this server supports: GenAI with the draft, or the main model alone."""
    instead = "or ignore it with --ignore-recommendation"
    try:
        content = recommendation.read(file)
    except ValueError as error:
        raise ConvertError(f"{error}, {instead}") from None
    if "draft" in content and content["draft"] is None:
        raise ConvertError(
            f"{file} was measured without a draft; tune with `python scripts/tune.py {main} {draft}`, {instead}"
        )
    try:
        fingerprints = {half: content[half]["fingerprint"] for half in ("main", "draft")}
        serving = _as_found(content, file.name)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ConvertError(
            f"{file} was not written by scripts/tune.py ({what}); run scripts/tune.py again, {instead}"
        ) from None
    for half, folder in (("main", main), ("draft", draft)):
        if recommendation.fingerprint(folder) != fingerprints[half]:
            raise ConvertError(
                f"{file} was measured with other weights than those in {folder}; tune again with "
                f"`python scripts/tune.py {main} {draft}`, {instead}"
            )
    return serving


def _as_found(content: dict, name: str) -> Serving:
    """The settings for this server in a recommendation."""
    chosen = content["settings"].get(GENAI)
    if not chosen:
        alone = content["settings"]["alone"]
        note = f"The main model is served alone, as {name} recommends ({str(content['reason']).rstrip('.')})."
        return Serving(device=str(alone["device"]), properties=dict(alone["properties"]), notes=[note])
    notes = [
        f"Devices, properties and draft length are from {name}, measured with one request at a time: "
        f"{float(chosen['speedup']):.2f}x the main model alone."
    ]
    if content["best"] == NATIVE:
        notes.append(f"The fastest method in {name} is this project's own engine, which this server does not run.")
    threshold = float(chosen[THRESHOLD])
    return Serving(
        device=str(chosen["device"]),
        properties=dict(chosen["properties"]),
        draft_device=str(chosen["draft_device"]),
        draft_properties=dict(chosen["draft_properties"]),
        draft_length=0 if threshold else int(chosen["num_assistant_tokens"]) or DRAFT_LENGTH,
        confidence_threshold=threshold,
        notes=notes,
    )


def graph_fields(serving: Serving, context_length: int | None) -> dict[str, object]:
    """Fields of LLMCalculatorOptions. Paths are relative to graph.pbtxt."""
    fields: dict[str, object] = {"models_path": "./main", "device": serving.device}
    if serving.properties:
        fields["plugin_config"] = json.dumps(serving.properties, ensure_ascii=False)
    if serving.drafting:
        fields |= {"draft_models_path": "./draft", "draft_device": serving.draft_device}
    if serving.stateful:
        return fields | {"pipeline_type": 0}  # LM, which ignores the fields below
    requests = 1 if serving.eagle3 else REQUESTS  # as the server's own export does
    fields |= {"cache_size": 0, "max_num_seqs": requests}  # cache_size 0: the cache grows as needed
    if not serving.drafting:
        return fields | {"enable_prefix_caching": True}
    # With a draft, a prefix cache and a sampled request make the engine fail (openvino.genai#4190), and a prompt split
    # over steps while other requests run gives wrong output. Without splitting, a step must fit each prompt and all
    # drafts.
    drafted = requests * ((serving.draft_length or DRAFT_LENGTH) + 1)
    return {
        **fields,
        "enable_prefix_caching": False,
        "dynamic_split_fuse": False,
        "max_num_batched_tokens": max(context_length or UNLIMITED, drafted),
    }


def greedy_by_default(file: Path, serving: Serving) -> None:
    """Set the defaults for requests in the main model's generation_config.json: greedy, with the draft length.

    The server takes each parameter from the request, else from this file, else from GenAI, whose temperature is 1.
    """
    config = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}  # the pair check has read it
    config |= {"do_sample": False, "temperature": 0.0, **serving.drafting}
    if THRESHOLD in serving.drafting:
        config["logprobs"] = 1  # without it the engine's greedy draft has no confidence and drafts only one token
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n")
