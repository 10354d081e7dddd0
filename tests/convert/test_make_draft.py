"""The command that makes a draft: drafts of both kinds that work, resumed after Ctrl-C at any stage, and its errors."""

import _thread
import contextlib
import errno
import importlib.util
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai
import pytest
from openvino_genai import GenerationConfig

from convert import make_draft
from speculative import ModelSpec, decoder, load
from speculative.convert import program
from speculative.convert.draft_training import beginnings, eagle3, stages, verdict
from speculative.convert.draft_training.beginnings import Prompt, opening
from speculative.convert.draft_training.clock import Clock
from speculative.convert.draft_training.draft_folder import DraftFolder
from speculative.convert.draft_training.eagle3 import Eagle3, published_layers
from speculative.convert.draft_training.head_weights import TrainedHead
from speculative.convert.draft_training.main_model import MainModel, Reading
from speculative.convert.draft_training.pruned import Pruned
from speculative.convert.draft_training.stages import TOP
from speculative.convert.draft_training.state_file import StateFile
from speculative.convert.draft_training.texts import Text, TextFile
from speculative.convert.draft_training.writer import Writer, encoded, held_out
from speculative.convert.errors import ConvertError
from speculative.modelgen import llama_ir
from speculative.models import eagle3_graph
from speculative.pair.check import check_pair
from tests.support.later import Later, torch, transformers
from tests.support.paths import MAIN, ROOT
from tests.support.tiny_checkpoints import run_optimum_here
from tests.support.tiny_main import logits_of, save_tiny_main, tiny_main
from tests.support.waiting import PATIENCE, wait_until

head, pruned_model = (Later(f"speculative.convert.draft_training.{name}") for name in ("head", "pruned_model"))
TRAINING = "speculative.convert.draft_training.training"
EXACT = {"EXECUTION_MODE_HINT": "ACCURACY"}
PRUNED = ["--kind", "pruned"]
PRUNED_OPTIONS = [*PRUNED, "--keep-layers", "2", "--tokens", "1500", "--length", "64", "--threads", "1"]
SHORT = ["--minutes", "0.1", "--tokens", "4000", "--length", "64", "--draft-vocabulary", "320", "--threads", "1"]


def run(*arguments):
    return make_draft.main([str(argument) for argument in arguments])


@pytest.fixture
def command():
    return make_draft.main


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
        while not stop.is_set():
            if condition() or time.monotonic() > until:  # a test then finds what it waited for missing
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
    """A draft of 200 steps, on slow machines, too: the first run is interrupted, the second one has no time left."""
    out = tmp_path_factory.mktemp("made") / "draft"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"MIN_STEPS": 200, "SAVE_EVERY": 0.1}.items():
            patch.setattr(f"{TRAINING}.{name}", value)
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


# --- output ---


