"""Adapters on the GPU or in the interpreter: against float64, roundings, launches, addresses.

That bits do not depend on other rows is tested with the other batch-invariant kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kernels.cuda.lora import StackedLora
from kernels.cuda.variant import Variant
from kernels.linear import DenseWeight
from kernels.lora import add_lora, new_table, row_slots
from kernels.lora_pairs import LoraPairs
from tests.kernels.cuda.poison import same_bits

Pair = tuple[torch.Tensor, torch.Tensor]
# For each part of the outputs, None: the part has no adapter.
Adapter = list[Pair | None]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def use_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter too, also for adapters that a model on the CPU packs otherwise."""
    monkeypatch.setattr("kernels.lora._has_triton_kernels", lambda _: True)
    monkeypatch.setattr("kernels.lora_pairs.pack_weight", DenseWeight)


@pytest.fixture(autouse=True)
def _triton_lora(monkeypatch: pytest.MonkeyPatch) -> None:
    use_triton(monkeypatch)


def make_adapter(
    inputs: int, parts: Sequence[int], ranks: Sequence[int], dtype: torch.dtype, seed: int
) -> Adapter:
    """Normal values; rank 0: none."""
    generator = torch.Generator().manual_seed(seed)
    pairs = [
        tuple(
            torch.randn(shape, generator=generator).to(dtype) for shape in ((rank, inputs), (outputs, rank))
        )
        for outputs, rank in zip(parts, ranks, strict=True)
    ]
    return [(a, b) if len(a) else None for a, b in pairs]


def make_table(
    adapters: dict[int, Adapter],
    inputs: int,
    parts: Sequence[int],
    dtype: torch.dtype,
    device: str,
    *,
    slots: int,
    max_rank: int,
) -> StackedLora:
    """What no adapter fills is NaN."""
    table = new_table(slots, max_rank, inputs, parts, dtype, torch.device(device))
    assert isinstance(table, StackedLora)
    for matrices in (table.a, table.b):
        matrices.fill_(torch.nan)
    for slot, adapter in adapters.items():
        table.set(slot, pairs_of(adapter, inputs, parts))
    return table


def pairs_of(adapter: Adapter, inputs: int, parts: Sequence[int]) -> LoraPairs | None:
    dtypes = [pair[0].dtype for pair in adapter if pair is not None]
    return LoraPairs(adapter, inputs, parts, dtypes[0], pack=False) if dtypes else None


