"""Console of the samples and the server: exit status, one-sentence errors, streaming with Ctrl-C, notes, summary."""

from speculative.cli.ctrl_c import ctrl_c

import errno
import io
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import openvino
import openvino_genai
from openvino_genai import DecodedResults, GenerationConfig

from speculative.cli.processes import discard_closed_output, discard_unwritable_output
from speculative.error_text import engine_lines, is_out_of_memory
from speculative.pair.weights import read as read_weights
from speculative.sampling.params import stop_ids_of
from speculative.sequence.detokenizer import IncrementalDetokenizer, cleans_up
from speculative.sequence.metrics import block_efficiency
from speculative.sequence.result import GenerationResult

ALL_TOKENS = GenerationConfig().top_k


def run(main: Callable[[], object]) -> None:
    """Run a sample and exit: 0 success, 1 failure, 2 bad usage, 130 Ctrl-C. Stack traces only with --debug."""
    discard_closed_output()
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")
    ctrl_c.listen()
    try:
        main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        discard_unwritable_output()
        if isinstance(error, BrokenPipeError) or getattr(error, "errno", None) == errno.EINVAL:  # EINVAL: on Windows
            sys.exit(0)  # the reader is gone: exit quietly
        if "--debug" in sys.argv:
            raise
        fail(sentence(error), status=1)


def say(text: str) -> None:
    """Print one line to stderr; stdout is reserved for the model's text."""
    print(text, file=sys.stderr, flush=True)


def fail(sentence: str, status: int = 2) -> NoReturn:
    """Exit with a one-sentence error: status 2 for bad usage, 1 for a failure."""
    say(f"error: {sentence}")
    sys.exit(status)


def sentence(error: BaseException) -> str:
    """Return an engine error on one line, without source locations."""
    if is_out_of_memory(error):
        return "not enough memory for the models and their KV caches: close programs or use a smaller format (int4)."
    text = getattr(error, "strerror", None) or " ".join(engine_lines(error))
    return f"{text} (use --debug for a stack trace)"


class Streamer(openvino_genai.StreamerBase):
    """Print the text as it is generated and record data for the summary; timing starts at construction.

    The engine calls `write` from its own thread with the tokens of one main-model forward pass: accepted draft tokens,
    then one token of the main model. `gained` holds their number per forward pass.
    """

    def __init__(self, folder: str | Path, tokenizer: openvino_genai.Tokenizer):
        super().__init__()
        self.detokenizer = IncrementalDetokenizer(tokenizer.decode, cleans_up=cleans_up(tokenizer))
        self.stop_tokens = stop_ids_of(folder, tokenizer)
        self.started = time.perf_counter()
        self.times: list[float] = []
        self.gained: list[int] = []
        self.at_end = False  # the last token ended the text
        self.error: OSError | None = None  # an error of stdout; an exception would be lost in the engine's thread
        ctrl_c.pressed.clear()

    def write(self, tokens: int | list[int]) -> openvino_genai.StreamingStatus:
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

    def end(self) -> None:
        self.guard(self.print, self.detokenizer.end())
        ctrl_c.streaming = False

    def show(self, tokens: list[int]) -> None:
        self.print(self.text_of(tokens))

    def text_of(self, tokens: list[int]) -> str:
        """Return the text added by `tokens`, in whole characters."""
        return self.detokenizer.push(tokens)[0]

    @property
    def text(self) -> str:
        return self.detokenizer.text

    def print(self, text: str) -> None:
        print(text, end="", flush=True)

    def guard(self, action: Callable, argument: object) -> None:
        try:
            action(argument)
        except OSError as error:
            self.error = error

    def check(self) -> None:
        """Raise the exception that stopped generation early: an error of stdout, or Ctrl-C."""
        if self.error:
            raise self.error
        if ctrl_c.pressed.is_set():
            raise KeyboardInterrupt


# ---- summary ---------------------------------------------------------------------------------------------------------


