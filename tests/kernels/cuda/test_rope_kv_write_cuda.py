"""QK-norm, rotation and KV write in one kernel, on the GPU or in the interpreter.

Dimension letters: T tokens; H query heads; K key-value heads; D head width; R width that is turned.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kernels.cuda.rope_kv_write import rope_kv_write
from kernels.rope import RopeSpec, rope_frequencies, rope_table
from kernels.rope_kv_write import rope_kv_write_reference
from tests.kernels.cuda.poison import assert_rounded, assert_same_roundings, far_apart, same_bits, surrounded
from tests.kernels.references import rms_norm64, rotate64

torch.set_num_threads(1)

HALVES = [torch.bfloat16, torch.float16]
DTYPES = [torch.float32, *HALVES]
PAGES, PAGE_SIZE, EPS = 3, 16, 1e-6
SPEC = RopeSpec(theta=10_000.0)
# Small, so that the float32 rounding of an angle does not show.
POSITIONS = [0, 5, 1, 7]
# Last and first slot, one that is not written, and the first of a page.
SLOTS = [47, 0, -1, 16]


@dataclass(frozen=True)
class Case:
    """Arguments on the CPU; the third token is a padded one, and all it has is NaN."""

    qkv: torch.Tensor  # [T, (H + 2 * K) * D]
    qk_norm: torch.Tensor | None  # [H + K, D]
    cos_sin: torch.Tensor | None  # [T, R]
    slots: torch.Tensor  # [T]
    k_pages: torch.Tensor
    v_pages: torch.Tensor

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys [T, H + K, D] in float64, and the lengths of the pairs that were turned."""
        kv_heads, width = self.k_pages.shape[2:]
        heads = self.qkv.view(len(self.qkv), -1, width)[:, :-kv_heads].double()
        if self.qk_norm is not None:
            heads = rms_norm64(heads, self.qk_norm, EPS)
        if self.cos_sin is None:
            return heads, heads.abs()
        turned = self.cos_sin.shape[1]
        pairs = heads[..., :turned]
        lengths = pairs.view(*pairs.shape[:2], 2, turned // 2).norm(dim=2)
        rotated = rotate64(pairs, POSITIONS, rope_frequencies(SPEC, turned)[0].tolist())
        rest = heads[..., turned:]
        return torch.cat([rotated, rest], dim=-1), torch.cat([lengths, lengths, rest.abs()], dim=-1)


def case(
    heads: int,
    kv_heads: int,
    width: int,
    dtype: torch.dtype,
    *,
    norm: bool | torch.dtype,
    turned: int | None = -1,
) -> Case:
    """The norm's weight has the dtype of the rest unless it is named; -1: all of a head is turned."""
    generator = torch.Generator().manual_seed(heads * width)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    qkv = random(len(SLOTS), (heads + 2 * kv_heads) * width).to(dtype)
    qkv[2] = torch.nan
    cos_sin = None
    if turned is not None:
        cos_sin = rope_table(SPEC, width if turned == -1 else turned, 8)[torch.tensor(POSITIONS)]
        cos_sin[2] = torch.nan
    pages = [random(PAGES, PAGE_SIZE, kv_heads, width).to(dtype) for _ in range(2)]
    for tensor in pages:
        tensor.flatten()[::3] = torch.nan
    weight = None
    if norm is not False:
        weight = random(heads + kv_heads, width).to(dtype if norm is True else norm)
    return Case(qkv, weight, cos_sin, torch.tensor(SLOTS), *pages)


def run(
    given: Case, device: str, slots_dtype: torch.dtype = torch.int64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The kernel's queries and both pages, on the CPU; `given` is left as it is."""
    k_pages, v_pages = (tensor.to(device, copy=True) for tensor in (given.k_pages, given.v_pages))
    query = rope_kv_write(
        surrounded(given.qkv, device),
        None if given.qk_norm is None else given.qk_norm.to(device),
        None if given.cos_sin is None else surrounded(given.cos_sin, device),
        given.slots.to(device, slots_dtype),
        k_pages,
        v_pages,
        EPS,
    )
    return query.cpu(), k_pages.cpu(), v_pages.cpu()


# Every head width; blocks of heads that hold queries and keys, that are cut off; values of two programs.
SHAPES = [(4, 2, 64), (3, 3, 80), (12, 12, 96), (14, 4, 128), (2, 1, 256), (1, 1, 8)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), SHAPES)
def test_is_accurate(
    heads: int, kv_heads: int, width: int, norm: bool, dtype: torch.dtype, device: str
) -> None:
    check_accuracy(case(heads, kv_heads, width, dtype, norm=norm), device)


def check_accuracy(given: Case, device: str) -> None:
    """What is computed and written for each token but the padded one, against float64."""
    query, k_pages, v_pages = run(given, device)
    kv_heads, width = given.k_pages.shape[2:]
    heads = given.qkv.shape[1] // width - 2 * kv_heads
    exact, lengths = given.exact()
    assert query.shape == (4, heads, width) and query.is_contiguous()
    tokens = [0, 1, 3]
    slots = given.slots[tokens]
    roundings = 1 if given.qk_norm is None else 3
    keys = k_pages.flatten(0, 1)[slots]
    assert_rounded(query[tokens], exact[tokens, :heads], roundings, lengths[tokens, :heads])
    assert_rounded(keys, exact[tokens, heads:], roundings, lengths[tokens, heads:])
    values = given.qkv.view(4, -1, width)[tokens, -kv_heads:]
    assert same_bits(v_pages.flatten(0, 1)[slots], values)


# Parts wider and narrower than the rest, neither always a power of two; blocks of heads that are cut.
PARTS = [(4, 2, 64, 16), (3, 3, 80, 32), (12, 12, 96, 72), (14, 4, 128, None), (2, 1, 256, 64), (1, 1, 9, 4)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True, torch.float32])
@pytest.mark.parametrize(("heads", "kv_heads", "width", "turned"), PARTS)
def test_a_part_of_a_head_is_turned(
    heads: int,
    kv_heads: int,
    width: int,
    turned: int | None,
    norm: bool | torch.dtype,
    dtype: torch.dtype,
    device: str,
) -> None:
    check_accuracy(case(heads, kv_heads, width, dtype, norm=norm, turned=turned), device)


