"""Speculative decoder for one request at a time: like `LLMPipeline`, but lossless when sampling, too.

    decoder = load("models/embedded/main", "models/embedded/draft")
    config = openvino_genai.GenerationConfig(max_new_tokens=100, do_sample=True, temperature=0.8)
    print(decoder.generate("def read_file(path):", config, seed=1).text)

Each iteration, the draft proposes tokens until the draft-length policy stops it, the main model verifies them in one
forward pass, and `rejection_sampling.verify` accepts or rejects them. Callers never manage the KV cache: every call
passes the whole sequence, and the model reuses the cached prefix.
"""

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from numbers import Integral
from pathlib import Path

import numpy as np
import openvino_genai
from openvino_genai import GenerationConfig, StreamerBase, StreamingStatus

from speculative.drafting import cost_model
from speculative.drafting.combined import CombinedDraftLength, CombinedProposer
from speculative.drafting.lookup_policy import LookupDraftLength
from speculative.drafting.policy import (
    AdaptiveDraftLength,
    DraftLengthPolicy,
    FixedDraftLength,
    policy_from_params,
)
from speculative.drafting.proposers import DraftModelProposer, Proposer
from speculative.drafting.retokenizer import Retokenizer
from speculative.drafting.suffix import LONGEST_MATCH, SuffixProposer
from speculative.models import vocabulary
from speculative.models.cached_model import CachedModel
from speculative.models.eagle3_head import EagleHead
from speculative.models.loading import load_models
from speculative.models.paged_model import PagedModel
from speculative.models.spec import ModelSpec
from speculative.pair.usable import check_capacity, explained
from speculative.sampling.grammar import Grammars, Tokens
from speculative.sampling.params import SamplingParams, check_seed, stop_ids_of
from speculative.sampling.proposal import Proposal
from speculative.sequence.detokenizer import cleans_up
from speculative.sequence.mask_thread import MaskThread
from speculative.sequence.output import OutputProcessor
from speculative.sequence.prompt import Prompt, encode
from speculative.sequence.result import GenerationResult, Step
from speculative.sequence.sequence import Sequence


