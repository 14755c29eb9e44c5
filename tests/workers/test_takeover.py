"""A worker whose gateway is gone is taken over by the next one: with its sequences, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest

from service.caches.segments import SegmentedTokens, SegmentStore
from tests.workers.gateway_end import Gateway, forward_command
from workers import adoption
from workers.common import worker_pb2
from workers.executors.weightless import PagedAttentionExecutor
from workers.orphan_timer import OrphanTimer
from workers.scheduler import Scheduler
from workers.server import WorkerServer


class Timer:
    """A fake of the kernel's timer and clock."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self._ends_s: float | None = None

    def ends(self) -> float | None:
        """When it ends the process."""
        return self._ends_s

    def now(self) -> float:
        return self.now_s

    def set_alarm(self, seconds: float) -> None:
        self._ends_s = self.now_s + seconds if seconds else None

    def advance(self, orphan_timer: OrphanTimer, seconds: float) -> None:
        for _ in range(round(seconds * 4)):
            self.now_s += 0.25
            orphan_timer.tick()


class Bench:
    """A worker in this process, and the gateways that connect to it."""

    def __init__(self) -> None:
        self.executor = PagedAttentionExecutor.create(kv_pages=64)
        self.timer = Timer()
        self.orphan_timer = OrphanTimer(60, now=self.timer.now, set_alarm=self.timer.set_alarm)
        self.worker = WorkerServer(
            lambda _: self.executor,
            lambda _: Scheduler(4, 16, max_rows=16),
            orphan_timer=self.orphan_timer,
        )
        self.streams: list[asyncio.Task[None]] = []

    def connect(self) -> Gateway:
        gateway = Gateway()
        self.streams.append(asyncio.create_task(gateway.connect(self.worker)))
        return gateway

    async def drop(self) -> None:
        """The last gateway dies."""
        stream = self.streams[-1]
        stream.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await stream


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    made.worker.start()
    yield made
    for stream in made.streams:
        stream.cancel()
    made.worker.stop(5)


async def computed(gateway: Gateway, op_id: int, sequence: int, tokens: Sequence[int]) -> None:
    gateway.send(forward_command(op_id, sequence, tokens))
    assert (await gateway.next("forward")).op_id == op_id


async def holdings(gateway: Gateway) -> dict[int, int]:
    ready = (await gateway.next("ready")).ready
    return {holding.sequence: holding.length for holding in ready.holdings}


def digest(tokens: Sequence[int]) -> bytes:
    """The digest as the gateway computes it."""
    return blake2b(np.array(tokens, "<u4").tobytes(), digest_size=16).digest()


def gateways_tokens(tokens: Sequence[int]) -> SegmentedTokens:
    store, segmented = SegmentStore(), SegmentedTokens()
    store.extend(segmented, tokens)
    return segmented


def adopt(gateway: Gateway, *claims: tuple[int, Sequence[int]]) -> None:
    items = [
        worker_pb2.AdoptCommand.Item(sequence=number, length=len(tokens), digest=digest(tokens))
        for number, tokens in claims
    ]
    gateway.ask(op_id=7, adopt=worker_pb2.AdoptCommand(items=items))


async def test_a_sequence_under_another_salt_is_not_kept(bench: Bench) -> None:
    """Its KV is of another adapter. After a restore of a gateway's files a number may be used again."""
    first = bench.connect()
    assert await holdings(first) == {}
    tokens, digests = [1, 2, 3, 4, 5], {}
    for number, salt in ((1, b"a1/"), (2, b"a2/"), (3, b""), (4, b"a4/")):
        first.send(forward_command(number, number, tokens, salt=salt))
        assert (await first.next("forward")).op_id == number
        other = b"a2x/" if number == 2 else b"" if number == 4 else salt
        digests[number] = gateways_tokens(tokens).digest(len(tokens), other)
    await bench.drop()
    second = bench.connect()
    assert (await holdings(second)).keys() == digests.keys()
    items = [
        worker_pb2.AdoptCommand.Item(sequence=number, length=len(tokens), digest=digest)
        for number, digest in digests.items()
    ]
    second.ask(op_id=7, adopt=worker_pb2.AdoptCommand(items=items))
    assert sorted((await second.next("adopted")).adopted.kept) == [1, 3]


async def test_what_the_next_gateway_knows_is_kept_and_the_rest_dropped(bench: Bench) -> None:
    first = bench.connect()
    assert await holdings(first) == {}
    texts = {number: [number, *range(100, 140 + number)] for number in (1, 2, 3, 4)}
    for number, tokens in texts.items():
        await computed(first, number, number, tokens)
    await bench.drop()
    second = bench.connect()
    assert await holdings(second) == {number: len(tokens) for number, tokens in texts.items()}
    other = [*texts[2][:20], 5]
    # One is shorter than here, one has another token, one is longer, one nobody knows.
    adopt(second, (1, texts[1][:30]), (2, other), (3, [*texts[3], 1]), (99, [1]))
    answer = await second.next("adopted")
    assert answer.op_id == 7 and list(answer.adopted.kept) == [1]
    assert {s.key: list(s.token_ids) for s in bench.executor.engine.kv_table} == {1: texts[1][:30]}
    second.send(forward_command(8, 1, [9], "DECODE", position=30))
    done = (await second.next("decodes")).decodes
    assert np.frombuffer(done.rows, "<i8")[0] == 8
    bench.executor.engine.kv_table.check_integrity()


