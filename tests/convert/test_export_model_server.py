"""Model repositories for OpenVINO Model Server: their content, checked against the server's published schema and the
engine it runs (GenAI), and the program's errors. The server itself is not run.
"""

import errno
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import jsonschema
import openvino_genai
import pytest

from convert import export_model_server
from speculative.convert import model_server_folder, model_server_graph, work_folder
from speculative.convert.errors import ConvertError
from speculative.convert.model_server_graph import read_graph
from speculative.pair import recommendation
from tests.support.killing import killed_at_rename
from tests.support.noisy_draft import save_noisy_draft
from tests.support.paths import DRAFT, MAIN, ROOT, everything_in
from tests.support.tiny_checkpoints import save_ir, train_tokenizer

PROGRAM = "convert/export_model_server.py"
PROMPT = "def read_file(path):"


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    """A pair named `embedded`: the embedded draft, with a noisy copy of it as its draft."""
    folder = tmp_path_factory.mktemp("pairs") / "embedded"
    shutil.copytree(DRAFT, folder / "main")
    (folder / "draft").mkdir()
    save_noisy_draft(folder / "draft")
    return folder


@pytest.fixture
def pair(embedded, tmp_path):
    """A copy of that pair for one test. Its files are hard links: replace them, never write into them."""
    return shutil.copytree(embedded, tmp_path / "embedded", copy_function=os.link)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "served"


@pytest.fixture
def command():
    return export_model_server.main


