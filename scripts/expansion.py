"""Grow a Llama to a larger shape without changing its function (Net2Net, Chen et al. 2015, arXiv 1511.05641, section 2).

The small model occupies the first channels, heads and neurons of the large one, with its own int8 values, zero points
and scales, so nothing is rounded anew. All else is random. It has no effect because every matrix is block triangular:

    [ small  random ] [ x ]   [ small x ]
    [   0    random ] [ 0 ] = [    0    ]

What the small model does not have stays exactly zero wherever it could be read: new hidden channels, value heads,
neurons (their `up` half is zero, whatever `gate` says), and what the added layers write. Only the embedding of the
tokens in use has zeros in place of random weights at the new channels, as each of its rows has one scale.
"""

from dataclasses import dataclass, fields, replace

import numpy as np
from llama_ir import Layer, Llama, Matrix

NEVER = -1e4  # logit added to the ids beyond the tokenizer's


@dataclass(frozen=True)
class Shape:
    """The dimensions of a Llama. `tied`: 1 where the embedding serves as the LM head too, else 0."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: int

    @property
    def parameters(self) -> int:
        """All weights of matrices and norms."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * layer + (2 - self.tied) * self.vocabulary * self.hidden + self.hidden


def shape_of(llama: Llama) -> Shape:
    """The shape a model has."""
    return Shape(
        layers=len(llama.layers),
        hidden=len(llama.norm),
        heads=llama.heads,
        kv_heads=llama.kv_heads,
        head_dim=llama.head_dim,
        intermediate=len(llama.layers[0].up.values),
        vocabulary=len(llama.embedding.values),
        tied=int(llama.head is None),
    )


