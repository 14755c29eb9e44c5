"""What must be true when nothing is under way, and when everything was released."""

from __future__ import annotations

from collections.abc import Iterable

from tests.sim.model_worker import ModelWorker
from tests.sim.oracle import Oracle
from tests.sim.watched import WatchedDispatcher


def check_rest(dispatcher: WatchedDispatcher, oracle: Oracle, workers: Iterable[ModelWorker]) -> None:
    """The table has what is true; workers hold of it what the table thinks, and nothing else."""
    table = dispatcher.table
    dispatcher.check_truth()
    assert not len(dispatcher.journal) and not oracle.abandoned
    for worker in workers:
        held = dict(worker.sequences)
        view = table._placement.find(worker.worker_id, worker.epoch)
        assert view is not None
        for entry in table._residence.held(view):
            tokens = oracle.caches[entry.state.cache_id].tokens
            copy = held.pop(entry.number, None)
            if copy is None:
                # To hold nothing of an empty cache is to hold it.
                assert not entry.kv_len or worker.has_forgotten(entry.number), "a copy is missing"
                continue
            assert copy[: entry.kv_len] == tokens[: entry.kv_len], (
                f"{entry.number}: another sequence's tokens"
            )
            assert len(copy) >= entry.kv_len or worker.has_forgotten(entry.number), "a tail is missing"
            assert len(copy) <= len(tokens) or entry.number in worker.untrimmed, (
                f"{entry.number}: pages wasted"
            )
        assert not held, f"{worker.worker_id}: {held}: sequences that nobody can name"


def check_end(dispatcher: WatchedDispatcher, workers: Iterable[ModelWorker]) -> None:
    """Nothing is left anywhere."""
    table = dispatcher.table
    assert len(table) == len(table.ledger) == table.journal_bytes == table.operations_in_flight == 0
    assert not table._catalog._by_request_id and not table._catalog._forks
    assert table._held == table._queued_bytes == 0
    for worker in workers:
        assert not worker.sequences, "a released sequence is still held"
    for view in table._placement:
        assert view.sequences == view.pages_queued == 0