@pytest.fixture
def export(capsys):
    """Run the program, which must succeed; return its output."""

    def export(*arguments):
        assert export_model_server.main([str(argument) for argument in arguments]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return export


def options_in(repository):
    """LLMCalculatorOptions as the server reads them."""
    return read_graph(Path(repository, "embedded", "graph.pbtxt").read_text(encoding="utf-8"))


def recommend(pair, best="genai", **settings):
    """Write a recommended.json for the pair, as scripts/tune.py does; return its settings."""
    alone = {"device": "CPU", "properties": {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 64}, "throughput": 300.0}
    drafting = {
        "device": "CPU",
        "properties": {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 128},
        "draft_device": "CPU",
        "draft_properties": {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 128},
        "num_assistant_tokens": 7,
        "assistant_confidence_threshold": 0.0,
        "scheduler": {"cache_size": 1, "max_num_batched_tokens": 2**31},
        "throughput": 700.0,
        "speedup": 2.3333,
    }
    every = {"alone": alone, "genai": {**drafting, **settings}}
    content = {
        "use_draft": best != "alone",
        "best": best,
        "reason": "The draft is slow.",
        "sentences": [],
        "settings": every if best != "alone" else {"alone": alone},
        "main": {"folder": "main", "fingerprint": recommendation.fingerprint(pair / "main")},
        "draft": {"folder": "draft", "fingerprint": recommendation.fingerprint(pair / "draft")},
        "measured_on": {},
    }
    recommendation.write(pair / recommendation.FILE, content)
    return every


# --- output ---


def test_pair_is_exported_as_model_repository(run, pair, out):
    before = everything_in(pair)
    finished = run(PROGRAM, pair, out)
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""

    assert sorted(path.name for path in out.iterdir()) == ["README.md", "config.json", "embedded"]
    assert sorted(path.name for path in out.parent.iterdir()) == ["embedded", "served"]  # no leftovers beside it
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert config["mediapipe_config_list"] == [{"name": "embedded", "base_path": "embedded"}]
    options = options_in(out)
    for half, path in (("main", options.models_path), ("draft", options.draft_models_path)):
        served = out / "embedded" / path  # relative to graph.pbtxt
        names = {path.name for path in (pair / half).iterdir()}
        assert {path.name for path in served.iterdir()} == names
        assert (served / "openvino_model.bin").samefile(pair / half / "openvino_model.bin")  # no second copy
        assert not (served / "config.json").samefile(pair / half / "config.json")
    assert (options.device, options.draft_device, options.plugin_config) == ("CPU", "CPU", "")
    assert not options.dynamic_split_fuse and not options.enable_prefix_caching
    assert options.max_num_batched_tokens == 256 * 6  # more than the context of 1,024 tokens
    assert everything_in(pair) == before

    for text in (finished.stdout, (out / "README.md").read_text(encoding="utf-8")):
        assert "untested" in text
        assert "Send only greedy requests" in text and "scripts/verify_lossless.py" in text
        assert f"-p 127.0.0.1:8000:8000 -v {out}:/models:ro openvino/model_server:" in text
        assert f"ovms --config_path {out}/config.json --rest_port 8000 --rest_bind_address 127.0.0.1" in text
        assert "/v3/chat/completions" in text


def test_default_request_is_greedy_with_draft(pair, out, export):
    """As in the server, GenAI reads generation_config.json, and a temperature above 0 means sampling."""
    file = pair / "main" / "generation_config.json"
    original = json.loads(file.read_text(encoding="utf-8"))
    file.unlink()
    file.write_text(json.dumps({**original, "do_sample": True, "temperature": 0.6, "top_p": 0.9}), encoding="utf-8")
    export(pair, out, "-k", 3)
    config = openvino_genai.GenerationConfig(str(out / "embedded/main/generation_config.json"))
    assert config.temperature == 0 and not config.do_sample
    assert config.num_assistant_tokens == 3
    assert config.eos_token_id == original["eos_token_id"]
    assert json.loads(file.read_text(encoding="utf-8"))["temperature"] == 0.6  # the pair keeps its own


def test_genai_with_exported_graph_gives_main_model_greedy_text(pair, out, export):
    """GenAI is configured from graph.pbtxt as in the server's sources; several requests run at once, some of them long.

    The server's own defaults only bring a warning here: on a model this small their text is right, too.
    """
    export(pair, out, *EXACT, "-k", 4)
    assert "differs from the main model's if a prompt is split" in export(
        pair, out.with_name("defaults"), *EXACT, "-k", 4, *DEFAULTS
    )
    prompts = some_prompts()
    assert served_texts(out, prompts) == texts_alone(pair, prompts)


@pytest.mark.long
def test_server_defaults_give_wrong_text_with_a_draft(tmp_path, out, export):
    """With a draft and concurrent requests, a prompt that is split over steps gets a different text. Once this test
    fails, dynamic_split_fuse may stay on."""
    pair = tmp_path / "embedded"
    for half in (MAIN, DRAFT):
        shutil.copytree(half, pair / half.name)
    export(pair, out, *EXACT, "-k", 4)
    export(pair, out.with_name("defaults"), *EXACT, "-k", 4, *DEFAULTS)
    prompts = some_prompts()
    expected = texts_alone(pair, prompts)
    assert served_texts(out, prompts) == expected
    assert served_texts(out.with_name("defaults"), prompts) != expected


EXACT = ["--property", "EXECUTION_MODE_HINT=ACCURACY"]
DEFAULTS = ["--set", "dynamic_split_fuse=true", "--set", "max_num_batched_tokens=256"]


def some_prompts():
    code = (ROOT / "speculative/sequence/metrics.py").read_text(encoding="utf-8")
    return ["class Stack:\n" * 20, code[:2500], PROMPT]  # 80, 937 and 7 tokens


def texts_alone(pair, prompts):
    """The main model's own greedy texts."""
    alone = openvino_genai.LLMPipeline(str(pair / "main"), "CPU", EXECUTION_MODE_HINT="ACCURACY")
    plain = openvino_genai.GenerationConfig(max_new_tokens=24, apply_chat_template=False)
    return [str(alone.generate(text, plain)) for text in prompts]


def served_texts(repository, prompts):
    """The server engine's outputs for these prompts, requested with a length only."""
    folder, options = repository / "embedded", options_in(repository)

    def scheduler():
        config = openvino_genai.SchedulerConfig()
        names = ("max_num_batched_tokens", "cache_size", "dynamic_split_fuse", "max_num_seqs", "enable_prefix_caching")
        for name in names:
            setattr(config, name, getattr(options, name))
        return config

    draft_folder = str(folder / options.draft_models_path)
    draft = openvino_genai.draft_model(draft_folder, options.draft_device, scheduler_config=scheduler())
    properties = {**json.loads(options.plugin_config), "draft_model": draft}
    main_folder = str(folder / options.models_path)
    pipeline = openvino_genai.ContinuousBatchingPipeline(main_folder, scheduler(), options.device, properties)
    request = openvino_genai.GenerationConfig(f"{main_folder}/generation_config.json")
    request.max_new_tokens, request.apply_chat_template = 24, False
    return [result.m_generation_ids[0] for result in pipeline.generate(prompts, [request] * len(prompts))]


def test_devices_properties_and_fields_reach_the_graph(pair, out, export):
    given = ["--device", "GPU.1", "--draft-device", "CPU", "--property", "KV_CACHE_PRECISION=u8", "--property", "N=8"]
    fields = {
        "cache_size": 4,
        "draft_cache_size": 1,
        "max_tokens_limit": 500,
        "tool_parser": "hermes3",
        "dynamic_split_fuse": "true",
        "chat_template_mode": "JINJA",
        "cache_eviction_config": "{start_size: 32 recent_size: 128 max_cache_size: 672}",
    }
    sets = [word for name, value in fields.items() for word in ("--set", f"{name}={value}")]
    printed = export(pair, out, *given, *sets, "--name", "embedded", "--bind", "10.0.0.7", "--port", 9000)
    options = options_in(out)
    assert (options.device, options.draft_device) == ("GPU.1", "CPU")
    assert json.loads(options.plugin_config) == {"KV_CACHE_PRECISION": "u8", "N": 8}
    assert (options.cache_size, options.draft_cache_size, options.max_tokens_limit) == (4, 1, 500)
    assert options.tool_parser == "hermes3" and options.dynamic_split_fuse and options.chat_template_mode == 1
    assert options.cache_eviction_config.recent_size == 128
    assert "on CPU it gets KV_CACHE_PRECISION=u8 N=8, like the main model" in printed
    assert "The server on 10.0.0.7 has no authentication" in printed
    assert "-p 10.0.0.7:9000:9000" in printed and "--rest_port 9000 --rest_bind_address 10.0.0.7" in printed
    assert "--device /dev/dri" in printed and "model_server:2026.4.1-gpu" in printed


def test_prefix_cache_with_a_draft_is_noted(pair, out, export):
    printed = export(pair, out, "--set", "enable_prefix_caching=true")
    assert options_in(out).enable_prefix_caching
    assert "a sampled request can make the engine fail for all clients" in printed


def test_eagle3_draft_is_served_one_request_at_a_time(tmp_path, out, export, refuses):
    pair = tmp_path / "embedded"
    for half, folder in (("main", MAIN), ("draft", MAIN.parent / "eagle3")):
        shutil.copytree(folder, pair / half)
    assert "one request at a time; leave it out" in refuses(2, pair, out, "--set", "max_num_seqs=4")
    export(pair, out, "--set", "max_num_seqs=1")
    assert options_in(out).max_num_seqs == 1


@pytest.mark.parametrize("devices", [["NPU", "NPU"], ["CPU", "NPU"], ["NPU", "CPU"]])
def test_npu_gets_stateful_pipeline(devices, pair, out, export):
    printed = export(pair, out, "--device", devices[0], "--draft-device", devices[1])
    options = options_in(out)
    assert options.HasField("pipeline_type") and options.pipeline_type == 0  # LM: stateful
    assert not options.HasField("max_num_seqs")
    assert "one request at a time" in printed and "--device /dev/accel" in printed


# --- the recommendation ---


def test_recommendation_is_applied(pair, out, export):
    recommend(pair)
    printed = export(pair, out)
    options = options_in(out)
    assert json.loads(options.plugin_config) == {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 128}
    assert (options.cache_size, options.max_num_batched_tokens) == (0, 256 * 8)  # a scheduler for one request is not
    assert '"num_assistant_tokens": 7' in printed and "2.33x the main model alone" in printed
    assert "instead of" not in printed

    export(
        pair, out, "--overwrite", "-k", 2, "--property", "DYNAMIC_QUANTIZATION_GROUP_SIZE=32", "--set", "cache_size=3"
    )
    options = options_in(out)
    assert json.loads(options.plugin_config) == {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 32}
    assert options.cache_size == 3
    assert json.loads((out / "embedded/main/generation_config.json").read_text("utf-8"))["num_assistant_tokens"] == 2

    printed = export(pair, out, "--overwrite", "--ignore-recommendation")
    assert options_in(out).plugin_config == "" and '"num_assistant_tokens": 5' in printed


def test_confidence_threshold_sets_required_logprobs(pair, out, export):
    recommend(pair, num_assistant_tokens=0, assistant_confidence_threshold=0.4)
    printed = export(pair, out)
    config = openvino_genai.GenerationConfig(str(out / "embedded/main/generation_config.json"))
    assert config.assistant_confidence_threshold == pytest.approx(0.4)
    assert config.logprobs == 1 and config.num_assistant_tokens is None  # they exclude each other
    assert '"assistant_confidence_threshold": 0.4' in printed and "num_assistant_tokens" not in printed


def test_main_model_is_served_alone_if_recommended(pair, out, export, refuses):
    recommend(pair, best="alone")
    printed = export(pair, out)
    options = options_in(out)
    assert json.loads(options.plugin_config) == {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 64}
    assert not options.draft_models_path and options.enable_prefix_caching
    assert not (out / "embedded/draft").exists()
    generation_config = "embedded/main/generation_config.json"
    assert (out / generation_config).read_bytes() == (pair / "main" / "generation_config.json").read_bytes()
    assert (
        "The main model is served alone, as recommended.json recommends (The draft is slow)" in printed
        and "Send only greedy" not in printed
        and "num_assistant_tokens" not in printed
    )

    assert "recommends serving the main model alone" in refuses(2, pair, out, "--overwrite", "-k", 4)
    assert "draft_cache_size" in refuses(2, pair, out, "--overwrite", "--set", "draft_cache_size=1")
    assert "Send only greedy" in export(pair, out, "--overwrite", "--ignore-recommendation")


def test_unsupported_parts_of_recommendation_are_reported(pair, out, export):
    recommend(pair, best="native", draft_properties={"INFERENCE_PRECISION_HINT": "f32"})
    printed = export(pair, out)
    assert "this project's own engine, which this server does not run" in printed
    assert "instead of INFERENCE_PRECISION_HINT=f32" in printed


def test_unusable_recommendation_is_rejected(pair, out, refuses):
    recommend(pair)
    file = pair / recommendation.FILE
    good = json.loads(file.read_text(encoding="utf-8"))
    for change, words in (
        ({"draft": {"fingerprint": "0" * 32}}, "measured with other weights than those in"),
        ({"draft": None}, "measured without a draft; tune with `python scripts/tune.py"),
        ({"main": {}}, "'fingerprint' is missing"),
        ({"settings": {}}, "'alone' is missing"),
        ({"settings": [1]}, "was not written by scripts/tune.py"),
        ({"settings": {"genai": {**good["settings"]["genai"], "device": None, "properties": 3}}}, "tune.py"),
        ({"settings": {"genai": {**good["settings"]["genai"], "num_assistant_tokens": "many"}}}, "'many'"),
        ({"format": 99}, "not in format 2"),
    ):
        file.write_text(json.dumps({**good, **change}), encoding="utf-8")
        assert words in refuses(1, pair, out), change
    assert not out.exists()


# --- the schema ---


def test_documented_graph_is_parsed_like_the_exported_one(pair, out, export):
    """The documented graph of a text generation server, with its own spacing, quotes and commas."""
    documented = """
        input_stream: "HTTP_REQUEST_PAYLOAD:input"
        output_stream: "HTTP_RESPONSE_PAYLOAD:output"
        node: {
          name: "LLMExecutor"
          calculator: "HttpLLMCalculator"
          input_stream: "LOOPBACK:loopback"
          input_stream: "HTTP_REQUEST_PAYLOAD:input"
          input_side_packet: "LLM_NODE_RESOURCES:llm"
          output_stream: "LOOPBACK:loopback"
          output_stream: "HTTP_RESPONSE_PAYLOAD:output"
          input_stream_info: { tag_index: 'LOOPBACK:0', back_edge: true }
          node_options: { [type.googleapis.com / mediapipe.LLMCalculatorOptions]: { OPTIONS } }
          input_stream_handler {
            input_stream_handler: "SyncSetInputStreamHandler",
            options { [mediapipe.SyncSetInputStreamHandlerOptions.ext] { sync_set { tag_index: "LOOPBACK:0" } } }
          }
        }"""
    fields = """models_path: "./main", device: "CPU", draft_models_path: "./draft", draft_device: "CPU", cache_size: 0,
        max_num_batched_tokens: 1536, max_num_seqs: 256, dynamic_split_fuse: false, enable_prefix_caching: false,
        plugin_config: '{"KV_CACHE_PRECISION": "u8"}'"""
    export(pair, out, "--property", "KV_CACHE_PRECISION=u8")
    text_format, pool, message = model_server_graph._protobuf()
    graphs = []
    for text in (documented.replace("OPTIONS", fields), (out / "embedded/graph.pbtxt").read_text(encoding="utf-8")):
        graphs.append(text_format.Parse(text, message("mediapipe.CalculatorGraphConfig"), descriptor_pool=pool))
    assert graphs[0] == graphs[1]

    for wrong, words in (
        (fields + ", draft_length: 5", "no field named"),
        (fields.replace("1536", "-1"), "out of range"),
        (fields.replace("false", '"maybe"', 1), "true"),
        (fields.replace('models_path: "./main",', "", 1), "models_path"),
        (fields.replace('draft_models_path: "./draft",', ""), "draft_device"),
    ):
        with pytest.raises(ConvertError, match=words):
            read_graph(documented.replace("OPTIONS", wrong))
    with pytest.raises(ConvertError, match="0 nodes"):
        read_graph("")


def test_config_schema_rejects_what_the_server_rejects():
    schema = json.loads(export_model_server.CONFIG_SCHEMA.read_text(encoding="utf-8"))
    good = {"model_config_list": [], "mediapipe_config_list": [{"name": "a", "base_path": "a"}]}
    jsonschema.validate(good, schema)
    for wrong in (
        {"mediapipe_config_list": good["mediapipe_config_list"]},
        {**good, "mediapipe_config_list": [{"base_path": "a"}]},
        {**good, "mediapipe_config_list": [{"name": "a", "device": "CPU"}]},
        {**good, "servables": []},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("cache_sise=1", "no such field; it has cache_size"),
        ("xyz=1", "it has best_of_limit"),
        ("cache_size", "is not FIELD=VALUE"),
        ("cache_size= ", "is not FIELD=VALUE"),
        ("cache_size=-1", "does not accept this value"),
        ("cache_size=many", "does not accept this value"),
        ("cache_size=1 max_num_seqs: 2", "more than one field"),
        ("dynamic_split_fuse=perhaps", "does not accept this value"),
        ("pipeline_type=FASTEST", "does not accept this value"),
        ("cache_eviction_config={start_size: 1}", "recent_size"),
        ("device=GPU", "give --device"),
        ("draft_device=GPU", "give --draft-device"),
        ("plugin_config={}", "give --property"),
        ("models_path=/", "this program sets it"),
    ],
)
def test_unknown_graph_field_is_rejected(assignment, words, pair, out, refuses):
    assert words in refuses(2, pair, out, "--set", assignment)
    assert not out.exists()


