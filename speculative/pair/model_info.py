"""Model information read from a folder in seconds, without compiling anything.

A folder is OpenVINO IR (`openvino_model.xml`, tokenizer IR, `config.json`) or a Hugging Face checkpoint before its
export (`config.json`, `tokenizer.json`, weights). A GGUF file before its conversion has all of it in one file.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import openvino as ov
import openvino_genai

from speculative.error_text import engine_lines, one_line
from speculative.models import attention_masks, gguf_file, vocabulary
from speculative.models.config import context_length, hidden_state_draft, sliding_window, text_config
from speculative.models.eagle3_graph import is_head
from speculative.models.vocabulary import Vocabulary, valid_id

# One test string per line: code, digits, several scripts, emoji, unusual white space.
TEST_TEXT = """\
def read_file(path: str) -> list[str]:\n    with open(path, encoding="utf-8") as file:\n\t\treturn file.read()
for (int i = 0; i < 1024; ++i) { sum += values[i] * 0x1F; } // TODO
3.14159 1,234,567 007 2026-11-21T08:45:00Z 0123456789
The quick brown fox doesn't jump; it's "sleeping" -- isn't it?
Größe, déjà vu, naïve, smörgåsbord, Łódź, İstanbul
Привет, мир! Γειά σου Κόσμε. שלום עולם مرحبا بالعالم
你好，世界。こんにちは世界 안녕하세요 세계 नमस्ते दुनिया สวัสดี
😀👍🏽👩‍💻🇪🇺 ∑∫√≠∞ → ¼ №
  two  spaces\u00a0and\u200bodd\u3000ones   """.splitlines()


class UnusableFolder(ValueError):
    """A folder lacks something; the message is one sentence that says what, where, and what to do."""


class DamagedFolder(UnusableFolder):
    """A file of the folder is missing, truncated or corrupt: no mistake of whoever named the folder."""


class TokenizerRules(NamedTuple):
    """Rules of tokenizer.json for splitting text."""

    merges: list[tuple[str, ...]]  # pairs
    normalizer: object
    pre_tokenizer: object


@dataclass
class ModelFacts:
    """Model information that the pair check compares; None or empty if the folder does not give it."""

    folder: Path
    tokens: dict[int, bytes] = field(default_factory=dict)  # token id -> token, as the tokenizer spells it
    vocabulary: Vocabulary | None = None  # of these tokens; IR only
    rules: TokenizerRules | None = None
    special_ids: dict[str, int | None] = field(default_factory=dict)  # of bos, eos, pad; without those not known
    encode: Callable[[list[str]], list[list[int]]] | None = None  # texts -> token ids of each; IR only
    chat_template: str = ""
    context_length: int | None = None  # tokens
    sliding_window: int = 0  # tokens; 0 without one
    dropped_masks: list[int] = field(default_factory=list)  # layers whose mask paged attention drops; IR only
    architecture: str = ""
    encoder_decoder: bool = False
    logits_width: int | None = None  # number of logits; may be padded beyond the tokenizer's vocabulary
    weight_bytes: int = 0


def is_ir(folder: Path) -> bool:
    """Whether the folder holds an OpenVINO language model."""
    return (folder / "openvino_model.xml").is_file()


def is_checkpoint(folder: Path) -> bool:
    """Whether the folder holds a Hugging Face checkpoint: a config and weights, or an index of weight shards."""
    weights = ("*.safetensors", "pytorch_model*.bin", "*.safetensors.index.json")
    return (folder / "config.json").is_file() and any(next(folder.glob(name), None) for name in weights)


def weight_files(folder: Path) -> list[Path]:
    """The files with the weights of a checkpoint or an IR, without copies of them in Mistral's own format."""
    for pattern in ("*.safetensors", "pytorch_model*.bin", "openvino_model.bin"):
        if files := sorted(folder.glob(pattern)):
            return [file for file in files if not file.name.startswith("consolidated")] or files
    return []


def weight_bytes(folder: Path) -> int:
    """Size of the weight files in bytes."""
    return sum(path.stat().st_size for path in weight_files(folder))


