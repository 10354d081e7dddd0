"""EAGLE-3 heads in export_pair.py: both checkpoint formats, the layers that a head reads, and errors.

optimum-cli runs in this process, which saves the seconds of importing it.
"""

import json
import re
import shutil

import numpy as np
import openvino_genai
import pytest

from convert import export_pair
from speculative.convert import eagle3_source, eagle3_to_ir, optimum_cli
from speculative.convert.errors import ConvertError
from speculative.convert.source import open_source
from speculative.models.eagle3_graph import check_head
from tests.support.later import Later, torch, transformers
from tests.support.paths import MAIN
from tests.support.tiny_checkpoints import run_optimum_here, save_checkpoint, save_eagle3_head, train_tokenizer

huggingface_hub, safetensors = Later("huggingface_hub"), Later("safetensors.torch")
patched = Later("optimum.exporters.openvino.model_patcher")
LAYERS = (1, 3, 4)  # 1, N/2 - 1, N - 4 of 8
CODE = "from pathlib import Path\nPath({marker!r}).touch()\nraise SystemExit\n"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Folders `main`, `head` and `other`, a main model of another size. No layers are in the head's config."""
    folder = tmp_path_factory.mktemp("checkpoints")
    tokenizer = train_tokenizer()
    save_checkpoint("llama", "draft", tokenizer, folder / "main", num_hidden_layers=8)
    save_checkpoint("llama", "main", tokenizer, folder / "other")
    save_eagle3_head(folder / "main", folder / "head", layers=None)
    return folder


def changed(checkpoints, folder, **config):
    """A copy of the head with another config."""
    shutil.copytree(checkpoints / "head", folder)
    given = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**given, **config}), encoding="utf-8")
    return folder


def exported(capsys, *arguments):
    status = export_pair.main(list(map(str, arguments)))
    return status, *capsys.readouterr()


