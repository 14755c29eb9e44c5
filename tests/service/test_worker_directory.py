"""What a gateway leaves of its workers to the next one, which checks all that it reads."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from service.pool import local
from service.pool.local import LocalLauncher, settings_of
from service.pool.process import LocalProcess, find_process
from service.pool.worker_directory import WorkerDirectory, lock_holder
from workers.common import worker_pb2
from workers.common.code import worker_code

CONFIG = worker_pb2.WorkerConfig(
    worker_id="worker-0", model="paged-attention", kv_pages=8, orphan_grace_s=60, log_level="info"
)
# Of a process that has a lock, as a worker.
HOLD = """
import fcntl, os, sys
for path in sys.argv[2:]:
    fcntl.lockf(os.open(path, os.O_RDWR), fcntl.LOCK_EX)
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def data_dir() -> Iterator[Path]:
    """A directory with a path that is short enough for sockets."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.fixture
def directory(data_dir: Path) -> Iterator[WorkerDirectory]:
    opened = WorkerDirectory(data_dir)
    opened.open()
    yield opened
    opened.close()


class Stranger:
    """A process with the command line and the lock of a worker."""

    def __init__(self, path: Path, *, shown: Path | None = None) -> None:
        """`shown`: what its command line has in place of the path. It has the lock nevertheless."""
        given = [path] if shown is None else [shown, path]
        hold = HOLD if shown is None else HOLD.replace("sys.argv[2:]", "sys.argv[3:]")
        # The path is not an argument of the second one, but a part of one.
        arguments = [str(given[0])] + [f"/proc/self/root{path}" for _ in given[1:]]
        command = [sys.executable, "-S", "-c", hold, "--lock", *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def end(self) -> int:
        with self.process as process:
            process.kill()
        return process.returncode


def test_files_are_read_back_and_private(directory: WorkerDirectory, data_dir: Path) -> None:
    file = directory.add("worker-0-3", "ab", "cd")
    assert directory.workers() == [file]
    assert (file.worker_id, file.epoch, file.settings, file.code) == ("worker-0", 3, "ab", "cd")
    (path,) = (data_dir / "workers").glob("*.lock")
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    directory.remove(file)
    directory.remove(file)
    assert directory.workers() == []


def test_epochs_and_the_id_are_durable(directory: WorkerDirectory, data_dir: Path) -> None:
    assert directory.last_epoch() == 0
    directory.write_epoch(41)
    assert directory.last_epoch() == 41
    assert len(directory.gateway_id()) == 32 and directory.gateway_id() == directory.gateway_id("another")
    (data_dir / "workers" / "gateway-id").write_text("")
    assert len(directory.gateway_id()) == 32, "no gateway has an empty id"
    for content in ("", "-1", "4e3", "9" * 30, "9" * 5000, "\N{SNOWMAN}"):
        (data_dir / "workers" / "epoch").write_text(content)
        assert directory.last_epoch() == 0


def test_only_one_gateway_locks_the_directory(directory: WorkerDirectory, data_dir: Path) -> None:
    other = WorkerDirectory(data_dir)
    with pytest.raises(BlockingIOError, match="another process has it"):
        other.open()
    directory.close()
    other.open()
    other.close()


def test_invalid_files_are_removed(directory: WorkerDirectory, data_dir: Path) -> None:
    """Whatever they contain, and whatever their names are."""
    place = data_dir / "workers"
    hostile: list[tuple[str, bytes]] = [
        ("worker-0-3.lock", content)
        for content in (b"", b"\xff\xfe", b"a", b"a\n", b"a\nb", b"a\nb\nc\n", b"a\nb\n" * 1000)
    ]
    names = ["-3", "w" * 99 + "-1", "worker-0"]
    names += [f"worker-0-{epoch}" for epoch in ("x", "-3", "0", 9**20)]
    hostile += [(f"{name}.lock", b"ab\ncd\n") for name in names]
    for name, content in hostile:
        path = place / name
        path.write_bytes(content)
        path.chmod(0o600)
        if name == "worker-0--3.lock":
            # An id may end so.
            assert [file.worker_id for file in directory.workers()] == ["worker-0-"]
            path.unlink()
            continue
        assert directory.workers() == [], (name, content[:80])
        assert not path.exists(), (name, content[:80])


def test_what_is_no_file_of_a_worker_is_removed(directory: WorkerDirectory, data_dir: Path) -> None:
    """Links are not followed. A file that is longer than any of a worker is not read to its end."""
    place = data_dir / "workers"
    path = directory.add("worker-0-3", "ab", "cd").path
    path.rename(data_dir / "elsewhere")
    path.symlink_to(data_dir / "elsewhere")
    os.mkfifo(place / "worker-1-1.lock")
    (place / "worker-2-1.lock" / "directory").mkdir(parents=True)
    (place / "worker-3-1.lock.tmp").touch()
    (place / "worker-4-1.lock").write_text(f"ab\n{300 * 'c'}\n")
    assert directory.workers() == []
    assert list(place.iterdir()) == [] and (data_dir / "elsewhere").exists()


@pytest.mark.parametrize("place", ["", "a %41", os.fsdecode(b"\xff")])
async def test_process_is_identified_by_its_lock_and_its_command(data_dir: Path, place: str) -> None:
    directory = WorkerDirectory(data_dir / place)
    directory.open()
    file, other, free = (directory.add(f"worker-0-{epoch}", "ab", "cd") for epoch in (3, 4, 5))
    worker, another = Stranger(file.path), Stranger(other.path, shown=file.path)
    assert lock_holder(other.path) == another.process.pid
    assert find_process(other) is None, "the kernel may be wrong, as of a lock on another host"
    assert find_process(free) is None
    found = find_process(file)
    assert found is not None and found[0] == worker.process.pid
    assert lock_holder(file.path) == worker.process.pid, "to look does not unlock it"
    os.close(found[1])
    worker.process.send_signal(signal.SIGSTOP)
    assert await adopt(directory, 60, like(kv_pages=9)) == {}
    assert worker.end() == -signal.SIGKILL, "though it was stopped"
    assert another.process.poll() is None
    another.end()


async def adopted(
    data_dir: Path, grace_s: float, *configs: worker_pb2.WorkerConfig
) -> Mapping[str, LocalProcess]:
    """The workers that a new gateway adopts, and detaches at once. It has stopped all others."""
    launcher = LocalLauncher(data_dir, grace_s)
    processes = await launcher.adopt(configs)
    await asyncio.gather(*launcher._stopping)
    launcher.close()
    for found in processes.values():
        found.detach()
    return processes


async def adopt(
    directory: WorkerDirectory, grace_s: float, *configs: worker_pb2.WorkerConfig
) -> dict[str, int]:
    """Epochs of the adopted workers. The directory is closed."""
    directory.close()
    processes = await adopted(directory.path.parent, grace_s, *configs)
    return {worker_id: found.epoch for worker_id, found in processes.items()}


def like(**values: Any) -> worker_pb2.WorkerConfig:
    config = worker_pb2.WorkerConfig(**values)
    merged = worker_pb2.WorkerConfig()
    merged.CopyFrom(CONFIG)
    merged.MergeFrom(config)
    return merged


def left(directory: WorkerDirectory, epoch: int, settings: str = "", code: str = "") -> Stranger:
    """A worker that a gateway has started, which has ended."""
    directory.open()
    return Stranger(directory.add(f"worker-0-{epoch}", settings or settings_of(CONFIG, ()), code).path)


async def test_workers_with_another_config_are_stopped(
    directory: WorkerDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = left(directory, 3)
    # Each gateway gives it the next one.
    assert await adopt(directory, 60, CONFIG) == {"worker-0": 4}
    other_logging = like(log_level="debug", model_was_proved=True)
    assert await adopt(directory, 60, other_logging) == {"worker-0": 5}
    assert worker.process.poll() is None
    for grace_s, config, settings in (
        (60, like(dtype="float32"), ""),
        (60, like(kv_pages=9), ""),
        (60, like(worker_id="worker-1"), ""),
        (0, like(), ""),
        (60, CONFIG, "of another version"),
    ):
        config.orphan_grace_s = grace_s
        worker.end()
        worker = left(directory, 6, settings)
        assert await adopt(directory, grace_s, config) == {}
        assert worker.process.wait(30) == -signal.SIGKILL
        assert {path.name for path in directory.path.iterdir()} == {"epoch", "gateway-id"}
    worker.end()
    before = settings_of(CONFIG, ())
    monkeypatch.setattr(local, "PROTOCOL", "of another version")
    assert settings_of(CONFIG, ()) != before


async def test_of_two_workers_for_one_slot_the_later_is_kept(directory: WorkerDirectory) -> None:
    """Its gateway may not have seen the end of the earlier one."""
    earlier, later = left(directory, 3), left(directory, 4)
    assert await adopt(directory, 60, CONFIG) == {"worker-0": 5}
    assert earlier.process.wait(30) == -signal.SIGKILL and later.process.poll() is None
    earlier.end()
    later.end()


async def test_workers_of_other_code_are_adopted_as_outdated(directory: WorkerDirectory) -> None:
    """Also those of which it is not known."""
    for epoch, code in enumerate((worker_code(), "that of another version", ""), 1):
        worker = left(directory, epoch, code=code)
        directory.close()
        found = (await adopted(directory.path.parent, 60, CONFIG))["worker-0"]
        assert found.is_outdated is (epoch > 1)
        worker.end()


@pytest.fixture
def temporary(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = data_dir / "tmp"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


async def test_without_a_directory_workers_end_with_their_gateway(
    data_dir: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their socket is in a temporary one then."""
    (data_dir / "a-file").touch()
    first = LocalLauncher(data_dir, 60)
    assert await first.adopt([CONFIG]) == {} and first._grace_s == 60
    for place in (data_dir, data_dir / "a-file"):
        other = LocalLauncher(place, 60)
        assert await other.adopt([CONFIG]) == {} and other._grace_s == 0
        socket = other._directory.socket
        assert socket.is_socket() and temporary in socket.parents
        assert socket.parent.stat().st_mode & 0o777 == 0o700
        other.close()
        assert list(temporary.iterdir()) == []  # noqa: ASYNC240 - of a test
    assert first._directory.socket.is_socket()
    first.close()
    monkeypatch.setattr("service.pool.local.can_watch", lambda: False)
    third = LocalLauncher(data_dir, 60)
    assert await third.adopt([CONFIG]) == {} and third._grace_s == 0
    third.close()


