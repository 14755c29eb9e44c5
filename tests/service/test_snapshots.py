"""What a refresh of all workers' snapshots leaves in their slots."""

from __future__ import annotations

from typing import cast

import pytest
from quire.v1 import worker_pb2

from service.config import Config
from service.pool.incarnation import Incarnation
from service.pool.launcher import Launcher
from service.pool.model_versions import WorkerSlot
from service.pool.supervisor import Supervisor
from tests.service.served import versions_of

BEFORE, AFTER = 3, 4


class Asked:
    """An incarnation that has been checked; before it says so, a heartbeat of the others comes."""

    def __init__(self, slot: WorkerSlot, others: list[WorkerSlot]) -> None:
        slot.ready = worker_pb2.WorkerReady()
        self.slot = slot
        self._others = others

    async def request_snapshot(self, *, check_integrity: bool, **_: object) -> worker_pb2.WorkerSnapshot:
        intact = True if check_integrity else None
        self.slot.snapshot = answer = worker_pb2.WorkerSnapshot(step_number=BEFORE, pool_intact=intact)
        for slot in self._others:
            slot.snapshot = worker_pb2.WorkerSnapshot(step_number=AFTER)
        return answer


@pytest.mark.parametrize("checks", [True, False])
async def test_a_heartbeat_hides_nothing_and_is_not_hidden(checks: bool) -> None:
    supervisor = Supervisor(Config(), versions_of(workers=2), cast(Launcher, None))
    slots = supervisor.versions.all_slots
    supervisor._running = {
        (slot.worker_id, slot.epoch): cast(Incarnation, Asked(slot, slots)) for slot in slots
    }
    checked = await supervisor.refresh_snapshots(check_integrity=checks)
    assert [slot.snapshot.step_number for slot in checked] == [AFTER, AFTER]
    assert [slot.snapshot.pool_intact for slot in checked] == [checks, checks]
