"""Work lists of decode attention: all keys are read once, by programs with about as much to do each."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from kernels.cuda.decode_plan import MIN_PART_KEYS, DecodePlan, num_units_for, plan_units
from kernels.cuda.variant import Variant
from tests.kernels.attention_case import SPLIT, attend, make_case
from tests.kernels.conftest import INTERPRETED
from tests.kernels.cuda.poison import same_bits

TILE, KV_HEADS = 64, 3


def plan_of(lengths: list[int], units: int, window: int | None, device: str) -> DecodePlan:
    return plan_units(torch.tensor(lengths, dtype=torch.int32, device=device), units, window, TILE, KV_HEADS)


def parts_of(plan: DecodePlan) -> list[int]:
    """The number of units of each item."""
    return plan.first_units.diff().tolist()


def tiles_of(length: int, window: int | None) -> int:
    return -(-min(length, window or length) // TILE)


@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize("items", [1, 5, 150])
def test_units_are_those_of_items_in_their_order(items: int, window: int | None, device: str) -> None:
    dice = random.Random(items)
    for most in (700, 40_000):
        lengths = [dice.choice((0, dice.randint(0, most), most)) for _ in range(items)]
        for units in (items + 1, 3 * items):
            plan = plan_of(lengths, units, window, device)
            parts, used = parts_of(plan), int(plan.first_units[-1])
            assert int(plan.first_units[0]) == 0 and min(parts) >= 1 and used <= units
            owners = [item for item, count in enumerate(parts) for _ in range(count)]
            assert not plan.arrived.any() and plan.arrived.shape == (KV_HEADS, units)
            assert plan.unit_items.tolist() == owners + [items] * (units - used)
            tiles = [tiles_of(length, window) for length in lengths]
            share = max(MIN_PART_KEYS // TILE, -(-sum(tiles) // (units - items)))
            for count, own in zip(parts, tiles, strict=True):
                # Every part of several has keys.
                assert count == 1 or (count - 1) * -(-own // count) < own
                # Never smaller than a part may be, and never more than a unit's share.
                assert count == 1 or -(-own // (MIN_PART_KEYS // TILE)) >= count
                assert -(-own // count) <= share


def test_a_long_item_is_divided_as_if_it_were_alone(device: str) -> None:
    """One of 32k tokens among 31 of 1k, as many as Qwen3-8B has heads: 2k keys are the most for a program."""
    units = num_units_for(32, 8, 40_960, 132)
    parts = parts_of(plan_of([1024] * 31 + [32_768], units, None, device))
    assert parts[:31] == [1] * 31 and parts[31] >= 16
    # Equal items are divided equally, and into as many parts as the device runs at once.
    for batch, count in ((1, 49), (8, 6), (16, 3), (24, 2), (64, 1), (256, 1)):
        units = num_units_for(batch, 8, 40_960, 132)
        parts = parts_of(plan_of([32_768] * batch, units, None, device))
        assert len(set(parts)) == 1 and 0.9 * count <= parts[0] <= count
    assert parts_of(plan_of([1024], num_units_for(1, 8, 1024, 132), None, device)) == [8]


def test_the_number_of_units_follows_from_shapes() -> None:
    for batch in (1, 3, 16, 100, 512):
        for kv_heads in (1, 2, 8, 32):
            for longest in (0, 1, 128, 129, 4096, 1 << 20):
                units = num_units_for(batch, kv_heads, longest, 132)
                assert batch <= units <= max(2 * batch, 3 * 132 // kv_heads)
                assert (units == batch) == (longest <= MIN_PART_KEYS)


def test_all_layers_with_the_same_window_have_one_list(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    from kernels.cuda import paged_attention as module

    made: list[int | None] = []

    def noted(lengths: torch.Tensor, units: int, window: int | None, tile: int, kv_heads: int) -> DecodePlan:
        made.append(window)
        return plan_units(lengths, units, window, tile, kv_heads)

    monkeypatch.setattr(module, "plan_units", noted)
    case = make_case([(1, 300), (1, 40)], device)
    first = attend(case, SPLIT)
    assert torch.equal(attend(case, SPLIT), first) and made == [None]


def test_an_item_of_several_parts_takes_no_further_launch(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    launched: list[str] = []
    launch = Variant.launch

    def noted(self: Variant, grid: tuple[int, ...], *arguments: object) -> None:
        launched.append(self.kernel.fn.__name__)
        launch(self, grid, *arguments)

    monkeypatch.setattr(Variant, "launch", noted)
    case = make_case([(1, 300), (1, 40)], device)
    case.check(attend(case, SPLIT))
    assert launched == ["plan_kernel", "decode_kernel"]


@pytest.mark.skipif(not INTERPRETED, reason="the order of programs is that of the interpreter")
def test_bits_do_not_depend_on_which_part_is_written_last(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """With sinks, which are added with the parts.

    The counts are zero again after any order, for the next layer and the next replay of a graph.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    case = make_case([(1, 300), (1, 5), (1, 0), (1, 140)], device, features=("sinks",))
    in_order = attend(case, SPLIT)
    (plan,) = case.batch.plans.values()
    assert max(parts_of(plan)) > 2
    choose = InterpreterBuilder.set_grid_idx

    def choose_from_the_end(self: Any, x: int, y: int, z: int) -> None:
        choose(self, self.grid_dim[0] - 1 - x, self.grid_dim[1] - 1 - y, z)

    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", choose_from_the_end)
    for _ in range(2):
        assert not plan.arrived.any()
        assert same_bits(attend(case, SPLIT), in_order)
    assert next(iter(case.batch.plans.values())) is plan and not plan.arrived.any()
