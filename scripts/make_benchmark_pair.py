"""Make a benchmark pair: the embedded pair's function at the shape, size and cost of a real model, offline, in minutes.

    python scripts/make_benchmark_pair.py pairs/tinyllama --shape TinyLlama-1.1B --acceptance 0.75

For measuring speed where no real model is at hand. What the main model writes is what models/embedded/main writes,
token for token: it is that model, grown without changing its function (Net2Net, Chen et al. 2015, arXiv 1511.05641).
Not for judging text. Rotary Llama architecture, int8 weights; the tokenizer is the embedded pair's, and ids beyond it
are never predicted.

The draft is the embedded main model too, with only the layers that matter (it was grown from four) and pseudo-random
noise on the weights of its last norm, as much as gives the acceptance rate asked for: greedy, K = 4, measured with
OpenVINO GenAI on held-out prompts.

--shape and --draft-shape take a name, dimensions, or a name with other dimensions:

    --shape Llama-3.2-1B
    --shape layers=11,hidden=1024,heads=16,kv_heads=4,head_dim=64,intermediate=2816,vocabulary=8192,tied=1
    --shape TinyLlama-1.1B,layers=11
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import traceback
from dataclasses import asdict, fields, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import llama_ir  # noqa: E402
import numpy as np  # noqa: E402
import openvino as ov  # noqa: E402
import openvino_genai  # noqa: E402
from expansion import Shape, expand, refuse_too_small, shape_of  # noqa: E402
from tqdm import tqdm  # noqa: E402

from speculative import genai_runs, metrics  # noqa: E402
from speculative.pair_check import check_pair  # noqa: E402

SOURCE = ROOT / "models/embedded/main"
PROMPTS = ROOT / "scripts/prompts/embedded_code.jsonl"

# From the models' public config.json. Dimensions only: Qwen3 normalises queries and keys as well, which is left out.
SHAPES = {
    "TinyLlama-1.1B": Shape(22, 2048, 32, 4, 64, 5632, 32000, 0),
    "Llama-3.2-1B": Shape(16, 2048, 32, 8, 64, 8192, 128256, 1),
    "Llama-3.2-3B": Shape(28, 3072, 24, 8, 128, 8192, 128256, 1),
    "Qwen3-0.6B": Shape(28, 1024, 16, 8, 128, 3072, 151936, 1),
    "Qwen3-1.7B": Shape(28, 2048, 16, 8, 128, 6144, 151936, 1),
    "Qwen3-4B": Shape(36, 2560, 32, 8, 128, 9728, 151936, 1),
}
DRAFT_SHAPE = Shape(4, 512, 8, 4, 64, 2304, 32000, 1)  # 34 M
CONTEXT = 8192
EXACT = {"EXECUTION_MODE_HINT": "ACCURACY"}  # f32 throughout
DRAFT_LENGTH, NEW_TOKENS, CHECKED = 4, 64, 4  # K, tokens a prompt, prompts of the exact comparison
NOTE = "benchmark pair: the function of a 31.6 M model at another model's shape, for measuring speed, not text"
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
        raise argparse.ArgumentTypeError(f"no shape is called {name!r}; known are {', '.join(SHAPES)}")
    known = [field.name for field in fields(Shape)]
    for part in rest:
        key, _, value = part.partition("=")
        if key not in known or not value.isdecimal() or not (int(value) or key == "tied"):
            raise argparse.ArgumentTypeError(f"{part!r} is not one of {', '.join(known)} with a whole number")
        chosen[key] = int(value)
    missing = [key for key in known if key not in chosen]
    if missing:
        raise argparse.ArgumentTypeError(f"{text!r} does not give {', '.join(missing)}")
    return Shape(**chosen)


def rate(text: str) -> float:
    """An argparse type: a number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if 0 <= value <= 1:
        return value
    raise argparse.ArgumentTypeError(f"{text!r} is not an acceptance rate from 0 to 1")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("out", type=Path, help="folder to make: OUT/main, OUT/draft, OUT/pair.json")
    add("--shape", type=shape, default="TinyLlama-1.1B", help="main model's (default: TinyLlama-1.1B)")
    add("--draft-shape", type=shape, help="draft's (default: 4 layers of 512, 34 M with a vocabulary of 32,000)")
    add("--acceptance", type=rate, default=0.75, metavar="A", help="acceptance rate of the draft (default: 0.75)")
    add("--seed", type=int, default=0, help="of the random weights and the noise (default: 0)")
    add("--overwrite", action="store_true", help="replace OUT where it exists")
    add("--debug", action="store_true", help="show stack traces")
    arguments = parser.parse_args()
    if arguments.draft_shape is None:
        arguments.draft_shape = replace(DRAFT_SHAPE, vocabulary=arguments.shape.vocabulary)
    if arguments.draft_shape.vocabulary != arguments.shape.vocabulary:
        parser.error(
            f"the draft's vocabulary={arguments.draft_shape.vocabulary} differs from the main model's "
            f"{arguments.shape.vocabulary}; give both the same"
        )
    if arguments.out.exists() and not arguments.overwrite:
        parser.error(f"{arguments.out} exists; choose another folder, or --overwrite")
    return arguments