# --- bad input, and disks ---


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--name", "a/b"], "is not a valid model name"),
        (["--name", ".."], "is not a valid model name"),
        (["--name", "config.json"], "is not a valid model name"),
        (["-k", "0"], "-k is 0, but must be at least 1"),
        (["-k", "two"], "invalid int value: 'two'"),
        (["--property", "FAST"], "'FAST' is not KEY=VALUE"),
        (["--bind", "everywhere"], "'everywhere' is not an IPv4 address"),
        (["--port", "70000"], "'70000' is not a whole number from 1 to 65535"),
        (["--port", "-1"], "'-1' is not a whole number from 1 to 65535"),
    ],
)
def test_invalid_options_are_named(arguments, words, pair, out, refuses):
    assert words in refuses(2, pair, out, *arguments)
    assert not out.exists()


def test_folder_without_a_sound_pair_is_rejected(tmp_path, pair, out, other_tokenizer, refuses):
    message = refuses(2, tmp_path / "no pair", out, "--name", "pair")
    assert "has no folders main and draft; create it with: python convert/" in message
    assert re.search("""MAIN DRAFT (['"]).*no pair\\1$""", message)
    assert "has no folders main and draft" in refuses(2, MAIN, out)
    for name in ("openvino_tokenizer.xml", "openvino_tokenizer.bin"):
        (pair / "draft" / name).unlink()
        shutil.copy(other_tokenizer / name, pair / "draft")
    assert "not a sound pair: " in refuses(1, pair, out)
    (pair / "draft" / "openvino_model.bin").unlink()
    assert "has no openvino_model.bin" in refuses(2, pair, out)
    (pair / "draft" / "openvino_model.xml").unlink()
    assert "has no openvino_model.xml" in refuses(2, pair, out)
    assert not out.exists()


