"""Pair check: compares main and draft model token by token, in seconds, without compiling them.

    check = check_pair(Path("models/embedded/main"), Path("models/embedded/draft"))
    for finding in check.findings:
        ...
    if not check.sound:
        ...

Why: GenAI only encodes one sentence and compares the number of tokens and three special ids. A draft whose tokenizer
gives every token a different id passes that check and then proposes nonsense.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from speculative.models import gguf_file
from speculative.models.eagle3_graph import check_head, is_head
from speculative.models.vocabulary import SAMPLE, SharedTokens
from speculative.pair.model_info import (
    TEST_TEXT,
    ModelFacts,
    UnusableFolder,
    checkpoint_facts,
    config_facts,
    gguf_facts,
    ir_facts,
    is_checkpoint,
    is_ir,
    read_graph,
    require_ir,
    tokenizer_facts,
)

OTHER_TOKENIZER = "shared tokens"  # the finding about a draft with another tokenizer
ALPHA = 0.7  # per-token acceptance of an average draft with the main model's tokenizer
MIN_SHARED_SPLIT = 0.5  # share of tokens that both tokenizers write, below which a draft is not worth it
MAX_SHOWN = 3  # first differences shown in a message


class Finding(NamedTuple):
    """The result of one check. `level` is "ok", "warning" (works, with a limit) or "error" (not a sound pair)."""

    level: str
    what: str  # files, vocabulary, tokenizer rules, special tokens, encodings, logits width, chat template, ...
    message: str  # one sentence: the finding, and what to do about it


class PairCheck(NamedTuple):
    """The findings, and a tokenizer fingerprint, equal for equal tokenizers only (None before the export)."""

    findings: list[Finding]
    fingerprint: str | None

    @property
    def sound(self) -> bool:
        """Whether no finding is an error."""
        return all(finding.level != "error" for finding in self.findings)

    @property
    def same_tokenizer(self) -> bool:
        """Whether GenAI's pipeline can use the draft, too."""
        return all(finding.what != OTHER_TOKENIZER for finding in self.findings)


def check_pair(main: Path, draft: Path, *, npu: bool = False, text: str = SAMPLE) -> PairCheck:
    """Compare two models: folders of OpenVINO IR, or of Hugging Face checkpoints or GGUF files not exported yet.

    Args:
        main, draft: the folders, or GGUF files.
        npu: the pair is for an NPU, whose stateful backend needs logits of equal width.
        text: what two different tokenizers are compared on.

    An unusable folder (missing, truncated, corrupt, of another kind) is reported as a finding, not raised.
    """
    main, draft = Path(main), Path(draft)
    if is_ir(main) and is_ir(draft) and is_head(draft):
        return _check_head(main, draft)
    ggufs = [gguf_file.is_named(folder) and folder.is_file() for folder in (main, draft)]
    unexported = any(ggufs) or any(
        is_checkpoint(folder) and not (folder / "openvino_model.xml").is_file() for folder in (main, draft)
    )
    readable: list[ModelFacts] = []
    findings: list[Finding] = []
    for folder, is_gguf in zip((main, draft), ggufs, strict=True):
        read = gguf_facts if is_gguf else checkpoint_facts if unexported else ir_facts
        try:
            readable.append(read(folder))
        except UnusableFolder as error:
            findings.append(Finding("error", "files", str(error)))
    if findings:
        return PairCheck(findings, None)
    facts = readable[0], readable[1]
    findings = [
        *([] if unexported else [Finding("ok", "files", "both folders are complete and readable OpenVINO IR")]),
        *(_compare_other_tokenizers(*facts, text) if _differ(*facts) else _compare_same_tokenizers(*facts, npu=npu)),
        *_compare_chat_templates(*facts),
        *_compare_context_lengths(*facts),
        *_judge_architectures(*facts),
        *_judge_attention(*facts),
        *_compare_sizes(*facts),
    ]
    return PairCheck(findings, None if unexported else _fingerprint(facts[0]))


