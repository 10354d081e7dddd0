"""Charts of load benchmarks for the HTML report: one line per method over the number of clients."""

from speculative.bench.reporting.markup import Markup, tag
from speculative.bench.reporting.svg import Axis, Plot, axis, colour, legend, shape, swatch
from speculative.bench.reporting.tables import finite, how, section
from speculative.bench.result import Drawn

PANELS = {  # key of a row: its range, heading, axis title, factor from the row's unit, explanation
    "throughput": (
        *("throughputs", "Throughput under load", "throughput (tokens/s)", 1),
        "New tokens per second of all clients together; bars show the range over the rounds.",
    ),
    "ttft": (
        *("ttft_range", "Time to first token", "TTFT (ms)", 1000),
        "Medians; bars cover 90 % of the requests.",
    ),
    "tpot": (
        *("tpot_range", "Time per output token", "TPOT (ms)", 1000),
        "Medians; bars cover 90 % of the requests.",
    ),
    "mean_draft_length": (
        *(None, "Draft length", "draft tokens", 1),
        "Draft tokens of a text per main-model forward pass.",
    ),
}


def loads(result: Drawn) -> list[Drawn]:
    """The rows measured with a number of clients."""
    return [row for row in result.get("rows", []) if "clients" in row]


def load_charts(result: Drawn) -> list[Markup]:
    rows = loads(result)
    return [chart for key in PANELS if (chart := _chart(key, rows))] if rows else []


def _chart(key: str, rows: list[Drawn]) -> Markup | None:
    spread, heading, title, unit, words = PANELS[key]
    measured = [row for row in rows if finite(row[key])]
    if not measured:
        return None
    clients = sorted({row["clients"] for row in rows})
    methods = list(dict.fromkeys(row["method"] for row in rows))
    x = Axis(
        f"{rows[0]['counted']}s at once", -0.4, len(clients) - 0.6, list(range(len(clients))), list(map(str, clients))
    )
    highest = max(unit * value for row in measured for value in [row[key], *(row[spread] if spread else [])])
    description = "; ".join(f"{row['name']}: {unit * row[key]:.4g}" for row in measured)
    plot = Plot(heading, description, x, axis(title, 0, highest or 1))
    entries = []
    for i, method in enumerate(methods):
        offset = 0.1 * (i - (len(methods) - 1) / 2)  # keeps the ranges of two methods apart
        line = [(clients.index(row["clients"]) + offset, row) for row in measured if row["method"] == method]
        if not line:
            continue
        plot.line([(position, unit * row[key]) for position, row in line], colour(i))
        for position, row in line:
            if spread:
                plot.spread(position, unit * min(row[spread]), unit * max(row[spread]), colour(i))
            plot.marker(position, unit * row[key], shape(i), colour(i), f"{row['name']}: {unit * row[key]:.4g}")
        entries.append((method, swatch(colour(i), shape(i))))
    return section(f"load-{key}", heading, how(words), tag("figure", plot.svg(), legend(entries)))