async def test_nothing_of_one_stream_is_said_on_the_next(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of running and queued forwards, unsent results, and integrity checks."""
    first = bench.connect()
    await first.next("ready")
    await computed(first, 1, 1, [1, 2, 3])
    holds, steps = asyncio.Event(), bench.executor.engine
    execute, loop = steps.execute, asyncio.get_running_loop()

    def slowly(*step: Any) -> Any:
        loop.call_soon_threadsafe(holds.set)
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.05), loop).result()
        return execute(*step)

    monkeypatch.setattr(steps, "execute", slowly)
    # Of many steps, of one, behind another, and of no step at all.
    first.send(forward_command(2, 2, range(40)), forward_command(3, 3, [1]))
    await holds.wait()
    for op_id, position in ((4, 3), (5, 4)):
        first.send(forward_command(op_id, 1, [op_id], "DECODE", position=position))
    first.ask(op_id=6, snapshot=worker_pb2.SnapshotCommand(check_integrity=True))
    first.ask(op_id=10, release=worker_pb2.ReleaseCommand(sequences=[50]))
    while not first.requests.empty():
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    second = bench.connect()
    held = await holdings(second)
    assert held[1] in (3, 4, 5) and 2 not in held, "the long one had not ended"
    await bench.streams[0]
    adopt(second, (1, [1, 2, 3]))
    assert list((await second.next("adopted")).adopted.kept) == [1]
    monkeypatch.setattr(steps, "execute", execute)
    # The same numbers again, for something else.
    await computed(second, 2, 20, [5])
    await computed(second, 3, 30, [5])
    second.ask(op_id=6, snapshot=worker_pb2.SnapshotCommand(check_integrity=True))
    walked = await second.next("snapshot")
    assert walked.op_id == 6 and walked.snapshot.pool_intact
    assert walked.snapshot.operations_in_flight == 0
    await computed(second, 11, 40, [5])
    assert second.received == [
        (0, "ready"),
        (0, "snapshot"),
        (7, "adopted"),
        (2, "forward"),
        (3, "forward"),
        (6, "snapshot"),
        (11, "forward"),
    ]
    assert {s.key: len(s) for s in bench.executor.engine.kv_table} == {1: 3, 20: 1, 30: 1, 40: 1}


async def test_a_worker_beyond_the_bound_gives_up_the_rest(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = bench.connect()
    await first.next("ready")
    for number in range(1, 6):
        await computed(first, number, number, [1, 2, 3])
    monkeypatch.setattr(adoption, "MAX_HELD_SEQUENCES", 3)
    second = bench.connect()
    assert await holdings(second) == {1: 3, 2: 3, 3: 3}
    assert len(list(bench.executor.engine.kv_table)) == 3


async def test_it_lives_for_the_grace_without_a_stream_and_no_longer(bench: Bench) -> None:
    timer = bench.timer
    assert timer.ends() == 160, "also if nobody ever comes"
    first = bench.connect()
    await first.next("ready")
    assert timer.ends() is None
    timer.advance(bench.orphan_timer, 100)
    await bench.drop()
    assert timer.ends() == 260
    bench.connect()
    second = bench.connect()
    await second.next("ready")
    assert timer.ends() is None, "the end of a stream that was replaced is nothing"
    await bench.drop()
    assert timer.ends() == 260 and not bench.worker.ended.done()


async def test_without_a_grace_it_ends_with_its_stream() -> None:
    worker = WorkerServer(lambda _: PagedAttentionExecutor.create(kv_pages=1), lambda _: Scheduler(4, 16, 16))
    streams = [asyncio.create_task(Gateway().connect(worker)) for _ in range(2)]
    await streams[0]
    assert not worker.ended.done(), "it was replaced"
    streams[1].cancel()
    await worker.ended


@pytest.mark.parametrize("stopped_s", [3.0, 90.0])
def test_a_worker_stopped_during_the_disconnect_counts_from_before(stopped_s: float) -> None:
    timer = Timer()
    orphan_timer = OrphanTimer(60, now=timer.now, set_alarm=timer.set_alarm)
    orphan_timer.connected()
    timer.advance(orphan_timer, 10)
    last_ran_s = timer.now_s
    timer.now_s += stopped_s
    # It learns of it after some turns of its loop.
    timer.advance(orphan_timer, 0.5)
    orphan_timer.disconnected()
    assert timer.ends() == max(last_ran_s + 60, timer.now_s + 0.001)
    orphan_timer.connected()
    timer.advance(orphan_timer, 5)
    orphan_timer.disconnected()
    assert timer.ends() == timer.now_s + 60, "long after it was continued it knows"
