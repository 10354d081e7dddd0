"""Shared fixtures and markers: run a program of this project as a user does, export tiny pairs, schedule test files."""

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from xdist.scheduler import LoadFileScheduling

from tests.support import in_process
from tests.support.paths import CORES, DRAFT, ROOT


def pytest_configure():
    """Give the programs under test a cache folder of their own, not the developer's, and let them send no telemetry:
    OpenVINO forks a process for each event, 25 of them in an export, and copies the memory of all imports so far."""
    if not os.environ.get("PYTEST_XDIST_WORKER"):
        os.environ["TF_BUILD"] = "tests"  # the telemetry of OpenVINO and NNCF stays off in CI; others look for "true"
        os.environ["XDG_CACHE_HOME"] = os.environ["LOCALAPPDATA"] = tempfile.mkdtemp(prefix="speculative-tests-")


def pytest_unconfigure():
    if not os.environ.get("PYTEST_XDIST_WORKER"):
        shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)


def pytest_addoption(parser):
    parser.addoption(
        "--long",
        action="store_true",
        help="also every architecture, 20,000 draws of every case, and tests that take minutes: soaks, a training",
    )


def pytest_generate_tests(metafunc):
    """Parametrize `architecture`. Each costs an export of two checkpoints: three by default, all with --long."""
    if "architecture" in metafunc.fixturenames:
        from tests.support.tiny_checkpoints import ARCHITECTURES

        every = metafunc.config.getoption("--long")
        metafunc.parametrize("architecture", ARCHITECTURES if every else ("llama", "mistral", "gemma3"))


IN_RAYS_PROCESS = [  # the last ends the server that those before it share
    *("test_serve_cluster", "test_address", "test_prefix_routing", "test_benchmark_serving", "test_serve_soak"),
    *("test_serve", "test_readme"),
    "test_serve_faults",
]
STARTING_RAY = {*IN_RAYS_PROCESS} - {"test_readme"}  # in which only a few tests do
IMPORTING_TORCH = [  # the first exports the pairs that files of other processes share
    *("test_architectures", "test_make_draft", "test_export_pair", "test_gguf", "test_eagle3_export"),
    *("test_pair_check", "test_export_head", "test_training", "test_vocabulary", "test_main_llama"),
]
LONGEST = [
    *(*IN_RAYS_PROCESS, *IMPORTING_TORCH, "test_lossless_draws", "test_lint", "test_smoke_and_benchmark", "test_tune"),
    *("test_structured_output", "test_batch_decoder", "test_make_benchmark_pair", "test_serve_api", "test_samples"),
    *("test_device_swap", "test_cached_model"),
    *("test_verify_lossless", "test_prefix_cache"),
]
EXPORTING = [
    *("test_export_pair", "test_make_benchmark_pair", "test_training", "test_eagle3_export", "test_make_draft"),
    *("test_export_head", "test_export_model_server", "test_gguf"),
]
SLOW = [  # 10 s of processor time or more
    *(*LONGEST, "test_answers", "test_notebook", "test_soak", "test_sweep_draft_length"),
    *("test_comparisons", "test_figures", "test_benchmark_batching", "test_eagle3_drafts"),
    *("test_eagle3_head", "test_engine_facts", "test_sampling_samples", "test_chat", "test_sample_errors"),
    *("test_report", "test_check_pair", "test_real_model", "test_embedded_pair", "test_openapi_fuzz"),
    *("test_engine_stateful", "test_batch_draft_length", "test_pair_check", "test_pass_width"),
    *("test_capacity", "test_plan_capacity"),
]


@pytest.hookimpl(tryfirst=True)  # before -m chooses by these markers
def pytest_collection_modifyitems(config, items):
    """Sort slow files first, so that no test process waits long for another at the end."""
    for item in items:
        for marker in (name for name, is_so in kinds(item).items() if is_so):
            item.add_marker(marker)
        if item.get_closest_marker("long") and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="takes minutes: --long"))
        if os.name == "nt" and (posix := item.get_closest_marker("posix")):
            item.add_marker(pytest.mark.skip(reason=posix.args[0]))
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


def kinds(item):
    """The markers of a test (see pyproject.toml) that `make test-fast` deselects."""
    file, fixtures = item.path.stem, item.fixturenames
    return {
        "ray": starts_ray(item.nodeid),
        "export": file in EXPORTING or "tiny_pair" in fixtures,
        "browser": "browser" in fixtures,
        "slow": file in SLOW,
    }


def starts_ray(nodeid):
    return Path(nodeid.partition("::")[0]).stem in STARTING_RAY or "::test_serving_" in nodeid