def test_output_folder_has_ir_checkpoint_record_and_card(made, main):
    names = {"openvino_model.xml", "openvino_model.bin", "config.json", "checkpoint", "README.md", "draft.json", "work"}
    assert {path.name for path in made.iterdir()} == names
    assert {path.name for path in (made / "checkpoint").iterdir()} == {"config.json", "model.safetensors"}
    assert eagle3_graph.is_head(made)
    config = json.loads((made / "checkpoint/config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 3]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]  # the inputs that vLLM reads
    record = json.loads((made / "draft.json").read_text())
    print(json.dumps(record, indent=1))
    assert record["draft"]["layers"] == [0, 2, 3] and record["command"].startswith("python convert/make_draft.py")
    assert record["training"]["held_out_agreement"][0] > 0.2  # 1 in 384 by chance
    for mode in ("greedy", "temperature 1"):
        acceptance = record["verdict"][mode]["acceptance_by_position"]
        assert len(acceptance) == 4 and acceptance[0] >= acceptance[-1] and acceptance[0] > 0.02
        assert record["verdict"][mode]["tokens_per_main_pass"]["main alone"] == 1
    card = (made / "README.md").read_text()
    assert record["command"] in card and f"{record['training']['steps']:,} steps" in card
    assert f"acceptance by position {record['verdict']['greedy']['acceptance_by_position'][0]:.2f}" in card


def test_greedy_text_equals_main_model_alone(main, engine):
    alone = decoder.load(ModelSpec(main, "CPU", EXACT))
    accepted = 0
    prompts = ("read_file(path)", "open the file", "fox", "import json", "def f(x):", "the lines", "a list", "return")
    for prompt in prompts:
        config = GenerationConfig(max_new_tokens=60, ignore_eos=True, num_assistant_tokens=3)
        result = engine.generate(prompt, config)
        config.num_assistant_tokens = 0
        assert result.tokens == alone.generate(prompt, config).tokens
        accepted += sum(result.accepted)
    assert accepted > 20  # of the texts that the head happens to be trained on, half the prompts give 20 to 31


def test_engine_logits_match_the_trained_head(main, made, engine):
    """A wrong layer, features or positions shifted by one, or a wrong d2t would make these logits differ."""
    model = MainModel(ModelSpec(main, "CPU", EXACT))
    kind = Eagle3(model)
    state = made / "work/training.pt"
    trained = head.HeadTraining(state, model.shape, kind.states, model.embeddings(), "cpu", pytest.fail)
    tokens = max((text.tokens for text in texts_of(made)), key=len)[:24]
    reading = kind.reader(8).read(tokens)
    trained._has_bf16 = False
    batch = trained._batch([(tokens, reading)])
    with torch.no_grad():
        steps = [logits[0].numpy() for logits in trained._logits(batch)]
    for known in (6, 15):  # tokens that the main model has verified
        engine.reset()
        engine.main.logits(tokens[:known])
        for step, expected in enumerate(steps):
            got = engine.draft.model.logits(tokens[: known + 1 + step])[0]
            assert np.corrcoef(got, expected[known - 1])[0, 1] > 0.995, (known, step)  # int8 weights here only
    assert engine.draft.model.targets.tolist() == trained.vocabulary.tolist()
    assert len(trained.vocabulary) < model.vocabulary


@pytest.fixture(scope="module")
def exported(made, tmp_path_factory):
    """The checkpoint, exported by optimum-cli."""
    import transformers.dynamic_module_utils as modules

    folder = tmp_path_factory.mktemp("exported")
    with pytest.MonkeyPatch.context() as patch:
        # The exporter's own code counts as remote code, whose imports are checked: einops, diffusers, not used here.
        patch.setattr(modules, "check_imports", modules.get_relative_imports)
        export = ["optimum-cli", "export", "openvino", "--model", str(made / "checkpoint"), str(folder / "head")]
        export += ["--task", "text-generation-with-past", "--weight-format", "fp32", "--trust-remote-code"]
        run_optimum_here(export, folder / "log", folder, verbose=False)
    return folder / "head"


def test_checkpoint_exported_by_optimum_cli_matches_the_ir(main, made, exported):
    """The IR exported by optimum-cli equals the IR that was written directly, except for int8 rounding."""
    graphs = [ov.Core().read_model(folder / "openvino_model.xml") for folder in (made, exported)]
    embedding = eagle3_graph.find_embedding(graphs[0].clone())
    eagle3_graph.find_embedding(graphs[1]).input(0).replace_source_output(embedding.input_value(0))
    tokens = np.arange(3, 23)
    states = np.random.default_rng(0).normal(size=(1, 20, 96)).astype(np.float32)
    inputs = {"input_ids": tokens[None], "attention_mask": np.ones((1, 20), np.int64), "hidden_states": states}
    inputs |= {"position_ids": np.arange(20)[None], "beam_idx": np.zeros(1, np.int32)}
    (ours, our_d2t), (theirs, their_d2t) = (
        [found[name] for name in ("logits", "d2t")]
        for found in (ov.Core().compile_model(graph, "CPU", EXACT)(inputs) for graph in graphs)
    )
    assert (our_d2t == their_d2t).all() and our_d2t.any()
    assert np.std(ours - theirs) < 0.05 * np.std(theirs)  # int8 rounding: 0.01 to 0.02


def test_progress_of_the_verdict_counts_answers_to_each_prompt(main, made):
    """With a large main model, all answers to one prompt take minutes."""
    progress = []
    prompts = [([5, 6, 7], ""), ([8, 9], "")]
    judged = verdict.judge(ModelSpec(main), made, [], prompts, 16, PATIENCE, lambda *answers: progress.append(answers))
    assert judged["held_out_prompts"] == 2
    assert progress == 2 * [(answer, 8) for answer in range(1, 9)]  # two modes of four methods


def test_genai_decodes_with_the_draft(main, made):
    """GenAI has its own EAGLE-3 decoding. It has default layers only from 10 layers on, and reads ours from the IR."""
    config = GenerationConfig(max_new_tokens=40, ignore_eos=True)
    alone = openvino_genai.LLMPipeline(str(main), "CPU", **EXACT).generate("fox", config)
    draft = openvino_genai.draft_model(str(made), "CPU", **EXACT)
    config.num_assistant_tokens = 3
    assert openvino_genai.LLMPipeline(str(main), "CPU", draft_model=draft, **EXACT).generate("fox", config) == alone


# --- training that starts from an existing head ---


def test_head_weights_are_read_back_from_ir(main, made, exported):
    """From the IR written directly, and from the one that optimum-cli exported from the same checkpoint."""
    from safetensors.numpy import load_file

    expected = load_file(made / "checkpoint/model.safetensors")
    model = MainModel(ModelSpec(main, "CPU", EXACT))
    for folder, tolerance in ((made, 0.02), (exported, 1e-6)):  # int8 and f32
        initial = TrainedHead(folder, model)
        read = initial.weights()
        assert (initial.vocabulary == expected["d2t"] + np.arange(len(initial.vocabulary))).all()
        assert {*read} == {*expected} - {"d2t", "t2d"}
        for name, weights in read.items():
            assert np.std(weights - expected[name]) <= tolerance * np.std(expected[name]), name
    assert TrainedHead(made, model).layers == [0, 2, 3]


def test_init_from_continues_training_of_a_head(main, made, tmp_path, monkeypatch):
    """Without a step of training, the new head has the weights of the old one.

    `--threads` leaves the choice of cores to the system: pinned by OpenVINO, two trainings would share the first."""
    properties, judge = [], verdict.judge
    monkeypatch.setattr(verdict, "judge", lambda main, *rest: properties.append(main.properties) or judge(main, *rest))
    monkeypatch.setattr(Clock, "verdict_seconds", 0.0)
    monkeypatch.setattr(f"{TRAINING}.MIN_STEPS", 0)
    monkeypatch.setattr(DraftFolder, "settle", lambda *_: None)  # the texts are those of a run without --init-from
    shutil.copytree(made / "work", tmp_path / "out/work")
    (tmp_path / "out/work/training.pt").unlink()
    options = [*SHORT[:6], "--init-from", made]
    assert run(main, tmp_path / "out", *options, "--threads", 1) == 0
    before, after = (json.loads((folder / "draft.json").read_text()) for folder in (made, tmp_path / "out"))
    assert after["training"]["steps"] == 0 and after["init_from"] == str(made)
    assert after["draft"] == before["draft"]
    assert properties == [{"INFERENCE_NUM_THREADS": 1, "ENABLE_CPU_PINNING": "NO"}]
    model = MainModel(ModelSpec(main, "CPU", EXACT))
    old, new = (TrainedHead(folder, model) for folder in (made, tmp_path / "out"))
    assert (old.vocabulary == new.vocabulary).all() and old.layers == new.layers
    for name, weights in new.weights().items():
        assert np.std(weights - old.weights()[name]) <= 0.01 * np.std(weights), name  # int8 again
    assert f"| start | the head in {made} |" in (tmp_path / "out/README.md").read_text()


def test_init_from_supports_another_draft_vocabulary(main, made, tmp_path):
    """Rows of the LM head come from the old head for tokens in its vocabulary, and from the main model for others."""
    model = MainModel(ModelSpec(main, "CPU", EXACT))
    kind = Eagle3(model, draft_vocabulary=350, init_from=made)
    texts = StateFile(made / "work/states", kind.states, TOP).texts()
    head = kind.training(tmp_path / "training.pt", texts, "cpu")
    old, rows = TrainedHead(made, model), head.head.lm_head.weight.detach().numpy()
    kept = np.isin(head.vocabulary, old.vocabulary)
    assert len(head.vocabulary) == 350 and 0 < kept.sum() < 350
    of_old, of_main = old.weights()["lm_head.weight"], model.output_layer(head.vocabulary[~kept]).rows
    assert (rows[kept] == of_old[np.searchsorted(old.vocabulary, head.vocabulary[kept])]).all()
    assert (rows[~kept] == of_main).all()
    assert (head.head.fc.weight.detach().numpy() == old.weights()["fc.weight"]).all()


# --- a pruned main model ---


CATEGORY = {f"{verb} {name}": verb for verb in ("read", "open", "write") for name in "abcd"}


@pytest.fixture(scope="module")
def pruned(main, made, tmp_path_factory):
    """A pruned draft, whose training is interrupted, for prompts of three categories, compared with the head."""
    folder = tmp_path_factory.mktemp("pruned")
    lines = [json.dumps({"prompt": prompt, "category": category}) for prompt, category in CATEGORY.items()]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    options = [*PRUNED_OPTIONS, "--prompts", folder / "prompts.jsonl", "--compare", made]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"MIN_STEPS": 5, "SAVE_EVERY": 0.0}.items():
            patch.setattr(f"{TRAINING}.{name}", value)
        patch.setattr(Clock, "verdict_seconds", PATIENCE)  # on all held-out prompts
        with ctrl_c_when(lambda: (folder / "draft/work/training.pt").exists()):
            assert run(main, folder / "draft", *options, "--minutes", "60") == 130
        assert run(main, folder / "draft", *options, "--minutes", "0.01") == 0
    return folder / "draft"


def kind_of(folder, kept=2):
    return Pruned(MainModel(ModelSpec(folder, "CPU", EXACT)), kept)


def test_pruned_model_keeps_yarn_attention_scaling(tmp_path):
    """YaRN scales the angles' cosine and sine, too, so both sides of each product of queries and keys."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    scaling = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64}
    config = transformers.LlamaConfig(
        **sizes, vocab_size=384, max_position_embeddings=1024, rope_scaling=scaling, initializer_range=0.3
    )
    model, tokens = transformers.LlamaForCausalLM(config).eval(), np.arange(0, 384, 8)
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens)[None]).logits[0].numpy()
    found = logits_of(llama_ir.build(pruned_model.in_numbers(model)), tokens)
    assert np.std(found - expected) < 0.1 * np.std(expected)


@pytest.mark.parametrize("idle", [[0, 1], [1, 2], [2, 3]])
def test_layers_that_change_hidden_states_least_are_pruned(main, tmp_path, idle):
    whole = tiny_main(kind_of(main).main.vocabulary)
    for i in idle:
        o, down = ((layer.scales / 100).astype(np.float16) for layer in (whole.layers[i].o, whole.layers[i].down))
        whole.layers[i] = replace(
            whole.layers[i], o=whole.layers[i].o._replace(scales=o), down=whole.layers[i].down._replace(scales=down)
        )
    choice = kind_of(changed(main, tmp_path / "main", whole)).choose([np.arange(0, 384, 8), np.arange(3, 99)])
    assert choice.layers == [i for i in range(4) if i not in idle] and 0 < choice.distance < 0.05


def changed(main, folder, model):
    """The tiny main model's folder with another model."""
    shutil.copytree(main, folder)
    ov.save_model(llama_ir.build(model), folder / "openvino_model.xml", compress_to_fp16=False)
    return folder


def test_only_llama_like_models_are_pruned(main, tmp_path):
    kind = kind_of(main)
    kind.check()
    whole = tiny_main(kind.main.vocabulary)
    bias = np.linspace(-9, 9, kind.main.vocabulary, dtype=np.float32)
    for name, what, model in (
        ("scaled", "layer 0", replace(whole, attention_scale=0.1)),
        ("biased", "logits", replace(whole, logits_bias=bias)),
    ):
        with pytest.raises(ConvertError, match=f"it computes other {what}.*use --kind eagle3"):
            kind_of(changed(main, tmp_path / name, model)).check()


def test_scaled_rotary_positions_need_the_scaling_in_the_config(main, tmp_path):
    """Wherever transformers writes it. That of Llama 3 changes early positions by less than the check's tolerance."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 1024
    whole = tiny_main(kind_of(main).main.vocabulary)
    config = json.loads((main / "config.json").read_text()) | {"max_position_embeddings": 8192}
    given = transformers.LlamaConfig(head_dim=whole.head_dim, max_position_embeddings=8192, rope_scaling=scaling)
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(given)
    folder = changed(main, tmp_path / "main", replace(whole, frequencies=rotary.inv_freq.numpy()))
    for parameters in ({"rope_scaling": scaling}, {"rope_parameters": {"rope_theta": 10000.0, **scaling}}):
        (folder / "config.json").write_text(json.dumps(config | parameters))
        kind_of(folder).check()
        assert kind_of(folder).llama.config()["rope_scaling"] == scaling
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConvertError, match="it computes other layer 0"):
        kind_of(folder).check()


def test_training_raises_acceptance_of_a_pruned_draft(tmp_path, monkeypatch):
    """Measured on held-out text. However few the steps, the learning rate reaches its highest value."""
    monkeypatch.setattr(f"{TRAINING}.MIN_STEPS", 10)
    monkeypatch.setattr(f"{TRAINING}.BATCH", 384)
    kind = kind_of(MAIN)
    reader = kind.reader(64)
    code = (ROOT / "speculative/decoder.py").read_text(encoding="utf-8")
    pieces = openvino_genai.Tokenizer(str(MAIN)).encode(code).input_ids.data[0][:1440].reshape(15, 96)
    read = [(piece, reader.read(piece)) for piece in pieces]
    held_out, trained_on = read[::5], [text for i, text in enumerate(read) if i % 5]
    draft = kind.training(tmp_path / "training.pt", trained_on, "cpu")
    before = draft.evaluate(held_out).overlap[0]
    rates = []
    draft.run(trained_on, lambda: 0.0, 1.0, lambda loss: rates.append(draft._optimizer.param_groups[0]["lr"]))
    after = draft.evaluate(held_out).overlap[0]
    print(before, after, rates)
    assert draft.steps == 10 and after > before + 0.02
    assert max(rates) > 0.9 * draft.rate


def test_interrupted_training_of_pruned_draft_resumes(main, pruned):
    record, work = json.loads((pruned / "draft.json").read_text()), pruned / "work"
    states = StateFile(work / "held_out_states", 0, 64)
    states.close()
    again = pruned_model.PrunedTraining(work / "training.pt", kind_of(main), pytest.fail, "cpu")
    assert again.choice.layers == record["draft"]["kept_layers"] and again.steps == record["training"]["steps"] == 5
    assert record["training"]["held_out_overlap"] == [round(again.evaluate(states.texts()).overlap[0], 3)]


def test_pruned_draft_is_an_ordinary_model(main, pruned):
    """The IR for both engines and the checkpoint for transformers are the same model, except for int8 rounding."""
    config = GenerationConfig(max_new_tokens=40, ignore_eos=True)
    alone = openvino_genai.LLMPipeline(str(main), "CPU", **EXACT).generate("fox", config)
    config.num_assistant_tokens = 3
    draft = openvino_genai.draft_model(str(pruned), "CPU", **EXACT)
    assert openvino_genai.LLMPipeline(str(main), "CPU", draft_model=draft, **EXACT).generate("fox", config) == alone
    assert check_pair(main, pruned).sound
    tokens = np.arange(5, 95, 3)
    with torch.no_grad():
        checkpoint = transformers.LlamaForCausalLM.from_pretrained(pruned / "checkpoint")
        expected = checkpoint(torch.from_numpy(tokens)[None]).logits[0].numpy()
    found = logits_of(ov.Core().read_model(pruned / "openvino_model.xml"), tokens)
    assert checkpoint.config.num_hidden_layers == 2
    rounded = logits_of(llama_ir.build(pruned_model.in_numbers(checkpoint)), tokens)
    assert np.abs(found - rounded).max() < 1e-3 * rounded.std()
    assert np.std(found - expected) < 0.03 * np.std(expected)  # int8 rounding gives 0.012


def test_verdict_has_categories_and_compares_other_drafts(pruned, made):
    record = json.loads((pruned / "draft.json").read_text())
    judged, card = record["verdict"], (pruned / "README.md").read_text()
    assert record["kind"] == "pruned" and len(record["draft"]["kept_layers"]) == 2
    assert judged["compared"] == [str(made)] and {*judged["categories"]} == {"read", "open", "write"}
    assert sum(part["held_out_prompts"] for part in judged["categories"].values()) == judged["held_out_prompts"]
    for mode in ("greedy", "temperature 1"):
        for part in (judged, *judged["categories"].values()):
            assert part[mode]["acceptance_by_position"][0] > 0.02
            assert len(part[mode]["acceptance_by_position_of_others"][str(made)]) == 4
            ways = ["fixed draft length 4", "draft", f"--compare {made}, fixed draft length 4", f"--compare {made}"]
            assert [*part[mode]["tokens_per_second"]] == [*ways, "suffix decoding", "main alone"]
    kept = ", ".join(map(str, record["draft"]["kept_layers"]))
    assert f"| layers | {kept} of the main model's 0 to 3" in card and "\n    read (" in card


def test_changed_draft_is_compared_again(main, pruned, made, monkeypatch, capsys):
    options = [main, pruned, *PRUNED_OPTIONS, "--prompts", pruned.parent / "prompts.jsonl", "--compare", made]
    assert run(*options, "--minutes", "0.01") == 0 and "is complete" in capsys.readouterr().out
    monkeypatch.setattr(stages, "_weights_hash", lambda folder: f"that of a retrained {folder}")

    def measures(self):
        raise ConvertError("measures again")

    monkeypatch.setattr(stages._Stages, "_require_space", measures)
    assert run(*options, "--minutes", "0.01") == 1 and "measures again" in capsys.readouterr().err


# --- texts ---


def test_prompts_are_user_turns_and_held_out_ones_are_not_trained_on(made, main):
    texts = texts_of(made)
    tokenizer = openvino_genai.Tokenizer(str(main))
    assert all(tokenizer.decode(text.prompt).startswith("def ") for text in texts)
    assert all(tokenizer.decode(text.prompt).endswith("return ") for text in texts)
    held_out, trained_on = ({tuple(t.prompt) for t in texts if t.held_out is part} for part in (True, False))
    assert len(held_out) >= 2 and len(trained_on) >= 8 and not held_out & trained_on
    assert {text.temperature for text in texts} == {0.0, 0.7, 1.0}
    assert max(len(text.tokens) for text in texts) <= 64


def test_given_prompts_are_split_by_category(main, pruned):
    tokenizer = openvino_genai.Tokenizer(str(main))
    texts = texts_of(pruned)
    held_out, trained_on = ({(tuple(t.prompt), t.category) for t in texts if t.held_out is p} for p in (True, False))
    given = {f"def {prompt}return ": category for prompt, category in CATEGORY.items()}
    for tokens, category in held_out | trained_on:
        assert given[tokenizer.decode(list(tokens))] == category
    assert not held_out & trained_on and {category for _, category in held_out} == {*CATEGORY.values()}


def test_held_out_split_is_stable_across_prompt_sets():
    """Otherwise a head that is trained further, with more prompts, would be judged on prompts it was trained on."""
    random = np.random.default_rng(0)
    prompts = [(random.integers(0, 999, 9).tolist(), "ab"[i % 2]) for i in range(400)]

    def split(some):
        places = held_out(some)
        return [{tuple(some[i][0]) for i in range(len(some)) if (i in places) is wanted} for wanted in (True, False)]

    few, many = split(prompts[:100]), split(prompts[::-1])
    assert 5 < len(few[0]) < 20 and 20 < len(many[0]) < 60
    assert len(few[1] & many[0]) == 0 and len(few[0] & many[1]) <= 2  # at most what was the first of its category
    for number, least in ((4, 1), (10, 2), (30, 2)):
        assert least <= len(held_out(prompts[:number])) <= number // 3
    named = [(ids, str(i % 7)) for i, (ids, _) in enumerate(prompts[:50])]
    assert {named[place][1] for place in held_out(named)} == {*"0123456"}


def test_duplicate_prompts_count_once(main, tmp_path):
    """Including prompts that become equal in the chat template."""
    prompts = [Prompt(f"read {i}{space}", "") for i in range(12) for space in ("", " ")]
    writer = Writer(ModelSpec(main), 64, 384, prompts, TextFile(tmp_path / "texts.jsonl"))
    tokens = [tuple(ids) for ids, _ in writer._prompts]
    assert (
        len(tokens)
        == len({*tokens})
        == len({tuple(decoder.encode(p.text, writer._tokenizer).tolist()) for p in prompts})
    )


def test_answers_that_are_being_written_count_when_the_time_is_up(main, tmp_path):
    """A large model completes few texts in the time it has; those that it is writing are kept."""
    file, unfinished = TextFile(tmp_path / "texts.jsonl"), []
    prompts = [Prompt(f"read {i}", "") for i in range(32)]
    Writer(ModelSpec(main), 384, 384, prompts, file).write(lambda: 0.0, 10**6, unfinished.append)
    assert file.is_enough and 0 < unfinished[-1] <= 32 * 384
    assert max(len(text.answer) for text in file.texts) < 40


def test_chat_template_parts_are_detected(main, tmp_path):
    random = np.random.default_rng(0)
    turn = opening(openvino_genai.Tokenizer(str(MAIN)), 4096, random)
    assert (turn.lead, turn.prefix, turn.stop_ids, turn.suffix) == ([0], [1], {2}, [2])  # <|user|>, <|assistant|>
    plain = opening(openvino_genai.Tokenizer(str(save_tiny_main(tmp_path / "plain", chat_template=None))), 384, random)
    assert (plain.prefix, plain.suffix) == ([0], [])  # BOS


@pytest.mark.parametrize("variation", [0.0, 0.7, 1.0])
def test_loss_and_gradient_equal_those_of_torch(variation):
    """The number of rows exceeds those computed at once."""
    from speculative.convert.draft_training.training import ROWS, DraftLoss

    torch.manual_seed(0)
    rows = 2 * ROWS + 5
    logits = torch.randn(rows, 50).requires_grad_()
    ids = torch.stack([torch.randperm(50)[:8] for _ in range(rows)])
    targets, weights = 0.9 * torch.rand(rows, 8).softmax(-1), torch.rand(rows) * (torch.rand(rows) > 0.3)
    loss, accepted = DraftLoss.apply(logits, ids, targets, weights, variation)
    (0.5 * loss).backward()
    found, logits.grad = logits.grad, None
    p, q = torch.zeros(rows, 50).scatter(-1, ids, targets), logits.softmax(-1)
    overlap = torch.minimum(p, q).sum(-1)
    of_rows = (1 - variation) * -(p * q.log()).sum(-1) + variation * (1 - overlap)
    (0.5 * (of_rows * weights).sum()).backward()
    assert torch.allclose(found, logits.grad, atol=1e-6)
    with torch.no_grad():
        assert torch.allclose(loss, (of_rows * weights).sum()) and torch.allclose(accepted, (overlap * weights).sum())


def test_padding_does_not_affect_the_loss(tmp_path):
    """The loss of two texts in one batch is the mean over their own tokens."""
    from speculative.convert.draft_training.training import Training

    class OfTokens(Training):
        rate = 0.0  # learns nothing, so that the losses can be compared
        extra_state = dict

        def forward(self, batch):
            yield self.model(batch.tokens)

    torch.manual_seed(0)
    training = OfTokens(tmp_path / "state", None, torch.nn.Embedding(8, 8), np.arange(8), 8, "cpu")
    random = np.random.default_rng(0)

    def text(n):
        log_p = np.log(np.full((n, 2), 0.4, np.float16))
        return random.integers(0, 8, n), Reading(np.zeros((n, 1), np.float16), random.integers(0, 8, (n, 2)), log_p)

    long, short = text(24), text(3)
    alone = [training._step([one], 0.0) for one in (long, short)]
    assert training._step([long, short], 0.0) == pytest.approx((24 * alone[0] + 3 * alone[1]) / 27, rel=1e-4)


# --- resumption ---


def test_further_training_is_installed_after_an_interruption(main, made, tmp_path, monkeypatch):
    monkeypatch.setattr(f"{TRAINING}.SAVE_EVERY", 0.1)
    monkeypatch.setattr(Clock, "verdict_seconds", 0.0)
    shutil.copytree(made, tmp_path / "out")
    state = tmp_path / "out/work/training.pt"
    stamp = state.stat().st_mtime_ns
    with ctrl_c_when(lambda: state.exists() and state.stat().st_mtime_ns > stamp):
        assert run(main, tmp_path / "out", "--minutes", "60", *SHORT[2:]) == 130
    assert run(main, tmp_path / "out", *SHORT) == 0
    before, after = (json.loads((out / "draft.json").read_text()) for out in (made, tmp_path / "out"))
    steps = torch.load(state, weights_only=True)["steps"]
    assert after["training"]["steps"] == steps > before["training"]["steps"]


def test_draft_inside_main_model_folder_can_be_resumed(main, tmp_path, monkeypatch):
    monkeypatch.setattr(f"{TRAINING}.MIN_STEPS", 1)
    monkeypatch.setattr(Clock, "verdict_seconds", 0.0)
    shutil.copytree(main, tmp_path / "main")
    options = ["--tokens", "1500", *SHORT[4:]]
    for minutes in ("0.01", "0.02"):
        assert run(tmp_path / "main", tmp_path / "main/draft", "--minutes", minutes, *options) == 0


def test_ctrl_c_at_any_stage_loses_no_progress(main, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(f"{TRAINING}.SAVE_EVERY", 0.1)
    monkeypatch.setattr(f"{TRAINING}.MIN_STEPS", 1)
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
    said = re.search(
        rf"{re.escape(str(out))} is complete; --minutes above ([\d.]+) continues the training", capsys.readouterr().out
    )
    spent = json.loads((work / "clock.json").read_text())
    needed = sum(spent[stage] for stage in ("texts", "states", "training")) / 0.9 / 60
    assert said and needed <= float(said[1]) < needed + 0.11


@pytest.mark.posix("signals")
@pytest.mark.parametrize("name, status", [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_signal_ends_the_program_and_keeps_written_texts(main, tmp_path, name, status):
    texts = tmp_path / "out/work/texts.jsonl"
    command = [sys.executable, str(ROOT / "convert/make_draft.py"), str(main), str(tmp_path / "out")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, encoding="utf-8", cwd=ROOT)
    wait_until(lambda: texts.exists() and texts.stat().st_size, "texts are written")
    process.send_signal(getattr(signal, name))
    _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == status and "Traceback" not in error, error
    assert status != 130 or error.splitlines()[-1] == "interrupted; run the same command again to resume"
    assert texts_of(tmp_path / "out") and json.loads((tmp_path / "out/work/clock.json").read_text())["texts"] > 0


def test_larger_minutes_continues_training(main, made, monkeypatch):
    monkeypatch.setattr(Clock, "verdict_seconds", 0.0)
    before = json.loads((made / "draft.json").read_text())["training"]["steps"]
    spent = sum(json.loads((made / "work/clock.json").read_text()).values())
    assert run(main, made, *SHORT, "--minutes", (spent + 4) / 60 / 0.9) == 0
    assert json.loads((made / "draft.json").read_text())["training"]["steps"] > before


def test_moved_prompts_and_head_are_recognised_by_their_content(main, made, pruned, tmp_path, capsys):
    """An earlier version recorded their paths, too."""
    shutil.copytree(pruned, tmp_path / "pruned")
    prompts = shutil.copy(pruned.parent / "prompts.jsonl", tmp_path / "moved.jsonl")
    shutil.copytree(made, tmp_path / "draft")
    settings = tmp_path / "draft/work/settings.json"
    head = {"--init-from": "elsewhere", "content of --init-from": stages._weights_hash(made)}
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **head}))
    for folder, options in (
        ("pruned", [*PRUNED_OPTIONS, "--prompts", prompts, "--minutes", "0.01"]),
        ("draft", [*SHORT, "--init-from", made]),
    ):
        assert run(main, tmp_path / folder, *options) == 0
        assert f"{tmp_path / folder} is complete" in capsys.readouterr().out


def test_partially_written_files_are_truncated(tmp_path):
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
    for name in ("states", "tokens", "lengths"):  # as after a kill while a text was added
        with (tmp_path / "states" / name).open("ab") as end:
            end.write(b"abc")
    states = StateFile(tmp_path / "states", 6, 2)
    states.add(np.arange(5), reading(5, 2))
    states.close()
    found = states.texts()
    assert [len(tokens) for tokens, _ in found] == [3, 5]
    assert (found[1][0] == np.arange(5)).all() and (found[1][1].states == 2).all() and (found[0][1].ids == 1).all()


# --- parts ---


def test_draft_vocabulary_covers_the_texts():
    counts = np.array([5, 0, 100, 1, 50, 2] + [0] * 200)
    assert eagle3.choose_vocabulary(counts, 3, 0.9, 100).tolist() == [0, 2, 4]
    assert len(eagle3.choose_vocabulary(counts, None, 0.9, 100)) == 64
    assert len(eagle3.choose_vocabulary(np.ones(1000), None, 0.99, 128)) == 128


def test_default_layers_match_published_heads():
    assert published_layers(28, MAIN) == [1, 13, 24]
    assert published_layers(10, MAIN) == [1, 4, 6]
    assert published_layers(3, MAIN) == [0, 1, 2]


# --- errors ---


def test_unsuitable_main_model_gives_one_sentence_error(refuses, main, tmp_path):
    out = tmp_path / "out"
    assert "holds no OpenVINO model" in refuses(2, tmp_path / "nowhere", out)
    assert "is an EAGLE-3 head, a draft for another model" in refuses(2, "models/embedded/eagle3", out)
    shallow = save_tiny_main(tmp_path / "shallow", layers=2)
    assert "number of layers that can be found by name: 2, but an EAGLE-3 draft reads three" in refuses(2, shallow, out)
    assert "reads three different layers of 0 to 3, not [1, 2, 4]" in refuses(2, main, out, "--layers", 1, 2, 4)
    assert "has 2 layers, so a pruned draft cannot keep 2" in refuses(2, shallow, out, *PRUNED, "--keep-layers", 2)
    (shallow / "openvino_model.bin").write_bytes(b"")
    assert "is corrupt or truncated" in refuses(1, shallow, out)
    assert not out.exists()


def test_prompts_file_may_have_bom_and_unicode_line_separators(tmp_path):
    texts = [f"Write\u2028{i}" for i in range(12)]
    lines = [json.dumps({"prompt": text, "category": "x"}, ensure_ascii=False) for text in texts]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8-sig", newline="\r\n")
    assert beginnings.read_prompts(tmp_path / "prompts.jsonl") == [(text, "x") for text in texts]


def test_category_may_be_null(tmp_path):
    lines = [json.dumps({"prompt": f"Write {i}", "category": None}) for i in range(12)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    assert {prompt.category for prompt in beginnings.read_prompts(tmp_path / "prompts.jsonl")} == {""}


def test_untrainable_head_is_rejected(refuses, main, made, tmp_path):
    shutil.copytree(made, tmp_path / "head", ignore=shutil.ignore_patterns("work"))
    config = json.loads((made / "config.json").read_text())
    for more in ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, {"attention_bias": True}):
        (tmp_path / "head/config.json").write_text(json.dumps(config | more))
        found = refuses(2, main, tmp_path / "out", "--init-from", tmp_path / "head")
        assert "scaled rotary positions or biases" in found and "leave it out" in found


def test_disk_space_check_includes_the_head(main):
    """Twice the training state, the checkpoint and the IR are most of the space of a large head."""
    kind = Eagle3(MainModel(ModelSpec(main, "CPU", EXACT)), draft_vocabulary=100_000_000)
    assert kind.space > 29 * kind.main.hidden * 100_000_000


def test_length_too_short_for_answers_is_reported(refuses, main, tmp_path, monkeypatch):
    monkeypatch.setattr("speculative.convert.draft_training.writer.MAX_ATTEMPTS", 40)
    monkeypatch.setattr(beginnings, "TURN", 60)
    found = refuses(1, main, tmp_path / "out", *SHORT[:2], "--length", 32, "--threads", 1)
    assert "give a greater --length" in found


def test_invalid_options_give_one_sentence_error(refuses, main, tmp_path):
    out, prompts = tmp_path / "out", tmp_path / "prompts.jsonl"
    assert "--minutes is 0.0, but must be greater than 0" in refuses(2, main, out, "--minutes", 0)
    assert "--length is 4, but must be at least 32" in refuses(2, main, out, "--length", 4)
    assert "torch cannot use --device cuda:99" in refuses(2, main, out, "--device", "cuda:99")
    assert "install torch for Intel GPUs: pip install" in refuses(2, main, out, "--device", "xpu:99")
    assert "cannot be read" in refuses(2, main, out, "--prompts", prompts)
    assert "--layers is for --kind eagle3" in refuses(2, main, out, *PRUNED, "--layers", 0, 1, 2)
    assert "--init-from is for --kind eagle3" in refuses(2, main, out, *PRUNED, "--init-from", out)
    layers = ["--layers", 0, 1, 2, "--init-from", out]
    assert "--layers is that of the head of --init-from" in refuses(2, main, out, *layers)
    assert "out holds no OpenVINO model; convert the head" in refuses(2, main, out, "--init-from", out)
    another = refuses(2, main, out, "--init-from", MAIN.parent / "eagle3")
    assert "--init-from is no head of the main model" in another and "the head of another model" in another
    assert "main has no table d2t of token ids" in refuses(2, main, out, "--init-from", main)
    assert "--keep-layers is for --kind pruned" in refuses(2, main, out, "--keep-layers", 1)
    assert "nowhere holds no OpenVINO model" in refuses(2, main, out, "--compare", tmp_path / "nowhere")
    assert "is no draft of the main model" in refuses(2, main, out, "--compare", MAIN.parent / "eagle3")
    prompts.write_text("Write a poem.\n")
    assert "is not a JSONL file of prompts" in refuses(2, main, out, "--prompts", prompts)
    prompts.write_text('{"prompt": "Write a poem."}\n' * 12)
    assert "has 1 different prompts" in refuses(2, main, out, "--prompts", prompts)
    prompts.write_text('{"prompt": 5}\n' * 12)
    assert "is not a JSONL file of prompts" in refuses(2, main, out, "--prompts", prompts)
    prompts.write_text('{"prompt": "Write a poem \\ud83d"}\n' * 12)
    assert "has a prompt with an unpaired surrogate, '\\ud83d'; fix" in refuses(2, main, out, "--prompts", prompts)
    assert "tokens need up to" in refuses(1, main, out, "--tokens", 10**12)
    assert not out.exists() or not (out / "draft.json").exists()


def test_foreign_folder_or_changed_settings_are_rejected(refuses, main, made, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").touch()
    assert "holds notes.txt, which this program did not make" in refuses(2, main, other)
    assert [path.name for path in other.iterdir()] == ["notes.txt"]
    for name in ("README.md", "work/new/a", "work/old/b", "work/replaced/c"):
        (other / name).parent.mkdir(parents=True, exist_ok=True)
        (other / name).touch()
    before = sorted(other.rglob("*"))
    assert "holds README.md, which this program did not make" in refuses(2, main, other)
    for name in ("README.md", "notes.txt"):
        (other / name).rename(tmp_path / name)
    assert "holds work/new, which this program did not make" in refuses(2, main, other)
    for name in ("README.md", "notes.txt"):
        (tmp_path / name).rename(other / name)
    assert sorted(other.rglob("*")) == before
    shutil.rmtree(other / "work")
    assert "was begun with another --length (64, not 100)" in refuses(2, main, made, *SHORT, "--length", 100)
    assert "was begun with another --kind (eagle3, not pruned)" in refuses(2, main, made, *SHORT[:6], *PRUNED)
    assert "was begun with another main model" in refuses(2, MAIN, made, *SHORT)
    shutil.copytree(made / "work", tmp_path / "out/work")
    settings = json.loads((made / "work/settings.json").read_text())
    for key, value in (("content of --init-from", "head"), ("content of --prompts", "0123456789abcdef")):
        (tmp_path / "out/work/settings.json").write_text(json.dumps({**settings, key: value}))
        assert f"was begun with another {key} ({value}, not None)" in refuses(2, main, tmp_path / "out", *SHORT)
    shutil.copytree(made / "work", tmp_path / "begun/work")
    (tmp_path / "begun/README.md").write_text("mine", encoding="utf-8")
    assert "begun holds README.md, which this program did not make" in refuses(2, main, tmp_path / "begun", *SHORT)
    assert (tmp_path / "begun/README.md").read_text(encoding="utf-8") == "mine"
    (other / "notes.txt").rename(other / "draft.json")
    assert "holds a finished draft without the folder work" in refuses(2, main, other)


def test_missing_torch_gives_one_sentence_error(refuses, main, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))
    assert "torch is not installed; install it with: pip install" in refuses(1, main, tmp_path / "out")


def full_for_python(_):
    raise OSError(errno.ENOSPC, "No space left on device")


def full_for_safetensors(_):
    raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")


def full_for_openvino(folder):
    (folder / "openvino_model.bin").symlink_to("/dev/full")
    ov.save_model(ov.Core().read_model(MAIN / "openvino_model.xml"), folder / "openvino_model.xml")


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
@pytest.mark.parametrize("job", [full_for_python, full_for_safetensors, full_for_openvino])
def test_full_disk_gives_one_sentence_error(job, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(program, "NOTHING", sys.maxsize)  # this disk is not full
    assert program.run(lambda: job(tmp_path), tmp_path, debug=False, interrupted="") == 1
    expected = f"error: the disk of {tmp_path} is full; free space and run the same command again\n"
    assert capsys.readouterr().err == expected


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_file_that_cannot_be_accessed_gives_one_sentence_error(tmp_path, capsys):
    file = Path("/proc/sys/kernel/ostype")
    assert program.run(lambda: file.write_bytes(b""), tmp_path, debug=False, interrupted="") == 1
    assert capsys.readouterr().err == (
        "error: /proc/sys/kernel/ostype cannot be accessed (Permission denied); change its permissions, or end the "
        "programs that use it, and run the same command again\n"
    )


def test_killed_run_loses_little_of_the_time_it_spent(tmp_path, monkeypatch):
    monkeypatch.setattr("speculative.convert.draft_training.clock.SAVE_EVERY", 0.0)
    clock = Clock(tmp_path / "clock.json", 1)
    with clock.stage("training"):
        clock.remaining("training")
        assert Clock(tmp_path / "clock.json", 1).spent["training"] > 0


def test_prompts_that_are_left_out_are_counted(main, capsys):
    prompts = [Prompt(f"{'word ' * 40 * (i % 3 == 0)}{i}", "") for i in range(30)]
    assert len(encoded(prompts, openvino_genai.Tokenizer(str(main)), 64)) == 20
    assert "prompts: 10 of 30 have more than 56 tokens and are left out" in capsys.readouterr().out


def test_outdated_draft_vocabulary_is_reported(main, tmp_path, capsys):
    """Of a training that continues with other texts than the first."""
    early, late = ([(np.arange(n, n + 60), 0)] for n in (0, 100))
    kind = Eagle3(MainModel(ModelSpec(main, "CPU", EXACT)), [0, 2, 3], 64)
    kind.training(tmp_path / "training.pt", early, "cpu").save()
    assert "earlier texts" not in capsys.readouterr().out
    kind.training(tmp_path / "training.pt", late, "cpu")
    assert "--init-from OUT --draft-vocabulary 64" in capsys.readouterr().out
