"""A worker's process when no gateway comes to it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.checkout import ROOT, environment
from service.pool.worker_directory import lock_holder
from service.pool.worker_port import NamedWorker, WorkerPort
from tests.forks import WORKERS, Forked, ForkedWorker, fork_server
from workers import process as entry_point
from workers.common import worker_pb2
from workers.process import EXIT_FAILED

# Far more than it takes.
PATIENCE_S = 60


def start(place: Path, name: str, lock: str = "") -> ForkedWorker:
    """A worker that its gateway has just started, which listens in this directory. `lock`: not its own."""
    path = place / f"{lock or name}.lock"
    if not path.exists():
        path.touch()
    command = [sys.executable, "-m", "workers", "--gateway", f"unix:{place}/gateway.sock"]
    command += ["--name", name, "--lock", str(path)]
    return ForkedWorker(
        fork_server(*WORKERS), command, env=environment(ROOT), cwd=str(ROOT), is_session=False
    )


async def lease(port: WorkerPort, name: str, grace_s: float) -> None:
    config = worker_pb2.WorkerConfig(
        model="paged-attention", kv_pages=8, device="cpu", threads=1, log_level="info", orphan_grace_s=grace_s
    )
    config.max_batch_tokens = config.max_batch_items = 16
    async with asyncio.timeout(PATIENCE_S):
        await NamedWorker(port, name, worker_pb2.Lease(gateway_id="g", epoch=1, config=config)).open(1 << 20)


async def test_it_ends_by_itself(tmp_path: Path) -> None:
    """Without a lease, or without a grace, with its gateway. Else when it has had none for so long."""
    port = WorkerPort(f"unix:{tmp_path}/gateway.sock", None, b"key")
    port.join("g")
    unleased, ending, orphan = (start(tmp_path, f"worker-{number}-1") for number in range(3))
    for worker in (unleased, ending, orphan):
        while (
            lock_holder(tmp_path / f"worker-{[unleased, ending, orphan].index(worker)}-1.lock") != worker.pid
        ):
            await asyncio.sleep(0.01)
    await lease(port, "worker-1-1", 0)
    await lease(port, "worker-2-1", 1.0)
    # It is stopped, and has not seen its gateway's end.
    unleased.send_signal(signal.SIGSTOP)
    for worker in (unleased, ending, orphan):
        worker.stdin.close()
    assert await asyncio.to_thread(ending.wait, PATIENCE_S) == -signal.SIGKILL
    assert orphan.poll() is None, "its gateway is there"
    port.end("g", 1)
    port.leave("g")
    assert await asyncio.to_thread(orphan.wait, PATIENCE_S) == -signal.SIGALRM
    unleased.send_signal(signal.SIGCONT)
    assert await asyncio.to_thread(unleased.wait, PATIENCE_S) == -signal.SIGKILL
    assert not lock_holder(tmp_path / "worker-2-1.lock")
    await asyncio.sleep(0.05)  # sockets are closed then


def test_it_needs_its_lock(tmp_path: Path) -> None:
    """Without it the next gateway would not find its process. The file is made before it is started."""
    worker = start(tmp_path, "worker-0-1")
    while not lock_holder(tmp_path / "worker-0-1.lock"):
        time.sleep(0.01)
    (tmp_path / "worker-1-1.lock").mkdir()
    for lock in ("worker-0-1", "worker-1-1"):
        refused = start(tmp_path, "worker-1-1", lock)
        assert refused.wait(PATIENCE_S) == EXIT_FAILED
        refused.stdin.close()
    worker.stdin.close()
    assert worker.wait(PATIENCE_S) == -signal.SIGKILL


def log_lines(file: int, *arguments: str) -> None:
    """Forked from a process with its imports, that would take seconds each time."""
    command = [sys.executable, "-m", "tests.workers.log_lines", *arguments]
    server = fork_server(*WORKERS)
    assert Forked(server, command, env=environment(ROOT), cwd=str(ROOT), files=(0, 1, file)).wait(60) == 0


def test_a_line_of_the_log_is_written_in_one_piece() -> None:
    """Gateway and workers write to one pipe: a line in two writes has those of others in its middle."""
    # What is written at once to such a pipe is read at once.
    read_end, write_end = os.pipe2(os.O_DIRECT)
    try:
        log_lines(write_end, "json")
        line = os.read(read_end, 1 << 16)
        assert json.loads(line)["event"] == "hello" and line.endswith(b"\n")
        os.set_blocking(read_end, False)
        with pytest.raises(BlockingIOError):
            os.read(read_end, 1 << 16)
    finally:
        os.close(read_end)
        os.close(write_end)


def test_lines_of_all_threads_say_whose_they_are(tmp_path: Path) -> None:
    """The model is loaded on a thread of its own, also by modules that use `logging`."""
    with (tmp_path / "log").open("wb") as file:
        log_lines(file.fileno(), "json", "another")
    found = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [(line["worker_id"], line["logger"], line["level"], line["event"]) for line in found] == [
        ("worker-3", "workers.a", "info", "one"),
        ("worker-3", "workers.b", "info", "other"),
        ("worker-3", "workers.a", "error", "failed"),
        ("worker-3", "workers.b", "error", "failed too"),
        ("worker-3", "workers.a", "error", "later"),
    ]
    assert found[0]["number"] == 1
    assert all(line["exception"].endswith("ValueError: planted") for line in found[2:])
    assert all(line["pid"] and line["timestamp"] for line in found)


def test_colours_are_for_terminals(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        log_lines(file.fileno(), "pretty")
    written = (tmp_path / "log").read_bytes()
    assert b"hello" in written and b"\x1b" not in written
    assert written.count(b"\n") == 1, "what a field has is in one line"


def test_torch_is_not_loaded_before_the_lease() -> None:
    code = "import workers.pool_member, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_what_triton_lacks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a model is loaded: a compiler, and a directory for what it has compiled."""
    for name in ("CC", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "C compiler" in entry_point.triton_problem()
    compiler = tmp_path / "clang"
    compiler.write_text("")
    compiler.chmod(0o755)
    assert not entry_point.triton_problem()
    assert (tmp_path / ".triton" / "cache").is_dir(), "the one that Triton will use"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(compiler / "cache"))
    assert "set TRITON_CACHE_DIR" in entry_point.triton_problem()
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CC", "cc")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    assert not entry_point.triton_problem()


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    """On a GPU's image without them. The packages that are needed are said."""
    (tmp_path / "uvloop.py").write_text("raise ModuleNotFoundError(name='uvloop')")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [sys.executable, "-m", "workers"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.startswith("python -m workers needs uvloop") and "protobuf" in done.stderr
