"""Speculative decoding, greedy and sampled, of one text at a time: what `LLMPipeline` does, lossless when sampling too.

    decoder = load(Path("models/embedded/main"), draft=Path("models/embedded/draft"))
    config = openvino_genai.GenerationConfig(max_new_tokens=100, do_sample=True, temperature=0.8)
    print(decoder.generate("def read_file(path):", config, seed=1).text)

Each iteration: the draft proposes tokens while the draft length rule wants more, the main model checks them in one
inference, `rejection_sampling.verify` decides. A model's cache needs no care: it holds what it holds, and the next call
says what the text is.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import openvino_genai
from openvino_genai import ChatHistory, GenerationConfig, StreamerBase, StreamingStatus

from speculative import cached_model, costs, huge_pages, metrics
from speculative.cached_model import CachedModel
from speculative.distribution import Distribution, check_supported
from speculative.draft_length import AdaptiveDraftLength, ConfidenceDraftLength, DraftLength, FixedDraftLength
from speculative.draft_source import DraftSource, ModelDraft, PromptLookup
from speculative.rejection_sampling import verify
from speculative.text_stream import TextStream

Prompt = str | ChatHistory | list | np.ndarray
"""A text (through the chat template if there is one), a chat history (list of dict or ChatHistory), or token ids."""


class Step(NamedTuple):
    """What one inference of the main model gained: `tokens`, of which the first `accepted` are draft tokens.

    `proposed` tokens were drafted for it. The first step of a text is the prompt's inference; it has no draft.
    """

    tokens: list[int]
    accepted: int
    proposed: int


@dataclass
class Generation:
    """A finished text and how it came about."""

    tokens: list[int] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)  # for each token
    text: str = ""
    finish_reason: str = "length"  # or "stop", or "cancelled"
    proposed: list[int] = field(default_factory=list)  # for each inference of the main model after the prompt's
    accepted: list[int] = field(default_factory=list)  # likewise
    gained: list[int] = field(default_factory=list)  # likewise: one more than accepted, but at an end of text
    seconds_to_first: float = 0.0  # from the call to the first token, prompt included
    seconds: float = 0.0  # the call
    draft_length: str = ""  # what the draft length rule did last, and why

    @property
    def decode_seconds(self) -> float:
        """Time for all tokens but the first."""
        return self.seconds - self.seconds_to_first

    @property
    def acceptance_rate(self) -> float | None:
        return metrics.acceptance_rate(self.proposed, [n + 1 for n in self.accepted])

    @property
    def block_efficiency(self) -> float | None:
        return metrics.block_efficiency(self.gained)

    @property
    def position_acceptance(self) -> list[float]:
        return metrics.position_acceptance(self.proposed, [n + 1 for n in self.accepted])


class Decoder:
    """A main model, where its draft tokens come from, and how many to draft.

    One text at a time: a second call while one is under way raises RuntimeError, from whichever thread.
    """

    def __init__(
        self,
        main: CachedModel,
        draft: DraftSource | None = None,
        draft_length: DraftLength | None = None,
        tokenizer: openvino_genai.Tokenizer | None = None,
        stop_token_ids: frozenset[int] = frozenset(),
    ):
        """Without `draft`, plain decoding. `draft_length` serves where the GenerationConfig of a call names none;
        without it that is 5. Without `tokenizer`, prompts are token ids and results have no text. `stop_token_ids`
        serve where a GenerationConfig names none."""
        self.main = main
        self.draft = draft
        self.draft_length = draft_length or FixedDraftLength(5)
        self.tokenizer = tokenizer
        self.stop_token_ids = stop_token_ids
        self._busy = threading.Lock()
        self._random = np.random.default_rng()

    def reset(self, seed: int | None = None) -> None:
        """Forget the caches and what the draft length rule learnt, and start the random numbers from `seed`.

        The same calls after a reset with the same seed give the same text on the same machine.
        """
        self.main.forget()
        if self.draft:
            self.draft.forget()
        self.draft_length.forget(repeatable=seed is not None)
        self._random = np.random.default_rng(seed)

    def stream(self, prompt: Prompt, config: GenerationConfig) -> Iterator[Step]:
        """Yield what each inference of the main model gains, until `max_new_tokens`, an end token or the context's end.

        Stop strings need the text: `generate` looks for them. Raises ValueError for a prompt that is empty or too long
        and for a config that asks for what speculative decoding of one text cannot do.
        """
        check_supported(config)
        tokens = self.encode(prompt, config)
        if not len(tokens):
            raise ValueError("the prompt has no tokens: give some text to go on from")
        ids = f"the prompt's token ids go from {tokens.min()} to {tokens.max()}"
        if tokens.min() < 0 or tokens.max() >= self.main.width:
            raise ValueError(f"{ids}, the model knows 0 to {self.main.width - 1}: encode it with the model's tokenizer")
        room = self.main.capacity - len(tokens)
        if room < 1:
            raise ValueError(f"the prompt has {len(tokens)} tokens and the context room for {self.main.capacity - 1}")
        longest = min(config.max_new_tokens, max(config.max_length - len(tokens), 0), room)
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("this decoder is busy with another text: wait for it, or make a decoder for each text")
        try:
            yield from self._steps(tokens, longest, config)
        finally:
            self._busy.release()

    def generate(
        self,
        prompt: Prompt,
        config: GenerationConfig | None = None,
        streamer: StreamerBase | Callable[[str], object] | None = None,
        seed: int | None = None,
    ) -> Generation:
        """Generate a whole text; `streamer` gets it as it comes, as in GenAI: a function of a piece of text, or a
        StreamerBase, which gets tokens. Either may return True or a StreamingStatus to stop.

        With `seed` the decoder is reset first. Errors as for `stream`.
        """
        config = config or GenerationConfig()
        if seed is not None:
            self.reset(seed)
        if config.stop_strings and not self.tokenizer:
            raise ValueError("stop_strings need the text, and this decoder has no tokenizer: give it one")
        result = Generation()
        text = TextStream(self._decode, config.stop_strings, config.include_stop_str_in_output)
        stops = self._stop_ids(config)
        watched = config.stop_strings or (streamer and not isinstance(streamer, StreamerBase))
        begin = time.perf_counter()
        with closing(self.stream(prompt, config)) as steps:  # whatever a streamer raises, the decoder is free again
            for step in steps:
                piece, used = text.push(step.tokens) if watched else ("", len(step.tokens))
                gained = step.tokens[:used]
                result.tokens += gained
                result.from_draft += [i < step.accepted for i in range(used)]
                result.seconds = time.perf_counter() - begin
                if result.seconds_to_first:
                    result.proposed.append(step.proposed)
                    result.accepted.append(min(step.accepted, used))
                    result.gained.append(used)
                else:
                    result.seconds_to_first = result.seconds
                if text.stopped or gained[-1] in stops:
                    result.finish_reason = "stop"
                if _told_to_stop(streamer, gained, piece):
                    result.finish_reason = "cancelled"
                if result.finish_reason != "length":
                    break
        if isinstance(streamer, StreamerBase):
            streamer.end()
        if watched:
            rest = text.end()
            if rest and streamer and not isinstance(streamer, StreamerBase):
                streamer(rest)
            result.text = text.text
        elif self.tokenizer:
            result.text = self._decode(result.tokens)
        result.draft_length = self._rule(config).why() if self.draft else "no draft"
        return result

    def encode(self, prompt: Prompt, config: GenerationConfig | None = None) -> np.ndarray:
        """The prompt's token ids int64 [n], as `LLMPipeline.generate` makes them."""
        if isinstance(prompt, str):
            if not self.tokenizer:
                raise ValueError("this decoder has no tokenizer: give token ids, not text")
            if not self.tokenizer.chat_template or (config and not config.apply_chat_template):
                return self.tokenizer.encode(prompt).input_ids.data[0]
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, ChatHistory) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], dict)):
            text = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True)
            return self.tokenizer.encode(text, add_special_tokens=False).input_ids.data[0]
        return np.asarray(prompt, np.int64)

    def _steps(self, prompt: np.ndarray, longest: int, config: GenerationConfig) -> Iterator[Step]:
        transform = Distribution(config, self.stop_token_ids)
        rule = self._rule(config)
        stops = self._stop_ids(config)
        n_prompt = n = len(prompt)
        tokens = np.empty(n_prompt + longest, np.int64)  # prompt, generated, drafted
        tokens[:n] = prompt

        def distribution(logits: np.ndarray, text: np.ndarray) -> np.ndarray:
            return transform(logits, text[:n_prompt], text[n_prompt:])

        while n < len(tokens):
            drafted, q = [], []
            begin = time.perf_counter()
            if self.draft and n > n_prompt:  # the prompt's inference comes first and alone: first token first
                confidence = None
                while len(drafted) < len(tokens) - n - 1 and rule.more(len(drafted), confidence):
                    proposal = self.draft.propose(tokens[: n + len(drafted)], distribution, self._random)
                    if proposal is None:
                        break
                    token, q_row, confidence = proposal
                    tokens[n + len(drafted)] = token
                    drafted.append(token)
                    q.append(q_row)
                    if token in stops:  # what follows an end is of no use
                        break
            drafted_at = time.perf_counter()
            logits = self.main.logits(tokens[: n + len(drafted)], last=len(drafted) + 1)
            p = lambda i: distribution(logits[i], tokens[: n + i])  # noqa: B023, E731
            accepted, token = verify(drafted, q, p, self._random)
            tokens[n + accepted] = token
            if n > n_prompt:
                rule.learn(len(drafted), accepted, drafted_at - begin, time.perf_counter() - drafted_at)
            gained = tokens[n : n + accepted + 1].tolist()
            end = next((i for i, token in enumerate(gained) if token in stops), None)
            if end is not None:  # the main model's own token behind an accepted end is not part of the text
                yield Step(gained[: end + 1], accepted, len(drafted))
                return
            yield Step(gained, accepted, len(drafted))
            n += len(gained)

    def _rule(self, config: GenerationConfig) -> DraftLength:
        """GenAI's names: a number is fixed, a threshold is by confidence, neither is this decoder's own rule."""
        if config.num_assistant_tokens:
            return FixedDraftLength(config.num_assistant_tokens)
        if config.assistant_confidence_threshold:
            return ConfidenceDraftLength(config.assistant_confidence_threshold)
        return self.draft_length

    def _stop_ids(self, config: GenerationConfig) -> frozenset[int]:
        if config.ignore_eos:
            return frozenset()
        named = {*config.stop_token_ids, *({config.eos_token_id} if config.eos_token_id >= 0 else ())}
        return frozenset(named) or self.stop_token_ids

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)


