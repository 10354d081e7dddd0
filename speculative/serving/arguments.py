"""Command-line arguments of serve_pair.py; all checks are made before Ray is started."""

import argparse
import contextlib
import ipaddress
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path

from speculative.cli import console, former_options
from speculative.cli.number_types import decimal, port_number, whole_number
from speculative.cli.parser import Parser
from speculative.cli.pipeline_arguments import (
    ARGUMENTS,
    DRAFT_LENGTH,
    check_models,
    draft_properties,
    take_recommendation,
)
from speculative.models.cores import thread_properties
from speculative.models.eagle3_head import has_paged_attention
from speculative.models.spec import ModelSpec
from speculative.pair.draft_limits import native_limit
from speculative.pair.engines import NATIVE
from speculative.pair.recommendation import ALONE, SUFFIX
from speculative.pair.usable import MIN_CAPACITY
from speculative.serving import resources
from speculative.serving.http import tracing
from speculative.serving.http.middleware import digest
from speculative.serving.settings import API_KEY_VARIABLE, LARGEST, Limits, Pair, Settings

FORMER_OPTIONS = {"--max-num-seqs": ["--max-running"], "--max-queue": ["--max-waiting"]}
ORIGIN = re.compile(r"\*|https?://[a-z0-9.:\[\]-]+")
_above_zero = decimal(lambda value: 0 < value < 1e6, "above 0 and below 1,000,000")


def parse(description: str, arguments: Sequence[str] | None = None, elsewhere: bool = False) -> Settings:
    """Parse and check the arguments, by default those of this program. With `elsewhere`, replicas may run on other
    machines, as with --address: whether these have the devices shows when they load the models."""
    parser = build_parser(description)
    args = parser.parse_args(arguments)
    if args.recommended:  # except its draft length, which is tuned for a single text; batches need less
        draft_length = args.num_assistant_tokens
        alone = [SUFFIX, ALONE] if args.suffix_decoding else [ALONE]
        methods = [NATIVE] if "draft" in args else alone
        args = take_recommendation(parser, args, *methods, arguments=arguments)
        args.num_assistant_tokens = draft_length
    if args.past_answers and not args.suffix_decoding:
        console.fail("--past-answers is for suffix decoding: add --suffix-decoding.")
    args.draft = Path(args.draft) if "draft" in args else None
    args.main = Path(args.main)
    args.property = dict(args.property)
    args.draft_property = draft_properties(args, NATIVE)
    if args.max_replicas and args.max_replicas < args.replicas:
        console.fail(f"--max-replicas {args.max_replicas} is below --replicas {args.replicas}: use at least as many.")
    if not args.address and args.port == args.metrics_port:
        console.fail(f"--port and --metrics-port are both {args.port}: choose another for one of them.")
    _check_models(args, elsewhere or args.address is not None)
    keys = _keys(args.api_key_file)
    _check_access(args, keys)
    if problem := tracing.problem():
        console.fail(problem)
    return Settings(
        pair=_pair(args),
        limits=Limits(args.max_prompt_tokens, args.max_output_tokens, args.max_num_seqs, args.max_queue, args.timeout),
        keys=keys,
        resources=dict(args.resource) or resources.required_by(args.device, args.draft_device if args.draft else ""),
        host=args.host,
        port=args.port,
        address=args.address,
        replicas=args.replicas,
        max_replicas=args.max_replicas,
        routing=args.routing,
        num_cpus=args.num_cpus,
        cors_origins=tuple(args.cors_origin),
        metrics_port=args.metrics_port,
        drain=args.drain,
    )


