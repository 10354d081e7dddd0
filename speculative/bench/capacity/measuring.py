"""Measurement of a replica's costs on this machine, with the server's batch decoder.

    costs = measure(decoder, prompts, max_new_tokens=64)

The main model's forward passes are timed by their number of tokens, alone and after another number of tokens, with and
without logits, over a long context, and over several sequences. Those of the draft were timed when the decoder was
loaded. Then the decoder answers the prompts, 1, 4, 8 and 16 at a time: without the draft model, with it but without
drafting, and with a fixed draft length, about that of the policy for as many texts. The forward passes are timed again
while decoding: those of the main model differ by a factor for each number of texts, those of the draft by a constant.
The time of an iteration outside its forward passes is distributed over iteration, requests, prompts, drafting rounds
and draft tokens by least squares, for the main model alone and with the draft. The time to tokenize a prompt and to add
a request is measured, too. Last, a draft is made and verified at each position of each answer.
"""

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from openvino_genai import GenerationConfig

from speculative.batch_decoder import BatchDecoder, Request
from speculative.bench.capacity.costs import Costs, Draft, Drafts, ModelCosts, Outside
from speculative.bench.capacity.least_squares import non_negative
from speculative.bench.load.metrics import PROMPTS_PER_RUN
from speculative.cli.progress import tqdm
from speculative.drafting.batch_policy import BatchDraftLength
from speculative.drafting.combined import Estimate
from speculative.models.batch_model import BatchModel, ScheduledTokens, Slot
from speculative.models.eagle3_batch import BatchHead
from speculative.models.paged_model import rounded_up

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)  # tokens in one forward pass
SHORT, LONG = 64, 1024  # tokens in the context, if they fit
SEQUENCES = 16  # with one token each, in one forward pass
REPETITIONS, ENOUGH_SECONDS = 5, 20.0  # repetitions; two do after so many seconds
# draft tokens for each text and iteration, by number of texts decoded at once
DRAFT_LENGTHS = {1: 8, 4: 3, 8: 2, 16: 2}
LONGEST_DRAFT = 8  # draft tokens at each position of an answer
RUN_SECONDS = 2.5  # for each number of texts, with and without drafts; longer until each of them has ended
OUTLIER = 10.0  # median absolute deviations from which a time is left out

Logits = Callable[[Sequence[ScheduledTokens]], list[np.ndarray]]  # a model's forward pass


