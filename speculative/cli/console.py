"""Console support shared by the samples: arguments, input checks, streaming, Ctrl-C, summary, one-sentence errors.

The pipeline, the draft model and the generation config stay in the sample itself.
"""

from speculative.cli.ctrl_c import ctrl_c

import argparse
import errno
import hashlib
import json
import math
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import openvino
import openvino_genai

from speculative.cli.properties import key_value
from speculative.models.config import context_length, read_config
from speculative.pair import recommendation
from speculative.pair.engines import GENAI, NATIVE

MAX_DRAFT_LENGTH = 64  # far above any useful K; the engine itself would draft up to max_new_tokens
MAX_DRAFT_LENGTH_NPU = 7  # with main on an NPU, which takes 16 tokens at once: GenAI may grow K to twice its value
MAX_NEW_TOKENS = 1_000_000
ALL_TOKENS = openvino_genai.GenerationConfig().top_k
RECOMMENDED = "recommended.json"  # written by scripts/tune.py, described in speculative/pair/recommendation.py
MEMORY_SIGNS = ("bad_alloc", "out of memory", "out_of_", "cannot allocate memory", "resource temporarily unavailable")
SAMPLE_OF = {
    "alone": "greedy_causal_lm.py",
    GENAI: "speculative_decoding_lm.py",
    NATIVE: "speculative_sampling_lm.py",
}
WEIGHT_FORMATS = {"u4": "int4", "i4": "int4", "u8": "int8", "i8": "int8", "f16": "fp16", "f32": "fp32"}


def run(main):
    """Run a sample and exit: 0 success, 1 failure, 2 bad usage, 130 Ctrl-C. Stack traces only with --debug."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="replace")
    ctrl_c.listen()
    try:
        main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if isinstance(error, BrokenPipeError) or getattr(error, "errno", None) == errno.EINVAL:  # EINVAL: on Windows
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader is gone: exit quietly
            sys.exit(0)
        if "--debug" in sys.argv:
            raise
        fail(sentence(error), status=1)


def say(text):
    """Print one line to stderr; stdout is reserved for the model's text."""
    print(text, file=sys.stderr, flush=True)


def fail(sentence, status=2):
    """Exit with a one-sentence error: status 2 for bad usage, 1 for a failure."""
    say(f"error: {sentence}")
    sys.exit(status)


def sentence(error):
    """Return an engine error on one line, without source locations."""
    text = getattr(error, "strerror", None) or str(error)
    if isinstance(error, MemoryError) or any(sign in text.lower() for sign in MEMORY_SIGNS):
        return "not enough memory for the models and their KV caches: close programs or use a smaller format (int4)."
    lines = (line.strip() for line in text.splitlines())
    kept = [line for line in lines if line and not line.startswith(("Exception from", "Check '"))]
    return " ".join(kept or [text or type(error).__name__]) + " (use --debug for a stack trace)"


# ---- arguments ------------------------------------------------------------------------------------------------------


