"""The asyncio client, from which the blocking one is generated: what only it does, and each method once."""

from __future__ import annotations

import asyncio
import gc
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

import grpc
import pytest
from quire import (
    AsyncCache,
    AsyncClient,
    AsyncGeneration,
    AsyncSession,
    Cache,
    CacheNotFound,
    Cancelled,
    Client,
    DeadlineExceeded,
    Generation,
    InternalError,
    QuireError,
    Session,
)

from tests.fake_executor import FakeExecutor, serving
from tests.programs import output_of

GENERATOR = Path(__file__).resolve().parents[2] / "clients" / "python" / "generate_blocking.py"


async def test_the_rest(target: str, executor: FakeExecutor) -> None:
    async with AsyncClient(target) as client:
        cache = await client.prefill([1, 2, 3])
        assert (await cache.verify([50, 51, 99])).accepted == 1
        await cache.extend([60])
        await cache.truncate(4)
        (copy,) = await cache.fork()
        ((twin,),) = await client.fork_caches([(cache, 1)])
        assert (twin.seq_len, executor.caches[twin.cache_id]) == (4, executor.caches[cache.cache_id])
        await twin.release()
        await cache.renew(5)
        await copy.release()
        results = await client.batch_decode([(cache, 5), (copy, 5)])
        assert not isinstance(results[0], QuireError)
        assert isinstance(results[1], CacheNotFound)
        assert (cache.seq_len, copy.seq_len) == (5, 4)
        assert (await client.model_info()).model.model_id == "fake"
        assert len((await client.status()).workers) == 2
        assert len((await client.forward([4, 5])).outputs) == 2
        assert await cache.release() is True
        made = await client.load_adapter("a", "org/name")
        assert await client.list_adapters() == [made]
        assert await client.unload_adapter("a") is True


async def test_a_cache_is_opened_with_and_without_a_block(target: str, executor: FakeExecutor) -> None:
    async with AsyncClient(target) as client:
        async with client.prefill([1]) as first, client.cache(first.cache_id) as same:
            assert same.seq_len == 1 and len(executor.caches) == 1
        assert not executor.caches
        task = asyncio.create_task(client.prefill([1]))
        made = [await task, *await asyncio.gather(client.prefill([2]), client.prefill([3]))]
        assert [executor.caches[cache.cache_id] for cache in made] == [[1], [2], [3]]
        with pytest.raises(CacheNotFound):
            async with client.cache("nowhere"):
                raise AssertionError("there is none")


