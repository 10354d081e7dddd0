"""The OpenAPI document at /openapi.json: the responses and errors of each path.

responses.py builds the responses; tests compare them with these schemas.
"""

from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import models_json_schema

from speculative.serving.http.middleware import OPEN

REFERENCE = "#/components/schemas/{model}"
ERRORS = {
    400: "The request is invalid or not supported",
    401: "The API key is missing or wrong",
    404: "The model does not exist",
    408: "The body was not received in time",
    413: "The body is too large",
    429: "The queue is full",
    500: "The server failed on this request",
    503: "The server is shutting down, or its engine is being replaced",
    504: "The request exceeded its time limit",
}
RETRYABLE = {429, 503}  # with the header retry-after
SECONDS = {"type": "integer", "minimum": 1}
ID = {"x-request-id": {"description": "As in the request, or a new one", "required": True,
                       "schema": {"type": "string", "minLength": 1, "maxLength": 128}}}  # fmt: skip
RETRY_AFTER = {"retry-after": {"description": "Seconds", "required": True, "schema": SECONDS}}


class Schema(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorObject(Schema):
    message: str
    type: Literal[
        "invalid_request_error", "authentication_error", "not_found_error", "rate_limit_error", "server_error"
    ]
    param: str | None
    code: str | None


class Error(Schema):
    error: ErrorObject


class Health(Schema):
    status: Literal["ok"]
    running: int = Field(ge=0)
    waiting: int = Field(ge=0)


class ModelCard(Schema):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int = Field(ge=1)
    chat_template: bool
    draft: str | None
    default_reasoning: bool | None


class ModelList(Schema):
    object: Literal["list"]
    data: list[ModelCard]


class PromptTokens(Schema):
    cached_tokens: int = Field(ge=0)
    audio_tokens: Literal[0]


class CompletionTokens(Schema):
    accepted_prediction_tokens: int = Field(ge=0)
    rejected_prediction_tokens: int = Field(ge=0)
    reasoning_tokens: int = Field(ge=0)
    audio_tokens: Literal[0]


class Usage(Schema):
    prompt_tokens: int = Field(ge=1)
    completion_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=1)
    prompt_tokens_details: PromptTokens
    completion_tokens_details: CompletionTokens


class TopLogprob(Schema):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Schema):
    content: list[TokenLogprob]
    refusal: None


class TextLogprobs(Schema):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class PromptLogprob(Schema):
    logprob: float
    rank: int = Field(ge=1)
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class AnyChoice(Schema):
    index: int = Field(ge=0)


class Choice(AnyChoice):
    finish_reason: Literal["stop", "length"]


class FunctionCall(Schema):
    name: str
    arguments: str


class ToolCall(Schema):
    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(Schema):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = Field("", min_length=1)
    tool_calls: list[ToolCall] = Field([], min_length=1)


class ChatChoice(AnyChoice):
    finish_reason: Literal["stop", "length", "tool_calls"]
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class TextChoice(Choice):
    text: str
    logprobs: TextLogprobs | None
    prompt_logprobs: PromptLogprobs = []


class Head(Schema):
    id: str
    created: int
    model: str


class ChatCompletion(Head):
    object: Literal["chat.completion"]
    choices: list[ChatChoice] = Field(min_length=1)
    usage: Usage
    prompt_logprobs: PromptLogprobs = []


class Completion(Head):
    object: Literal["text_completion"]
    choices: list[TextChoice] = Field(min_length=1)
    usage: Usage


class Token(Schema):
    text: str
    from_draft: bool


class Speculation(Schema):
    tokens: list[Token]
    iterations: int = Field(ge=0)
    draft_tokens: int = Field(ge=0)


class ChunkChoice(AnyChoice):
    speculation: Speculation | None = None


class FunctionDelta(Schema):
    name: str = ""
    arguments: str


class ToolCallDelta(Schema):
    index: int = Field(ge=0)
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionDelta


class Delta(Schema):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[ToolCallDelta] = Field([], min_length=1, max_length=1)


class ChatChunkChoice(ChunkChoice):
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    delta: Delta
    logprobs: ChatLogprobs | None


class TextChunkChoice(ChunkChoice):
    finish_reason: Literal["stop", "length"] | None
    text: str
    logprobs: TextLogprobs | None


class ChatCompletionChunk(Head):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice] = Field(max_length=1)
    usage: Usage | None = None


class CompletionChunk(Head):
    object: Literal["text_completion"]
    choices: list[TextChunkChoice] = Field(max_length=1)
    usage: Usage | None = None


class OutputText(Schema):
    type: Literal["output_text"]
    text: str
    annotations: list = Field(max_length=0)
    logprobs: list = Field(max_length=0)


