"""What attention promises beside its numbers: equal bits, extreme scores, padding, launches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.packed_pages import LeadingValues
from kernels.paged_attention import paged_attention
from tests.families import paired
from tests.kernels.attention_case import (
    CAP_AND_SINKS,
    COMPILED,
    FEATURES,
    SMALL,
    SPLIT,
    TORCH,
    TRITON,
    attend,
    make_case,
)
from tests.kernels.conftest import NEEDS_TRITON
from tests.kernels.instruction_sets import need_compiled
from tests.kernels.pages import packed
from tests.kernels.tree_batches import Tree, with_trees

CUDA = [pytest.param(name, marks=NEEDS_TRITON) for name in (TRITON, SPLIT)]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def device_of(backend: str, device: str) -> str:
    return device if backend.startswith(TRITON) else "cpu"


@NEEDS_TRITON
@DTYPES
def test_bits_of_an_item_do_not_depend_on_other_items(dtype: torch.dtype, device: str) -> None:
    items = [(1, 7), (1, 100), (1, 0), (6, 9), (33, 80)]
    case = make_case(items, device, kv_heads=1, dtype=dtype, features=CAP_AND_SINKS)
    together = torch.split(attend(case, TRITON), list(case.batch.query_lens))
    for item in range(len(items)):
        assert torch.equal(attend(case.part(item, item), TRITON), together[item])


@NEEDS_TRITON
def test_bits_of_a_divided_item_depend_on_nothing_but_lengths_of_others(device: str) -> None:
    case = make_case([(1, 100), (1, 7), (1, 0), (1, 90)], device, kv_heads=1)
    together = attend(case, SPLIT)
    case.query[1:] *= -2
    again = attend(case, SPLIT)
    assert torch.equal(again[0], together[0]) and not torch.equal(again[1], together[1])


@DTYPES
@pytest.mark.parametrize(
    ("names", "width", "window"), paired(map("+".join, ((), *FEATURES)), [(128, None), (80, 300)])
)
def test_bits_of_a_row_depend_on_its_sequence_only(
    dtype: torch.dtype, names: str, width: int, window: int | None
) -> None:
    """On the CPU: alone or among others, with one thread or several, decoded or verified."""
    items, features = (
        [(4, 1100), (1, 33), (16, 700), (3, 90), (40, 530), (110, 150)],
        names.split("+") if names else (),
    )
    case = make_case(items, width=width, value_width=64, dtype=dtype, window=window, features=features)
    together = attend(case, COMPILED)
    torch.set_num_threads(3)
    assert torch.equal(attend(case, COMPILED), together)
    torch.set_num_threads(1)
    by_item = torch.split(together, list(case.batch.query_lens))
    for item, rows in enumerate(by_item):
        for row in range(len(rows)):
            alone = case.part(item, item, slice(row, row + 1))
            assert torch.equal(attend(alone, COMPILED)[0], rows[row])


@pytest.mark.parametrize("quantised", [False, True])
def test_queries_of_float32_over_pages_of_bfloat16(quantised: bool) -> None:
    """They are rounded, and what is returned is not: rounded too, it is that of queries in bfloat16."""
    need_compiled()
    items = [(1, 1100), (5, 33), (40, 530), (1, 0)]
    case = make_case(items, dtype=torch.bfloat16, features=["softcap"], eight_bits=quantised)
    pages = packed(case.k_pages, case.v_pages, quantised=quantised)
    told: dict[str, Any] = {"scale": case.scoring.scale, "softcap": case.scoring.softcap}
    narrow = paged_attention(case.query, *pages, case.batch, **told)
    below = case.query.float() * (1 - 2**-12)  # They are nearest to those in bfloat16.
    wide = paged_attention(below, *pages, case.batch, **told)
    assert wide.dtype is torch.float32 and not torch.equal(wide.bfloat16().float(), wide)
    assert torch.equal(wide.bfloat16(), narrow)


@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize(("width", "value_width"), [(48, 32), (576, 512)])
@DTYPES
def test_values_that_are_a_part_of_keys(
    dtype: torch.dtype, width: int, value_width: int, window: int | None
) -> None:
    """The bits of the same values in pages of their own; in 8 bits as in torch."""
    need_compiled()
    items: list[tuple[int | Tree, int]] = [(1, 600), (1, 33), (5, 40), (40, 75), (Tree((0, 0, 1, 1)), 25)]
    case = make_case(items, width=width, value_width=value_width, kv_heads=1, dtype=dtype, window=window)
    case = replace(case, v_pages=case.k_pages[..., :value_width].contiguous())
    keys = packed(case.k_pages, case.v_pages)[0]
    told: dict[str, Any] = {"scale": case.scoring.scale, "sliding_window": window}
    found = paged_attention(case.query, keys, LeadingValues(keys, value_width), case.batch, **told)
    assert torch.equal(found, attend(case, COMPILED))
    keys = packed(case.k_pages, case.v_pages, quantised=True)[0]
    found = paged_attention(case.query, keys, LeadingValues(keys, value_width), case.batch, **told)
    pages = keys.dense(torch.arange(keys.shape[0]))
    exact = attend(replace(case, k_pages=pages, v_pages=pages[..., :value_width].contiguous()), TORCH)
    assert (found - exact).abs().max() <= 2**-7 * exact.abs().max()


@NEEDS_TRITON
# Narrow ones, and DeepSeek's, which take ten times as long: with each backend in one dtype.
@pytest.mark.parametrize(
    ("dtype", "backend", "width", "value_width", "heads"),
    [
        *(
            (dtype, backend, 48, 40, 20)
            for dtype in (torch.float32, torch.bfloat16)
            for backend in (TRITON, SPLIT, SMALL)
        ),
        (torch.bfloat16, TRITON, 576, 512, 34),
        (torch.float32, SPLIT, 576, 512, 34),
        (torch.bfloat16, SMALL, 576, 512, 34),
    ],
)
def test_values_in_keys_on_a_gpu(
    dtype: torch.dtype, width: int, value_width: int, heads: int, backend: str, device: str
) -> None:
    """Decodes, chunks and a tree; query heads of one or several programs. Slots without a token hold NaN."""
    items: list[tuple[int | Tree, int]] = [(1, 70), (1, 0), (1, 17), (5, 40), (Tree((0, 0, 1, 1)), 25)]
    case = make_case(items, device, width=width, group=heads, kv_heads=1, dtype=dtype)
    values = [keys[..., :value_width] for keys in case.keys]
    case = replace(case, v_pages=case.k_pages[..., :value_width], values=values)
    case.check(attend(case, backend, in_keys=True), rounds_weights=True)


@pytest.mark.parametrize("window", [None, 17])
@DTYPES
def test_others_are_the_same_to_the_bit_beside_a_tree(dtype: torch.dtype, window: int | None) -> None:
    case = make_case([(1, 60), (5, 40), (33, 70), (Tree((0, 0, 1, 1)), 25)], dtype=dtype, window=window)
    chains = replace(case, batch=replace(case.batch, trees=None))
    assert torch.equal(attend(case, COMPILED)[:39], attend(chains, COMPILED)[:39])


@pytest.mark.parametrize("tokens", [2, 16, 40])
@DTYPES
def test_a_chain_that_is_said_to_be_a_tree(tokens: int, dtype: torch.dtype) -> None:
    """It is attended as one that is not, to the bit."""
    case = make_case([(tokens, tokens + 25)], dtype=dtype)
    plain = attend(case, COMPILED)
    case.batch = with_trees(case.batch, [Tree(tuple(range(tokens - 1)))])
    assert torch.equal(attend(case, COMPILED), plain)


@pytest.mark.parametrize("backend", [TORCH, COMPILED, *CUDA])
@DTYPES
def test_scores_of_any_size(backend: str, dtype: torch.dtype, device: str) -> None:
    """Scores of thousands of either sign: the weights of all keys but one vanish, and nothing overflows.

    A sink of thousands leaves the keys nothing or everything. A cap makes them count by their sign alone. In
    float32 such scores are too coarse for the bound.
    """
    items = [(1, 40), (1, 0), (5, 40), (30, 70)]
    made = make_case(items, device_of(backend, device), group=3, kv_heads=1, dtype=dtype)
    sinks = torch.tensor([-5000.0, 0.0, 5000.0], device=made.query.device)
    told: list[dict[str, Any]] = [{"sinks": sinks}]
    if dtype is torch.bfloat16:
        told += [{"scale": scale, **more} for scale in (1e3, -1e3) for more in ({}, {"softcap": 1.5})]
    for scoring in told:
        case = replace(made, scoring=replace(made.scoring, **scoring))
        out = attend(case, backend)
        case.check(out, rounds_weights=backend.startswith(TRITON), any_order=backend == TORCH)


@pytest.mark.parametrize("backend", CUDA)
@DTYPES
def test_padding_items_are_zeros_whatever_they_hold(backend: str, dtype: torch.dtype, device: str) -> None:
    case = make_case(
        [(1, 0), (1, 18), (0, 0), (5, 0), (0, 30), (20, 25), (0, 0), (1, 0)], device, dtype=dtype
    )
    expected = attend(case, backend)
    case.check(expected, rounds_weights=True)
    case.query[[0, *range(2, 7), 27]] = torch.nan
    assert torch.equal(attend(case, backend), expected)


@pytest.mark.parametrize("backend", [COMPILED, *CUDA])
def test_indices_of_64_bits(backend: str, device: str) -> None:
    case = make_case([(1, 20), (1, 40), (13, 18)], device_of(backend, device), features=["sinks"])
    batch = case.batch
    names = ("page_tables", "query_starts", "context_lens")
    same = replace(batch, **{name: getattr(batch, name).long() for name in names})
    assert torch.equal(attend(replace(case, batch=same), backend), attend(case, backend))


@pytest.mark.parametrize("backend", [TORCH, COMPILED, *CUDA])
def test_nothing_to_do(backend: str, device: str) -> None:
    for items in ([], [(0, 0), (0, 5)]):
        case = make_case(items, device_of(backend, device))
        if items or backend != COMPILED:
            assert attend(case, backend).shape == (0, 4, 32)


@NEEDS_TRITON
def test_pages_past_two_to_the_31_elements(device: str) -> None:
    case = make_case([(1, 20), (2, 20)], device, width=64, dtype=torch.float16)
    expected = attend(case, TRITON)
    near = case.batch.page_tables[:, :2].long()
    far = near + (1 << 31) // (16 * 2 * 64)
    # 4 GiB each, of which only what is touched takes up memory.
    for name in ("k_pages", "v_pages"):
        pages = getattr(case, name)
        shape = (int(far.max()) + 1, *pages.shape[1:])
        moved = torch.empty_strided(shape, pages.stride(), dtype=pages.dtype, device=device)
        moved[far] = pages[near]
        setattr(case, name, moved)
    case.batch.page_tables[:, :2] = far
    assert torch.equal(attend(case, TRITON), expected)


BATCHES = {
    "decodes": ([(1, 5), (1, 60), (1, 0)], 3, 0),
    "prefills": ([(5, 5), (20, 40)], 0, 2),
    "decodes first": ([(1, 20), (1, 40), (9, 40), (1, 7)], 2, 2),
    "prefills first": ([(9, 40), (1, 20), (1, 70)], 0, 3),
}


@NEEDS_TRITON
@pytest.mark.parametrize("name", BATCHES)
def test_launches_of_a_mixed_batch(name: str, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """No launch that has nothing to do: in a decode step each one costs time.

    Lengths on the host do not matter: when a graph is captured they are upper bounds.
    """
    from kernels.cuda import paged_attention as cuda

    items, decoded, prefilled = BATCHES[name]
    case = make_case(items, device)
    expected = attend(case, TRITON)
    capacity = case.batch.page_tables.shape[1] * case.k_pages.shape[1]
    bounds = replace(case.batch, context_lens_host=[capacity] * len(items))
    assert torch.equal(attend(replace(case, batch=bounds), TRITON), expected)
    launched = {"decode_attention": 0, "prefill_attention": 0}
    for kernel in launched:

        def count(out: torch.Tensor, *arguments: Any, kernel: str = kernel, **_: Any) -> None:
            launched[kernel] = len(next(each for each in arguments if each is not None and each.dim() == 2))

        monkeypatch.setattr(cuda, kernel, count)
    attend(case, TRITON)
    assert launched == {"decode_attention": decoded, "prefill_attention": prefilled}
