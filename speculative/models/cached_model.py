"""A language model with a cache: tokens in, logits for the next token out.

    model = cached_model.load(Path("models/embedded/main"), "CPU")
    logits = model.logits(tokens, last=3)  # after each of the last 3 tokens

Every call gives the whole text so far. What the cache holds of it already, the longest common prefix, is not computed
again: a chat turn costs what is new, and a rejected draft is rolled back by being absent from the next call's tokens.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import openvino as ov
import openvino_genai

from speculative.models import kv_cache
from speculative.models.config import context_length, read_config, sliding_window, text_config
from speculative.models.npu_model import NpuModel
from speculative.models.paged_model import PagedModel
from speculative.models.stateful_model import StatefulModel

CAPACITY = 16_384  # longest sequence unless another is asked for, in tokens: bounds the memory for the cache
WRONG_WHEN_PAGED = ("mpt",)  # logits off by 3.6, in GenAI's pipeline too (2026.4.1)
STEP = 6  # tokens in an inference of the rollback check
EXACT = 1e-3  # total variation below which a rollback leaves nothing behind, whatever the precision
BEYOND_NOISE = 1.6  # times the noise: right caches reach 1.2, those wrong by one token start at 2.2 (SmolLM2-135M)
NATURAL = 0.25  # total variation that precision alone never makes; 0.03 is usual
CHECK_TEXT = "The library lends about four thousand books a month. Children may take three of them at a time, others 10"


class CannotRollBack(ValueError):
    """A step after a rollback gives another distribution than a fresh one."""

    def __init__(self, kind: str, difference: float, noise: float):
        super().__init__(
            f"a step after a rollback of the {kind} cache differs from a fresh one by {difference:.3f} in the next "
            f"token's distribution (total variation; fresh ones among each other {noise:.3f}): this model cannot be "
            "rolled back; decode it without a draft"
        )
        self.difference, self.noise = difference, noise


class Backend(Protocol):
    """What holds the cache: `PagedModel`, `StatefulModel` or `NpuModel`."""

    kind: str
    capacity: int  # longest sequence, in tokens
    chunk: int  # tokens of a prompt to give in one run
    cache_bytes: int

    def run(self, start: int, tokens: np.ndarray, last: int) -> np.ndarray:
        """Put tokens [n] at positions from `start` on, forgetting what was there and behind; logits [last, V]."""


class CachedModel:
    """One sequence of one model. Not thread-safe: one caller at a time."""

    def __init__(self, backend: Backend, text: np.ndarray | None = None, note: str = ""):
        """`text` (int64 [24 or more]) is what the rollback check decodes, by default pseudo-random tokens. `note` is
        what was found out about this model's cache before; with one, the cache is not checked again."""
        self.backend = backend
        self.capacity = backend.capacity
        self._held = np.zeros(self.capacity, np.int64)  # the tokens in the cache
        self._length = 0
        self.width = self.backend.run(0, np.zeros(1, np.int64), 1).shape[1]
        self.note = note
        if not note:
            self._check_rollback(text)

    def logits(self, tokens: np.ndarray, last: int = 1) -> np.ndarray:
        """Logits float32 [last, V] after each of the last `last` of `tokens` (int64 [n], the whole text so far).

        The array is a view that the next call overwrites. Raises ValueError where `tokens` is longer than `capacity`.
        """
        n = len(tokens)
        if n > self.capacity:
            raise ValueError(
                f"the text has {n} tokens and the cache room for {self.capacity}: shorten it or raise the capacity"
            )
        start = min(self.common_prefix(tokens), n - last)
        self._length = start  # should a run fail, nothing behind is trusted
        while n - start > self.backend.chunk + last:
            self._run(start, tokens[start : start + self.backend.chunk], 1)
            start += self.backend.chunk
        return self._run(start, tokens[start:], last)

    def common_prefix(self, tokens: np.ndarray) -> int:
        """How many of `tokens` the cache holds."""
        n = min(self._length, len(tokens))
        differ = self._held[:n] != tokens[:n]
        first = int(differ.argmax()) if n else 0
        return first if n and differ[first] else n

    def forget(self) -> None:
        """Take nothing from the cache for the next text."""
        self._length = 0

    def _run(self, start: int, tokens: np.ndarray, last: int) -> np.ndarray:
        logits = self.backend.run(start, tokens, last)
        self._length = start + len(tokens)
        self._held[start : self._length] = tokens
        return logits

    def _check_rollback(self, text: np.ndarray | None) -> None:
        """Compare steps after a rollback with the same on a fresh cache. Raises CannotRollBack where they differ.

        Distributions differ a little by themselves: with the number of tokens in an inference and, where keys of
        several tokens share a scale, with the order in which they came. So fresh computations in other pieces show the
        model's own noise, and the medians count: one expert of a mixture chosen otherwise moves a whole row.
        """
        step = max(1, min(STEP, (self.capacity - 1) // 3))
        if text is None:
            text = (np.arange(4 * step, dtype=np.int64) * 7919 + 1) % self.width
        other = text[3 * step : 4 * step]
        rolled_back, noise = [], []
        for start in (step, 2 * step):
            piece = text[: start + step]
            self.forget()
            if start > step:
                self.logits(text[: start - step])
            otherwise = _probabilities(self.logits(piece, last=step))
            self.logits(np.concatenate([text[:start], other]))
            self.logits(np.concatenate([text[:start], other, text[:1]]))  # a single token behind, as in decoding
            again = _probabilities(self.logits(piece, last=step))
            self.forget()
            self.logits(text[:start])
            fresh = _probabilities(self.logits(piece, last=step))
            rolled_back.append(_total_variation(again, fresh))
            noise.append(_total_variation(otherwise, fresh))
        self.forget()
        difference, natural = (float(np.median(np.concatenate(rows))) for rows in (rolled_back, noise))
        if not (difference < max(EXACT, BEYOND_NOISE * natural) and natural < NATURAL):
            raise CannotRollBack(self.backend.kind, difference, natural)


def _probabilities(logits: np.ndarray) -> np.ndarray:
    """float64 [rows, V]"""
    e = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def _total_variation(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """[rows], from 0 to 1"""
    return np.abs(p - q).sum(axis=1) / 2


def load(
    folder: Path,
    device: str = "CPU",
    properties: dict | None = None,
    capacity: int | None = None,
    stateful: bool | None = None,
) -> CachedModel:
    """Compile the IR in `folder` for `device` with OpenVINO `properties`.

    CACHE_DIR keeps the compiled model on disk, but for paged attention on a CPU, where OpenVINO cannot read it again.
    `capacity` is the longest text in tokens, by default the model's context length up to 16,384. `stateful` chooses the
    backend: paged attention (False) on CPU and GPU, stateful (True) elsewhere and, with a warning, on a GPU that fails
    at paged attention. An NPU has its own, for up to 1,152 tokens unless `capacity` or MAX_PROMPT_LEN and
    MIN_RESPONSE_LEN among the properties say more. Where a CPU's default cache keeps traces of rejected tokens beyond
    the model's own noise, keys are quantised by token, and the model's `note` says so. Raises ValueError for a model
    that cannot be rolled back, RuntimeError where OpenVINO cannot compile it.
    """
    folder = Path(folder)
    known = read_config(folder)
    context, window = context_length(known) or CAPACITY, sliding_window(known)
    model_type = text_config(known).get("model_type", known.get("model_type"))
    kind = device.partition(".")[0]
    model = ov.Core().read_model(folder / "openvino_model.xml")
    properties = properties or {}
    text = _check_text(folder)
    try:
        kv_cache.read(model)  # refuses states that cannot be rolled back
        if kind == "NPU":
            return CachedModel(NpuModel(model, device, properties, capacity, context, window), text)
        capacity = capacity or min(context, CAPACITY)

        def paged(properties: dict) -> Backend:
            return PagedModel(model.clone(), device, properties, capacity)

        def with_states(properties: dict) -> Backend:
            return StatefulModel(model.clone(), device, properties, capacity, window)

        if stateful is None:
            stateful = kind not in ("CPU", "GPU") or model_type in WRONG_WHEN_PAGED
        if kind == "CPU":
            return _rolled_back_on_cpu(with_states if stateful else paged, properties, text)
        if stateful:
            return CachedModel(with_states(properties), text)
        try:
            return CachedModel(paged(properties), text)
        except (RuntimeError, ValueError) as error:
            # A GPU driver may lack it. What fails for another reason fails again below, and says so.
            warnings.warn(f"no paged attention on {device} ({_line(error)}): the stateful cache is used", stacklevel=2)
            return CachedModel(with_states(properties), text)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None


def _rolled_back_on_cpu(backend: Callable[[dict], Backend], properties: dict, text: np.ndarray | None) -> CachedModel:
    """The model with a cache that can be rolled back.

    A CPU's default cache has u8 keys by channel: tokens of a block share scales, and rejected ones leave traces in
    them. By token there are none, so a difference that remains is a fault of the model or the engine. Properties of the
    caller's own stay as they are.
    """
    try:
        return CachedModel(backend(properties), text)
    except CannotRollBack as error:  # the first model is freed before the second is compiled
        found = error
        found.__traceback__ = None
    by_token = CachedModel(backend({**properties, "KEY_CACHE_QUANT_MODE": "BY_TOKEN"}), text)
    traces = (
        f"rejected tokens change the next token's distribution by {found.difference:.3f} (total variation), precision "
        f"alone by {found.noise:.3f}"
    )
    if {"KEY_CACHE_QUANT_MODE", "KV_CACHE_PRECISION"} & properties.keys():
        del by_token
        note = f"as the properties say, though {traces}; with KEY_CACHE_QUANT_MODE=BY_TOKEN they leave no trace"
        return CachedModel(backend(properties), note=note)
    by_token.note = f"keys quantised by token (KEY_CACHE_QUANT_MODE=BY_TOKEN), as by channel {traces}"
    return by_token


def _check_text(folder: Path) -> np.ndarray | None:
    """Tokens of a text for the rollback check; None where there is no tokenizer that tells its words apart."""
    if not (folder / "openvino_tokenizer.xml").exists():
        return None
    ids = openvino_genai.Tokenizer(str(folder)).encode(CHECK_TEXT).input_ids.data[0][: 4 * STEP].astype(np.int64)
    return ids if len(ids) == 4 * STEP and len(set(ids)) > 2 * STEP else None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
