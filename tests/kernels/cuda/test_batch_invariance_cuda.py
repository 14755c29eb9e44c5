"""Rows of batch-invariant kernels have the same bits in any batch, in any chunks.

In the interpreter this shows that the tiles of a row, and their order, do not depend on the batch: numpy sums
within a tile. What a compiler and tensor cores make of them only a GPU can show
(tests/gpu/test_batch_invariance.py).
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from kernels.attention_batch import AttentionBatch
from kernels.cuda.experts import experts
from kernels.cuda.linear import linear, splits_for
from kernels.cuda.paged_attention import paged_attention
from kernels.cuda.rms_norm import add_rms_norm, rms_norm
from kernels.experts import route
from kernels.lora import add_lora, new_table, row_slots
from kernels.lora_pairs import LoraPairs
from tests.kernels.attention_case import CAP_AND_SINKS, Case, Item, make_case
from tests.kernels.cuda import test_lora_cuda

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
# Of one item: its first row and the one after its last.
Chunk = tuple[int, int, int]


@pytest.fixture(autouse=True)
def products_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies by BLAS, in which the bits of a row depend on its place in a tile."""

    def matmul(a: Any, b: Any, dtype: Any) -> Any:
        return np.einsum("mk,kn->mn", a, b, dtype=dtype)

    monkeypatch.setattr(np, "matmul", matmul)


