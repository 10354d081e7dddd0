"""Language model with a KV cache that can be rolled back: tokens in, next-token logits out.

    model = cached_model.load(ModelSpec("models/embedded/main", "CPU"))
    logits = model.logits(tokens, last=3)  # after each of the last 3 tokens

Every call passes the whole sequence. The longest common prefix with the cache is not computed again: a chat turn costs
only its new tokens, and a rejected draft is rolled back by leaving it out of the next call.
"""

import hashlib
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import openvino as ov
import openvino_genai

from speculative.models import attention_masks, kv_cache
from speculative.models.config import context_length, read_config, sliding_window
from speculative.models.npu_model import NpuModel
from speculative.models.paged_model import PagedModel
from speculative.models.pass_width import PassWidth
from speculative.models.spec import ModelSpec
from speculative.models.stateful_model import StatefulModel

CAPACITY = 16_384  # default longest sequence, in tokens: bounds the memory for the cache
CHECK_STEP = 6  # tokens in a forward pass of the rollback check
EXACT_DIFFERENCE = 1e-3  # total variation below which a rollback counts as exact, whatever the noise
NOISE_FACTOR = 1.6  # times the noise: correct caches reach 1.2, caches wrong by one token start at 2.2 (SmolLM2-135M)
MAX_NOISE = 0.25  # total variation that rounding alone never causes; 0.03 is typical
CHECK_TEXT = "The library lends about four thousand books a month. Children may take three of them at a time, others 10"
_check_texts: dict[bytes, np.ndarray | None] = {}  # by tokenizer


class CannotRollBack(ValueError):
    """A step after a rollback gives a different distribution than the same step on a fresh cache."""

    def __init__(self, kind: str, difference: float, noise: float):
        super().__init__(
            f"after a rollback of the {kind} cache the next-token distribution differs from that of a fresh cache by "
            f"{difference:.3f} (total variation; {noise:.3f} between fresh caches): this model cannot be rolled back; "
            "decode it without a draft"
        )
        self.difference, self.noise = difference, noise


class Backend(Protocol):
    """The compiled model and its KV cache: `PagedModel`, `StatefulModel` or `NpuModel`."""

    kind: str
    capacity: int  # longest sequence, in tokens
    chunk: int  # prompt tokens per run
    cache_bytes: int
    supports_leaves: bool  # whether `run` accepts the parents of leaves, see `PagedModel.run`

    @property
    def hidden_states(self) -> np.ndarray | None:
        """The hidden states float32 [n, size] of the last run's tokens; None if the model does not return them."""

    def run(self, start: int, tokens: np.ndarray, last: int) -> np.ndarray:
        """Write tokens [n] at position `start`, dropping everything from there on; return logits [last, V]."""

    def clear(self) -> None:
        """Clear the cache's memory, if what is not in use there can change the rounding of what is."""


