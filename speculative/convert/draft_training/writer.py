"""Generates the training texts with the main model, at several temperatures, by GenAI's continuous batching."""

import itertools
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import openvino as ov
import openvino_genai
from openvino_genai import GenerationConfig, GenerationStatus

from speculative.convert.draft_training import beginnings
from speculative.convert.draft_training.beginnings import Prompt
from speculative.convert.draft_training.texts import Text, TextFile
from speculative.convert.errors import ConvertError
from speculative.models.spec import ModelSpec
from speculative.sampling.params import stop_ids_of
from speculative.sequence.prompt import encode

BATCH_SIZE = 32  # texts
TURN_TEMPERATURES, TURN_TOP_P = (0.7, 1.0), 0.9
TEMPERATURES = (0.0, 0.7, 1.0)
HELD_OUT = 10  # one prompt in so many is held out
MIN_ANSWER = 8  # tokens of an answer that is kept
MAX_ATTEMPTS = 1000  # texts that may be begun without reaching the least


class Part(NamedTuple):
    """A part of a text that is being written: the answer to `prompt`, or what becomes the prompt with `suffix`."""

    handle: Any  # GenAI's
    prompt: list[int]
    suffix: list[int] | None  # None: this is the answer
    temperature: float
    held_out: bool
    category: str
    tokens: list[int]  # that were written so far


class Writer:
    """Writes texts of at most `longest` tokens to a TextFile."""

    def __init__(self, main: ModelSpec, longest: int, vocabulary: int, prompts: list[Prompt], file: TextFile):
        """Without `prompts` the model writes its own. Raises ConvertError if too few of them are short enough."""
        scheduler = openvino_genai.SchedulerConfig()
        folder = str(main.folder)
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, main.device, main.properties)
        self._tokenizer = self._pipeline.get_tokenizer()
        self._stop_ids = set(stop_ids_of(main.folder, self._tokenizer))
        self._longest = longest
        self._vocabulary = vocabulary
        self._random = np.random.default_rng()  # new texts, also where an earlier training had the same prompts
        self._file = file
        self._request_ids = itertools.count()
        self._too_long = 0  # prompts that the model wrote in vain
        self._prompts = encoded(prompts, self._tokenizer, longest)
        self._held_out = held_out(self._prompts)
        self._prompt_order = self._shuffled_indices()

    def write(self, seconds_left: Callable[[], float], max_tokens: int, progress: Callable[[int], None]) -> None:
        """Write until the time is up or there are `max_tokens`, but at least a few texts. Calls `progress` often, with
        the number of tokens in unfinished texts.

        Raises ConvertError if the model does not write different texts.
        """
        running: list[Part] = []
        started = 0
        try:
            while (seconds_left() > 0 and self._file.token_count < max_tokens) or not self._file.is_enough_with(
                unfinished_texts(running)
            ):
                if started > MAX_ATTEMPTS and not self._file.is_enough:
                    mostly_too_long = 2 * self._too_long >= started - len(running)  # of those that ended
                    raise ConvertError(
                        f"the main model wrote only {len(self._file.texts)} different texts of at least {MIN_ANSWER} "
                        f"tokens; give {'a greater --length' if mostly_too_long else 'more prompts, with --prompts'}"
                    )
                while len(running) < BATCH_SIZE:
                    running.append(self._begin())
                    started += 1
                self._pipeline.step()
                running = [part for part in map(self._advance, running) if part]
                progress(sum(len(part.prompt) + len(part.tokens) for part in running))
        finally:
            for text in unfinished_texts(running):
                self._file.add(text)
            for part in running:
                part.handle.stop()
            while self._pipeline.has_non_finished_requests():  # frees their cache
                self._pipeline.step()

    def _begin(self) -> Part:
        if self._prompts:
            index = next(self._prompt_order)
            return self._answer(*self._prompts[index], held_out=index in self._held_out)
        opening = beginnings.opening(self._tokenizer, self._vocabulary, self._random)
        temperature = float(self._random.choice(TURN_TEMPERATURES))
        stop_ids = opening.stop_ids | self._stop_ids
        beginning = opening.lead + opening.prefix
        handle = self._request(beginning, opening.longest, temperature, stop_ids, TURN_TOP_P)
        return Part(handle, opening.prefix, opening.suffix, temperature, held_out=False, category="", tokens=[])

    def _shuffled_indices(self) -> Iterator[int]:
        """Places of the prompts, without end: all of them in random order, and again."""
        while True:
            yield from self._random.permutation(len(self._prompts)).tolist()

    def _advance(self, part: Part) -> Part | None:
        """The part itself while it is being written, then the text's next part; None after the answer."""
        runs = part.handle.get_status() == GenerationStatus.RUNNING
        while part.handle.can_read():
            for output in part.handle.read().values():
                part.tokens.extend(output.generated_ids)
        if runs:
            return part
        if part.suffix is None:
            if text := text_of(part):
                self._file.add(text)
            return None
        if part.tokens and part.tokens[-1] in {*self._stop_ids, *part.suffix[:1]}:
            part.tokens.pop()
        prompt = [*part.prompt, *part.tokens, *part.suffix]
        if not part.tokens or len(prompt) > self._longest - MIN_ANSWER:
            self._too_long += bool(part.tokens)
            return None
        return self._answer(prompt, "", held_out=is_held_out(prompt))

    def _answer(self, prompt: list[int], category: str, held_out: bool) -> Part:
        temperature = float(self._random.choice(TEMPERATURES))
        handle = self._request(prompt, self._longest - len(prompt), temperature, self._stop_ids)
        return Part(handle, prompt, None, temperature, held_out, category, tokens=[])

    def _request(
        self, prompt: list[int], longest: int, temperature: float, stop_ids: set[int], top_p: float = 1.0
    ) -> Any:
        config = GenerationConfig()
        config.max_new_tokens = longest
        config.stop_token_ids = stop_ids
        if temperature:
            config.do_sample, config.temperature, config.top_p = True, temperature, top_p
            config.rng_seed = int(self._random.integers(2**31))
        return self._pipeline.add_request(next(self._request_ids), ov.Tensor(np.array([prompt], np.int64)), config)


