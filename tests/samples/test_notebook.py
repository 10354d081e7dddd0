"""The notebook is executed from the first cell to the last, with fewer tokens and rounds than as committed, and with
--long as committed, too; the tests check what its cells computed."""

import json
import re
import shutil
import subprocess
import sys

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.paths import ROOT

NOTEBOOK = ROOT / "samples/notebooks/speculative_sampling.ipynb"
FEW = {"NEW_TOKENS": 24, "MAX_PROMPTS": 4, "ROUNDS": 1}
COMPUTED = """
import json
print(json.dumps({
    "pair": str(PAIR), "command": command, "devices": [MAIN_DEVICE, DRAFT_DEVICE], "dropdown": main_choice is not None,
    "texts": texts, "same": same, "speedups": speedups.tolist(), "acceptance_rates": acceptance_rates,
    "alphas": alphas, "efficiencies": efficiencies, "lengths": LENGTHS, "positions": positions,
    "gained_by": gained_by, "gains": gains,
    "same_with_engine": sum(a.tokens == b.tokens for a, b in zip(runs["alone"][0], dynamic["adaptive"][0])),
    "sampled_speedups": sampled_speedups.tolist(), "sampled_alpha": sampled_alpha, "from_draft": result.from_draft,
    "new_tokens": NEW_TOKENS,
}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The notebook's folder in a copy of a fresh checkout, whose path contains a space."""
    copy = tmp_path_factory.mktemp("a checkout") / "checkout"
    for part in ("samples", "scripts", "speculative", "convert", "models/embedded"):
        shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ROOT.glob("requirements*.txt"):
        shutil.copy(file, copy)
    return copy / "samples/notebooks"


def read(folder):
    return nbformat.read(folder / NOTEBOOK.name, as_version=4)


def change_settings(notebook, code):
    """As a user does: run `code` after the cell with the settings."""
    after = [cell.id for cell in notebook.cells].index("settings") + 1
    notebook.cells.insert(after, nbformat.v4.new_code_cell(code))


def execute(notebook, folder):
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": folder}})
    return client.execute()


@pytest.fixture(scope="module", params=[FEW, pytest.param({}, marks=pytest.mark.long)], ids=["few", "as-committed"])
def executed(folder, request):
    """{cell id: its outputs} after a run with other settings or as committed, and what the cells computed."""
    notebook = read(folder)
    change_settings(notebook, "".join(f"{name} = {value}\n" for name, value in request.param.items()))
    notebook.cells.append(nbformat.v4.new_code_cell(COMPUTED, id="computed"))
    outputs = {cell.id: cell.outputs for cell in execute(notebook, folder).cells if cell.cell_type == "code"}
    return outputs, json.loads(text_of(outputs["computed"]))


@pytest.fixture(scope="module")
def computed(executed):
    return executed[1]


@pytest.fixture(scope="module")
def outputs(executed):
    return executed[0]


def text_of(outputs):
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")


def test_greedy_text_is_equal_for_every_prompt(computed):
    assert len(computed["texts"]) == len(set(computed["texts"])) == len(computed["speedups"]) > 3
    assert computed["same"] == computed["same_with_engine"] == len(computed["texts"])
    assert all(speedup > 0 for speedup in computed["speedups"] + computed["sampled_speedups"])


def test_acceptance_metrics_are_consistent(computed):
    for rate, alpha, tau, k in zip(
        *(computed[name] for name in ("acceptance_rates", "alphas", "efficiencies", "lengths")), strict=True
    ):
        assert 0 < rate <= alpha <= 1 <= tau <= k + 1
    assert computed["acceptance_rates"][0] == computed["alphas"][0]  # K = 1: the same thing
    assert computed["efficiencies"] == sorted(computed["efficiencies"])
    assert len(computed["positions"]) == max(computed["lengths"])
    assert all(0 < share <= 1 for share in computed["positions"])
    assert 0 < computed["sampled_alpha"] <= 1


def test_confidence_threshold_needs_logprobs(computed):
    for name, longest in (("without logprobs", [2]), ("with logprobs=1", range(3, 50))):
        gained = computed["gained_by"][name]
        assert [sum(tokens) for tokens in gained] == [computed["new_tokens"] - 1] * len(computed["texts"])
        assert max(max(tokens) for tokens in gained) in longest


def test_adaptive_length_is_compared_with_fixed_lengths(computed, outputs):
    assert list(computed["gains"]) == ["K = 2", "K = 4", "K = 8", "adaptive"]
    assert "draft token" in text_of(outputs["dynamic"])


def test_text_streams_into_the_cells(outputs):
    alone, pair = (text_of(outputs[name]).rpartition("\n\n")[0] for name in ("one-alone", "one-speculative"))
    assert alone == pair and len(alone) > 20
    assert re.search(r"\n\n\d+ tokens/s\n$", text_of(outputs["one-alone"]))
    assert len(text_of(outputs["sampled-one"])) > 20


@pytest.mark.parametrize("cell", ["set-plot", "acceptance-plot", "position-plot", "dynamic-plot"])
def test_plots_are_drawn(outputs, cell):
    (figure,) = (output.data["image/png"] for output in outputs[cell] if "data" in output)
    assert figure.startswith("iVBORw0KGgo") and len(figure) > 5_000  # a PNG, and not an empty one


