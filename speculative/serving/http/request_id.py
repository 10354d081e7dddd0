"""ASGI middleware that adds the header x-request-id to each response: the request's own, or a new one.

It is the outermost one of the application, and also of Ray's proxy, which answers some requests itself.
"""

import re
import uuid

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"
ALLOWED = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


class RequestId:
    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = MutableHeaders(scope=scope)
        request_id = headers.get(HEADER, "")
        if not ALLOWED.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        headers[HEADER] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request_id  # in place of the one that Ray adds
            await send(message)

        await self.app(scope, receive, send_with_id)
