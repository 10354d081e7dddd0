"""The decoding methods whose losslessness is verified: their greedy texts and samples, and the crashes of requests."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import openvino as ov
import openvino_genai
from openvino_genai import GenerationConfig

from speculative.bench import genai
from speculative.cli.progress import tqdm
from speculative.decoder import Decoder
from speculative.drafting.combined import CombinedDraftLength, CombinedProposer
from speculative.drafting.lookup_policy import LookupDraftLength
from speculative.drafting.policy import LONGEST, Costs
from speculative.drafting.proposers import DraftModelProposer
from speculative.drafting.suffix import SuffixProposer
from speculative.models.cached_model import CachedModel
from speculative.models.spec import ModelSpec
from speculative.sampling import lossless_check
from speculative.sampling.params import SamplingParams

PATHS = ("engine", "genai", "lookup")
GREEDY_K, SAMPLED_K = [1, 4, 8], [2]  # default draft lengths
NGRAM = 3  # maximum n-gram length of GenAI's prompt lookup
CHEAP_VERIFICATION = Costs(
    draft=0.0, main={1: 1.0, LONGEST + 1: 3.0}
)  # costs at which most matches are worth verifying
CONFIDENCE = 0.4  # draft confidence threshold of the method that uses one
MIN_PROBABILITY = 0.002  # minimum probability of a sequence to be counted separately
MAX_CRASHES = 5  # per method


class Draw(NamedTuple):
    """The new tokens of one request, and the numbers of proposed and accepted draft tokens, if known."""

    tokens: list[int]
    proposed: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Requests:
    """The requests of every method: a greedy text for each prompt, and samples for the first prompt.

    prompts: token ids int64 [n] each. max_new_tokens: of a greedy text. tokens: of a sample. draws, genai_draws:
    samples per method of this project's engine and of GenAI. sampling: settings of the samples' GenerationConfig.
    """

    prompts: list[np.ndarray]
    max_new_tokens: int
    tokens: int
    draws: int
    genai_draws: int
    sampling: dict[str, Any]
    seed: int


class NativeRunner:
    """This project's decoder; its random number generator continues from request to request."""

    def __init__(self, decoder: Decoder, seed: int):
        self._decoder = decoder
        decoder.reset(seed)

    def request(self, prompt: np.ndarray, config: GenerationConfig, num_tokens: int) -> Draw:
        """The first `num_tokens` tokens after `prompt`. Raises RuntimeError on a crash."""
        tokens: list[int] = []
        proposed, accepted = 0, 0
        steps = self._decoder.stream(prompt, config)
        for step in steps:
            tokens += step.tokens
            proposed += step.proposed
            accepted += step.accepted - step.ends_in_leaf
            if len(tokens) >= num_tokens:
                steps.close()
        return Draw(tokens[:num_tokens], proposed, accepted)

    def close(self) -> None: ...


class GenAIRunner:
    """GenAI's LLMPipeline, loaded on first use and reloaded after a crash."""

    def __init__(self, load: Callable[[], openvino_genai.LLMPipeline]):
        self._load = load
        self._pipe: openvino_genai.LLMPipeline | None = None

    def request(self, prompt: np.ndarray, config: GenerationConfig, num_tokens: int) -> Draw:
        """The first `num_tokens` tokens after `prompt`. Raises RuntimeError on a crash."""
        try:
            self._pipe = self._pipe or self._load()
            result = self._pipe.generate(ov.Tensor(prompt[None]), config)
        except RuntimeError:
            self._pipe = None
            raise
        drafting = result.extended_perf_metrics  # excludes the last iteration
        counts = (drafting.get_num_draft_tokens(), drafting.get_num_accepted_tokens()) if drafting else (0, 0)
        return Draw(list(result.tokens[0][:num_tokens]), *counts)

    def close(self) -> None:
        """Free the memory; the next request reloads the pipeline."""
        self._pipe = None


@dataclass
class CheckedMethod:
    """One decoding method and the results of its requests; None stands for a crash."""

    name: str
    ours: bool
    runner: NativeRunner | GenAIRunner
    settings: dict[str, Any] = field(default_factory=dict)  # of the GenerationConfig
    is_greedy: bool = True  # generate greedy texts
    is_sampled: bool = True  # generate samples
    is_alone: bool = False  # plain decoding: a possible reference
    texts: list[Draw | None] = field(default_factory=list)  # greedy, one per prompt
    draws: list[Draw | None] = field(default_factory=list)
    crash: str = ""

    def request(self, prompt: np.ndarray, num_tokens: int, settings: dict[str, Any]) -> Draw | None:
        # Leave room for a full draft after the last wanted token: no method drafts more than max_new_tokens allows.
        room = self.settings.get("num_assistant_tokens", LONGEST if self.ours else 0)
        config = GenerationConfig(max_new_tokens=num_tokens + room, ignore_eos=True, **settings, **self.settings)
        try:
            draw = self.runner.request(prompt, config, num_tokens)
            if len(draw.tokens) < num_tokens:
                raise RuntimeError(f"generation ended after {len(draw.tokens)} of {num_tokens} tokens")
            return draw
        except RuntimeError as error:
            self.crash = " ".join(str(error).split())
            return None


