"""Stateful backend, with the KV cache as a state of the infer request, for devices without paged attention.

A state only grows. So a rollback leaves rejected entries in place and hides them: their attention mask is 0, and every
token's position is given explicitly. Nothing is copied until hidden entries fill the spare quarter of the cache; then
the entries in use are compacted once.
"""

import numpy as np
import openvino as ov

from speculative.models.gather_logits import keep_logits_at
from speculative.models.inference import infer

SPARE = 4  # one spare entry, for hidden ones, per this many entries of capacity


class StatefulModel:
    """A compiled model and its states; `run` for one sequence."""

    kind = "stateful"
    supports_leaves = False
    hidden_states = None
    chunk = 1024  # prompt tokens in one forward pass: bounds the memory for activations

    def __init__(
        self, model: ov.Model, device: str, properties: dict, capacity: int, window: int, counts_entries: bool = False
    ):
        """Modifies `model` in place. `capacity` is the longest sequence, in tokens.

        With a sliding `window` shorter than the cache (0 without one), rejected entries are removed by copying, because
        the window would count hidden entries too. So it is if another mask `counts_entries`, such as that of ALiBi.
        """
        self.capacity = capacity
        keep_logits_at(model, axis=1)
        compiled = ov.Core().compile_model(model, device, properties)
        self._request = compiled.create_infer_request()
        self._index = {name: i for i, port in enumerate(compiled.inputs) for name in port.names}
        room = capacity + capacity // SPARE
        self._can_hide = (
            not 0 < window < room and not counts_entries and {"attention_mask", "position_ids"} <= self._index.keys()
        )
        self.cache_bytes = room * _bytes_per_token(model, compiled)
        self._mask = np.zeros((1, room), np.int64)  # per entry: 1 = in use
        self._entry = np.zeros(capacity, np.int64)  # the entry of each position
        self._length = 0  # positions in use
        self._used = 0  # entries in use or hidden
        self._inputs: dict[str, ov.Tensor] = {}  # the request does not keep their arrays alive
        self._set("beam_idx", np.zeros(1, np.int32))

    def clear(self) -> None:
        """Nothing to do: entries that are not in use do not change others."""

    def run(self, start: int, tokens: np.ndarray, last: int) -> np.ndarray:
        """Write tokens [n] at positions start, start + 1, ... of the cache, dropping everything from `start` on.

        Returns logits float32 [last, V] after each of the last `last` tokens, as a view that the next run overwrites.
        """
        n = len(tokens)
        self._roll_back(start, n)
        end = self._used + n
        self._entry[start : start + n] = np.arange(self._used, end)
        self._mask[0, self._used : end] = 1
        self._set("input_ids", np.array(tokens, np.int64)[None])
        self._set("attention_mask", self._mask[:, :end])
        self._set("position_ids", np.arange(start, start + n, dtype=np.int64)[None])
        self._set("logits_positions", np.arange(n - last, n, dtype=np.int64))
        infer(self._request)
        self._length = start + n
        self._used = end
        return self._request.get_output_tensor(0).data.reshape(last, -1)

    def _roll_back(self, start: int, n: int) -> None:
        """Keep the first `start` positions and make room for n more entries."""
        if start == 0:
            self._request.reset_state()
            self._used = 0
        else:
            self._mask[0, self._entry[start : self._length]] = 0
            if (start < self._length and not self._can_hide) or self._used + n > self._mask.shape[1]:
                self._keep(self._entry[:start])
        self._length = start

    def _keep(self, entries: np.ndarray) -> None:
        """Compact the states to `entries`."""
        for state in self._request.query_state():
            state.state = ov.Tensor(np.take(state.state.data, entries, axis=2))
        self._used = len(entries)
        self._entry[: self._used] = np.arange(self._used)
        self._mask[0, : self._used] = 1

    def _set(self, name: str, array: np.ndarray) -> None:
        if name in self._index:  # some architectures have no position_ids or beam_idx
            self._inputs[name] = tensor = ov.Tensor(array, shared_memory=True)
            self._request.set_input_tensor(self._index[name], tensor)


def _bytes_per_token(model: ov.Model, compiled: ov.CompiledModel) -> int:
    """Bytes of the cache per token, in the device's cache precision, or in the model's if the device reports none."""
    try:
        precision = compiled.get_property("KV_CACHE_PRECISION")
    except RuntimeError:  # not every device has this property
        precision = None
    total = 0
    for variable in model.get_variables():
        info = variable.get_info()
        heads, size = info.data_shape[1].get_length(), info.data_shape[3].get_length()
        total += heads * size * (info.data_type if precision in (None, ov.Type.dynamic) else precision).size
    return total
