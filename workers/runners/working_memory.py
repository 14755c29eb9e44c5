"""How much memory a device needs for steps, besides weights and KV: measured, with the largest step."""

from __future__ import annotations

import torch

from workers.kv.tensors import KvTensors
from workers.models.inputs import AttentionBatch, ForwardInputs
from workers.models.model import Model
from workers.runners.cuda_graph import buckets_up_to

# For what allocators, libraries and the driver take that a single step does not show.
_RESERVE_BYTES = 512 << 20


def measure_working_bytes(
    model: Model, kv: KvTensors, *, max_step_tokens: int, max_seq_len: int, max_rows: int, vocab_size: int
) -> int:
    """Run a prefill as large as any step, and see what it takes.

    Args:
        model: On a CUDA device, with its weights.
        kv: A pool of at least `max_step_tokens` tokens, of which nothing is kept.
        max_step_tokens: Most tokens of a step.
        max_seq_len: Most tokens of a sequence; a step may hold several.
        max_rows: Most rows of logits of a step.
        vocab_size: V.
    """
    device = kv.device
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before_bytes = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    with torch.inference_mode():
        inputs = _prefills(max_step_tokens, max_seq_len, min(max_rows, max_step_tokens), kv.page_size)
        inputs = inputs.to(device)
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


def _prefills(tokens: int, max_seq_len: int, rows: int, page_size: int) -> ForwardInputs:
    """Prompts that are as long as may be, all in the same pages, with logits of the last rows."""
    lengths = [min(max_seq_len, tokens - first) for first in range(0, tokens, max_seq_len)]
    positions = torch.cat([torch.arange(length) for length in lengths])
    pages = -(-lengths[0] // page_size)
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return ForwardInputs(
        token_ids=torch.zeros(tokens, dtype=torch.int64),
        positions=positions,
        slots=positions,
        wanted_rows=torch.arange(tokens - rows, tokens),
        attention=AttentionBatch(
            page_tables=torch.arange(pages, dtype=torch.int32).expand(len(lengths), -1).contiguous(),
            query_starts=starts,
            context_lens=torch.tensor(lengths, dtype=torch.int32),
            query_lens=lengths,
            context_lens_host=lengths,
        ),
    )
