"""What holds of the adapters of a worker between two calls of their table."""

from __future__ import annotations

from typing import Any

from workers.adapters.table import AdapterTable


def check_adapters(table: AdapterTable[Any]) -> None:
    """Raises AssertionError if an invariant does not hold."""
    _check_slots(table)
    for number, known in table._known.items():
        assert known.metrics.waiting == sum(forward.adapter == number for forward in table._waiting)
    for forward in table._waiting:
        known = table._known[forward.adapter]
        is_unplaced = table._unplaced is not None and table._unplaced[0] is known
        is_wanted = known is table._reading or known in table._wanted
        assert is_unplaced or is_wanted or known.slot >= 0, "what is waited for comes"


def _check_slots(table: AdapterTable[Any]) -> None:
    resident = table._resident
    slots = {number: known.slot for number, known in table._known.items() if known.slot >= 0}
    assert sorted([*slots.values(), *resident._free_slots]) == [*range(resident._num_slots or 0)], "one owner"
    assert resident._resident.keys() == slots.keys()
    assert all(known.metrics.resident == (known.slot >= 0) for known in table._known.values())
    assert resident._used_bytes == sum(known.metrics.size_bytes for known in resident._resident.values())
    assert resident._used_bytes <= resident._max_bytes
