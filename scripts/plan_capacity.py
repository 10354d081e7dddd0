"""Plan a cluster by simulation: the number of replicas that meets goals for TTFT and TPOT, with and without a draft,
and the load at which drafting stops helping.

    python scripts/plan_capacity.py models/embedded/main models/embedded/draft --rate 5,20 --ttft-goal 0.5

first measures the times of forward passes and iterations on this machine, and the acceptance on the --prompts.
`--save-costs` saves these costs; `--costs` plans with them on any machine, without models, and with the medians of
several files: the speed of a machine, and of each start, varies. The simulation runs the scheduler of the server:
continuous batching, chunked prompts, the queue, and the server's own draft-length policy.

Requests arrive at random (Poisson) with lengths from a distribution: 512, uniform:LOW:HIGH, exponential:MEAN or
lognormal:MEDIAN:SIGMA; by default those of the prompts. `--trace` takes arrivals and lengths from JSON lines with
"arrival" (seconds), "prompt_tokens" and "output_tokens", or from the CSV of Azure's LLM inference traces or BurstGPT.
A goal is met if that percentile of the requests meets it; requests rejected with status 429 do not. For each rate and
setting, the smallest number of replicas that meets both goals is searched. More than 8 replicas are simulated as 8 with
their share of the requests. HTTP, proxies and clients on the replicas' cores are simulated with `--server`; the network
and other load on the processors are not.

Columns of the first table ("*" marks the smallest number of replicas that meets both goals):

    TTFT, TPOT  median, and the percentile of the goals in brackets; "refused": more requests than that were rejected
    busy        share of the time in which a replica computes
    batch       requests in an iteration, mean
    drafted     draft tokens per request and iteration, mean
    cached      share of the prompt tokens that come from the prefix cache
    refused     requests rejected with status 429 / all

`--against` compares a result of benchmark_batching.py or benchmark_serving.py, or the medians of several results, with
simulations of the same clients, with the means of TTFT and TPOT. Output: tables, then one JSON object on the last line.
"""

from speculative.cli.program import exit_on, prepare_output

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from speculative import batch_decoder
from speculative.bench import saved_result
from speculative.bench.capacity import measuring
from speculative.bench.capacity.cluster import ROUTINGS
from speculative.bench.capacity.costs import Costs, median
from speculative.bench.capacity.planner import Goals, Plan, Planner, break_even_point
from speculative.bench.capacity.replica import Settings
from speculative.bench.capacity.sharing import ServerCosts
from speculative.bench.capacity.tables import checks_table, drafting_table, plans_table, sentences
from speculative.bench.capacity.workload import Lengths, Workload, lengths, read_trace
from speculative.bench.harness import BackgroundLoad, add_plot_argument, environment, output_file, write_outputs
from speculative.bench.load.arguments import numbers
from speculative.bench.load.batch_methods import CACHE_TOKENS, Prompts
from speculative.bench.prompts import read_prompts, token_ids
from speculative.bench.result import Drawn
from speculative.cli.arguments import (
    add_device_arguments,
    add_huge_pages_argument,
    add_prompt_arguments,
    model_specs,
    refuse_unusable,
)
from speculative.cli.number_types import decimal, positive_float, positive_int, seed_number, share, two_or_more
from speculative.cli.parser import Parser
from speculative.cli.properties import PROPERTY
from speculative.pair.engines import NATIVE
from speculative.serving.settings import Limits, Pair

NEW_TOKENS = 64  # by default
NUMBER_TOKENS = 16  # maximum length of the number before a prompt
SAME = ("main", "draft", "device", "draft_device", "properties")  # of costs whose medians count


