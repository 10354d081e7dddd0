"""Draw what the scripts measured: one page with pictures for a browser, a table for spreadsheets, a plot.

    python scripts/benchmark.py models/embedded/main models/embedded/draft --json result.json
    python scripts/report.py result.json page.html
    python scripts/report.py result.json rows.csv speedup.png

RESULT is what `--json FILE` wrote, or the saved output of a script: its last line counts. The ending of each file
decides what is drawn: .html is one page that holds all it shows and loads nothing; .csv is the main table; .png is the
plot of speedup against draft length. The scripts' own `--html` and `--csv` write the same.
"""

import argparse
import csv
import io
import json
import math
import sys
from pathlib import Path

from markup import Markup, join, tag
from svg_charts import (
    COLOURS,
    PATTERNS,
    SERIES_MARKERS,
    Axis,
    Plot,
    axis,
    legend,
    part_swatch,
    stacked_bars,
    swatch,
    whole_axis,
)  # fmt: skip
from whole_file import write_whole

STYLE = Path(__file__).with_name("report.css")
TITLES = {
    "benchmark": "What the draft gains",
    "sweep_draft_length": "Speedup against draft length",
    "device_swap": "Devices for main model and draft",
    "tune": "The fastest settings",
}
LINE_BREAK = "\u21b5"  # shown where a token is one

# Columns of the tables: key -> (heading, how a value is written). Only those that a result has are shown.
SHARE, TIMES, RATE, MILLISECONDS, PLAIN = "{:.2f}", "{:.2f}x", "{:.1f}", "{:.1f}", "{}"
COLUMNS = {
    "name": ("way", PLAIN),
    "category": ("category", PLAIN),
    "temperature": ("temperature", "{:g}"),
    "k": ("K", PLAIN),
    "engine": ("engine", PLAIN),
    "throughput": ("tokens/s", RATE),
    "speedup": ("speedup", TIMES),
    "speedup_range": ("range", TIMES),
    "spread": ("spread", SHARE),
    "predicted": ("predicted", TIMES),
    "forward_speedup": ("speedup in main inferences", TIMES),
    "acceptance_rate": ("acceptance rate", SHARE),
    "block_efficiency": ("block efficiency", SHARE),
    "mean_draft_length": ("mean draft length", SHARE),
    "ttft": ("TTFT (ms)", MILLISECONDS),
    "tpot": ("TPOT (ms)", MILLISECONDS),
    "draft_ms": ("draft (ms)", SHARE),
    "verify_ms": ("verify (ms)", SHARE),
    "overhead_ms": ("overhead (ms)", SHARE),
    "outside": ("outside the models", "{:.1%}"),
    "repetition": ("repetition", SHARE),
    "same_text": ("same text as alone", PLAIN),
    "agreement": ("agreement", "{:.1%}"),
    "mean_kl": ("mean KL (nats)", "{:.2g}"),
    "dropped_in_round": ("dropped in round", PLAIN),
    "prompts": ("prompts", PLAIN),
    "what": ("compared", PLAIN),
    "ratio": ("ratio", SHARE),
}


# ---- the page -------------------------------------------------------------------------------------------------------


def html_text(result: dict) -> str:
    """The page. A section stands there when `result` has what it shows."""
    title = TITLES.get(result["program"], result["program"])
    charts = [speedup(result), acceptance(result), iteration(result), candidates(result)]
    sections = [
        summary(result, title), recommendation(result),
        tag("div", join(filter(None, charts)), class_="pair") if any(charts) else "",
        devices(result), categories(result), tokens(result), tables(result), environment(result),
    ]  # fmt: skip
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"{tag('title', title)}\n<style>\n{STYLE.read_text(encoding='utf-8')}</style>\n</head>\n"
        f"<body>\n{PATTERNS}\n{tag('main', Markup(chr(10)), join(filter(None, sections)))}\n</body>\n</html>\n"
    )


def section(name: str, title: str, *content: object) -> Markup:
    return tag("section", tag("h2", title, id=f"{name}-title"), *content, id=name, class_="card",
               aria_labelledby=f"{name}-title")  # fmt: skip


def how(words: str) -> Markup:
    return tag("p", words, class_="how")


def summary(result: dict, title: str) -> Markup:
    facts = result.get("environment", {})
    about = [str(facts[key]) for key in ("main", "draft") if facts.get(key)]
    first, *others = result["summary"] or ["Nothing was measured."]
    return tag(
        "header", tag("h1", f"{title}: {' with '.join(about)}" if about else title),
        tag("p", first, class_="answer"), *(tag("p", sentence) for sentence in others), id="summary", class_="card",
    )  # fmt: skip


