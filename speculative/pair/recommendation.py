"""Recommended settings of a pair or a main model, kept beside it in `recommended.json`, and a check that they apply.

    recommendation = read(place(main, draft))
    settings = recommendation["settings"]["genai"]  # device, properties, num_assistant_tokens, ...
    for note in check(recommendation, main, draft): ...

Written by scripts/tune.py, read by the samples with --recommended. The file holds:

- `use_draft`, `reason`: whether the draft gives a speedup, and why, in one sentence; `sentences`: all findings;
- `format`: 2. Format 1 named the engines "GenAI" and "ours"; it is converted when read;
- `best`: the fastest of `settings`: "alone" (the main model), "suffix" (suffix decoding), "genai" (its pipeline),
  "native" (this project's engine). "alone" is GenAI's pipeline, which the samples use, even if `sentences` names a
  faster method. Each has `device`, `properties`, `throughput`, `speedup` and `speedup_range` over the main model alone
  with its defaults; suffix decoding, also beside a draft, `max_ngram_size`; those with a worthwhile draft also
  `draft_device`, `draft_properties`, `num_assistant_tokens` (0: adaptive), `assistant_confidence_threshold` (0: none),
  `scheduler` (of GenAI's SchedulerConfig);
- `main`, `draft`: the folder's name and the fingerprint of its weights; `draft` is null if none was given;
- `measured_on`: versions and devices.
"""

import hashlib
import json
import os
from pathlib import Path

from speculative.atomic_write import atomic_write
from speculative.pair.engines import GENAI, NATIVE, engine_id

FILE = "recommended.json"
FORMAT = 2
ALONE, SUFFIX = "alone", "suffix"  # keys of `settings` without a draft model; those with one are engines
SAMPLE_OF = {  # the sample that runs with these settings
    ALONE: "greedy_causal_lm.py",
    SUFFIX: "suffix_decoding_lm.py",
    GENAI: "speculative_greedy_lm.py",
    NATIVE: "speculative_sampling_lm.py",
}
TUNE = "`python scripts/tune.py MAIN [DRAFT]`"
PIECES, PIECE = 64, 4096  # number and bytes of the weight samples: large weights are not read in full


def place(main: Path, draft: Path | None = None) -> Path | None:
    """`recommended.json` in the common parent folder of main and draft, or None if they have none."""
    parents = {Path(folder).resolve().parent for folder in (main, draft or main)}
    return parents.pop() / FILE if len(parents) == 1 else None


def fingerprint(folder: Path) -> str:
    """Hash of a model's graph and weights (their size and evenly spaced samples)."""
    digest = hashlib.sha256(Path(folder, "openvino_model.xml").read_bytes())
    with Path(folder, "openvino_model.bin").open("rb") as weights:
        size = weights.seek(0, os.SEEK_END)
        digest.update(str(size).encode())
        for i in range(PIECES):
            weights.seek(size * i // PIECES)
            digest.update(weights.read(PIECE))
    return digest.hexdigest()[:32]


def write(file: Path, recommendation: dict) -> None:
    """Write the file atomically. Raises OSError."""
    atomic_write(file, json.dumps({"format": FORMAT, **recommendation}, indent=2, ensure_ascii=False) + "\n")


def read(file: Path) -> dict:
    """Read the file. Raises ValueError, with a one-sentence message, if it is missing or unusable."""
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError:
        raise ValueError(f"there is no {file}: create it with {TUNE}") from None
    except ValueError:
        raise ValueError(f"{file} is not JSON: recreate it with {TUNE}") from None
    content = upgraded(content)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{file} is not in format {FORMAT}: recreate it with {TUNE}")
    return content


def upgraded(content: object) -> object:
    """The content of a file of format 1 in format 2; any other content unchanged."""
    if not isinstance(content, dict) or content.get("format") != 1:
        return content
    renamed = {**content, "format": 2}
    if isinstance(content.get("settings"), dict):
        renamed["settings"] = {engine_id(name): settings for name, settings in content["settings"].items()}
    if isinstance(content.get("best"), str):
        renamed["best"] = engine_id(content["best"])
    return renamed


def check(recommendation: dict, main: Path, draft: Path | None, measured_on: dict | None = None) -> list[str]:
    """Notes on differences between the measurement and now (`measured_on`, with the same keys).

    Raises ValueError if the weights have changed since the measurement, or it was without a draft.
    """
    if draft and recommendation["draft"] is None:
        advice = "tune with `python scripts/tune.py MAIN DRAFT`"
        raise ValueError(f"the recommendation was measured without a draft: {advice}")
    for role, folder in (("main", main), ("draft", draft)):
        if folder and fingerprint(folder) != recommendation[role]["fingerprint"]:
            raise ValueError(
                f"the recommendation was measured with other weights than those of the {role} model {folder}: "
                f"tune again with {TUNE}"
            )
    measured = recommendation["measured_on"]
    return [
        f"the recommendation was measured with {name} {measured[name]}, this is {now}"
        for name, now in (measured_on or {}).items()
        if name in measured and measured[name] != now
    ]