class Decoder:
    """A main model, a proposer of draft tokens and a draft-length policy.

    Decodes one request at a time: a concurrent call, from any thread, raises RuntimeError.
    """

    def __init__(
        self,
        main: CachedModel,
        draft: Proposer | None = None,
        draft_length: DraftLengthPolicy | None = None,
        tokenizer: openvino_genai.Tokenizer | None = None,
        stop_token_ids: frozenset[int] = frozenset(),
    ):
        """Without `draft`, decoding is plain. `draft_length` applies when a call's GenerationConfig sets no draft
        length; it defaults to a fixed 5. Without `tokenizer`, prompts are token ids and results have no text.
        `stop_token_ids` apply when a GenerationConfig sets no `eos_token_id`."""
        if isinstance(draft_length, AdaptiveDraftLength) and (
            isinstance(draft_length, CombinedDraftLength) != isinstance(draft, CombinedProposer) and draft is not None
        ):
            raise ValueError(
                "CombinedDraftLength is the adaptive draft length of a CombinedProposer, and of no other draft"
            )
        if isinstance(draft_length, LookupDraftLength) and isinstance(draft, (DraftModelProposer, CombinedProposer)):
            raise ValueError("LookupDraftLength is for prompt lookup: declining random proposals changes the output")
        self.main = main
        self.draft = draft
        self.draft_length = draft_length or FixedDraftLength(5)
        self.tokenizer = tokenizer
        self.stop_token_ids = stop_token_ids
        self.grammars = grammars_of(tokenizer, main.vocab_size)
        self._cleans_up = tokenizer is not None and cleans_up(tokenizer)
        self.kv_cache = _cache_findings(main, draft)
        self._masks = MaskThread()
        self._busy = threading.Lock()
        self._random = np.random.default_rng()

    @property
    def models(self) -> list[CachedModel | EagleHead]:
        """The main model, and the draft model if there is one."""
        draft = getattr(self.draft, "model", None)
        return [self.main, *([draft] if draft else [])]

    def reset(self, seed: int | None = None) -> None:
        """Clear the caches and what the draft-length policy has learned, and seed the random generator.

        After a reset with the same seed, the same calls give the same text on the same machine. Raises RuntimeError
        while the decoder is busy.
        """
        check_seed(seed)
        with self._locked():
            self._reset(seed)

    def _reset(self, seed: int | None) -> None:
        self.main.reset()
        if self.draft:
            self.draft.reset()
        if seed is not None:
            for model in self.models:
                model.clear()
        self.draft_length.reset(repeatable=seed is not None)
        self._random = np.random.default_rng(seed)

    def stream(
        self,
        prompt: Prompt,
        config: GenerationConfig,
        seed: int | None = None,
        logit_bias: Mapping[int, float] | None = None,
    ) -> Generator[Step, None, None]:
        """Yield one `Step` per forward pass of the main model, until `max_new_tokens`, a stop token or a full context.

        Stop strings are handled by `generate` only, as they need the text. With `seed` the decoder is reset first; the
        config's `rng_seed` has no effect here. An unfinished iterator keeps the decoder busy until it is closed. Raises
        ValueError for an empty or too long prompt and for config options that are not supported.
        """
        check_seed(seed)
        sequence = self._sequence(prompt, config, logit_bias=logit_bias)
        return self._locked_steps(sequence, self._policy_for(sequence.params), seed)

    def generate(
        self,
        prompt: Prompt,
        config: GenerationConfig | None = None,
        streamer: StreamerBase | Callable[[str], object] | None = None,
        seed: int | None = None,
        logit_bias: Mapping[int, float] | None = None,
        prompt_logprobs: int = 0,
    ) -> GenerationResult:
        """Generate a whole text. `streamer` receives it piece by piece, as in GenAI: a function receives text, a
        StreamerBase receives tokens. Either may return True, another number than 0, or a StreamingStatus to stop.

        Without `config`, the defaults of GenerationConfig apply: unlike LLMPipeline, the decoder reads only the stop
        tokens from the model's generation_config.json. The text ends before a stop string, even inside a token; GenAI's
        ends before that token.

        With `seed`, or the config's `rng_seed`, the decoder is reset first. `logit_bias` is added to the logits of
        token ids, as in OpenAI's API, in the main model and the draft. The config's `logprobs`, and `prompt_logprobs`
        for the prompt, request the log-probability of each token and of that many most probable tokens at its
        position: the log-softmax of the main model's logits. Raises the same errors as `stream`.
        """
        begin = time.perf_counter()
        streams_text = streamer is not None and not isinstance(streamer, StreamerBase)
        if streams_text and not self.tokenizer:
            raise ValueError("a streamer function receives text, but this decoder has no tokenizer: pass one")
        sequence = self._sequence(prompt, config or GenerationConfig(), seed, logit_bias, prompt_logprobs)
        policy = self._policy_for(sequence.params)
        decode = self.tokenizer.decode if self.tokenizer else None
        output = OutputProcessor(sequence.params, decode, streams_text, begin, self._cleans_up)
        result = output.result
        result.prompt_logprobs = sequence.prompt_logprobs
        # closing frees the decoder even if a streamer raises
        with closing(self._locked_steps(sequence, policy, sequence.params.seed)) as steps:
            for step in steps:
                tokens, piece = output.add_step(step)
                status: object = None
                if isinstance(streamer, StreamerBase):
                    status = streamer.write(tokens)
                elif streamer is not None and piece:
                    status = streamer(piece)
                if _stops(status):
                    result.finish_reason = "cancelled"
                if result.finish_reason != "length":
                    break
        rest = output.end()
        if isinstance(streamer, StreamerBase):
            streamer.end()
        elif streamer is not None and rest and result.finish_reason != "cancelled":
            streamer(rest)
        result.draft_length = policy.describe() if self.draft else "no draft"
        if sequence.has_grammar:
            result.draft_length += "; excludes iterations with tokens that the grammar forces"
        result.kv_cache = self.kv_cache
        return result

    def encode(self, prompt: Prompt, config: GenerationConfig | None = None) -> np.ndarray:
        """The prompt's token ids int64 [n], the same as `LLMPipeline.generate` computes."""
        return encode(prompt, self.tokenizer, config)

    def _sequence(
        self,
        prompt: Prompt,
        config: GenerationConfig,
        seed: int | None = None,
        logit_bias: Mapping[int, float] | None = None,
        prompt_logprobs: int = 0,
    ) -> Sequence:
        """The sequence of a new request. This is where its config is resolved."""
        ids = self.encode(prompt, config)
        params = SamplingParams.resolve(
            config,
            len(ids),
            self.main.capacity,
            self.stop_token_ids,
            seed=seed,
            grammars=self.grammars,
            logit_bias=logit_bias,
            prompt_logprobs=prompt_logprobs,
        )
        sequence = Sequence(ids, params, self.main.vocab_size, self._random)
        if params.tree_depth and not (self.main.supports_leaves and sequence.supports_leaves):
            raise ValueError(
                f"tree_depth={params.tree_depth} needs a main model on a CPU, with paged attention but no sliding "
                "window or ALiBi, and no grammar: leave it at 0"
            )
        return sequence

    def _locked_steps(
        self, sequence: Sequence, policy: DraftLengthPolicy, seed: int | None
    ) -> Generator[Step, None, None]:
        """Yield the steps of `sequence`, with the decoder locked."""
        with self._locked():
            if seed is not None:
                self._reset(seed)
            sequence.random = self._random
            yield from self._steps(sequence, policy)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("this decoder is busy with another request: wait for it, or create one decoder each")
        try:
            yield
        finally:
            self._busy.release()

    def _plan_passes(self, policy: DraftLengthPolicy, sequence: Sequence) -> None:
        """Let the policy draft trees where they can be verified. Pad the main model's forward passes where that is
        faster than to change their size, by the policy's costs."""
        if self.draft and isinstance(policy, (AdaptiveDraftLength, LookupDraftLength)):
            if self.main.pass_width is None:
                pads = isinstance(self.main.backend, PagedModel)  # others would have to remove the padding
                self.main.pass_width = policy.costs.pass_width(pads)
            policy.pass_width = self.main.pass_width
        else:  # the text must not depend on earlier calls, and padding changes the rounding of logits
            self.main.pass_width = None
        policy.has_leaves = self.main.supports_leaves and sequence.supports_leaves

    def _steps(self, sequence: Sequence, policy: DraftLengthPolicy) -> Generator[Step, None, None]:
        if sequence.needs_prompt_logprobs:  # these passes are not padded: the text must not depend on earlier calls
            self.main.pass_width = None
        while sequence.needs_prompt_logprobs:
            sequence.add_prompt_logprobs(self.main.logits(*sequence.prompt_part))
        self._plan_passes(policy, sequence)
        while not sequence.is_finished:
            is_prefill = sequence.is_prefill
            begin = time.perf_counter()
            declined = self._draft(sequence, policy)
            if policy.tree:
                sequence.draft_leaves(policy.leaves()[: self.main.capacity - len(sequence.token_ids)])
            forced = sequence.forced
            draft_end = time.perf_counter()
            with self._masks.computing([sequence]):
                logits = self.main.logits(sequence.token_ids, sequence.num_logits, sequence.leaf_positions)
            step = sequence.verify(logits)
            if sequence.accepted_leaf:
                self.main.accept_leaf(*sequence.accepted_leaf)
            seconds = draft_end - begin, time.perf_counter() - draft_end
            if (
                declined is not None
                and not forced
                and step.accepted == step.proposed
                and isinstance(policy, LookupDraftLength)
            ):
                policy.observe_declined(step.tokens[-1] == declined)
            if isinstance(policy, CombinedDraftLength) and not forced:
                # no match was searched for what follows a leaf
                policy.observe(step.tokens[: len(step.tokens) - step.ends_in_leaf])
            if policy.tree:
                policy.tree.observe(step.tokens)
            if not is_prefill and not forced:  # forced tokens say nothing about the source
                policy.update(step.proposed, step.accepted - step.ends_in_leaf, *seconds, step.ends_in_leaf)
            yield step

    def _draft(self, sequence: Sequence, policy: DraftLengthPolicy) -> int | None:
        """Draft tokens until `policy` stops. Returns the token that it declined to draft, None if it saw none."""
        if policy.tree:
            policy.tree.begin()
        if isinstance(self.draft, CombinedProposer):
            self._draft_from_two_sources(sequence, policy, self.draft)
            return None
        decides_by_proposal, confidence = isinstance(policy, LookupDraftLength), None
        begin = time.perf_counter()
        while True:
            if (
                sequence.draft_forced()
                and isinstance(self.draft, DraftModelProposer)
                and not self.draft.continues_copies
            ):
                break
            drafted = sequence.drafted - sequence.forced
            if not (
                self.draft and sequence.can_draft and (decides_by_proposal or policy.should_draft(drafted, confidence))
            ):
                break
            proposal = sequence.if_allowed(
                self.draft.propose(sequence.token_ids, sequence.distribution, sequence.random)
            )
            confidence = proposal.confidence if proposal else None
            if decides_by_proposal and not policy.should_draft(drafted, confidence):
                return proposal.token if proposal else None
            if proposal is None:
                if not sequence.drafted and not decides_by_proposal and self.main.pass_width:
                    self.main.pass_width.plan_one()  # not the pass that was planned with draft tokens
                break
            self._add_draft_token(sequence, policy, proposal)
            end = time.perf_counter()
            policy.observe_step(end - begin)
            begin = end
        return None

    @staticmethod
    def _add_draft_token(sequence: Sequence, policy: DraftLengthPolicy, proposal: Proposal) -> None:
        """Add a proposed draft token."""
        sequence.draft(proposal)
        if policy.tree:
            policy.tree.draft(proposal)

    def _draft_from_two_sources(self, sequence: Sequence, policy: DraftLengthPolicy, draft: CombinedProposer) -> None:
        """Draft tokens until `policy` stops, each from the better source, or copied from a trusted match."""
        combined_policy = policy if isinstance(policy, CombinedDraftLength) else None
        confidence, copied = None, False
        if combined_policy:
            combined_policy.begin()
        while True:
            copied = sequence.draft_forced() or copied
            if not sequence.can_draft:
                break
            inputs = sequence.token_ids, sequence.distribution, sequence.random
            match = sequence.if_allowed(draft.match(*inputs))
            can_use_model = draft.can_use_model(sequence.token_ids, copied)
            copies: bool | None = None
            if combined_policy:
                copies = combined_policy.copies_next(match, can_use_model)
            elif policy.should_draft(sequence.drafted - sequence.forced, confidence) and (
                can_use_model or draft.is_trusted(match)
            ):
                copies = draft.is_trusted(match)
            if copies is None:
                break
            begin = time.perf_counter()
            proposal = match if copies else draft.draft_model.propose(*inputs)
            if proposal is None:
                break
            if not copies:
                policy.observe_step(time.perf_counter() - begin)
            if combined_policy:
                combined_policy.draft(proposal, copies)
            self._add_draft_token(sequence, policy, proposal)
            confidence, copied = proposal.confidence, copied or copies

    def _policy_for(self, params: SamplingParams) -> DraftLengthPolicy:
        return policy_from_params(params) or self.draft_length


