"""Find the best draft length for a pair: measured and predicted speedup per K.

    python scripts/sweep_draft_length.py models/embedded/main models/embedded/draft -k 1-10 --temperature 0,0.7,1

Measured, for each K: the speedup over the main model alone in the same engine and the same round, and new tokens per
main-model forward pass. Predicted (Leviathan et al. 2023, theorem 3.8, with the cost of verification):

    tau / (v(K) + K c)

    tau   tokens per iteration, measured during the rounds
    c     cost ratio: draft step / main-model step, measured between the rounds
    v(K)  verify ratio: main-model pass over K + 1 tokens / over one, measured between the rounds

A second prediction uses only alpha, the probability that a draft token is accepted, the same for all K. If measured and
predicted speedup differ by more than 10 % on average, the summary names the part of an iteration that takes longer than
its cost.

All runs generate the same number of new tokens and are interleaved. GenAI's two pipelines run in separate processes.
Values are medians and ranges over the rounds. No prompt is served from a cache. Standard output is a table followed by
one JSON object on the last line. Ctrl-C keeps the complete rounds. Temperatures above 0 require this project's engine:
with a draft, GenAI samples from the wrong distribution (scripts/verify_lossless.py).
"""

from speculative.cli.program import exit_on, prepare_output

import argparse
import signal
import statistics
import sys
import time
from dataclasses import dataclass, field

import numpy as np

from speculative import decoder
from speculative.bench.cluster.child_process import ChildFailed
from speculative.bench.decoding_process import Closing, DecodingProcess, ProcessJob
from speculative.bench.harness import (
    BackgroundLoad,
    Method,
    add_output_arguments,
    environment,
    interleave,
    iteration_split,
    row,
    time_in,
    write_outputs,
)
from speculative.bench.methods import engine_alone, our_method
from speculative.bench.prompts import Prompt, read_prompts, shown_name, token_ids
from speculative.bench.result import MethodRow, SweepPoint
from speculative.cli import former_options
from speculative.cli.arguments import (
    add_pair_arguments,
    add_run_arguments,
    lengths,
    model_specs,
    refuse_unusable,
    temperatures,
)
from speculative.cli.parser import Parser
from speculative.decoder import Decoder
from speculative.models.cached_model import CachedModel
from speculative.pair.engines import GENAI, NATIVE, engine_id
from speculative.sequence import metrics

EXPLAINED = 0.1  # mean prediction error above which the summary explains it
REPEATS = 3  # cost measurements between two rounds


def parse_arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    add_pair_arguments(parser)
    add_run_arguments(parser, max_prompts=5)
    draft_length = parser.add_argument(
        "-k",
        "--num-assistant-tokens",
        type=lengths,
        default="1-10",
        metavar="K",
        help="draft lengths, 1-10 or 2,4,8 (default: 1-10)",
    )
    former_options.accept(parser, draft_length, "--k")
    parser.add_argument(
        "--temperature",
        type=temperatures,
        default="0",
        metavar="T",
        help="sampling temperatures, like 0,0.7,1; 0 is greedy (default: 0)",
    )
    parser.add_argument(
        "--engine",
        type=engine_id,
        choices=(NATIVE, GENAI),
        default=NATIVE,
        help="this project's engine or GenAI's pipeline (default: native)",
    )
    add_output_arguments(parser, with_plot=True)
    arguments = parser.parse_args()
    if arguments.engine == GENAI and any(arguments.temperature):
        parser.error(
            f"--temperature {max(arguments.temperature):g} is not supported with --engine genai, whose sampled mode "
            "with a draft is not lossless: use --temperature 0 or --engine native"
        )
    return arguments


# ---- cost of a draft step and of verification -----------------------------------------------------------------------


