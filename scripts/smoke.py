"""Smoke test of a pair, for your own CI: load, stream, compare with the main model alone, judge the acceptance rate.

    python scripts/smoke.py models/embedded/main models/embedded/draft --min-acceptance 0.3

Greedy, in execution mode ACCURACY (f32 throughout), where the text with a draft must equal the text without, token by
token. Prints one JSON line; the exit status is 0 when everything holds, 1 when something does not (the line says what),
2 for bad usage.
"""

import argparse
import json
import signal
import sys
from pathlib import Path

signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is written, so Ctrl-C may end it anywhere

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import openvino_genai  # noqa: E402
from arguments import refuse_missing_devices, refuse_unsound, whole  # noqa: E402

from speculative import genai_runs, metrics  # noqa: E402
from speculative.processes import prepare_output  # noqa: E402

PROMPTS = ("def read_notes(path):", "class Triangle:", "Count the words of a text.")


def share(text: str) -> float:
    if 0 <= (value := float(text)) <= 1:
        return value
    raise argparse.ArgumentTypeError(f"{text} is not a number from 0 to 1")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "main", type=Path, nargs="?", default=ROOT / "models/embedded/main", help="main model (IR folder)"
    )
    parser.add_argument("draft", type=Path, nargs="?", default=ROOT / "models/embedded/draft", help="draft (IR folder)")
    parser.add_argument("--device", default="CPU", help="device of the main model (default: CPU)")
    parser.add_argument("--draft-device", default="CPU", help="device of the draft (default: CPU)")
    parser.add_argument(
        "-k", "--num-assistant-tokens", type=whole, default=4, metavar="K", help="draft length (default: 4)"
    )
    parser.add_argument("--max-new-tokens", type=whole, default=48, metavar="N", help="tokens a prompt (default: 48)")
    parser.add_argument(
        "--min-acceptance", type=share, default=0.3, metavar="RATE", help="lowest acceptance rate (default: 0.3)"
    )
    parser.add_argument(
        "--prompt", action="append", help="a prompt of your own, instead of the three built in; repeatable"
    )
    return parser.parse_args()


def smoke(arguments: argparse.Namespace) -> dict:
    """Run the test and return its result; `problems` is empty when everything holds."""
    exact = {"EXECUTION_MODE_HINT": "ACCURACY"}  # f32 inference and KV cache, no quantized activations
    alone = genai_runs.load(arguments.main, arguments.device, None, "", exact, {})
    pair = genai_runs.load(arguments.main, arguments.device, arguments.draft, arguments.draft_device, exact, exact)
    problems, proposed, gained, streamed = [], [], [], 0
    for prompt in arguments.prompt or PROMPTS:
        inputs = genai_runs.encode(alone.get_tokenizer(), prompt)
        reference = genai_runs.generate(alone, inputs, arguments.max_new_tokens)
        run = genai_runs.generate(pair, inputs, arguments.max_new_tokens, arguments.num_assistant_tokens)
        proposed += run.proposed
        gained += run.gained
        if run.tokens != reference.tokens:
            place = next((i for i, (a, b) in enumerate(zip(run.tokens, reference.tokens, strict=False)) if a != b), -1)
            problems.append(f"the text after {prompt!r} differs from the main model's own at new token {place + 1}")
        pieces: list[str] = []
        config = openvino_genai.GenerationConfig(
            max_new_tokens=arguments.max_new_tokens,
            num_assistant_tokens=arguments.num_assistant_tokens,
            ignore_eos=True,
        )
        text = pair.generate([prompt], config, pieces.append).texts[0]
        streamed += len(pieces)
        if "".join(pieces) != text:
            problems.append(f"the text streamed after {prompt!r} is not the text returned")
    acceptance = metrics.acceptance_rate(proposed, gained)
    if (acceptance or 0.0) < arguments.min_acceptance:
        problems.append(f"the acceptance rate is {acceptance}, below {arguments.min_acceptance}")
    return {
        "ok": not problems,
        "problems": problems,
        "acceptance_rate": acceptance,
        "block_efficiency": metrics.block_efficiency(gained),
        "draft_length": arguments.num_assistant_tokens,
        "new_tokens": arguments.max_new_tokens * len(arguments.prompt or PROMPTS),
        "streamed_pieces": streamed,
        "main": str(arguments.main),
        "draft": str(arguments.draft),
        "device": arguments.device,
        "draft_device": arguments.draft_device,
        "openvino_genai": openvino_genai.__version__,
    }


def main() -> int:
    prepare_output()
    arguments = parse_arguments()
    refuse_unsound(arguments.main, arguments.draft)
    refuse_missing_devices(arguments)
    try:
        result = smoke(arguments)
    except RuntimeError as error:  # the engine's: a broken file, a device that is not there
        result = {"ok": False, "problems": [" ".join(str(error).split())]}
    print(json.dumps(result, ensure_ascii=False))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
