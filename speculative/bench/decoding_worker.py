"""Child process of speculative/bench/decoding_process.py: one pipeline and its decoding methods."""

import time

import numpy as np

from speculative import decoder
from speculative.bench.cluster import worker_process
from speculative.bench.decoding_process import ProcessJob
from speculative.bench.genai import Run
from speculative.bench.harness import Method, time_in
from speculative.bench.methods import genai_method, genai_pipeline, our_method
from speculative.bench.result import Loading, TokenView
from speculative.bench.token_view import token_view
from speculative.decoder import GenerationResult
from speculative.drafting.suffix import LONGEST_MATCH
from speculative.models import huge_pages
from speculative.pair.engines import NATIVE

FIRST_PROMPT = np.arange(1, 9)  # a pipeline allocates all its memory in the first run


class WorkerPipeline:
    """The models of a job. Its methods are called by name."""

    def load(self, job: ProcessJob) -> Loading:
        """Load the models. Returns the load time and this process's bytes in huge pages, if the system reports them."""
        self.job = job
        before, begin = huge_pages.allocated(), time.perf_counter()
        make = self._ours if job.engine == NATIVE else self._genai
        self.methods = {method.name: method for method in make()}
        seconds = time.perf_counter() - begin
        if job.huge_pages:  # the same way for both engines
            next(iter(self.methods.values())).decode(FIRST_PROMPT)
            huge_pages.move(before)
        return {"load_seconds": seconds, "huge_bytes": huge_pages.in_use()}

    def decode(self, name: str, ids: np.ndarray, json_schema: str) -> tuple[Run | GenerationResult, list[list[float]]]:
        """The run, and the seconds of its forward passes by model, if timed."""
        method = self.methods[name]
        for seconds in method.seconds:
            seconds.clear()
        return method.decode(ids, json_schema), method.seconds

    def token_view(self, ids: np.ndarray, draft_length: int | str) -> TokenView:
        return token_view(self.engine, ids, draft_length, self.job.max_new_tokens)

    def _genai(self) -> list[Method]:
        job = self.job
        pipe = genai_pipeline(job.main, job.draft, job.lookup, job.keep_caches)
        return [genai_method(name, pipe, k, job.max_new_tokens) for name, k, _ in job.methods]

    def _ours(self) -> list[Method]:
        job = self.job
        looks_up = any(str(draft_length).startswith("lookup") for _, draft_length, _ in job.methods)
        ours = decoder.load(job.main, job.draft, max_ngram_size=LONGEST_MATCH if looks_up and not job.draft else None)
        self.engine = ours
        seconds = [time_in(model) for model in ours.models]
        return [
            our_method(name, ours, seconds, k, t, job.max_new_tokens, job.keep_caches) for name, k, t in job.methods
        ]


if __name__ == "__main__":
    pipeline = WorkerPipeline()
    worker_process.serve(lambda name: getattr(pipeline, name))
