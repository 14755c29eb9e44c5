"""A session for threads, against a real gateway: the client's results, many at once, and every way to end."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from quire import (
    Cache,
    CacheNotFound,
    Client,
    DeadlineExceeded,
    InvalidRequest,
    PositionMismatch,
    QuireError,
    ResourceExhausted,
    Session,
    SessionEnded,
    Unavailable,
)

from tests.client.session_gateway import (
    TOP,
    held_back,
    in_flight,
    prompt_of,
    token_of,
    top_of,
    unary_answers,
)
from tests.gateway_process import ROOT, GatewayProcess
from tests.programs import run

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[Client]:
    with Client(gateway.address) as connected:
        yield connected


@pytest.fixture
def session(client: Client) -> Iterator[Session]:
    with client.session() as opened:
        yield opened


def everything(caller: Client | Session) -> list[object]:
    """What each operation says, in an order in which each depends on those before it."""
    said: list[object] = []
    with caller.prefill(prompt_of(0), output=TOP, lease_s=60) as cache:
        said += [cache.output.token_id, top_of(cache.output), cache.seq_len]
        said += [top_of(cache.decode(5, output=TOP)), cache.seq_len]
        said += [cache.extend([6, 7, 8]).token_id, cache.seq_len]
        verified = cache.verify([cache.output.token_id, 1, 2])
        said += [verified.accepted, [output.token_id for output in verified.outputs], cache.seq_len]
        cache.truncate(21)
        said += [cache.decode(9).token_id, cache.seq_len]
        (left,), (right, other) = caller.fork_caches([(cache, 1), (caller.prefill([1]), 2)], release=[])
        said += [left.seq_len, right.seq_len, other.decode(2).token_id]
        left, right = cache.fork(2)
        right.release()
        for result in caller.batch_decode([(cache, 3), (left, 3), (right, 3)]):
            said.append(type(result) if isinstance(result, QuireError) else result.token_id)
        cache.renew(30)
        said += [left.seq_len, right.seq_len, left.decode(4).token_id, left.release(), left.release()]
    said += [output.token_id for output in caller.forward([1, 2, 3]).outputs]
    return said


def test_a_session_says_what_the_client_says(client: Client, session: Session) -> None:
    assert everything(session) == everything(client)


def test_many_threads_share_a_session(gateway: GatewayProcess, session: Session) -> None:
    def loop(caller: int) -> list[list[int]]:
        with session.prefill(prompt_of(caller)) as cache:
            return [top_of(cache.decode(token_of(caller, step), output=TOP)) for step in range(6)]

    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(loop, range(20)))

    assert found == [unary_answers(caller, 6) for caller in range(20)]


def test_an_error_is_the_calls_own(session: Session) -> None:
    cache = session.prefill(prompt_of(0))
    with pytest.raises(InvalidRequest) as invalid:
        session.prefill([])
    assert invalid.value.reason == "EMPTY_TOKENS" and invalid.value.violations
    (copy,) = cache.fork()
    copy.release()
    with pytest.raises(CacheNotFound):
        copy.decode(1)
    cache.seq_len = 7
    with pytest.raises(PositionMismatch) as mismatch:
        cache.decode(1)
    assert mismatch.value.seq_len == 20
    cache.seq_len = 20
    cache.decode(1)
    assert cache.seq_len == 21


def test_a_request_that_is_too_large_hurts_only_its_caller(gateway: GatewayProcess) -> None:
    with Client(gateway.address, max_request_bytes=4096) as client, client.session() as session:
        with pytest.raises(ResourceExhausted):
            session.prefill([999] * 4096)
        assert session.prefill(prompt_of(0)).seq_len == 20


def test_calls_beyond_the_bound_wait(gateway: GatewayProcess, client: Client) -> None:
    with client.session(max_in_flight=3) as session, ThreadPoolExecutor(8) as threads:
        with held_back(gateway):
            calls = [threads.submit(session.forward, [caller, 1]) for caller in range(8)]
            gateway.wait_until(in_flight(gateway, 3))
            time.sleep(0.1)
            assert in_flight(gateway, 3)()
        assert [len(call.result().outputs) for call in calls] == [2] * 8
    with pytest.raises(ValueError, match="max_in_flight"):
        client.session(max_in_flight=0)


def test_a_time_limit_is_a_number(client: Client) -> None:
    """Before, each such call took one of the places of those in flight, for good."""
    with client.session(max_in_flight=1) as session:
        for caller in (client, session):
            with pytest.raises(ValueError, match="timeout_s is a number"):
                caller.prefill([1], timeout_s=math.nan)
        session.prefill([1], timeout_s=60).release()
    with pytest.raises(ValueError, match="timeout_s is a number"):
        Client("127.0.0.1:1", timeout_s=math.nan)


def test_the_time_to_close_a_session_is_a_number(gateway: GatewayProcess, client: Client) -> None:
    """Before, closing one failed, and its stream stayed open."""
    before = gateway.status().sessions
    with pytest.raises(ValueError, match="timeout_s is a number"):
        client.session(close_timeout_s=math.nan)
    # As long as it takes. Before, threads could not wait so long.
    with client.session(close_timeout_s=math.inf) as session:
        session.prefill([1]).release()
        assert gateway.status().sessions == before + 1


def test_a_step_that_took_too_long_can_be_repeated(gateway: GatewayProcess) -> None:
    with Client(gateway.address) as client, client.session(max_in_flight=1) as session:
        cache = session.prefill(prompt_of(0))
        with held_back(gateway):
            for _ in range(2):  # The second does not even get its turn.
                with pytest.raises(DeadlineExceeded):
                    cache.decode(token_of(0, 0), output=TOP, timeout_s=0.3)
        gateway.wait_until(in_flight(gateway, 0))
        again = cache.decode(token_of(0, 0), output=TOP)
        assert [top_of(again)] == unary_answers(0, 1)
        assert cache.seq_len == 21


def test_a_prefill_that_nobody_waited_for_leaves_no_cache(gateway: GatewayProcess) -> None:
    with Client(gateway.address) as client, client.session() as session:
        with held_back(gateway):
            with pytest.raises(DeadlineExceeded):
                session.prefill(prompt_of(0), timeout_s=0.2)
            with pytest.raises(DeadlineExceeded):
                session.prefill(prompt_of(1), request_id="mine", timeout_s=0.2)
        # The second can be asked for again, so it stays.
        gateway.wait_until(in_flight(gateway, 0))
        gateway.wait_until(lambda: gateway.status().caches == 1)
        assert session.prefill(prompt_of(1), request_id="mine").seq_len == 20
        assert gateway.status().caches == 1


@pytest.mark.parametrize("timeout_s", [math.inf, 1e15])
def test_an_endless_timeout_does_not_pass(gateway: GatewayProcess, timeout_s: float) -> None:
    with Client(gateway.address, timeout_s=timeout_s) as client, client.session() as session:
        assert len(list(client.execute(prompt_of(0), max_tokens=1))) == 1
        for caller in (client, session):
            with caller.prefill(prompt_of(0)) as cache:
                cache.decode(token_of(0, 0))


class TookTooLong(Exception):
    """What a program's own alarm raises."""


