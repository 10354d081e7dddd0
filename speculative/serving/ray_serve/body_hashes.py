"""Hashes of the beginning of a request body, for Ray's router, which chooses a replica without reading the body.

`BeginningReader` runs in Ray's proxies (connections.py), behind `WithoutInternalHeaders`. It reads the beginning of a
body and adds a header with hashes: one for each `CHUNK` bytes, together with all bytes before them.
"""

import asyncio
import hashlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-session-id"  # Ray gives its value to the router
CHUNK = 256  # bytes of a body per hash
PREFIX_BYTES = 128 * CHUNK  # of a body that are hashed
READ_SECONDS = 1.0  # time limit for reading them: a slow client's request is routed by what has arrived


def chunk_hashes(body: bytes, root: bytes) -> list[str]:
    """For each full chunk of `body`, a hash of it and all chunks before it; `root` is hashed before the first."""
    hashes: list[str] = []
    for end in range(CHUNK, len(body) + 1, CHUNK):
        previous = hashes[-1].encode() if hashes else root
        hashes.append(hashlib.blake2b(previous + body[end - CHUNK : end], digest_size=8).hexdigest())
    return hashes


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
        body = b"".join(message.get("body", b"") for message in messages)[:PREFIX_BYTES]
        hashes = chunk_hashes(body, dict(scope["headers"]).get(b"authorization", b""))
        headers = [*scope["headers"], (HEADER, ",".join(hashes).encode())]

        async def replay() -> Message:
            return messages.pop(0) if messages else await receive()

        await self.app({**scope, "headers": headers}, replay, send)

    @staticmethod
    async def _read(receive: Receive) -> list[Message]:
        """The messages with the first `PREFIX_BYTES` bytes of the body, or those that arrive within `READ_SECONDS`."""
        messages: list[Message] = []
        size, now = 0, asyncio.get_running_loop().time
        deadline = now() + READ_SECONDS
        while size < PREFIX_BYTES and (not messages or messages[-1].get("more_body")):
            try:
                messages.append(await asyncio.wait_for(receive(), deadline - now()))
            except asyncio.TimeoutError:
                break
            size += len(messages[-1].get("body", b""))
        return messages