@dataclass
class MeasuredCosts:
    """Seconds per forward pass of synthetic iterations, measured repeatedly between the rounds."""

    main: CachedModel
    draft: CachedModel
    ks: list[int]
    context: int  # tokens in the KV caches
    steps: list[float] = field(default_factory=list)  # draft steps
    verifies: dict[int, list[float]] = field(default_factory=dict)  # by number of draft tokens; 0: a plain step

    def measure(self) -> None:
        longest = max(self.ks) + 1
        context = max(1, min(self.context, *(model.capacity - longest for model in (self.main, self.draft))))
        text = (np.arange(context + longest) * 7919 + 1) % min(self.main.vocab_size, self.draft.vocab_size)
        for model in (self.main, self.draft):
            model.reset()
            model.logits(text[:context])

        def timed(model: CachedModel, start: int, n: int) -> float:
            begin = time.perf_counter()
            model.backend.run(start, text[start : start + n], n)
            return time.perf_counter() - begin

        for repeat in range(REPEATS + 1):
            for k in (0, *self.ks):  # as in decoding: draft steps, then verification, which evicts them from the caches
                steps = [timed(self.draft, context + i, 1) for i in range(k)]
                verify = timed(self.main, context, k + 1)
                if repeat:  # the first run of a shape is slower
                    self.steps += steps
                    self.verifies.setdefault(k, []).append(verify)
        for model in (self.main, self.draft):
            model.reset()

    @property
    def draft_step(self) -> float:
        return statistics.median(self.steps)

    def verify(self, k: int) -> float:
        return statistics.median(self.verifies[k])

    @property
    def cost_ratio(self) -> float:
        return self.draft_step / self.verify(0)

    def verify_ratio(self, k: int) -> float:
        return self.verify(k) / self.verify(0)


# ---- measuring ------------------------------------------------------------------------------------------------------


def load(arguments: argparse.Namespace, processes: list[DecodingProcess]) -> tuple[list[Method], Decoder]:
    """The methods (per temperature: main model alone, then each K), and our engine, in which costs are measured.
    Started processes are appended to `processes`."""
    main, draft = model_specs(arguments)
    n = arguments.max_new_tokens
    ours = decoder.load(main, draft)
    if arguments.engine == GENAI:
        alone = ProcessJob("alone", GENAI, main, None, n, (("GenAI, main alone", 0, 0.0),))
        methods = tuple((f"GenAI, K = {k}", k, 0.0) for k in arguments.num_assistant_tokens)
        for job in (alone, ProcessJob("pair", GENAI, main, draft, n, methods)):
            processes.append(DecodingProcess(job))
            processes[-1].start()
        return [method for process in processes for method in process.methods], ours
    alone = engine_alone(ours, main, draft)
    seconds = [time_in(model) for model in (ours.main, ours.draft.model)]
    seconds_alone = [time_in(alone.main)] if alone is not ours else seconds
    methods = []
    for t in arguments.temperature:
        kind = f"ours, temperature {t:g}" if t else "ours"
        for k in (0, *arguments.num_assistant_tokens):
            name, engine, timed = (f"K = {k}", ours, seconds) if k else ("main alone", alone, seconds_alone)
            methods.append(our_method(f"{kind}, {name}", engine, timed, k, t, n))
    return methods, ours


# ---- results --------------------------------------------------------------------------------------------------------


def sweep(methods: list[Method], rows: list[MethodRow], costs: MeasuredCosts) -> list[SweepPoint]:
    """One point per temperature and K."""
    points = []
    for t in dict.fromkeys(method.temperature for method in methods):
        drafted = [
            (method, one)
            for method, one in zip(methods, rows, strict=True)
            if method.temperature == t and method.draft_length
        ]
        runs = [run for method, _ in drafted for run in method.runs()]
        proposed, accepted = [n for run in runs for n in run.proposed], [n for run in runs for n in run.accepted]
        alpha = metrics.per_token_acceptance(proposed, accepted) or 0.0
        best = max(drafted, key=lambda pair: pair[1]["speedup"])[0]
        for method, one in drafted:
            k, tau = method.draft_length, one["block_efficiency"]
            ratios = costs.cost_ratio, costs.verify_ratio(k)
            points.append(
                {
                    "temperature": t,
                    "k": k,
                    "engine": method.engine,
                    "name": method.name,
                    "speedup": one["speedup"],
                    "speedup_range": one["speedup_range"],
                    "predicted": metrics.predicted_speedup(tau, k, *ratios),
                    "predicted_from_alpha": metrics.predicted_speedup(
                        metrics.block_efficiency_at(alpha, k), k, *ratios
                    ),
                    "forward_speedup": one["forward_speedup"],
                    "acceptance_rate": one["acceptance_rate"],
                    "block_efficiency": tau,
                    "alpha": alpha,
                    "cost_ratio": ratios[0],
                    "verify_ratio": ratios[1],
                    "repetition": one["repetition"],
                    "best": method is best,
                }
            )
    return points


