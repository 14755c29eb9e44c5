"""Turning the inputs of a step into those of the next."""

from __future__ import annotations

import pytest
import torch

from kernels.cuda.advance import advance

PAGE_SIZE = 16


def run(state: list[torch.Tensor], chosen: torch.Tensor, tables: torch.Tensor) -> None:
    tokens, positions, slots, lengths = state
    advance(tokens, positions, slots, lengths, chosen, tables, page_size=PAGE_SIZE)


@pytest.mark.parametrize("items", [0, 1, 5, 128, 131])
def test_each_sequence_moves_on_by_one(items: int, device: str) -> None:
    generator = torch.Generator().manual_seed(items)
    lengths = torch.randint(0, 60, (items,), generator=generator)
    lengths[::7] = 0  # padded
    lengths[1::5] = 16  # the next token begins a page
    tables = torch.randint(1, 1 << 30, (items, 4), generator=generator, dtype=torch.int32)
    tokens, chosen = (torch.randint(0, 1000, (items,), generator=generator) for _ in "ab")
    positions, slots = (lengths - 1).clamp(min=0), torch.randint(0, 99, (items,), generator=generator)
    before = [tensor.clone() for tensor in (tokens, positions, slots, lengths)]
    state = [tensor.to(device) for tensor in (tokens, positions, slots, lengths.to(torch.int32))]
    run(state, chosen.to(device), tables.to(device))
    after = [tensor.cpu().tolist() for tensor in state]
    for item, length in enumerate(lengths.tolist()):
        now = [column[item] for column in after]
        if length == 0:
            assert now == [int(column[item]) for column in before], "a padded item was touched"
        else:
            slot = int(tables[item, length // PAGE_SIZE]) * PAGE_SIZE + length % PAGE_SIZE
            assert now == [int(chosen[item]), length, slot, length + 1]


def test_beyond_the_table_nothing_is_written_anywhere(device: str) -> None:
    state = [torch.tensor([value], device=device) for value in (5, 31, 31)]
    lengths = torch.tensor([32], dtype=torch.int32, device=device)
    tables = torch.tensor([[1, 2, 77]], dtype=torch.int32, device=device)[:, :2]
    run([*state, lengths], torch.tensor([9], device=device), tables)
    assert [int(tensor) for tensor in (*state, lengths)] == [9, 32, -1, 33]
