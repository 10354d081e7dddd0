"""The samples as users run them: text on stdout, summary on stderr, devices, consoles, Ctrl-C, closed pipes."""

import ast
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys

import openvino_genai
import pytest

from speculative.cli.processes import interrupt_group, own_group
from tests.support.paths import DRAFT, MAIN, ROOT
from tests.support.useless_draft import save_useless_draft
from tests.support.waiting import PATIENCE

STAND_ALONE = "speculative_decoding_lm.py"
SMALL = DRAFT  # the embedded draft serves as the main model, too, because it is fast
SAMPLES = {
    STAND_ALONE: [SMALL, DRAFT],
    "greedy_causal_lm.py": [SMALL],
    "speculative_greedy_lm.py": [SMALL, DRAFT],
    "speculative_sampling_lm.py": [SMALL, DRAFT],
    "prompt_lookup_decoding_lm.py": [SMALL],
    "suffix_decoding_lm.py": [SMALL],
    "speculative_chat.py": [SMALL, DRAFT],
}
ONE_SHOT = [name for name in SAMPLES if name != "speculative_chat.py"]
WITH_CONSOLE = [name for name in ONE_SHOT if name != STAND_ALONE]
GREEDY = {"speculative_sampling_lm.py": ["--temperature", 0, "-k", 3], "suffix_decoding_lm.py": ["-k", 3]}
OUR_ENGINE = ("speculative_sampling_lm.py", "suffix_decoding_lm.py", "speculative_chat.py")
PROMPT = "def read_file(path):"
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
EXACT = ("--property", "EXECUTION_MODE_HINT=ACCURACY")
NPU_ON_CPU = ("--property", "NPUW_DEVICES=CPU", *EXACT)
TOKENS = 40


@pytest.fixture(scope="session")
def mediocre(tmp_path_factory):
    """A draft that has half of the small model's tokens right."""
    return save_useless_draft(tmp_path_factory.mktemp("mediocre") / "draft", share=0.05)


@pytest.fixture(scope="session")
def drafting(mediocre):
    """GenAI's pipeline of the small model with that draft."""
    draft = openvino_genai.draft_model(mediocre, "CPU", EXECUTION_MODE_HINT="ACCURACY")
    return openvino_genai.LLMPipeline(SMALL, "CPU", draft_model=draft, EXECUTION_MODE_HINT="ACCURACY")


@pytest.fixture(scope="session")
def greedy():
    """The small model's own greedy text and the number of its tokens, straight from the engine."""
    pipe = openvino_genai.LLMPipeline(SMALL, "CPU", EXECUTION_MODE_HINT="ACCURACY")
    result = pipe.generate([PROMPT], max_new_tokens=TOKENS)
    return result.texts[0], result.perf_metrics.get_num_generated_tokens()


def sample(name):
    return f"samples/{name}"


def figures(stderr):
    """Return {name: text} of the summary's lines."""
    return dict(re.findall(r"^(\w[\w ]*?) {2,}(.+)$", stderr, re.MULTILINE))


@pytest.mark.parametrize("name", WITH_CONSOLE)
def test_stdout_has_greedy_text_and_stderr_the_summary(run_here, greedy, name):
    text, tokens = greedy
    done = run_here(sample(name), *SAMPLES[name], PROMPT, "--max-new-tokens", TOKENS, *EXACT, *GREEDY.get(name, []))
    assert done.returncode == 0, done.stderr
    assert done.stdout == text
    shown = figures(done.stderr)
    assert shown["new tokens"] == str(tokens)
    assert re.fullmatch(r"\d+ ms", shown["time to first token"])
    assert re.fullmatch(r"[\d.]+ tokens/s \(decode only\)", shown["throughput"])
    assert re.fullmatch(r"\d+ of the main model after the prompt", shown["forward passes"])
    assert re.fullmatch(r"[\d.]+ tokens per forward pass", shown["block efficiency"])
    assert shown["main"] == f"{SMALL} on CPU, int8 weights, inference in f32"
    assert ("draft" in shown) == name.startswith("speculative")
    assert ("acceptance rate" in shown) == name.startswith(("speculative", "suffix"))


def test_stand_alone_sample_prints_main_model_text(run):
    done = run(sample(STAND_ALONE), MAIN, DRAFT, PROMPT, "--max-new-tokens", 12, *EXACT)
    assert done.returncode == 0, done.stderr
    pipe = openvino_genai.LLMPipeline(MAIN, "CPU", EXECUTION_MODE_HINT="ACCURACY")
    assert done.stdout == pipe.generate([PROMPT], max_new_tokens=12).texts[0]


