"""Create a model repository for OpenVINO Model Server (OVMS) from a pair: speculative decoding with an OpenAI-like API.

    python convert/export_model_server.py PAIR OUT
    python convert/export_model_server.py models/embedded build/served
    python convert/export_model_server.py models/qwen3 /srv/models --device GPU --property KV_CACHE_PRECISION=u8 -k 4
    python convert/export_model_server.py models/qwen3 /srv/models --set cache_size=8 --set tool_parser=hermes3

PAIR is a folder with main/ and draft/, as written by convert/export_pair.py. Devices, properties and draft length come
from PAIR/recommended.json (scripts/tune.py), if there is one; options override it. OUT gets config.json, NAME/ with
graph.pbtxt and both models, and README.md with the commands to start the server (on 127.0.0.1 unless --bind is given)
and example requests. Weights are hard links to PAIR's, or copies with --copy or if linking is not possible.

graph.pbtxt and config.json are checked against the server's published schema. This project has never run the server
itself: how it handles OUT is untested. With a draft, send it greedy requests only: its engine does not sample from the
main model's distribution (scripts/verify_lossless.py shows it). So temperature 0 is the default in OUT. Prompts are not
split over steps (dynamic_split_fuse is off): with a draft and concurrent requests, splitting changes the engine's
greedy output. An EAGLE-3 draft is served one request at a time, as the server requires, and not on an NPU.
"""

from speculative.cli.ctrl_c import raise_on_signals

import argparse
import ipaddress
import json
import re
import sys
from pathlib import Path

from speculative.cli import former_options
from speculative.cli.number_types import port_number
from speculative.cli.parser import Parser
from speculative.cli.processes import end_with_reader, utf8_output
from speculative.cli.properties import PROPERTY
from speculative.convert import program
from speculative.convert.errors import ConvertError
from speculative.convert.model_server_folder import new_repository, place_model, refuse_occupied
from speculative.convert.model_server_graph import graph_text, read_graph
from speculative.convert.model_server_guide import SERVER, UNTESTED, Guide
from speculative.convert.model_server_settings import (
    DRAFT_LENGTH,
    PREFIX_CACHE,
    SPLIT_PROMPTS,
    Serving,
    graph_fields,
    greedy_by_default,
    settings,
)
from speculative.convert.optimum_cli import shown
from speculative.convert.work_folder import recover
from speculative.pair import model_info
from speculative.pair.check import check_pair

ROOT = Path(__file__).resolve().parent.parent

CONFIG_SCHEMA = ROOT / "speculative/convert/model_server_config.json"
IMAGE = f"openvino/model_server:{SERVER}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status: 0 done, 1 the job failed, 2 bad usage, 130 interrupted."""
    utf8_output()
    options = parse(sys.argv[1:] if arguments is None else arguments)
    resume = "nothing was left behind"
    return program.run(lambda: export(options), options.out, options.debug, resume)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = build_parser()
    options = parser.parse_args(arguments)
    options.name = options.name or options.pair.resolve().name
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", options.name) or options.name in ("config.json", "README.md"):
        parser.error(f"{options.name!r} is not a valid model name; give --name with letters, digits, . _ -")
    if options.num_assistant_tokens is not None and options.num_assistant_tokens < 1:
        parser.error(f"-k is {options.num_assistant_tokens}, but must be at least 1")
    return options


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="export_model_server.py", description=__doc__)
    add = parser.add_argument
    add("pair", metavar="PAIR", type=Path, help="the folder with main/ and draft/")
    add("out", metavar="OUT", type=Path, help="the folder to create; must be new or empty")
    add("--name", help="the model's name in the API (default: PAIR's name)")
    add("--device", help="device of the main model (default: CPU)")
    add("--draft-device", help="device of the draft (default: the main model's)")
    add(
        "--property",
        **PROPERTY,
        help="OpenVINO property of the main model, which the server also applies to the draft; may be repeated",
    )
    draft_length = add(
        "-k",
        "--num-assistant-tokens",
        type=int,
        metavar="K",
        help=f"default draft length of requests (default: {DRAFT_LENGTH})",
    )
    former_options.accept(parser, draft_length, "--draft-length")
    add(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="any other field of LLMCalculatorOptions in graph.pbtxt; may be repeated",
    )
    add("--ignore-recommendation", action="store_true", help="ignore PAIR/recommended.json")
    add("--copy", action="store_true", help="copy the weights, so that OUT is self-contained")
    add("--overwrite", action="store_true", help="replace a repository that this program made")
    add("--bind", type=address, default="127.0.0.1", metavar="ADDRESS", help="IPv4 address (default: 127.0.0.1)")
    add("--port", type=port_number, default=8000, help="port (default: 8000)")
    add("--image", help=f"Docker image of the server (default: {IMAGE}, with -gpu for a GPU or NPU)")
    add("--debug", action="store_true", help="show stack traces")
    return parser


