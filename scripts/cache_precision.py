"""Measure the effect of KV-cache precision on the next-token distribution, with and without rejected tokens.

    python scripts/cache_precision.py models/embedded/main
    python scripts/cache_precision.py models/embedded/main --text my.txt --tokens 200

The reference is one forward pass over the whole text. It is compared with plain decoding, one token per forward pass,
and with the same after caching and rolling back four wrong tokens before each. Reports mean KL divergence (nats) and
total variation of the next token for the device's default cache, u8 keys by channel and by token, and f16. Output: a
table, then one JSON object on the last line.
"""

from speculative.cli.program import exit_on, prepare_output

import argparse
import json
from pathlib import Path

import numpy as np
import openvino_genai

from speculative.cli.arguments import refuse
from speculative.cli.number_types import positive_int
from speculative.cli.parser import Parser
from speculative.models import cached_model
from speculative.models.cached_model import CachedModel
from speculative.models.spec import ModelSpec
from speculative.pair.draft_limits import alone_limit
from speculative.pair.model_info import require_runnable

CACHES = {
    "default": {},
    "u8 by channel": {"KV_CACHE_PRECISION": "u8", "KEY_CACHE_QUANT_MODE": "BY_CHANNEL"},
    "u8 by token": {"KV_CACHE_PRECISION": "u8", "KEY_CACHE_QUANT_MODE": "BY_TOKEN"},
    "f16": {"KV_CACHE_PRECISION": "f16"},
}
PROMPT = 16  # tokens before the first one compared
REJECTED = 4
TEXT = Path(__file__).resolve().parent.parent / "README.md"


def probabilities(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def decoded(model: CachedModel, text: np.ndarray, rejected: int) -> np.ndarray:
    """Distributions [tokens, V] of plain decoding, with `rejected` wrong tokens rolled back before each token."""
    model.reset()
    model.logits(text[:PROMPT])
    rows = []
    for n in range(PROMPT + 1, len(text) + 1):
        if rejected:
            wrong = (text[n - 1 : n - 1 + rejected] + 7919) % model.vocab_size
            model.logits(np.concatenate([text[: n - 1], wrong]))
        rows.append(probabilities(model.logits(text[:n])[0]))
    return np.array(rows)


def compare(model: CachedModel, text: np.ndarray) -> dict:
    reference = probabilities(model.logits(text, last=len(text) - PROMPT))
    result = {}
    for name, rejected in (("plain", 0), ("rejected", REJECTED)):
        q = decoded(model, text, rejected)
        with np.errstate(divide="ignore", invalid="ignore"):
            kl = np.where(reference > 0, reference * (np.log(reference) - np.log(q)), 0).sum(axis=1)
        result[name] = {"kl": float(kl.mean()), "tv": float(np.abs(reference - q).sum(axis=1).mean() / 2)}
    return result


def parse_arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("model", type=Path, help="IR folder")
    parser.add_argument("--text", type=Path, default=TEXT, help="text file to decode (default: README.md)")
    parser.add_argument("--tokens", type=positive_int, default=120, help="number of its tokens to use (default: 120)")
    return parser.parse_args()


def main() -> None:
    prepare_output()
    arguments = parse_arguments()
    with exit_on(OSError, ValueError, status=2):
        require_runnable(arguments.model, writes_text=False)
        if limit := alone_limit(arguments.model):
            refuse(f"{limit}; give its main model")
        words = arguments.text.read_text(encoding="utf-8")
    result = {}
    with exit_on(RuntimeError, ValueError):
        tokenizer = openvino_genai.Tokenizer(str(arguments.model))
        text = tokenizer.encode(words).input_ids.data[0][: arguments.tokens].astype(np.int64)
        too_few = (
            f"{len(text)} tokens of {arguments.text} are too few: give a text and --tokens of at least {PROMPT + 1}"
        )
        refuse(too_few if len(text) <= PROMPT else "")
        for name, properties in CACHES.items():
            model = cached_model.load(ModelSpec(arguments.model, "CPU", properties), capacity=len(text) + 2 * REJECTED)
            result[name] = compare(model, text)
            shown = "; ".join(f"{case} KL {of['kl']:.4f}, TV {of['tv']:.4f}" for case, of in result[name].items())
            print(f"{name:14} {shown}{'; ' + model.note if model.note else ''}", flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
