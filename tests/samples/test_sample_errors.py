"""Bad input to the samples: one sentence on stderr, the right exit status, no stack trace, nothing on stdout."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.support.cutting_tokenizer import cutting_tokenizer
from tests.support.paths import DRAFT, MAIN, ROOT

SPECULATIVE = "samples/speculative_greedy_lm.py"
STAND_ALONE = "samples/speculative_decoding_lm.py"
PROMPT = "def read_file(path):"
SMALL = DRAFT  # the embedded draft serves as the main model, too, because it is fast


@pytest.fixture
def broken(tmp_path):
    """A copy of the embedded draft to break."""
    folder = tmp_path / "broken"
    shutil.copytree(DRAFT, folder)
    return folder


def assert_one_sentence(done, status, *parts):
    """The last line of stderr contains `parts`. The other lines are warnings, notes and loading messages."""
    *before, last = done.stderr.splitlines()
    assert done.returncode == status, done.stderr
    assert done.stdout == ""
    assert last.startswith("error: ")
    for part in parts:
        assert str(part) in last
    assert all(line.startswith(("Loading ", "warning: ", "note: ")) for line in before), done.stderr


# ---- folders --------------------------------------------------------------------------------------------------------


def test_missing_folder(run, tmp_path):
    done = run(SPECULATIVE, tmp_path / "nowhere", DRAFT, PROMPT)
    assert_one_sentence(done, 2, "main", f"no folder {tmp_path / 'nowhere'}")


def test_folder_without_model(run_here, tmp_path):
    assert_one_sentence(run_here(SPECULATIVE, SMALL, tmp_path, PROMPT), 2, tmp_path, "no openvino_model.xml", "draft")


@pytest.mark.parametrize("weights", ["model.safetensors", "model-00001-of-00002.safetensors", "pytorch_model.bin"])
def test_hugging_face_checkpoint_names_the_conversion_command(run_here, tmp_path, weights):
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / weights).touch()
    done = run_here(SPECULATIVE, tmp_path, DRAFT, PROMPT)
    assert_one_sentence(done, 2, tmp_path, "Hugging Face", "python convert/export_pair.py MAIN DRAFT OUT_DIR")
    assert (ROOT / "convert/export_pair.py").exists()


@pytest.mark.parametrize("part", ["tokenizer", "detokenizer"])
def test_model_without_tokenizer_ir(run_here, broken, part):
    (broken / f"openvino_{part}.xml").unlink()
    assert_one_sentence(run_here(SPECULATIVE, broken, DRAFT, PROMPT), 2, f"no openvino_{part}.xml", "convert_tokenizer")


@pytest.mark.parametrize("part", ["model", "tokenizer", "detokenizer"])
@pytest.mark.parametrize("size", [0, 1000, -1], ids=["empty", "start only", "one byte short"])
def test_truncated_weights(run_here, broken, part, size):
    weights = broken / f"openvino_{part}.bin"
    whole = weights.stat().st_size
    os.truncate(weights, size if size >= 0 else whole + size)
    assert_one_sentence(run_here(SPECULATIVE, SMALL, broken, PROMPT), 1, weights, f"of {whole} bytes", "again")


def test_missing_weights(run_here, broken):
    (broken / "openvino_model.bin").unlink()
    assert_one_sentence(run_here(SPECULATIVE, broken, DRAFT, PROMPT), 1, broken, "no openvino_model.bin", "again")


@pytest.mark.parametrize("part", ["model", "tokenizer"])
def test_truncated_xml(run_here, broken, part):
    xml = broken / f"openvino_{part}.xml"
    os.truncate(xml, 5000)
    assert_one_sentence(run_here(SPECULATIVE, broken, DRAFT, PROMPT), 1, xml, "corrupt", "again")


def test_xml_that_is_not_a_model(run_here, broken):
    (broken / "openvino_model.xml").write_text("<html>404 not found</html>", encoding="utf-8")
    assert_one_sentence(run_here(SPECULATIVE, broken, DRAFT, PROMPT), 1, "openvino_model.xml", "corrupt", "<html>")


# ---- the pair -------------------------------------------------------------------------------------------------------


def test_swapped_pair_is_a_warning(run_here):
    done = run_here(SPECULATIVE, DRAFT, MAIN, PROMPT, "--max-new-tokens", 4)
    assert done.returncode == 0, done.stderr
    warning = next(line for line in done.stderr.splitlines() if line.startswith("warning: "))
    assert warning.startswith(f"warning: {MAIN} as a draft of {DRAFT}: main weighs ") and "swapped?" in warning


def test_other_tokenizer_is_rejected_with_first_differing_tokens(run_here, broken, other_tokenizer):
    for file in other_tokenizer.iterdir():
        shutil.copy(file, broken)
    done = run_here(SPECULATIVE, SMALL, broken, PROMPT)
    assert_one_sentence(done, 2, SMALL, broken, "token ids differ", "' in main and '", "same tokenizer")


def test_draft_without_detokenizer_is_compared_by_encoding(run_here, broken, other_tokenizer):
    for file in broken.glob("openvino_detokenizer.*"):
        file.unlink()
    assert run_here(SPECULATIVE, SMALL, broken, PROMPT, "--max-new-tokens", 4).returncode == 0
    for file in other_tokenizer.glob("openvino_tokenizer.*"):
        shutil.copy(file, broken)
    done = run_here(SPECULATIVE, SMALL, broken, PROMPT)
    assert_one_sentence(done, 2, SMALL, broken, "encoded differently", "for main and", "same tokenizer")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_corrupt_config(run_here, broken, name):
    (broken / name).write_text('{"eos_token_id": ', encoding="utf-8")
    assert_one_sentence(run_here(SPECULATIVE, broken, DRAFT, PROMPT), 1, broken / name, "cannot be read", "again")


# ---- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", ["0", "-1", "65", "1000000000000", "four", "2.5", ""])
def test_invalid_draft_length(run_here, k):
    done = run_here(SPECULATIVE, SMALL, DRAFT, PROMPT, f"--num-assistant-tokens={k}")
    assert_one_sentence(done, 2, repr(k), "from 1 to 64")


def test_draft_length_above_npu_limit(run_here):
    npu = ("--device", "NPU", "--property", "NPUW_DEVICES=CPU")
    assert_one_sentence(run_here(SPECULATIVE, SMALL, DRAFT, PROMPT, "-k", 8, *npu), 2, "-k 8", "NPU", "1 to 7")


@pytest.mark.parametrize("count", ["0", "-5", "many", "99999999999"])
def test_invalid_number_of_new_tokens(run_here, count):
    assert_one_sentence(run_here(SPECULATIVE, SMALL, DRAFT, PROMPT, f"--max-new-tokens={count}"), 2, repr(count))


@pytest.mark.parametrize("stdin", ["", "\n"])
def test_empty_prompt(run_here, stdin):
    assert_one_sentence(run_here(SPECULATIVE, SMALL, DRAFT, "-", stdin=stdin), 2, "prompt is empty")
    if not stdin:
        assert_one_sentence(run_here(SPECULATIVE, SMALL, DRAFT, ""), 2, "prompt is empty")


def test_prompt_not_in_utf_8():
    command = [sys.executable, SPECULATIVE, str(SMALL), str(DRAFT), "-"]
    done = subprocess.run(command, input="naïve".encode("latin-1"), capture_output=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.decode().startswith("error: standard input is not UTF-8 (byte 2)")


def test_prompt_longer_than_context(run_here):
    assert_one_sentence(
        run_here(SPECULATIVE, SMALL, DRAFT, "-", stdin="x = 1\n" * 3000), 2, "too long", "context", SMALL
    )


def test_prompt_truncated_by_tokenizer(run_here, tmp_path):
    cutting_tokenizer(DRAFT, tmp_path / "cutting", 64)
    done = run_here("samples/greedy_causal_lm.py", tmp_path / "cutting", "-", stdin="x = 1\n" * 100)
    assert_one_sentence(done, 2, "64 tokens or more", "shorten the text")


def test_generation_limited_by_context_is_noted(run_here):
    done = run_here("samples/greedy_causal_lm.py", DRAFT, "-", "--max-new-tokens", 5000, stdin=" the" * 900)
    assert done.returncode == 0, done.stderr
    note = next(line for line in done.stderr.splitlines() if line.startswith("note: "))
    assert "new tokens, not 5000" in note


@pytest.mark.parametrize("option", ["--device", "--draft-device"])
@pytest.mark.parametrize("device", ["GPX", "cpu", "", "AUTO:GPX,CPU", "HETERO:GPX", "CPU,GPX"])
def test_unknown_device(run_here, option, device):
    bad = "GPX" if ":" in device else device or "''"
    role = "main" if option == "--device" else "draft"
    done = run_here(SPECULATIVE, SMALL, DRAFT, PROMPT, option, device)
    assert_one_sentence(done, 2, f"{role}: there is no {bad}: ", "OpenVINO finds CPU")


def test_device_without_driver(run_here):
    import openvino

    here = {name.partition(".")[0] for name in openvino.Core().available_devices}
    missing = [device for device in ("GPU", "NPU") if device not in here]
    if not missing:
        pytest.skip("this machine has a GPU and an NPU, with their drivers")
    remedy = {"GPU": "install the OpenCL runtime", "NPU": "install the Intel NPU driver"}
    for device in missing:
        done = run_here(SPECULATIVE, SMALL, DRAFT, PROMPT, "--device", device)
        assert_one_sentence(done, 2, f"there is no {device}: ", remedy[device])


@pytest.mark.parametrize("value", ["INFERENCE_PRECISION_HINT", "=f32", "KEY="])
def test_malformed_property(run_here, value):
    assert_one_sentence(run_here(SPECULATIVE, SMALL, DRAFT, PROMPT, f"--property={value}"), 2, repr(value), "KEY=VALUE")


def test_unsupported_property(run_here):
    done = run_here(SPECULATIVE, SMALL, DRAFT, PROMPT, "--property", "NO_SUCH=1")
    assert_one_sentence(done, 1, "Unsupported property NO_SUCH by CPU plugin", "--debug")


def test_debug_option_prints_stack_trace(run):
    done = run(SPECULATIVE, SMALL, DRAFT, PROMPT, "--property", "NO_SUCH=1", "--debug")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "speculative_greedy_lm.py" in done.stderr


def test_insufficient_memory():
    resource = pytest.importorskip("resource", reason="only POSIX systems limit a process's memory")
    limit = 600 << 20  # the engine alone takes about half a gigabyte of address space
    command = [sys.executable, SPECULATIVE, str(MAIN), str(DRAFT), PROMPT]
    done = subprocess.run(
        command,
        capture_output=True,
        encoding="utf-8",
        cwd=ROOT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert_one_sentence(done, 1, "not enough memory", "smaller format")


def test_missing_argument(run_here):
    assert_one_sentence(run_here(SPECULATIVE, SMALL, DRAFT), 2, "prompt", "--help")


def test_chat_checks_its_models(run_here, tmp_path):
    assert_one_sentence(run_here("samples/speculative_chat.py", SMALL, tmp_path), 2, tmp_path, "no openvino_model.xml")


# ---- the stand-alone sample -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["main", "draft"])
@pytest.mark.parametrize("kind", ["missing", "without a model", "checkpoint"])
def test_stand_alone_sample_rejects_unusable_folder(run_here, tmp_path, role, kind):
    if kind != "missing":
        (tmp_path / "bad").mkdir()
    if kind == "checkpoint":
        (tmp_path / "bad/model.safetensors").touch()
    folders = {"main": SMALL, "draft": DRAFT, role: tmp_path / "bad"}
    done = run_here(STAND_ALONE, *folders.values(), PROMPT)
    assert_one_sentence(done, 2, f"there is no {tmp_path / 'bad'}/openvino_model.xml", "convert/export_pair.py")


@pytest.mark.parametrize("option", ["--device", "--draft-device"])
@pytest.mark.parametrize("device", ["GPX", "cpu", "HETERO:GPX"])  # AUTO leaves GPX out
def test_stand_alone_sample_rejects_unknown_device(run_here, option, device):
    done = run_here(STAND_ALONE, SMALL, DRAFT, PROMPT, option, device)
    assert_one_sentence(done, 2, "GPX" if "GPX" in device else device)


@pytest.mark.parametrize("listed", [True, False], ids=["with detokenizer", "without detokenizer"])
def test_stand_alone_sample_rejects_other_tokenizer(run_here, broken, other_tokenizer, listed):
    for file in other_tokenizer.iterdir():
        shutil.copy(file, broken)
    if not listed:
        for file in broken.glob("openvino_detokenizer.*"):
            file.unlink()
    assert_one_sentence(run_here(STAND_ALONE, SMALL, broken, PROMPT), 2, SMALL, broken, "differ", "same tokenizer")


def test_stand_alone_sample_needs_the_main_models_tokenizer(run_here, broken):
    """An EAGLE-3 head has none."""
    for file in broken.glob("openvino_tokenizer.*"):
        file.unlink()
    done = run_here(STAND_ALONE, broken, DRAFT, PROMPT)
    assert_one_sentence(done, 2, f"there is no {broken}/openvino_tokenizer.xml", "convert/export_pair.py")


def test_stand_alone_sample_needs_no_draft_detokenizer(run_here, broken):
    for file in broken.glob("openvino_detokenizer.*"):
        file.unlink()
    done = run_here(STAND_ALONE, SMALL, broken, PROMPT, "--max-new-tokens", 4)
    assert done.returncode == 0 and done.stdout, done.stderr


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["-k", "0"], ["-k", "0"]),
        (["-k", "65"], ["-k", "65"]),
        (["-k", "four"], ["-k", "'four'"]),
        (["--max-new-tokens", "many"], ["--max-new-tokens", "'many'"]),
        (["--max-new-tokens=-5"], ["--max-new-tokens of 1 or more"]),
        (["--max-new-tokens", "0"], ["--max-new-tokens of 1 or more"]),
        (["--property", "INFERENCE_PRECISION_HINT"], ["--property", "'INFERENCE_PRECISION_HINT'"]),
        (["--property", "NO_SUCH=1"], ["NO_SUCH"]),
        (["--recommended"], ["--recommended"]),
    ],
)
def test_stand_alone_sample_rejects_invalid_option(run_here, options, parts):
    assert_one_sentence(run_here(STAND_ALONE, SMALL, DRAFT, PROMPT, *options), 2, *parts)


@pytest.mark.parametrize("stdin", ["", "\n"])
def test_stand_alone_sample_rejects_empty_prompt(run_here, stdin):
    assert_one_sentence(run_here(STAND_ALONE, SMALL, DRAFT, "-", stdin=stdin), 2, "prompt that is not empty")
    assert_one_sentence(run_here(STAND_ALONE, SMALL, DRAFT, ""), 2, "prompt that is not empty")
    assert_one_sentence(run_here(STAND_ALONE, SMALL, DRAFT), 2, "prompt")


def test_stand_alone_sample_reports_engine_error_in_one_sentence(run, broken):
    os.truncate(broken / "openvino_model.bin", 1000)
    assert_one_sentence(run(STAND_ALONE, SMALL, broken, PROMPT), 2, "scripts/check_pair.py")
