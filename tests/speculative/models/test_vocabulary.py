"""Vocabularies as bytes: what two tokenizers share, and how a draft reads the main model's text; on several kinds."""

import shutil
from pathlib import Path

import numpy as np
import openvino
import openvino_tokenizers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from speculative.drafting import retokenizer
from speculative.drafting.retokenizer import Retokenizer
from speculative.models import vocabulary
from speculative.models.vocabulary import SharedTokens, shared_tokens
from tests.support.later import transformers
from tests.support.letters import DRAFT as DRAFT_LETTERS
from tests.support.letters import MAIN as MAIN_LETTERS
from tests.support.letters import letters, shared_letters
from tests.support.paths import DRAFT, MAIN

TEXT = 'def naïve(path: str):\n    """Café 1234, 2026."""\n\treturn  path[12]  # 你好 😀 ﬁ\n'
TRAINING_TEXT = [
    TEXT,
    (MAIN / "tokenizer_config.json").read_text(encoding="utf-8"),
    Path(__file__).read_text(encoding="utf-8"),
]


def sentencepiece():
    """As Llama 2's: a space is spelled ▁ and put before each text, a character that is no token is spelled in bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    spaces, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), strip])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, max_token_length=8)
    tokenizer.train_from_iterator([text.replace("😀", "") for text in TRAINING_TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def byte_level(size, **how):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, **how)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def normalising():
    """Texts are normalised by NFKC, and several spaces are one."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=["<unk>", "</s>"], unk_token="<unk>")
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


