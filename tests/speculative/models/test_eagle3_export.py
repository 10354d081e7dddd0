"""EAGLE-3 heads in the published checkpoint format, exported by optimum-cli: both engines decode with them."""

import shutil

import numpy as np
import openvino as ov
import openvino_genai
import pytest
from openvino_genai import GenerationConfig

from speculative import ModelSpec, batch_decoder, decoder, load
from speculative.models import eagle3_graph
from speculative.models.eagle3_head import EagleHead
from speculative.pair.model_info import require_runnable
from tests.support.paths import MAIN
from tests.support.tiny_checkpoints import (
    run_optimum_here,
    save_checkpoint,
    save_eagle3_head,
    train_tokenizer,
    weaken_layers,
)

LAYERS = (0, 1, 2)  # of 4
PROMPT = "def read_file(path):"
EXACT = {"EXECUTION_MODE_HINT": "ACCURACY"}
K, NEW_TOKENS = 3, 60


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A main model with 4 layers and a head, both exported in f32."""
    folder = tmp_path_factory.mktemp("eagle3")
    save_checkpoint("llama", "main", train_tokenizer(), folder / "checkpoint", num_hidden_layers=4)
    weaken_layers(folder / "checkpoint", 0.1)  # or a tiny head could not learn it
    save_eagle3_head(folder / "checkpoint", folder / "head_checkpoint", LAYERS)
    with pytest.MonkeyPatch.context() as patch:
        import transformers.dynamic_module_utils as modules

        # The exporter's own code counts as remote code, whose imports are checked: einops, diffusers, not used here.
        patch.setattr(modules, "check_imports", modules.get_relative_imports)
        for name, source in (("main", "checkpoint"), ("exported", "head_checkpoint")):
            export = ["optimum-cli", "export", "openvino", "--model", str(folder / source), str(folder / name)]
            export += ["--task", "text-generation-with-past", "--weight-format", "fp32", "--trust-remote-code"]
            run_optimum_here(export, folder / "log", folder, verbose=False)
    head = ov.Core().read_model(folder / "exported/openvino_model.xml")
    head.set_rt_info(list(LAYERS), "hidden_layers_list")
    ov.save_model(head, folder / "head/openvino_model.xml", compress_to_fp16=False)
    shutil.copy(folder / "exported/config.json", folder / "head")
    return folder / "main", folder / "head"


@pytest.fixture(scope="module")
def engine(folders):
    return load(ModelSpec(folders[0], "CPU", EXACT), folders[1])


def test_load_recognises_the_head(folders, engine):
    assert [eagle3_graph.is_head(folder) for folder in folders] == [False, True]
    assert isinstance(engine.draft.model, EagleHead)
    require_runnable(folders[1], writes_text=False)  # without a tokenizer


def test_draft_distribution_equals_that_of_the_exported_head(folders, engine):
    """The exported graphs themselves, one after the other, without a cache and with fc in the head."""
    main = ov.Core().read_model(folders[0] / "openvino_model.xml")
    for layer in LAYERS:
        main.add_outputs((f"__module.model.layers.{layer}/aten::add/Add_1", 0))
    head = ov.Core().read_model(folders[1] / "openvino_model.xml")
    embedding = eagle3_graph.find_embedding(main.clone())
    eagle3_graph.find_embedding(head).input(0).replace_source_output(embedding.input_value(0))
    tokens = engine.encode(PROMPT)
    _, *states = _infer(main, tokens).values()
    states = np.concatenate(states, -1)
    expected = _infer(head, tokens[1:], hidden_states=states[:, :-1])[0][0, -1]
    known = np.arange(engine.main.vocab_size)
    assert engine.draft.model.targets.tolist() == known[known % 4 != 3].tolist()

    engine.reset()
    engine.main.logits(tokens[:-1])
    np.testing.assert_allclose(engine.draft.model.logits(tokens)[0], expected, atol=2e-4)


def _infer(model, tokens, **more):
    n = len(tokens)
    inputs = {"input_ids": tokens[None], "attention_mask": np.ones((1, n), np.int64), **more}
    inputs |= {"position_ids": np.arange(n)[None], "beam_idx": np.zeros(1, np.int32)}
    return ov.Core().compile_model(model, "CPU", EXACT)(inputs)


@pytest.mark.parametrize("k", [K, 0], ids=["fixed", "adaptive"])
def test_greedy_text_equals_main_model_alone(folders, engine, k):
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    alone = decoder.load(ModelSpec(folders[0], "CPU", EXACT)).generate(PROMPT, config)
    config.num_assistant_tokens = k
    result = engine.generate(PROMPT, config)
    print(result.draft_length, result.acceptance_rate)
    assert result.tokens == alone.tokens
    assert not k or result.acceptance_rate > 0.05


def test_genai_decodes_with_the_head_and_accepts_as_much(folders, engine):
    alone = _genai_tokens(openvino_genai.LLMPipeline(str(folders[0]), "CPU", **EXACT))[0]
    draft_model = openvino_genai.draft_model(str(folders[1]), "CPU", **EXACT)
    pipeline = openvino_genai.LLMPipeline(str(folders[0]), "CPU", draft_model=draft_model, **EXACT)
    tokens, iterations = _genai_tokens(pipeline, num_assistant_tokens=K)
    ours = engine.generate(PROMPT, GenerationConfig(max_new_tokens=NEW_TOKENS, ignore_eos=True, num_assistant_tokens=K))
    assert tokens == alone == ours.tokens
    print(iterations, ours.gained)
    assert abs(iterations - len(ours.gained)) <= 2


def _genai_tokens(pipeline, **options):
    """The tokens, and the number of forward passes of the main model after the prompt."""
    ids = pipeline.get_tokenizer().encode(PROMPT)
    result = pipeline.generate(ids, GenerationConfig(max_new_tokens=NEW_TOKENS, ignore_eos=True, **options))
    metrics = result.extended_perf_metrics or result.perf_metrics
    passes = getattr(metrics, "main_model_metrics", metrics).raw_metrics.m_batch_sizes
    return result.tokens[0], len(passes) - 1


@pytest.mark.parametrize("sample", ["speculative_decoding_lm.py", "speculative_sampling_lm.py"])
def test_samples_accept_a_head_as_draft(folders, run_here, sample):
    done = run_here(f"samples/{sample}", *folders, PROMPT, "--max-new-tokens", "20")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() and "draft" in done.stderr


@pytest.mark.parametrize(
    "order, sentence",
    [
        ((MAIN, 1), "reads hidden states of size 64 from each layer, but the main model's have size 512"),
        ((1, 0), "is an EAGLE-3 draft, which writes no text on its own"),
    ],
    ids=["another main model", "swapped"],
)
def test_misplaced_head_gives_one_sentence_error(folders, run_here, order, sentence):
    models = [folders[name] if isinstance(name, int) else name for name in order]
    done = run_here("samples/speculative_sampling_lm.py", *models, PROMPT)
    assert done.returncode == 2 and sentence in done.stderr and len(done.stderr.splitlines()) == 1


def test_check_pair_accepts_a_head_as_draft(folders, run_here):
    done = run_here("scripts/check_pair.py", *folders, "--rollback")
    assert done.returncode == 0, done.stdout
    assert "reads the outputs of the main model's layers 0, 1, 2" in " ".join(done.stdout.split())
    assert "warning  hidden states" not in done.stdout


def test_batch_decoder_generates_the_same_text(folders, engine):
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, ignore_eos=True, num_assistant_tokens=K)
    batch = batch_decoder.load(ModelSpec(folders[0], "CPU", EXACT), folders[1])
    requests = [batch.add_request(prompt, config) for prompt in (PROMPT, "import os")]
    while batch.has_unfinished_requests:
        batch.step()
    for prompt, request in zip((PROMPT, "import os"), requests, strict=True):
        alone = engine.generate(prompt, config)
        assert (request.result.tokens, request.result.accepted) == (alone.tokens, alone.accepted)
