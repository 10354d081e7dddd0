"""The conversion command: its output, the files it must not touch, and its errors.

Programs run in child processes where that matters (optimum-cli as a child, Ctrl-C, a missing package); elsewhere main()
is called with optimum-cli in this process, which saves the seconds of importing it.
"""

import contextlib
import ctypes
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import openvino_genai
import pytest

from convert import export_pair
from speculative.convert import optimum_cli, source
from speculative.convert.errors import ConvertError
from speculative.convert.pair_folder import PairFolder
from speculative.pair.model_info import checkpoint_facts
from tests.support.later import transformers
from tests.support.paths import ROOT, everything_in
from tests.support.tiny_checkpoints import run_optimum_here, save_checkpoint, save_ir, train_tokenizer
from tests.support.waiting import PATIENCE, wait_until, wait_until_loaded

PROGRAM = "convert/export_pair.py"
FP32 = ["--weight-format", "fp32", "--draft-weight-format", "fp32"]
posix = pytest.mark.posix("signals and limits")


@pytest.fixture(scope="module")
def irs(tokenizer, tmp_path_factory):
    """Folders `main` and `draft`, OpenVINO IR."""
    folder = tmp_path_factory.mktemp("irs")
    for role, width in (("main", 400), ("draft", 384)):
        save_ir(tokenizer, folder / role, logits_width=width)
    return folder


@pytest.fixture
def command():
    return export_pair.main


@pytest.fixture
def optimum_runs(monkeypatch):
    """Run optimum-cli in this process; the fixture is the list of commands."""
    runs = []

    def run(typed, *rest):
        runs.append(typed)
        run_optimum_here(typed, *rest)

    monkeypatch.setattr(optimum_cli, "run", run)
    return runs


def pair_of(folder):
    return [folder / "main", folder / "draft"]


# --- output ---


def test_pair_is_exported_checked_and_described(checkpoints, optimum_runs, tmp_path, capsys):
    pair = tmp_path / "models" / "tiny"
    pair.mkdir(parents=True)
    (pair / "README.md").write_text("a model card", encoding="utf-8")
    assert export_pair.main([*map(str, pair_of(checkpoints)), str(pair), "--weight-format", "fp32"]) == 0
    out = capsys.readouterr().out

    names = sorted(path.name for path in pair.iterdir())
    assert names == ["README.md", "draft", "main", "pair.json"]  # and the logs of child processes
    assert [path.name for path in pair.parent.iterdir()] == ["tiny"]  # no leftovers beside it
    commands = re.findall(r"^(?:main|draft): (optimum-cli export openvino .*)$", out, re.MULTILINE)
    assert len(commands) == len(optimum_runs) == 2
    assert "--task text-generation-with-past --weight-format fp32" in commands[0]
    assert "--weight-format int8" in commands[1]
    assert "ok      encodings" in out

    described = json.loads((pair / "pair.json").read_text(encoding="utf-8"))
    assert described["tokenizer_fingerprint"].startswith("sha256:")
    main = described["main"]
    assert main["source"] == str(checkpoints / "main")
    assert main["command"].startswith("optimum-cli export openvino --model ")
    assert main["command"].endswith(" --task text-generation-with-past --weight-format fp32 main")
    assert main["bytes"] == sum(path.stat().st_size for path in (pair / "main").iterdir())
    assert {"optimum-intel", "transformers", "openvino-genai"} <= main["versions"].keys()
    typed = {str(checkpoints / "main"), str(checkpoints / "draft")}
    texts = [path.read_text(encoding="utf-8") for path in pair.rglob("*.json")]
    assert not any(".unfinished" in text for text in texts)
    rest = json.dumps(described).replace(json.dumps(str(checkpoints))[1:-1], "")
    assert str(Path.home()) not in rest and str(ROOT) not in rest, typed

    exact = {"INFERENCE_PRECISION_HINT": "f32"}  # bf16 crashes on a single core with AMX, see docs/upstream.md
    draft_model = openvino_genai.draft_model(str(pair / "draft"), "CPU", **exact)
    pipeline = openvino_genai.LLMPipeline(str(pair / "main"), "CPU", draft_model=draft_model, **exact)
    assert pipeline.generate("def", max_new_tokens=8, num_assistant_tokens=3)


