"""A model with its KV cache in blocks (paged attention: Kwon et al. 2023, arXiv 2309.06180), for CPU and GPU.

The cache is one table of blocks for each layer, allocated once. Where a run starts is an input of the model, so rolling
back is starting earlier: nothing is copied, and what lies behind is overwritten. So is which blocks a sequence has: one
inference takes several sequences, each with its own number of tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import openvino as ov
from openvino._offline_transformations import paged_attention_transformation

from speculative.models.gather_logits import keep_logits_at


class SequenceInput(NamedTuple):
    """What `run` takes, and of which sequence: `tokens` int64 [n] go to positions start, start + 1, ... of the sequence
    in `blocks` (int32, in the order of its positions, enough of them), and logits are wanted after the last `last`."""

    blocks: np.ndarray
    start: int
    tokens: np.ndarray
    last: int


class PagedModel:
    """`run(start, tokens, last)` over an OpenVINO model and its blocks, `run_together(runs)` for several sequences."""

    kind = "paged attention"
    chunk = 1024  # tokens of a prompt in one inference: bounds the memory for activations

    def __init__(self, model: ov.Model, device: str, properties: dict, capacity: int):
        """`model` is changed in place. `capacity` is the longest sequence, or of several all together, in tokens."""
        self.capacity = capacity
        paged_attention_transformation(model)
        keep_logits_at(model, axis=0)
        core = ov.Core()
        if device.startswith("CPU"):  # would write the model at every start and fail to read it (2026.4.1)
            properties = {name: value for name, value in properties.items() if name != "CACHE_DIR"}
        compiled = core.compile_model(model, device, properties)
        self._request = compiled.create_infer_request()
        self._index = {name: i for i, port in enumerate(compiled.inputs) for name in port.names}
        on_gpu = device.startswith("GPU")
        self.block_size = 16 if on_gpu else 32  # tokens in a block, fixed by the plugin
        self.blocks = -(-capacity // self.block_size)
        self._nobodys_block = np.array([self.blocks], np.int32)  # one more: for padding
        self.cache_bytes = 0
        for i, port in enumerate(compiled.inputs):
            if port.any_name.startswith(("key_cache.", "value_cache.")):
                shape = ov.Shape([self.blocks + 1, *(dim.get_length() for dim in list(port.partial_shape)[1:])])
                if on_gpu:  # in the device's own memory
                    tensor = core.get_default_context(device).create_tensor(port.element_type, shape, {})
                else:
                    tensor = ov.Tensor(port.element_type, shape)
                self._request.set_input_tensor(i, tensor)
                self.cache_bytes += tensor.byte_size
        self._shared: dict[str, ov.Tensor] = {}
        self._longest = self._share("max_context_len", np.zeros((), np.int32))
        self._all_blocks = np.arange(self.blocks, dtype=np.int32)
        self._together: dict[str, np.ndarray] = {}  # the inputs of the last run, if it was of several
        self._shape: tuple[int, int, int] | None = None  # tokens, last, blocks of the last run, if it was of one alone

    def run(self, start: int, tokens: np.ndarray, last: int) -> np.ndarray:
        """Put tokens [n] at positions start, start + 1, ... of the cache and forget what was there and behind.

        Returns logits float32 [last, V] after the last `last` of them: a view that the next run overwrites.
        """
        n = len(tokens)
        end = start + n
        blocks = -(-end // self.block_size)
        self._set_shapes(n, last, blocks)
        self._ids[:] = tokens
        self._positions[:] = np.arange(start, end)
        self._past[0] = start
        self._span[1] = n
        self._block_span[1] = blocks
        self._longest[()] = end
        self._request.start_async()
        self._request.wait()
        return self._request.get_output_tensor(0).data.reshape(last, -1)

    def run_together(self, runs: Sequence[SequenceInput]) -> np.ndarray:
        """One inference on the tokens of all `runs`; each start as for `run`. Sequences may have blocks in common that
        end before their start. Tokens and rows are `rounded_up`; what is more goes to a block that no sequence has.

        Returns logits float32 [sum of last, V], one after the other: a view that the next run overwrites. `run` has the
        first blocks of the table for its sequence: who calls both must not mind.
        """
        if any(len(run.blocks) * self.block_size < run.start + len(run.tokens) for run in runs):
            raise ValueError("a sequence is longer than its blocks")  # OpenVINO would go beyond their memory
        tokens = sum(len(run.tokens) for run in runs)
        rows = sum(run.last for run in runs)
        if padding := rounded_up(tokens) - tokens:
            runs = [*runs, SequenceInput(self._nobodys_block, 0, np.zeros(padding, np.int64), 0)]
        counts = np.array([len(run.tokens) for run in runs])
        past = np.array([run.start for run in runs], np.int32)
        blocks = [run.blocks[: -(-(run.start + n) // self.block_size)] for run, n in zip(runs, counts, strict=True)]
        ends = counts.cumsum()
        wanted = [np.arange(end - run.last, end) for run, end in zip(runs, ends, strict=True)]
        wanted.append(np.zeros(rounded_up(rows) - rows, np.int64))
        self._shape = None
        self._put("input_ids", np.concatenate([run.tokens for run in runs]))
        self._put("position_ids", np.arange(ends[-1]) + np.repeat(past - (ends - counts), counts))
        self._put("past_lens", past)
        self._put("subsequence_begins", _from_zero(ends))
        self._put("block_indices", np.concatenate(blocks))
        self._put("block_indices_begins", _from_zero(np.cumsum([len(ids) for ids in blocks])))
        self._put("logits_positions", np.concatenate(wanted))
        self._longest[()] = (past + counts).max()
        self._request.start_async()
        self._request.wait()
        logits = self._request.get_output_tensor(0).data
        return logits.reshape(-1, logits.shape[-1])[:rows]

    def _share(self, name: str, array: np.ndarray) -> np.ndarray:
        self._shared[name] = tensor = ov.Tensor(array, shared_memory=True)  # which keeps the array alive
        self._request.set_input_tensor(self._index[name], tensor)
        return array

    def _put(self, name: str, values: np.ndarray) -> None:
        """Set an input of several sequences, anew where its shape differs from the last run's."""
        array = self._together.get(name)
        if array is not None and array.shape == values.shape:
            array[:] = values
        else:
            self._together[name] = self._share(name, values)

    def _set_shapes(self, n: int, last: int, blocks: int) -> None:
        """Set anew the inputs whose shape differs from the last run's."""
        if self._shape is None:
            self._together.clear()
            self._past = self._share("past_lens", np.zeros(1, np.int32))
            self._span = self._share("subsequence_begins", np.zeros(2, np.int32))
            self._block_span = self._share("block_indices_begins", np.zeros(2, np.int32))
        was_n, was_last, was_blocks = self._shape or (0, 0, 0)
        if n != was_n:
            self._ids = self._share("input_ids", np.zeros(n, np.int64))
            self._positions = self._share("position_ids", np.zeros(n, np.int64))
        if (n, last) != (was_n, was_last):
            self._share("logits_positions", np.arange(n - last, n, dtype=np.int64))
        if blocks != was_blocks:
            self._share("block_indices", self._all_blocks[:blocks])
        self._shape = n, last, blocks


def rounded_up(n: int) -> int:
    """The next size that an inference of several sequences may have: 1 to 16, then 8 sizes up to each power of 2, from
    128 on multiples of 16. OpenVINO compiles kernels for each size, 0.1 to 0.2 MB, and keeps thousands of them."""
    step = 1 << min(max((n - 1).bit_length() - 4, 0), 4)
    return -(-n // step) * step


def _from_zero(ends: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], ends)).astype(np.int32)
