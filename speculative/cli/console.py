"""What every sample needs around its idea: arguments, checked input, streaming, Ctrl-C, summary, one-sentence errors.

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

MAX_DRAFT_LENGTH = 64  # far above any K that pays; the engine would draft up to max_new_tokens
MAX_DRAFT_LENGTH_NPU = 7  # for a main model on an NPU, which takes 16 tokens at once: the engine lets K grow to twice K
MAX_NEW_TOKENS = 1_000_000
ALL_TOKENS = openvino_genai.GenerationConfig().top_k
RECOMMENDED = "recommended.json"  # written by scripts/tune.py, described in speculative/pair/recommendation.py
MEMORY_SIGNS = ("bad_alloc", "out of memory", "out_of_", "cannot allocate memory", "resource temporarily unavailable")
SAMPLE_OF = {
    "alone": "greedy_causal_lm.py",
    "GenAI": "speculative_decoding_lm.py",
    "ours": "speculative_sampling_lm.py",
}
WEIGHT_FORMATS = {"u4": "int4", "i4": "int4", "u8": "int8", "i8": "int8", "f16": "fp16", "f32": "fp32"}


def run(main):
    """Run a sample and end the process: 0 done, 1 failed, 2 bad usage, 130 Ctrl-C. A stack trace only with --debug."""
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
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads any more: end quietly
            sys.exit(0)
        if "--debug" in sys.argv:
            raise
        fail(sentence(error), status=1)


def say(text):
    """Print one line on stderr: stdout is the model's text alone."""
    print(text, file=sys.stderr, flush=True)


def fail(sentence, status=2):
    """End the process with one sentence: status 2 for bad usage, 1 for a job that failed."""
    say(f"error: {sentence}")
    sys.exit(status)


def sentence(error):
    """Return an error of the engine on one line, without its source locations."""
    text = getattr(error, "strerror", None) or str(error)
    if isinstance(error, MemoryError) or any(sign in text.lower() for sign in MEMORY_SIGNS):
        return (
            "not enough memory for the models and their caches: close programs, or convert to a smaller format (int4)."
        )
    lines = (line.strip() for line in text.splitlines())
    kept = [line for line in lines if line and not line.startswith(("Exception from", "Check '"))]
    return " ".join(kept or [text or type(error).__name__]) + " (--debug shows where)"


# ---- arguments ------------------------------------------------------------------------------------------------------


def parse_arguments(description, *names):
    """Parse the named arguments (keys of ARGUMENTS; KEY=VALUE gives one another default), check all that can be checked
    before a model is compiled, say what is loaded. `args.property` and `args.draft_property` come back as dictionaries.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: fail(f"{message} (--help shows the usage)")
    for name in (*names, "--debug"):
        name, _, default = name.partition("=")
        flags = DRAFT_LENGTH if name in DRAFT_LENGTH else (name,)
        argument = parser.add_argument(*flags, **ARGUMENTS[name])
        argument.default = default or argument.default
    args = parser.parse_args()
    if getattr(args, "recommended", False):
        args = take_recommendation(
            parser, args, "alone" if "draft" not in names else "ours" if "-k" in names else "GenAI"
        )

    if "-k" in names:
        set_draft_length(args, args.num_assistant_tokens)
    args.property = dict(args.property)
    models = {"main": (args.main, args.device, args.property)}
    if "draft" in names:
        if args.draft_device == args.device or "NPU" not in (args.draft_device, args.device):
            args.draft_property = args.draft_property or args.property  # the engine's own rule
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
            fail(f"-k {k} is too long for a main model on NPU: take 1 to {MAX_DRAFT_LENGTH_NPU}.")
        check_pair(Path(args.main), Path(args.draft))
    if "prompt" in names:
        args.prompt = read_prompt(args.prompt)
        fit_in_context(args)
    say("Loading " + " and ".join(f"{folder} on {device}" for folder, device, _ in models.values()) + " ...")
    return args


def whole_number(low, high):
    """Return an argparse type that takes whole numbers from `low` to `high`, both included."""

    def parse(text):
        if text.isdecimal() and low <= int(text) <= high:
            return int(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")

    return parse


def draft_length(text):
    """Parse 1 to MAX_DRAFT_LENGTH tokens, or auto, which is 0, or a threshold of the draft's confidence below 1."""
    try:
        if "." in text:
            return decimal(lambda value: 0 < value < 1, "between 0 and 1")(text)
        return 0 if text == "auto" else whole_number(1, MAX_DRAFT_LENGTH)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, nor auto") from None


