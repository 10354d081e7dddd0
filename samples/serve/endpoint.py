"""The HTTP application around one engine: OpenAI's paths, its errors, its streams.

Whatever ends a request early, a client that is gone, the time limit, gives its place in the batch to others.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from openvino_genai import GenerationConfig
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import Receive, Scope, Send

from samples.serve.engine_thread import Engine, Expired, Job, QueueFull
from samples.serve.guard import Guard
from samples.serve.limits import Limits
from samples.serve.metrics import Metrics
from samples.serve.openai_schema import (
    Answer,
    ApiError,
    Asked,
    ChatAsked,
    CompletionAsked,
    model_card,
    usage,
)

FIXED_DRAFT = (
    4  # tokens drafted for a sampled request with a seed: what pays changes with the clock, and the text would
)


class Endpoint:
    """Answers requests to the model called `name` by `engine`."""

    def __init__(self, name: str, engine: Engine, limits: Limits, metrics: Metrics, draft_length: int | float = 0):
        """`draft_length`: tokens drafted for each inference; below 1 the confidence to stop at; 0: as many as pay."""
        self.name, self.engine, self.limits, self.metrics = name, engine, limits, metrics
        self.draft_length = draft_length
        self.draining = False
        self.asking = 0  # requests that are not answered yet
        self._created = int(time.time())

    async def drain(self, seconds: float) -> int:
        """Take nothing more, and wait until all is answered; returns how many requests are not, after `seconds`."""
        self.draining = True
        until = time.monotonic() + seconds
        while self.asking and time.monotonic() < until:
            await asyncio.sleep(0.05)
        return self.asking

    def application(self, key: bytes | None) -> FastAPI:
        """`key`: the digest that `guard.digest` makes of the API key, or None."""
        app = FastAPI(title="A speculative pair", docs_url=None, redoc_url=None)
        app.add_middleware(Guard, key=key, max_body=self.limits.max_body, refused=self.metrics.refused)
        for kind, answer in (
            (StarletteHTTPException, self._refuse),
            (RequestValidationError, self._refuse_body),
            (Exception, self._fail),
        ):
            app.add_exception_handler(kind, answer)
        app.get("/health")(self.health)
        app.get("/v1/models")(self.models)
        app.get("/v1/models/{name:path}")(self.model)
        app.post("/v1/chat/completions")(self.chat)
        app.post("/v1/completions")(self.complete)
        return app

    # ---- paths ------------------------------------------------------------------------------------------------------

    async def health(self) -> dict:
        self._check_open()
        if self.engine.error:
            raise self._as_answer(self.engine.error)
        return {"status": "ok", "running": self.engine.running, "waiting": self.engine.waiting}

    async def models(self) -> dict:
        return {"object": "list", "data": [model_card(self.name, self._created)]}

    async def model(self, name: str) -> dict:
        self._check_model(name)
        return model_card(self.name, self._created)

    async def chat(self, asked: ChatAsked) -> Response:
        if not self.engine.decoder.tokenizer.chat_template:
            raise ApiError(400, f"The model {self.name} has no chat template: ask at /v1/completions.")
        return await self._answer(asked)

    async def complete(self, asked: CompletionAsked) -> Response:
        return await self._answer(asked)

    # ---- answers ----------------------------------------------------------------------------------------------------

    async def _answer(self, asked: Asked) -> Response:
        self._check_open()
        self._check_model(asked.model)
        prompt = await asyncio.to_thread(self._encode, asked)
        config = asked.config(self._room(asked, len(prompt)))
        self._set_draft_length(config, asked)
        try:
            job = self.engine.submit(prompt, config, asked.random_seed, self.limits.timeout)
        except QueueFull as full:
            message = f"All {self.limits.max_waiting} places in the queue are taken: try again in {full.seconds} s."
            raise ApiError(429, message, "queue_full", retry_after=full.seconds) from None
        answer = Answer(asked, self.name)
        if asked.stream:  # nothing is awaited between `submit` and the stream, which sees to the job's end
            return EventStream(self._until_over(job), lambda: self._events(job, answer))
        with self._until_over(job):
            generation = await job.end()
            return JSONResponse(answer.whole(generation, usage(len(job.prompt), generation, job.request.cached_tokens)))

    async def _events(self, job: Job, answer: Answer) -> AsyncIterator[bytes]:
        if head := answer.begin():
            yield head
        try:
            async for text in job.pieces():
                yield answer.piece(text)
            yield answer.end(
                job.generation.finish_reason, usage(len(job.prompt), job.generation, job.request.cached_tokens)
            )
        except Exception as error:
            yield answer.broken(self._as_answer(error))
            raise _Said from error

    @contextmanager
    def _until_over(self, job: Job) -> Iterator[None]:
        """While a request is answered; however that ends, its place in the batch is free afterwards."""
        self.asking += 1
        outcome = "disconnected"
        try:
            yield
            outcome = job.generation.finish_reason
        except Exception as error:
            answer = self._as_answer(error.__cause__ if isinstance(error, _Said) else error)
            outcome = answer.body["error"]["code"]
            if not isinstance(error, _Said):
                raise answer from error
        finally:
            self.asking -= 1
            self.engine.cancel(job)
            self.metrics.over(job, outcome)

    def _as_answer(self, error: Exception) -> ApiError:
        if isinstance(error, Expired):
            message = f"The request took longer than the {self.limits.timeout:g} s a request may take here."
            return ApiError(504, message, "timeout")
        if isinstance(error, ValueError):
            return ApiError(400, f"The request cannot be decoded: {one_line(error)}", "invalid_request")
        return ApiError(500, f"Decoding failed: {one_line(error)}", "decoding_failed")

    # ---- checks -----------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.draining:
            raise ApiError(503, "The server is shutting down.", "draining", retry_after=5)

    def _check_model(self, name: str) -> None:
        if name != self.name:
            message = f"There is no model {name!r} here, only {self.name!r}."
            raise ApiError(404, message, "model_not_found", "model")

    def _encode(self, asked: Asked) -> np.ndarray:
        try:
            return self.engine.decoder.encode(asked.prompt, asked.config(1))
        except (ValueError, RuntimeError, OverflowError) as error:
            message = f"The prompt cannot be encoded: {one_line(error)}"
            raise ApiError(400, message, "invalid_prompt") from None

    def _room(self, asked: Asked, prompt: int) -> int:
        """Tokens that may follow a prompt of so many: as many as are asked for, or else as many as the limits allow."""
        limits, context = self.limits, self.engine.decoder.main.context
        where = "messages" if isinstance(asked, ChatAsked) else "prompt"
        if prompt > min(limits.max_prompt_tokens, context - 1):
            message = f"The prompt has {prompt} tokens, and may have {min(limits.max_prompt_tokens, context - 1)} here."
            raise ApiError(400, message, "context_length_exceeded", where)
        wanted = asked.wanted_tokens
        if wanted is None:
            return min(limits.max_output_tokens, context - prompt)
        if wanted > limits.max_output_tokens:
            message = f"max_tokens is {wanted}, and may be {limits.max_output_tokens} here."
            raise ApiError(400, message, "max_tokens_exceeded", "max_tokens")
        if prompt + wanted > context:
            message = (
                f"The prompt has {prompt} tokens, max_tokens is {wanted}, and the context has room for {context}: "
                f"shorten the prompt, or ask for {context - prompt} tokens."
            )
            raise ApiError(400, message, "context_length_exceeded", where)
        return wanted

    def _set_draft_length(self, config: GenerationConfig, asked: Asked) -> None:
        length = self.draft_length
        if not length and config.do_sample and asked.seed is not None:
            length = FIXED_DRAFT
        if isinstance(length, float):
            config.assistant_confidence_threshold = length
        else:
            config.num_assistant_tokens = length

    # ---- errors -----------------------------------------------------------------------------------------------------

    async def _refuse(self, request: Request, error: HTTPException) -> Response:
        if not isinstance(error, ApiError):
            headers = error.headers
            error = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}.")
            error.headers = headers
        self.metrics.refused(error.status_code)
        return error.response()

    async def _refuse_body(self, request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"][1:])
        message = f"{place or 'The body'}: {first['msg'].removeprefix('Value error, ')}."
        return await self._refuse(request, ApiError(400, message, "invalid_request", place or None))

    async def _fail(self, request: Request, error: Exception) -> Response:
        return await self._refuse(request, ApiError(500, "The server failed at this request.", "internal_error"))


class _Said(Exception):
    """The client was told in the stream; `__cause__` is what happened."""


class EventStream(Response):
    """Server-sent events as they come, inside a context that ends with the last of them, or with the client."""

    media_type = "text/event-stream"

    def __init__(self, context: AbstractContextManager, events: Callable[[], AsyncIterator[bytes]]):
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._context, self._events = context, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._context:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in self._events():
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def one_line(error: Exception) -> str:
    """An error of the engine without its source locations."""
    lines = (line.strip() for line in str(error).splitlines())
    return " ".join(line for line in lines if line and not line.startswith(("Exception from", "Check '")))