def ir_facts(folder: Path) -> ModelFacts:
    """Read an OpenVINO IR folder. Raises UnusableFolder if a part is missing, truncated or corrupt."""
    require_ir(folder)
    model = read_graph(folder)
    if "logits" not in {name for output in model.outputs for name in output.names}:
        raise UnusableFolder(f"{folder}/openvino_model.xml has no output 'logits', so it is not a language model")
    facts = tokenizer_facts(folder)
    width = model.output("logits").partial_shape[-1]
    facts.logits_width = width.get_length() if width.is_static else None
    if (folder / "tokenizer.json").is_file():
        facts.rules = _tokenizer_rules(_read_json(folder / "tokenizer.json"))
    config = _read_config(facts)
    facts.dropped_masks = attention_masks.dropped(model, config)
    return facts


def read_graph(folder: Path) -> ov.Model:
    """Read the graph of an IR folder. Raises DamagedFolder."""
    try:
        return ov.Core().read_model(folder / "openvino_model.xml")
    except RuntimeError as error:
        raise DamagedFolder(
            f"{folder}/openvino_model.xml or .bin is corrupt or truncated ({_cause(error)}); export or copy it again"
        ) from error


def tokenizer_facts(folder: Path) -> ModelFacts:
    """Read the tokenizer of a folder that `require_ir` accepts, and the size of its weights. Raises UnusableFolder."""
    try:
        tokenizer = openvino_genai.Tokenizer(str(folder))
    except RuntimeError as error:
        raise DamagedFolder(
            f"the tokenizer IR in {folder} cannot be loaded ({_cause(error)}); export or copy it again"
        ) from error
    facts = ModelFacts(folder, weight_bytes=(folder / "openvino_model.bin").stat().st_size)
    if (folder / "openvino_detokenizer.xml").is_file():  # a draft does not need it, and some are published without
        facts.vocabulary = vocabulary.of(tokenizer)
        facts.tokens = facts.vocabulary.spelled if facts.vocabulary else {}
    facts.special_ids = {
        "bos": valid_id(tokenizer.get_bos_token_id()),
        "eos": valid_id(tokenizer.get_eos_token_id()),
        "pad": valid_id(tokenizer.get_pad_token_id()),
    }
    facts.encode = partial(_encode_all, tokenizer)
    facts.chat_template = tokenizer.chat_template
    return facts


def checkpoint_facts(folder: Path) -> ModelFacts:
    """Read a Hugging Face checkpoint, or its files in an IR folder. Raises UnusableFolder on a corrupt file."""
    facts = ModelFacts(folder, weight_bytes=weight_bytes(folder))
    settings: dict = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):  # the second one counts
        settings |= _read_json(folder / name) if (folder / name).is_file() else {}
    if (folder / "tokenizer.json").is_file():
        description = _read_json(folder / "tokenizer.json")
        facts.tokens = _tokenizer_tokens(description)
        facts.rules = _tokenizer_rules(description)
        ids = {token.decode(): token_id for token_id, token in facts.tokens.items()}
        special = {name: settings[f"{name}_token"] for name in ("bos", "eos", "pad") if f"{name}_token" in settings}
        if special.get("pad", "unknown") is None and "eos" in special:  # as GenAI does
            special["pad"] = special["eos"]
        for name, token in special.items():
            token = token.get("content") if isinstance(token, dict) else token
            facts.special_ids[name] = ids.get(token) if isinstance(token, str) else None
    template_file = folder / "chat_template.jinja"
    template = template_file.read_text(encoding="utf-8") if template_file.is_file() else settings.get("chat_template")
    facts.chat_template = template if isinstance(template, str) else json.dumps(template) if template else ""
    _read_config(facts)
    return facts


