"""Ways to decode several texts at once, in this process: GenAI's ContinuousBatchingPipeline and our batch decoder.

    python scripts/batching_ways.py '{"engine": "ours", "main": "models/embedded/main", "prompts": ["class Box:"],
                                      "texts": 16, "max_new_tokens": 50}'

That is one way alone in a process, under load of so many texts at once, as `memory_of` runs it: seconds to load, peak
memory and memory of the KV caches, printed as JSON.

GenAI gets what it needs to be right with a draft: without prefix cache, and without splitting prompts
(`dynamic_split_fuse=False`), which with a draft gives other texts than the main model alone.
"""

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import openvino_genai
from load_figures import Answer, Load, Span
from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig
from start_cost import peak_memory

from speculative import batch_decoder
from speculative.batch_decoder import BatchDecoder

CACHE_TOKENS = 8192  # of all texts together; GenAI's caches grow as needed


# ---- ours -----------------------------------------------------------------------------------------------------------


def our_way(name: str, decoder: BatchDecoder, prompts: Sequence[str], max_new_tokens: int) -> Load:
    """The batch's own rule says how much to draft."""
    config = GenerationConfig(max_new_tokens=max_new_tokens, ignore_eos=True)

    def run(clients: int, seconds: float, first: int) -> Span:
        numbers, begin, answers, going = itertools.count(first), time.perf_counter(), [], {}
        while True:
            while len(going) < clients and time.perf_counter() < begin + seconds:
                number = next(numbers)
                going[decoder.add(numbered(prompts, number), config)] = Answer(number, time.perf_counter())
            if not going:
                return Span(answers, begin, begin + seconds)
            for gain in decoder.step():
                answer = going[gain.request]
                answer.first = answer.first or time.perf_counter()
                if gain.request.finished:
                    answer.end, done = time.perf_counter(), gain.request.generation
                    answer.tokens, answer.accepted = len(done.tokens), sum(done.accepted)
                    answer.rejected = sum(done.proposed) - answer.accepted
                    answer.finish_reason, answer.whole = done.finish_reason, gain.request.error is None
                    answer.text = " ".join(map(str, done.tokens))
                    answers.append(going.pop(gain.request))

    return Load(name, run)


# ---- GenAI's --------------------------------------------------------------------------------------------------------


def scheduler(most_texts: int) -> SchedulerConfig:
    config = SchedulerConfig()
    config.dynamic_split_fuse = False
    config.enable_prefix_caching = False
    config.max_num_batched_tokens = 2**31  # a prompt is one inference, as LLMPipeline has it
    config.max_num_seqs = max(256, most_texts)
    return config


def genai_pipeline(
    main: Path, device: str, properties: dict, draft: Path | None = None, draft_device: str = "", most_texts: int = 256
) -> ContinuousBatchingPipeline:
    given = dict(properties)
    if draft:
        config = scheduler(most_texts)
        given["draft_model"] = openvino_genai.draft_model(
            str(draft), draft_device, scheduler_config=config, **properties
        )
    return ContinuousBatchingPipeline(str(main), scheduler(most_texts), device, given)


def genai_way(name: str, pipe: ContinuousBatchingPipeline, k: int, prompts: Sequence[str], max_new_tokens: int) -> Load:
    """With `k` draft tokens for each inference, or 0 for a pipeline without a draft."""
    config = GenerationConfig(max_new_tokens=max_new_tokens, ignore_eos=True, apply_chat_template=False)
    if k:
        config.num_assistant_tokens = k
    ids = itertools.count()

    def run(clients: int, seconds: float, first: int) -> Span:
        numbers, begin, answers, going = itertools.count(first), time.perf_counter(), [], {}
        while True:
            while len(going) < clients and time.perf_counter() < begin + seconds:
                number = next(numbers)
                answer = Answer(number, time.perf_counter())
                going[pipe.add_request(next(ids), numbered(prompts, number), config)] = answer
            if not going:
                return Span(answers, begin, begin + seconds)
            pipe.step()
            for handle, answer in list(going.items()):
                while handle.can_read():
                    answer.first = answer.first or time.perf_counter()
                    new = [token for part in handle.read().values() for token in part.generated_ids]
                    answer.tokens += len(new)
                    answer.text += "".join(f" {token}" for token in new)
                if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                    answer.end, answer.finish_reason, answer.whole = time.perf_counter(), "length", True
                    answer.text = answer.text.strip()
                    answers.append(going.pop(handle))

    return Load(name, run)


def numbered(prompts: Sequence[str], number: int) -> str:
    """None is asked twice, so that nothing is answered from a cache."""
    return f"# {number}\n{prompts[number % len(prompts)]}"


# ---- one way alone --------------------------------------------------------------------------------------------------


def load(asked: dict, most_texts: int) -> tuple[Callable[[str, int], Load], int | None]:
    """A function (name, K) that makes a way, and the bytes of its caches where they are fixed."""
    main, draft = Path(asked["main"]), Path(asked["draft"]) if asked.get("draft") else None
    device, draft_device = asked.get("device", "CPU"), asked.get("draft_device", "CPU")
    properties, prompts, tokens = asked.get("properties", {}), asked["prompts"], asked["max_new_tokens"]
    if asked["engine"] == "ours":
        ours = batch_decoder.load(
            main, device, draft, draft_device, properties, cache_tokens=asked.get("cache_tokens", CACHE_TOKENS)
        )
        return lambda name, k: our_way(name, ours, prompts, tokens), ours.cache_bytes
    pipe = genai_pipeline(main, device, properties, draft, draft_device, most_texts)
    return lambda name, k: genai_way(name, pipe, k, prompts, tokens), None


def memory_of(name: str, asked: dict) -> dict:
    """What a way takes in a process of its own. Raises RuntimeError, with what went wrong, where it fails."""
    process = subprocess.run(
        [sys.executable, __file__, json.dumps(asked)], capture_output=True, encoding="utf-8", errors="replace"
    )
    if process.returncode:
        said = process.stderr.strip().splitlines() or [f"it ended with status {process.returncode}"]
        raise RuntimeError(said[-1].removeprefix("error: "))
    return {"name": name, **json.loads(process.stdout.splitlines()[-1])}


def one_way(asked: dict) -> dict:
    begin = time.perf_counter()
    make, cache_bytes = load(asked, asked["texts"])
    seconds = time.perf_counter() - begin
    make("", asked.get("k", 0)).run(asked["texts"], asked.get("seconds", 0.5), 0)
    return {
        "first_seconds": seconds,
        "peak_bytes": peak_memory(),
        "cache_bytes": cache_bytes,
        "texts": asked["texts"],
    }


if __name__ == "__main__":
    try:
        print(json.dumps(one_way(json.loads(sys.argv[1]))))
    except (RuntimeError, ValueError, KeyError) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
