"""The thread that decodes: it steps one `BatchDecoder`, and the event loop never waits for an inference.

    engine = Engine(decoder, max_running=16, max_waiting=64)
    job = engine.submit(tokens, config, seed, seconds=600)  # in the event loop; raises QueueFull
    async for text in job.pieces(): ...
    job.generation

Jobs wait, first come first served, until there is a place in the batch and room in the cache. What a step gains for
all of them reaches the event loop in one call, however many they are; a job whose reader is slow keeps its text, and
holds up nobody.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

import numpy as np
from openvino_genai import GenerationConfig

from speculative.batch_decoder import BatchDecoder, Request, RequestOutput
from speculative.sequence.result import GenerationResult

SENT_TOGETHER = 0.04  # seconds of text in a piece after the first: what a piece costs on its way is paid less often


class QueueFull(Exception):
    """As many jobs wait as may; `seconds` is when to try again."""

    def __init__(self, seconds: int):
        super().__init__(f"the queue is full; a place is expected in {seconds} s")
        self.seconds = seconds


class Expired(Exception):
    """A job's time was over before it ended."""


class EngineFailed(RuntimeError):
    """The engine broke, by no job's fault, and decodes nothing any more; `__cause__` is what broke it."""

    def __init__(self, cause: Exception):
        super().__init__(f"the engine failed with {type(cause).__name__}: {cause}")
        self.__cause__ = cause


class Job:
    """A request on its way: waiting, then in the batch, then finished. Made and read in the event loop."""

    def __init__(self, prompt: np.ndarray, config: GenerationConfig, seed: int | None):
        self.prompt, self.config, self.seed = prompt, config, seed
        self.request: Request | None = None  # once it is in the batch
        self.finished = False
        self.expiry: asyncio.TimerHandle  # of its time; set when it is submitted
        self.error: Exception | None = None  # what ended it before its time
        self.salt = b""  # of the prefix cache
        self.submitted = time.perf_counter()
        self.first_at = self.last_at = 0.0  # when tokens came
        self._text: list[str] = []  # that nobody has read
        self._loop = asyncio.get_running_loop()
        self._news, self._end = asyncio.Event(), asyncio.Event()
        self._read_at = 0.0
        self._told: asyncio.TimerHandle | None = None  # when the reader will be

    @property
    def generation(self) -> GenerationResult:
        return self.request.generation

    async def pieces(self) -> AsyncIterator[str]:
        """The text as it comes. Raises what ended it before its time."""
        while not self.finished:
            await self._news.wait()
            self._news.clear()
            self._told, self._read_at = None, self._loop.time()
            if piece := self._take():
                yield piece
        if piece := self._take():
            yield piece
        if self.error:
            raise self.error

    async def end(self) -> GenerationResult:
        """The whole of it. Raises what ended it before its time."""
        await self._end.wait()
        if self.error:
            raise self.error
        return self.generation

    def gain(self, text: str, at: float) -> None:
        self.first_at, self.last_at = self.first_at or at, at
        if text:
            self._text.append(text)
            self._told = self._told or self._loop.call_at(self._read_at + SENT_TOGETHER, self._news.set)

    def finish(self, error: Exception | None) -> None:
        self.error, self.finished = error, True
        self._news.set()
        self._end.set()

    def _take(self) -> str:
        text = "".join(self._text)
        self._text.clear()
        return text


News = tuple[Job, str, bool, Exception | None]  # what came for it: text, whether that is all, what went wrong


