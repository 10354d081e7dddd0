"""Generate a benchmark pair: the embedded pair's output at the shape, size and cost of a real model; offline, minutes.

    python scripts/make_benchmark_pair.py pairs/tinyllama --shape TinyLlama-1.1B --acceptance 0.75
    python scripts/make_benchmark_pair.py pairs/tinyllama-useless --main-of pairs/tinyllama --acceptance 0
    python scripts/make_benchmark_pair.py pairs/tinyllama-sampled --main-of pairs/tinyllama --temperature 1
    python scripts/make_benchmark_pair.py pairs/qwen3-1.7b-eagle3 --shape Qwen3-1.7B --eagle3

The pair is for measuring speed when no real model is available, not for judging text: the main model generates the same
tokens as models/embedded/main. It is that model, expanded without changing its function (Net2Net, Chen et al. 2015,
arXiv 1511.05641), with Llama architecture and int8 weights. It uses the embedded pair's tokenizer; the additional ids
that fill the vocabulary are never predicted. Beyond the 1,024 tokens the model was trained on, the text is noise.

The draft is also the embedded main model, but with only the layers it was grown from and with pseudo-random noise on
the weights of its last norm, adjusted to reach the requested acceptance rate. The rate is measured at K = 4, greedy or
at --temperature (where the same draft has a lower rate), on the held-out prompts or on --prompts.

With --eagle3, the draft is an EAGLE-3 head: models/embedded/eagle3, expanded to the main model's shape, with a draft
vocabulary of 32,000 tokens as published heads have, or of all tokens if the main model has fewer. It has noise only
with --acceptance.

--shape and --draft-shape take a name, dimensions, or a name with some dimensions changed:

    --shape Llama-3.2-1B
    --shape layers=12,hidden=1024,heads=16,kv_heads=4,head_dim=64,intermediate=2816,vocabulary=8192,tied=1
    --shape TinyLlama-1.1B,layers=11

Prints a summary, then one JSON object on the last line, which is also saved as OUT/pair.json.
"""

from speculative.cli.ctrl_c import raise_on_signals

import argparse
import json
import shutil
import signal
import sys
import traceback
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import openvino as ov
import openvino_genai

from speculative.bench import genai
from speculative.bench.prompts import read_prompts
from speculative.byte_size import byte_size
from speculative.cli.number_types import positive_float, positive_int, seed_number, share
from speculative.cli.parser import Parser
from speculative.cli.processes import utf8_output
from speculative.cli.progress import tqdm
from speculative.convert.errors import ConvertError
from speculative.convert.work_folder import recover, replacement
from speculative.decoder import Decoder
from speculative.drafting.policy import FixedDraftLength
from speculative.drafting.proposers import DraftModelProposer
from speculative.error_text import one_line
from speculative.modelgen import eagle3_ir, llama_ir
from speculative.modelgen.eagle3_ir import Head
from speculative.modelgen.expansion import Shape, expand, expand_head, refuse_misfit, shape_of, shape_of_head
from speculative.modelgen.llama_ir import Llama, Matrix
from speculative.models.loading import load_models
from speculative.models.spec import ModelSpec
from speculative.pair.check import check_pair
from speculative.sequence import metrics

ROOT = Path(__file__).resolve().parent.parent

SOURCE = ROOT / "models/embedded/main"
HEAD_SOURCE = ROOT / "models/embedded/eagle3"
PROMPTS = ROOT / "scripts/prompts/embedded_code.jsonl"

