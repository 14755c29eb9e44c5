"""Each kernel by itself, with a cold cache: bytes or operations per second, and their share of the roof.

Dimension letters: T tokens; N items; H query heads; K key-value heads; D head width; C hidden width;
I intermediate width; V vocabulary; R rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.gpu.plan import PAGE_SIZE, Plan
from benchmarks.gpu.results import Roof, Row, row
from benchmarks.gpu.timing import Timer
from kernels.attention_batch import AttentionBatch
from kernels.cuda import paged_attention, rms_norm, rope_kv_write, sampling, silu_mul

EPS = 1e-6
# From this much on, the time that a kernel takes to start and to end is small beside that of reading.
LARGE_KV_BYTES = 200e6


def rows_kernels(plan: Plan, timer: Timer, roof: Roof) -> list[Row]:
    """What is done to each token by itself, at the widths of `kernel_shape`."""
    found = []
    for tokens in plan.row_tokens:
        for name, run, bytes_moved in _rows_calls(plan, tokens):
            found.append(_by_bytes(f"{name}, {tokens} tokens", timer, run, bytes_moved, roof))
    return found


def _rows_calls(plan: Plan, tokens: int) -> list[tuple[str, Callable[[], object], int]]:
    """(name, call, bytes that it reads and writes at least)."""
    shape = plan.kernel_shape
    hidden, inner, width = shape.hidden_size, shape.intermediate_size, shape.head_dim
    heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
    x, residual, weight = _random(plan, tokens, hidden), _random(plan, tokens, hidden), _random(plan, hidden)
    gate_up = _random(plan, tokens, 2 * inner)  # [T, 2 * I]
    qkv = _random(plan, tokens, (heads + 2 * kv_heads) * width)  # [T, (H + 2 * K) * D]
    qk_norm = _random(plan, heads + kv_heads, width)
    cos_sin = torch.rand(tokens, width, device=plan.device)  # [T, D]
    pages = -(-tokens // PAGE_SIZE)
    k_pages, v_pages = (_random(plan, pages, PAGE_SIZE, kv_heads, width) for _ in range(2))
    slots = torch.randperm(pages * PAGE_SIZE, device=plan.device)[:tokens]  # [T]
    element = plan.dtype.itemsize
    rope_bytes = 2 * qkv.nbytes + qk_norm.nbytes + cos_sin.nbytes + slots.nbytes
    return [
        ("rms_norm", lambda: rms_norm.rms_norm(x, weight, EPS), 2 * x.nbytes + weight.nbytes),
        (
            "add_rms_norm",
            lambda: rms_norm.add_rms_norm(x, residual, weight, EPS),
            4 * x.nbytes + weight.nbytes,
        ),
        ("silu_mul", lambda: silu_mul.silu_mul(gate_up), 3 * tokens * inner * element),
        (
            "rope_kv_write",
            lambda: rope_kv_write.rope_kv_write(qkv, qk_norm, cos_sin, slots, k_pages, v_pages, EPS),
            rope_bytes,
        ),
    ]


def attention_kernels(plan: Plan, timer: Timer, roof: Roof) -> list[Row]:
    """Decode and prefill attention, over pages in random order."""
    return [
        *(_decode_attention(plan, timer, roof, *size) for size in plan.decode_attention),
        *(_prefill_attention(plan, timer, roof, *size) for size in plan.prefill_attention),
    ]


def _decode_attention(plan: Plan, timer: Timer, roof: Roof, batch: int, context: int) -> Row:
    shape = plan.kernel_shape
    query, k_pages, v_pages, tables = _paged(plan, [1] * batch, context)
    run = _attention(query, k_pages, v_pages, tables, [1] * batch, context)
    read = 2 * batch * context * shape.num_key_value_heads * shape.head_dim * plan.dtype.itemsize
    name = f"decode attention, {batch} x {context} tokens"
    large = read >= LARGE_KV_BYTES
    return _by_bytes(name, timer, run, read, roof, goal=0.8 if large else None)


def _prefill_attention(plan: Plan, timer: Timer, roof: Roof, tokens: int, context: int) -> Row:
    shape = plan.kernel_shape
    query, k_pages, v_pages, tables = _paged(plan, [tokens], context)
    ms = timer.kernel(_attention(query, k_pages, v_pages, tables, [tokens], context))
    # A token sees all before it and itself; scores and sums are two products.
    pairs = tokens * (context - tokens) + tokens * (tokens + 1) // 2
    flops = 4 * shape.num_attention_heads * shape.head_dim * pairs / (ms["median"] / 1e3)
    return row(
        f"prefill attention, {tokens} of {context} tokens",
        ms,
        tflop_per_s=flops / 1e12,
        share_of_matmul=flops / roof["flops_per_s"],
    )


def sampling_kernels(plan: Plan, timer: Timer, roof: Roof) -> list[Row]:
    """The choice of a token for each row of logits, greedy and drawn."""
    found = []
    for rows in plan.sampling_rows:
        logits = _random(plan, rows, plan.kernel_shape.vocab_size)  # [R, V]
        keys = torch.arange(rows, device=plan.device)
        ids, best = torch.empty_like(keys), torch.empty(rows, device=plan.device)
        for name, temperature in (("greedy", 0.0), ("drawn", 1.0)):
            temperatures = torch.full((rows,), temperature, dtype=torch.float64, device=plan.device)

            def run(
                logits: torch.Tensor = logits,
                temperatures: torch.Tensor = temperatures,
                keys: torch.Tensor = keys,
                ids: torch.Tensor = ids,
                best: torch.Tensor = best,
            ) -> None:
                sampling.choose(logits, temperatures, keys, ids, best)

            found.append(_by_bytes(f"choose, {name}, {rows} rows", timer, run, logits.nbytes, roof))
    return found


def _by_bytes(
    name: str,
    timer: Timer,
    run: Callable[[], object],
    bytes_moved: int,
    roof: Roof,
    goal: float | None = None,
) -> Row:
    ms = timer.kernel(run)
    rate = bytes_moved / (ms["median"] / 1e3)
    goals = [] if goal is None else [("share_of_copy", goal, True)]
    return row(name, ms, *goals, gb_per_s=rate / 1e9, share_of_copy=rate / roof["bytes_per_s"])


def _random(plan: Plan, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=plan.dtype, device=plan.device)


def _paged(
    plan: Plan, query_lens: list[int], context: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [T, H, D], pages [pages, S, K, D] twice, and page tables [N, P] as wide as in the service."""
    shape, items = plan.kernel_shape, len(query_lens)
    each = -(-context // PAGE_SIZE)
    pages = (items * each, PAGE_SIZE, shape.num_key_value_heads, shape.head_dim)
    query = _random(plan, sum(query_lens), shape.num_attention_heads, shape.head_dim)
    width = max(each, -(-shape.max_position_embeddings // PAGE_SIZE))
    tables = torch.zeros(items, width, dtype=torch.int32, device=plan.device)
    tables[:, :each] = torch.randperm(items * each, device=plan.device).view(items, each)
    return query, _random(plan, *pages), _random(plan, *pages), tables


def _attention(
    query: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    tables: torch.Tensor,
    query_lens: list[int],
    context: int,
) -> Callable[[], object]:
    items = len(query_lens)
    starts = [sum(query_lens[:item]) for item in range(items + 1)]
    batch = AttentionBatch(
        page_tables=tables,
        query_starts=torch.tensor(starts, dtype=torch.int32, device=query.device),
        context_lens=torch.full((items,), context, dtype=torch.int32, device=query.device),
        query_lens=query_lens,
        context_lens_host=[context] * items,
    )
    scale = query.shape[2] ** -0.5
    return lambda: paged_attention.paged_attention(
        query, k_pages, v_pages, batch, scale=scale, sliding_window=None
    )
