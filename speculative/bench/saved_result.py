"""Reads the JSON result of a script: from a file of its --json, its saved output, or a recorded figure."""

import codecs
import json
from pathlib import Path


def read(file: Path) -> dict:
    """The object that is the whole file or its last line. Of one that `scripts/figures.py` recorded, its `result`.

    Windows PowerShell 5 saves outputs in UTF-16, others in UTF-8. Raises OSError, and ValueError for anything else.
    """
    data = file.read_bytes()
    text = data.decode("utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig").strip()
    for candidate in (text, text.rpartition("\n")[2]):
        try:
            found = json.loads(candidate)
        except ValueError:
            continue
        if isinstance(found, dict):
            is_recorded = {"command", "commit", "result"} <= set(found) and isinstance(found["result"], dict)
            return found["result"] if is_recorded else found
    raise ValueError("no JSON object, nor an output that ends with one")
