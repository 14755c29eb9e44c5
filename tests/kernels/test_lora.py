"""Low-rank adapters of several rows against float64, their bits, and what must not matter to them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from kernels.cpu import linear as cpu_linear
from kernels.lora import LoraTable, add_lora
from kernels.lora_pairs import MAX_RANK, LoraPairs, Pair
from tests.kernels.instruction_sets import need_compiled

DTYPES = [torch.bfloat16, torch.float32]
CPU = torch.device("cpu")
# Inputs, and the outputs of each part: those that fill the last blocks, and those that do not; odd ones.
SHAPES = [(64, (48, 16, 16)), (160, (33, 7, 20)), (47, (100, 1)), (33, (130,)), (288, (1040, 32))]


@pytest.fixture(params=["compiled", "torch"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "compiled":
        need_compiled()
    else:
        monkeypatch.setattr(cpu_linear, "can_multiply", lambda _: False)


class Case:
    """A projection with adapters of random ranks and parts in its slots, of which some are empty."""

    def __init__(
        self,
        rows: int,
        inputs: int,
        outputs: Sequence[int],
        dtype: torch.dtype,
        *,
        slots: int = 6,
        ranks: Sequence[int] = (1, 2, 5, 8, 16, 17, 31, 33, 64),
        seed: int = 0,
    ) -> None:
        dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)

        def numbers(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        self.outputs, self.dtype, self.inputs = outputs, dtype, inputs
        self.pairs: list[list[Pair]] = []
        for slot in range(slots):
            pairs: list[Pair] = []
            for width in outputs:
                rank = dice.choice(ranks)
                present = slot % 3 == 0 or dice.random() < 0.5
                pairs.append((numbers(rank, inputs), numbers(width, rank)) if present else None)
            self.pairs.append(pairs)
        self.x = numbers(rows, inputs + 24)[:, 24:]  # strided
        self.y = numbers(rows, sum(outputs))
        self.slots = torch.tensor([dice.randrange(-1, slots) for _ in range(rows)], dtype=torch.int32)

    def table(self) -> LoraTable:
        """A table of the pairs as they are now."""
        table = LoraTable(len(self.pairs), self.inputs, self.outputs, self.dtype, CPU)
        for slot, pairs in enumerate(self.pairs):
            if any(pair is not None for pair in pairs):
                table.set(slot, LoraPairs(pairs, self.inputs, self.outputs, self.dtype, pack=True))
        return table

    def run(self, rows: Sequence[int] | slice = slice(None), table: LoraTable | None = None) -> torch.Tensor:
        """The sum for some of the rows."""
        y = self.y[rows].clone()
        add_lora(y, self.x[rows], table or self.table(), self.slots[rows])
        return y

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum in float64, and what each element may be off by.

        A product of n terms loses at most n * 2^-24 of the sum of their sizes in float32, and what its inputs
        are off by. x A^T and the sum are rounded to the dtype.
        """
        unit = torch.finfo(self.dtype).eps / 2
        found, allowed = self.y.double(), torch.zeros(self.y.shape, dtype=torch.float64)
        for row, slot in enumerate(self.slots.tolist()):
            first = 0
            for pair, width in zip(self.pairs[slot], self.outputs, strict=True):
                here = (row, slice(first, first + width))
                first += width
                if slot < 0 or pair is None:
                    continue
                x, a, b = self.x[row].double(), pair[0].double(), pair[1].double()
                inner = a @ x
                inner_off = len(x) * 2**-24 * (a.abs() @ x.abs())
                inner_off += unit * (inner.abs() + inner_off)
                found[here] += b @ inner
                allowed[here] = b.abs() @ (len(inner) * 2**-24 * (inner.abs() + inner_off) + inner_off)
                allowed[here] += (unit + 2**-24) * (found[here].abs() + allowed[here])
        return found, allowed

    def check(self) -> None:
        exact, allowed = self.exact()
        found = self.run()
        assert found.dtype is self.dtype and ((found.double() - exact).abs() <= allowed).all()
        # An adapter with a mistake would pass if it were within the bounds.
        changed = (exact != self.y).any(1)
        assert ((exact - self.y).abs().amax(1) > 10 * allowed.amax(1))[changed].all()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 7, 70])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_rows_with_several_adapters(
    inputs: int, outputs: tuple[int, ...], rows: int, dtype: torch.dtype
) -> None:
    Case(rows, inputs, outputs, dtype, seed=rows).check()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slots", [1, 40])
