"""A model that keeps its KV cache as a state of the infer request, for devices without paged attention.

A state only grows. Rolling back therefore leaves the rejected entries where they are and hides them: attention mask 0,
and every token's position given explicitly. Nothing is copied until they fill a quarter of the cache; then the entries
in use are copied together once.
"""

import numpy as np
import openvino as ov

from speculative.models.gather_logits import keep_logits_at

SPARE = 4  # one entry of room for hidden entries to so many of capacity


class StatefulModel:
    """`run(start, tokens, last)` over an OpenVINO model and its states."""

    kind = "stateful"
    chunk = 1024  # tokens of a prompt in one inference: bounds the memory for activations

    def __init__(self, model: ov.Model, device: str, properties: dict, capacity: int, window: int):
        """`model` is changed in place. `capacity` is the longest sequence, in tokens.

        With a sliding `window` shorter than the cache (0 without one) rejected entries are cut off by copying: a window
        counts entries, hidden ones too.
        """
        self.capacity = capacity
        keep_logits_at(model, axis=1)
        compiled = ov.Core().compile_model(model, device, properties)
        self._request = compiled.create_infer_request()
        self._index = {name: i for i, port in enumerate(compiled.inputs) for name in port.names}
        room = capacity + capacity // SPARE
        self._can_hide = not 0 < window < room and {"attention_mask", "position_ids"} <= self._index.keys()
        self.cache_bytes = room * _bytes_per_token(model, compiled)
        self._mask = np.zeros((1, room), np.int64)  # of the entries: 1 = in use
        self._entry = np.zeros(capacity, np.int64)  # which one each position has
        self._length = 0  # positions in use
        self._used = 0  # entries, hidden ones too
        self._inputs: dict[str, ov.Tensor] = {}  # the request does not keep their arrays alive
        self._set("beam_idx", np.zeros(1, np.int32))

    def run(self, start: int, tokens: np.ndarray, last: int) -> np.ndarray:
        """Put tokens [n] at positions start, start + 1, ... of the cache and forget what was there and behind.

        Returns logits float32 [last, V] after the last `last` of them: a view that the next run overwrites.
        """
        n = len(tokens)
        self._roll_back(start, n)
        end = self._used + n
        self._entry[start : start + n] = np.arange(self._used, end)
        self._mask[0, self._used : end] = 1
        self._set("input_ids", np.array(tokens, np.int64)[None])
        self._set("attention_mask", self._mask[:, :end])
        self._set("position_ids", np.arange(start, start + n)[None])
        self._set("logits_positions", np.arange(n - last, n))
        self._request.start_async()
        self._request.wait()
        self._length = start + n
        self._used = end
        return self._request.get_output_tensor(0).data.reshape(last, -1)

    def _roll_back(self, start: int, n: int) -> None:
        """Leave the first `start` positions, with room for n more entries."""
        if start == 0:
            self._request.reset_state()
            self._used = 0
        else:
            self._mask[0, self._entry[start : self._length]] = 0
            if (start < self._length and not self._can_hide) or self._used + n > self._mask.shape[1]:
                self._keep(self._entry[:start])
        self._length = start

    def _keep(self, entries: np.ndarray) -> None:
        """Copy what is in use together."""
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
    """Bytes of the cache for each token, in the precision that the device keeps it in."""
    try:
        precision = compiled.get_property("KV_CACHE_PRECISION")
    except RuntimeError:  # not every device has a say in it
        precision = None
    total = 0
    for variable in model.get_variables():
        info = variable.get_info()
        heads, size = info.data_shape[1].get_length(), info.data_shape[3].get_length()
        total += heads * size * (precision or info.data_type).size
    return total