def test_token_view_colours_draft_and_main_model_tokens(outputs, computed):
    (page,) = (output.data["text/html"] for output in outputs["tokens"])
    assert page.count("#56B4E9") == sum(computed["from_draft"]) > 0
    assert page.count("<span") == len(computed["from_draft"])


def test_devices_come_from_a_dropdown(computed, outputs):
    assert computed["dropdown"] and computed["devices"] == ["CPU", "CPU"]
    assert any("application/vnd.jupyter.widget-view+json" in output.get("data", {}) for output in outputs["devices"])


def test_devices_come_from_settings_without_ipywidgets(folder):
    notebook = cells_up_to(read(folder), "chosen")
    settings = 'import sys\nsys.modules["ipywidgets"] = None\nDRAFT_DEVICE = "AUTO:CPU"'
    change_settings(notebook, settings)
    notebook.cells.append(nbformat.v4.new_code_cell("print(main_choice, MAIN_DEVICE, DRAFT_DEVICE)"))
    assert text_of(execute(notebook, folder).cells[-1].outputs) == "None CPU AUTO:CPU\n"


def cells_up_to(notebook, last):
    ids = [cell.id for cell in notebook.cells]
    notebook.cells = notebook.cells[: ids.index(last) + 1]
    return notebook


def variables(folder, last, **settings):
    """Run the cells up to `last` in this process with other settings; return the variables."""
    space = {}
    for cell in cells_up_to(read(folder), last).cells:
        if cell.cell_type == "code":
            exec(cell.source, space)
            if cell.id == "settings":
                assert settings.keys() <= space.keys()
                space.update(settings)
    return space


@pytest.fixture
def in_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return folder


@pytest.mark.parametrize(
    ("hub_pair", "main", "draft", "name"),
    [
        ("phi-3-mini", "OpenVINO/Phi-3-mini-4k-instruct-int4-ov", "OpenVINO/Phi-3-mini-FastDraft-50M-int8-ov", ""),
        ("Qwen/Qwen3-8B Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B", "Qwen-Qwen3-8B-Qwen-Qwen3-0.6B"),
    ],
)
def test_hub_pair_is_set_by_one_variable(in_folder, hub_pair, main, draft, name):
    space = variables(in_folder, "pair", HUB_PAIR=hub_pair)
    assert space["PAIR"] == in_folder.parent.parent / "models" / (name or hub_pair)
    dry = subprocess.run([*space["command"], "--dry-run"], capture_output=True, encoding="utf-8", timeout=60)
    assert dry.returncode == 0, dry.stderr
    assert f"hf download {main}\n" in dry.stdout and f"hf download {draft}\n" in dry.stdout
    for half in ("main", "draft"):
        assert str(space["PAIR"] / half) in dry.stdout.replace("'", "")
    assert not space["PAIR"].exists()


def test_pair_is_fetched_only_once(in_folder, capsys):
    """IR folders stand for hub ids, so that the test needs no hub."""
    local = "models/embedded/main models/embedded/draft"
    pair = variables(in_folder, "export", HUB_PAIR=local)["PAIR"]
    assert "done: " in capsys.readouterr().out
    assert (pair / "main/openvino_model.bin").read_bytes() == (
        ROOT / "models/embedded/main/openvino_model.bin"
    ).read_bytes()
    variables(in_folder, "export", HUB_PAIR=local)
    assert "done: " not in capsys.readouterr().out


def test_failed_fetch_reports_the_cause(in_folder, capsys):
    with pytest.raises(RuntimeError, match="'no-such-pair' was not converted"):
        variables(in_folder, "export", HUB_PAIR="no-such-pair")
    assert "unknown pair 'no-such-pair'" in capsys.readouterr().out


def test_missing_checkout_is_reported(in_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="clone it here"):
        variables(in_folder, "checkout")
    monkeypatch.chdir(in_folder.parent.parent.parent)  # a clone made from here, as in Colab
    assert variables(in_folder, "checkout")["ROOT"] == in_folder.parent.parent


def test_installed_packages_are_not_installed_again(in_folder, monkeypatch):
    installed = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: installed.append(command))
    variables(in_folder, "install")
    assert installed == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name not in ("openvino_genai", "optimum") or None)
    variables(in_folder, "install", HUB_PAIR="phi-3-mini")
    assert [command[-1] for command in installed] == ["requirements-run.txt", "requirements-export.txt"]
    assert all(command[:4] == [sys.executable, "-m", "pip", "install"] for command in installed)


def test_notebook_is_committed_without_outputs_in_standard_form():
    text = NOTEBOOK.read_text(encoding="utf-8")
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    assert nbformat.writes(notebook) + "\n" == text
    for cell in notebook.cells:
        assert re.fullmatch(r"[a-z-]+", cell.id)  # given by hand: an editor that renames them makes random ones
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None
            assert cell.source.count("\n") < 25, cell.id
    assert set(notebook.metadata) == {"kernelspec", "language_info"}


def test_linked_files_exist():
    links = re.findall(r"\]\((?!https?:)([^)]+)\)", NOTEBOOK.read_text(encoding="utf-8"))
    assert links
    for link in links:
        assert (NOTEBOOK.parent / link).exists(), link
