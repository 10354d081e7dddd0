"""Generates the training texts on a torch device, thousands at a time, for online training.

With given prompts, some texts answer one of them. For others the model continues the first words of one, which gives
any number of prompts of the same kinds.
"""

from collections.abc import Callable, Iterable

import numpy as np
import openvino_genai
import torch

from speculative.convert.draft_training import beginnings
from speculative.convert.draft_training.beginnings import Prompt
from speculative.convert.draft_training.slots import Slots, Start, Template, Written
from speculative.convert.draft_training.texts import Text, TextFile
from speculative.convert.draft_training.torch_main import SlotCache, TorchMain
from speculative.convert.draft_training.writer import (
    MAX_ATTEMPTS,
    MIN_ANSWER,
    TEMPERATURES,
    encoded,
    held_out,
    is_held_out,
)
from speculative.convert.errors import ConvertError
from speculative.models.spec import ModelSpec
from speculative.sampling.params import stop_ids_of

MOST_SLOTS, CPU_SLOTS = 2048, 32
MEMORY_SHARE = 0.5  # of a GPU's free memory, for the slots
AS_GIVEN, CONTINUED = 0.3, 0.4  # of the texts: a given prompt, the first words of one; the model writes the others
FEW_WORDS, FEW_WORDS_SHARE = 40, 0.7  # most tokens of a prompt's first words, in this share of the texts
SECOND_TURN_SHARE = 0.2


class DeviceWriter:
    """Writes texts of at most `longest` tokens to a TextFile."""

    def __init__(self, spec: ModelSpec, main: TorchMain, longest: int, prompts: list[Prompt], file: TextFile):
        """Without `prompts` the model writes its own. Raises ConvertError if too few of them are short enough."""
        tokenizer = openvino_genai.Tokenizer(str(spec.folder))
        self._random = np.random.default_rng()  # new texts, also where an earlier training had the same prompts
        self._file = file
        self._opening = beginnings.opening(tokenizer, main.vocabulary, self._random)
        self._prompts = encoded(prompts, tokenizer, longest)
        self._held_out = held_out(self._prompts)
        self._category_of = {tuple(self._prompts[index][0]): self._prompts[index][1] for index in self._held_out}
        self._training = [index for index in range(len(self._prompts)) if index not in self._held_out]
        self._first = iter(sorted(self._held_out))  # the verdict is about these, each once
        opening = len(self._opening.lead) + len(self._opening.prefix) + len(self._opening.suffix)
        if opening + MIN_ANSWER >= longest:
            raise ConvertError(
                f"the chat template of {spec.folder} takes {opening} tokens; give a --length well above that", 2
            )
        stop = stop_ids_of(spec.folder, tokenizer)
        after_answer = beginnings.next_turn(tokenizer)
        self._has_next_turn = bool(after_answer)
        longest_turn = max(self._opening.longest, longest // 3 if prompts else 0)  # given prompts may be long
        turn_stop = [*stop, *self._opening.stop_ids]
        template = Template([*stop], turn_stop, self._opening.suffix, after_answer, longest_turn)
        self._slots = Slots(main, _slot_count(main, longest), longest, template)

    def write(self, seconds_left: Callable[[], float], max_tokens: int, progress: Callable[[int], None]) -> None:
        """Write until the time is up or there are `max_tokens`, but at least a few texts. Calls `progress` often, with
        the number of tokens in unfinished texts.

        Raises ConvertError if the model does not write different texts.
        """
        rounds = 0
        try:
            while (seconds_left() > 0 and self._file.token_count < max_tokens) or not self._file.is_enough_with(
                self._texts(self._slots.incomplete())
            ):
                if rounds > MAX_ATTEMPTS and not self._file.is_enough:
                    raise ConvertError(
                        f"the main model wrote only {len(self._file.texts)} different texts of at least {MIN_ANSWER} "
                        "tokens; give a greater --length, or more prompts, with --prompts"
                    )
                for written in self._slots.run(self._begin):
                    self._keep(written)
                rounds += 1
                progress(self._slots.unfinished_tokens)
        finally:
            for written in self._slots.incomplete():  # an answer that was broken off is a text, too
                self._keep(written)

    def _begin(self) -> Start:
        if self._held_out:
            if (index := next(self._first, None)) is not None:
                return self._given(index)
            if not self._file.has_held_out:  # answers that were too short
                return self._given(int(self._random.choice([*self._held_out])))
        kind = self._random.random()
        if self._training and kind < AS_GIVEN:
            return self._given(int(self._random.choice(self._training)))
        beginning = self._opening.prefix
        if self._training and kind < AS_GIVEN + CONTINUED:
            beginning = self._first_words(int(self._random.choice(self._training)))
        return self._start([*self._opening.lead, *beginning], is_turn=True)

    def _given(self, index: int) -> Start:
        return self._start(self._prompts[index][0], is_turn=False, prompt=index)

    def _start(self, tokens: list[int], is_turn: bool, prompt: int | None = None) -> Start:
        turns = int(self._has_next_turn and self._random.random() < SECOND_TURN_SHARE)
        return Start(tokens, is_turn, turns, float(self._random.choice(TEMPERATURES)), prompt)

    def _first_words(self, index: int) -> list[int]:
        """The first tokens of a prompt, after those of the chat template, of which the last may be another one: the
        prompt's first letters can be part of it."""
        ids, opening = self._prompts[index][0], self._opening
        pairs = enumerate(zip(ids, opening.prefix, strict=False))
        begin = next((i for i, (token, other) in pairs if token != other), len(opening.prefix))
        words = len(ids) - len(opening.suffix) - begin
        if words < 2:
            return opening.prefix
        most = FEW_WORDS if self._random.random() < FEW_WORDS_SHARE else words
        return ids[: begin + int(self._random.integers(1, min(most, words - 1) + 1))]

    def _keep(self, written: Written) -> None:
        for text in self._texts([written]):
            self._file.add(text)

    def _texts(self, some: Iterable[Written]) -> list[Text]:
        """The texts without those whose answer is too short."""
        return [self._text(written) for written in some if len(written.tokens) - written.answer >= MIN_ANSWER]

    def _text(self, written: Written) -> Text:
        tokens, start = written.tokens.tolist(), written.start
        prompt, answer = tokens[: written.answer], tokens[written.answer :]
        if start.prompt is None:
            prompt = prompt[len(self._opening.lead) :]
            is_test, category = not self._prompts and is_held_out(prompt), ""
            if tuple(prompt) in self._category_of:  # the model wrote a held-out prompt
                is_test, category = True, self._category_of[tuple(prompt)]
        else:
            is_test, category = start.prompt in self._held_out, self._prompts[start.prompt][1]
        return Text(prompt, answer, start.temperature, is_test, category)


def _slot_count(main: TorchMain, longest: int) -> int:
    kind = main.device.partition(":")[0]
    if kind not in ("cuda", "xpu"):
        return CPU_SLOTS
    free, _ = (torch.cuda if kind == "cuda" else torch.xpu).mem_get_info(main.device)
    return max(1, min(MOST_SLOTS, int(MEMORY_SHARE * free) // SlotCache.bytes_each(main, longest)))
