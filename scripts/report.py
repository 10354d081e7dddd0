"""Render a benchmark result as an HTML report with charts, a CSV table or a PNG plot.

    python scripts/benchmark.py models/embedded/main models/embedded/draft --json result.json
    python scripts/report.py result.json page.html
    python scripts/report.py result.json rows.csv speedup.png

RESULT is a file written by `--json FILE`, the saved output of a script, or a result in docs/figures/. It needs the keys
`program` and `summary`, which the results of verify_lossless.py and benchmark_costs.py, for example, do not have. The
extension of each output file selects the format: .html is a self-contained page; .csv is the main table; .png is a plot
of speedup against draft length, of a server under load, or of a plan. The scripts' own `--html` and `--csv` write the
same files.
"""

import argparse
import sys
from pathlib import Path

from speculative.bench import saved_result
from speculative.bench.harness import png_file
from speculative.bench.reporting.page import draw
from speculative.bench.result import Result
from speculative.cli.parser import Parser
from speculative.cli.processes import prepare_output, print_or_exit

FORMER = {"way": "method"}  # keys of rows in results of earlier versions
GIVE = "give a file written by --json, or an output whose last line is the JSON"

# ---- the command ----------------------------------------------------------------------------------------------------


def read_result(text: str) -> Result:
    """An argparse type: the result in a JSON file or on the last line of a saved output."""
    try:
        result = saved_result.read(Path(text))
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot read {text!r} ({error.strerror}): {GIVE}") from None
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} has no result: {GIVE}") from None
    if {"program", "summary"} <= set(result):
        return with_present_keys(result)
    raise argparse.ArgumentTypeError(
        f"{text!r} has no keys 'program' and 'summary', so it cannot be drawn: give a file written by --json of a "
        "program whose results have them, like benchmark.py"
    )


def with_present_keys(result: dict) -> dict:
    """The result, of which earlier versions may have written the rows."""
    rows = result.get("rows")
    if isinstance(rows, list):
        result["rows"] = [{FORMER.get(k, k): row[k] for k in row} if isinstance(row, dict) else row for row in rows]
    return result


def output_file(text: str) -> Path:
    """An argparse type: an output file in a supported format."""
    path = Path(text)
    if path.suffix not in (".html", ".csv", ".png"):
        raise argparse.ArgumentTypeError(f"{text!r} does not end in .html, .csv or .png, which select the format")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: folder {str(path.parent)!r} does not exist")
    return png_file(text) if path.suffix == ".png" else path


def main() -> int:
    prepare_output()
    parser = Parser(description=__doc__)
    parser.add_argument("result", type=read_result, help="JSON of a script, or its saved output")
    parser.add_argument("files", type=output_file, nargs="+", metavar="FILE", help="output files: .html, .csv, .png")
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
            reason = f"the result does not have the scripts' format ({type(error).__name__}: {error})"
            print(f"error: {path} cannot be drawn: {reason}; give a file written by --json", file=sys.stderr)
            return 1
        except KeyboardInterrupt:  # partial files are removed
            return 130
    print_or_exit("\n".join(map(str, arguments.files)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
