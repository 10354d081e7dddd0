"""Tiny GGUF files, written by the gguf package from a tiny Hugging Face checkpoint.

save_gguf(checkpoint, tokenizer, tmp_path / "main.gguf", "Q8_0")
"""

import json
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType, quants

from tests.support.later import torch, transformers

FILE_TYPES = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16", "Q4_K": "MOSTLY_Q4_K_M"}
CHAT_TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}<assistant>"
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def save_gguf(
    checkpoint: Path,
    tokenizer: "transformers.PreTrainedTokenizerFast",
    path: Path,
    kind: str = "F16",
    architecture: str = "llama",
    metadata: dict | None = None,
    tensors: dict | None = None,
) -> Path:
    """Write a Llama checkpoint as a GGUF file with matrices of this kind. `metadata` is added to that of the model, and
    None removes a key; `tensors` likewise.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    writer = GGUFWriter(path, architecture)
    for key, value in {**model_metadata(model.config, tokenizer, kind, architecture), **(metadata or {})}.items():
        if value is not None and key != "general.architecture":
            add(writer, key, value)
    for name, weight in {**model_tensors(model), **(tensors or {})}.items():
        if weight is not None:
            type_ = GGMLQuantizationType[kind if weight.ndim > 1 else "F32"]
            writer.add_tensor(name, quantized(weight, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantized(weight: np.ndarray, type_: GGMLQuantizationType) -> np.ndarray:
    """Bytes of a matrix. The gguf package only decodes Q4_K, of which 8 groups of 32 weights are a block."""
    if type_ != GGMLQuantizationType.Q4_K:
        return quants.quantize(weight, type_)
    groups = weight.reshape(-1, 8, 32)
    least = -np.minimum(groups.min(axis=-1), 0)
    step = (groups.max(axis=-1) + least) / 15
    both = np.stack([step, least], axis=1)  # of each group in 4 of its 6 bits, of each block in f16
    unit = (both.max(axis=-1, keepdims=True) / 15).astype(np.float16)
    step, least = units = np.clip(np.ceil(both / unit), 1, 15).astype(np.uint8).swapaxes(0, 1)
    scales, minimums = (units * unit.swapaxes(0, 1))[..., None]
    q = np.clip(np.round((groups + minimums) / scales), 0, 15).astype(np.uint8)
    rest = step[:, 4:] | least[:, 4:] << 4
    parts = [unit.reshape(-1, 2).view(np.uint8), step[:, :4], least[:, :4], rest, (q[:, ::2] | q[:, 1::2] << 4)]
    return np.concatenate([part.reshape(len(groups), -1) for part in parts], axis=1).reshape(len(weight), -1)


def add(writer: GGUFWriter, key: str, value: object) -> None:
    if key == "general.alignment":  # also of what the writer writes
        writer.data_alignment = value
    for kind, name in ((bool, "bool"), (int, "uint32"), (float, "float32"), (str, "string"), (list, "array")):
        if isinstance(value, kind):
            getattr(writer, f"add_{name}")(key, value)
            return
    raise TypeError(f"{key} is {value!r}")


def model_metadata(config, tokenizer, kind: str, architecture: str) -> dict:
    """What llama.cpp's converter writes."""
    own = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_theta),
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
    }
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    return {
        "general.file_type": int(LlamaFileType[FILE_TYPES.get(kind, f"MOSTLY_{kind}")]),
        **{f"{architecture}.{key}": value for key, value in own.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            int(TokenType.CONTROL if i == 0 else TokenType.NORMAL) for i in range(len(tokens))
        ],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def model_tensors(model) -> dict[str, np.ndarray]:
    """GGUF's name of each weight -> float32 array."""
    found = {}
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        array = weight.numpy()
        base = name.removesuffix(".weight")
        projection = base.rpartition(".")[2]
        if projection in heads:  # GGUF pairs neighbouring rows in rotary positions, transformers rows half a head apart
            paired = array.reshape(heads[projection], 2, -1, array.shape[1]).swapaxes(1, 2)
            array = paired.reshape(array.shape)
        if base.startswith("model.layers."):
            _, _, layer, inner = base.split(".", 3)
            base = f"blk.{layer}.{NAMES[inner]}"
        else:
            base = NAMES[base]
        found[f"{base}.weight"] = np.ascontiguousarray(array)
    return found


def dequantized(checkpoint: Path, kind: str):
    """The checkpoint's model with the weights that a file of this kind holds."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    type_ = GGMLQuantizationType[kind]
    for weight in model.state_dict().values():
        if weight.ndim > 1:
            weight.copy_(torch.from_numpy(quants.dequantize(quantized(weight.numpy(), type_), type_)))
    return model
