"""Batched decoding methods: GenAI's ContinuousBatchingPipeline and our batch decoder, each in its own process.

    process = BatchingProcess({"name": "ours, draft", "engine": "native", "main": "models/embedded/main", ...})
    process.start()
    method = process.method("ours, adaptive draft", 0)

Both get the same token ids. GenAI alone runs with its default scheduler. With a draft, prompts must not be split
(`dynamic_split_fuse=False`), as GenAI's output otherwise differs from the main model's. Its prefix cache is off.
"""

import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai
from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig

from speculative import batch_decoder
from speculative.batch_decoder import BatchDecoder, Request
from speculative.bench import genai
from speculative.bench.cluster import worker_process
from speculative.bench.cluster.worker_process import WorkerProcess
from speculative.bench.load.metrics import Load, RequestRecord, Span
from speculative.bench.result import ProcessMemory
from speculative.bench.startup import peak_memory
from speculative.drafting.suffix import LONGEST_MATCH
from speculative.models import huge_pages
from speculative.models.spec import ModelSpec
from speculative.pair.engines import NATIVE

CACHE_TOKENS = 8192  # for all texts together; GenAI's caches grow as needed


class Prompts:
    """Token ids of prompts, each prefixed with a unique number so that none is served from a cache."""

    def __init__(self, main: Path, texts: Sequence[str]):
        self._tokenizer = openvino_genai.Tokenizer(str(main))
        self._texts = texts

    def __getitem__(self, number: int) -> np.ndarray:
        """Ids [n], with the main model's chat template if it has one."""
        text = f"# {number}\n{self._texts[number % len(self._texts)]}"
        return np.array(genai.encode(self._tokenizer, text).input_ids.data[0])


# ---- our engine -----------------------------------------------------------------------------------------------------


def our_method(name: str, decoder: BatchDecoder, prompts: Prompts, max_new_tokens: int) -> Load:
    """Our batch decoder with its adaptive draft length."""
    config = GenerationConfig(max_new_tokens=max_new_tokens, ignore_eos=True)

    def run(clients: int, seconds: float, first: int) -> Span:
        numbers, begin = itertools.count(first), time.perf_counter()
        answers: list[RequestRecord] = []
        running: dict[Request, RequestRecord] = {}
        while True:
            while len(running) < clients and time.perf_counter() < begin + seconds:
                number = next(numbers)
                prompt, sent = prompts[number], time.perf_counter()  # tokenized before, as for GenAI
                running[decoder.add_request(prompt, config)] = RequestRecord(number, sent)
            if not running:
                return Span(answers, begin, begin + seconds)
            for output in decoder.step():
                answer = running[output.request]
                answer.first = answer.first or time.perf_counter()
                if output.request.finished:
                    answer.end, done = time.perf_counter(), output.request.result
                    answer.tokens, answer.accepted = len(done.tokens), sum(done.accepted)
                    answer.rejected = sum(done.proposed) - answer.accepted
                    answer.finish_reason, answer.is_complete = done.finish_reason, output.request.error is None
                    answer.text = " ".join(map(str, done.tokens))
                    answers.append(running.pop(output.request))

    return Load(name, run)


# ---- GenAI ----------------------------------------------------------------------------------------------------------


def scheduler(max_texts: int, with_draft: bool) -> SchedulerConfig:
    config = SchedulerConfig()
    config.max_num_seqs = max(config.max_num_seqs, max_texts)
    if with_draft:
        config.dynamic_split_fuse = False
        config.max_num_batched_tokens = 2**31  # one forward pass per prompt, as in LLMPipeline
    return config


def genai_pipeline(main: ModelSpec, draft: ModelSpec | None = None, max_texts: int = 256) -> ContinuousBatchingPipeline:
    properties, config = dict(main.properties), scheduler(max_texts, draft is not None)
    if draft:
        properties["draft_model"] = openvino_genai.draft_model(
            str(draft.folder), draft.device, scheduler_config=config, **draft.properties
        )
    return ContinuousBatchingPipeline(str(main.folder), config, main.device, properties)