def set_draft_length(args, value):
    """Split what draft_length() gives into GenAI's two names: a number of tokens, or a threshold; both 0 for auto."""
    is_threshold = isinstance(value, float)
    args.num_assistant_tokens = 0 if is_threshold else value
    args.assistant_confidence_threshold = value if is_threshold else 0.0


def decimal(valid, range_):
    """Return an argparse type that takes the numbers of which `valid` is true; `range_` says which these are."""

    def parse(text):
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if valid(value):
            return value
        raise argparse.ArgumentTypeError(f"{text!r} is not a number {range_}")

    return parse


temperature = decimal(lambda value: 0 <= value < math.inf, "from 0 on")


def scheduler_config(settings):
    """Return GenAI's SchedulerConfig with these [(name, value)]."""
    config = openvino_genai.SchedulerConfig()
    for name, value in settings:
        if not hasattr(config, name):
            fail(f"--scheduler {name}={value}: GenAI's SchedulerConfig has no {name}.")
        try:
            setattr(config, name, {"True": True, "False": False}.get(value, value))
        except TypeError:
            fail(f"--scheduler {name}={value}: GenAI's SchedulerConfig takes no such {name}.")
    return config


DEVICE = {"default": "CPU", "help": "CPU, GPU, GPU.1, NPU, AUTO:GPU,CPU, HETERO:GPU,CPU, ... (default: %(default)s)"}
DRAFT_LENGTH = ("-k", "--num-assistant-tokens")  # of our own engine, which knows auto; of GenAI's
PROPERTY = {"type": key_value, "action": "append", "default": [], "metavar": "KEY=VALUE"}
ARGUMENTS = {
    "main": {"help": "folder of the main model (OpenVINO IR)"},
    "draft": {"help": "folder of the draft model (OpenVINO IR): smaller, with the same tokenizer"},
    "prompt": {"help": "the text to go on from; - reads it from standard input (less one newline at its end)"},
    "--device": DEVICE,
    "--draft-device": DEVICE,
    "--num-assistant-tokens": {
        "type": whole_number(1, MAX_DRAFT_LENGTH),
        "default": 5,
        "metavar": "K",
        "help": f"tokens drafted for one inference of the main model, 1 to {MAX_DRAFT_LENGTH} (default: %(default)s)",
    },
    "-k": {
        "type": draft_length,
        "default": "auto",
        "metavar": "K",
        "help": f"tokens drafted for each inference, 1 to {MAX_DRAFT_LENGTH}; auto: as many as pay; 0.4: until the "
        "draft is less sure of one than that (default: auto)",
    },
    "--temperature": {
        "type": temperature,
        "default": "1",
        "metavar": "T",
        "help": "below 1 likely tokens become likelier, above 1 less so; 0 is greedy (default: %(default)s)",
    },
    "--top-k": {
        "type": whole_number(1, MAX_NEW_TOKENS),
        "default": ALL_TOKENS,
        "metavar": "N",
        "help": "draw from the N most probable tokens only (default: all)",
    },
    "--top-p": {
        "type": decimal(lambda value: 1e-9 <= value <= 1, "above 0 and at most 1"),  # less is 0 in float32
        "default": 1.0,
        "metavar": "P",
        "help": "draw from the fewest tokens whose probabilities exceed P (default: all)",
    },
    "--seed": {
        "type": whole_number(0, 2**32 - 1),
        "default": random.getrandbits(32),
        "metavar": "N",
        "help": "the same seed gives the same text again on the same machine (default: a random one, which is shown)",
    },
    "--max-ngram-size": {
        "type": whole_number(1, MAX_DRAFT_LENGTH),
        "default": 3,
        "metavar": "N",
        "help": "longest run of last tokens that is looked up in the text so far (default: %(default)s)",
    },
    "--max-new-tokens": {
        "type": whole_number(1, MAX_NEW_TOKENS),
        "default": 100,
        "metavar": "N",
        "help": "stop after N new tokens (default: %(default)s)",
    },
    "--property": {**PROPERTY, "help": "OpenVINO property, like INFERENCE_PRECISION_HINT=f32; repeat for more"},
    "--draft-property": {**PROPERTY, "help": "the same for the draft (default: the main model's)"},
    "--scheduler": {**PROPERTY, "help": "setting of GenAI's SchedulerConfig, like cache_size=1; repeat for more"},
    "--recommended": {
        "action": "store_true",
        "help": f"start from what scripts/tune.py found ({RECOMMENDED} beside the main model's folder)",
    },
    "--debug": {"action": "store_true", "help": "show the stack trace of an error"},
}


