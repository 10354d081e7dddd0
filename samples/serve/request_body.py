"""A request's body: how long it may be, how much may be in it, and its JSON.

A few bytes of JSON can become a hundred times as much memory (an empty object), and one error each. So brackets and
commas are counted before anything is made of them.
"""

import json
import re
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from samples.serve.openai_schema import ApiError

BYTES_PER_TOKEN = 32  # of a prompt: text has 4 or so, escaped text up to 6 times as many
BYTES_BESIDE = 65_536  # of a body without its prompt
VALUES_BESIDE = 5_000
MOST_OBJECTS = 10_000  # and lists
STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # of a character outside the basic plane, escaped


def most_bytes(tokens: int) -> int:
    """Of a body whose prompt may have so many tokens."""
    return BYTES_BESIDE + BYTES_PER_TOKEN * tokens


def parsed(body: bytes, tokens: int) -> Any:
    """What is in a body whose prompt may have so many tokens. Raises ApiError."""
    objects, values = counted(body)
    if objects > MOST_OBJECTS or values > VALUES_BESIDE + tokens:  # perhaps they are in texts
        objects, values = counted(STRING.sub(b"", body))
    if objects > MOST_OBJECTS or values > VALUES_BESIDE + tokens:
        raise refusal(f"has {objects} objects and lists and {values} values, and may have {MOST_OBJECTS} and "
                      f"{VALUES_BESIDE + tokens} here")  # fmt: skip
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


def counted(body: bytes) -> tuple[int, int]:
    """No fewer objects and lists, and no fewer values, than are in it."""
    objects = body.count(b"{") + body.count(b"[")
    return objects, objects + body.count(b",")


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