def recommendation(result: dict) -> Markup | str:
    """Tune's: short values as facts, commands and programs as code."""
    found = result.get("recommendation")
    if not found:
        return ""
    code = {key: value for key, value in found.items() if is_code(key, value)}
    facts = {key: value for key, value in found.items() if key not in code}
    blocks = [(tag("h3", words(key)), tag("pre", tag("code", value), tabindex=0)) for key, value in code.items()]
    return section("recommendation", "Recommendation", facts_table("What was chosen and why", facts),
                   *(part for block in blocks for part in block))  # fmt: skip


def is_code(key: str, value: object) -> bool:
    return isinstance(value, str) and (key in ("command", "python") or "\n" in value)


def environment(result: dict) -> Markup | str:
    facts = result.get("environment")
    if not facts:
        return ""
    return section("environment", "Environment", facts_table("Where and how this was measured", facts))


# ---- speedup against K ----------------------------------------------------------------------------------------------


def speedup(result: dict) -> Markup | str:
    """One panel for each temperature: measured with the range of the rounds, predicted dashed."""
    points = speedup_points(result)
    if not points:
        return ""
    others = [row for row in result.get("rows", []) if isinstance(row["draft_length"], str) and finite(row["speedup"])]
    values = [value for p in points for value in (p["speedup"], p.get("predicted"), *(p.get("speedup_range") or []))]
    values += [row["speedup"] for row in others]
    y = axis("speedup (x)", 0, max(1.2, *filter(finite, values)))
    x = whole_axis("draft length K (tokens)", [p["k"] for p in points])
    engines = list(dict.fromkeys([p["engine"] for p in points] + [row["engine"] for row in others]))
    temperatures = list(dict.fromkeys(p["temperature"] for p in points))
    panels = []
    for t in temperatures:
        of_t = [row for row in others if row.get("temperature", 0) == t]
        panels.append(speedup_panel(t, [p for p in points if p["temperature"] == t], of_t, engines, x, y))
    notes = "Over the same main model alone, in the same round; bars are the range of the rounds."
    if any(finite(p.get("predicted")) for p in points):
        notes += " Predicted: tau / (v(K) + K c), from measured acceptance and costs."
        if finite(result.get("prediction_error")):
            notes += f" It is off by {result['prediction_error']:.1%} on average."
    panels = tag("div", *panels, class_="panels") if len(panels) > 1 else panels[0]
    return section("speedup", "Speedup against draft length", how(notes), panels)


def speedup_points(result: dict) -> list[dict]:
    """Of the sweep, or else of the rows with a fixed draft length; the best of each temperature is marked."""
    if result.get("sweep"):
        return [point for point in result["sweep"] if finite(point.get("speedup"))]
    points = [
        {**row, "k": row["draft_length"], "temperature": row.get("temperature", 0)}
        for row in result.get("rows", [])
        if isinstance(row.get("draft_length"), int) and row["draft_length"] and finite(row.get("speedup"))
    ]
    for t in {point["temperature"] for point in points}:
        max((p for p in points if p["temperature"] == t), key=lambda p: p["speedup"])["best"] = True
    return points


def speedup_panel(t: float, points: list[dict], others: list[dict], engines: list[str], x: Axis, y: Axis) -> Markup:
    title = "Greedy" if not t else f"Temperature {t:g}"
    best = max(points, key=lambda p: p["speedup"])
    plot = Plot(
        f"{title}: speedup against draft length",
        f"Highest: {best['speedup']:.2f}x at K = {best['k']}, {best['engine']}. The table below has all points.", x, y,
    )  # fmt: skip
    entries = []
    plot.level(1, "even")
    for engine in engines:
        style, shape = f"c{engines.index(engine) % COLOURS + 1}", SERIES_MARKERS[engines.index(engine) % 5]
        line = sorted((p for p in points if p["engine"] == engine), key=lambda p: p["k"])
        predicted = [(p["k"], p["predicted"]) for p in line if finite(p.get("predicted"))]
        if predicted:
            plot.line(predicted, f"{style} dashed")
            entries.append((f"{engine}, predicted", swatch(f"{style} dashed")))
        for row in (row for row in others if row["engine"] == engine):
            plot.level(row["speedup"], f"line dotted {style}")
            name = f"{engine}, {row['draft_length']}"
            entries.append((f"{name}: {row['speedup']:.2f}x", swatch(f"{style} dotted")))
        if line:
            entries.append((f"{engine}, measured", swatch(style, shape)))
            plot.line([(p["k"], p["speedup"]) for p in line], style)
        for p in line:
            said = f"{engine}, K = {p['k']}: {p['speedup']:.2f}x"
            if p.get("speedup_range"):
                plot.spread(p["k"], *p["speedup_range"], style)
                said += f" ({p['speedup_range'][0]:.2f} to {p['speedup_range'][1]:.2f})"
            plot.marker(p["k"], p["speedup"], "star" if p.get("best") else shape, style, said)
    entries.append(("best K", swatch("c6", "star", line=False)))
    entries.append(("main model alone", swatch("even-swatch")))
    return tag("figure", tag("h3", title), plot.svg(), legend(entries))