def unfinished_texts(running: list[Part]) -> list[Text]:
    """The answers that are being written: broken off, they are texts, too."""
    return [text for part in running if part.suffix is None and (text := text_of(part))]


def text_of(part: Part) -> Text | None:
    """The text of an answer; None if it is too short."""
    if len(part.tokens) < MIN_ANSWER:
        return None
    return Text(part.prompt, part.tokens, part.temperature, part.held_out, part.category)


def encoded(prompts: list[Prompt], tokenizer: openvino_genai.Tokenizer, longest: int) -> list[tuple[list[int], str]]:
    """The token ids of the different prompts that leave room for an answer in a text of `longest` tokens, with their
    categories. Raises ConvertError if they are too few."""
    pairs = [(encode(prompt.text, tokenizer).tolist(), prompt.category) for prompt in prompts]
    most = longest - MIN_ANSWER
    fitting = [(tuple(ids), category) for ids, category in pairs if len(ids) <= most]
    if too_long := len(pairs) - len(fitting):
        print(
            f"prompts: {too_long:,} of {len(pairs):,} have more than {most} tokens and are left out; with a greater "
            "--length they are not"
        )
    unique = dict(fitting)
    if prompts and len(unique) < beginnings.MIN_PROMPTS:
        raise ConvertError(
            f"only {len(unique)} prompts have at most {most} tokens; give shorter ones, or a greater --length",
            2,
        )
    return [([*ids], category) for ids, category in unique.items()]


def held_out(prompts: list[tuple[list[int], str]]) -> set[int]:
    """The places of the prompts that are held out, at most a third: one in `HELD_OUT`, the same ones in every set of
    prompts, and the first of each category, which differs between sets if one lacks it."""
    by_number = sorted(range(len(prompts)), key=lambda index: _number(prompts[index][0]))
    chosen = [index for index in by_number if is_held_out(prompts[index][0])]
    chosen += {prompts[index][1]: index for index in reversed(by_number)}.values()
    chosen += by_number[:2]
    return {*[*dict.fromkeys(chosen)][: len(prompts) // 3]}


def is_held_out(prompt: list[int]) -> bool:
    """Whether a prompt is one in HELD_OUT, the same ones in every run."""
    return _number(prompt) % HELD_OUT == 0


def _number(prompt: list[int]) -> int:
    """A number that is the same for the same prompt in every run."""
    return zlib.crc32(np.array(prompt, np.int64).tobytes())
