"""The contents of log lines, and what they never contain."""

from __future__ import annotations

import asyncio
import datetime as dt
import errno
import fcntl
import io
import json
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from quire.v1 import executor_pb2

from service.logging import bind_request_id, configure_logging, current_request_id, get_logger
from workers.common.background_log import BackgroundLog


@pytest.fixture(autouse=True)
def _restored(logging_as_before: None) -> Iterator[None]:
    yield
    bind_request_id("")


def lines_of(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_line_has_time_level_logger_event_and_request_id() -> None:
    stream = io.StringIO()
    configure_logging("info", "auto", stream)

    async def call() -> None:
        bind_request_id("r-1")
        get_logger("service.server").info("call_done", duration_ms=3.5)
        assert current_request_id() == "r-1"

    asyncio.run(call())
    get_logger("service.server").warning("after")

    first, second = lines_of(stream)
    when = dt.datetime.fromisoformat(first.pop("timestamp"))
    assert when.utcoffset() == dt.timedelta(0)
    assert first == {
        "level": "info",
        "logger": "service.server",
        "event": "call_done",
        "request_id": "r-1",
        "duration_ms": 3.5,
    }
    assert "request_id" not in second, "the id went with the call's task"


@pytest.mark.parametrize("log_format", ["json", "pretty"])
def test_contents_of_requests_never_get_in(log_format: str) -> None:
    configure_logging("debug", log_format, stream := io.StringIO())
    request = executor_pb2.PrefillRequest(token_ids=[48_151_623, 42_108_150], request_id="secret-key")
    local_value = [int("48151623")]
    try:
        raise ValueError("refused")
    except ValueError:
        get_logger("service").exception(
            "failed",
            request=request,
            token_ids=[48_151_623],
            token_id=48_151_623,
            prompt="48151623",
            rows=local_value,
            payload=b"48151623",
            workers=["worker-0"],
        )
    text = stream.getvalue()
    assert "48151623" not in text and "secret-key" not in text
    assert "worker-0" in text and "refused" in text and "Traceback" in text


ATTACK = "\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\r\nforged line\t"


@pytest.mark.parametrize("log_format", ["json", "pretty"])
def test_control_characters_are_escaped(log_format: str) -> None:
    configure_logging("info", log_format, stream := io.StringIO())
    log = get_logger("service")
    bind_request_id(ATTACK)
    try:
        raise ValueError(ATTACK)
    except ValueError:
        log.exception(ATTACK, message=ATTACK, names=[ATTACK])
    logging.getLogger("some.library").error(ATTACK)
    text = stream.getvalue()
    shown = text.replace("\n", "").replace("\t", "")
    assert shown.isprintable(), "nothing that a terminal acts on"
    starts = [line for line in text.splitlines() if line.startswith(("forged", '"forged'))]
    assert len(starts) == (1 if log_format == "pretty" else 0), "lines are broken in tracebacks only"


class UnreadPipe:
    """A pipe that is full already."""

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe()
        self.size_bytes = fcntl.fcntl(self.write_end, fcntl.F_GETPIPE_SZ)
        os.write(self.write_end, b"." * self.size_bytes)

    def read_until(self, wanted: bytes) -> bytes:
        text = b""
        while wanted not in text:
            text += os.read(self.read_end, 1 << 20)
        return text


def test_an_unread_pipe_does_not_block() -> None:
    pipe, told = UnreadPipe(), []
    done = threading.Event()

    def tell(lines: int) -> None:
        told.append(lines)
        done.set()

    log = BackgroundLog(pipe.write_end, tell)
    line = "x" * 1023 + "\n"
    for _ in range(10_000):  # 10 MB
        log.write(line)
    log.drain(0.01)
    written = pipe.read_until(line.encode())
    while not done.is_set():
        written += os.read(pipe.read_end, 1 << 20)
    log.write("the end\n")
    written += pipe.read_until(b"the end\n")
    log.drain(30.0)
    kept = written.count(line.encode())
    assert kept + sum(told) == 10_000 and 1000 < kept < 5000


def test_a_line_that_a_full_disk_cut_off_ends_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write, room = tmp_path / "log", os.write, [9, 2]

    def write_what_fits(fd: int, data: bytes) -> int:
        if not room:
            return write(fd, data)
        if not room[0]:
            del room[0]
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(fd, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(os, "write", write_what_fits)
    with path.open("wb") as file:
        log = BackgroundLog(file.fileno(), lambda _: None)
        for line in ("first\n", "second\n", "third\n", "fourth\n"):
            log.write(line)
        log.drain(30.0)
    assert [line for line in path.read_text().splitlines() if line] == ["first", "sec", "t", "fourth"]
