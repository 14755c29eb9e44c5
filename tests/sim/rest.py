"""What must be true when nothing is under way, and when everything was released."""

from __future__ import annotations

from collections.abc import Iterable

from tests.sim.model_worker import ModelWorker
from tests.sim.oracle import Oracle
from tests.sim.watched import WatchedDispatcher


def check_rest(dispatcher: WatchedDispatcher, oracle: Oracle, workers: Iterable[ModelWorker]) -> None:
    """The machine has what is true; workers hold of it what the machine thinks, and nothing else."""
    machine = dispatcher.machine
    dispatcher.check_truth()
    assert not len(dispatcher.journal) and not oracle.abandoned
    for worker in workers:
        held = dict(worker.sequences)
        view = machine.worker(worker.worker_id, worker.epoch)
        assert view is not None
        for state, kv_len in machine.held_by(view):
            number, tokens = state.number, oracle.caches[state.cache_id].tokens
            copy = held.pop(number, None)
            if copy is None:
                # To hold nothing of an empty cache is to hold it.
                assert not kv_len or worker.has_forgotten(number), "a copy is missing"
                continue
            assert copy[:kv_len] == tokens[:kv_len], f"{number}: another sequence's tokens"
            assert len(copy) >= kv_len or worker.has_forgotten(number), "a tail is missing"
            assert len(copy) <= len(tokens) or number in worker.untrimmed, f"{number}: pages wasted"
        assert not held, f"{worker.worker_id}: {held}: sequences that nobody can name"


def check_end(dispatcher: WatchedDispatcher, workers: Iterable[ModelWorker]) -> None:
    """Nothing is left anywhere."""
    dispatcher.machine.check_empty()
    for worker in workers:
        assert not worker.sequences, "a released sequence is still held"
