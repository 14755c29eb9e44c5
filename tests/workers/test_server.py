"""What a worker says of itself: when it starts, and in a long step, in which it must not seem to hang."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from quire.v1 import types_pb2

from tests.workers.gateway_end import LAST_ROW, Gateway, forward_command
from workers import forward_options
from workers.common import worker_pb2
from workers.executors.base import ModelExecutor
from workers.executors.weightless import PagedAttentionExecutor
from workers.logging import fields_of
from workers.outputs import Sampling
from workers.scheduler import Scheduler
from workers.server import WorkerServer

STEP_S = 1.0


class StartedError(Exception):
    """Ends the worker once it has loaded."""


def stop(_executor: ModelExecutor) -> Scheduler:
    raise StartedError


@pytest.mark.parametrize(("kernels", "level"), [(None, "warning"), ("cpu-avx2", "info")])
async def test_the_log_names_the_products_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kernels: str | None,
    level: str,
) -> None:
    caplog.set_level("INFO", "workers")
    monkeypatch.setattr("workers.models.active_kernels.kernel_name", lambda: kernels)
    executor = PagedAttentionExecutor.create(kv_pages=1)
    worker = WorkerServer(lambda _: executor, stop)
    worker.start()
    with pytest.raises(StartedError):
        await worker.ended
    (said,) = [record for record in caplog.records if record.message == "products in use"]
    assert fields_of(said)["products"] == executor.capabilities().products
    assert said.levelname.lower() == level


@asynccontextmanager
async def served(kv_pages: int = 8) -> AsyncIterator[tuple[Gateway, PagedAttentionExecutor]]:
    """A worker that is ready, and the other end of its stream. Neither has ended at the end."""
    executor = PagedAttentionExecutor.create(kv_pages=kv_pages)
    worker = WorkerServer(lambda _: executor, lambda _: Scheduler(16, 16, max_rows=16))
    gateway = Gateway()
    stream = asyncio.create_task(gateway.connect(worker))
    worker.start()
    try:
        await gateway.next("ready")
        yield gateway, executor
        assert not stream.done() and not worker.ended.done()
    finally:
        stream.cancel()
        worker.stop(5)


async def test_snapshots_are_answered_while_a_step_holds_the_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python code in a step lets go of the interpreter only when it is asked to."""
    async with served() as (gateway, executor):
        run = executor.engine._execute

        def busy(*step: Any) -> Any:
            until_s = time.monotonic() + STEP_S
            while time.monotonic() < until_s:
                pass
            return run(*step)

        monkeypatch.setattr(executor.engine, "_execute", busy)
        gateway.send(forward_command(1, 1, [1, 2, 3]))
        during, expected_ns = 0, 0
        while not executor.engine.stats.status().counts.steps:
            gateway.ask(op_id=2, snapshot=worker_pb2.SnapshotCommand())
            snapshot = (await gateway.next("snapshot")).snapshot
            during += snapshot.step_age_ns > 0
            expected_ns = max(expected_ns, snapshot.step_expected_ns)
            await asyncio.sleep(0.01)
        assert during >= 3, "a gateway that asks a few times in a step is answered"
        assert 0 < expected_ns < STEP_S * 1e9, "from the steps of the warm-up"


async def test_a_replay_is_not_counted_as_a_prefill() -> None:
    async with served() as (gateway, _):
        for kind in ("PREFILL", "REPLAY"):
            gateway.send(forward_command(1, 1, [1, 2, 3], kind))
            await gateway.next("forward")
        gateway.ask(op_id=2, snapshot=worker_pb2.SnapshotCommand(ordered=True))
        while (event := await gateway.next("snapshot")).op_id != 2:
            pass
        counts, pool = event.snapshot.counts, event.snapshot.pool
        assert (counts.prefill_operations, counts.replay_operations) == (1, 1)
        assert min(counts.prefill_ns, counts.replay_ns) > 0
        assert pool.prefix_query_tokens == 3, "nobody has asked for the tokens of a replay"


