"""What serve_pair.py asks of its arguments, all checked before Ray is started."""

import argparse
import ipaddress
import os
import socket
from pathlib import Path

from speculative.cli import console
from speculative.models.cached_model import CAPACITY
from speculative.serving import resources
from speculative.serving.limits import Limits
from speculative.serving.middleware import digest
from speculative.serving.pair import Pair

KEY = "SPECULATIVE_API_KEY"
MAX = 1_000_000


def parse(description: str) -> argparse.Namespace:
    """The arguments, with `pair`, `limits`, `keys` (digests, or None) and `resources` (of a replica) made of them."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: console.fail(f"{message} (--help shows the usage)")
    number = console.whole_number
    for name in ("main", "--device", "--draft-device", "-k", "--property", "--draft-property", "--recommended"):
        flags = console.DRAFT_LENGTH if name == "-k" else (name,)
        parser.add_argument(*flags, **console.ARGUMENTS[name])
    draft = {**console.ARGUMENTS["draft"], "nargs": "?", "default": argparse.SUPPRESS}
    parser.add_argument("draft", **draft)  # without one, the main model alone

    http = parser.add_argument_group("HTTP")
    http.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s, this machine)")
    http.add_argument("--port", type=number(1, 65535), default=8000, help="(default: %(default)s)")
    http.add_argument("--model-name", metavar="NAME", help="what clients call the model (default: the folder's name)")
    http.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help=f"ask for one of the keys in FILE, one a line (default: for the one in {KEY}, if that is set)",
    )
    http.add_argument("--insecure", action="store_true", help="listen at an address of the network without an API key")

    limits = parser.add_argument_group("limits of a replica")
    for name, default, meaning in (
        ("--max-prompt-tokens", None, "longest prompt (default: what the context allows)"),
        ("--max-output-tokens", 1024, "longest answer, where none is asked for too (default: %(default)s)"),
        ("--max-running", 16, "texts decoded at once (default: %(default)s)"),
        ("--max-waiting", 64, "requests that wait for a place; more are refused with 429 (default: %(default)s)"),
        ("--cache-tokens", CAPACITY, "tokens that all texts together may have (default: %(default)s)"),
    ):
        limits.add_argument(name, type=number(1, MAX), default=default, metavar="N", help=meaning)
    limits.add_argument(
        "--no-prefix-cache", dest="prefix_cache", action="store_false",
        help="compute prompts that begin alike each by itself (default: requests of the same API key and "
        "prompt_cache_key share it)",
    )  # fmt: skip
    seconds = console.decimal(lambda value: 0 < value < 1e6, "above 0")
    limits.add_argument(
        "--timeout", type=seconds, default=600.0, metavar="SECONDS", help="for a request (default: %(default)g)"
    )
    limits.add_argument(
        "--drain", type=seconds, default=30.0, metavar="SECONDS",
        help="for answers that are under way when the server is stopped (default: %(default)g)",
    )  # fmt: skip

    ray = parser.add_argument_group("Ray")
    ray.add_argument("--address", help="join this Ray cluster, HOST:PORT (default: a Ray of its own on this machine)")
    ray.add_argument("--replicas", type=number(1, 1000), default=1, metavar="N", help="(default: %(default)s)")
    ray.add_argument("--max-replicas", type=number(1, 1000), metavar="N", help="add replicas up to N under load")
    ray.add_argument("--num-cpus", type=number(1, 4096), metavar="N", help="cores of a replica (default: Ray counts 1)")
    ray.add_argument(
        "--resource", type=resource, action="append", default=[], metavar="NAME=AMOUNT",
        help="what a replica takes of a Ray resource; repeat for more (default: intel_gpu=1 or intel_npu=1 for those "
        "devices)",
    )  # fmt: skip
    ray.add_argument(
        "--metrics-port", type=number(1, 65535), default=8001, metavar="PORT",
        help="for Prometheus, of a Ray of its own (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--debug", **console.ARGUMENTS["--debug"])

    args = parser.parse_args()
    if args.recommended:  # but for its draft length, which is that of a single text: many under way want less
        draft_length = args.num_assistant_tokens
        args = console.take_recommendation(parser, args, "ours" if "draft" in args else "alone")
        args.num_assistant_tokens = draft_length
    args.draft = Path(args.draft) if "draft" in args else None
    args.main = Path(args.main)
    args.property = dict(args.property)
    args.draft_property = dict(args.draft_property) or args.property
    if args.max_replicas and args.max_replicas < args.replicas:
        console.fail(f"--max-replicas {args.max_replicas} is below --replicas {args.replicas}: give as many or more.")
    _check_models(args)
    args.pair = _pair(args)
    args.limits = Limits(
        args.max_prompt_tokens or MAX, args.max_output_tokens, args.max_running, args.max_waiting, args.timeout
    )
    args.keys = _keys(args.api_key_file)
    if not args.keys and not is_loopback(args.host):
        open_to_all = f"whoever reaches {args.host} may use this server, as there is no API key"
        if not args.insecure:
            console.fail(f"{open_to_all}: give --api-key-file, or --insecure if that is meant.")
        console.say(f"warning: {open_to_all}.")
    args.resources = dict(args.resource) or resources.taken_by(args.device, args.draft_device if args.draft else "")
    return args


def resource(text: str) -> tuple[str, float]:
    """An argparse type: what a replica takes of a Ray resource."""
    name, _, amount = text.partition("=")
    try:
        return name, console.decimal(lambda value: 0 < value < 1e6, "above 0")(amount) if name else 1 / 0
    except (argparse.ArgumentTypeError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=AMOUNT, like intel_gpu=1") from None


def _check_models(args: argparse.Namespace) -> None:
    console.check_model("main", args.main)
    console.check_device(args.device, args.property)
    if args.draft:
        console.check_model("draft", args.draft)
        console.check_device(args.draft_device, args.draft_property)
        console.check_pair(args.main, args.draft)


def _pair(args: argparse.Namespace) -> Pair:
    folder = args.main.resolve()
    threads = {"INFERENCE_NUM_THREADS": args.num_cpus} if args.num_cpus else {}
    return Pair(
        name=args.model_name or (folder.parent.name if folder.name == "main" else folder.name),
        main=folder,
        draft=args.draft and args.draft.resolve(),
        device=args.device,
        draft_device=args.draft_device,
        properties={**threads, **args.property},
        draft_properties={**threads, **args.draft_property},
        draft_length=args.num_assistant_tokens,
        cache_tokens=args.cache_tokens,
        prefix_cache=args.prefix_cache,
    )


def _keys(file: Path | None) -> frozenset[bytes] | None:
    """The digests of the API keys, or None where none is asked for."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines() if file else [os.environ.get(KEY, "")]
    except (OSError, UnicodeDecodeError) as error:
        console.fail(f"the API key cannot be read from {file}: {getattr(error, 'strerror', None) or 'no UTF-8'}.")
    keys = [line.strip() for line in lines if line.strip()]
    if file and not keys:
        console.fail(f"{file} holds no API key: write one into it.")
    if not all(key.isascii() and key.isprintable() for key in keys):
        console.fail(f"an API key in {file or KEY} has characters that HTTP headers do not take: use ASCII ones.")
    return frozenset(map(digest, keys)) or None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    try:
        addresses = {found[4][0] for found in socket.getaddrinfo(host, None)}
    except OSError:
        return False  # it will fail when it listens
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)


def in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
