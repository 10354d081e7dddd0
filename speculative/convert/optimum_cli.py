"""Runs `optimum-cli export openvino`: its arguments and their requirements."""

import importlib.util
import json
import os
import shlex
import subprocess
from pathlib import Path

from speculative.convert.child import Child
from speculative.convert.errors import ConvertError

TASK = "text-generation-with-past"  # cannot be inferred from a local folder
COMPRESSED = {"int8", "int4", "mxfp4", "nf4", "cb4"}
FORMATS = ("fp32", "fp16", "int8", "int4", "mxfp4", "nf4", "cb4")


def arguments_for(weight_format: str | None, extra: list[str], trust_remote_code: bool) -> list[str]:
    """The options of an export: this program's first, so that the user's own override them."""
    arguments = [] if names("--task", extra) else ["--task", TASK]
    if weight_format:
        arguments += ["--weight-format", weight_format]
    return arguments + (["--trust-remote-code"] if trust_remote_code else []) + extra


def command(model: str, arguments: list[str], output: str) -> list[str]:
    """The command as typed in a shell."""
    return ["optimum-cli", "export", "openvino", "--model", model, *arguments, output]


def npu_arguments(weight_format: str, parameters: int, channel_wise: bool, given: list[str]) -> tuple[list[str], str]:
    """The options that an NPU needs, without those in `given`, and one sentence about them.

    Integers must be symmetric; int4 uses channel-wise scales (above about 4 B parameters) or groups of 128
    (openvino#34450).
    """
    if weight_format == "fp16":
        return [], "for the NPU: nothing added, it supports fp16 weights directly"
    if weight_format == "int8":
        needed: dict[str, list[str]] = {"--sym": []}
    elif weight_format == "int4":
        needed = {"--sym": [], "--ratio": ["1.0"], "--group-size": ["-1" if channel_wise else "128"]}
    else:
        raise ConvertError(f"the NPU does not support {weight_format} weights; choose int4, int8 or fp16", 2)
    added = [part for option, value in needed.items() if not names(option, given) for part in (option, *value)]
    kept = [option for option in needed if names(option, given)]
    sentence = f"for the NPU: {' '.join(added) or 'nothing'} added ({parameters / 1e9:.2g} B parameters)"
    return added, sentence + (f", your own {' '.join(kept)} kept" if kept else "")


def has_recipe(model: str) -> bool:
    """Whether optimum-cli has default int4 settings for this hub id or folder name."""
    try:
        from optimum.intel.openvino.configuration import get_default_quantization_config
    except ImportError:
        return False
    return get_default_quantization_config(model, "int4") is not None


def expected_bytes(parameters: int, source_bytes: int, weight_format: str | None) -> int:
    """Peak disk space of an export in bytes: the result and, before compression, an uncompressed copy."""
    bytes_each = {"fp32": 4, "fp16": 2, "int8": 1.1, None: 4}.get(weight_format, 0.8)
    return int(parameters * bytes_each) + (source_bytes if weight_format in COMPRESSED else 0)


def require_optimum() -> None:
    """Raise ConvertError unless optimum-cli with its OpenVINO export is installed in this Python environment."""
    try:
        installed = importlib.util.find_spec("optimum.commands.export.openvino") is not None
    except ImportError:
        installed = False
    if not installed:
        raise ConvertError(
            "optimum-cli with its OpenVINO export is not installed; install it: pip install -r requirements-export.txt"
        )


def run(typed: list[str], log: Path, temporary: Path, verbose: bool) -> None:
    """Run the command `typed`; raise ConvertError with the last lines of the log if it fails.

    The child's temporary files go to `temporary`, on the disk whose space was checked. The child never outlives this
    call.
    """
    # all files are local: do not wait for an unreachable hub
    offline = {} if _needs_hub(typed) else {"HF_HUB_OFFLINE": "1"}
    child = Child("optimum-cli", ["-m", "optimum.commands.optimum_cli", *typed[1:]], log, temporary, verbose)
    child.run(offline)


def run_head(typed: list[str], log: Path, temporary: Path, verbose: bool) -> None:
    """As `run`, for the command of an EAGLE-3 head. transformers copies optimum-intel's class to a temporary folder."""
    child = Child("optimum-cli", typed[1:], log, temporary, verbose)
    child.run({"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(temporary / "modules")})


def use_given_name(config: Path, path: str, given: str) -> None:
    """Replace the source path that optimum-cli writes to a config file, if there is one, by what the user typed."""
    if config.is_file():
        value, named = (f": {json.dumps(name)}" for name in (path, given))
        text = config.read_text(encoding="utf-8").replace(value, named)
        config.write_text(text, encoding="utf-8", newline="\n")


def _needs_hub(typed: list[str]) -> bool:
    """Whether an export needs the hub: for calibration data, remote code of other repositories, or optimum-cli's
    default int4 settings (some use a data set)."""
    return names("--dataset", typed) or "--trust-remote-code" in typed or "int4" in typed


def names(option: str, words: list[str]) -> bool:
    """Whether the arguments have this option, as `--name value` or `--name=value`."""
    return any(word.partition("=")[0] == option for word in words)


def shown(parts: list[str]) -> str:
    """A command on one line, quoted for the shell."""
    return subprocess.list2cmdline(parts) if os.name == "nt" else shlex.join(parts)