def test_config_records_source_path_as_typed(checkpoints, irs, optimum_runs, tmp_path, monkeypatch):
    """The folder name, `model`, is also part of a key of the config (`save_onnx_model`)."""
    shutil.copytree(checkpoints / "draft", tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    assert export_pair.main([str(irs / "main"), "model/", "pair"]) == 0
    config = json.loads(Path("pair/draft/openvino_config.json").read_text(encoding="utf-8"))
    assert config["quantization_config"]["tokenizer"] == "model/" and "save_onnx_model" in config


def test_second_run_exports_only_missing_or_changed_models(checkpoints, optimum_runs, tmp_path, capsys):
    pair = tmp_path / "pair"
    sources = shutil.copytree(checkpoints, tmp_path / "sources")
    command = [*map(str, pair_of(sources)), str(pair), *FP32]
    assert export_pair.main(command) == 0
    assert len(optimum_runs) == 2
    before = everything_in(pair)

    assert export_pair.main(command) == 0
    assert len(optimum_runs) == 2
    assert everything_in(pair) == before
    assert capsys.readouterr().out.count("already complete") == 2

    config = sources / "draft" / "config.json"  # the source changes
    config.write_text(config.read_text(encoding="utf-8").replace("256", "128"), encoding="utf-8")
    assert export_pair.main(command) == 0
    assert [Path(typed[-1]).name for typed in optimum_runs[2:]] == ["draft.part"]
    assert "the draft has 128 tokens" in capsys.readouterr().out

    (pair / "main" / "openvino_model.bin").unlink()  # and an incomplete model is exported again
    assert export_pair.main(command) == 0
    assert [Path(typed[-1]).name for typed in optimum_runs[3:]] == ["main.part"]


def test_options_are_passed_to_optimum_cli(checkpoints, tmp_path, capsys):
    arguments = [*map(str, pair_of(checkpoints)), str(tmp_path / "pair"), "--dry-run", "--weight-format", "int4"]
    arguments += ["--main-args=--awq --group-size 64", "--draft-args", "--backup-precision none", "--trust-remote-code"]
    assert export_pair.main([*arguments, "--", "--ratio", "0.8"]) == 0
    note, main, draft = capsys.readouterr().out.splitlines()
    assert "with your permissions" in note
    task = "--task text-generation-with-past"
    own = "--trust-remote-code --ratio 0.8"
    assert f"{task} --weight-format int4 {own} --awq --group-size 64 {tmp_path / 'pair' / 'main'}" in main
    assert (
        f"--weight-format int8 --trust-remote-code --ratio 0.8 --backup-precision none {tmp_path / 'pair' / 'draft'}"
        in draft
    )
    assert not any(tmp_path.iterdir())  # --dry-run prints only


def test_dry_run_shows_how_to_pass_a_revision(irs, tmp_path, capsys):
    arguments = ["owner/model", str(irs / "draft"), str(tmp_path / "pair"), "--dry-run", "--revision", "v1"]
    assert export_pair.main(arguments) == 0
    download, note, export, _ = capsys.readouterr().out.splitlines()
    assert download == "hf download owner/model --revision v1"
    assert note.startswith("# give the folder that this prints instead of the hub id") and "owner/model" in export


def test_optimum_cli_options_accept_equals_sign(checkpoints, tmp_path, capsys):
    arguments = [*map(str, pair_of(checkpoints)), str(tmp_path / "pair"), "--dry-run"]
    assert export_pair.main([*arguments, "--", "--quant-mode=int8", "--dataset=wikitext2"]) == 0
    shown = capsys.readouterr().out.splitlines()[0]
    assert "--quant-mode=int8 --dataset=wikitext2" in shown and "--weight-format" not in shown
    assert optimum_cli._needs_hub(["--dataset=wikitext2"]) and not optimum_cli._needs_hub(["--other", "x"])


def test_backslash_is_a_path_separator_on_windows_only(monkeypatch):
    for system, given in (("nt", r'--cache_dir "C:\my cache" #1'), ("posix", r"--cache_dir C:\\my\ cache \#1")):
        with monkeypatch.context() as patch:
            patch.setattr(export_pair.os, "name", system)
            words = export_pair.shell_words(given)
        assert words == ["--cache_dir", r"C:\my cache", "#1"]


def test_npu_export_adds_symmetric_weight_options(checkpoints, tmp_path, capsys):
    arguments = [*map(str, pair_of(checkpoints)), str(tmp_path / "pair"), "--dry-run", "--for", "NPU"]
    for own in (["--group-size", "64"], ["--group-size=64"]):
        assert export_pair.main([*arguments, "--", *own]) == 0
        out = capsys.readouterr().out
        assert "# main for the NPU: --sym --ratio 1.0 added" in out
        assert "your own --group-size kept" in out
        assert f"--weight-format int4 --sym --ratio 1.0 {' '.join(own)}" in out
        assert f"--weight-format int8 --sym {' '.join(own)}" in out

    assert export_pair.main(["--pair", "qwen3-8b", "--for", "NPU", "--dry-run"]) == 0
    assert (
        "--model Qwen/Qwen3-8B --task text-generation-with-past --weight-format int4 --sym --ratio 1.0 --group-size -1"
        in (capsys.readouterr().out)
    )


@pytest.mark.parametrize(
    ("width", "size", "exported"),
    [
        pytest.param(width, size, exported, marks=[pytest.mark.long] * (exported and width != 96))
        for width, size in ((192, 64), (96, 32), (80, -1), (256, None))
        for exported in (False, True)
    ],
)
def test_int4_uses_largest_fitting_group_size(width, size, exported, tokenizer, irs, optimum_runs, tmp_path, capsys):
    checkpoint = save_wide_checkpoint(width, tokenizer, tmp_path / "draft")
    pair = tmp_path / "pair"
    command = [str(irs / "main"), str(checkpoint), str(pair), "--draft-weight-format", "int4"]
    assert export_pair.main(command + ["--dry-run"] * (not exported)) == 0
    out = capsys.readouterr().out
    added = f" --group-size {size}" if size else ""
    assert re.search(rf"--weight-format int4{added} \S+$", out, re.MULTILINE)
    sentence = f"draft --group-size {size} added: the default, 128, does not divide hidden_size {width}\n"
    assert (sentence in out) == bool(size)
    if exported:
        arguments = json.loads((pair / "pair.json").read_text(encoding="utf-8"))["draft"]["arguments"]
        assert arguments[arguments.index("int4") + 1 :] == added.split()
        assert 'element_type="u4"' in (pair / "draft" / "openvino_model.xml").read_text(encoding="utf-8")


def save_wide_checkpoint(width, tokenizer, folder):
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=256,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_invalid_group_size_is_rejected_with_alternatives(refuses, tokenizer, irs, tmp_path):
    checkpoint = save_wide_checkpoint(96, tokenizer, tmp_path / "draft")
    for given in (["--group-size", "64"], ["--group-size=128"]):
        message = refuses(2, irs / "main", checkpoint, tmp_path / "pair", "--draft-weight-format", "int4", "--", *given)
        assert "does not divide hidden_size 96 of" in message and "give 32, -1 (-1: one group" in message
    message = refuses(
        2, irs / "main", checkpoint, tmp_path / "p", "--draft-weight-format=int4", "--", "--group-size", "x"
    )
    assert "--group-size x is not a whole number" in message
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]
    command = [str(irs / "main"), str(checkpoint), str(tmp_path / "pair"), "--dry-run", "--draft-weight-format", "int4"]
    for fits in (["--group-size", "32"], ["--group-size", "64", "--group-size-fallback", "adjust"]):
        assert export_pair.main([*command, "--", *fits]) == 0


