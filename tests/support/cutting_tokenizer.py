"""A tokenizer that truncates a text to its last tokens, like those that GenAI makes from GGUF files."""

import shutil
from pathlib import Path

import numpy as np
import openvino
import openvino_genai
import openvino_tokenizers  # noqa: F401 -- registers the operations of tokenizers
from openvino import opset13


def cutting_tokenizer(source: Path, folder: Path, limit: int) -> openvino_genai.Tokenizer:
    """The tokenizer of `source`, saved in `folder` with a limit on the number of tokens."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("openvino_tokenizer.*"))
    model = openvino.Core().read_model(source / "openvino_tokenizer.xml")
    (lengths,) = [op for op in model.get_ops() if op.get_type_name() == "Select"]  # with truncation, and without
    lengths.input(2).replace_source_output(opset13.constant(np.int32(limit)).output(0))
    openvino.save_model(model, folder / "openvino_tokenizer.xml", compress_to_fp16=False)
    return openvino_genai.Tokenizer(str(folder))
