"""What a worker says of itself when it starts."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from workers.executors.base import ModelExecutor
from workers.executors.weightless import PagedAttentionExecutor
from workers.scheduler import Scheduler
from workers.server import WorkerServer


class StartedError(Exception):
    """Ends the worker once it has loaded."""


def stop(_executor: ModelExecutor) -> Scheduler:
    raise StartedError


@pytest.mark.parametrize(("compiled", "warnings"), [(None, 1), ("cpu-avx2", 0)])
async def test_slow_kernels_are_said_once(
    monkeypatch: pytest.MonkeyPatch, compiled: str | None, warnings: int
) -> None:
    monkeypatch.setattr("workers.models.active_kernels.kernel_name", lambda: compiled)
    with capture_logs() as logs:
        worker = WorkerServer(lambda _: PagedAttentionExecutor.create(kv_pages=1), stop, secret="x")
        worker.start()
        with pytest.raises(StartedError):
            await worker.ended
    said = [entry for entry in logs if "kernels are not compiled" in entry["event"]]
    assert [entry["log_level"] for entry in said] == ["warning"] * warnings
    (used,) = [entry["kernels"] for entry in logs if entry["event"] == "kernels in use"]
    assert used == f"torch, {compiled or 'cpu-not-compiled'}"