def test_npu_uses_channel_wise_groups_if_128_does_not_divide(checkpoints, tmp_path, capsys):
    arguments = [*map(str, pair_of(checkpoints)), str(tmp_path / "pair"), "--dry-run", "--for", "NPU"]
    assert export_pair.main(arguments) == 0
    assert "--weight-format int4 --sym --ratio 1.0 --group-size -1" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "known"), [("owner/unknown", False), ("facebook/opt-6.7b", True)])
def test_models_with_optimum_cli_recipe_are_known(name, known):
    assert optimum_cli.has_recipe(name) == known


def test_draft_from_main_is_the_main_model_in_int4(checkpoints, optimum_runs, tmp_path):
    arguments = [str(checkpoints / "main"), "--draft-from-main", str(tmp_path / "pair"), "--weight-format", "fp16"]
    assert export_pair.main([*arguments, "--draft-args", "--group-size 32"]) == 0
    described = json.loads((tmp_path / "pair" / "pair.json").read_text(encoding="utf-8"))
    assert described["draft"]["source"] == described["main"]["source"]
    assert "int4" in described["draft"]["arguments"]
    assert described["draft"]["bytes"] < described["main"]["bytes"]


def test_draft_from_main_requires_a_checkpoint(refuses, irs, tmp_path):
    message = refuses(2, irs / "main", tmp_path / "pair", "--draft-from-main", "--weight-format", "fp16")
    assert "is OpenVINO IR, which is copied unchanged; give its Hugging Face checkpoint as MAIN" in message
    assert not any(tmp_path.iterdir())


def test_ir_folders_are_copied_and_checked(irs, tmp_path, capsys):
    command = [*map(str, pair_of(irs)), str(tmp_path / "pair")]
    for more, copied in (([], 2), ([], 0), (["--force"], 2)):
        assert export_pair.main(command + more) == 0
        assert capsys.readouterr().out.count("copied unchanged") == copied
    for half in ("main", "draft"):
        assert everything_in(tmp_path / "pair" / half) == everything_in(irs / half)
    described = json.loads((tmp_path / "pair" / "pair.json").read_text(encoding="utf-8"))
    assert described["main"]["command"] is None


def test_subfolders_of_ir_are_no_part_of_the_model(irs, tmp_path, capsys):
    """The state of a training, or an OUT_DIR inside MAIN, which would be copied into itself."""
    main = shutil.copytree(irs / "main", tmp_path / "main")
    (main / "work").mkdir()
    (main / "work/states").write_bytes(b"gigabytes")
    command = [str(main), str(irs / "draft"), str(main / "pair")]
    for copied in (2, 0):
        assert export_pair.main(command) == 0
        assert capsys.readouterr().out.count("copied unchanged") == copied
    assert everything_in(main / "pair/main") == everything_in(irs / "main")


@pytest.mark.posix("a shell")
def test_printed_sample_command_can_be_pasted(irs, tmp_path, capsys):
    pair = tmp_path / "a pair"
    assert export_pair.main([*map(str, pair_of(irs)), str(pair)]) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1].removeprefix("try: "))
    assert words == ["python", "samples/speculative_decoding_lm.py", *map(str, pair_of(pair)), "def read_file(path):"]


