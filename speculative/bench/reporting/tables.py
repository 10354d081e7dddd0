"""Tables of the HTML report: results, environment, heat maps of devices and categories, token-by-token text."""

import math
from collections.abc import Sequence
from typing import TypeGuard

from speculative.bench.load.metrics import counted
from speculative.bench.reporting.markup import Markup, join, tag
from speculative.bench.result import CategoryRow, Drawn
from speculative.pair.engines import shown_engine
from speculative.sequence import metrics

LINE_BREAK, NOTHING = "\u21b5", "\u2205"  # shown for a line break in a token, and for a token without text

# Columns: key -> (heading, format). Only those present in a result are shown.
SHARE, TIMES, RATE, PLAIN = "{:.2f}", "{:.2f}x", "{:.1f}", "{}"
COLUMNS = {
    "name": ("method", PLAIN),
    "temperature": ("temperature", "{:g}"),
    "k": ("K", PLAIN),
    "engine": ("engine", PLAIN),
    "throughput": ("tokens/s", RATE),
    "speedup": ("speedup", TIMES),
    "speedup_range": ("range", SHARE),
    "spread": ("range", SHARE),
    "repetition": ("repetition", SHARE),
    "predicted": ("predicted", TIMES),
    "forward_speedup": ("tokens per forward pass", TIMES),
    "tokens_per_forward": ("tokens per forward pass", SHARE),
    "draft_passes": ("draft steps per forward pass", SHARE),
    "acceptance_rate": ("acceptance rate", SHARE),
    "block_efficiency": ("block efficiency", SHARE),
    "ttft": ("TTFT (ms)", RATE),
    "ttft_range": ("5-95 %", RATE),
    "tpot": ("TPOT (ms)", RATE),
    "tpot_range": ("5-95 %", RATE),
    "mean_draft_length": ("mean draft length", SHARE),
    "draft_ms": ("draft (ms)", SHARE),
    "verify_ms": ("verify (ms)", SHARE),
    "overhead_ms": ("overhead (ms)", SHARE),
    "outside": ("outside the models", "{:.1%}"),
    "same_text": ("same text as alone", PLAIN),
    "agreement": ("agreement with f32", "{:.1%}"),
    "mean_kl": ("mean KL (nats)", "{:.2g}"),
    "dropped_in_round": ("dropped", PLAIN),
    "failed": ("failed", PLAIN),
    "first_seconds": ("load (s)", RATE),
    "second_seconds": ("load with model cache (s)", RATE),
    "peak_bytes": ("peak memory (MB)", "{:.0f}"),
    "what": ("compared", PLAIN),
    "requests": ("requests", PLAIN),
    "answered": ("answered", PLAIN),
    "refused": ("refused", PLAIN),
    "cut off": ("cut off", PLAIN),
    "lost": ("lost", PLAIN),
    "cache_bytes": ("caches (MB)", "{:.0f}"),
    "ratio": ("ratio", SHARE),
    "range": ("range", SHARE),
    "interval": ("95 % interval over prompts", SHARE),
    "prompts": ("prompts", PLAIN),
}
CAPTIONS = {
    "Methods": "Medians and ranges over the rounds; tokens/s is decode only, prompt excluded",
    "Sources": "By measured times of single forward passes; ranges are 95 % intervals over prompts",
    "Under load": "Medians and ranges; tokens/s of all clients together, prompts and queueing included",
    "Draft lengths": "Speedup measured, predicted, and in tokens per forward pass; the best draft length in bold",
    "Loading": "Load time and peak memory in a separate process",
}
UNITS = dict.fromkeys(("ttft", "ttft_range", "tpot", "tpot_range"), 1e3) | {
    "peak_bytes": 1e-6,
    "cache_bytes": 1e-6,
}  # factor from the result's unit to the column's


