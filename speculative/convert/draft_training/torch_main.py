"""The main model on a torch device, for online training: it reads and writes whole batches of texts there."""

from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from speculative.convert.draft_training import torch_llama
from speculative.convert.draft_training.main_llama import MainLlama
from speculative.convert.draft_training.main_model import MainModel
from speculative.convert.errors import ConvertError

ROWS = 4096  # of logits at a time

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""The attention of a layer's queries, keys and values [batch, heads, tokens, head size], given the layer's index."""


class TorchMain:
    """A main model of the Llama, Qwen2 or Qwen3 architecture, with bfloat16 weights on a GPU. A draft reads its hidden
    states after `layers`."""

    def __init__(self, main: MainModel, layers: list[int], device: str):
        """Raises ConvertError if the main model has another architecture, or does not fit on the device."""
        try:
            llama = MainLlama(main)
            if problem := torch_llama.difference(llama):
                raise ValueError(problem)
        except ValueError as error:
            raise ConvertError(
                "--online is for main models of the Llama, Qwen2 and Qwen3 architectures, of which "
                f"{main.spec.folder} is none ({error}); leave it out",
                2,
            ) from error
        self.device, self.layers = device, layers
        self.dtype = _dtype(device)
        model = torch_llama.build(llama, [*range(len(llama.layers))])
        frequencies = model.model.rotary_emb.inv_freq  # stay float32: they are multiplied by positions
        try:
            self.llama = model.to(device, self.dtype).eval()
            self.llama.model.rotary_emb.inv_freq = frequencies.to(device)
        except torch.OutOfMemoryError as error:
            raise ConvertError(f"{main.spec.folder} does not fit into the memory of --device {device}") from error
        self.llama.requires_grad_(False)
        config = self.llama.config
        self.head_dim, self.kv_heads = config.head_dim, config.num_key_value_heads
        self.depth, self.vocabulary = config.num_hidden_layers, config.vocab_size

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """For `tokens` [batch, tokens] the hidden states that the draft reads [batch, tokens, size], and the normed
        last ones [batch, tokens, hidden]."""
        model, states = self.llama.model, {}
        hidden = model.embed_tokens(tokens)
        angles = model.rotary_emb(hidden, positions)
        for index, layer in enumerate(model.layers):
            attention, x = layer.self_attn, layer.input_layernorm(hidden)
            q, k, v = (
                projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
                for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            if self.llama.config.model_type == "qwen3":
                q, k = attention.q_norm(q), attention.k_norm(k)
            q, k = apply_rotary_pos_emb(q, k, *angles)
            attended = attend(index, q, k, v)
            hidden = hidden + attention.o_proj(attended.transpose(1, 2).flatten(2))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            if index in self.layers:
                states[index] = hidden
        return torch.cat([states[index] for index in self.layers], -1), model.norm(hidden)

    @torch.no_grad()
    def read(
        self, tokens: torch.Tensor, mask: torch.Tensor, top: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """For texts [batch, tokens] the hidden states that the draft reads [batch, tokens, size]. For tokens in `mask`
        also the `top` most likely next tokens and their probabilities, in order [batch, tokens, top]; 0 for others."""

        def attend(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        states, last = self.forward(tokens, torch.arange(tokens.shape[1], device=self.device)[None], attend)
        ids = torch.zeros(*tokens.shape, top, dtype=torch.long, device=self.device)
        probabilities = torch.zeros(ids.shape, device=self.device)
        rows = [self.llama.lm_head(part).float().log_softmax(-1).topk(top, dim=-1) for part in last[mask].split(ROWS)]
        ids[mask] = torch.cat([best.indices for best in rows])
        probabilities[mask] = torch.cat([best.values for best in rows]).exp()
        return states, ids, probabilities


class SlotCache:
    """Keys and values of `slots` texts of up to `length` tokens, each with its own position."""

    def __init__(self, main: TorchMain, slots: int, length: int):
        shape = (main.depth, slots, main.kv_heads, length, main.head_dim)
        self._main = main
        self._keys, self._values = (torch.zeros(shape, dtype=main.dtype, device=main.device) for _ in range(2))
        self._rows = torch.arange(slots, device=main.device)
        self._columns = torch.arange(length, device=main.device)

    @staticmethod
    def bytes_each(main: TorchMain, length: int) -> int:
        """Bytes of a slot, with its logits during a step."""
        return 2 * main.depth * main.kv_heads * length * main.head_dim * main.dtype.itemsize + 32 * main.vocabulary

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits float32 [slots, vocabulary] after `tokens` [slots] at `positions` [slots], which are stored."""
        later = self._columns > positions[:, None, None, None]

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys, values = self._keys[layer], self._values[layer]
            keys[self._rows, :, positions] = k[:, :, 0]
            values[self._rows, :, positions] = v[:, :, 0]
            grouped = q.reshape(len(q), self._main.kv_heads, -1, self._main.head_dim) * self._main.head_dim**-0.5
            scores = (grouped @ keys.transpose(-1, -2)).masked_fill(later, -torch.inf)
            return (scores.softmax(-1) @ values).reshape(q.shape)

        _, last = self._main.forward(tokens[:, None], positions[:, None], attend)
        return self._main.llama.lm_head(last[:, 0]).float()


def _dtype(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.bfloat16
