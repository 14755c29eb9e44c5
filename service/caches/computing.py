"""How an append is computed: on which worker, after what replay, and what if that fails. Pure.

An operation whose turn has come goes through attempts until one succeeds, its time is up, or trying on cannot
help. Each attempt is one forward with an op id of its own, so that an answer to an earlier one means nothing:

    PARKED      no worker, no room, or others have to be first: tried again when that has changed
    REPLAYING   the worker computes those of the cache's tokens that it does not have
    COMPUTING   the worker computes what was asked for

A worker that dies, drops the KV or has too few pages only sends an operation back to the start of this.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol

from service.caches.admission import TIME_SHARES, Ahead, Leaving
from service.caches.blame import blame, must_be_alone
from service.caches.chunks import Chunk
from service.caches.counts import take_one
from service.caches.effects import (
    AbortForward,
    Command,
    CommandDone,
    CommandFailed,
    Event,
    ForkSequence,
    ForwardDone,
    ForwardSequence,
    ReleaseSequences,
    TruncateSequence,
)
from service.caches.entries import Attempt, CacheEntry, Need, Operation, Phase
from service.caches.pace import sleep_s
from service.caches.placement import Placement, WorkerView
from service.caches.requests import Append, Kind, Priority, Restore
from service.caches.residence import Residence
from service.errors import (
    DeadlinePassed,
    InternalError,
    KvExhausted,
    NoWorker,
    Overloaded,
    QuireError,
    SequenceQuarantined,
    SequenceTooLong,
    WorkerFault,
    WorkerLost,
)

# So often an operation is tried again after workers died, or had lost its KV, before its caller is told.
_MOST_FAILURES = 8
# Tokens handed out for replays within a moment, but for one cache that has more: to copy and encode
# as many takes some milliseconds, and workers take longer to compute them.
_REPLAYED_AT_ONCE = 1 << 15
_MOMENT_S = 0.02
# A parked operation is refused so long before its deadline, or a tenth of its time: its caller hears why.
_REFUSE_EARLY_S = 0.1


class Outcomes(Protocol):
    """Who is told how an operation ended here."""

    def computed(self, operation: Operation, done: ForwardDone | None) -> None:
        """A worker has computed it; None: all that was wanted was the KV."""

    def not_computed(self, operation: Operation, error: QuireError) -> None:
        """It will not be, and the caller is to be told why."""


class Computing:
    """Owner of the attempts under way, and of the operations that are parked."""

    def __init__(
        self,
        placement: Placement,
        residence: Residence,
        outcomes: Outcomes,
        send: Callable[[WorkerView, Command], None],
        number: Callable[[], int],
        max_wait_s: float,
    ) -> None:
        # When the present input came; set by the table.
        self.now_s = 0.0
        self._placement = placement
        self._residence = residence
        self._outcomes = outcomes
        self._send = send
        self._number = number
        self._max_wait_s = max_wait_s
        self._attempts: dict[int, Operation] = {}
        self._parked: dict[int, Operation] = {}
        # Of the attempts under way: by worker and first chunk, and by worker, those that others wait for.
        self._replayed: Counter[tuple[WorkerView, Chunk]] = Counter()
        self._alone: Counter[WorkerView] = Counter()
        # Since when replays are counted, and how many tokens they have had.
        self._replays_since_s = -math.inf
        self._replayed_tokens = 0
        # Whether anything has happened that a parked operation may have waited for.
        self._changed = False

    @property
    def num_parked(self) -> int:
        """Operations whose turn has come and that cannot be computed yet."""
        return len(self._parked)

    def under_way(self, worker: WorkerView) -> Iterator[Operation]:
        """The operations that a worker computes."""
        return (o for o in self._attempts.values() if o.attempt is not None and o.attempt.worker is worker)

    # An operation comes, or goes.

    def start(self, operation: Operation) -> None:
        """Its turn has come; `base` is set. Raises QuireError if it cannot be computed at all."""
        entry = operation.entry
        if entry.quarantined:
            raise SequenceQuarantined
        # Before it is placed, which for a long cache is work itself.
        waits = entry.kv_len < operation.base and not self._may_replay()
        need = Need.PACE if waits else self._place(operation)
        if need is None and entry.strikes and must_be_alone(entry) and self._has_suspect(entry):
            need = Need.SOLITUDE
        if need is None and entry.kv_len < operation.base and self._has_relative(operation):
            need = Need.RELATIVE
        if need is not None:
            self._park(operation, need)
        elif entry.kv_len < operation.base:
            self._replayed_tokens += operation.base - entry.kv_len
            self._replay(operation)
        else:
            self._compute(operation)

    def stop(self, operation: Operation) -> None:
        """Takes back what a worker does for it, or is about to do. Nothing more comes of it."""
        entry, attempt = operation.entry, operation.attempt
        self._parked.pop(operation.ticket, None)
        if attempt is None:
            return
        self._leave(operation, Leaving.LATE if operation.is_late(self.now_s) else Leaving.TAKEN_BACK)
        self._send(attempt.worker, AbortForward(self._number(), attempt.op_id))
        computes = operation.phase is Phase.COMPUTING
        if computes and operation.copy_number is not None:
            self._release_copy(operation, attempt.worker)
        elif entry.visible:
            # An answer may be on its way: the worker's copy is then longer than it is known to be.
            known = operation.base if computes else entry.kv_len
            self._send(attempt.worker, TruncateSequence(self._number(), entry.number, known))

    # Workers come, answer and go.

    def workers_changed(self) -> None:
        """There is one more, or more room on one."""
        self._changed = True

    def worker_answered(self, event: Event) -> None:
        """A worker answered. Nothing happens if that attempt is not under way any more."""
        operation = self._attempts.get(event.op_id)
        if operation is None or isinstance(event, CommandDone):
            return
        attempt, entry = operation.attempt, operation.entry
        assert attempt is not None
        self._leave(operation, Leaving.ANSWERED if isinstance(event, ForwardDone) else self._why(operation))
        if isinstance(event, CommandFailed):
            self._attempt_failed(operation, attempt, event)
        elif operation.phase is Phase.REPLAYING:
            entry.kv_len = operation.base
            operation.replayed_tokens += attempt.tokens
            self._go_on(operation)
        else:
            entry.strikes = entry.named = 0
            self._outcomes.computed(operation, event)

    def worker_lost(self, worker: WorkerView, *, crashed: bool) -> list[CacheEntry]:
        """A worker is gone. Its operations are tried elsewhere; returns whose KV is gone with it."""
        under_way = list(self.under_way(worker))
        lost = self._residence.lose(worker)
        blame([operation.entry for operation in under_way], crashed=crashed)
        for operation in under_way:
            self._leave(operation, Leaving.TAKEN_BACK)
        for operation in under_way:
            # The end of one before it may have let a fork begin that releases its cache: it waits for that.
            if operation.has_turn:
                self._try_again(operation, WorkerLost())
        self._changed = True
        return lost

    # Time passes, things change.

    def go_on(self) -> None:
        """Tries those again whose obstacle may be gone, the oldest first. To be called after each turn."""
        if not self._changed or not self._parked:
            return
        self._changed = False
        full: set[WorkerView] = set()
        for ticket in sorted(self._parked):
            operation = self._parked.get(ticket)
            if operation is not None and self._is_free(operation, full):
                del self._parked[ticket]
                self._go_on(operation)

    def tick(self) -> None:
        """Time has passed: refuses parked operations whose time is up, and looks at the others again."""
        for operation in [o for o in self._parked.values() if self.now_s >= self._patience_s(o)]:
            self._outcomes.not_computed(operation, self._parked_too_long(operation))
        self._changed = True

    def _patience_s(self, operation: Operation) -> float:
        """Until when it may be parked."""
        until_s = operation.submitted_s + self._max_wait_s
        if operation.deadline_s is None:
            return until_s
        whole_s = operation.deadline_s - operation.submitted_s
        return min(until_s, operation.deadline_s - min(_REFUSE_EARLY_S, whole_s / 10))

    def _parked_too_long(self, operation: Operation) -> QuireError:
        if operation.need is Need.ROOM:
            return KvExhausted(operation.pages_needed, operation.pages_available)
        if operation.need is Need.WORKER:
            return NoWorker()
        return self._too_late(operation) if operation.deadline_s is None else DeadlinePassed()

    # What has to be there first.

    def _park(self, operation: Operation, need: Need) -> None:
        if isinstance(operation.request, Restore) and need in (Need.WORKER, Need.ROOM):
            # Nobody waits for it, and whoever comes next sees to it himself: he must not wait behind it.
            self._outcomes.not_computed(operation, NoWorker())
            return
        operation.phase, operation.need = Phase.PARKED, need
        self._parked[operation.ticket] = operation

    def _place(self, operation: Operation) -> Need | None:
        """Sees to it that the cache has a home that takes work."""
        entry, request = operation.entry, operation.request
        tokens = request.token_ids if isinstance(request, Append) and operation.copy_number is None else ()
        if entry.home is not None and entry.home.draining:
            self._residence.unsettle(entry)
        if entry.home is None:
            if not self._placement.open_workers(entry.state.weights):
                return Need.WORKER
            whole = [*entry.state.tokens.copy(), *tokens]
            worker = self._placement.choose(whole, entry.state.salt, entry.state.weights)
            self._placement.computes(whole, worker, entry.state.salt)
            self._residence.settle(entry, worker, self.now_s)
            entry.ownership += 1
        assert entry.home is not None
        wanted = entry.length + len(tokens)
        if wanted > entry.home.capacity_tokens:
            raise SequenceTooLong(wanted, entry.home.capacity_tokens)
        return None

    def _has_suspect(self, entry: CacheEntry) -> bool:
        """Whether its home computes another that has to be alone."""
        return entry.home is not None and self._alone[entry.home] > 0

    def _may_replay(self) -> bool:
        """Whether one more replay may begin in this moment."""
        if self.now_s - self._replays_since_s >= _MOMENT_S:
            self._replays_since_s, self._replayed_tokens = self.now_s, 0
        return self._replayed_tokens < _REPLAYED_AT_ONCE

    def _has_relative(self, operation: Operation) -> bool:
        """Whether a cache with which it shares its first tokens is just being replayed there."""
        entry = operation.entry
        home, tokens = entry.home, entry.state.tokens
        return home is not None and tokens.is_shared and self._replayed[home, tokens.chunks[0]] > 0

    def _is_free(self, operation: Operation, full: set[WorkerView]) -> bool:
        """Whether what a parked operation waited for may be there. `full`: workers that have no room now."""
        match operation.need:
            case Need.WORKER:
                return bool(self._placement.open_workers(operation.entry.state.weights))
            case Need.SOLITUDE:
                return not self._has_suspect(operation.entry)
            case Need.RELATIVE:
                return not self._has_relative(operation)
            case Need.PACE:
                return self._may_replay()
        return self._has_room(operation, full)

    def _has_room(self, operation: Operation, full: set[WorkerView]) -> bool:
        """Whether there may be room for it by now. Others may have to give theirs."""
        home = operation.entry.home
        if home is None:
            return self._has_room_anywhere(operation, full)
        if home in full:
            return False
        missing = operation.pages_needed - home.headroom
        if missing <= 0 or self._residence.make_room(home, missing, operation, self.now_s):
            return True
        if not self._is_accompanied(operation.entry, home):
            # Nobody is left who could make room: it finds out whether it fits.
            return True
        full.add(home)
        return False

    def _is_accompanied(self, entry: CacheEntry, home: WorkerView) -> bool:
        """Whether others take pages of a cache's home, which they may give back."""
        return self._residence.has_others(entry) or any(self.under_way(home))

    def _has_room_anywhere(self, operation: Operation, full: set[WorkerView]) -> bool:
        """The same of one whose own KV is gone meanwhile: it needs room for all of it."""
        tokens = operation.entry.length
        if isinstance(operation.request, Append):
            tokens += len(operation.request.token_ids)
        for worker in self._placement.open_workers(operation.entry.state.weights):
            if worker in full:
                continue
            missing = min(worker.pages_for(tokens), worker.pages_total) - worker.headroom
            if missing <= 0 or self._residence.make_room(worker, missing, operation, self.now_s):
                return True
            full.add(worker)
        return False

    # Attempts.

    def _replay(self, operation: Operation) -> None:
        """Asks for what the worker does not have, so that it has `base` tokens."""
        entry, request = operation.entry, operation.request
        missing = entry.state.tokens.between(entry.kv_len, operation.base)
        priority = request.priority if isinstance(request, Append) else Priority.NORMAL
        replay = Append(Kind.PREFILL, "", missing, rows=0, priority=priority)
        self._forward(operation, replay, entry.number, entry.kv_len, Phase.REPLAYING)

    def _compute(self, operation: Operation) -> None:
        entry, append = operation.entry, operation.request
        if not isinstance(append, Append):
            self._outcomes.computed(operation, None)
            return
        if operation.copy_number is None:
            self._forward(operation, append, entry.number, operation.base, Phase.COMPUTING)
            return
        # Looked at before the copy is made: it may not be let in.
        if operation.base:
            assert entry.home is not None
            self._admit(operation, append, entry.home)
            self._send(entry.home, ForkSequence(self._number(), entry.number, (operation.copy_number,)))
        self._forward(operation, append, operation.copy_number, operation.base, Phase.COMPUTING)

    def _forward(
        self, operation: Operation, append: Append, number: int, position: int, phase: Phase
    ) -> None:
        """Raises Overloaded or DeadlinePassed if it cannot be done in time."""
        entry, worker = operation.entry, operation.entry.home
        assert worker is not None
        replays, repeats = phase is Phase.REPLAYING, operation.copy_number is not None
        ahead, timeout_s = self._admit(operation, append, worker)
        tokens = len(append.token_ids)
        attempt = Attempt(self._number(), worker, ahead, worker.pages_for(tokens), tokens)
        operation.attempt, operation.phase, operation.need = attempt, phase, None
        entry.was_sent = True
        self._enter(attempt, operation)
        command = ForwardSequence(
            op_id=attempt.op_id,
            number=number,
            position=position,
            append=append,
            seed=entry.state.seed,
            prompt_len=entry.state.prompt_len if replays or repeats else entry.prompt_len_after(append),
            caller=operation.caller,
            keep_all=repeats,
            ephemeral=not replays and (repeats or entry.ephemeral),
            salt=entry.state.salt,
            timeout_s=timeout_s,
        )
        self._send(worker, command)

    def _admit(self, operation: Operation, append: Append, worker: WorkerView) -> tuple[Ahead, float]:
        """What is ahead of it, and by when it has to begin. Raises Overloaded or DeadlinePassed."""
        ahead = worker.load.look(append, operation.queue)
        wait_s = operation.submitted_s + self._max_wait_s - self.now_s
        if operation.deadline_s is None:
            # Short work is hardly ever kept from its turn for so long, and need not be looked at.
            if ahead.is_long:
                _require_turn(ahead, wait_s)
            return ahead, wait_s
        left_s = operation.deadline_s - self.now_s
        _require_time(ahead, left_s)
        return ahead, min(ahead.start_within_s(left_s), wait_s)

    def _enter(self, attempt: Attempt, operation: Operation) -> None:
        """An attempt begins."""
        entry, worker = operation.entry, attempt.worker
        self._attempts[attempt.op_id] = operation
        worker.load.enter(attempt.ahead, self.now_s)
        worker.pages_queued += attempt.pages
        if operation.phase is Phase.REPLAYING:
            attempt.first_chunk = entry.state.tokens.chunks[0]
            self._replayed[worker, attempt.first_chunk] += 1
        if entry.strikes and must_be_alone(entry):
            attempt.is_suspect = True
            self._alone[worker] += 1

    def _leave(self, operation: Operation, end: Leaving) -> None:
        """Its attempt is over."""
        attempt = operation.attempt
        assert attempt is not None
        operation.attempt = None
        del self._attempts[attempt.op_id]
        worker = attempt.worker
        worker.load.leave(attempt.ahead, self.now_s, end)
        worker.pages_queued -= attempt.pages
        if attempt.first_chunk is not None:
            take_one(self._replayed, (worker, attempt.first_chunk))
        if attempt.is_suspect:
            take_one(self._alone, worker)
        # Another may have waited for just that.
        self._changed = True

    def _why(self, operation: Operation) -> Leaving:
        return Leaving.LATE if operation.is_late(self.now_s) else Leaving.TAKEN_BACK

    def _attempt_failed(self, operation: Operation, attempt: Attempt, failed: CommandFailed) -> None:
        entry, error = operation.entry, failed.error
        if operation.copy_number is not None and operation.phase is Phase.COMPUTING:
            # A forward that never began has not released its copy.
            self._release_copy(operation, attempt.worker)
        if failed.kv_missing:
            entry.kv_len = 0
            self._try_again(operation, WorkerFault())
        elif isinstance(error, KvExhausted):
            self._no_room(operation, attempt, error)
        elif isinstance(error, DeadlinePassed):
            self._outcomes.not_computed(operation, self._too_late(operation))
        else:
            self._outcomes.not_computed(operation, error)

    def _release_copy(self, operation: Operation, worker: WorkerView) -> None:
        assert operation.copy_number is not None
        self._send(worker, ReleaseSequences(self._number(), (operation.copy_number,)))

    def _no_room(self, operation: Operation, attempt: Attempt, error: KvExhausted) -> None:
        """Its home has too few pages: others give theirs, it goes elsewhere, or it waits."""
        entry, home = operation.entry, attempt.worker
        operation.pages_needed, operation.pages_available = error.pages_needed, error.pages_available
        home.pages_available = error.pages_available
        missing = max(1, error.pages_needed - error.pages_available)
        if isinstance(operation.request, Restore):
            # Not at the cost of others.
            self._outcomes.not_computed(operation, error)
            return
        if entry.home is home and self._residence.make_room(home, missing, operation, self.now_s):
            self._go_on(operation)
            return
        whole = home.pages_for(entry.length) + error.pages_needed
        others = [w for w in self._placement.open_workers(home.weights) if w is not home]
        if any(w.headroom >= whole for w in others) and operation.failures < _MOST_FAILURES:
            operation.failures += 1
            self._residence.unsettle(entry)
            self._go_on(operation)
        elif self._is_accompanied(entry, home):
            self._park(operation, Need.ROOM)
        else:
            # Whoever was in its way has gone meanwhile; or it takes more than there is.
            self._try_again(operation, error)

    def _too_late(self, operation: Operation) -> QuireError:
        """What an append is told whose turn came too late, or not soon enough to be done in time."""
        if operation.deadline_s is not None and self.now_s >= operation.deadline_s:
            return DeadlinePassed()
        waited_s = self.now_s - operation.submitted_s
        return Overloaded(waited_s, waited_s, sleep_s(waited_s))

    def _try_again(self, operation: Operation, at_last: QuireError) -> None:
        operation.failures += 1
        if operation.failures > _MOST_FAILURES:
            self._outcomes.not_computed(operation, at_last)
        else:
            self._go_on(operation)

    def _go_on(self, operation: Operation) -> None:
        try:
            self.start(operation)
        except QuireError as error:
            self._outcomes.not_computed(operation, error)
        except Exception as error:
            # A bug of ours, which must not leave the cache waiting for an operation that never began.
            self._outcomes.not_computed(operation, bug(error))

    def check(self, operations: dict[int, Operation]) -> None:
        """Raises AssertionError if attempts and operations contradict each other. `operations`: by ticket."""
        for op_id, operation in self._attempts.items():
            assert operation.attempt is not None and operation.attempt.op_id == op_id
            assert operation.phase in (Phase.REPLAYING, Phase.COMPUTING)
            assert operations.get(operation.ticket) is operation
            assert operation.entry.home is operation.attempt.worker, "it is computed where its KV is"
            assert operation.attempt.worker.weights == operation.entry.state.weights
            assert self._placement.has(operation.attempt.worker)
        for ticket, operation in self._parked.items():
            assert operations.get(ticket) is operation and operation.phase is Phase.PARKED
            assert operation.attempt is None and operation.need is not None
        for operation in operations.values():
            tried = operation.phase in (Phase.REPLAYING, Phase.COMPUTING)
            assert tried is (operation.attempt is not None)
            assert (operation.phase is Phase.PARKED) is (operation.ticket in self._parked)
        for worker in self._placement:
            its = [o.attempt for o in self.under_way(worker) if o.attempt is not None]
            assert worker.pages_queued == sum(attempt.pages for attempt in its)
            worker.load.check([attempt.ahead for attempt in its])
        attempts = [o.attempt for o in self._attempts.values() if o.attempt is not None]
        assert self._alone == Counter(a.worker for a in attempts if a.is_suspect)
        assert self._replayed == Counter((a.worker, a.first_chunk) for a in attempts if a.first_chunk)


def bug(error: Exception) -> InternalError:
    """What its caller is told. Made here, since a frame of the error's traceback must not refer to it."""
    internal = InternalError()
    internal.__cause__ = error
    return internal


def _require_time(ahead: Ahead, left_s: float) -> None:
    """Raises Overloaded or DeadlinePassed if it cannot be done in time: at once, and before any work."""
    if left_s <= 0:
        raise DeadlinePassed
    expected_s, may_take_s = ahead.expected_s(), left_s * TIME_SHARES[ahead.priority]
    if expected_s > may_take_s:
        raise Overloaded(expected_s, may_take_s, sleep_s(expected_s - may_take_s))


def _require_turn(ahead: Ahead, wait_s: float) -> None:
    """Raises Overloaded if its turn would not come so soon. Its own work may take as long as it takes."""
    expected_s = ahead.expected_s() - ahead.own_s()
    if expected_s > wait_s:
        raise Overloaded(expected_s, max(wait_s, 0.0), sleep_s(expected_s - wait_s))
