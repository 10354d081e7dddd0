"""The training of the embedded pair, run for seconds: resuming, function-preserving growth, the resulting pair."""

import json
import signal
import subprocess
import sys

import pytest

from speculative.modelgen import text as embedded_text
from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE, wait_until


def test_recipes_render_completely_and_reproducibly():
    import random

    documents = embedded_text.recipe_documents(400, random.Random(5))
    assert len(set(documents)) > 300
    assert not [d for d in documents if "<<" in d or ">>" in d]
    assert documents == embedded_text.recipe_documents(400, random.Random(5))


def test_every_recipe_is_valid_python():
    import ast
    import random

    recipes = embedded_text.Recipes()
    generator = random.Random(0)
    for _ in range(600):
        _, code = recipes.render(generator, {})
        ast.parse(code)


def test_deepening_preserves_the_function():
    import torch

    from scripts.train_embedded_pair import MAIN_SHAPE, deepen, new_model

    torch.manual_seed(0)
    shallow = new_model(MAIN_SHAPE, 2).eval()
    deep = deepen(shallow, 5).eval()
    ids = torch.randint(0, 4096, (2, 20))
    with torch.no_grad():
        difference = (shallow(ids).logits - deep(ids).logits).abs().max().item()
    assert deep.config.num_hidden_layers == 5 and difference < 1e-5


def test_missing_torch_names_the_install_command(tmp_path):
    program = f"""import runpy, sys
sys.modules["torch"] = None  # as if it were not installed
sys.argv[1:] = [{str(tmp_path / "out")!r}]
runpy.run_path({str(ROOT / "scripts/train_embedded_pair.py")!r}, run_name="__main__")"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, encoding="utf-8", cwd=ROOT)
    assert process.returncode == 1 and process.stdout == "" and not (tmp_path / "out").exists()
    assert process.stderr == (
        "error: torch is not installed: `pip install -r requirements-export.txt` installs what training needs.\n"
    )


@pytest.mark.long
@pytest.mark.posix("POSIX signals stop the run in its middle here")
def test_interrupted_training_resumes_and_writes_two_checkpoints(tmp_path):
    command = [
        sys.executable,
        str(ROOT / "scripts/train_embedded_pair.py"),
        str(tmp_path),
        "--minutes",
        "0.2",
        "--no-compile",
    ]
    first = subprocess.Popen(command, stderr=subprocess.PIPE, encoding="utf-8", cwd=ROOT)
    wait_until((tmp_path / "shallow").exists, "the first half is trained")
    first.send_signal(signal.SIGINT)
    _, stderr = first.communicate(timeout=PATIENCE)
    assert first.returncode == 130 and "rerun the command to resume" in stderr and "Traceback" not in stderr, stderr
    made = (tmp_path / "shallow/model.safetensors").stat().st_mtime

    second = subprocess.run(command, capture_output=True, encoding="utf-8", cwd=ROOT, timeout=300)
    assert second.returncode == 0, second.stderr
    assert (tmp_path / "shallow/model.safetensors").stat().st_mtime == made  # not trained again
    for half in ("main", "draft"):
        assert (tmp_path / half / "model.safetensors").exists() and (tmp_path / half / "tokenizer.json").exists()
        assert json.loads((tmp_path / f"{half}.json").read_text())[half] > 0
