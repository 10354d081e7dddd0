"""A language model with a cache: tokens in, logits for the next token out.

    model = cached_model.load(Path("models/embedded/main"), "CPU")
    logits = model.logits(tokens, last=3)  # after each of the last 3 tokens

Every call gives the whole text so far. What the cache holds of it already, the longest common prefix, is not computed
again: a chat turn costs what is new, and a rejected draft is rolled back by being absent from the next call's tokens.
"""

import json
import warnings
from pathlib import Path
from typing import Protocol

import numpy as np
import openvino as ov

from speculative import kv_cache
from speculative.npu_model import NpuModel
from speculative.paged_model import PagedModel
from speculative.stateful_model import StatefulModel

CAPACITY = 16_384  # longest sequence unless another is asked for, in tokens: bounds the memory for the cache
WRONG_WHEN_PAGED = ("mpt",)  # logits off by 3.6, in GenAI's pipeline too (2026.4.1)
CONTEXT_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "seq_length")  # Llama and most; GPT-2; ChatGLM
TOLERANCE = 0.02  # of the logits' spread, in f32; rollbacks wrong by a single token differ by 0.025 and more
NATURAL = 0.1  # what precision alone never does; 0.01 is usual


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

    def __init__(self, backend: Backend):
        self.backend = backend
        self.capacity = backend.capacity
        self._held = np.zeros(self.capacity, np.int64)  # the tokens in the cache
        self._length = 0
        self.width = 0
        self._check_rollback()

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

    def _check_rollback(self) -> None:
        """Compare steps after a rollback with the same on a fresh cache, so that a wrong one never goes unnoticed.

        Logits differ a little by themselves, with the number of tokens in an inference and, in a u8 cache, with what
        was rolled back. So the text in one piece and in two shows how much is allowed, and the medians count: one
        expert of a mixture chosen otherwise moves a whole row.
        """
        self.width = self.backend.run(0, np.zeros(1, np.int64), 1).shape[1]
        ids = (np.arange(14, dtype=np.int64) * 7919 + 1) % self.width
        text, other = ids[:10], ids[10:]
        whole = self.logits(text, last=8).copy()
        wrong, natural = [], []
        for start in (2, 6):
            self.logits(np.concatenate([text[:start], other]))
            self.logits(np.concatenate([text[:start], other, text[:1]]))  # a single token behind, as in decoding
            rolled_back = self.logits(text, last=10 - start).copy()
            self.forget()
            self.logits(text[:start])
            fresh = self.logits(text, last=10 - start)
            spread = fresh.std(axis=1) + 1e-6
            wrong.append(np.sqrt(np.square(rolled_back - fresh).mean(axis=1)) / spread)
            natural.append(np.sqrt(np.square(whole[start - 2 :] - fresh).mean(axis=1)) / spread)
        difference, allowed = np.median(np.concatenate(wrong)), np.median(np.concatenate(natural))
        if not (difference < max(TOLERANCE, 4 * allowed) and allowed < NATURAL):
            raise ValueError(
                f"a step after a rollback of the {self.backend.kind} cache differs from a fresh one by "
                f"{max(difference, allowed):.2f} of the logits' spread: this model cannot be rolled back; "
                "decode it without a draft"
            )
        self.forget()


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
    MIN_RESPONSE_LEN among the properties say more. Raises ValueError for a model that cannot be rolled back,
    RuntimeError where OpenVINO cannot compile it.
    """
    folder = Path(folder)
    config = folder / "config.json"
    known = json.loads(config.read_text(encoding="utf-8")) if config.exists() else {}
    known = {**known, **known.get("text_config", {})}
    context = next((known[key] for key in CONTEXT_LENGTH_KEYS if key in known), CAPACITY)
    window = (known.get("use_sliding_window", True) and known.get("sliding_window")) or 0
    kind = device.partition(".")[0]
    model = ov.Core().read_model(folder / "openvino_model.xml")
    properties = properties or {}
    try:
        kv_cache.read(model)  # refuses states that cannot be rolled back
        if kind == "NPU":
            return CachedModel(NpuModel(model, device, properties, capacity, context, window))
        capacity = capacity or min(context, CAPACITY)
        if stateful is None:
            stateful = kind not in ("CPU", "GPU") or known.get("model_type") in WRONG_WHEN_PAGED
        if stateful:
            return CachedModel(StatefulModel(model, device, properties, capacity, window))
        try:
            return CachedModel(PagedModel(model.clone(), device, properties, capacity))
        except (RuntimeError, ValueError) as error:
            if kind == "CPU":
                raise
            # A GPU driver may lack it. What fails for another reason fails again below, and says so.
            warnings.warn(f"no paged attention on {device} ({_line(error)}): the stateful cache is used", stacklevel=2)
            return CachedModel(StatefulModel(model, device, properties, capacity, window))
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
