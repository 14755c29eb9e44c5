"""What is true of the state machine between any two inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from service.caches.cache_index import CacheIndex
from service.caches.entries import ALL_KV, CacheEntry, Operation, WorkerView
from service.caches.handlers import Parts
from service.caches.idempotency import Kind
from service.caches.machine import CacheMachine
from service.caches.requests import Fork, Priority
from service.caches.worker_load import WorkerLoad
from tests.sim.states import check_state


def phase_of(operation: Operation) -> str:
    """How far an operation has come: see `service/caches/states.py`."""
    return operation.state.name.lower()


def check_invariants(machine: CacheMachine) -> None:
    """Asserts that the parts of the machine agree. Half of what a schedule costs: no pass is made twice."""
    index, operations = machine.index, machine.operations
    entries = {entry.number: entry for entry in index}
    assert len(machine.ledger) == len(index)
    for number, entry in entries.items():
        assert machine.ledger.get(number) is entry.state, "there is one copy of a state"
        for operation in entry.operations():
            assert operations.get(operation.ticket) is operation
    for operation in operations.values():
        if not operation.entry.visible:
            entries[operation.entry.number] = operation.entry
    _check_index(index)
    _check_operations(machine, operations)
    _check_counts(machine, operations, entries)
    _check_placement(machine, entries)
    queued = _check_attempts(machine.parts, operations)
    for worker in machine._workers:
        its = queued.get(worker, ())
        assert worker.pages_queued == sum([operation.pages for operation in its])
        _check_load(worker.load, its)


def _check_index(index: CacheIndex) -> None:
    by_number = index._by_number
    for cache_id, entry in index.by_id.items():
        assert entry.visible and entry.state.cache_id == cache_id and not entry.ephemeral
        assert by_number[entry.number] is entry
    assert len(by_number) == len(index.by_id) == sum(map(len, index._numbers.values()))
    assert all(numbers == sorted(numbers) for numbers in index._numbers.values())
    for (tenant, request_id), answer in index.idempotency._answers.items():
        assert answer.made or answer.in_progress, "what has made nothing is forgotten"
        for child, entry in answer.made.items() if answer.kind is not Kind.EXECUTION else ():
            assert entry.tenant is tenant
            if answer.kind is Kind.CREATION:
                assert (entry.state.request_id, child) == (request_id, 0)
                assert by_number.get(entry.number) is (entry if entry.visible else None)
                continue
            fork = entry.state.fork
            assert by_number.get(entry.number) is entry
            assert fork is not None and (fork.request_id, fork.index) == (request_id, child)


def _check_operations(machine: CacheMachine, operations: Mapping[int, Operation]) -> None:
    for ticket, operation in operations.items():
        assert operation.ticket == ticket
        turns = 0
        for its in operation.entries:
            runs = its.running is operation
            assert runs + its.waiting.count(operation) == 1, "it runs or waits, exactly once"
            assert its.tenant is operation.entry.tenant
            assert its.running is not None or its.closing, "an operation waits only behind another"
            turns += runs
        assert operation.turns_left == len(operation.entries) - turns
        assert operation.entry is operation.entries[0]
        assert len(operation.entries) == 1 or isinstance(operation.request, Fork)
        check_state(operation)


def _check_counts(
    machine: CacheMachine, operations: Mapping[int, Operation], entries: Mapping[int, CacheEntry]
) -> None:
    # Of each tenant: caches, tokens and operations in flight. That of no caches may have operations.
    found = {machine.index.anonymous: [0, 0, 0]}
    for entry in entries.values():
        counts = found.setdefault(entry.tenant, [0, 0, 0])
        counts[0] += 1
        counts[1] += entry.length
    size_bytes, caches = 0, len(entries)
    for operation in operations.values():
        size_bytes += operation.size_bytes
        caches += operation.caches
        counts = found.setdefault(operation.entry.tenant, [0, 0, 0])
        counts[0] += operation.caches
        counts[1] += operation.tokens
        counts[2] += not operation.is_internal
    assert machine.admission._queued_bytes == size_bytes
    assert machine.admission._caches == caches
    for tenant, counts in found.items():
        assert [tenant.caches, tenant.tokens, tenant.in_flight] == counts


def _check_placement(machine: CacheMachine, entries: Mapping[int, CacheEntry]) -> None:
    placed = 0
    for entry in entries.values():
        worker = entry.worker
        assert entry.ownership >= entry.state.ownership
        if worker is None:
            assert not entry.kv_len
            continue
        placed += 1
        assert entry in worker.held and machine._workers.find(worker.worker_id, worker.epoch) is worker
        assert entry.kv_len == ALL_KV or entry.kv_len < entry.length
        assert entry.crash_score or not entry.quarantined
        assert worker.weights == entry.state.weights, "computed with its own"
    assert placed == sum([len(worker.held) for worker in machine._workers])


def _check_attempts(parts: Parts, operations: Mapping[int, Operation]) -> dict[WorkerView, list[Operation]]:
    """Returns what each worker computes."""
    attempts, parked = parts.attempts, parts.parked
    queued: dict[WorkerView, list[Operation]] = {}
    suspects, replayed = Counter[object](), Counter[object]()
    num_parked = num_running = 0
    for ticket, operation in operations.items():
        phase, op_id = phase_of(operation), operation.op_id
        is_parked = phase == "parked"
        assert is_parked is (ticket in parked.by_ticket) is (operation.need is not None)
        num_parked += is_parked
        if not op_id:
            continue
        worker = operation.entry.worker
        num_running += 1
        assert attempts.running.get(op_id) is operation
        assert worker is not None and worker.is_ready and phase in ("replaying", "computing")
        queued.setdefault(worker, []).append(operation)
        suspects[worker] += operation.is_suspect
        if operation.first_segment is not None:
            replayed[worker, operation.first_segment] += 1
    assert (len(attempts.running), len(parked.by_ticket)) == (num_running, num_parked)
    assert parked.suspects == suspects and parked.replaying == replayed
    assert max(suspects.values(), default=0) <= 1, "a worker computes one suspect at a time"
    return queued


def _check_load(load: WorkerLoad, all_there: Sequence[Operation]) -> None:
    costs = ([0] * len(Priority), [0] * len(Priority))
    by_caller: tuple[dict[int, int], dict[int, int]] = ({}, {})
    for operation in all_there:
        costs[operation.is_long][operation.priority] += operation.cost
        callers, caller = by_caller[operation.is_long], operation.caller or -operation.ticket
        callers[caller] = callers.get(caller, 0) + operation.cost
    for queue, cost, callers in zip(load._queues, costs, by_caller, strict=True):
        assert queue.by_caller == callers and queue.cost == cost
