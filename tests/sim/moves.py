"""Moves of caches in the schedules: what workers do of them, what is asked, and what may be answered."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from service.caches.effects import Claim
from service.caches.machine import CacheMachine
from service.caches.requests import Move, Moved
from service.errors import QuireError
from workers.common import worker_pb2

if TYPE_CHECKING:
    from tests.sim.model_worker import ModelWorker
    from tests.sim.oracle import Oracle
    from tests.sim.truth import Asked

FAULT = worker_pb2.WORKER_ERROR_REASON_FAULT
KV_EXHAUSTED = worker_pb2.WORKER_ERROR_REASON_KV_EXHAUSTED
# What a page of most workers takes; those of others say nothing of it, so that nothing is copied.
PAGE_BYTES = 64
# Why a move may end without the cache where it was to go, whatever the cache is.
MAY_FAIL = {"NO_WORKER", "OVERLOADED", "KV_EXHAUSTED", "WORKER_FAULT", "WORKER_LOST", "SEQUENCE_QUARANTINED"}


def any_move(rng: random.Random, oracle: Oracle, worker_ids: Sequence[str]) -> Move | None:
    """A cache to move, to a worker that is there or to be there; seldom one of them is not."""
    if not oracle.caches:
        return None
    cache = rng.choice(list(oracle.caches.values()))
    others = [worker_id for worker_id in worker_ids if worker_id != cache.worker_id]
    if not others or rng.random() < 0.1:
        others = [*worker_ids, "worker-9"]
    return Move("never-existed" if rng.random() < 0.02 else cache.cache_id, rng.choice(others))


# In a worker. The KV of a token is the token itself, with the adapter before them all.


def export_kv(
    worker: ModelWorker, op_id: int, command: worker_pb2.ExportKvCommand, goes_wrong: float
) -> None:
    """Answers with the KV of tokens, seldom that of other ones: their digest tells."""
    held = worker.sequences.get(command.sequence, [])
    if len(held) < command.end:
        worker.miss(op_id, command.sequence)
        return
    tokens = held[: command.end]
    if worker.rng.random() < goes_wrong:
        tokens = [(token + 1) % 8 for token in tokens]
    adapter = worker.adapters.get(command.sequence, 0)
    data = array("I", [adapter, *tokens[command.first :]]).tobytes()
    pages = worker_pb2.KvPages(
        first=command.first, end=command.end, digest=digest_of(tokens), fingerprint=str(worker.weights),
        salt=command.salt, data=data,
    )  # fmt: skip
    worker.outbox.append(worker_pb2.WorkerEvent(op_id=op_id, kv_pages=pages))


def import_kv(worker: ModelWorker, op_id: int, command: worker_pb2.ImportKvCommand) -> str:
    """Takes what fits, and says whether it has; see `MUST_HAPPEN`."""
    number, pages, pool = command.sequence, command.pages, worker.pool
    held = worker.sequences.get(number, [])
    if len(held) != pages.first:
        # The chunk before it failed.
        worker.excused.add(op_id)
        worker.miss(op_id, number)
        return "an import after one that failed"
    adapter, *tokens = array("I", pages.data)
    wanted = [*held, *command.token_ids]
    if not worker.is_claimed(wanted, Claim(number, len(wanted), pages.digest)):
        worker.refuse(op_id, FAULT)
        return "an import refused: other tokens"
    needed = pool.pages_for(pages.end) - pool.pages_for(len(held))
    if needed > worker.pages_left:
        worker.refuse(op_id, KV_EXHAUSTED, pages_needed=needed, pages_available=worker.pages_left)
        return "an import without room"
    assert pages.fingerprint == str(worker.weights), "of other weights"
    worker.sequences[number] = [*held, *tokens]
    worker.adapters[number] = adapter
    worker.outbox.append(worker_pb2.WorkerEvent(op_id=op_id, done=worker_pb2.ControlDone()))
    return "an import"


def digest_of(tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("I", tokens).tobytes(), digest_size=16).digest()


# For the oracle.


def check_moved(oracle: Oracle, asked: Asked, moved: Moved) -> None:
    """Asserts that the answer to a move can be true, and notes how it was made."""
    cache = oracle.cache_of(asked)
    assert cache is not None and asked.records is None, "it changes nothing"
    assert moved.copied_tokens <= len(cache.tokens) and moved.took_s >= 0
    assert moved.copied_bytes >= moved.copied_tokens, "all that was copied is counted"
    how = "a copy" if moved.copied_tokens else "nothing"
    if moved.replayed_tokens:
        how = "a replay of the rest" if moved.copied_tokens else "a replay"
    oracle.seen[f"moved by {how}"] += 1


def check_not_moved(oracle: Oracle, asked: Asked, error: QuireError) -> None:
    """Asserts that a worker had a reason, where the move itself has none."""
    assert error.reason in MAY_FAIL, error
    if error.reason == "WORKER_FAULT":
        assert asked.failures
    if error.reason == "KV_EXHAUSTED":
        assert KV_EXHAUSTED in asked.failures
    if error.reason == "SEQUENCE_QUARANTINED":
        cache = oracle.cache_of(asked)
        assert cache is not None and oracle.deaths.get(cache.number)


def check_copies(machine: CacheMachine) -> None:
    """Asserts that the running copies are those of operations, whose caches stay where they are."""
    moves, operations = machine._moves, machine.operations.values()
    under_way = {o.copy for o in operations if o.copy is not None and o.copy in moves.under_way}
    assert moves.under_way.keys() == under_way
    assert {copy for copy, _, _ in moves.sent.values()} == under_way, "each waits for something, and no other"
    for copy in under_way:
        operation = copy.operation
        assert not operation.op_id and operation.need is None and operation.records is None
        assert not operation.turns_left
        assert copy.target.is_ready and copy.source is operation.entry.worker, (
            "the source has it until the end"
        )
        assert copy.imported <= copy.next <= copy.end == operation.entry.kv_len
