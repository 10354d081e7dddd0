"""Tiny random Hugging Face checkpoints with one shared byte-level BPE tokenizer, made on the spot and offline.

    tokenizer = train_tokenizer()
    save_checkpoint("llama", "main", tokenizer, tmp_path / "main")
    save_checkpoint("llama", "draft", tokenizer, tmp_path / "draft")

Their text is noise, but they exercise the same architecture code as the real models, in kilobytes.
"""

import gc
import hashlib
import json
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import openvino
import openvino_tokenizers
import pytest
from openvino import opset13
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from speculative.convert.errors import ConvertError
from tests.support.later import torch, transformers
from tests.support.paths import ROOT

INITIALIZER_RANGE = 0.2
EMBEDDING_SIZE = 8

TRAINING_TEXT = [
    "def read_file(path):\n    with open(path, encoding='utf-8') as file:\n        return file.read()\n",
    "The quick brown fox jumps over the lazy dog 0123456789 times, and then some more.",
    "import os, sys, json\nfor name in sorted(os.listdir('.')):\n    print(name, len(name))\n",
]

# Sizes of main and draft: different in depth, width and number of heads, so that nothing works by accident.
SIZES = {
    "main": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128},
    "draft": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64},
}

# What each architecture needs beyond SIZES; a key `type` names the transformers model type.
ARCHITECTURES = {
    "llama": {"type": "llama", "num_key_value_heads": 2},  # grouped-query attention
    "qwen2": {"type": "qwen2", "num_key_value_heads": 2},
    "qwen3": {"type": "qwen3", "num_key_value_heads": 2, "head_dim": 16},
    "glm": {"type": "glm", "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0},  # GLM-4-9B-chat-hf
    "glm4": {"type": "glm4", "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0},  # GLM-4-9B-0414
    "gpt_neox": {"type": "gpt_neox"},  # dolly, pythia
    "gpt2": {"type": "gpt2"},
    "phi3": {"type": "phi3", "num_key_value_heads": 2, "pad_token_id": 0},
    "gemma2": {"type": "gemma2", "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 16},
    "gemma3": {
        "type": "gemma3_text",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
    },
    "mistral": {"type": "mistral", "num_key_value_heads": 2, "sliding_window": 16},
    "mixtral": {"type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 4, "sliding_window": None},
    "qwen3_moe": {
        "type": "qwen3_moe",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "gpt_oss": {
        "type": "gpt_oss",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "rope_scaling": None,
    },
    "granite": {"type": "granite", "num_key_value_heads": 2},
    "smollm3": {"type": "smollm3", "num_key_value_heads": 2, "no_rope_layer_interval": 2},
    "olmo2": {"type": "olmo2", "num_key_value_heads": 2},
    "cohere": {"type": "cohere", "num_key_value_heads": 2},  # Aya, Command R
    "cohere2": {"type": "cohere2", "num_key_value_heads": 2, "sliding_window": 16, "sliding_window_pattern": 2},
    "exaone4": {"type": "exaone4", "num_key_value_heads": 2, "sliding_window": 16, "sliding_window_pattern": 2},
    "phi": {"type": "phi", "partial_rotary_factor": 1.0},
    "stablelm": {"type": "stablelm", "num_key_value_heads": 2},
    "starcoder2": {"type": "starcoder2", "num_key_value_heads": 2, "sliding_window": 16},
    "gpt_bigcode": {"type": "gpt_bigcode"},  # StarCoder
    "gptj": {"type": "gptj", "rotary_dim": 8},
    "codegen": {"type": "codegen", "rotary_dim": 8, "num_attention_heads": 4},
    "opt": {"type": "opt"},
    "persimmon": {"type": "persimmon"},
    "falcon": {"type": "falcon"},
    "bloom": {"type": "bloom"},
}
# Whose attention masks paged attention drops.
DROPPED_MASKS = {
    "mpt": {"type": "mpt"},
    # falcon-rw-1b
    "falcon with ALiBi": {"type": "falcon", "alibi": True, "multi_query": False, "parallel_attn": False},
    "gpt_neo": {
        "type": "gpt_neo",
        "num_layers": 2,  # as many as attention_types, in main and draft
        "num_hidden_layers": 2,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 16,
    },
}


def export_key() -> str:
    """What an export of a tiny checkpoint depends on: the exporting packages and the code that makes and exports it."""
    packages = ("torch", "transformers", "tokenizers", "optimum-intel", "nncf", "openvino", "openvino-tokenizers")
    digest = hashlib.sha256(repr([(name, version(name)) for name in packages]).encode())
    sources = [Path(__file__), ROOT / "convert/export_pair.py", *sorted((ROOT / "speculative/convert").rglob("*.py"))]
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def train_tokenizer(vocab_size: int = 384, texts: list[str] = TRAINING_TEXT) -> "transformers.PreTrainedTokenizerFast":
    """Train a byte-level BPE tokenizer with `<|endoftext|>` as bos, eos and pad (id 0)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    end = "<|endoftext|>"
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=end, eos_token=end, pad_token=end)


def save_checkpoint(
    architecture: str, role: str, tokenizer: "transformers.PreTrainedTokenizerFast", folder: Path, **options
) -> Path:
    """Write a random checkpoint of `architecture`, a key of ARCHITECTURES or DROPPED_MASKS, in the size of `role` (main
    or draft).

    Both sizes take the same embeddings and output layer as far as they reach, which makes each next token depend mostly
    on the last one: greedy text varies, and the draft is right now and then, as drafts are. `options` go to the config.
    """
    options = {**SIZES[role], **{**ARCHITECTURES, **DROPPED_MASKS}[architecture], **options}
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    config = transformers.CONFIG_MAPPING[options.pop("type")](
        **{"vocab_size": len(tokenizer), "max_position_embeddings": 256, **options, **ids},
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0 if role == "main" else 1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    shared = torch.Generator().manual_seed(2)
    input_size = 1 if architecture.startswith("gemma") else EMBEDDING_SIZE  # Gemma enlarges its embeddings itself
    for layer, size in ((model.get_input_embeddings(), input_size), (model.get_output_embeddings(), 1)):
        weight = torch.randn(config.vocab_size, SIZES["main"]["hidden_size"], generator=shared) * size
        weight[:, SIZES["draft"]["hidden_size"] :] *= 0.2  # what the draft does not see
        layer.weight.data = weight[:, : layer.weight.shape[1]].contiguous()
    model.generation_config.eos_token_id = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run_optimum_here(typed: list[str], log: Path, temporary: Path, verbose: bool) -> None:
    """Stands in for speculative.convert.optimum_cli.run: the same optimum-cli, without the seconds that a new process
    needs to start, to look for extensions of it, and to collect the garbage of all tests so far."""
    from optimum.commands import optimum_cli

    torch.set_num_threads(1)  # the models are too small to share out
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", typed)
        patch.setattr(optimum_cli, "load_subpackages", lambda: None)
        try:
            optimum_cli.main()
        except Exception as error:
            raise ConvertError(f"optimum-cli failed: {error}") from error


def save_ir(
    tokenizer: "transformers.PreTrainedTokenizerFast", folder: Path, logits_width: int | None = None, **config
) -> Path:
    """Write the IR of the smallest language model there is, a table of next tokens, with the tokenizer's IR beside it.

    Enough for what reads an IR without generating; made in a fraction of a second. `config` goes to config.json.
    """
    width = logits_width or len(tokenizer)
    tokens = opset13.parameter([-1, -1], np.int64, name="input_ids")
    table = np.arange(width * width, dtype=np.float32).reshape(width, width)
    logits = opset13.gather(opset13.constant(table), tokens, opset13.constant(0))
    logits.output(0).set_names({"logits"})
    openvino.save_model(openvino.Model([logits], [tokens]), folder / "openvino_model.xml", compress_to_fp16=False)
    parts = openvino_tokenizers.convert_tokenizer(tokenizer, with_detokenizer=True)
    for part, name in zip(parts, ("openvino_tokenizer", "openvino_detokenizer"), strict=True):
        openvino.save_model(part, folder / f"{name}.xml", compress_to_fp16=False)
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **config}))
    return folder


def weaken_layers(folder: Path, factor: float) -> None:
    """Let the layers of a Llama checkpoint change less, so that the next token depends on the last one even more."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data *= factor
        layer.mlp.down_proj.weight.data *= factor
    model.save_pretrained(folder)


def save_eagle3_head(main: Path, folder: Path, layers: tuple[int, int, int] | None) -> Path:
    """Write an EAGLE-3 head for the checkpoint `main` (a Llama), in the published format and without embeddings.

    Random weights, but each token attends mostly to itself, and the LM head is fitted to main's next tokens, on text by
    main. The head reads the outputs of main's `layers`. Without `layers`, nothing is fitted.
    """
    from optimum.exporters.openvino.model_patcher import LlamaEagle3ForCausalLM
    from safetensors.torch import save_file

    model = transformers.AutoModelForCausalLM.from_pretrained(main)
    tokens = torch.arange(model.config.vocab_size)
    known = tokens[tokens % 4 != 3]  # the draft vocabulary
    config = transformers.CONFIG_MAPPING["llama"].from_dict(
        {
            **model.config.to_dict(),
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            "num_key_value_heads": model.config.num_attention_heads,
            "draft_vocab_size": len(known),
            "torch_dtype": "float32",
        }
    )
    torch.manual_seed(3)
    head = LlamaEagle3ForCausalLM(config).eval()
    head.model.embed_tokens.weight.data = model.get_input_embeddings().weight.data
    attention = head.model.midlayer.self_attn
    attention.q_proj.weight.data = attention.k_proj.weight.data * 4
    head.model.d2t = known - torch.arange(len(known))
    head.model.t2d[known] = True
    if layers:
        _fit_lm_head(head, model, layers, known)
    folder.mkdir(parents=True)
    tensors = {name.removeprefix("model."): tensor.contiguous() for name, tensor in head.state_dict().items()}
    del tensors["embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    return folder


def _fit_lm_head(head, model, layers: tuple[int, int, int], known: "torch.Tensor") -> None:
    with torch.no_grad():
        length = {"max_new_tokens": 200, "min_new_tokens": 200, "pad_token_id": 0}
        texts = [model.generate(torch.arange(1, 9)[:, None], do_sample=sampled, **length) for sampled in (True, False)]
        text = torch.cat(texts)
        outputs = model(text, output_hidden_states=True)
        states = torch.cat([outputs.hidden_states[layer + 1] for layer in layers], -1)
        normed = head.model(text[:, 1:], hidden_states=states[:, :-1]).last_hidden_state
        wanted = outputs.logits[:, 1:, known].flatten(0, 1)
        fitted = torch.linalg.lstsq(normed.flatten(0, 1), wanted - wanted.mean(-1, keepdim=True)).solution
        head.model.lm_head.weight.data = fitted.T.contiguous()
