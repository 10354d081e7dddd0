"""The warning of a crash of OpenVINO with fp16 weights on one thread of a CPU with AMX."""

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from speculative.pair import one_thread

ONE = {"INFERENCE_NUM_THREADS": 1}


@pytest.fixture
def folders(tmp_path):
    """A model with fp16 weights, and one with fp32 weights."""
    for name in ("fp16", "fp32"):
        (tmp_path / name).mkdir()
        x = ops.parameter([-1, 64], np.float32)
        product = ops.matmul(x, ops.constant(np.ones((64, 64), np.float32) / 3), False, True)
        path = tmp_path / name / "openvino_model.xml"
        ov.save_model(ov.Model([product], [x]), path, compress_to_fp16=name == "fp16")
    return tmp_path / "fp16", tmp_path / "fp32"


def info(tmp_path, monkeypatch, flags):
    monkeypatch.setattr(one_thread, "CPU_INFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags : fpu sse2 {flags}\n")


def test_crash_on_one_thread_is_announced(folders, tmp_path, monkeypatch):
    fp16, fp32 = folders
    monkeypatch.setattr(one_thread, "usable_cores", lambda: 2)  # tests may have a core each
    info(tmp_path, monkeypatch, "avx512f amx_bf16 amx_tile")
    assert f"{fp16} has fp16 weights" in one_thread.warning(fp16, "CPU", ONE)
    for properties in ({"INFERENCE_NUM_THREADS": 2}, {"INFERENCE_PRECISION_HINT": "f16"}):
        assert not one_thread.warning(fp16, "CPU", ONE | properties)
    assert not one_thread.warning(fp16, "CPU", ONE | {"EXECUTION_MODE_HINT": "ACCURACY"})
    assert not one_thread.warning(fp16, "GPU", ONE) and not one_thread.warning(fp32, "CPU", ONE)
    monkeypatch.setattr(one_thread, "usable_cores", lambda: 1)
    assert one_thread.warning(fp16, "CPU", {})


def test_no_crash_without_amx(folders, tmp_path, monkeypatch):
    info(tmp_path, monkeypatch, "avx512f avx512_bf16")
    assert not one_thread.warning(folders[0], "CPU", ONE)
