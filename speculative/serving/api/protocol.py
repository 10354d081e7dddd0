"""Request types of the OpenAI API: chat completions, completions; its errors.

The server rejects an unsupported field that would change the output, and names it; it rejects a field of the wrong type
and never converts it. It accepts and ignores fields that only label a request (`user`, `metadata`, ...), nulls, and
values that select the default behaviour (`off`). It reports only the first invalid element of a list, so a million
invalid elements cost no more than one.
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from fastapi import HTTPException
from fastapi.responses import JSONResponse
from openvino_genai import ChatHistory, GenerationConfig, StructuredOutputConfig
from pydantic import (
    BeforeValidator,
    FailFast,
    Field,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from speculative.serving.api.given import LABEL, Given
from speculative.serving.api.structured_output import ResponseFormat, Structure, StructuredOutputs
from speculative.serving.api.tool_calls import ToolFormat, ToolParser, forced
from speculative.serving.api.tools import MOST_TOOLS, NamedTool, Tool, ToolCall, ToolChoice, check_choice, check_names

COMPLETION_TOKENS = 16  # default max_tokens of /v1/completions, as in the API
SHOWN = 100  # maximum length of client input in an error message, in characters
MOST_TEXTS = 128  # as n in the API; and prompts of a request
MOST_LOGPROBS = 20  # most probable tokens at each place
MOST_BIASES = 1024
SEED_BITS = 2**64 - 1  # maps the API's seeds, which may be negative, to unsigned ones
TOKEN_ID = re.compile(r"[0-9]{1,9}", re.ASCII)
TokenId = Annotated[int, Field(ge=0, lt=10**9)]
Penalty = Field(None, ge=-2, le=2, allow_inf_nan=False)
# JSON schemas of fields for which the API accepts several types and this module converts them to one
TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
TEXT_OR_PARTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": TEXT_PART}]}
TEXT_OR_IDS = [{"type": "string"}, {"type": "array", "items": {"type": "integer", "minimum": 0}}]
PROMPTS = {
    "anyOf": [
        *TEXT_OR_IDS,
        *({"type": "array", "items": kind, "minItems": 1, "maxItems": MOST_TEXTS} for kind in TEXT_OR_IDS),
    ]
}
BIASES = {
    "type": "object",
    "patternProperties": {"^[0-9]{1,9}$": {"type": "number", "minimum": -100, "maximum": 100}},
    "additionalProperties": False,
    "maxProperties": MOST_BIASES,
}
STOPS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "maxItems": 4}]}


class ApiError(HTTPException):
    """An error response: an HTTP status and the API's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(status, message, None if retry_after is None else {"retry-after": str(retry_after)})
        self.body = {"error": {"message": message, "type": _type(status), "param": param, "code": code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status_code, self.headers)


def shown(text: str) -> str:
    """Shorten client input for an error message."""
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def _type(status: int) -> str:
    if status >= 500:
        return "server_error"
    return {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(
        status, "invalid_request_error"
    )


class StreamOptions(Given):
    include_usage: bool = False
    include_draft_tokens: bool = False  # an extension: `speculation` in each chunk (token_sources.py)
    include_obfuscation: bool | None = None  # accepted, but nothing is obfuscated


class TextPart(Given):
    off: ClassVar[dict[str, tuple]] = {"cache_control": LABEL}

    type: Literal["text"]
    text: str


def joined(content: Any) -> Any:
    """Concatenate the texts of a list of content parts. Raises ValueError if a part is not a text part."""
    if not isinstance(content, list):
        return content
    texts = []
    for i, part in enumerate(content):
        try:
            texts.append(TextPart.model_validate(part).text)
        except ValidationError as error:
            place, problem = described(error.errors(include_url=False)[0], TextPart.off)
            raise ValueError(f"part {i} is not a text part: {place}{': ' if place else ''}{problem}") from None
    return "".join(texts)


class Message(Given):
    off: ClassVar[dict[str, tuple]] = {
        "refusal": ("",),
        "function_call": ({},),
        "audio": ({},),
        "reasoning_content": ("",),
        "annotations": LABEL,  # sources of an earlier response
        "provider_specific_fields": LABEL,  # LiteLLM's
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(joined), WithJsonSchema(TEXT_OR_PARTS)]
    name: str | None = None
    tool_calls: Annotated[list[ToolCall] | None, FailFast()] = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def as_its_role_allows(cls, data: Any) -> Any:
        """Only an answer may be empty and have calls; only the result of a call has its id."""
        if not isinstance(data, dict):
            return data
        role = data.get("role")  # other calls would add to the time of a message
        if role != "assistant" and "tool_calls" in data and data["tool_calls"]:
            raise ValueError("only messages of the role assistant have tool_calls")
        if ("tool_call_id" in data and data["tool_call_id"] is not None) != (role == "tool"):
            raise ValueError("messages of the role tool, and no others, need a tool_call_id")
        if role == "assistant" and ("content" not in data or data["content"] is None):
            return {**data, "content": ""}
        return data

    def plain(self) -> dict[str, Any]:
        """Return the message in the format of chat templates."""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.role == "tool":
            message |= {"tool_call_id": self.tool_call_id} | ({"name": self.name} if self.name else {})
        return message


def few_and_not_empty(stop: Any) -> Any:
    """Validate stop strings and return them as a list."""
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list):
        raise ValueError("should be a string or a list of strings")
    if len(stops) > 4:
        raise ValueError(f"at most 4 stop strings are allowed, not {len(stops)}")
    if not all(isinstance(stop, str) for stop in stops):
        raise ValueError("should be a string or a list of strings")
    if not all(stops):
        raise ValueError("a stop string must not be empty")
    if any(len(stop) > 1000 for stop in stops):
        raise ValueError("a stop string must have at most 1000 characters")
    return stops


def biases(given: Any) -> Any:
    """Validate biases by token id, and return them with integer keys."""
    if not isinstance(given, dict):
        raise ValueError("should be an object with a bias from -100 to 100 for each token id")
    if len(given) > MOST_BIASES:
        raise ValueError(f"at most {MOST_BIASES} tokens are allowed, not {len(given)}")
    for token, bias in given.items():
        if not TOKEN_ID.fullmatch(token):
            raise ValueError(f"{shown(repr(token))} is not a token id")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ValueError(f"the bias of token {token} should be a number from -100 to 100")
    return {int(token): bias for token, bias in given.items()}


def all_tokens(top_k: Any) -> Any:
    """Convert 0 and -1, which mean all tokens in vLLM, to None."""
    return None if top_k in (0, -1) else top_k


class BaseRequest(Given):
    """The fields that chat completions and text completions share."""

    limit_name: ClassVar[str] = "max_tokens"  # what error messages call the number of tokens
    prompt_name: ClassVar[str] = "prompt"

    off: ClassVar[dict[str, tuple]] = {
        # OpenAI's
        "metadata": LABEL,
        "prompt_cache_retention": LABEL,
        "safety_identifier": LABEL,
        "service_tier": LABEL,
        "user": LABEL,
        # vLLM's
        "add_generation_prompt": (True,),
        "bad_words": ([],),
        "chat_template_kwargs": ({},),
        "detokenize": (True,),
        "early_stopping": (False,),
        "length_penalty": (1,),
        "priority": (0,),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "use_beam_search": (False,),
    }

    model: str
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MOST_TEXTS)
    max_tokens: int | None = Field(None, ge=1, le=2**31)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[list[str], BeforeValidator(few_and_not_empty), WithJsonSchema(STOPS)] = Field([])
    frequency_penalty: float | None = Penalty
    presence_penalty: float | None = Penalty
    logit_bias: Annotated[dict[int, float], BeforeValidator(biases), WithJsonSchema(BIASES)] = Field({})
    prompt_cache_key: str | None = None  # prefix-cache entries are shared only by requests with the same key
    # extensions, named as in vLLM
    top_k: Annotated[int | None, BeforeValidator(all_tokens)] = Field(None, ge=1, le=2**31)
    min_p: float | None = Field(None, ge=0, lt=1, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10, allow_inf_nan=False)
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = Field(None, ge=0, le=2**31)
    prompt_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    stop_token_ids: Annotated[list[TokenId], FailFast()] = Field([], max_length=MOST_TEXTS)
    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="after")
    def options_of_a_stream(self) -> "BaseRequest":
        if self.stream_options and not self.stream:
            raise ValueError("stream_options requires stream=true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs requires stream=false")
        return self

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens

    def structure(self, form: ToolFormat | None) -> Structure | None:
        """The constraint on the output. `form` is the format of the model's tool calls."""
        return self.structured_outputs.structure if self.structured_outputs else None

    def config(self, max_new_tokens: int) -> GenerationConfig:
        """Return the engine's GenerationConfig. The API's defaults apply: temperature 1, all tokens."""
        config = GenerationConfig()
        config.max_new_tokens = max_new_tokens
        temperature = 1.0 if self.temperature is None else self.temperature
        config.do_sample = temperature > 0 and self.top_p != 0
        if config.do_sample:
            config.temperature = temperature
            config.top_p = max(1.0 if self.top_p is None else self.top_p, 1e-9)  # smaller values are 0 in float32
            if self.top_k is not None:
                config.top_k = self.top_k
            config.min_p = self.min_p or 0.0
        config.repetition_penalty = self.repetition_penalty or 1.0
        config.frequency_penalty = self.frequency_penalty or 0.0
        config.presence_penalty = self.presence_penalty or 0.0
        config.stop_strings = set(self.stop)
        config.include_stop_str_in_output = bool(self.include_stop_str_in_output)
        config.ignore_eos = bool(self.ignore_eos)
        config.min_new_tokens = self.min_tokens or 0
        if self.top is not None or self.texts > self.choices_of_prompt:
            config.logprobs = max(self.top or 0, 1)
        config.apply_chat_template = False
        return config

    def prompts(self, form: ToolFormat | None) -> list:
        """The prompts, as input of a decoder's `encode`. `form` is the format of the model's tool calls."""
        raise NotImplementedError

    @property
    def number_of_prompts(self) -> int:
        return 1

    @property
    def repeated(self) -> list:
        """The prompts to echo in the choices."""
        return []

    @property
    def choices_of_prompt(self) -> int:
        """The number of choices in the response for each prompt."""
        return self.n or 1

    @property
    def texts(self) -> int:
        """The number of texts to generate for each prompt."""
        return self.choices_of_prompt

    @property
    def all_texts(self) -> int:
        return self.number_of_prompts * self.texts

    @property
    def top(self) -> int | None:
        """The requested number of most probable tokens per position; None without log-probabilities."""
        raise NotImplementedError

    @property
    def top_of_prompt(self) -> int | None:
        """Likewise, of the prompt."""
        return self.prompt_logprobs

    def random_seed(self, i: int) -> int | None:
        """The seed of text `i` of a prompt: the request's own for the first one, others for the others."""
        if self.seed is None:
            return None
        seed = self.seed & SEED_BITS
        return int(np.random.SeedSequence([seed, i]).generate_state(1, np.uint64)[0]) if i else seed


