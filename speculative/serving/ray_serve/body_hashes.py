"""Hashes of the beginning of a request body, for Ray's router, which chooses a replica without reading the body.

`BeginningReader` runs in Ray's proxies (connections.py), behind `WithoutInternalHeaders`. It reads the beginning of a
body and adds a header with hashes: one for each `CHUNK` bytes, together with all bytes before them.
"""

import asyncio
import hashlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-session-id"  # Ray gives its value to the router
CHUNK = 256  # bytes of a body per hash
READ = 128 * CHUNK  # bytes of a body that are looked at
SECONDS = 1.0  # to wait for them: a slow client's request is routed by what has come


def hashes(body: bytes, root: bytes) -> list[str]:
    """A hash for every whole chunk of `body` and all before it; `root` is hashed before the first."""
    found: list[str] = []
    for end in range(CHUNK, len(body) + 1, CHUNK):
        before = found[-1].encode() if found else root
        found.append(hashlib.blake2b(before + body[end - CHUNK : end], digest_size=8).hexdigest())
    return found


class BeginningReader:
    """ASGI middleware that adds `HEADER`, with the hashes of the body's beginning, to requests that have a body.

    Bodies of different API keys never have the same hashes, as they share no cache.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self.app(scope, receive, send)
        messages = await self._read(receive)
        body = b"".join(message.get("body", b"") for message in messages)[:READ]
        found = hashes(body, dict(scope["headers"]).get(b"authorization", b""))
        headers = [*scope["headers"], (HEADER, ",".join(found).encode())]

        async def again() -> Message:
            return messages.pop(0) if messages else await receive()

        await self.app({**scope, "headers": headers}, again, send)

    @staticmethod
    async def _read(receive: Receive) -> list[Message]:
        """The messages with the first `READ` bytes of the body, or those that come in time."""
        messages: list[Message] = []
        size, now = 0, asyncio.get_running_loop().time
        until = now() + SECONDS
        while size < READ and (not messages or messages[-1].get("more_body")):
            try:
                messages.append(await asyncio.wait_for(receive(), until - now()))
            except asyncio.TimeoutError:
                break
            size += len(messages[-1].get("body", b""))
        return messages
