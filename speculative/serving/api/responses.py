"""Responses of the OpenAI API: one object or a stream of server-sent events, token counts, and the model object.

A `ChoiceBuilder` builds one choice of a response, a `ResponseBuilder` the fields around the choices.
"""

import json
import time
import uuid
from collections.abc import Iterable, Sequence

from speculative.batch_decoder import BatchDecoder
from speculative.sequence.result import GenerationResult
from speculative.serving.api.answer_parser import AnswerParser
from speculative.serving.api.base_request import BaseRequest
from speculative.serving.api.chat_completions import ChatCompletionRequest
from speculative.serving.api.errors import ApiError
from speculative.serving.api.logprobs import (
    AlignedTokens,
    TokenEntry,
    TokenTexts,
    chat_logprobs,
    completion_logprobs,
    mean_logprob,
    prompt_logprob_entries,
)
from speculative.serving.api.reasoning import Reasoning, ReasoningFormat
from speculative.serving.api.token_sources import TokenSources, draft_source
from speculative.serving.api.tool_calls import Call, Event, Text
from speculative.serving.engine.engine_thread import GenerationHandle

LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}  # for clients that split lines as Unicode does


def as_json(data: dict) -> str:
    """The data of a server-sent event."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).translate(LINE_ENDS)


class ChoiceBuilder:
    """Builds choice number `index` of a text completion: as a whole, or as the choices of a stream's chunks."""

    def __init__(self, index: int):
        self.index = index
        self.pending_logprobs: list[TokenEntry] = []  # tokens whose log-probabilities go with the next text
        self.tokens: AlignedTokens | None = None  # set if log-probabilities are asked for
        self.echo = ""  # the prompt, if the text begins with it

    def full_choice(self, generation: GenerationResult) -> dict:
        return self._choice_fields(generation.finish_reason, True, text=self.echo + generation.text)

    def begin(self) -> list[dict]:
        """Return the fields before the text."""
        return []

    def piece(self, text: str) -> list[dict]:
        """Return the fields of a piece of the text: none if it is withheld."""
        text, self.echo = self.echo + text, ""
        return [self._choice_fields(None, text=text)]

    def end(self, finish_reason: str) -> list[dict]:
        """Return the fields after the text."""
        return [self._choice_fields(finish_reason, text=self.echo)]

    def count_reasoning(self, tokens: list[int]) -> int:
        """The number of the choice's `tokens` that are reasoning."""
        return 0

    def _choice_fields(self, finish_reason: str | None, is_full: bool = False, **content: object) -> dict:
        """The fields of the choice. Log-probabilities of no tokens are null in a chunk."""
        entries, self.pending_logprobs = self.pending_logprobs, []
        logprobs = self._logprobs(self.tokens, entries) if self.tokens and (entries or is_full) else None
        return {"index": self.index, **content, "logprobs": logprobs, "finish_reason": finish_reason}

    _logprobs = staticmethod(completion_logprobs)


