"""HTTP application around one engine: the OpenAI API's paths, errors and streams.

A request whose client disconnects or whose time limit passes frees its slot in the batch.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from openvino_genai import GenerationConfig
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from speculative.batch_decoder import BatchDecoder
from speculative.error_text import engine_lines
from speculative.models.block_pool import OutOfBlocks
from speculative.sampling.grammar import Grammar
from speculative.sequence.prompt import TextTooLong
from speculative.serving.api import tokenization
from speculative.serving.api.base_request import BaseRequest
from speculative.serving.api.chat_completions import ChatCompletionRequest
from speculative.serving.api.completions import CompletionRequest
from speculative.serving.api.errors import ApiError, described, shown, too_long
from speculative.serving.api.logprobs import TokenTexts
from speculative.serving.api.response_events import ResponsesBuilder
from speculative.serving.api.responses import ResponseBuilder, model_card
from speculative.serving.api.responses_api import ResponsesRequest
from speculative.serving.api.structured_output import Structure
from speculative.serving.api.token_sources import TokenSources
from speculative.serving.api.tokenization import DetokenizeRequest, TokenizeRequest
from speculative.serving.api.tool_calls import format_of
from speculative.serving.engine import health
from speculative.serving.engine.engine_thread import Engine, EngineFailed, Expired, GenerationHandle, QueueFull, pieces
from speculative.serving.engine.metrics import Metrics
from speculative.serving.http import openapi, request_body, request_limits
from speculative.serving.http.event_stream import AlreadySent, EventStream
from speculative.serving.http.middleware import Guard, salt
from speculative.serving.http.page import page
from speculative.serving.http.request_id import HEADER, RequestId
from speculative.serving.http.tracing import Traces
from speculative.serving.settings import Limits

RETRY = 10  # seconds in which Ray Serve usually replaces a broken replica
T = TypeVar("T")
AskedT = TypeVar("AskedT", TokenizeRequest, DetokenizeRequest)


class Stopped(Exception):
    """The server stopped before a request was complete."""


class Endpoint:
    """Serves the model called `name`, which `engine` decodes."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        limits: Limits,
        metrics: Metrics,
        draft_length: int | float = 0,
        traces: Traces | None = None,
    ):
        """`draft_length`: draft tokens per iteration; below 1, a confidence threshold; 0, adaptive."""
        self.name, self.engine, self.limits, self.metrics = name, engine, limits, metrics
        self.draft_length = draft_length
        self._traces = traces
        self.draining = self.stopped = False
        self.asking = 0  # requests without a complete response
        self.longest_prompt = request_limits.longest_prompt(limits, engine.decoder.main.context)
        tokenizer = engine.decoder.tokenizer
        self._tool_format = format_of(tokenizer.chat_template) if tokenizer and tokenizer.chat_template else None
        self._created = int(time.time())
        self._encoding = ThreadPoolExecutor(1, "encoding")  # one thread: chat templates are not known to be thread-safe
        self._token_texts: TokenTexts | None = None  # read when log-probabilities are asked for
        self._coming = 0  # choices of requests being encoded or waiting for it
        self._jobs: set[GenerationHandle] = set()

    async def drain(self, seconds: float) -> int:
        """Reject new requests, wait up to `seconds` for running ones, cancel the rest, and return their number."""
        self.draining = True
        until = time.monotonic() + seconds
        while self.asking and time.monotonic() < until:
            await asyncio.sleep(0.05)
        left, self.stopped = self.asking, True
        for job in self._jobs:
            if not job.finished:
                self.engine.cancel(job)
                job.finish(Stopped())
        return left

    def application(self, keys: frozenset[bytes] | None, cors_origins: Sequence[str] = ()) -> FastAPI:
        """Return the ASGI application. `keys`: digests of the API keys (`middleware.digest`); None: no key required.
        Pages of `cors_origins` may use it."""
        app = Application(cors_origins, title="A speculative pair", docs_url=None, redoc_url=None)
        app.router.route_class = request_body.route_of(self.longest_prompt)
        app.add_middleware(
            Guard,
            keys=keys,
            max_body=request_body.most_bytes(self.longest_prompt),
            limits=self.limits,
            refused=self.metrics.refused,
        )
        handlers: dict[type[Exception], Callable[[Request, Any], Awaitable[Response]]] = {
            StarletteHTTPException: self._refuse,
            RequestValidationError: self._refuse_body,
            Exception: self._fail,
        }
        for kind, answer in handlers.items():
            app.add_exception_handler(kind, answer)
        for method, path, handle in (
            ("GET", "/health", self.health),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{name:path}", self.model),
            ("POST", "/v1/chat/completions", self.chat),
            ("POST", "/v1/completions", self.complete),
            ("POST", "/v1/responses", self.respond),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/detokenize", self.detokenize),
        ):
            answers = openapi.answers(path, bool(keys))
            app.add_api_route(path, handle, methods=[method], response_model=None, responses=answers)
        app.add_api_route("/", page, include_in_schema=False)
        openapi.describe(app)
        return app

    # ---- paths ------------------------------------------------------------------------------------------------------

    async def health(self) -> dict:
        self._check_open()
        if trouble := self.trouble():
            raise ApiError(503, f"The engine is broken: {trouble}.", "engine_failed", retry_after=RETRY)
        return {"status": "ok", "running": self.engine.running, "waiting": self.engine.waiting}

    def trouble(self) -> str | None:
        """Return the reason for Ray Serve to replace this replica, or None."""
        return health.trouble(self.engine)

    async def models(self) -> dict:
        return {"object": "list", "data": [model_card(self.name, self._created, self.engine.decoder)]}

    async def model(self, name: str) -> dict:
        self._check_model(name)
        return model_card(self.name, self._created, self.engine.decoder)

    async def chat(self, asked: ChatCompletionRequest, request: Request) -> Response:
        self._check_chat_template()
        return await self._answer(asked, request)

    async def respond(self, asked: ResponsesRequest, request: Request) -> Response:
        self._check_chat_template()
        return await self._answer(asked.chat, request, asked)

    async def complete(self, asked: CompletionRequest, request: Request) -> Response:
        return await self._answer(asked, request)

    async def tokenize(self, asked: TokenizeRequest) -> dict:
        return await self._by_tokenizer(tokenization.tokenize, asked)

    async def detokenize(self, asked: DetokenizeRequest) -> dict:
        return await self._by_tokenizer(tokenization.detokenize, asked)

    # ---- answers ----------------------------------------------------------------------------------------------------

    async def _answer(
        self,
        asked: BaseRequest,
        request: Request,
        original: ResponsesRequest | None = None,
    ) -> Response:
        """Decode `asked` and build the response; in the format of `original`, if `asked` was made from it."""
        self._check_open()
        self._check_model(asked.model)
        if self.engine.error:
            raise self._as_answer(self.engine.error)
        request_limits.check_number(asked, self.limits)
        request_limits.check_tokens(asked, self.engine.decoder.main.vocab_size)
        request_limits.check_tools(asked, self._tool_format, self.name)
        self.asking += 1
        try:
            echoes = await self._in_encoding_thread(self._echoes, asked) if asked.repeated else []
            jobs = await self._submit(asked, salt(request.headers.get("authorization", ""), asked.prompt_cache_key))
        except BaseException:
            self.asking -= 1
            raise
        answer: ResponseBuilder | ResponsesBuilder
        if original and isinstance(asked, ChatCompletionRequest):
            answer = ResponsesBuilder(original, self.name, jobs, asked.parser(self._tool_format))
        else:
            sources = self._sources(asked, jobs)
            answer = ResponseBuilder(asked, self.name, jobs, self._token_texts, echoes, sources, self._tool_format)
        if asked.stream:  # nothing is awaited between `_submit` and the stream, which ends the jobs
            return EventStream(self._until_over(jobs, asked, request), lambda: self._events(jobs, answer))
        with self._until_over(jobs, asked, request):
            async for _ in pieces(jobs):
                pass
            if asked.top is None and asked.top_of_prompt is None:
                return JSONResponse(answer.whole())
            return await self._in_encoding_thread(lambda: JSONResponse(answer.whole()))

    def _sources(self, asked: BaseRequest, jobs: list[GenerationHandle]) -> list[TokenSources]:
        tokenizer = self.engine.decoder.tokenizer
        if not (tokenizer and asked.stream_options and asked.stream_options.include_draft_tokens):
            return []
        return [TokenSources(job, tokenizer.decode, self.engine.decoder.cleans_up) for job in jobs]

    async def _submit(self, asked: BaseRequest, salt: bytes) -> list[GenerationHandle]:
        """Encode the prompts and submit a job for each text. A full queue rejects the request before encoding."""
        jobs: list[GenerationHandle] = []
        try:
            self.engine.check_queue(self._coming + asked.all_texts)
            structure = asked.structure(self._tool_format)
            grammar = await self._compiled(structure) if structure else None
            prompts = await self._encoded(asked)
            if self.stopped:
                raise Stopped
            context = self.engine.decoder.main.context
            rooms = [request_limits.room(asked, len(prompt), self.limits, context) for prompt in prompts]
            configs = [asked.config(room) for room in rooms]
            if (least := asked.min_tokens or 0) > (most := min(config.max_new_tokens for config in configs)):
                message = f"min_tokens: is {least}, but at most {most} tokens are generated."
                raise ApiError(400, message, "invalid_request", "min_tokens")
            self.engine.check_queue(asked.all_texts)
            for prompt, config in zip(prompts, configs, strict=True):
                self._set_draft_length(config)
                self._set_stop_tokens(asked, config)
                if structure:
                    config.structured_output_config = structure.config
                    if structure.forces_calls:  # a stop string would cut them
                        config.stop_strings = set()
                for i in range(asked.texts):
                    seed, top = asked.random_seed(i), asked.top_of_prompt
                    of_prompt = max(top, 1) if top is not None and (asked.stream or i == 0) else 0
                    job = self.engine.submit(
                        prompt, config, seed, self.limits.timeout, salt, asked.logit_bias, of_prompt,
                        asked.continues_prompt,
                    )  # fmt: skip
                    job.grammar = grammar
                    jobs.append(job)
        except (QueueFull, EngineFailed, Stopped) as error:
            for job in jobs:
                self.engine.cancel(job)
            raise self._as_answer(error) from error
        return jobs

    async def _compiled(self, structure: Structure) -> Grammar:
        """The grammar of a request. It stays compiled for the decoder as long as it is referenced."""
        assert self.engine.decoder.grammars  # as there is a tokenizer
        try:
            compile = self.engine.decoder.grammars.compile
            return await asyncio.get_running_loop().run_in_executor(self._encoding, compile, structure.config)
        except ValueError as error:
            problem = str(error).partition(" is invalid: ")[2] or str(error)
            message = f"{structure.parameter}: is invalid or not supported: {problem}."
            raise ApiError(400, message, "invalid_request", structure.parameter) from None

    def _echoes(self, asked: BaseRequest) -> list[str]:
        """The echoed prompts."""
        tokenizer = self.engine.decoder.tokenizer
        assert tokenizer  # a server has one
        return [one if isinstance(one, str) else tokenizer.decode(one) for one in asked.repeated]

    async def _encoded(self, asked: BaseRequest) -> list[np.ndarray]:
        self._coming += asked.all_texts
        try:
            return await self._in_encoding_thread(self._encode, asked)
        finally:
            self._coming -= asked.all_texts

    async def _by_tokenizer(self, act: Callable[[BatchDecoder, AskedT], dict], asked: AskedT) -> dict:
        self._check_open()
        if asked.model is not None:
            self._check_model(asked.model)
        self.asking += 1
        try:
            return await self._in_encoding_thread(act, self.engine.decoder, asked)
        finally:
            self.asking -= 1

    async def _in_encoding_thread(self, act: Callable[..., T], *arguments: object) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._encoding, act, *arguments)
        except (ValueError, RuntimeError, OverflowError) as error:
            message = f"The prompt cannot be encoded: {' '.join(engine_lines(error))}"
            raise ApiError(400, message, "invalid_prompt") from None

    async def _events(
        self, jobs: list[GenerationHandle], answer: ResponseBuilder | ResponsesBuilder
    ) -> AsyncIterator[bytes]:
        if head := answer.begin():
            yield head
        try:
            async for index, text in pieces(jobs):
                if text is None:
                    yield answer.end_choice(index, jobs[index].result.finish_reason)
                elif events := answer.piece(index, text):
                    yield events
            yield answer.end()
        except Exception as error:
            yield answer.broken(self._as_answer(error))
            raise AlreadySent from error

    @contextmanager
    def _until_over(self, jobs: list[GenerationHandle], asked: BaseRequest, request: Request) -> Iterator[None]:
        """Context manager of a running request. Its end frees the slots in the batch and counts the outcomes."""
        self._jobs.update(jobs)
        outcome = "disconnected"
        try:
            yield
            outcome = ""  # each job has its own
        except Exception as error:
            answer = self._as_answer(error.__cause__ if isinstance(error, AlreadySent) else error)
            outcome = answer.body["error"]["code"] or "decoding_failed"
            if not isinstance(error, AlreadySent):
                answer.is_counted = True
                raise answer from error
        finally:
            self.asking -= 1
            self._jobs.difference_update(jobs)
            for job in jobs:
                self.engine.cancel(job)
                self.metrics.over(job, outcome or job.result.finish_reason)
            if self._traces:
                self._traces.over(asked, request.headers, jobs, outcome)

    def _as_answer(self, error: BaseException | None) -> ApiError:
        """Return the response to an error: 4xx for an invalid request, 503 if a retry helps, 500 for a defect."""
        if isinstance(error, QueueFull):
            message = f"The queue is full ({self.limits.max_queue} requests): retry in {error.seconds} s."
            return ApiError(429, message, "queue_full", retry_after=error.seconds)
        if isinstance(error, EngineFailed):
            message = "The engine failed, but not because of this request, and is being replaced: retry."
            return ApiError(503, message, "engine_failed", retry_after=RETRY)
        if isinstance(error, Stopped):
            message = "The server was stopped before the response was complete."
            return ApiError(503, message, "draining", retry_after=RETRY)
        if isinstance(error, Expired):
            message = f"The request exceeded the time limit of {self.limits.timeout:g} s."
            return ApiError(504, message, "timeout")
        if isinstance(error, ValueError | OutOfBlocks):
            return ApiError(400, f"The request cannot be decoded: {' '.join(engine_lines(error))}", "invalid_request")
        return ApiError(500, f"Decoding failed: {' '.join(engine_lines(error))}", "decoding_failed")

    # ---- checks -----------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.draining:
            raise ApiError(503, "The server is shutting down.", "draining", retry_after=5)

    def _check_chat_template(self) -> None:
        tokenizer = self.engine.decoder.tokenizer
        if not tokenizer or not tokenizer.chat_template:
            raise ApiError(400, f"The model {self.name} has no chat template: use /v1/completions.")

    def _check_model(self, name: str) -> None:
        if name != self.name:
            message = f"The model {shown(repr(name))} does not exist: use {self.name!r}."
            raise ApiError(404, message, "model_not_found", "model")

    def _encode(self, asked: BaseRequest) -> list[np.ndarray]:
        tokenizer = self.engine.decoder.tokenizer
        if not self._token_texts and (asked.top is not None or asked.top_of_prompt is not None):
            assert tokenizer  # a server has one
            self._token_texts = TokenTexts(tokenizer)
        try:
            return [self.engine.decoder.encode(prompt, asked.config(1)) for prompt in asked.prompts(self._tool_format)]
        except TextTooLong as error:
            raise too_long(error, asked.prompt_name) from None

    def _set_stop_tokens(self, asked: BaseRequest, config: GenerationConfig) -> None:
        """With `stop_token_ids`, `ignore_eos` ignores the model's own stop tokens only."""
        if asked.stop_token_ids:
            config.stop_token_ids = set(asked.stop_token_ids)
            if asked.ignore_eos:
                config.eos_token_id = asked.stop_token_ids[0]  # instead of the model's own
            config.ignore_eos = False

    def _set_draft_length(self, config: GenerationConfig) -> None:
        if isinstance(self.draft_length, float):
            config.assistant_confidence_threshold = self.draft_length
        else:
            config.num_assistant_tokens = self.draft_length

    # ---- errors -----------------------------------------------------------------------------------------------------

    async def _refuse(self, request: Request, error: HTTPException) -> Response:
        if not isinstance(error, ApiError):
            headers = error.headers
            error = ApiError(error.status_code, f"{shown(f'{request.method} {request.url.path}')}: {error.detail}.")
            error.headers = headers
        if not error.is_counted:
            self.metrics.refused(error.status_code)
        return error.response()

    async def _refuse_body(self, request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        place, problem = described({**first, "loc": first["loc"][1:]})
        message = f"{place or 'The body'}: {problem}."
        return await self._refuse(request, ApiError(400, message, "invalid_request", place or None))

    async def _fail(self, request: Request, error: Exception) -> Response:
        return await self._refuse(request, ApiError(500, "The server failed on this request.", "internal_error"))


class Application(FastAPI):
    """FastAPI with the middleware for every response, including the one to an unexpected error."""

    def __init__(self, cors_origins: Sequence[str], **options: Any):
        super().__init__(**options)
        self._cors_origins = cors_origins

    def build_middleware_stack(self) -> ASGIApp:
        app = super().build_middleware_stack()
        if self._cors_origins:
            app = CORSMiddleware(
                app, self._cors_origins, allow_methods=["GET", "POST"], allow_headers=["*"],
                expose_headers=[HEADER, "retry-after"],
            )  # fmt: skip
        return RequestId(app)
