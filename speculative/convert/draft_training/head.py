"""EAGLE-3 head in torch: the published architecture (arXiv 2503.01840), and its training, by training-time test.

    h0  = fc(hidden states of three layers)
    x   = [input_layernorm(embedding of the next token), hidden_norm(h)]
    h'  = h + attention(x);  h'' = h' + mlp(post_attention_layernorm(h'));  logits = lm_head(norm(h''))

A draft step takes the h'' of the step before for h0. Names are those of the published checkpoints.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.functional import pad
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    repeat_kv,
)

from speculative.convert.draft_training import training
from speculative.convert.draft_training.main_model import Shape
from speculative.convert.draft_training.training import Batch, Training

STEPS = 3  # unrolled draft steps


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads, config.num_key_value_heads, config.head_dim
        )  # fmt: skip
        both, width = 2 * config.hidden_size, self.heads * self.head_dim
        self.q_proj = nn.Linear(both, width, bias=False)
        self.k_proj = nn.Linear(both, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(both, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(
        self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], cache: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """The attention of one unrolled step, whose keys and values are added to `cache`.

        Row t attends to the keys of the first step up to t, and to its own of the later steps.
        """
        batch, rows, _ = x.shape
        q, k, v = (
            projection(x).view(batch, rows, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *angles)
        group = self.heads // self.kv_heads
        cache.append((repeat_kv(k, group), repeat_kv(v, group)))
        (first_keys, first_values), *step_cache = cache
        later = torch.ones(rows, rows, dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ first_keys.transpose(-1, -2)).float().masked_fill(later, -math.inf)
        scores = torch.cat([scores, *((q * keys).sum(-1, keepdim=True).float() for keys, _ in step_cache)], -1)
        weights = (scores / math.sqrt(self.head_dim)).softmax(-1).to(v.dtype)
        output = weights[..., :rows] @ first_values
        for i, (_, values) in enumerate(step_cache):
            output = output + weights[..., rows + i, None] * values
        return self.o_proj(output.transpose(1, 2).reshape(batch, rows, -1))


class Layer(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config)
        self.mlp = LlamaMLP(config)
        self.hidden_norm = LlamaRMSNorm(size, epsilon)
        self.input_layernorm = LlamaRMSNorm(size, epsilon)
        self.post_attention_layernorm = LlamaRMSNorm(size, epsilon)


class Head(nn.Module):
    """The head for a main model whose three layers' hidden states have `states` numbers for each token."""

    def __init__(self, config: LlamaConfig, states: int):
        super().__init__()
        self.midlayer = Layer(config)
        self.fc = nn.Linear(states, config.hidden_size, bias=False)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotation = LlamaRotaryEmbedding(config)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                scale = 0.3 if name == "fc.weight" else 0.7
                nn.init.normal_(weight, std=scale / math.sqrt(weight.shape[1]))
        for output in (self.midlayer.self_attn.o_proj, self.midlayer.mlp.down_proj):  # nearly nothing at first
            nn.init.normal_(output.weight, std=0.01)

    def unroll(self, embeddings: torch.Tensor, states: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
        """Logits [batch, rows, draft vocabulary] of each of `steps` draft steps, the training-time test.

        `states` [batch, rows, size] are the main model's of tokens 0, 1, ...; `embeddings` [batch, rows, hidden] are
        those of tokens 1, 2, .... Row t of step i predicts token t + i + 2, if there is one.
        """
        layer = self.midlayer
        rows = states.shape[1]
        hidden = self.fc(states)
        cache: list[tuple[torch.Tensor, torch.Tensor]] = []
        for i in range(steps):
            embedded = pad(embeddings[:, i:], (0, 0, 0, i))
            positions = torch.arange(i, i + rows, device=states.device)[None]
            x = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(hidden)], -1)
            hidden = hidden + layer.self_attn(x, self.rotation(hidden, positions), cache)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            yield self.lm_head(self.norm(hidden))


class Beginning(NamedTuple):
    """What a new training starts with: the main model's token ids int64 [draft vocabulary] that the head drafts, and
    weights by name. The others start at random."""

    vocabulary: np.ndarray
    weights: dict[str, np.ndarray]


class HeadTraining(Training):
    """A head in training."""

    unrolled = STEPS
    ahead = 1

    def __init__(
        self,
        file: Path,
        shape: Shape,
        states: int,
        embeddings: np.ndarray,
        device: str,
        beginning: Callable[[], Beginning],
    ):
        """Continues with the state in `file`, if it exists, and otherwise starts with what `beginning` gives."""
        torch.manual_seed(0)
        saved_state = training.load(file, device)
        vocabulary, weights = (saved_state["vocabulary"].cpu().numpy(), {}) if saved_state else beginning()
        self.config = LlamaConfig(
            **shape._asdict(),
            vocab_size=len(embeddings),
            num_hidden_layers=1,
            tie_word_embeddings=False,
            architectures=["LlamaForCausalLMEagle3"],
            draft_vocab_size=len(vocabulary),
        )
        head = Head(self.config, states)
        with torch.no_grad():
            for name, values in weights.items():
                head.get_parameter(name).copy_(torch.from_numpy(values))
        super().__init__(file, saved_state, head, vocabulary, len(embeddings), device)
        self.head = head
        self._embeddings = torch.from_numpy(embeddings).to(device)

    def extra_state(self) -> dict[str, Any]:
        return {"vocabulary": torch.from_numpy(self.vocabulary)}

    def forward(self, batch: Batch) -> Iterator[torch.Tensor]:
        embeddings = self._embeddings[batch.tokens[:, 1:]].float()
        return self.head.unroll(embeddings, batch.states[:, :-1], self.unrolled)
