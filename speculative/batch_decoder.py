"""Speculative decoder for many requests in one batch, greedy and sampled, lossless, on one copy of the weights.

    decoder = load("models/embedded/main", "models/embedded/draft")
    request = decoder.add_request("def read_file(path):", GenerationConfig(max_new_tokens=100, do_sample=True), seed=1)
    while decoder.has_unfinished_requests:
        for output in decoder.step():
            ...  # output.request, output.step, output.text
    print(request.result.text)

Requests join and leave between iterations (continuous batching: Yu et al. 2022, "Orca"; paged KV cache: Kwon et al.
2023, arXiv 2309.06180). An iteration has three parts: drafting rounds, each one draft forward pass that proposes a
token for every request that wants another; one main forward pass that verifies all draft tokens and processes chunks of
new prompts; and `rejection_sampling.verify` per request, with the request's own random generator. The distribution of a
request's output does not depend on the other requests. Its draft length does, and so does sampled text without a seed.

Requests with a common prefix (a system prompt, earlier chat turns) share its KV-cache blocks, even after the request
that computed them has ended. Only full blocks of verified tokens are shared.
"""

import threading
import time
from collections.abc import Callable, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import openvino_genai
from openvino_genai import GenerationConfig

from speculative.decoder import check_ngram_size, grammars_of
from speculative.drafting import cost_model
from speculative.drafting.acceptance import AcceptanceEstimate
from speculative.drafting.batch_policy import BatchDraftLength
from speculative.drafting.combined import CombinedEstimate, CombinedProposer, Estimate
from speculative.drafting.latency_curve import LatencyCurve
from speculative.drafting.policy import LONGEST, Confidence, DraftLengthPolicy, FixedDraftLength, policy_from_params
from speculative.drafting.proposers import DraftModelProposer, Proposer
from speculative.drafting.retokenizer import Retokenizer
from speculative.drafting.suffix import PastAnswers, SuffixProposer
from speculative.models.batch_model import BatchModel, ScheduledTokens, Slot
from speculative.models.block_pool import OutOfBlocks
from speculative.models.cached_model import CAPACITY
from speculative.models.eagle3_batch import BatchHead
from speculative.models.eagle3_head import EagleHead
from speculative.models.loading import load_models
from speculative.models.spec import ModelSpec
from speculative.models.vocabulary import SharedTokens
from speculative.pair.model_info import config_facts
from speculative.pair.usable import check_capacity, explained
from speculative.sampling.params import SamplingParams, stop_ids_of
from speculative.sampling.proposal import Proposal
from speculative.sequence.detokenizer import CONTEXT_TOKENS, cleans_up
from speculative.sequence.mask_thread import MaskThread
from speculative.sequence.output import OutputProcessor
from speculative.sequence.prompt import Prompt, encode
from speculative.sequence.result import GenerationResult, Step
from speculative.sequence.sequence import Sequence

PREFILL_CHUNK = 256  # most prompt tokens in one forward pass
MIN_PREFILL_CHUNK = 8  # prompt tokens that a forward pass may always include
PREFILL_SLOWDOWN = 3.0  # a forward pass with prompt tokens may take this many times as long as without
SEEDED_DRAFT = 4  # draft length of seeded sampling: the adaptive one depends on timings and on other requests

T = TypeVar("T")


