"""What a lease makes of a process that no gateway has started."""

from __future__ import annotations

import pytest
from quire.v1 import worker_pb2

from workers import pool_member
from workers.pool_member import PROTOCOL, PoolMember
from workers.process import EXIT_CONFIG


async def test_lease_decides_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a bad one does not end `quire worker`, and what another host has proved says nothing of this one."""
    configs: list[worker_pb2.WorkerConfig] = []

    def make(config: worker_pb2.WorkerConfig, *_: object) -> object:
        configs.append(config)
        return object()

    async def refuse(*_: object) -> int:
        return EXIT_CONFIG

    monkeypatch.setattr(pool_member, "make_worker", make)
    monkeypatch.setattr(pool_member, "run_worker", refuse)
    monkeypatch.setattr(pool_member, "configure_logging", lambda _: None)
    member = PoolMember(worker_pb2.WorkerConfig(threads=3))
    config = worker_pb2.WorkerConfig(model="adder", threads=1, workers=4, model_was_proved=True)
    member._take(worker_pb2.Lease(gateway_id="x", epoch=1, protocol=PROTOCOL, config=config))
    assert await member.done not in (0, EXIT_CONFIG)
    (used,) = configs
    assert (used.threads, used.workers, used.model_was_proved) == (3, 1, False)