def build_parser(description: str) -> argparse.ArgumentParser:
    parser = Parser(description=description)
    for name in ("main", "--device", "--draft-device", "-k", "--property", "--draft-property", "--recommended"):
        flags = DRAFT_LENGTH if name == "-k" else (name,)
        devices = {"help": "CPU, GPU or GPU.1 (default: CPU)"} if name == "--device" else {}
        parser.add_argument(*flags, **ARGUMENTS[name] | devices)
    draft = {**ARGUMENTS["draft"], "nargs": "?", "default": argparse.SUPPRESS}
    parser.add_argument("draft", **draft)  # optional: without it, the main model alone
    parser.add_argument(
        "--suffix-decoding", action=argparse.BooleanOptionalAction,
        help="copy draft tokens from the prompt and the answer so far; with a draft, where that gains more",
    )  # fmt: skip
    parser.add_argument(
        "--past-answers", type=whole_number(1, LARGEST), default=Pair.past_answers, metavar="TOKENS",
        help="with --suffix-decoding: also copy from past answers to requests with the same API key and "
        "prompt_cache_key; TOKENS of them are kept (default: none)",
    )  # fmt: skip
    _add_http_arguments(parser.add_argument_group("HTTP"))
    _add_limits(parser.add_argument_group("limits per replica"))
    _add_ray_arguments(parser.add_argument_group("Ray"))
    parser.add_argument("--debug", **ARGUMENTS["--debug"])
    return parser


def _add_http_arguments(http: argparse._ArgumentGroup) -> None:
    http.add_argument("--host", default=Settings.host, help="address to listen on (default: %(default)s, this machine)")
    http.add_argument("--port", type=port_number, default=Settings.port, help="port (default: %(default)s)")
    http.add_argument("--model-name", metavar="NAME", help="model name in the API (default: the folder's name)")
    http.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help=f"require one of the API keys in FILE, one per line (default: the one in {API_KEY_VARIABLE}, if set)",
    )
    http.add_argument("--insecure", action="store_true", help="listen on a network address without an API key")
    http.add_argument(
        "--cors-origin", type=origin, action="append", default=[], metavar="ORIGIN",
        help="let web pages of this origin use the server, like https://example.org; * for all (repeatable; "
        "default: none)",
    )  # fmt: skip


def _add_limits(group: argparse._ArgumentGroup) -> None:
    for name, least, default, meaning in (
        ("--max-prompt-tokens", 1, Limits.max_prompt_tokens, "maximum prompt length (default: limited by the context)"),
        (
            "--max-output-tokens",
            1,
            Limits.max_output_tokens,
            "maximum answer length, and its default in a request (default: %(default)s)",
        ),
        ("--max-num-seqs", 1, Limits.max_num_seqs, "maximum batch size (default: %(default)s)"),
        (
            "--max-queue",
            1,
            Limits.max_queue,
            "maximum queue length; further requests get status 429 (default: %(default)s)",
        ),
        (
            "--cache-tokens",
            MIN_CAPACITY,
            Pair.cache_tokens,
            "KV-cache size in tokens, for all requests of a replica together (default: %(default)s)",
        ),
    ):
        number = whole_number(least, LARGEST)
        argument = group.add_argument(name, type=number, default=default, metavar="N", help=meaning)
        former_options.accept(group, argument, *FORMER_OPTIONS.get(name, ()))
    group.add_argument(
        "--no-prefix-cache", dest="prefix_cache", action="store_false",
        help="do not cache prompt prefixes (default: shared between requests of the same API key and "
        "prompt_cache_key)",
    )  # fmt: skip
    group.add_argument(
        "--timeout",
        type=_above_zero,
        default=Limits.timeout,
        metavar="SECONDS",
        help="time limit per request (default: %(default)g)",
    )
    group.add_argument(
        "--drain", type=_above_zero, default=Settings.drain, metavar="SECONDS",
        help="time for finishing running requests when the server is stopped (default: %(default)g)",
    )  # fmt: skip


def _add_ray_arguments(ray: argparse._ArgumentGroup) -> None:
    ray.add_argument("--address", help="connect to this Ray cluster, HOST:PORT (default: start Ray on this machine)")
    ray.add_argument(
        "--replicas",
        type=whole_number(1, 1000),
        default=Settings.replicas,
        metavar="N",
        help="replicas (default: %(default)s)",
    )
    ray.add_argument(
        "--max-replicas",
        type=whole_number(1, 1000),
        metavar="N",
        help="scale up to N replicas under load",
    )
    ray.add_argument(
        "--routing", choices=("balanced", "prefix"), default=Settings.routing,
        help="balanced: to the less loaded of two replicas; prefix: to the replica that has the request's beginning in "
        "its prefix cache, unless it is overloaded (default: %(default)s)",
    )  # fmt: skip
    ray.add_argument(
        "--num-cpus",
        type=whole_number(1, 4096),
        metavar="N",
        help="cores per replica (default: Ray reserves 1, OpenVINO uses all)",
    )
    ray.add_argument(
        "--resource", type=resource, action="append", default=[], metavar="NAME=AMOUNT",
        help="Ray resource required per replica (repeatable; default: intel_gpu=1 if a model runs on a GPU)",
    )  # fmt: skip
    ray.add_argument(
        "--metrics-port", type=port_number, default=Settings.metrics_port, metavar="PORT",
        help="Prometheus port of the local Ray (default: %(default)s)",
    )  # fmt: skip


