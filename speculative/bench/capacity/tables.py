"""Tables and sentences of a plan."""

from collections.abc import Sequence

from speculative.bench.capacity.planner import ALONE, DRAFT, MIN_SPEEDUP, Goals, Plan
from speculative.bench.load.metrics import counted
from speculative.bench.result import CapacityCheck, LoadRow

COMPARED = ("throughput", "ttft", "tpot")


def plans_table(plans: Sequence[Plan], goals: Goals) -> str:
    """Every number of replicas that was simulated; "*" marks the smallest one that meets the goals."""
    p = f"p{goals.percentile:g}"
    rows = [(plan, row) for plan in plans for row in plan.rows]
    return _table(
        {
            "requests/s": [f"{row['rate']:g}" for _, row in rows],
            "draft": ["yes" if row["with_draft"] else "no" for _, row in rows],
            "max batch": [str(row["max_num_seqs"]) for _, row in rows],
            "replicas": [f"{row['replicas']}{'*' * (row is plan.choice)}" for plan, row in rows],
            f"TTFT, ms ({p})": [_both(row["ttft"], row["ttft_percentile"]) for _, row in rows],
            f"TPOT, ms ({p})": [_both(row["tpot"], row["tpot_percentile"]) for _, row in rows],
            "tokens/s": [f"{row['throughput']:.0f}" for _, row in rows],
            "busy": [f"{row['utilisation']:.0%}" for _, row in rows],
            "batch": [f"{row['batch']:.1f}" for _, row in rows],
            "drafted": [f"{row['mean_draft_length']:.2f}" for _, row in rows],
            "cached": [f"{row['cached']:.0%}" for _, row in rows],
            "refused": [f"{row['refused']}/{row['requests']}" for _, row in rows],
            "goals": ["met" if row["holds"] else "missed" for _, row in rows],
        }
    )


def drafting_table(rows: Sequence[LoadRow]) -> str:
    """Throughput of a replica with and without a draft, by number of clients."""
    alone = {row["clients"]: row for row in rows if row["method"] == ALONE}
    drafted = [row for row in rows if row["method"] == DRAFT]
    return _table(
        {
            "clients of a replica": [str(row["clients"]) for row in drafted],
            "tokens/s without draft": [f"{alone[row['clients']]['throughput']:.1f}" for row in drafted],
            "with draft": [f"{row['throughput']:.1f}" for row in drafted],
            "speedup": [f"{row['speedup']:.2f}x" for row in drafted],
            "drafted": [f"{row['mean_draft_length'] or 0:.2f}" for row in drafted],
        }
    )


def checks_table(checks: Sequence[CapacityCheck]) -> str:
    """Measured and simulated figures, with the error of the simulation."""
    return _table(
        {
            "method": [one["method"] for one in checks],
            "clients": [str(one["clients"]) for one in checks],
            "tokens/s measured": [f"{one['throughput']:.1f}" for one in checks],
            "simulated": [_error(one, "throughput", 1) for one in checks],
            "mean TTFT, ms measured": [_ms(one["ttft"]) for one in checks],
            "simulated ": [_error(one, "ttft", 1000) for one in checks],
            "mean TPOT, ms measured": [_ms(one["tpot"]) for one in checks],
            "simulated  ": [_error(one, "tpot", 1000) for one in checks],
        }
    )


def sentences(
    plans: Sequence[Plan], drafting: Sequence[LoadRow], even: tuple[int, float] | None, checks: Sequence[CapacityCheck],
    goals: Goals,
) -> list[str]:  # fmt: skip
    """The result in sentences; `even` as of `break_even_point`."""
    p = f"p{goals.percentile:g}"
    lines = []
    for rate in dict.fromkeys(plan.rate for plan in plans):
        plans_of_rate = [plan for plan in plans if plan.rate == rate]
        descriptions = "; ".join(_of_plan(plan, p) for plan in plans_of_rate)
        lines.append(f"{rate:g} requests/s at {p} TTFT {goals.ttft:g} s and TPOT {goals.tpot:g} s: {descriptions}.")
        if best := min((one for one in plans_of_rate if one.choice), key=_order, default=None):
            lines.append(f"Smallest for {rate:g} requests/s: {_of_plan(best, p)}.")
    if drafting:
        if even:
            clients, rate = even
            what = "Drafting does not help a replica" if clients == 1 else "Drafting no longer helps a replica"
            lines.append(
                f"{what} from {counted(clients, 'concurrent request')} on, about {rate:.3g} requests/s: its speedup is "
                f"below {MIN_SPEEDUP:g}x there."
            )
        else:
            max_clients = max(row["clients"] for row in drafting)
            lines.append(f"Drafting helps a replica at every load up to {counted(max_clients, 'concurrent request')}.")
    if checks:
        errors = {key: [abs(value) for one in checks if (value := error_of(one, key)) is not None] for key in COMPARED}
        labels = zip(("throughput", "TTFT", "TPOT"), errors.values(), strict=True)
        errors_text = ", ".join(f"{name} {sum(of) / len(of):.0%} (at most {max(of):.0%})" for name, of in labels if of)
        lines.append(f"Mean error of the simulation against the measurement: {errors_text}.")
    return lines


def error_of(check: CapacityCheck, key: str) -> float | None:
    """Simulated / measured - 1."""
    measured, simulated = check[key], check[f"{key}_simulated"]  # type: ignore[literal-required]
    return simulated / measured - 1 if measured and simulated else None


def _order(plan: Plan) -> tuple:
    choice = plan.choice
    assert choice
    return choice["replicas"], choice["with_draft"], choice["ttft_percentile"]


def _of_plan(plan: Plan, p: str) -> str:
    draft = "with the draft" if plan.settings.with_draft else "without a draft"
    labels = f"{draft}, --max-num-seqs {plan.settings.max_num_seqs}"
    if not plan.choice:
        return f"{labels}: no number of replicas, as {plan.why_not}"
    row = plan.choice
    return (
        f"{labels}: {counted(row['replicas'], 'replica')} ({p} TTFT {_ms(row['ttft_percentile'])} ms, TPOT "
        f"{_ms(row['tpot_percentile'])} ms, {row['utilisation']:.0%} busy)"
    )


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "refused"
    return f"{1000 * seconds:.0f}" if seconds >= 1 else f"{1000 * seconds:.4g}"


def _both(median: float | None, high: float | None) -> str:
    return f"{_ms(median)} ({_ms(high)})"


def _error(check: CapacityCheck, key: str, unit: float) -> str:
    error = error_of(check, key)
    simulated = check[f"{key}_simulated"]  # type: ignore[literal-required]
    return "" if error is None else f"{unit * simulated:.1f} ({error:+.0%})"


def _table(columns: dict[str, list[str]]) -> str:
    if not any(columns.values()):
        return ""
    widths = [max(map(len, [name, *column])) for name, column in columns.items()]
    lines = zip(*([name.strip(), *column] for name, column in columns.items()), strict=True)
    return "\n".join("   ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)) for line in lines)