class OutputMessage(Schema):
    id: str
    type: Literal["message"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningText(Schema):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(Schema):
    id: str
    type: Literal["reasoning"]
    status: Literal["in_progress", "completed", "incomplete"]
    summary: list = Field(max_length=0)
    content: list[ReasoningText]


class OutputCall(Schema):
    id: str
    type: Literal["function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    call_id: str
    name: str
    arguments: str


class InputTokens(Schema):
    cached_tokens: int = Field(ge=0)
    cache_write_tokens: int = Field(ge=0)


class ResponseUsage(Schema):
    input_tokens: int = Field(ge=1)
    input_tokens_details: InputTokens
    output_tokens: int = Field(ge=0)
    output_tokens_details: CompletionTokens
    total_tokens: int = Field(ge=1)


class IncompleteDetails(Schema):
    reason: Literal["max_output_tokens"]


class ResponseReasoning(Schema):
    effort: str | None
    summary: None


class ResponseText(Schema):
    format: dict[str, Any]


class ResponseObject(Schema):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall]
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: str | None
    reasoning: ResponseReasoning
    safety_identifier: str | None
    service_tier: str | None
    store: Literal[False]
    temperature: float
    text: ResponseText
    tool_choice: str | dict[str, str]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None


class ResponseEvent(BaseModel):
    """An event of a stream of /v1/responses; its other fields depend on its type."""

    type: str
    sequence_number: int = Field(ge=0)
    response: ResponseObject | None = None
    item: OutputMessage | OutputReasoning | OutputCall | None = None
    part: OutputText | ReasoningText | None = None


class Tokenized(Schema):
    count: int = Field(ge=0)
    max_model_len: int = Field(ge=1)
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Schema):
    prompt: str


COMMON_ERRORS = (413, 429, 500)  # errors of every path but /health
BODY_ERRORS = (400, 404, 408, *COMMON_ERRORS, 503)  # and of paths that read a body
GENERATION_ERRORS = (*BODY_ERRORS, 504)
RESPONSES = {  # by path: schema of the response, schema of a stream's chunks, errors
    "/health": (Health, None, (500, 503)),
    "/v1/models": (ModelList, None, COMMON_ERRORS),
    "/v1/models/{name:path}": (ModelCard, None, (404, *COMMON_ERRORS)),
    "/v1/chat/completions": (ChatCompletion, ChatCompletionChunk, GENERATION_ERRORS),
    "/v1/completions": (Completion, CompletionChunk, GENERATION_ERRORS),
    "/v1/responses": (ResponseObject, ResponseEvent, GENERATION_ERRORS),
    "/tokenize": (Tokenized, None, BODY_ERRORS),
    "/detokenize": (Detokenized, None, BODY_ERRORS),
}


def path_responses(path: str, keys: bool) -> dict[int | str, dict[str, Any]]:
    """The responses of a path, in FastAPI's form. `keys`: whether an API key is required."""
    schema, chunk, errors = RESPONSES[path]
    response: dict[str, Any] = {"model": schema, "description": "The response", "headers": ID}
    if chunk is ResponseEvent:
        response["description"] += ", or with stream=true its events, of which the last may be an error"
        response["content"] = {"text/event-stream": {"itemSchema": typed_event()}}
    elif chunk:
        response["description"] += ", or with stream=true its chunks, followed by `[DONE]` or an error"
        response["content"] = {"text/event-stream": {"itemSchema": event(chunk)}}
    if keys and path not in OPEN:
        errors += (401,)
    describe_error: dict[int | str, dict[str, Any]] = {200: response}
    return describe_error | {status: error(status) for status in sorted(errors)}


def error(status: int) -> dict[str, Any]:
    headers = {**ID, **(RETRY_AFTER if status in RETRYABLE else {})}
    return {"model": Error, "description": ERRORS[status], "headers": headers}


def event(chunk: type[BaseModel]) -> dict:
    """Schema of a server-sent event with a chunk or an error, in the form of OpenAPI 3.2 and FastAPI."""
    data = {"anyOf": [json_schema_of(chunk, Error), {"const": "[DONE]"}]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def typed_event() -> dict:
    """Schema of an event of /v1/responses, whose type is also the name of the event."""
    properties = {"event": {"type": "string"}, "data": {"anyOf": [json_schema_of(ResponseEvent)]}}
    return {"type": "object", "properties": properties, "required": ["event", "data"]}


def json_schema_of(*shapes: type[BaseModel]) -> dict:
    """Schema of a string with JSON of one of these shapes."""
    references = [{"$ref": REFERENCE.format(model=shape.__name__)} for shape in shapes]
    return {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": references}}


def describe(app: FastAPI) -> None:
    """Complete the OpenAPI document of `app`. FastAPI documents a 422 of its own, but this server sends 400 instead."""
    default_openapi = app.openapi

    def document() -> dict:
        if app.openapi_schema:
            return app.openapi_schema
        spec = default_openapi()
        for path in spec["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        schemas = spec["components"]["schemas"]
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        chunks: list[tuple[type[BaseModel], Literal["serialization"]]] = [
            (shape, "serialization") for shape in (ChatCompletionChunk, CompletionChunk, ResponseEvent)
        ]
        schemas |= models_json_schema(chunks, ref_template=REFERENCE)[1]["$defs"]
        return spec

    app.openapi = document  # type: ignore[method-assign]