def test_head_is_exported_with_its_layers_without_running_its_code(checkpoints, tmp_path, monkeypatch, capsys):
    marker = tmp_path / "code of the checkpoint ran"
    remote = {"AutoConfig": "foreign.Config", "AutoModelForCausalLM": "foreign.Model"}
    head = changed(checkpoints, tmp_path / "a_head", auto_map=remote)
    tensors = safetensors.load_file(head / "model.safetensors")
    tensors["d2t"] = tensors["d2t"].to(torch.int32)
    safetensors.save_file(tensors, head / "model.safetensors")
    (head / "foreign.py").write_text(CODE.format(marker=str(marker)), encoding="utf-8")
    tokenizer = {"tokenizer_class": "Foreign", "auto_map": {"AutoTokenizer": ["foreign.Tokenizer", None]}}
    (head / "tokenizer_config.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    monkeypatch.setattr(optimum_cli, "run", run_optimum_here)
    monkeypatch.setattr("optimum.commands.optimum_cli.load_subpackages", lambda: None)
    monkeypatch.setattr(optimum_cli, "run_head", lambda typed, *_: succeeded(eagle3_to_ir.main(typed[3:])))
    pair = tmp_path / "pair"
    command = [checkpoints / "main", head, pair, "--weight-format", "fp32", "--draft-weight-format", "fp32"]
    command += ["--draft-rope-theta", 16]
    status, out, error = exported(capsys, *command, "--trust-remote-code")
    assert status == 0, error
    assert not marker.exists()
    with pytest.raises(SystemExit):  # it would have run, had transformers seen it
        transformers.AutoConfig.from_pretrained(head, trust_remote_code=True)
    assert marker.exists()
    assert "the draft reads the outputs of the main model's layers 1, 3, 4" in out and "warning hidden" not in out

    draft_model = openvino_genai.draft_model(str(pair / "draft"), "CPU")  # which reads token ids of int64 only
    pipeline = openvino_genai.LLMPipeline(str(pair / "main"), "CPU", draft_model=draft_model)
    assert pipeline.generate("def f(x):", openvino_genai.GenerationConfig(max_new_tokens=4, num_assistant_tokens=2))
    graph = check_head(pair / "draft", pair / "main")
    assert graph.layers == graph.taps == list(LAYERS)
    size = json.loads((head / "config.json").read_text(encoding="utf-8"))["head_dim"]
    frequencies = 16.0 ** (-np.arange(0, size, 2) / size)  # of the rotary embedding with this base
    constants = [op.data.ravel() for op in graph.model.get_ops() if op.get_type_name() == "Constant"]
    assert any(one.size == size // 2 and np.allclose(one, frequencies, rtol=1e-3) for one in constants)
    names = sorted(path.name for path in (pair / "draft").iterdir())
    assert names == ["config.json", "generation_config.json", "openvino_model.bin", "openvino_model.xml"]
    record = json.loads((pair / "pair.json").read_text(encoding="utf-8"))["draft"]
    assert "eagle3_to_ir" in record["command"] and "--layers 1,3,4 --rope-theta 16 " in record["command"]
    texts = "".join(path.read_text(encoding="utf-8") for path in (pair / "draft").glob("*.json"))
    assert "auto_map" not in texts and ".unfinished" not in texts and "site-packages" not in texts

    assert exported(capsys, *command, "--trust-remote-code")[1].count("already complete") == 2


def succeeded(status):
    assert status == 0


def test_head_that_names_the_architecture_of_its_main_model_is_recognised(checkpoints, tmp_path):
    """As the EAGLE-3 paper's authors published theirs."""
    head = open_source(str(changed(checkpoints, tmp_path / "head", architectures=["LlamaForCausalLM"])), None)
    assert head.is_head and eagle3_source.head_config(head)["architectures"] == ["LlamaForCausalLMEagle3"]


def test_head_that_names_the_type_of_its_main_model_is_a_llama(checkpoints, tmp_path):
    head = open_source(str(changed(checkpoints, tmp_path / "head", model_type="qwen3")), None)
    eagle3_source.check_fit(head, open_source(str(checkpoints / "main"), None))
    assert eagle3_source.head_config(head)["model_type"] == "llama"


def test_incomplete_head_of_torch_is_refused_before_the_export(checkpoints, tmp_path):
    folder = changed(checkpoints, tmp_path / "head")
    tensors = safetensors.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    main = open_source(str(checkpoints / "main"), None)
    for names, words in (
        ({"d2t"}, None),
        (set(), "lacks d2t"),
        ({"d2t", "midlayer.self_attn.q_norm.weight"}, "q_norm"),
    ):
        kept = {name: tensor for name, tensor in tensors.items() if name != "d2t"}
        kept |= {name: tensors.get(name, torch.zeros(1)) for name in names}
        torch.save(kept, folder / "pytorch_model.bin")
        head = open_source(str(folder), None)
        if words is None:
            assert eagle3_source.check_fit(head, main) == list(LAYERS)
            continue
        with pytest.raises(ConvertError, match=words):
            eagle3_source.check_fit(head, main)


def test_known_heads_of_angelslim_get_the_base_of_their_training():
    """Their training code ignores that of their configs."""
    for draft, expected in (("AngelSlim/Qwen3-8B_eagle3", 10000), ("someone/Qwen3-8B_eagle3", None)):
        options = export_pair.parse(["Qwen/Qwen3-8B", draft, "x"])
        assert options.halves["draft"].rope_theta == expected
    options = export_pair.parse(["--pair", "qwen3-8b-eagle3", "--draft-rope-theta", "5e5"])
    assert options.halves["draft"].rope_theta == 5e5


def test_known_head_gets_its_base_as_a_folder(checkpoints, tmp_path, monkeypatch, capsys):
    """Also by a relative path, which looks like a hub id of someone else."""
    changed(checkpoints, tmp_path / "downloads" / "Qwen3-4B_eagle3")
    monkeypatch.chdir(tmp_path)
    for folder in ("downloads/Qwen3-4B_eagle3", f"{tmp_path}/downloads/Qwen3-4B_eagle3/"):
        status, out, _ = exported(capsys, checkpoints / "main", folder, "pair", "--dry-run")
        assert status == 0 and " --rope-theta 10000 " in out
        assert "# draft gets the rotary base 10000, whatever its config.json has" in out


def test_given_base_is_passed_exactly(checkpoints, tmp_path, capsys):
    command = [checkpoints / "main", checkpoints / "head", tmp_path / "pair", "--dry-run"]
    for given in ("1234567", "1234.5678"):
        assert f" --rope-theta {given} " in exported(capsys, *command, "--draft-rope-theta", given)[1]


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]])
@pytest.mark.parametrize("given", [["--draft-rope-theta", 1234567], ["--draft-args=--sym"], ["--", "--sym"]])
def test_conversion_options_for_a_draft_that_is_ir_are_rejected(given, dry_run, tmp_path, capsys):
    command = [MAIN, MAIN.parent / "eagle3", tmp_path / "pair", *dry_run]
    status, _, error = exported(capsys, *command, *given)
    assert status == 2 and f"{' '.join(map(str, given)).split('=')[-1].removeprefix('-- ')} has no effect" in error
    assert len(error.splitlines()) == 1 and not (tmp_path / "pair").exists()


