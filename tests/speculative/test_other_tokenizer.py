"""A draft with another tokenizer, in both decoders and for programs that need the main model's.

The embedded draft with its tokens renumbered gives each token the same probability, so greedy texts and their accepted
tokens must be those of the embedded draft; sampled tokens need not be the ones that a tokenizer would write. Draws are
compared in test_lossless_draws.py and test_batch_decoder.py, translated texts in models/test_vocabulary.py.
"""

import pytest
from openvino_genai import GenerationConfig

from speculative import batch_decoder, decoder
from speculative.models.spec import ModelSpec
from speculative.pair.draft_limits import alone_limit, genai_limit, native_limit, tokenizer_limit
from tests.support.noisy_draft import save_noisy_draft
from tests.support.paths import DRAFT, MAIN
from tests.support.steps import finish

EXACT = {"EXECUTION_MODE_HINT": "ACCURACY", "INFERENCE_NUM_THREADS": "1", "ENABLE_CPU_PINNING": "NO"}
LONG = "def add(a, b):\n    return a + b\n\n\n" * 60  # of which the draft encodes only the end again
PROMPTS = ["def read_file(path):", "naïve = '你好", f"{LONG}def add(a, b):", f"{LONG}def mul(a, b):"]


@pytest.fixture(scope="module")
def main(tmp_path_factory):
    """A main model as fast as the embedded draft, which is right about as often as for its own."""
    return ModelSpec(save_noisy_draft(tmp_path_factory.mktemp("main")), "CPU", EXACT)


@pytest.fixture(scope="module")
def drafts(renumbered_draft):
    return [ModelSpec(folder, "CPU", EXACT) for folder in (DRAFT, renumbered_draft)]


def config(k=3, **sampling):
    return GenerationConfig(max_new_tokens=24, num_assistant_tokens=k, **sampling)


def test_single_requests_match_the_draft_with_same_tokenizer(main, drafts):
    same, other = (decoder.load(main, draft) for draft in drafts)
    for prompt in PROMPTS:
        expected, found = (one.generate(prompt, config()) for one in (same, other))
        assert (found.tokens, found.accepted) == (expected.tokens, expected.accepted)
        assert sum(found.accepted) > 3
    sampled = [other.generate(PROMPTS[0], config(do_sample=True), seed=1).tokens for _ in range(2)]
    assert sampled[0] == sampled[1] != other.generate(PROMPTS[0], config(do_sample=True), seed=2).tokens


def test_batched_requests_match_the_draft_with_same_tokenizer(main, drafts):
    """The long prompts have a common beginning, which the second takes from the prefix cache. How much of it the draft
    has to read, and so the first tokens that it proposes, depends on the tokenizer."""
    results, accepted, cached = [], [], []
    for draft in drafts:
        batch = batch_decoder.load(main, draft, cache_tokens=4096)
        requests = []
        for prompts in (PROMPTS[:3], PROMPTS[3:]):
            requests += [batch.add_request(prompt, config(k)) for prompt in prompts for k in (2, 3)]
            finish(batch)
        assert not any(request.error for request in requests)
        results.append([request.result.tokens for request in requests])
        accepted.append([request.result.accepted for request in requests[:4]])
        cached.append(requests[-1].cached_tokens)
    assert results[0] == results[1] and accepted[0] == accepted[1] and cached[0] == cached[1] > 500


def test_cache_has_room_for_texts_with_more_draft_tokens(main, drafts):
    batch = batch_decoder.load(main, drafts[1], cache_tokens=640)
    assert batch.draft.context == 800 and batch.main.context == 640
    batch.add_request([5] * 300, GenerationConfig(max_new_tokens=200))  # 500 tokens, or 625 of the draft
    assert batch.has_room(120) and not batch.has_room(160)


def test_programs_that_need_the_same_tokenizer_reject_the_draft(renumbered_draft, run_here):
    assert genai_limit(MAIN, renumbered_draft, "CPU", "CPU") == (
        f"{renumbered_draft} has another tokenizer than {MAIN}, and GenAI needs the same: this project's engine drafts "
        "with it"
    )
    assert tokenizer_limit(MAIN, DRAFT) == genai_limit(MAIN, DRAFT, "CPU", "CPU") == ""
    assert alone_limit(renumbered_draft) == native_limit(renumbered_draft, "CPU", "CPU") == ""
    done = run_here("scripts/benchmark.py", MAIN, renumbered_draft, "--paths", "draft,genai")
    assert done.returncode == 2 and done.stderr.startswith(f"error: {renumbered_draft} has another tokenizer")
