"""When a cache is copied to another worker, and what comes of a copy that does not end."""

from __future__ import annotations

import pytest

from service.caches.moves import copy_pays
from service.caches.requests import Append, AppendKind, Move, Moved
from tests.sim.harness import Gateway


@pytest.mark.parametrize(
    ("size_bytes", "bytes_per_s", "replay_s", "copies"),
    [(100, 100.0, 1.1, True), (100, 100.0, 0.9, False), (0, 1.0, 0.0, False), (10**9, 1e8, 60.0, True)],
)
def test_the_faster_way_is_chosen(size_bytes: int, bytes_per_s: float, replay_s: float, copies: bool) -> None:
    assert copy_pays(size_bytes, bytes_per_s, replay_s) is copies


def placed(gateway: Gateway) -> tuple[str, str, str]:
    """A cache of several pages, its worker, and the other one."""
    (ticket,) = gateway.submit(Append(AppendKind.PREFILL, "", list(range(1, 41))))
    gateway.work()
    reply = gateway.replies[ticket]
    cache_id, here = reply.cache_id, reply.worker_id  # type: ignore[union-attr]
    (other,) = (worker_id for worker_id in gateway.workers if worker_id != here)
    return cache_id, here, other


def test_all_that_is_copied_is_not_computed_again() -> None:
    gateway = Gateway(workers=2)
    cache_id, _, other = placed(gateway)
    (ticket,) = gateway.submit(Move(cache_id, other))
    gateway.work()
    moved = gateway.replies[ticket]
    assert isinstance(moved, Moved) and (moved.copied_tokens, moved.replayed_tokens) == (40, 0)
    assert [len(worker.sequences) for worker in (gateway.workers[other],)] == [1]


def test_a_copy_that_is_stuck_is_replayed() -> None:
    gateway = Gateway(workers=2)
    cache_id, here, other = placed(gateway)
    (ticket,) = gateway.submit(Move(cache_id, other))
    assert gateway.machine.num_parked == 1, "so that time is kept"
    gateway.now_s += 6.0
    gateway.machine.tick(gateway.now_s)
    gateway.dispatcher.cancel(())
    gateway.workers[here].inbox.clear()
    gateway.workers[here].sequences.clear()
    gateway.work()
    moved = gateway.replies[ticket]
    assert isinstance(moved, Moved) and (moved.copied_tokens, moved.replayed_tokens) == (0, 40)
