"""Simulated replica: the scheduler of the batch decoder and its engine thread, with measured costs instead of models.

    environment = simpy.Environment()
    replica = Replica(environment, costs, Settings(max_num_seqs=16))
    done = replica.submit(SimulatedRequest(prompt=512, output=128))
    environment.run(done)

The engine's own policy, `BatchDraftLength`, chooses the draft length of each request. It learns from simulated times
and draft tokens as from real ones.
"""

from collections import OrderedDict, deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import cast

import simpy

from speculative.batch_decoder import PREFILL_CHUNK, prompt_budget
from speculative.bench.capacity.costs import Costs, Drafts
from speculative.bench.capacity.sharing import SharedCores
from speculative.drafting.acceptance import AcceptanceEstimate
from speculative.drafting.batch_policy import BatchDraftLength
from speculative.drafting.policy import LONGEST
from speculative.models.paged_model import rounded_up

BLOCK = 32  # tokens in a block of the KV cache
PIECE_SECONDS = 0.04  # of text per streamed piece after the first (PIECE_INTERVAL of the server's engine thread)


@dataclass(frozen=True)
class Settings:
    """Settings of a replica, as in samples/serve/serve_pair.py. `in_process`: there is no server; the thread of the
    batch decoder tokenizes and sends the requests, one after another, as in benchmark_batching.py."""

    with_draft: bool = True
    max_num_seqs: int = 16
    max_queue: int = 64
    cache_tokens: int = 16_384
    in_process: bool = False

    @property
    def room(self) -> int:
        """Tokens that fit in the cache, in whole blocks as in the engine."""
        return _blocks(self.cache_tokens) * BLOCK


@dataclass(eq=False)
class SimulatedRequest:
    """A request of `prompt` and `output` tokens. Its first `shared` tokens begin the next request of the same `chat`,
    too, and need not be computed where this one was."""

    prompt: int
    output: int
    chat: int = 0
    shared: int = 0
    drafts: Drafts = ()  # the draft at each position of the answer
    sent: float = 0.0
    first: float = 0.0  # when the first token came
    streamed: float = 0.0  # when the last piece of text was sent
    end: float = 0.0
    refused: bool = False
    cached: int = 0  # prompt tokens from the prefix cache
    accepted: int = 0  # draft tokens
    proposed: int = 0
    iterations: int = 0  # forward passes of the main model after the prompt's
    estimate: AcceptanceEstimate = field(init=False)
    done: simpy.Event = field(init=False)
    # in the replica
    prefilled: int = 0  # prompt tokens in the main model's cache
    draft_cached: int = 0  # tokens in the draft's
    generated: int = 0
    drafted: int = 0  # in this iteration
    done_drafting: bool = False  # has finished drafting in this iteration

    @property
    def length(self) -> int:
        """Prompt, generated and draft tokens."""
        return self.prompt + self.generated + self.drafted

    @property
    def in_shared(self) -> int:
        """Tokens in blocks that it shares with others of its chat, as far as they are computed."""
        return min(self.shared, self.prompt - 1, self.prefilled) // BLOCK * BLOCK

    def verdict(self, index: int) -> tuple[float, bool] | None:
        """The draft's confidence in the draft token `index` of this iteration, and whether the main model accepts it if
        it accepts those before it; None if the draft model proposes no token. Behind the draft that was measured here,
        it is as if a new one began."""
        position = self.generated
        while confidences := self.drafts[position].confidences:
            if index < len(confidences):
                return confidences[index], index < self.drafts[position].accepted
            index, position = index - len(confidences), position + len(confidences)
        return None

    @property
    def can_draft(self) -> bool:
        return self.generated + self.drafted < self.output - 1 and self.drafted < LONGEST and not self.done_drafting


