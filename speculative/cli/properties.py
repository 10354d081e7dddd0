"""OpenVINO properties on the command line (KEY=VALUE), shared by all programs."""

import argparse
import re
from typing import Any


def key_value(text: str) -> tuple[str, int | str]:
    """An argparse type. A whole number becomes an int, as some plugin properties accept nothing else."""
    key, _, value = text.partition("=")
    if not key.strip() or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE, like INFERENCE_PRECISION_HINT=f32")
    return key, int(value) if re.fullmatch(r"-?[0-9]{1,18}", value) else value


PROPERTY: dict[str, Any] = {"type": key_value, "action": "append", "default": [], "metavar": "KEY=VALUE"}
"""Arguments of `add_argument` for a repeatable KEY=VALUE option, without its help."""