@pytest.mark.parametrize(
    ("cut_bytes", "options"),
    [(0, []), (8, [LAST_ROW]), (4, [LAST_ROW]), (0, [b"\xff\xff"]), (72, [LAST_ROW])],
)
async def test_decodes_that_cannot_be_read_fail_alone(cut_bytes: int, options: list[bytes]) -> None:
    """Before, they ended the stream, and so all that the worker computed."""
    async with served() as (gateway, _):
        row = struct.pack("<9Q", 7, 1, 1, 5, 3, 1, 0, 0, 0)
        bad = worker_pb2.DecodesCommand(rows=row[: len(row) - cut_bytes], options=options)
        gateway.ask(decodes=bad)
        if bad.rows:
            assert (await gateway.next("error")).op_id == 7
        gateway.ask(op_id=8, snapshot=worker_pb2.SnapshotCommand())
        while (await gateway.next("snapshot")).op_id != 8:
            pass


def draws(**settings: Any) -> bytes:
    output = types_pb2.OutputOptions(sampling=types_pb2.SamplingParams(temperature=1.0, **settings))
    return worker_pb2.ForwardOptions(rows=1, output=output).SerializeToString()


def of_a_decode(op_id: int, which: int) -> list[int]:
    """A row of a DecodesCommand, of the third token of a sequence."""
    row = [0] * 9
    row[0:2], row[3:5], row[6] = [op_id, op_id], [2, 5], 256 * which
    return row


async def test_a_command_that_cannot_be_decoded_is_an_error_of_that_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one message with others, as it would be if a worker did not know a setting that a gateway knows."""

    class OldSampling(Sampling):
        def __init__(self, **given: Any) -> None:
            if given.get("penalty_from") is not None:
                raise TypeError("unexpected keyword argument 'penalty_from'")
            super().__init__(**given)

    monkeypatch.setattr(forward_options, "Sampling", OldSampling)
    async with served(kv_pages=32) as (gateway, _):
        for op_id in (11, 12, 13, 14):
            gateway.send(forward_command(op_id, op_id, [1, 2]))
            assert (await gateway.next("forward")).op_id == op_id
        unknown, garbage = draws(penalty_from=1), b"\xff\xff"
        rows = [of_a_decode(11, 0), of_a_decode(12, 1), of_a_decode(13, 2), of_a_decode(14, 3)]
        decodes = worker_pb2.DecodesCommand(
            rows=b"".join(struct.pack("<9Q", *row) for row in rows),
            options=[LAST_ROW, unknown, garbage, draws()],
        )
        commands = [worker_pb2.WorkerCommand(decodes=decodes)]
        for op_id, options in ((21, LAST_ROW), (22, unknown), (23, garbage), (24, draws(seed=1))):
            commands.append(forward_command(op_id, op_id, [1, 2], options=options))
        commands += [
            worker_pb2.WorkerCommand(op_id=31),
            worker_pb2.WorkerCommand(op_id=32, replace_weights={}),
        ]
        gateway.send(*commands)
        gateway.ask(op_id=99, snapshot=worker_pb2.SnapshotCommand(ordered=True))
        found: dict[int, str] = {}
        while not {11, 14, 21, 24, 12, 13, 22, 23, 31, 32, 99} <= found.keys():
            event = await asyncio.wait_for(gateway.events.get(), 30)
            if event.WhichOneof("event") == "decodes":
                numbers = struct.unpack(f"<{len(event.decodes.rows) // 8}Q", event.decodes.rows)
                found.update(dict.fromkeys(numbers[::5], "decodes"))
            else:
                found[event.op_id] = str(event.WhichOneof("event"))
        failed = {op_id for op_id, kind in found.items() if kind == "error"}
        assert failed == {12, 13, 22, 23, 31, 32}
