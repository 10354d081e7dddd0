"""Prometheus metrics of a replica, through Ray's metrics API; all replicas on all machines share the same series.

The counters of drafts, draft tokens and accepted tokens have vLLM's names and meanings, less its prefix `vllm:`. Rates
are computed from the counters, as usual in Prometheus: the acceptance rate is accepted over draft tokens; the mean
acceptance length is 1 + accepted tokens over drafts; the block efficiency, which includes iterations without a draft,
is decoded tokens over iterations. Definitions: speculative/sequence/metrics.py.
"""

import asyncio
from typing import Any

from ray.util.metrics import Counter, Gauge, Histogram

from speculative.serving.engine_thread import Engine, GenerationHandle

EVERY = 1.0  # seconds between updates, instead of one per token
TTFT = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100]
TPOT = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1]


class Metrics:
    """The metrics; create in the replica's event loop."""

    def __init__(self, engine: Engine, model: str):
        self._engine = engine
        tags = {"model": model}

        def made(kind: type, name: str, description: str, more: tuple = (), **options: Any) -> Any:
            metric = kind(name, description, tag_keys=("model", *more), **options)
            metric.set_default_tags(tags)
            return metric

        self._requests = made(Counter, "speculative_requests", "Requests by outcome", ("outcome",))
        self._prompt = made(Counter, "speculative_prompt_tokens", "Prompt tokens processed")
        self._counters = {
            "generated": made(Counter, "speculative_generated_tokens", "Tokens generated"),
            "decoded": made(Counter, "speculative_decoded_tokens", "Tokens generated after the first of each answer"),
            "iterations": made(Counter, "speculative_iterations", "Main-model passes after the prompt, per text"),
            "drafts": made(Counter, "spec_decode_num_drafts", "Drafts: iterations of a text with draft tokens"),
            "proposed": made(Counter, "spec_decode_num_draft_tokens", "Draft tokens proposed"),
            "accepted": made(Counter, "spec_decode_num_accepted_tokens", "Draft tokens accepted"),
        }
        self._told = dict.fromkeys(self._counters, 0)
        self._gauges = {
            "waiting": made(Gauge, "speculative_waiting_requests", "Requests waiting for a slot in the batch"),
            "running": made(Gauge, "speculative_running_requests", "Requests in the batch"),
        }
        self._ttft = made(
            Histogram, "speculative_ttft_seconds", "Time to first token, queueing included", boundaries=TTFT
        )
        self._tpot = made(
            Histogram, "speculative_tpot_seconds", "Time per output token after the first", boundaries=TPOT
        )
        self._task = asyncio.create_task(self._tell())

    def refused(self, status: int) -> None:
        """Count a request that was rejected with an error before decoding."""
        self._requests.inc(tags={"outcome": f"refused_{status}"})

    def over(self, job: GenerationHandle, outcome: str) -> None:
        self._requests.inc(tags={"outcome": outcome})
        if job.first_at:
            self._prompt.inc(len(job.prompt))
            self._ttft.observe(job.first_at - job.submitted)
            if (tokens := len(job.result.tokens)) > 1:
                self._tpot.observe((job.last_at - job.first_at) / (tokens - 1))

    async def _tell(self) -> None:
        while True:
            for name, counter in self._counters.items():
                now = getattr(self._engine, name)
                if now > self._told[name]:
                    counter.inc(now - self._told[name])
                    self._told[name] = now
            for name, gauge in self._gauges.items():
                gauge.set(getattr(self._engine, name))
            await asyncio.sleep(EVERY)
