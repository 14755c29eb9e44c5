"""QK-norm, rotation and KV write by the CPU's kernels, torch and the CUDA kernels.

Dimension letters: T tokens; H query heads; K key-value heads; D head width; R width that is rotated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from kernels.packed_pages import PackedKeys, PackedValues, Pages, can_pack
from kernels.rope import RopeSpec, rope_frequencies, rope_table
from kernels.rope_kv_write import rope_kv_write, rope_kv_write_reference
from tests.families import paired
from tests.kernels.conftest import NEEDS_TRITON, SELDOM
from tests.kernels.cuda.poison import assert_rounded, assert_same_roundings, far_apart, same_bits, surrounded
from tests.kernels.pages import dense, packed
from tests.kernels.references import angle_loss, assert_close, norm_loss, rms_norm64, rotate64

HALVES = [torch.bfloat16, torch.float16]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
PAGES, PAGE_SIZE, EPS = 3, 16, 1e-6
SPEC = RopeSpec(theta=10_000.0)
POSITIONS = [0, 5, 1, 7]
# Last and first slot, one that is not written, and the first of a page.
SLOTS = [47, 0, -1, 16]
TOKENS = [0, 1, 3]  # those that are not padded
TRITON = pytest.param("triton", marks=NEEDS_TRITON)


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
        """Queries and keys [T, H + K, D] in float64, and the lengths of the pairs that were rotated."""
        kv_heads, width = self.k_pages.shape[2:]
        heads = self.qkv.view(len(self.qkv), -1, width)[:, :-kv_heads].double()
        if self.qk_norm is not None:
            heads = rms_norm64(heads, self.qk_norm, EPS)
        if self.cos_sin is None:
            return heads, heads.abs()
        rotary = self.cos_sin.shape[1]
        pairs, rest = heads[..., :rotary], heads[..., rotary:]
        lengths = pairs.view(*pairs.shape[:2], 2, rotary // 2).norm(dim=2)
        rotated = rotate64(pairs, POSITIONS, rope_frequencies(SPEC, rotary)[0].tolist())
        return torch.cat([rotated, rest], dim=-1), torch.cat([lengths, lengths, rest.abs()], dim=-1)


Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Run = Callable[[Case], Result]


@pytest.fixture(params=[TRITON, "cpu"])
def run(request: pytest.FixtureRequest, device: str) -> Run:
    """Gives the queries and both pages, on the CPU, and leaves the case as it is."""
    on_device, kernel = "cpu", rope_kv_write  # type: str, Callable[..., torch.Tensor]
    if request.param == "triton":
        from kernels.cuda import rope_kv_write as cuda

        on_device, kernel = device, cuda.rope_kv_write

    def run(case: Case) -> Result:
        k_pages, v_pages = (pages.to(on_device, copy=True) for pages in (case.k_pages, case.v_pages))
        pages: tuple[Pages, Pages] = k_pages, v_pages
        if request.param == "cpu" and can_pack(k_pages):
            pages = packed(k_pages, v_pages)
        query = kernel(
            surrounded(case.qkv, on_device),
            None if case.qk_norm is None else case.qk_norm.to(on_device),
            None if case.cos_sin is None else surrounded(case.cos_sin, on_device),
            case.slots.to(on_device),
            *pages,
            EPS,
        )
        keys, values = (dense(one).cpu() for one in pages)
        return query.cpu(), keys, values

    return run


def make_case(
    heads: int,
    kv_heads: int,
    width: int,
    dtype: torch.dtype = torch.float32,
    *,
    norm: bool | torch.dtype = True,
    rotary: int | None = -1,
) -> Case:
    """The norm's weight has the dtype of the rest unless it is named; -1: all of a head is rotated."""
    generator = torch.Generator().manual_seed(heads * width)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    qkv = random(len(SLOTS), (heads + 2 * kv_heads) * width).to(dtype)
    qkv[2] = torch.nan
    cos_sin = None
    if rotary is not None:
        cos_sin = rope_table(SPEC, width if rotary == -1 else rotary, 8)[torch.tensor(POSITIONS)]
        cos_sin[2] = torch.nan
    pages = [random(PAGES, PAGE_SIZE, kv_heads, width).to(dtype) for _ in range(2)]
    for tensor in pages:
        tensor.flatten()[::3] = torch.nan
    weight = None
    if norm is not False:
        weight = random(heads + kv_heads, width).to(dtype if norm is True else norm)
    return Case(qkv, weight, cos_sin, torch.tensor(SLOTS), *pages)


# Every head width, whole and in part; parts wider and narrower than the rest; blocks of heads that hold
# queries and keys, that are cut off; values of two programs.
SHAPES = [
    *((4, 2, 64, -1), (3, 3, 80, -1), (14, 2, 128, -1), (2, 1, 256, -1), (1, 1, 8, -1)),
    *((6, 1, 32, 2), (3, 3, 80, 32), (12, 12, 96, 72), (4, 2, 128, None), (2, 1, 256, 64), (1, 1, 9, 4)),
]


NORMS = [
    *((torch.float32, norm) for norm in (False, True)),
    *((torch.bfloat16, norm) for norm in (False, True, torch.float32)),
    (torch.float16, True),
]