def test_invalid_generation_config_json_is_named(pair, out, refuses):
    file = pair / "main" / "generation_config.json"
    for content, words in (("{", "cannot be read"), ("[1]", "does not hold a JSON object")):
        file.unlink()
        file.write_text(content, encoding="utf-8")
        assert f"{file} {words}" in refuses(2, pair, out)
    assert [path.name for path in out.parent.iterdir()] == ["embedded"]


def test_overwrite_replaces_only_model_repositories(pair, out, export, refuses):
    out.mkdir()
    export(pair, out)  # an empty folder is as good as none
    assert "--overwrite replaces it" in refuses(2, pair, out)
    export(pair, out, "--overwrite", "--set", "cache_size=2")
    assert options_in(out).cache_size == 2

    (out / "notes.txt").write_text("mine", encoding="utf-8")
    before = everything_in(out)
    for arguments in ([], ["--overwrite"]):
        assert "holds files that this program did not make" in refuses(2, pair, out, *arguments)
    assert "holds files that this program did not make" in refuses(2, pair, pair, "--overwrite")
    assert "holds files that this program did not make" in refuses(2, pair, out / "notes.txt", "--overwrite")
    assert everything_in(out) == before


@pytest.mark.parametrize("step", ["write", "install", "interrupt"])
def test_failed_overwrite_keeps_the_old_repository(step, pair, out, export, monkeypatch, capsys):
    export(pair, out)
    before = everything_in(out)
    with monkeypatch.context() as patch:
        if step == "install":  # the second rename, when the old repository is out of the way
            original = Path.rename

            def rename(self, target):
                if target == out and self.parent.name == "new":
                    raise OSError(errno.EACCES, "Permission denied")
                return original(self, target)

            patch.setattr(Path, "rename", rename)
        else:
            error = KeyboardInterrupt() if step == "interrupt" else OSError(errno.ENOSPC, "No space left on device")
            patch.setattr(export_model_server, "greedy_by_default", lambda *_: (_ for _ in ()).throw(error))
        status = export_model_server.main([str(pair), str(out), "--overwrite", "--set", "cache_size=9"])
    assert status == (130 if step == "interrupt" else 1)
    words = {"write": "No space left", "install": "Permission denied", "interrupt": "nothing was left behind"}
    assert words[step] in capsys.readouterr().err
    assert everything_in(out) == before
    assert sorted(path.name for path in out.parent.iterdir()) == ["embedded", "served"]