def parse_arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    _add_costs_arguments(parser.add_argument_group("costs"))
    _add_workload_arguments(parser.add_argument_group("workload"))
    _add_goals_arguments(parser.add_argument_group("goals and settings"))
    parser.add_argument(
        "--seed", type=seed_number, default=0, metavar="N", help="seed of the random numbers (default: 0)"
    )
    parser.add_argument(
        "--against",
        type=load_result,
        nargs="+",
        metavar="FILE",
        help="compare with this result of a load benchmark (JSON); of several results, the medians",
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the JSON of the last line to FILE")
    parser.add_argument(
        "--csv", type=output_file, metavar="FILE", help="write the simulated numbers of replicas as CSV"
    )
    add_plot_argument(parser)
    parser.set_defaults(html=None)
    arguments = parser.parse_args()
    if bool(arguments.costs) == bool(arguments.main):
        parser.error("give either MAIN and perhaps DRAFT, to measure costs here, or --costs FILE")
    if arguments.rate is None and not arguments.trace and not arguments.against:
        parser.error("give a --rate in requests per second, a --trace, or a result to compare --against")
    if arguments.trace and (arguments.prompt_tokens or arguments.output_tokens):
        parser.error("--trace has the lengths: leave out --prompt-tokens and --output-tokens")
    measuring = ("device", "draft_device", "property", "prompts", "max_prompts", "huge_pages")
    given = {name: getattr(arguments, name) != parser.get_default(name) for name in (*measuring, "replicas", "think")}
    given["draft_device"] = arguments.draft_device != arguments.device  # the default
    if arguments.costs and (unused := [name for name in measuring if given[name]]):
        option = f"--{unused[0].replace('_', '-')}"
        parser.error(f"{option} is for measuring costs: leave it out with --costs, which were measured before")
    if given["replicas"] and not arguments.against:
        parser.error("--replicas is for --against: a plan finds the number of replicas itself")
    if given["think"] and not arguments.turns:
        parser.error("--think is the time between the --turns of a chat: give these, too")
    if arguments.turns and not arguments.cached:
        parser.error("--turns requires --cached, the share of a prompt that the request before had, too")
    return arguments


def _add_costs_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("main", type=Path, nargs="?", help="main model (IR folder), to measure costs here")
    group.add_argument("draft", type=Path, nargs="?", help="draft: a model or an EAGLE-3 head (IR folder)")
    group.add_argument(
        "--costs",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="costs written by --save-costs, instead of models; of several files, the medians",
    )
    group.add_argument(
        "--server",
        type=server_costs,
        metavar="FILE",
        help="a result of benchmark_serving.py (JSON): replicas share their cores with HTTP, proxies and clients as "
        "there (default: these have their own)",
    )
    group.add_argument("--save-costs", type=output_file, metavar="FILE", help="write the costs to FILE")
    add_device_arguments(group)
    group.add_argument("--property", **PROPERTY, help="OpenVINO property for both models (repeatable)")
    add_huge_pages_argument(group)
    add_prompt_arguments(group, max_prompts=20)
    group.add_argument(
        "--max-new-tokens",
        type=two_or_more,
        metavar="N",
        help="new tokens per measured text and, unless --output-tokens is given, per answer (default: 64; of --costs: "
        "as measured)",
    )
    group.add_argument(
        "--acceptance",
        type=share,
        metavar="A",
        help="probability that a draft token is accepted, independently (default: as measured)",
    )


def _add_workload_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--rate",
        type=rates,
        metavar="R",
        help="requests per second, one or several: 5 or 5,20,100 (default: the trace's)",
    )
    group.add_argument("--trace", type=trace, metavar="FILE", help="requests with arrivals and lengths")
    group.add_argument(
        "--prompt-tokens", type=token_lengths, metavar="N", help="prompt lengths (default: those of the prompts)"
    )
    group.add_argument(
        "--output-tokens", type=token_lengths, metavar="N", help="answer lengths (default: --max-new-tokens)"
    )
    group.add_argument(
        "--cached",
        type=share,
        default=0.0,
        metavar="S",
        help="share of a prompt that repeats an earlier request, from 0 to 1 (default: 0)",
    )
    group.add_argument(
        "--turns",
        type=positive_int,
        metavar="N",
        help="turns of a chat; each prompt begins with the previous one (default: all prompts have the same beginning)",
    )
    group.add_argument(
        "--think", type=positive_float, default=30.0, metavar="S", help="seconds between turns (default: 30)"
    )
    group.add_argument(
        "--requests",
        type=positive_int,
        default=300,
        metavar="N",
        help="simulated requests per number of replicas, at least 50 per replica and as many as arrive in "
        "16 TTFT goals, up to 5,000 (default: 300)",
    )


def _add_goals_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--ttft-goal", type=positive_float, default=1.0, metavar="S", help="goal for TTFT, in seconds (default: 1)"
    )
    group.add_argument(
        "--tpot-goal", type=positive_float, default=0.1, metavar="S", help="goal for TPOT, in seconds (default: 0.1)"
    )
    group.add_argument(
        "--percentile",
        type=percentile,
        default=95.0,
        metavar="P",
        help="percentile of the requests for both goals (default: 95)",
    )
    group.add_argument(
        "--max-num-seqs",
        type=numbers,
        default=str(Limits.max_num_seqs),
        metavar="N",
        help="maximum batch sizes to compare, 8,16,32 (default: %(default)s)",
    )
    group.add_argument(
        "--max-queue",
        type=positive_int,
        default=Limits.max_queue,
        metavar="N",
        help="maximum queue length per replica (default: %(default)s)",
    )
    group.add_argument(
        "--cache-tokens",
        type=positive_int,
        default=Pair.cache_tokens,
        metavar="N",
        help="KV-cache size per replica, in tokens (default: %(default)s)",
    )
    group.add_argument(
        "--routing",
        choices=ROUTINGS,
        default=ROUTINGS[0],
        help="the less loaded of two random replicas, or the one with the longest cached prefix (default: balanced)",
    )
    group.add_argument(
        "--replicas", type=positive_int, metavar="N", help="replicas of the server in --against (default: its own)"
    )


