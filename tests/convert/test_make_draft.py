"""The command that makes an EAGLE-3 draft: a draft that works, resumed after Ctrl-C at any stage, and its errors."""

import _thread
import contextlib
import errno
import importlib.util
import json
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import openvino as ov
import openvino_genai
import pytest
import torch
from openvino_genai import GenerationConfig

from convert import make_draft
from speculative import ModelSpec, decoder, load
from speculative.convert.draft_training import training
from speculative.convert.draft_training.beginnings import opening
from speculative.convert.draft_training.clock import Clock
from speculative.convert.draft_training.main_model import MainModel, Reading, published_layers
from speculative.convert.draft_training.state_file import StateFile
from speculative.convert.draft_training.texts import Text, TextFile
from speculative.models import eagle3_graph
from tests.support.paths import MAIN, ROOT
from tests.support.tiny_checkpoints import run_optimum_here
from tests.support.tiny_main import save_tiny_main
from tests.support.waiting import PATIENCE, wait_until

EXACT = {"EXECUTION_MODE_HINT": "ACCURACY"}
SHORT = ["--minutes", "0.1", "--tokens", "4000", "--length", "64", "--draft-vocabulary", "320", "--threads", "1"]


def run(*arguments):
    return make_draft.main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def main(tmp_path_factory):
    return save_tiny_main(tmp_path_factory.mktemp("make_draft") / "main")


@contextlib.contextmanager
def ctrl_c_when(condition):
    """Interrupt the main thread, as Ctrl-C does, as soon as `condition` is true. A real signal would be handled on the
    stack of pytest's faulthandler, which may be too small for a processor's AMX registers: the process would crash."""
    stop = threading.Event()

    def watch():
        until = time.monotonic() + PATIENCE
        while not stop.is_set() and time.monotonic() < until:
            if condition():
                _thread.interrupt_main()
                return
            time.sleep(0.001)

    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # as the program does when it starts
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        signal.signal(signal.SIGINT, usual)


@pytest.fixture(scope="module")
def made(main, tmp_path_factory):
    """A draft of 300 steps, on slow machines, too: the first run is interrupted, the second one has no time left."""
    out = tmp_path_factory.mktemp("made") / "draft"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"BATCH": 256, "LEAST_STEPS": 300, "SAVE_EVERY": 0.1}.items():
            patch.setattr(training, name, value)
        patch.setattr(Clock, "verdict_seconds", PATIENCE)  # on all held-out prompts
        with ctrl_c_when(lambda: (out / "work/training.pt").exists()):
            assert run(main, out, *SHORT, "--minutes", "60") == 130
        assert run(main, out, *SHORT) == 0
    return out


@pytest.fixture(scope="module")
def engine(main, made):
    return load(ModelSpec(main, "CPU", EXACT), made)


def texts_of(out):
    return [Text(*json.loads(line)) for line in (out / "work/texts.jsonl").read_text().splitlines()]


# --- what it makes ---


def test_the_folder_has_ir_checkpoint_record_and_card(made, main):
    names = {"openvino_model.xml", "openvino_model.bin", "config.json", "checkpoint", "README.md", "draft.json", "work"}
    assert {path.name for path in made.iterdir()} == names
    assert {path.name for path in (made / "checkpoint").iterdir()} == {"config.json", "model.safetensors"}
    assert eagle3_graph.is_head(made)
    record = json.loads((made / "draft.json").read_text())
    print(json.dumps(record, indent=1))
    assert record["layers"] == [0, 2, 3] and record["command"].startswith("python convert/make_draft.py")
    assert record["training"]["held_out_agreement"][0] > 0.2  # 1 in 384 by chance
    for mode in ("greedy", "temperature 1"):
        acceptance = record["verdict"][mode]["acceptance_by_position"]
        assert len(acceptance) == 4 and acceptance[0] >= acceptance[-1] and acceptance[0] > 0.02
        assert record["verdict"][mode]["tokens_per_main_pass"]["main alone"] == 1
    card = (made / "README.md").read_text()
    assert record["command"] in card and f"{record['training']['steps']:,} steps" in card
    assert f"acceptance by position {record['verdict']['greedy']['acceptance_by_position'][0]:.2f}" in card


def test_greedy_text_is_that_of_the_main_model_alone(main, engine):
    alone = decoder.load(ModelSpec(main, "CPU", EXACT))
    accepted = 0
    for prompt in ("read_file(path)", "open the file", "fox", "import json"):
        config = GenerationConfig(max_new_tokens=60, ignore_eos=True, num_assistant_tokens=3)
        result = engine.generate(prompt, config)
        config.num_assistant_tokens = 0
        assert result.tokens == alone.generate(prompt, config).tokens
        accepted += sum(result.accepted)
    assert accepted > 20


