"""Check a model pair on this machine for problems. Takes seconds; compiles nothing without --rollback.

    python scripts/check_pair.py models/embedded/main models/embedded/draft
    python scripts/check_pair.py models/embedded/main models/embedded/draft --device GPU --draft-device CPU

Checks the files, both tokenizers token by token, special tokens, chat templates, context lengths, weight formats, KV
caches, devices, memory and the expected cost of a draft step. Each finding is ok, a warning (works, with a limit) or an
error (does not work), and says what to do. Standard output is a table followed by one JSON object on the last line.
Exit status: 0 for a sound pair (warnings allowed), 1 if errors were found, 2 for bad usage.
"""

from speculative.cli.program import prepare_output

import argparse
import json
import shutil
import sys
import textwrap
from pathlib import Path

from speculative.bench.load.metrics import counted
from speculative.cli.arguments import add_device_arguments
from speculative.cli.parser import Parser
from speculative.cli.processes import print_or_exit
from speculative.error_text import one_line
from speculative.models.vocabulary import SAMPLE
from speculative.pair.check import Finding, check_pair
from speculative.pair.fit import check_fit, check_rollback
from speculative.pair.model_info import UnusableFolder

COLOURS = {"ok": "32", "warning": "33", "error": "31"}  # green, yellow, red
LEVEL, WHAT = 9, 16  # widths of the first two columns
WIDEST = 120


def folder(text: str) -> Path:
    if Path(text).exists():  # the check names a file, which may be a GGUF file that can be converted
        return Path(text)
    raise argparse.ArgumentTypeError(f"folder {text!r} does not exist: give the folder of an exported model")


def text_of(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{file!r} cannot be read as UTF-8 text: {one_line(error)}") from None


def parse_arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("main", type=folder, help="main model (IR folder)")
    parser.add_argument("draft", type=folder, help="draft model (IR folder)")
    add_device_arguments(parser)
    parser.add_argument(
        "--text", type=text_of, metavar="FILE", help="compare two different tokenizers on this text (UTF-8)"
    )
    parser.add_argument("--rollback", action="store_true", help="also compile both models and check KV-cache rollback")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    return parser.parse_args()


def examine(arguments: argparse.Namespace) -> list[Finding]:
    npu = any("NPU" in device for device in (arguments.device, arguments.draft_device))
    findings = check_pair(arguments.main, arguments.draft, npu=npu, text=arguments.text or SAMPLE).findings
    if ("error", "files") in {finding[:2] for finding in findings}:
        return findings
    try:
        findings += check_fit(arguments.main, arguments.draft, arguments.device, arguments.draft_device)
    except UnusableFolder as error:  # a checkpoint: possibly a sound pair, but not exported yet
        return [*findings, Finding("error", "files", str(error))]
    if arguments.rollback:
        findings += check_rollback(arguments.main, arguments.draft, arguments.device, arguments.draft_device)
    return findings


def show(findings: list[Finding]) -> None:
    coloured = sys.stdout.isatty()
    width = min(shutil.get_terminal_size((WIDEST, 24)).columns, WIDEST)
    shown = []
    for level, what, message in findings:
        lines = textwrap.wrap(message, max(width - LEVEL - WHAT, 30), break_long_words=False, break_on_hyphens=False)
        mark = f"\033[{COLOURS[level]}m{level:{LEVEL}}\033[0m" if coloured else f"{level:{LEVEL}}"
        shown.append(f"{mark}{what:{WHAT}}" + ("\n" + " " * (LEVEL + WHAT)).join(lines))
    print_or_exit("\n".join(shown))


def main() -> int:
    prepare_output()
    arguments = parse_arguments()
    findings = examine(arguments)
    number = {level: sum(finding.level == level for finding in findings) for level in COLOURS}
    sound = not number["error"]
    if not arguments.json:
        show(findings)
        verdict = "sound" if sound else "not sound"
        print_or_exit(f"\n{verdict}: {counted(number['error'], 'error')}, {counted(number['warning'], 'warning')}\n")
    result = {
        "sound": sound,
        "errors": number["error"],
        "warnings": number["warning"],
        "main": str(arguments.main),
        "draft": str(arguments.draft),
        "device": arguments.device,
        "draft_device": arguments.draft_device,
        "findings": [finding._asdict() for finding in findings],
    }
    print_or_exit(json.dumps(result, ensure_ascii=False))
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
