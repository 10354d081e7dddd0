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
from speculative.serving.api.answer_parser import AnswerParser
from speculative.serving.api.base_request import BaseRequest
from speculative.serving.api.chat_completions import ChatCompletionRequest
from speculative.serving.api.completions import CompletionRequest
from speculative.serving.api.errors import ApiError, describe_error, prompt_too_long, shorten
from speculative.serving.api.logprobs import TokenTexts, texts_of
from speculative.serving.api.reasoning import ReasoningFormat
from speculative.serving.api.response_events import ResponsesBuilder
from speculative.serving.api.responses import ResponseBuilder, model_card
from speculative.serving.api.responses_api import ResponsesRequest
from speculative.serving.api.structured_output import Structure
from speculative.serving.api.token_sources import TokenSources
from speculative.serving.api.tokenization import DetokenizeRequest, TokenizeRequest
from speculative.serving.api.tool_calls import detect_tool_format
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
RequestT = TypeVar("RequestT", TokenizeRequest, DetokenizeRequest)


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
        self.open_requests = 0  # requests without a complete response
        self.longest_prompt = request_limits.longest_prompt(limits, engine.decoder.main.context)
        tokenizer = engine.decoder.tokenizer
        self._chat_template = tokenizer.chat_template if tokenizer else ""
        self._tool_format = detect_tool_format(self._chat_template) if self._chat_template else None
        self._reasoning = ReasoningFormat.detect(tokenizer)
        self._created = int(time.time())
        self._encoding = ThreadPoolExecutor(1, "encoding")  # one thread: chat templates are not known to be thread-safe
        self._token_texts: TokenTexts | None = None  # created on the first request for log-probabilities
        self._encoding_texts = 0  # texts of requests that are being encoded or wait for the encoding thread
        self._jobs: set[GenerationHandle] = set()

    async def drain(self, seconds: float) -> int:
        """Reject new requests, wait up to `seconds` for running ones, cancel the rest, and return their number."""
        self.draining = True
        deadline = time.monotonic() + seconds
        while self.open_requests and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        unfinished, self.stopped = self.open_requests, True
        for job in self._jobs:
            if not job.finished:
                self.engine.cancel(job)
                job.finish(Stopped())
        return unfinished

    def application(self, keys: frozenset[bytes] | None, cors_origins: Sequence[str] = ()) -> FastAPI:
        """Return the ASGI application. `keys`: digests of the API keys (`middleware.digest`); None: no key required.
        Pages of `cors_origins` may use it."""
        app = Application(cors_origins, title="A speculative pair", docs_url=None, redoc_url=None)
        app.router.route_class = request_body.body_route(self.longest_prompt)
        app.add_middleware(
            Guard,
            keys=keys,
            max_body=request_body.max_bytes(self.longest_prompt),
            limits=self.limits,
            on_rejected=self.metrics.count_rejected,
        )
        handlers: dict[type[Exception], Callable[[Request, Any], Awaitable[Response]]] = {
            StarletteHTTPException: self._error_response,
            RequestValidationError: self._invalid_body_response,
            Exception: self._internal_error_response,
        }
        for error_type, handler in handlers.items():
            app.add_exception_handler(error_type, handler)
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
            answers = openapi.path_responses(path, bool(keys))
            app.add_api_route(path, handle, methods=[method], response_model=None, responses=answers)
        app.add_api_route("/", page, include_in_schema=False)
        app.add_api_route("/health", self.health, methods=["HEAD"], include_in_schema=False)
        openapi.describe(app)
        return app

    # ---- paths ------------------------------------------------------------------------------------------------------

    async def health(self) -> dict:
        self._check_open()
        if problem := self.health_problem():
            raise ApiError(503, f"The engine is broken: {problem}.", "engine_failed", retry_after=RETRY)
        return {"status": "ok", "running": self.engine.running, "waiting": self.engine.waiting}

    def health_problem(self) -> str | None:
        """Return the reason for Ray Serve to replace this replica, or None."""
        return health.problem(self.engine)

    async def models(self) -> dict:
        return {"object": "list", "data": [self._card()]}

    async def model(self, name: str) -> dict:
        self._check_model(name)
        return self._card()

    def _card(self) -> dict:
        return model_card(self.name, self._created, self.engine.decoder, self._reasoning)

    async def chat(self, request: ChatCompletionRequest, raw_request: Request) -> Response:
        self._check_chat_template()
        return await self._generate(request, raw_request)

    async def respond(self, request: ResponsesRequest, raw_request: Request) -> Response:
        self._check_chat_template()
        return await self._generate(request.chat, raw_request, request)

    async def complete(self, request: CompletionRequest, raw_request: Request) -> Response:
        return await self._generate(request, raw_request)

    async def tokenize(self, request: TokenizeRequest) -> dict:
        return await self._run_tokenizer(tokenization.tokenize, request)

    async def detokenize(self, request: DetokenizeRequest) -> dict:
        return await self._run_tokenizer(tokenization.detokenize, request)

    # ---- answers ----------------------------------------------------------------------------------------------------

    async def _generate(
        self,
        request: BaseRequest,
        raw_request: Request,
        original: ResponsesRequest | None = None,
    ) -> Response:
        """Decode `request` and build the response; in the format of `original`, if `request` was made from it."""
        self._check_open()
        self._check_model(request.model)
        if self.engine.error:
            raise self._api_error(self.engine.error)
        request_limits.check_num_texts(request, self.limits)
        request_limits.check_tokens(request, self.engine.decoder.main.vocab_size)
        request_limits.check_tools(request, self._tool_format, self.name)
        request_limits.check_reasoning(request, self._chat_template)
        self.open_requests += 1
        try:
            echoes = (
                await self._run_in_encoding_thread(self._decode_echoed_prompts, request)
                if request.echoed_prompts
                else []
            )
            jobs = await self._submit(
                request, salt(raw_request.headers.get("authorization", ""), request.prompt_cache_key)
            )
        except BaseException:
            self.open_requests -= 1
            raise
        parsers = self._answer_parsers(request, jobs)
        builder: ResponseBuilder | ResponsesBuilder
        if original:
            builder = ResponsesBuilder(original, self.name, jobs, *parsers)
        else:
            sources = self._token_sources(request, jobs)
            builder = ResponseBuilder(request, self.name, jobs, self._token_texts, echoes, sources, parsers)
        if request.stream:  # nothing is awaited between `_submit` and the stream, which ends the jobs
            return EventStream(self._request_context(jobs, request, raw_request), lambda: self._events(jobs, builder))
        with self._request_context(jobs, request, raw_request):
            async for _ in pieces(jobs):
                pass
            if request.num_logprobs is None and request.num_prompt_logprobs is None:
                return JSONResponse(builder.full_response())
            return await self._run_in_encoding_thread(lambda: JSONResponse(builder.full_response()))

    def _answer_parsers(self, request: BaseRequest, jobs: list[GenerationHandle]) -> list[AnswerParser]:
        if not isinstance(request, ChatCompletionRequest):
            return []
        return [AnswerParser(request.tool_parser(self._tool_format), self._reasoning, job.prompt) for job in jobs]

    def _token_sources(self, request: BaseRequest, jobs: list[GenerationHandle]) -> list[TokenSources]:
        tokenizer = self.engine.decoder.tokenizer
        if not (tokenizer and request.stream_options and request.stream_options.include_draft_tokens):
            return []
        return [TokenSources(job, tokenizer.decode, self.engine.decoder.cleans_up) for job in jobs]

    async def _submit(self, request: BaseRequest, salt: bytes) -> list[GenerationHandle]:
        """Encode the prompts and submit a job for each text. A full queue rejects the request before encoding."""
        jobs: list[GenerationHandle] = []
        try:
            self.engine.check_queue(self._encoding_texts + request.total_texts)
            prompts = await self._encode_prompts(request)
            structure = self._structure(request, prompts)
            grammar = await self._compile_grammar(structure) if structure else None
            if self.stopped:
                raise Stopped
            context = self.engine.decoder.main.context
            max_new_tokens = [
                request_limits.max_new_tokens(request, len(prompt), self.limits, context) for prompt in prompts
            ]
            configs = [request.config(limit) for limit in max_new_tokens]
            if (min_tokens := request.min_tokens or 0) > (
                max_tokens := min(config.max_new_tokens for config in configs)
            ):
                message = f"min_tokens: is {min_tokens}, but at most {max_tokens} tokens are generated."
                raise ApiError(400, message, "invalid_request", "min_tokens")
            self.engine.check_queue(request.total_texts)
            for prompt, config in zip(prompts, configs, strict=True):
                self._set_draft_length(config)
                self._set_stop_tokens(request, config)
                if structure:
                    config.structured_output_config = structure.config
                    if structure.forces_calls:  # a stop string would cut them
                        config.stop_strings = set()
                top, first = request.num_prompt_logprobs, len(jobs)
                for i in range(request.texts_per_prompt):
                    seed = request.random_seed(i)
                    num_prompt_logprobs = max(top, 1) if top is not None and i == 0 else 0
                    job = self.engine.submit(
                        prompt, config, seed, self.limits.timeout, salt, request.logit_bias, num_prompt_logprobs,
                        request.continues_prompt,
                    )  # fmt: skip
                    job.grammar = grammar
                    job.waits_for = jobs[first] if top is not None and i else None
                    jobs.append(job)
        except (QueueFull, EngineFailed, Stopped) as error:
            for job in jobs:
                self.engine.cancel(job)
            raise self._api_error(error) from error
        return jobs

    def _structure(self, request: BaseRequest, prompts: list[np.ndarray]) -> Structure | None:
        """The constraint on the texts. It leaves the reasoning of a chat completion free."""
        structure = request.structure(self._tool_format)
        if not structure or not self._reasoning or not isinstance(request, ChatCompletionRequest):
            return structure
        opening = self._reasoning.opening(prompts[0])
        return structure if opening is None else structure.after_reasoning(opening)

    async def _compile_grammar(self, structure: Structure) -> Grammar:
        """The grammar of a request. It stays compiled for the decoder as long as it is referenced."""
        return await asyncio.get_running_loop().run_in_executor(self._encoding, self._compile, structure)

    def _compile(self, structure: Structure) -> Grammar:
        assert self.engine.decoder.grammars  # as there is a tokenizer
        try:
            return self.engine.decoder.grammars.compile(structure.config)
        except ValueError as error:
            for part in structure.parts:
                self._compile(part)  # raises ApiError for the one that is invalid
            problem = str(error).partition(" is invalid: ")[2] or str(error)
            message = f"{structure.parameter}: is invalid or not supported: {problem}."
            raise ApiError(400, message, "invalid_request", structure.parameter) from None

    def _decode_echoed_prompts(self, request: BaseRequest) -> list[str]:
        """The echoed prompts."""
        tokenizer = self.engine.decoder.tokenizer
        assert tokenizer  # a server has one
        return [prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in request.echoed_prompts]

    async def _encode_prompts(self, request: BaseRequest) -> list[np.ndarray]:
        self._encoding_texts += request.total_texts
        try:
            return await self._run_in_encoding_thread(self._encode, request)
        finally:
            self._encoding_texts -= request.total_texts

    async def _run_tokenizer(self, function: Callable[[BatchDecoder, RequestT], dict], request: RequestT) -> dict:
        self._check_open()
        if request.model is not None:
            self._check_model(request.model)
        self.open_requests += 1
        try:
            return await self._run_in_encoding_thread(function, self.engine.decoder, request)
        finally:
            self.open_requests -= 1

    async def _run_in_encoding_thread(self, function: Callable[..., T], *arguments: object) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._encoding, function, *arguments)
        except (ValueError, RuntimeError, OverflowError) as error:
            message = f"The prompt cannot be encoded: {' '.join(engine_lines(error))}"
            raise ApiError(400, message, "invalid_prompt") from None

    async def _events(
        self, jobs: list[GenerationHandle], builder: ResponseBuilder | ResponsesBuilder
    ) -> AsyncIterator[bytes]:
        if head := builder.begin():
            yield head
        try:
            async for index, text in pieces(jobs):
                if text is None:
                    yield builder.end_choice(index, jobs[index].result.finish_reason)
                elif events := builder.piece(index, text):
                    yield events
            yield builder.end()
        except Exception as error:
            yield builder.error_event(self._api_error(error))
            raise AlreadySent from error

    @contextmanager
    def _request_context(
        self, jobs: list[GenerationHandle], request: BaseRequest, raw_request: Request
    ) -> Iterator[None]:
        """Context manager of a running request. Its end frees the slots in the batch and counts the outcomes."""
        self._jobs.update(jobs)
        outcome = "disconnected"
        try:
            yield
            outcome = ""  # each job has its own finish reason
        except Exception as error:
            response = self._api_error(error.__cause__ if isinstance(error, AlreadySent) else error)
            outcome = response.body["error"]["code"] or "decoding_failed"
            if not isinstance(error, AlreadySent):
                response.is_counted = True
                raise response from error
        finally:
            self.open_requests -= 1
            self._jobs.difference_update(jobs)
            for job in jobs:
                self.engine.cancel(job)
                self.metrics.count_finished(job, outcome or job.result.finish_reason)
            if self._traces:
                self._traces.send_span(request, raw_request.headers, jobs, outcome)

    def _api_error(self, error: BaseException | None) -> ApiError:
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
        if not self._chat_template:
            raise ApiError(400, f"The model {self.name} has no chat template: use /v1/completions.")

    def _check_model(self, name: str) -> None:
        if name != self.name:
            message = f"The model {shorten(repr(name))} does not exist: use {self.name!r}."
            raise ApiError(404, message, "model_not_found", "model")

    def _encode(self, request: BaseRequest) -> list[np.ndarray]:
        tokenizer = self.engine.decoder.tokenizer
        if not self._token_texts and (request.num_logprobs is not None or request.num_prompt_logprobs is not None):
            assert tokenizer  # a server has one
            self._token_texts = texts_of(tokenizer)
        try:
            return [
                self.engine.decoder.encode(prompt, request.config(1)) for prompt in request.prompts(self._tool_format)
            ]
        except TextTooLong as error:
            raise prompt_too_long(error, request.prompt_name) from None

    def _set_stop_tokens(self, request: BaseRequest, config: GenerationConfig) -> None:
        """With `stop_token_ids`, `ignore_eos` ignores the model's own stop tokens only."""
        if request.stop_token_ids:
            config.stop_token_ids = set(request.stop_token_ids)
            if request.ignore_eos:
                config.eos_token_id = request.stop_token_ids[0]  # instead of the model's own
            config.ignore_eos = False

    def _set_draft_length(self, config: GenerationConfig) -> None:
        if isinstance(self.draft_length, float):
            config.assistant_confidence_threshold = self.draft_length
        else:
            config.num_assistant_tokens = self.draft_length

    # ---- errors -----------------------------------------------------------------------------------------------------

    async def _error_response(self, raw_request: Request, error: HTTPException) -> Response:
        if not isinstance(error, ApiError):
            headers = error.headers
            error = ApiError(
                error.status_code, f"{shorten(f'{raw_request.method} {raw_request.url.path}')}: {error.detail}."
            )
            error.headers = headers
        if not error.is_counted:
            self.metrics.count_rejected(error.status_code)
        return error.response()

    async def _invalid_body_response(self, raw_request: Request, error: RequestValidationError) -> Response:
        details = error.errors()[0]
        parameter, problem = describe_error({**details, "loc": details["loc"][1:]})
        message = f"{parameter or 'The body'}: {problem}."
        return await self._error_response(raw_request, ApiError(400, message, "invalid_request", parameter or None))

    async def _internal_error_response(self, raw_request: Request, error: Exception) -> Response:
        return await self._error_response(
            raw_request, ApiError(500, "The server failed on this request.", "internal_error")
        )


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
