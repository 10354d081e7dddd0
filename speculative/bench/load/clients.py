"""Closed-loop clients for an OpenAI-compatible server, each sending one request after another in its own thread.

    server = Target("http://127.0.0.1:8000/v1", "embedded")
    span = closed_loop(server, clients=8, seconds=10, prompts=["def area(", "class Box:"], settings={"max_tokens": 50})

The outcome of each request is a `RequestRecord`: answered, refused (with the API's error object), cut off, or lost.
"""

import http.client
import itertools
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from speculative.bench.load.metrics import RequestRecord, Span
from speculative.error_text import one_line

TIMEOUT_SECONDS = 120.0  # seconds without any data after which a request counts as lost
ROUND_TRIPS = 40  # requests, one after the other
TOKENIZE = "/tokenize"  # beside /v1, as in vLLM
MAX_RETRY_WAIT = 5.0  # maximum seconds a client honours Retry-After


class Target(NamedTuple):
    """A server's endpoint."""

    url: str  # http://127.0.0.1:8000/v1
    model: str
    api_key: str = ""
    chat: bool = False  # /chat/completions, else /completions

    def connect(self, timeout: float = TIMEOUT_SECONDS) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        return kind(parts.hostname or "localhost", parts.port, timeout=timeout)

    @property
    def headers(self) -> dict[str, str]:
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"Content-Type": "application/json", **key}

    def path(self, name: str) -> str:
        return urlsplit(self.url).path.rstrip("/") + name

    def request(self, prompt: str, settings: dict) -> tuple[str, bytes]:
        """Path and body of a request for a streamed answer."""
        parameters = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        body = {
            "model": self.model,
            **parameters,
            "stream": True,
            "stream_options": {"include_usage": True},
            **settings,
        }
        return self.path("/chat/completions" if self.chat else "/completions"), json.dumps(body).encode()


def ask(
    connection: http.client.HTTPConnection,
    server: Target,
    number: int,
    prompt: str,
    settings: dict,
    piece: Callable[[str], None] = lambda text: None,
) -> RequestRecord:
    """Send one request; `piece` is called with each piece of text. Errors are recorded in the answer."""
    path, body = server.request(prompt, settings)
    answer = RequestRecord(number, time.perf_counter())
    try:
        connection.request("POST", path, body, server.headers)
        response = connection.getresponse()
        answer.status = response.status
        if response.status == 200:
            _read_events(response, answer, piece)
        else:
            wait = response.getheader("Retry-After") or ""
            answer.retry_after = float(wait) if wait.isdecimal() else 0.0  # otherwise a date
            answer.error = _message(json.loads(response.read()))
    except TimeoutError:
        pass  # lost
    except (OSError, http.client.HTTPException, ValueError) as error:
        answer.cut_off = f"status {answer.status}, {one_line(error)}"
    answer.end = time.perf_counter()
    if answer.outcome != "answered":
        connection.close()  # reconnects automatically
    return answer


def _read_events(response: http.client.HTTPResponse, answer: RequestRecord, piece: Callable[[str], None]) -> None:
    for line in _lines(response):
        name, _, data = line.strip().partition(b":")
        if name != b"data":
            continue
        data = data.lstrip()
        if data == b"[DONE]":
            answer.is_complete = True
            response.read()
            return
        event = json.loads(data)
        if "error" in event:
            answer.error = _message(event)
        for choice in event.get("choices", []):
            texts = choice.get("delta") or {"text": choice.get("text")}
            reasoning = texts.get("reasoning_content") or texts.get("reasoning")  # vLLM sends both, with the same text
            text = "".join(part or "" for part in (reasoning, texts.get("content"), texts.get("text")))
            if text:
                answer.first = answer.first or time.perf_counter()
                answer.text += text
                answer.pieces += 1
                piece(text)
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        usage = event.get("usage")
        if usage:
            answer.tokens, answer.prompt_tokens = usage["completion_tokens"], usage.get("prompt_tokens") or 0
            answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            details = usage.get("completion_tokens_details") or {}
            answer.accepted = details.get("accepted_prediction_tokens")
            answer.rejected = details.get("rejected_prediction_tokens")


def _lines(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Lines as they arrive. Raises HTTPException if the connection breaks; iterating over `response` does not."""
    incomplete = b""
    while received := response.read1():
        *complete_lines, incomplete = (incomplete + received).split(b"\n")
        yield from complete_lines


def _message(content: dict) -> str:
    """The message of the API's error object. Raises ValueError for anything else."""
    try:
        return content["error"]["message"] or "error"
    except (KeyError, TypeError):
        raise ValueError("not the API's error object") from None


def round_trip(server: Target, prompts: Sequence[str]) -> float:
    """Seconds that a request with a prompt takes without inference: the median of requests to /tokenize. Raises
    ValueError if the server does not answer."""
    connection, seconds = server.connect(timeout=10), []
    try:
        for number in range(ROUND_TRIPS):
            body = json.dumps({"model": server.model, "prompt": prompts[number % len(prompts)]})
            begin = time.perf_counter()
            connection.request("POST", TOKENIZE, body, server.headers)
            connection.getresponse().read()
            seconds.append(time.perf_counter() - begin)
    except (OSError, http.client.HTTPException) as error:
        raise ValueError(f"{server.url} does not answer: {error}") from None
    finally:
        connection.close()
    return statistics.median(seconds)


def closed_loop(
    server: Target,
    clients: int,
    seconds: float,
    prompts: Sequence[str],
    settings: dict,
    first: int = 0,
    schemas: Sequence[str] = (),
) -> Span:
    """Run `clients` clients for `seconds`, each sending its next request when it has an answer.

    Prompts are numbered from `first` and prefixed with their number on a separate line, so that none repeats and is
    served from a cache. `schemas` are the JSON schemas of their answers, "" for any answer.
    """
    formats = [response_format(schema) for schema in schemas or [""] * len(prompts)]
    answers: list[RequestRecord] = []
    numbers = itertools.count(first)
    begin = time.perf_counter()

    def client() -> None:
        connection = server.connect()
        while time.perf_counter() < begin + seconds:
            number = next(numbers)
            index = number % len(prompts)
            parameters = {**settings, **formats[index]}
            answer = ask(connection, server, number, f"# {number}\n{prompts[index]}", parameters)
            answers.append(answer)
            if answer.outcome != "answered":
                time.sleep(min(answer.retry_after or 0.1, MAX_RETRY_WAIT))
        connection.close()

    threads = [threading.Thread(target=client, daemon=True) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Span(answers, begin, begin + seconds)


def response_format(schema: str) -> dict:
    """The parameter that makes an answer follow a JSON schema, if there is one."""
    if not schema:
        return {}
    schema_object = {"name": "answer", "schema": json.loads(schema)}
    return {"response_format": {"type": "json_schema", "json_schema": schema_object}}


def only_model(server: Target) -> str:
    """The name of the served model. Raises ValueError if it cannot be determined."""
    connection = server.connect(timeout=10)
    try:
        connection.request("GET", server.path("/models"), headers=server.headers)
        response = connection.getresponse()
        content = json.loads(response.read())
        if response.status != 200:
            raise ValueError(f"{server.url}/models answers {response.status}: {_message(content)}")
        return content["data"][0]["id"]
    except (OSError, http.client.HTTPException, KeyError, IndexError, TypeError, json.JSONDecodeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{server.url} is not a usable OpenAI-compatible endpoint: {reason}") from None
    finally:
        connection.close()
