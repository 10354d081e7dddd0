"""Limits on the number and idle time of a proxy's connections, and the proxy's middleware.

uvicorn, the HTTP server of Ray Serve, waits forever for the request of a client that connects and sends nothing. Ray
calls `bound` or `bound_for_prefix_routing` in each of its proxies, as configured by `ray_runtime.joined`.
"""

import asyncio

from starlette.middleware import Middleware
from uvicorn.protocols.http import auto

from speculative.serving.http.request_id import RequestId
from speculative.serving.ray_serve.body_hashes import BeginningReader
from speculative.serving.ray_serve.internal_headers import WithoutInternalHeaders

MOST = 1_000  # connections
IDLE = 30.0  # seconds without a request


def bound() -> list[Middleware]:
    """Install the limits; call before creating uvicorn's server. Returns the middlewares that Ray adds to its own,
    the outermost one last."""
    auto.AutoHTTPProtocol = bounded(auto.AutoHTTPProtocol)
    return [Middleware(RequestId), Middleware(WithoutInternalHeaders)]


def bound_for_prefix_routing() -> list[Middleware]:
    """The same for `--routing prefix`, which needs the beginning of each body."""
    return [Middleware(BeginningReader), *bound()]


def bounded(protocol: type[asyncio.Protocol], most: int = MOST, idle: float = IDLE) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol that closes a connection after `idle` to 2 `idle` seconds without a request."""

    class Bounded(protocol):  # type: ignore[valid-type, misc]
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            if len(self.connections) > most:
                transport.abort()
            self._look = self.loop.call_later(idle, self._close_if_idle, None)

        def connection_lost(self, error: Exception | None) -> None:
            self._look.cancel()
            super().connection_lost(error)

        def _close_if_idle(self, before: object) -> None:
            """`before`: the request at the time of the last check."""
            if self.cycle is before and (before is None or before.response_complete):
                self.transport.close()
            else:
                self._look = self.loop.call_later(idle, self._close_if_idle, self.cycle)

    return Bounded
