"""Corrects the IR that GenAI's reader makes of a GGUF file.

- A group of weights in Q4_1 or Q4_K is `scale * q + minimum`. The reader writes `scale * (q - offset)` with an offset
  of 4 bits, a whole number. Here it becomes a number in f16, which has the precision of the file's own minimum. A group
  of equal weights has no scale in the file, only a minimum, and would become 0. Here its scale is that value.
- Weights in Q8_0 are signed. The reader writes them unsigned, with the offset 128. Here they become signed, which saves
  the CPU plugin the subtraction.
- The tokenizer keeps a text's last 8192 tokens. Here it keeps them all.
- The detokenizer skips user-defined tokens, such as <think>, as well as control tokens. Here it skips control tokens
  only.
"""

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import openvino as ov
from openvino import opset13

from speculative.convert.errors import ConvertError
from speculative.models.gguf_file import CONTROL, GgufFile

ROUNDED = {"Q4_1", "Q4_K"}
FOUR_BITS = {*ROUNDED, "Q4_0"}
IN_LAYER = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")  # as the reader goes
INSTEAD = "give a weight format (int8 or fp16), for which the weights are decoded first"
ROUNDING = 1e-3  # largest error of a weight, relative to the largest numbers of its group: twice that of f16
STEP = 2**-24  # between the smallest numbers in f16
ROWS = 1024  # of a matrix that are decoded at a time: memory stays bounded


def import_gguf() -> ModuleType:
    """The gguf package. Raises ConvertError if it is not installed."""
    try:
        import gguf
    except ImportError:
        raise ConvertError(
            "decoding the weights of a GGUF file needs gguf; install it: pip install -r requirements-run.txt"
        ) from None
    return gguf


def correct(xml: Path, file: GgufFile | None) -> None:
    """Write an IR of GenAI's reader again, with corrected weights. `file` is the one that it read; None if that has no
    weights of the kinds in ROUNDED.

    Raises ConvertError if the gguf package is not installed, or the IR does not have the weights of the file.
    """

    def change(model: ov.Model) -> None:
        _make_signed(model)
        if file:
            _restore_offsets(model, file)

    _rewrite(xml, change)


def keep_whole_texts(xml: Path) -> None:
    """Lift the limit of a tokenizer of GenAI's reader: it keeps the last 8192 tokens of a text, whatever the model's
    context is."""
    import openvino_tokenizers  # noqa: F401 -- registers the operations of tokenizers

    def change(model: ov.Model) -> None:
        (length,) = [node for node in model.get_ops() if node.get_type_name() == "Minimum"]  # of text and limit
        length.input(1).replace_source_output(opset13.constant(np.int32(np.iinfo(np.int32).max)).output(0))

    _rewrite(xml, change)


def skip_control_tokens_only(xml: Path, file: GgufFile) -> None:
    """Let a detokenizer of GenAI's reader write user-defined tokens: it skips them as special tokens."""
    import openvino_tokenizers  # noqa: F401 -- registers the operations of tokenizers

    kinds = file.metadata["tokenizer.ggml.token_type"]
    skipped = np.array([i for i, kind in enumerate(kinds) if kind == CONTROL], np.int32)

    def change(model: ov.Model) -> None:
        (decoder,) = [node for node in model.get_ops() if node.get_type_name() == "VocabDecoder"]
        ids = decoder.input_value(4).get_node()  # a Slice, which GenAI empties to write special tokens, too
        ids.input(0).replace_source_output(opset13.constant(skipped).output(0))

    _rewrite(xml, change)


def _rewrite(xml: Path, change: Callable[[ov.Model], None]) -> None:
    """Change the model of an IR."""
    model = ov.Core().read_model(xml)
    change(model)
    changed = xml.with_name("changed.xml")
    ov.save_model(model, changed, compress_to_fp16=False)
    del model  # which maps the file that is replaced
    for suffix in (".bin", ".xml"):
        changed.with_suffix(suffix).replace(xml.with_suffix(suffix))


def _make_signed(model: ov.Model) -> None:
    for packed in _constants(model, ov.Type.u8):
        subtract = _reader(_reader(packed))
        if subtract.get_type_name() == "Subtract":
            offsets = subtract.input_value(1).get_node().input_value(0).get_node()
            if (offsets.data == 128).all():
                signed = opset13.constant((packed.data ^ 128).view(np.int8))
                subtract.output(0).replace(opset13.convert(signed, subtract.get_element_type()).output(0))


