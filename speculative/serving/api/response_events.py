"""Responses of /v1/responses: the response object, or the typed events of a stream, numbered from 0 on.

The output has an item for each text and each tool call, which begins with its first piece and ends where the next one
begins.
"""

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from speculative.serving.api.errors import ApiError
from speculative.serving.api.responses import as_json, usage
from speculative.serving.api.responses_api import NamedFunction, ResponsesRequest
from speculative.serving.api.tool_calls import Arguments, Call, Event, Text, ToolParser
from speculative.serving.engine.engine_thread import GenerationHandle


class ResponsesBuilder:
    """Builds the response to `asked`, whose text the only one of `jobs` generates, in `ResponseBuilder`'s interface.
    `parser` finds the tool calls in it."""

    def __init__(
        self, asked: ResponsesRequest, model: str, jobs: Sequence[GenerationHandle], parser: ToolParser | None = None
    ):
        self._jobs = jobs
        self._parser = parser
        self._items: list[dict[str, Any]] = []  # all but the last are complete
        self._finish_reason: str | None = None
        self._number = 0  # of the next event
        choice = asked.tool_choice
        text_format = asked.text_format and asked.text_format.model_dump(by_alias=True, exclude_none=True)
        self._response: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": {},
            "model": model,
            "output": [],
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": {"format": text_format or {"type": "text"}},
            "tool_choice": choice.model_dump() if isinstance(choice, NamedFunction) else choice,
            "tools": [tool.model_dump(exclude_none=True) for tool in asked.tools],
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def whole(self) -> dict:
        """Return the response."""
        (job,) = self._jobs
        self.piece(0, job.result.text)
        self.end_choice(0, job.result.finish_reason)
        return self._finished()

    def begin(self) -> bytes:
        """Return the events before the text."""
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, response=self._response) for kind in kinds)

    def piece(self, index: int, text: str) -> bytes:
        """Return the events of a piece of the text."""
        return self._events(self._parser.feed(text) if self._parser else [Text(text)])

    def end_choice(self, index: int, finish_reason: str) -> bytes:
        """Return the events after the text."""
        rest = self._events(self._parser.end()) if self._parser else b""
        if not self._items:
            rest += self._begin_item(_message())
        drops = self._parser is not None and self._parser.drops
        self._finish_reason = "stop" if drops else finish_reason  # nothing that is kept was cut
        return rest + self._end_item("incomplete" if self._finish_reason == "length" else "completed")

    def end(self) -> bytes:
        """Return the last event."""
        response = self._finished()
        return self._event(f"response.{response['status']}", response=response)

    def broken(self, error: ApiError) -> bytes:
        """Return the last event of a stream that fails."""
        details = error.body["error"]
        return self._event("error", **{name: details[name] for name in ("code", "message", "param")})

    def _finished(self) -> dict:
        counts = usage(self._jobs, 1)
        cut = self._finish_reason == "length"
        return {
            **self._response,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
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

    def _events(self, found: Iterable[Event]) -> bytes:
        """The events of the text and calls that were found."""
        events = b""
        for one in found:
            if isinstance(one, Text):
                if not self._items or self._items[-1]["type"] != "message":
                    events += self._end_item("completed") + self._begin_item(_message())
                self._items[-1]["content"][0]["text"] += one.text
                events += self._event("response.output_text.delta", **self._place, delta=one.text, logprobs=[])
            elif isinstance(one, Call):
                events += self._end_item("completed") + self._begin_item(_call(one))
            elif isinstance(one, Arguments):
                self._items[-1]["arguments"] += one.text
                events += self._event("response.function_call_arguments.delta", **self._place, delta=one.text)
        return events

    @property
    def _place(self) -> dict[str, Any]:
        """The indices of the last item and, for a message, of its only part."""
        item = self._items[-1]
        place = {"item_id": item["id"], "output_index": len(self._items) - 1}
        return place | ({"content_index": 0} if item["type"] == "message" else {})

    def _begin_item(self, item: dict[str, Any]) -> bytes:
        self._items.append(item)
        is_message = item["type"] == "message"
        empty = {**item, "content": []} if is_message else item
        events = self._event("response.output_item.added", output_index=len(self._items) - 1, item=empty)
        if is_message:
            events += self._event("response.content_part.added", **self._place, part=item["content"][0])
        return events

    def _end_item(self, status: str) -> bytes:
        """Return the events that end the last item, if there is one."""
        if not self._items:
            return b""
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "message":
            (part,) = item["content"]
            events = self._event("response.output_text.done", **self._place, text=part["text"], logprobs=[])
            events += self._event("response.content_part.done", **self._place, part=part)
        else:
            events = self._event("response.function_call_arguments.done", **self._place, arguments=item["arguments"])
        return events + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _event(self, kind: str, **content: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number, **content}
        self._number += 1
        return f"event: {kind}\ndata: {as_json(data)}\n\n".encode()


def _message() -> dict[str, Any]:
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    item = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "status": "in_progress", "role": "assistant"}
    return {**item, "content": [part]}


def _call(call: Call) -> dict[str, Any]:
    item = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "status": "in_progress"}
    return {**item, "call_id": call.id, "name": call.name, "arguments": ""}
