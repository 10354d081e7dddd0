"""--address: cells and candidates on the machines of a Ray cluster, here two real Ray nodes on one machine.

The embedded draft serves as both models, because it is fast. No test depends on a speed.
"""

import contextlib
import json
import signal
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from speculative.bench.cluster import hosts, ray_nodes
from speculative.bench.cluster.hosts import Place
from speculative.bench.devices.matrix import Cell, Device
from speculative.bench.result import SwapResult, TuneResult
from tests.support.paths import DRAFT, ROOT
from tests.support.progress import EACH_STEP
from tests.support.serving import ray_cluster
from tests.support.typed import problems
from tests.support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.posix("Ray's clusters are for Linux")
SWAP, TUNE = "scripts/device_swap.py", "scripts/tune.py"
ROOM = {"object_store_memory": 80 * 2**20}
QUICK = ["--max-prompts", 1, "--max-new-tokens", 12, "--rounds", 1, "--property", "EXECUTION_MODE_HINT=ACCURACY"]
QUICK += ["--property", "INFERENCE_NUM_THREADS=1"]  # several mostly wait for each other


@pytest.fixture(scope="module")
def cluster():
    """A head node without CPUs, as is common: nothing is measured on it."""
    with ray_cluster(num_cpus=0, **ROOM) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def machines(cluster):
    """A function that returns the given number of cluster nodes by name; nodes of earlier tests are reused."""
    names = iter(("one", "two", "three", "four", "five", "six"))
    nodes = {}

    def machines(number):
        for name, node in list(nodes.items()):
            if node not in cluster.worker_nodes:  # removed by a test
                del nodes[name]
            elif len(nodes) > number:
                cluster.remove_node(nodes.pop(name))
        while len(nodes) < number:
            name = next(names)
            nodes[name] = cluster.add_node(num_cpus=1, node_name=name, **ROOM)
        return dict(nodes)

    return machines


def start(program, *arguments, python=(sys.executable,), **options):
    command = [*python, program, DRAFT, DRAFT, *arguments]
    return subprocess.Popen(
        list(map(str, command)),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        **options,
    )


def finish(process, status=0, seconds=200):
    out, stderr = process.communicate(timeout=seconds)
    assert process.returncode == status, stderr
    assert "Traceback" not in stderr
    result = json.loads(out.splitlines()[-1])
    assert problems(result, SwapResult | TuneResult) == []
    return result, stderr


def cells_of(result):
    return {(cell["main_device"], cell["draft_device"]): cell for cell in result["matrix"]["cells"]}


def running_cell(results, nodes):
    """The name of the node that measures a cell, after another cell was measured, and its process."""

    def found():
        cells = {name: running("speculative.bench.devices.cell", one) for name, one in nodes.items()}
        return next(((name, cell) for name, cell in cells.items() if cell), None) if results.exists() else None

    return wait_until(found, "the second cell is measured", every=0.1)


