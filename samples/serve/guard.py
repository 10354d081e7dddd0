"""What every HTTP request has to pass before it is looked at: the API key, and the size of its body."""

import hashlib
import hmac
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from samples.serve.openai_schema import ApiError

OPEN = ("/health",)  # asked by machines that have no key


def digest(key: str) -> bytes:
    """What is kept of a key: enough to know it again, not to tell it."""
    return hashlib.sha256(key.encode()).digest()


class Guard:
    """ASGI middleware. `key` is the `digest` of the API key, or None where there is none."""

    def __init__(self, app: ASGIApp, key: bytes | None, max_body: int, refused: Callable[[int], None]):
        """`refused` is told the status of each refusal."""
        self.app = app
        self.key = key
        self.max_body = max_body
        self.refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])
        try:
            if scope["path"] not in OPEN:
                self._check_key(headers.get(b"authorization", b"").decode("latin-1"))
            length = headers.get(b"content-length", b"0")
            if length.isdigit() and int(length) > self.max_body:
                raise self._too_large()
        except ApiError as error:
            self.refused(error.status_code)
            return await error.response()(scope, receive, send)
        await self.app(scope, self._bounded(receive), send)

    def _check_key(self, authorization: str) -> None:
        kind, _, given = authorization.partition(" ")
        if self.key is None:
            return
        if kind.lower() != "bearer" or not hmac.compare_digest(digest(given.strip()), self.key):
            raise ApiError(401, "The API key is missing or wrong: send the header Authorization: Bearer KEY.",
                           "invalid_api_key")  # fmt: skip

    def _bounded(self, receive: Receive) -> Receive:
        came = 0

        async def bounded() -> Message:
            nonlocal came
            message = await receive()
            came += len(message.get("body", b""))
            if came > self.max_body:
                raise self._too_large()
            return message

        return bounded

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body has more than {self.max_body} bytes: send a shorter prompt.", "body_too_large")
