"""Every kind of unsound pair and unusable folder is found and reported in one sentence."""

import json
import re
import shutil

import openvino_genai
import pytest
from tokenizers import Tokenizer

from speculative.models import vocabulary
from speculative.pair.check import check_pair, tokenizer_fingerprint
from tests.support.later import transformers
from tests.support.letters import letters
from tests.support.paths import DRAFT, MAIN
from tests.support.tiny_checkpoints import TRAINING_TEXT, save_checkpoint, save_ir, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer()


@pytest.fixture(scope="module")
def ir(tokenizer, tmp_path_factory):
    """An IR folder to check others against."""
    return save_ir(tokenizer, tmp_path_factory.mktemp("ir"), max_position_embeddings=256)


@pytest.fixture
def copy(ir, tmp_path):
    """A copy of it, to be changed."""
    return shutil.copytree(ir, tmp_path / "copy")


def edited(tokenizer, edit):
    """The tokenizer with its tokenizer.json changed by `edit`."""
    description = json.loads(tokenizer.backend_tokenizer.to_str())
    edit(description)
    changed = Tokenizer.from_str(json.dumps(description))
    end = "<|endoftext|>"
    return transformers.PreTrainedTokenizerFast(tokenizer_object=changed, bos_token=end, eos_token=end, pad_token=end)


def swap_two_letters(description):
    """Swap the ids of `e` and `t`: every text keeps its number of tokens."""
    vocabulary = description["model"]["vocab"]
    vocabulary["e"], vocabulary["t"] = vocabulary["t"], vocabulary["e"]


def swap_two_merges(description):
    merges = description["model"]["merges"]
    merges[3], merges[4] = merges[4], merges[3]


def split_digits(description):
    """Split text before every digit, which the merges do not show."""
    byte_level = description["pre_tokenizer"]
    digits = {"type": "Digits", "individual_digits": True}
    description["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, byte_level]}


def change_json(path, **values):
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**content, **values}), encoding="utf-8")


def levels(check):
    return {finding.what: finding.level for finding in check.findings}


def message(check, what):
    """The message of the one finding of this kind, which is one sentence on one line."""
    (text,) = (finding.message for finding in check.findings if finding.what == what)
    assert "\n" not in text
    return text


def test_embedded_pair_is_sound():
    check = check_pair(MAIN, DRAFT)
    assert check.sound
    assert set(levels(check).values()) == {"ok"}
    assert check.fingerprint == tokenizer_fingerprint(MAIN) == tokenizer_fingerprint(DRAFT)


def test_swapped_roles_are_a_warning():
    check = check_pair(DRAFT, MAIN)
    assert check.sound
    assert levels(check)["size"] == "warning"
    assert "swapped" in message(check, "size")


def test_other_token_ids_are_supported_by_native_engine_only(ir, tokenizer, tmp_path):
    other = save_ir(edited(tokenizer, swap_two_letters), tmp_path)
    check = check_pair(ir, other)
    assert check.sound and not check.same_tokenizer
    text = message(check, "vocabulary")
    assert "2 of 384 token ids differ" in text and "GenAI's pipeline needs a draft with the same tokenizer" in text
    assert "'e' in main and 't' in draft" in text
    assert levels(check)["vocabulary"] == "warning" and levels(check)["shared tokens"] == "ok"
    assert "has 384 of the main model's 384 tokens, which are 100% of a sample text's, and splits" in message(
        check, "shared tokens"
    )
    assert check.fingerprint != tokenizer_fingerprint(other)


def test_draft_that_splits_text_differently_is_a_warning(ir, tmp_path):
    letters_only = train_tokenizer(vocab_size=258)
    check = check_pair(ir, save_ir(letters_only, tmp_path), text="\n".join(TRAINING_TEXT))
    assert check.sound and levels(check)["shared tokens"] == "warning"
    text = message(check, "shared tokens")
    assert "of the text's" in text and "too little; choose another draft" in text


def test_draft_without_common_token_is_rejected(ir, tokenizer, tmp_path, monkeypatch):
    others = iter([letters(["a"]), letters(["b"])])
    monkeypatch.setattr(vocabulary, "of", lambda tokenizer: next(others))
    check = check_pair(ir, save_ir(edited(tokenizer, swap_two_letters), tmp_path))
    assert not check.sound and "no token of the draft" in message(check, "shared tokens")


def test_genai_accepts_a_draft_with_other_token_ids(tmp_path):
    """Why this check exists: GenAI only counts the tokens of one sentence. If GenAI improves, this fails."""
    draft = shutil.copytree(DRAFT, tmp_path / "draft")
    trained = transformers.PreTrainedTokenizerFast.from_pretrained(MAIN)
    description = json.loads(trained.backend_tokenizer.to_str())
    swap_two_letters(description)
    other = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(description)), **trained.special_tokens_map
    )
    toy = save_ir(other, tmp_path / "toy")
    for part in ("openvino_tokenizer", "openvino_detokenizer"):
        for suffix in (".xml", ".bin"):
            shutil.copy(toy / (part + suffix), draft)
    assert not check_pair(MAIN, draft).same_tokenizer
    openvino_genai.LLMPipeline(str(MAIN), "CPU", draft_model=openvino_genai.draft_model(str(draft), "CPU"))


