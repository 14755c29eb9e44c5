"""What a gateway has written down of its workers: believed by the next one only as far as it is true."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from quire.v1 import worker_pb2

from service.pool.lasting import LastingProcess, address_of, boot_id, start_ticks
from service.pool.local import LocalLauncher
from service.pool.registry import Entry, Registry

CONFIG = worker_pb2.WorkerConfig(
    worker_id="worker-0", model="paged-attention", kv_pages=8, orphan_grace_s=60, log_level="info"
)
WAIT = "import sys; print(flush=True); sys.stdin.read()"


@pytest.fixture
def data_dir() -> Iterator[Path]:
    """A directory whose path is short, as those of tests are not."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.fixture
def registry(data_dir: Path) -> Iterator[Registry]:
    opened = Registry(data_dir)
    opened.open()
    yield opened
    opened.close()


class Stranger:
    """A process that looks like a worker that listens at an address."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-S", "-c", WAIT, *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def end(self) -> int:
        with self.process as process:
            process.kill()
        return process.returncode


def entry_of(data_dir: Path, process: subprocess.Popen[bytes] | None = None, **changed: Any) -> Entry:
    pid = os.getpid() if process is None else process.pid
    path = data_dir / "workers" / "worker-0-3.sock"
    fields: dict[str, Any] = {
        "worker_id": "worker-0",
        "epoch": 3,
        "pid": pid,
        "boot_id": boot_id(),
        "start_ticks": start_ticks(pid),
        "socket": str(path),
        "secret": "ab12",
        "config": CONFIG,
    }
    return Entry(**(fields | changed))


def test_what_was_written_is_read_and_private(registry: Registry, data_dir: Path) -> None:
    entry = entry_of(data_dir)
    registry.write(entry)
    registry.write(entry)
    assert registry.read() == [entry]
    (path,) = (data_dir / "workers").glob("*.json")
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    registry.remove(entry)
    registry.remove(entry)
    assert registry.read() == []


def test_epochs_last(registry: Registry, data_dir: Path) -> None:
    assert registry.last_epoch() == 0
    registry.note_epoch(41)
    assert registry.last_epoch() == 41
    for content in ("", "-1", "4e3", "9" * 30, "9" * 5000, "\N{SNOWMAN}"):
        (data_dir / "workers" / "epoch").write_text(content)
        assert registry.last_epoch() == 0


def test_one_gateway_has_it_at_a_time(registry: Registry, data_dir: Path) -> None:
    other = Registry(data_dir)
    with pytest.raises(BlockingIOError, match="another gateway has it"):
        other.open()
    registry.close()
    other.open()
    other.close()


def test_a_long_path_has_its_socket_elsewhere(data_dir: Path) -> None:
    registry = Registry(data_dir / ("x" * 90))
    registry.open()
    path = registry.socket_path("worker-0-3")
    assert len(os.fsencode(path)) <= 107 and path.parent.stat().st_mode & 0o777 == 0o700
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    entry = entry_of(data_dir, socket=str(path))
    registry.write(entry)
    assert registry.read() == [entry]
    registry.remove(entry)
    assert not path.parent.exists()
    registry.close()


def changed(entry: dict[str, Any], **values: Any) -> str:
    return json.dumps(entry | values)


def test_what_is_not_an_entry_is_removed(registry: Registry, data_dir: Path) -> None:
    """Whatever somebody has put there."""
    place = data_dir / "workers"
    registry.write(entry_of(data_dir))
    good = json.loads((place / "worker-0-3.json").read_text())
    hostile: list[str | bytes] = [
        b"",
        b"\xff\xfe",
        "[]",
        "null",
        "[" * 60_000,
        '{"pid": ' + "9" * 60_000 + "}",
        "{" + " " * (1 << 17),
        changed(good, pid=1),
        changed(good, pid=-1),
        changed(good, pid=True),
        changed(good, pid="7"),
        changed(good, pid=1 << 40),
        changed(good, epoch=4),
        changed(good, epoch=-3),
        changed(good, epoch=1 << 80),
        changed(good, worker_id="../worker-0"),
        changed(good, socket="/etc/passwd"),
        changed(good, socket="\0/worker-0-3.sock"),
        changed(good, socket="\ud800/worker-0-3.sock"),
        changed(good, secret="a\nb"),
        changed(good, secret=""),
        changed(good, config=[]),
        changed(good, config={"workerId": 7}),
        changed(good, config={"kvPages": "x"}),
        json.dumps({name: value for name, value in good.items() if name != "secret"}),
    ]
    for content in hostile:
        path = place / "worker-0-3.json"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        path.chmod(0o600)
        assert registry.read() == [], content[:80]
        assert not path.exists(), content[:80]


def test_what_is_no_private_file_is_removed_and_not_followed(registry: Registry, data_dir: Path) -> None:
    place = data_dir / "workers"
    entry = entry_of(data_dir)
    registry.write(entry)
    path = place / "worker-0-3.json"
    path.rename(data_dir / "elsewhere")
    path.symlink_to(data_dir / "elsewhere")
    os.mkfifo(place / "worker-1-1.json")
    (place / "worker-2-1.json").mkdir()
    (place / "worker-3-1.json.tmp").touch()
    assert registry.read() == []
    assert list(place.iterdir()) == [] and (data_dir / "elsewhere").exists()
    registry.write(entry)
    path.chmod(0o640)
    assert registry.read() == [] and not path.exists()


async def test_a_process_is_known_by_when_it_began_and_what_it_is(registry: Registry, data_dir: Path) -> None:
    address = address_of(entry_of(data_dir).socket)
    worker, other = Stranger("--listen", address), Stranger("--listen", address + "x")
    entry = entry_of(data_dir, worker.process)
    for wrong in (
        entry_of(data_dir, worker.process, start_ticks=entry.start_ticks - 1),
        entry_of(data_dir, worker.process, boot_id="before"),
        entry_of(data_dir, other.process),
    ):
        assert LastingProcess.find(wrong, registry) is None
    found = LastingProcess.find(entry, registry)
    assert found is not None
    ended = asyncio.create_task(found.ended())
    await asyncio.sleep(0)
    assert not ended.done()
    worker.process.send_signal(signal.SIGSTOP)
    assert await found.end(grace_s=0) is None and await ended is None
    assert worker.end() == -signal.SIGKILL
    assert LastingProcess.find(entry, registry) is None, "it is gone"
    assert other.process.poll() is None
    other.end()


async def adopt(data_dir: Path, grace_s: float, *configs: worker_pb2.WorkerConfig) -> dict[str, int]:
    """The epochs of what a new gateway takes over; it has ended all others then."""
    launcher = LocalLauncher(data_dir, grace_s)
    adopted = await launcher.adopt(configs)
    assert launcher.last_epoch >= 3
    await asyncio.gather(*launcher._ending)
    launcher.close()
    for found in adopted.values():
        found.processes.leave()
    return {worker_id: found.epoch for worker_id, found in adopted.items()}


def like(**values: Any) -> worker_pb2.WorkerConfig:
    config = worker_pb2.WorkerConfig(**values)
    merged = worker_pb2.WorkerConfig()
    merged.CopyFrom(CONFIG)
    merged.MergeFrom(config)
    return merged


async def test_who_would_compute_something_else_is_ended(data_dir: Path) -> None:
    worker = Stranger("--listen", address_of(entry_of(data_dir).socket))
    registry = Registry(data_dir)

    def write(**changed: Any) -> None:
        registry.open()
        registry.write(entry_of(data_dir, worker.process, **changed))
        registry.close()

    write()
    assert await adopt(data_dir, 60, CONFIG) == {"worker-0": 3}
    said_otherwise = like(log_level="debug", log_format="json", model_was_proved=True)
    assert await adopt(data_dir, 60, said_otherwise) == {"worker-0": 3}
    assert worker.process.poll() is None
    for grace_s, config, written in (
        (60, like(dtype="float32"), {}),
        (60, like(kv_pages=9), {}),
        (60, like(worker_id="worker-1"), {}),
        (0, like(), {}),
        (60, CONFIG, {"protocol": "of another version"}),
    ):
        config.orphan_grace_s = grace_s
        worker.end()
        worker = Stranger("--listen", address_of(entry_of(data_dir).socket))
        write(**written)
        assert await adopt(data_dir, grace_s, config) == {}
        assert worker.process.wait(30) == -signal.SIGKILL
        assert list((data_dir / "workers").iterdir()) == []
    worker.end()


async def test_without_a_registry_workers_end_with_their_gateway(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (data_dir / "a-file").touch()
    monkeypatch.setattr("service.pool.local._LOCK_PATIENCE_S", 0.1)
    first = LocalLauncher(data_dir, 60)
    assert await first.adopt([CONFIG]) == {} and first._is_open
    for other in (LocalLauncher(data_dir, 60), LocalLauncher(data_dir / "a-file", 60)):
        assert await other.adopt([CONFIG]) == {} and not other._is_open
        other.close()
    first.close()
    monkeypatch.setattr("service.pool.local.can_watch", lambda: False)
    third = LocalLauncher(data_dir, 60)
    assert await third.adopt([CONFIG]) == {} and not third._is_open
    third.close()
