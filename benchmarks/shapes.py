"""The models that are measured: their sizes, and what a step on them must read and compute at least."""

from __future__ import annotations

from dataclasses import asdict, dataclass

# Weights and KV are bfloat16 (llama.cpp keeps its KV in float16).
ELEMENT_BYTES = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """A Qwen3. Names are those of Hugging Face configs.

    Attributes:
        name: What `--shape` calls it.
    """

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 40_960
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    tie_word_embeddings: bool = True

    @property
    def layer_elements(self) -> int:
        """Elements of the matrices of one layer."""
        heads = 2 * self.num_attention_heads + 2 * self.num_key_value_heads
        return self.hidden_size * (heads * self.head_dim + 3 * self.intermediate_size)

    @property
    def weight_bytes(self) -> int:
        """What a decode step reads of the weights: every matrix once; of the embedding, only as the head."""
        matrices = self.num_hidden_layers * self.layer_elements + self.vocab_size * self.hidden_size
        return ELEMENT_BYTES * matrices

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * ELEMENT_BYTES * self.num_hidden_layers * self.num_key_value_heads * self.head_dim

    def decode_bytes(self, batch: int, context_tokens: int) -> int:
        """What one decode step of `batch` sequences reads at least."""
        return self.weight_bytes + batch * context_tokens * self.kv_bytes_per_token

    def prefill_flops(self, batch: int, tokens: int) -> int:
        """What a prefill of `batch` prompts computes at least: causal attention, one row of logits each."""
        matrices = 2 * self.num_hidden_layers * self.layer_elements * tokens
        width = self.num_attention_heads * self.head_dim
        # Scores and sums, over half of the square.
        attention = 2 * self.num_hidden_layers * width * tokens * tokens
        return batch * (matrices + attention + 2 * self.vocab_size * self.hidden_size)

    def hf_config(self) -> dict[str, object]:
        """The contents of config.json."""
        settings = {k: v for k, v in asdict(self).items() if k != "name"}
        return settings | {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "use_sliding_window": False,
            "torch_dtype": "bfloat16",
            # No end token: loops run for as many steps as they are told to.
            "bos_token_id": None,
            "eos_token_id": None,
        }


_QWEN3 = {"vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128}
DEFAULT_SHAPE = "qwen3-0.6b"
SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            name=DEFAULT_SHAPE,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            **_QWEN3,
        ),
        Shape(
            name="qwen3-8b",
            hidden_size=4096,
            intermediate_size=12_288,
            num_hidden_layers=36,
            num_attention_heads=32,
            tie_word_embeddings=False,
            **_QWEN3,
        ),
        Shape(
            name="qwen3-14b",
            hidden_size=5120,
            intermediate_size=17_408,
            num_hidden_layers=40,
            num_attention_heads=40,
            tie_word_embeddings=False,
            **_QWEN3,
        ),
        # For trying the suite: its figures mean nothing.
        Shape(
            name="tiny",
            vocab_size=2048,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
        ),
        # Likewise for a GPU's, in Triton's interpreter.
        Shape(
            name="rehearsal",
            vocab_size=160,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=64,
            max_position_embeddings=128,
        ),
    )
}
