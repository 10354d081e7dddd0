"""Decoding thread: steps one `BatchDecoder`, so that the event loop never waits for a forward pass.

    engine = Engine(decoder, max_num_seqs=16, max_queue=64)
    job = engine.submit(tokens, config, seed, seconds=600)  # in the event loop; raises QueueFull
    async for text in job.pieces(): ...
    job.result

Jobs wait, first come first served, for a slot in the batch and room in the KV cache. The results of a step reach the
event loop in one call, for any number of jobs. The text of a job with a slow reader is buffered and delays no others.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import numpy as np
from openvino_genai import GenerationConfig

from speculative.batch_decoder import BatchDecoder, Request, RequestOutput
from speculative.sampling.grammar import Grammar
from speculative.sequence.detokenizer import CONTEXT_TOKENS
from speculative.sequence.result import GenerationResult

PIECE_INTERVAL = 0.04  # seconds of text per piece after the first, to reduce the overhead per piece


class QueueFull(Exception):
    """The queue is full; retry after `seconds`."""

    def __init__(self, seconds: int):
        super().__init__(f"the queue is full; a slot is expected in {seconds} s")
        self.seconds = seconds


class Expired(Exception):
    """A job exceeded its time limit."""


class EngineFailed(RuntimeError):
    """The engine failed, not because of a job, and no longer decodes; `__cause__` is the original error."""

    def __init__(self, cause: Exception):
        super().__init__(f"the engine failed with {type(cause).__name__}: {cause}")
        self.__cause__ = cause


class GenerationHandle:
    """A request: waiting, then in the batch, then finished. Created and read in the event loop."""

    def __init__(self, prompt: np.ndarray, config: GenerationConfig, seed: int | None):
        self.prompt, self.config, self.seed = prompt, config, seed
        self.request: Request | None = None  # once it is in the batch
        self.finished = False
        self.timeout_handle: asyncio.TimerHandle  # set on submission
        self.error: Exception | None = None  # the error that ended it early
        self.salt = b""  # prefix-cache salt
        self.logit_bias: Mapping[int, float] | None = None
        self.prompt_logprobs = 0
        self.waits_for: GenerationHandle | None = None  # has the same prompt, whose log-probabilities it computes
        self.continues = False  # whether the text continues that of the prompt
        self.grammar: Grammar | None = None  # referenced here so that it stays compiled
        self.submitted = time.perf_counter()
        self.admitted = 0.0  # when it got its slot in the batch
        self.first_token_time = self.last_token_time = 0.0  # 0: no token yet
        self._text: list[str] = []  # unread text
        self._loop = asyncio.get_running_loop()
        self._wakeup, self._ended = asyncio.Event(), asyncio.Event()
        self._last_read = 0.0  # time of the loop
        self._pending_wakeup: asyncio.TimerHandle | None = None  # the scheduled call of `_wakeup.set`

    @property
    def context(self) -> list[int]:
        """The last tokens of the prompt, which detokenization needs, if the text continues that of the prompt."""
        return self.prompt[-CONTEXT_TOKENS:].tolist() if self.continues else []

    @property
    def result(self) -> GenerationResult:
        assert self.request is not None  # it has been in the batch
        return self.request.result

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens taken from the prefix cache."""
        return self.request.cached_tokens if self.request else 0

    @property
    def can_begin(self) -> bool:
        """Whether the text may be read: log-probabilities of the prompt, if asked for, are known."""
        first = self.waits_for
        return not first or (bool(first.request) and len(first.result.prompt_logprobs) >= len(first.prompt) - 1)

    async def pieces(self) -> AsyncIterator[str]:
        """The text as it is generated. Raises the error that ended the job early."""
        async for _, text in pieces([self]):
            if text is not None:
                yield text

    async def wait(self) -> GenerationResult:
        """The complete result. Raises the error that ended the job early."""
        await self._ended.wait()
        if self.error:
            raise self.error
        return self.result

    def append_output(self, text: str, now: float) -> None:
        """Add the text of a step's output, and wake the reader at most once per `PIECE_INTERVAL`."""
        self.first_token_time, self.last_token_time = self.first_token_time or now, now
        if text:
            self._text.append(text)
            if not self._pending_wakeup:
                self._pending_wakeup = self._loop.call_at(self._last_read + PIECE_INTERVAL, self._wakeup.set)

    def finish(self, error: Exception | None) -> None:
        self.error, self.finished = error, True
        self._wakeup.set()
        self._ended.set()

    def use_wakeup_event(self, wakeup: asyncio.Event) -> None:
        """Set `wakeup`, instead of the handle's own event, when text arrives or the job ends."""
        self._wakeup = wakeup

    def take_text(self) -> str:
        """Return and clear the unread text."""
        self._pending_wakeup = None
        text = "".join(self._text)
        if text:  # the first piece is sent at once
            self._last_read = self._loop.time()
        self._text.clear()
        return text


