"""PNG plot of a plan, with matplotlib: TTFT and TPOT by number of replicas, simulated and measured throughput by number
of clients."""

import io
from typing import TYPE_CHECKING

from speculative.bench.reporting.plot import COLOURS, DOTS, MARKERS
from speculative.bench.result import Drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = (4.6, 3.4)  # inches of a panel


def png(result: Drawn) -> bytes:
    """The panels for which the result has data. Raises ValueError if there are none."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = []
    if result["rows"]:
        drawn += [lambda panel: _goal(panel, result, "ttft"), lambda panel: _goal(panel, result, "tpot")]
    if result["drafting"]:
        drawn.append(lambda panel: _drafting(panel, result))
    if result["checks"]:
        drawn.append(lambda panel: _checks(panel, result))
    if not drawn:
        raise ValueError("there is no plan to plot: no number of replicas meets the goals, or no --rate was given")
    figure = Figure(figsize=(SIZE[0] * len(drawn), SIZE[1]), dpi=DOTS)
    for panel, draw in zip(figure.subplots(1, len(drawn), squeeze=False)[0], drawn, strict=True):
        draw(panel)
        panel.grid(axis="y", color="0.88")
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, fontsize="small")
    figure.tight_layout()
    written = io.BytesIO()
    FigureCanvasAgg(figure).print_png(written)
    return written.getvalue()


def _goal(panel: "Axes", result: Drawn, key: str) -> None:
    """A percentile by number of replicas, for each rate and setting, and the goal."""
    several = len({row["max_num_seqs"] for row in result["rows"]}) > 1
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in result["rows"]:
        seconds = row["ttft_percentile"] if key == "ttft" else row["tpot_percentile"]
        name = f"{row['rate']:g}/s, {'with' if row['with_draft'] else 'without'} draft"
        name += f", batch {row['max_num_seqs']}" if several else ""
        if seconds is not None:
            lines.setdefault(name, []).append((row["replicas"], 1000 * seconds))
    for i, (name, points) in enumerate(lines.items()):
        panel.plot(
            *zip(*points, strict=True), label=name, color=COLOURS[i % len(COLOURS)], marker=MARKERS[i % len(MARKERS)]
        )
    goal = 1000 * (result["goals"]["ttft"] if key == "ttft" else result["goals"]["tpot"])
    panel.axhline(goal, color="0.4", linewidth=1, linestyle="--", label="goal")
    panel.set(
        xlabel="replicas", ylabel=f"p{result['goals']['percentile']:g} {key.upper()} (ms)", xscale="log", yscale="log"
    )
    counts = sorted({row["replicas"] for row in result["rows"]})
    panel.set_xticks(counts, [str(n) for n in counts])
    panel.set_xticks([], minor=True)


def _drafting(panel: "Axes", result: Drawn) -> None:
    """Throughput of a replica by number of clients."""
    for i, method in enumerate(dict.fromkeys(row["method"] for row in result["drafting"])):
        points = [(row["clients"], row["throughput"]) for row in result["drafting"] if row["method"] == method]
        panel.plot(*zip(*points, strict=True), label=method, color=COLOURS[i], marker=MARKERS[i])
    _clients(panel, sorted({row["clients"] for row in result["drafting"]}), "throughput, simulated (tokens/s)")


def _checks(panel: "Axes", result: Drawn) -> None:
    """Measured throughput as lines, simulated as dashed ones."""
    for i, method in enumerate(dict.fromkeys(check["method"] for check in result["checks"])):
        checks = [check for check in result["checks"] if check["method"] == method]
        clients = [check["clients"] for check in checks]
        panel.plot(
            clients,
            [one["throughput"] for one in checks],
            label=f"{method}, measured",
            color=COLOURS[i],
            marker=MARKERS[i],
        )
        simulated = [one["throughput_simulated"] for one in checks]
        panel.plot(
            clients, simulated, label="simulated", color=COLOURS[i], linestyle="--", marker=MARKERS[i], fillstyle="none"
        )
    _clients(panel, sorted({check["clients"] for check in result["checks"]}), "throughput (tokens/s)")


def _clients(panel: "Axes", counts: list[int], title: str) -> None:
    panel.set_xscale("log", base=2)
    panel.set_xticks(counts, [str(n) for n in counts])
    panel.set_xticks([], minor=True)
    panel.set(xlabel="clients", ylabel=title)
    panel.set_ylim(bottom=0)
