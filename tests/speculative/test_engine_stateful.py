"""Stateful tests with hypothesis: requests join, leave and fail in any order, checked against reference models of the
block pool and the batch engine. Nothing leaks, no request writes to another's cache, and no output depends on another
request.
"""

import dataclasses
import functools

import numpy as np
import openvino
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from openvino_genai import GenerationConfig

from speculative.batch_decoder import BatchDecoder
from speculative.decoder import Decoder
from speculative.drafting.latency_curve import LatencyCurve
from speculative.modelgen import llama_ir
from speculative.models import cached_model
from speculative.models.batch_model import BatchModel, ScheduledTokens, Slot
from speculative.models.block_pool import BlockPool, BlockTable, OutOfBlocks
from speculative.models.spec import ModelSpec
from tests.support.tiny_llama import tiny_llama
from tests.support.untimed import Untimed

BLOCKS, BLOCK = 12, 4  # of the pool alone
ROOM, CONTEXT = 512, 150  # tokens: of all texts, of the longest one
EXACT = {"EXECUTION_MODE_HINT": "ACCURACY", "INFERENCE_NUM_THREADS": "1", "ENABLE_CPU_PINNING": "NO"}
DRAFT_LENGTHS = ({}, {"num_assistant_tokens": 1}, {"num_assistant_tokens": 4}, {"assistant_confidence_threshold": 0.5})


def state(text, i):
    """The cache entry of token `i`, which depends on all tokens up to it."""
    return hash(text[: i + 1].tobytes())


