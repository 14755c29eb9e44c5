"""Callers who make the server hold or look at much: nobody else is harmed, and nothing grows.

What stands against other attacks is tested by itself: in test_parsing.py, test_masks.py, test_logging.py
and test_handshakes.py of tests/service and, over a socket, in tests/e2e/test_bounds.py. How long others wait
beside one who asks for much: tests/workers/test_turns_by_cost.py.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import grpc
import pytest
from quire import Client
from quire.v1 import executor_pb2 as pb
from quire.v1 import types_pb2 as types

from tests.attacks.half_sent import HalfSent
from tests.error_details import reason_of
from tests.gateway_process import GatewayProcess

UNREAD_MIB, JOURNAL_MIB, MESSAGE_MIB = 64, 16, 16
# The allocator's, the interpreter's, and of what is received before anybody can look at it.
SLACK_MIB = 128
FLAGS = {
    "--max-unread-bytes": UNREAD_MIB << 20,
    "--max-journal-bytes": JOURNAL_MIB << 20,
    "--kv-pages": 4096,
    "--message-timeout-s": 2,
}
TIMEOUT_S = 90.0
# How long what is held open is held, and the longest time in which memory may be given back.
HELD_S, GIVEN_BACK_S = 1.0, 20.0
SERVICE = "/quire.v1.ModelExecutorService/"
FULL = "RESOURCE_EXHAUSTED ANSWERS_FULL"


@pytest.fixture(scope="module")
def gateway() -> Iterator[GatewayProcess]:
    flags = [word for name, value in FLAGS.items() for word in (name, str(value))]
    with GatewayProcess(model="paged-attention", workers=2, flags=flags) as gateway:
        yield gateway


class Bystanders:
    """Two callers that decode with short pauses, one with unary calls and one on a Session."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._stop = threading.Event()
        self.steps = [0, 0]
        self.failed: list[Exception] = []
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(2)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        try:
            with contextlib.ExitStack() as stack:
                caller: Any = stack.enter_context(Client(self._address, timeout_s=TIMEOUT_S, retries=False))
                if number:
                    caller = stack.enter_context(caller.session())
                cache = stack.enter_context(caller.prefill(range(65)))
                while not self._stop.wait(0.02):
                    cache.decode(1)
                    self.steps[number] += 1
        except Exception as error:
            self.failed.append(error)


def memory_mib(pid: int, name: str) -> float:
    """VmRSS: what is resident now. VmHWM: the most that ever was."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


@pytest.fixture
def bounded(gateway: GatewayProcess) -> Iterator[None]:
    """Others are served during the test, no worker is replaced, and memory is given back."""
    pid, workers = gateway.process.pid, [worker.pid for worker in gateway.status().workers]
    before_mib = memory_mib(pid, "VmRSS")
    with Bystanders(gateway.address) as others:
        gateway.wait_until(lambda: min(others.steps) > 2 or bool(others.failed))
        begun = list(others.steps)
        yield
        time.sleep(0.3)
    assert not others.failed and all(now > then for now, then in zip(others.steps, begun, strict=True))
    assert [worker.pid for worker in gateway.status().workers] == workers, "a healthy worker was killed"
    most_mib = JOURNAL_MIB + SLACK_MIB
    give_up_s = time.monotonic() + GIVEN_BACK_S
    while memory_mib(pid, "VmRSS") > before_mib + most_mib and time.monotonic() < give_up_s:
        time.sleep(0.1)
    assert memory_mib(pid, "VmRSS") <= before_mib + most_mib


@pytest.fixture
def small_peak(gateway: GatewayProcess) -> Iterator[None]:
    """The gateway never has more than its settings allow, beside what may be under way."""
    pid = gateway.process.pid
    before_mib = memory_mib(pid, "VmRSS")
    # Resets the peak, where there is such a file.
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    yield
    assert memory_mib(pid, "VmHWM") < before_mib + UNREAD_MIB + JOURNAL_MIB + 14 * MESSAGE_MIB + SLACK_MIB


def said(error: Any) -> str:
    """A failed call's code and reason."""
    return f"{error.code().name} {reason_of(error)}".strip()


@pytest.mark.usefixtures("bounded", "small_peak")
def test_a_message_of_very_many_calls_is_refused(gateway: GatewayProcess) -> None:
    assert gateway.channel is not None
    method: Any = gateway.channel.stream_stream(SERVICE + "Session")
    for _ in range(2):
        with pytest.raises(grpc.RpcError) as refused:
            list(method(iter([b"\x0a\x00" * 900_000]), timeout=TIMEOUT_S))
        assert said(refused.value) == "INVALID_ARGUMENT TOO_MANY_CALLS"


@pytest.fixture
def long_cache(gateway: GatewayProcess) -> Iterator[str]:
    cache_id = gateway.prefill([at % 1000 for at in range(15_000)]).kv_cache.cache_id
    yield cache_id
    gateway.release(cache_id)


@pytest.mark.usefixtures("bounded", "small_peak")
def test_very_many_copies_of_a_long_cache_take_little(gateway: GatewayProcess, long_cache: str) -> None:
    made = [handle.cache_id for _ in range(2) for handle in gateway.fork(long_cache, 1024)]
    for begin in range(0, len(made), 1024):
        gateway.fork(long_cache, 0, release=made[begin : begin + 1024])


@pytest.mark.usefixtures("bounded", "small_peak")
def test_copies_that_part_share_what_is_before(gateway: GatewayProcess, long_cache: str) -> None:
    for _ in range(2):
        made = [handle.cache_id for handle in gateway.fork(long_cache, 64)]
        steps = [pb.DecodeRequest(cache_id=cache_id, token_id=1) for cache_id in made]
        gateway.stub.BatchDecode(pb.BatchDecodeRequest(items=steps), timeout=TIMEOUT_S)
        gateway.fork(long_cache, 0, release=made)


@pytest.mark.usefixtures("bounded", "small_peak")
def test_what_there_is_room_for_is_computed_though_nobody_reads_it(gateway: GatewayProcess) -> None:
    """12 answers of 48 MB. A call that is made as a stream receives nothing until it is read."""
    logits = types.OutputOptions(logits=types.DATA_TYPE_F32)
    request = pb.ForwardRequest(token_ids=[3] * 12_000, output=logits).SerializeToString()
    with contextlib.ExitStack() as stack:
        channels = [stack.enter_context(contextlib.closing(gateway.connect())) for _ in range(12)]
        methods: list[Any] = [channel.unary_stream(SERVICE + "Forward") for channel in channels]
        calls = [method(request, timeout=TIMEOUT_S) for method in methods]
        gateway.wait_until(lambda: not all(call.is_active() for call in calls))
        time.sleep(HELD_S)
        answers = {"not read" if call.is_active() else said(call) for call in calls}
        for call in calls:
            call.cancel()
    assert answers == {"not read", FULL}


# What arrives within a second is not counted, and how much that is depends on the machine.
@pytest.mark.usefixtures("bounded")
def test_messages_that_never_end_are_given_up(gateway: GatewayProcess) -> None:
    connections = [HalfSent(gateway.address) for _ in range(24)]
    standing, give_up_s = list(connections), time.monotonic() + 40.0
    while standing and time.monotonic() < give_up_s:
        standing = [one for one in standing if one.send()]
    for connection in connections:
        connection.close()
    assert not standing, "the server goes on to hold their messages"
