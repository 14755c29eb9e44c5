"""A fork of several caches, which happens as a whole or not at all. `tests/sim` tries everything else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from service.caches.requests import Appended, Fork, Handles, Source
from service.caches.reservations import Limits
from tests.service.failing_journal import FailingJournal
from tests.sim.harness import Gateway, decode, prefill
from tests.sim.model_worker import Pool


def forks(*sources: tuple[str, int], release: tuple[str, ...] = (), request_id: str = "") -> Fork:
    return Fork([Source(*source) for source in sources], release, request_id)


class Bench(Gateway):
    """A gateway with a journal that can be slow, or fail; and two caches, of [1, 2] and of [3]."""

    def __init__(self, limits: Limits | None = None, pool: Pool | None = None) -> None:
        self.disk = FailingJournal()
        super().__init__(limits, pool=pool, journal=self.disk)
        self.left, self.right = self.create(1, 2), self.create(3)

    def ids(self, fork: Fork) -> list[str]:
        return [handle.cache_id for handle in self.handles(fork).handles]

    def all_tokens(self) -> list[list[int]]:
        return sorted(list(state.tokens.copy()) for state in self.machine.ledger)


@pytest.fixture
def gateway() -> Bench:
    return Bench()


def unknown(gateway: Bench) -> Fork:
    return forks((gateway.left, 1), ("kv_never", 1), release=(gateway.left, gateway.right))


def at_another_length(gateway: Bench) -> Fork:
    sources = [Source(gateway.left, 1, 2), Source(gateway.right, 1, 2)]
    return Fork(sources, (gateway.left, gateway.right))


def too_many(gateway: Bench) -> Fork:
    return forks((gateway.left, 1), (gateway.right, 2), release=(gateway.left, gateway.right))


@pytest.mark.parametrize(
    ("ask", "reason", "metadata"),
    [
        (unknown, "CACHE_NOT_FOUND", {"index": "1"}),
        (at_another_length, "POSITION_MISMATCH", {"index": "1", "position": "2", "seq_len": "1"}),
        (too_many, "CACHE_LIMIT", None),
    ],
)
def test_one_wrong_cache_and_nothing_happens(
    ask: Callable[[Bench], Fork], reason: str, metadata: dict[str, str] | None
) -> None:
    gateway = Bench(Limits(max_caches=4))
    error = gateway.refusal(ask(gateway))
    assert error.reason == reason and metadata in (None, error.metadata)
    assert gateway.all_tokens() == [[1, 2], [3]]
    assert len(gateway.ids(forks((gateway.left, 1), (gateway.right, 1)))) == 2, "there is room for these"


def test_whoever_it_waits_for_gets_the_pages_of_its_other_caches() -> None:
    """Else they would wait for each other."""
    gateway = Bench(pool=Pool(4, page_tokens=1))
    step, fork = gateway.submit(
        prefill(4, 5, cache_id=gateway.right), forks((gateway.left, 1), (gateway.right, 1))
    )
    gateway.work()
    assert step not in gateway.replies, "there is no room for it beside the other cache"
    gateway.wait(1.0)
    gateway.work()
    made = gateway.replies[fork]
    assert isinstance(gateway.replies[step], Appended) and isinstance(made, Handles)
    assert [gateway.tokens(handle.cache_id) for handle in made.handles] == [[1, 2], [3, 4, 5]]


def test_kv_that_was_lost_is_computed_for_the_copies(gateway: Bench) -> None:
    gateway.lose_worker(crashed=False)
    copies = gateway.ids(forks((gateway.left, 1), (gateway.right, 1), release=(gateway.left, gateway.right)))
    gateway.start_worker("worker-0")
    answers = [gateway.append(decode(copy, 4)) for copy in copies]
    assert [answer.replayed_tokens for answer in answers] == [2, 1]


# Repetitions.


@pytest.mark.parametrize("releases", [False, True])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_repetition_gets_the_first_ones_copies(gateway: Bench, releases: bool, restarts: bool) -> None:
    """Also when the parents have grown since, or are gone, or the gateway is another."""
    sources = ((gateway.left, 2), (gateway.right, 1))
    fork = forks(*sources, release=(gateway.left, gateway.right) if releases else (), request_id="f")
    made = gateway.ids(fork)
    if not releases:
        gateway.append(decode(gateway.left, 4))
    if restarts:
        again = Gateway()
        for record in gateway.disk.written:
            again.machine.recovering(record, 0.0)
        again.machine.recovered(now_s=0.0, wall_s=0.0, tenant_of=lambda _: again.machine.index.anonymous)
        assert [handle.cache_id for handle in again.handles(fork).handles] == made
    assert gateway.ids(fork) == made


def test_the_request_id_belongs_to_these_caches_and_counts(gateway: Bench) -> None:
    other = gateway.create(5)
    left, right = gateway.left, gateway.right
    gateway.ids(forks((left, 2), (right, 1), request_id="f"))
    for sources in (
        [(left, 1), (right, 2)],
        [(right, 1), (left, 2)],
        [(right, 2), (left, 1)],
        [(left, 2), (other, 1)],
        [(left, 2)],
        [(left, 3)],
        [(left, 2), (right, 1), (other, 1)],
    ):
        assert gateway.refusal(forks(*sources, request_id="f")).reason == "REQUEST_ID_REUSED", sources
    assert len(gateway.ids(forks((left, 2), (other, 0), (right, 1), request_id="f"))) == 3
    assert len(gateway.machine) == 6


def test_one_is_not_repeated_once_all_copies_of_a_parent_are_gone(gateway: Bench) -> None:
    fork = forks((gateway.left, 1), (gateway.right, 1), request_id="f")
    first, second = gateway.ids(fork)
    gateway.release(first)
    assert gateway.refusal(fork).reason == "CACHE_NOT_FOUND"
    assert gateway.refusal(forks((gateway.right, 1), request_id="f")).reason == "REQUEST_ID_REUSED"
    gateway.release(second)
    assert len(gateway.ids(fork)) == 2, "nothing is known of it any more"
