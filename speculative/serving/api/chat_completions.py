"""Requests of /v1/chat/completions."""

from typing import Annotated, Any, ClassVar

from openvino_genai import ChatHistory, StructuredOutputConfig
from pydantic import FailFast, Field, ValidationInfo, field_validator, model_validator

from speculative.serving.api.base_request import MAX_LOGPROBS, BaseRequest
from speculative.serving.api.messages import Message
from speculative.serving.api.structured_output import ResponseFormat, Structure
from speculative.serving.api.template_variables import ReasoningEffort, TemplateVariables, effort_variables
from speculative.serving.api.tool_calls import ToolFormat, ToolParser, forced_calls_tag
from speculative.serving.api.tools import MAX_TOOLS, NamedTool, Tool, ToolChoice, check_choice, check_names


class ChatCompletionRequest(BaseRequest):
    no_effect: ClassVar[dict[str, tuple]] = BaseRequest.no_effect | {
        "add_special_tokens": (False,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "best_of": (1,),
        "continue_final_message": (False,),
        "echo": (False,),
        "modalities": (["text"],),
        "store": (False,),
        "verbosity": ("medium",),
    }

    prompt_name: ClassVar[str] = "messages"
    effort_name: ClassVar[str] = "reasoning_effort"
    parameters_name: ClassVar[str] = "tools[{}].function.parameters"

    messages: Annotated[list[Message], FailFast()] = Field(min_length=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31)
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], FailFast()] = Field([], max_length=MAX_TOOLS)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: TemplateVariables = Field({})  # vLLM's extension

    @model_validator(mode="after")
    def check_top_logprobs(self) -> "ChatCompletionRequest":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs requires logprobs=true")
        return self

    @model_validator(mode="after")
    def check_structured_outputs(self) -> "ChatCompletionRequest":
        if self.structured_outputs and self.response_format and self.response_format.structure:
            raise ValueError("response_format and structured_outputs exclude each other: send one of them")
        if self.structured_outputs and self.callable_tools:
            raise ValueError("structured_outputs and tools exclude each other: send one of them")
        return self

    @field_validator("tools")
    @classmethod
    def check_tool_names(cls, tools: list[Tool]) -> list[Tool]:
        check_names([tool.function.name for tool in tools])
        return tools

    @field_validator("tool_choice")
    @classmethod
    def check_tool_choice(cls, choice: ToolChoice, info: ValidationInfo) -> ToolChoice:
        names = [tool.function.name for tool in info.data.get("tools", ())]
        check_choice(choice.function.name if isinstance(choice, NamedTool) else None, choice == "required", names)
        return choice

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def names_tool(self) -> bool:
        """Whether the request names the tool to call."""
        return isinstance(self.tool_choice, NamedTool)

    @property
    def forces_calls(self) -> bool:
        """Whether the model must call tools."""
        return self.tool_choice not in ("none", "auto")

    @property
    def limit_name(self) -> str:
        return "max_completion_tokens" if self.max_completion_tokens else "max_tokens"

    @property
    def requested_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def structure(self, tool_format: ToolFormat | None) -> Structure | None:
        answer_schema = self.response_format.schema_text if self.response_format else None
        if tool_format and self.callable_tools and (answer_schema or self.tool_choice != "auto"):
            chosen_name = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
            tools = {i: tool.function for i, tool in enumerate(self.tools) if chosen_name in (None, tool.function.name)}
            functions = {function.name: function.schema_text for function in tools.values()}
            multiple = not chosen_name and self.parallel_tool_calls is not False
            text_schema = answer_schema if self.tool_choice == "auto" else None
            tag = forced_calls_tag(tool_format, functions, multiple, text_schema)
            config = StructuredOutputConfig(structural_tags_config=tag)
            parts = [Structure.of_schema(self.parameters_name.format(i), tools[i].schema_text) for i in tools]
            return Structure("tools", config, self.forces_calls, tuple(parts))
        return (self.response_format and self.response_format.structure) or super().structure(tool_format)

    def tool_parser(self, tool_format: ToolFormat | None) -> ToolParser | None:
        """A parser of the tool calls in a text."""
        names = {tool.function.name for tool in self.callable_tools}
        if not tool_format or not names:
            return None
        return ToolParser(tool_format, names, self.parallel_tool_calls is not False, self.forces_calls)

    def history(self, tool_format: ToolFormat | None) -> ChatHistory:
        """The messages, tools and variables, as input of a chat template."""
        history = ChatHistory([message.plain() for message in self.messages])
        variables: dict[str, Any] = {**effort_variables(self.reasoning_effort), **self.chat_template_kwargs}
        if tool_format and self.callable_tools:
            tools = [tool.model_dump(exclude_none=True) for tool in self.callable_tools]
            if tool_format.variable == "tools":
                history.set_tools(tools)
            else:
                variables[tool_format.variable] = tools
        history.set_extra_context(variables)
        return history

    def prompts(self, tool_format: ToolFormat | None) -> list:
        return [self.history(tool_format)]

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
