"""Make a draft for a main model, from that model alone.

    python convert/make_draft.py MAIN OUT
    python convert/make_draft.py models/embedded/main drafts/embedded --minutes 20
    python convert/make_draft.py models/qwen3/main drafts/qwen3 --minutes 240 --device cuda --prompts prompts.jsonl
    python convert/make_draft.py models/llama/main drafts/llama --minutes 60 --tokens 20000000 --device cuda --online
    python convert/make_draft.py models/qwen3/main drafts/qwen3 --init-from models/qwen3/draft --prompts prompts.jsonl
    python convert/make_draft.py models/llama/main drafts/llama --kind pruned --minutes 240 --device cuda

MAIN is a folder with OpenVINO IR, as export_pair.py makes it. OUT gets an EAGLE-3 head (--kind eagle3), which drafts
from the main model's hidden states, or the main model without most of its layers (--kind pruned, for Llama,
Qwen2 and Qwen3), an ordinary draft model for every engine and device. Stages:

1. texts      the main model writes prompts (its chat template up to the user's turn) and answers, or answers to
              --prompts; a part is held out
2. states     next-token probabilities of these texts, and for a head the hidden states of three layers, computed with
              the served IR
3. training   in torch: a head of the published architecture, by training-time test; or distillation of the model
              without the layers that change the hidden states least
4. verdict    acceptance on held-out prompts, also by category, and speed compared with suffix decoding, the main
              model alone and other drafts (--compare)

--online runs the main model in torch on --device, too, and computes its hidden states during the training instead of
storing them: for millions of tokens on a GPU. For main models of the Llama, Qwen2 and Qwen3 architectures.

--init-from HEAD trains an existing head further, such as a published one for a fine-tuned or quantized main model, or
for your own prompts. It keeps its vocabulary, unless --draft-vocabulary chooses another one from the new texts.

OUT gets IR, checkpoint/ (the published format, or Hugging Face's), README.md and draft.json. OUT/work keeps texts,
states and the training state; it may be removed afterwards. Run an interrupted command again to resume it; a larger
--minutes continues the training.
"""

from speculative.cli.ctrl_c import raise_on_signals

import argparse
import importlib.util
import math
import shlex
import sys
from pathlib import Path

from speculative.cli.parser import Parser
from speculative.cli.processes import utf8_output
from speculative.convert import program
from speculative.convert.draft_training import stages
from speculative.convert.errors import ConvertError
from speculative.error_text import engine_lines

XPU_INSTALL = "pip install torch --index-url https://download.pytorch.org/whl/xpu"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status: 0 done, 1 the job failed, 2 bad usage, 130 interrupted."""
    utf8_output()
    arguments = sys.argv[1:] if arguments is None else arguments
    parsed = build_parser().parse_args(arguments)
    resume = "run the same command again to resume"
    return program.run(lambda: stages.make(options(parsed, arguments)), parsed.out, parsed.debug, resume)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="make_draft.py", description=__doc__)
    add = parser.add_argument
    add("main", metavar="MAIN", help="folder of the main model, OpenVINO IR")
    add("out", metavar="OUT", type=Path, help="folder of the draft, new or of an earlier run")
    add("--kind", choices=["eagle3", "pruned"], default="eagle3", help="kind of draft (default: eagle3)")
    add("--minutes", type=float, default=20, help="time for all stages together (default: 20)")
    add("--prompts", type=Path, metavar="FILE", help="JSONL file of user turns, with or without category")
    add("--tokens", type=int, default=500_000, help="maximum tokens of all texts, for disk space (default: 500000)")
    add("--length", type=int, default=256, help="maximum tokens of a text, including the prompt (default: 256)")
    add(
        "--draft-vocabulary",
        type=int,
        metavar="N",
        help="tokens that the head can propose (default: enough for 99.5 %% of the training texts, at most 8192)",
    )
    add(
        "--layers",
        type=int,
        nargs=3,
        metavar="N",
        help="the main model's layers, from 0, whose outputs the head reads (default: 1, N/2-1, N-4; below 10 layers "
        "0, N/2, N-1)",
    )
    add("--init-from", type=Path, metavar="HEAD", help="EAGLE-3 head to train further (OpenVINO IR folder)")
    add("--keep-layers", type=int, metavar="N", help="layers that a pruned draft keeps (default: a quarter)")
    add("--compare", action="append", default=[], metavar="DRAFT", help="also measure this draft; may be repeated")
    add("--device", default="cpu", help="torch's device for the training: cpu, cuda or xpu (default: cpu)")
    add("--online", action="store_true", help="run the main model on --device, too (Llama, Qwen2, Qwen3; eagle3)")
    add("--threads", type=int, help="CPU threads (default: all)")
    add("--debug", action="store_true", help="show stack traces")
    return parser


def options(parsed: argparse.Namespace, arguments: list[str]) -> stages.Options:
    """The options, checked. Raises ConvertError."""
    if not (math.isfinite(parsed.minutes) and parsed.minutes > 0):
        raise ConvertError(f"--minutes is {parsed.minutes}, but must be greater than 0", 2)
    least_of = {"tokens": 1000, "length": 32, "draft_vocabulary": 1, "keep_layers": 1, "threads": 1}
    for name, least in least_of.items():
        value = getattr(parsed, name)
        if value is not None and value < least:
            raise ConvertError(f"--{name.replace('_', '-')} is {value}, but must be at least {least}", 2)
    options_of = {"eagle3": ("layers", "draft_vocabulary", "init_from", "online"), "pruned": ("keep_layers",)}
    for kind, names in options_of.items():
        for name in names:
            if getattr(parsed, name) and parsed.kind != kind:
                option = f"--{name.replace('_', '-')}"
                raise ConvertError(f"{option} is for --kind {kind}, not {parsed.kind}; leave it out", 2)
    if parsed.layers is not None and parsed.init_from:
        raise ConvertError("--layers is that of the head of --init-from; leave it out", 2)
    require_torch(parsed.device)
    return stages.Options(
        main=parsed.main,
        out=parsed.out,
        command=shlex.join(["python", "convert/make_draft.py", *arguments]),
        minutes=parsed.minutes,
        tokens=parsed.tokens,
        longest=parsed.length,
        prompts=parsed.prompts,
        kind=parsed.kind,
        layers=parsed.layers,
        draft_vocabulary=parsed.draft_vocabulary,
        init_from=parsed.init_from,
        keep_layers=parsed.keep_layers,
        compared=list(dict.fromkeys(parsed.compare)),
        device=parsed.device,
        online=parsed.online,
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
            advice = f", or install torch for Intel GPUs: {XPU_INSTALL}" if device.startswith("xpu") else ""
            reason = engine_lines(error)[0]
            raise ConvertError(f"torch cannot use --device {device} ({reason}); use cpu{advice}", 2) from error


if __name__ == "__main__":
    raise_on_signals()
    sys.exit(main())
