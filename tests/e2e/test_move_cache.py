"""Caches that move between real workers: whatever happens, their tokens are those of a run without moves."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from quire.v1 import admin_pb2
from quire.v1 import executor_pb2 as pb

from service.model_names import SHIPPED_MODEL, WEIGHTLESS_MODEL
from tests import undisturbed
from tests.e2e.unharmed import release_all
from tests.error_details import refused
from tests.gateway_process import GatewayProcess

# Far more than any operation takes.
TIMEOUT_S = 60
RANDOM = random.Random(3)
# Several pages, of which the last is not full.
PROMPT = [RANDOM.randrange(12) for _ in range(201)]
STEPS = 12
WORKERS = ("worker-0", "worker-1")


class Text:
    """A cache, and the tokens that were chosen for it so far."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self.gateway = gateway
        answer = gateway.stub.Prefill(pb.PrefillRequest(token_ids=PROMPT), timeout=TIMEOUT_S)
        self.handle, self.tokens, self.replayed = answer.kv_cache, [answer.output.token_id], 0

    @property
    def elsewhere(self) -> str:
        """The worker that does not have it."""
        return WORKERS[self.handle.worker_id == WORKERS[0]]

    def decode(self, count: int = 1) -> None:
        for _ in range(count):
            request = pb.DecodeRequest(
                cache_id=self.handle.cache_id, token_id=self.tokens[-1], position=self.handle.seq_len
            )
            answer = self.gateway.stub.Decode(request, timeout=TIMEOUT_S)
            self.handle, self.replayed = answer.kv_cache, self.replayed + answer.replayed_tokens
            self.tokens.append(answer.output.token_id)

    def move(self, worker_id: str) -> admin_pb2.MoveCacheResponse:
        request = admin_pb2.MoveCacheRequest(cache_id=self.handle.cache_id, worker_id=worker_id)
        return self.gateway.admin.MoveCache(request, timeout=TIMEOUT_S)


@pytest.fixture(scope="module", params=[WEIGHTLESS_MODEL, SHIPPED_MODEL])
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def served(model: str) -> Iterator[GatewayProcess]:
    """Workers that are stopped for a while are not taken for dead."""
    flags = ["--kv-pages", "128", "--heartbeat-timeout-s", "60"]
    with GatewayProcess(model=model, workers=2, flags=flags) as gateway:
        yield gateway


@pytest.fixture
def gateway(served: GatewayProcess) -> Iterator[GatewayProcess]:
    yield served
    served.wait_until_ready()
    release_all(served)
    served.assert_pools_are_whole()


@pytest.fixture(scope="module")
def expected(model: str) -> list[int]:
    return undisturbed.greedy(PROMPT, 1 + STEPS, model=model)


def test_a_cache_that_moves_between_all_steps_goes_on_the_same(
    gateway: GatewayProcess, expected: list[int]
) -> None:
    text = Text(gateway)
    for step in range(STEPS):
        target = text.elsewhere
        moved = text.move(target)
        assert (moved.copied_tokens, moved.replayed_tokens) == (len(PROMPT) + step, 0)
        assert moved.copied_bytes and moved.time.ToNanoseconds() > 0
        text.decode()
        assert text.handle.worker_id == target
    assert text.tokens == expected and text.replayed == 0


def test_to_where_it_is_nothing_moves(gateway: GatewayProcess) -> None:
    text = Text(gateway)
    moved = text.move(text.handle.worker_id)
    assert (moved.copied_tokens, moved.replayed_tokens, moved.copied_bytes) == (0, 0, 0)


def test_what_is_unknown_is_refused(gateway: GatewayProcess) -> None:
    text = Text(gateway)
    assert refused(lambda: text.move("worker-7")) == "NO_WORKER"
    text.handle.cache_id = "never-existed"
    assert refused(lambda: text.move(text.elsewhere)) == "CACHE_NOT_FOUND"


@pytest.mark.parametrize("dies", ["source", "target"])
def test_a_worker_that_dies_in_a_move_changes_nothing(
    gateway: GatewayProcess, expected: list[int], dies: str
) -> None:
    text = Text(gateway)
    text.decode(3)
    before = text.handle.worker_id
    target = text.elsewhere
    victim = before if dies == "source" else target
    (process,) = (
        process for process in gateway.worker_processes()
        if process.pid == next(w.pid for w in gateway.status().workers if w.worker_id == victim)
    )  # fmt: skip
    process.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor() as threads:
        moving = threads.submit(text.move, target)
        gateway.wait_until_in_flight(1)
        process.kill()
        if dies == "source":
            moved = moving.result()
            assert (moved.copied_tokens, moved.replayed_tokens > 0) == (0, True)
        else:
            assert refused(moving.result) == "NO_WORKER"
    text.decode(STEPS - 3)
    assert text.tokens == expected
    assert text.handle.worker_id == (target if dies == "source" else before)
    assert text.replayed == 0, "one of the two has it"
