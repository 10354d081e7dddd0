"""Responses of /v1/responses: the response object, or the typed events of a stream, numbered from 0 on.

The output has an item for the reasoning, each text and each tool call, which begins with its first piece and ends where
the next one begins.
"""

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from speculative.serving.api.answer_parser import AnswerParser
from speculative.serving.api.errors import ApiError
from speculative.serving.api.reasoning import Reasoning
from speculative.serving.api.responses import as_json, usage
from speculative.serving.api.responses_api import NamedFunction, ResponsesRequest
from speculative.serving.api.tool_calls import Arguments, Call, Event, Text
from speculative.serving.engine.engine_thread import GenerationHandle

TEXT_EVENTS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}  # by type of item


class ResponsesBuilder:
    """Builds the response to `request`, whose text the only one of `jobs` generates, in `ResponseBuilder`'s interface.
    `parser` finds reasoning and tool calls in it."""

    def __init__(self, request: ResponsesRequest, model: str, jobs: Sequence[GenerationHandle], parser: AnswerParser):
        self._jobs = jobs
        self._parser = parser
        self._items: list[dict[str, Any]] = []  # all but the last are complete
        self._finish_reason: str | None = None
        self._sequence_number = 0  # of the next event
        choice = request.tool_choice
        text_format = request.text_format and request.text_format.model_dump(by_alias=True, exclude_none=True)
        self._response: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "metadata": request.metadata,
            "model": model,
            "output": [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
            "safety_identifier": request.safety_identifier,
            "service_tier": request.service_tier,
            "store": False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {"format": text_format or {"type": "text"}},
            "tool_choice": choice.model_dump() if isinstance(choice, NamedFunction) else choice,
            "tools": [tool.model_dump(exclude_none=True) for tool in request.tools],
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": request.user,
        }

    def full_response(self) -> dict:
        """Return the response."""
        (job,) = self._jobs
        self.piece(0, job.result.text)
        self.end_choice(0, job.result.finish_reason)
        return self._finished()

    def begin(self) -> bytes:
        """Return the events before the text."""
        event_types = ("response.created", "response.in_progress")
        return b"".join(self._event(event_type, response=self._response) for event_type in event_types)

    def piece(self, index: int, text: str) -> bytes:
        """Return the events of a piece of the text."""
        return self._events(self._parser.feed(text))

    def end_choice(self, index: int, finish_reason: str) -> bytes:
        """Return the events after the text."""
        rest = self._events(self._parser.end())
        if not self._items:
            rest += self._begin_item(_message())
        # if calls are dropped, the output that is kept is complete
        self._finish_reason = "stop" if self._parser.drops_calls else finish_reason
        return rest + self._end_item("incomplete" if self._finish_reason == "length" else "completed")

    def end(self) -> bytes:
        """Return the last event."""
        response = self._finished()
        return self._event(f"response.{response['status']}", response=response)

    def error_event(self, error: ApiError) -> bytes:
        """Return the last event of a stream that fails."""
        details = error.body["error"]
        return self._event("error", **{name: details[name] for name in ("code", "message", "param")})

    def _finished(self) -> dict:
        counts = usage(self._jobs, 1, sum(self._parser.count_reasoning(job.result.tokens) for job in self._jobs))
        truncated = self._finish_reason == "length"
        return {
            **self._response,
            "status": "incomplete" if truncated else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if truncated else None,
            "output": self._items,
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": {
                    "cached_tokens": counts["prompt_tokens_details"]["cached_tokens"],
                    "cache_write_tokens": 0,  # writing into the prefix cache is free
                },
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": counts["completion_tokens_details"],
                "total_tokens": counts["total_tokens"],
            },
        }

    def _events(self, parsed_events: Iterable[Event | Reasoning]) -> bytes:
        """The events of parsed reasoning, text and tool calls."""
        events = b""
        for parsed in parsed_events:
            if isinstance(parsed, Text | Reasoning):
                new = _message() if isinstance(parsed, Text) else _reasoning()
                if not self._items or self._items[-1]["type"] != new["type"]:
                    events += self._end_item("completed") + self._begin_item(new)
                self._items[-1]["content"][0]["text"] += parsed.text
                events += self._text_event("delta", delta=parsed.text)
            elif isinstance(parsed, Call):
                events += self._end_item("completed") + self._begin_item(_call(parsed))
            elif isinstance(parsed, Arguments):
                self._items[-1]["arguments"] += parsed.text
                events += self._event("response.function_call_arguments.delta", **self._indices, delta=parsed.text)
        return events

    @property
    def _indices(self) -> dict[str, Any]:
        """The indices of the last item and, if it has content, of its only part."""
        item = self._items[-1]
        place = {"item_id": item["id"], "output_index": len(self._items) - 1}
        return place | ({"content_index": 0} if "content" in item else {})

    def _text_event(self, event: str, **content: Any) -> bytes:
        """An event of the text of the last item."""
        kind = self._items[-1]["type"]
        more = content | ({"logprobs": []} if kind == "message" else {})
        return self._event(f"{TEXT_EVENTS[kind]}.{event}", **self._indices, **more)

    def _begin_item(self, item: dict[str, Any]) -> bytes:
        self._items.append(item)
        empty = {**item, "content": []} if "content" in item else item
        events = self._event("response.output_item.added", output_index=len(self._items) - 1, item=empty)
        if "content" in item:
            events += self._event("response.content_part.added", **self._indices, part=item["content"][0])
        return events

    def _end_item(self, status: str) -> bytes:
        """Return the events that end the last item, if there is one."""
        if not self._items:
            return b""
        item = self._items[-1]
        item["status"] = status
        if "content" in item:
            (part,) = item["content"]
            events = self._text_event("done", text=part["text"])
            events += self._event("response.content_part.done", **self._indices, part=part)
        else:
            events = self._event("response.function_call_arguments.done", **self._indices, arguments=item["arguments"])
        return events + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _event(self, event_type: str, **content: Any) -> bytes:
        data = {"type": event_type, "sequence_number": self._sequence_number, **content}
        self._sequence_number += 1
        return f"event: {event_type}\ndata: {as_json(data)}\n\n".encode()


def _message() -> dict[str, Any]:
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    item = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "status": "in_progress", "role": "assistant"}
    return {**item, "content": [part]}


def _reasoning() -> dict[str, Any]:
    item = {"id": f"rs_{uuid.uuid4().hex}", "type": "reasoning", "status": "in_progress", "summary": []}
    return {**item, "content": [{"type": "reasoning_text", "text": ""}]}


def _call(call: Call) -> dict[str, Any]:
    item = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "status": "in_progress"}
    return {**item, "call_id": call.id, "name": call.name, "arguments": ""}
