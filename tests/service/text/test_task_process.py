"""A process that is not trusted: it answers, or it is gone and said to be."""

from __future__ import annotations

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

from service.text.task_process import Bounds, TaskFailed, TaskProcess

MODULE = "tests.service.text.unruly"
BOUNDS = Bounds(max_cpu_s=0.3, max_memory_bytes=256 << 20, max_answer_bytes=1 << 20, patience_s=20)


@pytest.fixture
def process() -> Iterator[TaskProcess]:
    process = TaskProcess(MODULE, BOUNDS)
    yield process
    process.end()


def is_gone(pid: int | None) -> bool:
    return pid is not None and not psutil.pid_exists(pid)


def test_it_answers_task_after_task(process: TaskProcess) -> None:
    large = os.urandom(1 << 20)[: (1 << 20) - 10]
    assert process.ask(b"say a") == b"a"
    pid = process.pid
    assert process.ask(b"say " + large) == large
    assert process.ask(b"say ") == b""
    assert (process.pid, process.num_tasks) == (pid, 3)


def test_what_it_writes_elsewhere_is_no_answer(process: TaskProcess) -> None:
    assert process.ask(b"shout") == b"done"
    assert process.ask(b"say a") == b"a"


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (b"loop", "computed for more than 0.3 s"),
        (b"crash", "crashed its process"),
        (b"write 2000000", "wrote too much"),
    ],
)
def test_what_a_task_does_itself_ends_it(process: TaskProcess, task: bytes, said: str) -> None:
    process.ask(b"say a")
    with pytest.raises(TaskFailed, match=said) as caught:
        process.ask(task)
    assert caught.value.is_own_doing
    assert is_gone(process.pid)
    with pytest.raises(TaskFailed):
        process.ask(b"say a")


def test_time_is_counted_for_each_task(process: TaskProcess) -> None:
    # Half a second in all.
    for _ in range(25):
        process.ask(b"say " + bytes(1_000_000))
    assert process.ask(b"say a") == b"a"


@pytest.mark.parametrize("num_before", [0, 1])
def test_it_may_be_earlier_tasks_that_left_no_room(process: TaskProcess, num_before: int) -> None:
    for _ in range(num_before):
        process.ask(b"say a")
    with pytest.raises(TaskFailed, match="needs too much memory") as caught:
        process.ask(b"abort")
    assert caught.value.is_own_doing == (num_before == 0)


def test_it_holds_no_more_than_its_bound(process: TaskProcess) -> None:
    assert process.ask(b"swell 1000000") == b"1000000"
    # A MemoryError, which this module does not catch.
    with pytest.raises(TaskFailed, match="status 1"):
        process.ask(b"swell 300000000")


def test_it_writes_no_files(process: TaskProcess, tmp_path: pytest.TempPathFactory) -> None:
    with pytest.raises(TaskFailed):
        process.ask(f"file {tmp_path}/x".encode())


def test_patience_ends_for_one_that_does_nothing() -> None:
    process = TaskProcess(MODULE, replace(BOUNDS, patience_s=0.5))
    with pytest.raises(TaskFailed, match="took too long"):
        process.ask(b"sleep")
    assert is_gone(process.pid)


def test_it_has_nothing_of_ours(process: TaskProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_TOKEN", "planted")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.set_inheritable(True)
        links = process.ask(b"descriptors").decode().split("\n")
    assert sorted(link.partition(":")[0] for link in links) == ["/dev/null"] * 3 + ["pipe"] * 2
    assert b"planted" not in process.ask(b"environment")


def test_signals_to_the_group_leave_it(process: TaskProcess) -> None:
    process.ask(b"say a")
    assert process.pid is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(process.pid, number)
    assert process.ask(b"say a") == b"a"


def test_killing_it_ends_the_task_under_way(process: TaskProcess) -> None:
    process.ask(b"say a")
    killer = threading.Timer(0.05, process.kill)
    killer.start()
    with pytest.raises(TaskFailed):
        process.ask(b"sleep")
    killer.join()
    assert is_gone(process.pid)


def test_one_that_was_killed_before_it_began_never_begins(process: TaskProcess) -> None:
    process.kill()
    with pytest.raises(TaskFailed, match="was ended"):
        process.ask(b"say a")
    assert process.pid is None


def test_it_ends_with_who_forgets_it() -> None:
    process = TaskProcess(MODULE, BOUNDS)
    process.ask(b"say a")
    pid = process.pid
    del process
    assert is_gone(pid)


def test_it_ends_with_who_started_it() -> None:
    program = (
        "import sys, time\n"
        "from service.text.task_process import *\n"
        f"process = TaskProcess({MODULE!r}, Bounds(1, 1 << 30, 100))\n"
        "process.ask(b'say a')\n"
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
