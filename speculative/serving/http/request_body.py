"""JSON parser for request bodies with limits on their size and number of values.

A few bytes of JSON (an empty object) can take a hundred times as much memory and produce an error each. Brackets and
commas are therefore counted before parsing.
"""

import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

from speculative.serving.api.errors import ApiError, shown

BYTES_PER_TOKEN = 32  # of a prompt: plain text has about 4, escaped text up to 6 times as many
BYTES_BESIDE = 65_536  # of a body without its prompt
VALUES_BESIDE = 5_000
MOST_OBJECTS = 4_000  # and lists: each may be a message or part of one, which cost more than other values
UNMARKED = bytes(set(range(256)) - set(b'"{[,'))
HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # an escaped surrogate: half of a character outside the basic plane


def most_bytes(tokens: int) -> int:
    """Maximum size of a body whose prompt may have `tokens` tokens."""
    return BYTES_BESIDE + BYTES_PER_TOKEN * tokens


def parsed(body: bytes, tokens: int) -> Any:
    """The parsed body, whose prompt may have `tokens` tokens. Raises ApiError."""
    if not fits(body, VALUES_BESIDE + tokens):
        raise refusal(f"may have {MOST_OBJECTS} objects and lists and {VALUES_BESIDE + tokens} values here")
    try:
        data = json.loads(body.decode("utf-8"), parse_constant=no_number)
        if HALF.search(body):
            json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise refusal(f"holds half a character, {half} (a lone surrogate): send whole ones") from None
    except UnicodeDecodeError:
        raise refusal("is not UTF-8") from None
    except RecursionError:
        raise refusal("is nested too deeply") from None
    except ValueError as error:
        raise refusal(f"is not JSON: {error}") from None
    return data


def fits(body: bytes, values: int) -> bool:
    """Whether the body has at most `values` values. Brackets and commas within strings do not count; strings are
    removed only if the total count is too high. Takes few calls and linear time for any body."""
    if few(body, values):
        return True
    marks = body.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, delete=UNMARKED)
    if marks.count(b'"') > 4 * values:  # a value has at most two strings, itself and its key, with two quotes each
        return False
    return few(b"".join(marks.split(b'"')[::2]), values)


def few(marks: bytes, values: int) -> bool:
    """Whether the numbers of opening brackets and commas are within the limits."""
    objects = marks.count(b"{") + marks.count(b"[")
    return objects <= MOST_OBJECTS and objects + marks.count(b",") <= values


def no_number(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def refusal(what: str) -> ApiError:
    return ApiError(400, f"The body {what}.", "invalid_request")


def route_of(tokens: int) -> type[APIRoute]:
    """FastAPI's route class with bodies parsed by `parsed`. Refuses a body whose Content-Type is another one."""

    class BodyRequest(Request):
        async def json(self) -> Any:
            return parsed(await self.body(), tokens)

    class BodyRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def read_and_handle(request: Request) -> Response:
                try:
                    return await handle(BodyRequest(request.scope, request.receive))
                except RequestValidationError as error:
                    if isinstance(error.body, bytes):
                        kind = shown(request.headers.get("content-type", ""))
                        what = f"has Content-Type {kind!r}, so it is not read as JSON: send the header Content-Type: "
                        raise refusal(f"{what}application/json") from None
                    raise

            return read_and_handle

    return BodyRoute
