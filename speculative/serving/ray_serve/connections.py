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

MAX_CONNECTIONS = 1_000
IDLE_SECONDS = 30.0  # without a request


def bound() -> list[Middleware]:
    """Install the limits; call before creating uvicorn's server. Returns the middlewares that Ray adds to its own,
    the outermost one last."""
    auto.AutoHTTPProtocol = limit_connections(auto.AutoHTTPProtocol)
    return [Middleware(RequestId), Middleware(WithoutInternalHeaders)]


def bound_for_prefix_routing() -> list[Middleware]:
    """The same for `--routing prefix`, which needs the beginning of each body."""
    return [Middleware(BeginningReader), *bound()]


def limit_connections(
    protocol: type[asyncio.Protocol], max_connections: int = MAX_CONNECTIONS, idle_seconds: float = IDLE_SECONDS
) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol, with a connection limit. It closes a connection that has had no request for
    `idle_seconds` to twice as long."""

    class Bounded(protocol):  # type: ignore[valid-type, misc]
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                transport.abort()
            self._idle_check = self.loop.call_later(idle_seconds, self._close_if_idle, None)

        def connection_lost(self, error: Exception | None) -> None:
            self._idle_check.cancel()
            super().connection_lost(error)

        def _close_if_idle(self, last_cycle: object) -> None:
            """`last_cycle`: the request at the time of the last check."""
            if self.cycle is last_cycle and (last_cycle is None or last_cycle.response_complete):
                self.transport.close()
            else:
                self._idle_check = self.loop.call_later(idle_seconds, self._close_if_idle, self.cycle)

    return Bounded
