"""Parser for OpenVINO properties on the command line (KEY=VALUE), shared by all programs."""

import argparse
import re


def key_value(text: str) -> tuple[str, int | str]:
    """An argparse type. A whole number becomes an int, as some plugin properties accept nothing else."""
    key, _, value = text.partition("=")
    if not key.strip() or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE, like INFERENCE_PRECISION_HINT=f32")
    return key, int(value) if re.fullmatch(r"-?[0-9]{1,18}", value) else value
