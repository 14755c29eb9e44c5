"""Measures how much device memory steps need besides weights and KV, by running the largest step."""

from __future__ import annotations

import dataclasses

import torch

from workers.device_sampling import ROWS_AT_ONCE
from workers.kv.states import EMPTY, FROM_START, Held, StateRun
from workers.kv.tensors import KvTensors
from workers.models.inputs import AttentionBatch, ForwardInputs
from workers.models.model import Model
from workers.runners.cuda_graph import buckets_up_to

# For memory of allocators, libraries and the driver that a single step does not show.
RESERVE_BYTES = 512 << 20


def measure_working_bytes(
    model: Model, kv: KvTensors, *, max_step_tokens: int, max_seq_len: int, max_rows: int, vocab_size: int
) -> int:
    """Run a prefill of the largest size, and measure its peak memory.

    Args:
        model: On a CUDA device, with its weights.
        kv: A pool of at least `max_step_tokens` tokens. Its content is overwritten.
        max_step_tokens: Most tokens of a step.
        max_seq_len: Most tokens of a sequence; a step may contain several.
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
        if model.max_lora_slots:
            rows = torch.zeros(max_step_tokens, dtype=torch.int32)
            inputs = dataclasses.replace(inputs, lora_slots=rows)
        if kv.states is not None:
            ends = inputs.attention.context_lens_host
            inputs.states = [StateRun(FROM_START, (), (Held(end, EMPTY),)) for end in ends]
        inputs = inputs.to(device)
        logits = model.logits(model.forward(inputs, kv))  # [R, V]
        # Sampling and log-probabilities use float32 copies of some rows.
        copies = [logits[:128].float() for _ in range(3)]
    torch.cuda.synchronize(device)
    step_bytes = torch.cuda.max_memory_allocated(device) - before_bytes
    del inputs, copies
    graphs_take = graph_bytes(max_rows, vocab_size, logits.element_size())
    del logits
    torch.cuda.empty_cache()
    return step_bytes + graphs_take + RESERVE_BYTES


def graph_bytes(max_rows: int, vocab_size: int, element_size: int) -> int:
    """The memory of the CUDA graphs. With adapters there are twice as many, which share it.

    Logits are three times there: what the model has computed, where all graphs leave them, and those of a
    step that are kept while the next one runs. What adjusts rows is a float32 copy of some of them, one row
    that is none, and what is sorted of each; and of all rows how often each token occurs.
    """
    rows = buckets_up_to(max_rows)[-1]
    adjusting_bytes = 2 * 4 * (min(rows, ROWS_AT_ONCE) + 1) + 4 * rows
    return (3 * rows * element_size + adjusting_bytes) * vocab_size


def _prefills(tokens: int, max_seq_len: int, rows: int, page_size: int) -> ForwardInputs:
    """Prompts of the maximum length, all in the same pages, with logits of the last rows."""
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