def running(program, node):
    """The process of `program` that runs on a node of the cluster: its parent's parent is the node's raylet."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    for one in raylet.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(word.endswith(program) for word in one.cmdline()):
                return one
    return None


# ---- device_swap.py -------------------------------------------------------------------------------------------------


def test_machines_share_the_cells(cluster, machines, tmp_path):
    names = set(machines(2))
    options = ["--address", cluster.address, "--devices", "GPU,CPU", "--results", tmp_path / "cells.jsonl"]
    result, stderr = finish(start(SWAP, *options, *QUICK))
    assert "2 Ray nodes are on 1 computer: these take turns" in stderr
    cells = cells_of(result)
    assert len(cells) == 6
    measured = {key: cell for key, cell in cells.items() if "GPU" not in key}
    assert {cell["status"] for cell in measured.values()} == {"ok"}
    assert {cell["machine"] for cell in measured.values()} == names
    assert all(cell["same_text"] for cell in measured.values())
    assert set(result["environment"]["machines"]) == names
    for key, cell in cells.items():
        if "GPU" in key:
            assert cell["status"] == "absent" and "there is no GPU" in cell["reason"] and "machine" not in cell
    assert any(line.startswith("GPU is absent: there is no GPU") for line in result["summary"])


def test_ctrl_c_ends_remote_processes(cluster, machines, tmp_path):
    two, results = machines(2), tmp_path / "cells.jsonl"
    options = ["--address", cluster.address, "--devices", "CPU", "--results", results]
    process = start(SWAP, *options, *QUICK, "--max-new-tokens", 400)
    _, cell = running_cell(results, two)
    process.send_signal(signal.SIGINT)
    result, _ = finish(process, status=130)
    statuses = [cell["status"] for cell in cells_of(result).values()]
    assert "ok" in statuses and "not run" in statuses
    assert psutil.wait_procs([cell], timeout=PATIENCE)[1] == []


def test_cell_of_a_lost_node_is_retried_on_another_machine(cluster, machines, tmp_path):
    two, results = machines(2), tmp_path / "cells.jsonl"
    options = ["--address", cluster.address, "--devices", "CPU", "--results", results]
    process = start(SWAP, *options, *QUICK, "--max-new-tokens", 400)
    lost, _ = running_cell(results, two)
    cluster.remove_node(two[lost], allow_graceful=False)
    result, _ = finish(process)
    cells = cells_of(result)
    assert len(cells) == 2 and {cell["status"] for cell in cells.values()} == {"ok"}
    assert {cell["machine"] for cell in cells.values()} == set(two) - {lost}
    kept = [json.loads(line)["result"]["machine"] for line in results.read_text(encoding="utf-8").splitlines()]
    assert sorted(kept) == sorted(cell["machine"] for cell in cells.values())


def test_losing_all_machines_is_reported_and_next_run_resumes(cluster, machines, tmp_path):
    one, results = machines(1), tmp_path / "cells.jsonl"
    options = ["--address", cluster.address, "--devices", "CPU", "--results", results, *QUICK]
    process = start(SWAP, *options, "--max-new-tokens", 401)
    name, _ = running_cell(results, one)
    cluster.remove_node(one[name], allow_graceful=False)
    result, _ = finish(process, status=1)
    cells = cells_of(result)
    assert cells["CPU", "none"]["status"] == "ok" and cells["CPU", "CPU"]["status"] == "not run"
    assert f"machine {name} was lost" in cells["CPU", "CPU"]["reason"]
    assert any(f"machine {name} was lost" in line for line in result["summary"])
    (other,) = machines(1)
    again, stderr = finish(start(SWAP, *options, "--max-new-tokens", 401))
    assert "1 of 2 cells are already in" in stderr
    kept, new = (cells_of(again)["CPU", draft] for draft in ("none", "CPU"))
    assert [kept[key] == cells["CPU", "none"][key] for key in ("machine", "measured")] == [True, True]
    assert new["machine"] == other != name


def test_missing_model_on_a_machine_is_an_error(cluster, machines, tmp_path):
    (name,) = machines(1)
    folders = [DRAFT, tmp_path / "elsewhere"]
    missing = rf"machine {name} has no model in .*elsewhere: copy it to the same path there"
    with pytest.raises(ValueError, match=missing), ray_nodes.connect(cluster.address, folders, print):
        pass


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("nowhere", ["'nowhere'", "HOST:PORT"]),
        ("127.0.0.1:9", ["no Ray cluster at 127.0.0.1:9", "ray start --head"]),
    ],
)
@pytest.mark.parametrize("program", [SWAP, TUNE])
def test_invalid_address_gives_one_sentence_error(run_here, program, address, words):
    done = run_here(program, DRAFT, DRAFT, "--address", address)
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    assert all(word in done.stderr.splitlines()[-1] for word in words)


@pytest.mark.parametrize("program", [SWAP])
def test_ray_is_not_imported_without_an_address(run, tmp_path, program):
    """The import fails, as if the package were not installed."""
    (tmp_path / "ray.py").write_text("raise ImportError('no Ray here')\n", encoding="utf-8")
    here = {"env": {"PYTHONPATH": str(tmp_path)}}
    options = ["--devices", "CPU", *QUICK, "--results", tmp_path / "cells.jsonl"]
    done = run(program, DRAFT, DRAFT, *options, **here)
    assert done.returncode == 0, done.stderr
    done = run(program, DRAFT, DRAFT, *options, "--address", "127.0.0.1:9", **here)
    assert done.returncode == 2 and "--address requires Ray" in done.stderr.splitlines()[-1]


# ---- tune.py --------------------------------------------------------------------------------------------------------


def test_equal_machines_share_candidates_and_survive_a_lost_node(cluster, machines, tmp_path):
    two = machines(2)
    kept, lost = two
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def area(width, height):\nimport os\n", encoding="utf-8")
    files = ["--out", tmp_path / "found.json", "--prompts", prompts]
    short = ["--minutes", 0.1, "--max-new-tokens", 12, "--devices", "CPU"]
    process = start(TUNE, "--address", cluster.address, *files, *short, python=EACH_STEP)
    early = ""
    while "properties" not in early:
        early += (piece := process.stderr.read(1))
        assert piece, early
    worker = running("speculative.bench.tuning.worker", two[lost])
    assert running("speculative.bench.tuning.worker", two[kept]) and worker
    cluster.remove_node(two[lost], allow_graceful=False)
    result, _ = finish(process)
    assert "2 Ray nodes are on 1 computer" in early
    assert set(result["environment"]["machines"]) == set(two)
    assert any("Machines lost during tuning" in line and lost in line for line in result["summary"])
    names = {row["name"] for row in result["rows"]}
    assert {"GenAI, main alone, default properties", "GenAI, K = 5, default properties"} <= names
    rows = {row["name"]: row["speedup"] for row in result["rows"]}
    alone = {name: speedup for name, speedup in rows.items() if name.startswith("GenAI, main alone, default")}
    schedulers = [name for name in alone if name.endswith("max_num_batched_tokens=2147483648")]
    assert not any("draft: " in name for name in alone)  # not with options of a draft
    assert {name: alone[name] for name in set(alone) - {*schedulers}} == {"GenAI, main alone, default properties": 1}
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert found["measured_on"].keys() == {"openvino_genai", "CPU"}
    assert psutil.wait_procs([worker], timeout=PATIENCE)[1] == []


def test_tuning_uses_equal_machines_only():
    server = [place("server", "CPU"), place("server", "CPU")]
    laptop = place("laptop", "CPU", "GPU")
    assert hosts.equal_machines([laptop, *server], None) == server
    assert hosts.equal_machines([laptop, *server], "laptop") == [laptop]
    with pytest.raises(ValueError, match="no machine is named 'desk': choose one of laptop, server, server"):
        hosts.equal_machines([laptop, *server], "desk")


# ---- assignment of cells to machines --------------------------------------------------------------------------------


def place(kind, *devices):
    return Place({name: Device(name, name) for name in devices}, None, ["1", "CPU"], kind, SimpleNamespace(name=kind))


def test_cells_are_assigned_to_few_machine_kinds_with_both_devices():
    laptop, server, stick = place("laptop", "CPU", "GPU"), place("server", "CPU"), place("stick", "CPU", "NPU")
    devices = [Device(name) for name in ("CPU", "GPU", "NPU")]
    cells = [Cell(main, draft) for main in devices for draft in (None, *devices)]
    chosen = hosts.assign(cells, [server, laptop, stick])
    where = {(cell.main.name, cell.draft and cell.draft.name): chosen.get(id(cell)) for cell in cells}
    assert {kind for key, kind in where.items() if "NPU" not in key} == {"laptop"}
    assert where["NPU", None] == where["CPU", "NPU"] == "stick"
    assert where["GPU", "NPU"] is None and where["NPU", "GPU"] is None
    assert "server" not in where.values()


def test_node_offers_only_the_devices_it_declares():
    found = {
        "devices": [
            {"name": name, "full_name": name, "missing": "", "stands_for": stands_for}
            for name, stands_for in (
                ("CPU", ["CPU"]),
                ("GPU", ["GPU"]),
                ("GPU.1", ["GPU.1"]),
                ("NPU", ["NPU"]),
                ("AUTO", ["CPU", "NPU"]),
            )
        ],
        "processor": "CPU",
        "openvino_genai": "1",
    }
    machine = SimpleNamespace(name="one", declared=["CPU", "GPU"], cores=4)
    devices = hosts.look_up(machine, lambda job, seconds: found, None, False).devices
    assert [name for name, one in devices.items() if not one.missing] == ["CPU", "GPU", "GPU.1"]
    assert devices["NPU"].missing == devices["AUTO"].missing == "its node was started with CPU, GPU only"