def parse_arguments(description, *names):
    """Parse the named arguments (keys of ARGUMENTS; KEY=VALUE overrides a default), check everything that can be
    checked before compiling a model, and print what is loaded. `args.property` and `args.draft_property` are
    dictionaries."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: fail(f"{message} (see --help)")
    for name in (*names, "--debug"):
        name, _, default = name.partition("=")
        flags = DRAFT_LENGTH if name in DRAFT_LENGTH else (name,)
        argument = parser.add_argument(*flags, **ARGUMENTS[name])
        argument.default = default or argument.default
    args = parser.parse_args()
    if getattr(args, "recommended", False):
        args = take_recommendation(
            parser, args, "alone" if "draft" not in names else NATIVE if "-k" in names else GENAI
        )

    if "-k" in names:
        set_draft_length(args, args.num_assistant_tokens)
    args.property = dict(args.property)
    models = {"main": (args.main, args.device, args.property)}
    if "draft" in names:
        if args.draft_device == args.device or "NPU" not in (args.draft_device, args.device):
            args.draft_property = args.draft_property or args.property  # as the engine does
        args.draft_property = dict(args.draft_property)
        models["draft"] = (args.draft, args.draft_device, args.draft_property)
    for role, (folder, device, properties) in models.items():
        check_model(role, Path(folder))
        check_device(device, properties)
    if getattr(args, "scheduler", None):
        args.property["scheduler_config"] = scheduler_config(args.scheduler)
    if "draft" in names:
        too_long = "--num-assistant-tokens" in names and args.num_assistant_tokens > MAX_DRAFT_LENGTH_NPU
        if too_long and args.device == "NPU":
            k = args.num_assistant_tokens
            fail(f"-k {k} is too large for a main model on NPU: use 1 to {MAX_DRAFT_LENGTH_NPU}.")
        check_pair(Path(args.main), Path(args.draft))
    if "prompt" in names:
        args.prompt = read_prompt(args.prompt)
        fit_in_context(args)
    say("Loading " + " and ".join(f"{folder} on {device}" for folder, device, _ in models.values()) + " ...")
    return args


def whole_number(low, high):
    """Return an argparse type for whole numbers from `low` to `high` inclusive."""

    def parse(text):
        if text.isdecimal() and low <= int(text) <= high:
            return int(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")

    return parse


def draft_length(text):
    """Parse 1 to MAX_DRAFT_LENGTH tokens, auto (returned as 0), or a draft confidence threshold between 0 and 1."""
    try:
        if "." in text:
            return decimal(lambda value: 0 < value < 1, "between 0 and 1")(text)
        return 0 if text == "auto" else whole_number(1, MAX_DRAFT_LENGTH)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, nor auto") from None


def set_draft_length(args, value):
    """Split the value of draft_length() into GenAI's two options, number of tokens and threshold; both 0 for auto."""
    is_threshold = isinstance(value, float)
    args.num_assistant_tokens = 0 if is_threshold else value
    args.assistant_confidence_threshold = value if is_threshold else 0.0


def decimal(valid, range_):
    """Return an argparse type for numbers for which `valid` is true; `range_` describes them."""

    def parse(text):
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if valid(value):
            return value
        raise argparse.ArgumentTypeError(f"{text!r} is not a number {range_}")

    return parse


temperature = decimal(lambda value: 0 <= value < math.inf, "of 0 or more")


def scheduler_config(settings):
    """Return GenAI's SchedulerConfig with these [(name, value)] set."""
    config = openvino_genai.SchedulerConfig()
    for name, value in settings:
        if not hasattr(config, name):
            fail(f"--scheduler {name}={value}: GenAI's SchedulerConfig has no {name}.")
        try:
            setattr(config, name, {"True": True, "False": False}.get(value, value))
        except TypeError:
            fail(f"--scheduler {name}={value}: not a valid value for {name} in GenAI's SchedulerConfig.")
    return config


DEVICE = {"default": "CPU", "help": "CPU, GPU, GPU.1, NPU, AUTO:GPU,CPU, HETERO:GPU,CPU, ... (default: %(default)s)"}
DRAFT_LENGTH = ("-k", "--num-assistant-tokens")  # names the variant for our engine, with auto; and for GenAI
PROPERTY = {"type": key_value, "action": "append", "default": [], "metavar": "KEY=VALUE"}
ARGUMENTS = {
    "main": {"help": "folder of the main model (OpenVINO IR)"},
    "draft": {"help": "folder of the draft model (OpenVINO IR), smaller and with the same tokenizer"},
    "prompt": {"help": "prompt text; - reads it from standard input (one trailing newline is removed)"},
    "--device": DEVICE,
    "--draft-device": DEVICE,
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
        "type": whole_number(0, 2**32 - 1),
        "default": random.getrandbits(32),
        "metavar": "N",
        "help": "random seed; the same seed reproduces the text on the same machine (default: random, printed)",
    },
    "--max-ngram-size": {
        "type": whole_number(1, MAX_DRAFT_LENGTH),
        "default": 3,
        "metavar": "N",
        "help": "longest n-gram to look up in the text so far (default: %(default)s)",
    },
    "--max-new-tokens": {
        "type": whole_number(1, MAX_NEW_TOKENS),
        "default": 100,
        "metavar": "N",
        "help": "stop after N new tokens (default: %(default)s)",
    },
    "--property": {**PROPERTY, "help": "OpenVINO property, like INFERENCE_PRECISION_HINT=f32 (repeatable)"},
    "--draft-property": {**PROPERTY, "help": "OpenVINO property of the draft model (default: the main model's)"},
    "--scheduler": {**PROPERTY, "help": "setting of GenAI's SchedulerConfig, like cache_size=1 (repeatable)"},
    "--recommended": {
        "action": "store_true",
        "help": f"use the settings saved by scripts/tune.py ({RECOMMENDED} next to the main model's folder)",
    },
    "--debug": {"action": "store_true", "help": "show stack traces of errors"},
}


