"""Function-preserving expansion of a Llama, or an EAGLE-3 head, to a larger shape.

As in Net2Net (Chen et al. 2015, arXiv 1511.05641), the small model occupies the first channels, heads and neurons of
the large one, with its own int8 values, zero points and scales, so nothing is requantized. All other weights are
random. They have no effect because every matrix is block triangular:

    [ small  random ] [ x ]   [ small x ]
    [   0    random ] [ 0 ] = [    0    ]

Everything new is exactly zero wherever it is read: new hidden channels, value heads and neurons (their `up` half is
zero, whatever `gate` is), and the output of added layers. New query heads on an old key head do attend to something,
but the weights that read them are zero. An embedding row has one scale for all channels, so rows of the tokenizer's
tokens are zero, not random, in the new channels.

Rounding makes some of these zeros small numbers, which many random layers would amplify: with OpenVINO's 8-bit KV
cache, a model of 28 layers wrote other text. So the rows that compute zeros have small scales.

An EAGLE-3 head is expanded in the same way, with each part of the concatenations that it reads on its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np

from speculative.modelgen.eagle3_ir import Head
from speculative.modelgen.llama_ir import Layer, Llama, Matrix

NEVER = -1e4  # added to the logits of ids beyond the small model's
DAMPING = np.float16(2**-6)  # of the scales of new rows whose outputs are zero


@dataclass(frozen=True)
class Shape:
    """The dimensions of a Llama. `tied` is 1 if the embedding is also the LM head, else 0."""

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
        """Number of weights in matrices and norms."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * layer + (2 - self.tied) * self.vocabulary * self.hidden + self.hidden


def shape_of(llama: Llama) -> Shape:
    """The shape of a model."""
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


def shape_of_head(head: Head) -> Shape:
    """The shape of an EAGLE-3 head; `vocabulary` is the draft's."""
    return Shape(
        layers=1,
        hidden=len(head.norm),
        heads=head.heads,
        kv_heads=head.kv_heads,
        head_dim=head.head_dim,
        intermediate=len(head.up.values),
        vocabulary=len(head.targets),
        tied=0,
    )