class Engine:
    """Jobs and the thread that runs them. Once it has broken, `error` is set and nothing is decoded any more."""

    def __init__(self, decoder: BatchDecoder, max_running: int, max_waiting: int):
        """To be made in the event loop that submits."""
        self.decoder = decoder
        self.max_running, self.max_waiting = max_running, max_waiting
        self.error: EngineFailed | None = None
        self.stepping_since = 0.0  # when the inference began that is under way; 0: none is
        self.generated = 0  # tokens, so far
        self.decoded = self.iterations = self.proposed = self.accepted = 0  # behind the prompts' inferences
        self._waiting: deque[Job] = deque()
        self._running: dict[Request, Job] = {}
        self._usual_seconds = 1.0  # a job in the batch, lately
        self._changed = threading.Condition()
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
    def idle(self) -> bool:
        return not self._waiting and not self._running

    def check_queue(self, coming: int = 0) -> None:
        """Raises QueueFull where no place is left behind `coming` jobs that are not submitted yet."""
        if self.waiting + coming >= self.max_waiting + max(self.max_running - self.running, 0):
            raise QueueFull(self._seconds_to_place())

    def submit(
        self, prompt: np.ndarray, config: GenerationConfig, seed: int | None, seconds: float, salt: bytes = b""
    ) -> Job:
        """A job that has so many seconds from now on, and shares cached prompts with others of the same `salt`.
        Raises QueueFull, and EngineFailed if the engine has broken."""
        if self.error:
            raise self.error
        self.check_queue()
        job = Job(prompt, config, seed)
        job.salt = salt
        job.expiry = self._loop.call_later(seconds, self._expire, job)
        with self._changed:
            self._waiting.append(job)
            self._changed.notify()
        return job

    def cancel(self, job: Job) -> None:
        """Let it leave: nobody wants it any more. One that is finished stays as it is, and is forgotten."""
        job.expiry.cancel()  # or the loop would hold it until then
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)
            elif job.request:
                self.decoder.cancel(job.request)
            self._changed.notify()

    def _expire(self, job: Job) -> None:
        if not job.finished:
            self.cancel(job)
            job.finish(Expired())

    def close(self) -> None:
        """End the thread after the step that is under way."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._wait():
                self._step()
        except Exception as error:  # whatever it is: the replica is to be replaced
            self.error = EngineFailed(error)
            self._tell(self._break)

    def _wait(self) -> bool:
        """Until there is something to do; False where that is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting or self._running)
            return not self._closed

    def _step(self) -> None:
        with self._changed:
            refused = self._admit()
        if refused:  # before the step, which may raise
            self._tell(self._deliver, refused, time.perf_counter())
        self.stepping_since = time.monotonic()
        gains = self.decoder.step()
        self.stepping_since = 0.0
        news = []
        for gain in gains:
            self._count(gain)
            job, finished = self._running.get(gain.request), gain.request.finished
            if job:  # of one that was cancelled in mid-step there are two gains, both finished
                news.append((job, gain.text, finished, gain.request.error))
            if finished:
                self._running.pop(gain.request, None)
        if news:
            self._tell(self._deliver, news, time.perf_counter())

    def _admit(self) -> list[News]:
        """Put jobs that wait into the batch, in their order; tells of those that it will not have."""
        refused = []
        while self._waiting and len(self._running) < self.max_running:
            job = self._waiting[0]
            if self._running and not self.decoder.has_room(len(job.prompt) + job.config.max_new_tokens):
                break
            self._waiting.popleft()
            try:
                job.request = self.decoder.add(job.prompt, job.config, job.seed, stream=True, salt=job.salt)
                self._running[job.request] = job
            except Exception as error:  # this job's own
                refused.append((job, "", True, error))
        return refused

    def _count(self, gain: RequestOutput) -> None:
        tokens, accepted, proposed = gain.step
        self.generated += len(tokens)
        if tokens and gain.request.generation.gained:  # not the prompt's inference
            self.decoded += len(tokens)
            self.iterations += 1
            self.accepted += accepted
            self.proposed += proposed

    def _tell(self, act: Callable, *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(act, *arguments)
        except RuntimeError:  # the loop has ended, and with it everybody who would listen
            self._closed = True

    def _deliver(self, news: list[News], at: float) -> None:
        for job, text, finished, error in news:
            if job.finished:  # its time was over
                continue
            if not error:
                job.gain(text, at)
            if finished:
                self._usual_seconds += 0.1 * (at - job.submitted - self._usual_seconds)
                job.finish(error)

    def _break(self) -> None:
        with self._changed:
            jobs = [*self._running.values(), *self._waiting]
            self._running.clear()
            self._waiting.clear()
        for job in jobs:
            job.finish(self.error)

    def _seconds_to_place(self) -> int:
        return int(min(max(self._usual_seconds / self.max_running, 1), 60))
