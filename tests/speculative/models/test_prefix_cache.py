"""Prefix cache: requests with a common prefix share its KV-cache blocks without any effect on their output. Only blocks
of verified tokens after the same prefix are shared, shared blocks are never written to, and every block is freed.

A shadow of the cache is kept token by token for main and draft model; it finds the planted bugs.
"""

import contextlib
import dataclasses
from collections import Counter

import numpy as np
import openvino
import openvino_genai
import pytest
from openvino_genai import GenerationConfig

from speculative.batch_decoder import BatchDecoder
from speculative.decoder import Decoder
from speculative.drafting.batch_policy import BatchDraftLength
from speculative.drafting.latency_curve import LatencyCurve
from speculative.drafting.proposers import DraftModelProposer
from speculative.modelgen import llama_ir
from speculative.models import cached_model
from speculative.models.batch_model import BatchModel, Slot
from speculative.models.block_pool import BlockPool, BlockTable, OutOfBlocks
from speculative.models.spec import ModelSpec
from tests.support.noisy_draft import save_noisy_draft
from tests.support.paths import DRAFT, MAIN
from tests.support.steps import finish
from tests.support.tiny_llama import tiny_llama

EXACT = {"EXECUTION_MODE_HINT": "ACCURACY"}
ONE_THREAD = {"INFERENCE_NUM_THREADS": "1", "ENABLE_CPU_PINNING": "NO"}
F32 = {**EXACT, **ONE_THREAD}
U8 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "u8", **ONE_THREAD}
BLOCK, ROOM, CONTEXT = 32, 640, 200  # tokens: of a block, of all texts, of the longest one
RULES = ({"num_assistant_tokens": 3}, {"assistant_confidence_threshold": 0.5}, {"num_assistant_tokens": 1}, {})


def decoder_of(main, draft, share=True):
    costs = BatchDraftLength(LatencyCurve({1: 1.0, 64: 3.0}), LatencyCurve({1: 0.2}), LatencyCurve({1: 0.1}))
    return BatchDecoder(BatchModel(main, CONTEXT, share), BatchModel(draft, CONTEXT, share), costs)


def greedy(tokens, **options):
    return GenerationConfig(max_new_tokens=tokens, ignore_eos=True, **options)


def models_of(decoder):
    return decoder.main, decoder.draft


def blocks_are_back(decoder):
    return all(model.pool.free == model.pool.blocks and not model.pool.reserved for model in models_of(decoder))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A pair of two layers each: with one layer, a token's cache entry would not depend on the tokens before it."""
    base = tmp_path_factory.mktemp("tiny")
    for name, noise in (("main", 0.0), ("draft", 0.2)):
        llama = tiny_llama(1, noise)
        llama = dataclasses.replace(llama, layers=[*llama.layers, *tiny_llama(2, noise).layers])
        (base / name).mkdir()
        openvino.save_model(llama_ir.build(llama), base / name / "openvino_model.xml", compress_to_fp16=False)
    return base / "main", base / "draft"


@pytest.fixture(scope="module")
def tiny(folders):
    return [cached_model.load(ModelSpec(folder, "CPU", F32), capacity=ROOM) for folder in folders]


@pytest.fixture(scope="module")
def conversations(folders):
    """Requests with common prefixes, first and second turns, each with the output of the single-request decoder."""
    main, draft = (cached_model.load(ModelSpec(folder, "CPU", F32), capacity=CONTEXT) for folder in folders)
    decoder, random = Decoder(main, DraftModelProposer(draft, main.vocab_size)), np.random.default_rng(3)
    system, user = random.integers(0, 8, (3, BLOCK)), random.integers(0, 8, (2, BLOCK))
    requests, texts = [], []
    for seed in range(36):
        if seed % 3 == 2:  # continues an earlier text
            earlier = int(random.integers(len(requests)))
            prompt = np.concatenate([requests[earlier][0], texts[earlier].tokens])
        else:
            prompt = np.concatenate([system[random.integers(3)], user[random.integers(2)]])
        prompt = np.concatenate([prompt, random.integers(0, 8, random.integers(1, 20))])[-CONTEXT + 40 :]
        config = greedy(int(random.integers(2, 40)), do_sample=seed % 2 == 0, **RULES[seed % 3])
        requests.append((prompt, config, seed))
        texts.append(decoder.generate(prompt, config, seed=seed))
    return requests, [text.tokens for text in texts]


