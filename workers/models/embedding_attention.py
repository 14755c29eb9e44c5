"""A model without weights: one layer of attention over embeddings that are a formula of the token id.

It serves tests and benchmarks of the code around a model. It uses the real paged KV cache, and each of its
numbers can be checked by hand. Let V be the vocabulary size and D the width of a head, which has D / 2 pairs.
Pair i of key-value head h has the multiplier m = 3^(h * D / 2 + i + 1) mod V, and token t has the embedding

    (cos a, sin a)    with    a = 2 * pi * (t * m mod V) / V

in elements 2 * i and 2 * i + 1 of the head. Query, key and value are this embedding; query heads that share a
key-value head are equal. So the score of tokens s and t in a head is the sum over its pairs of
cos(2 * pi * (s - t) * m / V), divided by sqrt(D). Positions matter for causality only: two sequences with the
same last token and the same tokens before it, in any order, give the same row. The logit of token t is the
dot product of the attended row with the embedding of t, over all query heads.

Dimension letters: T tokens of the batch; R wanted rows; H query heads; K key-value heads; D head width;
V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kernels.kv_write import kv_write
from kernels.paged_attention import paged_attention
from workers.kv.tensors import KvTensors
from workers.models.errors import ModelError
from workers.models.hidden_states import HiddenStateCapture
from workers.models.inputs import ForwardInputs


@dataclass(frozen=True, slots=True)
class EmbeddingConfig:
    """Sizes of the model without weights. Fields are named as in `ModelConfig`.

    Raises:
        ModelError: A size is invalid; the message names it.
    """

    vocab_size: int = 1024
    num_attention_heads: int = 2
    num_key_value_heads: int = 2
    head_dim: int = 16
    max_position_embeddings: int = 32768
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    model_type: str = "paged-attention"

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name}: must be at least 1, got {getattr(self, name)}")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ModelError(f"head_dim: must be even and at least 2, got {self.head_dim}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelError(
                f"num_attention_heads: must be a multiple of num_key_value_heads, "
                f"got {self.num_attention_heads} and {self.num_key_value_heads}"
            )

    @property
    def num_hidden_layers(self) -> int:
        """Layers of KV: one."""
        return 1

    @property
    def hidden_size(self) -> int:
        """The width of the rows that `forward` returns."""
        return self.num_attention_heads * self.head_dim


class EmbeddingAttention:
    """The model of the module's docstring, with the interface of `Decoder`."""

    # With one layer and no norm or residual stream there are no hidden states.
    has_hidden_states = False

    def __init__(
        self,
        config: EmbeddingConfig | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Compute the table of embeddings: V * K * D elements."""
        self.config = EmbeddingConfig() if config is None else config
        self.dtype = dtype
        self.device = torch.device(device)
        self._embeddings = embedding_table(self.config).to(device=self.device, dtype=dtype)  # [V, K, D]
        self._group_size = self.config.num_attention_heads // self.config.num_key_value_heads
        self._head = self._embeddings.repeat_interleave(self._group_size, dim=1).flatten(1)  # [V, H * D]

    @torch.inference_mode()
    def forward(
        self, inputs: ForwardInputs, kv: KvTensors, capture: HiddenStateCapture | None = None
    ) -> torch.Tensor:
        """Attend the batch.

        Mutates `kv`: writes the keys and values of the batch's tokens to their slots.

        Args:
            inputs: The batch. Tokens must be below `vocab_size`.
            kv: Pages of one layer, of this model's shape and dtype.
            capture: None: it has no hidden states.

        Returns:
            [R, H * D] the attended rows of `inputs.wanted_rows`, in that order.
        """
        assert capture is None, "this model has no hidden states"
        embedded = self._embeddings.index_select(0, inputs.token_ids)  # [T, K, D]
        k_pages, v_pages = kv.layer(0)
        kv_write(embedded, embedded, k_pages, v_pages, inputs.slots)
        attended = paged_attention(
            embedded.repeat_interleave(self._group_size, dim=1),  # [T, H, D]
            k_pages,
            v_pages,
            inputs.attention,
            scale=self.config.head_dim**-0.5,
        )
        return attended.flatten(1).index_select(0, inputs.wanted_rows)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] in the model's dtype of rows [R, H * D] from `forward`; owned by the caller."""
        return hidden @ self._head.T


def embedding_table(config: EmbeddingConfig) -> torch.Tensor:
    """The embeddings of all tokens.

    Returns:
        [V, K, D] float32.
    """
    vocab_size, half = config.vocab_size, config.head_dim // 2
    pairs = config.num_key_value_heads * half
    multipliers = torch.tensor([pow(3, pair + 1, vocab_size) for pair in range(pairs)])  # [K * D / 2]
    # Reduced as integers, so that the angles of large ids are as exact as those of small ones.
    turns = torch.outer(torch.arange(vocab_size), multipliers).remainder(vocab_size)  # [V, K * D / 2]
    angles = turns.double() * (2 * math.pi / vocab_size)
    table = torch.stack((angles.cos(), angles.sin()), dim=-1)  # [V, K * D / 2, 2]
    return table.float().view(vocab_size, config.num_key_value_heads, config.head_dim)
