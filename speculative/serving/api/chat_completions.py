"""Requests of /v1/chat/completions."""

from typing import Annotated, ClassVar

from openvino_genai import ChatHistory, StructuredOutputConfig
from pydantic import FailFast, Field, ValidationInfo, field_validator, model_validator

from speculative.serving.api.base_request import MOST_LOGPROBS, BaseRequest
from speculative.serving.api.messages import Message
from speculative.serving.api.structured_output import ResponseFormat, Structure
from speculative.serving.api.tool_calls import ToolFormat, ToolParser, forced
from speculative.serving.api.tools import MOST_TOOLS, NamedTool, Tool, ToolChoice, check_choice, check_names


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
            config = StructuredOutputConfig(structural_tags_config=tag)
            return Structure("tools", config, forces_calls=self.tool_choice != "auto")
        return (self.response_format and self.response_format.structure) or super().structure(form)

    def parser(self, form: ToolFormat | None) -> ToolParser | None:
        """A parser of the tool calls in a text."""
        names = {tool.function.name for tool in self.offered}
        return ToolParser(form, names, self.parallel_tool_calls is not False) if form and names else None

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
