"""A request's body: how long it may be, how much may be in it, and its JSON.

A few bytes of JSON can become a hundred times as much memory (an empty object), and one error each. So brackets and
commas are counted before anything is made of them.
"""

import json
import re
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from speculative.serving.protocol import ApiError

BYTES_PER_TOKEN = 32  # of a prompt: text has 4 or so, escaped text up to 6 times as many
BYTES_BESIDE = 65_536  # of a body without its prompt
VALUES_BESIDE = 5_000
MOST_OBJECTS = 4_000  # and lists: each may be a message or a part of one, which cost more than other values
UNMARKED = bytes(set(range(256)) - set(b'"{[,'))
HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # of a character outside the basic plane, escaped


def most_bytes(tokens: int) -> int:
    """Of a body whose prompt may have so many tokens."""
    return BYTES_BESIDE + BYTES_PER_TOKEN * tokens


def parsed(body: bytes, tokens: int) -> Any:
    """What is in a body whose prompt may have so many tokens. Raises ApiError."""
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
    """Whether there are at most so many values in it. The brackets and commas of strings do not count; they are left
    out only where all of them together are too many. The calls are few and the time is linear, whatever the body is."""
    if few(body, values):
        return True
    marks = body.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, delete=UNMARKED)
    if marks.count(b'"') > 4 * values:  # a value has two strings at most, itself and its key, of two quotes each
        return False
    return few(b"".join(marks.split(b'"')[::2]), values)


def few(marks: bytes, values: int) -> bool:
    """By the objects and lists that begin there, and the commas."""
    objects = marks.count(b"{") + marks.count(b"[")
    return objects <= MOST_OBJECTS and objects + marks.count(b",") <= values


def no_number(name: str) -> None:
    raise ValueError(f"{name} is no number")


def refusal(what: str) -> ApiError:
    return ApiError(400, f"The body {what}.", "invalid_request")


def route_of(tokens: int) -> type[APIRoute]:
    """FastAPI's route, with bodies read by `parsed`."""

    class BodyRequest(Request):
        async def json(self) -> Any:
            return parsed(await self.body(), tokens)

    class BodyRoute(APIRoute):
        def get_route_handler(self):
            handle = super().get_route_handler()

            async def read_and_handle(request: Request) -> Response:
                return await handle(BodyRequest(request.scope, request.receive))

            return read_and_handle

    return BodyRoute
