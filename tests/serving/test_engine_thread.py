"""The decoding thread of the server: each job gets its own result or error; an engine failure is blamed on no job."""

import asyncio
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from openvino_genai import GenerationConfig, Tokenizer

from speculative.batch_decoder import BatchDecoder
from speculative.drafting.batch_policy import BatchDraftLength
from speculative.drafting.latency_curve import LatencyCurve
from speculative.models import cached_model
from speculative.models.batch_model import BatchModel
from speculative.models.block_pool import OutOfBlocks
from speculative.models.spec import ModelSpec
from speculative.serving.engine.engine_thread import PIECE_INTERVAL, Engine, EngineFailed, GenerationHandle, QueueFull
from tests.support.paths import MAIN
from tests.support.tiny_llama import save_tiny_llama

TINY = {"INFERENCE_NUM_THREADS": "1", "ENABLE_CPU_PINNING": "NO"}
PATIENCE = 60  # seconds, for what takes milliseconds


@pytest.fixture(scope="module")
def main(tmp_path_factory):
    return cached_model.load(
        ModelSpec(save_tiny_llama(tmp_path_factory.mktemp("tiny") / "main", seed=1), "CPU", TINY), capacity=256
    )


@pytest.fixture
def decoder(main):
    rule = BatchDraftLength(LatencyCurve({1: 1.0}), LatencyCurve({1: 0.2}), LatencyCurve({1: 0.1}))
    return BatchDecoder(BatchModel(main, 128), None, rule, Tokenizer(str(MAIN)))


def config(tokens=5):
    return GenerationConfig(max_new_tokens=tokens, ignore_eos=True)


def submit(engine, tokens=5, prompt=(1, 2, 3)):
    return engine.submit(np.array(prompt), config(tokens), None, seconds=600)


def outcomes(decoder, act, max_num_seqs=4):
    """The outcome of each job that `act(engine)` returns: its generation, or its error."""

    async def ask():
        engine = Engine(decoder, max_num_seqs, max_queue=9)
        ends = [asyncio.wait_for(job.wait(), PATIENCE) for job in act(engine)]
        found = await asyncio.gather(*ends, return_exceptions=True)
        alive = engine.error
        if alive is None:  # the engine still works
            after = submit(engine)
            assert len((await asyncio.wait_for(after.wait(), PATIENCE)).tokens) == 5 and engine.idle
        else:
            with pytest.raises(EngineFailed):
                submit(engine)
        engine.close()
        return found, alive

    return asyncio.run(ask())


def test_engine_failure_is_not_reported_as_a_job_error(decoder, monkeypatch):
    """Neither running nor waiting jobs get a ValueError, which would blame the client."""

    def broken():
        raise ValueError("concatenate nothing")

    monkeypatch.setattr(decoder, "step", broken)
    found, error = outcomes(decoder, lambda engine: [submit(engine) for _ in range(3)], max_num_seqs=1)
    for one in (*found, error):
        assert isinstance(one, EngineFailed) and not isinstance(one, ValueError)
        assert isinstance(one.__cause__, ValueError) and str(one) == (
            "the engine failed with ValueError: concatenate nothing"
        )


def test_rejected_job_gets_its_own_error_if_the_step_then_fails(decoder, monkeypatch):
    def broken():
        raise ZeroDivisionError

    monkeypatch.setattr(decoder, "step", broken)
    (refused, other), error = outcomes(decoder, lambda engine: [submit(engine, prompt=[]), submit(engine)])
    assert isinstance(refused, ValueError) and "no tokens" in str(refused)
    assert isinstance(other, EngineFailed) and isinstance(error, EngineFailed)


def test_jobs_that_cannot_start_fail_alone(decoder, monkeypatch):
    add_request = decoder.add_request

    def add_or_raise(prompt, *arguments, **options):
        if 7 in prompt:
            raise OverflowError("seven")
        return add_request(prompt, *arguments, **options)

    monkeypatch.setattr(decoder, "add_request", add_or_raise)
    prompts = [(1, 2), (), (7, 7), (9999,), (3, 4)]
    found, error = outcomes(decoder, lambda engine: [submit(engine, prompt=prompt) for prompt in prompts])
    assert error is None
    assert [type(one) for one in found[1:4]] == [ValueError, OverflowError, ValueError]
    assert len(found[0].tokens) == len(found[4].tokens) == 5


def test_job_larger_than_the_cache_is_rejected(main):
    small = BatchModel(main, 128)
    small.pool.reserve(200)
    decoder = BatchDecoder(small, None, BatchDraftLength(*(LatencyCurve({1: 1.0}),) * 3), Tokenizer(str(MAIN)))
    found, error = outcomes(decoder, lambda engine: [submit(engine, 100), submit(engine)])
    assert isinstance(found[0], OutOfBlocks) and len(found[1].tokens) == 5 and error is None