def randn(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def cancelling(x: torch.Tensor) -> torch.Tensor:
    """Rows whose products with [w, w] lose what rounding to bfloat16 would hide."""
    return torch.cat([x, -1.01 * x], -1)


def random_batches(dice: random.Random, rows: int) -> list[list[int]]:
    """Some of the rows in some order: one, a few, and all."""
    return [dice.sample(range(rows), count) for count in (1, 2, dice.randint(3, rows - 1), rows)]


@DTYPES
def test_products(dtype: torch.dtype, device: str) -> None:
    x = cancelling(randn(150, 65, dtype=dtype, device=device))
    weight = randn(140, 65, dtype=dtype, device=device).repeat(1, 2)
    together = linear(x, weight, None)
    for rows in random_batches(random.Random(1), len(x)):
        assert torch.equal(linear(x[rows], weight, None), together[rows])


@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=["bf16"])
def test_products_with_parts(dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many rows that a program sums all parts of the inputs, and so few that each sums one."""
    # As of a small GPU, for which few rows are many.
    monkeypatch.setattr("kernels.cuda.linear.PROGRAMS", 16)
    half = 330
    x = cancelling(randn(140, half, dtype=dtype, device=device))
    weight = randn(300, half, dtype=dtype, device=device).repeat(1, 2)
    together = linear(x, weight, None)
    assert splits_for(dtype, len(weight), 2 * half) == 2
    for rows in ([7], [130, 64, 65], list(range(70, 5, -1))):
        assert torch.equal(linear(x[rows], weight, None), together[rows])


@DTYPES
def test_experts(dtype: torch.dtype, device: str) -> None:
    """So few that tiles would go by the number of pairs."""
    tokens, count, width, inner = 40, 2, 150, 40
    x = cancelling(randn(tokens, width // 2, dtype=dtype, device=device))
    gate_up = randn(count, 2 * inner, width // 2, dtype=dtype, device=device).repeat(1, 1, 2)
    down = randn(count, width, inner, dtype=dtype, device=device).div(inner**0.5)
    ids, scores = route(randn(tokens, count, dtype=dtype, device=device), 2, normalize=True)
    weights = gate_up, down
    together = experts(x, *weights, ids, scores, "silu", batch_invariant=True)
    for rows in random_batches(random.Random(2), tokens):
        some = experts(x[rows], *weights, ids[rows], scores[rows], "silu", batch_invariant=True)
        assert torch.equal(some, together[rows])


_triton_lora = test_lora_cuda._triton_lora


@DTYPES
def test_adapters(dtype: torch.dtype, device: str) -> None:
    """Rows of three slots and of none, several tiles of one of them."""
    count, inputs, outputs, rank = 120, 2100, 40, 6
    x = cancelling(randn(count, inputs // 2, dtype=dtype, device=device))
    y = randn(count, outputs, dtype=dtype, device=device)
    table = new_table(3, 8, inputs, [outputs], dtype, torch.device(device))
    for slot in range(3):
        a = randn(rank + slot, inputs // 2, dtype=dtype, device=device).repeat(1, 2)
        b = randn(outputs, rank + slot, dtype=dtype, device=device)
        table.set(slot, LoraPairs([(a, b)], inputs, [outputs], dtype, pack=False))
    slots = torch.tensor([random.Random(row).choice((-1, 0, 1, 2, 2, 2)) for row in range(count)])
    slots = slots.to(device, torch.int32)

    def adapted(rows: list[int]) -> torch.Tensor:
        some = y[rows]
        add_lora(some, x[rows], table, row_slots(slots[rows], 3))
        return some

    together = adapted(list(range(count)))
    for rows in random_batches(random.Random(4), count):
        assert torch.equal(adapted(rows), together[rows])


@DTYPES
@pytest.mark.parametrize("width", [100, 1030])
def test_norms(width: int, dtype: torch.dtype, device: str) -> None:
    x, weight = randn(20, width, dtype=dtype, device=device), randn(width, dtype=dtype, device=device)
    normed, residual = rms_norm(x, weight, 1e-6), x.flip(0)
    added = add_rms_norm(x, residual, weight, 1e-6)
    for rows in random_batches(random.Random(3), len(x)):
        assert torch.equal(rms_norm(x[rows], weight, 1e-6), normed[rows])
        assert torch.equal(add_rms_norm(x[rows], x.flip(0)[rows], weight, 1e-6), added[rows])


def attend(case: Case, batch: AttentionBatch, query: torch.Tensor) -> torch.Tensor:
    return paged_attention(query, case.k_pages, case.v_pages, batch, case.scoring, batch_invariant=True)


def batch_of(case: Case, chunks: list[Chunk]) -> tuple[AttentionBatch, torch.Tensor]:
    """The batch in which items of a case, of one chunk each, have come as far as these chunks."""
    whole, device = case.batch, case.query.device
    first_rows = whole.query_starts.tolist()
    items = [item for item, _, _ in chunks]
    lens = [end - begin for _, begin, end in chunks]
    contexts = [whole.context_lens_host[i] - whole.query_lens[i] + end for i, _, end in chunks]
    starts = torch.tensor([0, *lens]).cumsum(0).to(device, torch.int32)
    batch = AttentionBatch(
        whole.page_tables[items], starts, torch.tensor(contexts, device=device), lens, contexts
    )
    rows = [case.query[first_rows[i] + begin : first_rows[i] + end] for i, begin, end in chunks]
    return batch, torch.cat(rows)


def random_chunks(dice: random.Random, query_lens: list[int]) -> list[list[Chunk]]:
    """Batches, at random, that have every row of the items once."""
    batches, begins = [], [0] * len(query_lens)
    while begins != query_lens:
        chunks = []
        for item in dice.sample(range(len(begins)), len(begins)):
            begin = begins[item]
            begins[item] = min(query_lens[item], begin + dice.choice((0, 1, 1, 7, 40)))
            chunks += [(item, begin, begins[item])] * (begins[item] > begin)
        batches += [chunks] * bool(chunks)
    return batches


@pytest.mark.parametrize(
    ("dtype", "window", "features"),
    [
        # Not all with all: the tiles go by the type and the window, and features are added to their scores.
        pytest.param(torch.float32, None, (), id="fp32"),
        pytest.param(torch.float32, 5, (), id="fp32-5"),
        pytest.param(torch.bfloat16, 70, (), id="bf16-70"),
        pytest.param(torch.bfloat16, None, CAP_AND_SINKS, id="bf16-features"),
        pytest.param(torch.bfloat16, 5, CAP_AND_SINKS, id="bf16-5-features"),
        pytest.param(torch.float32, 70, CAP_AND_SINKS, id="fp32-70-features"),
    ],
)
def test_attention(features: tuple[str, ...], window: int | None, dtype: torch.dtype, device: str) -> None:
    """Decodes, chunks and whole texts; contexts that the decode kernel would split."""
    items: list[Item] = [(45, 45), (20, 150), (3, 90)]
    case = make_case(items, device, group=3, kv_heads=1, dtype=dtype, window=window, features=features)
    together = torch.split(attend(case, case.batch, case.query), list(case.batch.query_lens))
    # With this seed some batches begin with decodes, whose bits differ where they have a kernel of their own.
    for chunks in random_chunks(random.Random(0), list(case.batch.query_lens)):
        rows = torch.split(attend(case, *batch_of(case, chunks)), [end - begin for _, begin, end in chunks])
        for (item, begin, end), some in zip(chunks, rows, strict=True):
            assert torch.equal(some, together[item][begin:end])


@DTYPES
def test_attention_is_right(dtype: torch.dtype, device: str) -> None:
    case = make_case([(1, 80), (1, 0), (20, 90), (33, 33)], device, dtype=dtype, window=24)
    case.check(attend(case, case.batch, case.query), rounds_weights=True)
