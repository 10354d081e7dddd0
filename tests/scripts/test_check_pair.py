"""check_pair.py as users run it, and the facts it checks: caches, weights, devices, memory."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import openvino as ov
import pytest
from openvino import opset13

from speculative.bench.result import CheckResult
from speculative.bench.tuning import settings
from speculative.models import cached_model, cores, kv_cache
from speculative.models.spec import ModelSpec
from speculative.pair import devices, fit, weights
from speculative.pair.devices import DeviceFacts, Memory
from speculative.pair.fit import check_fit, check_rollback
from tests.speculative.models.test_cached_model import OneShort
from tests.support.paths import DRAFT, MAIN, ROOT
from tests.support.tiny_llama import save_llama_with_outlier_keys
from tests.support.typed import problems
from tests.support.waiting import PATIENCE

HERE = ov.Core().available_devices
PROGRAM = "scripts/check_pair.py"


def result_of(process):
    result = json.loads(process.stdout.splitlines()[-1])
    assert problems(result, CheckResult) == []
    return result


def messages(findings, level, what):
    return [finding.message for finding in findings if (finding.level, finding.what) == (level, what)]


def save_model(folder, packed=ov.Type.u4, cache=(-1, 2, -1, 8), window=None, width=64):
    """Give `folder`, a copy of an IR, a model with packed weights [width, 64], a table, a state of shape `cache`."""
    tokens = opset13.parameter([-1, -1], np.int64, name="input_ids")
    weight = opset13.multiply(
        opset13.convert(ov.op.Constant(packed, ov.Shape([width, 64]), [1] * (width * 64)), np.float32),
        opset13.constant(np.full((width, 1), 0.5, np.float32)),
    )
    table = opset13.constant(np.arange(32 * 64, dtype=np.uint8).reshape(32, 64))
    hidden = opset13.convert(opset13.gather(table, tokens, opset13.constant(0)), np.float32)
    logits = opset13.matmul(hidden, weight, False, True)
    logits.output(0).set_names({"logits"})
    sinks = []
    if cache:
        info = ov.op.util.VariableInfo()
        info.data_shape, info.data_type, info.variable_id = ov.PartialShape(cache), ov.Type.f32, "past_key_values.0"
        variable = ov.op.util.Variable(info)
        sinks = [opset13.assign(opset13.read_value(variable), variable)]
    ov.save_model(ov.Model([logits.output(0)], sinks, [tokens]), folder / "openvino_model.xml", compress_to_fp16=False)
    config = {"max_position_embeddings": 256, "sliding_window": window}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture
def copy(tmp_path):
    return shutil.copytree(DRAFT, tmp_path / "copy")


@pytest.fixture
def npu_here(monkeypatch):
    """As on a machine with an NPU. The checks for an NPU do not query the device."""
    npu = DeviceFacts("NPU", "a neural processor", "", devices.MAIN_MEMORY)
    monkeypatch.setattr(devices, "look_up", lambda device, core: [npu])


def test_embedded_pair_is_sound(run):
    process = run(PROGRAM, MAIN, DRAFT)
    result = result_of(process)
    assert (process.returncode, process.stderr) == (0, "")
    assert result["sound"] and result["errors"] == 0
    looked_at = {
        "files",
        "vocabulary",
        "encodings",
        "special tokens",
        "chat template",
        "context length",
        "architecture",
    }
    looked_at |= {"device", "weight formats", "KV cache", "memory", "cost ratio"}
    assert looked_at <= {finding["what"] for finding in result["findings"]}
    table = process.stdout.splitlines()[:-1]
    assert "\033" not in process.stdout and max(map(len, table)) <= 120
    assert "sound: 0 errors" in process.stdout


def test_json_option_prints_only_json(run_here):
    process = run_here(PROGRAM, MAIN, DRAFT, "--json")
    assert process.stdout.count("\n") == 1 and result_of(process)["sound"]


@pytest.mark.posix("POSIX terminals")
def test_terminal_output_is_coloured():
    import pty

    terminal, end = pty.openpty()
    process = subprocess.Popen([sys.executable, PROGRAM, str(MAIN), str(MAIN)], stdout=end, cwd=ROOT)
    os.close(end)
    shown = b""
    while True:
        try:
            shown += os.read(terminal, 4096)
        except OSError:  # the other end is closed
            break
    os.close(terminal)
    assert process.wait(timeout=PATIENCE) == 0
    assert b"\033[32mok" in shown and b"\033[33mwarning" in shown  # main as its own draft is too expensive


@pytest.mark.parametrize(
    ("arguments", "word"),
    [([MAIN], "draft"), ([MAIN, "no/such/folder"], "no/such/folder"), ([MAIN, DRAFT, "--what"], "--what")],
)
def test_bad_usage_exits_with_2(run_here, arguments, word):
    process = run_here(PROGRAM, *arguments)
    assert process.returncode == 2 and process.stdout == ""
    assert word in process.stderr and "Traceback" not in process.stderr


def test_other_tokenizer_is_a_warning(run_here, renumbered_draft, tmp_path):
    process = run_here(PROGRAM, MAIN, renumbered_draft)
    assert process.returncode == 0 and result_of(process)["sound"]
    assert "warning  vocabulary" in process.stdout and "ok       shared tokens" in process.stdout
    text = tmp_path / "text"
    text.write_text("def naïve(path):\n" * 3, encoding="utf-8")
    process = run_here(PROGRAM, MAIN, renumbered_draft, "--text", text)
    assert "which are 100% of the text's, and splits 100% of it alike" in " ".join(process.stdout.split())
    process = run_here(PROGRAM, MAIN, renumbered_draft, "--text", tmp_path / "none")
    assert process.returncode == 2 and "cannot be read as UTF-8 text" in process.stderr


def test_truncated_model_is_an_error(run_here, copy):
    path = copy / "openvino_model.bin"
    path.write_bytes(path.read_bytes()[:-1000])
    process = run_here(PROGRAM, MAIN, copy, "--json")
    (finding,) = result_of(process)["findings"]
    assert process.returncode == 1 and finding["what"] == "files"
    assert "truncated" in finding["message"] and process.stderr == ""


def test_checkpoint_error_names_the_conversion_command(run_here, tmp_path):
    for role, source in (("main", MAIN), ("draft", DRAFT)):
        (tmp_path / role).mkdir()
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(source / name, tmp_path / role)
        (tmp_path / role / "model.safetensors").write_bytes(b"")
    process = run_here(PROGRAM, tmp_path / "main", tmp_path / "draft")
    assert process.returncode == 1
    assert "convert/export_pair.py" in result_of(process)["findings"][-1]["message"]


@pytest.mark.parametrize(("mark", "sentence"), [("eagle3_mode", "has no table d2t"), ("dflash_mode", "DFlash")])
def test_hidden_state_drafts_are_recognised(run_here, copy, mark, sentence):
    model = ov.Core().read_model(copy / "openvino_model.xml")
    model.set_rt_info("True", [mark])  # as optimum-intel does
    ov.save_model(model, copy / "marked.xml", compress_to_fp16=False)
    for suffix in (".xml", ".bin"):
        (copy / f"marked{suffix}").replace(copy / f"openvino_model{suffix}")
    process = run_here(PROGRAM, MAIN, copy, "--json")
    finding = next(found for found in result_of(process)["findings"] if found["level"] == "error")
    assert process.returncode == 1 and sentence in finding["message"]


def test_head_that_openvino_cannot_read_is_one_error(run_here, tmp_path):
    head = shutil.copytree(MAIN.parent / "eagle3", tmp_path / "head")
    xml = head / "openvino_model.xml"
    xml.write_text(xml.read_text(encoding="utf-8").replace('type="MatMul"', 'type="Unknown"'), encoding="utf-8")
    process = run_here(PROGRAM, MAIN, head, "--json")
    [message] = [found["message"] for found in result_of(process)["findings"] if found["level"] == "error"]
    assert process.returncode == 1 and "is corrupt or truncated" in message and "Unknown" in message


@pytest.mark.parametrize("device", [name for name in ("GPU", "NPU", "GPX", "CPU.7") if name not in HERE])
def test_absent_device_is_an_error_with_reason(device):
    findings = check_fit(MAIN, DRAFT, "CPU", f"AUTO:{device},CPU")
    (message,) = messages(findings, "error", "device")
    assert device in message and "OpenVINO finds" in message
    assert "install" in message if device in ("GPU", "NPU") else "use one of these" in message


def test_device_strings_are_parsed():
    here = ["CPU", "GPU.0", "GPU.1"]
    assert devices.names("GPU.1", here) == ["GPU.1"]
    assert devices.names("AUTO:GPU,CPU", here) == ["GPU", "CPU"]
    assert devices.names("MULTI:GPU.1(2),CPU(4)", here) == ["GPU.1", "CPU"]
    assert devices.names("HETERO", here) == here
    assert devices.names("AUTO:-GPU.0", here) == ["CPU", "GPU.1"]


def test_main_memory_is_detected():
    memory = devices.main_memory()
    assert memory.total > 1e9 and (memory.available is None or 0 < memory.available <= memory.total)


@pytest.mark.parametrize("files", devices.CGROUPS)
def test_memory_of_a_container_is_what_its_processes_leave(files, tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "CGROUP", tmp_path)
    (tmp_path / "memory").mkdir()
    for name, text in zip(
        files, ("2000000000", "1500000000", "anon 1\ninactive_file 400000000\nkernel 2"), strict=True
    ):
        (tmp_path / name).write_text(f"{text}\n")
    assert devices.main_memory() == (2_000_000_000, 900_000_000)
    (tmp_path / files[0]).write_text("max\n")
    assert devices.main_memory().total > 2_000_000_000


@pytest.mark.parametrize(
    ("files", "unlimited"),
    [
        ({"cpu.max": "250000 100000"}, {"cpu.max": "max 100000"}),
        ({"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}, {"cpu/cpu.cfs_quota_us": "-1"}),
    ],
    ids=["cgroup v2", "cgroup v1"],
)
def test_cpu_limit_of_a_container_is_respected(files, unlimited, tmp_path, monkeypatch):
    monkeypatch.setattr(cores, "CGROUP", tmp_path)
    monkeypatch.setattr(cores, "usable_cores", lambda: 64)
    monkeypatch.setattr(fit, "usable_cores", lambda: 64)
    (tmp_path / "cpu").mkdir()

    def write(texts):
        for name, text in texts.items():
            (tmp_path / name).write_text(f"{text}\n", encoding="ascii")

    write(files)
    (message,) = messages(check_fit(MAIN, DRAFT, "CPU", "CPU"), "warning", "cores")
    assert "the time of 2 cores, but OpenVINO computes on 64" in message and "INFERENCE_NUM_THREADS=2" in message
    tried = settings.property_values("CPU", ov.Core())
    assert [n for ((name, n),) in tried if name == "INFERENCE_NUM_THREADS"] == [2, 1]
    assert settings.draft_property_values("CPU") == [(("INFERENCE_NUM_THREADS", 1),)]
    write(unlimited)
    assert not messages(check_fit(MAIN, DRAFT, "CPU", "CPU"), "warning", "cores")
    assert (("INFERENCE_NUM_THREADS", 64),) in settings.property_values("CPU", ov.Core())


@pytest.mark.parametrize(
    ("memory", "level"),
    [(Memory(10**7, 10**7), "error"), (Memory(10**9, 10**7), "warning"), (Memory(None, None), "ok")],
)
def test_required_memory_is_compared_with_available_memory(monkeypatch, memory, level):
    monkeypatch.setattr(devices, "main_memory", lambda: memory)
    (message,) = messages(check_fit(MAIN, DRAFT, "CPU", "CPU"), level, "memory")
    assert "main 38" in message and "draft 2" in message
    assert level == "ok" or "int4" in message


def test_estimated_cache_size_matches_the_engine():
    cache = kv_cache.read(ov.Core().read_model(DRAFT / "openvino_model.xml"))
    assert cache == (1, 2, 64, 2 * 2 * 64)
    made = cached_model.load(ModelSpec(DRAFT, "CPU", {"EXECUTION_MODE_HINT": "ACCURACY"}), capacity=512).backend
    assert cache.bytes_per_token(ov.Type.f32) * (512 + 32) == made.cache_bytes
    made = cached_model.load(ModelSpec(DRAFT, "CPU", {"KV_CACHE_PRECISION": "u8"}), capacity=512).backend
    assert 0.9 < made.cache_bytes / (cache.bytes_per_token(ov.Type.u8) * (512 + 32)) <= 1


def test_state_without_rollback_is_an_error(copy):
    (message,) = messages(check_fit(MAIN, save_model(copy, cache=(-1, 2, 64)), "CPU", "CPU"), "error", "KV cache")
    assert "draft" in message and "rolled back" in message


def test_model_without_kv_cache_is_an_error(copy):
    (message,) = messages(check_fit(MAIN, save_model(copy, cache=None), "CPU", "CPU"), "error", "KV cache")
    assert "no KV cache" in message


def test_weights_are_counted_by_format_and_use(copy):
    read = weights.read(ov.Core().read_model(save_model(copy) / "openvino_model.xml"))
    assert read.formats == ["int4", "int8"] and read.asymmetric == ["int4", "int8"]
    assert read.parameters == 64 * 64 + 32 * 64
    assert 64 * 64 // 2 <= read.bytes_per_step < 64 * 64 // 2 + 32 * 64  # the table is looked up, not read


def test_embedded_weights_account_for_the_whole_file():
    for folder, parameters in ((MAIN, 31.6e6), (DRAFT, 2.0e6)):
        read = weights.read(ov.Core().read_model(folder / "openvino_model.xml"))
        assert read.formats == ["int8"] and read.parameters == pytest.approx(parameters, rel=0.02)
        assert read.bytes_per_step == pytest.approx((folder / "openvino_model.bin").stat().st_size, rel=0.01)


def test_npu_rejects_asymmetric_int4(copy, npu_here):
    findings = check_fit(MAIN, save_model(copy, ov.Type.u4), "NPU", "NPU")
    (message,) = messages(findings, "error", "NPU weights")
    assert "draft" in message and "--for NPU" in message
    assert len(messages(findings, "warning", "NPU shapes")) == 2
    (message,) = messages(check_fit(MAIN, save_model(copy, ov.Type.i4), "NPU", "NPU"), "ok", "NPU weights")
    assert "draft has int4" in message


def test_npu_rejects_sliding_window(copy, npu_here):
    (message,) = messages(check_fit(MAIN, save_model(copy, window=16), "NPU", "NPU"), "error", "NPU shapes")
    assert "16 tokens" in message


def test_other_logits_width_is_an_error_only_on_npu(run_here, copy):
    save_model(copy, width=4160)  # 64 more than the tokenizer has tokens: padding
    for device, level in (("CPU", "warning"), ("NPU", "error")):
        result = result_of(run_here(PROGRAM, MAIN, copy, "--json", "--draft-device", device))
        assert {finding["level"] for finding in result["findings"] if finding["what"] == "logits width"} == {level}


def test_draft_as_large_as_main_model_is_a_warning():
    (message,) = messages(check_fit(MAIN, MAIN, "CPU", "CPU"), "warning", "cost ratio")
    assert "cost ratio of 1.00" in message and "smaller" in message
    (message,) = messages(check_fit(MAIN, DRAFT, "CPU", "CPU"), "ok", "cost ratio")
    assert "cost ratio of 0.06" in message


def test_rollback_is_tested_on_request(run_here):
    findings = result_of(run_here(PROGRAM, DRAFT, DRAFT, "--json", "--rollback"))["findings"]
    rollback = [finding for finding in findings if finding["what"] == "rollback"]
    assert [(finding["level"], finding["message"].split(":")[0]) for finding in rollback] == [
        ("ok", "main"),
        ("ok", "draft"),
    ]


def test_rollback_check_reports_errors_and_required_properties(tmp_path, monkeypatch):
    monkeypatch.setattr(cached_model, "PagedModel", OneShort)
    findings = list(check_rollback(DRAFT, save_llama_with_outlier_keys(tmp_path / "ir", 40), "CPU", "CPU"))
    assert [finding.level for finding in findings] == ["error", "error"]
    assert all("this model cannot be rolled back" in finding.message for finding in findings)
    monkeypatch.undo()
    (finding,) = list(check_rollback(DRAFT, tmp_path / "ir", "CPU", "CPU"))[1:]
    assert finding.level == "ok" and "KEY_CACHE_QUANT_MODE=BY_TOKEN" in finding.message
