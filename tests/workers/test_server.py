"""What a worker says of itself: when it starts, and in a long step, in which it must not seem to hang."""

from __future__ import annotations

import asyncio
import struct
import time
from typing import Any

import pytest
from quire.v1 import worker_pb2
from structlog.testing import capture_logs

from tests.workers.gateway_end import LAST_ROW, Gateway
from workers.executors.base import ModelExecutor
from workers.executors.weightless import PagedAttentionExecutor
from workers.scheduler import Scheduler
from workers.server import WorkerServer

STEP_S = 1.0


class StartedError(Exception):
    """Ends the worker once it has loaded."""


def stop(_executor: ModelExecutor) -> Scheduler:
    raise StartedError


@pytest.mark.parametrize(("kernels", "level"), [(None, "warning"), ("cpu-avx2", "info")])
async def test_the_log_names_the_products_once(
    monkeypatch: pytest.MonkeyPatch, kernels: str | None, level: str
) -> None:
    monkeypatch.setattr("workers.models.active_kernels.kernel_name", lambda: kernels)
    executor = PagedAttentionExecutor.create(kv_pages=1)
    with capture_logs() as logs:
        worker = WorkerServer(lambda _: executor, stop)
        worker.start()
        with pytest.raises(StartedError):
            await worker.ended
    (said,) = [entry for entry in logs if entry["event"] == "products in use"]
    assert said["products"] == executor.capabilities().products
    assert said["log_level"] == level


async def test_snapshots_are_answered_while_a_step_holds_the_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python code in a step lets go of the interpreter only when it is asked to."""
    executor = PagedAttentionExecutor.create(kv_pages=8)
    worker = WorkerServer(lambda _: executor, lambda _: Scheduler(16, 16, max_rows=16))
    gateway = Gateway()
    stream = asyncio.create_task(gateway.connect(worker))
    worker.start()
    await gateway.next("ready")
    run = executor.engine._execute

    def busy(*step: Any) -> Any:
        until_s = time.monotonic() + STEP_S
        while time.monotonic() < until_s:
            pass
        return run(*step)

    monkeypatch.setattr(executor.engine, "_execute", busy)
    forward = worker_pb2.ForwardCommand(
        sequence=1, token_ids=[1, 2, 3], options=LAST_ROW, kind="OPERATION_KIND_PREFILL"
    )
    gateway.ask(op_id=1, forward=forward)
    during, expected_ns = 0, 0
    while not executor.engine.status().counts.steps:
        gateway.ask(op_id=2, snapshot=worker_pb2.SnapshotCommand())
        snapshot = (await gateway.next("snapshot")).snapshot
        during += snapshot.step_age_ns > 0
        expected_ns = max(expected_ns, snapshot.step_expected_ns)
        await asyncio.sleep(0.01)
    assert during >= 3, "a gateway that asks a few times in a step is answered"
    assert 0 < expected_ns < STEP_S * 1e9, "from the steps of the warm-up"
    stream.cancel()
    worker.stop(5)


async def test_a_replay_is_not_counted_as_a_prefill() -> None:
    executor = PagedAttentionExecutor.create(kv_pages=8)
    worker = WorkerServer(lambda _: executor, lambda _: Scheduler(16, 16, max_rows=16))
    gateway = Gateway()
    stream = asyncio.create_task(gateway.connect(worker))
    worker.start()
    await gateway.next("ready")
    for kind in ("PREFILL", "REPLAY"):
        forward = worker_pb2.ForwardCommand(
            sequence=1, token_ids=[1, 2, 3], options=LAST_ROW, kind=f"OPERATION_KIND_{kind}"
        )
        gateway.ask(op_id=1, forward=forward)
        await gateway.next("forward")
    gateway.ask(op_id=2, snapshot=worker_pb2.SnapshotCommand(ordered=True))
    while (event := await gateway.next("snapshot")).op_id != 2:
        pass
    counts, pool = event.snapshot.counts, event.snapshot.pool
    assert (counts.prefill_operations, counts.replay_operations) == (1, 1)
    assert min(counts.prefill_ns, counts.replay_ns) > 0
    assert pool.prefix_query_tokens == 3, "nobody has asked for the tokens of a replay"
    stream.cancel()
    worker.stop(5)


@pytest.mark.parametrize(
    ("cut_bytes", "options"),
    [(0, []), (8, [LAST_ROW]), (4, [LAST_ROW]), (0, [b"\xff\xff"]), (72, [LAST_ROW])],
)
async def test_decodes_that_cannot_be_read_fail_alone(cut_bytes: int, options: list[bytes]) -> None:
    """Before, they ended the stream, and so all that the worker computed."""
    executor = PagedAttentionExecutor.create(kv_pages=8)
    worker = WorkerServer(lambda _: executor, lambda _: Scheduler(16, 16, max_rows=16))
    gateway = Gateway()
    stream = asyncio.create_task(gateway.connect(worker))
    worker.start()
    await gateway.next("ready")
    row = struct.pack("<9Q", 7, 1, 1, 5, 3, 1, 0, 0, 0)
    bad = worker_pb2.DecodesCommand(rows=row[: len(row) - cut_bytes], options=options)
    gateway.ask(decodes=bad)
    if bad.rows:
        assert (await gateway.next("error")).op_id == 7
    gateway.ask(op_id=8, snapshot=worker_pb2.SnapshotCommand())
    while (await gateway.next("snapshot")).op_id != 8:
        pass
    stream.cancel()
    worker.stop(5)