def test_different_merges_are_an_error(ir, tokenizer, tmp_path):
    check = check_pair(ir, save_ir(edited(tokenizer, swap_two_merges), tmp_path))
    assert levels(check)["vocabulary"] == "ok"
    assert levels(check)["merges"] == "error"
    assert "from number 4 on" in message(check, "merges")


def test_different_pretokenization_shows_in_encodings(ir, tokenizer, tmp_path):
    texts = [*TRAINING_TEXT, "0123456789 0123456789 1234 1234"]
    plain = train_tokenizer(texts=texts)
    check = check_pair(save_ir(plain, tmp_path / "a"), save_ir(edited(plain, split_digits), tmp_path / "b"))
    assert {levels(check)[what] for what in ("vocabulary", "merges", "special tokens")} == {"ok"}
    assert levels(check)["pre_tokenizer"] == "warning"
    assert levels(check)["encodings"] == "error"


def test_different_pad_token_is_rejected_as_by_genai(tmp_path):
    draft = shutil.copytree(DRAFT, tmp_path / "draft")
    tokenizer_ir = draft / "openvino_tokenizer.xml"
    text = tokenizer_ir.read_text(encoding="utf-8")
    inserted = re.sub('<pad_token_id value="0" ?/>', '<pad_token_id value="7" />', text)
    assert inserted != text
    tokenizer_ir.write_text(inserted, encoding="utf-8")
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        (draft / name).unlink()
    check = check_pair(MAIN, draft)
    assert levels(check)["special tokens"] == "error"
    assert "pad is" in message(check, "special tokens")
    with pytest.raises(RuntimeError, match="Tokenizers for draft and main models are different"):
        openvino_genai.LLMPipeline(str(MAIN), "CPU", draft_model=openvino_genai.draft_model(str(draft), "CPU"))


@pytest.mark.parametrize(
    ("main_width", "draft_width", "npu", "level"),
    [(384, 384, True, "ok"), (400, 384, False, "warning"), (384, 400, False, "warning"), (400, 384, True, "error")],
)
def test_padded_logits_are_an_error_only_on_npu(main_width, draft_width, npu, level, tokenizer, tmp_path):
    main = save_ir(tokenizer, tmp_path / "main", logits_width=main_width)
    draft = save_ir(tokenizer, tmp_path / "draft", logits_width=draft_width)
    check = check_pair(main, draft, npu=npu)
    assert levels(check)["logits width"] == level
    assert check.sound == (level != "error")


def test_draft_that_cannot_read_every_token_is_rejected(ir, tokenizer, tmp_path):
    check = check_pair(ir, save_ir(tokenizer, tmp_path, logits_width=380))
    assert levels(check)["logits width"] == "error"
    assert "383" in message(check, "logits width")


def test_draft_without_detokenizer_is_compared_by_encoding(ir, copy):
    """Some drafts are published like this: GenAI reads no other part of a draft's tokenizer."""
    for name in ("openvino_detokenizer.xml", "openvino_detokenizer.bin", "tokenizer.json"):
        (copy / name).unlink()
    assert check_pair(ir, copy).sound
    assert levels(check_pair(copy, ir))["vocabulary"] == "error"  # the main model has to write text


def test_chat_templates_are_compared(ir, tokenizer, tmp_path):
    first = train_tokenizer()
    first.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    second = train_tokenizer()
    second.chat_template = "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"
    first, second = save_ir(first, tmp_path / "first"), save_ir(second, tmp_path / "second")
    assert levels(check_pair(first, second))["chat template"] == "warning"
    assert levels(check_pair(ir, second))["chat template"] == "warning"  # the main model's is what counts
    assert levels(check_pair(first, ir))["chat template"] == "ok"
    assert levels(check_pair(first, first))["chat template"] == "ok"


def test_shorter_draft_context_is_a_warning(ir, copy):
    change_json(copy / "config.json", max_position_embeddings=128)
    assert levels(check_pair(ir, copy))["context length"] == "warning"
    assert levels(check_pair(copy, ir))["context length"] == "ok"


def test_shorter_context_of_a_head_is_a_warning(tmp_path):
    head = shutil.copytree(MAIN.parent / "eagle3", tmp_path / "head")
    change_json(head / "config.json", max_position_embeddings=128)
    check = check_pair(MAIN, head)
    assert levels(check)["context length"] == "warning"
    assert "in GenAI's pipeline the head goes on drafting at positions" in message(check, "context length")


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
        {"architectures": ["DFlashDraftModel"]},
    ],
)
def test_dependent_or_encoder_decoder_model_is_rejected(config, ir, copy):
    change_json(copy / "config.json", **config)
    check = check_pair(ir, copy)
    assert levels(check)["architecture"] == "error"
    assert config["architectures"][0] in message(check, "architecture")