def mean_error(points: list[SweepPoint], key: str = "predicted") -> float:
    """Mean over K of |predicted - measured| / measured."""
    return statistics.mean(abs(point[key] - point["speedup"]) / point["speedup"] for point in points)


def explain(methods: list[Method], costs: MeasuredCosts) -> str:
    """Which parts of an iteration take longer or shorter than the costs used for the prediction; largest first."""
    drafted = [method for method in methods if method.draft_length]
    splits = [iteration_split(method) for method in drafted]
    if None in splits:
        return "GenAI's pipeline does not expose its time outside the forward passes: try --engine native."
    alone = [iteration_split(method) for method in methods if not method.draft_length]
    plain = statistics.mean(part["verify_ms"] + part["overhead_ms"] for part in alone)
    predicted_draft = statistics.mean(1000 * method.draft_length * costs.draft_step for method in drafted)
    predicted_verify = statistics.mean(1000 * costs.verify(method.draft_length) for method in drafted)
    means = {name: statistics.mean(part[name] for part in splits) for name in ("draft_ms", "verify_ms", "overhead_ms")}
    iteration_ms = predicted_draft + predicted_verify
    parts = {
        "in the draft": means["draft_ms"] - predicted_draft,
        "in the main model": means["verify_ms"] - predicted_verify,
        "outside both models": means["overhead_ms"],
    }
    shown = [f"{ms:+.2f} ms {where}" for where, ms in sorted(parts.items(), key=lambda part: -abs(part[1]))]
    return (
        f"Reason, averaged over K: an iteration takes {sum(means.values()):.2f} ms, but its costs add up to "
        f"{iteration_ms:.2f} ({', '.join(shown)}); a token without a draft takes {plain:.2f} ms, but its forward pass "
        f"costs {1000 * costs.verify(0):.2f}."
    )


def summary(
    points: list[SweepPoint], methods: list[Method], costs: MeasuredCosts, load: BackgroundLoad, asked_rounds: int
) -> list[str]:
    lines, rounds = [], len(methods[0].rounds)
    for t in dict.fromkeys(point["temperature"] for point in points):
        rows_at = [point for point in points if point["temperature"] == t]
        best = next(point for point in rows_at if point["best"])
        expected = max(rows_at, key=lambda point: point["predicted"])
        low, high = best["speedup_range"]
        kind = f"At temperature {t:g}" if t else "Greedy"
        if best["speedup"] < 1:
            lines.append(
                f"{kind}, no K is faster than the main model alone: the best, K = {best['k']}, reaches "
                f"{best['speedup']:.2f}x ({low:.2f}-{high:.2f}). Do not use a draft here."
            )
            continue
        near = [point["k"] for point in rows_at if point["speedup"] >= low and not point["best"]]
        over = f"over {rounds} round{'s' if rounds > 1 else ''}"
        also = f"; within measurement noise: K = {', '.join(map(str, near))}" if near else ""
        lines.append(
            f"{kind}, K = {best['k']} is the best: {best['speedup']:.2f}x the main model alone ({low:.2f}-{high:.2f} "
            f"{over}), {best['forward_speedup']:.2f} tokens per main-model forward pass; predicted: K = "
            f"{expected['k']} with {expected['predicted']:.2f}x{also}."
        )
        if low < 1:
            lines.append(f"In at least one round it was slower than the main model alone ({low:.2f}x): measure longer.")
    error = mean_error(points)
    lines.append(
        f"The prediction is off by {error:.1%} on average over K (from alpha alone by "
        f"{mean_error(points, 'predicted_from_alpha'):.1%}); a draft step costs {costs.cost_ratio:.3f} of a main-model "
        "step."
    )
    if error > EXPLAINED:
        lines.append(explain(methods, costs))
    if rounds < asked_rounds:
        lines.append(f"Interrupted: {rounds} of {asked_rounds} rounds completed; only these are shown.")
    return [*lines, load.sentence] if load.sentence else lines


