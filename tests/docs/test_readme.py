"""Every command in README and docs runs in a copy of the checkout, in the shell it is written for; links resolve.

A command whose arguments need no shell runs in this process. Without --long, only the arguments are parsed of commands
that measure for long and whose programs run in their own tests.
"""

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from speculative.batch_decoder import BatchDecoder
from speculative.decoder import Decoder
from tests.support.paths import ROOT
from tests.support.waiting import wait_until

README = (ROOT / "README.md").read_text(encoding="utf-8")
GENERATED = ("cli.md", "python-api.md", "architecture.md")  # by docs/generate.py
DOCS = [path for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in GENERATED]
PAGES = [ROOT / "README.md", *DOCS]
LINKING = [
    *PAGES,
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "deploy/README.md",
    ROOT / "docs/architecture.in.md",
    ROOT / "models/embedded/README.md",
]

# Arguments that make a long command short; the last one wins in argparse.
SMALL = "heads=10,kv_heads=5,head_dim=64,intermediate=1500,vocabulary=5000,tied=0"
DRAFT = "--draft-shape layers=4,hidden=512,heads=8,kv_heads=4,head_dim=64,intermediate=1408,vocabulary=5000,tied=1"
FEW, ONE = "--prompts few_prompts.jsonl", "--prompts one_prompt.jsonl"
BENCHMARK = "--starts 1 --rounds 1 --max-new-tokens 8 --max-prompts 1 --no-starts"
SHORTER = {
    "samples/": "--max-new-tokens 16",
    "scripts/benchmark.py models/embedded/main --": BENCHMARK,
    "scripts/benchmark.py models/embedded": f"--paths engine -k 4 {BENCHMARK}",
    "scripts/benchmark.py": f"-k 4 {BENCHMARK}",
    "scripts/benchmark_serving.py": "--max-concurrency 2 --seconds 0.5 --rounds 1 --max-new-tokens 12",
    "scripts/benchmark_routing.py": "--chats 2 --turns 2 --rounds 1",
    "scripts/benchmark_batching.py": "--starts 1 --max-concurrency 2 --seconds 0.5 --rounds 1 --max-new-tokens 12",
    "scripts/benchmark_costs.py": "--repeat 1 --max-new-tokens 8",
    "scripts/make_benchmark_pair.py build/tinyllama --shape": f"--shape layers=11,hidden=640,{SMALL} {DRAFT} {FEW}",
    "scripts/make_benchmark_pair.py build/tinyllama-": f"{DRAFT} {FEW}",
    "scripts/make_benchmark_pair.py build/qwen3": f"--shape layers=11,hidden=640,{SMALL} {FEW}",
    "convert/make_draft.py": "--minutes 0.1 --tokens 2000 --length 96 --draft-vocabulary 512 --threads 1",
    "--against": "--requests 10",
    "scripts/plan_capacity.py --costs": "--requests 10 --rate 2 --ttft-goal 1 --tpot-goal 5 --max-num-seqs 2",
    "scripts/compare_sources.py": "--max-new-tokens 16 --max-prompts 2",
    "scripts/sweep_draft_length.py": "--rounds 1 -k 2 --max-new-tokens 16 --max-prompts 2",
    "scripts/device_swap.py": "--devices NPU --rounds 1 --max-new-tokens 16 --max-prompts 1",
    "scripts/tune.py": f"--minutes 0.02 --max-new-tokens 8 {ONE}",
    "scripts/verify_lossless.py": f"--draws 100 --tokens 1 -k 2 --max-new-tokens 8 --paths engine {ONE}",
}


