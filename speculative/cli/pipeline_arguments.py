"""Command-line arguments of the programs that generate text (samples, server): types, defaults, checks, tuned settings.

Everything that can be checked before a model is compiled is checked here. An error ends the program with one sentence:
exit status 2, or 1 for a damaged file.
"""

import argparse
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openvino
import openvino_genai

from speculative.cli.console import ALL_TOKENS, fail, say
from speculative.cli.number_types import decimal, seed_number, whole_number
from speculative.cli.parser import DRAFT_DEVICE, Parser
from speculative.cli.properties import PROPERTY
from speculative.models import attention_masks
from speculative.models.config import context_length, read_config
from speculative.models.eagle3_graph import check_head, is_head
from speculative.pair import devices, one_thread, recommendation
from speculative.pair.check import compare_tokenizers
from speculative.pair.draft_limits import genai_limit, genai_tree_limit, native_limit
from speculative.pair.engines import GENAI, NATIVE
from speculative.pair.model_info import DamagedFolder, require_runnable
from speculative.pair.recommendation import ALONE, SUFFIX
from speculative.sequence.prompt import TextTooLong, encode

MAX_DRAFT_LENGTH = 64  # far above any useful K; the engine itself would draft up to max_new_tokens
MAX_DRAFT_LENGTH_NPU = 7  # with main on an NPU, which takes 16 tokens at once: GenAI may grow K to twice its value
MAX_NEW_TOKENS = 1_000_000


def parse_arguments(description: str, *names: str) -> argparse.Namespace:
    """Parse the named arguments (keys of ARGUMENTS; KEY=VALUE overrides a default), check everything that can be
    checked before compiling a model, and print what is loaded. `args.property` and `args.draft_property` are
    dictionaries."""
    parser = Parser(description=description)
    for name in (*names, "--debug"):
        name, _, default = name.partition("=")
        flags = DRAFT_LENGTH if name in DRAFT_LENGTH else (name.strip("[]"),)
        argument = parser.add_argument(*flags, **ARGUMENTS[name])
        argument.default = default or argument.default
    args = _parse(parser)
    if "--regex" in names and (args.regex is None) == (args.json_schema is None):
        fail("give either --json-schema or --regex (see --help)")
    if "[draft]" in names and "draft" in args:
        names = (*names, "draft")
    if getattr(args, "recommended", False):
        methods = [ALONE]
        if "draft" in names:
            methods = [NATIVE if "-k" in names else GENAI]
        elif "-k" in names:  # suffix decoding, of which the chat sample is no sample
            methods = [SUFFIX, *([ALONE] if "[draft]" in names else [])]
        args = take_recommendation(parser, args, *methods)

    if "-k" in names:
        set_draft_length(args, args.num_assistant_tokens)
    args.property = dict(args.property)
    models = {"main": (Path(args.main), args.device, args.property)}
    engine = NATIVE if "-k" in names else GENAI
    if "draft" in names:
        args.draft_property = draft_properties(args, engine)
        models["draft"] = (Path(args.draft), args.draft_device, args.draft_property)
    check_models(models, engine)
    if "draft" in names:
        check_limits(args, engine)
    if getattr(args, "scheduler", None):
        args.property["scheduler_config"] = scheduler_config(args.scheduler)
    if "draft" in names:
        too_long = "--num-assistant-tokens" in names and args.num_assistant_tokens > MAX_DRAFT_LENGTH_NPU
        if too_long and args.device == "NPU":
            k = args.num_assistant_tokens
            fail(f"-k {k} is too large for a main model on NPU: use 1 to {MAX_DRAFT_LENGTH_NPU}.")
    if "prompt" in names:
        args.prompt = read_prompt(args.prompt)
        fit_in_context(args)
    say("Loading " + " and ".join(f"{folder} on {device}" for folder, device, _ in models.values()) + " ...")
    return args