def test_known_pairs_are_complete_and_listed(capsys):
    pairs = export_pair.known_pairs()
    assert len(pairs) >= 11
    for name, pair in pairs.items():
        halves = [half for half in ("main", "draft") if half in pair]
        sizes = [f"{half}_size" for half in halves]
        assert {"main", "why", "licence", "device", "verified", *sizes} <= pair.keys(), name
        for half, form in (("main", "weight_format"), ("draft", "draft_weight_format"))[: len(halves)]:
            converted_already = pair[half].endswith("-ov") or pair[half].startswith("models/")
            keeps_its_own = name == "qwen2.5-coder-1.5b"  # the main model's GGUF file, without a draft
            assert (form in pair) != (converted_already or keeps_its_own), name
        assert export_pair.main(["--pair", name, "--dry-run"]) == 0
        out = capsys.readouterr().out
        assert all(pair[half] in out for half in halves) and str(Path("models", name)) in out
    assert export_pair.main(["--list"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n{name}\n" in f"\n{out}" for name in pairs)


# --- from the hub, which is a server in this process ---


class Hub(BaseHTTPRequestHandler):
    """The three responses of a hub that a download needs: a model's file list, a file's size, a file."""

    models: ClassVar[dict[str, Path]] = {}
    broken = ""  # a file that it fails to send
    commit = "0123456789abcdef0123456789abcdef01234567"

    def do_GET(self):
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self.answer_information("/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main")
        else:
            self.answer_file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))

    do_HEAD = do_GET

    def answer_information(self, name, revision):
        if name == "owner/gated":
            self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif name not in self.models:
            self.answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", "v1", self.commit):
            self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        else:
            files = [{"rfilename": path.name, "size": path.stat().st_size} for path in self.models[name].iterdir()]
            content = {"id": name, "modelId": name, "sha": self.commit, "siblings": files, "private": False, "tags": []}
            self.answer(200, json.dumps(content).encode(), {})

    def answer_file(self, name, revision, file):
        if file == self.broken:
            self.answer(403, b"", {})
            return
        content = (self.models[name] / file).read_bytes()
        self.answer(200, content, {"ETag": f'"{file}"', "X-Repo-Commit": self.commit})

    def answer(self, status, body, headers):
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        """Log nothing."""


