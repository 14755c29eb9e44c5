"""How much memory a device needs for steps, besides weights and KV: measured, with the largest step."""

from __future__ import annotations

import torch

from workers.kv.tensors import KvTensors
from workers.models.inputs import ForwardInputs
from workers.runners.base import Model
from workers.runners.cuda_graph import buckets_up_to

# For what allocators, libraries and the driver take that a single step does not show.
_RESERVE_BYTES = 512 << 20


def measure_working_bytes(
    model: Model, kv: KvTensors, *, max_step_tokens: int, max_rows: int, vocab_size: int
) -> int:
    """Run a prefill as large as any step, and see what it takes. Leaves nothing allocated.

    Args:
        model: On a CUDA device, with its weights.
        kv: A pool of at least `max_step_tokens` tokens, of which nothing is kept.
        max_step_tokens: Most tokens of a step.
        max_rows: Most rows of logits of a step.
        vocab_size: V.
    """
    device = kv.device
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before_bytes = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    with torch.inference_mode():
        inputs = _prefill(max_step_tokens, min(max_rows, max_step_tokens), kv.page_size).to(device)
        logits = model.logits(model.forward(inputs, kv))  # [R, V]
        # Sampling and log-probabilities work on copies in float32 of some rows.
        copies = [logits[:128].float() for _ in range(3)]
    torch.cuda.synchronize(device)
    step_bytes = torch.cuda.max_memory_allocated(device) - before_bytes
    del inputs, copies
    # The graphs keep their logits, each bucket its own.
    graph_bytes = sum(buckets_up_to(max_rows)) * vocab_size * logits.element_size()
    del logits
    torch.cuda.empty_cache()
    return step_bytes + graph_bytes + _RESERVE_BYTES


def _prefill(tokens: int, rows: int, page_size: int) -> ForwardInputs:
    """One prompt in the first pages, with logits of its last rows."""
    pages = -(-tokens // page_size)
    return ForwardInputs(
        token_ids=torch.zeros(tokens, dtype=torch.int64),
        positions=torch.arange(tokens),
        slots=torch.arange(tokens),
        query_starts=torch.tensor([0, tokens], dtype=torch.int32),
        context_lens=torch.tensor([tokens], dtype=torch.int32),
        block_tables=torch.arange(pages, dtype=torch.int32)[None],
        wanted_rows=torch.arange(tokens - rows, tokens),
        query_lens=[tokens],
        context_lens_host=[tokens],
    )
