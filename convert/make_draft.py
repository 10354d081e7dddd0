"""Make an EAGLE-3 draft for a main model, from nothing but that model.

    python convert/make_draft.py MAIN OUT
    python convert/make_draft.py models/embedded/main drafts/embedded --minutes 20
    python convert/make_draft.py models/qwen3/main drafts/qwen3 --minutes 240 --device cuda --prompts prompts.jsonl

MAIN is a folder with OpenVINO IR, as export_pair.py makes it. Stages:

1. texts      the main model writes prompts (its chat template up to the user's turn) and answers, or answers to
              --prompts; a part is held out
2. states     what the main model computes for these texts, from the very IR that will be served: hidden states of
              three layers, and the probabilities of next tokens
3. training   an EAGLE-3 head of the published architecture, in torch, by training-time test
4. verdict    acceptance on held-out prompts and the speed beside prompt lookup and the main model alone

OUT gets IR, checkpoint/ (the published format), README.md and draft.json. OUT/work keeps texts, states and the training
state; it may be removed afterwards. Run an interrupted command again to resume it; a larger --minutes trains on.
"""

from speculative.cli.ctrl_c import raise_keyboard_interrupt

import argparse
import errno
import importlib.util
import math
import shlex
import signal
import sys
import traceback
from pathlib import Path

from speculative.cli.processes import utf8_output
from speculative.convert.draft_training import stages
from speculative.convert.errors import ConvertError
from speculative.error_text import engine_lines


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status: 0 done, 1 the job failed, 2 bad usage, 130 interrupted."""
    utf8_output()
    arguments = sys.argv[1:] if arguments is None else arguments
    parsed = build_parser().parse_args(arguments)
    try:
        stages.make(options(parsed, arguments))
        return 0
    except KeyboardInterrupt:
        print("\ninterrupted; run the same command again to resume", file=sys.stderr)
        return 130
    except Exception as error:
        if parsed.debug:
            traceback.print_exc()
        print(f"make_draft: {sentence(error, parsed.out)}", file=sys.stderr)
        return error.status if isinstance(error, ConvertError) else 1


def sentence(error: Exception, out: Path) -> str:
    """What went wrong, in one sentence."""
    if isinstance(error, ConvertError):
        return str(error)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"the disk of {out} is full; make room and run the same command again to resume"
    return f"{type(error).__name__}: {engine_lines(error)[0]}; --debug shows where"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make_draft.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("main", metavar="MAIN", help="folder of the main model, OpenVINO IR")
    add("out", metavar="OUT", type=Path, help="folder of the draft, new or of an earlier run")
    add("--kind", choices=["eagle3"], default="eagle3", help="of draft (eagle3)")
    add("--minutes", type=float, default=20, help="time for all stages together (20)")
    add("--prompts", type=Path, metavar="FILE", help="JSONL file of user turns, instead of the model's own")
    add("--tokens", type=int, default=500_000, help="most tokens of text: bounds the disk space (500000)")
    add("--length", type=int, default=256, help="most tokens of a text, prompt included (256)")
    add("--draft-vocabulary", type=int, metavar="N", help="tokens that the draft knows (those of 99.5 %% of the texts)")
    add("--layers", type=int, nargs=3, metavar="N", help="layers whose hidden states the draft reads (1, N/2-1, N-4)")
    add("--device", default="cpu", help="torch's device for the training: cpu, cuda or xpu (cpu)")
    add("--threads", type=int, help="CPU threads (all)")
    add("--debug", action="store_true", help="show stack traces")
    return parser


def options(parsed: argparse.Namespace, arguments: list[str]) -> stages.Options:
    """The options, checked. Raises ConvertError."""
    if not (math.isfinite(parsed.minutes) and parsed.minutes > 0):
        raise ConvertError(f"--minutes is {parsed.minutes}, but must be greater than 0", 2)
    for name, least in (("tokens", 1000), ("length", 32), ("draft_vocabulary", 1), ("threads", 1)):
        value = getattr(parsed, name)
        if value is not None and value < least:
            raise ConvertError(f"--{name.replace('_', '-')} is {value}, but must be at least {least}", 2)
    require_torch(parsed.device)
    return stages.Options(
        main=parsed.main,
        out=parsed.out,
        command=shlex.join(["python", "convert/make_draft.py", *arguments]),
        minutes=parsed.minutes,
        tokens=parsed.tokens,
        longest=parsed.length,
        prompts=parsed.prompts,
        layers=parsed.layers,
        draft_vocabulary=parsed.draft_vocabulary,
        device=parsed.device,
        threads=parsed.threads,
    )


def require_torch(device: str) -> None:
    """Raise ConvertError unless torch and transformers are installed and torch has the device."""
    for package in ("torch", "transformers", "safetensors"):
        if importlib.util.find_spec(package) is None:
            raise ConvertError(f"{package} is not installed; install it with: pip install -r requirements-export.txt")
    if device != "cpu":
        import torch

        try:
            torch.zeros(1, device=device)
        except (RuntimeError, AssertionError) as error:
            raise ConvertError(f"torch cannot use --device {device} ({engine_lines(error)[0]}); use cpu", 2) from error


if __name__ == "__main__":
    raise_keyboard_interrupt()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is running is saved
    sys.exit(main())
