"""Limits of one request: numbers of texts and tokens, token ids, tools, effort of reasoning."""

from speculative.serving.api.base_request import BaseRequest
from speculative.serving.api.chat_completions import ChatCompletionRequest
from speculative.serving.api.completions import CompletionRequest
from speculative.serving.api.errors import ApiError
from speculative.serving.api.template_variables import has_effort
from speculative.serving.api.tool_calls import ToolFormat
from speculative.serving.settings import Limits


def check_num_texts(request: BaseRequest, limits: Limits) -> None:
    """Raise ApiError if `request` has more prompts or texts than are allowed."""
    max_texts, max_total_texts = limits.max_num_seqs, limits.max_num_seqs + limits.max_queue
    name = "best_of" if request.texts_per_prompt > request.choices_per_prompt else "n"
    if request.texts_per_prompt > max_texts:
        message = f"{name}: is {request.texts_per_prompt}, but at most {max_texts} are allowed."
        raise ApiError(400, message, "invalid_request", name)
    if request.total_texts > max_total_texts:
        texts = f"{request.num_prompts} prompts with {name}={request.texts_per_prompt} are {request.total_texts} texts"
        raise ApiError(400, f"prompt: {texts}, but at most {max_total_texts} are allowed.", "invalid_request", "prompt")


def check_tokens(request: BaseRequest, vocab_size: int) -> None:
    """Raise ApiError if `request` has token ids outside the vocabulary of `vocab_size` tokens."""
    token_ids = [("logit_bias", request.logit_bias), ("stop_token_ids", request.stop_token_ids)]
    if isinstance(request, CompletionRequest):
        token_ids += [("prompt", prompt) for prompt in request.prompt if not isinstance(prompt, str)]
    for name, tokens in token_ids:
        if invalid := [
            token for token in (min(tokens, default=0), max(tokens, default=0)) if not 0 <= token < vocab_size
        ]:
            message = f"{name}: has token {invalid[0]}, but the model's token ids are 0 to {vocab_size - 1}."
            raise ApiError(400, message, "invalid_request", name)


def check_tools(request: BaseRequest, tool_format: ToolFormat | None, model: str) -> None:
    """Raise ApiError if `request` has tools, but the chat template of `model` has no `tool_format` of tool calls."""
    if isinstance(request, ChatCompletionRequest) and request.callable_tools and not tool_format:
        message = f"tools: the format of tool calls of {model}'s chat template is not supported."
        raise ApiError(400, message, "invalid_request", "tools")


def check_reasoning(request: BaseRequest, chat_template: str) -> None:
    """Raise ApiError if `request` sets an effort of reasoning that `chat_template` cannot set."""
    if isinstance(request, ChatCompletionRequest) and not has_effort(chat_template, request.reasoning_effort):
        name, effort = request.effort_name, request.reasoning_effort
        message = f'{name}: the chat template has no effort "{effort}": omit it, or send chat_template_kwargs.'
        raise ApiError(400, message, "invalid_request", name)


def longest_prompt(limits: Limits, context: int) -> int:
    """Return the maximum number of tokens of a prompt for a model with `context` tokens."""
    return min(limits.max_prompt_tokens, context - 1)


def max_new_tokens(request: BaseRequest, prompt: int, limits: Limits, context: int) -> int:
    """Return the maximum number of new tokens after a prompt of `prompt` tokens: the requested number, or what the
    limits allow if the request has none. Raises ApiError if prompt or number exceed a limit."""
    prompt_name, limit_name = request.prompt_name, request.limit_name
    if prompt > (longest := longest_prompt(limits, context)):
        message = f"The prompt has {prompt} tokens, but at most {longest} are allowed."
        raise ApiError(400, message, "context_length_exceeded", prompt_name)
    requested = request.requested_tokens
    if requested is None:
        return min(limits.max_output_tokens, context - prompt, request.default_tokens or context)
    if requested > limits.max_output_tokens:
        message = f"{limit_name} is {requested}, but at most {limits.max_output_tokens} are allowed."
        raise ApiError(400, message, "max_tokens_exceeded", limit_name)
    if prompt + requested > context:
        message = (
            f"The prompt has {prompt} tokens and {limit_name} is {requested}, but the context is only {context} "
            f"tokens: shorten the prompt, or set {limit_name} to {context - prompt}."
        )
        raise ApiError(400, message, "context_length_exceeded", prompt_name)
    return requested
