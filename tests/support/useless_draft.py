"""A draft whose tokens are never accepted, made of the embedded draft."""

import re
import shutil
from pathlib import Path

import numpy as np

from tests.support.paths import DRAFT


def save_useless_draft(folder: Path, share: float = 1.0) -> Path:
    """A copy of the embedded draft in the new `folder`, made useless; the smaller the `share`, the more of its tokens
    the embedded draft as main model accepts."""
    shutil.copytree(DRAFT, folder)
    make_useless(folder, share)
    return folder


def make_useless(draft: Path, share: float = 1.0) -> None:
    """Shuffle a share of the rows of the embedding, which is tied to the output layer: the generated tokens change."""
    xml = (draft / "openvino_model.xml").read_text(encoding="utf-8")
    constants = re.findall(r'<data element_type="u8" shape="4096, 256" offset="(\d+)" size="(\d+)"', xml)
    assert constants
    weights = np.fromfile(draft / "openvino_model.bin", np.uint8)
    for offset, size in constants:
        rows = weights[int(offset) : int(offset) + int(size)].reshape(4096, 256)
        random = np.random.default_rng(0)
        chosen = random.permutation(4096)[: round(4096 * share)]
        rows[chosen] = rows[random.permutation(chosen)]
    weights.tofile(draft / "openvino_model.bin")