def measure(decoder: BatchDecoder, prompts: Sequence[np.ndarray], max_new_tokens: int) -> Costs:
    """The costs of `decoder`, which must have no requests, for answers to `prompts` (token ids [n], any number of which
    may be asked for by index) of `max_new_tokens` tokens. Takes a minute, of a large model several."""
    main = measure_main(decoder.main)
    draft = draft_costs(decoder)
    plain_recorder, *drafting = [
        Recorder(Costs(main, draft), drafts) for drafts in ([False, False, True] if draft else [False])
    ]
    original_policy, model = decoder.draft_length, decoder.draft
    # a multiple of the number of prompts, with as many digits as in the load benchmarks
    numbers_per_run = -(-PROMPTS_PER_RUN // len(prompts)) * len(prompts)
    numbers = {
        recorder: itertools.count(numbers_per_run * i)
        for i, recorder in enumerate([plain_recorder, *drafting], start=1)
    }
    try:
        for texts, recorder in tqdm(list(itertools.product(DRAFT_LENGTHS, numbers)), desc="iterations", leave=False):
            decoder.draft_length, decoder.draft = recorder, None if recorder is plain_recorder else model
            with recorder.timing(decoder):
                recorder.run(decoder, prompts, numbers[recorder], texts, max_new_tokens)
    finally:
        decoder.draft_length, decoder.draft = original_policy, model
    if draft:
        draft = draft_while_decoding(draft, [one for recorder in drafting for one in recorder.draft_passes])
    first_prompts = [prompts[numbers_per_run + i] for i in range(len(prompts))]
    drafts = [drafts_of(decoder, ids, max_new_tokens) for ids in tqdm(first_prompts, desc="drafts", leave=False)]
    lengths = list(map(len, first_prompts))
    shares = decoder.draft is None or decoder.draft.shares
    outside = outside_of(drafting or [plain_recorder])
    return Costs(main, draft, outside, drafts, lengths, shares, outside_of([plain_recorder]))


# ---- forward passes -------------------------------------------------------------------------------------------------


def measure_main(model: BatchModel) -> ModelCosts:
    """The costs of the main model's forward passes. Passes that are compared follow one another, as the speed of a
    machine changes with time; each is run twice, because the first one may be prepared again."""
    max_tokens = min(model.context, LONG + SIZES[-1])
    ids = (np.arange(max_tokens, dtype=np.int64) * 7919 + 1) % model.vocab_size
    short, long = (max(1, min(context, max_tokens - SIZES[-1])) for context in (SHORT, LONG))
    sizes = [n for n in SIZES if short + n <= max_tokens]
    last = sizes[-1]
    slots = [model.slot(max_tokens), model.slot(short + last), *(model.slot(short + 1) for _ in range(SEQUENCES - 1))]
    long_slots, short_slots = slots[:1], slots[1:]

    def seconds(slots: Sequence[Slot], context: int, tokens: int, rows: int) -> list[float]:
        """Of the first and the second pass over `tokens` tokens of each sequence."""
        pass_seconds = []
        for _ in range(2):
            for slot in slots:
                slot.start_write(context, context)  # computes them again
            begin = time.perf_counter()
            model.logits([ScheduledTokens(slot, ids[: context + tokens], rows) for slot in slots])
            pass_seconds.append(time.perf_counter() - begin)
        return pass_seconds

    rounds: list[_Round] = []
    try:
        model.logits([ScheduledTokens(long_slots[0], ids, 1)])
        for slot in short_slots:
            model.logits([ScheduledTokens(slot, ids[:short], 1)])
        began = time.perf_counter()
        while len(rounds) <= REPETITIONS:
            times = {n: seconds(short_slots[:1], short, n, n) for n in sizes}
            many_tokens = times[last][1]
            one_row = seconds(short_slots[:1], short, last, 1)[1]
            many_tokens_long = seconds(long_slots, long, last, last)[1]
            one, one_token_long = seconds(short_slots[:1], short, 1, 1)[1], seconds(long_slots, long, 1, 1)[1]
            in_one = seconds(short_slots[:1], short, SEQUENCES, SEQUENCES)[1]
            in_several = seconds(short_slots, short, 1, 1)[1]
            far_many, far_one = many_tokens_long - many_tokens, one_token_long - one
            rounds.append(_Round(times, many_tokens - one_row, far_many, far_one, in_several - in_one))
            if len(rounds) > 2 and time.perf_counter() - began > ENOUGH_SECONDS:
                break
    finally:
        for slot in slots:
            slot.free_blocks()
    return _costs_of(rounds[1:], short, long)  # the first one compiles kernels


class _Round(NamedTuple):
    """Seconds of forward passes, measured one after the other."""

    passes: dict[int, list[float]]  # by number of tokens: after another number, and after the same
    without_logits: float  # less, with a single logit
    far_many: float  # more, of the largest number of tokens behind the long context
    far_one: float  # the same of a single token
    sequences: float  # more, of `SEQUENCES` tokens of as many sequences than of one


def _costs_of(rounds: Sequence[_Round], short: int, long: int) -> ModelCosts:
    sizes = list(rounds[0].passes)
    extra_tokens = max(sizes[-1] - 1, 1)  # tokens of the largest pass, beyond one
    without, far_many, far_one, sequences = (
        max(0.0, statistics.median(values)) for values in zip(*(one[1:] for one in rounds), strict=True)
    )
    attention = max(0.0, far_many - far_one) / (extra_tokens * max(long - short, 1))
    context = max(0.0, far_one / max(long - short, 1) - attention)
    passes, changes = {}, []
    for n in sizes:
        changed, same = (statistics.median(seconds) for seconds in zip(*(one.passes[n] for one in rounds), strict=True))
        passes[n] = max(0.0, same - short * (context + n * attention))
        changes.append(changed - same)
    sequence = max(0.0, sequences / (SEQUENCES - 1) - short * context)
    change = max(0.0, statistics.median(changes))
    return ModelCosts(passes, without / extra_tokens, change, context, attention, sequence)


def draft_costs(decoder: BatchDecoder) -> ModelCosts | None:
    """The costs of the draft's forward passes, as measured when the decoder was loaded; None without a draft."""
    if not decoder.draft:
        return None
    policy = decoder.draft_length
    first, further = ({n: curve.measured(n) for n in SIZES} for curve in (policy.draft, policy.draft_further))
    of_context = ModelCosts({1: 0.0}) if isinstance(decoder.draft, BatchHead) else measure_main(decoder.draft)
    return dataclasses.replace(of_context, passes=first, change=0.0, sequence=0.0, further=further)


class DraftPass(NamedTuple):
    """A forward pass of the draft while decoding."""

    tokens: int
    seconds: float
    changed: bool  # after one over another number of tokens
    further: bool  # in the same iteration as the one before


def draft_while_decoding(standalone: ModelCosts, passes: Sequence[DraftPass]) -> ModelCosts:
    """The costs of a draft with `standalone` costs, corrected by how much longer its `passes` took while decoding. No
    cost is below the shortest of these passes: with other programs running, the first measurement may take longer."""

    def longer(further: bool, changed: bool) -> float:
        differences = [
            one.seconds - standalone.seconds(one.tokens, one.tokens, further=further)
            for one in passes
            if (one.further, one.changed) == (further, changed)
        ]
        return statistics.median(differences) if differences else 0.0

    same = longer(further=True, changed=False)
    change = max(0.0, longer(further=True, changed=True) - same)
    first = longer(further=False, changed=True) - change  # nearly all first ones are over another number
    shortest = min((one.seconds for one in passes), default=0.0)
    by_tokens = [
        {n: max(seconds + more, shortest) for n, seconds in table.items()}
        for table, more in ((standalone.passes, first), (standalone.further or standalone.passes, same))
    ]
    return dataclasses.replace(standalone, passes=by_tokens[0], further=by_tokens[1], change=change)


# ---- iterations -----------------------------------------------------------------------------------------------------


class Iteration(NamedTuple):
    """A measured iteration."""

    seconds: float  # outside its forward passes
    requests: int
    rounds: int  # of drafting
    drafted: int  # tokens
    prompts: int = 0
    main: float = 0.0  # seconds of its main forward pass
    expected: float = 0.0  # the same by the costs of passes measured one after another


class Recorder(BatchDraftLength):
    """Policy that drafts a fixed number of tokens for each request, or none, and records the iterations. It decides as
    the engine's policy does, too, because that takes time."""

    def __init__(self, costs: Costs, drafts: bool):
        policy = costs.policy()
        super().__init__(policy.main, policy.draft, policy.draft_further)
        self._costs = costs
        self.iterations: list[Iteration] = []
        self.draft_passes: list[DraftPass] = []
        self.tokenizing: list[float] = []  # seconds, of each request
        self.arrivals: list[float] = []  # seconds to add each request
        self._texts = 1  # decoded at once, as far as there is room
        self._drafts = drafts
        self._width = 0  # tokens of the draft's last forward pass
        self._forward_seconds, self._rounds = 0.0, 0  # of this iteration
        self._requests, self._prompts = 0, 0  # of this iteration
        self._main, self._expected = 0.0, 0.0  # seconds of its main forward pass

    def choose(self, estimates: Sequence[Estimate], tokens: int, model_users: int, forced: bool = False) -> list[int]:
        super().choose(estimates, tokens, model_users, forced)
        length = DRAFT_LENGTHS[self._texts] if self._drafts else 0
        return [i for i, estimate in enumerate(estimates) if estimate.drafted < length]

    def update_draft(self, tokens: int, seconds: float, search_seconds: float = 0.0) -> None:
        super().update_draft(tokens, seconds, search_seconds)
        self._rounds += 1

    @contextmanager
    def timing(self, decoder: BatchDecoder) -> Iterator[None]:
        """Time the forward passes within the block."""
        models = [model for model in (decoder.main, decoder.draft) if model]
        for model in models:
            model.logits = self._timed(model.logits, model is decoder.draft)  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            for model in models:
                del model.logits  # the instance's, not the method

    def _timed(self, logits: Logits, of_draft: bool) -> Logits:
        def timed(parts: Sequence[ScheduledTokens]) -> list[np.ndarray]:
            begin_total = time.perf_counter()
            starts = [part.start for part in parts]
            begin = time.perf_counter()
            result = logits(parts)
            seconds = time.perf_counter() - begin
            (self._record_draft_pass if of_draft else self._record_main_pass)(parts, starts, seconds)
            self._forward_seconds += time.perf_counter() - begin_total
            return result

        return timed

    def _record_draft_pass(self, parts: Sequence[ScheduledTokens], starts: Sequence[int], seconds: float) -> None:
        tokens = sum(len(part.tokens) for part in parts) - sum(starts)
        width = rounded_up(tokens)
        self.draft_passes.append(DraftPass(tokens, seconds, width != self._width, self._rounds > 0))
        self._width = width

    def _record_main_pass(self, parts: Sequence[ScheduledTokens], starts: Sequence[int], seconds: float) -> None:
        computed = [len(part.tokens) - start for part, start in zip(parts, starts, strict=True)]
        attended = sum(start * n for start, n in zip(starts, computed, strict=True))
        tokens, width = sum(computed), self.pass_width
        size = max(width.last, tokens)  # padding included
        self._main, self._requests = seconds, len(parts)
        self._expected = self._costs.main.seconds(
            size, sum(part.last for part in parts), sum(starts), attended, width.is_changed, sequences=len(parts)
        )
        self._prompts = sum(n > part.last for part, n in zip(parts, computed, strict=True))

    def run(
        self, decoder: BatchDecoder, prompts: Sequence[np.ndarray], numbers: Iterator[int], texts: int, tokens: int
    ) -> None:
        """Decode `texts` texts at once, a new one when one ends."""
        config, running = GenerationConfig(max_new_tokens=tokens, ignore_eos=True), 0
        self._texts, remaining, deadline = texts, texts, time.perf_counter() + RUN_SECONDS
        while True:
            while running < texts and (remaining > 0 or time.perf_counter() < deadline):
                begin = time.perf_counter()
                ids = prompts[next(numbers)]
                tokenized = time.perf_counter()
                if not decoder.has_room(len(ids) + tokens):
                    break
                decoder.add_request(ids, config)
                self.tokenizing.append(tokenized - begin)
                self.arrivals.append(time.perf_counter() - tokenized)
                running, remaining = running + 1, remaining - 1
            if not running:
                return
            running -= self._step(decoder)

    def _step(self, decoder: BatchDecoder) -> int:
        """Run and record an iteration; returns how many requests it has finished."""
        self._forward_seconds, self._rounds = 0.0, 0
        begin = time.perf_counter()
        outputs = decoder.step()
        seconds = time.perf_counter() - begin - self._forward_seconds
        drafted = sum(output.step.proposed for output in outputs)
        counts = self._requests, self._rounds, drafted, self._prompts
        self.iterations.append(Iteration(seconds, *counts, self._main, self._expected))
        return sum(output.request.finished for output in outputs)


def outside_of(recorders: Sequence[Recorder]) -> Outside:
    """What iterations take beyond their forward passes, and these beyond passes measured one after another."""
    iterations = [one for recorder in recorders for one in recorder.iterations]
    tokenizing = [seconds for recorder in recorders for seconds in recorder.tokenizing]
    arrivals = [seconds for recorder in recorders for seconds in recorder.arrivals]
    if not iterations:
        return Outside()
    counts = [(1, one.requests, one.rounds, one.drafted, one.prompts) for one in iterations]
    iteration, request, round_, token, prompt = _least_squares(counts, [one.seconds for one in iterations])
    tokenize, arrival = statistics.median(tokenizing), statistics.median(arrivals)
    return Outside(iteration, request, round_, token, arrival, prompt, tokenize, *_factors(iterations))


def _factors(iterations: Sequence[Iteration]) -> list[dict[int, float]]:
    """The factors of plain forward passes, of those with draft tokens and with prompts, by number of sequences: those
    of the nearest number where there are none, 1 without any."""
    passes: list[dict[int, list[Iteration]]] = [{}, {}, {}]
    for one in iterations:
        if one.expected > 0:
            of_kind = passes[2 if one.prompts else 1 if one.rounds else 0]
            of_kind.setdefault(_nearest(DRAFT_LENGTHS, one.requests), []).append(one)
    return [
        {n: _factor(of_kind[_nearest(of_kind, n)]) if of_kind else 1.0 for n in DRAFT_LENGTHS} for of_kind in passes
    ]


def _nearest(numbers: Iterable[int], number: int) -> int:
    """The one of `numbers` that is nearest to `number`, by ratio."""
    return min(numbers, key=lambda n: abs(math.log2(n / number)))


def _factor(passes: Sequence[Iteration]) -> float:
    """The measured time of `passes` in relation to the expected time, without outliers."""
    times = np.array([(one.main, one.expected) for one in passes])
    ratios = times[:, 0] / times[:, 1]
    deviations = np.abs(ratios - np.median(ratios))
    main, expected = times[deviations <= _limit(deviations)].sum(0)
    return float(main / expected)


def _least_squares(columns: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """The coefficients of `columns`, none below 0, without outliers among `values`."""
    counts, observed = np.array(columns, float), np.array(values)
    inliers, coefficients = np.ones(len(observed), bool), np.zeros(counts.shape[1])
    for _ in range(3):
        coefficients = non_negative(counts[inliers], observed[inliers])
        residuals = np.abs(observed - counts @ coefficients)
        inliers = residuals <= _limit(residuals[inliers])
    return coefficients.tolist()


def _limit(deviations: np.ndarray) -> float:
    """The deviation from which a value is an outlier."""
    return OUTLIER * max(float(np.median(deviations)), 1e-9)


# ---- drafts ---------------------------------------------------------------------------------------------------------


def drafts_of(decoder: BatchDecoder, prompt: np.ndarray, max_new_tokens: int) -> Drafts:
    """The draft at each position of the answer to `prompt` (token ids [n]), from the second token to the last but one.
    Empty without a draft model, or if the cache has no room."""
    if not decoder.draft or not decoder.has_room(len(prompt) + max_new_tokens):
        return []
    request = decoder.add_request(prompt, GenerationConfig(max_new_tokens=max_new_tokens, ignore_eos=True))
    sequence = request.sequence
    drafted: list[list[tuple[int, float]]] = []  # tokens and confidences, by position
    try:
        while not sequence.is_finished:
            if sequence.can_draft:
                drafted.append(_draft(decoder.draft, request))
                sequence.drop_draft()  # the answer grows token by token
            (rows,) = decoder.main.logits([ScheduledTokens(request.slot, sequence.token_ids, 1)])
            sequence.verify(rows)
    finally:
        decoder.cancel(request)
        decoder.step()  # frees its blocks
    answer = sequence.verified_ids[len(prompt) :].tolist()
    drafts = []
    for position, draft in enumerate(drafted, start=1):
        right = (token == of_answer for (token, _), of_answer in zip(draft, answer[position:], strict=False))
        confidences = [round(confidence, 2) for _, confidence in draft]
        drafts.append(Draft(confidences, sum(itertools.takewhile(bool, right))))
    return drafts


def _draft(model: BatchModel, request: Request) -> list[tuple[int, float]]:
    """Draft up to `LONGEST_DRAFT` tokens; returns them with the draft's confidence."""
    sequence, proposer, slot = request.sequence, request.model_proposer, request.draft_slot
    drafted: list[tuple[int, float]] = []
    assert proposer and slot
    while sequence.can_draft and len(drafted) < LONGEST_DRAFT:
        if (ids := proposer.draft_ids(sequence.token_ids)) is None:
            break
        (slot.rows,) = model.logits([ScheduledTokens(slot, ids, 1)])
        if not (proposal := proposer.propose(sequence.token_ids, sequence.distribution, sequence.random)):
            break
        sequence.draft(proposal)
        drafted.append((proposal.token, proposal.confidence()))
    return drafted
