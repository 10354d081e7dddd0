"""Requests of /v1/completions."""

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from speculative.serving.api.base_request import MAX_LOGPROBS, MAX_TEXTS, BaseRequest
from speculative.serving.api.tool_calls import ToolFormat

TEXT_OR_IDS = [{"type": "string"}, {"type": "array", "items": {"type": "integer", "minimum": 0}}]
PROMPTS = {
    "anyOf": [
        *TEXT_OR_IDS,
        *({"type": "array", "items": kind, "minItems": 1, "maxItems": MAX_TEXTS} for kind in TEXT_OR_IDS),
    ]
}


def validate_prompts(prompt: Any) -> list[str | list[int]]:
    """Validate prompts, which are a text, token ids, or a list of texts or of token ids; return them as a list."""
    multiple = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    prompts = prompt if multiple else [prompt]
    if len(prompts) > MAX_TEXTS:
        raise ValueError(f"at most {MAX_TEXTS} prompts per request are allowed, not {len(prompts)}")
    for i, one in enumerate(prompts):
        place = f"prompt {i} " if multiple else ""
        if not isinstance(one, str) and not (isinstance(one, list) and set(map(type, one)) <= {int}):
            raise ValueError(f"{place}should be a string or a list of token ids")
        if not one:
            raise ValueError(f"{place or 'the prompt '}is empty: send some text to continue")
    return prompts


class CompletionRequest(BaseRequest):
    continues_prompt: ClassVar[bool] = True
    default_tokens: ClassVar[int | None] = 16  # as in the API
    no_effect: ClassVar[dict[str, tuple]] = BaseRequest.no_effect | {"add_special_tokens": (True,), "suffix": ("",)}

    prompt: Annotated[list, BeforeValidator(validate_prompts), WithJsonSchema(PROMPTS)]
    max_tokens: int | None = Field(None, ge=0, le=2**31)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1, le=MAX_TEXTS)

    @model_validator(mode="after")
    def check_no_generation(self) -> "CompletionRequest":
        if self.echoes_only and (self.stream or not self.echo):
            raise ValueError("max_tokens=0 requires echo=true and stream=false")
        return self

    @model_validator(mode="after")
    def check_best_of(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of < self.choices_per_prompt:
            raise ValueError(f"best_of should be at least n, which is {self.choices_per_prompt}")
        if self.stream and self.texts_per_prompt > self.choices_per_prompt:
            raise ValueError("best_of above n requires stream=false")
        return self

    @property
    def echoed_prompts(self) -> list:
        return [prompt for prompt in self.prompt for _ in range(self.choices_per_prompt)] if self.echo else []

    @property
    def texts_per_prompt(self) -> int:
        return self.best_of or self.choices_per_prompt

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((top for top in wanted if top is not None), default=None)

    def prompts(self, tool_format: ToolFormat | None) -> list:
        return self.prompt

    @property
    def num_prompts(self) -> int:
        return len(self.prompt)

    @property
    def requested_tokens(self) -> int | None:
        """With max_tokens=0, one token is decoded and left out of the response."""
        return None if self.max_tokens is None else max(self.max_tokens, 1)

    @property
    def echoes_only(self) -> bool:
        return self.max_tokens == 0