KINDS = {
    "sentencepiece": sentencepiece,
    "bytes only": lambda: byte_level(257),
    "words with spaces": lambda: byte_level(700, use_regex=False),  # "path: str" may be one token, and "1234"
    "normalising": normalising,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folders = {"embedded": MAIN}
    for kind, make in KINDS.items():
        folders[kind] = folder = tmp_path_factory.mktemp("tokenizer")
        parts = openvino_tokenizers.convert_tokenizer(make(), with_detokenizer=True)
        for part, name in zip(parts, ("tokenizer", "detokenizer"), strict=True):
            openvino.save_model(part, folder / f"openvino_{name}.xml")
    return folders


@pytest.fixture(scope="module")
def vocabularies(folders):
    return {kind: vocabulary.read(folder) for kind, folder in folders.items()}


def text_of(vocabulary, ids):
    tokens = vocabulary.tokens()
    return b"".join(tokens[token] for token in ids.tolist()).decode()


@pytest.mark.parametrize("kind", ["embedded", *KINDS])
def test_token_bytes_join_to_the_text(kind, vocabularies):
    expected = {"sentencepiece": f" {TEXT}", "normalising": " " + TEXT.replace("ﬁ", "fi")}
    text = text_of(vocabularies[kind], vocabularies[kind].encode(TEXT))
    if kind == "normalising":
        assert text.split() == expected[kind].split()
    else:
        assert text == expected.get(kind, TEXT)


def test_byte_token_is_used_only_without_a_regular_token(vocabularies):
    spelled, ids = vocabularies["sentencepiece"].spelled, vocabularies["sentencepiece"].ids()
    assert spelled[ids[b"a"]] == b"a" and spelled[ids[b"\xf0"]] == b"<0xF0>" and spelled[ids[b" "]] == "▁".encode()


def test_prefix_holds_tokens_before_each_text(vocabularies):
    assert vocabularies["sentencepiece"].prefix.tolist() == [vocabularies["sentencepiece"].bos]
    assert not len(vocabularies["embedded"].prefix)


def test_pairs_have_equal_bytes_and_share_the_eos_token():
    shared = SharedTokens(letters(["a", "b", "</s>"])._replace(eos=2), letters(["<|end|>", "b", "c"])._replace(eos=0))
    assert shared.pairs == {1: 1, 2: 0}
    assert dict(zip(shared.main_ids.tolist(), shared.draft_ids.tolist(), strict=True)) == {1: 1, 2: 0}
    shared.fit(main_size=4, draft_size=1)  # the draft gives no logits for b
    assert shared.main_ids.tolist() == [2] and shared.draft_ids.tolist() == [0]
    named = SharedTokens(letters(["a", "<|end|>"])._replace(eos=1), letters(["<|end|>", "</s>"])._replace(eos=1))
    assert named.pairs == {1: 0}


def test_same_tokenizer_needs_no_translation(folders, tmp_path):
    assert shared_tokens(MAIN, DRAFT) is None
    assert len(shared_tokens(MAIN, folders["sentencepiece"]).pairs) > 200
    without = shutil.copytree(folders["sentencepiece"], tmp_path / "without")
    (without / "openvino_detokenizer.xml").unlink()
    assert shared_tokens(MAIN, without) is None  # its tokens are not known


def test_tokenizers_with_renumbered_nodes_are_not_loaded(tmp_path, monkeypatch):
    """Every export numbers its nodes differently; loading two vocabularies takes seconds for large ones."""
    loaded = []
    monkeypatch.setattr(vocabulary, "read", loaded.append)
    xml = "openvino_tokenizer.xml"
    assert (MAIN / xml).read_bytes() != (DRAFT / xml).read_bytes()
    assert vocabulary.differing(MAIN, DRAFT) is None and loaded == []
    for name, former, new in ((xml, b"<dim>1</dim>", b"<dim>-1</dim>"), ("openvino_tokenizer.bin", b"def", b"fed")):
        other = shutil.copytree(DRAFT, tmp_path / name)
        content = (other / name).read_bytes()
        assert former in content
        (other / name).write_bytes(content.replace(former, new, 1))
        vocabulary.differing(MAIN, other)
        assert loaded[-2:] == [MAIN, other]


def test_vocabularies_without_common_token_are_rejected(folders, monkeypatch):
    others = iter([letters(["a"]), letters(["b"])])
    monkeypatch.setattr(vocabulary, "read", lambda folder: next(others))
    with pytest.raises(ValueError, match="shares no token with"):
        shared_tokens(MAIN, folders["bytes only"])


def test_similarity_of_token_splits():
    shared = shared_letters()
    assert shared.shared_split("abcdef") == (5 / 6, 3 / 6)  # ab is one token of the draft, and f is none
    assert shared.shared_split("ce") == (1, 1)
    assert shared.shared_split("") == (0, 0)


@pytest.mark.parametrize("main", ["embedded", "sentencepiece", "bytes only"])
@pytest.mark.parametrize("draft", ["embedded", *KINDS])
def test_draft_reads_a_text_in_its_own_tokens(main, draft, vocabularies):
    """For any chunks of the text; a partial character is read as bytes if the draft has byte tokens."""
    ours, theirs = vocabularies[main], vocabularies[draft]
    reader = Retokenizer(SharedTokens(ours, theirs))
    tokens = ours.encode(TEXT)
    for n in range(1, len(tokens) + 1):
        ids = reader.ids(tokens[:n])
    assert ids.tolist() == [*theirs.prefix, *theirs.encode(text_of(ours, tokens))]


def test_beginning_of_text_is_translated(vocabularies):
    """BOS is translated to the draft's BOS, or spelled as text; a token without text cannot be read."""
    ours = vocabularies["sentencepiece"]
    tokens = np.concatenate([ours.prefix, ours.encode("x = 1")])
    same = Retokenizer(SharedTokens(ours, ours._replace(spelled={**ours.spelled})))
    assert same.ids(tokens).tolist() == [*ours.prefix, *ours.encode(" x = 1")]
    theirs = vocabularies["embedded"]
    assert text_of(theirs, Retokenizer(SharedTokens(ours, theirs)).ids(tokens)) == "<s> x = 1"
    assert Retokenizer(shared_letters()).ids(np.array([99])) is None


def test_partial_character_is_read_as_bytes_if_possible(vocabularies):
    ours = vocabularies["bytes only"]
    smile = ours.encode("😀")
    for draft, spelled in (("sentencepiece", True), ("embedded", True), ("normalising", False)):
        theirs = vocabularies[draft]
        ids = Retokenizer(SharedTokens(ours, theirs)).ids(smile[:2])
        expected = [*theirs.prefix, theirs.ids().get(b"\xf0"), theirs.ids().get(b"\x9f")]
        assert (ids.tolist() == expected) if spelled else (ids is None)


def test_draft_tokens_are_kept_until_verified_then_reencoded():
    reader = Retokenizer(shared_letters())

    def read(text):
        ids = reader.ids(np.array([MAIN_LETTERS.index(letter) for letter in text]))
        return [DRAFT_LETTERS[token] for token in ids]

    assert read("ca") == ["c", "a"]
    reader.draft(MAIN_LETTERS.index("b"))
    assert read("cab") == ["c", "a", "b"] == read("cab")  # the draft wrote a and b, not ab
    assert read("cabe") == ["c", "ab", "e"]
    assert read("cae") == ["c", "a", "e"]  # another text
    reader.draft(MAIN_LETTERS.index("b"))
    assert read("caeg") == ["c", "a", "e", "g"]  # rejected


@settings(max_examples=30, deadline=None)
@given(
    words=st.lists(
        st.sampled_from(["path", " path", "  ", "\n    ", "12", "你好", "😀", ".", "def ", "-"]), max_size=60
    )
)
@pytest.mark.parametrize("draft", ["embedded", "sentencepiece", "words with spaces"])
def test_long_text_is_split_without_changing_its_tokens(draft, words, vocabularies):
    """Only the end of the text is encoded again, with the same result; final ids do not change."""
    ours, theirs = vocabularies["bytes only"], vocabularies[draft]
    reader, tokens, final = Retokenizer(SharedTokens(ours, theirs)), ours.encode("x = [" + "".join(words)), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retokenizer, "MAX_TAIL", 40)
        patch.setattr(retokenizer, "MIN_TAIL", 24)
        reader.reset()
        for n in (*range(1, len(tokens), 7), len(tokens)):
            ids = reader.ids(tokens[:n]).tolist()
            assert reader.final_ids.tolist()[: len(final)] == final
            final = reader.final_ids.tolist()
    assert len(final) > len(theirs.prefix) or len(tokens) < 200
    assert ids == [*theirs.prefix, *theirs.encode(text_of(ours, tokens))]
