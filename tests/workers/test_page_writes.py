"""Keys and values of a step go to their slots and nowhere else."""

from __future__ import annotations

import pytest
import torch

from workers.models.page_writes import PageWrites


@pytest.mark.parametrize("slots", [[5, 0, 23], [5, -1, 23], [-1, -1, -1]])
def test_slots_named_and_no_others(slots: list[int]) -> None:
    """Values of another width than keys; a padded token is not written."""
    keys, values = torch.randn(3, 2, 8), torch.randn(3, 2, 5)
    k_pages, v_pages = torch.full((6, 4, 2, 8), torch.nan), torch.full((6, 4, 2, 5), torch.nan)
    PageWrites(torch.tensor(slots, dtype=torch.int32)).write(keys, values, k_pages, v_pages)
    for new, pages in ((keys, k_pages), (values, v_pages)):
        rows = pages.flatten(0, 1)
        written = [slot for slot in slots if slot >= 0]
        for token, slot in enumerate(slots):
            assert slot < 0 or torch.equal(rows[slot], new[token])
        assert int(rows.isnan().all(-1).all(-1).sum()) == len(rows) - len(written)


def test_a_slot_beyond_the_pages_raises() -> None:
    pages = torch.zeros(2, 4, 1, 8)
    with pytest.raises((IndexError, RuntimeError)):
        PageWrites(torch.tensor([8])).write(torch.ones(1, 1, 8), torch.ones(1, 1, 8), pages, pages)
