"""JSON parser for request bodies with limits on their size and number of values.

A few bytes of JSON (an empty object) can take a hundred times as much memory and produce an error each. Brackets and
commas are therefore counted before parsing.
"""

import json
import re
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

from speculative.error_text import lone_surrogate
from speculative.serving.api.errors import ApiError, shorten

BYTES_PER_TOKEN = 32  # of a prompt: plain text has about 4, escaped text up to 6 times as many
EXTRA_BYTES = 65_536  # for the body without its prompt
VALUES_PER_TOKEN = 2  # of a prompt: there may be several prompts of token ids
EXTRA_VALUES = 5_000
MAX_OBJECTS = 4_000  # and lists: messages and their parts, which cost more than other values
UNMARKED = bytes(set(range(256)) - set(b'"{[,'))
ESCAPED_SURROGATE = re.compile(
    rb"\\u[dD][89a-fA-F]"
)  # an escaped surrogate: half of a character outside the basic plane


def max_bytes(tokens: int) -> int:
    """Maximum size of a body whose prompt may have `tokens` tokens."""
    return EXTRA_BYTES + BYTES_PER_TOKEN * tokens


def max_values(tokens: int) -> int:
    """Maximum number of values of such a body."""
    return EXTRA_VALUES + VALUES_PER_TOKEN * tokens


def parse(body: bytes, tokens: int) -> Any:
    """The parsed body, whose prompt may have `tokens` tokens. Raises ApiError."""
    if not is_within_limits(body, max_values(tokens)):
        raise invalid_body(f"may have {MAX_OBJECTS} objects and lists and {max_values(tokens)} values here")
    try:
        data = json.loads(body.decode("utf-8-sig"), parse_constant=reject_constant)
        surrogate = lone_surrogate(json.dumps(data, ensure_ascii=False)) if ESCAPED_SURROGATE.search(body) else ""
    except UnicodeDecodeError:
        raise invalid_body("is not UTF-8") from None
    except RecursionError:
        raise invalid_body("is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise invalid_body(f"is not JSON: {error}") from None
    except ValueError:  # of int()
        raise invalid_body(f"has an integer of more than {sys.get_int_max_str_digits():,} digits") from None
    if surrogate:
        raise invalid_body(f"holds half a character, {surrogate} (a lone surrogate): send whole ones")
    return data


def is_within_limits(body: bytes, values: int) -> bool:
    """Whether the body has at most `values` values. Brackets and commas within strings do not count; strings are
    removed only if the total count is too high. Takes few calls and linear time for any body."""
    if counts_within_limits(body, values):
        return True
    punctuation = body.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, delete=UNMARKED)
    if (
        punctuation.count(b'"') > 4 * values
    ):  # a value has at most two strings, itself and its key, with two quotes each
        return False
    return counts_within_limits(b"".join(punctuation.split(b'"')[::2]), values)


def counts_within_limits(punctuation: bytes, values: int) -> bool:
    """Whether the numbers of opening brackets and commas are within the limits."""
    objects = punctuation.count(b"{") + punctuation.count(b"[")
    return objects <= MAX_OBJECTS and objects + punctuation.count(b",") <= values


def reject_constant(name: str) -> None:
    raise invalid_body(f"is not JSON: {name} is not a number")


def invalid_body(what: str) -> ApiError:
    return ApiError(400, f"The body {what}.", "invalid_request")


def body_route(tokens: int) -> type[APIRoute]:
    """FastAPI's route class with bodies parsed by `parse`. Refuses a body whose Content-Type is another one, or that
    has a Content-Encoding."""

    class BodyRequest(Request):
        async def json(self) -> Any:
            coding = self.headers.get("content-encoding", "identity")
            if coding.lower() != "identity":
                raise invalid_body(f"has Content-Encoding {shorten(coding)!r}, which is not supported: send plain JSON")
            return parse(await self.body(), tokens)

    class BodyRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def read_and_handle(request: Request) -> Response:
                try:
                    return await handle(BodyRequest(request.scope, request.receive))
                except RequestValidationError as error:
                    if isinstance(error.body, bytes):
                        content_type = shorten(request.headers.get("content-type", ""))
                        what = f"has Content-Type {content_type!r}, so it is not read as JSON"
                        raise invalid_body(f"{what}: send the header Content-Type: application/json") from None
                    raise

            return read_and_handle

    return BodyRoute