def draft_properties(args: argparse.Namespace, engine: str) -> dict[str, Any]:
    """The properties of the draft: those given, else the main model's on the same kind of device (GPU.0 and GPU.1), or
    in GenAI's pipeline on different kinds, unless one is an NPU."""
    if args.draft_property is not None:
        return dict(args.draft_property)
    kinds = {device.partition(".")[0] for device in (args.device, args.draft_device)}
    return args.property if len(kinds) == 1 or (engine == GENAI and "NPU" not in kinds) else {}


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; there is no `draft` if it is optional and was not given."""
    args = parser.parse_args(arguments)
    if vars(args).get("draft", "") is None:
        del args.draft
    return args


def draft_length(text: str) -> float:
    """Parse 1 to MAX_DRAFT_LENGTH tokens, auto (returned as 0), or a draft confidence threshold between 0 and 1."""
    try:
        if "." in text:
            return decimal(lambda value: 0 < value < 1, "between 0 and 1")(text)
        return 0 if text == "auto" else whole_number(1, MAX_DRAFT_LENGTH)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, nor auto") from None


def set_draft_length(args: argparse.Namespace, value: float) -> None:
    """Split the value of draft_length() into GenAI's two options, number of tokens and threshold; both 0 for auto."""
    is_threshold = isinstance(value, float)
    args.num_assistant_tokens = 0 if is_threshold else value
    args.assistant_confidence_threshold = value if is_threshold else 0.0


def file_text(path: str) -> str:
    """The text of a file."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise argparse.ArgumentTypeError(f"{path} is not UTF-8") from None
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error.strerror}") from None


temperature = decimal(lambda value: 0 <= value < math.inf, "of 0 or more")


def scheduler_config(settings: list[tuple[str, object]]) -> openvino_genai.SchedulerConfig:
    """Return GenAI's SchedulerConfig with these [(name, value)] set."""
    config = openvino_genai.SchedulerConfig()
    for name, value in settings:
        if not hasattr(config, name):
            fail(f"--scheduler {name}={value}: GenAI's SchedulerConfig has no {name}.")
        try:
            setattr(config, name, value == "True" if value in ("True", "False") else value)
        except TypeError:
            fail(f"--scheduler {name}={value}: not a valid value for {name} in GenAI's SchedulerConfig.")
    return config


DEVICE = {"default": "CPU", "help": "CPU, GPU, GPU.1, NPU, AUTO:GPU,CPU, HETERO:GPU,CPU, ... (default: %(default)s)"}
DRAFT_LENGTH = ("-k", "--num-assistant-tokens")  # names the variant for our engine, with auto; and for GenAI
ARGUMENTS: dict[str, dict[str, Any]] = {  # those of `add_argument`
    "main": {"help": "folder of the main model (OpenVINO IR)"},
    "draft": {
        "help": "folder of the draft (OpenVINO IR): a smaller model, best with the same tokenizer, or an EAGLE-3 head "
        "of the main model"
    },
    "[draft]": {
        "nargs": "?",
        "help": "folder of the draft (OpenVINO IR), a model or an EAGLE-3 head; without one, suffix decoding drafts: "
        "it copies tokens from the text so far",
    },
    "prompt": {"help": "prompt text; - reads it from standard input (one trailing newline is removed)"},
    "--device": DEVICE,
    "--draft-device": DRAFT_DEVICE,
    "--num-assistant-tokens": {
        "type": whole_number(1, MAX_DRAFT_LENGTH),
        "default": 5,
        "metavar": "K",
        "help": f"draft tokens per iteration, 1 to {MAX_DRAFT_LENGTH} (default: %(default)s)",
    },
    "-k": {
        "type": draft_length,
        "default": "auto",
        "metavar": "K",
        "help": f"draft tokens per iteration, 1 to {MAX_DRAFT_LENGTH}; auto: adaptive; a threshold like 0.4: until the "
        "draft's confidence in a token is lower (default: auto)",
    },
    "--json-schema": {
        "type": file_text,
        "metavar": "FILE",
        "help": "write JSON that follows the schema in this file",
    },
    "--regex": {"metavar": "REGEX", "help": "write text that this regular expression matches as a whole"},
    "--suffix-decoding": {
        "action": argparse.BooleanOptionalAction,
        "help": "also copy draft tokens from the text so far: with the adaptive draft length, where that gains more "
        "than the draft model's tokens, otherwise after matches of three tokens or more",
    },
    "--tree-depth": {
        "type": whole_number(1, MAX_DRAFT_LENGTH),
        "metavar": "D",
        "help": "with an EAGLE-3 draft: draft a tree of D levels instead of a chain, and verify its K most probable "
        "tokens; greedy",
    },
    "--branching-factor": {
        "type": whole_number(1, MAX_DRAFT_LENGTH),
        "default": 4,
        "metavar": "B",
        "help": "tokens drafted after each token of the tree, and kept per level (default: %(default)s)",
    },
    "--temperature": {
        "type": temperature,
        "default": "1",
        "metavar": "T",
        "help": "sampling temperature; 0 is greedy (default: %(default)s)",
    },
    "--top-k": {
        "type": whole_number(1, MAX_NEW_TOKENS),
        "default": ALL_TOKENS,
        "metavar": "N",
        "help": "sample only from the N most probable tokens (default: all)",
    },
    "--top-p": {
        "type": decimal(lambda value: 1e-9 <= value <= 1, "above 0 and at most 1"),  # smaller is 0 in float32
        "default": 1.0,
        "metavar": "P",
        "help": "sample from the smallest set of tokens whose total probability exceeds P (default: all)",
    },
    "--seed": {
        "type": seed_number,
        "default": random.getrandbits(32),
        "metavar": "N",
        "help": "random seed; the same seed reproduces the text on the same machine (default: random, printed)",
    },
    "--max-ngram-size": {
        "type": whole_number(1, MAX_DRAFT_LENGTH),
        "default": 3,
        "metavar": "N",
        "help": "longest match to look for in the text so far, in tokens (default: %(default)s)",
    },
    "--max-new-tokens": {
        "type": whole_number(1, MAX_NEW_TOKENS),
        "default": 100,
        "metavar": "N",
        "help": "stop after N new tokens (default: %(default)s)",
    },
    "--property": {**PROPERTY, "help": "OpenVINO property, like INFERENCE_PRECISION_HINT=f32 (repeatable)"},
    "--draft-property": {
        **PROPERTY,
        "default": None,
        "help": "OpenVINO property of the draft model (repeatable; default: the main model's properties, if both run "
        "on the same kind of device; GenAI's pipeline also takes them if the kinds differ, unless one is an NPU)",
    },
    "--scheduler": {**PROPERTY, "help": "setting of GenAI's SchedulerConfig, like cache_size=1 (repeatable)"},
    "--recommended": {
        "action": "store_true",
        "help": f"use the settings saved by scripts/tune.py ({recommendation.FILE} next to the main model's folder)",
    },
    "--debug": {"action": "store_true", "help": "show stack traces of errors"},
}


