"""How a soak begins and ends: servers serve, there were faults enough, and all pools are whole."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from quire.v1 import executor_pb2 as pb

from tests.soak.tally import Tally

_PROGRESS_S = 5.0


async def wait_until_serving(stub: Any, server: Any) -> None:
    """`server`: a Server, or a Cluster."""
    for _ in range(3000):
        with contextlib.suppress(grpc.RpcError):
            status = await stub.GetStatus(pb.GetStatusRequest(), timeout=5)
            if status.state == pb.SERVER_STATE_SERVING:
                return
        await asyncio.sleep(0.1)
        if server.has_ended:
            break
    raise RuntimeError(f"the server does not serve:\n{server.log_tail()}")


async def until(is_enough: Callable[[], bool], minutes: float, tally: Tally) -> None:
    """Or until so much time has passed. Shows progress."""
    loop = asyncio.get_running_loop()
    end_s, shown_s = loop.time() + 60 * minutes, loop.time()
    while not is_enough() and loop.time() < end_s:
        await asyncio.sleep(0.05)
        if loop.time() - shown_s > _PROGRESS_S:
            shown_s = loop.time()
            print(tally.progress(), file=sys.stderr, flush=True)


async def check_pools(stubs: Sequence[Any], workers: int, tally: Tally) -> None:
    """Releases what sequences that could not go on have left, and looks into the pools of all workers.

    `stubs`: of all gateways, each of which knows the caches of all.
    """
    found: Any = "no answer"
    for _ in range(600):
        with contextlib.suppress(grpc.RpcError):
            page = pb.ListCachesRequest(page_size=1000)
            while True:
                caches = await stubs[0].ListCaches(page, timeout=5)
                for cache in caches.kv_caches:
                    release = pb.ReleaseCacheRequest(cache_id=cache.cache_id)
                    await stubs[0].ReleaseCache(release, timeout=5)
                page.page_token = caches.next_page_token
                if not page.page_token:
                    break
            request = pb.GetCacheMetricsRequest(check_integrity=True)
            found = [
                each for stub in stubs for each in (await stub.GetCacheMetrics(request, timeout=15)).workers
            ]
            whole = {
                one.worker_id
                for one in found
                if one.pool_intact and not one.pool.pages_referenced and not one.pool.sequences
            }
            if len(whole) == workers:
                return
        await asyncio.sleep(0.1)
    tally.lose("pools not whole", str(found))