def test_the_engine_drafts_as_the_head_was_trained(main, made, engine):
    """A wrong tap, features or positions shifted by one, or a wrong d2t: all make these logits differ."""
    model = MainModel(ModelSpec(main, "CPU", EXACT))
    trained = _training(model, made)
    tokens = max((text.tokens for text in texts_of(made)), key=len)[:24]
    reading = model.reader(8).read(tokens)
    trained._has_bf16 = False
    batch = trained._batch([(tokens, reading)])
    with torch.no_grad():
        steps = [logits[0].numpy() for logits in trained._logits(batch)]
    for known in (6, 15):  # tokens that the main model has verified
        engine.reset()
        engine.main.logits(tokens[:known])
        for step, expected in enumerate(steps):
            got = engine.draft.model.logits(tokens[: known + 1 + step])[0][trained.vocabulary]
            assert np.corrcoef(got, expected[known - 1])[0, 1] > 0.995, (known, step)  # int8 weights here only
    outside = np.setdiff1d(np.arange(model.vocabulary), trained.vocabulary)
    assert len(outside) and np.isneginf(engine.draft.model.logits(tokens)[0][outside]).all()


def _training(model, out):
    state = out / "work/training.pt"
    embeddings = model.embeddings()
    return training.Training(state, model.shape, model.states, embeddings, "cpu", pytest.fail, pytest.fail)


def test_the_checkpoint_loads_in_the_exporter(main, made, tmp_path):
    """Exported by optimum-cli it computes the same as the IR that was written directly, but for int8 rounding."""
    import transformers.dynamic_module_utils as modules

    with pytest.MonkeyPatch.context() as patch:
        # The exporter's own code counts as remote code, whose imports are checked: einops, diffusers, not used here.
        patch.setattr(modules, "check_imports", modules.get_relative_imports)
        export = ["optimum-cli", "export", "openvino", "--model", str(made / "checkpoint"), str(tmp_path / "exported")]
        export += ["--task", "text-generation-with-past", "--weight-format", "fp32", "--trust-remote-code"]
        run_optimum_here(export, tmp_path / "log", tmp_path, verbose=False)
    graphs = [ov.Core().read_model(folder / "openvino_model.xml") for folder in (made, tmp_path / "exported")]
    embedding = eagle3_graph._embedding(graphs[0].clone())
    eagle3_graph._embedding(graphs[1]).input(0).replace_source_output(embedding.input_value(0))
    tokens = np.arange(3, 23)
    states = np.random.default_rng(0).normal(size=(1, 20, 96)).astype(np.float32)
    inputs = {"input_ids": tokens[None], "attention_mask": np.ones((1, 20), np.int64), "hidden_states": states}
    inputs |= {"position_ids": np.arange(20)[None], "beam_idx": np.zeros(1, np.int32)}
    (ours, our_d2t), (theirs, their_d2t) = (
        [found[name] for name in ("logits", "d2t")]
        for found in (ov.Core().compile_model(graph, "CPU", EXACT)(inputs) for graph in graphs)
    )
    assert (our_d2t == their_d2t).all() and our_d2t.any()
    assert np.abs(ours - theirs).max() < 0.1 * theirs.std()


def test_genai_decodes_with_the_draft(main, made):
    """Its own way to decode with EAGLE-3 heads; it finds three layers by default only from 10 on, and reads ours."""
    config = GenerationConfig(max_new_tokens=40, ignore_eos=True)
    alone = openvino_genai.LLMPipeline(str(main), "CPU", **EXACT).generate("fox", config)
    draft = openvino_genai.draft_model(str(made), "CPU", **EXACT)
    config.num_assistant_tokens = 3
    assert openvino_genai.LLMPipeline(str(main), "CPU", draft_model=draft, **EXACT).generate("fox", config) == alone


# --- texts ---


def test_prompts_are_user_turns_and_no_held_out_one_is_trained_on(made, main):
    texts = texts_of(made)
    tokenizer = openvino_genai.Tokenizer(str(main))
    assert all(tokenizer.decode(text.prompt).startswith("def ") for text in texts)
    assert all(tokenizer.decode(text.prompt).endswith("return ") for text in texts)
    held_out, trained_on = ({tuple(t.prompt) for t in texts if t.held_out is part} for part in (True, False))
    assert len(held_out) >= 2 and len(trained_on) >= 8 and not held_out & trained_on
    assert {text.temperature for text in texts} == {0.0, 0.7, 1.0}
    assert max(len(text.tokens) for text in texts) <= 64


