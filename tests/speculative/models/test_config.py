"""All programs read the same context length of a model, under any architecture's key."""

import json
import re

import pytest

from speculative.models.config import context_length, read_config, sliding_window
from speculative.pair.model_info import config_facts


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 8192}, 8192),
        ({"n_positions": 1024}, 1024),
        ({"seq_length": 32768}, 32768),
        ({"max_seq_len": 2048}, 2048),  # MPT, DBRX
        ({"max_sequence_length": 512}, 512),
        ({"text_config": {"max_position_embeddings": 4096}}, 4096),
        ({"max_position_embeddings": 1, "text_config": {"max_position_embeddings": 4096}}, 4096),
        ({"text_config": None, "n_positions": 7}, 7),
        ({}, None),
    ],
)
def test_context_length(config, length, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert context_length(read_config(tmp_path)) == config_facts(tmp_path).context_length == length


@pytest.mark.parametrize("tokens", ["many", 1024.5, True, -1])
def test_context_length_that_is_no_number_of_tokens_is_refused(tokens):
    with pytest.raises(ValueError, match=re.escape(f"n_positions of config.json is {tokens!r}, but must be")):
        context_length({"n_positions": tokens})


def test_model_without_config_has_unknown_context_length(tmp_path):
    assert context_length(read_config(tmp_path)) is None


def test_unused_sliding_window_counts_as_none():
    assert sliding_window({"sliding_window": 16}) == 16
    assert sliding_window({"sliding_window": 16, "use_sliding_window": False}) == 0
    assert sliding_window({"text_config": {"sliding_window": 32}}) == 32


@pytest.mark.parametrize(("content", "words"), [("{", "is not JSON (Expect"), ("[]", "does not hold a JSON object")])
def test_unreadable_config_is_named(content, words, tmp_path):
    (tmp_path / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / 'config.json'} {words}")):
        read_config(tmp_path)
