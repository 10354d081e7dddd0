"""Charts of the HTML report: speedup, acceptance, time per iteration, tuning candidates."""

from collections.abc import Sequence
from typing import Any

from speculative.bench.reporting.markup import Markup, tag
from speculative.bench.reporting.svg import (
    Axis,
    Plot,
    axis,
    colour,
    integer_axis,
    legend,
    part_swatch,
    shape,
    stacked_bars,
    swatch,
)
from speculative.bench.reporting.tables import candidate_name, finite, how, method_name, section
from speculative.bench.result import Drawn
from speculative.pair.engines import GENAI, NATIVE, engine_id, shown_engine
from speculative.pair.recommendation import ALONE, SUFFIX

OTHER_ROWS = ("device_swap", "tune")  # programs whose rows differ in more than the decoding method
FIGURES = ("throughput", "speedup", "speedup_range")  # results in a recommendation, besides its settings

# ---- speedup against draft length -----------------------------------------------------------------------------------


def speedup(result: Drawn) -> Markup | str:
    """One panel per temperature: measured with the range over the rounds, predicted dashed."""
    points = speedup_points(result)
    if not points:
        return ""
    others = [row for row in result.get("rows", []) if isinstance(row["draft_length"], str) and finite(row["speedup"])]
    others = [_with_shown_engine(row) for row in others]
    values = [value for p in points for value in (p["speedup"], p.get("predicted"), *(p.get("speedup_range") or []))]
    values += [row["speedup"] for row in others]
    y = axis("speedup (x)", 0, max(1.2, *filter(finite, values)))
    x = integer_axis("draft length K (tokens)", [p["k"] for p in points])
    engines = list(dict.fromkeys(p["engine"] for p in points + others))
    panels = []
    for t in dict.fromkeys(p["temperature"] for p in points):
        points_of_t, others_of_t = ([p for p in group if p.get("temperature", 0) == t] for group in (points, others))
        panels.append(speedup_panel(t, points_of_t, others_of_t, engines, x, y))
    notes = "Relative to the main model alone in the same rounds; bars show the range over the rounds."
    if any(finite(p.get("predicted")) for p in points):
        notes += " Predicted: tau / (v(K) + K c), from measured acceptance and costs"
        notes += (
            f"; off by {result['prediction_error']:.1%} on average." if finite(result.get("prediction_error")) else "."
        )
    if len(panels) == 1:
        return section("speedup", "Speedup against draft length", how(notes), panels[0])
    side_by_side = tag("div", *panels, class_="panels")
    return section("speedup", "Speedup against draft length", how(notes), side_by_side, kind="card wide")


def speedup_points(result: Drawn) -> list[dict[str, Any]]:
    """The points of the sweep, or of the rows with a fixed draft length; the best per temperature is marked.

    Empty if the rows differ in more than the draft length.
    """
    if result.get("sweep"):
        return [_with_shown_engine(point) for point in result["sweep"] if finite(point.get("speedup"))]
    if result["program"] in OTHER_ROWS:
        return []
    points = [
        {**_with_shown_engine(row), "k": row["draft_length"], "temperature": row.get("temperature", 0)}
        for row in result.get("rows", [])
        if isinstance(row.get("draft_length"), int) and row["draft_length"] and finite(row.get("speedup"))
    ]
    for t in {point["temperature"] for point in points}:
        max((p for p in points if p["temperature"] == t), key=lambda p: p["speedup"])["best"] = True
    return points


def _with_shown_engine(row: Drawn) -> dict[str, Any]:
    return {**row, "engine": shown_engine(row["engine"])}


