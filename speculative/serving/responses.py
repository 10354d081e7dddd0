"""Responses of the OpenAI API: one object, or a stream of server-sent events; the token counts and the model's card.

A `ChoiceBuilder` builds one choice of a response, a `ResponseBuilder` what surrounds the choices.
"""

import json
import time
import uuid
from collections.abc import Iterable, Sequence

from speculative.batch_decoder import BatchDecoder
from speculative.sequence.result import GenerationResult
from speculative.serving.engine_thread import GenerationHandle
from speculative.serving.protocol import ApiError, BaseRequest, ChatCompletionRequest
from speculative.serving.token_sources import TokenSources, draft_source

LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}  # for clients that split lines as Unicode does


class ChoiceBuilder:
    """Builds choice number `index` of a text completion: as a whole, or as the choices of a stream's chunks."""

    def __init__(self, index: int):
        self.index = index

    def whole(self, generation: GenerationResult) -> dict:
        return self._choice(generation.finish_reason, text=generation.text)

    def begin(self) -> list[dict]:
        """Return what comes before the text."""
        return []

    def piece(self, text: str) -> list[dict]:
        """Return what a piece of the text makes: nothing if it is held back."""
        return [self._choice(None, text=text)]

    def end(self, finish_reason: str) -> list[dict]:
        """Return what comes after the text."""
        return [self._choice(finish_reason, text="")]

    def _choice(self, finish_reason: str | None, **content: object) -> dict:
        return {"index": self.index, **content, "logprobs": None, "finish_reason": finish_reason}


class ChatChoiceBuilder(ChoiceBuilder):
    """Builds one choice of a chat completion."""

    def whole(self, generation: GenerationResult) -> dict:
        message = {"role": "assistant", "content": generation.text, "refusal": None}
        return self._choice(generation.finish_reason, message=message)

    def begin(self) -> list[dict]:
        return [self._choice(None, delta={"role": "assistant", "content": ""})]

    def piece(self, text: str) -> list[dict]:
        return [self._choice(None, delta={"content": text})]

    def end(self, finish_reason: str) -> list[dict]:
        return [self._choice(finish_reason, delta={})]


class ResponseBuilder:
    """Builds the response to one request, as one object or as a stream of chunks."""

    def __init__(self, asked: BaseRequest, model: str, sources: Sequence[TokenSources] = ()):
        """`sources` of the tokens of each choice, if the chunks are to tell them."""
        self._sources = sources
        self._chat = isinstance(asked, ChatCompletionRequest)
        kind = ChatChoiceBuilder if self._chat else ChoiceBuilder
        self.choices = [kind(index) for index in range(asked.choices)]
        self._texts = asked.texts
        self._usage_last = bool(asked.stream_options and asked.stream_options.include_usage)
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, jobs: Sequence[GenerationHandle]) -> dict:
        """Return the response; each choice is the result of one of `jobs`."""
        choices = [choice.whole(job.result) for choice, job in zip(self.choices, jobs, strict=True)]
        name = "chat.completion" if self._chat else "text_completion"
        return {**self._head, "object": name, "choices": choices, "usage": usage(jobs, self._texts)}

    def begin(self) -> bytes:
        """Return the server-sent events before the text."""
        return b"".join(self._chunks(choice.begin()) for choice in self.choices)

    def piece(self, index: int, text: str) -> bytes:
        """Return the events of a piece of the text of choice `index`."""
        return self._chunks(self._with_sources(index, self.choices[index].piece(text)))

    def end_choice(self, index: int, finish_reason: str) -> bytes:
        """Return the events after the text of choice `index`."""
        return self._chunks(self._with_sources(index, self.choices[index].end(finish_reason), last=True))

    def end(self, jobs: Sequence[GenerationHandle]) -> bytes:
        """Return the events after all choices, which are the results of `jobs`."""
        last = b""
        if self._usage_last:
            last = self._event({**self._chunk_head(), "choices": [], "usage": usage(jobs, self._texts)})
        return last + b"data: [DONE]\n\n"

    def broken(self, error: ApiError) -> bytes:
        """Return the last event of a stream that fails."""
        return self._event(error.body)

    def _with_sources(self, index: int, choices: list[dict], last: bool = False) -> list[dict]:
        if self._sources and choices:
            choices[-1]["speculation"] = self._sources[index].take(last)
        return choices

    def _chunks(self, choices: Iterable[dict]) -> bytes:
        usage = {"usage": None} if self._usage_last else {}
        return b"".join(self._event({**self._chunk_head(), "choices": [choice], **usage}) for choice in choices)

    def _chunk_head(self) -> dict:
        return {**self._head, "object": "chat.completion.chunk" if self._chat else "text_completion"}

    @staticmethod
    def _event(data: dict) -> bytes:
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).translate(LINE_ENDS)
        return b"data: " + text.encode() + b"\n\n"


def usage(jobs: Sequence[GenerationHandle], texts: int) -> dict:
    """Return the API's token counts of a request with `jobs`, `texts` for each prompt, which counts once.

    `completion_tokens` excludes rejected draft tokens, which are not part of the output.
    """
    generations, first = [job.result for job in jobs], jobs[::texts]
    prompt_tokens = sum(len(job.prompt) for job in first)
    completion_tokens = sum(len(generation.tokens) for generation in generations)
    accepted = sum(sum(generation.from_draft) for generation in generations)
    proposed = sum(sum(generation.proposed) for generation in generations)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(job.cached_tokens for job in first), "audio_tokens": 0},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": proposed - accepted,
            "reasoning_tokens": 0,
            "audio_tokens": 0,
        },
    }


def model_card(name: str, created: int, decoder: BatchDecoder) -> dict:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "local",
        "max_model_len": decoder.main.context,
        "chat_template": bool(decoder.tokenizer and decoder.tokenizer.chat_template),
        "draft": draft_source(decoder),
    }
