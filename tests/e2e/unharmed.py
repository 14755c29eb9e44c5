"""What must hold of a gateway after anything that was done to it from outside."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from quire.v1 import executor_pb2 as pb

from tests.gateway_process import GatewayProcess

TIMEOUT_S = 30.0


@contextmanager
def unharmed(gateway: GatewayProcess) -> Iterator[None]:
    """Afterwards the same processes serve, and all that was created can be released."""
    before = _processes(gateway)
    yield
    # Calls that were given up are being rolled back.
    give_up_s = time.monotonic() + TIMEOUT_S
    while gateway.status().operations_in_flight:
        assert time.monotonic() < give_up_s, "operations are left in flight"
    assert gateway.prefill([1, 2, 3]).kv_cache.seq_len == 3
    release_all(gateway)
    gateway.assert_pools_are_whole()
    assert _processes(gateway) == before
    assert gateway.process.poll() is None


def release_all(gateway: GatewayProcess) -> None:
    """Releases every cache there is."""
    while handles := gateway.stub.ListCaches(
        pb.ListCachesRequest(page_size=1000), timeout=TIMEOUT_S
    ).kv_caches:
        for handle in handles:
            gateway.release(handle.cache_id)


def _processes(gateway: GatewayProcess) -> list[tuple[str, int, int]]:
    return [(worker.worker_id, worker.pid, worker.epoch) for worker in gateway.status().workers]