def imports_torch(nodeid):
    file, _, test = nodeid.partition("::")
    return Path(file).stem in IMPORTING_TORCH or test == "test_generated_pages_are_up_to_date"


class TogetherScheduling(LoadFileScheduling):
    """One test process runs all tests that start Ray: with two clusters starting on two cores, one may exceed the 30 s
    that Ray gives its processes. If there are more processes than cores, it runs nothing else: Ray mostly waits.

    One process runs all files that import torch, transformers and optimum, which takes 10 s of processor time."""

    def _split_scope(self, nodeid):
        if starts_ray(nodeid):
            return "ray"
        return "torch" if imports_torch(nodeid) else super()._split_scope(nodeid)

    def _reschedule(self, node):
        if "ray" not in self.assigned_work[node] or len(self.nodes) <= len(CORES):
            super()._reschedule(node)
        elif not node.shutting_down:
            node.shutdown()  # after the tests that it already has


def pytest_xdist_make_scheduler(config, log):
    return TogetherScheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Pin each of several test processes to a core of its own: the threads of small models mostly wait for each other,
    and need a fifth more time if they compete for cores. Tests that start Ray use all cores."""
    if CORES and os.environ.get("PYTEST_XDIST_WORKER"):
        os.sched_setaffinity(0, CORES if starts_ray(item.nodeid) else own_core())


HELD = []  # a lock is released when it is collected as garbage


@functools.cache
def own_core():
    """The first core that no other test process uses, or all cores if every one is used."""
    import openvino
    from filelock import FileLock, Timeout

    openvino.Core().get_property("CPU", "FULL_DEVICE_NAME")  # sees all cores: with one it crashes, see docs/upstream.md
    for core in CORES:
        lock = FileLock(Path(os.environ["XDG_CACHE_HOME"]) / f"core-{core}.lock")
        with contextlib.suppress(Timeout):
            lock.acquire(blocking=False)
            HELD.append(lock)
            return {core}
    return CORES


@pytest.fixture(scope="session", autouse=True)
def costs_measured_briefly():
    """No test depends on measured speed: in the tests' own processes, models are timed less often and at fewer sizes
    than in use, which takes seconds for each pair that is loaded, and up to five times as many on a busy machine."""
    from speculative.drafting import cost_model

    brief = {"MAX_MEASUREMENTS": 2, "MIN_SECONDS": 0.0, "ENOUGH_SECONDS": 0.0, "MEASURED_BATCHED": (1, 8, 64)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in brief.items():
            patch.setattr(cost_model, name, value)
        yield


@pytest.fixture
def run():
    """Run `python PROGRAM ARGS...` from the checkout and return the finished process, its output decoded as UTF-8."""

    def run(program, *arguments, stdin="", timeout=300, env=None, encoding="utf-8"):
        return subprocess.run(
            [sys.executable, str(ROOT / program), *map(str, arguments)],
            input=stdin,
            capture_output=True,
            encoding=encoding,
            errors="replace",
            cwd=ROOT,
            timeout=timeout,
            env={**os.environ, **(env or {})},
        )

    return run


@pytest.fixture
def run_here():
    """The same in this process (tests/support/in_process.py), for tests of what a program prints, not how it ends."""
    return in_process.run_here


@pytest.fixture
def kept_signals():
    """Programs set SIGINT and SIGPIPE when they are imported: a test that imports one leaves both as they were."""
    names = [name for name in ("SIGINT", "SIGPIPE") if hasattr(signal, name)]
    usual = {getattr(signal, name): signal.getsignal(getattr(signal, name)) for name in names}
    yield
    for number, handler in usual.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def shared_server():
    """A function that returns the server that most tests share: it has a batch of 4 requests and a queue of 4,
    answers of at most 300 tokens, exact arithmetic, and no key. A test may end it; the next call starts another."""
    from tests.support.serving import METRICS_EXPORTED, Server

    options = ("--max-num-seqs", 4, "--max-queue", 4, "--max-output-tokens", 300, "--timeout", 60)
    options += ("--property", "EXECUTION_MODE_HINT=ACCURACY")  # a text does not depend on the rest of the batch
    options += ("--num-assistant-tokens", 3)  # the adaptive draft length depends on this machine
    env = {**METRICS_EXPORTED, "RAY_gcs_server_port_wait_time_s": "10"}  # until Ray gives up a killed head node
    servers = []

    def shared_server():
        if not servers or servers[-1].process.poll() is not None:
            servers.append(Server(*options, env=env))
            servers[-1].wait_for("ready: ")
        return servers[-1]

    yield shared_server
    for server in servers:
        server.end()


@pytest.fixture(scope="module")  # no longer: until it ends, this thread has an event loop that runs
def browser():
    """A browser of this machine: Chromium or Chrome, or Edge on Windows. Nothing is downloaded."""
    playwright = pytest.importorskip("playwright.sync_api")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with playwright.sync_playwright() as driver:
        for choice in [{"executable_path": found}] if found else [{"channel": "chrome"}, {"channel": "msedge"}]:
            try:
                started = driver.chromium.launch(**choice)
            except playwright.Error as error:
                reason = str(error).splitlines()[0]
                continue
            yield started
            started.close()
            return
        if os.environ.get("CI") == "true":
            pytest.fail(f"in CI the page is tested in a browser, and none starts: {reason}")
        pytest.skip(f"no browser starts here ({reason}): install chromium from your system's packages")


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory):
    """A folder that concurrent test processes share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base