# ---- acceptance per position, time per iteration --------------------------------------------------------------------


def acceptance(result: dict) -> Markup | str:
    """The longest fixed draft of each engine and temperature, and every way with another rule."""
    rows = [row for row in result.get("rows", []) if row.get("position_acceptance")]
    if not rows:
        return ""
    longest: dict[tuple, dict] = {}
    for row in rows:
        key = (
            row["engine"],
            row.get("temperature", 0),
            row["draft_length"] if isinstance(row["draft_length"], str) else "",
        )
        if key not in longest or len(row["position_acceptance"]) > len(longest[key]["position_acceptance"]):
            longest[key] = row
    shown = list(longest.values())
    most = max(len(row["position_acceptance"]) for row in shown)
    plot = Plot(
        "Acceptance per position",
        "; ".join(f"{way(row)}: {', '.join(f'{share:.2f}' for share in row['position_acceptance'])}" for row in shown),
        whole_axis("position in the draft (token)", [1, most]), axis("accepted (share)", 0, 1),
    )  # fmt: skip
    entries = []
    for i, row in enumerate(shown):
        style = f"c{i % COLOURS + 1}{' dashed' if i >= COLOURS else ''}"
        shape, points = SERIES_MARKERS[i % len(SERIES_MARKERS)], list(enumerate(row["position_acceptance"], start=1))
        plot.line(points, style)
        for position, share in points:
            plot.marker(position, share, shape, style, f"{way(row)}, position {position}: {share:.2f}")
        entries.append((way(row), swatch(style, shape)))
    words = "Of the iterations that proposed an i-th draft token, the share that accepted it and all before it."
    return section("acceptance", "Acceptance per position", how(words), tag("figure", plot.svg(), legend(entries)))


def way(row: dict) -> str:
    """The name of a row."""
    length = row["draft_length"]
    named = f"{row['engine']}, " + (length if isinstance(length, str) else f"K = {length}" if length else "alone")
    return row.get("name") or named


def iteration(result: dict) -> Markup | str:
    rows = result.get("iteration")
    if not rows:
        return ""
    parts = ("draft", "verify", "overhead")
    bars = [(row["name"], [row[f"{part}_ms"] for part in parts]) for row in rows]
    chart = stacked_bars(
        "Time of one iteration", "; ".join(f"{name}: {sum(values):.1f} ms" for name, values in bars),
        "time of one iteration (ms)", bars, list(parts),
    )  # fmt: skip
    marks = ["the draft's inferences", "verify: one inference of the main model", "overhead: the rest"]
    entries = [(words, part_swatch(i)) for i, words in enumerate(marks, start=1)]
    words = "Means. An iteration drafts K tokens, has the main model verify them and yields up to K + 1 tokens."
    return section("iteration", "Time of one iteration", how(words), tag("figure", chart, legend(entries)))


# ---- heat maps ------------------------------------------------------------------------------------------------------


def heat_table(caption: str, corner: str, columns: list[str], rows: list[tuple[str, list[Markup]]]) -> Markup:
    head = tag("tr", tag("th", corner, scope="col"), *(tag("th", name, scope="col") for name in columns))
    body = (tag("tr", tag("th", name, scope="row"), *cells) for name, cells in rows)
    table = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", *body), class_="heat")
    return scroll(table, caption)


def heat(value: float, highest: float) -> str:
    """The style of a cell: full colour for the highest value."""
    return f"--share: {max(0.0, min(1.0, value / highest)) * 0.85:.2f}"


