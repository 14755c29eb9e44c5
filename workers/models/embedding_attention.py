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

import torch

from kernels.attention_scoring import Scoring
from kernels.cpu import kv_write as cpu_kv_write
from kernels.cpu import paged_attention as cpu_attention
from kernels.kv_write import kv_write
from kernels.packed_pages import PackedKeys, PackedValues
from kernels.paged_attention import paged_attention
from workers.kv.tensors import KvTensors, LayerKv
from workers.models.capture import RowCapture
from workers.models.inputs import ForwardInputs
from workers.models.lora import WithoutLora


class EmbeddingAttention(WithoutLora):
    """The model of the module's docstring, as a `Model`. float32."""

    dtype = torch.float32
    # With one layer and no norm or residual stream there are no hidden states.
    has_hidden_states = False
    takes_trees = True
    packs_kv = True
    batch_invariant = False
    graphable = False
    rotation_bytes = 0

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        vocab_size: int = 1024,
        num_heads: int = 2,
        num_kv_heads: int = 2,
        head_dim: int = 16,
    ) -> None:
        """Compute the table of embeddings: V * K * D elements. The number of heads is a multiple of K."""
        self.device = torch.device(device)
        self.vocab_size, self.num_heads = vocab_size, num_heads
        self.kv_layers: tuple[LayerKv, ...] = (LayerKv(num_kv_heads, head_dim, head_dim),)
        self._embeddings = embedding_table(vocab_size, num_kv_heads, head_dim).to(self.device)  # [V, K, D]
        self._group_size = num_heads // num_kv_heads
        self._scoring = Scoring(self.kv_layers[0].key_dim ** -0.5)
        self._head = self._embeddings.repeat_interleave(self._group_size, dim=1).flatten(1)  # [V, H * D]

    def forward(
        self, inputs: ForwardInputs, kv: KvTensors, capture: RowCapture | None = None
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
        queries = embedded if self._group_size == 1 else embedded.repeat_interleave(self._group_size, dim=1)
        k_pages, v_pages = kv.layer(0)
        if isinstance(k_pages, PackedKeys) and isinstance(v_pages, PackedValues):
            # Not by `kv_write` and `paged_attention`, whose checks cost more than they do here.
            cpu_kv_write.kv_write(embedded, embedded, k_pages, v_pages, inputs.slots)
            attended = torch.empty_like(queries)  # [T, H, D]
            cpu_attention.attend(attended, queries, k_pages, v_pages, inputs.attention, self._scoring)
        else:
            kv_write(embedded, embedded, k_pages, v_pages, inputs.slots)
            attended = paged_attention(queries, k_pages, v_pages, inputs.attention, scale=self._scoring.scale)
        rows, wanted = attended.flatten(1), inputs.wanted_rows
        return rows if wanted.shape == rows.shape[:1] else rows.index_select(0, wanted)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] in the model's dtype of rows [R, H * D] from `forward`; owned by the caller."""
        return hidden @ self._head.T


def embedding_table(vocab_size: int, num_kv_heads: int, head_dim: int) -> torch.Tensor:
    """The embeddings of all tokens: [V, K, D] float32."""
    pairs = num_kv_heads * head_dim // 2
    multipliers = torch.tensor([pow(3, pair + 1, vocab_size) for pair in range(pairs)])  # [K * D / 2]
    # Reduced as integers, so that the angles of large ids are as exact as those of small ones.
    turns = torch.outer(torch.arange(vocab_size), multipliers).remainder(vocab_size)  # [V, K * D / 2]
    angles = turns.double() * (2 * math.pi / vocab_size)
    table = torch.stack((angles.cos(), angles.sin()), dim=-1)  # [V, K * D / 2, 2]
    return table.float().view(vocab_size, num_kv_heads, head_dim)