@pytest.fixture
def hub(tmp_path):
    """Environment of a process for which the hub is the server above."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "hub"), "HF_TOKEN": ""}
    server.shutdown()


def test_hub_snapshots_are_pinned_and_recorded(run, hub, irs, tmp_path, monkeypatch):
    monkeypatch.setattr(Hub, "models", {"owner/main-ov": irs / "main", "owner/draft-ov": irs / "draft"})
    pair = tmp_path / "pair"
    arguments = ["--draft-revision", "v1", "owner/main-ov", "owner/draft-ov"]
    finished = run(PROGRAM, *arguments, pair, env=hub)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    described = json.loads((pair / "pair.json").read_text(encoding="utf-8"))
    assert described["main"]["source"] == "owner/main-ov"
    assert described["main"]["revision"] == described["draft"]["revision"] == Hub.commit
    assert str(tmp_path) not in json.dumps(described)
    assert not any(path.is_symlink() for path in pair.rglob("*"))

    nowhere = {**hub, "HF_ENDPOINT": "http://127.0.0.1:9"}  # a hub out of reach: the snapshot downloaded earlier serves
    finished = run(PROGRAM, *arguments, tmp_path / "second", env=nowhere)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "the hub cannot be reached; using an earlier download" in finished.stdout


def test_hub_checkpoint_is_exported_under_its_hub_name(run, hub, checkpoints, irs, tmp_path, monkeypatch):
    """In child processes, as a user runs it."""
    repository = shutil.copytree(checkpoints / "main", tmp_path / "repository")
    for copy in ("consolidated.safetensors", "pytorch_model.bin"):
        shutil.copy(repository / "model.safetensors", repository / copy)
    monkeypatch.setattr(Hub, "models", {"owner/Tiny-Llama": repository})
    pair = tmp_path / "pair"
    finished = run(PROGRAM, irs / "main", "owner/Tiny-Llama", pair, env=hub)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert re.search(r"--model \S*/Tiny-Llama --task", finished.stdout)  # by that name optimum-cli finds its recipes
    described = json.loads((pair / "pair.json").read_text(encoding="utf-8"))
    assert "--model owner/Tiny-Llama --task" in described["draft"]["command"]
    assert sorted(path.name for path in pair.iterdir()) == ["draft", "draft.log", "main", "pair.json"]
    assert "Applying Weight Compression" in (pair / "draft.log").read_text(encoding="utf-8")
    assert "Applying Weight Compression" not in finished.stdout + finished.stderr
    downloaded = (tmp_path / "hub").rglob("snapshots/*/*")
    assert [path.name for path in downloaded if path.suffix in (".safetensors", ".bin")] == ["model.safetensors"]


def test_duplicate_weight_files_count_once(checkpoints, tmp_path):
    folder = shutil.copytree(checkpoints / "main", tmp_path / "main")
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    counts = {source.count_parameters(path) for path in (folder, checkpoints / "main")}
    sizes = {checkpoint_facts(path).weight_bytes for path in (folder, checkpoints / "main")}
    assert len(counts) == len(sizes) == 1 and min(counts | sizes) > 0


def test_interrupted_download_is_not_taken_for_an_earlier_one(run, hub, irs, tmp_path, monkeypatch):
    monkeypatch.setattr(Hub, "models", {"owner/main-ov": irs / "main"})
    monkeypatch.setattr(Hub, "broken", "openvino_tokenizer.bin")
    command = (PROGRAM, "owner/main-ov", irs / "draft", tmp_path / "pair")
    finished = run(*command, env=hub)
    assert finished.returncode == 1 and not (tmp_path / "pair").exists()
    assert "the download of owner/main-ov was interrupted" in finished.stderr.splitlines()[-1]
    assert "Traceback" not in finished.stderr
    monkeypatch.setattr(Hub, "broken", "")
    assert run(*command, env=hub).returncode == 0
    assert (tmp_path / "pair/main/openvino_tokenizer.bin").is_file()


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["owner/absent"], 2, "there is no folder owner/absent here, and no public model of that name"),
        (["owner/gated"], 1, "accept its licence"),
        (["owner/main-ov", "--revision", "v9"], 2, "has no revision v9"),
    ],
)
def test_hub_errors_are_one_sentence(arguments, status, words, run, hub, irs, tmp_path, monkeypatch):
    monkeypatch.setattr(Hub, "models", {"owner/main-ov": irs / "main"})
    name, *rest = arguments
    finished = run(PROGRAM, name, irs / "draft", tmp_path / "pair", *rest, env=hub)
    assert finished.returncode == status, finished.stderr
    assert words in finished.stderr and len(finished.stderr.splitlines()) == 1
    assert {path.name for path in tmp_path.iterdir()} <= {"hub"}


def test_unreachable_hub_is_reported_with_alternative(run, irs, tmp_path):
    env = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hub")}
    finished = run(PROGRAM, "owner/main", irs / "draft", tmp_path / "pair", env=env)
    assert finished.returncode == 1
    assert "the hub cannot be reached for owner/main" in finished.stderr
    assert "give the path of its folder instead" in finished.stderr
    assert len(finished.stderr.splitlines()) == 1


# --- errors: nothing is lost, and no partial output is left ---


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "expected MAIN DRAFT OUT_DIR, got nothing"),
        (["main", "draft"], "expected MAIN DRAFT OUT_DIR, got main draft"),
        (["main", "draft", "out", "more"], "got main draft out more"),
        (["--pair", "nope"], "unknown pair 'nope'; known pairs: smollm2"),
        (["--pair", "gpt2-xl", "--draft-from-main"], "names a draft already"),
        (["main", "out", "--draft-from-main", "--weight-format", "int4"], "smaller than int4"),
        (["main", "out", "--draft-from-main", "--draft-revision", "v1"], "give its --revision"),
        (["--pair", "smollm2-135m", "--revision", "v1"], "has a fixed version"),
        (["main", "out", "--without-draft", "--draft-weight-format", "int4"], "--draft-weight-format is for a draft;"),
        (["main", "out", "--without-draft", "--other-tokenizer"], "leave it out with --without-draft"),
        (["main", "draft", "out", "--weight-format", "int3"], "int3"),
        (["main", "draft", "out", "--", "--weight-format", "int4"], "put it before the --"),
        (["main", "draft", "out", "--", "--weight-format=int4"], "put it before the --"),
        (["main", "draft", "out", "--main-args", '"'], "check their quotes"),
        (["./main", "./draft", "out"], "./main is neither a folder here nor a hub id"),
    ],
)
def test_bad_usage_gives_one_sentence_error(arguments, words, refuses, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words in refuses(2, *arguments)
    assert not any(tmp_path.iterdir())


def test_debug_option_prints_traceback(tmp_path, capsys):
    assert export_pair.main([str(tmp_path), str(tmp_path), str(tmp_path / "pair"), "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_folder_without_model_is_rejected(refuses, irs, checkpoints, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "holds neither OpenVINO IR" in refuses(2, tmp_path / "empty", irs / "draft", tmp_path / "pair")
    gguf = tmp_path / "gguf"
    gguf.mkdir()
    (gguf / "model.gguf").touch()
    assert "model.gguf is empty" in refuses(1, gguf, irs / "draft", tmp_path / "pair")
    assert "has no revision" in refuses(2, *pair_of(irs), tmp_path / "pair", "--revision", "main")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "gguf"]


def test_corrupt_checkpoint_is_rejected_before_export(refuses, checkpoints, tmp_path):
    broken = shutil.copytree(checkpoints, tmp_path / "broken")
    weights = broken / "draft" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "model.safetensors is truncated" in refuses(1, *pair_of(broken), tmp_path / "pair")
    weights.write_bytes(b"no weights")
    assert "not a readable safetensors file" in refuses(1, *pair_of(broken), tmp_path / "pair")
    (broken / "main" / "config.json").write_text("{", encoding="utf-8")
    assert "config.json is corrupt" in refuses(1, *pair_of(broken), tmp_path / "pair")
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_checkpoint_with_missing_files_is_rejected_before_export(refuses, checkpoints, tmp_path):
    broken = shutil.copytree(checkpoints, tmp_path / "broken")
    draft = broken / "draft"
    transformers.AutoModelForCausalLM.from_pretrained(draft).save_pretrained(draft, max_shard_size="20KB")
    (draft / "model.safetensors").unlink()
    assert export_pair.main([*map(str, pair_of(broken)), str(tmp_path / "pair"), "--dry-run"]) == 0
    first, *others = sorted(draft.glob("model-*.safetensors"))
    first.unlink()
    message = refuses(1, *pair_of(broken), tmp_path / "pair")
    assert f"draft lacks {first.name} (1 of {1 + len(others)} files of weights are missing); copy or" in message
    (draft / "model.safetensors.index.json").write_text('{"weight_map": []}', encoding="utf-8")
    assert "draft/model.safetensors.index.json is no index of weight files" in refuses(
        1, *pair_of(broken), tmp_path / "pair"
    )
    shutil.copy(checkpoints / "draft/model.safetensors", draft)  # which transformers prefers
    assert export_pair.main([*map(str, pair_of(broken)), str(tmp_path / "pair"), "--dry-run"]) == 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (draft / name).unlink()
    message = refuses(1, *pair_of(broken), tmp_path / "pair")
    assert "draft has no tokenizer (tokenizer.json); copy it from the model's repository" in message
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_mismatched_pair_is_rejected_before_and_after_export(refuses, checkpoints, irs, tmp_path):
    other = train_tokenizer(vocab_size=300)
    checkpoint = save_checkpoint("llama", "draft", other, tmp_path / "checkpoint")
    message = refuses(1, checkpoints / "main", checkpoint, tmp_path / "pair")
    assert "not a sound pair, before exporting" in message and "84 of 384 token ids differ" in message
    ir = save_ir(other, tmp_path / "ir")
    message = refuses(1, irs / "main", ir, tmp_path / "pair")
    assert "not a sound pair" in message and "(--other-tokenizer converts it for that)" in message
    assert export_pair.main([str(irs / "main"), str(ir), str(tmp_path / "other"), "--other-tokenizer"]) == 0
    shutil.rmtree(tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "ir"]


def test_insufficient_disk_space_is_reported_before_export(refuses, checkpoints, tmp_path, monkeypatch):
    small = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: small)
    assert "make room" in refuses(1, *pair_of(checkpoints), tmp_path / "pair")
    assert not any(tmp_path.iterdir())


def test_unwritable_target_is_rejected(refuses, irs, tmp_path):
    (tmp_path / "file").touch()
    assert "cannot be written" in refuses(1, *pair_of(irs), tmp_path / "file" / "pair")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@posix
def test_read_only_target_is_rejected(refuses, irs, tmp_path):
    pair = tmp_path / "pair"
    with unprivileged():
        tmp_path.chmod(0o555)
        assert "cannot be written (Permission denied)" in refuses(1, *pair_of(irs), pair)
        tmp_path.chmod(0o755)
        pair.mkdir(mode=0o555)
        assert "cannot be written (Permission denied)" in refuses(1, *pair_of(irs), pair)
    assert [path.name for path in tmp_path.rglob("*")] == ["pair"]


@contextlib.contextmanager
def unprivileged():
    """File permissions hold for root too: on Linux this thread gives up its capabilities for a while (man 2 capset)."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this thread
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable, in two halves
    assert libc.capget(header, sets) == 0, os.strerror(ctypes.get_errno())
    without = (ctypes.c_uint32 * 6)(*sets)
    without[0] = without[3] = 0
    assert libc.capset(header, without) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        assert libc.capset(header, sets) == 0, os.strerror(ctypes.get_errno())