def essential(main: llama_ir.Llama) -> llama_ir.Llama:
    """The main model with the layers it was grown from (scripts/train_embedded_pair.py: 4, then 10)."""
    deep, shallow = len(main.layers), 4
    kept = [i for i in range(deep) if not i or i * shallow // deep != (i - 1) * shallow // deep]
    return replace(main, layers=[main.layers[i] for i in kept])


def with_noise(model: llama_ir.Llama, noise: float, seed: int) -> llama_ir.Llama:
    """The weights of the last norm mixed with as large pseudo-random ones: none of them at noise 0, all at 1."""
    random = np.random.default_rng(seed).standard_normal(len(model.norm)).astype(np.float32)
    return replace(model, norm=model.norm * (np.sqrt(1 - noise**2) + noise * random))


def write(model: llama_ir.Llama, folder: Path) -> None:
    """Write the IR, with the tokenizer and a config.json that states the shape."""
    folder.mkdir(exist_ok=True)
    ov.save_model(llama_ir.build(model), folder / "openvino_model.xml", compress_to_fp16=False)
    for pattern in TOKENIZER_FILES:
        for file in SOURCE.glob(pattern):
            shutil.copyfile(file, folder / file.name)
    dimensions = shape_of(model)
    config = json.loads((SOURCE / "config.json").read_text(encoding="utf-8"))
    config |= {
        "hidden_size": dimensions.hidden,
        "num_hidden_layers": dimensions.layers,
        "num_attention_heads": dimensions.heads,
        "num_key_value_heads": dimensions.kv_heads,
        "head_dim": dimensions.head_dim,
        "intermediate_size": dimensions.intermediate,
        "vocab_size": dimensions.vocabulary,
        "tie_word_embeddings": bool(dimensions.tied),
        "rms_norm_eps": model.epsilon,
        "max_position_embeddings": CONTEXT,
    }
    write_json(folder / "config.json", config)
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    write_json(folder / "tokenizer_config.json", {**settings, "model_max_length": CONTEXT})


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def measure(main: Path, draft: Path, description: str) -> tuple[float, list[genai_runs.Run]]:
    """The acceptance rate, greedy at K = 4 over all held-out prompts, and the runs."""
    pipe = genai_runs.load(main, "CPU", draft, "CPU", {}, {})
    runs = []
    for prompt in tqdm(prompts(), desc=description, unit="prompt", leave=False):
        runs.append(
            genai_runs.generate(pipe, genai_runs.encode(pipe.get_tokenizer(), prompt), NEW_TOKENS, DRAFT_LENGTH)
        )
    proposed, gained = ([n for run in runs for n in getattr(run, name)] for name in ("proposed", "gained"))
    return metrics.acceptance_rate(proposed, gained), runs


def prompts() -> list[str]:
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines]


def make_draft(main: llama_ir.Llama, arguments: argparse.Namespace, folder: Path) -> dict:
    """Write the draft with the noise that gives the acceptance asked for; return how that was found.

    Measured with the small main model, which writes the same text, by bisection.
    """
    small = main if arguments.draft_shape.layers >= len(main.layers) else essential(main)
    tried = {}

    def accepted(noise: float) -> float:
        grown = expand(
            with_noise(small, noise, arguments.seed),
            arguments.draft_shape,
            np.random.default_rng(arguments.seed + 1),
            tqdm(disable=True),
        )
        write(grown, folder)
        tried[noise] = measure(SOURCE, folder, f"draft, noise {noise:.3f}")[0]
        print(f"draft: noise {noise:.3f} gives acceptance {tried[noise]:.3f}", file=sys.stderr)
        return tried[noise]

    def distance(noise: float) -> float:
        return abs(tried[noise] - arguments.acceptance)

    low, high = 0.0, 1.0
    if accepted(low) > arguments.acceptance and accepted(high) < arguments.acceptance:
        for _ in range(10):
            if min(map(distance, tried)) <= 0.01:
                break
            middle = (low + high) / 2
            low, high = (middle, high) if accepted(middle) > arguments.acceptance else (low, middle)
    noise = min(tried, key=distance)
    if noise != list(tried)[-1]:
        accepted(noise)
    return {"asked": arguments.acceptance, "with_small_main": tried[noise], "noise": noise, "layers": len(small.layers)}


