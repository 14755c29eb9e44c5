"""The weightless executor: attention over the real paged pool, on embeddings computed from token ids.

Everything but the weights is real (pages, scheduling, sampling), and every number can be checked by hand.
For tests, and for benchmarks of the gateway alone.
"""

from __future__ import annotations

import torch

from workers.executors.base import ModelExecutor
from workers.executors.info import ExecutorInfo
from workers.kv.sizing import choose_num_pages
from workers.kv.table import KvTable
from workers.kv.tensors import KvTensors
from workers.models.backends import active_kernels
from workers.models.embedding_attention import EmbeddingAttention
from workers.runners.eager import EagerRunner

PAGE_SIZE = 16


class PagedAttentionExecutor(ModelExecutor):
    """One attention layer, Q = K = V = embedding(token id). float32."""

    @classmethod
    def create(
        cls, *, device: torch.device | str = "cpu", kv_pages: int | None = None
    ) -> PagedAttentionExecutor:
        """Allocates the pool. Raises KvSizingError for one that does not fit."""
        device = torch.device(device)
        model = EmbeddingAttention(device=device)
        config = model.config
        shape = {
            "num_layers": config.num_hidden_layers,
            "page_size": PAGE_SIZE,
            "kv_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
        }
        bytes_per_page = KvTensors.page_bytes(dtype=model.dtype, **shape)
        num_pages = choose_num_pages(kv_pages, bytes_per_page)
        kv = KvTensors(num_pages=num_pages, dtype=model.dtype, device=device, **shape)
        runner = EagerRunner(model, kv)
        info = ExecutorInfo(
            executor="paged-attention",
            runner=runner.name,
            kernels=active_kernels(model.dtype, device),
            device=str(device),
            dtype="float32",
            model_id="paged-attention",
            architecture="paged-attention",
            vocab_size=config.vocab_size,
            max_seq_len=config.max_position_embeddings,
            num_layers=1,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
        )
        return cls(info, KvTable(num_pages, PAGE_SIZE), kv, runner)
