"""ASGI middleware that removes the headers by which a request controls Ray Serve itself.

A client could have Ray ignore that it disconnects, set a timeout of its own, or choose what the router stores.
"""

from starlette.types import ASGIApp, Receive, Scope, Send

NAMES = frozenset({
    b"x-session-id",
    b"x-request-timeout-seconds",
    b"x-request-disconnect-disabled",
    b"serve-multiplexed-model-id",
})  # fmt: skip


class WithoutInternalHeaders:
    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "headers" in scope:
            headers = [header for header in scope["headers"] if header[0].lower().replace(b"_", b"-") not in NAMES]
            scope = {**scope, "headers": headers}
        await self.app(scope, receive, send)