@pytest.mark.parametrize("options", [(), ("-k", 1), ("--max-new-tokens", 1)], ids=["all", "K = 1", "one token"])
def test_stand_alone_sample_prints_text_and_three_summary_lines(run_here, greedy, mediocre, drafting, options):
    """Its figures are GenAI's own, which leave out the last iteration; the other samples add it."""
    options = ("--max-new-tokens", TOKENS, *EXACT, *options)
    done = run_here(sample(STAND_ALONE), SMALL, mediocre, PROMPT, *options)
    assert done.returncode == 0, done.stderr
    shown = figures(done.stderr)
    assert list(shown) == ["new tokens", "acceptance rate", "devices"]
    assert done.stderr.count("\n") == 2 + len(shown)
    tokens, k = (1 if "--max-new-tokens" in options[4:] else TOKENS), (1 if "-k" in options else 5)
    result = drafting.generate([PROMPT], max_new_tokens=tokens, num_assistant_tokens=k)
    assert done.stdout == result.texts[0]
    assert done.stdout == greedy[0] or tokens == 1
    counts = result.extended_perf_metrics
    accepted, drafted = counts.get_num_accepted_tokens(), counts.get_num_draft_tokens()
    assert re.fullmatch(rf"{result.perf_metrics.get_num_generated_tokens()} \([\d.]+ tokens/s\)", shown["new tokens"])
    rate = f"{accepted / drafted:.2f} ({accepted} of {drafted} draft tokens)" if drafted else "unknown"
    assert shown["acceptance rate"] == rate
    assert shown["devices"] == "main on CPU, draft on CPU"


@pytest.mark.parametrize("tokens", [20, TOKENS])
@pytest.mark.parametrize("k", [1, 8])
def test_summary_matches_engine_counts(run_here, mediocre, drafting, k, tokens):
    result = drafting.generate([PROMPT], max_new_tokens=tokens, num_assistant_tokens=k)
    gained = list(result.extended_perf_metrics.main_model_metrics.raw_metrics.m_batch_sizes)
    ended = sum(gained) < tokens  # after an end token, the length of the last draft is unknown
    counted = gained[:-1] if ended else gained
    proposed = sum(min(k, tokens - sum(gained[:i]) - 1) for i in range(1, len(counted)))
    accepted = sum(counted[1:]) - len(counted[1:])

    done = run_here(
        sample("speculative_greedy_lm.py"), SMALL, mediocre, PROMPT, "-k", k, "--max-new-tokens", tokens, *EXACT
    )
    assert done.stdout == result.texts[0]
    shown = figures(done.stderr)
    assert shown["forward passes"] == f"{len(gained) - 1} of the main model after the prompt"
    assert shown["block efficiency"] == f"{sum(gained[1:]) / len(gained[1:]):.2f} tokens per forward pass"
    assert shown["acceptance rate"] == f"{accepted / proposed:.2f} ({accepted} of {proposed} draft tokens)"


@pytest.mark.parametrize("k", [5, 16])
def test_perfect_draft_has_acceptance_rate_1_despite_early_stop(run_here, k):
    done = run_here(
        sample("speculative_greedy_lm.py"), SMALL, SMALL, "def f(", "-k", k, "--max-new-tokens", 300, *EXACT
    )
    shown = figures(done.stderr)
    assert int(shown["new tokens"]) < 300
    assert shown["acceptance rate"].startswith("1.00 (")