# From the models' public config.json. Dimensions only: Qwen3's normalization of queries and keys is left out.
SHAPES = {
    "TinyLlama-1.1B": Shape(22, 2048, 32, 4, 64, 5632, 32000, 0),
    "Llama-3.2-1B": Shape(16, 2048, 32, 8, 64, 8192, 128256, 1),
    "Llama-3.2-3B": Shape(28, 3072, 24, 8, 128, 8192, 128256, 1),
    "Qwen3-0.6B": Shape(28, 1024, 16, 8, 128, 3072, 151936, 1),
    "Qwen3-1.7B": Shape(28, 2048, 16, 8, 128, 6144, 151936, 1),
    "Qwen3-4B": Shape(36, 2560, 32, 8, 128, 9728, 151936, 1),
}
DRAFT_SHAPE = Shape(4, 512, 8, 4, 64, 2304, 32000, 1)  # 34 M
HEAD_VOCABULARY = 32000  # of EAGLE's published heads, and of AngelSlim's for Qwen3
CONTEXT = 8192  # written to config.json
Draft = TypeVar("Draft", Llama, Head)
EXACT = {"EXECUTION_MODE_HINT": "ACCURACY"}  # f32 throughout
ACCEPTANCE = 0.75  # by default, of a draft model
DRAFT_LENGTH = 4
TOLERANCE, MAX_TRIALS = 0.02, 6  # of the acceptance rate; few tokens cannot hit it closer than by one
COMPARED = 4  # prompts for comparing main's greedy tokens with the embedded main model's
FORMAT = 2  # of pair.json; main models of format 1 may write other text with an 8-bit KV cache
NOTE = "benchmark pair: the function of a small model at the shape of a large one, for measuring speed, not text"
TOKENIZER_FILES = ("*token*", "chat_template.jinja", "generation_config.json")


def shape(text: str) -> Shape:
    """An argparse type: NAME, NAME,key=value... or key=value for all."""
    name, *rest = text.split(",")
    chosen = {}
    if "=" in name:
        rest = [name, *rest]
    elif name in SHAPES:
        chosen = asdict(SHAPES[name])
    else:
        raise argparse.ArgumentTypeError(f"unknown shape {name!r}: choose from {', '.join(SHAPES)}")
    shape_keys = [field.name for field in fields(Shape)]
    for part in rest:
        key, _, value = part.partition("=")
        if key not in shape_keys or not value.isdecimal() or not (int(value) or key == "tied"):
            raise argparse.ArgumentTypeError(f"{part!r} is not one of {', '.join(shape_keys)} with a whole number")
        chosen[key] = int(value)
    missing = [key for key in shape_keys if key not in chosen]
    if missing:
        raise argparse.ArgumentTypeError(f"{text!r} does not specify {', '.join(missing)}")
    return Shape(**chosen)


def new_tokens(text: str) -> int:
    """An argparse type: a whole number of 3 or more, enough for a draft token between the main model's."""
    if (value := positive_int(text)) < 3:
        raise argparse.ArgumentTypeError(f"{text!r} new tokens leave none to draft: use 3 or more")
    return value


def parse_arguments() -> argparse.Namespace:
    """Parse the arguments, check OUT and resolve the shapes, the prompts and the models that both are expanded from."""
    parser = build_parser()
    arguments = parser.parse_args()
    refuse_occupied(parser, arguments)
    resolve_shapes(parser, arguments)
    try:
        arguments.prompts = [prompt.text for prompt in read_prompts(arguments.prompts)]
    except ValueError as error:
        parser.error(f"--prompts: {error}")
    open_sources(parser, arguments)
    return arguments


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("out", type=Path, help="output folder for OUT/main, OUT/draft, OUT/pair.json")
    add("--shape", type=shape, help=f"main model shape: {', '.join(SHAPES)} or dimensions (default: TinyLlama-1.1B)")
    add("--draft-shape", type=shape, help="draft shape (default: 4 layers of 512, 34 M with a vocabulary of 32,000)")
    add("--eagle3", action="store_true", help="the draft is an EAGLE-3 head of the main model's shape")
    add(
        "--acceptance",
        type=share,
        metavar="A",
        help="acceptance rate of the draft (default: 0.75; with --eagle3, that of the embedded head)",
    )
    add(
        "--temperature",
        type=positive_float,
        default=0.0,
        metavar="T",
        help="measure acceptance with sampling at this temperature, without top-k and top-p (default: greedy)",
    )
    add(
        "--main-of",
        type=Path,
        metavar="PAIR",
        help="reuse the main model of this benchmark pair, sharing its disk space",
    )
    add("--prompts", type=Path, default=PROMPTS, help='JSON lines with "prompt" for measuring acceptance')
    add(
        "--max-new-tokens",
        type=new_tokens,
        default=64,
        metavar="N",
        help="new tokens per prompt for measuring acceptance and speed (default: 64)",
    )
    add("--seed", type=seed_number, default=0, help="seed of the random weights and the noise (default: 0)")
    add("--overwrite", action="store_true", help="replace OUT if it is a benchmark pair")
    add("--debug", action="store_true", help="show stack traces")
    return parser