class Request:
    """A request being decoded, created by `BatchDecoder.add_request`; `result` grows with every step.

    `finished` tells whether it has ended, and `error` is the exception that ended it, if one did. `cached_tokens` of
    its prompt came from the prefix cache.
    """

    def __init__(
        self,
        sequence: Sequence,
        output: OutputProcessor,
        policy: DraftLengthPolicy | Estimate,
    ):
        self.sequence = sequence
        self.output = output
        self.policy = policy  # its own policy, or its acceptance estimate for the batch's policy
        self.slot: Slot  # in the main model's cache
        self.draft_slot: Slot | None = None  # in the draft model's
        self.proposer: Proposer | None = None
        # the proposer, or the part of it that uses the draft model
        self.model_proposer: DraftModelProposer | None = None
        self.suffix: SuffixProposer | None = None  # stores its answer for later requests
        self.drafted_at_search = -1  # draft tokens at the last search for a match; -1: no search yet
        self.confidence: Confidence | None = None  # in the last draft token
        self.match: Proposal | None = None  # the token that may be copied next; as it is not random, it may be declined
        self.copied = False  # whether it has copied a token in this iteration, although there is a draft model
        self.done_drafting = False  # in this iteration
        self.is_repeatable = False  # whether its text must depend on its seed only
        # its draft model has not read all tokens yet: no main forward pass in this iteration
        self.waits_for_draft = False
        self.random_state: Mapping[str, Any] = {}  # at the beginning of the iteration, if it is repeatable
        self.cached_tokens = 0  # prompt tokens taken from the prefix cache
        self.cancelled = False
        self.finished = False
        self.error: Exception | None = None  # the error that ended it

    @property
    def result(self) -> GenerationResult:
        return self.output.result

    @property
    def follows_batch(self) -> bool:
        """Whether the batch's policy decides its draft length."""
        return isinstance(self.policy, Estimate)

    @property
    def copy(self) -> Proposal | None:
        """The next draft token if it is a copy."""
        return None if isinstance(self.policy, CombinedEstimate) and not self.policy.copies else self.match


class RequestOutput(NamedTuple):
    """A request's new tokens of one iteration, and the text that is final now (when streaming).

    `request.finished` marks the last output; it has no tokens if the request was cancelled or failed.
    """

    request: Request
    step: Step
    text: str