def finite(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and math.isfinite(value)


def section(name: str, title: str, *content: object, kind: str = "card") -> Markup:
    heading = tag("h2", title, id=f"{name}-title")
    return tag("section", heading, *content, id=name, class_=kind, aria_labelledby=f"{name}-title")


def how(words: str) -> Markup:
    """A paragraph on how to read the section."""
    return tag("p", words, class_="how")


def scroll(table: Markup, label: str) -> Markup:
    """A container that scrolls sideways on narrow screens, so that the page does not."""
    return tag("div", table, class_="scroll", tabindex=0, role="region", aria_label=label)


# ---- results --------------------------------------------------------------------------------------------------------


def tables(result: Drawn) -> Markup | str:
    methods = "Sources" if result["program"] == "compare_sources" else "Methods"
    named: dict[str, list[Drawn]] = {
        "Draft lengths": result.get("sweep", []),
        methods: [{**row, "name": method_name(row)} for row in result.get("rows", []) if "clients" not in row],
        "Under load": [row for row in result.get("rows", []) if "clients" in row],
        "Candidates": [
            {**one, "name": candidate_name(i, one)} for i, one in enumerate(result.get("candidates", []), 1)
        ],
        "Comparisons": result.get("comparisons", []) or result.get("ratios", []),
        "Time per iteration": result.get("iteration", []),
        "Loading": result.get("starts", []),
    }
    named = {name: rows for name, rows in named.items() if rows}
    drawn: list[Markup] = []
    for name, rows in named.items():
        table = tag("summary", name), data_table(CAPTIONS.get(name, name), rows)
        drawn.append(tag("details", *table, open=None if drawn else ""))  # the first one is open
    keys = {key for rows in named.values() for row in rows for key in row}
    return section("tables", "Tables", *drawn, terms(keys, is_timed=methods == "Methods")) if drawn else ""


def method_name(row: Drawn) -> str:
    """The name of a row."""
    if row.get("name"):
        return row["name"]
    if "replicas" in row:  # of a plan
        draft = "with the draft" if row["with_draft"] else "without a draft"
        return f"{row['rate']:g} requests/s, {counted(row['replicas'], 'replica')}, {draft}"
    length = row["draft_length"]
    words = length if isinstance(length, str) else f"K = {length}" if length else "alone"
    return f"{shown_engine(row['engine'])}, {words}"


def candidate_name(number: int, candidate: Drawn) -> str:
    settings = candidate.get("settings", {})
    return f"{number}: {candidate.get('name') or ', '.join(f'{key} = {value}' for key, value in settings.items())}"


def data_table(caption: str, rows: Sequence[Drawn]) -> Markup:
    """A table of the known columns for which any row has a value."""
    used = [key for key in COLUMNS if any(row.get(key) is not None for row in rows)]
    in_name = {"engine", "temperature", "k"} if "name" in used else set()  # contained in the name
    used = [key for key in used if key not in in_name]
    head = tag("tr", *(tag("th", COLUMNS[key][0], scope="col", class_=alignment(rows, key)) for key in used))
    body = []
    for row in rows:
        first, *others = [tag("td", cell_text(key, row.get(key)), class_=alignment(rows, key)) for key in used]
        first = tag("th", unbroken(cell_text(used[0], row.get(used[0]))), scope="row")
        body.append(tag("tr", first, *others, class_="best" if row.get("best") else None))
    table = tag("table", tag("caption", tag("span", caption)), tag("thead", head), tag("tbody", *body))
    return scroll(table, caption)


def unbroken(name: str) -> str:
    """Prevent a line break within "K = 4"."""
    return name.replace(" = ", "\u00a0=\u00a0")


def alignment(rows: Sequence[Drawn], key: str) -> str | None:
    return None if any(isinstance(row.get(key), str) for row in rows) else "number"


def cell_text(key: str, value: object) -> str:
    if isinstance(value, list):
        return " to ".join(cell_text(key, part) for part in value)
    if key == "engine" and isinstance(value, str):
        return shown_engine(value)
    if isinstance(value, bool) or not finite(value):
        return plain(value) if isinstance(value, (bool, str, dict)) else ""
    return COLUMNS[key][1].format(value * UNITS.get(key, 1))


def terms(keys: set[str], is_timed: bool) -> Markup:
    """The meaning of the columns, from the docstrings of the functions that compute them; `is_timed`: by the clock."""
    defined = [key for key in COLUMNS if key in keys and hasattr(metrics, key)]
    definitions = [(COLUMNS[key][0], (getattr(metrics, key).__doc__ or "").split("\n")[0]) for key in defined]
    runs = ", runs interleaved" if is_timed else ""
    definitions.append(("speedup", f"Throughput over that of the same main model alone{runs}."))
    definition_list = tag("dl", *(join([tag("dt", term), tag("dd", meaning)]) for term, meaning in definitions))
    return tag("details", tag("summary", "Column definitions"), definition_list)


# ---- facts ----------------------------------------------------------------------------------------------------------


def environment(result: Drawn) -> Markup | str:
    facts = result.get("environment")
    if not facts:
        return ""
    if finite(facts.get("other_load")):
        facts = {**facts, "other_load": f"{facts['other_load']:.0%} of the processor time"}
    return section("environment", "Environment", facts_table("Measurement environment", facts))


def recommendation(result: Drawn) -> Markup | str:
    """The recommendation of tune.py without its sentences, which are in the summary."""
    recommended = result.get("recommendation")
    if not recommended:
        return ""
    facts = {key: value for key, value in recommended.items() if key not in ("sentences", "reason")}
    return section("recommendation", "Recommendation", facts_table("Content of recommended.json", facts))


def facts_table(caption: str, facts: Drawn) -> Markup:
    rows = (tag("tr", tag("th", words(key), scope="row"), tag("td", fact(value))) for key, value in facts.items())
    table = tag("table", tag("caption", tag("span", caption)), tag("tbody", *rows), class_="facts")
    return scroll(table, caption)


def words(key: str) -> str:
    return key.replace("_", " ")


def fact(value: object) -> object:
    """A dict of dicts as one paragraph per entry, anything else as plain text."""
    if isinstance(value, dict) and any(isinstance(part, dict) for part in value.values()):
        return join(tag("p", f"{key}: {plain(part)}") for key, part in value.items())
    return plain(value)


def plain(value: object) -> str:
    """A value as plain text."""
    if isinstance(value, dict):
        parts = (f"({plain(part)})" if isinstance(part, dict) and part else plain(part) for part in value.values())
        return ", ".join(f"{key} = {part}" for key, part in zip(value, parts, strict=True)) or "none"
    if isinstance(value, list):
        return ", ".join(plain(part) for part in value) or "none"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    return f"{value:.3g}" if isinstance(value, float) else str(value)


# ---- heat maps ------------------------------------------------------------------------------------------------------


def heat_table(caption: str, corner: str, columns: list[str], rows: list[tuple[str, list[Markup]]]) -> Markup:
    head = tag("tr", tag("th", corner, scope="col"), *(tag("th", name, scope="col") for name in columns))
    body = (tag("tr", tag("th", unbroken(name), scope="row"), *cells) for name, cells in rows)
    table = tag("table", tag("caption", tag("span", caption)), tag("thead", head), tag("tbody", *body), class_="heat")
    return scroll(table, caption)


def heat(value: float, highest: float) -> str:
    """The style of a cell; the highest value has the strongest colour."""
    return f"--share: {0.85 * value / highest if highest > 0 else 0:.2f}"


def devices(result: Drawn) -> Markup | str:
    matrix = result.get("matrix")
    if not matrix:
        return ""
    cells = {(cell["main_device"], cell["draft_device"]): cell for cell in matrix["cells"]}
    measured = [cell for cell in cells.values() if finite(cell.get("throughput"))]
    highest = max((cell["throughput"] for cell in measured), default=1)
    real = [cell for cell in measured if cell["status"] == "ok"]
    best = max(real, key=lambda cell: cell["throughput"], default=None)
    reasons = list(dict.fromkeys(cell["reason"] for cell in matrix["cells"] if cell.get("reason")))
    rows = []
    for main in matrix["main_devices"]:
        of_main = [cells.get((main, draft), {}) for draft in matrix["draft_devices"]]
        rows.append((main, [device_cell(cell, highest, cell is best, reasons) for cell in of_main]))
    columns = ["no draft" if draft == "none" else f"draft on {draft}" for draft in matrix["draft_devices"]]
    words = (
        "Tokens per second; stronger colour is faster, the fastest is framed. Below it: speedup over the same main "
        "device without a draft. Numbers in brackets refer to the reasons under the table."
    )
    definition_list = tag("ol", *(tag("li", reason) for reason in reasons), class_="reasons") if reasons else ""
    caption = "Throughput (tokens/s) by device of main model and draft"
    return section(
        "devices", "Devices", how(words), heat_table(caption, "main model on", columns, rows), definition_list
    )


def device_cell(cell: Drawn, highest: float, best: bool, reasons: list[str]) -> Markup:
    """One cell; its reason is given as a number in the list under the table."""
    status = cell.get("status", "not measured")
    mark = f" [{reasons.index(cell['reason']) + 1}]" if cell.get("reason") else ""
    if not finite(cell.get("throughput")):
        return tag("td", tag("b", status + mark), class_="none")
    lines = []
    if finite(cell.get("speedup")) and cell["draft_device"] != "none":
        lines.append(f"{cell['speedup']:.2f}x" + (", slower than alone" if cell["speedup"] < 0.995 else ""))
    if cell.get("same_text") is False:
        first = cell.get("first_difference")
        lines.append("\u2260 text differs" + (f" from token {first}" if first is not None else ""))
    if status != "ok":
        lines.append(status + mark)
    below = [tag("small", line) for line in lines]
    value = tag("b", f"{cell['throughput']:.1f}")
    return tag("td", value, *below, class_="best" if best else None, style=heat(cell["throughput"], highest))


def categories(result: Drawn) -> Markup | str:
    recommended = [row for row in result.get("categories", []) if finite(row.get("speedup"))]
    if not recommended:
        return ""
    cells = {(category_method(row), row["category"]): row for row in recommended}
    samples = (result.get("environment") or {}).get("samples", 1)  # of each prompt, above temperature 0
    prompts = {
        row["category"]: row.get("prompts", row.get("texts", 0) // (samples if row.get("temperature") else 1))
        for row in recommended
    }
    highest = max(row["speedup"] for row in recommended)
    rows = [
        (name, [category_cell(cells.get((name, category)), highest) for category in prompts])
        for name in dict.fromkeys(map(category_method, recommended))
    ]
    columns = [f"{name or 'no category'} ({n or 'no'} prompt{'' if n == 1 else 's'})" for name, n in prompts.items()]
    words = "Speedup over the main model alone; stronger colour is faster. Below it: acceptance rate."
    table = heat_table("Speedup by method and prompt category", "method", columns, rows)
    return section("categories", "By prompt category", how(words), table)


def category_method(row: Drawn) -> str:
    """The name of the method, or of the source of draft tokens, of a row by category."""
    return f"{row['source']}, temperature {row['temperature']:g}" if "source" in row else row["name"]


def category_cell(row: CategoryRow | None, highest: float) -> Markup:
    if row is None:
        return tag("td", "not measured", class_="none")
    accepted = row.get("acceptance_rate")
    below = tag("small", f"accepted {accepted:.2f}") if finite(accepted) else ""
    return tag("td", tag("b", f"{row['speedup']:.2f}x"), below, style=heat(row["speedup"], highest))


# ---- a text, token by token -----------------------------------------------------------------------------------------


def tokens(result: Drawn) -> Markup | str:
    view = result.get("token_view")
    if not view:
        return ""
    steps = view["steps"]
    accepted, rejected = (sum(len(step[kind]) for step in steps) for kind in ("accepted", "rejected"))
    words = (
        f"One text in {len(steps)} iterations: {accepted} draft tokens accepted, {rejected} rejected, and one token of "
        "the main model at the end of each."
    )
    text = [tag("span", view.get("prompt", ""), class_="prompt")]
    for i, step in enumerate(steps, start=1):
        title = f"iteration {i}: {len(step['accepted'])} of {len(step['accepted']) + len(step['rejected'])} accepted"
        pieces = [tag("u", shown(piece, "\n")) for piece in step["accepted"]]
        pieces += [tag("del", shown(piece, "")) for piece in step["rejected"]]
        pieces.append(tag("b", shown(step["main"], "\n")))
        text.append(tag("span", *pieces, title=title))
    marks = [("u", "accepted draft token"), ("del", "rejected draft token"), ("b", "main model's token")]
    named = [tag("li", tag(name, meaning)) for name, meaning in marks]
    named.append(tag("li", tag("span", "prompt", class_="prompt")))
    named.append(tag("li", f"{LINE_BREAK} line break, {NOTHING} token without text", class_="prompt"))
    legend = tag("ul", *named, class_="legend tokens")
    return section("tokens", "Token by token", how(words), legend, tag("div", *text, class_="text tokens"))


def shown(piece: str, line_break: str) -> str:
    """A token's text with invisible characters made visible."""
    return piece.replace("\n", LINE_BREAK + line_break) or NOTHING