def genai_method(name: str, pipe: ContinuousBatchingPipeline, k: int, prompts: Prompts, max_new_tokens: int) -> Load:
    """GenAI's pipeline with `k` draft tokens per iteration, or 0 for a pipeline without a draft."""
    config = GenerationConfig(max_new_tokens=max_new_tokens, ignore_eos=True)
    if k:
        config.num_assistant_tokens = k
    ids = itertools.count()

    def run(clients: int, seconds: float, first: int) -> Span:
        numbers, begin = itertools.count(first), time.perf_counter()
        answers: list[RequestRecord] = []
        running: dict[openvino_genai.GenerationHandle, RequestRecord] = {}
        while True:
            while len(running) < clients and time.perf_counter() < begin + seconds:
                number = next(numbers)
                prompt, sent = ov.Tensor(prompts[number][None]), time.perf_counter()
                running[pipe.add_request(next(ids), prompt, config)] = RequestRecord(number, sent)
            if not running:
                return Span(answers, begin, begin + seconds)
            pipe.step()
            for handle, answer in list(running.items()):
                while handle.can_read():
                    answer.first = answer.first or time.perf_counter()
                    new = [token for part in handle.read().values() for token in part.generated_ids]
                    answer.tokens += len(new)
                    answer.text += "".join(f" {token}" for token in new)
                if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                    answer.end, answer.finish_reason, answer.is_complete = time.perf_counter(), "length", True
                    answer.text = answer.text.strip()
                    answers.append(running.pop(handle))

    return Load(name, run)


# ---- processes ------------------------------------------------------------------------------------------------------


class BatchingProcess:
    """A process that decodes batches of texts."""

    def __init__(self, job: dict):
        """`job` is the argument of `Batch.load`."""
        self.job = job
        self._worker = WorkerProcess([sys.executable, "-m", "speculative.bench.load.batch_methods"])

    def start(self) -> None:
        """Load the models in a new process. Raises RuntimeError or ValueError if they are rejected, or ChildFailed."""
        self._worker.close()
        self._worker.call("load", self.job)

    def close(self) -> None:
        self._worker.close()

    def method(self, name: str, k: int) -> Load:
        return Load(name, lambda *load: self._worker.call("run", k, *load))

    def memory(self) -> ProcessMemory:
        """The process's load time and peak memory so far."""
        memory = self._worker.call("memory")
        return {
            "name": self.job["name"],
            "texts": self.job["texts"],
            "first_seconds": memory["first_seconds"],
            "peak_bytes": memory["peak_bytes"],
            "cache_bytes": memory["cache_bytes"],
        }


class Batch:
    """The child's side. Its methods are called by name."""

    def load(self, job: dict) -> None:
        main = ModelSpec(job["main"], job["device"], job["properties"])
        draft = ModelSpec(job["draft"], job["draft_device"], job["properties"]) if job.get("draft") else None
        self.job, self.prompts = job, Prompts(main.folder, job["prompts"])
        self.methods: dict[int, Load] = {}
        self.ours, self.cache_bytes = job["engine"] == NATIVE, None
        before, begin = huge_pages.allocated(), time.perf_counter()
        if self.ours:
            longest = LONGEST_MATCH if job.get("suffix_decoding") else None
            self.pipeline = batch_decoder.load(main, draft, max_ngram_size=longest, cache_tokens=job["cache_tokens"])
            self.cache_bytes = self.pipeline.cache_bytes
        else:
            self.pipeline = genai_pipeline(main, draft, job["texts"])
        self.seconds = time.perf_counter() - begin
        if job["huge_pages"]:  # the same way for both engines; a pipeline allocates all its memory in the first run
            self.run(2 if draft else 0, 1, 0.001, 0)
            huge_pages.move(before)

    def run(self, k: int, clients: int, seconds: float, first: int) -> Span:
        if k not in self.methods:
            new_tokens = self.job["max_new_tokens"]
            if self.ours:
                self.methods[k] = our_method("", self.pipeline, self.prompts, new_tokens)
            else:
                self.methods[k] = genai_method("", self.pipeline, k, self.prompts, new_tokens)
        return self.methods[k].run(clients, seconds, first)

    def memory(self) -> dict:
        return {"first_seconds": self.seconds, "peak_bytes": peak_memory(), "cache_bytes": self.cache_bytes}


if __name__ == "__main__":
    batch = Batch()
    worker_process.serve(lambda name: getattr(batch, name))
