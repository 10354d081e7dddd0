"""Costs of a replica: times of its forward passes and of its other work, and the acceptance of its draft tokens.

costs = measuring.measure(decoder, prompts, max_new_tokens=64)
costs.save(Path("costs.json"), environment)
costs, environment = Costs.read(Path("costs.json"))
costs = median([costs, others])  # of several starts
"""

import functools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from speculative.atomic_write import atomic_write
from speculative.bench.capacity.sharing import ServerCosts
from speculative.drafting.batch_policy import BatchDraftLength
from speculative.drafting.cost_model import MEASURED_BATCHED
from speculative.drafting.latency_curve import LatencyCurve, monotone
from speculative.models.paged_model import rounded_up

FORMAT = 4  # of the file
NO_COSTS = "has no costs: give a file written by --save-costs"
MAX_TOKENS = 2048  # in a forward pass

T = TypeVar("T")


class Draft(NamedTuple):
    """The draft at a position of a text, verified by the main model; empty if the draft model proposes nothing."""

    confidences: Sequence[float]  # the draft model's, in each draft token
    accepted: int  # how many of its first tokens the main model accepts


Drafts = Sequence[Draft]
"""The draft at each position of a text, in order."""


@dataclass(frozen=True)
class ModelCosts:
    """Seconds of a model's forward passes: of the main model, or of a draft after the main model."""

    passes: Mapping[int, float]  # by number of tokens, 1 included, of one sequence, with logits after each
    without_logits: float = 0.0  # less, for each token without logits
    change: float = 0.0  # more, after a forward pass over another number of tokens
    context: float = 0.0  # more, for each token in the context of each sequence
    attention: float = 0.0  # more, for each token in the context of each token
    sequence: float = 0.0  # more, for each sequence after the first
    further: Mapping[int, float] | None = None  # of a draft after itself, with its weights in the CPU caches

    def __post_init__(self) -> None:
        object.__setattr__(self, "_of", _table(self.passes))
        object.__setattr__(self, "_further", _table(self.further or self.passes))

    def seconds(
        self, tokens: int, rows: int, context: int = 0, attended: int = 0, changed: bool = False, further: bool = False,
        sequences: int = 1,
    ) -> float:  # fmt: skip
        """Seconds of a forward pass over `tokens` tokens of `sequences` sequences with `rows` logits. The sequences
        have `context` tokens in the cache, those that their tokens attend to are `attended`."""
        table: list[float] = getattr(self, "_further" if further else "_of")
        minimum = table[min(rows, MAX_TOKENS)]
        token_seconds = max(table[min(rounded_up(tokens), MAX_TOKENS)] - self.without_logits * (tokens - rows), minimum)
        cache_seconds = self.context * context + self.attention * attended
        return token_seconds + self.change * changed + self.sequence * (sequences - 1) + cache_seconds


def _table(passes: Mapping[int, float]) -> list[float]:
    """Seconds of 0, 1, ..., MAX_TOKENS tokens: interpolated, extrapolated linearly."""
    n, seconds = monotone(passes)
    table = np.interp(np.arange(MAX_TOKENS + 1), n, seconds)
    if len(n) > 1:
        table[n[-1] :] += (seconds[-1] - seconds[-2]) / (n[-1] - n[-2]) * np.arange(MAX_TOKENS + 1 - n[-1])
    table[0] = 0.0
    return table.tolist()


@dataclass(frozen=True)
class Outside:
    """What iterations take beyond the main model's forward passes as measured one after another: the seconds outside
    them, and factors by which their own time differs while texts are decoded."""

    iteration: float = 0.0
    request: float = 0.0  # more, for each request in an iteration
    round: float = 0.0  # more, for each drafting round
    token: float = 0.0  # more, for each draft token
    arrival: float = 0.0  # once, for each request, to add it to the batch decoder
    prompt: float = 0.0  # more, for each request whose prompt is processed in an iteration
    tokenize: float = 0.0  # once, for each request, before it is added
    # factors by number of sequences in the forward pass
    plain_factors: Mapping[int, float] = field(default_factory=lambda: {1: 1.0})  # without draft tokens and prompts
    draft_factors: Mapping[int, float] = field(default_factory=lambda: {1: 1.0})  # with draft tokens to verify
    prompt_factors: Mapping[int, float] = field(default_factory=lambda: {1: 1.0})  # with prompts

    def factor(self, drafts: bool, prompts: bool, sequences: int) -> float:
        """The factor of a forward pass of `sequences` sequences, by whether it includes draft tokens and prompts."""
        factors = self.prompt_factors if prompts else self.draft_factors if drafts else self.plain_factors
        return _interpolated(tuple(factors.items()), sequences)


@functools.cache
def _interpolated(factors: tuple[tuple[int, float], ...], sequences: int) -> float:
    """The factor of so many sequences, between those measured."""
    numbers, values = zip(*factors, strict=True)
    return float(np.interp(math.log2(sequences), np.log2(numbers), values))