# ---- recommended settings -------------------------------------------------------------------------------------------


def take_recommendation(
    parser: argparse.ArgumentParser, args: argparse.Namespace, *methods: str, arguments: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parse `arguments`, by default those of this program, again: with tune.py's settings for the first of `methods`
    that has any as defaults. `args.recommended` describes their origin. `args` are those parsed before."""
    main, draft = Path(args.main), Path(args.draft) if "draft" in args else None
    check_folders({"main": main, "draft": draft} if draft else {"main": main})
    file = recommendation.place(main)
    assert file is not None  # one folder has one parent
    try:
        recommended = recommendation.read(file)
    except ValueError as error:
        fail(str(error), status=1 if file.exists() else 2)
    try:
        notes = recommendation.check(recommended, main, draft, _versions())
        settings, best = recommended["settings"], recommended["best"]
        drafting = best in (GENAI, NATIVE)
        reason = (
            "for this pair, this method gains too little or was not measured" if drafting else recommended["reason"]
        )
    except (KeyError, TypeError, AttributeError):
        fail(f"{file} is incomplete: recreate it with {recommendation.TUNE}", status=1)
    except ValueError as error:
        fail(f"{file}: {error}")
    chosen = next((settings[method] for method in methods if method in settings), None)
    if chosen is None:
        fail(f"{file} recommends samples/{recommendation.SAMPLE_OF[best]} --recommended instead: {reason}")
    for note in notes:
        say(f"note: {note}; tune again")

    defaults = {"device": chosen["device"], "property": list(chosen["properties"].items())}
    if "scheduler" in args:
        defaults["scheduler"] = list(chosen.get("scheduler", {}).items())
    if "suffix_decoding" in args:
        defaults["suffix_decoding"] = "max_ngram_size" in chosen
    if draft:
        defaults["draft_device"] = chosen["draft_device"]
        defaults["num_assistant_tokens"] = chosen["assistant_confidence_threshold"] or chosen["num_assistant_tokens"]
        same_as_main = all(chosen[f"draft_{name}"] == chosen[name] for name in ("device", "properties"))
        if not same_as_main:  # otherwise the draft inherits the main model's
            defaults["draft_property"] = list(chosen["draft_properties"].items())
    parser.set_defaults(**defaults)
    args = _parse(parser, arguments)
    overridden = [name for name, value in defaults.items() if vars(args)[name] != value]
    args.recommended = f"by {file}"
    if overridden:
        args.recommended += f", except --{', --'.join(name.replace('_', '-') for name in overridden)}"
    return args


def _versions() -> dict[str, str]:
    """Return {what: version} of openvino_genai and the devices, as a recommendation's `measured_on`."""
    core = openvino.Core()
    names = {name: core.get_property(name, "FULL_DEVICE_NAME") for name in core.available_devices}
    return {"openvino_genai": openvino_genai.__version__, **names}


# ---- checks ---------------------------------------------------------------------------------------------------------


def check_models(models: dict[str, tuple[Path, str, dict]], engine: str, elsewhere: bool = False) -> None:
    """Reject models that the engine cannot run: {"main" or "draft": (folder, device, properties)}. The devices are not
    checked if they are those of other machines (`elsewhere`)."""
    check_folders({role: folder for role, (folder, _, _) in models.items()})
    for role, (folder, device, properties) in models.items() if not elsewhere else ():
        try:
            devices.require(device, properties)
        except ValueError as error:
            fail(f"{role}: {error}")
        if crash := one_thread.warning(folder, device, properties):
            say(f"warning: {crash}")
        is_paged = "NPU" not in device and properties.get("ATTENTION_BACKEND") != "SDPA"
        if role == "main" and engine == GENAI and is_paged and attention_masks.dropped_of(folder):
            say(
                f"warning: OpenVINO's paged attention drops the position bias or sliding window of {folder}, so its "
                "text will be wrong: use samples/speculative_sampling_lm.py, whose engine decodes it without"
            )
    if "draft" in models:
        check_pair(models["main"][0], models["draft"][0], engine)


def check_folders(folders: dict[str, Path]) -> None:
    """Reject folders that the engine cannot load: {"main" or "draft": folder}."""
    for role, folder in folders.items():
        try:
            require_runnable(folder, writes_text=role == "main")
        except ValueError as error:
            fail(f"{role}: {error}", status=1 if isinstance(error, DamagedFolder) else 2)


def check_pair(main: Path, draft: Path, engine: str) -> None:
    """Reject a draft that does not fit: GenAI needs the same tokenizer, but compares only the number of tokens and the
    special ids. An EAGLE-3 draft has no tokenizer, but its graph must fit."""
    if is_head(draft):
        try:
            check_head(draft, main)
        except ValueError as error:
            fail(str(error))
        return
    for finding in compare_tokenizers(main, draft):
        not_in_genai = (finding.level, finding.what) == ("warning", "vocabulary")
        if finding.level == "error" or (engine == GENAI and not_in_genai):
            fail(f"the tokenizers of {main} and {draft} differ: {finding.message}")
        if finding.level == "warning":
            say(f"warning: {draft} as a draft of {main}: {finding.message}")


def check_limits(args: argparse.Namespace, engine: str) -> None:
    """Reject an EAGLE-3 draft that the engine cannot run, and a tree that GenAI cannot draft."""
    main, draft = Path(args.main), Path(args.draft)
    depth = getattr(args, "tree_depth", None)
    devices = (args.device, args.draft_device)
    limit = native_limit(draft, *devices) if engine == NATIVE else genai_limit(main, draft, *devices)
    if limit := limit or (genai_tree_limit(draft) if depth else ""):
        fail(limit)
    if depth and depth > args.num_assistant_tokens:
        fail(f"-k {args.num_assistant_tokens} is less than --tree-depth {depth}: a tree has a token in each level.")


def read_prompt(prompt: str) -> str:
    """Return the prompt, read from standard input if it is "-"; reject an empty one and what is not UTF-8."""
    if prompt == "-":
        if not sys.stdin:
            fail("standard input is closed: give the prompt as an argument.")
        try:
            prompt = sys.stdin.buffer.read().decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n")
        except UnicodeDecodeError as error:
            fail(f"standard input is not UTF-8 (byte {error.start}): save the prompt as UTF-8.")
    if not prompt:
        fail("the prompt is empty: give some text to continue.")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        fail(f"the prompt is not UTF-8 (character {error.start + 1}): set a UTF-8 locale or use standard input.")
    return prompt


def fit_in_context(args: argparse.Namespace) -> None:
    """Reject a prompt that fills the context; lower max_new_tokens, with a note, if the context leaves less room."""
    context = context_length(read_config(args.main)) or MAX_NEW_TOKENS
    tokenizer = openvino_genai.Tokenizer(args.main)
    try:
        available = context - len(encode(args.prompt, tokenizer))
    except TextTooLong as error:
        fail(f"{error}.")
    if available < 1:
        fail(f"the prompt is {1 - available} tokens too long for the context of {args.main}: shorten it.")
    if available < args.max_new_tokens:
        say(f"note: the context of {args.main} has room for {available} new tokens, not {args.max_new_tokens}.")
        args.max_new_tokens = available
