"""A sandboxed process returns a result, or it is ended and the error says why."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest

from service.text.task_process import TaskFailed, TaskProcess
from service.text.tasks import TaskKind
from tests.service.served import turns_of

# Its tasks are Python.
HOSTILE = TaskKind(
    "tests.service.text.hostile_code",
    max_cpu_s=0.3,
    max_memory_bytes=256 << 20,
    max_result_bytes=1 << 20,
    timeout_s=20,
)
ECHO = b"result = 'a'"
# In native code, which does not run Python's signal handlers.
LOOP = b"sum(range(10**12))"
SLEEP = b"import time; time.sleep(1000)"
FILES = b"""
import os, time
links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
files = {os.path.basename(link): os.readlink(link) for link in links if os.path.islink(link)}
"""
# A result whose bytes come one by one.
DRIP = (
    FILES
    + b"""
(sent_to,) = (int(number) for number, file in files.items() if "socket" in file)
os.write(sent_to, (30).to_bytes(4, "big"))
for _ in range(30):
    time.sleep(0.1)
    os.write(sent_to, b"x")
time.sleep(1000)
"""
)


@pytest.fixture
def process() -> Iterator[TaskProcess]:
    process = TaskProcess(HOSTILE)
    yield process
    process.close()


def run(process: TaskProcess, task: bytes) -> bytes:
    return asyncio.run(process.run(task))


def is_gone(pid: int | None) -> bool:
    return pid is not None and not psutil.pid_exists(pid)


async def test_a_large_result_does_not_keep_the_event_loop(process: TaskProcess) -> None:
    """Also where each part of it is there before it is read."""
    loop = asyncio.get_running_loop()
    result = b"x" * 1_000_000
    await process.run(ECHO)
    left = len(result).to_bytes(4, "big") + result

    async def sock_recv(_socket: socket.socket, size: int) -> bytes:
        nonlocal left
        part, left = left[:size], left[size:]
        return part

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "sock_recv", sock_recv)
        found, turns = await turns_of(process.run(ECHO))
    assert found == result and turns > 10


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (LOOP, "used more than 0.3 s of CPU time"),
        (b"import ctypes; ctypes.string_at(0)", "crashed its process"),
        (b"result = 'x' * 2_000_000", "wrote too large a result"),
    ],
)
def test_a_misbehaving_task_ends_the_process(process: TaskProcess, task: bytes, message: str) -> None:
    run(process, ECHO)
    with pytest.raises(TaskFailed, match=message) as caught:
        run(process, task)
    assert caught.value.is_task_fault
    assert is_gone(process.pid)
    with pytest.raises(TaskFailed):
        run(process, ECHO)


def test_cpu_time_is_limited_per_task(process: TaskProcess) -> None:
    # Half a second in total.
    for _ in range(25):
        run(process, b"sum(range(2_000_000))")
    assert run(process, ECHO) == b"a"


def test_memory_is_limited(process: TaskProcess) -> None:
    assert run(process, b"result = len(bytes(1_000_000))") == b"1000000"
    # An uncaught MemoryError.
    with pytest.raises(TaskFailed, match="status 1"):
        run(process, b"bytes(300_000_000)")


@pytest.mark.parametrize("task", [SLEEP, DRIP])
def test_a_hanging_task_times_out(task: bytes) -> None:
    process = TaskProcess(replace(HOSTILE, timeout_s=0.5))
    with pytest.raises(TaskFailed, match="took too long"):
        run(process, task)
    assert is_gone(process.pid)


def test_that_it_was_idle_before_its_first_task_is_not_the_fault_of_that() -> None:
    process = TaskProcess(replace(HOSTILE, idle_s=0.01))
    asyncio.run(process._start())
    assert process._popen is not None
    assert process._popen.wait(timeout=30) == 0
    with pytest.raises(TaskFailed) as failed:
        run(process, ECHO)
    assert not failed.value.is_task_fault


def test_it_inherits_no_descriptors_and_no_secrets(
    process: TaskProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_TOKEN", "planted")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.set_inheritable(True)
        code = FILES + b"result = ','.join(file for file in files.values() if '/proc/' not in file)"
        files = run(process, code).decode().split(",")
    assert sorted(file.partition(":")[0] for file in files) == ["/dev/null"] * 3 + ["socket"]
    assert b"planted" not in run(process, b"import os; result = str(os.environ)")


def test_it_ignores_signals_to_the_process_group(process: TaskProcess) -> None:
    run(process, ECHO)
    assert process.pid is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(process.pid, number)
    assert run(process, ECHO) == b"a"


def test_killing_it_fails_the_running_task(process: TaskProcess) -> None:
    run(process, ECHO)
    killer = threading.Timer(0.05, process.kill)
    killer.start()
    with pytest.raises(TaskFailed):
        run(process, SLEEP)
    killer.join()
    assert is_gone(process.pid)


def test_it_ends_with_its_parent_process() -> None:
    program = (
        "import asyncio, time\n"
        "from tests.service.text.test_task_process import *\n"
        "process = TaskProcess(HOSTILE)\n"
        "run(process, ECHO)\n"
        "print(process.pid, flush=True)\n"
        "time.sleep(100)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    deadline_s = time.monotonic() + 10
    while psutil.pid_exists(pid) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert is_gone(pid)