class Replica:
    """A simulated replica; `run` is a process of the simulation and starts with it."""

    def __init__(
        self,
        environment: simpy.Environment,
        costs: Costs,
        settings: Settings,
        policy: BatchDraftLength | None = None,
        cores: SharedCores | None = None,
    ):
        """`policy` decides on draft lengths, by default as in the engine. `cores` are shared with other replicas and
        with the server's other work."""
        self.environment = environment
        self.costs = costs
        self.settings = settings
        self.policy = policy or costs.policy()
        self.draft = costs.draft if settings.with_draft else None
        self.outside = costs.outside if self.draft else costs.outside_alone or costs.outside
        self.waiting: deque[SimulatedRequest] = deque()
        self.running: list[SimulatedRequest] = []
        self.cores = cores
        self.busy = 0.0  # seconds in iterations
        self.in_batch = 0.0  # seconds in iterations, of each request
        self._prefixes: OrderedDict[int, int] = OrderedDict()  # tokens by chat, least recently used first
        self._wakeup = environment.event()
        self._draft_width = 0  # tokens of the draft's last forward pass
        environment.process(self.run())

    @property
    def load(self) -> int:
        """Number of requests, including waiting ones."""
        return len(self.waiting) + len(self.running)

    def remember(self, chat: int, tokens: int) -> None:
        """Keep the beginning of a chat in the prefix cache, and forget unused ones if there is no room."""
        if tokens >= BLOCK:
            self._prefixes[chat] = max(tokens, self._prefixes.pop(chat, 0))
        used = self._shared_tokens()
        unused = {one: tokens_kept - used.get(one, 0) for one, tokens_kept in self._prefixes.items()}
        excess = sum(unused.values()) - (self.settings.room - self._reserved())
        for one in list(self._prefixes):
            if excess > 0 and one not in used:
                excess -= self._prefixes.pop(one)

    def submit(self, request: SimulatedRequest, latency: float = 0.0) -> simpy.Event:
        """Queue a request that was sent `latency` seconds before, or refuse it if the queue is full; the event happens
        at its end."""
        request.sent, request.done = self.environment.now - latency, self.environment.event()
        settings = self.settings
        too_long = request.prompt + request.output > settings.room
        free_places = settings.max_queue + max(settings.max_num_seqs - len(self.running), 0)
        if too_long or len(self.waiting) >= free_places:
            request.refused, request.end = True, self.environment.now
            return request.done.succeed()
        self.waiting.append(request)
        if not self._wakeup.triggered:
            self._wakeup.succeed()
        return request.done

    def run(self) -> Generator[simpy.Event, None, None]:
        while True:
            if not self.waiting and not self.running:
                self._wakeup = self.environment.event()
                yield self._wakeup
            seconds = self._admit() + self._iterate()
            if self.cores:
                seconds *= self.cores.slowdown(self)
            self.busy += seconds
            self.in_batch += seconds * len(self.running)
            yield self.environment.timeout(seconds)
            self._deliver()
            if self.cores and not self.load:
                self.cores.leave(self)
            yield self.environment.timeout(0.0)  # a client may send its next request before the next iteration

    def _admit(self) -> float:
        """Move waiting requests into the batch, in order; returns the seconds that this takes."""
        in_process = self.settings.in_process
        tokenize = self.outside.tokenize if in_process else 0.0
        seconds = 0.0
        while self.waiting and len(self.running) < self.settings.max_num_seqs:
            request = self.waiting[0]
            needed = _blocks(request.prompt + request.output) * BLOCK
            if self.running and self._reserved() + needed > self.settings.room:
                break
            self.running.append(self.waiting.popleft())
            request.estimate = cast(AcceptanceEstimate, self.policy.estimate())
            if in_process and request.sent == self.environment.now:  # sent after those before it, when tokenized
                request.sent += seconds + tokenize
            seconds += tokenize + self.outside.arrival
        return seconds

    def _reserved(self) -> int:
        """Tokens that fit in the blocks of the running requests; a shared block counts once."""
        own = sum(_blocks(request.prompt + request.output) * BLOCK - request.in_shared for request in self.running)
        return own + sum(self._shared_tokens().values())

    def _shared_tokens(self) -> dict[int, int]:
        """Tokens of the beginnings that running requests share, by chat."""
        used: dict[int, int] = {}
        for request in self.running:
            if tokens := request.in_shared:
                used[request.chat] = max(tokens, used.get(request.chat, 0))
        return used

    # ---- an iteration -----------------------------------------------------------------------------------------------

    def _iterate(self) -> float:
        """Advance all requests by one iteration; returns its seconds."""
        decoding = [request for request in self.running if request.generated]
        prompts = self._prompts(len(decoding))
        prompt_tokens = sum(prompts.values())
        drafting = self._draft(decoding, prompt_tokens) if self.draft and decoding else 0.0
        verified = sum(1 + request.drafted for request in decoding)
        rows, context, attended = verified, 0, 0
        for request in decoding:
            context += request.prompt + request.generated
            attended += (request.prompt + request.generated) * (1 + request.drafted)
        for request, tokens in prompts.items():
            context += request.prefilled
            attended += request.prefilled * tokens
            request.prefilled += tokens
            rows += request.prefilled == request.prompt
        tokens = verified + prompt_tokens
        size = rounded_up(tokens)
        width = self.policy.pass_width.width_for(size)
        sequences = len(decoding) + len(prompts)
        changed = self.policy.pass_width.is_changed
        padded = width if width > size else tokens
        main = self.costs.main.seconds(padded, rows, context, attended, changed, sequences=sequences)
        main *= self.outside.factor(drafting > 0, prompt_tokens > 0, sequences)
        main += self.outside.request * sequences + self.outside.prompt * len(prompts)
        gained = sum(map(self._verify, decoding))
        self.policy.update_main(verified, prompt_tokens, gained, main)
        for request in prompts:
            if request.prefilled == request.prompt:
                request.generated = 1
        return drafting + main + self.outside.iteration

    def _prompts(self, decoding: int) -> dict[SimulatedRequest, int]:
        """The prompt tokens of each request in the next forward pass."""
        prompts = [request for request in self.running if not request.generated]
        if not prompts:
            return {}
        remaining = prompt_budget(self.policy.main, decoding)
        for request in prompts:
            if not request.prefilled and (prefix := self._prefixes.get(request.chat)):
                self._prefixes.move_to_end(request.chat)
                usable = min(prefix, request.shared, request.prompt - 1) // BLOCK * BLOCK
                request.cached = request.prefilled = usable
                request.draft_cached = usable if self.costs.shares_prefixes else 0
        missing = {request: request.prompt - request.prefilled for request in prompts}
        first = missing[prompts[0]]
        shorter = [request for request in prompts if 2 * missing[request] <= first] if first > remaining else []
        scheduled = _share(remaining // 2, shorter, missing)
        others = [request for request in prompts if request not in scheduled]
        return scheduled | _share(remaining - sum(scheduled.values()), others, missing)

    def _draft(self, decoding: list[SimulatedRequest], prompt_tokens: int) -> float:
        """Run drafting rounds; returns their seconds."""
        assert self.draft
        for request in decoding:
            request.done_drafting = False
            request.estimate.begin()
        self.policy.begin([one.estimate for one in decoding if one.can_draft], len(decoding))
        spent = 0.0
        while True:
            candidates = [request for request in decoding if request.can_draft]
            tokens = prompt_tokens + sum(1 + request.drafted for request in decoding)
            chosen = [candidates[i] for i in self.policy.choose([one.estimate for one in candidates], tokens, 0)]
            if not chosen:
                return spent
            remaining, computed, context, attended = PREFILL_CHUNK, 0, 0, 0
            for request in chosen:
                missing = min(request.length - request.draft_cached, remaining)
                context += request.draft_cached
                attended += request.draft_cached * missing
                request.draft_cached += missing
                request.done_drafting = request.draft_cached < request.length
                remaining, computed = remaining - missing, computed + missing
            drafting = [request for request in chosen if not request.done_drafting]
            width = rounded_up(computed)
            changed, self._draft_width = width != self._draft_width, width
            seconds = self.draft.seconds(computed, len(drafting), context, attended, changed, further=spent > 0)
            seconds += self.outside.token * len(drafting)
            for request in drafting:
                if verdict := request.verdict(request.drafted):
                    request.drafted += 1
                    request.estimate.draft(verdict[0])
                else:
                    request.done_drafting = True
            self.policy.update_draft(computed, seconds)
            spent += seconds + self.outside.round

    def _verify(self, request: SimulatedRequest) -> int:
        """Accept the draft tokens up to the first wrong one; returns the number of new tokens."""
        accepted = 0
        while accepted < request.drafted and (verdict := request.verdict(accepted)) and verdict[1]:
            accepted += 1
        request.draft_cached = min(request.draft_cached, request.prompt + request.generated + accepted)
        if self.draft:
            request.estimate.update(request.drafted, accepted)
        request.iterations += 1
        request.proposed += request.drafted
        request.accepted += accepted
        request.generated += accepted + 1
        request.drafted = 0
        return accepted + 1

    def _deliver(self) -> None:
        now = self.environment.now
        for request in self.running:
            if request.generated and not request.first:
                request.first = now
                self.remember(request.chat, request.shared)
            is_finished = request.generated == request.output
            is_first = request.first == now
            if (
                self.cores
                and request.generated
                and (is_first or is_finished or now >= request.streamed + PIECE_SECONDS)
            ):
                self.cores.use(requests=is_first, pieces=1)
                request.streamed = now
            if is_finished:
                request.end = now
                request.done.succeed()
        self.running = [request for request in self.running if request.generated < request.output]


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)


def _share(
    budget: int, requests: Sequence[SimulatedRequest], missing: dict[SimulatedRequest, int]
) -> dict[SimulatedRequest, int]:
    """The `missing` tokens of the first `requests` that fit into `budget` tokens."""
    shares = {}
    for request in requests:
        if budget:
            shares[request] = min(missing[request], budget)
            budget -= shares[request]
    return shares