def test_eagle3_config_without_d2t_table_is_rejected(ir, copy):
    change_json(copy / "config.json", architectures=["LlamaForCausalLMEagle3"])
    check = check_pair(ir, copy)
    assert levels(check)["hidden states"] == "error" and "has no table d2t" in message(check, "hidden states")


def remove(name):
    return lambda folder: (folder / name).unlink()


def truncate(name):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:500])


def change_context(tokens):
    return lambda folder: change_json(folder / "config.json", max_position_embeddings=tokens)


def make_vision_model(folder):
    (folder / "openvino_model.xml").rename(folder / "openvino_language_model.xml")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (shutil.rmtree, "there is no folder"),
        (remove("openvino_model.xml"), "has no openvino_model.xml"),
        (remove("openvino_model.bin"), "has no openvino_model.bin"),
        (remove("openvino_tokenizer.xml"), "without --disable-convert-tokenizer"),
        (truncate("openvino_model.xml"), "openvino_model.xml is corrupt or truncated"),
        (truncate("openvino_model.bin"), "openvino_model.bin is truncated (500 of"),
        (truncate("openvino_tokenizer.xml"), "openvino_tokenizer.xml is corrupt or truncated"),
        (truncate("openvino_tokenizer.bin"), "openvino_tokenizer.bin is truncated (500 of"),
        (truncate("tokenizer.json"), "tokenizer.json cannot be read"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json does not hold a JSON object"),
        (lambda folder: (folder / "config.json").write_text("{}", encoding="utf-16"), "/config.json cannot be read"),
        (lambda folder: (folder / "generation_config.json").write_text("{"), "generation_config.json cannot be read"),
        (
            lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": "x"}'),
            "/generation_config.json has a wrong value ([json.exception.type_error.302] type must be number, but is "
            "string); correct it",
        ),
        (change_context("many"), "max_position_embeddings of config.json is 'many', but must be a whole number"),
        (make_vision_model, "vision-language"),
    ],
)
def test_unusable_folder_gives_a_single_error(damage, words, ir, copy):
    damage(copy)
    for check in (check_pair(copy, ir), check_pair(ir, copy)):
        assert not check.sound
        assert check.fingerprint is None
        assert words in message(check, "files")


def test_checkpoints_are_compared_before_their_export(tokenizer, tmp_path):
    main = save_checkpoint("llama", "main", tokenizer, tmp_path / "main")
    draft = save_checkpoint("gpt2", "draft", tokenizer, tmp_path / "draft")
    check = check_pair(main, draft)
    assert check.sound
    assert check.fingerprint is None
    assert levels(check)["merges"] == "ok"

    edited(tokenizer, swap_two_letters).save_pretrained(draft)
    check = check_pair(main, draft)
    assert levels(check)["vocabulary"] == "warning" and not check.same_tokenizer
    assert "after the export" in message(check, "shared tokens")

    tokenizer.pad_token = "a"
    tokenizer.save_pretrained(draft)
    tokenizer.pad_token = "<|endoftext|>"
    assert levels(check_pair(main, draft))["special tokens"] == "error"

    (draft / "tokenizer.json").unlink()  # SentencePiece alone: nothing to compare yet, nothing to reject
    assert levels(check_pair(main, draft))["vocabulary"] == "warning"
    assert check_pair(main, draft).sound


def test_unnamed_special_tokens_of_a_checkpoint_are_unknown(tokenizer, tmp_path):
    """GPT-2's tokenizer has them by its class; its files on the hub name none."""
    main = save_checkpoint("gpt2", "main", tokenizer, tmp_path / "main")
    draft = save_checkpoint("gpt2", "draft", tokenizer, tmp_path / "draft")
    (draft / "tokenizer_config.json").write_text('{"model_max_length": 1024}', encoding="utf-8")
    assert message(check_pair(main, draft), "special tokens") == "the same ids in both (bos 0, eos 0, pad 0)"
    change_json(draft / "special_tokens_map.json", bos_token="a")  # which is read, too
    assert re.match(r"bos is 0 .* in main and \d+ \('a'\) in draft", message(check_pair(main, draft), "special tokens"))
    (draft / "special_tokens_map.json").unlink()
    check = check_pair(main, draft)
    assert check.sound and "special tokens" not in levels(check)


def test_checkpoint_is_compared_with_ir(ir, tokenizer, tmp_path):
    checkpoint = save_checkpoint("llama", "main", tokenizer, tmp_path)
    assert check_pair(checkpoint, ir).sound
    edited(tokenizer, swap_two_merges).save_pretrained(checkpoint)
    assert levels(check_pair(ir, checkpoint))["merges"] == "error"