def _check_head(main: Path, draft: Path) -> PairCheck:
    """`check_pair` for an EAGLE-3 draft, which has no tokenizer of its own: its graph must fit the main model's."""
    try:
        facts = ir_facts(main)
        require_ir(draft, standalone=False)
        read_graph(draft)
    except UnusableFolder as error:
        return PairCheck([Finding("error", "files", str(error))], None)
    findings = [Finding("ok", "files", "both folders are complete and readable OpenVINO IR")]
    try:
        head = check_head(draft, main)
    except ValueError as error:
        return PairCheck([*findings, Finding("error", "hidden states", str(error))], _fingerprint(facts))
    layers = ", ".join(map(str, head.taps))
    message = f"the draft reads the outputs of the main model's layers {layers}"
    findings.append(Finding("ok", "hidden states", message))
    if not head.layers:
        message = (
            f"the draft does not say which layers it was trained on, so layers {layers} are read, as by GenAI; heads "
            "trained with the published code read each one layer earlier: convert its checkpoint again with "
            "convert/export_pair.py, which writes hidden_layers_list"
        )
        findings.append(Finding("warning", "hidden states", message))
    if facts.logits_width:
        message = f"the draft proposes {len(head.targets):,} of the main model's {facts.logits_width:,} tokens"
        findings.append(Finding("ok", "vocabulary", message))
    draft_facts = config_facts(draft)
    draft_facts.weight_bytes = (draft / "openvino_model.bin").stat().st_size
    findings += [
        *_compare_context_lengths(facts, draft_facts, is_head=True),
        *_judge_attention(facts),
        *_compare_sizes(facts, draft_facts),
    ]
    return PairCheck(findings, _fingerprint(facts))


def compare_tokenizers(main: Path, draft: Path) -> list[Finding]:
    """The part of `check_pair` that takes a fraction of a second: vocabularies, encodings and sizes of two IR folders.

    Encodes a test text; every token only if the draft has no detokenizer, which lists them. Raises UnusableFolder if a
    tokenizer cannot be loaded.
    """
    facts = tokenizer_facts(Path(main)), tokenizer_facts(Path(draft))
    if _differ(*facts):
        return [*_compare_other_tokenizers(*facts), *_compare_sizes(*facts)]
    texts = TEST_TEXT if facts[1].tokens else _texts(facts[0])
    return [*_compare_vocabularies(*facts), *_compare_encodings(*facts, texts), *_compare_sizes(*facts)]


def tokenizer_fingerprint(folder: Path) -> str:
    """SHA-256 of a tokenizer IR's behaviour: tokens, special ids, encodings of a test text and of every token.

    Raises UnusableFolder (a ValueError) if the folder is not a complete IR.
    """
    return _fingerprint(ir_facts(Path(folder)))


def _fingerprint(main: ModelFacts) -> str:
    assert main.encode is not None  # an IR has a tokenizer
    tokens = [[token_id, token.hex()] for token_id, token in sorted(main.tokens.items())]
    content = json.dumps([tokens, main.special_ids, main.encode(_texts(main))])
    return "sha256:" + hashlib.sha256(content.encode()).hexdigest()


def _texts(main: ModelFacts) -> list[str]:
    """The texts that both tokenizers encode: the test text, and each token of main that is valid text on its own.

    Encoding a token's own text exercises the merges that produce it, for any kind of tokenizer.
    """
    texts = [*TEST_TEXT]
    for _, token in sorted(main.tokens.items()):
        with contextlib.suppress(UnicodeDecodeError):  # a part of a character
            texts.append(token.decode())
    return [text for text in texts if text]


def _compare_vocabularies(main: ModelFacts, draft: ModelFacts) -> Iterator[Finding]:
    if not main.tokens or not draft.tokens:
        folder = (draft if main.tokens else main).folder
        if not main.encode:
            message = f"{folder} has no tokenizer.json, so the vocabularies can only be compared after the export"
            yield Finding("warning", "vocabulary", message)
        elif not main.tokens:
            message = f"{folder} has no openvino_detokenizer.xml, so it cannot produce text; export it again"
            yield Finding("error", "vocabulary", message)
        else:
            message = f"{folder} has no detokenizer to list its tokens; they are compared by encoding, see encodings"
            yield Finding("ok", "vocabulary", message)
        return
    yield Finding("ok", "vocabulary", f"{len(main.tokens):,} tokens with the same ids in both")


def _differ(main: ModelFacts, draft: ModelFacts) -> bool:
    """Whether the two tokenizers have other tokens, or other ids for them."""
    return bool(main.tokens and draft.tokens and main.tokens != draft.tokens)


def _compare_same_tokenizers(main: ModelFacts, draft: ModelFacts, *, npu: bool) -> Iterator[Finding]:
    """Everything in which two tokenizers may differ whose tokens do not, or are not known."""
    yield from _compare_vocabularies(main, draft)
    yield from _compare_rules(main, draft)
    yield from _compare_special_tokens(main, draft)
    yield from _compare_encodings(main, draft, _texts(main))
    yield from _compare_logits_width(main, draft, npu=npu)


