"""What must be true when nothing is under way, and when everything was released."""

from __future__ import annotations

from collections.abc import Iterable

from service.caches.table import CacheTable
from tests.sim.model_worker import ModelWorker
from tests.sim.oracle import Oracle
from tests.sim.watched import WatchedJournal


def check_rest(
    table: CacheTable, journal: WatchedJournal, oracle: Oracle, workers: Iterable[ModelWorker]
) -> None:
    """Workers hold what the table thinks they hold, token for token, and nothing else."""
    journal.check_bytes()
    for cache_id, cache in oracle.caches.items():
        assert list(journal.token_ids(cache_id)) == cache.tokens
    for worker in workers:
        held = dict(worker.sequences)
        for entry in table._entries.values():
            if entry.worker.epoch != worker.epoch:
                continue
            tokens = oracle.caches[entry.cache_id].tokens
            assert entry.length == len(tokens)
            copy = held.pop(entry.number, None)
            if copy is None:
                # To hold nothing of an empty cache is to hold it.
                assert not tokens or worker.has_forgotten(entry.number), "a copy is missing"
            else:
                assert copy[: len(tokens)] == tokens, "another sequence's tokens"
                assert len(copy) == len(tokens) or entry.number in worker.untrimmed, "pages wasted"
        assert not held, "sequences that nobody can name"


def check_end(table: CacheTable, journal: WatchedJournal, workers: Iterable[ModelWorker]) -> None:
    """Nothing is left anywhere."""
    assert len(table) == len(journal) == journal.size_bytes == 0
    assert not table._by_request_id
    for worker in workers:
        assert not worker.sequences, "a released sequence is still held"
    for view in table._placement:
        assert view.sequences == view.pages_queued == 0
