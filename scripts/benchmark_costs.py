"""Measure the cost of the engine's steps, how it scales, and how close decoding comes to the memory-bandwidth limit.

    python scripts/benchmark_costs.py models/embedded/main models/embedded/draft

- Forward passes: the main model over 1 to 17 tokens and the draft over one, with short and long contexts; and whether a
  step costs more after a rollback.
- Outside the models: logits to distribution, sampling and verification, by vocabulary size.
- Load time and memory with the model files in the page cache: without a model cache (CACHE_DIR), with an empty one and
  with a filled one; peak memory compared with the weights.
- Bandwidth limit: an iteration with K draft tokens reads the main model's weights once and the draft's K times. The
  time for this at the read bandwidth, measured before and after each text, is given as a fraction of the decoding time.

Values are medians; the machine must be idle. Output: tables, then one JSON object on the last line.
"""

from speculative.cli.program import exit_on, prepare_output

import argparse
import json
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import openvino_genai
from openvino_genai import GenerationConfig

from speculative import decoder
from speculative.bench.result import BandwidthLimit, CostsStart, InferenceCosts, OneStart, SamplingCosts
from speculative.bench.startup import Start, job, read_files, run
from speculative.cli.arguments import add_huge_pages_argument, add_pair_arguments, model_specs, refuse_unusable
from speculative.cli.number_types import positive_int, two_or_more
from speculative.cli.parser import Parser
from speculative.cli.processes import signals_raise
from speculative.cli.progress import tqdm
from speculative.models.cached_model import CachedModel
from speculative.models.cores import usable_cores
from speculative.pair import weights
from speculative.pair.engines import NATIVE
from speculative.sampling.distribution import Distribution
from speculative.sampling.params import SamplingParams
from speculative.sampling.rejection_sampling import draw, verify

TOKENS = (1, 2, 3, 5, 7, 9, 13, 17)
CONTEXTS = (256, 512, 1024, 2048, 4096)
VOCABULARIES = (4_096, 32_000, 151_936)
SETTINGS = {
    "greedy": GenerationConfig(),
    "temperature 1": GenerationConfig(do_sample=True),
    "top-k 50": GenerationConfig(do_sample=True, top_k=50),
    "top-p 0.9": GenerationConfig(do_sample=True, top_p=0.9),
}
TEXT = Path(__file__).resolve().parent.parent / "speculative/modelgen/recipes.txt"


def parse_arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    add_pair_arguments(parser)
    parser.add_argument(
        "-k",
        "--num-assistant-tokens",
        type=positive_int,
        default=4,
        metavar="K",
        help="draft length for the bandwidth limit",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=two_or_more,
        default=200,
        metavar="N",
        help="new tokens for the bandwidth limit (default: 200)",
    )
    parser.add_argument(
        "--repeat", type=positive_int, default=9, metavar="N", help="repetitions of each measurement (default: 9)"
    )
    add_huge_pages_argument(parser)
    return parser.parse_args()


# ---- forward passes -------------------------------------------------------------------------------------------------


def inference_costs(context: int, main: CachedModel, draft: CachedModel, repeat: int) -> InferenceCosts:
    """Milliseconds with a context of `context` tokens: main model by number of tokens, draft step, rollback."""
    text = (np.arange(context + max(TOKENS), dtype=np.int64) * 7919 + 1) % min(main.vocab_size, draft.vocab_size)
    main.logits(text[:context])
    draft.logits(text[:context])

    def step(model: CachedModel, start: int, n: int) -> float:
        begin = time.perf_counter()
        model.backend.run(start, text[start : start + n], n)
        return time.perf_counter() - begin

    def median(model: CachedModel, n: int) -> float:
        return 1000 * statistics.median([step(model, context, n) for _ in range(repeat + 1)][1:])

    differences = []
    for _ in range(repeat):  # five tokens after dropping seven of nine, and without a rollback
        step(main, context, 9)
        rolled_back = step(main, context + 2, 5)
        step(main, context - 7, 9)
        differences.append(rolled_back - step(main, context + 2, 5))
    row = {
        "context": context,
        "main": {n: median(main, n) for n in TOKENS},
        "draft": median(draft, 1),
        "rollback": 1000 * statistics.median(differences),
    }
    main.reset()
    draft.reset()
    return row


