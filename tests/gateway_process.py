"""A real gateway with real workers in processes of their own, for tests from end to end."""

from __future__ import annotations

from quire.v1 import executor_pb2

from benchmarks import checkout, gateway_process

ROOT = checkout.ROOT


class GatewayProcess(gateway_process.GatewayProcess):
    """A `quire serve` on a free port, and what tests ask of its pools."""

    def pools(self) -> list[executor_pb2.WorkerCacheMetrics]:
        """The workers' pools, with their invariants checked."""
        request = executor_pb2.GetCacheMetricsRequest(check_integrity=True)
        return list(self.stub.GetCacheMetrics(request, timeout=30).workers)

    def assert_pools_are_whole(self) -> None:
        """No sequence holds a page, and the accounting of every pool adds up."""
        for worker in self.pools():
            pool = worker.pool
            assert worker.pool_intact, worker
            assert pool.sequences == 0 and pool.pages_referenced == 0, pool
            assert pool.pages_free + pool.pages_cached == pool.pages_total > 0, pool