def devices(result: dict) -> Markup | str:
    matrix = result.get("matrix")
    if not matrix:
        return ""
    cells = {(cell["main_device"], cell["draft_device"]): cell for cell in matrix["cells"]}
    best = max((c for c in cells.values() if finite(c.get("throughput"))), key=lambda c: c["throughput"], default=None)
    reasons: list[str] = []
    rows = []
    for main in matrix["main_devices"]:
        drawn = [device_cell(cells.get((main, draft), {}), best, reasons) for draft in matrix["draft_devices"]]
        rows.append((main, drawn))
    columns = ["no draft" if draft == "none" else f"draft on {draft}" for draft in matrix["draft_devices"]]
    words = (
        "Tokens per second, darker is faster, the fastest is framed; below, the speedup over the same main device "
        "without a draft. Numbers in brackets lead to the reasons."
    )
    listed = tag("ol", *(tag("li", reason) for reason in reasons), class_="reasons") if reasons else ""
    caption = "Throughput (tokens/s) by device of main model and draft"
    return section("devices", "Devices", how(words), heat_table(caption, "main model on", columns, rows), listed)


def device_cell(cell: dict, best: dict | None, reasons: list[str]) -> Markup:
    """What a cell came to; its reason goes to the list under the table, each once."""
    status, lines = cell.get("status", "not run"), []
    mark = ""
    if cell.get("reason"):
        if cell["reason"] not in reasons:
            reasons.append(cell["reason"])
        mark = f" [{reasons.index(cell['reason']) + 1}]"
    if not finite(cell.get("throughput")):
        return tag("td", tag("b", status), tag("small", mark) if mark else "", class_="none")
    if finite(cell.get("speedup")) and cell["draft_device"] != "none":
        lines.append(f"{cell['speedup']:.2f}x" + (", slower than alone" if cell["speedup"] < 1 else ""))
    if cell.get("same_text") is False:
        first = cell.get("first_difference")
        lines.append("other text" + (f" from token {first} on" if first is not None else ""))
    if status != "ok":
        lines.append(status)
    value = tag("b", f"{cell['throughput']:.1f}{mark}")
    return tag("td", value, *(tag("small", line) for line in lines), class_="best" if cell is best else None,
               style=heat(cell["throughput"], best["throughput"]))  # fmt: skip


def categories(result: dict) -> Markup | str:
    found = [row for row in result.get("categories", []) if finite(row.get("speedup"))]
    if not found:
        return ""
    cells = {(row["category"], row["name"]): row for row in found}
    names = list(dict.fromkeys(row["name"] for row in found))
    highest = max(row["speedup"] for row in found)
    prompts = {row["category"]: row.get("prompts") for row in found}
    rows = []
    for category in dict.fromkeys(row["category"] for row in found):
        drawn = [category_cell(cells.get((category, name)), highest) for name in names]
        rows.append((f"{category} ({prompts[category]} prompts)" if prompts[category] else category, drawn))
    words = "Speedup over the main model alone, darker is faster; below, the acceptance rate."
    return section("categories", "By category of prompt", how(words),
                   heat_table("Speedup by category of prompt and way", "category", names, rows))  # fmt: skip


def category_cell(row: dict | None, highest: float) -> Markup:
    if row is None:
        return tag("td", "not measured", class_="none")
    accepted = row.get("acceptance_rate")
    below = tag("small", f"acceptance {accepted:.2f}") if finite(accepted) else ""
    return tag("td", tag("b", f"{row['speedup']:.2f}x"), below, style=heat(row["speedup"], highest))


# ---- tune's candidates ----------------------------------------------------------------------------------------------