@pytest.mark.posix("signals")
@pytest.mark.parametrize("renames", range(3))
def test_killed_overwrite_is_undone_by_the_next_run(renames, pair, out, export, refuses):
    """The program is killed before each of its renames in turn."""
    export(pair, out)
    before = everything_in(out)
    killed_at_rename(renames, PROGRAM, pair, out, "--overwrite", "--set", "cache_size=9")
    assert "--overwrite replaces it" in refuses(2, pair, out)  # repairs an interrupted run first
    assert everything_in(out) == before
    assert sorted(path.name for path in out.parent.iterdir()) == ["embedded", "served"]
    export(pair, out, "--overwrite", "--set", "cache_size=9")
    assert options_in(out).cache_size == 9


@pytest.mark.posix("signals")
def test_killed_first_export_leaves_no_files(pair, out, export):
    killed_at_rename(1, PROGRAM, pair, out)
    export(pair, out)
    assert sorted(path.name for path in out.parent.iterdir()) == ["embedded", "served"]


def test_concurrent_writes_to_one_repository_are_rejected(pair, out, refuses):
    with work_folder.replacement(out):
        assert "another process is writing" in refuses(1, pair, out)
    assert sorted(path.name for path in out.iterdir()) == []


def test_weights_are_copied_on_request_or_without_hard_links(pair, out, export, monkeypatch, refuses):
    weights = "main/openvino_model.bin"

    def no_link(*_):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    assert "copied, because" not in export(pair, out, "--copy")
    assert not (out / "embedded" / weights).samefile(pair / weights)
    monkeypatch.setattr(os, "link", no_link)
    printed = export(pair, out, "--overwrite")
    assert "were copied, because hard links" in printed and "cross-device" in printed
    assert (out / "embedded" / weights).read_bytes() == (pair / weights).read_bytes()

    usage = shutil.disk_usage(out)._replace(free=1000)
    monkeypatch.setattr(model_server_folder.shutil, "disk_usage", lambda _: usage)
    assert "the disk has only 1.0 KB free" in refuses(1, pair, out, "--overwrite")


