"""Layout of a model's KV cache, read from its IR: its size per token, and whether it can be rolled back."""

from typing import NamedTuple

import openvino as ov


class KvCache(NamedTuple):
    """One key and one value of `heads` x `head_size` numbers for each layer and token (the largest ones)."""

    layers: int
    heads: int  # of keys and values: fewer than the query's with grouped-query attention
    head_size: int
    numbers: int  # for each token, over all layers, keys and values

    def bytes_per_token(self, precision: ov.Type) -> int:
        """Bytes in `precision`; 8-bit caches also hold scales and zero points, up to a quarter more (head size 32)."""
        return self.numbers * 5 // 4 if precision.size == 1 else self.numbers * precision.size


def read(model: ov.Model) -> KvCache:
    """Read the layout. Raises ValueError if the model has no KV cache, or a state that cannot be cut to fewer tokens.

    A key or value cache has an entry for each token; other states merge all tokens into one (linear attention, SSM).
    """
    states = [variable.get_info() for variable in model.get_variables()]
    if not states:
        raise ValueError(
            "the model has no KV cache: export it with `optimum-cli export openvino` (which makes it stateful)"
        )
    for state in states:
        shape = state.data_shape
        if shape.rank.get_length() != 4 or not shape[2].is_dynamic:
            raise ValueError(
                f"the model keeps a state that cannot be rolled back ({state.variable_id}: linear attention or a state "
                "space model): speculative decoding needs an attention cache"
            )
    sizes = [(state.data_shape[1].get_length(), state.data_shape[3].get_length()) for state in states]
    heads, head_size = max(sizes, key=lambda size: size[0] * size[1])
    return KvCache(len(states) // 2, heads, head_size, sum(a * b for a, b in sizes))
