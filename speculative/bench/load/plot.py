"""PNG plot of throughput, TTFT, TPOT and draft length by number of clients, with matplotlib:
`python scripts/report.py result.json load.png`, for results of benchmark_serving.py and benchmark_batching.py.
"""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from speculative.bench.reporting.plot import COLOURS, DOTS, MARKERS
from speculative.bench.result import Drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = (9.6, 6.6)  # inches
PANELS = [  # key of a row, its range, axis title, factor from the row's unit
    ("throughput", "throughputs", "throughput (tokens/s)", 1),
    ("ttft", "ttft_range", "TTFT (ms)", 1000),
    ("tpot", "tpot_range", "TPOT (ms)", 1000),
    ("mean_draft_length", None, "draft tokens per forward pass", 1),
]


def png(rows: Sequence[Drawn]) -> bytes:
    """One panel per metric, one line per method."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, dpi=DOTS)
    panels = figure.subplots(2, 2)
    methods = list(dict.fromkeys(row["method"] for row in rows))
    clients = sorted({row["clients"] for row in rows})
    for panel, (key, spread, title, unit) in zip(panels.flat, PANELS, strict=True):
        for i, method in enumerate(methods):
            line = [row for row in rows if row["method"] == method and row[key] is not None]
            if line:
                _draw(panel, method, line, i, key, spread, unit)
        panel.set_xscale("log", base=2)
        panel.set_xticks(clients, [str(n) for n in clients])
        panel.set_xticks([], minor=True)
        panel.set(xlabel=f"concurrent {rows[0]['counted']}s", ylabel=title)
        panel.set_ylim(bottom=0)
        panel.grid(axis="y", color="0.88")
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    panels.flat[0].legend(frameon=False, fontsize="small")
    figure.tight_layout()
    written = io.BytesIO()
    FigureCanvasAgg(figure).print_png(written)
    return written.getvalue()


def _draw(panel: "Axes", method: str, line: list[Drawn], i: int, key: str, spread: str | None, unit: float) -> None:
    x, y = [row["clients"] for row in line], [unit * row[key] for row in line]
    reach = None
    if spread:
        low = [unit * (row[key] - min(row[spread])) for row in line]
        high = [unit * (max(row[spread]) - row[key]) for row in line]
        reach = [low, high]
    colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
    panel.errorbar(x, y, reach, label=method, color=colour, marker=marker, capsize=2.5, elinewidth=1)
