"""Decoding methods under comparison: GenAI's pipeline and our engine, each alone, with a draft and with prompt lookup;
ours also with a draft and suffix decoding together.

No prompt is served from a cache: every round repeats the prompts, and with a cache hit the time to first token would be
that of a single token. GenAI's prefix cache is off, and our engine clears its caches before each run. With
`keep_caches` both keep theirs, for long contexts.

With a JSON schema, a text ends with it, and our engine also drafts what the schema forces; alone, it does not.
"""

import re
from dataclasses import replace

import numpy as np
import openvino_genai
from openvino_genai import GenerationConfig, SchedulerConfig, StructuredOutputConfig

from speculative import decoder
from speculative.bench import genai
from speculative.bench.genai import Run, Tree
from speculative.bench.harness import Method
from speculative.decoder import Decoder, GenerationResult
from speculative.drafting.combined import CombinedDraftLength, CombinedProposer
from speculative.drafting.lookup_policy import LookupDraftLength
from speculative.drafting.policy import AdaptiveDraftLength, DraftLengthPolicy
from speculative.drafting.proposers import DraftModelProposer, Proposer
from speculative.drafting.suffix import SuffixProposer
from speculative.models.eagle3_graph import is_head
from speculative.models.spec import ModelSpec
from speculative.pair.engines import GENAI, NATIVE
from speculative.sequence.sequence import Sequence

LOOKUP, NGRAM = 5, 3  # prompt lookup: draft tokens, and GenAI's maximum n-gram length
ADAPTIVE_LOOKUP = "lookup adaptive"
TWO_SOURCES = "adaptive, two sources"  # the draft and suffix decoding
FORCED = "forced"  # tokens that the JSON schema forces, and no others
TREE = "tree {} x {}, K = {}"  # the draft length of GenAI's trees: depth, branching factor, tokens


def genai_pipeline(
    main: ModelSpec, draft: ModelSpec | None = None, lookup: bool = False, keep_caches: bool = False
) -> openvino_genai.LLMPipeline:
    """An `LLMPipeline` as created by `LLMPipeline(main, device)`, except for its prefix cache."""
    properties = dict(main.properties)
    if "NPU" not in main.device + (draft.device if draft else "") and not keep_caches:  # NPUs have none
        scheduler = SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = 2**31  # as LLMPipeline sets it: one forward pass per prompt
        properties["scheduler_config"] = scheduler
    if lookup:
        properties["prompt_lookup"] = True
    return genai.load(replace(main, properties=properties), None if lookup else draft)


def genai_method(name: str, pipe: openvino_genai.LLMPipeline, draft_length: int | str, max_new_tokens: int) -> Method:
    if str(draft_length).startswith("lookup"):
        return Method(
            name,
            GENAI,
            draft_length,
            0.0,
            lambda ids, json_schema="": _looked_up(
                pipe, ids, genai.generation_config(pipe, max_new_tokens, json_schema)
            ),
        )
    k, tree = draft_length or None if isinstance(draft_length, int) else None, None
    if str(draft_length).startswith("tree"):
        depth, branching_factor, k = map(int, re.findall(r"\d+", str(draft_length)))
        tree = Tree(depth, branching_factor)
    return Method(
        name,
        GENAI,
        draft_length,
        0.0,
        lambda ids, json_schema="": genai.generate(
            pipe, genai.inputs(ids), max_new_tokens, k, tree=tree, json_schema=json_schema
        ),
    )


def _looked_up(pipe: openvino_genai.LLMPipeline, ids: np.ndarray, config: GenerationConfig) -> Run:
    """GenAI does not report the number of tokens it looked up, so `proposed` is empty."""
    config.num_assistant_tokens, config.max_ngram_size = LOOKUP, NGRAM
    result = pipe.generate(genai.inputs(ids), config)
    gained = list(result.perf_metrics.raw_metrics.m_batch_sizes)[1:]  # the first is the prompt's forward pass
    return Run(genai.output_tokens(result, config), [], gained, *genai.seconds(result.perf_metrics, len(gained)))


class AloneDecoder(Decoder):
    """A decoder that drafts nothing, not even what a grammar forces."""

    def _draft(self, sequence: Sequence, policy: DraftLengthPolicy) -> None:
        return None


def engine_alone(engine: Decoder, main: ModelSpec, draft: ModelSpec | None) -> Decoder:
    """The engine for decoding without the draft of `engine`: another one if that is an EAGLE-3 head, as its main model
    also computes the hidden states that the head reads."""
    return decoder.load(main) if draft and is_head(draft.folder) else engine


def native_config(draft_length: int | str, temperature: float, max_new_tokens: int) -> GenerationConfig:
    """The request of a method of our engine."""
    config = GenerationConfig(max_new_tokens=max_new_tokens, ignore_eos=True)
    config.do_sample, config.temperature = temperature > 0, temperature or 1.0
    if draft_length == f"lookup {LOOKUP}":
        config.num_assistant_tokens = LOOKUP
    elif isinstance(draft_length, int) and draft_length:
        config.num_assistant_tokens = draft_length
    return config


def with_source(engine: Decoder, draft_length: int | str) -> Decoder:
    """A decoder with the models of `engine`, and with its draft, suffix decoding, both or neither, as `draft_length`
    says."""
    source: Proposer | None = engine.draft if draft_length not in (0, FORCED) else None
    policy = engine.draft_length
    if (
        draft_length == TWO_SOURCES
        and isinstance(source, DraftModelProposer)
        and isinstance(policy, AdaptiveDraftLength)
    ):
        source = CombinedProposer(SuffixProposer(engine.main.vocab_size), source)
        policy = CombinedDraftLength(policy.costs)
    elif isinstance(policy, (AdaptiveDraftLength, LookupDraftLength)):
        lookup = str(draft_length).startswith("lookup")
        source = SuffixProposer(engine.main.vocab_size) if lookup else source
        policy = (LookupDraftLength if lookup else AdaptiveDraftLength)(policy.costs)
    native_decoder = (Decoder if draft_length else AloneDecoder)(
        engine.main, source, policy, None, engine.stop_token_ids
    )
    native_decoder.grammars = engine.grammars
    return native_decoder


def our_method(
    name: str,
    engine: Decoder,
    seconds: list[list[float]],
    draft_length: int | str,
    temperature: float,
    max_new_tokens: int,
    keep_caches: bool = False,
) -> Method:
    """A method of `engine`, with its draft, suffix decoding, both or neither, as `draft_length` says;
    `seconds` are those of its models' forward passes. Each method adapts its draft length independently."""
    config = native_config(draft_length, temperature, max_new_tokens)
    native_decoder = with_source(engine, draft_length)
    source = native_decoder.draft

    def decode(ids: np.ndarray, json_schema: str = "") -> GenerationResult:
        if not keep_caches:
            native_decoder.main.reset()
            if source:
                source.reset()
        config.ignore_eos = not json_schema
        config.structured_output_config = StructuredOutputConfig(json_schema=json_schema) if json_schema else None
        result = native_decoder.generate(ids, config)
        if json_schema and result.tokens[-1] in engine.stop_token_ids:  # as in genai.written
            result.tokens.pop()
        return result

    return Method(name, NATIVE, draft_length, temperature, decode, seconds)