class Shadow:
    """A shadow of the cache, derived from the forward passes alone: for each position, the text last written there.

    `wrong` counts reads of another request's entries, and shared entries with traces of rejected tokens.
    """

    def __init__(self, decoder, patch):
        self.decoder, self.wrong = decoder, 0
        self.places = {id(model): {} for model in models_of(decoder)}
        self.soiled = {id(model): set() for model in models_of(decoder)}
        logits = BatchModel.logits

        def watched(model, parts):
            starts = [part.start for part in parts]
            rows = logits(model, parts)
            texts = [[hash(part.tokens[: i + 1].tobytes()) for i in range(len(part.tokens))] for part in parts]
            where = [
                [(int(block), offset) for block in part.slot.blocks(len(part.tokens)) for offset in range(BLOCK)]
                for part in parts
            ]
            for start, text, places in zip(starts, texts, where, strict=True):
                for i in range(start, len(text)):
                    self.write(id(model), *places[i], text[i])
            for text, places in zip(texts, where, strict=True):
                held = self.places[id(model)]
                self.wrong += any(held.get(place) != state for state, place in zip(text, places, strict=False))
            return rows

        patch.setattr(BatchModel, "logits", watched)

    def write(self, model, block, offset, state):
        held, soiled = self.places[model], self.soiled[model]
        if offset == 0:
            soiled.discard(block)
            for i in range(BLOCK):
                held.pop((block, i), None)
        elif (block, offset) in held:
            soiled.add(block)
        held[block, offset] = state

    def look(self):
        """Every shared block holds the tokens of its key, and no block in use is free."""
        for model in models_of(self.decoder):
            held, soiled = self.places[id(model)], self.soiled[id(model)]
            for shared in model.pool._shared.values():
                text, before = shared.tokens, shared.parent
                while before:
                    text, before = before.tokens + text, before.parent
                begin = len(text) - len(shared.tokens)
                texts = [hash(text[: begin + 8 * (i + 1)]) for i in range(BLOCK)]
                self.wrong += any(held.get((shared.block, i)) != text for i, text in enumerate(texts))
                self.wrong += model.rollback_leaves_traces and shared.block in soiled
        for request in self.decoder._requests:
            self.wrong += any(shared in self.decoder.main.pool._unused for shared in request.slot._table._shared)


def run_all(decoder, requests, patch, most=12):
    """Decode all requests, joining as others leave; return them and the errors that the shadow found."""
    random, shadow = np.random.default_rng(0), Shadow(decoder, patch)
    waiting, added = list(reversed(requests)), []
    while waiting or decoder.has_unfinished_requests:
        going = sum(not request.finished for request in added)
        if waiting and going < most and random.random() < 0.5:
            prompt, config, seed = waiting[-1]
            if decoder.has_room(len(prompt) + config.max_new_tokens):
                added.append(decoder.add_request(prompt, config, seed))
                waiting.pop()
        decoder.step()
        shadow.look()
    return added, shadow.wrong


def test_texts_equal_those_decoded_alone(tiny, conversations, monkeypatch):
    """Including eviction: the cache fits only a fraction of the conversations."""
    requests, alone = conversations
    decoder = decoder_of(*tiny)
    added, wrong = run_all(decoder, requests, monkeypatch)
    assert [request.result.tokens for request in added] == alone and not wrong
    prompts, cached = sum(len(prompt) for prompt, *_ in requests), sum(request.cached_tokens for request in added)
    assert 0.3 < cached / prompts < 1
    assert sum(len(prompt) for prompt, *_ in requests) > 4 * ROOM and blocks_are_back(decoder)