@pytest.mark.parametrize(
    ("device", "draft_device", "properties"),
    [
        ("AUTO:CPU", "HETERO:CPU", (*EXACT, "--draft-property", "EXECUTION_MODE_HINT=ACCURACY")),
        ("NPU", "NPU", NPU_ON_CPU),
        ("CPU", "NPU", (*EXACT, "--draft-property", "NPUW_DEVICES=CPU")),
        ("NPU", "CPU", (*NPU_ON_CPU, "--draft-property", "EXECUTION_MODE_HINT=ACCURACY")),
    ],
)
@pytest.mark.parametrize("name", [STAND_ALONE, "speculative_greedy_lm.py"])
def test_main_and_draft_run_on_any_pair_of_devices(run_here, greedy, device, draft_device, properties, name):
    done = run_here(
        sample(name), SMALL, DRAFT, PROMPT, "--max-new-tokens", TOKENS,
        "--device", device, "--draft-device", draft_device, *properties,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    if name == STAND_ALONE and "NPU" in (device, draft_device):  # GenAI misses the stop token, see below
        assert done.stdout.startswith(greedy[0])
    else:
        assert done.stdout == greedy[0]
    shown = figures(done.stderr)
    accepted, proposed = map(int, re.search(r"\((\d+) of (\d+) draft", shown["acceptance rate"]).groups())
    assert accepted <= proposed
    if name == STAND_ALONE:
        assert shown["devices"] == f"main on {device}, draft on {draft_device}"
        return
    assert f" on {device}, " in shown["main"]
    assert f" on {draft_device}, " in shown["draft"]
    assert 0 < accepted <= greedy[1] - 1 - int(shown["forward passes"].split()[0])  # the last one may not count


class Steps(openvino_genai.StreamerBase):
    """Collects the tokens, and the positions at which a forward pass of the main model ended."""

    def __init__(self):
        super().__init__()
        self.tokens, self.ends = [], set()

    def write(self, tokens):
        self.tokens += tokens
        self.ends.add(len(self.tokens) - 1)
        return openvino_genai.StreamingStatus.RUNNING

    def end(self):
        pass


def test_text_ends_at_stop_token_with_npu_draft(run_here, tmp_path):
    """With an NPU, GenAI misses a stop token within the tokens of a forward pass (test_engine_facts.py)."""
    steps = Steps()
    draft = openvino_genai.draft_model(SMALL, "NPU", NPUW_DEVICES="CPU", EXECUTION_MODE_HINT="ACCURACY")
    pipe = openvino_genai.LLMPipeline(SMALL, "CPU", draft_model=draft, EXECUTION_MODE_HINT="ACCURACY")
    config = openvino_genai.GenerationConfig(max_new_tokens=30, ignore_eos=True, num_assistant_tokens=7)
    pipe.generate([PROMPT], config, steps)
    inside = [i for i, token in enumerate(steps.tokens) if i not in steps.ends and token not in steps.tokens[:i]]
    assert inside

    main = tmp_path / "main"
    shutil.copytree(SMALL, main)
    settings = {"eos_token_id": steps.tokens[inside[-1]]}
    (main / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    on_cpu = run_here(sample("greedy_causal_lm.py"), main, PROMPT, *EXACT)
    on_npu = run_here(
        sample("speculative_greedy_lm.py"), main, main, PROMPT, "-k", 7, "--draft-device", "NPU", *EXACT,
        "--draft-property", "NPUW_DEVICES=CPU", "--draft-property", "EXECUTION_MODE_HINT=ACCURACY",
    )  # fmt: skip
    assert figures(on_cpu.stderr)["new tokens"] == figures(on_npu.stderr)["new tokens"] == str(inside[-1] + 1)
    assert on_cpu.stdout == on_npu.stdout


def test_one_new_token_is_summarized(run_here):
    done = run_here(sample("speculative_greedy_lm.py"), SMALL, DRAFT, PROMPT, "--max-new-tokens", 1)
    assert done.returncode == 0, done.stderr
    assert figures(done.stderr)["new tokens"] == "1"


# ---- consoles -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", ["", "\ufeff"], ids=["plain", "byte order mark"])
@pytest.mark.parametrize("after", ["", "\n", "\r\n"], ids=["none", "LF", "CRLF"])
def test_dash_reads_prompt_from_stdin(before, after):
    program = "import sys; sys.path.insert(0, 'samples'); import console; print(repr(console.read_prompt('-')))"
    prompt = "naïve 你好 🙂:\n    two lines"
    done = subprocess.run(
        [sys.executable, "-c", program], input=(before + prompt + after).encode(), capture_output=True, cwd=ROOT
    )
    assert ast.literal_eval(done.stdout.decode()) == prompt


@pytest.mark.parametrize("name", ["greedy_causal_lm.py", STAND_ALONE])
def test_prompt_from_stdin_gives_same_text(run_here, greedy, name):
    done = run_here(sample(name), *SAMPLES[name], "-", "--max-new-tokens", TOKENS, *EXACT, stdin=PROMPT + "\n")
    assert done.stdout == greedy[0]


def test_output_is_utf_8_on_a_cp1252_console(run, tmp_path):
    console = {"PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0"}
    program = tmp_path / "hello.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT / 'samples')!r})\n"
        "import console; console.run(lambda: print('naïve 你好 🙂', end=''))",
        encoding="utf-8",
    )
    assert run(program, env=console).stdout == "naïve 你好 🙂"

    folder = tmp_path / "モデル"
    shutil.copytree(DRAFT, folder)
    done = run(sample("greedy_causal_lm.py"), folder, "naïve 你好 🙂", "--max-new-tokens", 8, env=console)
    assert done.returncode == 0, done.stderr
    assert figures(done.stderr)["main"].startswith(f"{folder} on CPU")
    text = done.stdout
    done = run(sample(STAND_ALONE), folder, folder, "naïve 你好 🙂", "--max-new-tokens", 8, env=console)
    assert done.returncode == 0, done.stderr
    assert done.stdout == text


def test_streamer_never_splits_a_character():
    from samples import console

    tokenizer = openvino_genai.Tokenizer(SMALL)
    text = "naïve Σ 你好 🙂🙂 é\n\tdef f(x): pass"
    streamer = console.Streamer(SMALL, tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False).input_ids.data[0].tolist()
    pieces = [streamer.text_of([token]) for token in ids]
    assert "".join(pieces) == streamer.text == text
    assert "\ufffd" not in "".join(pieces)
    half = tokenizer.encode("🙂", add_special_tokens=False).input_ids.data[0].tolist()[:1]
    assert streamer.text_of(half) == ""
    assert streamer.detokenizer.end() == "\ufffd"


ended_by_signal = pytest.mark.posix("Windows has no SIGPIPE, and another status for a program that Ctrl-C ended")


@pytest.mark.parametrize("name", ["greedy_causal_lm.py", pytest.param(STAND_ALONE, marks=ended_by_signal)])
def test_closed_pipe_ends_quietly(name):
    command = [sys.executable, sample(name), *SAMPLES[name], PROMPT, "--max-new-tokens", "300"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout.read(1)
        process.stdout.close()
        shown = process.stderr.read().decode()
    if name == STAND_ALONE:
        assert (process.returncode, shown) == (-signal.SIGPIPE, "")
        return
    assert process.returncode == 0
    assert shown.splitlines() == [f"Loading {SMALL} on CPU ..."]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, a disk that is always full")  # noqa: PTH110
def test_full_disk_gives_one_sentence_error():
    command = [sys.executable, sample("greedy_causal_lm.py"), SMALL, PROMPT, "--max-new-tokens", "300"]
    with open("/dev/full", "w", encoding="utf-8") as full:  # noqa: PTH123
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, cwd=ROOT, env=BUFFERED)
    assert done.returncode == 1
    assert "No space left on device" in done.stderr.decode().splitlines()[-1]
    assert "Traceback" not in done.stderr.decode()


@pytest.mark.posix("the shell closes stdout")
@pytest.mark.parametrize("program", ["samples/greedy_causal_lm.py", "scripts/check_pair.py"])
def test_closed_stdout_is_no_error(program):
    arguments = [SMALL, SMALL] if "check" in program else [SMALL, PROMPT, "--max-new-tokens", "4"]
    command = shlex.join(map(str, [sys.executable, program, *arguments]))
    done = subprocess.run(f"{command} >&-", shell=True, stderr=subprocess.PIPE, cwd=ROOT)
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr


def test_acceptance_rate_is_at_most_1(run_here):
    """GenAI counts the accepted tokens of a text's last draft, but not always the draft tokens themselves."""
    found = []
    for tokens in (4, 6, 12):
        done = run_here(sample(STAND_ALONE), MAIN, DRAFT, "def f", "--max-new-tokens", tokens)
        found.append(figures(done.stderr)["acceptance rate"])
    assert all(rate == "unknown" or 0 <= float(rate.split()[0]) <= 1 for rate in found)
    assert found[-1] != "unknown"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--max-new-tokens", 10**22], "--max-new-tokens of 1 or more"),
        (["-k", "65"], "-k is 65"),
        (["\udcff"], "utf-8"),
    ],
)
def test_invalid_engine_arguments_give_one_sentence_error(run, options, words):
    prompt = [] if options[0] == "\udcff" else ["x"]
    done = run(sample(STAND_ALONE), SMALL, SMALL, *prompt, *options)
    assert done.returncode == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1