@dataclass(frozen=True)
class Costs:
    """The costs of a main model, a draft and a machine that a plan needs."""

    main: ModelCosts
    draft: ModelCosts | None = None
    outside: Outside = Outside()  # with the draft, if there is one
    drafts: Sequence[Drafts] = ()  # of each prompt's text
    prompt_tokens: Sequence[int] = ()  # lengths of the prompts
    shares_prefixes: bool = True  # whether the draft's cache shares blocks of common prefixes, too
    outside_alone: Outside | None = None  # of the main model alone; None: as `outside`
    server: ServerCosts | None = None  # of the server that shares the engines' cores; None: it has its own

    def policy(self) -> BatchDraftLength:
        """The engine's draft-length policy, initialized with these costs, as far as the engine measures them when it
        loads a model: it extrapolates those of longer forward passes."""
        draft = self.draft or ModelCosts({1: 0.0})
        passes = self.main.passes, draft.passes, draft.further or draft.passes
        measured = (LatencyCurve(by_tokens) for by_tokens in passes)
        main, first, further = (LatencyCurve({n: curve(n) for n in MEASURED_BATCHED}) for curve in measured)
        return BatchDraftLength(main, first, further, self.main.change)

    @property
    def latency(self) -> float:
        """Seconds that a request to a server takes without inference; if that is not known, those to tokenize it."""
        return self.server.latency if self.server else self.outside.tokenize

    @property
    def acceptance(self) -> float | None:
        """The share of the draft tokens up to the first rejected one that the main model accepted; None without any."""
        drafts = [one for text in self.drafts for one in text]
        judged = sum(min(one.accepted + 1, len(one.confidences)) for one in drafts)
        return sum(one.accepted for one in drafts) / judged if judged else None

    def save(self, path: Path, environment: Mapping[str, Any]) -> None:
        """Write the costs as JSON, with the `environment` in which they were measured. Raises OSError."""
        atomic_write(path, json.dumps({"format": FORMAT, "environment": environment, **asdict(self)}) + "\n")

    @classmethod
    def read(cls, path: Path) -> tuple["Costs", dict[str, Any]]:
        """Read costs and environment from a file that `save` wrote. Raises ValueError if that is not possible."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            found = content["format"]
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path} {NO_COSTS}") from None
        if found != FORMAT:
            raise ValueError(f"{path} has costs of format {found}, not {FORMAT}: measure them again")
        try:
            draft = content["draft"]
            costs = cls(
                _model(content["main"]),
                draft and _model(draft),
                _outside(content["outside"]),
                [[_draft(*one) for one in text] for text in content["drafts"]],
                content["prompt_tokens"],
                content["shares_prefixes"],
                _outside(content["outside_alone"]) if content.get("outside_alone") else None,
                ServerCosts(**content["server"]) if content.get("server") else None,
            )
            return costs, dict(content["environment"])
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{path} {NO_COSTS}") from None


def median(starts: Sequence[Costs]) -> Costs:
    """The medians of costs of the same models and machine, of several starts: the speed of a machine varies from minute
    to minute, and with the place at which a process loads a model. Drafts are those of the first start."""
    first = starts[0]
    drafts = [costs.draft for costs in starts if costs.draft]
    alone = [costs.outside_alone or costs.outside for costs in starts]
    return replace(
        first,
        main=_medians([costs.main for costs in starts]),
        draft=_medians(drafts) if drafts else None,
        outside=_medians([costs.outside for costs in starts]),
        outside_alone=_medians(alone),
    )


def _medians(starts: Sequence[T]) -> T:
    """The medians of the fields of dataclasses: of numbers, and of tables of numbers."""
    medians: dict[str, Any] = {}
    for name in (one.name for one in fields(starts[0])):  # type: ignore[arg-type]
        values = [getattr(start, name) for start in starts]
        if isinstance(values[0], Mapping):
            common = [n for n in values[0] if all(n in start for start in values)]
            medians[name] = {n: statistics.median(start[n] for start in values) for n in common}
        else:
            medians[name] = values[0] if values[0] is None else statistics.median(values)
    return type(starts[0])(**medians)


def _model(content: dict) -> ModelCosts:
    passes, further = _by_number(content["passes"]), content["further"]
    if 1 not in passes:
        raise ValueError
    return ModelCosts(**{**content, "passes": passes, "further": further and _by_number(further)})


def _outside(content: dict) -> Outside:
    factors = {name: _by_number(content[name]) for name in ("plain_factors", "draft_factors", "prompt_factors")}
    if not all(factors.values()):
        raise ValueError
    return Outside(**{**content, **factors})


def _draft(confidences: list, accepted: int) -> Draft:
    if accepted not in range(len(confidences) + 1) or not all(0 <= confidence <= 1 for confidence in confidences):
        raise ValueError
    return Draft(list(map(float, confidences)), int(accepted))


def _by_number(content: dict) -> dict[int, float]:
    """A JSON object whose keys are numbers, in ascending order. Raises ValueError if one is not positive."""
    found = {int(n): float(one) for n, one in content.items()}
    if any(n < 1 for n in found):
        raise ValueError
    return dict(sorted(found.items()))