def test_prefix_cache_can_be_disabled(tiny, conversations, monkeypatch):
    requests, alone = conversations
    decoder = decoder_of(*tiny, share=False)
    added, wrong = run_all(decoder, requests[:15], monkeypatch)
    assert [request.result.tokens for request in added] == alone[:15] and not wrong
    assert not any(request.cached_tokens for request in added) and not decoder.main.pool._shared
    assert blocks_are_back(decoder)


@pytest.fixture(scope="module")
def small(folders):
    """With a u8 cache, in which rejected tokens leave traces."""
    return [cached_model.load(ModelSpec(folder, "CPU", U8), capacity=ROOM) for folder in folders]


def test_only_blocks_without_rollback_traces_are_shared(small, conversations, monkeypatch):
    requests, _ = conversations
    decoder = decoder_of(*small)
    added, wrong = run_all(decoder, requests, monkeypatch)
    assert not wrong and sum(request.cached_tokens for request in added) > 0.2 * sum(len(p) for p, *_ in requests)
    assert blocks_are_back(decoder)


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        (EXACT, False),
        ({"KV_CACHE_PRECISION": "u8"}, True),
        ({"KV_CACHE_PRECISION": "u8", "KEY_CACHE_QUANT_MODE": "BY_TOKEN"}, False),
    ],
    ids=str,
)
def test_caches_that_keep_traces_of_rejected_tokens_are_known(properties, expected):
    assert (
        BatchModel(cached_model.load(ModelSpec(DRAFT, "CPU", properties), capacity=64)).rollback_leaves_traces
        is expected
    )


@contextlib.contextmanager
def counted_tokens(decoder):
    """The number of tokens that each model computes."""
    computed = Counter()
    for model in models_of(decoder):
        run = model._backend.run_together

        def counted(runs, run=run, model=model, **options):
            computed[model] += sum(len(one.tokens) for one in runs)
            return run(runs, **options)

        model._backend.run_together = counted
    try:
        yield computed
    finally:
        for model in models_of(decoder):
            del model._backend.run_together


def test_cached_prefix_is_not_computed_again(tiny):
    """Of a common prefix of 100 tokens, 96 are in full blocks. A second turn also reuses the first turn's answer."""
    decoder = decoder_of(*tiny)
    random = np.random.default_rng(4)
    beginning = random.integers(0, 8, 100)
    with counted_tokens(decoder) as computed:
        first = decoder.add_request(beginning, greedy(40))
        finish(decoder)
        computed.clear()
        other = decoder.add_request(np.concatenate([beginning, [1, 2, 3]]), greedy(2, num_assistant_tokens=1))
        finish(decoder)
        assert (first.cached_tokens, other.cached_tokens) == (0, 96)
        assert computed[decoder.main] == 103 - 96 + 1  # and one iteration, in which nothing can be drafted
        second = np.concatenate([beginning, first.result.tokens, [4] * 5])
        computed.clear()
        turn = decoder.add_request(second, greedy(3, num_assistant_tokens=1))
        finish(decoder)
        assert turn.cached_tokens == (140 - 1) // BLOCK * BLOCK
        assert computed[decoder.draft] < 30


@pytest.mark.parametrize("chunk", [64, 256])
@pytest.mark.parametrize("salts", [(b"",) * 4, (b"a", b"b", b"a", b"b")], ids=["one tenant", "two tenants"])
def test_requests_with_one_prompt_compute_it_once(chunk, salts, tiny, monkeypatch):
    """Except the last, partial block. The main model and the draft read 132 tokens, of which 128 are in full blocks;
    after them, one token is drafted with the first of two new tokens, and verified with the second."""
    monkeypatch.setattr("speculative.batch_decoder.PREFILL_CHUNK", chunk)
    prompt = np.random.default_rng(5).integers(0, 8, 132)
    config = greedy(3, num_assistant_tokens=1, do_sample=True)
    alone = decoder_of(*tiny, share=False)
    expected = [alone.add_request(prompt, config, seed=i) for i in range(4)]
    finish(alone)
    decoder = decoder_of(*tiny)
    with counted_tokens(decoder) as computed:
        requests = [decoder.add_request(prompt, config, seed=i, salt=salt) for i, salt in enumerate(salts)]
        finish(decoder)
    assert [request.result.tokens for request in requests] == [request.result.tokens for request in expected]
    assert [request.cached_tokens for request in requests] == [
        128 if salt in salts[:i] else 0 for i, salt in enumerate(salts)
    ]
    often = len(set(salts))
    for model in models_of(decoder):
        assert often * 132 <= computed[model] <= often * 132 + (4 - often) * 4 + 4 * 4
    assert blocks_are_back(decoder)