def load(
    main: Path,
    device: str = "CPU",
    draft: Path | None = None,
    draft_device: str | None = None,
    properties: dict | None = None,
    draft_properties: dict | None = None,
    max_ngram_size: int | None = None,
    capacity: int | None = None,
    use_huge_pages: bool = False,
) -> Decoder:
    """A decoder of the IR folders `main` and `draft`, each on its own device with its own OpenVINO properties.

    The draft's device and properties are the main model's unless given. Instead of a draft, `max_ngram_size` looks
    draft tokens up in the text (prompt lookup). The draft length is adaptive; what it needs to know is measured now,
    once, and kept (in CACHE_DIR if the properties name one, else in the user's cache folder). `use_huge_pages`, on
    Linux, is for a process that stays: it loads seconds longer for each gigabyte of weights, and decodes faster.
    """
    before = huge_pages.allocated() if use_huge_pages else []
    properties = properties or {}
    draft_device = draft_device or device
    draft_properties = properties if draft_properties is None else draft_properties
    main_model = cached_model.load(main, device, properties, capacity)
    draft_model = draft and cached_model.load(draft, draft_device, draft_properties)
    if use_huge_pages:
        huge_pages.move(before)
    source, rule = None, None
    if draft_model or max_ngram_size:
        source = (
            ModelDraft(draft_model, main_model.width) if draft_model else PromptLookup(main_model.width, max_ngram_size)
        )
        key = costs.key((main, device, properties), (draft, draft_device, draft_properties))
        rule = AdaptiveDraftLength(costs.remembered(key, main_model, draft_model, costs.folder(properties)))
    tokenizer = openvino_genai.Tokenizer(str(main))
    file = Path(main, "generation_config.json")
    stops = GenerationConfig(file).stop_token_ids if file.exists() else set()
    return Decoder(main_model, source, rule, tokenizer, frozenset(stops or {tokenizer.get_eos_token_id()}))


def _told_to_stop(streamer: object, tokens: list[int], piece: str) -> bool:
    if isinstance(streamer, StreamerBase):
        answer = streamer.write(tokens)
    elif streamer and piece:
        answer = streamer(piece)
    else:
        return False
    return answer is True or answer in (StreamingStatus.STOP, StreamingStatus.CANCEL)