# ---- recommended settings -------------------------------------------------------------------------------------------


def take_recommendation(parser, args, engine):
    """Parse again with tune.py's settings for `engine` as defaults; `args.recommended` describes their origin."""
    file, tune = Path(args.main).resolve().parent / RECOMMENDED, "`python scripts/tune.py MAIN DRAFT`"
    folders = {role: Path(vars(args)[role]) for role in ("main", "draft") if role in args}
    for role, folder in folders.items():
        check_model(role, folder)
    if not file.exists():
        fail(f"{file} does not exist: create it with {tune}.")
    try:
        found = recommendation.upgraded(json.loads(file.read_text(encoding="utf-8")))
        settings, best, measured_on = found["settings"], found["best"], found["measured_on"]
        others = [folder for role, folder in folders.items() if fingerprint(folder) != found[role]["fingerprint"]]
        reason = (
            found["reason"] if best == "alone" else "for this pair, this engine gains too little or was not measured"
        )
    except (OSError, ValueError, KeyError, TypeError):
        fail(f"{file} is not a valid recommendation: create it again with {tune}.", status=1)
    if others:
        fail(f"{file} was measured with different weights than those in {others[0]}: tune again with {tune}.")
    if engine not in settings:
        fail(f"{file} recommends samples/{SAMPLE_OF[best]} --recommended instead: {reason}")
    note_changes(measured_on)

    settings = settings[engine]
    own = {"device": settings["device"], "property": list(settings["properties"].items())}
    if "scheduler" in args:
        own["scheduler"] = list(settings.get("scheduler", {}).items())
    if "draft" in args:
        own["draft_device"] = settings["draft_device"]
        own["num_assistant_tokens"] = settings["assistant_confidence_threshold"] or settings["num_assistant_tokens"]
        if settings["draft_properties"] != settings["properties"]:  # if equal, the draft inherits the main model's
            own["draft_property"] = list(settings["draft_properties"].items())
    parser.set_defaults(**own)
    args = parser.parse_args()
    overridden = [name for name, value in own.items() if vars(args)[name] != value]
    args.recommended = f"by {file}"
    if overridden:
        args.recommended += f", except --{', --'.join(name.replace('_', '-') for name in overridden)}"
    return args