def test_without_prefix_cache_each_request_computes_its_prompt(tiny):
    decoder = decoder_of(*tiny, share=False)
    with counted_tokens(decoder) as computed:
        requests = [decoder.add_request(np.arange(132) % 8, greedy(1)) for _ in range(4)]
        finish(decoder)
    assert computed[decoder.main] == 4 * 132 and not any(request.cached_tokens for request in requests)


@pytest.mark.parametrize("end", ["cancelled", "failed"])
def test_requests_continue_if_the_one_they_wait_for_ends(end, tiny, monkeypatch):
    monkeypatch.setattr("speculative.batch_decoder.PREFILL_CHUNK", 40)
    prompt, decoder = np.random.default_rng(5).integers(0, 8, 132), decoder_of(*tiny)
    first, *others = (decoder.add_request(prompt, greedy(5)) for _ in range(3))
    decoder.step()
    if end == "cancelled":
        decoder.cancel(first)
    else:
        first.error = RuntimeError("planted")
    finish(decoder)
    again = decoder.add_request(prompt, greedy(5))
    finish(decoder)
    assert [len(request.result.tokens) for request in (first, *others)] == [0, 5, 5]
    assert all(request.result.tokens == again.result.tokens for request in others) and blocks_are_back(decoder)


def test_seeded_text_does_not_depend_on_draft_prefill(tiny, monkeypatch):
    """The draft may read a long prompt in several iterations, next to other prompts, or take it from the cache."""
    monkeypatch.setattr("speculative.batch_decoder.PREFILL_CHUNK", 40)
    random = np.random.default_rng(5)
    prompt, other = random.integers(0, 8, (2, 132))
    config = greedy(30, do_sample=True, temperature=1.5)

    def text(decoder, *before):
        for one in before:
            decoder.add_request(one, greedy(20, num_assistant_tokens=3))
        request = decoder.add_request(prompt, config, seed=3)
        finish(decoder)
        return request.result.tokens

    decoder = decoder_of(*tiny)
    alone, cached = (text(decoder) for _ in range(2))
    assert alone == cached == text(decoder_of(*tiny), other) == text(decoder_of(*tiny), other, prompt)


def test_concurrent_requests_compute_a_shared_prefix_once(tiny, monkeypatch):
    monkeypatch.setattr("speculative.batch_decoder.PREFILL_CHUNK", 64)
    decoder = decoder_of(*tiny)
    beginning = np.random.default_rng(5).integers(0, 8, 130)
    requests = [decoder.add_request(np.append(beginning, i), greedy(4), seed=i) for i in range(4)]
    finish(decoder)
    assert sum(request.cached_tokens for request in requests) >= 3 * 96
    assert decoder.main.pool.reserved == 0 and len(decoder.main.pool._shared) == 4


def test_shared_block_is_reserved_once(tiny):
    decoder = decoder_of(*tiny)
    beginning = np.random.default_rng(6).integers(0, 8, 4 * BLOCK)
    for i in range(5):
        decoder.add_request(np.append(beginning, i), greedy(20, num_assistant_tokens=1))
        decoder.step()
    assert decoder.main.pool.reserved == 4 + 5
    with pytest.raises(ValueError, match=r"^128 tokens are shared with other sequences"):
        decoder._requests[0].slot.start_write(100, 110)
    finish(decoder)
    assert blocks_are_back(decoder)


