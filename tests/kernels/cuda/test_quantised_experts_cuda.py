"""Experts that are quantised as a GPU has them: their products, against those of the dequantised matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kernels.cuda import experts as cuda
from kernels.experts import experts, route
from kernels.gated_activation import Activation
from kernels.gpu_experts import GpuExperts
from kernels.gpu_weight import GpuWeight
from kernels.group_formats import FORMATS, GroupFormat, integer_groups
from tests.kernels.conftest import SELDOM
from tests.kernels.cuda.test_gpu_weight import bytes_on, named
from tests.kernels.grouped_weights import numbers, random_weight
from tests.kernels.references import experts64
from tests.kernels.test_experts import assert_within

COUNT, WIDTH, INNER, K, IDLE = 4, 64, 32, 2, 2
# Tokens: so many that there are more than 16 pairs for each expert, and fewer of them.
MANY, FEW = 33, slice(5)
# Of values in a table, of zero points, and of parts of a group with scales of their own.
FORMS = [FORMATS["mxfp4"], integer_groups(4, 128, torch.float16, zeros=True), FORMATS["q4_k"]]


def stack_of(
    forms: Sequence[GroupFormat], rows: Sequence[int], inputs: int, dtype: torch.dtype, device: str
) -> GpuExperts:
    """Random matrices, with so many rows of each expert in each format."""
    stacks = []
    for form, size in zip(forms, rows, strict=True):
        stack = GpuWeight(COUNT * size, inputs, dtype, form, bytes_on(device))
        stack.write_parts(0, random_weight(form, COUNT * size, inputs).parts(torch.arange(COUNT * size)))
        stacks.append(stack)
    return GpuExperts(stacks, COUNT)


def dense(weights: GpuExperts) -> torch.Tensor:
    return torch.stack([weights[expert].dense() for expert in range(len(weights))]).cpu()


class Case:
    """Experts of which one has no rows, and NaN in the place of its scales."""

    def __init__(
        self, form: GroupFormat, second: GroupFormat, dtype: torch.dtype, device: str, *, tokens: int
    ) -> None:
        forms, rows = ([form], [2 * INNER]) if second is form else ([form, second], [INNER, INNER])
        gate_up = stack_of(forms, rows, WIDTH, dtype, device)
        down = stack_of([form], [WIDTH], INNER, dtype, device)
        self.dense = dense(gate_up), dense(down)
        for stack in (*gate_up.stacks, *down.stacks):
            stack.data.view(COUNT, -1)[IDLE] = 0xFF
        self.weights = gate_up, down
        x = numbers(tokens, WIDTH, seed=1)
        # So that gates are neither 0 nor 1 everywhere.
        self.x = (x / self.dense[0].float().pow(2).sum(2).max().sqrt()).to(dtype)
        ids, self.scores = route(numbers(tokens, COUNT - 1, seed=2), K, normalize=True)
        self.ids = ids + (ids >= IDLE)
        sizes = numbers(COUNT, 2 * INNER, dtype=dtype, seed=3), numbers(COUNT, WIDTH, dtype=dtype, seed=4)
        self.biases = sizes
        self._device = device

    def run(self, rows: slice = slice(None), *, biased: bool = False, **options: Any) -> torch.Tensor:
        x, ids, scores = (each[rows].to(self._device) for each in (self.x, self.ids, self.scores))
        biases = (self.biases[0].to(self._device), self.biases[1].to(self._device)) if biased else None
        gate: Activation = "clamped_swiglu" if biased else "silu"
        return experts(x, *self.weights, ids, scores, gate, biases=biases, **options).cpu()

    def assert_accurate(
        self, actual: torch.Tensor, rows: slice = slice(None), *, biased: bool = False
    ) -> None:
        given = self.x[rows], *self.dense, self.ids[rows], self.scores[rows]
        exact = experts64(*given, *("clamped_swiglu", self.biases) if biased else ("silu",))
        assert_within(actual, *exact)


# Interpreted each format has one of them; few rows in bfloat16 are in the test of bits, too.
@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        pytest.param(form, dtype, marks=() if dtype is often else SELDOM)
        for form, often in zip(FORMS, (torch.bfloat16, torch.float32, torch.float32), strict=True)
        for dtype in (torch.bfloat16, torch.float32)
    ],
    ids=named,
)
def test_few_rows_are_multiplied_by_what_is_dequantised_in_registers(
    form: GroupFormat, dtype: torch.dtype, device: str
) -> None:
    case = Case(form, form, dtype, device, tokens=5)
    case.assert_accurate(case.run())


# Of one format, as gpt_oss has it: interpreted in test_gpt_oss_cuda.py.
@pytest.mark.parametrize("second", [pytest.param(FORMS[0], marks=SELDOM), FORMATS["q8_0"]], ids=named)
def test_biases_and_gate_and_up_in_several_formats(
    second: GroupFormat, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few rows, and of more, for which matrices of some experts are dequantised at a time."""
    case = Case(FORMS[0], second, torch.bfloat16, device, tokens=MANY)
    case.assert_accurate(case.run(FEW, biased=True), FEW, biased=True)
    # Of two experts.
    monkeypatch.setattr(cuda, "SCRATCH_BYTES", 2 * 2 * INNER * WIDTH * 2)
    case.assert_accurate(case.run(biased=True), biased=True)


@pytest.mark.parametrize("form", FORMS[2:], ids=named)
def test_bits_of_a_row_do_not_depend_on_the_others(
    form: GroupFormat, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With any number of them in a batch-invariant model, else with few."""
    case = Case(form, form, torch.bfloat16, device, tokens=MANY)
    monkeypatch.setattr(cuda, "SCRATCH_BYTES", 2 * 2 * INNER * WIDTH * 2)
    together, few = case.run(batch_invariant=True), case.run(FEW)
    case.assert_accurate(together)
    for rows in (slice(2, 3), FEW):
        assert torch.equal(case.run(rows, batch_invariant=True), together[rows])
    assert torch.equal(case.run(slice(2, 3)), few[2:3])
    # They are those of the dequantised matrices.
    x, gate_up, down, ids, scores = (each.to(device) for each in (case.x, *case.dense, case.ids, case.scores))
    plain = cuda.experts(x, gate_up, down, ids, scores, "silu", batch_invariant=True)
    assert torch.equal(plain.cpu(), together)