# Twice by turns: each shape with two of the norms.
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "rotary", "dtype", "norm"),
    [*paired(SHAPES, NORMS[:3], mark=SELDOM), *paired(SHAPES, NORMS[3:], mark=SELDOM)],
)
def test_is_accurate_and_writes_the_named_slots_only(
    heads: int,
    kv_heads: int,
    width: int,
    rotary: int | None,
    norm: bool | torch.dtype,
    dtype: torch.dtype,
    run: Run,
) -> None:
    case = make_case(heads, kv_heads, width, dtype, norm=norm, rotary=rotary)
    query, k_pages, v_pages = run(case)
    exact, lengths = case.exact()
    assert query.shape == (4, heads, width) and query[0].is_contiguous()
    slots = case.slots[TOKENS]
    keys = k_pages.flatten(0, 1)[slots]
    roundings = 1 if norm is False else 3
    # In float32: angles up to 7, and the norm.
    lost = angle_loss(7) + (0 if norm is False else norm_loss(width))
    for actual, of in ((query[TOKENS], slice(heads)), (keys, slice(heads, None))):
        if dtype is torch.float32:
            assert_close(actual, exact[TOKENS, of], lost)
        else:
            assert_rounded(actual, exact[TOKENS, of], roundings, lengths[TOKENS, of])
    assert same_bits(v_pages.flatten(0, 1)[slots], case.qkv.view(4, -1, width)[TOKENS, -kv_heads:])
    untouched = torch.ones(PAGES * PAGE_SIZE, dtype=torch.bool)
    untouched[slots] = False
    for after, before in ((k_pages, case.k_pages), (v_pages, case.v_pages)):
        assert same_bits(after.flatten(0, 1)[untouched], before.flatten(0, 1)[untouched])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("norm", "rotary"), [(True, 48), (False, 128), (torch.float32, 48), (True, None)])
def test_rounds_where_the_three_operations_do(
    norm: bool | torch.dtype, rotary: int | None, dtype: torch.dtype, run: Run
) -> None:
    case = make_case(28, 4, 128, dtype, norm=norm, rotary=rotary)
    query, k_pages, v_pages = run(case)
    slots = case.slots[TOKENS]
    expected = rope_kv_write_reference(
        case.qkv, case.qk_norm, case.cos_sin, case.slots, case.k_pages, case.v_pages, EPS
    )
    assert_same_roundings(query[TOKENS], expected[TOKENS])
    assert_same_roundings(k_pages.flatten(0, 1)[slots], case.k_pages.flatten(0, 1)[slots])
    assert same_bits(v_pages, case.v_pages)


@DTYPES
def test_slots_of_32_bits(dtype: torch.dtype, run: Run) -> None:
    case = make_case(4, 2, 80, dtype)
    for actual, expected in zip(run(replace(case, slots=case.slots.int())), run(case), strict=True):
        assert same_bits(actual, expected)


@DTYPES
def test_no_tokens(dtype: torch.dtype, run: Run) -> None:
    case = make_case(2, 1, 64, dtype, norm=False)
    query, k_pages, _ = run(Case(case.qkv[:0], None, None, case.slots[:0], case.k_pages, case.v_pages))
    assert query.shape == (0, 2, 64) and same_bits(k_pages, case.k_pages)


@NEEDS_TRITON
@pytest.mark.parametrize("run", [TRITON], indirect=True)
def test_rows_and_slots_beyond_32_bits(run: Run, device: str) -> None:
    from kernels.cuda import rope_kv_write as cuda

    kv_heads, width = 2, 64
    case = make_case(2, kv_heads, width, torch.bfloat16, norm=False)
    assert case.cos_sin is not None
    # Slots have 128 elements: this one begins at element 2^31. What lies before is never touched.
    far = 1 << 24
    slots = torch.tensor([far, 0, far + 1], dtype=torch.int32, device=device)
    shape = (far // PAGE_SIZE + 1, PAGE_SIZE, kv_heads, width)
    strides = (PAGE_SIZE * kv_heads * width, kv_heads * width, width, 1)
    pages = [torch.empty_strided(shape, strides, dtype=torch.bfloat16, device=device) for _ in range(2)]
    qkv, cos_sin = far_apart(case.qkv[TOKENS], device), case.cos_sin[TOKENS].to(device)
    query = cuda.rope_kv_write(qkv, None, cos_sin, slots, pages[0], pages[1], EPS)
    near = run(case)
    assert same_bits(query.cpu(), near[0][TOKENS])
    for tensor, expected in zip(pages, near[1:], strict=True):
        written = tensor.flatten(0, 1)[slots.long()].cpu()
        assert same_bits(written, expected.flatten(0, 1)[case.slots[TOKENS]])


@DTYPES
def test_a_slot_beyond_the_pages_is_refused_and_nothing_written(dtype: torch.dtype) -> None:
    keys, values = (torch.full((3, 16, 1, 16), torch.nan, dtype=dtype) for _ in range(2))
    qkv = torch.randn(2, 64).to(dtype)
    with pytest.raises((IndexError, RuntimeError)):
        rope_kv_write(qkv, None, torch.ones(2, 16), torch.tensor([0, 48]), keys, values, EPS)
    if can_pack(keys):
        pages = PackedKeys(keys.fill_(torch.nan)), PackedValues(values.fill_(torch.nan))
        with pytest.raises(IndexError):
            rope_kv_write(qkv, None, torch.ones(2, 16), torch.tensor([0, 48]), *pages, EPS)
        assert keys.isnan().all() and values.isnan().all()