def refuse_occupied(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Complete an interrupted installation of OUT; refuse to replace anything but a benchmark pair."""
    out = arguments.out
    try:
        recover(out)
    except ConvertError as error:
        parser.error(str(error))
    if out.exists() and not arguments.overwrite:
        parser.error(f"{out} exists: choose another folder, or use --overwrite")
    if out.exists() and not is_benchmark_pair(out):
        parser.error(f"{out} is not a benchmark pair and is not overwritten: choose another folder")


def resolve_shapes(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Set the shapes that were not given; main's is that of the --main-of pair."""
    if arguments.main_of:
        if arguments.shape:
            parser.error("--main-of and --shape exclude each other: the main model already has a shape")
        if not is_benchmark_pair(arguments.main_of):
            parser.error(f"{arguments.main_of} is not a benchmark pair: give a folder generated by this program")
        pair = read_json(arguments.main_of / "pair.json")
        if pair.get("format") != FORMAT:
            parser.error(f"{arguments.main_of} was generated by another version: generate it again")
        try:
            arguments.shape = Shape(**pair["main"]["shape"])
        except (KeyError, TypeError) as error:
            parser.error(
                f"{arguments.main_of}/pair.json lacks the main model's shape ({error}): generate the pair again"
            )
    arguments.shape = arguments.shape or SHAPES["TinyLlama-1.1B"]
    if arguments.eagle3:
        if arguments.draft_shape:
            parser.error("--draft-shape and --eagle3 exclude each other: a head has the shape of its main model")
        vocabulary = min(HEAD_VOCABULARY, arguments.shape.vocabulary)
        arguments.draft_shape = replace(arguments.shape, layers=1, vocabulary=vocabulary, tied=0)
        return
    if arguments.acceptance is None:
        arguments.acceptance = ACCEPTANCE
    arguments.draft_shape = arguments.draft_shape or replace(DRAFT_SHAPE, vocabulary=arguments.shape.vocabulary)
    if arguments.draft_shape.vocabulary != arguments.shape.vocabulary:
        parser.error(
            f"the draft's vocabulary={arguments.draft_shape.vocabulary} differs from the main model's "
            f"{arguments.shape.vocabulary}: give both the same"
        )


def open_sources(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Set `source` and `draft_source`, the models that main and draft are expanded from; check that they fit."""
    try:
        arguments.source = llama_ir.read(SOURCE)
        arguments.draft_source = eagle3_ir.read(HEAD_SOURCE) if arguments.eagle3 else arguments.source
    except (OSError, RuntimeError, ValueError) as error:
        parser.error(f"cannot read the embedded models: {one_line(error)}")
    if not arguments.eagle3 and arguments.draft_shape.layers < len(arguments.source.layers):
        arguments.draft_source = essential(arguments.source)
    for role, source, required in (
        ("shape", arguments.source, arguments.shape),
        ("draft-shape", arguments.draft_source, arguments.draft_shape),
    ):
        try:
            refuse_misfit(dimensions(source), required)
        except ValueError as error:
            parser.error(f"--{role}: {error}")


def is_benchmark_pair(folder: Path) -> bool:
    """Whether the folder was generated by this program, according to its pair.json."""
    try:
        pair = read_json(folder / "pair.json")
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(pair, dict) and pair.get("kind") == "benchmark pair"


def dimensions(model: Llama | Head) -> Shape:
    return shape_of_head(model) if isinstance(model, Head) else shape_of(model)


def matrices(model: Llama | Head) -> list[Matrix]:
    if isinstance(model, Head):
        return [getattr(model, key) for key in eagle3_ir.MATRICES]
    of_layers = [getattr(layer, key) for layer in model.layers for key in llama_ir.MATRICES]
    return [model.embedding, *of_layers, *([] if model.head is None else [model.head])]


def essential(main: Llama) -> Llama:
    """The main model with the layers it was grown from (scripts/train_embedded_pair.py: 4, then 10)."""
    deep, shallow = len(main.layers), 4
    kept_layers = [i for i in range(deep) if not i or i * shallow // deep != (i - 1) * shallow // deep]
    return replace(main, layers=[main.layers[i] for i in kept_layers])


def with_noise(draft: Draft, noise: float, seed: int) -> Draft:
    """The draft with equally large pseudo-random values mixed into its last norm: none at noise 0, only those at 1."""
    random = np.random.default_rng(seed).standard_normal(len(draft.norm))
    return replace(draft, norm=(draft.norm * (np.sqrt(1 - noise**2) + noise * random)).astype(np.float32))


def write(model: Llama | Head, folder: Path, vocabulary: int) -> None:
    """Write a model with its tokenizer, or the head of a main model with that `vocabulary`, to `folder`."""
    if isinstance(model, Head):
        write_head(model, folder, vocabulary)
    else:
        write_model(model, folder)


def write_head(head: Head, folder: Path, vocabulary: int) -> None:
    """Write the IR and a config.json with the shape."""
    folder.mkdir(exist_ok=True)
    shape = shape_of_head(head)
    eagle3_ir.save(head, vocabulary, folder)
    config = read_json(HEAD_SOURCE / "config.json")
    config |= {"vocab_size": vocabulary, "draft_vocab_size": shape.vocabulary}
    write_json(folder / "config.json", config | settings_of(shape, head.epsilon))


def write_model(model: Llama, folder: Path) -> None:
    """Write the IR, the tokenizer and a config.json with the shape."""
    folder.mkdir(exist_ok=True)
    ov.save_model(llama_ir.build(model), folder / "openvino_model.xml", compress_to_fp16=False)
    for pattern in TOKENIZER_FILES:
        for file in SOURCE.glob(pattern):
            shutil.copyfile(file, folder / file.name)
    shape = shape_of(model)
    config = read_json(SOURCE / "config.json")
    config |= {
        "num_hidden_layers": shape.layers,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": bool(shape.tied),
    }
    write_json(folder / "config.json", config | settings_of(shape, model.epsilon))
    settings = read_json(SOURCE / "tokenizer_config.json")
    write_json(folder / "tokenizer_config.json", {**settings, "model_max_length": CONTEXT})


def settings_of(shape: Shape, epsilon: float) -> dict:
    """The settings of config.json that a model and a head have in common."""
    return {
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "rms_norm_eps": epsilon,
        "max_position_embeddings": CONTEXT,
    }


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def acceptance_rate(main: Path, draft: Path, arguments: argparse.Namespace, description: str) -> tuple[float, float]:
    """The acceptance rate at K = 4 over all prompts, and the share of one draft token in it."""
    main_model, draft_model, _ = load_models(ModelSpec(main), ModelSpec(draft))
    assert draft_model
    source = DraftModelProposer(draft_model, main_model.vocab_size)
    engine = Decoder(main_model, source, FixedDraftLength(DRAFT_LENGTH), openvino_genai.Tokenizer(str(SOURCE)))
    config = openvino_genai.GenerationConfig(max_new_tokens=arguments.max_new_tokens, ignore_eos=True)
    if arguments.temperature:
        config.do_sample, config.temperature = True, arguments.temperature
    bar = tqdm(arguments.prompts, desc=description, unit="prompt", leave=False)
    runs = [engine.generate(prompt, config, seed=arguments.seed) for prompt in bar]
    proposed, accepted = ([n for run in runs for n in getattr(run, key)] for key in ("proposed", "accepted"))
    return metrics.acceptance_rate(proposed, accepted), 1 / max(1, sum(proposed))


def make_draft(arguments: argparse.Namespace, folder: Path) -> tuple[Llama | Head, float]:
    """Write the draft with the noise that yields the requested acceptance rate; return it and the noise."""
    noise = 0.0 if arguments.acceptance is None else noise_for_acceptance(arguments, folder)
    draft = with_noise(arguments.draft_source, noise, arguments.seed)
    generator = np.random.default_rng([arguments.seed, 1])
    if isinstance(draft, Head):
        grown = expand_head(draft, arguments.draft_shape, arguments.shape.vocabulary, generator)
    else:
        grown = expand(draft, arguments.draft_shape, generator, lambda: None)
    write(grown, folder, arguments.shape.vocabulary)
    return grown, noise


def noise_for_acceptance(arguments: argparse.Namespace, folder: Path) -> float:
    """The noise that yields the requested acceptance rate. Drafts to try are written to `folder`.

    Measured with the embedded models, as the large ones generate the same text. Acceptance falls with noise roughly
    as 1 - noise^2.5, which gives the first guess; further ones interpolate linearly between the nearest on both sides.
    """
    target, rates, source = arguments.acceptance, {}, arguments.draft_source

    def try_with(noise: float) -> tuple[float, float]:
        """The acceptance rate, and the distance from it that counts as none: one token more or less."""
        write(with_noise(source, noise, arguments.seed), folder, len(arguments.source.embedding.values))
        rates[noise], step = acceptance_rate(SOURCE, folder, arguments, f"draft with noise {noise:.3f}")
        print(f"draft with noise {noise:.3f}: acceptance {rates[noise]:.3f}", file=sys.stderr)
        return rates[noise], max(TOLERANCE, 1.01 * step)

    if target <= TOLERANCE:
        try_with(1.0)
    elif (highest := try_with(0.0)[0]) > target + TOLERANCE:
        more, less = (0.0, highest), (1.0, 0.0)  # noise and acceptance on both sides of the requested rate
        noise = (1 - target / highest) ** 0.4
        while True:
            rate, near = try_with(noise)
            if abs(rate - target) <= near or len(rates) >= MAX_TRIALS:
                break
            more, less = ((noise, rate), less) if rate > target else (more, (noise, rate))
            noise = more[0] + (less[0] - more[0]) * (more[1] - target) / (more[1] - less[1])
    elif highest < target - TOLERANCE and source is not arguments.source:
        way = f"use --draft-shape with layers={len(arguments.source.layers)} or more, or "
        print(
            f"warning: the acceptance rate of this draft is at most {highest:.3f}, not {target:g}: "
            f"{'' if arguments.eagle3 else way}give a lower --acceptance",
            file=sys.stderr,
        )
    return min(rates, key=lambda noise: abs(rates[noise] - target))


def make_main(arguments: argparse.Namespace, folder: Path) -> Llama:
    with tqdm(total=arguments.shape.layers, desc="main", unit="layer", leave=False) as bar:
        main = expand(arguments.source, arguments.shape, np.random.default_rng([arguments.seed, 0]), bar.update)
        bar.set_postfix_str("writing")
        write_model(main, folder)
    return main


def same_tokens(main: Path, arguments: argparse.Namespace) -> dict:
    """How many greedy tokens equal the embedded main model's, up to the first difference of each prompt, in f32."""
    small, large = (genai.load(ModelSpec(folder, properties=EXACT)) for folder in (SOURCE, main))
    prompts, equal = arguments.prompts[:COMPARED], 0
    for prompt in tqdm(prompts, desc="same tokens", unit="prompt", leave=False):
        inputs = genai.encode(small.get_tokenizer(), prompt)
        ours, theirs = (genai.generate(pipe, inputs, arguments.max_new_tokens).tokens for pipe in (large, small))
        equal += next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))
    return {"equal": equal, "compared": arguments.max_new_tokens * len(prompts)}


