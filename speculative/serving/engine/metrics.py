"""Prometheus metrics of a replica, through Ray's metrics API: one port per machine exports those of all its replicas.

Metrics that vLLM has too have its names, labels and meanings (https://docs.vllm.ai/en/stable/usage/metrics/). Ray
replaces the colon and adds a prefix: `vllm:num_requests_running` is `ray_vllm_num_requests_running`, as for vLLM on
Ray. All other names begin with `speculative_`. Rates are computed from the counters, as usual in Prometheus: the
acceptance rate is accepted over draft tokens; the mean acceptance length is 1 + accepted tokens over drafts; the block
efficiency, which includes iterations without a draft, is decoded tokens over iterations. Definitions:
speculative/sequence/metrics.py. Sums of histograms are estimates: Ray counts each value as the middle of its bucket.
"""

import asyncio
from typing import Any

from ray.util.metrics import Counter, Gauge, Histogram

from speculative.serving.engine.engine_thread import Engine, GenerationHandle

UPDATE_SECONDS = 1.0  # seconds between updates, instead of one per token
COUNTERS = {  # name: attribute of `Engine`, description
    "vllm_prompt_tokens": ("prompt_tokens", "Prompt tokens processed, those from the prefix cache included"),
    "vllm_prefix_cache_queries": ("prompt_tokens", "Prompt tokens looked for in the prefix cache"),
    "vllm_prefix_cache_hits": ("cached_tokens", "Prompt tokens found in the prefix cache"),
    "vllm_generation_tokens": ("generated", "Tokens generated"),
    "vllm_spec_decode_num_drafts": ("drafts", "Drafts: iterations of a text with draft tokens"),
    "vllm_spec_decode_num_draft_tokens": ("proposed", "Draft tokens proposed"),
    "vllm_spec_decode_num_accepted_tokens": ("accepted", "Draft tokens accepted"),
    "speculative_decoded_tokens": ("decoded", "Tokens generated after the first of each answer"),
    "speculative_iterations": ("iterations", "Main-model passes after the prompt, per text"),
}
GAUGES = {
    "vllm_num_requests_running": ("running", "Requests in the batch"),
    "vllm_num_requests_waiting": ("waiting", "Requests waiting for a slot in the batch"),
    "vllm_kv_cache_usage_perc": ("cache_usage", "Share of the KV cache in use, from 0 to 1"),
}
TTFT = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 1000]
TPOT = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5]
LATENCY = [0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000]
QUEUE = [0.001, 0.01, *LATENCY]  # below 1 ms: there was a free slot
TOKENS = [10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000]
NORMAL_REASONS = ("stop", "length")  # reasons that are no errors


class Metrics:
    """The metrics; create in the replica's event loop."""

    def __init__(self, engine: Engine, model: str):
        self._engine = engine
        tags = {"model_name": model}

        def create(metric_type: type, name: str, description: str, extra_tags: tuple = (), **options: Any) -> Any:
            metric = metric_type(name, description, tag_keys=("model_name", *extra_tags), **options)
            metric.set_default_tags(tags)
            return metric

        self._counters = {name: create(Counter, name, description) for name, (_, description) in COUNTERS.items()}
        self._exported = dict.fromkeys(COUNTERS, 0)
        self._gauges = {name: create(Gauge, name, description) for name, (_, description) in GAUGES.items()}
        self._request_success = create(
            Counter, "vllm_request_success", "Requests that ended, by reason: stop, length, abort or error",
            ("finished_reason",),
        )  # fmt: skip
        self._errors = create(
            Counter, "speculative_request_errors", "Requests refused (refused_STATUS) or failed (code of the error)",
            ("error",),
        )  # fmt: skip
        self._ttft = create(
            Histogram, "vllm_time_to_first_token_seconds", "Time to first token, queueing included", boundaries=TTFT
        )
        self._tpot = create(
            Histogram, "vllm_request_time_per_output_token_seconds", "Time per output token after a request's first",
            boundaries=TPOT,
        )  # fmt: skip
        self._latency = create(
            Histogram, "vllm_e2e_request_latency_seconds", "Time from a request to its last token", boundaries=LATENCY
        )
        self._queued = create(
            Histogram, "vllm_request_queue_time_seconds", "Time waiting for a slot in the batch", boundaries=QUEUE
        )
        self._prompts = create(Histogram, "vllm_request_prompt_tokens", "Tokens of a prompt", boundaries=TOKENS)
        self._answers = create(Histogram, "vllm_request_generation_tokens", "Tokens of an answer", boundaries=TOKENS)
        self._task = asyncio.create_task(self._export())

    def count_rejected(self, status: int) -> None:
        """Count a request that was rejected with an error before decoding."""
        self._errors.inc(tags={"error": f"refused_{status}"})

    def count_finished(self, job: GenerationHandle, outcome: str) -> None:
        """Count a request that ended. `outcome`: its finish reason, "disconnected", or the code of its error."""
        reason = {"disconnected": "abort"}.get(outcome, outcome if outcome in NORMAL_REASONS else "error")
        self._request_success.inc(tags={"finished_reason": reason})
        if reason == "error":
            self._errors.inc(tags={"error": outcome})
        if job.first_token_time:
            tokens = len(job.result.tokens)
            self._ttft.observe(job.first_token_time - job.submitted)
            self._latency.observe(job.last_token_time - job.submitted)
            self._queued.observe(job.admitted - job.submitted)
            self._prompts.observe(len(job.prompt))
            self._answers.observe(tokens)
            if tokens > 1:
                self._tpot.observe((job.last_token_time - job.first_token_time) / (tokens - 1))

    async def _export(self) -> None:
        while True:
            for name, counter in self._counters.items():
                value = getattr(self._engine, COUNTERS[name][0])
                if value > self._exported[name]:
                    counter.inc(value - self._exported[name])
                    self._exported[name] = value
            for name, gauge in self._gauges.items():
                gauge.set(getattr(self._engine, GAUGES[name][0]))
            await asyncio.sleep(UPDATE_SECONDS)
