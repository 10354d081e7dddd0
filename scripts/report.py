"""Draw what the scripts measured: one page with pictures for a browser, a table for spreadsheets, a plot.

    python scripts/benchmark.py models/embedded/main models/embedded/draft --json result.json
    python scripts/report.py result.json page.html
    python scripts/report.py result.json rows.csv speedup.png

RESULT is what `--json FILE` wrote, or the saved output of a script: its last line counts. The ending of each file
decides what is drawn: .html is one page that holds all it shows and loads nothing; .csv is the main table; .png is the
plot of speedup against draft length, or of a server under load. The scripts' own `--html` and `--csv` write the same.
"""

import argparse
import json
import sys
from pathlib import Path

from speculative.bench.reporting.page import draw
from speculative.cli.processes import prepare_output

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