def test_failed_computations_are_not_shared(tiny, monkeypatch):
    """A failed forward pass may have written anything; a request with NaN logits ends."""
    decoder = decoder_of(*tiny)
    prompt = np.random.default_rng(7).integers(0, 8, 80)
    request = decoder.add_request(prompt, greedy(20))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder.main._backend, "run_together", lambda runs, **_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            decoder.step()
    assert not decoder.main.pool._shared
    bad = decoder.add_request(prompt[69::-1], greedy(20))  # which does not wait for another request
    monkeypatch.setattr(bad.sequence, "_transform", lambda logits, *text: logits * np.nan)
    monkeypatch.setattr(request.sequence, "_transform", lambda logits, *text: logits * np.nan)
    decoder.step()
    assert bad.error and request.error and not decoder.main.pool._shared and blocks_are_back(decoder)


def test_embedded_draft_reuses_the_cache_in_a_conversation(tmp_path):
    """In each turn, greedy tokens equal the main model's, and few tokens besides those of the turn are computed."""
    alone = Decoder(
        cached_model.load(ModelSpec(DRAFT, "CPU", F32), capacity=CONTEXT),
        None,
        tokenizer=openvino_genai.Tokenizer(str(MAIN)),
    )
    pair = DRAFT, save_noisy_draft(tmp_path)
    decoder = decoder_of(*(cached_model.load(ModelSpec(folder, "CPU", F32), capacity=ROOM) for folder in pair))
    history = alone.encode(
        'class Stack:\n    """A stack of items."""\n\n    def __init__(self):\n        self.items = []\n'
    )
    before = 0
    for question in ("\n    def push(self, item):\n", "\n    def pop(self):\n", "\n    def peek(self):\n"):
        history = np.concatenate([history, alone.encode(question)])
        request = decoder.add_request(history, greedy(24))
        finish(decoder)
        assert request.result.tokens == alone.generate(history, greedy(24)).tokens
        assert request.cached_tokens == before // BLOCK * BLOCK
        history = np.concatenate([history, request.result.tokens])
        before = len(history) - 1
    assert request.cached_tokens >= 64 and blocks_are_back(decoder)


def test_blocks_are_shared_by_content_and_never_lost():
    """Sequences in blocks of four tokens are added, grow, are shared and freed at random, against a reference model."""
    pool, random = BlockPool(40, 4), np.random.default_rng(0)
    leases, content, found = {}, {}, 0
    for _ in range(4000):
        if random.random() < 0.3 and pool.has_room(most := int(random.integers(1, 60))):
            lease = pool.reserve(most)
            text = np.repeat(random.integers(0, 2, 15), 4)[:most]  # often alike
            held = lease.match_prefix(text[:-1])
            found += held > 0
            leases[lease] = text, held
        elif leases:
            lease = list(leases)[random.integers(len(leases))]
            text, held = leases[lease]
            if random.random() < 0.15:
                lease.free_blocks()
                del leases[lease]
            else:
                end = int(random.integers(held, len(text) + 1))
                for i, block in enumerate(lease.blocks(end).tolist()):
                    if (i + 1) * 4 > held:
                        content[block] = text[: min((i + 1) * 4, end)].tobytes()
                lease.cache_full_blocks(text[:end] if random.random() < 0.7 else text[:0])
                leases[lease] = text, max(held, end)
        own = [block for lease in leases for block in lease._blocks[len(lease._shared) : lease._allocated].tolist()]
        shared = {shared.block for lease in leases for shared in lease._shared}
        assert len(set(own)) == len(own) and not shared & set(own)
        assert len(own) + len(shared) == pool.blocks - pool.free <= pool.reserved <= pool.blocks
        for lease, (text, held) in leases.items():
            for i, block in enumerate(lease.blocks(held).tolist()):
                assert content[block] == text[: min((i + 1) * 4, held)].tobytes()
        for known in pool._shared.values():
            assert (
                known.parent == b"" or known.parent in pool._shared.values()
            )  # b"": the salt, of those that begin a text
    assert found > 200
    with pytest.raises(OutOfBlocks):
        pool.reserve(4 * 40 + 1)
    for lease in leases:
        lease.free_blocks()
    assert pool.free == pool.blocks and pool.reserved == 0