def facts(model: Llama | Head, folder: Path) -> dict:
    """The facts on a model for pair.json. zero_share: share of weights that are exactly zero.

    Raises RuntimeError if the file is smaller than its int8 weights.
    """
    parameters = sum(matrix.values.size for matrix in matrices(model))
    zeros = sum(int(np.count_nonzero(matrix.values == matrix.zero_points)) for matrix in matrices(model))
    size = (folder / "openvino_model.bin").stat().st_size
    if size < parameters:
        raise RuntimeError(f"{folder.name} has {size:,} bytes for {parameters:,} weights: some are missing")
    return {
        "shape": asdict(dimensions(model)),
        "parameters": parameters,
        "zero_share": round(zeros / parameters, 4),
        "bytes": size,
    }


def milliseconds_per_token(folder: Path, arguments: argparse.Namespace) -> float:
    """The time of a model alone: the best of three runs."""
    pipe = genai.load(ModelSpec(folder))
    inputs = genai.encode(pipe.get_tokenizer(), arguments.prompts[0])
    runs = [genai.generate(pipe, inputs, arguments.max_new_tokens) for _ in range(4)][1:]
    return round(min(run.decode_seconds for run in runs) * 1000 / (arguments.max_new_tokens - 1), 2)


def make_pair(arguments: argparse.Namespace, folder: Path) -> dict:
    """Write main, draft, pair.json and README.md into `folder`; return the content of pair.json."""
    pair = {"format": FORMAT, "kind": "benchmark pair", "note": NOTE, "openvino_genai": openvino_genai.__version__}
    draft, noise = make_draft(arguments, folder / "draft")
    if arguments.main_of:
        shutil.copytree(arguments.main_of / "main", folder / "main", copy_function=link_or_copy)
        before = read_json(arguments.main_of / "pair.json")
        pair |= {key: before[key] for key in ("main", "same_greedy_tokens")}
    else:
        main = make_main(arguments, folder / "main")
        pair["main"] = facts(main, folder / "main")
        del main
        pair["main"]["milliseconds_per_token"] = milliseconds_per_token(folder / "main", arguments)
        pair["same_greedy_tokens"] = same_tokens(folder / "main", arguments)
    pair["draft"] = {
        "kind": "EAGLE-3 head" if arguments.eagle3 else "model",
        **facts(draft, folder / "draft"),
        "noise": noise,
        "seed": arguments.seed,
    }
    if isinstance(draft, Llama):
        pair["draft"]["function_layers"] = len(arguments.draft_source.layers)
        pair["draft"]["milliseconds_per_token"] = milliseconds_per_token(folder / "draft", arguments)
    measured, _ = acceptance_rate(folder / "main", folder / "draft", arguments, "acceptance")
    pair["acceptance"] = {
        "asked": arguments.acceptance,
        "measured": round(measured, 4),
        "draft_length": DRAFT_LENGTH,
        "temperature": arguments.temperature,
        "prompts": len(arguments.prompts),
        "new_tokens": arguments.max_new_tokens,
    }
    write_json(folder / "pair.json", pair)
    made = "made by `python scripts/make_benchmark_pair.py`; see pair.json"
    (folder / "README.md").write_text(f"# {arguments.out.name}\n\nA {NOTE}; {made}.\n", encoding="utf-8")
    for finding in check_pair(folder / "main", folder / "draft").findings:
        if finding.level != "ok":
            raise RuntimeError(f"the generated pair is not sound: {finding.what}: {finding.message}")
    return pair