# ---- outside the models ---------------------------------------------------------------------------------------------


def sampling_costs(size: int, name: str, config: GenerationConfig, repeat: int) -> SamplingCosts:
    """Microseconds of an iteration's work outside the forward passes, with a vocabulary of `size`."""
    random = np.random.default_rng(0)
    logits = (random.standard_normal((5, size)) * 3).astype(np.float32)
    text = random.integers(0, size, 200)
    transform = Distribution(SamplingParams.resolve(config))
    q = [transform(row, text, text) for row in logits]
    drafted = [int(np.asarray(row).argmax()) for row in q[:4]]

    def median(action: Callable[[], object]) -> float:
        times = []
        for _ in range(10 * repeat):
            begin = time.perf_counter()
            action()
            times.append(time.perf_counter() - begin)
        return 1e6 * statistics.median(times)

    return {
        "vocabulary": size,
        "settings": name,
        "distribution": median(lambda: transform(logits[0], text, text)),
        "draw": median(lambda: draw(q[0], random)),
        "verify_4": median(lambda: verify(drafted, q[:4], lambda i: transform(logits[i], text, text), random)),
    }


# ---- load time and memory -------------------------------------------------------------------------------------------

STARTS = 3  # of each kind, interleaved


def starts(arguments: argparse.Namespace) -> list[CostsStart]:
    """Starts in new processes: without a model cache, filling it, and using it. Medians of several."""
    starts_by_cache: dict[str, list[OneStart]] = {"no cache": [], "first": [], "second": []}
    ours = Start("ours with the draft", NATIVE, with_draft=True)
    read_files(arguments.main, arguments.draft)
    with signals_raise():  # do not leave a temporary folder behind
        for _ in range(min(STARTS, arguments.repeat)):
            with tempfile.TemporaryDirectory() as folder:
                caches = {}, {"CACHE_DIR": folder}, {"CACHE_DIR": folder}
                for name, cache in zip(starts_by_cache, caches, strict=True):
                    starts_by_cache[name].append(run(job(ours, arguments, **cache)))
    return [
        {
            "start": name,
            "seconds": statistics.median(one["seconds"] for one in runs),
            "peak_bytes": max(one["peak_bytes"] or 0 for one in runs) or None,
            "cache_bytes": runs[0]["cache_bytes"],
        }
        for name, runs in starts_by_cache.items()
    ]


# ---- bandwidth limit ------------------------------------------------------------------------------------------------