def speedup_panel(
    t: float, points: Sequence[Drawn], others: Sequence[Drawn], engines: list[str], x: Axis, y: Axis
) -> Markup:
    title = f"Temperature {t:g}" if t else "Greedy"
    best = max(points, key=lambda p: p["speedup"])
    summary = (
        f"Highest: {best['speedup']:.2f}x at K = {best['k']}, {best['engine']}. All points are in the tables below."
    )
    plot = Plot(f"{title}: speedup against draft length", summary, x, y)
    plot.level(1, "even")
    entries = []
    for i, engine in enumerate(engines):
        line = sorted((p for p in points if p["engine"] == engine), key=lambda p: p["k"])
        offset = 0.14 * (i - (len(engines) - 1) / 2)  # keeps the ranges of two engines apart
        predicted = [(p["k"] + offset, p["predicted"]) for p in line if finite(p.get("predicted"))]
        if line:
            plot.line([(p["k"] + offset, p["speedup"]) for p in line], colour(i))
            entries.append((f"{engine}, measured", swatch(colour(i), shape(i))))
        if predicted:
            plot.line(predicted, f"{colour(i)} dashed")
            entries.append((f"{engine}, predicted", swatch(f"{colour(i)} dashed")))
        for j, row in enumerate(row for row in others if row["engine"] == engine):
            style = f"{colour(i)} rule{j % 3}"
            plot.level(row["speedup"], style)
            entries.append((f"{method_name(row)}: {row['speedup']:.2f}x", swatch(style)))
        for p in line:
            low, high = p.get("speedup_range") or [p["speedup"]] * 2
            plot.spread(p["k"] + offset, low, high, colour(i))
            tooltip = f"{engine}, K = {p['k']}: {p['speedup']:.2f}x ({low:.2f} to {high:.2f})"
            plot.marker(p["k"] + offset, p["speedup"], "star" if p.get("best") else shape(i), colour(i), tooltip)
            if p.get("best"):
                plot.note(p["k"] + offset, max(high, p["speedup"]), f"{p['speedup']:.2f}x")
    entries += [("best K", swatch("even", "star", line=False)), ("main model alone", swatch("even"))]
    return tag("figure", tag("h3", title), plot.svg(), legend(entries))


# ---- acceptance per position ----------------------------------------------------------------------------------------


def acceptance(result: Drawn) -> Markup | str:
    """Per engine and temperature: the longest fixed draft length, and every other policy."""
    longest: dict[tuple, Drawn] = {}
    for row in result.get("rows", []):
        rule = row["draft_length"] if isinstance(row.get("draft_length"), str) else "fixed"
        key = (row.get("engine"), row.get("temperature"), rule)
        if len(row.get("position_acceptance") or []) > len(longest.get(key, {}).get("position_acceptance", [])):
            longest[key] = row
    rows = list(longest.values())
    if not rows or result["program"] in OTHER_ROWS:
        return ""
    max_positions = max(len(row["position_acceptance"]) for row in rows)
    description = "; ".join(
        f"{method_name(row)}: {', '.join(f'{a:.2f}' for a in row['position_acceptance'])}" for row in rows
    )
    x, y = (
        integer_axis("position in the draft (token)", [1, max_positions]),
        axis("accepted (share of iterations)", 0, 1),
    )
    plot = Plot("Per-position acceptance", description, x, y)
    entries = []
    for i, row in enumerate(rows):
        points = list(enumerate(row["position_acceptance"], start=1))
        plot.line(points, colour(i))
        for position, share in points:
            plot.marker(position, share, shape(i), colour(i), f"{method_name(row)}, position {position}: {share:.2f}")
        entries.append((method_name(row), swatch(colour(i), shape(i))))
    words = "Share of the iterations with an i-th draft token in which it, and so all before it, was accepted."
    return section("acceptance", "Per-position acceptance", how(words), tag("figure", plot.svg(), legend(entries)))


# ---- time per iteration ---------------------------------------------------------------------------------------------


def iteration(result: Drawn) -> Markup | str:
    rows = result.get("iteration")
    if not rows:
        return ""
    parts = ("draft", "verify", "overhead")
    bars = [(row["name"], [row[f"{part}_ms"] for part in parts]) for row in rows]
    description = "; ".join(f"{name}: {sum(values):.1f} ms" for name, values in bars)
    chart = stacked_bars("Time per iteration", description, "time per iteration (ms)", bars, parts)
    marks = ["draft: its forward passes", "verify: one forward pass of the main model", "overhead: the rest"]
    entries = [(words, part_swatch(i)) for i, words in enumerate(marks, start=1)]
    words = "Means. An iteration drafts up to K tokens, verifies them with the main model and yields 1 to K + 1 tokens."
    return section("iteration", "Time per iteration", how(words), tag("figure", chart, legend(entries)))


