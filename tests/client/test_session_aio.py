"""A session for tasks, against a real gateway: what `test_session.py` shows for threads, and cancellation."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from quire import (
    AsyncCache,
    AsyncClient,
    AsyncSession,
    SessionEnded,
)

from tests.client.session_gateway import (
    TOP,
    held_back,
    in_flight,
    prompt_of,
    token_of,
    top_of,
    unary_answers,
)
from tests.gateway_process import GatewayProcess

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.fixture
async def client(gateway: GatewayProcess) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(gateway.address) as connected:
        yield connected


@pytest.fixture
async def session(client: AsyncClient) -> AsyncIterator[AsyncSession]:
    async with client.session() as opened:
        yield opened


async def until(condition: Callable[[], bool]) -> None:
    """Polls, while the loop goes on."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def test_many_tasks_share_a_session(gateway: GatewayProcess, client: AsyncClient) -> None:
    async def loop(session: AsyncSession, caller: int) -> list[list[int]]:
        async with session.prefill(prompt_of(caller)) as cache:
            return [top_of(await cache.decode(token_of(caller, step), output=TOP)) for step in range(6)]

    # More callers than calls that may be in flight.
    async with client.session(max_in_flight=10) as session:
        found = await asyncio.gather(*(loop(session, caller) for caller in range(20)))

    assert found == [unary_answers(caller, 6) for caller in range(20)]


async def test_calls_made_together_run_together(gateway: GatewayProcess, session: AsyncSession) -> None:
    caches = await asyncio.gather(*(session.prefill(prompt_of(caller)) for caller in range(8)))
    (before,) = gateway.status().workers
    await asyncio.gather(*(cache.decode(1) for cache in caches))
    (after,) = gateway.status().workers
    assert after.counts.batch_items - before.counts.batch_items == 8
    assert after.counts.steps - before.counts.steps == 1


async def test_calls_beyond_the_bound_wait(gateway: GatewayProcess, client: AsyncClient) -> None:
    async with client.session(max_in_flight=3) as session:
        with held_back(gateway):
            calls = [asyncio.create_task(session.forward([caller, 1])) for caller in range(8)]
            await until(in_flight(gateway, 3))
            # One that waits for its turn can go, and so can one that is in flight: its place stays taken.
            calls[0].cancel()
            calls[7].cancel()
            await asyncio.sleep(0.1)
            assert in_flight(gateway, 3)()
        answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(answer).__name__ for answer in answers] == (
        ["CancelledError", *["ForwardResponse"] * 6, "CancelledError"]
    )


async def test_cancelling_one_call_leaves_the_others(gateway: GatewayProcess, session: AsyncSession) -> None:
    caches = await asyncio.gather(*(session.prefill(prompt_of(caller)) for caller in range(6)))
    with held_back(gateway):
        steps = [
            asyncio.create_task(cache.decode(token_of(caller, 0), output=TOP))
            for caller, cache in enumerate(caches)
        ]
        await until(in_flight(gateway, 6))
        steps[2].cancel()
        with pytest.raises(asyncio.CancelledError):
            await steps[2]
    others = [caller for caller in range(6) if caller != 2]
    for caller in others:
        assert [top_of(await steps[caller])] == unary_answers(caller, 1)
    # The cancelled append may have been applied: it can be repeated, or undone.
    again = await caches[2].decode(token_of(2, 0), output=TOP)
    assert [top_of(again)] == unary_answers(2, 1)
    assert caches[2].seq_len == 21
    with held_back(gateway), pytest.raises(TimeoutError):
        await asyncio.wait_for(caches[2].decode(1), 0.1)
    await caches[2].truncate(21)
    await caches[2].decode(2)
    assert caches[2].seq_len == 22


