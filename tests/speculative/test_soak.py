"""Soak test: thousands of tokens, many prompts, many rejected drafts; memory stays flat, the cache stays correct.

Decodes 20,000 tokens with `--long`, else 1,500, at least twice.
"""

import ctypes
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from openvino_genai import GenerationConfig

from speculative.decoder import Decoder
from speculative.drafting.proposers import DraftModelProposer
from speculative.models import cached_model
from speculative.models.spec import ModelSpec
from tests.support.paths import DRAFT, MAIN, ROOT

GROWTH = 8_000_000  # bytes, when the same texts are generated once more
TIMES = 4  # to generate them, at most

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux with glibc")


def resident_bytes() -> int:
    ctypes.CDLL(None).malloc_trim(0)  # what the allocator holds back between texts is no leak
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def load(stateful: bool) -> Decoder:
    exact = {"EXECUTION_MODE_HINT": "ACCURACY"}
    main, draft = (cached_model.load(ModelSpec(folder, "CPU", exact), stateful=stateful) for folder in (MAIN, DRAFT))
    return Decoder(main, DraftModelProposer(draft, main.vocab_size))


def generate(one: Decoder, wanted: int) -> np.ndarray:
    """Return the last of the texts of `wanted` tokens in all, each with a part of the one before; the same in every
    call."""
    one.reset(seed=0)
    random, width = np.random.default_rng(1), one.main.vocab_size
    done, rejections, text = 0, 0, random.integers(1, width, 20)
    while done < wanted:
        prompt = text[: int(random.integers(1, len(text) + 1))]  # goes back somewhere in the last text
        prompt = np.concatenate([prompt, random.integers(1, width, int(random.integers(1, 30)))])[-700:]
        config = GenerationConfig(max_new_tokens=int(random.integers(20, 200)), ignore_eos=True, do_sample=True)
        config.num_assistant_tokens = int(random.integers(1, 9))
        result = one.generate(prompt, config)
        rejections += sum(n <= k for n, k in zip(result.gained, result.proposed, strict=True))
        done += len(result.tokens)
        text = np.concatenate([prompt, result.tokens])
    assert rejections > done // 20
    return text


def growth(one: Decoder, wanted: int) -> tuple[list[int], np.ndarray]:
    """Return by how many bytes memory grows each time that the same texts are generated once more, until it does not,
    and the last of them.

    The first times it grows with every new shape of an inference (OpenVINO keeps what it compiled) and with every page
    that is written to for the first time. A leak makes it grow every time.
    """
    first, grown = generate(one, wanted), []
    while len(grown) < TIMES and (not grown or grown[-1] >= GROWTH):
        before = resident_bytes()
        text = generate(one, wanted)
        assert text.tolist() == first.tolist()
        grown.append(resident_bytes() - before)
    return grown, text


def check(stateful: bool, wanted: int) -> None:
    one = load(stateful)
    grown, text = growth(one, wanted)
    assert grown[-1] < GROWTH, grown
    for model in (one.main, one.draft.model):
        model.logits(text[:-1])
        used = model.logits(text, last=4).copy()
        model.reset()
        assert np.abs(used - model.logits(text, last=4)).max() < 1e-3


def check_planted_leak() -> None:
    """The main model's logits of each forward pass are kept, 16 KB a token."""
    one, kept = load(stateful=False), []
    logits = one.main.logits
    one.main.logits = lambda *a, **named: kept.append(logits(*a, **named).copy()) or kept[-1]
    grown, _ = growth(one, 400)
    assert len(grown) == TIMES and grown[-1] >= GROWTH, grown


def in_own_process(call: str) -> None:
    """What other tests left in this process is not measured."""
    program = f"from tests.speculative import test_soak; test_soak.{call}"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr[-1000:]


@pytest.mark.long
@pytest.mark.parametrize("stateful", [False, True], ids=["paged", "stateful"])
def test_long_use_leaks_no_memory_and_keeps_the_cache_correct(stateful):
    in_own_process(f"check({stateful}, wanted=10_000)")


@pytest.mark.long
def test_planted_leak_is_detected():
    in_own_process("check_planted_leak()")