def grammars_of(tokenizer: openvino_genai.Tokenizer | None, vocab_size: int) -> Grammars | None:
    """The compiler of grammars for a model with `vocab_size` logits; None without a tokenizer."""
    if not tokenizer:
        return None

    def tokens() -> Tokens:
        vocab = vocabulary.of(tokenizer)
        if not vocab:
            raise ValueError("structured_output_config needs a detokenizer that names its tokens: convert it again")
        return Tokens(vocab.tokens(), vocabulary.special(tokenizer, vocab), vocab.encode)

    return Grammars(tokens, vocab_size)


def check_ngram_size(max_ngram_size: int | None) -> None:
    """Raise ValueError for a longest match of suffix decoding that has no tokens."""
    if max_ngram_size is not None and not (isinstance(max_ngram_size, Integral) and max_ngram_size >= 1):
        raise ValueError(
            f"max_ngram_size is {max_ngram_size!r}, but must be a whole number from 1 ({LONGEST_MATCH} is typical)"
        )


def _cache_findings(main: CachedModel, draft: Proposer | None) -> str:
    """Findings about the models' caches at load; "" without any."""
    models = {"main": main, "draft": getattr(draft, "model", None)}
    return "; ".join(f"{role}: {model.note}" for role, model in models.items() if model and model.note)