class ReadBandwidth:
    """Memory read bandwidth of all cores together, in bytes per second, from taking the maximum of 1 GiB of numbers.

    Reads only, as decoding does: a copy moves more bytes, because memory reads and writes at the same time.
    """

    def __init__(self):
        cores = usable_cores()
        self.parts = [np.ones(2**30 // cores, np.int8) for _ in range(cores)]

    def measure(self, times: int = 3) -> float:
        """The best of several tries, as other tenants may use the memory at any time."""
        best = float("inf")
        for _ in range(times):
            begin = time.perf_counter()
            threads = [threading.Thread(target=part.max) for part in self.parts]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            best = min(best, time.perf_counter() - begin)
        return sum(part.nbytes for part in self.parts) / best


def limit(arguments: argparse.Namespace, one: decoder.Decoder) -> BandwidthLimit:
    """The engine's throughput as a fraction of the limit set by reading the weights, with and without the draft."""
    main, draft = weights.read_pair(arguments.main, arguments.draft)
    bytes_ = {"main": main.bytes_per_step, "draft": draft.bytes_per_step}
    text = openvino_genai.Tokenizer(str(arguments.main)).encode(TEXT.read_text(encoding="utf-8")).input_ids.data[0]
    config = GenerationConfig(
        max_new_tokens=arguments.max_new_tokens, ignore_eos=True, num_assistant_tokens=arguments.num_assistant_tokens
    )
    alone = decoder.Decoder(one.main)
    facts = {"weight_bytes": bytes_, "runs": []}
    memory = ReadBandwidth()
    begins = [i * 200 % (len(text) - 60) for i in range(2 + arguments.repeat // 3)]
    prompts = [text[begin : begin + 60] for begin in begins]
    reached: dict[str, list[float]] = {"alone": [], "draft": []}
    for prompt in prompts:
        for name, engine in (("alone", alone), ("draft", one)):
            before = memory.measure()
            result = engine.generate(prompt, config)
            per_second = max(before, memory.measure())
            read = len(result.gained) * bytes_["main"] + sum(result.proposed) * bytes_["draft"]
            reached[name].append(read / result.decode_seconds / per_second)
            facts["runs"].append(
                {
                    "method": name,
                    "seconds": result.decode_seconds,
                    "tokens": len(result.tokens) - 1,
                    "bandwidth": per_second,
                }
            )
    facts["bandwidth"] = statistics.median(run["bandwidth"] for run in facts["runs"])
    return facts | {name: statistics.median(ratios[1:]) for name, ratios in reached.items()}


# ---- table ----------------------------------------------------------------------------------------------------------


def table(
    inferences: list[InferenceCosts],
    sampling: list[SamplingCosts],
    started: list[CostsStart],
    bound: BandwidthLimit,
    arguments: argparse.Namespace,
) -> str:
    lines = ["context   main, ms on " + "".join(f"{n:>7}" for n in TOKENS) + " tokens   draft, ms   rollback, ms"]
    for row in inferences:
        main = "".join(f"{row['main'][n]:7.1f}" for n in TOKENS)
        lines.append(f"{row['context']:>7}   {'':12}{main}{'':7} {row['draft']:>11.2f}   {row['rollback']:>12.2f}")
    lines += ["", "vocabulary   settings        distribution, us   draw, us   verify 4, us"]
    lines += [
        f"{row['vocabulary']:>10,}   {row['settings']:<14} {row['distribution']:>17.0f} {row['draw']:>10.0f}"
        f" {row['verify_4']:>14.0f}"
        for row in sampling
    ]
    on_disk = sum(Path(folder, "openvino_model.bin").stat().st_size for folder in (arguments.main, arguments.draft))
    lines += ["", "start      seconds   peak memory, MB   weights, MB   cache at full length, MB"]
    for row in started:
        peak = f"{row['peak_bytes'] / 1e6:,.0f}" if row["peak_bytes"] else "n/a"
        lines.append(
            f"{row['start']:<9} {row['seconds']:>8.1f} {peak:>17} {on_disk / 1e6:>13,.0f}"
            f" {row['cache_bytes'] / 1e6:>26,.0f}"
        )
    lines += [
        "",
        f"memory read bandwidth {bound['bandwidth'] / 1e9:.1f} GB/s; a forward pass reads "
        f"{bound['weight_bytes']['main'] / 1e6:,.0f} MB (main), {bound['weight_bytes']['draft'] / 1e6:,.0f} MB (draft)",
        f"fraction of this limit reached: {bound['alone']:.2f} alone, {bound['draft']:.2f} with K = "
        f"{arguments.num_assistant_tokens}",
    ]
    return "\n".join(lines)


def main() -> int:
    prepare_output()
    arguments = parse_arguments()
    refuse_unusable(arguments, NATIVE)
    properties = dict(arguments.property)
    with exit_on(RuntimeError, ValueError):
        started = starts(arguments)
        one = decoder.load(*model_specs(arguments), use_huge_pages=arguments.huge_pages)
        longest = min(one.main.capacity, one.draft.model.capacity) - max(TOKENS)
        contexts = tqdm([n for n in CONTEXTS if n <= longest], desc="contexts", leave=False)
        inferences = [inference_costs(n, one.main, one.draft.model, arguments.repeat) for n in contexts]
        sampling = [
            sampling_costs(size, name, config, arguments.repeat)
            for size in VOCABULARIES
            for name, config in SETTINGS.items()
        ]
        bound = limit(arguments, one)
    print(table(inferences, sampling, started, bound, arguments))
    environment = {
        "main": str(arguments.main),
        "draft": str(arguments.draft),
        "device": arguments.device,
        "draft_device": arguments.draft_device,
        "properties": properties,
        "huge_pages": arguments.huge_pages,
        "openvino_genai": openvino_genai.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {usable_cores()} cores",
    }
    results = {"inferences": inferences, "sampling": sampling, "starts": started, "limit": bound}
    print(json.dumps({"environment": environment, **results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
