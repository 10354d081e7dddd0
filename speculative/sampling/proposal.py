"""A proposed draft token with the distribution it was sampled from."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from speculative.sampling.rejection_sampling import OneHot


class Proposal(NamedTuple):
    """A draft token, the distribution float32 [V] it was sampled from, and the draft's confidence, from 0 to 1."""

    token: int
    q: np.ndarray | OneHot
    confidence: Callable[[], float]
