"""Runs the load benchmarks as users do, and checks what both write. The embedded draft is main and draft model, because
it is fast."""

import csv
import itertools
import json
import os
import subprocess
import sys

from speculative.bench.result import BatchingResult, ServingResult
from tests.support.paths import DRAFT, ROOT
from tests.support.typed import problems

QUICK = ["--max-concurrency", "1,3", "--rounds", "1"]
QUICK += ["--max-new-tokens", "12", "--max-prompts", "4", "--property", "EXECUTION_MODE_HINT=ACCURACY"]
QUICK += ["--property", "INFERENCE_NUM_THREADS=1"]  # several mostly wait for each other


def measure(program, folder, *options, env=None):
    """The result of one run in exact arithmetic, with these options, whose files are in `folder`."""
    files = [part for kind in ("json", "csv", "html", "png") for part in (f"--{kind}", str(folder / f"load.{kind}"))]
    command = [sys.executable, program, str(DRAFT), str(DRAFT), *QUICK, *map(str, options), *files]
    environment = {**os.environ, **(env or {})}
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", timeout=500)
    assert process.returncode == 0, process.stderr
    assert "Traceback" not in process.stderr
    result = json.loads(process.stdout.splitlines()[-1])
    assert result["program"] in program
    return result


def check(result, kind: type[ServingResult] | type[BatchingResult], methods, folder):
    """Every method is measured with 1 and 3 clients, and every file has the result."""
    assert problems(result, kind) == []
    assert [(row["method"], row["clients"]) for row in result["rows"]] == list(itertools.product(methods, (1, 3)))
    for one in result["rows"]:
        assert one["answered"] == one["requests"] >= one["clients"]
        assert one["refused"] == one["cut off"] == one["lost"] == 0
        assert one["throughput"] > 0 and one["ttft"] > 0 and one["tpot"] > 0
        assert one["ttft_range"][0] <= one["ttft"] <= one["ttft_range"][1]
        if one["method"] in ("with draft", "ours, adaptive draft"):
            assert one["block_efficiency"] >= 1 and one["mean_draft_length"] >= 0  # none where it gains no time here
            assert not one["mean_draft_length"] or 0 <= one["acceptance_rate"] <= 1
        if one["speedup"] is not None:
            assert one["same_text"] == one["texts"] > 0  # greedy, exact: the draft changes no text
    assert len(result["summary"]) >= 4
    assert any(line.startswith("The draft ") for line in result["summary"])
    assert json.loads((folder / "load.json").read_text(encoding="utf-8")) == result
    rows = list(csv.DictReader((folder / "load.csv").open(encoding="utf-8")))
    assert [row["name"] for row in rows] == [row["name"] for row in result["rows"]]
    page = (folder / "load.html").read_text(encoding="utf-8")
    assert all(f'id="load-{key}"' in page for key in ("throughput", "ttft", "tpot", "mean_draft_length"))
    assert (folder / "load.png").read_bytes().startswith(b"\x89PNG")