@posix
def test_target_can_be_a_symlink_to_another_disk(irs, tmp_path, capsys):
    with tempfile.TemporaryDirectory(dir=Path("/dev/shm") if Path("/dev/shm").is_dir() else tmp_path) as other_disk:
        pair, place = tmp_path / "pair", Path(other_disk, "place")
        pair.symlink_to(place)
        assert export_pair.main([*map(str, pair_of(irs)), str(pair)]) == 0  # which does not exist yet
        assert f"done: {pair / 'main'}, {pair / 'draft'}" in capsys.readouterr().out
        assert export_pair.main([*map(str, pair_of(irs)), str(pair), "--force"]) == 0
        assert everything_in(pair / "main") == everything_in(irs / "main")
        assert [path.name for path in place.parent.iterdir()] == ["place"]
        assert pair.is_symlink()


@posix
def test_disk_root_is_rejected_as_target():
    folder = PairFolder(Path("/dev"))
    with contextlib.closing(folder), pytest.raises(ConvertError, match="/dev is the root of a disk; choose a folder"):
        folder.open()


def test_foreign_folder_is_never_replaced(refuses, checkpoints, tmp_path):
    home = shutil.copytree(checkpoints, tmp_path / "home")
    (home / ".writable").touch()
    before = everything_in(home)
    assert "will not be replaced" in refuses(2, *pair_of(home), home)
    assert everything_in(home) == before


@pytest.mark.parametrize(
    "record", [None, "[]", "{}", '{"main": {"source": 1}}', '{"kind": "benchmark pair", "main": {}}']
)
def test_hand_made_models_are_replaced_only_with_overwrite(record, refuses, irs, tmp_path):
    pair = shutil.copytree(irs, tmp_path / "pair")
    if record:
        (pair / "pair.json").write_text(record, encoding="utf-8")
    before = everything_in(pair)
    message = refuses(2, *pair_of(irs), pair, "--force")
    assert "pair/main was not made by this program" in message and "--overwrite" in message
    assert everything_in(pair) == before and [path.name for path in tmp_path.iterdir()] == ["pair"]
    assert export_pair.main([*map(str, pair_of(irs)), str(pair), "--overwrite"]) == 0
    assert json.loads((pair / "pair.json").read_text(encoding="utf-8"))["main"]["source"] == str(irs / "main")


