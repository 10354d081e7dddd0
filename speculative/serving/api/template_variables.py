"""Variables of the chat template in a request: `chat_template_kwargs`, as in vLLM, and `reasoning_effort`."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from speculative.pair.thinking_switch import VARIABLE
from speculative.serving.api.reasoning import END
from speculative.serving.api.structured_output import Schema

RESERVED = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"}  # set by the server

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


def check_variables(variables: dict[str, Any]) -> dict[str, Any]:
    """Validate the names of variables."""
    if reserved := sorted(RESERVED & variables.keys()):
        raise ValueError(f"{reserved[0]} is set by the server and cannot be changed")
    return variables


TemplateVariables = Annotated[Schema, AfterValidator(check_variables)]


def effort_variables(effort: ReasoningEffort | None) -> dict[str, Any]:
    """The variables that set the effort: `reasoning_effort` and, to disable reasoning, `enable_thinking`."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort} | ({VARIABLE: False} if effort == "none" else {})


def has_effort(chat_template: str, effort: ReasoningEffort | None) -> bool:
    """Whether a chat template can set the effort. All that have no reasoning can set none."""
    if effort == "none" and (VARIABLE in chat_template or END not in chat_template):
        return True
    return effort is None or "reasoning_effort" in chat_template
