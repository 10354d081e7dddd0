"""Errors of the OpenAI API, and problems of a request in its notation."""

import re
from collections.abc import Mapping
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse

from speculative.sequence.prompt import TextTooLong
from speculative.serving.api.api_object import NOT_SERVED

PYDANTIC_WORDS = re.compile(r"^(Value error, |(Input|List|String|Dictionary) (?=should))| after validation, not \d+$")
MAX_SHOWN = 100  # maximum length of client input in an error message, in characters


class ApiError(HTTPException):
    """An error response: an HTTP status and the API's error object."""

    is_counted = False  # in the metrics, as the outcome of a request that was begun

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(status, message, None if retry_after is None else {"retry-after": str(retry_after)})
        self.body = {"error": {"message": message, "type": _type(status), "param": param, "code": code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status_code, self.headers)


def prompt_too_long(error: TextTooLong, param: str) -> ApiError:
    """The response to a text that the tokenizer would cut."""
    return ApiError(400, f"{param}: {error}.", "context_length_exceeded", param)


def _type(status: int) -> str:
    if status >= 500:
        return "server_error"
    return {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(
        status, "invalid_request_error"
    )


def shorten(text: str) -> str:
    """Shorten client input for an error message."""
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def describe_error(error: Mapping[str, Any]) -> tuple[str, str]:
    """Return the parameter of a pydantic error in the API's notation (`messages[0].content`), and the problem."""
    location = (*error["loc"], error["ctx"]["name"]) if error["type"] == NOT_SERVED else error["loc"]
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    place = shorten("".join(parts).removeprefix("."))
    if error["type"] == "missing":
        return place, "is required"
    if error["type"] in ("model_type", "model_attributes_type"):
        return place, "should be an object"
    return place, PYDANTIC_WORDS.sub("", error["msg"])