def _compare_other_tokenizers(main: ModelFacts, draft: ModelFacts, text: str = SAMPLE) -> Iterator[Finding]:
    """Tokens that a draft with another tokenizer can propose: those that both have, where both split the text alike."""
    ids = sorted(main.tokens.keys() | draft.tokens.keys())
    different = [i for i in ids if main.tokens.get(i) != draft.tokens.get(i)]
    details = "; ".join(
        f"{i} is {_token(main, i)} in main and {_token(draft, i)} in draft" for i in different[:MAX_SHOWN]
    )
    message = (
        f"{len(different):,} of {len(ids):,} token ids differ ({details}): GenAI's pipeline needs a draft with the "
        "same tokenizer, this project's engine drafts the tokens that both have"
    )
    yield Finding("warning", "vocabulary", message)
    if not main.vocabulary or not draft.vocabulary:
        message = "run scripts/check_pair.py after the export: it counts the tokens that both have"
        yield Finding("warning", OTHER_TOKENIZER, message)
        return
    shared = SharedTokens(main.vocabulary, draft.vocabulary)
    share, shared_split = shared.shared_split(text)
    message = (
        f"the draft has {len(shared.pairs):,} of the main model's {len(main.tokens):,} tokens, which are {share:.0%} "
        f"of {'a sample' if text is SAMPLE else 'the'} text's, and splits {shared_split:.0%} of it alike: where a "
        f"draft with the same tokenizer would have {ALPHA:.0%} of its tokens accepted, expect "
        f"{ALPHA * shared_split:.0%}"
    )
    if not shared.pairs:
        yield Finding("error", OTHER_TOKENIZER, "no token of the draft is one of the main model; choose another draft")
    elif shared_split < MIN_SHARED_SPLIT:
        yield Finding("warning", OTHER_TOKENIZER, f"{message}, which is too little; choose another draft")
    else:
        yield Finding("ok", OTHER_TOKENIZER, f"{message}; measure it")


def _compare_rules(main: ModelFacts, draft: ModelFacts) -> Iterator[Finding]:
    if not main.rules or not draft.rules:
        return
    ours, theirs = main.rules.merges, draft.rules.merges
    if ours != theirs:
        first = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
        )
        details = [" + ".join(map(repr, merges[first])) if first < len(merges) else "none" for merges in (ours, theirs)]
        message = (
            f"the merges differ from number {first + 1} on ({details[0]} in main, {details[1]} in draft); "
            "choose a draft trained with the same tokenizer"
        )
        yield Finding("error", "merges", message)
    else:
        yield Finding("ok", "merges", f"{len(ours):,} identical merges in both")
    for part in ("normalizer", "pre_tokenizer"):
        if getattr(main.rules, part) != getattr(draft.rules, part):
            message = f"the two tokenizer.json have different {part} settings; the encodings show whether it matters"
            yield Finding("warning", part, message)


def _compare_special_tokens(main: ModelFacts, draft: ModelFacts) -> Iterator[Finding]:
    shared_names = [name for name in main.special_ids if name in draft.special_ids]
    different = [name for name in shared_names if main.special_ids[name] != draft.special_ids[name]]
    if not shared_names:
        return
    if not different:
        details = ", ".join(f"{name} {main.special_ids[name]}" for name in shared_names)
        yield Finding("ok", "special tokens", f"the same ids in both ({details})")
        return
    details = "; ".join(
        f"{name} is {_show(main, main.special_ids[name])} in main and {_show(draft, draft.special_ids[name])} in draft"
        for name in different
    )
    message = (
        f"{details}, and GenAI rejects such a pair; if the vocabularies are equal, set the same bos_token, eos_token "
        "and pad_token in both tokenizer_config.json and export again"
    )
    yield Finding("error", "special tokens", message)


def _compare_encodings(main: ModelFacts, draft: ModelFacts, texts: list[str]) -> Iterator[Finding]:
    if not main.encode or not draft.encode:
        return
    encoded = zip(texts, main.encode(texts), draft.encode(texts), strict=True)
    different = [(text, ours, theirs) for text, ours, theirs in encoded if ours != theirs]
    if not different:
        message = f"{len(TEST_TEXT)} test lines and {len(texts) - len(TEST_TEXT):,} tokens are encoded the same in both"
        yield Finding("ok", "encodings", message)
        return
    text, ours, theirs = different[0]
    position = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
    )
    details = [
        _show(facts, ids[position]) if position < len(ids) else "nothing"
        for facts, ids in ((main, ours), (draft, theirs))
    ]
    message = (
        f"{len(different):,} of {len(texts):,} texts are encoded differently (in {text!r} token {position + 1} is "
        f"{details[0]} for main and {details[1]} for draft); choose a draft trained with the same tokenizer"
    )
    yield Finding("error", "encodings", message)