def table(points: list[SweepPoint]) -> str:
    lines = [
        "temperature    K   speedup (range)      tokens per forward   predicted   from alpha   acceptance   v(K)"
        "   repetition"
    ]
    expected = {}
    for point in points:
        expected[point["temperature"]] = max(expected.get(point["temperature"], 0), point["predicted"])
    for point in points:
        low, high = point["speedup_range"]
        acceptance = "" if point["acceptance_rate"] is None else f"{point['acceptance_rate']:.2f}"
        marks = [name for name, is_so in (
            ("best", point["best"]), ("predicted best", point["predicted"] == expected[point["temperature"]])
        ) if is_so]  # fmt: skip
        lines.append(
            f"{point['temperature']:>11g} {point['k']:>4}   {point['speedup']:5.2f}x ({low:.2f}-{high:.2f})"
            f"   {point['forward_speedup']:18.2f}   {point['predicted']:8.2f}x   {point['predicted_from_alpha']:9.2f}x"
            f"   {acceptance:>10}   {point['verify_ratio']:4.2f}   {point['repetition']:10.2f}"
            f"{'   <- ' + ', '.join(marks) if marks else ''}"
        )
    return "\n".join(lines)


# ---- the program ----------------------------------------------------------------------------------------------------


def measure(
    arguments: argparse.Namespace, ids: list[np.ndarray]
) -> tuple[list[Method], MeasuredCosts, BackgroundLoad, bool]:
    """The methods with their rounds, the costs, the background load, and whether all rounds were completed.

    Raises KeyboardInterrupt without a complete round.
    """
    with Closing() as processes:
        methods, ours = load(arguments, processes)
        context = int(statistics.mean(map(len, ids))) + arguments.max_new_tokens // 2
        costs = MeasuredCosts(ours.main, ours.draft.model, arguments.num_assistant_tokens, context)
        with BackgroundLoad() as other:
            complete = interleave(methods, ids, arguments.rounds, before_round=costs.measure)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # do not interrupt the output
    return methods, costs, other, complete


def result_of(
    arguments: argparse.Namespace,
    prompts: list[Prompt],
    methods: list[Method],
    costs: MeasuredCosts,
    other: BackgroundLoad,
) -> dict:
    """The program's result, as written in JSON."""
    alone = {method.temperature: method for method in methods if not method.draft_length}
    rows = [row(method, alone[method.temperature]) for method in methods]
    points = sweep(methods, rows, costs)
    facts = {
        **environment(arguments, other),
        "prompts": f"{len(prompts)} of {shown_name(arguments.prompts)}",
        "max_new_tokens": arguments.max_new_tokens,
        "rounds": len(methods[0].rounds),
    }
    return {
        "program": "sweep_draft_length",
        "summary": summary(points, methods, costs, other, arguments.rounds),
        "environment": facts,
        "rows": rows,
        "sweep": points,
        "prediction_error": mean_error(points),
        "iteration": [split for method in methods if method.draft_length and (split := iteration_split(method))],
    }


def main() -> int:
    prepare_output()
    arguments = parse_arguments()
    refuse_unusable(arguments, NATIVE, arguments.engine)
    with exit_on(ValueError, status=2):
        prompts = read_prompts(arguments.prompts, arguments.max_prompts)
        ids = token_ids(prompts, arguments.main, arguments.max_new_tokens)
    with exit_on(RuntimeError, ValueError, KeyError, ChildFailed):
        methods, costs, other, complete = measure(arguments, ids)
    result = result_of(arguments, prompts, methods, costs, other)
    write_outputs(arguments, result, "\n".join([table(result["sweep"]), "", *result["summary"]]))
    return 0 if complete else 130


if __name__ == "__main__":
    sys.exit(main())