class CachedModel:
    """One sequence of one model. Not thread-safe."""

    targets: np.ndarray | None = None  # int64 [n], ascending: the token ids that its logits are of; None: 0, 1, ...

    def __init__(self, backend: Backend, text: np.ndarray | None = None, note: str = ""):
        """`text` (int64 [24 or more]) is the input of the rollback check, by default pseudo-random tokens. `note` is
        the finding of an earlier rollback check; if given, the check is skipped."""
        self.backend = backend
        self.capacity = backend.capacity
        self.pass_width: PassWidth | None = None  # if set, pads the passes that give logits after each token
        self._tokens = np.zeros(self.capacity, np.int64)  # the tokens in the cache
        self._length = 0  # of these
        self._computed = 0  # of these, the leading ones whose entries are in place; all but an accepted leaf
        self._leaf_states = np.zeros((0, 0), np.float32)  # hidden states of the last run's leaves
        self.version = 0  # increases with each change to the cache
        self.vocab_size = self.backend.run(0, np.zeros(1, np.int64), 1).shape[1]
        self.hidden_states: np.ndarray | None = None  # float32 [capacity, size] of the tokens in the cache
        if backend.hidden_states is not None:
            self.hidden_states = np.empty((self.capacity, backend.hidden_states.shape[1]), np.float32)
        self.note = note
        if not note:
            self._check_rollback(text)

    @property
    def supports_leaves(self) -> bool:
        """Whether `logits` accepts leaves."""
        return self.backend.supports_leaves

    def logits(self, tokens: np.ndarray, last: int = 1, leaves: Sequence[tuple[int, int]] = ()) -> np.ndarray:
        """Logits float32 [last, V] after each of the last `last` tokens of `tokens` (int64 [n], the whole sequence).

        `leaves` are alternatives to the last `last` - 1 tokens, each a place in `tokens` and a token; their logits
        follow, [last + leaves, V]. The array is a view that the next call overwrites. Raises ValueError if `tokens`,
        with the leaves, is longer than `capacity`.
        """
        n = len(tokens)
        if n + len(leaves) > self.capacity:
            raise ValueError(
                f"the text has {n} tokens, but the cache only fits {self.capacity}: shorten it or raise the capacity"
            )
        recomputed = self._length - self._computed  # an accepted leaf
        start = min(self.common_prefix(tokens), self._computed, n - last)
        self.version += 1
        self._length = self._computed = start  # if a run fails, nothing after `start` counts as cached
        try:
            while n - start > self.backend.chunk + last:
                self._run(start, tokens[start : start + self.backend.chunk], 1)
                start += self.backend.chunk
            return self._run(start, tokens[start:], last, leaves, recomputed)
        except BaseException:  # Ctrl-C, for one: the state has grown by a pass that is over; blocks are written again
            if not isinstance(self.backend, PagedModel):
                self._length = self._computed = 0
            raise

    def accept_leaf(self, position: int, token: int, leaf: int) -> None:
        """Continue with leaf number `leaf` of the last call, the `token` at `position`. The next call computes its
        cache entry again, but its hidden state is known."""
        if self.hidden_states is not None:
            self.hidden_states[position] = self._leaf_states[leaf]
        self.version += 1
        self._tokens[position] = token
        self._length, self._computed = position + 1, position

    def common_prefix(self, tokens: np.ndarray) -> int:
        """The number of leading `tokens` in the cache."""
        return common_prefix(self._tokens[: self._length], tokens)

    def reset(self) -> None:
        """Clear the cache."""
        self.version += 1
        self._length = self._computed = 0
        if self.pass_width:
            self.pass_width.reset()

    def clear(self) -> None:
        """Clear the cache and its memory: the same calls then give the same logits again, to the last bit."""
        self.reset()
        self.backend.clear()

    def _run(
        self, start: int, tokens: np.ndarray, last: int, leaves: Sequence[tuple[int, int]] = (), recomputed: int = 0
    ) -> np.ndarray:
        n, extra = len(tokens), len(leaves)
        padding = self._padding(start, n + extra, n == last + recomputed)
        if not leaves:
            padded = np.append(tokens, np.full(padding, tokens[-1])) if padding else tokens
            logits = self.backend.run(start, padded, last + padding)[:last]
        else:
            padded_leaves = [*leaves, *([leaves[-1]] * padding)]
            parents = [position - start - 1 for position, _ in padded_leaves]
            padded = np.append(tokens, [token for _, token in padded_leaves])
            assert isinstance(self.backend, PagedModel)
            logits = self.backend.run(start, padded, last + len(padded_leaves), None, parents)[: last + extra]
        self._tokens[start : start + n] = tokens
        if self.hidden_states is not None:
            states = self.backend.hidden_states
            assert states is not None
            self.hidden_states[start : start + n] = states[:n]
            self._leaf_states = states[n : n + extra].copy()
        self._length = self._computed = start + n
        return logits

    def _padding(self, start: int, n: int, verifies: bool) -> int:
        """The number of tokens to add to a pass over n tokens: later passes overwrite them. None for prompts."""
        if not self.pass_width:
            return 0
        if not verifies:
            self.pass_width.reset()
            return 0
        width = self.pass_width.width_for(n)
        return width - n if start + width <= self.capacity else 0

    def _check_rollback(self, text: np.ndarray | None) -> None:
        """Compare steps after a rollback with the same steps on a fresh cache. Raises CannotRollBack if they differ.

        Distributions also vary with the number of tokens in a forward pass and, if keys of several tokens share a
        scale, with their order. So fresh computations in differently sized chunks give the model's own noise. Medians
        are compared, because a single different expert choice in a mixture of experts changes a whole row.
        """
        step = max(1, min(CHECK_STEP, (self.capacity - 1) // 3))
        if text is None:
            text = (np.arange(4 * step, dtype=np.int64) * 7919 + 1) % self.vocab_size
        other = text[3 * step : 4 * step]
        rolled_back, noise = [], []
        for start in (step, 2 * step):
            piece = text[: start + step]
            self.reset()
            if start > step:
                self.logits(text[: start - step])
            other_chunks = _probabilities(self.logits(piece, last=step))
            self.logits(np.concatenate([text[:start], other]))
            self.logits(np.concatenate([text[:start], other, text[:1]]))  # one more token, as in decoding
            recomputed = _probabilities(self.logits(piece, last=step))
            self.reset()
            self.logits(text[:start])
            fresh = _probabilities(self.logits(piece, last=step))
            rolled_back.append(_total_variation(recomputed, fresh))
            noise.append(_total_variation(other_chunks, fresh))
        self.reset()
        difference, usual_noise = (float(np.median(np.concatenate(rows))) for rows in (rolled_back, noise))
        if not (difference < max(EXACT_DIFFERENCE, NOISE_FACTOR * usual_noise) and usual_noise < MAX_NOISE):
            raise CannotRollBack(self.backend.kind, difference, usual_noise)


def common_prefix(tokens: np.ndarray, others: np.ndarray) -> int:
    """The number of leading tokens that two sequences, int64 [n] and [m], have in common."""
    n = min(len(tokens), len(others))
    differ = tokens[:n] != others[:n]
    return int(differ.argmax()) if differ.any() else n


class TracelessCache(NamedTuple):
    """A KV cache in which rejected tokens leave no traces."""

    property: str
    value: str
    name: str


CPU_CACHE = TracelessCache("KEY_CACHE_QUANT_MODE", "BY_TOKEN", "keys quantized by token")
GPU_CACHE = TracelessCache("KV_CACHE_PRECISION", "f16", "keys not quantized")


def _probabilities(logits: np.ndarray) -> np.ndarray:
    """float64 [rows, V]"""
    e = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def _total_variation(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """[rows], from 0 to 1"""
    return np.abs(p - q).sum(axis=1) / 2


def load(
    model: ModelSpec | str | Path,
    *,
    capacity: int | None = None,
    stateful: bool | None = None,
    prepare: Callable[[ov.Model], None] | None = None,
) -> CachedModel:
    """Compile a model; a path stands for a ModelSpec with the CPU and no properties.

    CACHE_DIR keeps the compiled model on disk, except for paged attention on a CPU, where OpenVINO cannot read it back.
    `capacity` is the longest sequence in tokens, by default the model's context length, at most 16,384. `stateful`
    selects the backend; by default paged attention (False) on CPU and GPU, stateful (True) elsewhere, for models whose
    attention masks paged attention drops and, with a warning, on a GPU without paged attention. The NPU has its own
    backend, for up to 1,152 tokens unless `capacity` or the properties MAX_PROMPT_LEN and MIN_RESPONSE_LEN raise it. If
    the default cache keeps traces of rejected tokens beyond the model's own noise, it gets another one and the model's
    `note` says so: keys quantized by token on a CPU, f16 on a GPU. `prepare` may modify the graph before anything else
    does. Raises ValueError for a model that cannot be rolled back, RuntimeError if OpenVINO cannot compile it.
    """
    spec = ModelSpec.of(model)
    graph = ov.Core().read_model(spec.folder / "openvino_model.xml")
    if prepare:
        prepare(graph)
    return compile_graph(graph, spec, capacity=capacity, stateful=stateful)


def compile_graph(
    graph: ov.Model, spec: ModelSpec, *, capacity: int | None = None, stateful: bool | None = None
) -> CachedModel:
    """Compile `graph`, which was read from the folder of `spec`; see `load`."""
    folder, device, properties = spec.folder, spec.device, spec.properties
    known = read_config(folder)
    context, window = context_length(known) or CAPACITY, sliding_window(known)
    kind = device.partition(".")[0]
    text = _check_text(folder)
    try:
        kv_cache.read(graph)  # rejects states that cannot be rolled back
        if kind == "NPU":
            return CachedModel(NpuModel(graph, device, properties, capacity, context, window), text)
        drops_masks = bool(attention_masks.dropped(graph, known))
        capacity = capacity or min(context, CAPACITY)

        def paged(properties: dict) -> Backend:
            return PagedModel(graph.clone(), device, properties, capacity)

        def with_states(properties: dict) -> Backend:
            return StatefulModel(graph.clone(), device, properties, capacity, window, counts_entries=drops_masks)

        if stateful is None:
            stateful = drops_masks or kind not in ("CPU", "GPU")
        if kind == "CPU":
            return _rolled_back(with_states if stateful else paged, properties, text, CPU_CACHE)
        if stateful:
            return CachedModel(with_states(properties), text)
        return _paged_or_with_states(device, paged, with_states, properties, text)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None


def _paged_or_with_states(
    device: str,
    paged: Callable[[dict], Backend],
    with_states: Callable[[dict], Backend],
    properties: dict,
    text: np.ndarray | None,
) -> CachedModel:
    """Load the model with paged attention, which a GPU driver may lack, else, with a warning, with states."""
    try:
        return _rolled_back(paged, properties, text, GPU_CACHE)
    except (RuntimeError, ValueError) as error:  # another failure is raised again below
        warnings.warn(f"no paged attention on {device} ({_line(error)}): using the stateful cache", stacklevel=3)
        return CachedModel(with_states(properties), text)


def _rolled_back(
    backend: Callable[[dict], Backend], properties: dict, text: np.ndarray | None, cache: TracelessCache
) -> CachedModel:
    """Load the model with a cache that can be rolled back: the default one, or else `cache`.

    The default caches of CPUs and GPUs quantize keys by channel: tokens of a block share scales, in which rejected
    tokens leave traces. In `cache` they leave none, so a remaining difference is a fault of the model or the engine.
    The caller's own properties are not changed.
    """
    try:
        return CachedModel(backend(properties), text)
    except CannotRollBack as error:  # the first model is freed before the second is compiled
        found = error
        found.__traceback__ = None
    setting = f"{cache.property}={cache.value}"
    without_traces = CachedModel(backend({**properties, cache.property: cache.value}), text)
    traces = (
        f"rejected tokens change the next-token distribution by {found.difference:.3f} (total variation), rounding "
        f"alone by {found.noise:.3f}"
    )
    if {"KEY_CACHE_QUANT_MODE", "KV_CACHE_PRECISION"} & properties.keys():
        del without_traces
        note = f"as the properties say, although {traces}; with {setting} they leave no trace"
        return CachedModel(backend(properties), note=note)
    without_traces.note = f"{cache.name} ({setting}), because by channel {traces}"
    return without_traces


def _check_text(folder: Path) -> np.ndarray | None:
    """Tokens of a text for the rollback check; None without a tokenizer that gives enough distinct tokens.

    A draft mostly has its main model's tokenizer, which takes longer to load than to recognize.
    """
    files = [folder / "openvino_tokenizer.xml", folder / "openvino_tokenizer.bin"]
    if not files[0].exists():
        return None
    key = hashlib.sha256(b"".join(file.read_bytes() for file in files if file.exists())).digest()
    if key not in _check_texts:
        ids = openvino_genai.Tokenizer(str(folder)).encode(CHECK_TEXT).input_ids.data[0]
        ids = ids[: 4 * CHECK_STEP].astype(np.int64)
        _check_texts[key] = ids if len(ids) == 4 * CHECK_STEP and len(set(ids)) > 2 * CHECK_STEP else None
    return _check_texts[key]


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