async def pieces(jobs: Sequence[GenerationHandle]) -> AsyncIterator[tuple[int, str | None]]:
    """The texts of `jobs` as they are generated: pairs of job index and piece, with None after a job's last piece.

    Raises the first error that ends a job early."""
    wakeup = asyncio.Event()
    wakeup.set()
    for job in jobs:
        job.use_wakeup_event(wakeup)
    running = dict(enumerate(jobs))
    while running:
        await wakeup.wait()
        wakeup.clear()
        for i, job in list(running.items()):
            if not job.can_begin:  # the other job's first text, or its end, wakes this
                continue
            finished = job.finished
            if text := job.take_text():
                yield i, text
            if finished:
                if job.error:
                    raise job.error
                del running[i]
                yield i, None


Update = tuple[GenerationHandle, str, bool, Exception | None]  # new text, whether the job is finished, error


class Engine:
    """The jobs and the thread that runs them. After a failure, `error` is set and decoding stops."""

    def __init__(self, decoder: BatchDecoder, max_num_seqs: int, max_queue: int):
        """Create in the event loop that submits jobs."""
        self.decoder = decoder
        self.max_num_seqs, self.max_queue = max_num_seqs, max_queue
        self.error: EngineFailed | None = None
        self.stepping_since = 0.0  # start of the current step; 0: none
        self.prompt_tokens = self.cached_tokens = 0  # total, and those of them from the prefix cache
        self.generated = 0  # tokens
        self.decoded = self.iterations = 0  # tokens and iterations after each prompt's forward pass
        self.drafts = self.proposed = self.accepted = 0
        self._waiting: deque[GenerationHandle] = deque()
        self._running: dict[Request, GenerationHandle] = {}
        self._mean_seconds = 1.0  # recent average duration of a job
        self._condition = threading.Condition()
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def cache_usage(self) -> float:
        """The share of the main model's KV-cache blocks that running requests use."""
        pool = self.decoder.main.pool
        return 1 - pool.free / pool.blocks

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running

    def check_queue(self, jobs: int = 1) -> None:
        """Raise QueueFull if the queue has no room for `jobs` more."""
        with self._condition:  # a job on its way into the batch is in neither collection
            room = self.max_queue + max(self.max_num_seqs - self.running, 0) - self.waiting
        if jobs > room:
            raise QueueFull(self._expected_wait())

    def submit(
        self,
        prompt: np.ndarray,
        config: GenerationConfig,
        seed: int | None,
        seconds: float,
        salt: bytes = b"",
        logit_bias: Mapping[int, float] | None = None,
        prompt_logprobs: int = 0,
        continues: bool = False,
    ) -> GenerationHandle:
        """Submit a job with a time limit of `seconds`; the other arguments are those of `BatchDecoder.add_request`.
        Raises QueueFull, or EngineFailed if the engine has failed."""
        if self.error:
            raise self.error
        self.check_queue()
        job = GenerationHandle(prompt, config, seed)
        job.salt, job.logit_bias, job.prompt_logprobs, job.continues = salt, logit_bias, prompt_logprobs, continues
        job.timeout_handle = self._loop.call_later(seconds, self._expire, job)
        with self._condition:
            self._waiting.append(job)
            self._condition.notify()
        return job

    def cancel(self, job: GenerationHandle) -> None:
        """Cancel a job. A finished job is not changed."""
        job.timeout_handle.cancel()  # otherwise the loop references the job until the timeout
        with self._condition:
            if job in self._waiting:
                self._waiting.remove(job)
            elif job.request:
                self.decoder.cancel(job.request)
            self._condition.notify()

    def _expire(self, job: GenerationHandle) -> None:
        if not job.finished:
            self.cancel(job)
            job.finish(Expired())

    def close(self) -> None:
        """Stop the thread after the current step."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._wait():
                self._step()
        except Exception as error:  # any error: the replica must be replaced
            self.error = EngineFailed(error)
            self._call_in_loop(self._fail_jobs)

    def _wait(self) -> bool:
        """Wait for work; returns False when the engine is closed."""
        with self._condition:
            self._condition.wait_for(lambda: self._closed or self._waiting or self._running)
            return not self._closed

    def _step(self) -> None:
        with self._condition:
            rejected = self._admit()
        if rejected:  # before the step, which may raise
            self._call_in_loop(self._deliver, rejected, time.perf_counter())
        self.stepping_since = time.monotonic()
        outputs = self.decoder.step()
        self.stepping_since = 0.0
        updates = []
        for output in outputs:
            self._count_tokens(output)
            job, finished = self._running.get(output.request), output.request.finished
            if job:  # a job cancelled during a step has two outputs, both finished
                updates.append((job, output.text, finished, output.request.error))
            if finished:
                self._running.pop(output.request, None)
        if updates:
            self._call_in_loop(self._deliver, updates, time.perf_counter())

    def _admit(self) -> list[Update]:
        """Move waiting jobs into the batch in order; returns those that the decoder rejects."""
        rejected: list[Update] = []
        while self._waiting and len(self._running) < self.max_num_seqs:
            job = self._waiting[0]
            if self._running and not self.decoder.has_room(len(job.prompt) + job.config.max_new_tokens):
                break
            self._waiting.popleft()
            try:
                job.request = self.decoder.add_request(
                    job.prompt, job.config, job.seed, True, job.salt, job.logit_bias, job.prompt_logprobs,
                    job.continues, hides_stop_token=True,
                )  # fmt: skip
                job.admitted = time.perf_counter()
                self._running[job.request] = job
            except Exception as error:  # caused by this job
                rejected.append((job, "", True, error))
        return rejected

    def _count_tokens(self, output: RequestOutput) -> None:
        tokens, accepted, proposed = output.step[:3]
        self.generated += len(tokens)
        if tokens and not output.request.result.gained:  # the prompt's forward pass
            self.prompt_tokens += output.request.sequence.num_prompt_tokens
            self.cached_tokens += output.request.cached_tokens
        elif tokens:
            self.decoded += len(tokens)
            self.iterations += 1
            self.drafts += proposed > 0
            self.accepted += accepted
            self.proposed += proposed

    def _call_in_loop(self, callback: Callable, *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:  # the loop has ended, and all readers with it
            self._closed = True

    def _deliver(self, updates: list[Update], now: float) -> None:
        for job, text, finished, error in updates:
            if job.finished:  # timed out
                continue
            if not error:
                job.append_output(text, now)
            if finished:
                self._mean_seconds += 0.1 * (now - job.submitted - self._mean_seconds)
                job.finish(error)

    def _fail_jobs(self) -> None:
        with self._condition:
            jobs = [*self._running.values(), *self._waiting]
            self._running.clear()
            self._waiting.clear()
        for job in jobs:
            job.finish(self.error)

    def _expected_wait(self) -> int:
        return int(min(max(self._mean_seconds / self.max_num_seqs, 1), 60))
