"""Draw what the scripts measured: one page with pictures for a browser, a table for spreadsheets, a plot.

    python scripts/benchmark.py models/embedded/main models/embedded/draft --json result.json
    python scripts/report.py result.json page.html
    python scripts/report.py result.json rows.csv speedup.png

RESULT is what `--json FILE` wrote, or the saved output of a script: its last line counts. The ending of each file
decides what is drawn: .html is one page that holds all it shows and loads nothing; .csv is the main table; .png is the
plot of speedup against draft length, or of a server under load. The scripts' own `--html` and `--csv` write the same.
"""

import argparse
import csv
import io
import json
import sys
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from load_charts import load_charts, loads
from markup import Markup, tag
from report_charts import acceptance, candidates, iteration, speedup, speedup_points
from report_tables import categories, devices, environment, recommendation, tables, tokens
from svg_charts import PATTERNS
from whole_file import write_whole

from speculative.processes import prepare_output

STYLE = Path(__file__).with_name("report.css")
TITLES = {
    "benchmark": "What the draft gains",
    "sweep_draft_length": "Speedup against draft length",
    "device_swap": "Devices for main model and draft",
    "tune": "The best settings",
    "benchmark_serving": "What a draft gains under load",
    "benchmark_batching": "Several texts at once",
}
INDENT = "    "  # of a sentence that is a line of a program
ALLOWED = "default-src 'none'; style-src 'unsafe-inline'"  # nothing is loaded, nothing is run


# ---- the page -------------------------------------------------------------------------------------------------------


def html_text(result: dict) -> str:
    """The page: words first, then pictures, tables, the environment; each where `result` has what it shows."""
    title = TITLES.get(result["program"], result["program"])
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


def commands_apart(sentences: list[str]):
    """The sentences; a command at the end of one stands on an indented line of its own."""
    for sentence in sentences:
        words, found, command = sentence.partition(": python ")
        yield words + ":" if found else sentence
        if found:
            yield f"{INDENT}python {command}"


def summary(result: dict, title: str) -> Markup:
    """The sentences, the first one large; those that are indented are lines of a program."""
    facts = result.get("environment", {})
    about = [str(facts[key]) for key in ("main", "draft") if facts.get(key)]
    first, *others = result["summary"] or ["Nothing was measured."]
    content = [tag("h1", f"{title}: {' with '.join(about)}" if about else title), tag("p", first, class_="answer")]
    for is_code, lines in groupby(commands_apart(others), key=lambda line: line.startswith(INDENT)):
        if is_code:
            content.append(tag("pre", tag("code", "\n".join(line.removeprefix(INDENT) for line in lines)), tabindex=0))
        else:
            content += [tag("p", line) for line in lines]
    return tag("header", *content, id="summary", class_="card")


# ---- CSV ------------------------------------------------------------------------------------------------------------


def csv_text(result: dict) -> str:
    """The main table of a result: draft lengths, candidates, or else the ways, or the cells of devices."""
    rows = result.get("sweep") or result.get("candidates") or result.get("rows")
    rows = rows or result.get("matrix", {}).get("cells", [])
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
    if path.suffix == ".png" and loads(result):
        import load_plot

        write_whole(path, load_plot.png(loads(result)))
    elif path.suffix == ".png":
        from speedup_plot import png

        write_whole(path, png(speedup_points(result)))
    else:
        write_whole(path, html_text(result) if path.suffix == ".html" else csv_text(result))


def main() -> int:
    prepare_output()
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
        except ValueError as error:
            print(f"error: {path} cannot be drawn: {error}", file=sys.stderr)
            return 1
        except (KeyError, TypeError, AttributeError) as error:
            reason = f"the result is not of the form that the scripts print ({type(error).__name__}: {error})"
            print(f"error: {path} cannot be drawn: {reason}; give what --json wrote", file=sys.stderr)
            return 1
        except KeyboardInterrupt:  # what is half-written is gone
            return 130
    print(*arguments.files, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
