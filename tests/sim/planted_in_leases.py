"""Planted bugs: in leases of workers on other hosts, for the shell's schedules. Each public name is one."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from service.caches.effects import Claim
from tests.sim.fake_leases import LeasedProcesses
from tests.sim.model_worker import ModelWorker
from tests.sim.planted import begins_at


def earlier_leases_are_heard(patch: pytest.MonkeyPatch) -> None:
    """A worker carries out what arrives late on a stream of an earlier lease."""
    patch.setattr("tests.sim.fake_leases.accepts", lambda processes: not processes.worker.crashed)


@begins_at(35)
def adopted_as_long_as_it_is(patch: pytest.MonkeyPatch) -> None:
    """A worker does not cut what it computed after it was heard last."""
    adopt = ModelWorker.adopt

    def uncut(worker: ModelWorker, claims: list[Claim]) -> dict[int, int]:
        before = {number: list(tokens) for number, tokens in worker.sequences.items()}
        kept = adopt(worker, claims)
        worker.sequences.update((number, before[number]) for number in kept)
        return kept

    patch.setattr(ModelWorker, "adopt", uncut)


def holdings_are_not_told(patch: pytest.MonkeyPatch) -> None:
    holdings = LeasedProcesses.holdings

    def untold(processes: LeasedProcesses) -> Mapping[int, int]:
        holdings(processes)
        return {}

    patch.setattr(LeasedProcesses, "holdings", untold)