def gguf_facts(path: Path) -> ModelFacts:
    """Read a GGUF file. Raises DamagedFolder if it is damaged."""
    try:
        file = gguf_file.read(path)
    except gguf_file.BrokenFile as error:
        raise DamagedFolder(str(error)) from error
    facts = ModelFacts(path, weight_bytes=path.stat().st_size)
    facts.tokens = {token_id: token.encode() for token_id, token in file.tokens().items()}
    config, _ = gguf_file.configs(file)
    facts.special_ids = {name: config.get(f"{name}_token_id") for name in ("bos", "eos", "pad")}
    facts.chat_template = file.metadata.get("tokenizer.chat_template", "")
    _take_config(facts, config)
    return facts


def config_facts(folder: Path) -> ModelFacts:
    """Read config.json only. Raises UnusableFolder if it is corrupt."""
    facts = ModelFacts(folder)
    _read_config(facts)
    return facts


def require_ir(folder: Path, *, standalone: bool = True) -> None:
    """Raise UnusableFolder unless the folder holds every file of a language model's IR, complete, and is `standalone`,
    not a draft that needs the main model's hidden states.

    Raises DamagedFolder, a subclass, if a file is truncated or corrupt. Reads the .xml and config files, not the
    weights.
    """
    if not folder.is_dir():
        if gguf_file.is_named(folder) and folder.is_file():
            raise UnusableFolder(
                f"{folder} is a GGUF file, not OpenVINO IR; convert it first: python convert/export_pair.py {folder} "
                "DRAFT OUT_DIR, or --without-draft instead of DRAFT"
            )
        if folder.is_file():
            raise UnusableFolder(f"{folder} is a file; give the folder of an exported model")
        raise UnusableFolder(f"there is no folder {folder}")
    if not is_ir(folder):
        if (folder / "openvino_language_model.xml").is_file():
            raise UnusableFolder(f"{folder} is a vision-language model, which takes no draft; use a text model")
        if is_checkpoint(folder):
            raise UnusableFolder(
                f"{folder} is a Hugging Face checkpoint, not OpenVINO IR; convert the pair first: "
                "python convert/export_pair.py MAIN DRAFT OUT_DIR"
            )
        if is_ir(folder / "main"):
            raise UnusableFolder(f"{folder} is the folder of a pair; give {folder / 'main'} or {folder / 'draft'}")
        raise UnusableFolder(f"{folder} has no openvino_model.xml; give the folder of an exported model")
    if standalone and (kind := hidden_state_draft(folder)):
        raise UnusableFolder(
            f"{folder} is made for {kind}: it drafts from the main model's hidden states and is not a standalone "
            "model; use a language model that decodes alone as main model, and this one as its draft"
        )
    _require_part(folder, "model")
    if not is_head(folder):  # which is exported without a tokenizer
        _require_part(folder, "tokenizer")
        if (folder / "openvino_detokenizer.xml").is_file():  # a draft needs none
            _require_part(folder, "detokenizer")
    for file in sorted(folder.glob("*config.json")):
        _read_json(file)
    _require_generation_config(folder / "generation_config.json")


def _require_generation_config(file: Path) -> None:
    """Raise DamagedFolder if GenAI cannot load the file; without it, there are defaults."""
    if file.is_file():
        try:
            openvino_genai.GenerationConfig(file)
        except RuntimeError as error:
            raise DamagedFolder(f"{file} has a wrong value ({one_line(error)}); correct it") from error


def require_runnable(folder: Path, *, writes_text: bool) -> None:
    """Raise UnusableFolder unless a pipeline can load the folder. A model that `writes_text` needs a detokenizer, which
    a draft does not."""
    require_ir(folder, standalone=False)
    if writes_text and is_head(folder):
        raise UnusableFolder(f"{folder} is an EAGLE-3 draft, which writes no text on its own; give its main model")
    if writes_text:
        _require_part(folder, "detokenizer")


