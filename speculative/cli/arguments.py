"""Command-line arguments shared by the scripts, with their types and checks."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from speculative.cli.number_types import positive_int, two_or_more
from speculative.cli.parser import DRAFT_DEVICE
from speculative.cli.properties import PROPERTY
from speculative.models.spec import ModelSpec
from speculative.pair import devices
from speculative.pair.check import check_pair
from speculative.pair.draft_limits import genai_limit, native_limit
from speculative.pair.engines import GENAI, NATIVE
from speculative.pair.model_info import require_ir

PROMPTS = Path(__file__).resolve().parents[2] / "scripts/prompts/embedded_code.jsonl"


def add_pair_arguments(parser: argparse.ArgumentParser, without_draft: str = "") -> None:
    """Main model, draft, devices and properties; the draft is optional if `without_draft` says what is done then."""
    parser.add_argument("main", type=Path, help="main model (IR folder)")
    parser.add_argument(
        "draft",
        type=Path,
        nargs="?" if without_draft else None,
        help="draft: a model or an EAGLE-3 head (IR folder)" + (without_draft and f"; without one, {without_draft}"),
    )
    add_device_arguments(parser)
    parser.add_argument("--property", **PROPERTY, help="OpenVINO property for both models (repeatable)")


def add_device_arguments(parser: argparse._ActionsContainer) -> None:
    """The devices of main model and draft."""
    parser.add_argument("--device", default="CPU", help="device of the main model (default: CPU)")
    parser.add_argument("--draft-device", **DRAFT_DEVICE)


def model_specs(arguments: argparse.Namespace, properties: dict | None = None) -> tuple[ModelSpec, ModelSpec | None]:
    """Main model and draft, if given, each on its device, both with `properties`, by default the --property."""
    properties = dict(arguments.property) if properties is None else properties
    draft = arguments.draft and ModelSpec(arguments.draft, arguments.draft_device, properties)
    return ModelSpec(arguments.main, arguments.device, properties), draft


def add_prompt_arguments(parser: argparse.ArgumentParser, max_prompts: int) -> None:
    parser.add_argument(
        "--prompts",
        default=str(PROMPTS),
        metavar="FILE",
        help='JSON lines with "prompt", text with one prompt per line, or a Hugging Face data set as '
        "OWNER/NAME[@SUBSET][:COLUMN[:SPLIT]]; several files with commas between them (default: code prompts)",
    )
    parser.add_argument(
        "--max-prompts", type=positive_int, default=max_prompts, metavar="N", help="number of prompts, taken evenly "
        f"from all (default: {max_prompts})",
    )  # fmt: skip


def add_run_arguments(parser: argparse.ArgumentParser, max_prompts: int) -> None:
    """Prompts, number of new tokens and rounds."""
    add_prompt_arguments(parser, max_prompts)
    parser.add_argument(
        "--max-new-tokens", type=two_or_more, default=100, metavar="N", help="new tokens per run (default: 100)"
    )
    parser.add_argument(
        "--rounds", type=positive_int, default=3, metavar="N", help="interleaved rounds after the warm-up (default: 3)"
    )


def add_huge_pages_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--huge-pages",
        action="store_true",
        help="keep all weights in huge pages of 2 MiB (Linux), as the server does",
    )


def add_starts_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--starts",
        type=positive_int,
        default=1,
        metavar="N",
        help="number of times to start the processes of all engines, with --rounds rounds each (default: 1)",
    )


def add_paths_argument(parser: argparse.ArgumentParser, choices: Sequence[str]) -> None:
    """`--paths`: some of the `choices` paths of decoding; by default all, without a draft "lookup" (`choose_paths`)."""

    def paths(text: str) -> list[str]:
        if not set(text.split(",")) <= set(choices):
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of {', '.join(choices)}")
        return text.split(",")

    parser.add_argument(
        "--paths", type=paths, help=f"comma-separated, from {','.join(choices)} (default: all; without a draft: lookup)"
    )


def choose_paths(parser: argparse.ArgumentParser, arguments: argparse.Namespace, choices: Sequence[str]) -> None:
    """Set the default of `--paths`. Exits with status 2 if a path needs the draft that is not given."""
    arguments.paths = arguments.paths or (list(choices) if arguments.draft else ["lookup"])
    drafted = [path for path in arguments.paths if path != "lookup"]
    if drafted and not arguments.draft:
        parser.error(f"--paths {','.join(drafted)} requires a draft: add its folder, or measure --paths lookup")


def require_draft_for(parser: argparse.ArgumentParser, arguments: argparse.Namespace, *options: str) -> None:
    """Exit with status 2 if one of these options of a draft is given without one."""
    defaults = vars(parser.parse_args([str(arguments.main), "--device", arguments.device]))
    for option in options:
        name = option.strip("-").replace("-", "_")
        if not arguments.draft and vars(arguments)[name] != defaults[name]:
            parser.error(f"{option} requires a draft: add its folder")


def lengths(text: str) -> list[int]:
    """An argparse type: draft lengths, "1-8" or "2,4,6"."""
    try:
        first, _, last = text.partition("-")
        values = [*range(int(first), min(int(last), 65) + 1)] if last else [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1 or max(values) > 64:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a range like 1-8 or a list like 2,4,6 of draft lengths 1 to 64"
        )
    return list(dict.fromkeys(values))


def temperatures(text: str) -> list[float]:
    """An argparse type: temperatures, each once."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 <= value < float("inf") for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of temperatures of 0 or more, like 0,0.7,1")
    return list(dict.fromkeys(values))


def refuse_unsound(main: Path, draft: Path | None) -> None:
    """Exit with status 2 and the first reason if the folders are not a sound pair, or main model without a draft."""
    if draft:
        for finding in check_pair(main, draft).findings:
            if finding.level == "error":
                refuse(f"{finding.what}: {finding.message}")
        return
    try:
        require_ir(main)
    except ValueError as error:
        refuse(str(error))


def refuse_unusable(arguments: argparse.Namespace, *engines: str) -> None:
    """Exit with status 2 if main model and draft, if given, are not sound, OpenVINO does not find a requested device,
    or one of `engines` cannot run the draft on the devices."""
    refuse_unsound(arguments.main, arguments.draft)
    refuse_missing_devices(arguments)
    if NATIVE in engines:
        refuse_in_native(arguments)
    if GENAI in engines:
        refuse(limit_in_genai(arguments))


def refuse(reason: str) -> None:
    """Exit with status 2 and `reason`, unless it is ""."""
    if reason:
        print(f"error: {reason}", file=sys.stderr)
        sys.exit(2)


def refuse_in_native(arguments: argparse.Namespace) -> None:
    """Exit with status 2 if this project's engine cannot run the draft on the devices."""
    devices = (arguments.device, arguments.draft_device)
    refuse(native_limit(arguments.draft, *devices) if arguments.draft else "")


def limit_in_genai(arguments: argparse.Namespace) -> str:
    """Why GenAI's pipeline cannot run the draft on the devices; "" if it can, or there is none."""
    devices = (arguments.device, arguments.draft_device)
    return genai_limit(arguments.main, arguments.draft, *devices) if arguments.draft else ""


def refuse_missing_devices(arguments: argparse.Namespace) -> None:
    """Exit with status 2 if OpenVINO does not find a requested device."""
    properties = dict(getattr(arguments, "property", None) or ())
    for device in dict.fromkeys((arguments.device, arguments.draft_device)):
        try:
            devices.require(device, properties)
        except ValueError as error:
            refuse(str(error))
