"""Fixtures of the conversion tests: small checkpoints to convert."""

import pytest

from tests.support.tiny_checkpoints import save_checkpoint, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer()


@pytest.fixture
def refuses(command, capsys):
    """Run the module's `command`, a fixture, with arguments it must reject with this status; return its one-sentence
    error."""

    def refuses(status, *arguments):
        try:
            returned = command([str(argument) for argument in arguments])
        except SystemExit as stop:
            returned = stop.code
        error = capsys.readouterr().err
        assert returned == status, error
        assert "Traceback" not in error
        lines = error.splitlines()
        assert len(lines) == 1 and lines[0].startswith("error: "), error
        return lines[0]

    return refuses


@pytest.fixture(scope="module")
def checkpoints(tokenizer, tmp_path_factory):
    """Folders `main` and `draft`, Hugging Face checkpoints."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for role in ("main", "draft"):
        save_checkpoint("llama", role, tokenizer, folder / role)
    return folder