def print_summary(
    args: Namespace, config: GenerationConfig, streamer: Streamer, result: DecodedResults | GenerationResult
) -> None:
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
        formats = precision(args.draft, args.draft_device, args.draft_property)
        rows["draft"] = f"{args.draft} on {args.draft_device}, {formats}"
    say("\n\n" + "\n".join(f"{name:20} {value}" for name, value in rows.items()))


def figures(
    args: Namespace, config: GenerationConfig, streamer: Streamer, result: DecodedResults | GenerationResult
) -> dict[str, object]:
    """Return {name: value with unit}. The prompt's forward pass yields the first token; the others are decoding."""
    first, last = streamer.times[0], streamer.times[-1]
    tokens, inferences = sum(streamer.gained) - 1, len(streamer.gained) - 1
    rows: dict[str, object] = {"new tokens": tokens + 1}
    rows["time to first token"] = f"{(first - streamer.started) * 1000:.0f} ms"
    if tokens:
        rows["throughput"] = f"{tokens / (last - first):.1f} tokens/s (decode only)"
        rows["forward passes"] = f"{inferences} of the main model after the prompt"
        rows["block efficiency"] = f"{block_efficiency(streamer.gained[1:]):.2f} tokens per forward pass"
    if hasattr(result, "from_draft"):  # our engine
        proposed, accepted = sum(result.proposed), sum(result.accepted)
        if result.finish_reason == "length" and tokens + 1 < config.max_new_tokens:
            rows["new tokens"] = f"{tokens + 1} (KV cache full)"
    else:
        proposed, accepted = draft_tokens(args, config, streamer, result)
    if proposed:
        rows["acceptance rate"] = f"{accepted / proposed:.2f} ({accepted} of {proposed} draft tokens)"
    return rows


def draft_tokens(
    args: Namespace, config: GenerationConfig, streamer: Streamer, result: DecodedResults
) -> tuple[int, int]:
    """Return the numbers of proposed and accepted draft tokens.

    GenAI does not count the last iteration of a text, except with an NPU. If the text ended at its maximum length, the
    iteration is added: its draft length was K or what the remaining tokens allowed. If it ended at a stop token, the
    draft stopped there too, GenAI does not report its length, and the last iteration stays excluded; so it does with
    trees.
    """
    drafting, gained = result.extended_perf_metrics, streamer.gained
    if not drafting:  # no draft model
        return 0, 0
    proposed, accepted = drafting.get_num_draft_tokens(), sum(gained[1:]) - len(gained[1:])
    if "NPU" in (args.device, args.draft_device) or len(gained) < 2:
        return proposed, accepted
    if streamer.at_end or getattr(args, "tree_depth", None):
        return proposed, accepted - (gained[-1] - 1)
    wanted = config.max_new_tokens - sum(gained[:-1])
    return proposed + min(config.num_assistant_tokens, wanted - 1), accepted


def sampling(args: Namespace) -> str:
    """Return a description of the sampling settings."""
    if args.temperature <= 1e-6:
        return f"greedy (temperature {args.temperature:g})"
    top_k = "all" if args.top_k == ALL_TOKENS else args.top_k
    return f"temperature {args.temperature:g}, top-k {top_k}, top-p {args.top_p:g}, seed {args.seed}"


def precision(folder: str, device: str, properties: dict) -> str:
    """Return the weight format, read from the IR, and the inference precision reported by the device."""
    core = openvino.Core()
    weights = "+".join(read_weights(core.read_model(Path(folder, "openvino_model.xml"))).formats)
    try:
        core.set_property(device, {name: value for name, value in properties.items() if name != "scheduler_config"})
        hint = core.get_property(device, "INFERENCE_PRECISION_HINT").to_string()
    except RuntimeError:  # AUTO, HETERO and a simulated NPU do not report it
        hint = "the device's default"
    return f"{weights} weights, inference in {hint.replace('dynamic', 'f32')}"  # dynamic: the model's own types