def adapted64(
    y: torch.Tensor, x: torch.Tensor, adapters: dict[int, Adapter], parts: Sequence[int], slots: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result in float64, and what may differ from it.

    A sum of n products in float32 is off by at most n * 2^-24 times the sum of their sizes, in any order.
    x A^T and the result are rounded to the dtype, by at most half of its epsilon.
    """
    exact, allowed = y.double(), torch.zeros_like(y, dtype=torch.float64)
    half, numbers = torch.finfo(y.dtype).eps / 2, torch.tensor(slots)
    for slot, adapter in adapters.items():
        rows, begin = (numbers == slot).nonzero().to(y.device), 0  # [rows, 1]
        wide = x[rows[:, 0]].double()
        for outputs, pair in zip(parts, adapter, strict=True):
            at = rows, torch.arange(begin, begin + outputs, device=y.device)
            begin += outputs
            if pair is None:
                continue
            a, b = (matrix.to(y.device).double().T for matrix in pair)
            inner = wide @ a
            lost = half * inner.abs() + (1 + half) * (len(a) + 1) * 2**-24 * (wide.abs() @ a.abs())
            sizes = (inner.abs() + lost) @ b.abs() + exact[at].abs()
            exact[at] += inner @ b
            summed = lost @ b.abs() + (len(b) + 2) * 2**-24 * sizes
            allowed[at] = summed + half * (exact[at].abs() + summed)
    return exact, allowed


def run(
    table: StackedLora, y: torch.Tensor, x: torch.Tensor, slots: Sequence[int], device: str
) -> torch.Tensor:
    """Add to a copy of y, and return it on the CPU. Behind y and x in memory is NaN, and stays so."""
    behind = [torch.full((each.numel() + 64,), torch.nan, dtype=each.dtype, device=device) for each in (y, x)]
    y_placed, x_placed = (
        memory[: each.numel()].view(each.shape).copy_(each)
        for memory, each in zip(behind, (y, x), strict=True)
    )
    numbers = torch.tensor(slots, dtype=torch.int32, device=device)
    add_lora(y_placed, x_placed, table, row_slots(numbers, len(table.a)))
    assert behind[0][y.numel() :].isnan().all(), "written behind the outputs"
    return y_placed.cpu()


def random_rows(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> Pair:
    generator = torch.Generator().manual_seed(rows)
    y, x = (torch.randn(rows, width, generator=generator).to(dtype) for width in (outputs, inputs))
    return y, x


# Rows of one slot beside each other and apart, more than a tile of them, and some without an adapter.
SLOTS = [2, 2, -1, 0, 2, 3, 0, -1, 1, *[2] * 40, -1, 3]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("max_rank", "ranks"),
    [
        (256, [(256, 100, 0), (1, 16, 17), (0, 0, 3), (64, 65, 129)]),
        (8, [(8, 8, 8), (0, 1, 0), (3, 0, 0), (0, 0, 7)]),
        (40, [(40, 32, 33), (16, 0, 1), (5, 40, 40), (0, 0, 0)]),
    ],
    ids=["large", "small", "between"],
)
def test_as_in_float64(
    max_rank: int, ranks: list[tuple[int, int, int]], dtype: torch.dtype, device: str
) -> None:
    inputs, parts = 150, (140, 16, 70)
    adapters = {slot: make_adapter(inputs, parts, each, dtype, slot) for slot, each in enumerate(ranks)}
    table = make_table(adapters, inputs, parts, dtype, device, slots=6, max_rank=max_rank)
    y, x = random_rows(len(SLOTS), inputs, sum(parts), dtype)
    actual = run(table, y, x, SLOTS, device)
    exact, allowed = adapted64(y, x, adapters, parts, SLOTS)
    error = (actual.double() - exact).abs()
    assert (error <= allowed).all(), f"off by {(error - allowed).max()} more than allowed"
    # Where nothing is allowed there is no adapter: not a bit changes.
    untouched = allowed == 0
    assert untouched.any() and torch.equal(actual[untouched], y[untouched])


@pytest.mark.parametrize("inputs", [1000, 2100, 9000])
def test_splits_of_the_inputs_add_up(inputs: int, device: str) -> None:
    """A number of splits for each size, none of which is filled."""
    parts = (20,)
    adapters = {1: make_adapter(inputs, parts, (3,), torch.bfloat16, 1)}
    table = make_table(adapters, inputs, parts, torch.bfloat16, device, slots=2, max_rank=4)
    y, x = random_rows(3, inputs, 20, torch.bfloat16)
    exact, allowed = adapted64(y, x, adapters, parts, [1, 1, 1])
    assert ((run(table, y, x, [1, 1, 1], device).double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_rounds_where_the_reference_does(dtype: torch.dtype, device: str) -> None:
    """Sums of small integers are exact in float32, so that only the roundings to the dtype are left."""
    generator = torch.Generator().manual_seed(4)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-9, 10, shape, generator=generator).to(dtype)

    y, x, a, b = integers(40, 24), integers(40, 2048), integers(4, 2048), integers(24, 4)
    inner = (x.float() @ a.float().T).to(dtype)
    expected = (y.float() + inner.float() @ b.float().T).to(dtype)
    table = make_table({0: [(a, b)]}, 2048, (24,), dtype, device, slots=1, max_rank=4)
    assert torch.equal(run(table, y, x, [0] * 40, device), expected)


def test_a_slot_has_the_adapter_that_was_set_last(device: str) -> None:
    """With a smaller rank than before, in other parts, or none."""
    inputs, parts, dtype = 40, (24, 8), torch.float32
    y, x = random_rows(4, inputs, 32, dtype)
    slots = [0, 1, 0, -1]
    kept = make_adapter(inputs, parts, (5, 5), dtype, 9)
    table = make_table({0: kept, 1: kept}, inputs, parts, dtype, device, slots=2, max_rank=8)
    for ranks in ((8, 8), (2, 3), (0, 8), (8, 0), (0, 0), (1, 1)):
        adapters = {0: kept, 1: make_adapter(inputs, parts, ranks, dtype, 3)}
        table.set(1, pairs_of(adapters[1], inputs, parts))
        exact, allowed = adapted64(y, x, adapters, parts, slots)
        assert ((run(table, y, x, slots, device).double() - exact).abs() <= allowed).all()


def test_no_rows(device: str) -> None:
    table = make_table({}, 40, (24,), torch.float32, device, slots=2, max_rank=4)
    assert run(table, torch.empty(0, 24), torch.empty(0, 40), [], device).shape == (0, 24)


def test_a_row_that_is_not_finite_harms_no_other(device: str) -> None:
    inputs, parts, dtype = 40, (24,), torch.float32
    adapters = {
        0: make_adapter(inputs, parts, (4,), dtype, 0),
        1: make_adapter(inputs, parts, (4,), dtype, 1),
    }
    table = make_table(adapters, inputs, parts, dtype, device, slots=2, max_rank=4)
    y, x = random_rows(5, inputs, 24, dtype)
    expected = run(table, y, x, [0, 1, 0, -1, 1], device)
    x[0], x[3] = torch.nan, torch.inf
    table.set(1, pairs_of([(torch.full((4, inputs), torch.inf), torch.ones(24, 4))], inputs, parts))
    actual = run(table, y, x, [0, 1, 0, -1, 1], device)
    assert torch.equal(actual[2:4], expected[2:4])


@pytest.mark.parametrize("count", [1, 7, 100])
def test_the_launch_does_not_depend_on_the_slots(
    count: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is captured once and replayed with other slots, of which any distribution has enough programs."""
    launched: list[tuple[Variant, tuple[int, ...]]] = []
    launch = Variant.launch

    def record(self: Variant, grid: tuple[int, ...], *arguments: object) -> None:
        launched.append((self, grid))
        launch(self, grid, *arguments)

    monkeypatch.setattr(Variant, "launch", record)
    inputs, parts, dtype = 16, (16,), torch.float32
    adapters = {slot: make_adapter(inputs, parts, (2,), dtype, slot) for slot in range(5)}
    table = make_table(adapters, inputs, parts, dtype, device, slots=5, max_rank=2)
    y, x = random_rows(count, inputs, 16, dtype)
    spread = [index % 5 for index in range(count)]
    # The fullest distribution has a block that is not full in every slot.
    uneven = [min(index, 4) for index in range(count)]
    for slots in (spread, uneven, [3] * count, [-1] * count):
        exact, allowed = adapted64(y, x, adapters, parts, slots)
        assert ((run(table, y, x, slots, device).double() - exact).abs() <= allowed).all()
    assert len(launched) == 8 and launched[:2] == launched[2:4] == launched[4:6] == launched[6:]


def test_slots_beyond_32_bits(device: str) -> None:
    """The last one, behind others that are never read."""
    inputs, rank, dtype = 4096, 256, torch.bfloat16
    slots = (1 << 31) // (rank * inputs) + 1
    near = make_table(
        {0: make_adapter(inputs, (inputs,), (3,), dtype, 0)},
        inputs,
        (inputs,),
        dtype,
        device,
        slots=1,
        max_rank=rank,
    )
    far = StackedLora(1, rank, inputs, (inputs,), dtype, torch.device(device))
    for name in ("a", "b"):
        matrices = getattr(near, name)
        behind = torch.empty_strided(
            (slots, *matrices.shape[1:]), matrices.stride(), dtype=dtype, device=device
        )
        behind[-1] = matrices[0]
        setattr(far, name, behind)
    far.ranks = torch.zeros(slots, 1, dtype=torch.int32, device=device)
    far.ranks[-1] = 3
    y, x = random_rows(2, inputs, inputs, dtype)
    assert same_bits(run(far, y, x, [slots - 1] * 2, device), run(near, y, x, [0, 0], device))
