"""Main models of the Llama, Qwen2 and Qwen3 architectures in torch: from their IR, and as an IR again."""

from dataclasses import replace

import numpy as np
import openvino as ov
import pytest

from speculative import ModelSpec
from speculative.convert.draft_training.eagle3 import Eagle3
from speculative.convert.draft_training.main_model import MainModel
from speculative.convert.draft_training.pruned import Pruned
from speculative.convert.errors import ConvertError
from speculative.modelgen import llama_ir
from tests.support.later import Later, torch, transformers
from tests.support.tiny_checkpoints import run_optimum_here, save_checkpoint, train_tokenizer
from tests.support.tiny_main import logits_of, of_architecture, save_tiny_main, tiny_main

pruned_model, torch_llama, torch_main = (
    Later(f"speculative.convert.draft_training.{name}") for name in ("pruned_model", "torch_llama", "torch_main")
)
EXACT = {"EXECUTION_MODE_HINT": "ACCURACY"}
TOKENS = np.arange(0, 384, 16)


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def main(request, tmp_path_factory):
    folder = save_tiny_main(tmp_path_factory.mktemp(request.param) / "main", architecture=request.param)
    return MainModel(ModelSpec(folder, "CPU", EXACT)), request.param


def torch_logits(model, tokens=TOKENS):
    with torch.no_grad():
        return model(torch.from_numpy(tokens)[None]).logits[0].numpy()


def error(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("layers", [[0, 1, 2, 3], [0, 3], [2]])
def test_pruned_model_equals_main_model_without_other_layers(main, layers, tmp_path):
    model, architecture = main
    kind = Pruned(model, 2)
    kind.check()
    whole = of_architecture(tiny_main(model.vocabulary), architecture)
    expected = logits_of(llama_ir.build(replace(whole, layers=[whole.layers[i] for i in layers])), TOKENS)
    if len(layers) == 4:
        assert (expected == logits_of(model.graph, TOKENS)).all()
    built = torch_llama.build(kind.llama, layers)
    assert built.config.model_type == architecture
    assert np.abs(torch_logits(built) - expected).max() < 0.01 * expected.std()
    exported = llama_ir.build(pruned_model.in_numbers(built))
    assert np.abs(logits_of(exported, TOKENS) - expected).max() < 0.1 * expected.std()
    built.save_pretrained(tmp_path / "checkpoint")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype=torch.float32)
    assert (torch_logits(again) == torch_logits(built)).all()


def test_torch_main_reads_what_the_ir_computes(main):
    kind = Eagle3(main[0])
    in_torch = torch_main.TorchMain(kind.main, kind.layers, "cpu")
    mask = torch.ones(1, len(TOKENS), dtype=torch.bool)
    states, ids, probabilities = in_torch.read(torch.from_numpy(TOKENS)[None], mask, 8)
    expected = kind.reader(8).read(TOKENS)
    assert error(states[0].numpy(), expected.states) < 2e-3  # those of the IR are rounded to float16
    assert (ids[0, :, 0].numpy() == expected.ids[:, 0]).all()
    assert np.allclose(probabilities[0], np.exp(expected.log_probabilities.astype(float)), atol=2e-3)


@pytest.mark.parametrize("left_out", ["biases", "head_norms"])
def test_biases_and_head_norms_matter(left_out):
    """So that the tests above would show a training that leaves them out."""
    whole = of_architecture(tiny_main(384), {"biases": "qwen2", "head_norms": "qwen3"}[left_out])
    without = replace(whole, layers=[replace(layer, **{left_out: {}}) for layer in whole.layers])
    assert error(*(logits_of(llama_ir.build(model), TOKENS) for model in (without, whole))) > 0.05


def test_attention_with_biases_and_head_norms_is_refused(tmp_path):
    folder = save_tiny_main(tmp_path / "main")
    both = of_architecture(of_architecture(tiny_main(384), "qwen2"), "qwen3")
    ov.save_model(llama_ir.build(both), folder / "openvino_model.xml", compress_to_fp16=False)
    with pytest.raises(ConvertError, match=r"cannot be pruned, as only .* \(its attention has both biases and norms\)"):
        Pruned(MainModel(ModelSpec(folder, "CPU", EXACT)), 2)


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_exported_model_is_read_as_its_checkpoint(name, tmp_path, monkeypatch):
    from convert import export_pair
    from speculative.convert import optimum_cli

    monkeypatch.setattr(optimum_cli, "run", run_optimum_here)
    tokenizer = train_tokenizer()
    for role in ("main", "draft"):
        save_checkpoint(name, role, tokenizer, tmp_path / role, num_hidden_layers=3)
    original = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "main")
    for parameter_name, parameter in original.named_parameters():
        if "norm" in parameter_name or parameter_name.endswith("bias"):  # a new model has biases of 0 and norms of 1
            parameter.data += 0.3 * torch.randn_like(parameter)
    original.save_pretrained(tmp_path / "main")
    sources = [str(tmp_path / role) for role in ("main", "draft")]
    assert export_pair.main([*sources, str(tmp_path / "pair"), "--weight-format", "fp32"]) == 0
    kind = Pruned(MainModel(ModelSpec(tmp_path / "pair/main", "CPU", EXACT)), 2)
    kind.check()
    assert kind.llama.architecture == name
    built = torch_llama.build(kind.llama, [0, 1, 2])
    assert error(torch_logits(built), torch_logits(original)) < 0.005
