"""The models that are measured on a GPU: those of `benchmarks.shapes`, and some of other families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks import shapes
from benchmarks.shapes import ELEMENT_BYTES, Shape


@dataclass(frozen=True, slots=True)
class ExpertsShape(Shape):
    """A Qwen3 with a mixture of experts instead of each MLP."""

    num_experts: int = 128
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768

    @property
    def layer_elements(self) -> int:
        """Elements of the matrices of one layer that one token uses."""
        return self._elements(self.num_experts_per_tok)

    def decode_bytes(self, batch: int, context_tokens: int) -> int:
        """As `Shape`, with the expected number of distinct experts for uniform, independent routing."""
        met = self.num_experts * (1 - (1 - self.num_experts_per_tok / self.num_experts) ** batch)
        more = self.num_hidden_layers * (self._elements(met) - self.layer_elements)
        return super(ExpertsShape, self).decode_bytes(batch, context_tokens) + ELEMENT_BYTES * int(more)

    def _elements(self, experts: float) -> int:
        heads = 2 * self.num_attention_heads + 2 * self.num_key_value_heads
        inner = int(3 * experts * self.moe_intermediate_size)
        return self.hidden_size * (heads * self.head_dim + inner + self.num_experts)

    def hf_config(self) -> dict[str, Any]:
        """The contents of config.json."""
        own = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True}
        return super(ExpertsShape, self).hf_config() | own


@dataclass(frozen=True, slots=True)
class WindowsShape(Shape):
    """A Gemma 3: every sixth layer attends to the whole context, the others to a window."""

    sliding_window: int = 1024

    def decode_bytes(self, batch: int, context_tokens: int) -> int:
        """As `Shape`, without keys and values before a window."""
        unread = self._sliding * max(0, context_tokens - self.sliding_window)
        unread *= 2 * self.num_key_value_heads * self.head_dim
        read = super(WindowsShape, self).decode_bytes(batch, context_tokens)
        return read - ELEMENT_BYTES * batch * unread

    def prefill_flops(self, batch: int, tokens: int) -> int:
        """As `Shape`, without scores before a window."""
        unseen = self._sliding * max(0, tokens - self.sliding_window) ** 2
        computed = super(WindowsShape, self).prefill_flops(batch, tokens)
        return computed - 2 * batch * self.num_attention_heads * self.head_dim * unseen

    @property
    def _sliding(self) -> int:
        """The number of layers with a window."""
        return self.num_hidden_layers - self.num_hidden_layers // 6

    def hf_config(self) -> dict[str, Any]:
        """The contents of config.json."""
        dense = ("use_sliding_window", "hidden_act")
        settings = super(WindowsShape, self).hf_config()
        own = {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]}
        return {name: value for name, value in settings.items() if name not in dense} | own


SHAPES = shapes.SHAPES | {
    shape.name: shape
    for shape in (
        ExpertsShape("qwen3-30b-a3b", 151_936, 2048, 6144, 48, 32, 4, 128, tie_word_embeddings=False),
        WindowsShape("gemma3-12b", 262_208, 3840, 15_360, 48, 16, 8, 256),
        ExpertsShape(
            "rehearsal-experts", 160, 64, 96, 1, 2, 1, 64, False, 128,
            num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48,
        ),
    )
}  # fmt: skip
