"""Runs of OpenVINO GenAI's own pipeline, as records from which the metrics are computed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import openvino
import openvino_genai

from speculative.models.spec import ModelSpec

NO_TOKEN = 2**31 - 1  # used as EOS: pairs with an NPU, and drafts, stop at EOS in spite of ignore_eos


class Tree(NamedTuple):
    """GenAI's settings of a tree of draft tokens, which EAGLE-3 drafts can propose."""

    depth: int  # levels
    branching_factor: int  # tokens drafted after each token, and kept per level


@dataclass(frozen=True)
class Run:
    """One greedy generation.

    tokens: new token ids. proposed, accepted, gained: one entry per main-model forward pass after the prompt (see
    `speculative.sequence.metrics`). ttft: from the call to the first token, prompt included. seconds: from the call to
    the last token, as in `speculative.sequence.result`; GenAI's work after that (clean-up, detokenization) is excluded.
    """

    tokens: list[int]
    proposed: list[int]
    gained: list[int]
    ttft: float
    seconds: float

    @property
    def accepted(self) -> list[int]:
        return [n - 1 for n in self.gained]

    @property
    def decode_seconds(self) -> float:
        """Seconds for all tokens but the first."""
        return self.seconds - self.ttft


def load(main: ModelSpec, draft: ModelSpec | None = None) -> openvino_genai.LLMPipeline:
    """An `LLMPipeline` of the main model, alone or with a draft."""
    if draft is None:
        return openvino_genai.LLMPipeline(str(main.folder), main.device, **main.properties)
    draft_model = openvino_genai.draft_model(str(draft.folder), draft.device, **draft.properties)
    return openvino_genai.LLMPipeline(str(main.folder), main.device, draft_model=draft_model, **main.properties)


def encode(tokenizer: openvino_genai.Tokenizer, prompt: str) -> openvino_genai.TokenizedInputs:
    """The prompt's token ids as in `LLMPipeline.generate(str)`, with the chat template if there is one."""
    if not tokenizer.chat_template:
        return tokenizer.encode(prompt)
    text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def inputs(ids: np.ndarray) -> openvino_genai.TokenizedInputs:
    """Token ids [n] in the pipeline's input type."""
    return openvino_genai.TokenizedInputs(openvino.Tensor(ids[None]), openvino.Tensor(np.ones_like(ids[None])))


def generate(
    pipe: openvino_genai.LLMPipeline,
    inputs: openvino_genai.TokenizedInputs,
    max_new_tokens: int,
    draft_length: int | None = None,
    streamer: Callable[[str], None] | None = None,
    tree: Tree | None = None,
    json_schema: str = "",
) -> Run:
    """Generate max_new_tokens greedily, ignoring EOS; with a `json_schema`, until its end.

    `draft_length` is K for a pipeline with a draft, None for one without; of a `tree`, the number of its tokens.
    `streamer` receives the text piece by piece.

    A pair with an NPU varies K: then `proposed` assumes the given K and is not the number of tokens drafted.
    """
    config = generation_config(pipe, max_new_tokens, json_schema)
    if draft_length is not None:
        config.num_assistant_tokens = draft_length
    if tree:
        config.tree_depth, config.branching_factor = tree
    result = pipe.generate(inputs, config, streamer)
    metrics, drafting = result.perf_metrics, result.extended_perf_metrics
    # m_batch_sizes has the tokens gained per main-model forward pass; get_num_accepted_tokens() omits the last one.
    # With an NPU it also has those of all earlier calls, so count from the end.
    sizes = list((drafting.main_model_metrics if drafting else metrics).raw_metrics.m_batch_sizes)
    gained: list[int] = []
    while sizes and sum(gained) < len(result.tokens[0]):
        gained.insert(0, sizes.pop())
    gained = gained[1:]  # the first is the prompt's forward pass
    proposed, done = [], 1
    for tokens in gained:
        proposed.append(min(draft_length or 0, max_new_tokens - done - 1))  # no more than the remaining tokens
        done += tokens
    return Run(output_tokens(result, config), proposed, gained, *seconds(metrics, len(gained)))


def output_tokens(result: openvino_genai.EncodedResults, config: openvino_genai.GenerationConfig) -> list[int]:
    """The new tokens, without one that only ends the text: ours ends without where nothing else is allowed."""
    tokens = list(result.tokens[0])
    return tokens[:-1] if tokens[-1] in config.stop_token_ids | {config.eos_token_id} else tokens


def generation_config(
    pipe: openvino_genai.LLMPipeline, max_new_tokens: int, json_schema: str = ""
) -> openvino_genai.GenerationConfig:
    """The configuration of a greedy generation that ends with `json_schema`, or without one after max_new_tokens."""
    if not json_schema:
        return openvino_genai.GenerationConfig(max_new_tokens=max_new_tokens, ignore_eos=True, eos_token_id=NO_TOKEN)
    structure = openvino_genai.StructuredOutputConfig(json_schema=json_schema)
    config = openvino_genai.GenerationConfig(max_new_tokens=max_new_tokens, structured_output_config=structure)
    config.set_eos_token_id(pipe.get_tokenizer().get_eos_token_id())
    return config


def seconds(metrics: openvino_genai.PerfMetrics, iterations: int) -> tuple[float, float]:
    """From the call to the first token and to the last one, with `iterations` forward passes between them."""
    times = metrics.raw_metrics.m_new_token_times  # ms per forward pass; with an NPU, of earlier calls too
    first = metrics.get_ttft().mean / 1000
    return first, first + (times[-1] - times[-1 - iterations]) / 1000
