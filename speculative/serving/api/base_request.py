"""Base class of the requests for chat completions and text completions.

The server rejects an unsupported field that would change the output, and names it; it rejects a field of the wrong type
and never converts it. It accepts and ignores fields that only label a request (`user`, `metadata`, ...), nulls, and
values that select the default behaviour (`no_effect`). It reports only the first invalid element of a list, so that a
million invalid elements cost no more than one.
"""

import re
from typing import Annotated, Any, ClassVar

import numpy as np
from openvino_genai import GenerationConfig
from pydantic import BeforeValidator, FailFast, Field, WithJsonSchema, model_validator

from speculative.serving.api.api_object import LABEL, ApiObject
from speculative.serving.api.errors import shorten
from speculative.serving.api.structured_output import Structure, StructuredOutputs
from speculative.serving.api.tool_calls import ToolFormat

MAX_TEXTS = 128  # as n in the API; and prompts of a request
MAX_LOGPROBS = 20  # most probable tokens at each place
MAX_BIASES = 1024
MAX_MIN_P = 1 - 2**-24  # the largest float32 below 1
SEED_BITS = 2**64 - 1  # maps the API's seeds, which may be negative, to unsigned ones
TOKEN_ID = re.compile(r"[0-9]{1,9}", re.ASCII)
TokenId = Annotated[int, Field(ge=0, lt=10**9)]
Penalty = Field(None, ge=-2, le=2, allow_inf_nan=False)
BIASES = {
    "type": "object",
    "patternProperties": {"^[0-9]{1,9}$": {"type": "number", "minimum": -100, "maximum": 100}},
    "additionalProperties": False,
    "maxProperties": MAX_BIASES,
}
STOPS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "maxItems": 4}]}


class StreamOptions(ApiObject):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's extension: with `include_usage`, the usage of a choice in its chunks
    include_draft_tokens: bool = False  # an extension: `speculation` in each chunk (token_sources.py)
    include_obfuscation: bool | None = None  # accepted, but nothing is obfuscated


def validate_stop(stop: Any) -> Any:
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


def validate_logit_bias(biases: Any) -> Any:
    """Validate biases by token id, and return them with integer keys."""
    if not isinstance(biases, dict):
        raise ValueError("should be an object with a bias from -100 to 100 for each token id")
    if len(biases) > MAX_BIASES:
        raise ValueError(f"at most {MAX_BIASES} tokens are allowed, not {len(biases)}")
    for token, bias in biases.items():
        if not TOKEN_ID.fullmatch(token):
            raise ValueError(f"{shorten(repr(token))} is not a token id")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ValueError(f"the bias of token {token} should be a number from -100 to 100")
    return {int(token): bias for token, bias in biases.items()}


def normalize_top_k(top_k: Any) -> Any:
    """Convert 0 and -1, which mean all tokens in vLLM, to None."""
    return None if top_k in (0, -1) else top_k


TopK = Annotated[int | None, Field(ge=1, le=2**31), BeforeValidator(normalize_top_k)]


class BaseRequest(ApiObject):
    """The fields that chat completions and text completions share."""

    default_tokens: ClassVar[int | None] = None  # most new tokens of a request that sets no limit; None: the server's
    prompt_name: ClassVar[str] = "prompt"
    continues_prompt: ClassVar[bool] = False  # the text follows that of the prompt

    no_effect: ClassVar[dict[str, tuple]] = {
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
    n: int | None = Field(None, ge=1, le=MAX_TEXTS)
    max_tokens: int | None = Field(None, ge=1, le=2**31)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[list[str], BeforeValidator(validate_stop), WithJsonSchema(STOPS)] = Field([])
    frequency_penalty: float | None = Penalty
    presence_penalty: float | None = Penalty
    logit_bias: Annotated[dict[int, float], BeforeValidator(validate_logit_bias), WithJsonSchema(BIASES)] = Field({})
    prompt_cache_key: str | None = None  # prefix-cache entries are shared only by requests with the same key
    # extensions, named as in vLLM
    top_k: TopK = None
    min_p: float | None = Field(None, ge=0, lt=1, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10, allow_inf_nan=False)
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = Field(None, ge=0, le=2**31)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    stop_token_ids: Annotated[list[TokenId], FailFast()] = Field([], max_length=MAX_TEXTS)
    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="after")
    def check_stream_options(self) -> "BaseRequest":
        if self.stream_options and not self.stream:
            raise ValueError("stream_options requires stream=true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs requires stream=false")
        return self

    @property
    def echoes_only(self) -> bool:
        """Whether the response has no text but the echoed prompt."""
        return False

    @property
    def limit_name(self) -> str:
        """What error messages call the number of tokens."""
        return "max_tokens"

    @property
    def requested_tokens(self) -> int | None:
        return self.max_tokens

    def structure(self, tool_format: ToolFormat | None) -> Structure | None:
        """The constraint on the output. `tool_format` is the format of the model's tool calls."""
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
            config.min_p = min(self.min_p or 0.0, MAX_MIN_P)
        config.repetition_penalty = self.repetition_penalty or 1.0
        config.frequency_penalty = self.frequency_penalty or 0.0
        config.presence_penalty = self.presence_penalty or 0.0
        config.stop_strings = set(self.stop)
        config.include_stop_str_in_output = bool(self.include_stop_str_in_output)
        config.ignore_eos = bool(self.ignore_eos)
        config.min_new_tokens = self.min_tokens or 0
        if self.num_logprobs is not None or self.texts_per_prompt > self.choices_per_prompt:
            config.logprobs = max(self.num_logprobs or 0, 1)
        config.apply_chat_template = False
        return config

    def prompts(self, tool_format: ToolFormat | None) -> list:
        """The prompts, as input of a decoder's `encode`. `tool_format` is the format of the model's tool calls."""
        raise NotImplementedError

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def echoed_prompts(self) -> list:
        """The prompts to echo in the choices."""
        return []

    @property
    def choices_per_prompt(self) -> int:
        """The number of choices in the response for each prompt."""
        return self.n or 1

    @property
    def texts_per_prompt(self) -> int:
        """The number of texts to generate for each prompt."""
        return self.choices_per_prompt

    @property
    def total_texts(self) -> int:
        return self.num_prompts * self.texts_per_prompt

    @property
    def num_logprobs(self) -> int | None:
        """The requested number of most probable tokens per position; None without log-probabilities."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Likewise, of the prompt."""
        return self.prompt_logprobs

    def random_seed(self, i: int) -> int | None:
        """The seed of text `i` of a prompt: the request's own for the first one, others for the others."""
        if self.seed is None:
            return None
        seed = self.seed & SEED_BITS
        return int(np.random.SeedSequence([seed, i]).generate_state(1, np.uint64)[0]) if i else seed
