"""Fixtures of the conversion tests: small checkpoints to convert."""

import pytest

from tests.support.tiny_checkpoints import save_checkpoint, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer()


@pytest.fixture(scope="module")
def checkpoints(tokenizer, tmp_path_factory):
    """Folders `main` and `draft`, Hugging Face checkpoints."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for role in ("main", "draft"):
        save_checkpoint("llama", role, tokenizer, folder / role)
    return folder
