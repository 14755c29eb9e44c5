"""The registry of workers: the next gateway checks all that it reads."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from quire.v1 import worker_pb2

from service.pool.local import LocalLauncher
from service.pool.process import LocalProcess, boot_id, start_ticks
from service.pool.registry import Registry, RegistryEntry, remove_socket
from workers.common.code import worker_code

CONFIG = worker_pb2.WorkerConfig(
    worker_id="worker-0", model="paged-attention", kv_pages=8, orphan_grace_s=60, log_level="info"
)
WAIT = "import sys; print(flush=True); sys.stdin.read()"


@pytest.fixture
def data_dir() -> Iterator[Path]:
    """A directory with a path that is short enough for sockets."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.fixture
def temporary(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = data_dir / "tmp"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


@pytest.fixture
def registry(data_dir: Path) -> Iterator[Registry]:
    opened = Registry(data_dir)
    opened.open()
    yield opened
    opened.close()


class Stranger:
    """A process with the command line of a worker."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-S", "-c", WAIT, *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def end(self) -> int:
        with self.process as process:
            process.kill()
        return process.returncode


def entry_of(data_dir: Path, process: subprocess.Popen[bytes] | None = None, **changed: Any) -> RegistryEntry:
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
    return RegistryEntry(**(fields | changed))


def test_entries_are_read_back_and_private(registry: Registry, data_dir: Path) -> None:
    entry = entry_of(data_dir)
    registry.write(entry)
    registry.write(entry)
    assert registry.read() == [entry]
    (path,) = (data_dir / "workers").glob("*.json")
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    registry.remove(entry)
    registry.remove(entry)
    assert registry.read() == []


def test_epochs_are_durable(registry: Registry, data_dir: Path) -> None:
    assert registry.last_epoch() == 0
    registry.write_epoch(41)
    assert registry.last_epoch() == 41
    for content in ("", "-1", "4e3", "9" * 30, "9" * 5000, "\N{SNOWMAN}"):
        (data_dir / "workers" / "epoch").write_text(content)
        assert registry.last_epoch() == 0


def test_only_one_gateway_locks_the_registry(registry: Registry, data_dir: Path) -> None:
    other = Registry(data_dir)
    with pytest.raises(BlockingIOError, match="another gateway has it"):
        other.open()
    registry.close()
    other.open()
    other.close()


def test_socket_of_a_long_path_is_in_a_temporary_directory(data_dir: Path) -> None:
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


def test_invalid_entries_are_removed(registry: Registry, data_dir: Path) -> None:
    """Whatever they contain."""
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


def test_files_that_are_not_private_are_removed_and_not_followed(registry: Registry, data_dir: Path) -> None:
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


def nothing(_: RegistryEntry) -> None:
    """Callback that does nothing."""


@pytest.mark.parametrize("place", ["", "a %41", os.fsdecode(b"\xff")])
async def test_process_is_identified_by_start_time_and_command(data_dir: Path, place: str) -> None:
    data_dir /= place
    address = entry_of(data_dir).socket
    worker, other = Stranger("--socket", address), Stranger("--socket", address + "x")
    entry = entry_of(data_dir, worker.process)
    for wrong in (
        entry_of(data_dir, worker.process, start_ticks=entry.start_ticks - 1),
        entry_of(data_dir, worker.process, boot_id="before"),
        entry_of(data_dir, other.process),
    ):
        assert LocalProcess.attach(wrong, nothing) is None
    found = LocalProcess.attach(entry, nothing)
    assert found is not None
    ended = asyncio.create_task(found.wait())
    await asyncio.sleep(0)
    assert not ended.done()
    worker.process.send_signal(signal.SIGSTOP)
    assert await found.stop(grace_s=0) is None and await ended is None
    assert worker.end() == -signal.SIGKILL
    assert LocalProcess.attach(entry, nothing) is None, "it has exited"
    assert other.process.poll() is None
    other.end()


async def adopted(
    data_dir: Path, grace_s: float, *configs: worker_pb2.WorkerConfig
) -> Mapping[str, LocalProcess]:
    """The workers that a new gateway adopts, and detaches at once. It has stopped all others."""
    launcher = LocalLauncher(data_dir, grace_s)
    processes = await launcher.adopt(configs)
    assert launcher._epochs.last >= 3
    await asyncio.gather(*launcher._stopping)
    launcher.close()
    for found in processes.values():
        found.detach()
    return processes


async def adopt(data_dir: Path, grace_s: float, *configs: worker_pb2.WorkerConfig) -> dict[str, int]:
    """Epochs of the adopted workers."""
    processes = await adopted(data_dir, grace_s, *configs)
    return {worker_id: found.epoch for worker_id, found in processes.items()}


def like(**values: Any) -> worker_pb2.WorkerConfig:
    config = worker_pb2.WorkerConfig(**values)
    merged = worker_pb2.WorkerConfig()
    merged.CopyFrom(CONFIG)
    merged.MergeFrom(config)
    return merged


def register(data_dir: Path, worker: Stranger, **changed: Any) -> None:
    """As its gateway does, which ends."""
    registry = Registry(data_dir)
    registry.open()
    registry.write(entry_of(data_dir, worker.process, **changed))
    registry.close()


async def test_workers_with_another_config_are_stopped(data_dir: Path) -> None:
    worker = Stranger("--socket", entry_of(data_dir).socket)
    register(data_dir, worker)
    assert await adopt(data_dir, 60, CONFIG) == {"worker-0": 3}
    other_logging = like(log_level="debug", log_format="json", model_was_proved=True)
    assert await adopt(data_dir, 60, other_logging) == {"worker-0": 3}
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
        worker = Stranger("--socket", entry_of(data_dir).socket)
        register(data_dir, worker, **written)
        assert await adopt(data_dir, grace_s, config) == {}
        assert worker.process.wait(30) == -signal.SIGKILL
        assert list((data_dir / "workers").iterdir()) == []
    worker.end()


async def test_workers_of_other_code_are_adopted_as_outdated(data_dir: Path) -> None:
    """Also those that a version without digests of code has written, whose entries lack the field."""
    worker = Stranger("--socket", entry_of(data_dir).socket)
    register(data_dir, worker, code=worker_code())
    assert not (await adopted(data_dir, 60, CONFIG))["worker-0"].is_outdated
    (path,) = (data_dir / "workers").glob("*.json")
    content = json.loads(path.read_text())
    for code in ({"code": "that of another version"}, {}):
        del content["code"]
        content |= code
        path.write_text(json.dumps(content))
        assert (await adopted(data_dir, 60, CONFIG))["worker-0"].is_outdated
    worker.end()


def test_digest_of_the_code_changes_with_any_source(tmp_path: Path) -> None:
    kernel = tmp_path / "kernels" / "cpu" / "products.cpp"
    kernel.parent.mkdir(parents=True)
    digests = {worker_code(tmp_path)}
    for content in ("one", "two"):
        kernel.write_text(content)
        digests.add(worker_code(tmp_path))
    kernel.rename(kernel.with_name("sums.cpp"))
    digests.add(worker_code(tmp_path))
    (kernel.parent / "library.so").touch()
    digests.add(worker_code(tmp_path))
    assert len(digests) == 4


async def test_without_a_registry_workers_end_with_their_gateway(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (data_dir / "a-file").touch()
    monkeypatch.setattr("service.pool.registry._LOCK_TIMEOUT_S", 0.1)
    locked: list[int] = []
    first = LocalLauncher(data_dir, 60, lambda: locked.append(1))
    assert await first.adopt([CONFIG]) == {} and first._grace_s == 60
    for directory in (data_dir, data_dir / "a-file"):
        other = LocalLauncher(directory, 60, lambda: locked.append(2))
        assert await other.adopt([CONFIG]) == {} and other._grace_s == 0
        socket = other._registry.socket_path("worker-0-1")
        assert socket.parent.parent == Path(tempfile.gettempdir())
        assert socket.parent.stat().st_mode & 0o777 == 0o700
        remove_socket(str(socket))
        assert not socket.parent.exists()
        other.close()
    first.close()
    assert locked == [1]
    monkeypatch.setattr("service.pool.local.can_watch", lambda: False)
    third = LocalLauncher(data_dir, 60)
    assert await third.adopt([CONFIG]) == {} and third._grace_s == 0
    third.close()


async def test_without_a_data_directory_nothing_stays(temporary: Path) -> None:
    launcher = LocalLauncher(None, 0)
    assert await launcher.adopt([CONFIG]) == {}
    socket = launcher._registry.socket_path("worker-0-1")
    assert temporary in socket.parents and socket.parent.stat().st_mode & 0o777 == 0o700
    launcher.close()
    assert os.listdir(temporary) == []  # noqa: PTH208 - pathlib's is not for async functions


async def test_only_directories_of_dead_gateways_are_removed(temporary: Path) -> None:
    living, dead, third = (LocalLauncher(None, 0) for _ in range(3))
    (temporary / "quire-workers-notes").symlink_to(temporary / "else")
    (temporary / "else").mkdir()
    for launcher in (living, dead):
        await launcher.adopt([CONFIG])
    dead._registry.close()
    await third.adopt([CONFIG])
    left = sorted(os.listdir(temporary))  # noqa: PTH208 - pathlib's is not for async functions
    homes = [launcher._temporary.name for launcher in (living, third)]  # type: ignore[union-attr]
    assert left == sorted(["else", "quire-workers-notes", *homes])
    living.close()
    third.close()


def test_sockets_of_dead_gateways_are_removed(registry: Registry, data_dir: Path) -> None:
    registry.write(entry_of(data_dir))
    kept, left = registry.socket_path("worker-0-3"), registry.socket_path("worker-1-4")
    kept.touch()
    left.touch()
    assert len(registry.read()) == 1 and kept.exists() and not left.exists()


def test_removed_directory_is_created_again(registry: Registry, temporary: Path) -> None:
    first = registry.socket_path("worker-0-1")
    shutil.rmtree(first.parent)
    assert registry.socket_path("worker-0-2").parent.parent == temporary
    registry.open()
    assert registry.socket_path("worker-0-2").parent == first.parent and first.parent.is_dir()


def test_path_that_is_too_long_for_a_socket_is_reported(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = data_dir / ("x" * 90)
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    with pytest.raises(OSError, match="the path is too long for a socket"):
        Registry(place).socket_path("worker-0-1")
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("can_watch", [True, False])
async def test_child_is_watched_and_stopped(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, can_watch: bool
) -> None:
    """Also without pidfds."""
    monkeypatch.setattr("service.pool.local.can_watch", lambda: can_watch)
    command = [sys.executable, "-S", "-c", "import sys; sys.exit(len(sys.stdin.read()) + 7)"]
    monkeypatch.setattr("service.pool.local._command", lambda *_: command)
    registry = Registry(data_dir)
    registry.open()
    registry.write_epoch(41)
    registry.close()
    launcher = LocalLauncher(data_dir, 0)
    await launcher.adopt([CONFIG])
    exits, hangs, detached = [await launcher.start(like()) for _ in range(3)]
    assert [process.epoch for process in (exits, hangs, detached)] == [42, 43, 44]
    assert registry.last_epoch() == 44
    stdin = exits._child.stdin  # type: ignore[union-attr]
    assert stdin is not None
    stdin.close()
    assert await exits.wait() == 7 == await exits.stop(grace_s=0)
    os.kill(hangs.pid, signal.SIGSTOP)
    assert await hangs.stop(grace_s=0) == -signal.SIGKILL
    exits.kill()
    detached.detach()
    detached.kill()
    child = detached._child
    assert child is not None and child.poll() is None, "it is detached"
    with child:
        child.kill()
    launcher.close()