# ---- what was recommended -------------------------------------------------------------------------------------------


def take_recommendation(parser, args, engine):
    """Parse again with the settings that tune.py found best for `engine` as defaults; `args.recommended` says so."""
    file, tune = Path(args.main).resolve().parent / RECOMMENDED, "`python scripts/tune.py MAIN DRAFT`"
    folders = {role: Path(vars(args)[role]) for role in ("main", "draft") if role in args}
    for role, folder in folders.items():
        check_model(role, folder)
    if not file.exists():
        fail(f"there is no {file}: make it with {tune}.")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        settings, best, measured_on = found["settings"], found["best"], found["measured_on"]
        others = [folder for role, folder in folders.items() if fingerprint(folder) != found[role]["fingerprint"]]
        reason = (
            found["reason"] if best == "alone" else "with the pair, this engine gains too little or was not measured"
        )
    except (OSError, ValueError, KeyError, TypeError):
        fail(f"{file} cannot be read as a recommendation: make it anew with {tune}.", status=1)
    if others:
        fail(f"{file} was measured with other weights than those in {others[0]}: tune again with {tune}.")
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
        if settings["draft_properties"] != settings["properties"]:  # where equal, the draft takes the main model's
            own["draft_property"] = list(settings["draft_properties"].items())
    parser.set_defaults(**own)
    args = parser.parse_args()
    overridden = [name for name, value in own.items() if vars(args)[name] != value]
    args.recommended = f"by {file}"
    if overridden:
        args.recommended += f", but for --{', --'.join(name.replace('_', '-') for name in overridden)}"
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
    """Say what differs from when the recommendation was measured: openvino_genai's version, a device's full name."""
    core = openvino.Core()
    now = {name: core.get_property(name, "FULL_DEVICE_NAME") for name in core.available_devices}
    now["openvino_genai"] = openvino_genai.__version__
    for name, before in measured_on.items():
        if name in now and before != now[name]:
            say(f"note: the recommendation was measured with {name} {before}, this is {now[name]}: tune again.")


# ---- checked input --------------------------------------------------------------------------------------------------


def check_model(role, folder):
    """Refuse a folder that the engine cannot load, with the reason."""
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
            if (role, part) == ("draft", "detokenizer"):  # a draft needs none, and some are published without
                continue
            command = f"convert_tokenizer HUB_ID_OR_CHECKPOINT --with-detokenizer -o {folder}"
            fail(f"{folder} has no openvino_{part}.xml: make it with `{command}`.")
        try:
            needed = max((offset + size for offset, size in constants(xml)), default=0)
        except ElementTree.ParseError as error:
            fail(f"{xml} is corrupt ({error}): copy or convert the model again.", status=1)
        found = weights.stat().st_size if weights.exists() else 0
        if found < needed:
            fail(f"{weights} has {found} of {needed} bytes: copy or convert the model again.", status=1)


