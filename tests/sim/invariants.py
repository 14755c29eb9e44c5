"""What is true of the state machine between any two inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from service.caches.attempts import Attempts
from service.caches.cache_index import CacheIndex
from service.caches.entries import CacheEntry, Operation
from service.caches.machine import CacheMachine
from service.caches.requests import Fork, Priority
from service.caches.worker_load import Work, WorkerLoad
from tests.sim.moves import check_copies


def phase_of(operation: Operation) -> str:
    """How far an operation has come: see `service/caches/machine.py`."""
    if operation.turns_left:
        return "waiting"
    if operation.records is not None:
        return "committing"
    if operation.copy is not None and operation.copy.under_way:
        return "copying"
    if operation.attempt is None:
        return "parked"
    return "replaying" if operation.attempt.replays else "computing"


def check_invariants(machine: CacheMachine) -> None:
    """Asserts that the parts of the machine agree."""
    operations = machine._queues.operations
    creating = {o.entry.number: o.entry for o in operations.values() if not o.entry.visible}
    entries = {entry.number: entry for entry in machine.index} | creating
    assert len(machine.ledger) == len(machine.index)
    for entry in machine.index:
        assert machine.ledger.get(entry.number) is entry.state, "there is one copy of a state"
        assert all(operations.get(o.ticket) is o for o in entry.operations())
    _check_index(machine.index)
    _check_operations(machine, operations)
    _check_counts(machine, operations, entries)
    _check_placement(machine, entries)
    _check_attempts(machine._attempts, operations)
    check_copies(machine)
    for worker in machine._workers:
        its = [o.attempt for o in machine._attempts.under_way(worker) if o.attempt is not None]
        assert worker.pages_queued == sum(attempt.pages for attempt in its)
        _check_load(worker.load, [attempt.work for attempt in its])


def _check_index(index: CacheIndex) -> None:
    for cache_id, entry in index.by_id.items():
        assert entry.visible and entry.state.cache_id == cache_id and not entry.ephemeral
        assert index._by_number[entry.number] is entry
    assert len(index._by_number) == len(index.by_id) == sum(map(len, index._by_order.values()))
    for (tenant, request_id), made in index._forks.items():
        for child, entry in made.items():
            fork = entry.state.fork
            assert index._by_number.get(entry.number) is entry and entry.tenant is tenant
            assert fork is not None and (fork.request_id, fork.index) == (request_id, child)


def _check_operations(machine: CacheMachine, operations: Mapping[int, Operation]) -> None:
    restores = {o for o in operations.values() if o.kind is machine._restores}
    assert machine._restores.under_way == restores
    for ticket, operation in operations.items():
        assert operation.ticket == ticket
        for its in operation.entries:
            assert sum(o is operation for o in its.operations()) == 1, "it runs or waits, exactly once"
            assert its.tenant is operation.entry.tenant
            assert its.running is not None or its.closing, "an operation waits only behind another"
        turns = sum(its.running is operation for its in operation.entries)
        assert operation.turns_left == len(operation.entries) - turns
        assert operation.entry is operation.entries[0]
        assert len(operation.entries) == 1 or isinstance(operation.request, Fork)
        assert not operation.turns_left or operation.attempt is None


def _check_counts(
    machine: CacheMachine, operations: Mapping[int, Operation], entries: Mapping[int, CacheEntry]
) -> None:
    under_way = operations.values()
    assert machine.admission._queued_bytes == sum(o.size_bytes for o in under_way)
    assert machine.admission._caches == len(entries) + sum(o.caches for o in under_way)
    for tenant in {entry.tenant for entry in entries.values()} | {machine.index.anonymous}:
        its = [o for o in under_way if o.entry.tenant is tenant]
        caches = [entry for entry in entries.values() if entry.tenant is tenant]
        assert tenant.in_flight == sum(not o.is_internal for o in its)
        assert tenant.caches == len(caches) + sum(o.caches for o in its)
        assert tenant.tokens == sum(e.length for e in caches) + sum(o.tokens for o in its)


def _check_placement(machine: CacheMachine, entries: Mapping[int, CacheEntry]) -> None:
    placed = {entry.number: entry.worker for entry in entries.values() if entry.worker is not None}
    assert placed == {entry.number: worker for worker in machine._workers for entry in worker.held}
    for entry in entries.values():
        assert entry.kv_len <= entry.length and (entry.worker is not None or not entry.kv_len)
        assert entry.worker is None or entry.worker.weights == entry.state.weights, "computed with its own"
        assert entry.ownership >= entry.state.ownership


def _check_attempts(attempts: Attempts, operations: Mapping[int, Operation]) -> None:
    for operation in operations.values():
        assert (phase_of(operation) == "parked") is (operation.ticket in attempts.parked)
        assert (operation.need is not None) is (operation.ticket in attempts.parked)
    under_way = {o.attempt.op_id: o for o in operations.values() if o.attempt is not None}
    assert attempts.running == under_way and attempts.parked.keys() <= operations.keys()
    suspects, replayed = Counter[object](), Counter[object]()
    for operation in under_way.values():
        worker, attempt = operation.entry.worker, operation.attempt
        assert worker is not None and worker.is_ready and attempt is not None
        assert phase_of(operation) in ("replaying", "computing")
        suspects[worker] += attempt.is_suspect
        if attempt.first_segment is not None:
            replayed[worker, attempt.first_segment] += 1
    assert attempts._suspects == suspects and attempts._replayed == replayed


def _check_load(load: WorkerLoad, all_there: list[Work]) -> None:
    for is_long, queue in enumerate(load._queues):
        by_caller: dict[int, int] = {}
        by_priority = dict.fromkeys(Priority, 0)
        for work in all_there:
            if work.is_long == is_long:
                by_caller[work.caller] = by_caller.get(work.caller, 0) + work.cost
                by_priority[work.priority] += work.cost
        assert queue.by_caller == by_caller
        assert queue.cost == list(by_priority.values())