class ChatChoiceBuilder(ChoiceBuilder):
    """Builds one choice of a chat completion, in which `parser` finds reasoning and tool calls. `names_tool`: the
    request names the tool to call."""

    def __init__(self, index: int, parser: AnswerParser, names_tool: bool = False):
        super().__init__(index)
        self._parser, self._names_tool = parser, names_tool

    def full_choice(self, generation: GenerationResult) -> dict:
        content, reasoning, calls = "", "", []
        for delta in self._deltas([*self._parser.feed(generation.text), *self._parser.end()]):
            content += delta.get("content", "")
            reasoning += delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    calls.append({name: value for name, value in call.items() if name != "index"})
                else:
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        message: dict = {"role": "assistant", "content": None if calls and not content else content, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return self._choice_fields(self._reason(generation.finish_reason), True, message=message)

    def begin(self) -> list[dict]:
        return [self._choice_fields(None, delta={"role": "assistant", "content": ""})]

    def piece(self, text: str) -> list[dict]:
        return [self._choice_fields(None, delta=delta) for delta in self._deltas(self._parser.feed(text))]

    def end(self, finish_reason: str) -> list[dict]:
        rest = [self._choice_fields(None, delta=delta) for delta in self._deltas(self._parser.end())]
        return [*rest, self._choice_fields(self._reason(finish_reason), delta={})]

    def count_reasoning(self, tokens: list[int]) -> int:
        return self._parser.count_reasoning(tokens)

    def _deltas(self, events: Iterable[Event | Reasoning]) -> list[dict]:
        deltas: list[dict] = []
        for event in events:
            if isinstance(event, Text):
                deltas.append({"content": event.text})
            elif isinstance(event, Reasoning):
                deltas.append({"reasoning_content": event.text})
            elif isinstance(event, Call):
                function = {"name": event.name, "arguments": ""}
                call = {"index": event.number, "id": event.id, "type": "function", "function": function}
                deltas.append({"tool_calls": [call]})
            else:
                deltas.append({"tool_calls": [{"index": event.number, "function": {"arguments": event.text}}]})
        return deltas

    def _reason(self, finish_reason: str) -> str:
        if not self._parser.calls:
            return finish_reason
        is_complete = finish_reason == "stop" or self._parser.drops_calls  # the tool calls that are kept are complete
        if not is_complete:
            return finish_reason
        return "stop" if self._names_tool else "tool_calls"  # as OpenAI and vLLM

    _logprobs = staticmethod(chat_logprobs)


class ResponseBuilder:
    """Builds the response to one request, as one object or as a stream of chunks."""

    def __init__(
        self,
        request: BaseRequest,
        model: str,
        jobs: Sequence[GenerationHandle] = (),
        token_texts: TokenTexts | None = None,
        echoes: Sequence[str] = (),
        sources: Sequence[TokenSources] = (),
        parsers: Sequence[AnswerParser] = (),
    ):
        """`jobs` generate the texts. `token_texts` are required for log-probabilities. `echoes` are the echoed
        prompts of the choices, if requested, and `sources` the draft or main origin of each choice's tokens, if the
        chunks include it. `parsers` are those of the choices of a chat completion."""
        self._request, self._jobs, self._token_texts, self._sources = request, jobs, token_texts, sources
        self._chat = isinstance(request, ChatCompletionRequest)
        number = request.num_prompts * request.choices_per_prompt
        self.choices: Sequence[ChoiceBuilder] = (
            [ChatChoiceBuilder(index, parser, request.names_tool) for index, parser in enumerate(parsers)]
            if isinstance(request, ChatCompletionRequest)
            else [ChoiceBuilder(index) for index in range(number)]
        )
        for choice, echo in zip(self.choices, echoes, strict=False):
            choice.echo = echo
        options = request.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._continuous_usage = bool(options and options.continuous_usage_stats)
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def full_response(self) -> dict:
        """Return the response."""
        if self._request.echoes_only:
            for job in self._jobs:
                job.result.tokens, job.result.logprobs, job.result.text = [], [], ""
                job.result.finish_reason = "length"
        choices = []
        for choice, job in zip(self.choices, self._chosen_jobs(), strict=True):
            self._add_logprobs(choice, job, job.result.text, last=True)
            choices.append(choice.full_choice(job.result))
        name = "chat.completion" if self._chat else "text_completion"
        response = {
            **self._head,
            "object": name,
            "choices": choices,
            "usage": self._usage(),
        }
        if self._token_texts and (num_logprobs := self._request.prompt_logprobs) is not None:
            for index, target in enumerate([response] if self._chat else choices):
                first = self._first_of_prompt(index)
                prompt_logprobs = first.result.prompt_logprobs
                target["prompt_logprobs"] = prompt_logprob_entries(
                    self._token_texts, first.prompt.tolist(), prompt_logprobs, num_logprobs
                )
        return response

    def begin(self) -> bytes:
        """Return the server-sent events before the text."""
        return b"".join(self._chunks(choice.begin()) for choice in self.choices)

    def piece(self, index: int, text: str) -> bytes:
        """Return the events of a piece of the text of choice `index`."""
        if self._token_texts:
            self._add_logprobs(self.choices[index], self._jobs[index], text)
        return self._chunks(self._with_sources(index, self.choices[index].piece(text)))

    def end_choice(self, index: int, finish_reason: str) -> bytes:
        """Return the events after the text of choice `index`."""
        if self._token_texts:
            self._add_logprobs(self.choices[index], self._jobs[index], "", last=True)
        return self._chunks(self._with_sources(index, self.choices[index].end(finish_reason), last=True))

    def end(self) -> bytes:
        """Return the events after all choices."""
        last = b""
        if self._include_usage:
            last = self._event({**self._chunk_head(), "choices": [], "usage": self._usage()})
        return last + b"data: [DONE]\n\n"

    def error_event(self, error: ApiError) -> bytes:
        """Return the last event of a stream that fails."""
        return self._event(error.body)

    def _usage(self) -> dict:
        jobs = self._jobs
        reasoning = (choice.count_reasoning(job.result.tokens) for choice, job in zip(self.choices, jobs, strict=False))
        return usage(jobs, self._request.texts_per_prompt, sum(reasoning))

    def _with_sources(self, index: int, choices: list[dict], last: bool = False) -> list[dict]:
        if self._sources and choices:
            choices[-1]["speculation"] = self._sources[index].take(last)
        return choices

    def _chosen_jobs(self) -> Sequence[GenerationHandle]:
        """The jobs whose results are the choices: of each prompt, those with the highest log-probability per token."""
        texts, num_choices = self._request.texts_per_prompt, self._request.choices_per_prompt
        if texts == num_choices:
            return self._jobs
        of_prompts = [self._jobs[begin : begin + texts] for begin in range(0, len(self._jobs), texts)]
        return [
            job for jobs in of_prompts for job in sorted(jobs, key=lambda job: -mean_logprob(job.result))[:num_choices]
        ]

    def _first_of_prompt(self, index: int) -> GenerationHandle:
        """The first job with the prompt of choice `index`."""
        return self._jobs[index // self._request.choices_per_prompt * self._request.texts_per_prompt]

    def _add_logprobs(self, choice: ChoiceBuilder, job: GenerationHandle, text: str, last: bool = False) -> None:
        """Add the log-probabilities of the tokens of `text` to the next output of `choice`."""
        if not self._token_texts or (num_logprobs := self._request.num_logprobs) is None:
            return
        if not choice.tokens:
            choice.tokens = AlignedTokens(self._token_texts, num_logprobs, job.context)
            if self._request.echoed_prompts:
                choice.pending_logprobs = choice.tokens.prompt_entries(
                    job.prompt.tolist(),
                    self._first_of_prompt(choice.index).result.prompt_logprobs,
                    choice.echo,
                    has_names=isinstance(self._request.echoed_prompts[choice.index], str),
                )
        choice.pending_logprobs += choice.tokens.take(job.result, text, last)

    def _chunks(self, choices: Iterable[dict]) -> bytes:
        return b"".join(
            self._event({**self._chunk_head(), "choices": [choice], **self._chunk_usage(choice["index"])})
            for choice in choices
        )

    def _chunk_usage(self, index: int) -> dict:
        """The field `usage` of a chunk of choice `index`."""
        if not self._include_usage:
            return {}
        if not self._continuous_usage:
            return {"usage": None}
        job = self._jobs[index]
        reasoning = self.choices[index].count_reasoning(job.result.tokens) if job.request else 0
        return {"usage": usage([job], 1, reasoning)}

    def _chunk_head(self) -> dict:
        return {**self._head, "object": "chat.completion.chunk" if self._chat else "text_completion"}

    @staticmethod
    def _event(data: dict) -> bytes:
        return f"data: {as_json(data)}\n\n".encode()


def usage(jobs: Sequence[GenerationHandle], texts: int, reasoning_tokens: int) -> dict:
    """Return the API's token counts of a request with `jobs`, `texts` for each prompt, which counts once.

    `completion_tokens` excludes rejected draft tokens, which are not part of the output.
    """
    generations, first = [job.result for job in jobs if job.request], jobs[::texts]  # those in the batch so far
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
            "reasoning_tokens": reasoning_tokens,
            "audio_tokens": 0,
        },
    }


def model_card(name: str, created: int, decoder: BatchDecoder, reasoning: ReasoningFormat | None) -> dict:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "local",
        "max_model_len": decoder.main.context,
        "chat_template": bool(decoder.tokenizer and decoder.tokenizer.chat_template),
        "draft": draft_source(decoder),
        "default_reasoning": reasoning.default if reasoning else None,
    }