def constants(xml):
    """Return {(offset, size): element type} of the constants in the .bin beside an IR's .xml, in bytes."""
    nodes = ElementTree.iterparse(xml)
    found = [node.attrib for _, node in nodes if node.tag == "data" and "offset" in node.attrib]
    if nodes.root.tag != "net":
        raise ElementTree.ParseError(f"<{nodes.root.tag}> is not <net>")
    return {(int(node["offset"]), int(node["size"])): node["element_type"] for node in found}


def check_device(device, properties):
    """Refuse a device of which OpenVINO finds none here. AUTO:GPU,-CPU names two, GPU.1 is one of the GPUs."""
    here = openvino.Core().available_devices
    kinds = {name.partition(".")[0] for name in here} | {"AUTO", "HETERO", "MULTI", "BATCH"}
    if "NPUW_DEVICES" in properties:  # the NPU's code path on another device
        kinds.add("NPU")
    for name in (device.partition(":")[2] or device).split(","):
        if not name.startswith("-") and name.partition(".")[0].partition("(")[0] not in kinds:
            fail(f"there is no device {name!r} here, only {', '.join(here)}: install its driver or choose another.")


def check_pair(main, draft):
    """Refuse a draft whose tokens are not the main model's: the engine compares a token count and the special ids."""
    first, second = openvino_genai.Tokenizer(main), openvino_genai.Tokenizer(draft)
    advice = "take a draft with the same tokenizer."
    text = "def f(x):\n    return x ** 2  # naïve Σ 你好 🙂 1234\n"
    if (draft / "openvino_detokenizer.xml").exists():
        differ = sorted(first.get_vocab().items() ^ second.get_vocab().items(), key=lambda entry: entry[1])
        if differ:
            shown = ", ".join(f"{token.decode(errors='replace')!r} = {number}" for token, number in differ[:4])
            fail(f"the tokenizers of {main} and {draft} differ ({shown}, ...): {advice}")
    else:  # which lists the tokens
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
        fail("the prompt is empty: give the text to go on from.")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        fail(
            f"the prompt is not UTF-8 (character {error.start + 1}): set a UTF-8 locale, or give it by standard input."
        )
    return prompt


def fit_in_context(args):
    """Refuse a prompt that fills the context; lower max_new_tokens, and say so, where the context leaves less."""
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
    """Print the text as it comes and keep what the summary needs; time starts when the streamer is made.

    The engine calls `write` from a thread of its own with the tokens of one inference of the main model: accepted draft
    tokens, then one of the main model's own. `gained` holds their number for each inference.
    """

    def __init__(self, folder, tokenizer):
        super().__init__()
        self.tokenizer = tokenizer
        self.stop_tokens = stop_tokens(folder, tokenizer)
        self.started = time.perf_counter()
        self.times, self.gained, self.text = [], [], ""
        self.at_end = False  # the last token ended the text
        self.error = None  # what happened to stdout; an exception would be lost in the engine's thread
        self._ids, self._begin, self._shown = [], 0, 0
        ctrl_c.pressed.clear()

    def write(self, tokens):
        ctrl_c.streaming = True
        self.times.append(time.perf_counter())
        tokens = tokens if isinstance(tokens, list) else [tokens]
        # Where an NPU takes part, the engine looks for an end at the last of these tokens only, and runs past others.
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
        """Return what `tokens` add to the text. The bytes of an unfinished character wait for the next tokens."""
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
        """Raise what stopped the text before its end: an error of stdout, or Ctrl-C."""
        if self.error:
            raise self.error
        if ctrl_c.pressed.is_set():
            raise KeyboardInterrupt