def test_foreign_pair_json_is_kept(refuses, irs, tmp_path):
    pair = tmp_path / "pair"
    pair.mkdir()
    (pair / "pair.json").write_text('["mine"]', encoding="utf-8")
    assert "pair/pair.json was not made by this program" in refuses(2, *pair_of(irs), pair)
    assert [path.name for path in pair.iterdir()] == ["pair.json"]


def test_pair_of_other_models_is_replaced_only_with_overwrite(refuses, irs, tmp_path, monkeypatch):
    """The embedded pair, for example: its pair.json names the checkpoints that its training wrote."""
    pair = shutil.copytree(ROOT / "models/embedded", tmp_path / "embedded")
    before = everything_in(pair)
    message = refuses(2, *pair_of(irs), pair)
    assert f"embedded/main was made from checkpoints/main, not from {irs / 'main'}; choose another" in message
    assert everything_in(pair) == before

    command = [*map(str, pair_of(irs)), str(pair)]
    assert export_pair.main([*command, "--overwrite"]) == 0
    monkeypatch.chdir(irs)
    assert export_pair.main(["./main", "draft", str(pair), "--force"]) == 0  # the same sources in other words
    mine = pair / "draft" / "notes.txt"
    mine.write_text("mine", encoding="utf-8")
    assert "embedded/draft contains files that this program did not write" in refuses(2, *command, "--force")
    assert mine.read_text(encoding="utf-8") == "mine"


