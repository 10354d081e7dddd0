"""The files in deploy/, as far as that is possible without Docker and Kubernetes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import compose_spec
import httpx
import psutil
import pytest
import yaml

from speculative.bench.load.server import free_port
from speculative.pair import recommendation
from speculative.serving import arguments
from speculative.serving.settings import API_KEY_VARIABLE, Settings
from tests.support.later import Later
from tests.support.paths import DRAFT, MAIN, ROOT
from tests.support.serving import PLAIN, ray_cluster
from tests.support.waiting import PATIENCE, wait_until

application, schema = Later("speculative.serving.ray_serve.application"), Later("ray.serve.schema")
exceptions = Later("ray.exceptions")
DEPLOY = ROOT / "deploy"
KEY = "a key that only tests know"


def read(name):
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


def serve_config():
    return yaml.safe_load(read("rayservice.yaml")["spec"]["serveConfigV2"])


def containers(template):
    return template["template"]["spec"]["containers"]


def test_dockerfile_passes_hadolint():
    hadolint = Path(sys.executable).parent / "hadolint"
    process = subprocess.run([hadolint, "--format", "json", DEPLOY / "Dockerfile"], capture_output=True, text=True)
    assert json.loads(process.stdout) == []


def test_image_pins_base_copies_all_files_and_runs_without_root(monkeypatch):
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    assert re.search(r"^FROM python:3\.\d+-slim-\w+$", text, flags=re.MULTILINE)
    assert re.findall(r"^USER (.*)", text, flags=re.MULTILINE) == ["1000"] and "\nHEALTHCHECK" in text
    models = re.search(r"^ARG MODELS=(.*)$", text, flags=re.MULTILINE)[1]
    sources = [
        path.replace("$MODELS", models)
        for line in re.findall(r"^COPY (.*) \S+$", text, flags=re.MULTILINE)
        for path in line.split()
    ]
    sent = re.findall(r"^!(.*)", (ROOT / ".dockerignore").read_text(encoding="utf-8"), flags=re.MULTILINE)
    sent = [models if path == "models" else path for path in sent]
    assert sorted(sources) == sorted(sent) and all((ROOT / path).exists() for path in sources)
    program, given = (json.loads(re.search(rf"^{name} (.*)", text, re.MULTILINE)[1]) for name in ("ENTRYPOINT", "CMD"))
    assert all((ROOT / path).exists() for path in [*program[1:], *given[:2]])
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv(API_KEY_VARIABLE, KEY)
    settings = arguments.parse("", given)  # reachable at the published port, with a key
    assert settings.host == "0.0.0.0" and settings.keys


def test_compose_file_matches_compose_specification():
    compose = compose_spec.PyCompose.from_yaml((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    compose.validate()
    services = read("compose.yaml")["services"]
    assert int(services["server"]["stop_grace_period"].removesuffix("s")) > Settings.drain
    assert sorted(services) == sorted(compose.service_names()) == ["grafana", "prometheus", "server"]
    mounted = [volume.split(":")[0] for service in services.values() for volume in service["volumes"]]
    assert mounted and all((DEPLOY / path).exists() for path in mounted)
    assert all(port.startswith("127.0.0.1:") for service in services.values() for port in service.get("ports", []))
    assert read("prometheus.yaml")["scrape_configs"][0]["static_configs"][0]["targets"] == [
        f"127.0.0.1:{Settings.metrics_port}"
    ]


def test_rayservice_has_valid_serve_config_and_pinned_ray():
    service = read("rayservice.yaml")
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    cluster = service["spec"]["rayClusterConfig"]
    required = (ROOT / "requirements-serve.txt").read_text(encoding="utf-8")
    assert f"ray[serve]=={cluster['rayVersion']} " in required
    for container in containers(cluster["headGroupSpec"]) + containers(cluster["workerGroupSpecs"][0]):
        assert [variable["name"] for variable in container["env"]] == [API_KEY_VARIABLE]
    [app] = schema.ServeDeploySchema(**serve_config()).applications
    assert app.import_path == f"{application.build.__module__}:build"


def test_builder_accepts_serve_pair_options(monkeypatch):
    monkeypatch.setenv(API_KEY_VARIABLE, KEY)
    monkeypatch.chdir(ROOT)
    [app] = serve_config()["applications"]
    deployment = application.build(app["args"])._bound_deployment
    assert deployment.num_replicas == 2
    assert deployment._deployment_config.request_router_config.get_request_router_class() is application.PrefixRouter


def test_builder_leaves_devices_to_the_replicas(monkeypatch):
    """It may run on a head node without the GPU that the replicas have; CPU properties are not the GPU's."""
    monkeypatch.setenv(API_KEY_VARIABLE, KEY)
    options = [MAIN, DRAFT, "--device", "GPU", "--draft-device", "CPU", "--num-cpus", "2"]
    deployment = application.build({"options": options})._bound_deployment
    pair, *_ = deployment.init_args
    assert (pair.main.device, pair.main.properties) == ("GPU", {})
    assert pair.draft.properties == {"INFERENCE_NUM_THREADS": 2, "ENABLE_CPU_PINNING": "NO"}
    pair, *_ = application.build({"options": ["CPU" if o == "GPU" else o for o in options]})._bound_deployment.init_args
    assert pair.main.properties == pair.draft.properties
    assert deployment.ray_actor_options["resources"] == {"intel_gpu": 1}