def commands(language, text=README):
    """The commands in all fenced blocks of a language, without comments; lines ending in a backslash are joined."""
    for block in re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if command := line.partition("  #")[0].strip():
                yield re.sub(r"\s+", " ", command)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of a fresh checkout, in which commands may write."""
    copy = tmp_path_factory.mktemp("readme") / "checkout"
    ignore = shutil.ignore_patterns(".git", ".venv", "checkpoints", "__pycache__", ".*_cache", "build")
    shutil.copytree(ROOT, copy, ignore=ignore)
    for folder in (copy / "models").iterdir():
        if folder.name != "embedded":
            shutil.rmtree(folder)
    prompts = (copy / "scripts/prompts/embedded_code.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    for name, n in (("few", 2), ("one", 1)):
        (copy / f"{name}_prompt{'s' * (n > 1)}.jsonl").write_text("".join(prompts[:n]), encoding="utf-8")
    return copy


def as_tested(command):
    """The command with options that make it short; commands that need the hub run with --dry-run."""
    if command.startswith("make "):
        return command.replace("make ", "make --dry-run ", 1)
    if "export_pair.py" in command and "models/embedded" not in command and "--list" not in command:
        before, dashes, after = command.partition(" -- ")
        return f"{before} --dry-run{dashes}{after}"
    for folder in ("models/smollm2-135m/", "build/smollm2-int8/"):
        command = command.replace(folder, "models/embedded/")  # instead of a download
    if "scripts/benchmark.py" in command:  # the main model is measured in test_smoke_and_benchmark.py
        command = command.replace("models/embedded/main models/embedded/draft", "models/embedded/draft " * 2)
    command = re.sub("--context [0-9]+", "--context 200", command)
    command = re.sub(" --exhaustive [0-9]+", "", command)  # hundreds of settings: in test_tune.py, of a small model
    for program, arguments in SHORTER.items():
        if program in command:
            return f"{command} {arguments}"
    return command


posix = pytest.mark.posix("bash blocks; PowerShell's are compared with them below")
SERVING = re.compile("serve_pair.py|benchmark_(routing|serving).py|//127.0.0.1:800")


# Commands that run with --long only: their programs run in their own tests, and CI installs as `make demo` does.
LONG = re.compile(
    r"build/(tinyllama|qwen3)|scripts/(benchmark_(batching|costs|routing|serving)|device_swap|smoke|sweep_draft_length).py|\.venv|"
    r"scripts/benchmark.py models/embedded/main --|scripts/plan_capacity.py (models|build)|convert/make_draft.py"
)


def marked(commands):
    return [pytest.param(one, id=one, marks=[pytest.mark.long] * bool(LONG.search(one))) for one in commands]


def every(language):
    """The commands (in Python: blocks) of a language on all pages: those that need no server, and those that do."""
    found = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if language == "python":
            found |= dict.fromkeys(re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL))
        else:
            found |= dict.fromkeys(commands(language, text))
    return [one for one in found if not SERVING.search(one)], [one for one in found if SERVING.search(one)]


def run(command, checkout):
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    process = subprocess.run(
        command, cwd=checkout, env=environment, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8",
        timeout=600,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def words_of(command):
    """The words of a command that runs a program if a shell would only split it, else None."""
    bare = re.sub(r"""'[^']*'|"[^"$`!\\\\]*\"""", "", command)
    return shlex.split(command) if re.fullmatch(r"python \w+/[\w ./,:=+-]+", bare) else None


def in_bash(command):
    return ["bash", "-euo", "pipefail", "-c", as_tested(command)]


@posix
@pytest.mark.parametrize("command", marked(every("bash")[0]))
def test_command(command, checkout, run_here):
    if words := words_of(as_tested(command)):
        process = run_here(*words[1:], checkout=checkout)
        assert process.returncode == 0, process.stdout + process.stderr
    else:
        run(in_bash(command), checkout)


@pytest.mark.parametrize(
    "command", [one for kind in every("bash") for one in kind if LONG.search(one) and ".venv" not in one]
)
def test_long_command_is_parsed(command, kept_signals, tmp_path, monkeypatch):
    program, *arguments = shlex.split(re.sub(r"^(taskset -c \d+ )?python ", "", command))
    module = importlib.import_module(program.removesuffix(".py").replace("/", "."))
    (tmp_path / "docs/capacity").mkdir(parents=True)
    (tmp_path / "build/tinyllama").mkdir(parents=True)
    if "--main-of" in arguments:
        main = {"shape": asdict(module.SHAPES["TinyLlama-1.1B"])}
        made = {"format": module.FORMAT, "kind": "benchmark pair", "main": main}
        (tmp_path / "build/tinyllama/pair.json").write_text(json.dumps(made), encoding="utf-8")
    elif "make_benchmark_pair" in program:
        (tmp_path / "build/tinyllama").rmdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    parsed = module.parse_arguments() if hasattr(module, "parse_arguments") else module.build_parser().parse_args()
    assert arguments[0] in [str(value) for value in vars(parsed).values()]