def candidates(result: dict) -> Markup | str:
    """Speed against agreement; who was never compared with the exact text stands in the table only."""
    found = result.get("candidates")
    if not found:
        return ""
    chosen = (result.get("recommendation") or {}).get("settings")
    shown = [c for c in found if finite(c.get("throughput")) and finite(c.get("agreement"))]
    content = [how("Up is faster, right is truer to the exact greedy text of the main model (f32).")]
    if shown:
        agreement, speed = [c["agreement"] for c in shown], [c["throughput"] for c in shown]
        fastest = max(shown, key=lambda c: c["throughput"])
        plot = Plot(
            "Speed against agreement",
            f"{len(shown)} candidates; the fastest decodes {fastest['throughput']:.1f} tokens/s "
            f"and agrees in {fastest['agreement']:.1%} of the tokens.",
            percent_axis("agreement with f32 greedy (share of tokens)", min(agreement), max(agreement)),
            axis("throughput (tokens/s)", min(0.9 * min(speed), min(speed) - 1), max(speed)),
        )  # fmt: skip
        for c in shown:
            said = (
                f"{number_of(c, found)}: {settings(c)}: {c['throughput']:.1f} tokens/s, agreement {c['agreement']:.1%}"
            )
            dropped = c.get("dropped_in_round") is not None
            shape, style = ("star", "c2") if c["settings"] == chosen else ("circle", "c1 open" if dropped else "c1")
            plot.marker(c["agreement"], c["throughput"], shape, style, said)
            if not dropped:
                plot.note(c["agreement"], c["throughput"], str(number_of(c, found)))
        entries = [("measured to the end", swatch("c1", "circle", line=False)),
                   ("dropped on the way", swatch("c1 open", "circle", line=False))]  # fmt: skip
        if any(c["settings"] == chosen for c in shown):
            entries.append(("recommended", swatch("c2", "star", line=False)))
        content.append(tag("figure", plot.svg(), legend(entries)))
    left = len(found) - len(shown)
    if left:
        content.append(how(f"{left} without a measured agreement stand in the table only."))
    return section("candidates", "Candidates", *content)


def percent_axis(title: str, low: float, high: float) -> Axis:
    found = axis(title, low, high)
    return found._replace(labels=[f"{100 * value:g} %" for value in found.ticks])


def settings(candidate: dict) -> str:
    return ", ".join(f"{key} = {value}" for key, value in candidate["settings"].items()) or "defaults"


def number_of(candidate: dict, found: list[dict]) -> int:
    return next(i for i, other in enumerate(found, start=1) if other is candidate)


# ---- the token view -------------------------------------------------------------------------------------------------


def tokens(result: dict) -> Markup | str:
    view = result.get("token_view")
    if not view:
        return ""
    steps = view["steps"]
    accepted, rejected = (sum(len(step[kind]) for step in steps) for kind in ("accepted", "rejected"))
    words = (
        f"One text: {accepted} draft tokens accepted, {rejected} rejected, "
        f"{sum(bool(step['main']) for step in steps)} tokens by the main model itself, in {len(steps)} iterations."
    )
    text = [tag("span", view.get("prompt", ""), class_="prompt")]
    for i, step in enumerate(steps, start=1):
        said = f"iteration {i}: {len(step['accepted'])} of {len(step['accepted']) + len(step['rejected'])} accepted"
        pieces = [tag("u", shown(piece)) for piece in step["accepted"]]
        pieces += [tag("del", piece.replace("\n", LINE_BREAK)) for piece in step["rejected"]]
        pieces += [tag("b", shown(step["main"]))] if step["main"] else []
        text.append(tag("span", *pieces, title=said))
    marks = [("u", "accepted draft token"), ("del", "rejected draft token"), ("b", "main model's token")]
    named = [tag("li", tag(name, meaning)) for name, meaning in marks]
    key = tag("ul", *named, tag("li", tag("span", "prompt", class_="prompt")), class_="legend tokens")
    return section("tokens", "Token by token", how(words), key, tag("div", *text, class_="text tokens"))


def shown(piece: str) -> str:
    """A token's text, its line breaks visible."""
    return piece.replace("\n", LINE_BREAK + "\n")


# ---- tables ---------------------------------------------------------------------------------------------------------


def tables(result: dict) -> Markup | str:
    named = [
        ("Ways to decode", [{**row, "name": way(row)} for row in result.get("rows", [])]),
        ("Draft lengths", result.get("sweep", [])),
        ("Candidates", [{"name": f"{i}: {settings(c)}", **c} for i, c in enumerate(result.get("candidates", []), 1)]),
        ("Comparisons", result.get("comparisons", [])),
        ("Time of one iteration", result.get("iteration", [])),
    ]
    drawn = [
        tag("details", tag("summary", name), data_table(name, rows), open="" if i == 0 else None)
        for i, (name, rows) in enumerate((name, rows) for name, rows in named if rows)
    ]
    return section("tables", "Tables", *drawn) if drawn else ""


