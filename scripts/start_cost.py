"""What a start costs: seconds to load, the first and the second time, and the peak memory; each in a new process.

    python scripts/start_cost.py '{"main": "models/embedded/main", "device": "CPU", "engine": "GenAI"}'

That is one start, as `start_costs` runs it: from here to a text of 32 tokens, printed as JSON.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import psutil
from measuring import ctrl_c_raises
from openvino_genai import GenerationConfig

from speculative import decoder, genai_runs

TOKENS = 32


def start_costs(
    name: str, engine: str, main: Path, device: str, draft: Path | None, draft_device: str, properties: dict
):
    """Two starts that share a model cache (CACHE_DIR), which is empty at the first. Raises RuntimeError, with what went
    wrong, where one fails."""
    found = []
    with ctrl_c_raises(), tempfile.TemporaryDirectory() as folder:  # which Ctrl-C must not leave behind
        asked = {
            "engine": engine,
            "main": str(main),
            "device": device,
            "draft": str(draft) if draft else None,
            "draft_device": draft_device,
            "properties": {**properties, "CACHE_DIR": folder},
        }
        for _ in range(2):
            command = [sys.executable, __file__, json.dumps(asked)]
            process = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
            if process.returncode:
                said = process.stderr.strip().splitlines() or [f"it ended with status {process.returncode}"]
                raise RuntimeError(said[-1].removeprefix("error: "))
            found.append(json.loads(process.stdout.splitlines()[-1]))
    first, second = found
    return {
        "name": name,
        "first_seconds": first["seconds"],
        "second_seconds": second["seconds"],
        "peak_bytes": first["peak_bytes"],
        "second_peak_bytes": second["peak_bytes"],
    }


def one_start(asked: dict) -> dict:
    main, device, properties = Path(asked["main"]), asked["device"], asked.get("properties", {})
    draft, draft_device = asked.get("draft") and Path(asked["draft"]), asked.get("draft_device", "")
    prompt = np.arange(1, 9)
    begin = time.perf_counter()
    if asked["engine"] == "ours":
        ours = decoder.load(main, device, draft, draft_device, properties, properties)
        seconds = time.perf_counter() - begin
        ours.generate(prompt, GenerationConfig(max_new_tokens=TOKENS, ignore_eos=True))
    else:
        pipe = genai_runs.load(main, device, draft, draft_device, properties, properties)
        seconds = time.perf_counter() - begin
        genai_runs.generate(pipe, genai_runs.inputs(prompt), TOKENS, 4 if draft else None)
    return {"seconds": seconds, "peak_bytes": peak_memory()}


def peak_memory() -> int | None:
    """Of this process so far, in bytes; None where the system does not tell."""
    status = Path("/proc/self/status")
    if status.is_file():
        told = [line for line in status.read_text().splitlines() if line.startswith("VmHWM")]
        return int(told[0].split()[1]) * 1024 if told else None
    return getattr(psutil.Process().memory_info(), "peak_wset", None)  # Windows


if __name__ == "__main__":
    try:
        print(json.dumps(one_start(json.loads(sys.argv[1]))))
    except (RuntimeError, ValueError, KeyError) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
