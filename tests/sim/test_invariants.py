"""The page of invariants names each planted bug."""

from __future__ import annotations

import re
from pathlib import Path

from tests.sim import (
    planted_in_bytes,
    planted_in_caches,
    planted_in_leases,
    planted_in_shards,
    planted_in_shell,
    planted_in_workers,
)
from tests.sim.planted import plants_of

MODULES = (
    planted_in_bytes,
    planted_in_caches,
    planted_in_leases,
    planted_in_shards,
    planted_in_shell,
    planted_in_workers,
)


def test_the_page_names_what_is_planted() -> None:
    page = (Path(__file__).parent.parent / "INVARIANTS.md").read_text(encoding="utf-8")
    state_machine = page.partition("## Elsewhere")[0].partition("| --- |")[2]
    planted = {bug.__name__ for module in MODULES for bug in plants_of(module)}
    assert planted == set(re.findall(r"`(\w+)`", state_machine))
