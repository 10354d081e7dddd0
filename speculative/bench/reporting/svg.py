"""Inline SVG charts for the HTML report: line and point plots, stacked bars.

Charts are 360 units wide, so that a phone shows them at full size. Colours are CSS classes c1 to c6, which the page's
style sheet defines for light and dark mode; series also differ in marker or dash, bars in pattern.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from speculative.bench.reporting.markup import Markup, join, tag

WIDTH, HEIGHT = 360, 236  # of a chart; with bars, the height is that of the bars
LEFT, RIGHT, TOP, BOTTOM = 48, 18, 16, 42  # margins
MAX_STEPS = 6  # between the ticks of an axis
COLOURS = 6
LONGEST_NAME = 48  # characters that fit above a bar
MARKERS = {
    "circle": "M-3.5,0a3.5,3.5 0 1,0 7,0a3.5,3.5 0 1,0 -7,0",
    "square": "M-3.2,-3.2h6.4v6.4h-6.4z",
    "triangle": "M0,-4.2L4,3.2H-4z",
    "diamond": "M0,-4.6L4.6,0L0,4.6L-4.6,0z",
    "cross": "M-3.5,-3.5L3.5,3.5M-3.5,3.5L3.5,-3.5",
    "star": "M0,-8L1.9,-2.6H7.6L3,0.9L4.7,6.5L0,3.1L-4.7,6.5L-3,0.9L-7.6,-2.6H-1.9z",
}
SERIES_MARKERS = ("circle", "square", "triangle", "diamond", "cross")


def colour(i: int) -> str:
    """The style of the i-th series."""
    return f"c{i % COLOURS + 1}" + (" dashed" if i >= COLOURS else "")


def shape(i: int) -> str:
    return SERIES_MARKERS[i % len(SERIES_MARKERS)]


class Axis(NamedTuple):
    title: str  # including the unit
    low: float
    high: float
    ticks: Sequence[float]
    labels: list[str]


def ticks(low: float, high: float) -> list[float]:
    """Round numbers that enclose `low` to `high`, with at most `MAX_STEPS` steps."""
    span = (high - low) or abs(high) or 1.0
    unit = 10 ** math.floor(math.log10(span / MAX_STEPS))
    for step in (unit, 2 * unit, 5 * unit, 10 * unit, 20 * unit):
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first <= MAX_STEPS:
            break
    return [round(step * i, 10) for i in range(first, max(last, first + 1) + 1)]


def axis(title: str, low: float, high: float) -> Axis:
    """An axis over round numbers that enclose `low` to `high`."""
    values = ticks(low, high)
    return Axis(title, values[0], values[-1], values, [f"{value:g}" for value in values])


def integer_axis(title: str, values: Sequence[int]) -> Axis:
    """An axis over whole numbers, half a step wider on both sides."""
    low, high = min(values), max(values)
    step = math.ceil((high - low + 1) / 12)
    values_shown = list(range(low, high + 1, step))
    return Axis(title, low - 0.5, high + 0.5, values_shown, [str(value) for value in values_shown])


def number(value: float) -> str:
    """A coordinate."""
    return f"{value:.1f}"


class Plot:
    """Lines and points over two axes; later additions are drawn on top."""

    def __init__(self, title: str, description: str, x: Axis, y: Axis):
        self.title, self.description, self.x, self.y = title, description, x, y
        self.parts: list[Markup] = []

    def at_x(self, value: float) -> float:
        return LEFT + (value - self.x.low) / (self.x.high - self.x.low) * (WIDTH - LEFT - RIGHT)

    def at_y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y.low) / (self.y.high - self.y.low) * (HEIGHT - TOP - BOTTOM)

    def line(self, points: Sequence[tuple[float, float]], style: str) -> None:
        path = " ".join(f"{number(self.at_x(x))},{number(self.at_y(y))}" for x, y in points)
        self.parts.append(tag("polyline", points=path, class_=f"line {style}"))

    def level(self, y: float, style: str) -> None:
        """A horizontal line."""
        at = number(self.at_y(y))
        self.parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at, class_=f"line {style}"))

    def spread(self, x: float, low: float, high: float, style: str) -> None:
        at, bottom, top = self.at_x(x), self.at_y(low), self.at_y(high)
        path = f"M{at:.1f},{bottom:.1f}V{top:.1f}M{at - 3:.1f},{top:.1f}h6M{at - 3:.1f},{bottom:.1f}h6"
        self.parts.append(tag("path", d=path, class_=f"spread {style}"))

    def marker(self, x: float, y: float, shape: str, style: str, label: str) -> None:
        """`label` is shown on hover."""
        place = f"translate({number(self.at_x(x))} {number(self.at_y(y))})"
        self.parts.append(tag("path", tag("title", label), d=MARKERS[shape], transform=place, class_=f"marker {style}"))

    def note(self, x: float, y: float, words: str) -> None:
        """Text above a point, kept within the chart."""
        at = self.at_x(x)
        anchor = "end" if at > WIDTH - 30 else "middle"
        place = {"x": number(at), "y": number(self.at_y(y) - 9), "text_anchor": anchor}
        self.parts.append(tag("text", words, **place, class_="note-text"))

    def svg(self) -> Markup:
        bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
        frame = []
        for value, label in zip(self.y.ticks, self.y.labels, strict=True):
            at = self.at_y(value)
            frame.append(tag("line", x1=LEFT, x2=right, y1=number(at), y2=number(at), class_="grid-line"))
            frame.append(tag("text", label, x=LEFT - 6, y=number(at + 3.5), text_anchor="end"))
        for value, label in zip(self.x.ticks, self.x.labels, strict=True):
            frame.append(tag("text", label, x=number(self.at_x(value)), y=bottom + 15, text_anchor="middle"))
        middle = number((TOP + bottom) / 2)
        frame.append(tag("line", x1=LEFT, x2=right, y1=bottom, y2=bottom, class_="axis-line"))
        frame.append(tag("text", self.x.title, x=(LEFT + right) / 2, y=HEIGHT - 7, text_anchor="middle", class_="axis"))
        frame.append(
            tag(
                "text",
                self.y.title,
                transform=f"translate(11 {middle}) rotate(-90)",
                text_anchor="middle",
                class_="axis",
            )
        )
        return picture(self.title, self.description, HEIGHT, [*frame, *self.parts])


def stacked_bars(
    title: str, description: str, unit: str, rows: list[tuple[str, list[float]]], parts: Sequence[str]
) -> Markup:
    """One bar per (name, values of the parts), with its name above and its total to the right."""
    scale = axis(unit, 0, max([sum(values) for _, values in rows] + [1e-9]))
    left, right, step = 4, WIDTH - 52, 30
    bottom = TOP + step * len(rows) + 2
    drawn = []
    for value, label in zip(scale.ticks, scale.labels, strict=True):
        at = number(left + value / scale.high * (right - left))
        drawn.append(tag("line", x1=at, x2=at, y1=TOP - 8, y2=bottom, class_="grid-line"))
        drawn.append(tag("text", label, x=at, y=bottom + 14, text_anchor="middle" if value else "start"))
    for i, (name, values) in enumerate(rows):
        top, x = TOP + step * i, float(left)
        drawn.append(tag("text", shortened(name), x=left, y=top + 6, class_="bar-name"))
        for part, what, value in zip(range(1, len(parts) + 1), parts, values, strict=True):
            width = value / scale.high * (right - left)
            box = {"x": number(x), "y": top + 10, "width": number(width), "height": 12}
            drawn.append(tag("rect", tag("title", f"{name}: {what} {value:.2f} ms"), **box, class_=f"part part{part}"))
            x += width
        drawn.append(tag("text", f"{sum(values):.1f} ms", x=number(x + 5), y=top + 20, class_="bar-total"))
    drawn.append(tag("text", unit, x=number((left + right) / 2), y=bottom + 32, text_anchor="middle", class_="axis"))
    return picture(title, description, bottom + 40, drawn)


def shortened(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "\u2026"


def picture(title: str, description: str, height: float, content: list[Markup]) -> Markup:
    """The SVG element with an accessible title and description."""
    return tag(
        "svg", tag("title", title), tag("desc", description), join(content),
        viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=f"{title}. {description}",
    )  # fmt: skip


def legend(entries: list[tuple[str, Markup]]) -> Markup:
    """A legend of (words, swatch) entries."""
    return tag("ul", join(tag("li", swatch, words) for words, swatch in entries), class_="legend")


def swatch(style: str, shape: str = "", line: bool = True) -> Markup:
    parts = [tag("line", x1=1, x2=27, y1=7, y2=7, class_=f"line {style}")] if line else []
    if shape:
        parts.append(tag("path", d=MARKERS[shape], transform="translate(14 7)", class_=f"marker {style}"))
    return tag("svg", join(parts), viewBox="0 0 28 14", class_="swatch", aria_hidden="true")


def part_swatch(part: int) -> Markup:
    box = tag("rect", x=4, y=1, width=20, height=12, class_=f"part part{part}")
    return tag("svg", box, viewBox="0 0 28 14", class_="swatch", aria_hidden="true")


PATTERNS = Markup(
    '<svg width="0" height="0" aria-hidden="true" class="patterns"><defs>'
    '<pattern id="part1" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" class="ground1"/><rect width="2" height="6" class="mark"/></pattern>'
    '<pattern id="part3" width="5" height="5" patternUnits="userSpaceOnUse">'
    '<rect width="5" height="5" class="ground3"/><circle cx="2.5" cy="2.5" r="1.1" class="mark"/></pattern>'
    "</defs></svg>"
)
