"""Responses of /v1/responses: the response object, or the typed events of a stream, numbered from 0 on."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from speculative.serving.engine_thread import GenerationHandle
from speculative.serving.protocol import ApiError
from speculative.serving.responses import as_json, usage
from speculative.serving.responses_api import ResponsesRequest

PLACE = {"output_index": 0, "content_index": 0}


class ResponsesBuilder:
    """Builds the response to `asked`, whose text the only one of `jobs` generates, in `ResponseBuilder`'s interface."""

    def __init__(self, asked: ResponsesRequest, model: str, jobs: Sequence[GenerationHandle]):
        self._jobs = jobs
        self._item_id = f"msg_{uuid.uuid4().hex}"
        self._text = ""
        self._finish_reason: str | None = None
        self._number = 0  # of the next event
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
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": {"format": text_format or {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def whole(self) -> dict:
        """Return the response."""
        (job,) = self._jobs
        self._text, self._finish_reason = job.result.text, job.result.finish_reason
        return self._finished()

    def begin(self) -> bytes:
        """Return the events before the text."""
        return b"".join(
            [
                self._event("response.created", response=self._response),
                self._event("response.in_progress", response=self._response),
                self._event("response.output_item.added", output_index=0, item=self._item("in_progress", [])),
                self._event("response.content_part.added", item_id=self._item_id, **PLACE, part=self._part("")),
            ]
        )

    def piece(self, index: int, text: str) -> bytes:
        """Return the event of a piece of the text."""
        self._text += text
        return self._event("response.output_text.delta", item_id=self._item_id, **PLACE, delta=text, logprobs=[])

    def end_choice(self, index: int, finish_reason: str) -> bytes:
        """Return the events after the text."""
        self._finish_reason = finish_reason
        place = {"item_id": self._item_id, **PLACE}
        return b"".join(
            [
                self._event("response.output_text.done", **place, text=self._text, logprobs=[]),
                self._event("response.content_part.done", **place, part=self._part(self._text)),
                self._event("response.output_item.done", output_index=0, item=self._message()),
            ]
        )

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
            "output": [self._message()],
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": counts["prompt_tokens_details"]["cached_tokens"]},
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": counts["completion_tokens_details"],
                "total_tokens": counts["total_tokens"],
            },
        }

    def _message(self) -> dict:
        status = "incomplete" if self._finish_reason == "length" else "completed"
        return self._item(status, [self._part(self._text)])

    def _item(self, status: str, content: list[dict]) -> dict:
        return {"id": self._item_id, "type": "message", "status": status, "role": "assistant", "content": content}

    @staticmethod
    def _part(text: str) -> dict:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _event(self, kind: str, **content: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number, **content}
        self._number += 1
        return f"event: {kind}\ndata: {as_json(data)}\n\n".encode()
