"""Results of runs: single-token outputs, arguments that are not UTF-8, and the token view."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import openvino_genai
import pytest

from speculative.bench.genai import Run
from speculative.bench.harness import Method, row, write_outputs
from speculative.bench.token_view import token_view
from speculative.decoder import Decoder
from speculative.drafting.policy import FixedDraftLength
from speculative.drafting.proposers import DraftModelProposer
from speculative.models import cached_model
from speculative.models.spec import ModelSpec
from tests.support.noisy_draft import save_noisy_draft
from tests.support.paths import DRAFT, ROOT
from tests.support.waiting import PATIENCE

LONG, SHORT = Run([1, 2, 3], [1], [2], ttft=0.5, seconds=0.7), Run([1], [], [], ttft=0.5, seconds=0.5)


def method(*runs):
    return Method("a", "native", 1, 0, decode=len, rounds=[[*runs]])


def test_single_token_output_has_no_time_per_token():
    mixed = method(LONG, SHORT)
    assert row(mixed, mixed)["tpot"] == pytest.approx(0.1) and row(mixed, mixed)["throughput"] == pytest.approx(10)
    assert mixed.decodes([0, 1]) and not mixed.decodes([1])
    with pytest.raises(ValueError, match="all answers of a have a single token"):
        row(method(SHORT), method(SHORT))


def test_arguments_not_in_utf_8_are_escaped(tmp_path, capsys):
    arguments = argparse.Namespace(json=tmp_path / "out.json", csv=None, html=None, png=None)
    write_outputs(arguments, {"command": "caf\udce9"})
    written = (tmp_path / "out.json").read_text(encoding="utf-8")
    assert json.loads(written) == json.loads(capsys.readouterr().out) == {"command": "caf\udce9"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
def test_full_disk_gives_one_sentence_error(tmp_path):
    """The files are written in any case."""
    code = f"""
import argparse, pathlib
from speculative.bench.harness import write_outputs
from speculative.cli.processes import prepare_output
prepare_output()
arguments = argparse.Namespace(json=pathlib.Path({str(tmp_path / "out.json")!r}), csv=None, html=None, png=None)
write_outputs(arguments, {{"a": 1}}, "table")
"""
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, cwd=ROOT, timeout=PATIENCE)
    assert done.returncode == 1
    assert done.stderr == b"error: the output cannot be written: No space left on device.\n"
    assert json.loads((tmp_path / "out.json").read_text()) == {"a": 1}


def test_token_view_shows_rejected_token_next_to_accepted_leaf(tmp_path):
    exact = {"EXECUTION_MODE_HINT": "ACCURACY"}
    main, draft = (cached_model.load(ModelSpec(one, "CPU", exact)) for one in (DRAFT, save_noisy_draft(tmp_path)))
    tokenizer, chain_and_leaves = openvino_genai.Tokenizer(str(DRAFT)), FixedDraftLength(2, 6)
    decoder = Decoder(main, DraftModelProposer(draft, main.vocab_size), chain_and_leaves, tokenizer)
    prompt = tokenizer.encode("class Stack:\n", add_special_tokens=False).input_ids.data[0].astype(np.int64)
    steps = [*decoder.stream(prompt, openvino_genai.GenerationConfig(max_new_tokens=60, ignore_eos=True))]
    assert any(step.ends_in_leaf for step in steps)
    for step, shown in zip(steps, token_view(decoder, prompt, "tree", 60)["steps"], strict=True):
        assert len(shown["accepted"]) == step.accepted
        assert len(shown["rejected"]) == step.proposed - step.accepted + step.ends_in_leaf
