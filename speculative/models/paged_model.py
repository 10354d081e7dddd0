"""Paged-attention backend, with the KV cache in blocks, for CPU and GPU.

Each layer's cache is one array of blocks, allocated once (Kwon et al. 2023, arXiv 2309.06180). The start position of a
run is an input of the model, so rolling back means starting earlier: nothing is copied, later entries are overwritten.
The block table is an input too, so one forward pass can hold several sequences, each with its own number of tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import openvino as ov
from openvino._offline_transformations import paged_attention_transformation

from speculative.models.eagle3_graph import HIDDEN_STATE
from speculative.models.gather_logits import keep_logits_at
from speculative.models.inference import infer

ALIGNMENT = 64  # bytes
SLIDING_WINDOW, ALIBI_SLOPES = 10, 11  # inputs of the paged-attention operation


class SequenceInput(NamedTuple):
    """One sequence of `run_together`: `tokens` int64 [n] at positions start, start + 1, ... of the sequence in
    `blocks` (int32, in position order, enough of them), with logits after each of the last `last` tokens."""

    blocks: np.ndarray
    start: int
    tokens: np.ndarray
    last: int


@dataclass
class Batch:
    """The inputs of `run_together` for sequences of certain sizes; those not set in each run depend on these only."""

    sizes: tuple[tuple[int, int, int], ...]  # of each sequence: tokens, logits, blocks
    width: int
    ids: np.ndarray  # without padding, as `blocks` and `hidden`
    blocks: np.ndarray
    hidden: np.ndarray | None
    past: np.ndarray  # of each sequence, those of padding included
    positions: np.ndarray
    offsets: np.ndarray  # of each token in the tokens of its sequence
    sequence: np.ndarray  # of each token, its index
    padding: int  # most tokens in a sequence of padding
    rows: int  # logits, without padding


class PagedModel:
    """A compiled model and its cache blocks; `run` for one sequence, `run_together` for several."""

    kind = "paged attention"
    chunk = 1024  # prompt tokens in one forward pass: bounds the memory for activations

    def __init__(self, model: ov.Model, device: str, properties: dict, capacity: int):
        """Modifies `model` in place. `capacity` is the number of cached tokens, over all sequences."""
        self.capacity = capacity
        on_cpu = device.startswith("CPU")
        paged_attention_transformation(model, allow_qq_bias=on_cpu)  # not tried on other devices
        self.supports_leaves = on_cpu and not _counts_cache_entries(model)
        keep_logits_at(model, axis=0)
        core = ov.Core()
        if on_cpu:  # OpenVINO writes the cache at every start and fails to read it (2026.4.1)
            properties = {name: value for name, value in properties.items() if name != "CACHE_DIR"}
        compiled = core.compile_model(model, device, properties)
        self._request = compiled.create_infer_request()
        self._index = {name: i for i, port in enumerate(compiled.inputs) for name in port.names}
        on_gpu = device.startswith("GPU")
        self.block_size = 16 if on_gpu else 32  # tokens in a block, fixed by the plugin
        self.blocks = -(-capacity // self.block_size)
        outputs = [port.any_name for port in compiled.outputs]
        self._hidden_output = outputs.index(HIDDEN_STATE) if HIDDEN_STATE in outputs else None
        # a GPU writes faster to the memory that its plugin allocates
        self._shares_outputs = on_cpu and all(port.partial_shape[-1].is_static for port in compiled.outputs)
        if self._shares_outputs:
            self._outputs = [  # shared memory, [0, size] before the first run
                np.empty((0, port.partial_shape[-1].get_length()), port.element_type.to_dtype())
                for port in compiled.outputs
            ]
            self._output_views = list(self._outputs)  # of it, what the last run wrote
        self.cache_bytes = 0
        self._caches: list[np.ndarray] = []  # bytes by block, of each layer's keys and values
        self._used = 0  # leading blocks that were written since the last `clear`
        self._hidden_size = 0  # of the input `hidden_states`, which only EAGLE-3 heads have
        for port in compiled.inputs:
            if port.any_name == "hidden_states":
                self._hidden_size = port.partial_shape[-1].get_length()
            if port.any_name.startswith(("key_cache.", "value_cache.")):
                shape = ov.Shape([self.blocks + 1, *(dim.get_length() for dim in list(port.partial_shape)[1:])])
                if on_gpu:  # in the device's own memory
                    tensor = core.get_default_context(device).create_tensor(port.element_type, shape, {})
                else:
                    tensor = ov.Tensor(self._zeros(shape, port.element_type), shape, port.element_type)
                self._request.set_tensor(port.any_name, tensor)  # `set_input_tensor` takes no remote tensor
                self.cache_bytes += tensor.get_byte_size()
        self._shared: dict[str, ov.Tensor] = {}  # input tensors on numpy arrays
        self._longest = self._set_shared_input("max_context_len", np.zeros((), np.int32))
        self._attend_to_all()
        self._all_blocks = np.arange(self.blocks, dtype=np.int32)
        self._batch: Batch | None = None  # the inputs of the last run, if it was `run_together`
        self._batch_inputs: dict[str, np.ndarray] = {}  # the arrays of its inputs
        self._shape: tuple[int, int, int, int] | None = None  # tokens, last, padding, blocks of the last `run`

    def _zeros(self, shape: ov.Shape, element_type: ov.Type) -> np.ndarray:
        """Memory for a layer's cache, aligned to cache lines as OpenVINO's own. Its pages are not allocated yet."""
        size = math.prod(shape) * element_type.bitwidth // 8
        zeros = np.zeros(size + ALIGNMENT, np.uint8)
        first = -zeros.ctypes.data % ALIGNMENT
        self._caches.append(zeros[first : first + size].reshape(shape[0], -1))
        return zeros[first : first + size]

    def clear(self) -> None:
        """Clear the cache's memory, except on a GPU. Entries that are not in use change the rounding of others in
        their block: OpenVINO quantizes keys by channel."""
        for cache in self._caches:
            cache[: self._used] = 0
        self._used = 0
        self._shape = None  # forgets the last padding

    @property
    def hidden_states(self) -> np.ndarray | None:
        """The last run's hidden states float32 [tokens, size], as a view that the next run overwrites; None if the
        model does not return them (see eagle3_graph.py)."""
        return None if self._hidden_output is None else self._output(self._hidden_output)

    def run(
        self,
        start: int,
        tokens: np.ndarray,
        last: int,
        hidden_states: np.ndarray | None = None,
        parents: Sequence[int] = (),
        padding: int = 0,
    ) -> np.ndarray:
        """Write tokens [n] at positions start, start + 1, ... of the cache, dropping everything from `start` on.

        `hidden_states` float32 [n, size] are an EAGLE-3 head's other input, by default zeros. The last tokens may be
        leaves of a tree, which follow their `parents`, places in `tokens`, and are seen by no other token; their cache
        entries must be overwritten by the next run, like those of `padding` more tokens, which may be any. Leaves and
        `padding` exclude each other.
        Returns logits float32 [last, V] after each of the last `last` of `tokens`, as a view that the next run
        overwrites.
        """
        given = len(tokens)
        n = given + padding
        end = start + n
        blocks = -(-end // self.block_size)
        self._used = max(self._used, blocks)
        if self._shape != (n, last, padding, blocks):
            self._set_shapes(n, last, padding, blocks)
        self._ids[:given] = tokens
        np.add(self._offsets, start, out=self._positions)
        if parents:
            self._positions[n - len(parents) :] = start + np.array(parents) + 1
            self._attend_to_parents(n, parents)
        elif self._has_leaves:
            self._attend_to_all()
        self._past[0] = start
        self._longest[()] = end
        if self._hidden_size:
            self._hidden[:given, 0] = 0 if hidden_states is None else hidden_states
        infer(self._request)
        return self._output(0)

    def run_together(
        self, runs: Sequence[SequenceInput], hidden_states: np.ndarray | None = None, width: int = 0
    ) -> np.ndarray:
        """One forward pass over the tokens of all `runs`; `start` works as in `run`. Sequences may share blocks that
        end before their start. Token and row counts are `rounded_up`, tokens to `width` if that is more; padding goes
        to a block of its own. `hidden_states` float32 [sum of tokens, size] are an EAGLE-3 head's other input, by
        default zeros.

        Returns logits float32 [sum of last, V], in order, as a view that the next run overwrites. `run` uses the first
        blocks of the cache for its sequence, so calling it overwrites sequences in these blocks.
        """
        sizes = tuple((len(run.tokens), run.last, -(-(run.start + len(run.tokens)) // self.block_size)) for run in runs)
        if any(len(run.blocks) < blocks for run, (_, _, blocks) in zip(runs, sizes, strict=True)):
            raise ValueError("a sequence is longer than its blocks")  # OpenVINO would write out of bounds
        if self._batch is None or (sizes, width) != (self._batch.sizes, self._batch.width):
            self._set_batch(sizes, width)
        batch = self._batch
        assert batch is not None
        np.concatenate([run.tokens for run in runs], out=batch.ids)
        batch.past[: len(runs)] = [run.start for run in runs]
        np.add(batch.offsets, batch.past[batch.sequence], out=batch.positions)
        np.concatenate([run.blocks[:n] for run, (_, _, n) in zip(runs, sizes, strict=True)], out=batch.blocks)
        if batch.hidden is not None:
            batch.hidden[:] = 0 if hidden_states is None else hidden_states
        self._longest[()] = max(batch.padding, max(run.start + len(run.tokens) for run in runs))
        self._used = self.blocks + 1
        if self._has_leaves:
            self._attend_to_all()
        infer(self._request)
        return self._output(0)[: batch.rows]

    def _attend_to_parents(self, n: int, parents: Sequence[int]) -> None:
        """Let each leaf, the last of n tokens, attend only to its parent, what that attends to, and itself."""
        self._has_leaves = True  # first: Ctrl-C may come before both inputs are set
        chain = n - len(parents)
        attends = np.tri(n, dtype=np.uint8)
        attends[chain:] = attends[list(parents)]
        attends[np.arange(chain, n), np.arange(chain, n)] = 1
        self._set_shared_input("qq_bias", attends.ravel())
        self._set_shared_input("qq_bias_begins", np.array([0, n * n], np.int32))

    def _attend_to_all(self) -> None:
        """Let tokens attend to all tokens before them."""
        if "qq_bias" in self._index:
            self._set_shared_input("qq_bias", np.zeros(0, np.uint8))
            self._set_shared_input("qq_bias_begins", np.zeros(0, np.int32))
        self._has_leaves = False

    def _set_shared_input(self, name: str, array: np.ndarray) -> np.ndarray:
        self._shared[name] = tensor = ov.Tensor(array, shared_memory=True)  # keeps the array alive
        self._request.set_input_tensor(self._index[name], tensor)
        return array

    def _set_batch(self, sizes: tuple[tuple[int, int, int], ...], width: int) -> None:
        """Allocate the inputs of `run_together` for sequences of these `sizes`, and set those that depend on sizes
        only."""
        self._shape = self._batch = None  # until all is set: Ctrl-C may come in between
        counts, rows, blocks = (list(column) for column in zip(*sizes, strict=True))
        tokens, num_blocks = sum(counts), sum(blocks)
        padding = max(rounded_up(tokens), width) - tokens
        parts = [min(self.block_size, padding - i) for i in range(0, padding, self.block_size)]
        counts += parts
        begins = list(accumulate(counts, initial=0))
        sequence = [i for i, n in enumerate(counts) for _ in range(n)]

        ids = self._batch_input("input_ids", (len(sequence),), np.int64)
        ids[tokens:] = 0
        hidden = None
        if self._hidden_size:
            hidden = self._batch_input("hidden_states", (len(sequence), 1, self._hidden_size), np.float32)
            hidden[tokens:] = 0
        past = self._batch_input("past_lens", (len(counts),), np.int32)
        past[len(sizes) :] = 0
        positions = self._batch_input("position_ids", (len(sequence),), np.int64)
        block_ids = self._batch_input("block_indices", (num_blocks + len(parts),), np.int32)
        block_ids[num_blocks:] = self.blocks  # an extra block for padding
        self._batch_input("subsequence_begins", (len(begins),), np.int32)[:] = begins
        blocks += [1] * len(parts)
        self._batch_input("block_indices_begins", (len(begins),), np.int32)[:] = list(accumulate(blocks, initial=0))
        places = [place for end, last in zip(begins[1:], rows, strict=False) for place in range(end - last, end)]
        logits_positions = self._batch_input("logits_positions", (rounded_up(len(places)),), np.int64)
        logits_positions[: len(places)] = places
        logits_positions[len(places) :] = 0
        self._set_outputs(len(sequence), len(logits_positions))

        self._batch = Batch(
            sizes,
            width,
            ids[:tokens],
            block_ids[:num_blocks],
            None if hidden is None else hidden[:tokens, 0],
            past,
            positions,
            np.array([offset for n in counts for offset in range(n)]),
            np.array(sequence),
            max(parts, default=0),
            len(places),
        )

    def _batch_input(self, name: str, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        """The array of an input of `run_together`; a new one only if the shape changed."""
        array = self._batch_inputs.pop(name, None)  # missing until it is set: Ctrl-C may come in between
        if array is None or array.shape != shape:
            array = self._set_shared_input(name, np.zeros(shape, dtype))
        self._batch_inputs[name] = array
        return array

    def _set_outputs(self, n: int, rows: int) -> None:
        """Let the next run write the logits of `rows` tokens, and hidden states of n, to shared memory: to ask OpenVINO
        for the outputs after each run takes longer than a draft step's other work."""
        if self._shares_outputs:
            self._set_shared_output(0, rows)
            if self._hidden_output is not None:
                self._set_shared_output(self._hidden_output, n)

    def _set_shared_output(self, index: int, rows: int) -> None:
        if len(self._output_views[index]) == rows:
            return
        if len(self._outputs[index]) < rows:
            self._outputs[index] = np.empty((rows, self._outputs[index].shape[1]), self._outputs[index].dtype)
        view = self._outputs[index][:rows]
        self._output_views[index] = self._outputs[index][:0]  # until it is set: Ctrl-C may come in between
        self._request.set_output_tensor(index, ov.Tensor(view[:, np.newaxis], shared_memory=True))
        self._output_views[index] = view

    def _output(self, index: int) -> np.ndarray:
        """An output of the last run, [rows, size], as a view that the next run overwrites."""
        if self._shares_outputs:
            return self._output_views[index]
        data = self._request.get_output_tensor(index).data
        return data.reshape(-1, data.shape[-1])

    def _set_shapes(self, n: int, last: int, padding: int, blocks: int) -> None:
        """Allocate the inputs whose shape differs from the last run's, and set those that depend on shapes only."""
        if self._shape is None:
            self._batch = None
            self._batch_inputs.clear()
            self._past = self._set_shared_input("past_lens", np.zeros(1, np.int32))
            self._span = self._set_shared_input("subsequence_begins", np.zeros(2, np.int32))
            self._block_span = self._set_shared_input("block_indices_begins", np.zeros(2, np.int32))
        was_n, was_last, _, was_blocks = self._shape or (0, 0, 0, 0)
        self._shape = None  # until all is set: Ctrl-C may come in between
        if n != was_n:
            self._ids = self._set_shared_input("input_ids", np.zeros(n, np.int64))
            self._positions = self._set_shared_input("position_ids", np.zeros(n, np.int64))
            self._offsets = np.arange(n)
            if self._hidden_size:
                self._hidden = self._set_shared_input("hidden_states", np.zeros((n, 1, self._hidden_size), np.float32))
        if last != was_last:
            self._logits_positions = self._set_shared_input("logits_positions", np.zeros(last, np.int64))
        if blocks != was_blocks:
            self._set_shared_input("block_indices", self._all_blocks[:blocks])
        if (n, last) != (was_n, was_last):
            self._set_outputs(n, last)
        self._logits_positions[:] = np.arange(n - padding - last, n - padding)
        self._span[1], self._block_span[1] = n, blocks
        self._shape = n, last, padding, blocks


def _counts_cache_entries(model: ov.Model) -> bool:
    """Whether attention depends on the number of cache entries between two tokens: by a sliding window, or by ALiBi
    (Press et al. 2022, arXiv 2108.12409). Leaves are not at the entry of their position."""
    for node in model.get_ops():
        if node.get_type_name() == "PagedAttentionExtension":
            window, slopes = (node.input_value(i).get_node() for i in (SLIDING_WINDOW, ALIBI_SLOPES))
            if any(value.get_type_name() != "Constant" or value.data.any() for value in (window, slopes)):
                return True
    return False


def rounded_up(n: int) -> int:
    """The next batch size in tokens to pad to: 1 to 16, then 8 sizes up to each power of 2, from 128 on multiples of
    16. OpenVINO compiles kernels for each size, 0.1 to 0.2 MB, and caches thousands of them."""
    step = 1 << min(max((n - 1).bit_length() - 4, 0), 4)
    return -(-n // step) * step