def test_model_without_chat_template_uses_completions_in_examples(tmp_path, out, export):
    tokenizer = train_tokenizer()
    tokenizer.chat_template = None
    for half in ("main", "draft"):
        save_ir(tokenizer, tmp_path / "embedded" / half)
    printed = export(tmp_path / "embedded", out)
    assert "has no chat template" in printed
    assert "/v3/completions" in printed and '"prompt": ' in printed and "chat/completions" not in printed


def test_missing_packages_name_the_install_command(pair, out, monkeypatch, refuses):
    model_server_graph._protobuf.cache_clear()
    for package in ("jsonschema", "google.protobuf"):
        monkeypatch.setitem(sys.modules, package, None)
        model_server_graph._protobuf.cache_clear()
        assert f"{package.split('.')[-1]} is not installed; install it: pip install -r" in refuses(1, pair, out)


# --- the example requests ---


class Recorder(BaseHTTPRequestHandler):
    """Records each request's path and body; responds with one chunk of a chat completion."""

    requests: list

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append((self.path, body))
        chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
        chunk["choices"] = [{"index": 0, "delta": {"content": "café"}, "finish_reason": None}]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode())

    def log_message(self, *_):
        """Log nothing."""


@pytest.fixture
def recorder():
    requests = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OwnRecorder", (Recorder,), {"requests": requests}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port, requests
    server.shutdown()
    server.server_close()


def test_example_requests_match_server_documentation(pair, out, export, recorder):
    """Draft length and temperature reach the server by curl, and by the real openai client where it is installed."""
    port, requests = recorder
    export(pair, out, "-k", 4, "--port", port)
    guide = (out / "README.md").read_text(encoding="utf-8")
    line = re.search(r"^curl http.*/v3/.*$", guide, re.MULTILINE)[0]
    words = shlex.split(line)
    sent = json.loads(words[words.index("-d") + 1])
    assert (sent["model"], sent["temperature"], sent["num_assistant_tokens"]) == ("embedded", 0, 4)
    if shutil.which("curl"):
        subprocess.run(words, check=True, capture_output=True, timeout=60)
        assert requests.pop() == ("/v3/chat/completions", sent)

    pytest.importorskip("openai")
    code = re.search(r"```python\n(.*?)```", guide, re.DOTALL)[1]
    finished = subprocess.run(
        [sys.executable, "-X", "utf8", "-c", code], capture_output=True, encoding="utf-8", timeout=60, cwd=ROOT
    )
    assert finished.stdout == "café", finished.stderr
    assert requests == [("/v3/chat/completions", {**sent, "stream": True})]
