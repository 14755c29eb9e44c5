"""The asyncio client against the same fake server: it sends and remembers what the blocking one does."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import grpc
import pytest
from quire import (
    AsyncCache,
    AsyncClient,
    AsyncSession,
    Cache,
    CacheNotFound,
    Client,
    DeadlineExceeded,
    PositionMismatch,
    QuireError,
    Session,
)

from tests.fake_executor import FakeExecutor, rich_status

GENERATOR = Path(__file__).resolve().parents[2] / "clients" / "python" / "generate_blocking.py"


async def test_a_decoding_loop(target: str, executor: FakeExecutor) -> None:
    executor.script = [7, 8, 9]
    async with AsyncClient(target) as client:
        async with await client.prefill([1, 2, 3]) as cache:
            seen = [cache.output.token_id]
            while len(seen) < 3:
                seen.append((await cache.decode(seen[-1])).token_id)
            assert seen == [7, 8, 9]
            assert executor.caches[cache.cache_id] == [1, 2, 3, 7, 8]
        assert executor.caches == {}


async def test_retries_and_errors(target: str, executor: FakeExecutor) -> None:
    lost = rich_status(grpc.StatusCode.UNAVAILABLE, "WORKER_LOST")
    async with AsyncClient(target, timeout_s=20) as client:
        executor.fail("Prefill", lost, applied=True)
        cache = await client.prefill([1, 2])
        assert len(executor.caches) == 1
        executor.fail("Decode", lost, applied=True)
        await cache.decode(3)
        assert executor.caches[cache.cache_id] == [1, 2, 3]
        executor.fail("ForkCache", lost, applied=True)
        assert len(await cache.fork()) == 1
        assert len(executor.caches) == 2
        executor.caches[cache.cache_id].append(4)
        with pytest.raises(PositionMismatch) as caught:
            await cache.decode(9)
        assert caught.value.seq_len == 4


async def test_the_rest(target: str, executor: FakeExecutor) -> None:
    async with AsyncClient(target) as client:
        cache = await client.prefill([1, 2, 3])
        assert (await cache.verify([50, 51, 99])).accepted == 1
        await cache.extend([60])
        await cache.truncate(4)
        (copy,) = await cache.fork()
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


async def test_time_limit_and_cancellation(target: str, executor: FakeExecutor) -> None:
    executor.decode_delay_s = 0.5
    async with AsyncClient(target, timeout_s=0.1) as client:
        cache = await client.prefill([1])
        with pytest.raises(DeadlineExceeded):
            await cache.decode(2)
    async with AsyncClient(target) as client:

        async def hold() -> None:
            async with await client.prefill([1]) as held:
                await held.decode(2)

        task = asyncio.create_task(hold())
        while len(executor.calls["Prefill"]) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(executor.calls["ReleaseCache"]) == 1, "a cancelled block releases its cache"


@pytest.mark.parametrize(
    ("blocking", "awaiting"), [(Client, AsyncClient), (Session, AsyncSession), (Cache, AsyncCache)]
)
def test_both_clients_offer_the_same(blocking: type, awaiting: type) -> None:
    def offered(kind: type) -> dict[str, tuple[str, str]]:
        return {
            name: (str(inspect.signature(member)).replace("Async", ""), inspect.getdoc(member) or "")
            for name, member in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_")
        }

    asynchronous = offered(awaiting)
    assert {name: signature for name, (signature, _) in offered(blocking).items()} == {
        name: signature for name, (signature, _) in asynchronous.items()
    }
    assert all(docstring for _, docstring in asynchronous.values())


@pytest.mark.parametrize("kind", [Client, AsyncClient, Session, AsyncSession, Cache, AsyncCache])
def test_types_can_be_asked_for(kind: type) -> None:
    """Programs do so, such as those that make tools of functions."""
    for name, member in inspect.getmembers(kind, inspect.isfunction):
        if not name.startswith("_") or name == "__init__":
            assert "return" in get_type_hints(member), name


def test_the_blocking_client_is_the_asyncio_one_without_await() -> None:
    done = subprocess.run([sys.executable, GENERATOR, "--check"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


async def test_a_token_goes_with_every_call(target: str, executor: FakeExecutor) -> None:
    async with AsyncClient(target, token="secret", timeout_s=20) as client:
        await client.model_info()
        await (await client.prefill([1])).decode(2)
    assert executor.authorizations == {"Bearer secret"}