def test_builder_applies_recommendation_to_its_own_options(monkeypatch, tmp_path):
    """The builder does not read sys.argv, which belongs to a Ray worker process."""
    main = shutil.copytree(DRAFT, tmp_path / "main")
    settings = {"device": "CPU", "properties": {"INFERENCE_NUM_THREADS": 1}}
    role = {"fingerprint": recommendation.fingerprint(main)}
    found = {"main": role, "draft": None, "measured_on": {}, "best": "alone", "settings": {"alone": settings}}
    recommendation.write(recommendation.place(main), {**found, "reason": ""})
    monkeypatch.setenv(API_KEY_VARIABLE, KEY)
    monkeypatch.setattr("sys.argv", ["serve", "deploy"])
    options = [main, "--recommended", "--no-suffix-decoding", "--max-num-seqs", 3]
    pair, limits, *_ = application.build({"options": options})._bound_deployment.init_args
    assert pair.main.properties == {"INFERENCE_NUM_THREADS": 1} and limits.max_num_seqs == 3


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ([DRAFT], "anyone who can reach 0.0.0.0 can use this server"),
        ([DRAFT, "--port", 80], "--port is an option of serve_pair.py"),
        ([DRAFT, "--max-num-seqs=0"], "argument --max-num-seqs"),
    ],
)
def test_builder_rejects_invalid_options(options, problem, monkeypatch):
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    with pytest.raises(ValueError, match=re.escape(problem)):
        application.build({"options": options})


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            lambda: exceptions.ActorDiedError(),
            "cannot listen: its proxy for 127.0.0.1:8123 ended. Choose another --port",
        ),
        (lambda: TimeoutError("HTTP proxies not available after 60s."), "did not start: HTTP proxies not available"),
    ],
)
def test_failed_start_of_ray_serve_gives_one_sentence(error, reason, monkeypatch):
    """The errors of Ray Serve's start that depend on which of its processes is first."""
    settings = SimpleNamespace(host="127.0.0.1", port=8123, address=None, limits=SimpleNamespace(timeout=60))

    def start(**_):
        raise error()

    monkeypatch.setattr(application.serve, "start", start)
    with pytest.raises(application.ServeFailed, match=re.escape(f"Ray Serve {reason}")):
        application.start(settings)


RESTARTED = """
import os, subprocess, sys, time
from speculative.serving.ray_serve import ray_runtime

if "SECOND" in os.environ:
    sys.exit()
if sys.argv[1:]:  # below the program that restarts: starts a process every few milliseconds
    for _ in range(200):
        if not os.fork():
            time.sleep(600)
        print(flush=True)
        time.sleep(0.005)
    time.sleep(600)
below = subprocess.Popen([sys.executable, __file__, "below"], stdout=subprocess.PIPE)
below.stdout.readline()
ray_runtime._restart(None, {"SECOND": "1"})
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_restart_leaves_no_process_that_ray_starts_meanwhile(tmp_path):
    """A process that Ray's raylet started while it was killed kept the metrics port, which the second start needs."""
    assert left_by(RESTARTED, tmp_path) == []


FAILED_START = """
import os, subprocess, sys, time
from types import SimpleNamespace
from speculative.serving.ray_serve import ray_runtime

def init(*_, **__):
    subprocess.run([sys.executable, __file__, "raylet"])
    raise RuntimeError("timed out")

if ray_runtime.STARTS_VARIABLE in os.environ:
    sys.exit()
if sys.argv[1:] == ["raylet"]:  # starts its agent and dies
    subprocess.Popen([sys.executable, __file__, "agent"])
elif sys.argv[1:]:
    time.sleep(600)
else:
    sys.modules["ray"] = SimpleNamespace(init=init)
    ray_runtime._start(8001, None)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep no orphans below a process")
def test_restart_leaves_no_process_of_a_dead_raylet(tmp_path):
    """A raylet whose agents need more than 15 s to start dies. An agent that it left kept the metrics port."""
    assert left_by(FAILED_START, tmp_path) == []


def left_by(source, folder):
    """Run a program to its end. Returns the processes that it leaves, and kills them."""
    program = folder / "program.py"
    program.write_text(source, encoding="utf-8")
    subprocess.run([sys.executable, program], check=True, timeout=PATIENCE, env={**os.environ, "PYTHONPATH": str(ROOT)})
    left = [one for one in psutil.process_iter(["cmdline"]) if str(program) in (one.info["cmdline"] or [])]
    for one in left:
        one.kill()
    return left


@pytest.mark.skipif(sys.platform != "linux", reason="Ray's clusters are for Linux")
def test_serving_rayservice_config_with_serve_run(tmp_path, monkeypatch):
    """`serve run` deploys the config as KubeRay's operator does. The model is small and there is one replica."""
    monkeypatch.setenv(API_KEY_VARIABLE, KEY)
    config, port = serve_config(), free_port()
    config["applications"][0]["args"]["options"] = [str(DRAFT), "--num-cpus", "1", "--routing", "prefix"]
    config["http_options"] = {"host": "127.0.0.1", "port": port}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    url, headers = f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {KEY}"}
    body = {"model": DRAFT.name, "prompt": "def", "max_tokens": 5}
    with ray_cluster(num_cpus=1, object_store_memory=80 * 2**20) as cluster:
        command = [Path(sys.executable).parent / "serve", "run", "--address", cluster.address, tmp_path / "config.yaml"]
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
        wait_until(lambda: httpx.get(f"{url}/health", verify=False).is_success, passing=(httpx.TransportError,))
        assert httpx.post(f"{url}/v1/completions", json=body, headers=headers, **PLAIN).json()["choices"]
        assert httpx.post(f"{url}/v1/completions", json=body, **PLAIN).status_code == 401
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE)