def _require_part(folder: Path, part: str) -> None:
    """Raise UnusableFolder unless `openvino_PART.xml` is complete and its .bin holds all constants that it names."""
    xml, weights = folder / f"openvino_{part}.xml", folder / f"openvino_{part}.bin"
    if not xml.is_file():
        raise UnusableFolder(
            f"{folder} has no {xml.name}; export the model again, without --disable-convert-tokenizer, or create it "
            f"with `convert_tokenizer HUB_ID_OR_CHECKPOINT --with-detokenizer -o {folder}`"
        )
    if not weights.is_file():
        raise DamagedFolder(f"{folder} has no {weights.name}; export or copy it again")
    try:
        needed = _weight_bytes(xml)
    except ElementTree.ParseError as error:
        raise DamagedFolder(f"{xml} is corrupt or truncated ({error}); export or copy it again") from error
    if (found := weights.stat().st_size) < needed:
        raise DamagedFolder(f"{weights} is truncated ({found} of {needed} bytes); export or copy it again")


class _Extent:
    """Follows the elements of an IR's .xml: the root's tag, and where the last constant in the .bin file ends."""

    def __init__(self) -> None:
        self.root, self.bytes = "", 0

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self.root = self.root or tag
        if tag == "data" and {"offset", "size"} <= attributes.keys():
            self.bytes = max(self.bytes, int(attributes["offset"]) + int(attributes["size"]))

    def close(self) -> None:
        """The parser requires it."""


def _weight_bytes(xml: Path) -> int:
    """The size of the .bin file that an IR's .xml describes: where its last constant ends."""
    extent = _Extent()
    parser = ElementTree.XMLParser(target=extent)
    parser.feed(xml.read_bytes())
    parser.close()
    if extent.root != "net":
        raise ElementTree.ParseError(f"<{extent.root}> is not <net>")
    return extent.bytes


def _read_config(facts: ModelFacts) -> dict:
    if not (facts.folder / "config.json").is_file():
        return {}
    config = _read_json(facts.folder / "config.json")
    _take_config(facts, config)
    return config


def _take_config(facts: ModelFacts, config: dict) -> None:
    try:
        facts.context_length = context_length(config)
    except ValueError as error:
        raise DamagedFolder(f"{facts.folder}: {error}") from error
    facts.architecture = next(iter(config.get("architectures") or []), config.get("model_type", ""))
    facts.encoder_decoder = bool(config.get("is_encoder_decoder"))
    facts.sliding_window = sliding_window(config)
    if facts.logits_width is None:
        facts.logits_width = config.get("vocab_size") or text_config(config).get("vocab_size")


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise DamagedFolder(f"{path} cannot be read ({error}); copy or download it again") from error
    if not isinstance(content, dict):
        raise DamagedFolder(f"{path} does not hold a JSON object; copy or download it again")
    return content


def _tokenizer_tokens(description: dict) -> dict[int, bytes]:
    """Token id -> token of a tokenizer.json: BPE and WordPiece have a mapping, Unigram a list of [token, score]."""
    vocabulary = description.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, dict):
        tokens = {token_id: token.encode() for token, token_id in vocabulary.items()}
    else:
        tokens = {token_id: token.encode() for token_id, (token, *_) in enumerate(vocabulary)}
    tokens.update({added["id"]: added["content"].encode() for added in description.get("added_tokens", [])})
    return tokens


def _tokenizer_rules(description: dict) -> TokenizerRules:
    """The rules of a tokenizer.json; merges always as pairs (older files write "left right")."""
    merges = description.get("model", {}).get("merges") or []
    merges = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in merges]
    return TokenizerRules(merges, description.get("normalizer"), description.get("pre_tokenizer"))


def _encode_all(tokenizer: openvino_genai.Tokenizer, texts: list[str]) -> list[list[int]]:
    """Encode each text, including the tokenizer's special tokens, in batches that keep the tensor small."""
    encodings = []
    for start in range(0, len(texts), 2048):
        encoded = tokenizer.encode(texts[start : start + 2048], add_special_tokens=True)
        rows = zip(encoded.input_ids.data, encoded.attention_mask.data, strict=True)
        encodings += [ids[mask.astype(bool)].tolist() for ids, mask in rows]
    return encodings


def _cause(error: Exception) -> str:
    """The last line of an OpenVINO error."""
    return engine_lines(error)[-1].rstrip(".:")
