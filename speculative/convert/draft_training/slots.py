"""Texts that a main model in torch writes at the same time, one in each slot.

A step gives every slot a token. Which one, and what a slot does next, is computed on the device, without a look at any
value: CUDA captures a step as a graph, and replays it.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from speculative.convert.draft_training.torch_main import SlotCache, TorchMain

STEPS = 16  # between two looks at which texts are complete
TURN_TEMPERATURE = 0.85  # of a user turn
MIN_P = 0.03  # of a user turn's tokens, relative to the most likely one
GREEDY = 0.01  # lower temperatures are greedy


class Start(NamedTuple):
    """How a text begins: with `tokens`, which the model continues as a user turn, or answers."""

    tokens: list[int]
    is_turn: bool
    turns: int  # further turns of the user, after the answer
    temperature: float  # of the answers
    prompt: int | None = None  # the index of a given prompt


class Written(NamedTuple):
    tokens: np.ndarray  # int64 [n]
    answer: int  # place of the first token of the first answer
    start: Start


class Template(NamedTuple):
    """Token ids that end a text, that end a user turn, that follow one, and that lead from an answer to the next."""

    stop: list[int]
    turn_stop: list[int]
    after_turn: list[int]
    after_answer: list[int]
    longest_turn: int


class Slots:
    """`count` texts of at most `length` tokens."""

    def __init__(self, main: TorchMain, count: int, length: int, template: Template):
        self._length, self._template = length, template
        self._cache = SlotCache(main, count, length)

        def column(dtype: torch.dtype = torch.long) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=main.device)

        self._starts: list[Start | None] = [None] * count
        self._tokens = torch.zeros(count, length, dtype=torch.long, device=main.device)
        self._position, self._known, self._turn_end, self._turns, self._answer = (column() for _ in range(5))
        self._is_turn, self._done = column(torch.bool), ~column(torch.bool)
        self._temperature = column(torch.float32)
        self._rows = torch.arange(count, device=main.device)
        self._stop, self._turn_stop, self._after_turn, self._after_answer = (
            torch.tensor(ids, dtype=torch.long, device=main.device)
            for ids in (template.stop, template.turn_stop, template.after_turn, template.after_answer)
        )
        self._graph = self._capture() if main.device.startswith("cuda") else None

    @torch.no_grad()
    def run(self, begin: Callable[[], Start]) -> Iterator[Written]:
        """Start new texts in free slots, as `begin` says, and go on for some steps; returns the texts that were
        complete before."""
        yield from self._exchange(begin)
        for _ in range(STEPS):
            self._graph.replay() if self._graph else self._step()

    @property
    def unfinished_tokens(self) -> int:
        """The number of tokens in the texts that are being written."""
        return int(self._position[~self._done].sum())

    def incomplete(self) -> Iterator[Written]:
        """The texts that are being written, which have an answer."""
        yield from self._written([*range(len(self._starts))])

    @torch.no_grad()
    def _capture(self) -> "torch.cuda.CUDAGraph":
        with torch.cuda.device(self._tokens.device):  # which need not be the first GPU
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._step()  # of no text: all slots are done
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._step()
        return graph

    def _step(self) -> None:
        """One token for each text."""
        here = self._tokens[self._rows, self._position]
        sampled = self._sample(self._cache.logits(here, self._position))
        place = (self._position + 1).clamp(max=self._length - 1)
        is_new = (place >= self._known) & ~self._done
        token = torch.where(is_new, sampled, self._tokens[self._rows, place])
        self._tokens[self._rows, place] = token
        turn_stops = is_new & self._is_turn & (token[:, None] == self._turn_stop).any(-1)
        answer_stops = is_new & ~self._is_turn & (token[:, None] == self._stop).any(-1)
        is_empty = turn_stops & (place == self._known)
        if not len(self._after_turn):
            is_empty = turn_stops  # a text that ends among its first words
        turn_ends = (turn_stops | (is_new & self._is_turn & (place >= self._turn_end))) & ~is_empty
        goes_on = answer_stops & (self._turns > 0)
        self._put(turn_ends, place, self._after_turn)
        self._put(goes_on, place, self._after_answer)
        first = place + max(1, len(self._after_turn))
        self._answer.copy_(torch.where(turn_ends & (self._answer == 0), first, self._answer))
        next_end = place + len(self._after_answer) + self._template.longest_turn
        self._turn_end.copy_(torch.where(goes_on, next_end, self._turn_end))
        self._is_turn.copy_((self._is_turn | goes_on) & ~turn_ends)
        self._turns.sub_(goes_on.long())
        self._position.copy_(torch.where(self._done, self._position, place))
        self._done.logical_or_((answer_stops & ~goes_on) | is_empty | (place >= self._length - 1))

    def _sample(self, logits: torch.Tensor) -> torch.Tensor:
        """A token for each slot, drawn by Gumbel-max; unlikely ones are left out of user turns."""
        temperature = torch.where(self._is_turn, TURN_TEMPERATURE, self._temperature)
        scaled = logits / temperature.clamp(min=GREEDY)[:, None]
        least = scaled.amax(-1) + torch.where(self._is_turn, math.log(MIN_P), -torch.inf)
        scaled = scaled.masked_fill(scaled < least[:, None], -torch.inf)
        gumbel = -torch.empty_like(scaled).exponential_().clamp(min=1e-20).log()
        return torch.where((temperature > GREEDY)[:, None], scaled + gumbel, scaled).argmax(-1)

    def _put(self, where: torch.Tensor, place: torch.Tensor, ids: torch.Tensor) -> None:
        """Write `ids` from `place` on, over the token that ended this part."""
        if len(ids):
            places = (place[:, None] + torch.arange(len(ids), device=ids.device)).clamp(max=self._length - 1)
            kept = self._tokens.gather(1, places)
            self._tokens.scatter_(1, places, torch.where(where[:, None], ids, kept))
            self._known.copy_(torch.where(where, place + len(ids), self._known))

    def _exchange(self, begin: Callable[[], Start]) -> Iterator[Written]:
        """Replace complete texts by new ones."""
        free = self._done.nonzero()[:, 0].tolist()
        if not free:
            return
        yield from self._written(free)
        starts = [begin() for _ in free]
        tokens = np.zeros((len(free), self._length), np.int64)
        for row, (index, start) in enumerate(zip(free, starts, strict=True)):
            self._starts[index] = start
            tokens[row, : len(start.tokens)] = start.tokens
        known = torch.tensor([len(start.tokens) for start in starts])
        is_turn = torch.tensor([start.is_turn for start in starts])
        columns = {
            self._tokens: torch.from_numpy(tokens),
            self._known: known,
            self._is_turn: is_turn,
            self._turns: torch.tensor([start.turns for start in starts]),
            self._turn_end: known + self._template.longest_turn - 1,
            self._answer: known * ~is_turn,
            self._temperature: torch.tensor([start.temperature for start in starts]),
            self._position: torch.zeros_like(known),
            self._done: torch.zeros_like(is_turn),
        }
        for column, values in columns.items():
            column[free] = values.to(column.device)

    def _written(self, indices: list[int]) -> Iterator[Written]:
        """The texts in some slots that have an answer."""
        columns = (self._tokens, self._position, self._answer)
        for index, tokens, position, answer in zip(indices, *(c[indices].cpu().numpy() for c in columns), strict=True):
            start = self._starts[index]
            if start and 0 < answer <= position:
                yield Written(tokens[: position + 1].copy(), int(answer), start)