async def test_without_a_thread_that_waits_for_it_no_child_is_left(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later start may work."""
    command = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]
    monkeypatch.setattr("service.pool.local._command", lambda *_: command)

    start, children = threading.Thread.start, list[subprocess.Popen[bytes]]()

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "worker-process":
            raise RuntimeError("can't start new thread")
        start(thread)

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            children.append(self)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    launcher = LocalLauncher(data_dir, 0)
    await launcher.adopt([CONFIG])
    with pytest.raises(OSError, match="new thread"):
        await launcher.start(like())
    assert launcher._directory.workers() == []
    assert [child.returncode for child in children] == [-signal.SIGKILL]
    launcher.close()


async def test_child_is_watched_and_stopped(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-S", "-c", "import sys; sys.exit(len(sys.stdin.read()) + 7)"]
    monkeypatch.setattr("service.pool.local._command", lambda *_: command)
    directory = WorkerDirectory(data_dir)
    directory.open()
    directory.write_epoch(41)
    directory.close()
    launcher = LocalLauncher(data_dir, 0)
    await launcher.adopt([CONFIG])
    exits, hangs, detached = [await launcher.start(like()) for _ in range(3)]
    assert [process.epoch for process in (exits, hangs, detached)] == [42, 43, 44]
    assert directory.last_epoch() == 44
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


@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_pid_is_no_other_processs_before_the_end_of_a_worker_is_known(is_killed: bool) -> None:
    """Else a signal could go to that one."""
    child = started()
    endpoint: Any = SimpleNamespace(epoch=1)
    process = LocalProcess(child.pid, endpoint, lambda: None, child=child)
    seen = psutil.Process(child.pid)
    end_unseen(child)
    assert seen.status() == psutil.STATUS_ZOMBIE
    if is_killed:
        process.kill()
    assert await process.wait() == child.returncode == 1
    assert not seen.is_running()


def started() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)


def end_unseen(child: subprocess.Popen[bytes]) -> None:
    """The event loop has no turn meanwhile."""
    assert child.stdin is not None
    child.stdin.close()
    process = psutil.Process(child.pid)
    while process.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    time.sleep(0.1)
