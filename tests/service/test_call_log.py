"""Lines of calls: which have one, what is in it, and how many there are."""

from __future__ import annotations

import asyncio
import io
import re
from pathlib import Path
from typing import Any

import pytest
from quire.v1 import executor_pb2, executor_pb2_grpc

from service.api.call_log import CallLog
from service.api.interceptor import CallInterceptor
from service.config import Config
from service.errors import CacheNotFound, Draining, QueueFull
from service.logging import configure_logging
from tests.service.served import channel_to, state_of, until
from tests.service.test_interceptor import Servicer, answers, raises, serving
from tests.service.test_logging import lines_of

OPERATIONS = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
# Of a line of the log about a call: those of the table, and those of all lines.
_TABLE = OPERATIONS.read_text().partition("## Logs of calls")[2].partition("\n## ")[0]
_FIRST_COLUMN = " ".join(re.findall(r"^\| (`.*?) \|", _TABLE, flags=re.MULTILINE))
FIELDS_OF_CALLS = {*re.findall(r"\w+", _FIRST_COLUMN), "timestamp", "level", "logger"}
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
METADATA = [("x-request-id", "r-1"), ("traceparent", f"00-{TRACE}-00f067aa0ba902b7-00")]


@pytest.fixture
def stream(logging_as_before: None) -> io.StringIO:
    stream = io.StringIO()
    configure_logging("info", "json", stream)
    return stream


@pytest.mark.parametrize(
    ("log_level", "events"), [("info", ["call refused"]), ("debug", ["call done"] * 60 + ["call refused"])]
)
async def test_the_level_says_which_calls_have_a_line(
    stream: io.StringIO, log_level: str, events: list[str]
) -> None:
    """At debug level each, also of more in a second than lines of failures have."""
    configure_logging(log_level, "json", stream)
    state = state_of(Config(log_level=log_level))
    async with serving(state) as harness:
        for _ in range(60):
            await harness.decode(answers, *METADATA)
        await harness.refused(raises(CacheNotFound()), *METADATA)
    found = [line for line in lines_of(stream) if line["event"].startswith("call ")]
    assert [line["event"] for line in found] == events
    for line in found:
        assert (line["request_id"], line["trace_id"], line["rpc"]) == ("r-1", TRACE, "Decode")
        assert line["duration_ms"] >= 0
        assert line["logger"] == "service.api.call_log" and line.keys() <= FIELDS_OF_CALLS
        failed = line["event"] == "call refused"
        assert (line["code"], line.get("reason")) == (
            ("NOT_FOUND", "CACHE_NOT_FOUND") if failed else ("OK", None)
        )
    assert state.call_log.refusals == {"CACHE_NOT_FOUND": 1}, "they are counted whatever is logged"


async def test_a_caller_that_leaves_while_it_is_written_to_is_no_failure(stream: io.StringIO) -> None:
    """What it does not read takes more than the buffers, so that a message is being written."""
    message, ended = executor_pb2.SessionResponse(), 0
    message.results.add().error.message = "x" * 1_000_000

    class Writer(Servicer):
        async def Session(self, _messages: object, context: Any) -> None:  # type: ignore[override]
            nonlocal ended
            try:
                while True:
                    await context.write(message)
            finally:
                ended += 1

    state = state_of(Config())
    async with channel_to(Writer(), CallInterceptor(state)) as channel:  # type: ignore[abstract]
        for count in range(1, 21):
            call: Any = executor_pb2_grpc.ModelExecutorServiceStub(channel).Session()
            await call.read()
            # Until the next message fills the buffers. Not each of the calls needs to have come so far.
            await asyncio.sleep(0.03)
            call.cancel()
            await until(lambda count=count: ended == count)  # type: ignore[misc]
        await until(lambda: len(lines_of(stream)) == 20)
    assert {line["event"] for line in lines_of(stream)} == {"call cancelled"}
    assert not state.call_log.refusals


def test_a_flood_is_logged_in_part_and_counted_in_full(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr("service.api.call_log.time.monotonic", lambda: now_s)
    log = CallLog(Config())
    for _ in range(1000):
        log.refused("Decode", QueueFull(9, 1.0), 0.1)
        log.cancelled("Decode", 0.1)
    first = lines_of(stream)
    assert len(first) == 50 and all("suppressed_lines" not in line for line in first)
    now_s += 1
    log.refused("Prefill", Draining(), 0.1)
    log.cancelled("Prefill", 0.1)
    refused, cancelled = lines_of(stream)[50:]
    assert (refused["event"], cancelled["event"]) == ("call refused", "call cancelled")
    assert refused["suppressed_lines"] == 1950 and "suppressed_lines" not in cancelled
    assert log.refusals == {"QUEUE_FULL": 1000, "DRAINING": 1}