# ---- tune's candidates ----------------------------------------------------------------------------------------------


def candidates(result: Drawn) -> Markup | str:
    """Speed against agreement; candidates never compared with the f32 text are in the table only."""
    numbered = list(enumerate(result.get("candidates", []), start=1))
    if not numbered:
        return ""
    comparable = [
        (i, candidate)
        for i, candidate in numbered
        if finite(candidate.get("throughput")) and finite(candidate.get("agreement"))
    ]
    content = [how("Higher is faster; further right agrees more with the main model's greedy text in f32.")]
    if comparable:
        content.append(candidates_figure(comparable, chosen(result)))
    if len(comparable) < len(numbered):
        content.append(
            how(
                f"{len(numbered) - len(comparable)} of {len(numbered)} lack one of the two measurements: see the table "
                "below."
            )
        )
    return section("candidates", "Speed against agreement", *content)


def candidates_figure(comparable: list[tuple[int, Drawn]], recommended: Drawn | None) -> Markup:
    agreement, speed = zip(
        *((candidate["agreement"], candidate["throughput"]) for _, candidate in comparable), strict=True
    )
    top = max((candidate for _, candidate in comparable), key=lambda candidate: candidate["throughput"])
    description = (
        f"{len(comparable)} candidates; the fastest decodes {top['throughput']:.1f} tokens/s and agrees on "
        f"{top['agreement']:.1%} of the tokens."
    )
    x = percent_axis("agreement with f32 greedy (% of tokens)", min(agreement), max(agreement))
    plot = Plot("Speed against agreement", description, x, axis("throughput (tokens/s)", 0, max(speed)))
    for i, candidate in comparable:
        is_complete = candidate.get("spread") is not None and not candidate.get("dropped_in_round")
        mark, style = ("star", "c2") if candidate is recommended else ("circle", "c1" if is_complete else "c1 open")
        agreed = candidate["agreement"]
        tooltip = f"{candidate_name(i, candidate)}: {candidate['throughput']:.1f} tokens/s, agreement {agreed:.1%}"
        plot.marker(candidate["agreement"], candidate["throughput"], mark, style, tooltip)
    entries = [("measured to the end", swatch("c1", "circle", line=False))]
    entries.append(("dropped, or only measured briefly", swatch("c1 open", "circle", line=False)))
    for i, candidate in comparable:
        if candidate is recommended:
            plot.note(candidate["agreement"], candidate["throughput"], str(i))
            entries.append((f"recommended: {candidate_name(i, candidate)}", swatch("c2", "star", line=False)))
    return tag("figure", plot.svg(), legend(entries))


def chosen(result: Drawn) -> Drawn | None:
    """The candidate with the recommended settings."""
    recommendation = result.get("recommendation") or {}
    best = recommendation.get("settings", {}).get(recommendation.get("best"))
    if best is None:
        return None
    engine = {ALONE: GENAI, SUFFIX: NATIVE}.get(recommendation["best"]) or engine_id(recommendation["best"])
    settings = {key: value for key, value in best.items() if key not in FIGURES} | {"engine": engine}
    equal = [one for one in result["candidates"] if _with_engine_id(one.get("settings")) == settings]
    same_figures = [one for one in equal if one.get("throughput") == best.get("throughput")]  # of several drafts
    return next(iter([*same_figures, *equal]), None)


def _with_engine_id(settings: Drawn | None) -> Drawn:
    """The settings of a candidate, the engine by its present id; a device or property set has none."""
    settings = settings or {}
    return {**settings, "engine": engine_id(settings["engine"])} if "engine" in settings else settings


def percent_axis(title: str, low: float, high: float) -> Axis:
    axis_of_values = axis(title, 0.9 if low == high == 1 else low, high)
    return axis_of_values._replace(labels=[f"{100 * value:g}" for value in axis_of_values.ticks])