def checked_methods(
    engine: Decoder,
    main: ModelSpec,
    draft: ModelSpec | None,
    paths: Collection[str] = PATHS,
    ks: list[int] | None = None,
    seed: int = 1,
) -> list[CheckedMethod]:
    """The main model alone in both engines, then the methods of `paths`, those without a draft first.

    Args:
        engine: decoder of the pair; without a draft if `paths` lacks "engine".
        main, draft: the models of GenAI's pipelines, which are loaded on use; no draft if `paths` is "lookup".
        paths: from PATHS.
        ks: draft lengths, instead of the default ones.
        seed: of the engine's random numbers.
    """
    no_prefix_cache = openvino_genai.SchedulerConfig()
    no_prefix_cache.enable_prefix_caching = False

    def pipeline(draft: ModelSpec | None, **more: Any) -> GenAIRunner:
        return GenAIRunner(lambda: genai.load(replace(main, properties={**main.properties, **more}), draft))

    plain = NativeRunner(Decoder(engine.main), seed)
    methods = [
        CheckedMethod("GenAI main alone", False, pipeline(None), is_alone=True),
        CheckedMethod("engine main alone", True, plain, is_sampled=False, is_alone=True),
    ]
    if "engine" in paths:
        pair = NativeRunner(engine, seed)
        methods += for_each_k("engine draft", True, pair, ks)
        by_confidence = {"assistant_confidence_threshold": CONFIDENCE}
        methods.append(CheckedMethod("engine draft, by confidence", True, pair, by_confidence))
        methods.append(CheckedMethod("engine draft, adaptive", True, pair))
    if "lookup" in paths:
        suffix = SuffixProposer(engine.main.vocab_size)
        lookup = NativeRunner(Decoder(engine.main, suffix), seed)
        adaptive = NativeRunner(Decoder(engine.main, suffix, LookupDraftLength(CHEAP_VERIFICATION)), seed)
        methods += for_each_k("engine lookup", True, lookup, ks)
        methods.append(CheckedMethod("engine lookup, adaptive", True, adaptive))
        if isinstance(engine.draft, DraftModelProposer):
            source = CombinedProposer(suffix, engine.draft)
            length = CombinedDraftLength(CHEAP_VERIFICATION)
            both = NativeRunner(Decoder(engine.main, source, length), seed)
            methods.append(CheckedMethod("engine draft and lookup, adaptive", True, both))
        methods += for_each_k("GenAI lookup", False, pipeline(None, prompt_lookup=True), ks, max_ngram_size=NGRAM)
    if "genai" in paths:
        drafted = for_each_k("GenAI draft", False, pipeline(draft), ks)
        fresh = pipeline(draft, scheduler_config=no_prefix_cache)
        methods += drafted
        methods += [
            CheckedMethod(f"{method.name}, no prefix cache", False, fresh, method.settings, is_greedy=False)
            for method in drafted
            if method.is_sampled
        ]
    return methods


def for_each_k(
    name: str, ours: bool, runner: NativeRunner | GenAIRunner, given_ks: list[int] | None, **settings: Any
) -> list[CheckedMethod]:
    """The method with each draft length: those asked for, or the default ones, which differ for texts and samples."""
    greedy, sampled = (given_ks or ks for ks in (GREEDY_K, SAMPLED_K))
    return [
        CheckedMethod(
            f"{name}, K = {k}", ours, runner, {"num_assistant_tokens": k, **settings}, k in greedy, k in sampled
        )
        for k in sorted({*greedy, *sampled})
    ]


def run(methods: list[CheckedMethod], requests: Requests) -> None:
    """Generate every method's greedy texts and samples."""
    prompts, num_tokens = requests.prompts, {True: requests.draws, False: requests.genai_draws}
    total = sum(method.is_greedy * len(prompts) + method.is_sampled * num_tokens[method.ours] for method in methods)
    with tqdm(total=total, unit="request", dynamic_ncols=True) as bar:
        for method, next_method in zip(methods, [*methods[1:], None], strict=True):
            bar.set_description(method.name)
            for prompt in prompts if method.is_greedy else ():
                method.texts.append(method.request(prompt, requests.max_new_tokens, {}))
                bar.update()
            for i in range(num_tokens[method.ours] if method.is_sampled else 0):
                if method.draws.count(None) < MAX_CRASHES:
                    settings = {**requests.sampling, "rng_seed": requests.seed + i}
                    method.draws.append(method.request(prompts[0], requests.tokens, settings))
                bar.update()
            if next_method is None or next_method.runner is not method.runner:
                method.runner.close()


def exact_cells(main: CachedModel, requests: Requests) -> lossless_check.Cells:
    """The exact joint distribution of a sample; sequences with too few expected samples are pooled into one cell."""
    params = SamplingParams.resolve(GenerationConfig(**requests.sampling))
    next_token = lossless_check.main_alone(main, requests.prompts[0], params)
    resolution = max(lossless_check.EXPECTED / max(requests.draws, requests.genai_draws), MIN_PROBABILITY)
    with tqdm(unit=" forward passes", desc="exact distribution", leave=False, dynamic_ncols=True) as bar:

        def counted(tokens: tuple[int, ...]) -> lossless_check.Probabilities:
            bar.update()
            return next_token(tokens)

        return lossless_check.exact_joint(counted, requests.tokens, resolution)