def test_base_of_a_known_pair_is_ignored_for_a_draft_that_is_ir(tmp_path, capsys):
    shutil.copytree(MAIN.parent / "eagle3", tmp_path / "Qwen3-4B_eagle3")
    status, out, _ = exported(capsys, MAIN, tmp_path / "Qwen3-4B_eagle3", tmp_path / "pair", "--dry-run")
    assert status == 0 and "is OpenVINO IR: copied" in out


@pytest.mark.parametrize("shard_size", [1 << 30, 1 << 15])
def test_speculators_head_is_converted_to_eagle_format(shard_size, checkpoints, tmp_path, capsys):
    config = json.loads((checkpoints / "head/config.json").read_text(encoding="utf-8"))
    drafted = config.pop("draft_vocab_size")
    del config["architectures"]
    folder = tmp_path / "speculators"
    folder.mkdir()
    tensors = safetensors.load_file(checkpoints / "head/model.safetensors")
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    huggingface_hub.save_torch_state_dict(renamed, folder, max_shard_size=shard_size)
    assert (folder / "model.safetensors").exists() == (shard_size > sum(tensor.nbytes for tensor in renamed.values()))
    nested = {"architectures": ["Eagle3Speculator"], "draft_vocab_size": drafted, "norm_before_residual": False}
    nested["target_hidden_size"] = None  # as in published ones
    nested |= {"transformer_layer_config": config, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    (folder / "config.json").write_text(json.dumps(nested), encoding="utf-8")

    head, main = open_source(str(folder), None), open_source(str(checkpoints / "main"), None)
    assert head.is_head and eagle3_source.check_fit(head, main) == list(LAYERS)
    eagle3_source.stage(head, tmp_path / "staged")
    exported = patched.LlamaEagle3ForCausalLM.from_pretrained(tmp_path / "staged").state_dict()
    staged = {name.removeprefix("model."): tensor for name, tensor in exported.items()}
    assert staged.keys() == {*tensors, "embed_tokens.weight"}
    assert all(torch.equal(staged[name], tensors[name]) for name in tensors)
    made = json.loads((tmp_path / "staged/config.json").read_text(encoding="utf-8"))
    assert made["architectures"] == ["LlamaForCausalLMEagle3"] and made["draft_vocab_size"] == drafted
    assert "target_hidden_size" not in made
    assert made["hidden_size"] == config["hidden_size"] and made["rope_theta"] == config["rope_theta"]
    command = [str(main.folder), str(folder), str(tmp_path / "pair"), "--dry-run", "--draft-weight-format", "int4"]
    assert export_pair.main(command) == 0
    assert re.search("/draft .*--weight-format int4 --group-size 32$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({}, "1,3,4"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}}, "0,2,5"),  # outputs
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}, "1,3,4"),  # inputs
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, "1,3,4"),  # copied from eagle_config by a converter
    ],
)
def test_layers_come_from_config_or_published_defaults(config, layers, checkpoints, tmp_path, capsys):
    head = changed(checkpoints, tmp_path / "head", **config)
    status, out, _ = exported(capsys, checkpoints / "main", head, tmp_path / "pair", "--dry-run")
    assert status == 0 and f"/draft --layers {layers} --task" in out


@pytest.mark.parametrize(
    ("main", "config", "words"),
    [
        ("other", {}, "was trained for hidden states of size 32, but .* has 64: it is the head of another model"),
        ("main", {"vocab_size": 500}, "was trained for a vocabulary of 500, but .* has 384: it is the head of another"),
        ("main", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 9, 20]}}, "of layers 1, 9, 20, .* 0 to 7"),
        (
            "main",
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5, 6]}},
            r"reads 4 layers \(2, 4, 5, 6\)",
        ),
        ("main", {"eagle_aux_hidden_state_layer_ids": [0, 4, 5]}, r"\(-1, 3, 4; -1: the embeddings\)"),
        ("main", {"eagle_config": {"norm_before_fc": True}}, "has norm_before_fc, which optimum-cli ignores"),
        ("main", {"embed_requires_grad": True}, "was trained with embeddings of its own"),
        ("main", {"norm_before_residual": True}, "has norm_before_residual, which optimum-cli ignores"),
        ("main", {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "of the architecture Eagle3DeepseekV2ForCausalLM"),
        ("main", {"modal_type": "VLM"}, "is the head of a vision-language model"),
        ("main", {"model_type": "gemma3_text"}, "has a layer of the type gemma3_text"),
        ("head", {}, "is an EAGLE-3 head, a draft for another model"),
    ],
)
def test_mismatched_head_is_rejected_before_export(main, config, words, checkpoints, tmp_path, capsys):
    head = changed(checkpoints, tmp_path / "head", **config)
    status, out, error = exported(capsys, checkpoints / main, head, tmp_path / "pair")
    assert status in (1, 2) and "optimum-cli export" not in out
    assert len(error.splitlines()) == 1
    assert re.search(words, error), error
    assert not (tmp_path / "pair").exists()


