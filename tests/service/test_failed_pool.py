"""What the log says when the workers' tasks end with errors."""

from __future__ import annotations

import asyncio

import structlog

from service.pool.launcher import PoolFailed
from service.server import _report_failure


async def _fails(error: BaseException) -> None:
    raise error


async def test_errors_are_told_one_by_one_however_deep_they_lie_in_groups() -> None:
    deep = ExceptionGroup("inner", [PoolFailed("it never starts"), ExceptionGroup("", [OSError("other")])])
    workers = asyncio.create_task(_fails(ExceptionGroup("outer", [deep])))
    await asyncio.wait({workers})
    with structlog.testing.capture_logs() as logs:
        assert _report_failure(workers) == 1
    said = [(record["event"], record.get("error")) for record in logs]
    assert said == [("cannot start workers", "it never starts"), ("the worker pool failed", None)]
