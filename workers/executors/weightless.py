"""The weightless executor: attention over the real paged pool, on embeddings computed from token ids.

Pages, scheduling and sampling are the same as for a real model, and the results can be checked by hand. For
tests, and for benchmarks of the gateway alone.
"""

from __future__ import annotations

from typing import Self

import torch

from workers.executors.base import ModelExecutor
from workers.executors.describe import describe, kv_shape
from workers.executors.engine import Engine
from workers.kv.sizing import choose_num_pages
from workers.kv.table import KvTable
from workers.kv.tensors import KvTensors
from workers.models.embedding_attention import EmbeddingAttention
from workers.runners.eager import EagerRunner


class PagedAttentionExecutor(ModelExecutor):
    """One attention layer, Q = K = V = embedding(token id). float32."""

    name = "paged-attention"

    @classmethod
    def create(cls, *, device: torch.device | str = "cpu", kv_pages: int | None = None) -> Self:
        """Allocates the pool. Raises KvSizingError if it does not fit."""
        model = EmbeddingAttention(device=device)
        shape = kv_shape(model.config, model.dtype)
        num_pages = choose_num_pages(kv_pages, KvTensors.page_bytes(**shape))
        kv = KvTensors(num_pages=num_pages, device=device, **shape)
        engine = Engine(KvTable(num_pages, kv.page_size), kv, EagerRunner(model, kv))
        return cls(describe(model.config, cls.name, model.dtype), engine)