def test_more_rows_than_pass_at_a_time(slots: int, dtype: torch.dtype) -> None:
    Case(600, 48, (40, 24), dtype, slots=slots, seed=slots).check()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "ranks",
    [
        # What fills the last block, one more, and one less.
        [*range(1, 9), *(rank for rank in range(9, MAX_RANK + 1) if rank % 16 in (15, 0, 1))],
        pytest.param(range(1, MAX_RANK + 1), marks=pytest.mark.thorough),
    ],
    ids=["around blocks", "every"],
)
def test_any_rank(ranks: Sequence[int], dtype: torch.dtype) -> None:
    for rank in ranks:
        Case(5, 40, (20, 40), dtype, slots=4, ranks=[rank], seed=rank).check()


@pytest.mark.usefixtures("backend")
def test_only_x_a_and_the_sum_are_rounded() -> None:
    """Near 256 numbers are 2 apart, so 1 and a little more tells whether more is rounded, or less."""
    little = 2.0**-9  # beside 1 it is lost in bfloat16
    y = torch.tensor([[256.0], [256.0]], dtype=torch.bfloat16)
    x = torch.tensor([[1.0, little], [0.0, 1.0]], dtype=torch.bfloat16)
    a, b = torch.tensor([[1.0, 1.0], [0.0, 1.0]]), torch.tensor([[1.0, little]])
    table = LoraTable(2, 2, (1,), torch.bfloat16, CPU)
    table.set(0, LoraPairs([(a[:1], b[:, :1])], 2, (1,), torch.bfloat16, pack=True))
    table.set(1, LoraPairs([(a, b)], 2, (1,), torch.bfloat16, pack=True))
    add_lora(y, x, table, torch.tensor([0, 1], dtype=torch.int32))
    # Half-way between two numbers the even one is taken: of 257 that is 256, and of a little more 258.
    assert y.tolist() == [[256.0], [258.0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_bits_of_a_row_depend_neither_on_the_others_nor_on_threads(
    inputs: int, outputs: tuple[int, ...], dtype: torch.dtype
) -> None:
    need_compiled()
    case = Case(300, inputs, outputs, dtype, slots=9)
    table = case.table()
    alone = torch.cat([case.run([row], table) for row in range(300)])
    dice = random.Random(1)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(case.run(table=table), alone)
        for count in (2, 3, 8, 17, 40, 290):
            rows = dice.sample(range(300), count)
            assert torch.equal(case.run(rows, table), alone[rows])
    case.slots[:] = 3
    together = case.run(table=table)
    assert torch.equal(together, torch.cat([case.run([row], table) for row in range(300)]))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_other_rows_and_slots_does_not_matter(dtype: torch.dtype) -> None:
    """Nor what is in a slot that no row has, nor what is beside the rows in memory."""
    case = Case(40, 47, (33, 20), dtype, slots=9)
    case.slots[case.slots == 6] = -1
    case.slots[11] = 3
    clean = case.run()
    assert clean.isfinite().all()
    for pair in case.pairs[6]:
        assert pair is not None
        pair[0].fill_(torch.nan)
        pair[1].fill_(torch.nan)
    case.x[case.slots < 0] = torch.nan
    beside = case.x.as_strided((40, 24), case.x.stride(), 0)
    beside.fill_(torch.nan)
    case.x[11] = torch.nan
    poisoned = case.run()
    others = [row for row in range(40) if row != 11]
    assert torch.equal(poisoned[others], clean[others])
    assert poisoned[11].isnan().all()


def test_a_dtype_without_a_kernel() -> None:
    Case(12, 40, (30, 20), torch.float16).check()
