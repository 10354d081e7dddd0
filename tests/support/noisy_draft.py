"""A draft for the embedded draft: the same model with noise in its weights, right about as often as a good draft is."""

import shutil
from pathlib import Path

import numpy as np
import openvino

from speculative.modelgen import llama_ir
from tests.support.paths import DRAFT

NOISE = 0.3  # standard deviations of the weights


def save_noisy_draft(folder: Path) -> Path:
    """Write the IR, with the tokenizer of the embedded draft, to `folder`, which exists."""
    noisy, random = llama_ir.read(DRAFT), np.random.default_rng(0)
    for matrix in (getattr(layer, name) for layer in noisy.layers for name in llama_ir.MATRICES):
        noise = random.normal(size=matrix.values.shape) * NOISE * matrix.values.std()
        matrix.values[:] = np.round(matrix.values + noise).clip(0, 255)
    openvino.save_model(llama_ir.build(noisy), folder / "openvino_model.xml", compress_to_fp16=False)
    for file in DRAFT.iterdir():
        if file.stem != "openvino_model":
            shutil.copy(file, folder)
    return folder
