"""The connections of a proxy, bounded in number and in idle time: uvicorn, which Ray Serve listens with, waits for ever
for the request of a client that connects and says nothing.

Ray calls `bound` in each of its proxies, as `ray_here.PROXIES` has it.
"""

import asyncio

from uvicorn.protocols.http import auto

MOST = 1_000  # connections
IDLE = 30.0  # seconds without a request


def bound() -> list:
    """To be called before uvicorn's server is made. Returns Ray's middlewares: none."""
    auto.AutoHTTPProtocol = bounded(auto.AutoHTTPProtocol)
    return []


def bounded(protocol: type[asyncio.Protocol], most: int = MOST, idle: float = IDLE) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol, a connection without a request closed after `idle` to 2 `idle` seconds."""

    class Bounded(protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            if len(self.connections) > most:
                transport.abort()
            self._look = self.loop.call_later(idle, self._close_if_idle, None)

        def connection_lost(self, error: Exception | None) -> None:
            self._look.cancel()
            super().connection_lost(error)

        def _close_if_idle(self, before: object) -> None:
            """`before`: the request that was there when this was looked at last."""
            if self.cycle is before and (before is None or before.response_complete):
                self.transport.close()
            else:
                self._look = self.loop.call_later(idle, self._close_if_idle, self.cycle)

    return Bounded