async def test_cancellation(target: str, executor: FakeExecutor) -> None:
    executor.decode_delay_s = 1.0
    async with AsyncClient(target) as client:

        async def hold() -> None:
            async with client.prefill([1]) as held:
                await held.decode(2)

        task = asyncio.create_task(hold())
        assert await asyncio.to_thread(executor.decoding.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(executor.calls["ReleaseCache"]) == 1, "a cancelled block releases its cache"


class Unheard(FakeExecutor):
    """Answers calls that make caches when their callers have left."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun, self.may_release = threading.Event(), threading.Event()
        self.waits = True
        self.may_release.set()

    def _later(self, answer: Callable[..., Any], request: Any, context: Any) -> Any:
        if not context.is_active():
            # The test's host is slow, and nothing was begun in time.
            context.abort(grpc.StatusCode.CANCELLED, "")
        made = answer(request, context)
        has_left = threading.Event()
        if self.waits and context.add_callback(has_left.set):
            self.has_begun.set()
            assert has_left.wait(60)
        return made

    def Prefill(self, request: Any, context: Any) -> Any:
        return self._later(super().Prefill, request, context)

    def BatchPrefill(self, request: Any, context: Any) -> Any:
        return self._later(super().BatchPrefill, request, context)

    def ForkCache(self, request: Any, context: Any) -> Any:
        return self._later(super().ForkCache, request, context)

    def ForkCaches(self, request: Any, context: Any) -> Any:
        return self._later(super().ForkCaches, request, context)

    def ReleaseCache(self, request: Any, context: Any) -> Any:
        assert self.may_release.wait(60)
        return super().ReleaseCache(request, context)


@pytest.mark.parametrize(
    ("make", "made"),
    [
        (lambda client, _: client.prefill([1, 2]), 1),
        (lambda client, _: client.batch_prefill([[1], [2]]), 2),
        (lambda _, cache: cache.fork(2), 2),
        (lambda client, cache: client.fork_caches([(cache, 3)]), 3),
    ],
    ids=["prefill", "batch_prefill", "fork", "fork_caches"],
)
async def test_caches_whose_ids_nobody_got_are_released(make: Callable[..., Any], made: int) -> None:
    """A cancelled call ends at once. Before, it went on for two seconds, and left what it made then."""
    executor = Unheard()
    with serving(executor) as target:
        async with AsyncClient(target) as client:
            executor.waits = False
            cache = await client.prefill([1])
            executor.waits = True
            task = asyncio.ensure_future(make(client, cache))
            assert await asyncio.to_thread(executor.has_begun.wait, 60)
            assert len(executor.caches) == 1 + made
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
        # A client that is closed has waited for the release.
        assert [*executor.caches] == [cache.detach()]


def test_a_call_of_threads_whose_time_is_over_leaves_no_cache() -> None:
    executor = Unheard()
    with serving(executor) as target:
        with Client(target) as client, pytest.raises(DeadlineExceeded):
            client.batch_prefill([[1], [2]], timeout_s=0.5)
        assert not executor.caches


async def test_a_call_whose_time_is_over_leaves_no_cache() -> None:
    executor = Unheard()
    with serving(executor) as target:
        async with AsyncClient(target) as client:
            with pytest.raises(DeadlineExceeded):
                await client.batch_prefill([[1], [2]], timeout_s=0.5)
        assert not executor.caches


async def test_a_close_that_is_cancelled_closes_the_connection() -> None:
    """While it waits for the release after a cancelled call."""
    executor = Unheard()
    with serving(executor) as target:
        client = AsyncClient(target)
        task = asyncio.create_task(client.prefill([1]))
        assert await asyncio.to_thread(executor.has_begun.wait, 60)
        executor.may_release.clear()
        task.cancel()
        await asyncio.wait([task])
        closing = asyncio.create_task(client.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        executor.may_release.set()
        with pytest.raises(grpc.aio.UsageError):
            await client.prefill([1])


async def test_a_release_that_is_cancelled_at_once_is_made(target: str, executor: FakeExecutor) -> None:
    async with AsyncClient(target) as client:
        cache = await client.prefill([1])
        task = asyncio.create_task(cache.release())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
    assert not executor.caches


async def test_a_client_that_is_closed_says_so_to_those_who_wait(target: str, executor: FakeExecutor) -> None:
    """A CancelledError would be that of their task: a TaskGroup, say, would go on as if all was done."""
    executor.decode_delay_s = 1.0
    client = AsyncClient(target)
    cache = await client.prefill([1])
    calls = (cache.decode(2), client.generate([1, 2]), client.load_weights("/x"))
    waiting = [asyncio.create_task(call) for call in calls]
    for begun in (executor.decoding, executor.loading):
        assert await asyncio.to_thread(begun.wait, 60)
    await client.close()
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(error) for error in found] == [Cancelled] * 3
    cache.detach()


async def test_weights_of_which_the_server_says_nothing() -> None:
    class Silent(FakeExecutor):
        def LoadWeights(self, _request: Any, _context: Any) -> Iterator[Any]:
            return iter(())

    with serving(Silent()) as target, Client(target) as client, pytest.raises(InternalError):
        client.load_weights("/x")


async def test_an_execution_that_is_cancelled_ends_with_that_error(
    target: str, executor: FakeExecutor
) -> None:
    executor.decode_delay_s = 0.05
    async with AsyncClient(target) as client:
        execution = client.execute([1, 2], max_tokens=100)

        async def read_and_cancel() -> None:
            async for _ in execution:
                await execution.cancel()

        with pytest.raises(Cancelled):
            await read_and_cancel()


def test_a_client_that_is_made_outside_of_a_loop_says_so(target: str) -> None:
    """Before, its first call said something about futures and loops."""
    with pytest.raises(RuntimeError, match="made in the event loop"):
        AsyncClient(target)


async def test_leaving_a_loop_over_chunks_ends_the_execution(target: str, executor: FakeExecutor) -> None:
    """Before, the server went on until the garbage collector of the client ran."""
    executor.decode_delay_s = 0.01
    gc.disable()
    try:
        async with AsyncClient(target) as client:
            async for _ in client.execute([1, 2], max_tokens=100_000):
                break
            assert await asyncio.to_thread(executor.ended.wait, 30)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "kind",
    [Client, AsyncClient, Session, AsyncSession, Cache, AsyncCache, Generation, AsyncGeneration],
)
def test_types_can_be_asked_for(kind: type) -> None:
    """Programs do so, such as those that make tools of functions."""
    for name, member in inspect.getmembers(kind, inspect.isfunction):
        if not name.startswith("_") or name == "__init__":
            assert "return" in get_type_hints(member), name


def test_the_blocking_client_is_the_asyncio_one_without_await() -> None:
    output_of(sys.executable, GENERATOR, "--check")