def compare(main: Path, description: str) -> tuple[int, int]:
    """Greedy tokens that equal the embedded main model's up to the first difference, and how many were compared."""
    small, large = (genai_runs.load(folder, "CPU", None, "", EXACT, {}) for folder in (SOURCE, main))
    equal = 0
    for prompt in tqdm(prompts()[:CHECKED], desc=description, unit="prompt", leave=False):
        inputs = genai_runs.encode(small.get_tokenizer(), prompt)
        ours, theirs = (genai_runs.generate(pipe, inputs, NEW_TOKENS).tokens for pipe in (large, small))
        equal += next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))
    return equal, CHECKED * NEW_TOKENS


def milliseconds_per_token(folder: Path) -> float:
    """Median time per token after the first, alone, over three prompts."""
    pipe = genai_runs.load(folder, "CPU", None, "", {}, {})
    inputs = [genai_runs.encode(pipe.get_tokenizer(), prompt) for prompt in prompts()[:4]]
    runs = [genai_runs.generate(pipe, prompt, NEW_TOKENS) for prompt in inputs][1:]
    return statistics.median(1000 * run.decode_seconds / (NEW_TOKENS - 1) for run in runs)


def facts(folder: Path, dimensions: Shape) -> dict:
    return {
        "shape": asdict(dimensions),
        "parameters": dimensions.parameters,
        "bytes": (folder / "openvino_model.bin").stat().st_size,
        "milliseconds_per_token": round(milliseconds_per_token(folder), 2),
    }


def make_pair(arguments: argparse.Namespace, folder: Path) -> None:
    source = llama_ir.read(SOURCE)
    refuse_too_small(shape_of(source), arguments.shape)
    print(f"main: {arguments.shape.parameters / 1e6:,.1f} M parameters, draft: ", end="", file=sys.stderr)
    print(f"{arguments.draft_shape.parameters / 1e6:,.1f} M, to {arguments.out}", file=sys.stderr)
    acceptance = make_draft(source, arguments, folder / "draft")
    with tqdm(total=arguments.shape.layers, desc="main", unit="layer") as bar:
        main = expand(source, arguments.shape, np.random.default_rng(arguments.seed), bar)
    print("main: writing", file=sys.stderr)
    write(main, folder / "main")
    del main
    equal, compared = compare(folder / "main", "same tokens?")
    acceptance["measured"] = measure(folder / "main", folder / "draft", "acceptance")[0]
    pair = {
        "format": 1,
        "kind": "benchmark pair",
        "note": NOTE,
        "main": facts(folder / "main", arguments.shape),
        "draft": facts(folder / "draft", arguments.draft_shape),
        "acceptance": {key: round(value, 4) for key, value in acceptance.items()},
        "same_greedy_tokens": {"equal": equal, "compared": compared},
        "seed": arguments.seed,
        "openvino_genai": openvino_genai.__version__,
    }
    write_json(folder / "pair.json", pair)
    (folder / "README.md").write_text(f"# {arguments.out.name}\n\nA {NOTE}.\n", encoding="utf-8")
    for finding in check_pair(folder / "main", folder / "draft").findings:
        if finding.level != "ok":
            print(f"{finding.level}: {finding.what}: {finding.message}", file=sys.stderr)
    print(json.dumps(pair, ensure_ascii=False))


def main() -> int:
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8")
    arguments = parse_arguments()
    out = arguments.out
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        make_pair(arguments, folder)
        if out.exists():
            shutil.rmtree(out)
        folder.chmod(0o755)
        folder.replace(out)
        return 0
    except KeyboardInterrupt:
        print("\ninterrupted; nothing is left behind", file=sys.stderr)
        return 130
    except (RuntimeError, ValueError, OSError) as error:
        if arguments.debug:
            traceback.print_exc()
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
