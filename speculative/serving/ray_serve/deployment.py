"""Ray Serve deployment: each replica is one copy of the pair's weights with one engine, placed by Ray."""

import asyncio

from fastapi import FastAPI
from ray import serve

from speculative import batch_decoder
from speculative.drafting.suffix import LONGEST_MATCH
from speculative.serving.engine.engine_thread import Engine
from speculative.serving.engine.metrics import Metrics
from speculative.serving.http import tracing
from speculative.serving.http.endpoint import Endpoint
from speculative.serving.http.tracing import Traces
from speculative.serving.settings import Limits, Pair


@serve.deployment
@serve.ingress()
class Replica:
    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, pair: Pair, limits: Limits, keys: frozenset[bytes] | None, cors_origins: tuple[str, ...] = ()
    ):
        """`keys`: digests of the API keys (`middleware.digest`), or None. `cors_origins`: whose pages may use it."""
        decoder = await asyncio.to_thread(
            batch_decoder.load, pair.main, pair.draft, cache_tokens=pair.cache_tokens, use_huge_pages=True,
            prefix_cache=pair.prefix_cache, subtract_penalties=True, past_answers=pair.past_answers,
            max_ngram_size=LONGEST_MATCH if pair.suffix_decoding else None,
        )  # fmt: skip
        self._engine = Engine(decoder, limits.max_num_seqs, limits.max_queue)
        metrics = Metrics(self._engine, pair.name)
        self._traces = Traces(pair.name) if tracing.is_wanted() else None
        self._endpoint = Endpoint(pair.name, self._engine, limits, metrics, pair.draft_length, self._traces)
        self._keys, self._cors_origins = keys, cors_origins

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._endpoint.application(self._keys, self._cors_origins)

    async def check_health(self) -> None:
        """Called regularly by Ray Serve, which replaces a replica that raises."""
        if problem := self._endpoint.health_problem():
            raise RuntimeError(problem)

    async def drain(self, seconds: float) -> int:
        unfinished = await self._endpoint.drain(seconds)
        if self._traces:
            await asyncio.to_thread(self._traces.close)
        return unfinished

    async def cache_bytes(self) -> int:
        return self._engine.decoder.cache_bytes
