"""Planted bugs: in what workers are asked and told, and in other weights. Each public name is one."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

from service.caches.answers import CommandFailed, Event
from service.caches.effects import Claim
from service.caches.entries import WorkerView
from service.caches.ledger import Ledger
from service.caches.records import CacheForked, Record, numbers_of
from service.caches.requests import Append, PreviousCaches, Request
from service.errors import QuireError, SequenceQuarantined, WorkerFault
from tests.forwards import SentForward, Told
from tests.sim.machine import PlantedMachine
from tests.sim.model_worker import ModelWorker
from tests.sim.planted import begins_at
from tests.sim.truth import Asked
from workers.common import worker_pb2

# What is kept, or sent to workers, would show a bug at once; callers are to.
KEPT = "tests.sim.watched.check_ledger"
SENT = "tests.sim.watched.WatchedDispatcher.expect"


# Workers.


class LateAnswersAccepted(PlantedMachine):
    """An answer to an earlier forward of a sequence is taken for that of the present one."""

    # That it does anything at all would show it at once; its consequences are to.
    silent = ("tests.sim.simulation.Simulation.check_late",)

    def watch(self, *args: Any) -> None:
        super().watch(*args)
        self.sequence: dict[int, int] = {}
        self.present: dict[int, int] = {}

    def on_command(self, worker_id: str, epoch: int, command: Told) -> Iterable[Told]:
        if isinstance(command, SentForward):
            self.sequence[command.op_id] = command.number
            self.present[command.number] = command.op_id
        return (command,)

    def on_event(self, event: Event) -> Event:
        op_id, answer = event
        return self._latest(op_id), answer

    def _latest(self, op_id: int) -> int:
        number = self.sequence.get(op_id)
        return op_id if number is None else self.present[number]


class _Replays(PlantedMachine):
    """Something else is sent in the place of a replay."""

    def on_command(self, worker_id: str, epoch: int, command: Told) -> Iterable[Told]:
        if isinstance(command, SentForward):
            state = self.ledger.get(command.number)
            # What a caller appends begins where the cache ends.
            if state is not None and command.position < state.length:
                return self.replay(command)
        return (command,)

    def replay(self, command: SentForward) -> Iterable[Told]:
        raise NotImplementedError


class NothingReplayed(_Replays):
    def replay(self, command: SentForward) -> Iterable[Told]:
        done = worker_pb2.ForwardDone(kept=len(command.append.token_ids))
        self.answered([(command.op_id, done)], self.oracle.now_s)
        return ()


class WrongTokensReplayed(_Replays):
    silent = (SENT,)

    def replay(self, command: SentForward) -> Iterable[Told]:
        return (_with_tokens(command, [0] * len(command.append.token_ids)),)


def _with_tokens(command: SentForward, tokens: Sequence[int]) -> SentForward:
    return dataclasses.replace(command, append=dataclasses.replace(command.append, token_ids=tokens))


class _Forgotten(PlantedMachine):
    """Nothing is computed for some, and they are not told so."""

    def watch(self, *args: Any) -> None:
        super().watch(*args)
        self.forgotten: set[int] = set()

    def on_command(self, worker_id: str, epoch: int, command: Told) -> Iterable[Told]:
        asked, _ = self.sequence_of(command.op_id)
        is_forgotten = asked is not None and asked.number in self.forgotten
        return () if is_forgotten and isinstance(command, SentForward) else (command,)


class LossesNotNoticed(_Forgotten):
    """What a worker computed when it died is not computed again."""

    def worker_lost(self, worker_id: str, epoch: int, *args: Any, **how: Any) -> None:
        under_way = self.computed_on(worker_id, epoch)
        self.forgotten |= {asked.number for asked, _ in under_way if asked is not None}
        super().worker_lost(worker_id, epoch, *args, **how)


@begins_at(2450)  # See `AllAreQuarantined`.
def adopted_unseen(patch: pytest.MonkeyPatch) -> None:
    """A worker keeps what is claimed of it without a look at the tokens."""
    patch.setattr(ModelWorker, "is_claimed", lambda *_: True)


class _AdoptedInFull(PlantedMachine):
    def claims(self, holdings: Mapping[int, int]) -> list[Claim]:
        return [dataclasses.replace(c, length=holdings[c.number]) for c in super().claims(holdings)]


@begins_at(110)  # See `AllAreQuarantined`.
def adopted_in_full(patch: pytest.MonkeyPatch) -> None:
    """A gateway claims all that a worker holds, be it more than the journal has."""
    patch.setattr("tests.sim.simulation.Machine", _AdoptedInFull)
    patch.setattr(ModelWorker, "is_claimed", lambda *_: True)


class NobodyIsQuarantined(PlantedMachine):
    """A worker that dies is taken for one that has lost all KV and stops, so that nobody is blamed."""

    def watch(self, *args: Any) -> None:
        super().watch(*args)
        self.sent: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.dead: set[tuple[str, int]] = set()

    def on_command(self, worker_id: str, epoch: int, command: Told) -> Iterable[Told]:
        if (worker_id, epoch) in self.dead:
            return ()
        self.sent[worker_id, epoch].append(command.op_id)
        return (command,)

    def worker_lost(self, worker_id: str, epoch: int, now_s: float, *, crashed: bool = True) -> None:
        self.dead.add((worker_id, epoch))
        self.worker_draining(worker_id, epoch, now_s)
        missing = CommandFailed(WorkerFault(), kv_missing=True)
        self.answered([(op_id, missing) for op_id in self.sent.pop((worker_id, epoch), ())], now_s)
        super().worker_lost(worker_id, epoch, now_s, crashed=crashed)


class AllAreQuarantined(PlantedMachine):
    """Whatever a worker computed when it died is never computed again."""

    # One schedule in 1,600 shows it. Where to begin to look saves half a minute, and decides nothing.
    first_seed = 2490

    def watch(self, *args: Any) -> None:
        super().watch(*args)
        self.quarantined: set[int] = set()

    def worker_lost(self, worker_id: str, epoch: int, *args: Any, **how: Any) -> None:
        self.quarantined |= {number for _, number in self.computed_on(worker_id, epoch)}
        super().worker_lost(worker_id, epoch, *args, **how)

    def on_request(self, request: Request, asked: Asked) -> Request | QuireError:
        if self.quarantined and isinstance(request, Append):
            state = self.state_of(request.cache_id)
            if state is not None and state.number in self.quarantined:
                return SequenceQuarantined()
        return request


# Weights.


class ComputedByAnybody(PlantedMachine):
    """Any worker is taken for one that has loaded what is served. Callers are to see it."""

    silent = (SENT,)

    def worker_ready(self, worker: WorkerView, *args: Any) -> None:
        super().worker_ready(dataclasses.replace(worker, weights=self.weights.serving), *args)


class CachesOfTheWeightsBeforeUsedOn(PlantedMachine):
    def watch(self, *args: Any) -> None:
        super().watch(*args)
        self.weights.can_use = lambda weights: True  # type: ignore[method-assign]


class _LedgerOfForksWithout(Ledger):
    missing: str

    def apply(self, record: Record) -> None:
        super().apply(record)
        for number in numbers_of(record) if isinstance(record, CacheForked) else ():
            setattr(self.get(number), self.missing, 0)


class _LedgerOfTheFirstWeights(_LedgerOfForksWithout):
    missing = "weights"


class ForksAreOfThePresentWeights(PlantedMachine):
    silent = (KEPT,)
    ledger_type = _LedgerOfTheFirstWeights


class AnswersOfReplacedWeightsAreRepeated(PlantedMachine):
    """The answers to last appends survive a replacement of the weights."""

    first_seed = 1240  # See `AllAreQuarantined`.

    def weights_replaced(self, *args: Any) -> None:
        kept = [(entry, entry.answer) for entry in self.index]
        super().weights_replaced(*args)
        for entry, answer in kept:
            entry.answer = answer


class CachesContinueWhereTheyEnd(PlantedMachine):
    def weights_replaced(self, *args: Any) -> None:
        weights, workers, now_s, previous = args
        is_end = previous is PreviousCaches.END
        super().weights_replaced(weights, workers, now_s, PreviousCaches.RECOMPUTE if is_end else previous)


class AnswersOfKeptAttemptsAreTaken(PlantedMachine):
    """What a worker computed before it got other weights is taken for theirs, if it keeps its KV."""

    def weights_replaced(self, *args: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self._attempts, "interrupt", lambda _: [])
            super().weights_replaced(*args)


# Adapters.


class _LedgerOfForksWithoutAdapters(_LedgerOfForksWithout):
    missing = "adapter"


class ForksHaveNoAdapter(PlantedMachine):
    silent = (KEPT,)
    ledger_type = _LedgerOfForksWithoutAdapters


class ReplaysHaveNoAdapter(PlantedMachine):
    def on_command(self, worker_id: str, epoch: int, command: Told) -> Iterable[Told]:
        if isinstance(command, SentForward) and command.replays:
            command = dataclasses.replace(command, adapter=0)
        return (command,)


class RepeatedCreationsIgnoreTheAdapter(PlantedMachine):
    """A creation that is repeated with another adapter gets the cache of the first."""

    first_seed = 160  # See `AllAreQuarantined`.

    def on_request(self, request: Request, asked: Asked) -> Request:
        if isinstance(request, Append) and request.request_id:
            made = self.oracle.made.get((asked.tenant, request.request_id))
            if made is not None:
                return dataclasses.replace(request, adapter=made.adapter)
        return request
