"""Warning of a crash in OpenVINO's CPU plugin: fp16 weights, one thread, a CPU with AMX (docs/upstream.md)."""

from collections.abc import Mapping
from pathlib import Path

import openvino as ov

from speculative.models.cores import usable_cores
from speculative.pair import weights

CPU_INFO = Path("/proc/cpuinfo")


def warning(folder: Path, device: str, properties: Mapping[str, object]) -> str:
    """One sentence if the model in `folder` is one that can crash with these OpenVINO `properties`, else ""."""
    is_one = str(properties.get("INFERENCE_NUM_THREADS", 0)) == "1" or usable_cores() == 1
    precision = str(properties.get("INFERENCE_PRECISION_HINT", "bf16"))
    in_bf16 = precision == "bf16" and properties.get("EXECUTION_MODE_HINT") != "ACCURACY"
    if not is_one or not in_bf16 or not device.startswith("CPU") or not _has_amx():
        return ""
    if "fp16" not in weights.read(ov.Core().read_model(folder / "openvino_model.xml")).formats:
        return ""
    return (
        f"{folder} has fp16 weights, with which OpenVINO can crash (floating point exception) on one thread of a CPU "
        "with AMX: use two threads, or --property INFERENCE_PRECISION_HINT=f16"
    )


def _has_amx() -> bool:
    return CPU_INFO.is_file() and "amx_bf16" in CPU_INFO.read_text()
