"""The weightless executor: attention over the real paged pool, on embeddings computed from token ids.

Pages, scheduling and sampling are the same as for a real model, and the results can be checked by hand. For
tests, and for benchmarks of the gateway alone. Its tokens depend on all of a sequence's KV, so who compares
them notices any page that is not the right one.
"""

from __future__ import annotations

from typing import Self

import torch

from workers.executors.base import ModelExecutor
from workers.executors.engine import Engine
from workers.kv.sizing import choose_num_pages
from workers.kv.table import KvTable
from workers.models.embedding_attention import HEAD_DIM, NUM_HEADS, VOCAB_SIZE, EmbeddingAttention
from workers.models.model import ModelDescription, new_pages, page_bytes
from workers.runners.eager import EagerRunner


class PagedAttentionExecutor(ModelExecutor):
    """The model of `workers/models/embedding_attention.py`. float32."""

    name = "paged-attention"

    @classmethod
    def create(cls, *, device: torch.device | str = "cpu", kv_pages: int | None = None) -> Self:
        """Allocates the pool. Raises KvSizingError if that does not fit."""
        model = EmbeddingAttention(device)
        description = ModelDescription(
            model_id=cls.name,
            architecture=cls.name,
            vocab_size=VOCAB_SIZE,
            max_seq_len=32768,
            num_layers=1,
            hidden_size=NUM_HEADS * HEAD_DIM,
            num_attention_heads=NUM_HEADS,
            num_kv_heads=1,
            head_dim=HEAD_DIM,
            dtype="float32",
        )
        kv = new_pages(model, choose_num_pages(kv_pages, page_bytes(model)))
        table = KvTable(kv.num_pages, kv.page_size)
        runner = EagerRunner(model, kv)
        return cls(description, Engine(table, kv, runner, batch_invariant=model.batch_invariant))