class Pool(RuleBasedStateMachine):
    """Sequences in a block pool. Texts consist of two tokens only, so that many have a common prefix."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(BLOCKS, BLOCK)
        self.cache = np.full((BLOCKS, BLOCK), -1)
        self.texts = {}  # of each lease: its longest text, and how much of it is in the cache

    def one(self, data):
        return data.draw(st.sampled_from(list(self.texts)))

    def write(self, lease, begin, end):
        text, _ = self.texts[lease]
        blocks = lease.blocks(end)
        for i in range(begin, end):
            assert i >= lease.shared
            self.cache[blocks[i // BLOCK], i % BLOCK] = state(text, i)
        self.texts[lease] = text, end

    @rule(text=st.lists(st.integers(0, 1), min_size=1, max_size=5), most=st.integers(1, 60))
    def reserve(self, text, most):
        text = np.repeat(np.array(text), BLOCK)[:most]
        room = self.pool.has_room(len(text))
        assert room == (self.pool.needed(len(text)) <= self.pool.blocks - self.pool.reserved)
        if not room:
            with pytest.raises(OutOfBlocks):
                self.pool.reserve(len(text))
            return
        lease = self.pool.reserve(len(text))
        self.texts[lease] = text, lease.match_prefix(text[:-1])

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def grow(self, data):
        lease = self.one(data)
        text, held = self.texts[lease]
        self.write(lease, held, data.draw(st.integers(held, len(text))))

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def roll_back(self, data):
        """Reject a token: entries that are not shared are overwritten."""
        lease = self.one(data)
        text, held = self.texts[lease]
        back = data.draw(st.integers(lease.shared, held))
        self.texts[lease] = text, back
        self.write(lease, back, held)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def cache_full_blocks(self, data):
        lease = self.one(data)
        text, held = self.texts[lease]
        lease.cache_full_blocks(text[:held])
        assert lease.shared == held // BLOCK * BLOCK

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def match_prefix(self, data):
        lease = self.one(data)
        text, held = self.texts[lease]
        self.texts[lease] = text, max(held, lease.match_prefix(text[:-1]))

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def free_blocks(self, data):
        lease = self.one(data)
        del self.texts[lease]
        lease.free_blocks()

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def exceed_the_reservation(self, data):
        lease = self.one(data)
        with pytest.raises(OutOfBlocks, match="that reserved"):
            lease.blocks(self.pool.needed(len(self.texts[lease][0])) * BLOCK + 1)

    @invariant()
    def every_request_reads_its_own_entries(self):
        for lease, (text, held) in self.texts.items():
            blocks = lease.blocks(held)
            states = [state(text, i) for i in range(held)]
            assert [self.cache[blocks[i // BLOCK], i % BLOCK] for i in range(held)] == states

    @invariant()
    def blocks_are_counted(self):
        taken = {block for lease in self.texts for block in lease._blocks[: lease._allocated].tolist()}
        assert self.pool.free == BLOCKS - len(taken)
        assert len(taken) <= self.pool.reserved <= BLOCKS
        may_take = sum(self.pool.needed(len(text)) - lease._allocated for lease, (text, _) in self.texts.items())
        assert self.pool.reserved == len(taken) + may_take

    def teardown(self):
        for lease in self.texts:
            lease.free_blocks()
        assert self.pool.free == BLOCKS and self.pool.reserved == 0


class Engine(RuleBasedStateMachine):
    """Requests to the batch decoder; `alone` returns the main model's own output for one. Costs are not learned from
    the clock: hypothesis needs the same run again from the same choices."""

    def __init__(self, main, draft, alone):
        super().__init__()
        length = Untimed(LatencyCurve({1: 1.0, 64: 3.0}), LatencyCurve({1: 0.2}), LatencyCurve({1: 0.1}))
        self.decoder = BatchDecoder(BatchModel(main, CONTEXT), BatchModel(draft, CONTEXT), length)
        self.alone = alone
        self.requests = {}  # with what was requested: prompt, number of tokens, whether greedy
        self.failing, self.last = set(), {}

    @property
    def going(self):
        return [request for request in self.requests if not request.finished]

    def one(self, data):
        return data.draw(st.sampled_from(self.going))

    @rule(
        beginning=st.integers(0, 70),
        end=st.lists(st.integers(0, 7), min_size=1, max_size=3),
        tokens=st.integers(1, 40),
        sampled=st.booleans(),
        length=st.sampled_from(DRAFT_LENGTHS),
    )
    def add(self, beginning, end, tokens, sampled, length):
        prompt = [*(i * i % 7 for i in range(beginning)), *end]
        config = GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=sampled, **length)
        try:
            request = self.decoder.add_request(prompt, config, seed=len(self.requests))
        except OutOfBlocks:
            assert not self.decoder.has_room(len(prompt) + tokens)
        else:
            self.requests[request] = prompt, tokens, not sampled

    @rule(steps=st.integers(1, 6))
    def step(self, steps):
        for _ in range(steps):
            for gain in self.decoder.step():
                assert not self.last.get(gain.request), "a gain behind the last one"
                self.last[gain.request] = gain.request.finished

    @precondition(lambda self: self.going)
    @rule(data=st.data())
    def cancel(self, data):
        self.decoder.cancel(self.one(data))

    @precondition(lambda self: self.going)
    @rule(data=st.data(), place=st.sampled_from(["draft", "verify", "add_step", "end"]))
    def fail(self, data, place):
        """From now on, one request fails while it drafts, is verified, is recorded or ends."""
        request = self.one(data)
        setattr(request.sequence if place in ("draft", "verify") else request.output, place, broken)
        self.failing.add(request)

    @precondition(lambda self: self.going)
    @rule(of_main=st.booleans())
    def fail_an_inference(self, of_main):
        """Fail a forward pass. It may be retried; a request that was about to end may have ended before."""
        model = self.decoder.main if of_main else self.decoder.draft
        model.logits = broken
        try:
            self.step(1)
        except Broken:
            pass
        finally:
            del model.logits

    @precondition(lambda self: self.decoder._requests)
    @rule(data=st.data())
    def compare_with_a_fresh_computation(self, data):
        """The cache entries of one request, in the main and the draft model."""
        request = data.draw(st.sampled_from(self.decoder._requests))
        request.sequence.drop_draft()
        text = request.sequence.token_ids
        for model, slot in ((self.decoder.main, request.slot), (self.decoder.draft, request.draft_slot)):
            fresh = model.slot(len(text)) if model.has_room(len(text)) else None
            if fresh:
                (rows,) = model.logits([ScheduledTokens(slot, text, 1)])
                rows = rows.copy()
                (expected,) = model.logits([ScheduledTokens(fresh, text, 1)])
                np.testing.assert_allclose(rows, expected, rtol=1e-3, atol=1e-3)
                fresh.free_blocks()

    @invariant()
    def no_request_exceeds_its_reservation(self):
        for model in (self.decoder.main, self.decoder.draft):
            assert 0 <= model.pool.blocks - model.pool.free <= model.pool.reserved <= model.pool.blocks

    def teardown(self):
        for _ in range(1000):
            if not self.decoder.has_unfinished_requests:
                break
            self.step(1)
        assert not self.going
        for request, (prompt, tokens, greedy) in self.requests.items():
            got = request.result
            whole = not request.cancelled and request not in self.failing
            assert request.error is None or request in self.failing
            assert len(got.tokens) == tokens if whole else len(got.tokens) <= tokens
            assert got.finish_reason == ("length" if whole else got.finish_reason)
            if greedy:
                assert got.tokens == self.alone(tuple(prompt))[: len(got.tokens)]
        assert set(self.last) == set(self.requests) and all(self.last.values())
        for model in (self.decoder.main, self.decoder.draft):
            assert model.pool.free == model.pool.blocks and model.pool.reserved == 0


class Broken(Exception):
    pass


def broken(*arguments):
    raise Broken


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """Creates the state machine of a pair of two layers: with one, the cache would not depend on the tokens before."""
    base, models = tmp_path_factory.mktemp("tiny"), []
    for name, noise in (("main", 0.0), ("draft", 0.2)):
        llama = tiny_llama(1, noise)
        llama = dataclasses.replace(llama, layers=[*llama.layers, *tiny_llama(2, noise).layers])
        (base / name).mkdir()
        openvino.save_model(llama_ir.build(llama), base / name / "openvino_model.xml", compress_to_fp16=False)
        models.append(cached_model.load(ModelSpec(base / name, "CPU", EXACT), capacity=ROOM))
    one = Decoder(cached_model.load(ModelSpec(base / "main", "CPU", EXACT), capacity=CONTEXT))

    @functools.cache
    def alone(prompt):
        return one.generate(list(prompt), GenerationConfig(max_new_tokens=40, ignore_eos=True)).tokens

    return lambda: Engine(*models, alone)


def run(machine, long, examples, steps, phases=tuple(Phase)):
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples * (60 if long else 1),
            stateful_step_count=steps,
            deadline=None,
            database=None,
            derandomize=not long,
            phases=phases,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_block_pool_matches_the_reference_model(request):
    run(Pool, request.config.getoption("--long"), examples=75, steps=40)


def test_batch_engine_matches_the_reference_model(engine, request):
    run(engine, request.config.getoption("--long"), examples=15, steps=30)


# ---- planted bugs ---------------------------------------------------------------------------------------------------


def unused_reservations_leak(patch):
    give_back = BlockTable.free_blocks

    def wrong(self):
        self._pool._reserved += self._max_blocks > self._allocated
        give_back(self)

    patch.setattr(BlockTable, "free_blocks", wrong)


def shared_blocks_reused_while_referenced(patch):
    def wrong(self, shared):
        shared.ref_count -= 1
        if shared.ref_count <= 1:
            self._unused[shared] = None

    patch.setattr(BlockPool, "_release", wrong)


def blocks_keyed_by_own_tokens_only(patch):
    own = BlockTable._next_key
    patch.setattr(BlockTable, "_next_key", lambda self, tokens: (None, own(self, tokens)[1]))


def failed_requests_keep_their_blocks(patch):
    leave = BatchDecoder._finalize

    def wrong(self):
        for request in self._requests:
            if request.error:
                request.draft_slot._table.free_blocks = lambda: None
        return leave(self)

    patch.setattr(BatchDecoder, "_finalize", wrong)


def blocks_in_the_wrong_order(patch):
    blocks = Slot.blocks
    patch.setattr(Slot, "blocks", lambda self, tokens: blocks(self, tokens)[::-1].copy())


@pytest.mark.parametrize(
    "bug",
    [
        unused_reservations_leak,
        shared_blocks_reused_while_referenced,
        failed_requests_keep_their_blocks,
        blocks_in_the_wrong_order,
        blocks_keyed_by_own_tokens_only,
    ],
)
def test_planted_bugs_are_detected(bug, engine, monkeypatch):
    """The state machine of the affected part detects it."""
    of_engine = bug in (failed_requests_keep_their_blocks, blocks_in_the_wrong_order)
    bug(monkeypatch)
    found = (AssertionError, IndexError, ValueError, KeyError, StopIteration, Flaky)  # Flaky: it makes runs differ
    with pytest.raises(found):
        # Many, as the examples depend on the modules that the process has imported; the first that fails ends the test.
        run(engine if of_engine else Pool, False, 1000 if not of_engine else 60, 40, phases=(Phase.generate,))
