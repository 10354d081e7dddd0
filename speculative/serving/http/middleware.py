"""ASGI middleware that checks every HTTP request first: API key, free slot, size and timeout of the body."""

import asyncio
import hashlib
import hmac
import json
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from speculative.serving.api.errors import ApiError
from speculative.serving.settings import Limits

OPEN = ("/health", "/")  # probed by machines without a key; the page, which has a field for it


def digest(key: str) -> bytes:
    """The hash stored for a key: sufficient to recognize it, not to recover it."""
    return hashlib.sha256(key.encode()).digest()


def salt(authorization: str, cache_key: str | None) -> bytes:
    """The salt of the prefix cache: requests share prompts only with others of the same API key and
    `prompt_cache_key`."""
    return digest(json.dumps([authorization, cache_key]))


class Guard:
    """ASGI middleware. `keys` are the `digest`s of the API keys, or None if no key is required."""

    def __init__(
        self,
        app: ASGIApp,
        keys: frozenset[bytes] | None,
        max_body: int,
        limits: Limits,
        on_rejected: Callable[[int], None],
    ):
        """`max_body` is in bytes. `on_rejected` is called with the status of each rejected request."""
        self.app = app
        self.keys = keys
        self.max_body = max_body
        self.limits = limits
        self.on_rejected = on_rejected
        self.open = 0  # requests being processed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].removeprefix(scope.get("root_path", "")) in OPEN:
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])
        try:
            self._check_key(headers.get(b"authorization", b"").decode("latin-1"))
            length = headers.get(b"content-length", b"0")
            if length.isdigit() and int(length) > self.max_body:
                raise self._too_large()
            if self.open >= self.limits.max_open_requests:
                raise ApiError(429, f"{self.open} requests are already open: retry in 1 s.", "queue_full",
                               retry_after=1)  # fmt: skip
        except ApiError as error:
            self.on_rejected(error.status_code)
            return await error.response()(scope, receive, send)
        self.open += 1
        try:
            await self.app(scope, self._bounded(receive), send)
        finally:
            self.open -= 1

    def _check_key(self, authorization: str) -> None:
        kind, _, given = authorization.partition(" ")
        if self.keys is None:
            return
        given_digest = digest(given.strip())
        if kind.lower() != "bearer" or not any(hmac.compare_digest(given_digest, key) for key in self.keys):
            raise ApiError(401, "The API key is missing or wrong: send the header Authorization: Bearer KEY.",
                           "invalid_api_key")  # fmt: skip

    def _bounded(self, receive: Receive) -> Receive:
        """Receive the body within its size and time limits; after it, pass on disconnect messages."""
        received, is_complete = 0, False
        until = asyncio.get_running_loop().time() + self.limits.body_timeout

        async def bounded() -> Message:
            nonlocal received, is_complete
            if is_complete:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), until - asyncio.get_running_loop().time())
            except asyncio.TimeoutError:
                seconds = self.limits.body_timeout
                raise ApiError(408, f"The body was not received within {seconds:g} s.", "body_too_slow") from None
            received += len(message.get("body", b""))
            is_complete = not message.get("more_body", False)
            if received > self.max_body:
                raise self._too_large()
            return message

        return bounded

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"The body has more than {self.max_body} bytes: send a shorter prompt, or fewer.", "body_too_large"
        )