# ---- Ctrl-C ---------------------------------------------------------------------------------------------------------


def press_ctrl_c_when(arguments, ready):
    """Start a sample, interrupt it once `ready(process)` returns, and return (exit status, stderr)."""
    command = [sys.executable, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, **own_group()) as process:
        seen = ready(process)
        interrupt_group(process)
        rest = process.stderr.read()
        process.wait(timeout=PATIENCE)
    return process.returncode, (seen + rest).decode()


@pytest.fixture
def endless(tmp_path):
    """A fast model that never generates a stop token."""
    shutil.copytree(DRAFT, tmp_path / "endless")
    (tmp_path / "endless/generation_config.json").write_text('{"eos_token_id": 4095}', encoding="utf-8")
    return tmp_path / "endless"


@pytest.mark.parametrize("name", [pytest.param(STAND_ALONE, marks=ended_by_signal), *WITH_CONSOLE])
def test_ctrl_c_during_generation_exits_with_130(endless, name):
    def text_streams(process):
        process.stdout.read(1)
        return b""

    models = [endless] * len(SAMPLES[name])
    status, shown = press_ctrl_c_when([sample(name), *models, PROMPT, "--max-new-tokens", 1900], text_streams)
    assert status == (-signal.SIGINT if name == STAND_ALONE else 130)  # a shell shows the former as 130, too
    assert "Traceback" not in shown
    assert not figures(shown)