def refuse_misfit(small: Shape, large: Shape) -> None:
    """Raise ValueError if `small` does not fit into `large`, or `large` is not a valid shape."""
    if large.head_dim % 2 or large.heads % large.kv_heads or large.tied > 1:
        raise ValueError(
            f"heads={large.heads}, kv_heads={large.kv_heads}, head_dim={large.head_dim}, tied={large.tied} is not a "
            "valid shape: heads must be a multiple of kv_heads, head_dim even, tied 0 or 1"
        )
    for field in fields(Shape):
        needed, given = getattr(small, field.name), getattr(large, field.name)
        if given < needed and field.name not in ("heads", "kv_heads", "tied"):
            raise ValueError(f"{field.name}={given} is too small to hold the function: give at least {needed}")
    serves, room = small.heads // small.kv_heads, large.heads // large.kv_heads
    needed = small.kv_heads * -(-serves // room)
    if large.kv_heads < needed:
        raise ValueError(
            f"heads={large.heads} with kv_heads={large.kv_heads} is too small to hold the function: with {room} "
            f"heads for each of them, give at least kv_heads={needed}"
        )


class Places:
    """Mapping from the large model's indices to the small model's.

    origin: the small model's index for each index of the large one, -1 for none. live: whether the value there may be
    nonzero. Weights that read values that are not live are arbitrary.
    """

    def __init__(self, origin: np.ndarray, live: np.ndarray | None = None):
        self.origin = origin
        self.used = origin >= 0
        self.live = self.used if live is None else live


def first(small: int, large: int) -> Places:
    """The small model's indices come first."""
    return Places(np.where(np.arange(large) < small, np.arange(large), -1))


def repeated(places: Places, size: int, times: int) -> Places:
    """Mappings of a concatenation of `times` equal parts, which have `size` indices each in the small model."""
    origins = [np.where(places.used, places.origin + i * size, -1) for i in range(times)]
    return Places(np.concatenate(origins), np.tile(places.live, times))


def head_places(small: Shape, large: Shape) -> tuple[Places, Places]:
    """Mappings of the channels of all query heads, and of all key (and value) heads.

    A key head keeps its query heads; if a key head serves fewer query heads in the large model, it is repeated for the
    rest. Halves of a head stay halves, as the rotary embedding rotates channel i with channel i + head_dim / 2.
    """
    serves, room = small.heads // small.kv_heads, large.heads // large.kv_heads
    query_head, key_head = np.full(large.heads, -1), np.full(large.kv_heads, -1)
    parts = [(key, begin) for key in range(small.kv_heads) for begin in range(0, serves, room)]
    for place, (key, begin) in enumerate(parts):
        count = min(room, serves - begin)
        query_head[place * room : place * room + count] = key * serves + begin + np.arange(count)
        key_head[place] = key
    channel = np.full((2, large.head_dim // 2), -1)
    channel[:, : small.head_dim // 2] = np.arange(small.head_dim).reshape(2, -1)

    def channels(head: np.ndarray) -> np.ndarray:
        known = (head[:, None] >= 0) & (channel.ravel() >= 0)
        return np.where(known, head[:, None] * small.head_dim + channel.ravel(), -1)

    keys = channels(key_head)
    live = np.repeat(keys >= 0, room, axis=0)  # every query head outputs values of its key head
    return Places(channels(query_head).ravel(), live.ravel()), Places(keys.ravel())


def grow(
    small: Matrix, rows: Places, columns: Places, generator: np.random.Generator, *, embed: bool, new_rows_zero: bool
) -> Matrix:
    """Create a matrix of the large model.

    Args:
        small: the small model's matrix; new rows have its mean scale, or `DAMPING` times that if they compute zeros.
        rows, columns: mappings of outputs and inputs.
        generator: source of the random weights.
        embed: whether to embed the small matrix, or use random weights only.
        new_rows_zero: whether the outputs of all other rows must be zero.
    """
    shape = (len(rows.origin), len(columns.origin))
    values = np.frombuffer(generator.bytes(shape[0] * shape[1]), np.uint8).reshape(shape).copy()
    zero_points = np.full((shape[0], 1), 128, np.uint8)
    scales = np.full((shape[0], 1), small.scales.mean(dtype=np.float32), np.float16)
    live = np.flatnonzero(columns.live)
    used = rows.used if embed else np.zeros(shape[0], bool)
    if new_rows_zero:
        values[np.ix_(~used, live)] = 128
        scales[~used] *= DAMPING
    origin = rows.origin[used]
    zero_points[used], scales[used] = small.zero_points[origin], small.scales[origin]
    source = columns.origin[live]
    values[np.ix_(used, live)] = np.where(source >= 0, small.values[origin][:, source], small.zero_points[origin])
    return Matrix(values, zero_points, scales)


class Expansion:
    """The parts of a model of shape `new` with the function of those of shape `old`, and random weights elsewhere."""

    def __init__(self, old: Shape, new: Shape, generator: np.random.Generator):
        self.hidden = first(old.hidden, new.hidden)
        self.neurons = first(old.intermediate, new.intermediate)
        self.queries, self.keys = head_places(old, new)
        self.share = old.hidden / new.hidden  # new channels are zero, so the mean square shrinks by this factor
        self.added_frequencies = (new.head_dim - old.head_dim) // 2
        self.generator = generator

    def matrix(
        self, like: Matrix, rows: Places, columns: Places, *, embed: bool = True, new_rows_zero: bool = True
    ) -> Matrix:
        return grow(like, rows, columns, self.generator, embed=embed, new_rows_zero=new_rows_zero)

    def norm(self, like: np.ndarray) -> np.ndarray:
        """Weights float32 [new.hidden] from those of the small model, [old.hidden]."""
        weights = self.generator.uniform(0.5, 1.5, len(self.hidden.origin)) * like.mean()
        weights[: len(like)] = like
        return (weights * np.sqrt(self.share)).astype(np.float32)

    def frequencies(self, like: np.ndarray) -> np.ndarray:
        """Rotary frequencies float32 [new.head_dim / 2] from those of the small model, [old.head_dim / 2]."""
        added = like[-1] * self.generator.uniform(0.1, 1, self.added_frequencies)
        return np.concatenate([like, added]).astype(np.float32)

    def layer(self, like: Layer, embed: bool) -> Layer:
        """A layer with the function of `like`, or, without `embed`, an added one, which changes nothing."""
        attended, activated = self.queries, self.neurons
        if not embed:  # the values and the `up` half of an added layer are zero, so its output is
            attended, activated = (Places(p.origin, np.zeros_like(p.live)) for p in (self.queries, self.neurons))
        return Layer(
            attention_norm=self.norm(like.attention_norm),
            q=self.matrix(like.q, self.queries, self.hidden, embed=embed, new_rows_zero=False),
            k=self.matrix(like.k, self.keys, self.hidden, embed=embed),
            v=self.matrix(like.v, self.keys, self.hidden, embed=embed),
            o=self.matrix(like.o, self.hidden, attended, embed=embed),
            feed_forward_norm=self.norm(like.feed_forward_norm),
            gate=self.matrix(like.gate, self.neurons, self.hidden, embed=embed, new_rows_zero=False),
            up=self.matrix(like.up, self.neurons, self.hidden, embed=embed),
            down=self.matrix(like.down, self.hidden, activated, embed=embed),
        )


def expand(small: Llama, shape: Shape, generator: np.random.Generator, progress: Callable[[], object]) -> Llama:
    """Expand `small` to `shape`, with the same function; calls progress() after each layer.

    Raises ValueError if it does not fit.
    """
    old = shape_of(small)
    refuse_misfit(old, shape)
    new = Expansion(old, shape, generator)
    layers = []
    for i in range(shape.layers):
        layers.append(new.layer(small.layers[i % old.layers], embed=i < old.layers))
        progress()
    tokens = first(old.vocabulary, shape.vocabulary)
    written = Places(new.hidden.origin, np.ones_like(new.hidden.live))  # an embedding row is written to all channels
    head = small.embedding if small.head is None else small.head
    return replace(
        small,
        embedding=new.matrix(small.embedding, tokens, written, new_rows_zero=False),
        layers=layers,
        norm=new.norm(small.norm),
        head=None if shape.tied else new.matrix(head, tokens, new.hidden, new_rows_zero=False),
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        frequencies=new.frequencies(small.frequencies),
        epsilon=small.epsilon * new.share,
        logits_bias=bias(tokens),
    )


def expand_head(small: Head, shape: Shape, vocabulary: int, generator: np.random.Generator) -> Head:
    """Expand an EAGLE-3 head to `shape`, with the same function, for the expansion of its main model with the same
    hidden size and `vocabulary` tokens. Added tokens of the draft vocabulary are never drafted.

    Raises ValueError if it does not fit.
    """
    old = shape_of_head(small)
    refuse_misfit(old, shape)
    if shape.vocabulary > vocabulary:
        raise ValueError(f"a draft vocabulary of {shape.vocabulary} tokens exceeds the main model's {vocabulary}")
    new = Expansion(old, shape, generator)
    others = np.setdiff1d(np.arange(vocabulary), small.targets)
    added = others[len(others) - (shape.vocabulary - old.vocabulary) :]  # the last: a d2t of zeros would look damaged
    targets = np.sort(np.concatenate([small.targets, added]))
    origin = np.full(len(targets), -1)
    origin[targets.searchsorted(small.targets)] = np.arange(old.vocabulary)
    tokens, both = Places(origin), repeated(new.hidden, old.hidden, 2)  # of the embedding and the hidden state
    return Head(
        fc=new.matrix(small.fc, new.hidden, repeated(new.hidden, old.hidden, 3)),
        q=new.matrix(small.q, new.queries, both, new_rows_zero=False),
        k=new.matrix(small.k, new.keys, both),
        v=new.matrix(small.v, new.keys, both),
        o=new.matrix(small.o, new.hidden, new.queries),
        gate=new.matrix(small.gate, new.neurons, new.hidden, new_rows_zero=False),
        up=new.matrix(small.up, new.neurons, new.hidden),
        down=new.matrix(small.down, new.hidden, new.neurons),
        lm_head=new.matrix(small.lm_head, tokens, new.hidden, new_rows_zero=False),
        hidden_norm=new.norm(small.hidden_norm),
        input_norm=new.norm(small.input_norm),
        feed_forward_norm=new.norm(small.feed_forward_norm),
        norm=new.norm(small.norm),
        targets=targets,
        layers=small.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        frequencies=new.frequencies(small.frequencies),
        epsilon=small.epsilon * new.share,
        attention_scale=small.attention_scale,
        logits_bias=bias(tokens),
    )


def bias(tokens: Places) -> np.ndarray | None:
    """The bias float32 of the logits that keeps added tokens from being generated; None without any."""
    return None if tokens.used.all() else np.where(tokens.used, 0, NEVER).astype(np.float32)
