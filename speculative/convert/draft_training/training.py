"""Trains a head: training-time test, soft cross-entropy against the main model's probabilities, AdamW with cosine."""

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import LlamaConfig

from speculative.convert.draft_training.head import Head
from speculative.convert.draft_training.main_model import HeadShape, OutputLayer, Reading

STEPS = 3  # unrolled draft steps
STEP_WEIGHT = 0.8  # of each against the one before, as in EAGLE
RATE, WARM_UP, LEAST_RATE = 1e-3, 30, 0.05
LEAST_STEPS = 10  # of the optimizer, however short the time
CLIP = 0.5
BATCH, POOL = 1024, 256  # tokens of a batch, texts whose lengths are compared
SAVE_EVERY = 60.0  # seconds

TextStates = tuple[np.ndarray, Reading]


class Batch(NamedTuple):
    """Tensors [batch, tokens, ...]; `there` is false for padding."""

    tokens: torch.Tensor
    states: torch.Tensor
    ids: torch.Tensor
    probabilities: torch.Tensor
    there: torch.Tensor


class Scores(NamedTuple):
    """For each draft step, on held-out texts: how often the head's most likely token is the main model's, and how
    likely rejection sampling accepts at temperature 1 (the overlap of the two distributions)."""

    agreement: list[float]
    overlap: list[float]