def address(text: str) -> str:
    try:
        return str(ipaddress.IPv4Address(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an IPv4 address; give 127.0.0.1, for example") from None


def export(options: argparse.Namespace) -> None:
    """Create the repository: check the models, determine the settings, write the files, install OUT atomically."""
    recover(options.out.resolve())
    refuse_occupied(options.out, options.overwrite)
    context_length = require_models(options.pair)
    serving, graph = plan(options, context_length)
    config, guide = config_text(options.name), guide_for(options, serving)
    copied = write_repository(options, serving, graph, config, guide)
    if copied:
        print(f"the weights were copied, because hard links from {options.out} failed ({copied})")
    report(options, guide)


def require_models(pair: Path) -> int | None:
    """The main model's context length. Raises ConvertError if the folder does not have both models."""
    main, draft = pair / "main", pair / "draft"
    if not main.is_dir() or not draft.is_dir():
        create = shown(["python", "convert/export_pair.py", "MAIN", "DRAFT", str(pair)])
        raise ConvertError(f"{pair} has no folders main and draft; create it with: {create}", 2)
    try:
        for folder in (main, draft):
            model_info.require_ir(folder, standalone=folder == main)
        return model_info.config_facts(main).context_length
    except model_info.UnusableFolder as error:
        raise ConvertError(str(error), 2) from None


def plan(options: argparse.Namespace, context_length: int | None) -> tuple[Serving, str]:
    """The settings and the text of graph.pbtxt. Raises ConvertError if the pair is not sound with them."""
    main, draft = options.pair / "main", options.pair / "draft"
    serving = settings(options, main, draft)
    graph = graph_text(graph_fields(serving, context_length), options.set)
    fields = read_graph(graph)
    if fields.dynamic_split_fuse and serving.drafting:
        serving.notes.append(SPLIT_PROMPTS)
    if fields.enable_prefix_caching and serving.drafting:
        serving.notes.append(PREFIX_CACHE)
    if serving.eagle3 and fields.max_num_seqs != 1:
        raise ConvertError(
            f"--set max_num_seqs={fields.max_num_seqs} is not possible: with an EAGLE-3 draft the server takes one "
            "request at a time; leave it out",
            2,
        )
    check = check_pair(main, draft, npu=serving.stateful)
    if not check.sound:
        reasons = "; ".join(
            f"{finding.what}: {finding.message}" for finding in check.findings if finding.level == "error"
        )
        raise ConvertError(f"not a sound pair: {reasons}")
    return serving, graph


def guide_for(options: argparse.Namespace, serving: Serving) -> Guide:
    """The content of README.md; what the user must know of it is added to the notes."""
    chat = bool(model_info.ir_facts(options.pair / "main").chat_template)
    if not chat:
        serving.notes.append("The model has no chat template: use the completions API, not chat completions.")
    if options.bind != "127.0.0.1":
        serving.notes.append(f"The server on {options.bind} has no authentication: only let trusted clients reach it.")
    return Guide(
        name=options.name,
        folder=options.out.resolve(),
        devices=[serving.device, serving.draft_device],
        address=options.bind,
        port=options.port,
        image=options.image or IMAGE + ("-gpu" if re.search("[GN]PU", serving.device + serving.draft_device) else ""),
        drafting=serving.drafting,
        chat=chat,
        notes=serving.notes,
    )


def write_repository(options: argparse.Namespace, serving: Serving, graph: str, config: str, guide: Guide) -> str:
    """Write and install OUT; return why weights were copied instead of linked, or ""."""
    with new_repository(guide.folder, options.overwrite) as folder:
        served = folder / options.name
        copied = place_model(options.pair / "main", served / "main", options.copy)
        if serving.drafting:
            draft = options.pair / "draft"
            copied = place_model(draft, served / "draft", options.copy) or copied
            greedy_by_default(served / "main" / "generation_config.json", serving)
        write(served / "graph.pbtxt", graph)
        write(folder / "config.json", config)
        write(folder / "README.md", guide.text())
    return copied


def config_text(name: str) -> str:
    """The content of config.json, checked against the server's published schema."""
    try:
        import jsonschema
    except ImportError:
        raise ConvertError("jsonschema is not installed; install it: pip install -r requirements-export.txt") from None
    config = {"model_config_list": [], "mediapipe_config_list": [{"name": name, "base_path": name}]}
    jsonschema.validate(config, json.loads(CONFIG_SCHEMA.read_text(encoding="utf-8")))
    return json.dumps(config, indent=2) + "\n"


def write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8", newline="\n")


def report(options: argparse.Namespace, guide: Guide) -> None:
    size = sum(path.stat().st_size for path in guide.folder.rglob("*") if path.is_file())
    print(f"done: {options.out} ({size / 1e6:,.1f} MB); graph.pbtxt and config.json match the published schema")
    for note in [UNTESTED, *guide.notes]:
        print(f"  {note}")
    print(f"start it with Docker:\n  {guide.docker()}")
    print(f"or on bare metal:\n  {guide.bare_metal()}")
    print(f"send a request (for the openai package see {options.out}/README.md):\n  {guide.curl()}")


if __name__ == "__main__":
    raise_on_signals()
    end_with_reader()  # the folder is complete before anything is printed
    sys.exit(main())
