"""Limits on what one request may ask of a model: numbers of texts and tokens, token ids, tools."""

from speculative.serving.api.base_request import BaseRequest
from speculative.serving.api.chat_completions import ChatCompletionRequest
from speculative.serving.api.completions import CompletionRequest
from speculative.serving.api.errors import ApiError
from speculative.serving.api.tool_calls import ToolFormat
from speculative.serving.settings import Limits


def check_number(asked: BaseRequest, limits: Limits) -> None:
    """Raise ApiError if `asked` are more texts than a request may ask for."""
    together, most = limits.max_num_seqs, limits.max_num_seqs + limits.max_queue
    name = "best_of" if asked.texts > asked.choices_of_prompt else "n"
    if asked.texts > together:
        message = f"{name}: is {asked.texts}, but at most {together} are allowed."
        raise ApiError(400, message, "invalid_request", name)
    if asked.all_texts > most:
        texts = f"{asked.number_of_prompts} prompts with {name}={asked.texts} are {asked.all_texts} texts"
        raise ApiError(400, f"prompt: {texts}, but at most {most} are allowed.", "invalid_request", "prompt")


def check_tokens(asked: BaseRequest, vocab_size: int) -> None:
    """Raise ApiError if `asked` names token ids that a model with `vocab_size` tokens does not have."""
    named = [("logit_bias", asked.logit_bias), ("stop_token_ids", asked.stop_token_ids)]
    if isinstance(asked, CompletionRequest):
        named += [("prompt", prompt) for prompt in asked.prompt if not isinstance(prompt, str)]
    for name, tokens in named:
        if wrong := [
            token for token in (min(tokens, default=0), max(tokens, default=0)) if not 0 <= token < vocab_size
        ]:
            message = f"{name}: has token {wrong[0]}, but the model's token ids are 0 to {vocab_size - 1}."
            raise ApiError(400, message, "invalid_request", name)


def check_tools(asked: BaseRequest, form: ToolFormat | None, model: str) -> None:
    """Raise ApiError if `asked` has tools, but the chat template of `model` has no `form` of tool calls."""
    if isinstance(asked, ChatCompletionRequest) and asked.offered and not form:
        message = f"tools: the format of tool calls of {model}'s chat template is not supported."
        raise ApiError(400, message, "invalid_request", "tools")


def longest_prompt(limits: Limits, context: int) -> int:
    """Return the maximum number of tokens of a prompt for a model with `context` tokens."""
    return min(limits.max_prompt_tokens, context - 1)


def room(asked: BaseRequest, prompt: int, limits: Limits, context: int) -> int:
    """Return the maximum number of new tokens after a prompt of `prompt` tokens: the requested number, or what the
    limits allow if the request has none. Raises ApiError if prompt or number exceed a limit."""
    where, limit = asked.prompt_name, asked.limit_name
    if prompt > (longest := longest_prompt(limits, context)):
        message = f"The prompt has {prompt} tokens, but at most {longest} are allowed."
        raise ApiError(400, message, "context_length_exceeded", where)
    wanted = asked.wanted_tokens
    if wanted is None:
        return min(limits.max_output_tokens, context - prompt)
    if wanted > limits.max_output_tokens:
        message = f"{limit} is {wanted}, but at most {limits.max_output_tokens} are allowed."
        raise ApiError(400, message, "max_tokens_exceeded", limit)
    if prompt + wanted > context:
        message = (
            f"The prompt has {prompt} tokens and {limit} is {wanted}, but the context is only {context} tokens: "
            f"shorten the prompt, or set {limit} to {context - prompt}."
        )
        raise ApiError(400, message, "context_length_exceeded", where)
    return wanted
