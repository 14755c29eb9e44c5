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
from workers.models.embedding_attention import EmbeddingAttention
from workers.models.model import ModelDescription, new_pages, page_bytes
from workers.runners.eager import EagerRunner


class PagedAttentionExecutor(ModelExecutor):
    """The model of `workers/models/embedding_attention.py`. float32."""

    name = "paged-attention"

    @classmethod
    def create(cls, *, device: torch.device | str = "cpu", kv_pages: int | None = None, **sizes: int) -> Self:
        """Allocates the pool. `sizes` are those of `EmbeddingAttention`.

        Raises:
            KvSizingError: The pool does not fit.
            ValueError: There is no model of these sizes.
        """
        model = EmbeddingAttention(device, **sizes)
        layer = model.kv_layers[0]
        description = ModelDescription(
            model_id=cls.name,
            architecture=cls.name,
            vocab_size=model.vocab_size,
            max_seq_len=32768,
            num_layers=len(model.kv_layers),
            hidden_size=model.num_heads * layer.key_dim,
            num_attention_heads=model.num_heads,
            num_kv_heads=layer.kv_heads,
            head_dim=layer.key_dim,
            dtype="float32",
        )
        kv = new_pages(model, choose_num_pages(kv_pages, page_bytes(model)))
        table = KvTable(kv.num_pages, kv.page_size)
        runner = EagerRunner(model, kv)
        return cls(description, Engine(table, kv, runner, batch_invariant=model.batch_invariant))