def test_missing_optimum_cli_names_the_install_command(run, checkpoints, irs, tmp_path):
    shadow = tmp_path / "shadow" / "optimum"  # a package of that name without the export
    shadow.mkdir(parents=True)
    (shadow / "__init__.py").touch()
    env = {"PYTHONPATH": str(shadow.parent)}
    finished = run(PROGRAM, checkpoints / "main", irs / "draft", tmp_path / "pair", env=env)
    assert finished.returncode == 1
    assert "pip install -r requirements-export.txt" in finished.stderr
    assert len(finished.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["shadow"]


def test_failed_export_shows_log_and_next_run_resumes(run, optimum_runs, checkpoints, irs, tmp_path, capsys):
    """The main model is IR and complete at once. The draft fails in optimum-cli because of an unknown option."""
    draft = checkpoints / "draft"
    pair = shutil.copytree(irs, tmp_path / "pair")  # an older pair, which has to stay
    before = everything_in(pair)

    command = [irs / "main", draft, pair, "--overwrite"]
    finished = run(PROGRAM, *command, "--draft-args=--no-such-option")
    assert finished.returncode == 1
    assert "optimum-cli failed with exit status 2" in finished.stderr
    assert (
        "unrecognized arguments: --no-such-option" in finished.stderr
        and "Traceback (most recent call last)" not in finished.stderr.splitlines()[0]
    )
    assert everything_in(pair) == before
    unfinished = tmp_path / ".pair.unfinished"
    assert not (unfinished / "draft.part").exists() and not (unfinished / "draft").exists()
    assert "--no-such-option" in (unfinished / "draft.log").read_text(encoding="utf-8")

    assert export_pair.main([str(word) for word in command]) == 0
    assert len(optimum_runs) == 1 and "main: already complete" in capsys.readouterr().out
    assert not unfinished.exists()
    assert json.loads((pair / "pair.json").read_text(encoding="utf-8"))["draft"]["source"] == str(draft)


@posix
@pytest.mark.parametrize("kind", [pytest.param("exported", marks=pytest.mark.long), "copied"])
def test_full_disk_during_export_leaves_no_partial_pair(kind, checkpoints, irs, tmp_path):
    """The real programs under a real limit on file size."""
    import resource

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that writing fails as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    pair = tmp_path / "pair"
    main = (checkpoints if kind == "exported" else irs) / "main"
    command = [sys.executable, str(ROOT / PROGRAM), str(main), str(irs / "draft"), str(pair), *FP32]
    finished = subprocess.run(command, capture_output=True, encoding="utf-8", preexec_fn=limit, timeout=300, cwd=ROOT)
    assert finished.returncode == 1, finished.stdout + finished.stderr
    words = "optimum-cli failed" if kind == "exported" else "could not be copied (File too large"
    assert words in finished.stderr
    assert not pair.exists()
    assert not (tmp_path / ".pair.unfinished" / "main").exists()


@posix
def test_ctrl_c_during_startup_prints_nothing(tmp_path):
    command = [sys.executable, str(ROOT / PROGRAM), "main", "draft", str(tmp_path / "pair")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", cwd=ROOT)
    wait_until_loaded("_multiarray_umath", process)  # numpy, which openvino needs
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=PATIENCE) == ("", "")
    assert process.returncode == 130


@posix
@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGHUP", 129)])
def test_ctrl_c_and_hangup_end_the_export_and_its_child(name, status, checkpoints, irs, tmp_path):
    pair = shutil.copytree(irs, tmp_path / "pair")
    before = everything_in(pair)
    command = [sys.executable, str(ROOT / PROGRAM), *map(str, pair_of(checkpoints)), str(pair), "--overwrite"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", cwd=ROOT)
    line = process.stdout.readline()
    assert line.startswith("main: optimum-cli export openvino"), process.communicate()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    child = wait_until(children.read_text).split()[0] if children.exists() else None
    process.send_signal(getattr(signal, name))
    _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == status
    assert error.strip() == ("interrupted; run the same command again to resume" if status == 130 else "")
    assert child is None or not Path(f"/proc/{child}").exists()
    assert everything_in(pair) == before
    assert [path.name for path in tmp_path.iterdir()] == ["pair"]


@posix
def test_lock_on_a_deleted_lock_file_does_not_count(irs, tmp_path, monkeypatch):
    """One export ends, and another begins, between the moments when a third opens the lock file and locks it."""
    import fcntl

    first, second, third = (PairFolder(tmp_path / "pair") for _ in range(3))
    first.open()
    flock = fcntl.flock

    def late(file, how):
        monkeypatch.setattr(fcntl, "flock", flock)
        first.close()
        second.open()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(ConvertError, match="another process is writing"):
        third.open()
    second.close()
    assert not any(tmp_path.iterdir())
    third.open()
    third.close()


def test_without_draft_ignores_unfinished_draft_of_an_earlier_run(irs, tmp_path):
    pair, unfinished = tmp_path / "pair", PairFolder(tmp_path / "pair")
    shutil.copytree(irs / "main", pair / "draft")  # made by hand: no pair.json
    before = everything_in(pair / "draft")
    unfinished.open()
    shutil.copytree(irs / "draft", unfinished.start("draft"))
    unfinished.complete("draft", {"source": "refused"})
    unfinished.log("draft").write_text("refused", encoding="utf-8")
    unfinished.close()
    assert export_pair.main([str(tmp_path / "nowhere"), str(pair), "--without-draft"]) == 2
    assert (tmp_path / ".pair.unfinished/draft").is_dir()  # it may still be wanted
    assert export_pair.main([str(irs / "main"), str(pair), "--without-draft"]) == 0
    assert everything_in(pair / "draft") == before and (pair / "main/openvino_model.xml").is_file()
    assert not (pair / "draft.log").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["pair"]


def test_concurrent_exports_to_one_target_are_rejected(refuses, irs, tmp_path):
    first = PairFolder(tmp_path / "pair")
    first.open()
    assert "another process is writing" in refuses(1, *pair_of(irs), tmp_path / "pair")
    first.close()
    assert export_pair.main([*map(str, pair_of(irs)), str(tmp_path / "pair")]) == 0


@pytest.mark.parametrize("old_pair", [True, False])
@pytest.mark.parametrize("renames", range(7))
def test_interrupted_install_is_undone(renames, old_pair, irs, tmp_path, monkeypatch):
    """Interrupted after each of its renames in turn: by an error, which is undone at once, and by a kill, which the
    next run undoes. Before the last rename the old pair is in place, after it the new one; never a mixture.
    """
    pair = tmp_path / "pair"
    pair.mkdir()
    (pair / "README.md").write_text("a model card", encoding="utf-8")
    if old_pair:
        for half in ("main", "draft", "pair.json"):
            (pair / half).mkdir() if half != "pair.json" else (pair / half).write_text("{}", encoding="utf-8")
        for half in ("main", "draft"):
            (pair / half / "openvino_model.xml").write_text("old", encoding="utf-8")
    before = everything_in(pair)

    for error in (OSError, KilledError):
        folder = PairFolder(pair)
        folder.open()
        for half in ("main", "draft"):
            part = folder.start(half)
            part.mkdir()
            (part / "openvino_model.xml").write_text("new", encoding="utf-8")
            folder.complete(half, {"source": half})
        with monkeypatch.context() as patch:
            fail_renames_from(renames, error, patch)
            try:
                folder.install_pair({"new": True})
            except (OSError, KilledError):
                pass
            else:
                assert renames >= (7 if old_pair else 4)
        folder.close()
        if error is KilledError:
            PairFolder(pair).open()
        after = everything_in(pair)
        if (pair / "pair.json").exists() and json.loads((pair / "pair.json").read_text(encoding="utf-8")):
            assert (pair / "main" / "openvino_model.xml").read_text(encoding="utf-8") == "new"
            assert (pair / "draft" / "openvino_model.xml").read_text(encoding="utf-8") == "new"
            break
        assert after == before


class KilledError(BaseException):
    """Stands for the kill of a process, which ends without any cleanup."""


def fail_renames_from(renames, error, patch):
    """Let Path.rename fail from this call on; with KilledError, nothing is undone either."""
    calls = iter(range(100))
    original = Path.rename

    def rename(self, target):
        if self.parent.name == "pair" or target.parent.name == "pair" or target.name == "replaced":
            call = next(calls)
            if call == renames or (error is KilledError and call > renames):
                raise error("broken off")
        return original(self, target)

    patch.setattr(Path, "rename", rename)
    if error is KilledError:
        patch.setattr(PairFolder, "_put_back", lambda self: None)