# ---- types of arguments ---------------------------------------------------------------------------------------------


percentile = decimal(lambda value: 0 < value < 100, "above 0 and below 100")


def rates(text: str) -> list[float]:
    return [positive_float(part) for part in text.split(",")]


def token_lengths(text: str) -> Lengths:
    try:
        return lengths(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def trace(text: str) -> tuple[str, list]:
    try:
        return text, read_trace(Path(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def load_result(text: str) -> Drawn:
    try:
        result = saved_result.read(Path(text))
    except (OSError, ValueError):
        result = {}
    if "rows" not in result:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a result of a load benchmark: give a file written by its --json"
        )
    return result


def server_costs(text: str) -> ServerCosts:
    try:
        return ServerCosts.of(load_result(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


# ---- costs ----------------------------------------------------------------------------------------------------------


class NumberedPrompts(Sequence[np.ndarray]):
    """Prompts with a number before each, so that none is served from a cache, without end."""

    def __init__(self, main: Path, texts: list[str]):
        self._prompts, self._number = Prompts(main, texts), len(texts)

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, number):
        return self._prompts[number]


def measured_costs(arguments: argparse.Namespace) -> tuple[Costs, Drawn]:
    """The costs on this machine, and the environment."""
    tokens = arguments.max_new_tokens or NEW_TOKENS
    with exit_on(ValueError, status=2):
        prompts = read_prompts(arguments.prompts, arguments.max_prompts)
        token_ids(prompts, arguments.main, tokens + NUMBER_TOKENS)
    with exit_on(RuntimeError, ValueError):
        decoder = batch_decoder.load(
            *model_specs(arguments), cache_tokens=CACHE_TOKENS, use_huge_pages=arguments.huge_pages
        )
        with BackgroundLoad() as load:
            numbered = NumberedPrompts(arguments.main, [prompt.text for prompt in prompts])
            costs = measuring.measure(decoder, numbered, tokens)
    if load.sentence:
        print(f"note: {load.sentence}", file=sys.stderr)
    return costs, {**environment(arguments, load), "max_new_tokens": tokens, "context": decoder.main.context}


def costs_of(arguments: argparse.Namespace) -> tuple[Costs, Drawn]:
    """The costs, measured or read, and the environment of their measurement."""
    if arguments.main:
        refuse_unusable(arguments, NATIVE)
        costs, facts = measured_costs(arguments)
    else:
        with exit_on(ValueError, status=2):
            costs_read = [Costs.read(path) for path in arguments.costs]
            for path, (_, facts) in zip(arguments.costs, costs_read, strict=True):
                if other := [key for key in SAME if facts.get(key) != costs_read[0][1].get(key)]:
                    raise ValueError(
                        f"{path} has costs of another {other[0]} than {arguments.costs[0]}: give files of the same "
                        "models, devices and properties"
                    )
        costs, facts = median([costs for costs, _ in costs_read]), costs_read[0][1]
    if arguments.server:
        costs = dataclasses.replace(costs, server=arguments.server)
    if arguments.save_costs:
        with exit_on(OSError):
            costs.save(arguments.save_costs, facts)
    return costs, facts


# ---- the program ----------------------------------------------------------------------------------------------------


def workload_of(arguments: argparse.Namespace, costs: Costs, measured: Drawn) -> Workload:
    """Raises ValueError if the acceptance of the draft is not known."""
    if costs.draft and costs.acceptance is None and arguments.acceptance is None:
        raise ValueError(
            "no draft was verified while costs were measured: give more --max-new-tokens, shorter prompts, or "
            "--acceptance"
        )
    return Workload(
        arguments.prompt_tokens or costs.prompt_tokens or lengths("128"),
        arguments.output_tokens or lengths(str(arguments.max_new_tokens or measured.get("max_new_tokens", NEW_TOKENS))),
        costs.drafts if arguments.acceptance is None else arguments.acceptance,
        arguments.trace[1] if arguments.trace else (),
        arguments.cached,
        arguments.turns or 0,
        arguments.think,
    )


def plans_of(arguments: argparse.Namespace, planner: Planner, all_settings: list[Settings]) -> list[Plan]:
    if arguments.rate is None and not arguments.trace:
        return []
    rates = arguments.rate or [planner.workload.trace_rate]
    return [planner.plan(rate, settings) for rate in rates for settings in all_settings]


def refuse_other_loads(loads: list[Drawn], measured: Drawn, replicas: int | None) -> int:
    """The number of replicas of the servers in load benchmarks. Raises ValueError if it is not `replicas`, or if the
    models are not those whose costs were `measured`."""
    for load in loads:
        facts = load.get("environment", {})
        for name in ("main", "draft"):
            of_costs, of_load = (str(one.get(name) or "") for one in (measured, facts))
            if of_costs and of_load and Path(of_costs).parts[-2:] != Path(of_load).parts[-2:]:  # wherever they were
                raise ValueError(f"the costs are those of {of_costs}, but the load was measured with {of_load}")
    found, *others = {load.get("environment", {}).get("replicas", 1) for load in loads}
    if others:
        raise ValueError("the loads were measured with different numbers of replicas: compare them one by one")
    if replicas not in (None, found):
        raise ValueError(f"--replicas is {replicas}, but the load was measured with {found}: omit it")
    return found


def result_of(
    arguments: argparse.Namespace, planner: Planner, plans: list[Plan], drafting: list, checks: list, measured: Drawn
) -> dict:
    """The program's result, as written in JSON."""
    workload, goals = planner.workload, planner.goals
    even = break_even_point(drafting, workload.mean_output(planner.seed)) if drafting else None
    return {
        "program": "plan_capacity",
        "summary": sentences(plans, drafting, even, checks, goals),
        "environment": {**environment(argparse.Namespace()), "measured": measured},
        "workload": {
            "arrivals": arguments.trace[0] if arguments.trace else "Poisson",
            "prompt_tokens": _shown(arguments.prompt_tokens, arguments.trace, "as measured"),
            "output_tokens": _shown(workload.output, arguments.trace, ""),
            "acceptance": planner.costs.draft and (
                workload.acceptance if isinstance(workload.acceptance, float) else planner.costs.acceptance
            ),
            "cached": workload.cached,
            "turns": workload.turns,
            "think": workload.think,
            "routing": planner.routing,
            "requests": planner.count,
            "seed": planner.seed,
        },
        "goals": {"ttft": goals.ttft, "tpot": goals.tpot, "percentile": goals.percentile},
        "plans": [
            {
                "rate": plan.rate,
                "with_draft": plan.settings.with_draft,
                "max_num_seqs": plan.settings.max_num_seqs,
                "replicas": plan.choice and plan.choice["replicas"],
                "why_not": plan.why_not,
            }
            for plan in plans
        ],
        "rows": [row for plan in plans for row in plan.rows],
        "drafting": drafting,
        "checks": checks,
    }  # fmt: skip


def _shown(lengths: Lengths | None, trace: object, default: str) -> str:
    return "as in the trace" if trace else lengths.text if lengths else default


def main() -> int:
    prepare_output()
    arguments = parse_arguments()
    with exit_on():
        costs, measured = costs_of(arguments)
        goals = Goals(arguments.ttft_goal, arguments.tpot_goal, arguments.percentile)
        with exit_on(ValueError, status=2):
            workload = workload_of(arguments, costs, measured)
        if context := measured.get("context"):  # not in files of the Python API
            with exit_on(ValueError, status=2):
                workload.check(context)
        planner = Planner(costs, workload, goals, arguments.routing, arguments.requests, arguments.seed)
        all_settings = [
            Settings(with_draft, n, arguments.max_queue, arguments.cache_tokens)
            for n in arguments.max_num_seqs
            for with_draft in ([False, True] if costs.draft else [False])
        ]
        plans = plans_of(arguments, planner, all_settings)
        drafting = planner.drafting(all_settings[-1]) if costs.draft and plans else []
        with exit_on(ValueError, status=2):
            checks = []
            if arguments.against:
                replicas = refuse_other_loads(arguments.against, measured, arguments.replicas)
                checks = planner.compare_with(arguments.against, all_settings[-1], replicas)
    result = result_of(arguments, planner, plans, drafting, checks, measured)
    shown = [plans_table(plans, goals), drafting_table(drafting), checks_table(checks), "\n".join(result["summary"])]
    write_outputs(arguments, result, "\n\n".join(filter(None, shown)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