class ChatCompletionRequest(BaseRequest):
    off: ClassVar[dict[str, tuple]] = BaseRequest.off | {
        "add_special_tokens": (False,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "best_of": (1,),
        "echo": (False,),
        "modalities": (["text"],),
        "store": (False,),
    }

    prompt_name: ClassVar[str] = "messages"

    messages: Annotated[list[Message], FailFast()] = Field(min_length=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31)
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], FailFast()] = Field([], max_length=MOST_TOOLS)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def top_of_logprobs(self) -> "ChatCompletionRequest":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs requires logprobs=true")
        return self

    @model_validator(mode="after")
    def one_structure(self) -> "ChatCompletionRequest":
        if self.structured_outputs and self.response_format and self.response_format.structure:
            raise ValueError("response_format and structured_outputs exclude each other: send one of them")
        if self.structured_outputs and self.offered:
            raise ValueError("structured_outputs and tools exclude each other: send one of them")
        return self

    @field_validator("tools")
    @classmethod
    def with_names_of_their_own(cls, tools: list[Tool]) -> list[Tool]:
        check_names([tool.function.name for tool in tools])
        return tools

    @field_validator("tool_choice")
    @classmethod
    def among_the_tools(cls, choice: ToolChoice, info: ValidationInfo) -> ToolChoice:
        names = [tool.function.name for tool in info.data.get("tools", ())]
        check_choice(choice.function.name if isinstance(choice, NamedTool) else None, choice == "required", names)
        return choice

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def structure(self, form: ToolFormat | None) -> Structure | None:
        answer = self.response_format.schema_text if self.response_format else None
        if form and self.offered and (answer or self.tool_choice != "auto"):
            wanted = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
            functions = {tool.function.name: tool.function.schema_text for tool in self.offered}
            functions = {name: schema for name, schema in functions.items() if wanted in (None, name)}
            several = not wanted and self.parallel_tool_calls is not False
            tag = forced(form, functions, several, answer if self.tool_choice == "auto" else None)
            return Structure("tools", StructuredOutputConfig(structural_tags_config=tag))
        return (self.response_format and self.response_format.structure) or super().structure(form)

    def parser(self, form: ToolFormat | None) -> ToolParser | None:
        """A parser of the tool calls in a text."""
        names = {tool.function.name for tool in self.offered}
        return ToolParser(form, names) if form and names else None

    def history(self, form: ToolFormat | None) -> ChatHistory:
        """The messages and tools, as input of a chat template."""
        history = ChatHistory([message.plain() for message in self.messages])
        if form and self.offered:
            tools = [tool.model_dump(exclude_none=True) for tool in self.offered]
            if form.variable == "tools":
                history.set_tools(tools)
            else:
                history.set_extra_context({form.variable: tools})
        return history

    def prompts(self, form: ToolFormat | None) -> list:
        return [self.history(form)]

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def all_prompts(prompt: Any) -> list[str | list[int]]:
    """Validate prompts, which are a text, token ids, or a list of texts or of token ids; return them as a list."""
    several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    prompts = prompt if several else [prompt]
    if len(prompts) > MOST_TEXTS:
        raise ValueError(f"at most {MOST_TEXTS} prompts per request are allowed, not {len(prompts)}")
    for i, one in enumerate(prompts):
        place = f"prompt {i} " if several else ""
        if not isinstance(one, str) and not (isinstance(one, list) and set(map(type, one)) <= {int}):
            raise ValueError(f"{place}should be a string or a list of token ids")
        if not one:
            raise ValueError(f"{place or 'the prompt '}is empty: send some text to continue")
    return prompts


