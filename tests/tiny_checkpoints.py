"""Tiny random Hugging Face checkpoints with one shared byte-level BPE tokenizer, made on the spot and offline.

    tokenizer = train_tokenizer()
    save_checkpoint("llama", "main", tokenizer, tmp_path / "main")
    save_checkpoint("llama", "draft", tokenizer, tmp_path / "draft")

Their text is noise; what they prove is the path: the same architecture code as the real models, in kilobytes.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

TRAINING_TEXT = [
    "def read_file(path):\n    with open(path, encoding='utf-8') as file:\n        return file.read()\n",
    "The quick brown fox jumps over the lazy dog 0123456789 times, and then some more.",
    "import os, sys, json\nfor name in sorted(os.listdir('.')):\n    print(name, len(name))\n",
]

# Sizes of main and draft: different in depth, width and number of heads, so that nothing works by accident.
SIZES = {
    "main": {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128},
    "draft": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
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
    "gemma3": {"type": "gemma3_text", "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 16},
    "mistral": {"type": "mistral", "num_key_value_heads": 2, "sliding_window": 16},
}


def train_tokenizer(vocab_size: int = 384, texts: list[str] = TRAINING_TEXT) -> PreTrainedTokenizerFast:
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
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=end, eos_token=end, pad_token=end)


def save_checkpoint(
    architecture: str, role: str, tokenizer: PreTrainedTokenizerFast, folder: Path, vocab_size: int | None = None
) -> Path:
    """Write a random checkpoint of `architecture` (a key of ARCHITECTURES) in the size of `role` (main or draft).

    The weights are drawn wider than usual, so that greedy text varies instead of repeating one token.
    """
    options = {**SIZES[role], **ARCHITECTURES[architecture]}
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    config = CONFIG_MAPPING[options.pop("type")](
        **{**options, **ids},
        vocab_size=vocab_size or len(tokenizer),
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0 if role == "main" else 1)
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
