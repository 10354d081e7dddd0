"""The benchmark results in README and docs: each has a valid command and is shown as it was measured."""

import importlib
import json
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from scripts import figures
from speculative.bench.reporting import gains_table
from tests.support.paths import DRAFT, ROOT

pytestmark = pytest.mark.usefixtures("kept_signals")
SMALL = "-k 2 --max-prompts 2 --max-new-tokens 8 --rounds 1 --starts 1 --paths genai,engine,sampled --no-starts"
MACHINE = dict.fromkeys(figures.MACHINE, "x") | {"instruction_sets": "", "date": "2026-11-22 10:00 UTC"}


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A page with markers, and a folder for saved results."""
    page = tmp_path / "page.md"
    page.write_text("# Page\n<!-- figures:one -->\nold\n<!-- /figures -->\n<!-- figures:two -->\n<!-- /figures -->\n")
    monkeypatch.setattr(figures, "KEPT", tmp_path / "figures")
    monkeypatch.setattr(figures, "PAGES", (page,))
    return tmp_path


def test_pages_show_the_saved_results():
    """`python scripts/figures.py --render` writes them."""
    kept = figures.read_kept()
    for page in figures.PAGES:
        text = page.read_text(encoding="utf-8")
        assert figures.rendered(text, kept) == text, page
    assert not set(kept) - set(figures.FIGURES)


def test_saved_output_has_no_local_paths():
    program = (
        "import json, pathlib; path = str(pathlib.Path('a/b').resolve()); print(path, json.dumps([path]), sep='\\n')"
    )
    assert figures.run(f"-c {shlex.quote(program)}") == ["a/b", '["a/b"]']


def test_pages_show_exactly_the_defined_figures():
    text = "".join(page.read_text(encoding="utf-8") for page in figures.PAGES)
    assert {name for _, name, _ in figures.BLOCK.findall(text)} == {
        *figures.FIGURES, "gains", "overview", "sources", "structured", "summary",
    }  # fmt: skip
    assert text.count("<!-- figures:") == len(figures.BLOCK.findall(text)) == text.count("<!-- /figures -->")


def test_saved_results_are_small_and_complete():
    for path in (ROOT / "docs/figures").glob("*.json"):
        kept = json.loads(path.read_text(encoding="utf-8"))
        assert path.stat().st_size < 200_000 and kept["name"] == path.stem and kept["commit"] and kept["output"]
        missing = {"instruction_sets"} if kept["machine"]["date"] < "2026-11-29" else set()
        assert set(kept["machine"]) | missing == set(figures.MACHINE)


@pytest.mark.parametrize("name", figures.FIGURES)
def test_every_command_is_parsed(name, monkeypatch):
    program, *arguments = shlex.split(figures.FIGURES[name].command)
    module = importlib.import_module(program.removesuffix(".py").replace("/", "."))
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("speculative.bench.harness.output_file", str)  # the build folders may not exist
    parsed = module.parse_arguments()
    assert str(parsed.main).endswith("/main")


@pytest.mark.parametrize("making", [making for making in figures.PAIRS.values() if "make_benchmark_pair" in making])
def test_every_pair_can_be_made(making, monkeypatch, tmp_path):
    from scripts import make_benchmark_pair

    program, *arguments = shlex.split(making)
    monkeypatch.chdir(tmp_path)
    if "--main-of" in arguments:
        main = {"shape": asdict(make_benchmark_pair.SHAPES["TinyLlama-1.1B"])}
        pair = {"format": make_benchmark_pair.FORMAT, "kind": "benchmark pair", "main": main}
        Path("build/tinyllama").mkdir(parents=True)
        Path("build/tinyllama/pair.json").write_text(json.dumps(pair), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    assert figures.PAIRS[str(make_benchmark_pair.parse_arguments().out)] == making


def test_first_pair_is_made_before_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    good, useless = (figures.PAIRS[f"build/tinyllama{end}"] for end in ("", "-useless"))
    assert figures.pairs_for(figures.FIGURES["useless-draft"].command) == [good, useless]
    (tmp_path / "build/tinyllama").mkdir(parents=True)
    (tmp_path / "build/tinyllama/pair.json").touch()
    assert figures.pairs_for(figures.FIGURES["useless-draft"].command) == [useless]
    assert figures.pairs_for(figures.FIGURES["costs"].command) == figures.pairs_for(figures.FIGURES["lossless"].command)


def test_only_missing_figures_are_measured():
    kept = {"a": {"commit": "1"}, "b": {"commit": "2"}}
    assert figures.missing(["a", "b", "c"], kept, "2", again=False) == ["c"]
    assert figures.missing(["a", "b", "c"], kept, "2", again=True) == ["a", "c"]


def test_figure_is_measured_saved_and_shown(checkout, monkeypatch, capsys):
    """Measure, save and render with a small command; a failing command does not stop the others."""
    small = figures.Figure(f"scripts/benchmark.py {DRAFT} {DRAFT} {SMALL}", 1)
    monkeypatch.setattr(
        figures, "FIGURES", {"two": figures.Figure("scripts/benchmark.py nothing here", 1), "one": small}
    )
    monkeypatch.setattr(sys, "argv", ["figures.py"])
    assert figures.main() == 1
    assert "exited with status 2" in capsys.readouterr().err
    kept = figures.read_kept()
    assert list(kept) == ["one"] and kept["one"]["commit"] == figures.present_commit()
    assert kept["one"]["result"]["program"] == "benchmark" and "token_view" not in kept["one"]["result"]
    page = (checkout / "page.md").read_text(encoding="utf-8")
    assert page.startswith("# Page\n<!-- figures:one -->\n```bash\npython scripts/benchmark.py")
    assert "\nGenAI, K = 2 " in page and f"at commit {kept['one']['commit']} on " in page
    assert "Not measured yet: `make figures FIGURES=two`." in page and "old" not in page
    cells = [line.split("|")[2].strip() for line in gains_table.gains({"embedded": kept["one"]}).splitlines()[2:9]]
    assert cells[0].endswith("at K = 2") and "alone " in cells[3] and "K = 2 " in cells[3]
    assert cells[6] == "not measured"
    monkeypatch.setattr(figures, "measure", None)  # it is not measured again
    monkeypatch.setattr(sys, "argv", ["figures.py", "one"])
    assert figures.main() == 0


def test_ctrl_c_keeps_measured_figures(checkout, monkeypatch):
    def interrupted(command):
        if "first" in command:
            return ["a table", '{"program": "x"}']
        raise KeyboardInterrupt

    monkeypatch.setattr(figures, "FIGURES", {"one": figures.Figure("first", 1), "two": figures.Figure("second", 1)})
    monkeypatch.setattr(figures, "run", interrupted)
    monkeypatch.setattr(sys, "argv", ["figures.py"])
    assert figures.main() == 130
    assert list(figures.read_kept()) == ["one"] and "a table" in (checkout / "page.md").read_text(encoding="utf-8")


@pytest.mark.posix("signals")
def test_ctrl_c_lets_the_command_end_its_children(tmp_path):
    """The command is interrupted, not killed: a server that it started would be left running."""
    program, ended = tmp_path / "program.py", tmp_path / "ended"
    program.write_text(
        "import os, pathlib, signal, sys, time\n"
        "os.kill(os.getppid(), signal.SIGINT)\n"
        "time.sleep(1)\n"
        f"pathlib.Path({str(ended)!r}).touch()\n"
        "sys.exit(130)\n"
    )
    start = f"from scripts import figures; figures.run({str(program)!r})"  # a separate process receives the signal
    process = subprocess.run(
        [sys.executable, "-c", start], cwd=ROOT, capture_output=True, encoding="utf-8", timeout=300
    )
    assert "KeyboardInterrupt" in process.stderr and process.returncode
    assert ended.exists()


ENGINE_IDS = pytest.mark.parametrize(
    ("genai", "native"), [("genai", "native"), ("GenAI", "ours")], ids=["present", "former"]
)  # in recorded results


@ENGINE_IDS
def test_gains_table_matches_the_results(genai, native):
    def method(name, engine, k, speedup, sampled=False):
        row = {"name": name, "engine": engine, "sampled": sampled, "draft_length": k, "speedup": speedup}
        return {**row, "speedup_range": [speedup - 0.1, speedup + 0.1]}

    rows = [
        method("GenAI, main alone", genai, 0, 1.0), method("GenAI, draft alone", genai, 0, 9.0),
        method("GenAI, K = 4", genai, 4, 2.0), method("GenAI, K = 8", genai, 8, 2.5), method("ours", native, 4, 3.0),
        method("ours, adaptive", native, "adaptive", 2.9), method("ours, sampled", native, 8, 1.5, sampled=True),
    ]  # fmt: skip
    fact = {"what": "x", "where": "K = 4", "ratio": 1.04, "range": [1.0, 1.1], "interval": [0.99, 1.08]}
    alone = {"what": "ours, main alone / GenAI, main alone, 4 texts", "clients": 4, "ratio": 0.9, "range": [0.8, 1]}
    best = {
        "what": "ours, draft / GenAI, K = 4, the best of GenAI, 4 texts",
        "clients": 4,
        "ratio": 1.2,
        "range": [1, 2],
    }
    load = [{"method": "with draft", "clients": 4, "speedup": 1.3, "speedup_range": [1.1, 1.4]}]
    results = {
        "embedded": {"rows": rows, "comparisons": [fact, {"what": "K = 4, texts that differ"}]},
        "server-embedded": {"rows": [{"method": "main model alone", "clients": 4, "speedup": None}, *load]},
        "batch-embedded": {"rows": [], "comparisons": [alone, best]},
    }
    kept = {name: {"result": result, "commit": "abc1234", "machine": MACHINE} for name, result in results.items()}
    table = gains_table.gains(kept).splitlines()
    assert [line.split("|")[2].strip() for line in table[2:-2]] == [
        "2.50x (2.40-2.60) at K = 8", "3.00x (2.90-3.10) at K = 4", "2.90x (2.80-3.00)", "K = 4 1.04 (0.99-1.08)",
        "1.50x (1.40-1.60) at K = 8", "", "4: 1.30x (1.10-1.40)", "4: 0.90 (0.80-1.00)", "4: 1.20 (1.00-2.00)",
    ]  # fmt: skip
    assert all(line.split("|")[3].strip() == "not measured" for line in table[2:-2])
    assert table[-1] == "Measured at commit abc1234 (2026-11-22)."
    assert "Not measured yet" in gains_table.gains({})


@pytest.mark.parametrize(("arguments", "word"), [(["embedded,magic"], "'magic'"), (["--nothing"], "--nothing")])
def test_bad_input_gives_one_sentence_error(run_here, arguments, word):
    process = run_here("scripts/figures.py", *arguments)
    assert process.returncode == 2 and word in process.stderr and "Traceback" not in process.stderr


def test_list_option_and_make_target_name_the_figures(run):
    process = run("scripts/figures.py", "--list")
    assert process.returncode == 0 and [line.split()[0] for line in process.stdout.splitlines()] == list(
        figures.FIGURES
    )
    made = subprocess.run(
        ["make", "--dry-run", "figures", "FIGURES=embedded,lookup"], cwd=ROOT, capture_output=True, encoding="utf-8"
    )
    assert made.returncode == 0 and "scripts/figures.py embedded,lookup" in made.stdout


@ENGINE_IDS
def test_summary_has_one_number_and_range_per_row(genai, native):
    found = [(genai, False, 4, 2.5), (native, False, 8, 3.0), (native, False, "adaptive", 2.9)]
    found.append((native, True, "adaptive", 2.2))
    rows = [
        {"engine": engine, "sampled": sampled, "name": "", "draft_length": k, "speedup": up, "speedup_range": [1, 9]}
        for engine, sampled, k, up in found
    ]
    load = [{"method": "with draft", "clients": n, "speedup": n / 2, "speedup_range": [1, 2]} for n in (1, 4)]
    kept = {
        "benchmark-pair": {"result": {"rows": rows}, "machine": MACHINE, "commit": "abc"},
        "server-benchmark-pair": {"result": {"rows": load}, "machine": MACHINE, "commit": "abc"},
    }
    lines = gains_table.summary(kept).splitlines()
    assert [line.split("|")[2].strip() for line in lines[2:7]] == [*["not measured"] * 4, ""]
    assert [line.split("|")[3].strip() for line in lines[2:7]] == [
        *("2.50x (1.00-9.00) at K = 4", "3.00x (1.00-9.00) at K = 8", "2.90x (1.00-9.00)", "2.20x (1.00-9.00)"),
        "2.00x (1.00-2.00)",
    ]
    assert "Benchmark pair: x, x cores, 2026-11-22, commit abc. OpenVINO GenAI x." in lines[-1]
    assert "Not measured yet" in gains_table.summary({})


def test_overview_has_one_row_per_result_with_machine_and_section():
    def row(sampled, k, speedup, bounds):
        return {"engine": "native", "sampled": sampled, "name": "", "draft_length": k, "speedup": speedup,
                "speedup_range": bounds}  # fmt: skip

    pair = [row(False, 8, 3.0, [1, 9]), row(True, 4, 2.0, [2, 2]), row(False, "adaptive", 2.9, [2.9, 2.9])]
    load = [{"method": "with draft", "clients": 4, "speedup": 1.5, "speedup_range": [1, 2]}]
    path = {"ours": True, "holds": True}
    checked = {"greedy": [path, {**path, "ours": False}], "sampled": [path, {**path, "holds": False}]}
    results = {"benchmark-pair": {"rows": pair}, "server-benchmark-pair": {"rows": load}, "lossless": checked}
    machine = MACHINE | {"processor": "Intel(R) Xeon(R) Processor", "instruction_sets": "AVX2, AMX", "cores": 2}
    kept = {name: {"result": result, "machine": machine, "commit": "abc"} for name, result in results.items()}
    rows = [line.strip("|").split("|") for line in gains_table.overview(kept).splitlines()[2:]]
    lines = {words.strip(): [cell.strip() for cell in cells] for words, *cells in rows}
    best, adaptive, *_ = lines.values()
    where = ["Intel Xeon (AVX2, AMX), 2 cores, 2026-11-22", "[The benchmark pair](#the-benchmark-pair)"]
    assert best == ["3.00x (1.00-9.00) at K = 8", "2.00x at K = 4", *where]
    assert adaptive == ["2.90x", "", *where]
    assert lines["server with the 1.1 B pair, by number of clients"][0] == "4: 1.50x (1.00-2.00)"
    *_, lossless = lines.values()
    assert lossless[:2] == ["no difference in 1 of 1 decoding paths", "no difference in 1 of 2 decoding paths"]
    missing = [cells for cells in lines.values() if cells[0] == "not measured"]
    assert len(missing) == len(lines) - 4 and all(len(cells) == 4 for cells in missing)


def test_sources_are_compared_by_category():
    def row(name, sampled, speedup):
        return {"name": name, "sampled": sampled, "draft_length": 3, "speedup": speedup, "block_efficiency": 1.5}

    def part(category, name, speedup):
        return {"category": category, "name": name, "speedup": speedup, "prompts": 2}

    alone = {**row("alone", False, 1.0), "draft_length": 0}
    result = {
        "rows": [alone, row("K = 3", False, 1.2), row("lookup", False, 1.1), row("sampled", True, 1.3)],
        "categories": [part("code", "K = 3", 1.0), part("code", "lookup", 1.4), part("code", "sampled", 1.3)],
    }
    tables = gains_table.sources({"sources-smollm2": {"result": result}}).splitlines()
    assert [line for line in tables if "head" in line] == [
        "**SmolLM2-135M (fp16 weights) with its EAGLE-3 head, greedy**",
        "**SmolLM2-135M (fp16 weights) with its EAGLE-3 head, temperature 1**",
    ]
    assert tables[4:7] == [
        "| code | 2 | 1.00x | **1.40x** |",
        "| all prompts | 2 | **1.20x** | 1.10x |",
        "| tokens per forward pass | | 1.50 | 1.50 |",
    ]
    assert "| code | 2 | **1.30x** |" in tables
    assert "Not measured yet" in gains_table.sources({})
