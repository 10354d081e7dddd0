"""Acceptance of draft tokens: the probability that the main model accepts one, learned from verified tokens."""


class AcceptanceEstimate:
    """Learns the acceptance probability of a draft token, given that those before it were accepted.

    Draft tokens are counted by the draft's confidence in them (as in Mamou et al. 2024, arXiv 2405.04304), with
    exponential decay. The prior of a confidence is that rejections are proportional to 1 - confidence, by a factor
    learned from all draft tokens. `is_due` reports that no token was drafted for long, so that one should be, as a
    probe.
    """

    BINS = 8  # of the draft's confidence
    DECAY = 0.99  # decay of the statistics per judged draft token
    PRIOR = 4.0  # weight of the prior, in draft tokens
    BIN_PRIOR = 16.0  # weight of the prior of a confidence bin, in draft tokens
    DOUBT_PRIOR = 16.0  # weight of the prior of rejections by doubt, in draft tokens
    TYPICAL_DOUBT = 0.35  # mean of 1 - confidence for that prior: 0.2 to 0.5 for the greedy drafts of three pairs
    PRIOR_ACCEPTANCE = 0.7
    can_use_model = True  # whether the draft model can propose the next token
    copies = False  # whether the next draft token needs no draft model although there is one
    PROBE_FIRST, PROBE_LAST = 8, 64  # plain iterations between probes; doubled after each unsuccessful one

    def __init__(
        self,
        prior: float = PRIOR_ACCEPTANCE,
        pool: "AcceptanceEstimate | None" = None,
        prior_decays: bool = False,
    ):
        """`prior` is the acceptance before any draft token is judged. With `pool`, the estimate over all requests, the
        prior is its acceptance, and it learns from this request's draft tokens, too.

        With `prior_decays`, the weight of the prior decays like that of any draft token, which suits a single request.
        Otherwise it is constant, which suits a request with a pool, because the pool continues to learn, and the pool
        itself, because the next request may have a higher acceptance.
        """
        self._prior = prior
        self._pool = pool
        self._prior_weight = 0.0 if prior_decays else self.PRIOR  # constant weight of the prior
        self._all_judged = self.PRIOR - self._prior_weight
        self._all_accepted = self._all_judged * prior
        # sums over judged draft tokens: of 1 - confidence, and of those rejected
        self._doubt = self.DOUBT_PRIOR * self.TYPICAL_DOUBT
        self._rejected = self.DOUBT_PRIOR * (1 - prior)
        # by confidence bin; plain numbers: the main model has evicted the code of numpy's functions from the CPU caches
        self._judged = [0.0] * self.BINS
        self._accepted = [0.0] * self.BINS
        self.judged = self.accepted = 0  # draft tokens up to the first rejected one of each iteration; without decay
        self.plain = 0  # consecutive iterations without a draft
        self._probe_every = self.PROBE_FIRST
        self.begin()

    def begin(self) -> None:
        """Start an iteration."""
        self._bins: list[int] = []  # confidence bins of this iteration's draft tokens
        self._next: int | None = None  # confidence bin of the next draft token, if known
        self.survival = 1.0  # probability that all of them are accepted

    @property
    def drafted(self) -> int:
        """Draft tokens in this iteration whose confidence is known."""
        return len(self._bins)

    @property
    def drafted_acceptance(self) -> list[float]:
        """The acceptance probability of each draft token, given that those before it are accepted."""
        return [self._bin_acceptance(bin_) for bin_ in self._bins]

    @property
    def is_due(self) -> bool:
        """Whether a probe is due: no token was drafted for long, and the confidence in the next one is not known."""
        return self._next is None and self.plain >= self._probe_every

    def set_next(self, confidence: float) -> None:
        """Record the draft's `confidence` in the next draft token, which is not random and may be declined."""
        self._next = self._bin(confidence)

    def draft(self, confidence: float) -> None:
        """Record a draft token and the draft's `confidence` in it, from 0 to 1."""
        self._bins.append(self._bin(confidence))
        self._next = None
        self.survival *= self._bin_acceptance(self._bins[-1])

    def observe_declined(self, was_correct: bool) -> None:
        """Record whether the foreseen token, which was not drafted, was the next one after the accepted ones."""
        assert self._next is not None
        for estimate in (self, self._pool) if self._pool else (self,):
            estimate._count(self._next, was_correct)

    def update(self, drafted: int, accepted: int) -> None:
        """Record an iteration's outcome: of `drafted` draft tokens, the first `accepted` ones were accepted."""
        judged = min(drafted, accepted + 1)
        for estimate in (self, self._pool) if self._pool else (self,):
            for i, bin_ in enumerate(self._bins[:judged]):
                estimate._count(bin_, i < accepted)
            estimate.judged += judged
            estimate.accepted += accepted
        if not drafted:
            self.plain += 1
        elif self.plain:  # this was a probe
            was_correct = accepted == drafted
            self.plain = self._probe_every if was_correct else 0  # after a success, probe again at once
            self._probe_every = self.PROBE_FIRST if was_correct else min(2 * self._probe_every, self.PROBE_LAST)

    def _count(self, bin_: int, was_accepted: bool) -> None:
        self._judged = [judged * self.DECAY for judged in self._judged]
        self._judged[bin_] += 1
        self._accepted = [accepted * self.DECAY for accepted in self._accepted]
        self._accepted[bin_] += was_accepted
        self._doubt = self._doubt * self.DECAY + self._doubt_of(bin_)
        self._rejected = self._rejected * self.DECAY + (not was_accepted)
        self._all_judged = self._all_judged * self.DECAY + 1
        self._all_accepted = self._all_accepted * self.DECAY + was_accepted

    def mean(self) -> float:
        """The probability that the next draft token is accepted, whatever the draft's confidence in it."""
        prior = self._pool.mean() if self._pool else self._prior
        return (self._all_accepted + self._prior_weight * prior) / (self._all_judged + self._prior_weight)

    def next(self) -> float:
        """The probability that the next draft token is accepted: by its confidence, if that is known."""
        return self.mean() if self._next is None else self._bin_acceptance(self._next)

    def _bin(self, confidence: float) -> int:
        return min(int(confidence * self.BINS), self.BINS - 1)

    def _doubt_of(self, bin_: int) -> float:
        """1 - confidence, at the centre of the bin."""
        return 1 - (bin_ + 0.5) / self.BINS

    def _bin_acceptance(self, bin_: int) -> float:
        return (self._accepted[bin_] + self.BIN_PRIOR * self._bin_prior(bin_)) / (self._judged[bin_] + self.BIN_PRIOR)

    def _bin_prior(self, bin_: int) -> float:
        """The acceptance in a bin, as far as the draft tokens in it do not show it."""
        if self._pool:
            return self._pool._bin_acceptance(bin_)
        return max(1 - self._rejected / self._doubt * self._doubt_of(bin_), 0.0)

    def describe(self) -> str:
        """The measured acceptance, in a few words."""
        return describe_acceptance(self.judged, self.accepted)


def describe_acceptance(judged: int, accepted: int) -> str:
    """The acceptance of `judged` draft tokens, in a few words."""
    if not judged:
        return "no draft token verified yet"
    return f"per-token acceptance {accepted / judged:.2f} over {count_of_tokens(judged)}"


def count_of_tokens(n: int) -> str:
    """A number of draft tokens: "1 draft token", "2 draft tokens"."""
    return f"{n} draft token{'' if n == 1 else 's'}"
