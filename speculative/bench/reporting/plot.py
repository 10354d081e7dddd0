"""PNG plot of speedup against draft length, with matplotlib: `python scripts/report.py result.json speedup.png`."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from speculative.bench.result import Drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE, DOTS = (7.2, 3.9), 160  # inches, dots per inch
COLOURS, MARKERS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"), "os^Dv"  # Okabe and Ito


def png(points: Sequence[Drawn]) -> bytes:
    """One panel per temperature: measured with the range over the rounds, predicted dashed, the best K as a star.

    Raises ValueError if there are no points.
    """
    if not points:
        raise ValueError(
            "the result has no speedup by draft length: give one of sweep_draft_length.py, or benchmark.py with a draft"
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    temperatures = list(dict.fromkeys(point["temperature"] for point in points))
    figure = Figure(figsize=(SIZE[0], SIZE[1]) if len(temperatures) < 3 else (1.4 * SIZE[0], SIZE[1]), dpi=DOTS)
    panels = figure.subplots(1, len(temperatures), sharey=True, squeeze=False)[0]
    highest = max(
        value
        for point in points
        for value in (1, point["speedup"], point.get("predicted") or 0, *(point.get("speedup_range") or []))
    )
    engines = list(dict.fromkeys(point["engine"] for point in points))
    for panel, t in zip(panels, temperatures, strict=True):
        panel.axhline(1, color="0.4", linewidth=1)
        for i, engine in enumerate(engines):
            line = [p for p in points if (p["temperature"], p["engine"]) == (t, engine)]
            if line:
                draw_engine(panel, engine, sorted(line, key=lambda p: p["k"]), i, 0.14 * (i - (len(engines) - 1) / 2))
        panel.set(
            title=f"temperature {t:g}" if t else "greedy", xlabel="draft length K (tokens)", ylim=(0, 1.12 * highest)
        )
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.grid(axis="y", color="0.88")
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("speedup over the main model alone (x)")
    panels[0].legend(frameon=False, fontsize="small")
    figure.tight_layout()
    written = io.BytesIO()
    FigureCanvasAgg(figure).print_png(written)
    return written.getvalue()


def draw_engine(panel: "Axes", engine: str, line: Sequence[Drawn], i: int, offset: float) -> None:
    """Draw one engine's line; `offset` is an x offset that keeps the ranges of two engines apart."""
    colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
    k, speedup = [p["k"] + offset for p in line], [p["speedup"] for p in line]
    ranges = [p.get("speedup_range") or [p["speedup"]] * 2 for p in line]
    reach = [[s - low for s, (low, _) in zip(speedup, ranges, strict=True)],
             [high - s for s, (_, high) in zip(speedup, ranges, strict=True)]]  # fmt: skip
    panel.errorbar(
        k, speedup, reach, color=colour, marker=marker, capsize=2.5, elinewidth=1, label=f"{engine}, measured"
    )
    predicted = [(p["k"] + offset, p["predicted"]) for p in line if p.get("predicted") is not None]
    if predicted:
        panel.plot(
            *zip(*predicted, strict=True), color=colour, linestyle="--", linewidth=1.3, label=f"{engine}, predicted"
        )
    for at, p, (_, high) in zip(k, line, ranges, strict=True):
        if p.get("best"):
            panel.plot(at, p["speedup"], marker="*", markersize=15, color=colour)
            panel.annotate(f"{p['speedup']:.2f}x", (at, high), (0, 5), textcoords="offset points", ha="center")