def choose_vocabulary(counts: np.ndarray, size: int | None, coverage: float, most: int) -> np.ndarray:
    """The ids, sorted, of the `size` most frequent tokens; by default as many as have a share of `coverage`, a multiple
    of 64 of at most `most`. `counts` [vocabulary] is each token's frequency."""
    order = np.argsort(-counts, kind="stable")
    if not size:
        needed = int(np.searchsorted(np.cumsum(counts[order]), coverage * counts.sum())) + 1
        size = min(-(-needed // 64) * 64, most)
    return np.sort(order[: min(size, len(counts))])


class Training:
    """A head in training; `save` and the constructor keep and continue it."""

    def __init__(
        self,
        file: Path,
        shape: HeadShape,
        states: int,
        embeddings: np.ndarray,
        device: str,
        vocabulary: Callable[[], np.ndarray],
        output_layer: Callable[[np.ndarray], OutputLayer | None],
    ):
        """Continues with the state in `file`, if it exists. Otherwise `vocabulary` gives the draft vocabulary, and
        `output_layer` the main model's LM head, which the head's starts as."""
        torch.manual_seed(0)
        self._file, self._device = file, device
        kept = torch.load(file, map_location=device, weights_only=True) if file.exists() else None
        self.vocabulary: np.ndarray = kept["vocabulary"].cpu().numpy() if kept else vocabulary()
        self.config = LlamaConfig(
            **shape._asdict(),
            vocab_size=len(embeddings),
            num_hidden_layers=1,
            tie_word_embeddings=False,
            architectures=["LlamaForCausalLMEagle3"],
            draft_vocab_size=len(self.vocabulary),
        )
        self.head = Head(self.config, states)
        if not kept and (output := output_layer(self.vocabulary)):
            with torch.no_grad():
                self.head.lm_head.weight.copy_(torch.from_numpy(output.rows))
                self.head.norm.weight.copy_(torch.from_numpy(output.norm))
        self.head.to(device)
        self._optimizer = torch.optim.AdamW(self.head.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)
        self.steps, self.tokens = 0, 0
        if kept:
            self.head.load_state_dict(kept["head"])
            self._optimizer.load_state_dict(kept["optimizer"])
            self.steps, self.tokens = kept["steps"], kept["tokens"]
        self._embeddings = torch.from_numpy(embeddings).to(device)
        self._place = torch.full((len(embeddings),), -1, device=device)  # in the draft vocabulary
        self._place[torch.from_numpy(self.vocabulary).to(device)] = torch.arange(len(self.vocabulary), device=device)
        self._random = np.random.default_rng(self.steps)
        self._has_bf16 = device != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()

    @property
    def is_enough(self) -> bool:
        """Whether the head was trained at all."""
        return self.steps >= LEAST_STEPS

    def save(self) -> None:
        state = {
            "head": self.head.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "steps": self.steps,
            "tokens": self.tokens,
            "vocabulary": torch.from_numpy(self.vocabulary),
        }
        partial = self._file.with_suffix(".new")
        with partial.open("wb") as file:
            torch.save(state, file)
        partial.replace(self._file)

    def run(
        self,
        texts: list[TextStates],
        seconds_left: Callable[[], float],
        seconds: float,
        progress: Callable[[float], None],
    ) -> None:
        """Train until the time is up, at least LEAST_STEPS. `seconds` is the whole time of the training, over all runs.
        Calls `progress` with the loss of each step. The state is saved every minute and at the end, also by Ctrl-C."""
        batches = self._batches(texts)
        saved = time.monotonic()
        try:
            while (left := seconds_left()) > 0 or not self.is_enough:
                share = min(1 - left / seconds, self.steps / LEAST_STEPS)
                progress(self._step(next(batches), share))
                if time.monotonic() - saved > SAVE_EVERY:
                    self.save()
                    saved = time.monotonic()
        finally:
            self.save()

    def _step(self, texts: list[TextStates], share: float) -> float:
        """One optimizer step, when `share` of the training is over; returns the loss."""
        rate = LEAST_RATE + (1 - LEAST_RATE) * (1 + math.cos(math.pi * share)) / 2
        for group in self._optimizer.param_groups:
            group["lr"] = RATE * rate * min(1, (self.steps + 1) / WARM_UP)
        batch = self._batch(texts)
        loss = torch.zeros((), device=self._device)
        for i, logits in enumerate(self._logits(batch)):
            places, targets, there = self._targets(batch, i)
            known = targets.masked_fill(places < 0, 0)
            drafted = there & (places[..., 0] >= 0)  # the most likely token is in the draft vocabulary
            known = known / known.sum(-1, keepdim=True).clamp(min=1e-6)
            log_q = logits.gather(-1, places.clamp(min=0)) - logits.logsumexp(-1, keepdim=True)
            losses = -(known * log_q).sum(-1)
            loss = loss + STEP_WEIGHT**i * (losses * drafted).sum() / drafted.sum().clamp(min=1)
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), CLIP)
        self._optimizer.step()
        self.steps += 1
        self.tokens += int(batch.there.sum())
        return loss.item()

    @torch.no_grad()
    def evaluate(self, texts: list[TextStates]) -> Scores:
        """Scores on held-out texts, of at least 5 tokens each."""
        hits, overlap, rows = (np.zeros(STEPS) for _ in range(3))
        for text in texts:
            batch = self._batch([text])
            for i, logits in enumerate(self._logits(batch)):
                places, targets, there = self._targets(batch, i)
                q = logits.softmax(-1).gather(-1, places.clamp(min=0)).masked_fill(places < 0, 0)
                hits[i] += int((logits.argmax(-1) == places[..., 0])[there].sum())
                overlap[i] += float(torch.minimum(q, targets).sum(-1)[there].sum())
                rows[i] += int(there.sum())
        return Scores((hits / rows.clip(1)).tolist(), (overlap / rows.clip(1)).tolist())

    def _logits(self, batch: Batch) -> Iterator[torch.Tensor]:
        """Logits float32 [batch, rows, draft vocabulary] of each draft step, for rows that have a target."""
        embeddings = self._embeddings[batch.tokens[:, 1:]].float()
        rows = embeddings.shape[1]
        with torch.autocast(self._device.partition(":")[0], torch.bfloat16, enabled=self._has_bf16):
            for i, logits in enumerate(self.head.unroll(embeddings, batch.states[:, :-1], STEPS)):
                yield logits[:, : rows - i].float()

    def _targets(self, batch: Batch, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The main model's most likely tokens after each row of a draft step, as places in the draft vocabulary (-1:
        outside), and their probabilities, [batch, rows, top]; and whether the row is of a text."""
        after = slice(step + 1, None)
        return self._place[batch.ids[:, after]], batch.probabilities[:, after], batch.there[:, after]

    def _batch(self, texts: list[TextStates]) -> Batch:
        count, longest = len(texts), max(len(tokens) for tokens, _ in texts)
        tokens = np.zeros((count, longest), np.int64)
        there = np.zeros((count, longest), bool)
        parts = []
        for values in zip(*(reading for _, reading in texts), strict=True):
            parts.append(np.zeros((count, longest, values[0].shape[1]), values[0].dtype))
            for i, value in enumerate(values):
                parts[-1][i, : len(value)] = value
        for i, (ids, _) in enumerate(texts):
            tokens[i, : len(ids)] = ids
            there[i, : len(ids)] = True
        states, top, log_p = (torch.from_numpy(part).to(self._device) for part in parts)
        all_there = torch.from_numpy(there).to(self._device)
        all_tokens = torch.from_numpy(tokens).to(self._device)
        return Batch(all_tokens, states.float(), top.long(), log_p.float().exp(), all_there)

    def _batches(self, texts: list[TextStates]) -> Iterator[list[TextStates]]:
        """Endless batches of about BATCH tokens, of texts of similar length, in random order."""
        while True:
            order = self._random.permutation(len(texts))
            batches: list[list[TextStates]] = []
            for pool in (order[at : at + POOL] for at in range(0, len(order), POOL)):
                batch: list[TextStates] = []
                for i in sorted(pool, key=lambda i: len(texts[i][0])):
                    if batch and (len(batch) + 1) * len(texts[i][0]) > BATCH:
                        batches.append(batch)
                        batch = []
                    batch.append(texts[i])
                batches.append(batch)
            for place in self._random.permutation(len(batches)):
                yield batches[place]