class BatchDecoder:
    """A main model, a proposer of draft tokens, a draft-length policy and the running requests.

    One thread calls `step`; `add_request`, `cancel` and `has_room` may be called from other threads.
    """

    def __init__(
        self,
        main: BatchModel,
        draft: BatchModel | None,
        draft_length: BatchDraftLength,
        tokenizer: openvino_genai.Tokenizer | None = None,
        stop_token_ids: frozenset[int] = frozenset(),
        subtract_penalties: bool = False,
        shared: SharedTokens | None = None,
        suffix: SuffixProposer | None = None,
    ):
        """Without `draft` and `suffix`, decoding is plain; with both, each draft token comes from the source that is
        worth more. `draft_length` applies to requests whose GenerationConfig sets no draft
        length. Without `tokenizer`, prompts are token ids and results have no text. `stop_token_ids` apply when a
        GenerationConfig sets no `eos_token_id`. `subtract_penalties` gives penalties OpenAI's meaning instead of
        GenAI's. `shared` is for a draft with another tokenizer."""
        self.main = main
        self.draft = draft
        self.suffix = suffix
        self.draft_length = draft_length
        self.tokenizer = tokenizer
        self.stop_token_ids = stop_token_ids
        self.subtract_penalties = subtract_penalties
        self.grammars = grammars_of(tokenizer, main.vocab_size)
        self.cleans_up = tokenizer is not None and cleans_up(tokenizer)
        self._masks = MaskThread()
        self._shared = shared
        self._requests: list[Request] = []
        self._new: list[Request] = []  # added since the last step
        self._lock = threading.Lock()  # guards new requests and block reservations

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._new or self._requests)

    @property
    def cache_bytes(self) -> int:
        """Memory in bytes of the KV caches for all requests, main and draft."""
        return self.main.cache_bytes + (self.draft.cache_bytes if self.draft else 0)

    def encode(self, prompt: Prompt, config: GenerationConfig | None = None) -> np.ndarray:
        """The prompt's token ids int64 [n], the same as `LLMPipeline.generate` computes."""
        return encode(prompt, self.tokenizer, config)

    def has_room(self, tokens: int) -> bool:
        """Whether a request of up to `tokens` tokens, prompt included, would be accepted now."""
        tokens = min(tokens, self.main.context)
        with self._lock:
            fits = self.main.has_room(tokens)
            return fits and (not self.draft or self.draft.has_room(self._draft_cache_length(tokens)))

    def add_request(
        self,
        prompt: Prompt,
        config: GenerationConfig | None = None,
        seed: int | None = None,
        stream: bool = False,
        salt: bytes = b"",
        logit_bias: Mapping[int, float] | None = None,
        prompt_logprobs: int = 0,
        continues: bool = False,
        hides_stop_token: bool = False,
    ) -> Request:
        """Add a request, which joins at the next step. `seed`, or the config's `rng_seed`, seeds its random generator.
        As the same seed must give the same text, a seeded sampled request with a draft model ignores `draft_length` and
        past answers, and drafts `SEEDED_DRAFT` tokens unless its config sets a draft length. With `stream`, outputs
        carry the text piece by piece. The request shares cached blocks and past answers only with requests that have
        the same `salt`. `logit_bias` and `prompt_logprobs` are those of `Decoder.generate`. With `continues`, the text
        continues that of the prompt: tokenizers that leave out a text's first space keep it. With `hides_stop_token`,
        a stop token has no text, unless the config sets `include_stop_str_in_output`; by default it has one, as in
        GenAI.

        Raises OutOfBlocks if the cache has no blocks for prompt and `max_new_tokens` (see `has_room`), and ValueError
        as `Decoder.stream` does.
        """
        config = config or GenerationConfig()
        ids = self.encode(prompt, config)
        params = SamplingParams.resolve(
            config,
            len(ids),
            self.main.context,
            self.stop_token_ids,
            self.subtract_penalties,
            seed,
            self.grammars,
            logit_bias,
            prompt_logprobs,
        )
        sequence = Sequence(ids, params, self.main.vocab_size, np.random.default_rng(params.seed))
        decode = self.tokenizer and (lambda ids: self.tokenizer.decode(ids))
        context = ids[-CONTEXT_TOKENS:].tolist() if continues else None
        output = OutputProcessor(params, decode, stream, None, self.cleans_up, context, hides_stop_token)
        request = Request(sequence, output, self._policy_for(params))
        request.result.prompt_logprobs = sequence.prompt_logprobs
        request.is_repeatable = self._is_repeatable(params)
        if self.suffix:
            request.suffix = request.proposer = self.suffix.of_request(salt)
        with self._lock:
            request.slot = self.main.slot(sequence.max_length, salt)
            if self.draft:
                try:
                    longest = self._draft_cache_length(sequence.max_length)
                    request.draft_slot = self.draft.slot(longest, salt, request.slot)
                except OutOfBlocks:
                    request.slot.free_blocks()
                    raise
                retokenizer = Retokenizer(self._shared) if self._shared else None
                model = DraftModelProposer(request.draft_slot, self.main.vocab_size, retokenizer)
                request.model_proposer = request.proposer = model
                if self.suffix:  # past answers would make seeded text depend on other requests
                    seeded = params.do_sample and params.seed is not None
                    request.proposer = CombinedProposer(self.suffix.of_request(salt, past=not seeded), model)
            self._new.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Remove a request at the next step. No effect on a finished one."""
        request.cancelled = True

    def step(self) -> list[RequestOutput]:
        """Run one iteration and return the output of each request, except those still in prefill.

        A request that fails on its own (NaN logits, text that cannot be decoded) is finished with its `error` set and a
        last output without tokens; the others continue. Errors from OpenVINO are raised: no request has advanced then,
        and `step` may be called again.
        """
        with self._lock:
            self._requests += self._new
            self._new = []
        # finished ones are left where Ctrl-C ended the last step before it removed them
        active = [request for request in self._requests if not (request.finished or request.cancelled or request.error)]
        outputs = self._iterate(active) if active else []
        return outputs + self._finalize()

    def _iterate(self, requests: list[Request]) -> list[RequestOutput]:
        running = [request for request in requests if not request.sequence.is_prefill]
        prefills = self._schedule_prefills(
            [request for request in requests if request.sequence.is_prefill], len(running)
        )
        num_prompt_tokens = sum(part.missing for part in prefills.values())
        if running:
            self._draft(running, num_prompt_tokens)
        running = [request for request in running if not (request.error or request.waits_for_draft)]
        verified = sum(request.sequence.num_logits for request in running)
        parts = {
            request: ScheduledTokens(request.slot, request.sequence.token_ids, request.sequence.num_logits)
            for request in running
        } | prefills
        if not parts:  # all requests failed while drafting, or wait for their drafts
            self._cache_verified_blocks(requests)
            return []

        begin = time.perf_counter()
        self.main.pass_width = self.draft_length.pass_width
        with self._masks.computing(request.sequence for request, part in parts.items() if part.last):
            logits = self.main.logits(list(parts.values()))
        forced = {request for request in running if request.sequence.forced}
        steps: dict[Request, Step] = {}
        for request, rows in zip(parts, logits, strict=True):
            if request.sequence.needs_prompt_logprobs:
                self._try(request, request.sequence.add_prompt_logprobs, rows)
            elif len(rows) and (step := self._try(request, request.sequence.verify, rows)):
                steps[request] = step
        gained = sum(len(steps[request].tokens) for request in running if request in steps)
        self.draft_length.update_main(verified, num_prompt_tokens, gained, time.perf_counter() - begin)
        self._cache_verified_blocks(requests)
        for request in running:
            if request in steps and isinstance(request.policy, Estimate) and request not in forced:
                step = steps[request]
                if isinstance(request.policy, CombinedEstimate):
                    request.policy.observe(step.tokens)
                elif request.match and step.accepted == step.proposed:
                    request.policy.observe_declined(step.tokens[-1] == request.match.token)
                request.policy.update(step.proposed, step.accepted)
        outputs = [self._try(request, self._process_step, request, step) for request, step in steps.items()]
        return [output for output in outputs if output]

    def _schedule_prefills(self, requests: list[Request], running: int) -> dict[Request, ScheduledTokens]:
        """Schedule prompt tokens, first come, first served, up to the number for which running requests can wait. If
        the first prompt needs several passes, prompts of at most half its length get up to half of each pass. A request
        waits for blocks of a common prefix that an earlier request computes."""
        if not requests:
            return {}
        parts = {}
        for request in requests:
            if request.sequence.needs_prompt_logprobs:  # needs the logits of all its tokens
                parts[request] = ScheduledTokens(request.slot, *request.sequence.prompt_part)
                continue
            request.cached_tokens += request.slot.match_prefix(request.sequence.token_ids)
            parts[request] = ScheduledTokens(request.slot, request.sequence.token_ids, 1)
        budget, first = prompt_budget(self.draft_length.main, running), parts[requests[0]]
        missing, shorter = first.missing, {}
        if missing > budget:
            shorter = {
                request: part
                for request, part in parts.items()
                if 2 * part.missing <= missing and not part.can_wait_for(first)
            }
        ahead = _schedule(budget // 2, shorter)
        others = {request: part for request, part in parts.items() if request not in ahead}
        return ahead | _schedule(budget - sum(part.missing for part in ahead.values()), others)

    def _draft(self, running: list[Request], num_prompt_tokens: int) -> None:
        """Run drafting rounds, each adding a token to every request that wants another. The main model's next forward
        pass also includes `num_prompt_tokens` prompt tokens."""
        for request in running:
            if request.is_repeatable and request.sequence.drafted:
                request.sequence.random.bit_generator.state = request.random_state  # draw the same tokens again
            request.sequence.drop_draft()  # of an iteration that failed
            request.confidence, request.match, request.done_drafting, request.drafted_at_search = None, None, False, -1
            request.copied = request.waits_for_draft = False
            if request.is_repeatable:
                request.random_state = request.sequence.random.bit_generator.state
            if isinstance(request.policy, Estimate):
                request.policy.begin()
        if not (self.draft or self.suffix):
            for request in running:
                self._try(request, self._draft_forced, request)
            return
        drafting = [request.policy for request in running if self._try(request, self._can_draft, request)]
        followers = [policy for policy in drafting if isinstance(policy, Estimate)]
        self.draft_length.begin(followers, len(running))
        while True:
            for request in running:
                self._try(request, self._draft_forced, request)
            begin = time.perf_counter()
            if self.suffix:
                for request in running:
                    self._try(request, self._find_match, request)
            search_seconds = time.perf_counter() - begin
            if not (chosen := self._choose_requests(running, num_prompt_tokens)):
                break
            begin = time.perf_counter()
            computed = (
                self._run_draft_model(self.draft, [request for request in chosen if not request.copy])
                if self.draft
                else 0
            )
            for request in chosen:
                if not request.done_drafting:
                    self._try(request, self._propose, request)
            self.draft_length.update_draft(computed, time.perf_counter() - begin, search_seconds)

    def _choose_requests(self, running: list[Request], num_prompt_tokens: int) -> list[Request]:
        """Return the requests that draft another token."""
        own: list[Request] = []
        others: list[Request] = []
        estimates: list[Estimate] = []  # of `others`
        for request in running:
            policy, drafted = request.policy, request.sequence.drafted - request.sequence.forced
            if request.done_drafting or request.error or not self._try(request, self._can_draft, request):
                continue
            if isinstance(policy, Estimate):
                if drafted < LONGEST:
                    others.append(request)
                    estimates.append(policy)
            elif self._try(request, policy.should_draft, drafted, request.confidence):
                own.append(request)
            else:  # ask only once: the confidence is overwritten by the next forward pass
                request.done_drafting = True
        tokens = num_prompt_tokens + sum(request.sequence.num_logits for request in running)
        indices = self.draft_length.choose(estimates, tokens, sum(not request.copy for request in own), bool(own))
        return own + [others[i] for i in indices]

    @staticmethod
    def _can_draft(request: Request) -> bool:
        """Whether another draft token can be useful. Raises ValueError if the grammar is too complex for the text."""
        return request.sequence.can_draft

    @staticmethod
    def _draft_forced(request: Request) -> None:
        """Draft the tokens that the grammar forces. The draft model continues after them if it can."""
        if request.sequence.draft_forced():
            request.copied = True
            model = request.model_proposer
            alone = model is not None and model is request.proposer and not model.continues_copies
            request.done_drafting = request.done_drafting or alone

    @staticmethod
    def _run_draft_model(draft: BatchModel, requests: list[Request]) -> int:
        """Run the draft model over the requests' missing tokens; long ones are split over several iterations, in which
        their requests have no draft, or wait.

        Returns the number of tokens computed.
        """
        needed = {}
        for request in sorted(requests, key=lambda request: not request.sequence.drafted):
            slot, proposer = request.draft_slot, request.model_proposer
            if not slot or not proposer:
                continue
            if (ids := proposer.draft_ids(request.sequence.token_ids)) is not None:
                slot.match_prefix(proposer.final_ids(request.sequence.verified_ids))
                needed[request] = ScheduledTokens(slot, ids, 1)
        parts = _schedule(PREFILL_CHUNK, needed)
        computed = sum(part.missing for part in parts.values())
        if parts:
            for part, rows in zip(parts.values(), draft.logits(list(parts.values())), strict=True):
                part.slot.rows = rows
        for request in requests:
            request.done_drafting = request not in parts or not parts[request].last
            request.waits_for_draft = request.is_repeatable and request.done_drafting and request in needed
            if request.waits_for_draft:  # it draws the same draft tokens later, or the output would not be lossless
                request.sequence.drop_draft()
                request.sequence.random.bit_generator.state = request.random_state
        return computed

    def _find_match(self, request: Request) -> None:
        """Find the token that the request may copy next, for the policy to decide on."""
        sequence, source, policy = request.sequence, request.proposer, request.policy
        if request.done_drafting or request.drafted_at_search == sequence.drafted or not sequence.can_draft:
            return
        request.drafted_at_search = sequence.drafted
        inputs = sequence.token_ids, sequence.distribution, sequence.random
        if isinstance(source, CombinedProposer):
            match, can_use_model = (
                sequence.if_allowed(source.match(*inputs)),
                source.can_use_model(sequence.token_ids, request.copied),
            )
            if isinstance(policy, CombinedEstimate):
                request.match = match
                policy.set_next(match, can_use_model)
                policy.copies = policy.prefers_copy(self.draft_length.step_worth)
            else:
                request.match = match if source.is_trusted(match) else None
            request.done_drafting = not request.match and not can_use_model
        elif source and isinstance(policy, AcceptanceEstimate):
            request.match = sequence.if_allowed(source.propose(*inputs))
            request.done_drafting = request.match is None
            if request.match:
                policy.set_next(request.match.confidence())

    def _propose(self, request: Request) -> None:
        sequence = request.sequence
        source = request.model_proposer or request.proposer
        proposal = copy = request.copy
        if source and not proposal:
            proposal = sequence.if_allowed(source.propose(sequence.token_ids, sequence.distribution, sequence.random))
        if proposal is None:
            request.done_drafting = True
            return
        request.match, request.copied = None, request.copied or copy is not None
        sequence.draft(proposal)
        request.confidence = proposal.confidence
        if isinstance(request.policy, CombinedEstimate):
            request.policy.draft(proposal, copied=copy is not None)
        elif isinstance(request.policy, AcceptanceEstimate):
            request.policy.draft(proposal.confidence())

    @staticmethod
    def _cache_verified_blocks(requests: list[Request]) -> None:
        """Share the requests' cached blocks with others, now that their tokens are verified."""
        for request in requests:
            if request.error:
                continue
            verified = request.sequence.verified_ids
            request.slot.cache_full_blocks(verified)
            if request.draft_slot and request.model_proposer:
                request.draft_slot.cache_full_blocks(request.model_proposer.final_ids(verified))

    def _process_step(self, request: Request, step: Step) -> RequestOutput:
        tokens, piece = request.output.add_step(step)
        used = len(tokens)
        step = step._replace(tokens=tokens, accepted=min(step.accepted, used), logprobs=step.logprobs[:used])
        if request.sequence.is_finished or request.result.finish_reason == "stop":
            piece += self._finish(request)
        return RequestOutput(request, step, piece)

    def _finish(self, request: Request) -> str:
        if request.proposer:
            policy = self.draft_length if isinstance(request.policy, Estimate) else request.policy
            request.result.draft_length = policy.describe()
        else:
            request.result.draft_length = "no draft"
        rest = request.output.end()
        request.finished = True
        if request.suffix and not (request.cancelled or request.error):
            sequence = request.sequence
            end = sequence.num_prompt_tokens + len(request.result.tokens)
            request.suffix.remember(sequence.token_ids[:end], sequence.num_prompt_tokens)
        return rest

    def _finalize(self) -> list[RequestOutput]:
        """Free the blocks of finished, cancelled and failed requests; return the last outputs of the latter two."""
        last = []
        for request in self._requests:
            if (request.cancelled or request.error) and not request.finished:
                request.result.finish_reason = "cancelled"
                last.append(RequestOutput(request, Step([], 0, 0), self._try(request, self._finish, request) or ""))
                request.finished = True  # even if its remaining text could not be decoded
            if request.finished:
                with self._lock:
                    request.slot.free_blocks()
                    if request.draft_slot:
                        request.draft_slot.free_blocks()
        self._requests = [request for request in self._requests if not request.finished]
        return last

    def _draft_cache_length(self, tokens: int) -> int:
        """How many tokens the draft's cache needs for `tokens` tokens of the main model."""
        return self._shared.draft_length(tokens) if self._shared else tokens

    def _policy_for(self, params: SamplingParams) -> DraftLengthPolicy | Estimate:
        if params.tree_depth:
            raise ValueError(f"tree_depth={params.tree_depth} is not supported for many requests: leave it at 0")
        if policy := policy_from_params(params):
            return policy
        if self._is_repeatable(params):
            return FixedDraftLength(SEEDED_DRAFT)
        return self.draft_length.estimate(combined=bool(self.draft and self.suffix))

    def _is_repeatable(self, params: SamplingParams) -> bool:
        """Whether the text of a request depends on its drafts, and must not."""
        return self.draft is not None and params.do_sample and params.seed is not None

    @staticmethod
    def _try(request: Request, function: Callable[..., T], *arguments: object) -> T | None:
        """Return what `function` returns. An exception ends only this request: it is stored as its error, None
        returned."""
        try:
            return function(*arguments)
        except Exception as error:
            request.error = request.error or error
            return None