def test_given_prompts_are_answered(main, tmp_path):
    prompts = [f"read {name}" for name in "abcdefghijkl"]
    lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    (tmp_path / "prompts.jsonl").write_text(lines)
    assert run(main, tmp_path / "out", *SHORT[2:], "--minutes", "0.02", "--prompts", tmp_path / "prompts.jsonl") == 0
    tokenizer = openvino_genai.Tokenizer(str(main))
    texts = texts_of(tmp_path / "out")
    assert {tokenizer.decode(text.prompt) for text in texts} <= {f"def {prompt}return " for prompt in prompts}
    held_out, trained_on = ({tuple(t.prompt) for t in texts if t.held_out is part} for part in (True, False))
    assert len(held_out) == 2 and not held_out & trained_on


def test_openings(main, tmp_path):
    random = np.random.default_rng(0)
    turn = opening(openvino_genai.Tokenizer(str(MAIN)), 4096, random)
    assert (turn.lead, turn.prefix, turn.stop_ids, turn.suffix) == ([0], [1], {2}, [2])  # <|user|>, <|assistant|>
    plain = opening(openvino_genai.Tokenizer(str(save_tiny_main(tmp_path / "plain", chat_template=None))), 384, random)
    assert (plain.prefix, plain.suffix) == ([0], [])  # BOS


# --- resumption ---