def test_jobs_wait_for_free_cache_blocks(decoder):
    """The cache has room for two of them."""
    found, error = outcomes(decoder, lambda engine: [submit(engine, 120) for _ in range(5)])
    assert [len(one.tokens) for one in found] == [120] * 5 and error is None


def test_job_moving_into_the_batch_still_occupies_a_slot(decoder, monkeypatch):
    """The job has left the queue and is not in the batch yet."""
    add_request, step = decoder.add_request, decoder.step
    entering, entered, checked = (threading.Event() for _ in range(3))

    def slow(*arguments, **options):
        entering.set()
        entered.wait(0.2)  # the queue is checked now
        return add_request(*arguments, **options)

    monkeypatch.setattr(decoder, "add_request", slow)
    # The job keeps its place until then: the thread that checks may be the last to get the lock.
    monkeypatch.setattr(decoder, "step", lambda: step() if checked.wait(PATIENCE) else [])

    async def ask():
        engine = Engine(decoder, max_num_seqs=1, max_queue=0)
        job = submit(engine)
        assert await asyncio.to_thread(entering.wait, PATIENCE)
        with pytest.raises(QueueFull):
            engine.check_queue()
        entered.set()
        checked.set()
        assert len((await asyncio.wait_for(job.wait(), PATIENCE)).tokens) == 5
        engine.close()

    asyncio.run(ask())


@pytest.mark.parametrize("place", ["verify", "add_step", "end"], ids=["verifying", "decoding text", "finishing"])
@pytest.mark.parametrize("others", [0, 2])
def test_failing_job_in_batch_ends_with_its_error(place, others, decoder, monkeypatch):
    """A failure at any point, even in the last action for a job, ends it at once, not at its time limit."""
    add_request, broken = decoder.add_request, []

    def fail(*arguments):
        raise OverflowError(place)

    def add_failing_request(prompt, *arguments, **options):
        request = add_request(prompt, *arguments, **options)
        if 7 in prompt:
            monkeypatch.setattr(request.sequence if place == "verify" else request.output, place, fail)
            broken.append(request)
        return request

    monkeypatch.setattr(decoder, "add_request", add_failing_request)
    prompts = [(7, 1), *[(i, 2) for i in range(others)]]
    found, error = outcomes(decoder, lambda engine: [submit(engine, prompt=prompt) for prompt in prompts])
    assert error is None and isinstance(found[0], OverflowError) and broken[0].error is found[0]
    assert [len(one.tokens) for one in found[1:]] == [5] * others


def test_num_drafts_counts_only_iterations_with_draft_tokens():
    """As in vLLM. The adaptive draft length often drafts nothing, and prefill is not an iteration."""
    names = ("prompt_tokens", "cached_tokens", "generated", "decoded", "iterations", "drafts", "proposed", "accepted")
    counts = SimpleNamespace(**dict.fromkeys(names, 0))
    steps = [([5], 0, 0), ([6], 0, 0), ([7, 8, 9], 2, 4), ([10], 0, 3), ([], 0, 2)]
    for number, step in enumerate(steps):
        result = SimpleNamespace(gained=[len(tokens) for tokens, _, _ in steps[1 : number + 1]])
        request = SimpleNamespace(result=result, sequence=SimpleNamespace(num_prompt_tokens=8), cached_tokens=3)
        Engine._count_tokens(counts, SimpleNamespace(step=step, request=request))
    assert tuple(vars(counts).values()) == (8, 3, 6, 5, 3, 2, 7, 2)


def test_decoding_thread_ends_when_engine_closes(decoder):
    before = {*threading.enumerate()}
    outcomes(decoder, lambda engine: [submit(engine)])
    assert {*threading.enumerate()} <= before


def test_first_chunk_is_sent_at_once_and_later_text_is_grouped():
    async def ask():
        loop, job = asyncio.get_running_loop(), GenerationHandle(np.array([1]), config(), None)
        assert job.take_text() == ""  # as readers do before there is any text
        job.append_output("one", 0.0)
        assert job._pending_wakeup.when() <= loop.time()
        read = loop.time()
        assert job.take_text() == "one"
        job.append_output("two", 0.0)
        pending = job._pending_wakeup
        job.append_output(" three", 0.0)
        assert pending is job._pending_wakeup and pending.when() >= read + PIECE_INTERVAL
        assert job.take_text() == "two three"

    asyncio.run(ask())