def fingerprint(folder):
    """Identify a model's graph and weights, as speculative/pair/recommendation.py does."""
    digest = hashlib.sha256((folder / "openvino_model.xml").read_bytes())
    with (folder / "openvino_model.bin").open("rb") as weights:
        size = weights.seek(0, os.SEEK_END)
        digest.update(str(size).encode())
        for i in range(64):
            weights.seek(size * i // 64)
            digest.update(weights.read(4096))
    return digest.hexdigest()[:32]


def note_changes(measured_on):
    """Print what changed since the recommendation was measured: openvino_genai's version, a device's full name."""
    core = openvino.Core()
    now = {name: core.get_property(name, "FULL_DEVICE_NAME") for name in core.available_devices}
    now["openvino_genai"] = openvino_genai.__version__
    for name, before in measured_on.items():
        if name in now and before != now[name]:
            say(f"note: the recommendation was measured with {name} {before}, not {now[name]}: tune again.")


# ---- input checks ---------------------------------------------------------------------------------------------------


def check_model(role, folder):
    """Reject a folder that the engine cannot load, with the reason."""
    if not folder.is_dir():
        fail(f"{folder} is not a folder: give the {role} model's folder of OpenVINO IR.")
    if not (folder / "openvino_model.xml").exists():
        if any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin")):
            command = "python convert/export_pair.py MAIN DRAFT OUT_DIR"
            fail(f"{folder} is a Hugging Face checkpoint, not OpenVINO IR: convert the pair first with `{command}`.")
        fail(f"{folder} has no openvino_model.xml: give the {role} model's folder of OpenVINO IR.")
    for file in folder.glob("*config.json"):
        try:
            json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            fail(f"{file} is corrupt ({error}): copy or convert the model again.", status=1)
    for part in ("model", "tokenizer", "detokenizer"):
        xml, weights = folder / f"openvino_{part}.xml", folder / f"openvino_{part}.bin"
        if not xml.exists():
            if (role, part) == ("draft", "detokenizer"):  # not needed for a draft, and some are published without
                continue
            command = f"convert_tokenizer HUB_ID_OR_CHECKPOINT --with-detokenizer -o {folder}"
            fail(f"{folder} has no openvino_{part}.xml: create it with `{command}`.")
        try:
            needed = max((offset + size for offset, size in constants(xml)), default=0)
        except ElementTree.ParseError as error:
            fail(f"{xml} is corrupt ({error}): copy or convert the model again.", status=1)
        found = weights.stat().st_size if weights.exists() else 0
        if found < needed:
            fail(f"{weights} is truncated ({found} of {needed} bytes): copy or convert the model again.", status=1)


def constants(xml):
    """Return {(offset, size): element type} of the constants in an IR's .bin, in bytes, from its .xml."""
    nodes = ElementTree.iterparse(xml)
    found = [node.attrib for _, node in nodes if node.tag == "data" and "offset" in node.attrib]
    if nodes.root.tag != "net":
        raise ElementTree.ParseError(f"<{nodes.root.tag}> is not <net>")
    return {(int(node["offset"]), int(node["size"])): node["element_type"] for node in found}


def check_device(device, properties):
    """Reject a device that OpenVINO does not find. AUTO:GPU,-CPU names two devices; GPU.1 is one of the GPUs."""
    here = openvino.Core().available_devices
    kinds = {name.partition(".")[0] for name in here} | {"AUTO", "HETERO", "MULTI", "BATCH"}
    if "NPUW_DEVICES" in properties:  # the NPU code path on another device
        kinds.add("NPU")
    for name in (device.partition(":")[2] or device).split(","):
        if not name.startswith("-") and name.partition(".")[0].partition("(")[0] not in kinds:
            fail(f"device {name!r} not found, only {', '.join(here)}: install its driver or choose another device.")


def check_pair(main, draft):
    """Reject a draft with a different vocabulary; the engine itself compares only the token count and special ids."""
    first, second = openvino_genai.Tokenizer(main), openvino_genai.Tokenizer(draft)
    advice = "use a draft with the same tokenizer."
    text = "def f(x):\n    return x ** 2  # naïve Σ 你好 🙂 1234\n"
    if (draft / "openvino_detokenizer.xml").exists():
        differ = sorted(first.get_vocab().items() ^ second.get_vocab().items(), key=lambda entry: entry[1])
        if differ:
            shown = ", ".join(f"{token.decode(errors='replace')!r} = {number}" for token, number in differ[:4])
            fail(f"the tokenizers of {main} and {draft} differ ({shown}, ...): {advice}")
    else:  # only a detokenizer lists the tokens: compare encodings
        text += "\n".join(token.decode(errors="ignore") for token in first.get_vocab())
    ours, theirs = (tokenizer.encode(text).input_ids.data[0].tolist() for tokenizer in (first, second))
    if ours != theirs:
        at = next((i for i, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other), 0)
        shown = f"{first.decode(ours[at : at + 1])!r} = {ours[at]} or {theirs[at]}"
        fail(f"the tokenizers of {main} and {draft} encode a text differently ({shown}, ...): {advice}")
    if (draft / "openvino_model.bin").stat().st_size > (main / "openvino_model.bin").stat().st_size:
        say(f"warning: the draft {draft} is larger than the main model {main}: are they swapped?")


def read_prompt(prompt):
    if prompt == "-":
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


def fit_in_context(args):
    """Reject a prompt that fills the context; lower max_new_tokens, with a note, if the context leaves less room."""
    context = context_length(read_config(args.main)) or MAX_NEW_TOKENS
    tokenizer = openvino_genai.Tokenizer(args.main)
    text = args.prompt
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
    room = context - tokenizer.encode(text).input_ids.shape[1]
    if room < 1:
        fail(f"the prompt is {1 - room} tokens too long for the context of {args.main}: shorten it.")
    if room < args.max_new_tokens:
        say(f"note: the context of {args.main} has room for {room} new tokens, not {args.max_new_tokens}.")
        args.max_new_tokens = room


class Streamer(openvino_genai.StreamerBase):
    """Print the text as it is generated and record data for the summary; timing starts at construction.

    The engine calls `write` from its own thread with the tokens of one main-model forward pass: accepted draft tokens,
    then one token of the main model. `gained` holds their number per forward pass.
    """

    def __init__(self, folder, tokenizer):
        super().__init__()
        self.tokenizer = tokenizer
        self.stop_tokens = stop_tokens(folder, tokenizer)
        self.started = time.perf_counter()
        self.times, self.gained, self.text = [], [], ""
        self.at_end = False  # the last token ended the text
        self.error = None  # an error of stdout; an exception would be lost in the engine's thread
        self._ids, self._begin, self._shown = [], 0, 0
        ctrl_c.pressed.clear()

    def write(self, tokens):
        ctrl_c.streaming = True
        self.times.append(time.perf_counter())
        tokens = tokens if isinstance(tokens, list) else [tokens]
        # With an NPU, the engine checks only the last of these tokens for a stop token and runs past others.
        end = next((i for i, token in enumerate(tokens) if token in self.stop_tokens), None)
        self.at_end = end is not None
        tokens = tokens if end is None else tokens[: end + 1]
        self.gained.append(len(tokens))
        self.guard(self.show, tokens)
        if self.error or ctrl_c.pressed.is_set():
            return openvino_genai.StreamingStatus.CANCEL
        return openvino_genai.StreamingStatus.RUNNING if end is None else openvino_genai.StreamingStatus.STOP

    def end(self):
        self.guard(self.print, self.text_of([], last=True))
        ctrl_c.streaming = False

    def show(self, tokens):
        self.print(self.text_of(tokens))

    def text_of(self, tokens, last=False):
        """Return the text added by `tokens`. The bytes of an incomplete character are held back until it is
        complete."""
        self._ids += tokens
        before = self.tokenizer.decode(self._ids[self._begin : self._shown])
        both = self.tokenizer.decode(self._ids[self._begin :])
        if both.endswith("\ufffd") and not last:
            return ""
        self._begin, self._shown = self._shown, len(self._ids)
        self.text += both[len(before) :]
        return both[len(before) :]

    def print(self, text):
        print(text, end="", flush=True)

    def guard(self, action, argument):
        try:
            action(argument)
        except OSError as error:
            self.error = error

    def check(self):
        """Raise the exception that stopped generation early: an error of stdout, or Ctrl-C."""
        if self.error:
            raise self.error
        if ctrl_c.pressed.is_set():
            raise KeyboardInterrupt


def stop_tokens(folder, tokenizer):
    """Return the stop token ids, determined as the engine does."""
    file = Path(folder, "generation_config.json")
    ids = openvino_genai.GenerationConfig(file).stop_token_ids if file.exists() else set()
    return ids or {tokenizer.get_eos_token_id()}


# ---- summary --------------------------------------------------------------------------------------------------------


def print_summary(args, config, streamer, result):
    """Print the metrics and settings of one generation, by GenAI or our engine, to stderr."""
    streamer.check()
    rows = figures(args, config, streamer, result)
    if "temperature" in args:
        rows["draft length"] = result.draft_length
        rows["sampling"] = sampling(args)
    if getattr(result, "kv_cache", ""):  # our engine
        rows["KV cache"] = result.kv_cache
    if getattr(args, "recommended", False):
        rows["settings"] = f"recommended {args.recommended}"
    rows["main"] = f"{args.main} on {args.device}, {precision(args.main, args.device, args.property)}"
    if "draft" in args:
        rows["draft"] = f"{args.draft} on {args.draft_device}, "
        rows["draft"] += precision(args.draft, args.draft_device, args.draft_property)
    say("\n\n" + "\n".join(f"{name:20} {value}" for name, value in rows.items()))


def figures(args, config, streamer, result):
    """Return {name: value with unit}. The prompt's forward pass yields the first token; the others are decoding."""
    first, last = streamer.times[0], streamer.times[-1]
    tokens, inferences = sum(streamer.gained) - 1, len(streamer.gained) - 1
    rows = {"new tokens": tokens + 1, "time to first token": f"{(first - streamer.started) * 1000:.0f} ms"}
    if tokens:
        rows["throughput"] = f"{tokens / (last - first):.1f} tokens/s (decode only)"
        rows["forward passes"] = f"{inferences} of the main model after the prompt"
        rows["block efficiency"] = f"{tokens / inferences:.2f} tokens per forward pass"
    if hasattr(result, "from_draft"):  # our engine
        proposed, accepted = sum(result.proposed), sum(result.from_draft)
        if result.finish_reason == "length" and tokens + 1 < config.max_new_tokens:
            rows["new tokens"] = f"{tokens + 1} (KV cache full)"
    else:
        proposed, accepted = draft_tokens(args, config, streamer, result)
    if proposed:
        rows["acceptance rate"] = f"{accepted / proposed:.2f} ({accepted} of {proposed} draft tokens)"
    return rows


def draft_tokens(args, config, streamer, result):
    """Return the numbers of proposed and accepted draft tokens.

    GenAI does not count the last iteration of a text, except with an NPU. If the text ended at its maximum length, the
    iteration is added: its draft length was K or what the remaining tokens allowed. If it ended at a stop token, the
    draft stopped there too, GenAI does not report its length, and the last iteration stays excluded.
    """
    drafting, gained = result.extended_perf_metrics, streamer.gained
    if not drafting:  # no draft model
        return 0, 0
    proposed, accepted = drafting.get_num_draft_tokens(), sum(gained[1:]) - len(gained[1:])
    if "NPU" in (args.device, args.draft_device) or len(gained) < 2:
        return proposed, accepted
    if streamer.at_end:
        return proposed, accepted - (gained[-1] - 1)
    wanted = config.max_new_tokens - sum(gained[:-1])
    return proposed + min(config.num_assistant_tokens, wanted - 1), accepted


def sampling(args):
    """Return a description of the sampling settings."""
    if args.temperature <= 1e-6:
        return f"greedy (temperature {args.temperature:g})"
    top_k = "all" if args.top_k == ALL_TOKENS else args.top_k
    return f"temperature {args.temperature:g}, top-k {top_k}, top-p {args.top_p:g}, seed {args.seed}"


def precision(folder, device, properties):
    """Return the weight format, read from the IR, and the inference precision reported by the device."""
    sizes = Counter()
    for (_, size), element_type in constants(Path(folder, "openvino_model.xml")).items():
        sizes[WEIGHT_FORMATS.get(element_type, element_type)] += size
    weights = "+".join(name for name, size in sizes.most_common() if size > 0.1 * sizes.total())
    core = openvino.Core()
    try:
        core.set_property(device, {name: value for name, value in properties.items() if name != "scheduler_config"})
        hint = core.get_property(device, "INFERENCE_PRECISION_HINT").to_string()
    except RuntimeError:  # AUTO, HETERO and a simulated NPU do not report it
        hint = "the device's default"
    return f"{weights} weights, inference in {hint.replace('dynamic', 'f32')}"  # dynamic: the model's own types