class CompletionRequest(BaseRequest):
    off: ClassVar[dict[str, tuple]] = BaseRequest.off | {"add_special_tokens": (True,), "suffix": ("",)}

    prompt: Annotated[list, BeforeValidator(all_prompts), WithJsonSchema(PROMPTS)]
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1, le=MOST_TEXTS)

    @model_validator(mode="after")
    def best_of_several(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of < self.choices_of_prompt:
            raise ValueError(f"best_of should be at least n, which is {self.choices_of_prompt}")
        if self.stream and self.texts > self.choices_of_prompt:
            raise ValueError("best_of above n requires stream=false")
        return self

    @property
    def repeated(self) -> list:
        return [prompt for prompt in self.prompt for _ in range(self.choices_of_prompt)] if self.echo else []

    @property
    def texts(self) -> int:
        return self.best_of or self.choices_of_prompt

    @property
    def top(self) -> int | None:
        return self.logprobs

    @property
    def top_of_prompt(self) -> int | None:
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((top for top in wanted if top is not None), default=None)

    def prompts(self, form: ToolFormat | None) -> list:
        return self.prompt

    @property
    def number_of_prompts(self) -> int:
        return len(self.prompt)

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens or COMPLETION_TOKENS


def described(error: Mapping[str, Any], off: dict[str, tuple]) -> tuple[str, str]:
    """Return the parameter of a pydantic error in the API's notation (`messages[0].content`), and the problem."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"])
    place = shown("".join(parts).removeprefix("."))
    if error["type"] == "missing":
        return place, "is required"
    if error["type"] == "extra_forbidden":
        return place, _not_served(str(error["loc"][-1]), off)
    if error["type"] in ("model_type", "model_attributes_type"):
        return place, "should be an object"
    return place, error["msg"].removeprefix("Value error, ").replace("Input should", "should")


def _not_served(name: str, off: dict[str, tuple]) -> str:
    if name not in off:
        return "unknown parameter: omit it"
    return f"only {' or '.join(json.dumps(value) for value in off[name])} is supported: omit it"