def link_or_copy(source: str, target: str) -> None:
    try:
        Path(target).hardlink_to(source)
    except OSError:  # another disk, or a file system without hard links
        shutil.copyfile(source, target)


def require_space(arguments: argparse.Namespace) -> None:
    shape = arguments.draft_shape
    needed = shape.parameters + (0 if arguments.main_of else arguments.shape.parameters)
    if arguments.eagle3:  # fc, and the embeddings that q, k and v read beside the hidden states
        needed += shape.hidden * (3 * shape.hidden + shape.head_dim * (shape.heads + 2 * shape.kv_heads))
    free = shutil.disk_usage(arguments.out.parent).free
    if free < 1.1 * needed:
        raise OSError(f"{arguments.out.parent} has {byte_size(free)} free, but {byte_size(1.1 * needed)} are needed")


def summary(pair: dict, out: Path) -> str:
    lines = [f"{out}: a {NOTE}"]
    for role in ("main", "draft"):
        model = pair[role]
        size = f"{model['parameters'] / 1e6:,.1f} M parameters, {model['bytes'] / 1e6:,.1f} MB of int8 weights"
        alone = model.get("milliseconds_per_token")  # a head cannot run alone
        lines.append(f"{role:6} {size}, {f'{alone} ms per token alone' if alone else model['kind']}")
    acceptance, same = pair["acceptance"], pair["same_greedy_tokens"]
    requested = "" if acceptance["asked"] is None else f" (requested: {acceptance['asked']})"
    lines.append(
        f"acceptance {acceptance['measured']:.3f} at K = {DRAFT_LENGTH}, temperature {acceptance['temperature']:g}"
        f"{requested}"
    )
    lines.append(f"{same['equal']} of {same['compared']} greedy tokens of main equal those of models/embedded/main")
    return "\n".join(lines)


def main() -> int:
    utf8_output()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up as on Ctrl-C
    try:
        arguments = parse_arguments()
        out = arguments.out
        with replacement(out) as folder:
            require_space(arguments)
            pair = make_pair(arguments, folder)
        print(summary(pair, out))
        print(json.dumps(pair, ensure_ascii=False))
        return 0
    except KeyboardInterrupt:
        print("\ninterrupted; partial files were removed", file=sys.stderr)
        return 130
    except Exception as error:
        if "--debug" in sys.argv:
            traceback.print_exc()
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise_on_signals()
    sys.exit(main())
