"""The compiled mixture of experts against its parts, pair by pair, to the bit."""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest
import torch

from kernels import experts as module
from kernels.experts import experts, matrix_of, pack_experts
from kernels.float8_weight import Float8Format, Float8Weight
from kernels.gated_activation import ACTIVATIONS, UNGATED, Activation, gated_activation
from kernels.group_formats import FORMATS, GroupFormat, integer_groups
from kernels.linear import DenseWeight, linear
from kernels.stacked_weight import StackedWeight
from kernels.weight import Weight
from kernels.weight_formats import WeightFormat
from tests.families import paired
from tests.kernels.grouped_weights import random_weight
from tests.kernels.instruction_sets import need_compiled
from tests.kernels.test_experts import choices, matrices, pack

DTYPES = [torch.bfloat16, torch.float32]


class Case:
    """A mixture of experts with packed weights, and rows for it."""

    def __init__(
        self, tokens: int, count: int, k: int, inner: int, width: int, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.plain = matrices(count, inner, width, dtype)
        self.gate_up, self.down = (pack(weight) for weight in self.plain)
        self.x = torch.randn(tokens, width + 8).to(dtype)[:, 8:]  # strided
        self.ids, self.weights = choices(tokens, count, k)
        self.biases: tuple[torch.Tensor, torch.Tensor] | None = None

    def run(self, activation: Activation = "silu", rows: slice = slice(None)) -> torch.Tensor:
        given = self.x[rows], self.gate_up, self.down, self.ids[rows], self.weights[rows]
        return experts(*given, activation, biases=self.biases)

    def one_by_one(self, activation: Activation = "silu") -> torch.Tensor:
        """Each pair of a token and an expert by itself, by the kernels for its parts."""
        totals = []
        for row, ids, weights in zip(self.x[:, None], self.ids.tolist(), self.weights.float(), strict=True):
            total = torch.tensor(-0.0)
            for expert, weight in zip(ids, weights, strict=True):
                into, out_of = (None, None) if self.biases is None else (each[expert] for each in self.biases)
                inner = gated_activation(linear(row, matrix_of(self.gate_up, expert), into), activation)
                total = total + linear(inner, matrix_of(self.down, expert), out_of)[0].float() * weight
            totals.append(total.to(self.x.dtype))
        return torch.stack(totals)


@pytest.fixture
def one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled kernel: fail where experts are run one after the other."""
    need_compiled()

    def refuse(*_: object) -> None:
        raise AssertionError("not computed by the kernel")

    monkeypatch.setattr(module, "_one_by_one", refuse)


@pytest.mark.usefixtures("one_call")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("tokens", "count", "k", "inner", "width"),
    [
        *[(1, 1, 1, 1, 3), (5, 3, 2, 40, 72), (8, 4, 3, 64, 128), (13, 64, 8, 33, 200), (90, 2, 2, 130, 66)],
        (300, 1, 1, 40, 33),  # more rows of an expert than pass a weight at once
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_those_of_each_pair_by_itself(
    tokens: int, count: int, k: int, inner: int, width: int, activation: Activation, dtype: torch.dtype
) -> None:
    case = Case(tokens, count, k, inner, width, dtype)
    if activation == UNGATED:
        case.gate_up = pack(case.plain[0][:, :inner])
    assert torch.equal(case.run(activation), case.one_by_one(activation))


def unrounded(form: GroupFormat) -> GroupFormat:
    return dataclasses.replace(form, rounds_rows=False)


INT4 = integer_groups(4, 64, torch.bfloat16, zeros=True)
# The formats of gate, up and down of one expert after the other; None: that of the rows.
FORMS: dict[str, list[tuple[WeightFormat | None, ...]]] = {
    "q8_0": [(FORMATS["q8_0"],) * 3],
    "as llama.cpp has them": [(FORMATS["q4_k"], FORMATS["q4_k"], FORMATS["q6_k"])],
    "gate and up apart": [(FORMATS["q4_k"], FORMATS["q5_k"], INT4)],
    "some not at all": [(None, FORMATS["q3_k"], None), (INT4, INT4, FORMATS["iq4_xs"]), (None,) * 3],
    "rows that are not rounded": [
        (unrounded(FORMATS["q4_k"]), unrounded(FORMATS["q4_k"]), unrounded(FORMATS["q6_k"])),
        (None, FORMATS["q8_0"], unrounded(INT4)),
    ],
    "8-bit floats": [
        (Float8Format(32),) * 3,
        (Float8Format(), FORMATS["q8_0"], Float8Format(32)),
        (None,) * 3,
    ],
}


def quantised(form: WeightFormat | None, outputs: int, inputs: int, dtype: torch.dtype) -> Weight:
    """Random rows, other ones each time, so large that results are of the size of what goes in."""
    if form is None:
        return DenseWeight(torch.randn(outputs, inputs).div(inputs**0.5).to(dtype))
    if isinstance(form, Float8Format):
        floats = Float8Weight(outputs, inputs, dtype, form, lambda size: torch.empty(size, dtype=torch.uint8))
        values = torch.randn(outputs, inputs).to(torch.float8_e4m3fn)
        floats.write_values(0, values, (torch.rand(outputs, floats.num_scales) + 0.5) / inputs**0.5)
        return floats
    assert isinstance(form, GroupFormat)
    made = random_weight(form, outputs, inputs, dtype)
    parts = made.parts(torch.randperm(outputs))
    size = float(made.dense().float().std()) * inputs**0.5
    for scales in (parts.scales, parts.minima):
        if scales is not None:
            scales.div_(size)
    made.write_parts(0, parts)
    return made


@pytest.mark.usefixtures("one_call")
# Formats go with dtypes, and numbers of tokens with the formats by turns.
@pytest.mark.parametrize(
    ("name", "dtype", "tokens", "k"), paired(product(FORMS, DTYPES), [(300, 2), (33, 3), (5, 2), (1, 1)])
)
def test_bits_of_quantised_experts_are_those_of_each_pair_by_itself(
    name: str, dtype: torch.dtype, tokens: int, k: int
) -> None:
    """With fewer rows of an expert than pass a weight at once, and with more; on one thread and several.

    With biases, too.
    """
    case, inner, width = Case(tokens, 4, k, 96, 160, dtype), 96, 160
    forms = FORMS[name]
    each = [forms[expert % len(forms)] for expert in range(4)]
    gate_up: list[Weight] = []
    for gate, up, _ in each:
        gate_up.append(
            quantised(gate, 2 * inner, width, dtype)
            if gate == up
            else StackedWeight([quantised(one, inner, width, dtype) for one in (gate, up)])
        )
    case.gate_up = pack_experts(gate_up)
    case.down = pack_experts([quantised(down, width, inner, dtype) for *_, down in each])
    if tokens > 1:
        case.biases = torch.randn(4, 2 * inner).to(dtype), torch.randn(4, width).to(dtype)
    together = case.run()
    assert together.isfinite().all() and 0.01 < together.std() < 100
    assert torch.equal(together, case.one_by_one())
    torch.set_num_threads(3)
    assert torch.equal(case.run(), together)


@pytest.mark.usefixtures("one_call")
@pytest.mark.parametrize("k", [1, 2, 5])
def test_weights_of_bfloat16_and_ids_that_are_strided(k: int) -> None:
    case = Case(7, 6, k, 48, 64)
    case.weights = case.weights.bfloat16()
    case.ids = torch.cat([case.ids, case.ids + 1], dim=1)[:, :k]
    assert torch.equal(case.run(), case.one_by_one())


@pytest.mark.usefixtures("one_call")
def test_each_product_and_each_sum_is_rounded_in_its_turn() -> None:
    case = Case(20, 3, 3, 32, 64)
    for weight in case.plain:
        weight[1:] = weight[0]
    case.gate_up, case.down = (pack(weight) for weight in case.plain)
    # Of three equal results the third takes the others away, and what their roundings lost is left.
    case.weights = torch.rand(20, 3)
    case.weights[:, 2] = -(case.weights[:, 0] + case.weights[:, 1])
    expected = case.one_by_one()
    assert 0 < expected.count_nonzero() < expected.numel() and expected.abs().max() < 1e-5
    assert torch.equal(case.run(), expected)


@pytest.mark.usefixtures("one_call")
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_row_depend_neither_on_the_others_nor_on_threads(dtype: torch.dtype) -> None:
    case = Case(40, 8, 3, 96, 160, dtype)
    case.ids[:, 0] = torch.tensor([7, 2] * 20)
    together = case.run()
    alone = [case.run(rows=slice(row, row + 1)) for row in range(40)]
    assert torch.equal(torch.cat(alone), together)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(case.run(), together)


@pytest.mark.usefixtures("one_call")
def test_experts_without_rows_are_not_read_and_nan_stays_in_its_row() -> None:
    case = Case(9, 6, 2, 32, 48)
    case.ids = 2 + torch.arange(18).view(9, 2) % 2
    clean = case.run()
    for weight in case.plain:
        weight[:2], weight[4:] = torch.nan, torch.nan
    case.gate_up, case.down = (pack(weight) for weight in case.plain)
    case.x[4] = torch.nan
    poisoned = case.run()
    others = [row for row in range(9) if row != 4]
    assert poisoned[4].isnan().all() and torch.equal(poisoned[others], clean[others])


@pytest.mark.parametrize(("wrong", "tokens"), [(-1, 1), (2**40, 1), (3, 40)])
def test_an_id_of_no_expert_is_refused(wrong: int, tokens: int) -> None:
    case = Case(tokens, 3, 2, 16, 32)
    case.ids[-1, -1] = wrong
    with pytest.raises((IndexError, RuntimeError)):
        case.run()
