"""The measured models: their sizes, and the minimum memory traffic and computation of a step."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

# Weights and KV are bfloat16 (llama.cpp keeps its KV in float16).
ELEMENT_BYTES = 2
DEFAULT_SHAPE = "qwen3-0.6b"


@dataclass(frozen=True, slots=True)
class Shape:
    """A Qwen3. Names are those of Hugging Face configs; `name` is what `--shape` calls it."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    tie_word_embeddings: bool = True
    max_position_embeddings: int = 40_960
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0

    @property
    def layer_elements(self) -> int:
        """Elements of the matrices of one layer."""
        heads = 2 * self.num_attention_heads + 2 * self.num_key_value_heads
        return self.hidden_size * (heads * self.head_dim + 3 * self.intermediate_size)

    def decode_bytes(self, batch: int, context_tokens: int) -> int:
        """The minimum bytes that a decode step reads: each matrix once (the head included), and the KV."""
        matrices = self.num_hidden_layers * self.layer_elements + self.vocab_size * self.hidden_size
        return ELEMENT_BYTES * matrices + self.kv_bytes(batch * context_tokens)

    def kv_bytes(self, tokens: int) -> int:
        """The KV of this many tokens."""
        return ELEMENT_BYTES * tokens * 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim

    def prefill_flops(self, batch: int, tokens: int) -> int:
        """The minimum FLOP of a prefill of `batch` prompts: causal attention, one row of logits each."""
        matrices = 2 * self.num_hidden_layers * self.layer_elements * tokens
        # Scores and sums, over half of the square.
        attention = 2 * self.num_hidden_layers * self.num_attention_heads * self.head_dim * tokens * tokens
        return batch * (matrices + attention + 2 * self.vocab_size * self.hidden_size)

    def hf_config(self) -> dict[str, Any]:
        """The contents of config.json. Without an end token, so that loops run for all their steps."""
        settings = {k: v for k, v in asdict(self).items() if k != "name"}
        return settings | {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "use_sliding_window": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": None,
            "eos_token_id": None,
        }


# The last two are for testing the suite, and the GPU suite on a CPU. Their figures are meaningless.
SHAPES = {
    shape.name: shape
    for shape in (
        Shape(DEFAULT_SHAPE, 151_936, 1024, 3072, 28, 16, 8, 128),
        Shape("qwen3-4b", 151_936, 2560, 9728, 36, 32, 8, 128),
        Shape("qwen3-8b", 151_936, 4096, 12_288, 36, 32, 8, 128, tie_word_embeddings=False),
        Shape("qwen3-14b", 151_936, 5120, 17_408, 40, 40, 8, 128, tie_word_embeddings=False),
        Shape("tiny", 2048, 128, 256, 2, 4, 2, 32),
        Shape("rehearsal", 160, 64, 96, 1, 2, 1, 64, max_position_embeddings=128),
    )
}