def _compare_logits_width(main: ModelFacts, draft: ModelFacts, *, npu: bool) -> Iterator[Finding]:
    """Widths may differ: models of one family may pad the vocabulary to different multiples (Qwen2.5, Phi)."""
    if not main.logits_width or not draft.logits_width:
        return
    widths = f"main predicts over {main.logits_width:,} ids and draft over {draft.logits_width:,}"
    largest = max(main.tokens, default=-1)
    if largest >= draft.logits_width:
        message = f"{widths}, but token ids go up to {largest:,}, which the draft does not know; choose another draft"
        yield Finding("error", "logits width", message)
    elif main.logits_width == draft.logits_width:
        yield Finding("ok", "logits width", f"both predict over {main.logits_width:,} ids")
    elif npu:
        message = f"{widths}, and with an NPU they must be equal; choose another draft, or CPU or GPU for both"
        yield Finding("error", "logits width", message)
    else:
        message = f"{widths} (padding beyond the shared tokens); this works on CPU and GPU, but not on an NPU"
        yield Finding("warning", "logits width", message)


def _compare_chat_templates(main: ModelFacts, draft: ModelFacts) -> Iterator[Finding]:
    if main.chat_template == draft.chat_template:
        yield Finding("ok", "chat template", "the same in both" if main.chat_template else "none in both")
    elif not main.chat_template:
        message = "only the draft has one, and only the main model's is used; chat prompts will be sent as plain text"
        yield Finding("warning", "chat template", message)
    elif not draft.chat_template:
        yield Finding("ok", "chat template", "main's is used for both; the draft has none")
    else:
        message = (
            "they differ; main's is used for both, which is correct, but a draft tuned on another template may have a "
            "lower acceptance rate: measure it"
        )
        yield Finding("warning", "chat template", message)


def _compare_context_lengths(main: ModelFacts, draft: ModelFacts, is_head: bool = False) -> Iterator[Finding]:
    if not main.context_length or not draft.context_length:
        return
    if draft.context_length < main.context_length:
        in_genai = "the draft fails or is rejected"
        if is_head:
            in_genai = "the head goes on drafting at positions that it was not trained on"
        message = (
            f"the draft has {draft.context_length:,} tokens and the main model {main.context_length:,}; beyond "
            f"{draft.context_length:,}, prompt included, this project's engine drafts nothing, and in GenAI's pipeline "
            f"{in_genai}"
        )
        yield Finding("warning", "context length", message)
    else:
        details = f"{main.context_length:,} tokens for main, {draft.context_length:,} for draft"
        yield Finding("ok", "context length", details)


def _judge_architectures(main: ModelFacts, draft: ModelFacts) -> Iterator[Finding]:
    """Decoder-only language models may differ in architecture; any other kind of model is an error."""
    has_error = False
    for role, facts in (("main", main), ("draft", draft)):
        name = facts.architecture.lower()
        if facts.encoder_decoder:
            message = f"{role} ({facts.architecture}) is an encoder-decoder model; use a decoder-only language model"
            has_error = True
            yield Finding("error", "architecture", message)
        elif "eagle" in name or "dflash" in name:
            message = (
                f"{role} ({facts.architecture}) drafts from the main model's hidden states and is not a standalone "
                "model; use a standalone language model, or convert an EAGLE-3 draft first: convert/export_pair.py"
            )
            has_error = True
            yield Finding("error", "architecture", message)
    if not has_error:
        yield Finding("ok", "architecture", f"{main.architecture or 'unknown'} with {draft.architecture or 'unknown'}")


def _judge_attention(main: ModelFacts, draft: ModelFacts | None = None) -> Iterator[Finding]:
    """Paged attention, which GenAI's pipeline and the server need, must keep the attention masks."""
    effects = {"main": "gives wrong text without an error", "draft": "drafts badly with it"}
    for role, facts in (("main", main), ("draft", draft)):
        if facts and (layers := facts.dropped_masks):
            message = (
                f"OpenVINO's paged attention drops the position bias or sliding window of {role} from layer "
                f"{layers[0]} on, so GenAI's pipeline {effects[role]}; use this project's engine, which runs it without"
            )
            yield Finding("warning", "attention", message)


def _compare_sizes(main: ModelFacts, draft: ModelFacts) -> Iterator[Finding]:
    if not main.weight_bytes or not draft.weight_bytes:
        return
    sizes = f"main weighs {_megabytes(main)} and draft {_megabytes(draft)}"
    if draft.weight_bytes > main.weight_bytes:
        message = f"{sizes}, so drafting costs more than it saves; are main and draft swapped?"
        yield Finding("warning", "size", message)
    else:
        yield Finding("ok", "size", f"{sizes}: {main.weight_bytes / draft.weight_bytes:.1f} to 1")


def _megabytes(facts: ModelFacts) -> str:
    return f"{facts.weight_bytes / 1e6:,.1f} MB"


def _show(facts: ModelFacts, token_id: int | None) -> str:
    """A token's id and text, for a message."""
    if token_id is None:
        return "missing"
    return f"{token_id} ({_token(facts, token_id)})"


def _token(facts: ModelFacts, token_id: int) -> str:
    token = facts.tokens.get(token_id)
    return repr(token.decode(errors="replace")) if token is not None else "no token"
