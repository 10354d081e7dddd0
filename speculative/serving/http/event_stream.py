"""A response of server-sent events, whose context ends with the last event or when the client disconnects."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send


class AlreadySent(Exception):
    """The stream has already sent the error, which is `__cause__`, to the client."""


class EventStream(Response):
    """Sends `events` within `context`."""

    media_type = "text/event-stream"

    def __init__(self, context: AbstractContextManager, events: Callable[[], AsyncIterator[bytes]]):
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})  # the latter for nginx
        del self.headers["content-length"]
        self._context, self._events = context, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._context:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in self._events():
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