@pytest.mark.parametrize("slots_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_writes_the_named_slots_and_nothing_else(
    dtype: torch.dtype, slots_dtype: torch.dtype, device: str
) -> None:
    given = case(4, 2, 80, dtype, norm=True)
    query, k_pages, v_pages = run(given, device, slots_dtype)
    untouched = torch.ones(PAGES * PAGE_SIZE, dtype=torch.bool)
    untouched[[47, 0, 16]] = False
    for after, before in ((k_pages, given.k_pages), (v_pages, given.v_pages)):
        assert same_bits(after.flatten(0, 1)[untouched], before.flatten(0, 1)[untouched])
    assert torch.isfinite(query[[0, 1, 3]]).all(), "NaN of a padded token reached another"


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("norm", [True, False, torch.float32])
@pytest.mark.parametrize("turned", [128, 48, None])
def test_rounds_where_the_three_operations_do(
    turned: int | None, norm: bool | torch.dtype, dtype: torch.dtype, device: str
) -> None:
    given = case(28, 4, 128, dtype, norm=norm, turned=turned)
    query, k_pages, v_pages = run(given, device)
    expected = rope_kv_write_reference(
        given.qkv, given.qk_norm, given.cos_sin, given.slots, given.k_pages, given.v_pages, EPS
    )
    tokens = [0, 1, 3]
    slots = given.slots[tokens]
    assert_same_roundings(query[tokens], expected[tokens])
    assert_same_roundings(k_pages.flatten(0, 1)[slots], given.k_pages.flatten(0, 1)[slots])
    assert same_bits(v_pages, given.v_pages)


def test_no_tokens(device: str) -> None:
    given = case(2, 1, 64, torch.float32, norm=False)
    nothing = Case(given.qkv[:0], None, None, given.slots[:0], given.k_pages, given.v_pages)
    query, k_pages, _ = run(nothing, device)
    assert query.shape == (0, 2, 64)
    assert same_bits(k_pages, given.k_pages)


def test_rows_and_slots_beyond_32_bits(device: str) -> None:
    kv_heads, width = 2, 64
    given = case(2, kv_heads, width, torch.bfloat16, norm=False)
    assert given.cos_sin is not None
    tokens = torch.tensor([0, 1, 3])
    # Slots have 128 elements: this one begins at element 2^31. What lies before is never touched.
    far = 1 << 24
    slots = torch.tensor([far, 0, far + 1], dtype=torch.int32, device=device)
    shape = (far // PAGE_SIZE + 1, PAGE_SIZE, kv_heads, width)
    strides = (PAGE_SIZE * kv_heads * width, kv_heads * width, width, 1)
    k_pages, v_pages = (
        torch.empty_strided(shape, strides, dtype=torch.bfloat16, device=device) for _ in range(2)
    )
    query = rope_kv_write(
        far_apart(given.qkv[tokens], device),
        None,
        given.cos_sin[tokens].to(device),
        slots,
        k_pages,
        v_pages,
        EPS,
    )
    near_query, near_keys, near_values = run(given, device)
    near_slots = given.slots[tokens]
    assert same_bits(query.cpu(), near_query[tokens])
    written = slots.long()
    assert same_bits(k_pages.flatten(0, 1)[written].cpu(), near_keys.flatten(0, 1)[near_slots])
    assert same_bits(v_pages.flatten(0, 1)[written].cpu(), near_values.flatten(0, 1)[near_slots])
