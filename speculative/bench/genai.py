"""Runs of OpenVINO GenAI's own pipeline, each as the record that the metrics are computed from."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openvino
import openvino_genai

NO_TOKEN = 2**31 - 1  # as the end of text: pairs with an NPU, and drafts, stop there in spite of ignore_eos


@dataclass(frozen=True)
class Run:
    """One greedy generation.

    tokens: new token ids. proposed, gained: one entry for each inference of the main model after the prompt's (see
    `speculative.sequence.metrics`). ttft: from the call to the first token, prompt included. seconds: from
    the call to the last token, as in `speculative.sequence.result`; what GenAI does behind it (clean-up,
    detokenization) is left out.
    """

    tokens: list[int]
    proposed: list[int]
    gained: list[int]
    ttft: float
    seconds: float

    @property
    def decode_seconds(self) -> float:
        """Time for all tokens but the first."""
        return self.seconds - self.ttft


def load(main: Path, device: str, draft: Path | None, draft_device: str, properties: dict, draft_properties: dict):
    """An `LLMPipeline` of the main model, alone or with a draft."""
    if draft is None:
        return openvino_genai.LLMPipeline(str(main), device, **properties)
    draft_model = openvino_genai.draft_model(str(draft), draft_device, **draft_properties)
    return openvino_genai.LLMPipeline(str(main), device, draft_model=draft_model, **properties)


def encode(tokenizer: openvino_genai.Tokenizer, prompt: str) -> openvino_genai.TokenizedInputs:
    """The prompt's token ids as `LLMPipeline.generate(str)` makes them: through the chat template if there is one."""
    if not tokenizer.chat_template:
        return tokenizer.encode(prompt)
    text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def inputs(ids: np.ndarray) -> openvino_genai.TokenizedInputs:
    """Token ids [n] as the pipeline takes them."""
    return openvino_genai.TokenizedInputs(openvino.Tensor(ids[None]), openvino.Tensor(np.ones_like(ids[None])))


def generate(pipe, inputs, max_new_tokens: int, draft_length: int | None = None) -> Run:
    """Generate max_new_tokens greedily, past any end of text.

    `draft_length` is K of a pipeline that has a draft, None of one that has none.

    A pair with an NPU changes K as it goes: there `proposed` is what the given K stands for, not what was drafted.
    """
    config = openvino_genai.GenerationConfig(max_new_tokens=max_new_tokens, ignore_eos=True, eos_token_id=NO_TOKEN)
    if draft_length is not None:
        config.num_assistant_tokens = draft_length
    result = pipe.generate(inputs, config)
    metrics, drafting = result.perf_metrics, result.extended_perf_metrics
    # m_batch_sizes has the tokens gained by each inference of the main model; get_num_accepted_tokens() leaves out the
    # last one. Where an NPU takes part, it has those of all earlier calls too, so count from the end.
    sizes = list((drafting.main_model_metrics if drafting else metrics).raw_metrics.m_batch_sizes)
    gained: list[int] = []
    while sizes and sum(gained) < len(result.tokens[0]):
        gained.insert(0, sizes.pop())
    gained = gained[1:]  # the first is the prompt's inference
    proposed, done = [], 1
    for tokens in gained:
        proposed.append(min(draft_length or 0, max_new_tokens - done - 1))  # no more than can still be used
        done += tokens
    return Run(list(result.tokens[0]), proposed, gained, *seconds(metrics, len(gained)))


def seconds(metrics: openvino_genai.PerfMetrics, iterations: int) -> tuple[float, float]:
    """From the call to its first token, and to its last one; `iterations` inferences lie between them."""
    times = metrics.raw_metrics.m_new_token_times  # ms, one for each inference; of earlier calls too with an NPU
    first = metrics.get_ttft().mean / 1000
    return first, first + (times[-1] - times[-1 - iterations]) / 1000
