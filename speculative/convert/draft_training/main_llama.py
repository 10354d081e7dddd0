"""The main model's graph as that of a Llama, a Qwen2 or a Qwen3: its layers, sizes and hidden states."""

from typing import Any

from speculative.convert.draft_training import llama_weights
from speculative.convert.draft_training.main_model import Forward, MainModel
from speculative.models.config import read_config, rope
from speculative.models.eagle3_graph import last_dimension


class MainLlama:
    """The decoder layers that are found in the graph of `main`."""

    def __init__(self, main: MainModel):
        """Raises ValueError if the graph is of another architecture."""
        self.main = main
        self.layers = llama_weights.find_layers(main.graph)
        has_norms = "self_attn.q_norm.weight" in self.layers[0].norms
        if has_norms and self.layers[0].biases:
            raise ValueError("its attention has both biases and norms")
        self.architecture = "qwen3" if has_norms else "qwen2" if self.layers[0].biases else "llama"

    def hidden_states(self, **properties: str) -> Forward:
        """Compile the main model to give the embeddings of a text, the hidden states after each layer, and logits."""
        graph = self.main.graph.clone()
        layers = llama_weights.find_layers(graph)
        logits = graph.output("logits").get_node().input_value(0).get_node()
        outputs = [layers[0].before, *(layer.after for layer in layers), logits]
        return Forward(graph, outputs, self.main.spec, **properties)

    def config(self) -> dict[str, Any]:
        """Its config for transformers, but for the number of layers."""
        first = self.layers[0]
        sizes = {name: last_dimension(node) for name, node in first.matrices.items()}
        return self.main.shape._asdict() | {
            "vocab_size": self.main.vocabulary,
            "head_dim": first.head_dim,
            "num_attention_heads": sizes["self_attn.q_proj.weight"] // first.head_dim,
            "num_key_value_heads": sizes["self_attn.k_proj.weight"] // first.head_dim,
            "intermediate_size": sizes["mlp.gate_proj.weight"],
            "rope_scaling": rope(read_config(self.main.spec.folder))[1],
        }