@contextlib.contextmanager
def ended_by_an_alarm(gateway: GatewayProcess, first: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Its body makes a call, which this program's own alarm ends, after it has called `first`."""

    def alarm(*_: object) -> None:
        first()
        raise TookTooLong

    before = signal.signal(signal.SIGALRM, alarm)
    try:
        with held_back(gateway):
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(TookTooLong):
                yield
    finally:
        signal.signal(signal.SIGALRM, before)
    gateway.wait_until(in_flight(gateway, 0))


def test_a_prefill_that_a_signal_has_ended_leaves_no_cache(gateway: GatewayProcess, session: Session) -> None:
    with ended_by_an_alarm(gateway):
        session.prefill(prompt_of(0))
    gateway.wait_until(lambda: gateway.status().caches == 0)


def test_the_error_of_a_handler_that_closes_the_client_is_raised(gateway: GatewayProcess) -> None:
    """A ValueError of gRPC took its place: the client wanted to release what the call had made."""
    client = Client(gateway.address)
    with ended_by_an_alarm(gateway, client.close):
        client.prefill(prompt_of(0))


def decoding(cache: Cache, token_id: int, errors: list[QuireError]) -> threading.Thread:
    """A thread that decodes once, and keeps what it raises."""

    def decode() -> None:
        try:
            cache.decode(token_id)
        except QuireError as error:
            errors.append(error)

    thread = threading.Thread(target=decode)
    thread.start()
    return thread


def test_closing_waits_for_answers(gateway: GatewayProcess, client: Client) -> None:
    errors: list[QuireError] = []
    session = client.session()
    caches = [session.prefill(prompt_of(caller)) for caller in range(4)]
    with held_back(gateway):
        threads = [decoding(cache, 1, errors) for cache in caches]
        gateway.wait_until(in_flight(gateway, 4))
        closing = threading.Thread(target=session.close)
        closing.start()
        time.sleep(0.05)
    for thread in [*threads, closing]:
        thread.join(30)
        assert not thread.is_alive()
    assert errors == [] and [cache.seq_len for cache in caches] == [21] * 4
    with pytest.raises(SessionEnded, match="closed"):
        caches[0].decode(2)
    session.close()


def test_closing_does_not_wait_for_good(gateway: GatewayProcess, client: Client) -> None:
    """And what was in flight is repeated on another session, once."""
    errors: list[QuireError] = []
    session = client.session(close_timeout_s=0.2)
    cache = session.prefill(prompt_of(0))
    with held_back(gateway):
        thread = decoding(cache, token_of(0, 0), errors)
        gateway.wait_until(in_flight(gateway, 1))
        session.close()
        thread.join(30)
    assert [type(error) for error in errors] == [SessionEnded]
    with client.session() as another:
        another.adopt(cache)
        again = cache.decode(token_of(0, 0), output=TOP)
        assert [top_of(again)] == unary_answers(0, 1)
        assert cache.seq_len == 21
    client.adopt(cache)
    assert cache.release()


def test_closing_the_client_ends_its_sessions(gateway: GatewayProcess) -> None:
    errors: list[QuireError] = []
    client = Client(gateway.address)
    session = client.session()
    cache = session.prefill(prompt_of(0))
    with held_back(gateway):
        thread = decoding(cache, 1, errors)
        gateway.wait_until(in_flight(gateway, 1))
        client.close()
        thread.join(30)
    assert [type(error) for error in errors] == [SessionEnded]
    session.close()


def test_a_killed_gateway_ends_every_call() -> None:
    errors: list[QuireError] = []
    with GatewayProcess(model="paged-attention") as doomed, Client(doomed.address) as client:
        session = client.session()
        caches = [session.prefill(prompt_of(caller)) for caller in range(8)]
        with held_back(doomed):
            threads = [decoding(cache, 1, errors) for cache in caches]
            doomed.wait_until(in_flight(doomed, 8))
            doomed.process.kill()
            for thread in threads:
                thread.join(30)
                assert not thread.is_alive()
        assert [type(error) for error in errors] == [SessionEnded] * 8
        assert isinstance(errors[0].__cause__, Unavailable)
        assert len({id(error) for error in errors}) == 8, "each has a traceback of its own"
        with pytest.raises(SessionEnded):
            session.forward([1])
        session.close()
        with client.session() as another, pytest.raises(SessionEnded):
            another.forward([1])


def readers() -> int:
    return sum(thread.name == "quire-session" for thread in threading.enumerate())


def test_a_session_that_is_forgotten_ends(gateway: GatewayProcess, client: Client) -> None:
    before = readers()
    session = client.session()
    cache = session.prefill(prompt_of(0))
    assert readers() == before + 1
    del session
    cache.decode(1)
    assert cache.seq_len == 21, "its caches keep it"
    del cache
    gateway.wait_until(lambda: readers() == before)


_FORGETS = """
import quire, sys
client = quire.Client(sys.argv[1])
session = client.session()
cache = session.prefill([1, 2, 3])
cache.decode(4)
print(cache.seq_len)
"""
_FORGETS_ALSO = """
import asyncio, quire, sys
async def main():
    global client, session, cache
    client = quire.AsyncClient(sys.argv[1])
    session = client.session()
    cache = await session.prefill([1, 2, 3])
    await cache.decode(4)
    print(cache.seq_len)
asyncio.run(main())
"""


@pytest.mark.parametrize("program", [_FORGETS, _FORGETS_ALSO])
def test_a_program_that_closes_nothing_ends(gateway: GatewayProcess, program: str) -> None:
    path = f"import sys; sys.path.insert(0, {str(ROOT / 'clients' / 'python')!r})\n"
    done = run(sys.executable, "-c", path + program, gateway.address)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "4", "")