@posix
def test_installation_commands_match_make():
    """CI runs the same steps in a fresh clone; with --long, the commands run."""
    shown = list(commands("bash"))
    dry_run = ["make", "--no-print-directory", "--dry-run", "--always-make", "demo"]
    made = subprocess.run(dry_run, cwd=ROOT, capture_output=True, text=True)
    steps = made.stdout.replace("python3 -m venv", "python -m venv").splitlines()
    install = [re.sub("--[a-z-]+ (?=.*-r )", "", step) for step in steps if not step.startswith("touch")]
    assert len(install) == 3 and all(step in shown for step in install), made.stdout + made.stderr


@pytest.mark.parametrize("program", every("python")[0])
def test_python_block(program, checkout):
    assert len(run([sys.executable, "-c", program], checkout)) > 100


@pytest.fixture(scope="module")
def at_server(shared_server):
    """A function that replaces the documented ports in a text by those of a running server."""
    server = shared_server()
    wait_until(server.metrics, "metrics are exported")
    return lambda text: text.replace(":8000", f":{server.port}").replace(":8001", f":{server.metrics_port}")


def make_missing_pair(command, checkout):
    """Make the benchmark pair of a command as documented: the tests that make it may run in another test process."""
    for making in every("bash")[0]:
        if making.startswith("python scripts/make_benchmark_pair.py"):
            pair = making.split()[2]
            if f"{pair}/main" in command and not (checkout / pair).exists():
                run(in_bash(making), checkout)


@posix
@pytest.mark.parametrize("command", marked(every("bash")[1]))
def test_serving_command(command, checkout, request):
    if command == "python samples/serve/serve_pair.py models/embedded/main models/embedded/draft":
        request.getfixturevalue("at_server")  # it is what `Server` starts, and runs until Ctrl-C
    elif "scripts/benchmark_" in command:  # with servers of its own
        make_missing_pair(command, checkout)
        run(in_bash(command), checkout)
    else:
        run(in_bash(request.getfixturevalue("at_server")(command)), checkout)


@pytest.mark.parametrize("program", every("python")[1])
def test_serving_python_block(program, checkout, at_server):
    assert len(run([sys.executable, "-c", at_server(program)], checkout)) > 100


def test_powershell_commands_match_bash():
    bash = {command.replace(".venv/bin/", ".venv/Scripts/") for command in commands("bash")}
    shown = list(commands("powershell"))
    assert shown
    for command in shown:
        assert command.replace("\\", "/") in bash


def anchors(page):
    """The anchors of a page: its headings, converted as on GitHub."""
    headings = re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_linked_files_and_headings_exist(page):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8")):
        file = page.parent / target if target else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), f"{target}#{anchor}"


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="argparse prints options otherwise from Python 3.13 on")
def test_generated_pages_are_up_to_date(run_here):
    """The command line, the Python API, and the architecture page with its list of files."""
    process = run_here("docs/generate.py", "--check")
    assert process.returncode == 0, process.stdout + process.stderr


def test_properties_are_documented_without_parentheses():
    page = (ROOT / "docs/python-api.md").read_text(encoding="utf-8")
    properties = [
        name for kind in (Decoder, BatchDecoder) for name, of in vars(kind).items() if isinstance(of, property)
    ]
    assert "has_unfinished_requests" in properties
    assert all(f"\n{name}: " in page for name in properties if not name.startswith("_"))


def test_readme_is_a_landing_page():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def shape(output):
    """The part of an output that is the same on any machine: words without numbers and inference precision."""
    words = re.sub(r"\b(bf16|f16|f32)\b", "PRECISION", output.replace("\\", "/"))
    return [line.rstrip() for line in re.sub(r"\d[\d,.]*", "N", words).splitlines() if line.strip()]


def test_demo_prints_what_the_readme_shows():
    """The text may differ in a near-tie on another processor; it is compared in exact arithmetic by other tests."""
    shown = re.search(r"^```bash\nmake demo\n```\n+```text\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)[1]
    recipe = re.search(r"^demo:.*\n\t\$\(PY\) (.*)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[1]
    process = subprocess.run(
        [sys.executable, *shlex.split(recipe)], cwd=ROOT, capture_output=True, encoding="utf-8", timeout=600
    )
    assert process.returncode == 0, process.stderr
    summary = shape(process.stderr)
    assert len(summary) == 3
    assert shape(shown)[-len(summary) :] == summary
    assert len(shape(shown)) == len(shape(process.stdout)) + len(summary)