def test_rope_theta_is_read_where_transformers_5_writes_it(checkpoints, tmp_path):
    head = changed(checkpoints, tmp_path / "head", rope_theta=None, rope_parameters={"rope_theta": 5e5})
    assert eagle3_source.head_config(open_source(str(head), None))["rope_theta"] == 5e5


def test_rope_scaling_is_read_where_transformers_5_writes_it(checkpoints, tmp_path):
    """Also beside rope_theta at the top, where version 4 wrote it."""
    scaling = {"rope_type": "llama3", "factor": 8.0}
    config = {"rope_theta": 5e5, "rope_scaling": None, "rope_parameters": {"rope_theta": 5e5, **scaling}}
    head = changed(checkpoints, tmp_path / "head", **config)
    assert eagle3_source.head_config(open_source(str(head), None))["rope_scaling"] == scaling


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("midlayer.mlp.up_proj.weight", "lacks midlayer.mlp.up_proj.weight, so it is not a complete EAGLE-3 head"),
        ("midlayer.self_attn.q_proj.bias", "has midlayer.self_attn.q_proj.bias, which optimum-cli leaves out"),
        ("fc.bias", "has fc.bias, which optimum-cli leaves out"),
    ],
)
def test_head_with_missing_or_further_tensors_is_rejected(name, words, checkpoints, tmp_path, capsys):
    head = changed(checkpoints, tmp_path / "head")
    tensors = safetensors.load_file(head / "model.safetensors")
    if tensors.pop(name, None) is None:
        tensors[name] = torch.zeros(4)
    safetensors.save_file(tensors, head / "model.safetensors")
    status, _, error = exported(capsys, checkpoints / "main", head, tmp_path / "pair")
    assert status == 1 and words in error and len(error.splitlines()) == 1


def test_head_may_store_embeddings_of_its_main_model_only(checkpoints, tmp_path):
    folder = changed(checkpoints, tmp_path / "head")
    head, main = open_source(str(folder), None), open_source(str(checkpoints / "main"), None)
    tensors = safetensors.load_file(folder / "model.safetensors")
    embeddings = safetensors.load_file(checkpoints / "main/model.safetensors")["model.embed_tokens.weight"]
    for kind in (torch.float32, torch.float16, torch.bfloat16):
        safetensors.save_file({**tensors, "embed_tokens.weight": embeddings.to(kind)}, folder / "model.safetensors")
        assert eagle3_source.check_fit(head, main) == list(LAYERS)
    trained = embeddings + 0.1 * embeddings.flip(0)
    safetensors.save_file({**tensors, "embed_tokens.weight": trained}, folder / "model.safetensors")
    with pytest.raises(ConvertError, match=r"which differ from those of .* by \d+%, but a head gets those of the main"):
        eagle3_source.check_fit(head, main)


def test_head_without_d2t_table_is_rejected(checkpoints, tmp_path, capsys):
    head = changed(checkpoints, tmp_path / "head")
    tensors = safetensors.load_file(head / "model.safetensors")
    del tensors["d2t"]
    safetensors.save_file(tensors, head / "model.safetensors")
    status, _, error = exported(capsys, checkpoints / "main", head, tmp_path / "pair")
    assert status == 1 and "lacks d2t, so it is not a complete EAGLE-3 head" in error

    torch.save(tensors, head / "pytorch_model.bin")  # read by the conversion itself, as torch is needed
    (head / "model.safetensors").unlink()
    assert eagle3_to_ir.main([str(head), str(tmp_path / "ir")]) == 1
    error = capsys.readouterr().err
    assert "lacks d2t" in error and len(error.splitlines()) == 1
    assert not (tmp_path / "ir").exists()