def made_once(folder, make):
    """Return the folder, which the first test process that needs it creates by `make(folder)`."""
    from filelock import FileLock  # the hub's client has it

    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
            partial.mkdir()
            make(partial)
            partial.rename(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_pair(shared_folder):
    """A function of an architecture: the folder of its tiny pair, `main` and `draft`, exported in f32 at first.

    Test processes that run beside each other share them; later runs, too, where EXPORTS_CACHE names a folder.
    """
    from convert import export_pair
    from speculative.convert import optimum_cli
    from tests.support.tiny_checkpoints import export_key, run_optimum_here, save_checkpoint, train_tokenizer

    shared = shared_folder / "tiny_pairs"
    if cache := os.environ.get("EXPORTS_CACHE"):
        shared = Path(cache) / export_key()
    shared.mkdir(parents=True, exist_ok=True)

    def export(architecture: str, folder: Path) -> None:
        tokenizer = train_tokenizer()
        for role in ("main", "draft"):
            save_checkpoint(architecture, role, tokenizer, folder / "checkpoints" / role)
        sources = [str(folder / "checkpoints" / role) for role in ("main", "draft")]
        precision = ["--weight-format", "fp32", "--draft-weight-format", "fp32"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(optimum_cli, "run", run_optimum_here)
            assert export_pair.main([*sources, str(folder / "pair"), *precision]) == 0

    def tiny_pair(architecture: str) -> Path:
        return made_once(shared / architecture, functools.partial(export, architecture)) / "pair"

    return tiny_pair


@pytest.fixture(scope="session")
def other_tokenizer(shared_folder):
    """A folder with tokenizer IRs that split text as the embedded pair's do but number the tokens in reverse."""
    return made_once(shared_folder / "other_tokenizer", save_other_tokenizer)


@pytest.fixture(scope="session")
def renumbered_draft(shared_folder, other_tokenizer):
    """The embedded draft with that tokenizer: it gives the same tokens the same probabilities under other ids."""
    return made_once(shared_folder / "renumbered_draft", functools.partial(save_renumbered_draft, other_tokenizer))


def save_renumbered_draft(tokenizer, folder):
    import numpy as np
    import openvino
    import openvino_genai
    from openvino import opset13

    shutil.copytree(DRAFT, folder, dirs_exist_ok=True)
    shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
    former = openvino_genai.Tokenizer(str(DRAFT)).get_vocab()
    present = openvino_genai.Tokenizer(str(folder)).get_vocab()
    numbers = np.array([former[token] for token in sorted(present, key=present.get)])
    model = openvino.Core().read_model(DRAFT / "openvino_model.xml")
    for node in model.get_ordered_ops():  # the embeddings, which the LM head shares: weights and scales
        if node.get_type_name() == "Constant" and list(node.shape)[:1] == [len(numbers)]:
            renumbered = opset13.constant(node.data[numbers])
            for reader in node.output(0).get_target_inputs():
                reader.replace_source_output(renumbered.output(0))
    openvino.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)


def save_other_tokenizer(folder):
    from openvino import save_model
    from openvino_tokenizers import convert_tokenizer
    from transformers import PreTrainedTokenizerFast

    description = json.loads((DRAFT / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["content"] for token in description["added_tokens"]}
    vocabulary = description["model"]["vocab"]
    words = [word for word in vocabulary if word not in special]
    numbers = sorted((vocabulary[word] for word in words), reverse=True)
    words.sort(key=vocabulary.get)
    vocabulary.update(zip(words, numbers, strict=True))
    (folder / "tokenizer.json").write_text(json.dumps(description), encoding="utf-8")

    settings = json.loads((DRAFT / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokens = {
        name: settings[name] for name in ("bos_token", "eos_token", "pad_token", "unk_token") if settings.get(name)
    }
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **tokens)
    for model, name in zip(
        convert_tokenizer(tokenizer, with_detokenizer=True), ("tokenizer", "detokenizer"), strict=True
    ):
        save_model(model, folder / f"openvino_{name}.xml")