def test_ctrl_c_at_every_stage_loses_nothing(main, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(training, "SAVE_EVERY", 0.1)
    monkeypatch.setattr(training, "LEAST_STEPS", 1)
    out = tmp_path / "out"
    work = out / "work"
    long = ["--minutes", "60", *SHORT[2:]]

    def size(name):
        return (work / name).stat().st_size if (work / name).exists() else 0

    def steps():
        return torch.load(work / "training.pt", weights_only=True)["steps"]

    def interrupted(condition, options):
        with ctrl_c_when(condition):
            assert run(main, out, *options) == 130
        shown = capsys.readouterr()
        assert shown.err.splitlines()[-1] == "interrupted; run the same command again to resume"
        assert not (out / "draft.json").exists()
        return (work / "texts.jsonl").read_bytes(), (work / "states/lengths").read_bytes()

    texts, _ = interrupted(lambda: size("texts.jsonl") > 1000, long)
    assert texts
    more_texts, lengths = interrupted(lambda: size("states/lengths") > 8, long)
    assert more_texts.startswith(texts) and lengths
    same_texts, more_lengths = interrupted(lambda: size("training.pt") > 0, long)
    assert same_texts == more_texts and more_lengths.startswith(lengths) and len(more_lengths) > len(lengths)
    first = steps()
    before = work / "training.pt"
    stamp = before.stat().st_mtime_ns
    interrupted(lambda: before.stat().st_mtime_ns > stamp, long)
    assert steps() > first > 0
    ended = steps()
    done = ["--minutes", "0.001", *SHORT[2:]]  # the training's time is up
    interrupted(lambda: (work / "new/openvino_model.xml").exists(), done)
    assert run(main, out, *done) == 0
    assert steps() == ended == json.loads((out / "draft.json").read_text())["training"]["steps"]
    assert not (work / "new/openvino_model.xml").exists()
    capsys.readouterr()
    assert run(main, out, *done) == 0
    assert f"{out} is complete; a larger --minutes continues the training" in capsys.readouterr().out


@pytest.mark.posix("signals")
@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_program_with_what_it_wrote(main, tmp_path, number, status):
    texts = tmp_path / "out/work/texts.jsonl"
    command = [sys.executable, str(ROOT / "convert/make_draft.py"), str(main), str(tmp_path / "out")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, encoding="utf-8", cwd=ROOT)
    wait_until(lambda: texts.exists() and texts.stat().st_size, "texts come")
    process.send_signal(number)
    _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == status and "Traceback" not in error, error
    assert status != 130 or error.splitlines()[-1] == "interrupted; run the same command again to resume"
    assert texts_of(tmp_path / "out") and json.loads((tmp_path / "out/work/clock.json").read_text())["texts"] > 0


def test_a_larger_time_trains_on(main, made):
    before = json.loads((made / "draft.json").read_text())["training"]["steps"]
    spent = sum(json.loads((made / "work/clock.json").read_text()).values())
    assert run(main, made, *SHORT, "--minutes", (spent + 1) / 60 / 0.9) == 0
    assert json.loads((made / "draft.json").read_text())["training"]["steps"] > before


def test_half_written_files_are_cut(tmp_path):
    file = TextFile(tmp_path / "texts.jsonl")
    file.add(Text([1, 2], [3, 4], 0.7, False))
    file.add(Text([1, 2], [3, 4], 1.0, False))  # the same tokens
    file.close()
    with (tmp_path / "texts.jsonl").open("ab") as end:
        end.write(b"[[1, 2], [3")
    again = TextFile(tmp_path / "texts.jsonl")
    again.add(Text([1], [5], 0.0, True))
    again.close()
    assert [text.answer for text in TextFile(tmp_path / "texts.jsonl").texts] == [[3, 4], [5]]

    def reading(n, value):
        return Reading(np.full((n, 6), value, np.float16), np.full((n, 2), value), np.full((n, 2), value, np.float16))

    states = StateFile(tmp_path / "states", 6, 2)
    states.add(np.arange(3), reading(3, 1))
    states.close()
    for name in ("states", "tokens", "lengths"):  # as a run leaves them that was killed while it added a text
        with (tmp_path / "states" / name).open("ab") as end:
            end.write(b"abc")
    states = StateFile(tmp_path / "states", 6, 2)
    states.add(np.arange(5), reading(5, 2))
    states.close()
    found = states.texts()
    assert [len(tokens) for tokens, _ in found] == [3, 5]
    assert (found[1][0] == np.arange(5)).all() and (found[1][1].states == 2).all() and (found[0][1].ids == 1).all()


# --- parts ---


def test_the_draft_vocabulary_covers_the_texts():
    counts = np.array([5, 0, 100, 1, 50, 2] + [0] * 200)
    assert training.choose_vocabulary(counts, 3, 0.9, 100).tolist() == [0, 2, 4]
    assert len(training.choose_vocabulary(counts, None, 0.9, 100)) == 64
    assert len(training.choose_vocabulary(np.ones(1000), None, 0.99, 128)) == 128


def test_layers_are_those_of_published_heads():
    assert published_layers(28, MAIN) == [1, 13, 24]
    assert published_layers(10, MAIN) == [1, 4, 6]
    assert published_layers(3, MAIN) == [0, 1, 2]


# --- errors ---


@pytest.fixture
def refuses(capsys):
    def refuses(status, *arguments):
        assert run(*arguments) == status
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("make_draft: "), lines
        return lines[0]

    return refuses


def test_a_wrong_main_model_is_one_sentence(refuses, main, tmp_path):
    out = tmp_path / "out"
    assert "holds no OpenVINO model" in refuses(2, tmp_path / "nowhere", out)
    shallow = save_tiny_main(tmp_path / "shallow", layers=2)
    assert "has 2 layers that can be found by name, but an EAGLE-3 draft reads three" in refuses(2, shallow, out)
    assert "reads three different layers of 0 to 3, not [1, 2, 4]" in refuses(2, main, out, "--layers", 1, 2, 4)
    (shallow / "openvino_model.bin").write_bytes(b"")
    assert "is corrupt or truncated" in refuses(1, shallow, out)
    assert not out.exists()


def test_wrong_options_are_one_sentence(refuses, main, tmp_path):
    out, prompts = tmp_path / "out", tmp_path / "prompts.jsonl"
    assert "--minutes is 0.0, but must be greater than 0" in refuses(2, main, out, "--minutes", 0)
    assert "--length is 4, but must be at least 32" in refuses(2, main, out, "--length", 4)
    assert "torch cannot use --device cuda" in refuses(2, main, out, "--device", "cuda")
    assert "cannot be read" in refuses(2, main, out, "--prompts", prompts)
    prompts.write_text("Write a poem.\n")
    assert "is not a JSONL file of prompts" in refuses(2, main, out, "--prompts", prompts)
    prompts.write_text('{"prompt": "Write a poem."}\n' * 12)
    assert "has 1 different prompts" in refuses(2, main, out, "--prompts", prompts)
    assert "tokens need up to" in refuses(1, main, out, "--tokens", 10**12)
    assert not out.exists() or not (out / "draft.json").exists()


def test_another_folder_or_other_settings_are_refused(refuses, main, made, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").touch()
    assert "holds notes.txt, which this program did not make" in refuses(2, main, other)
    assert [path.name for path in other.iterdir()] == ["notes.txt"]
    assert "was begun with another --length (64, not 100)" in refuses(2, main, made, *SHORT, "--length", 100)
    assert "was begun with another main model" in refuses(2, MAIN, made, *SHORT)
    (other / "notes.txt").rename(other / "draft.json")
    assert "holds a finished draft without the folder work" in refuses(2, main, other)


def test_missing_torch_is_one_sentence(refuses, main, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))
    assert "torch is not installed; install it with: pip install" in refuses(1, main, tmp_path / "out")


def test_a_full_disk_is_one_sentence(tmp_path):
    said = make_draft.sentence(OSError(errno.ENOSPC, "No space left on device"), tmp_path)
    assert said == f"the disk of {tmp_path} is full; make room and run the same command again to resume"