def _restore_offsets(model: ov.Model, file: GgufFile) -> None:
    gguf = import_gguf()
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file.path).tensors}
    matrices, names = _constants(model, ov.Type.u4), _names(file)
    if len(matrices) != len(names):
        raise ConvertError(f"GenAI's reader kept {len(matrices)} of {len(names)} matrices in 4 bits; {INSTEAD}")
    for name, packed in zip(names, matrices, strict=True):
        if file.tensors[name].type in ROUNDED:
            subtract = _reader(_reader(packed))
            scales = _reader(subtract).input_value(1).get_node()
            rows, parts = _rows(name, file), []
            for some in (slice(start, start + ROWS) for start in range(0, len(rows), ROWS)):
                weights = gguf.quants.dequantize(stored[name].data[rows[some]], stored[name].tensor_type)
                bytes_of_rows = packed.data.reshape(len(rows), -1)[some]
                parts.append(_corrected(name, weights, bytes_of_rows, scales.data[some]))
            quantized, new_scales, offsets = map(np.concatenate, zip(*parts, strict=True))
            in_4_bits = ov.Tensor(ov.Type.u4, packed.get_output_shape(0))
            in_4_bits.data[:] = quantized.ravel()
            packed.output(0).replace(opset13.constant(in_4_bits).output(0))
            scales.output(0).replace(opset13.constant(new_scales).output(0))
            subtract.input(1).replace_source_output(opset13.constant(offsets).output(0))


def _corrected(
    name: str, weights: np.ndarray, packed: np.ndarray, scales: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What gives weights float32 [rows, columns]: their quantized values uint8 [rows, columns / 2], two in a byte, and
    the scale and offset float16 [rows, groups, 1] of each group, from quantized values and scales of GenAI's reader."""
    rows, groups, _ = scales.shape
    weights, packed = weights.reshape(rows, groups, -1), packed.reshape(rows, groups, -1)
    without_scale = scales == 0
    packed = np.where(without_scale, 0, packed)
    scales = np.where(without_scale, np.abs(weights[..., :1]), scales).astype(np.float16)

    quantized = np.stack([packed & 15, packed >> 4], axis=-1).reshape(weights.shape).astype(np.float32)
    exact = scales.astype(np.float32)
    steps = np.divide(weights, exact, out=np.zeros_like(weights), where=exact != 0)
    offsets = (quantized - steps).mean(axis=-1, keepdims=True).astype(np.float16)
    error = np.abs(exact * (quantized - offsets) - weights).max(axis=-1, keepdims=True)
    if (error > ROUNDING * (np.abs(weights).max(axis=-1, keepdims=True) + 15 * np.abs(exact)) + 15 * STEP).any():
        raise ConvertError(f"GenAI's reader did not keep the weights of {name}; {INSTEAD}")
    return packed.reshape(rows, -1), scales, offsets


def _constants(model: ov.Model, element: ov.Type) -> list[ov.op.Constant]:
    """The matrices of a type, in the order in which GenAI's reader added them, which numbers their names."""
    found = [
        node
        for node in model.get_ops()
        if node.get_type_name() == "Constant"
        and node.get_output_element_type(0) == element
        and list(node.get_output_shape(0))[-1:] > [1]  # not an offset
    ]
    return sorted(found, key=lambda node: int("0" + re.sub(r"\D", "", node.get_friendly_name())))


def _reader(node: ov.Node) -> ov.Node:
    """The node that reads another one: Convert, Subtract and Multiply in turn, in a decompression graph."""
    return next(iter(node.output(0).get_target_inputs())).get_node()


def _names(file: GgufFile) -> list[str]:
    """The 4-bit matrices of a file, in the order in which GenAI's reader adds them."""
    layers = [f"blk.{i}.{name}" for i in range(file.get("block_count")) for name in IN_LAYER]
    names = [f"{name}.weight" for name in ("token_embd", *layers, "output")]
    return [name for name in names if name in file.tensors and file.tensors[name].type in FOUR_BITS]


def _rows(name: str, file: GgufFile) -> np.ndarray:
    """The rows of a matrix in the order of the IR: for rotary positions, `llama` files pair neighbouring rows of a
    head, the IR rows half a head apart."""
    rows = np.arange(file.tensors[name].shape[0])
    heads = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}.get(name.split(".")[-2])
    if file.architecture != "llama" or heads is None:
        return rows
    count = file.get(heads, file.get("attention.head_count"))
    return rows.reshape(count, -1, 2).swapaxes(1, 2).ravel()