def refuse_too_small(small: Shape, large: Shape) -> None:
    """Raise ValueError where `small` does not fit into `large`."""
    for field in fields(Shape):
        needed, given = getattr(small, field.name), getattr(large, field.name)
        if given < needed and field.name not in ("heads", "kv_heads", "tied"):
            raise ValueError(f"{field.name}={given} is too small to hold the function, which needs at least {needed}")
    if large.head_dim % 2 or large.heads % large.kv_heads:
        raise ValueError(f"head_dim={large.head_dim} must be even, heads={large.heads} a multiple of kv_heads")
    per_kv_head, room = small.heads // small.kv_heads, large.heads // large.kv_heads
    needed = small.kv_heads * -(-per_kv_head // room)
    if large.kv_heads < needed:
        raise ValueError(
            f"kv_heads={large.kv_heads} with heads={large.heads} is too small to hold the function: {needed} kv_heads "
            f"are needed where each serves {room} heads"
        )


class Places:
    """Which index of the small model stands at each index of the large one: `origin`, -1 for none.

    `zero` marks the indices whose value is always exactly zero: weights that read them are free.
    """

    def __init__(self, origin: np.ndarray, zero: np.ndarray | None = None):
        self.origin = origin
        self.used = origin >= 0
        self.zero = ~self.used if zero is None else zero


def first(small: int, large: int) -> Places:
    """The small model's come first."""
    return Places(np.where(np.arange(large) < small, np.arange(large), -1))


def expand(small: Llama, shape: Shape, generator: np.random.Generator, bar) -> Llama:
    """The same function at `shape`; `bar.update()` after each layer. Raises ValueError where it does not fit."""
    old = shape_of(small)
    refuse_too_small(old, shape)
    hidden = first(old.hidden, shape.hidden)
    neurons = first(old.intermediate, shape.intermediate)
    queries, keys = head_places(old, shape)

    def matrix(like: Matrix, rows: Places, columns: Places, embedded: bool, write: str) -> Matrix:
        return fill(like if embedded else None, like, rows, columns, write, generator)

    # the mean over more channels is smaller by old.hidden / shape.hidden: in epsilon and, as its root, in the weights
    share = old.hidden / shape.hidden

    def norm(weight: np.ndarray) -> np.ndarray:
        new = generator.uniform(0.5, 1.5, shape.hidden).astype(np.float32) * weight.mean()
        new[: old.hidden] = weight
        return (new * np.sqrt(share)).astype(np.float32)

    layers = []
    for i in range(shape.layers):
        embedded = i < old.layers
        like = small.layers[i % old.layers]
        layers.append(
            Layer(
                attention_norm=norm(like.attention_norm),
                q=matrix(like.q, queries, hidden, embedded, "anything"),
                k=matrix(like.k, keys, hidden, embedded, "zero"),
                v=matrix(like.v, keys, hidden, embedded, "zero"),
                o=matrix(like.o, hidden, queries if embedded else nothing(queries), embedded, "zero"),
                feed_forward_norm=norm(like.feed_forward_norm),
                gate=matrix(like.gate, neurons, hidden, embedded, "anything"),
                up=matrix(like.up, neurons, hidden, embedded, "zero"),
                down=matrix(like.down, hidden, neurons if embedded else nothing(neurons), embedded, "zero"),
            )
        )
        bar.update()

    tokens = first(old.vocabulary, shape.vocabulary)
    # an embedding row is a column of what it writes: its new channels must be zero, so none of its columns is free
    embedding = matrix(small.embedding, tokens, Places(hidden.origin, hidden.used & False), True, "anything")
    head = None
    if not shape.tied:
        head = matrix(small.head or small.embedding, tokens, hidden, True, "anything")
    half = old.head_dim // 2
    lowest = small.frequencies[-1]
    frequencies = np.concatenate([small.frequencies, lowest * generator.uniform(0.1, 1, shape.head_dim // 2 - half)])
    return replace(
        small,
        embedding=embedding,
        layers=layers,
        norm=norm(small.norm),
        head=head,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        frequencies=frequencies.astype(np.float32),
        epsilon=small.epsilon * share,
        logits_bias=np.where(tokens.used, 0, NEVER).astype(np.float32) if shape.vocabulary > old.vocabulary else None,
    )


def nothing(places: Places) -> Places:
    """The same indices where all values are zero: what an added layer's own attention and neurons give."""
    return Places(np.full_like(places.origin, -1))


def head_places(old: Shape, new: Shape) -> tuple[Places, Places]:
    """Where the rows of the query heads, and of the key and value heads, go.

    Each key head keeps its query heads; where it may serve fewer of them in the large model, it stands there again for
    the rest. Halves of a head stay halves, so that the rotary embedding turns the same pairs.
    """
    serves, room = old.heads // old.kv_heads, new.heads // new.kv_heads
    query_of, key_of = np.full(new.heads, -1), np.full(new.kv_heads, -1)
    place = 0
    for key in range(old.kv_heads):
        for begin in range(0, serves, room):
            queries = np.arange(begin, min(begin + room, serves)) + key * serves
            query_of[place * room : place * room + len(queries)] = queries
            key_of[place] = key
            place += 1
    within = np.full((2, new.head_dim // 2), -1)
    within[:, : old.head_dim // 2] = np.arange(old.head_dim).reshape(2, -1)
    within = within.ravel()

    def rows(head_of: np.ndarray) -> np.ndarray:
        both = (head_of[:, None] >= 0) & (within[None] >= 0)
        return np.where(both, head_of[:, None] * old.head_dim + within[None], -1)

    queries, keys = rows(query_of), rows(key_of)
    # a new query head on a used key head attends to real values, and so is not zero
    return Places(queries.ravel(), np.repeat(keys < 0, room, axis=0).ravel()), Places(keys.ravel())


def fill(
    small: Matrix | None, like: Matrix, rows: Places, columns: Places, write: str, generator: np.random.Generator
) -> Matrix:
    """A matrix of the large model from one of the small model, or from none.

    Args:
        small: the matrix to embed, None for an added layer.
        like: gives new rows their scale.
        rows, columns: where the small model's outputs and inputs stand.
        write: what a new row may give, "zero" or "anything".
    """
    shape = (len(rows.origin), len(columns.origin))
    values = np.frombuffer(generator.bytes(shape[0] * shape[1]), np.uint8).reshape(shape).copy()
    zero_points = np.full((shape[0], 1), 128, np.uint8)
    scales = np.full((shape[0], 1), like.scales.mean(dtype=np.float32), np.float16)
    silent = ~columns.zero  # where a row that must give zero, or what the small model has, cannot be random
    if small is not None:
        into, from_row = np.flatnonzero(rows.used), rows.origin[rows.used]
        zero_points[into], scales[into] = small.zero_points[from_row], small.scales[from_row]
        block = np.repeat(small.zero_points[from_row], int(silent.sum()), axis=1)
        known = columns.used[silent]
        block[:, known] = small.values[from_row][:, columns.origin[silent][known]]
        values[np.ix_(into, np.flatnonzero(silent))] = block
        new = ~rows.used
    else:
        new = np.ones(shape[0], bool)
    if write == "zero":
        values[np.ix_(np.flatnonzero(new), np.flatnonzero(silent))] = 128
    return Matrix(values, zero_points, scales)
