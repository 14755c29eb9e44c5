"""What a lease makes of a process that no gateway has started."""

from __future__ import annotations

import pytest
from quire.v1 import worker_pb2

from workers import pool_member
from workers.common.protocol import EXIT_CONFIG, PROTOCOL
from workers.pool_member import PoolMember, Refused

# The first message of a gateway with the protocol of 2026-11-24 02:48, before workers exported KV.
EARLIER_LEASE = bytes.fromhex(
    "1285010a1036663666366636663666366636663666100719000000000000244022440a08776f726b65722d31120561646465721a04"
    "6175746f20012a046175746f39cdccccccccccec3f42046175746f5080107a04696e666fa1010000000000004e40c801022a206634"
    "386335333230663061333963653861396331653232386434316261306339"
)


async def test_gateway_of_another_version_is_refused_by_name() -> None:
    """These fields keep their numbers, so that versions can tell each other that they differ."""
    lease = worker_pb2.ConnectRequest.FromString(EARLIER_LEASE).lease
    assert (lease.gateway_id, lease.epoch) == ("6f" * 8, 7)
    assert lease.protocol == "f48c5320f0a39ce8a9c1e228d41ba0c9"
    member = PoolMember(worker_pb2.WorkerConfig())
    with pytest.raises(Refused, match="different versions"):
        member._take(lease)
    assert member._worker is None and not member.done.done(), "the next gateway may be of this version"


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