def data_table(caption: str, rows: list[dict]) -> Markup:
    """The columns that are known and that a row fills."""
    used = [key for key in COLUMNS if any(row.get(key) is not None for row in rows)]
    used = [key for key in used if not (key == "engine" and "name" in used)]
    head = tag("tr", *(tag("th", COLUMNS[key][0], scope="col", class_=numeric(rows, key)) for key in used))
    body = []
    for row in rows:
        first, *others = ((key, cell_text(key, row.get(key))) for key in used)
        data = [tag("td", text, class_=numeric(rows, key)) for key, text in others]
        body.append(tag("tr", tag("th", first[1], scope="row"), *data, class_="best" if row.get("best") else None))
    return scroll(tag("table", tag("caption", caption), tag("thead", head), tag("tbody", *body)), caption)


def numeric(rows: list[dict], key: str) -> str | None:
    return None if any(isinstance(row.get(key), str) for row in rows) else "number"


def cell_text(key: str, value: object) -> str:
    form = COLUMNS[key][1]
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return " to ".join(cell_text(key, part) for part in value)
    if key in ("ttft", "tpot"):
        value = 1000 * value
    return form.format(value) if isinstance(value, (int, float)) or form == PLAIN else str(value)


def scroll(table: Markup, label: str) -> Markup:
    """What is wider than a phone is moved sideways by itself; the page is not."""
    return tag("div", table, class_="scroll", tabindex=0, role="region", aria_label=label)


def facts_table(caption: str, facts: dict) -> Markup:
    rows = (tag("tr", tag("th", words(key), scope="row"), tag("td", plain(value))) for key, value in facts.items())
    table = tag("table", tag("caption", caption), tag("tbody", *rows), class_="facts")
    return scroll(table, caption)


def words(key: str) -> str:
    return key.replace("_", " ")


def plain(value: object) -> str:
    """A fact in words."""
    if isinstance(value, dict):
        return ", ".join(f"{words(str(key))}: {plain(part)}" for key, part in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(plain(part) for part in value) or "none"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def finite(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


# ---- CSV ------------------------------------------------------------------------------------------------------------


def csv_text(result: dict) -> str:
    """The main table of a result: draft lengths, device cells, candidates, or else the ways."""
    rows = (
        result.get("sweep")
        or result.get("matrix", {}).get("cells")
        or result.get("candidates")
        or result.get("rows", [])
    )
    flat = [dict(flatten(row)) for row in rows]
    written = io.StringIO(newline="")
    writer = csv.DictWriter(written, list(dict.fromkeys(key for row in flat for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return written.getvalue()


def flatten(row: dict, before: str = ""):
    """(column, value): what is nested becomes settings.K; lists are joined by spaces."""
    for key, value in row.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{before}{key}.")
        elif isinstance(value, list):
            yield before + key, " ".join(map(str, value))
        elif isinstance(value, str) and value.startswith(("=", "+", "-", "@")):
            yield before + key, "'" + value  # a spreadsheet would compute it
        else:
            yield before + key, value


# ---- the command ----------------------------------------------------------------------------------------------------


def read_result(text: str) -> dict:
    """An argparse type: the result in a file of JSON or in the last line of a saved output."""
    path = Path(text)
    try:
        content = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        content = ""
    for candidate in (content, content.rpartition("\n")[2]):
        try:
            result = json.loads(candidate)
        except ValueError:
            continue
        if isinstance(result, dict) and {"program", "summary"} <= set(result):
            return result
    raise argparse.ArgumentTypeError(
        f"{text!r} holds no result of these scripts: give what --json wrote, or an output whose last line is the JSON"
    )


def output_file(text: str) -> Path:
    """An argparse type: a file that can be written, of a kind that can be drawn."""
    path = Path(text)
    if path.suffix not in (".html", ".csv", ".png"):
        raise argparse.ArgumentTypeError(f"{text!r} ends neither in .html nor in .csv nor in .png: one of them decides")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written, as there is no folder {str(path.parent)!r}")
    return path


def draw(result: dict, path: Path) -> None:
    if path.suffix == ".png":
        from speedup_plot import png

        write_whole(path, png(speedup_points(result)))
    else:
        write_whole(path, html_text(result) if path.suffix == ".html" else csv_text(result))


def main() -> int:
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=read_result, help="JSON of a script, or its saved output")
    parser.add_argument("files", type=output_file, nargs="+", metavar="FILE", help="what to write: .html, .csv, .png")
    arguments = parser.parse_args()
    for path in arguments.files:
        try:
            draw(arguments.result, path)
        except OSError as error:
            print(f"error: {path} was not written: {error.strerror or error}", file=sys.stderr)
            return 1
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            print(f"error: the result cannot be drawn as {path}: {type(error).__name__}: {error}", file=sys.stderr)
            return 1
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
