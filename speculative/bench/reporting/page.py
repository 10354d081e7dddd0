"""Report output for a result: HTML page, CSV table and PNG plot."""

import csv
import io
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

from speculative.atomic_write import atomic_write
from speculative.bench.load.charts import load_charts, loads
from speculative.bench.reporting.charts import acceptance, candidates, iteration, speedup, speedup_points
from speculative.bench.reporting.markup import Markup, tag
from speculative.bench.reporting.svg import PATTERNS
from speculative.bench.reporting.tables import categories, devices, environment, recommendation, tables, tokens
from speculative.bench.result import Drawn

STYLE = Path(__file__).with_name("report.css")
TITLES = {
    "benchmark": "Speedup of speculative decoding",
    "sweep_draft_length": "Speedup by draft length",
    "device_swap": "Devices for main model and draft",
    "tune": "Recommended settings",
    "benchmark_serving": "Speedup of speculative decoding under load",
    "benchmark_batching": "Batched generation",
    "compare_sources": "Sources of draft tokens",
}
INDENT = "    "  # marks a sentence as a line of code
ALLOWED = "default-src 'none'; style-src 'unsafe-inline'"  # no external resources, no scripts


# ---- the page -------------------------------------------------------------------------------------------------------


def html_text(result: Drawn) -> str:
    """The HTML page: summary, charts, tables, environment; a part is left out if `result` has no data for it."""
    program: str = result["program"]
    title = TITLES.get(program, program)
    charts = [chart for chart in (f(result) for f in (speedup, acceptance, iteration, candidates)) if chart]
    charts += load_charts(result)
    parts = [summary(result, title), devices(result), tag("div", *charts, class_="pair") if charts else ""]
    parts += [f(result) for f in (categories, tokens, recommendation, tables, environment)]
    head = [
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{ALLOWED}">'),
        tag("title", title),
        tag("style", Markup(STYLE.read_text(encoding="utf-8"))),
    ]
    page = tag("html", tag("head", *head), tag("body", PATTERNS, tag("main", *parts)), lang="en")
    return f"<!DOCTYPE html>\n{page}\n"


def commands_apart(sentences: list[str]) -> Iterator[str]:
    """Yield the sentences, with a command at the end of one moved to its own indented line."""
    for sentence in sentences:
        words, separator, command = sentence.partition(": python ")
        yield words + ":" if separator else sentence
        if separator:
            yield f"{INDENT}python {command}"


def summary(result: Drawn, title: str) -> Markup:
    """The summary sentences, the first one large; indented ones are code."""
    facts = result.get("environment", {})
    models = [str(facts[key]) for key in ("main", "draft") if facts.get(key)]
    first, *others = result["summary"] or ["Nothing was measured."]
    content = [tag("h1", f"{title}: {' with '.join(models)}" if models else title), tag("p", first, class_="answer")]
    for is_code, lines in groupby(commands_apart(others), key=lambda line: line.startswith(INDENT)):
        if is_code:
            content.append(tag("pre", tag("code", "\n".join(line.removeprefix(INDENT) for line in lines)), tabindex=0))
        else:
            content += [tag("p", line) for line in lines]
    return tag("header", *content, id="summary", class_="card")


# ---- CSV ------------------------------------------------------------------------------------------------------------


def csv_text(result: Drawn) -> str:
    """The main table of a result: draft lengths, candidates, methods, or device cells."""
    rows = result.get("sweep") or result.get("candidates") or result.get("rows")
    rows = rows or result.get("matrix", {}).get("cells", [])
    flat = [dict(flatten(row)) for row in rows]
    written = io.StringIO(newline="")
    writer = csv.DictWriter(written, list(dict.fromkeys(key for row in flat for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return written.getvalue()


def flatten(row: Drawn, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield (column, value): nested keys become settings.K; lists are joined by spaces."""
    for key, value in row.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            yield prefix + key, " ".join(map(str, value))
        elif isinstance(value, str) and value.startswith(("=", "+", "-", "@")):
            yield prefix + key, "'" + value  # a spreadsheet would evaluate it
        else:
            yield prefix + key, value


# ---- PNG ------------------------------------------------------------------------------------------------------------


def png(result: Drawn) -> bytes:
    """The plot of a result. Raises ValueError if it has nothing to plot. Matplotlib is imported only here."""
    if result["program"] == "plan_capacity":
        from speculative.bench.capacity import plot as capacity_plot

        return capacity_plot.png(result)
    if loads(result):
        from speculative.bench.load import plot as load_plot

        return load_plot.png(loads(result))
    from speculative.bench.reporting import plot

    return plot.png(speedup_points(result))


# ---- files ----------------------------------------------------------------------------------------------------------


def draw(result: Drawn, path: Path) -> None:
    """Write a file in the format that its name ends in. Raises OSError, and ValueError without anything to plot."""
    contents: dict[str, Callable[[Drawn], str | bytes]] = {".html": html_text, ".csv": csv_text, ".png": png}
    atomic_write(path, contents[path.suffix](result))
