"""The weightless executor: attention over the real paged pool, on embeddings computed from token ids.

Pages, scheduling and sampling are the same as for a real model, and the results can be checked by hand. For
tests, and for benchmarks of the gateway alone.
"""

from __future__ import annotations

from typing import Self

import torch

from workers.executors.base import ModelExecutor
from workers.executors.engine import Engine
from workers.kv.sizing import choose_num_pages
from workers.kv.table import KvTable
from workers.models.embedding_attention import EmbeddingAttention
from workers.models.model import ModelDescription, new_pages, page_bytes
from workers.runners.eager import EagerRunner


class PagedAttentionExecutor(ModelExecutor):
    """One attention layer, Q = K = V = embedding(token id). float32."""

    name = "paged-attention"

    @classmethod
    def create(cls, *, device: torch.device | str = "cpu", kv_pages: int | None = None) -> Self:
        """Allocates the pool. Raises KvSizingError if it does not fit."""
        model = EmbeddingAttention(device)
        layer = model.kv_layers[0]
        description = ModelDescription(
            model_id=cls.name,
            architecture=cls.name,
            vocab_size=model.vocab_size,
            max_seq_len=32768,
            num_layers=1,
            hidden_size=model.num_heads * layer.key_dim,
            num_attention_heads=model.num_heads,
            num_kv_heads=layer.kv_heads,
            head_dim=layer.key_dim,
            dtype="float32",
        )
        kv = new_pages(model, choose_num_pages(kv_pages, page_bytes(model)))
        return cls(description, Engine(KvTable(kv.num_pages, kv.page_size), kv, EagerRunner(model, kv)))