def _stops(status: object) -> bool:
    """Whether a streamer that returned `status` stops the generation. Raises TypeError for what is no status."""
    if isinstance(status, StreamingStatus):
        return status != StreamingStatus.RUNNING
    if status is None or isinstance(status, bool | np.bool_ | Integral):
        return bool(status)
    raise TypeError(f"the streamer returned {status!r}: return None, True to stop, or a StreamingStatus")


def load(
    main: ModelSpec | str | Path,
    draft: ModelSpec | str | Path | None = None,
    *,
    max_ngram_size: int | None = None,
    capacity: int | None = None,
    use_huge_pages: bool = False,
) -> Decoder:
    """Load the main model, and a draft if given, into a decoder.

    Each is a `ModelSpec` (IR folder, device, OpenVINO properties) or a path. A main model given as a path runs on the
    CPU without properties; a draft given as a path takes the main model's device and properties, a draft given as a
    ModelSpec only its own. A draft may be an EAGLE-3 head, and may have another tokenizer: it then proposes the tokens
    that both have. `max_ngram_size` selects suffix decoding, with matches of at most that many tokens; if there is a
    draft as well, each draft token comes from the source that is worth more. `capacity` is the main model's longest
    sequence in tokens, by default its context length, at most 16,384. The draft length is adaptive; its cost model is
    measured on the first load and cached (in CACHE_DIR if the main model's properties set one, else in the user's cache
    folder).
    `use_huge_pages` (Linux) suits long-running processes: loading takes seconds longer per gigabyte of weights,
    decoding is faster.
    """
    check_ngram_size(max_ngram_size)
    check_capacity("capacity", capacity)
    main = ModelSpec.of(main)
    draft = None if draft is None else ModelSpec.of(draft, like=main)
    with explained(main.folder, draft.folder if draft else None):
        main_model, draft_model, shared = load_models(main, draft, capacity=capacity, use_huge_pages=use_huge_pages)
    source: Proposer | None = None
    policy: DraftLengthPolicy | None = None
    if draft_model or max_ngram_size:
        key = cost_model.key(main, draft)
        measured = cost_model.load_or_measure(key, main_model, draft_model, cost_model.folder(main.properties))
        suffix = SuffixProposer(main_model.vocab_size, max_ngram_size) if max_ngram_size else None
        if draft_model:
            retokenizer = Retokenizer(shared) if shared else None
            source = DraftModelProposer(draft_model, main_model.vocab_size, retokenizer)
            policy = AdaptiveDraftLength(measured)
            if suffix:
                source = CombinedProposer(suffix, source)
                policy = CombinedDraftLength(measured)
        else:
            source, policy = suffix, LookupDraftLength(measured)
    tokenizer = openvino_genai.Tokenizer(str(main.folder))
    return Decoder(main_model, source, policy, tokenizer, stop_ids_of(main.folder, tokenizer))
