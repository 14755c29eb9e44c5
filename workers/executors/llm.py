"""The executor of decoder-only language models, loaded from a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from workers.executors.base import ModelExecutor
from workers.executors.info import ExecutorInfo
from workers.kv.sequence import SequenceTable
from workers.kv.sizing import choose_num_pages
from workers.kv.tensors import KvTensors
from workers.models.backends import active_kernels
from workers.models.weights import LoadedModel, load_model
from workers.runners.eager import EagerRunner

PAGE_SIZE = 16


class LlmExecutor(ModelExecutor):
    """Any decoder-only model that `workers/models` knows."""

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        dtype: str = "auto",
        device: torch.device | str = "cpu",
        kv_blocks: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> LlmExecutor:
        """Loads the weights and allocates the pool.

        dtype: "auto" (the model's own), "bfloat16", "float16" or "float32", for weights and KV.
        kv_blocks: pages of 16 tokens; None sizes the pool from free memory.
        progress: called with (done_bytes, total_bytes) while weights are read.

        Raises ModelError for a directory that cannot be served, KvSizingError for a pool that does not fit.
        """
        device = torch.device(device)
        loaded = load_model(directory, dtype, device, progress, pack=True)
        config, weights_dtype = loaded.config, loaded.decoder.dtype
        shape = {
            "num_layers": config.num_hidden_layers,
            "page_size": PAGE_SIZE,
            "kv_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
        }
        bytes_per_page = KvTensors.page_bytes(dtype=weights_dtype, **shape)
        num_pages = choose_num_pages(kv_blocks, bytes_per_page, device.type)
        kv = KvTensors(num_pages=num_pages, dtype=weights_dtype, device=device, **shape)
        runner = EagerRunner(loaded.decoder, kv)
        info = _describe(directory, loaded, runner.name, device)
        return cls(info, SequenceTable(num_pages, PAGE_SIZE), kv, runner)


def _describe(directory: Path, loaded: LoadedModel, runner: str, device: torch.device) -> ExecutorInfo:
    config, dtype = loaded.config, loaded.decoder.dtype
    tokenizer = directory / "tokenizer.json"
    return ExecutorInfo(
        executor="llm",
        runner=runner,
        kernels=active_kernels(dtype, device),
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        model_id=directory.name,
        architecture=config.model_type,
        vocab_size=config.vocab_size,
        max_seq_len=config.max_position_embeddings,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        num_parameters=loaded.num_parameters,
        weight_bytes=loaded.weight_bytes,
        eos_token_ids=config.eos_token_ids,
        bos_token_id=config.bos_token_id,
        tokenizer_json=tokenizer.read_bytes() if tokenizer.is_file() else b"",
    )