async def test_a_cancelled_prefill_leaves_no_cache(gateway: GatewayProcess, client: AsyncClient) -> None:
    async def prefills() -> None:
        async with client.session() as session:
            await asyncio.gather(*(session.prefill(prompt_of(caller)) for caller in range(4)))

    task = asyncio.create_task(prefills())
    with held_back(gateway):
        await until(in_flight(gateway, 4))
        task.cancel()
        await asyncio.sleep(0.05)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gateway.status().caches == 0


@pytest.mark.parametrize("is_unary", [False, True])
async def test_cancelling_at_any_moment_leaves_no_cache(
    gateway: GatewayProcess, client: AsyncClient, is_unary: bool
) -> None:
    rng = random.Random(3)

    async def turn(maker: AsyncClient | AsyncSession, caller: int) -> None:
        async with maker.prefill(prompt_of(caller)) as cache:
            (copy,) = await cache.fork()
            async with copy:
                for step in range(5):
                    await asyncio.gather(*(c.decode(token_of(caller, step)) for c in (cache, copy)))

    async with client.session() as session:
        for _ in range(15):
            maker = client if is_unary else session
            turns = [asyncio.create_task(turn(maker, caller)) for caller in range(20)]
            for task in turns:
                asyncio.get_running_loop().call_later(rng.uniform(0, 0.1), task.cancel)
            await asyncio.wait(turns)
            assert {task.exception() for task in turns if not task.cancelled()} <= {None}
        # What was cancelled at last is still being undone.
        await until(lambda: gateway.status().caches == 0)


async def outcomes(steps: list[asyncio.Task[object]]) -> list[str]:
    async with asyncio.timeout(30):
        return [type(outcome).__name__ for outcome in await asyncio.gather(*steps, return_exceptions=True)]


def decode_each(caches: list[AsyncCache]) -> list[asyncio.Task[object]]:
    async def decode(cache: AsyncCache) -> object:
        return await cache.decode(1)

    return [asyncio.create_task(decode(cache)) for cache in caches]


async def test_closing_waits_for_answers(gateway: GatewayProcess, client: AsyncClient) -> None:
    session = client.session()
    caches = [await session.prefill(prompt_of(caller)) for caller in range(4)]
    with held_back(gateway):
        steps = decode_each(caches)
        await until(in_flight(gateway, 4))
        closing = asyncio.create_task(session.close())
        await asyncio.sleep(0.05)
    assert await outcomes([*steps, closing]) == ["StepOutput"] * 4 + ["NoneType"]
    with pytest.raises(SessionEnded, match="closed"):
        await caches[0].decode(2)
    await session.close()


async def test_closing_the_client_ends_its_sessions(gateway: GatewayProcess) -> None:
    client = AsyncClient(gateway.address)
    session = client.session()
    caches = [await session.prefill(prompt_of(0))]
    with held_back(gateway):
        steps = decode_each(caches)
        await until(in_flight(gateway, 1))
        await client.close()
        assert await outcomes(steps) == ["SessionEnded"]
    await session.close()


async def test_a_session_that_ends_while_it_sends_says_what_the_server_said(
    request: pytest.FixtureRequest,
) -> None:
    """Without care about every third of these ends is told as INTERNAL (grpc/grpc issue 36066)."""
    count = 40 if request.config.getoption("--thorough") else 20

    async def refuse(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for _ in messages:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "enough")
            yield b""

    handlers: dict[str, Any] = {"Session": grpc.stream_stream_rpc_method_handler(refuse)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("quire.v1.ModelExecutorService", handlers),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with AsyncClient(f"127.0.0.1:{port}", max_request_bytes=50_000) as client:
            causes = [await cause_of_the_end(client) for _ in range(count)]
    finally:
        await server.stop(0)
    assert set(causes) == {"RESOURCE_EXHAUSTED: enough"}


async def cause_of_the_end(client: AsyncClient) -> str:
    async with client.session() as session:
        calls = (session.prefill([token] * 20_000) for token in range(8))
        results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, SessionEnded) for result in results)
    return str(results[0].__cause__)  # type: ignore[union-attr]