def prompt_budget(main: LatencyCurve, running: int) -> int:
    """The prompt tokens that a forward pass of the main model may include beside those of `running` requests."""
    if not running:
        return PREFILL_CHUNK
    tokens = main.max_tokens(PREFILL_SLOWDOWN * main(running), other_tokens=running, most=PREFILL_CHUNK)
    return max(tokens, MIN_PREFILL_CHUNK)


def _schedule(budget: int, parts: dict[Request, ScheduledTokens]) -> dict[Request, ScheduledTokens]:
    """The first of `parts` that fit into `budget` tokens, without those whose next block another one computes; the last
    one may be truncated, with fewer logits."""
    fitting: dict[Request, ScheduledTokens] = {}
    computed: list[ScheduledTokens] = []
    for request, part in parts.items():
        if not budget:
            break
        if part.has_full_block:
            if part.last <= 1 and any(part.can_wait_for(other) for other in computed):
                continue
            computed.append(part)
        missing = part.missing
        if missing > budget:
            cut = missing - budget
            part = ScheduledTokens(part.slot, part.tokens[: len(part.tokens) - cut], max(part.last - cut, 0))
        fitting[request] = part
        budget -= min(missing, budget)
    return fitting


def load(
    main: ModelSpec | str | Path,
    draft: ModelSpec | str | Path | None = None,
    *,
    max_ngram_size: int | None = None,
    past_answers: int = 0,
    cache_tokens: int = CAPACITY,
    use_huge_pages: bool = False,
    prefix_cache: bool = True,
    subtract_penalties: bool = False,
) -> BatchDecoder:
    """Load the main model, and a draft if given, into a batch decoder; see `decoder.load` for the common arguments.

    `past_answers` is how many tokens of the latest answers are kept, for suffix decoding to copy from them, too; those
    of another salt are never used. `cache_tokens` is the KV-cache capacity in tokens for all requests together, prompts
    included; `BatchDecoder.cache_bytes` gives its size. Without `prefix_cache`, requests share no blocks.
    `subtract_penalties` is passed to `BatchDecoder`. Costs are measured at load and updated while decoding. Raises
    ValueError for a model or device without paged attention.
    """
    check_ngram_size(max_ngram_size)
    if not (isinstance(past_answers, Integral) and past_answers >= 0):
        raise ValueError(f"past_answers is {past_answers!r}, but must be a whole number of tokens from 0")
    if past_answers and not max_ngram_size:
        raise ValueError("past_answers are for suffix decoding: pass max_ngram_size, too")
    check_capacity("cache_tokens", cache_tokens)
    main = ModelSpec.of(main)
    draft = None if draft is None else ModelSpec.of(draft, like=main)
    with explained(main.folder, draft.folder if draft else None):
        main_model, draft_model, shared = load_models(
            main, draft, capacity=cache_tokens, draft_capacity=cache_tokens, use_huge_pages=use_huge_pages
        )
    batch = BatchModel(main_model, config_facts(main.folder).context_length, prefix_cache)
    source: BatchModel | None = None
    suffix: SuffixProposer | None = None
    if max_ngram_size:
        past = PastAnswers(past_answers) if past_answers else None
        suffix = SuffixProposer(batch.vocab_size, max_ngram_size, past)
    if draft and draft_model:
        context = config_facts(draft.folder).context_length
        if isinstance(draft_model, EagleHead):
            source = BatchHead(draft_model, batch, context)
        else:
            source = BatchModel(draft_model, context, prefix_cache)
    policy = cost_model.measure_batched(main_model, draft_model)
    tokenizer = openvino_genai.Tokenizer(str(main.folder))
    return BatchDecoder(
        batch, source, policy, tokenizer, stop_ids_of(main.folder, tokenizer), subtract_penalties, shared, suffix
    )