@pytest.mark.parametrize("name", ["speculative_greedy_lm.py", "speculative_sampling_lm.py"])
def test_ctrl_c_during_loading_exits_with_130(name):
    status, shown = press_ctrl_c_when([sample(name), SMALL, DRAFT, PROMPT], lambda process: process.stderr.readline())
    assert status == 130
    assert shown.split() == f"Loading {SMALL} on CPU and {DRAFT} on CPU ...".split()


def test_ctrl_c_during_engine_import_exits_with_130(tmp_path):
    """A stand-in for the engine reports the start of its import and then waits."""
    (tmp_path / "openvino.py").write_text(
        "import sys, time; print('importing', file=sys.stderr, flush=True); time.sleep(60)", encoding="utf-8"
    )
    program = tmp_path / "sample.py"
    program.write_text(
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT / 'samples')!r}]; import console", encoding="utf-8"
    )
    status, shown = press_ctrl_c_when([program], lambda process: process.stderr.readline())
    assert status == 130
    assert shown.split() == ["importing"]


# ---- the source code of samples -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLES)
def test_help_is_the_docstring(run_here, name):
    docstring = ast.get_docstring(ast.parse((ROOT / sample(name)).read_text(encoding="utf-8")))
    done = run_here(sample(name), "--help")
    assert done.returncode == 0
    assert docstring in done.stdout
    assert f"python samples/{name} models/embedded/main" in docstring


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_import_only_engine_and_console(name):
    tree = ast.parse((ROOT / sample(name)).read_text(encoding="utf-8"))
    imports = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imports |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    drafting = {"speculative.drafting.policy", "speculative.drafting.suffix"}
    engine = {"speculative", *drafting} if name in OUR_ENGINE else set()
    expected = {"openvino_genai"} if name == STAND_ALONE else {"console", "openvino_genai"}
    assert expected <= imports - sys.stdlib_module_names - {"readline"} - engine
    assert imports - sys.stdlib_module_names - {"readline"} <= expected | engine


@pytest.mark.parametrize("name", ONE_SHOT)
def test_sample_fits_on_one_screen(name):
    lines = (ROOT / sample(name)).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= (60 if name == STAND_ALONE else 45)


def test_console_module_is_short():
    assert len((ROOT / "speculative/cli/console.py").read_text(encoding="utf-8").splitlines()) <= 220


def assigned(name):
    """The assignment targets in the main function of a sample, in order."""
    tree = ast.parse((ROOT / sample(name)).read_text(encoding="utf-8"))
    main = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main")
    return [ast.unparse(node.targets[0]) for node in ast.walk(main) if isinstance(node, ast.Assign)]


@pytest.mark.parametrize("name", WITH_CONSOLE)
def test_samples_share_statements_in_the_same_order(name):
    """The statements of the stand-alone sample are in the others too, in the same order, unless they belong to an
    option that the others lack, or our engine replaces them."""
    first, other = assigned(STAND_ALONE), assigned(name)
    assert [target for target in first if target in other] == [target for target in other if target in first]
    assert {"args", "config", "config.max_new_tokens", "result"} <= set(first) & set(other)