def test_blocks_freed_twice_are_free_once():
    """Else other sequences would lose theirs."""
    pool, text = BlockPool(8, 4), np.arange(12)
    ended, other = pool.reserve(12), pool.reserve(8)
    ended.blocks(10)
    ended.cache_full_blocks(text[:8])
    assert other.match_prefix(text[:8]) == 8
    for _ in range(2):
        ended.free_blocks()
        assert pool.free == 6 and pool.reserved == 2
    with pytest.raises(OutOfBlocks, match="reserved 0 cache blocks requested 1"):
        ended.blocks(1)


# ---- planted bugs ----------------------------------------------------------------------------------------------------


def blocks_keyed_by_own_tokens_only(patch):
    """Bug: shares blocks regardless of the tokens before them."""
    own = BlockTable._next_key
    patch.setattr(BlockTable, "_next_key", lambda self, tokens: (None, own(self, tokens)[1]))


def unverified_tokens_are_shared(patch):
    """Bug: shares tokens before they are verified."""

    def wrong(self, tokens):
        n = min(self._length, len(tokens)) // BLOCK * BLOCK
        self._table.cache_full_blocks(self._tokens[:n])

    patch.setattr(Slot, "cache_full_blocks", wrong)
    logits = BatchModel.logits

    def at_once(self, parts):
        rows = logits(self, parts)
        for part in parts:
            part.slot.cache_full_blocks(part.tokens)
        return rows

    patch.setattr(BatchModel, "logits", at_once)
    patch.setattr(Slot, "start_write", begin_anywhere)


def begin_anywhere(self, start, end):
    self._length, self._written = start, max(self._written, end)


def partial_block_is_shared(patch):
    patch.setattr(Slot, "start_write", begin_anywhere)
    share = Slot.cache_full_blocks

    def wrong(self, tokens):
        share(self, tokens)
        left = tokens[self._table.shared : self._length]
        if BLOCK - 4 < len(left) < BLOCK and self._length < len(tokens):
            self._table.cache_full_blocks(
                np.concatenate([tokens[: self._length], np.zeros(BLOCK - len(left), np.int64)])
            )

    patch.setattr(Slot, "cache_full_blocks", wrong)


def blocks_freed_while_in_use(patch):
    release = BlockPool._release

    def wrong(self, shared):
        shared.ref_count = 1
        if (shared.parent, shared.tokens) in self._shared:
            release(self, shared)

    patch.setattr(BlockPool, "_release", wrong)


def evicted_blocks_still_match(patch):
    def wrong(self):
        if self._empty:
            return self._empty.pop()
        oldest = next(iter(self._unused))
        del self._unused[oldest]
        return oldest.block

    patch.setattr(BlockPool, "_allocate", wrong)


def prefix_match_one_token_too_long(patch):
    adopt = Slot.match_prefix

    def wrong(self, tokens):
        spared = adopt(self, tokens)
        if spared and self._length < len(tokens) - 1:
            self.commit(self._length, tokens[self._length : self._length + 1])
        return spared

    patch.setattr(Slot, "match_prefix", wrong)


BUGS = (
    blocks_keyed_by_own_tokens_only,
    unverified_tokens_are_shared,
    partial_block_is_shared,
    blocks_freed_while_in_use,
    evicted_blocks_still_match,
    prefix_match_one_token_too_long,
)


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_detected(bug, tiny, conversations, monkeypatch):
    bug(monkeypatch)
    _, wrong = run_all(decoder_of(*tiny), conversations[0][:24], monkeypatch)
    assert wrong > 5


def test_ignored_rollback_traces_are_detected(small, conversations, monkeypatch):
    monkeypatch.setattr(Slot, "start_write", begin_anywhere)
    _, wrong = run_all(decoder_of(*small), conversations[0][:24], monkeypatch)
    assert wrong > 5
