"""Features that a request does not use take no time: none of their code runs."""

import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from openvino_genai import GenerationConfig, StructuredOutputConfig

import speculative
from speculative import batch_decoder, decoder
from tests.support.paths import DRAFT, MAIN

FEATURES = {"sampling/grammar.py", "sampling/logprobs.py"}
OTHERS = {("sampling/distribution.py", "_processed"), ("sequence/mask_thread.py", "_compute")}
ROOT = Path(speculative.__file__).parent


@contextmanager
def calls(into):
    """Add the functions of this project that are called in this thread and in new ones: (file, name)."""

    def see(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(ROOT)):
            into.add((Path(code.co_filename).relative_to(ROOT).as_posix(), code.co_name))

    threading.setprofile(see)
    sys.setprofile(see)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def decode_alone(config):
    decoder.load(MAIN, DRAFT).generate("def read(path):", config)


def decode_in_batch(config):
    batch = batch_decoder.load(MAIN, DRAFT, cache_tokens=512)
    batch.add_request("def read(path):", config)
    while batch.has_unfinished_requests:
        batch.step()


@pytest.mark.parametrize("decode", [decode_alone, decode_in_batch])
@pytest.mark.parametrize("sampled", [False, True])
def test_code_of_unused_features_does_not_run(decode, sampled):
    called = set()
    with calls(called):
        decode(GenerationConfig(max_new_tokens=24, do_sample=sampled, ignore_eos=True))
    assert ("sampling/distribution.py", "__call__") in called and ("sequence/sequence.py", "verify") in called
    assert not {one for one in called if one in OTHERS or (one[0] in FEATURES and one[1] != "__init__")}


@pytest.mark.parametrize("decode", [decode_alone, decode_in_batch])
def test_code_of_used_features_is_detected(decode):
    called, config = set(), GenerationConfig(max_new_tokens=24, logprobs=2, presence_penalty=0.5)
    config.structured_output_config = StructuredOutputConfig(regex="[a-c]{5}")
    with calls(called):
        decode(config)
    assert {file for file, _ in called} >= FEATURES
    assert called >= OTHERS