def resource(text: str) -> tuple[str, float]:
    """An argparse type: a Ray resource and the amount required per replica."""
    name, _, amount = text.partition("=")
    with contextlib.suppress(argparse.ArgumentTypeError):
        if name:
            return name, _above_zero(amount)
    raise argparse.ArgumentTypeError(f"{text!r} is not NAME=AMOUNT, like intel_gpu=1")


def origin(text: str) -> str:
    """An argparse type: the origin of web pages, as browsers send it."""
    if ORIGIN.fullmatch(text):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is not an origin, like https://example.org or http://localhost:3000")


def _check_models(args: argparse.Namespace, elsewhere: bool) -> None:
    models = {"main": (args.main, args.device, args.property)}
    if args.draft:
        models["draft"] = (args.draft, args.draft_device, args.draft_property)
    check_models(models, NATIVE, elsewhere)
    if args.draft and (limit := native_limit(args.draft, args.device, args.draft_device)):
        console.fail(limit)
    for role, (_, device, _) in models.items():
        if not has_paged_attention(device):
            console.fail(f"{role}: the server needs paged attention, which {device} lacks: use CPU, GPU or GPU.1.")


def _check_access(args: argparse.Namespace, keys: frozenset[bytes] | None) -> None:
    """End the program if it would listen on a network address without an API key, unless with --insecure."""
    if not keys and not is_loopback(args.host):
        open_to_all = f"anyone who can reach {args.host} can use this server, as there is no API key"
        if not args.insecure:
            console.fail(f"{open_to_all}: use --api-key-file, or --insecure if this is intended.")
        console.say(f"warning: {open_to_all}.")


def _pair(args: argparse.Namespace) -> Pair:
    folder = args.main.resolve()

    def spec(folder: Path, device: str, properties: dict) -> ModelSpec:
        uses_cpu = re.split("[.:]", device)[0] not in ("GPU", "NPU")
        threads = thread_properties(args.num_cpus) if uses_cpu else {}  # each replica is a process
        return ModelSpec(folder, device, {**threads, **properties})

    return Pair(
        name=args.model_name or (folder.parent.name if folder.name == "main" else folder.name),
        main=spec(folder, args.device, args.property),
        draft=args.draft and spec(args.draft.resolve(), args.draft_device, args.draft_property),
        draft_length=args.num_assistant_tokens,
        cache_tokens=args.cache_tokens,
        prefix_cache=args.prefix_cache,
        suffix_decoding=bool(args.suffix_decoding),
        past_answers=args.past_answers,
    )


def _keys(file: Path | None) -> frozenset[bytes] | None:
    """The digests of the API keys, or None if no key is required."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines() if file else [os.environ.get(API_KEY_VARIABLE, "")]
    except (OSError, UnicodeDecodeError) as error:
        console.fail(f"cannot read API keys from {file}: {getattr(error, 'strerror', None) or 'not UTF-8'}.")
    keys = [line.strip() for line in lines if line.strip()]
    if file and not keys:
        console.fail(f"{file} contains no API key: add one.")
    if not all(key.isascii() and key.isprintable() for key in keys):
        console.fail(f"an API key in {file or API_KEY_VARIABLE} has characters not allowed in HTTP headers: use ASCII.")
    return frozenset(map(digest, keys)) or None


def is_loopback(host: str) -> bool:
    """Whether this address is reachable only from this machine."""
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return False  # listening will fail
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)


def in_url(host: str) -> str:
    """The host in a URL for this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