def stop_tokens(folder, tokenizer):
    """Return the ids that end a text, as the engine finds them."""
    file = Path(folder, "generation_config.json")
    ids = openvino_genai.GenerationConfig(file).stop_token_ids if file.exists() else set()
    return ids or {tokenizer.get_eos_token_id()}


# ---- summary --------------------------------------------------------------------------------------------------------


def print_summary(args, config, streamer, result):
    """Print the figures of one generation, by GenAI or by our own engine, and what made it on stderr."""
    streamer.check()
    rows = figures(args, config, streamer, result)
    if "temperature" in args:
        rows["draft length"] = result.draft_length
        rows["sampling"] = sampling(args)
    if getattr(result, "kv_cache", ""):  # our own engine
        rows["KV cache"] = result.kv_cache
    if getattr(args, "recommended", False):
        rows["settings"] = f"recommended {args.recommended}"
    rows["main"] = f"{args.main} on {args.device}, {precision(args.main, args.device, args.property)}"
    if "draft" in args:
        rows["draft"] = f"{args.draft} on {args.draft_device}, "
        rows["draft"] += precision(args.draft, args.draft_device, args.draft_property)
    say("\n\n" + "\n".join(f"{name:20} {value}" for name, value in rows.items()))


def figures(args, config, streamer, result):
    """Return {name: figure with its unit}. The prompt's inference gives the first token; the others are decoding."""
    first, last = streamer.times[0], streamer.times[-1]
    tokens, inferences = sum(streamer.gained) - 1, len(streamer.gained) - 1
    rows = {"new tokens": tokens + 1, "time to first token": f"{(first - streamer.started) * 1000:.0f} ms"}
    if tokens:
        rows["throughput"] = f"{tokens / (last - first):.1f} tokens/s (decode only)"
        rows["main inferences"] = f"{inferences} after the prompt's"
        rows["block efficiency"] = f"{tokens / inferences:.2f} tokens per main inference"
    if hasattr(result, "from_draft"):  # our own engine
        proposed, accepted = sum(result.proposed), sum(result.from_draft)
        if result.finish_reason == "length" and tokens + 1 < config.max_new_tokens:
            rows["new tokens"] = f"{tokens + 1}, as the cache has no room for more"
    else:
        proposed, accepted = draft_tokens(args, config, streamer, result)
    if proposed:
        rows["acceptance rate"] = f"{accepted / proposed:.2f} ({accepted} of {proposed} draft tokens)"
    return rows


def draft_tokens(args, config, streamer, result):
    """Return how many tokens the draft proposed and how many were accepted.

    GenAI leaves out a text's last iteration, except where an NPU takes part. Where the text ended by its length it is
    added: the draft was as long as K and the tokens still wanted allowed. At an end token the draft stops as well, and
    how far it was is not told: there the last iteration stays out.
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
    """Return how the next token is chosen, in words."""
    if args.temperature <= 1e-6:
        return f"none: temperature {args.temperature:g} is greedy"
    top_k = "all" if args.top_k == ALL_TOKENS else args.top_k
    return f"temperature {args.temperature:g}, top-k {top_k}, top-p {args.top_p:g}, seed {args.seed}"


def precision(folder, device, properties):
    """Return the weight format, read from the IR, and the inference precision, as the device tells it."""
    sizes = Counter()
    for (_, size), element_type in constants(Path(folder, "openvino_model.xml")).items():
        sizes[WEIGHT_FORMATS.get(element_type, element_type)] += size
    weights = "+".join(name for name, size in sizes.most_common() if size > 0.1 * sizes.total())
    core = openvino.Core()
    try:
        core.set_property(device, {name: value for name, value in properties.items() if name != "scheduler_config"})
        hint = core.get_property(device, "INFERENCE_PRECISION_HINT").to_string()
    except RuntimeError:  # AUTO, HETERO and a simulated NPU do not tell
        hint = "the device's default"
    return f"{weights} weights, inference in {hint.replace('dynamic', 'f32')}"  # dynamic: the model's own types
