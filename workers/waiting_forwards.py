"""Forwards that wait for KV on disk or for their adapter before they are scheduled.

They are kept by what they wait for: `kv_disk` and the table of adapters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from workers.adapters.errors import AdapterError
from workers.adapters.table import AdapterTable
from workers.answers import Answers
from workers.decodes import Column, Decodes
from workers.failures import failure_of
from workers.kv.disk_threads import DiskReport
from workers.kv_disk import KvDisk
from workers.operations import Failed, FailureReason, Forward
from workers.scheduler import Scheduler


def require_adapters(adapters: AdapterTable[Any] | None) -> AdapterTable[Any]:
    """Return `adapters`. Raises AdapterError if it is None."""
    if adapters is None:
        raise AdapterError("this model has no adapters")
    return adapters


class WaitingForwards:
    """Queues forwards in the scheduler once they have what they need, and answers those that fail before."""

    def __init__(
        self,
        scheduler: Scheduler,
        answers: Answers,
        adapters: AdapterTable[Any] | None,
        kv_disk: KvDisk | None,
    ) -> None:
        self._scheduler, self._answers = scheduler, answers
        self._adapters, self._kv_disk = adapters, kv_disk

    def __len__(self) -> int:
        return sum([len(some) for some in (self._adapters, self._kv_disk) if some is not None])

    def add(self, forward: Forward) -> None:
        """Queues a forward, or lets it wait."""
        if forward.adapter and self._adapters is not None:
            self._adapters.count(forward)
        if self._kv_disk is None or self._kv_disk.admit(forward):
            self._add_read([forward])

    def _add_read(self, forwards: Sequence[Forward]) -> None:
        """Queues forwards that do not wait for the disk (any more), or lets them wait for their adapters."""
        for forward in forwards:
            if self._admit(forward):
                self.queue(forward)

    def queue(self, forward: Forward) -> None:
        """Queues a forward that waits for nothing."""
        try:
            self._scheduler.add(forward)
        except Exception as error:
            self._fail(forward, error)

    def _admit(self, forward: Forward) -> bool:
        """Whether a forward has its adapter. If not, it waits for that, or has failed."""
        try:
            return not forward.adapter or require_adapters(self._adapters).admit(forward)
        except Exception as error:
            self._fail(forward, error)
            return False

    def _fail(self, forward: Forward, error: Exception) -> None:
        self._answers.results.append(failure_of(forward.op_id, error, "a forward could not be queued"))

    def behind_reads(self, decodes: Decodes) -> Decodes:
        """Lets decodes wait behind forwards of their sequences that wait for the disk. Returns the others."""
        kv_disk = self._kv_disk
        if kv_disk is None or not len(kv_disk):
            return decodes
        waits = np.array([kv_disk.has(sequence) for sequence in decodes.sequences], np.bool_)
        for forward in decodes.take(waits).forwards():
            kv_disk.admit(forward)
        return decodes.take(~waits)

    def with_adapters(self, decodes: Decodes) -> Decodes:
        """Returns decodes that have their adapters, and sets their slots. The others wait or have failed."""
        adapters = self._adapters
        can_run = decodes.columns[Column.ADAPTER] == 0 if adapters is None else adapters.assign_slots(decodes)
        for forward in decodes.take(~can_run).forwards():
            self._admit(forward)
        return decodes.take(can_run)

    def was_read(self, report: DiskReport) -> None:
        """Queues the forwards whose pages were read."""
        assert self._kv_disk is not None, "the report is from it"
        self._add_read(self._kv_disk.take(report))

    def advance_adapters(self, adapters: AdapterTable[Any]) -> None:
        """Between two steps: loads and unloads adapters, and queues the forwards that have theirs now."""
        self._expire(adapters)
        ready, results = adapters.advance(self._scheduler.adapters)
        self._answers.results += results
        for forward in ready:
            self._scheduler.add(forward)

    def advance_disk(self, kv_disk: KvDisk) -> None:
        """Between two steps: starts writes, and goes on without the disk if that does not answer."""
        kv_disk.write_more()
        self._expire(kv_disk)
        self._add_read(kv_disk.give_up_if_stuck())

    def _expire(self, owner: AdapterTable[Any] | KvDisk) -> None:
        now_ns = time.monotonic_ns()
        for late in owner.drop(lambda one: one.deadline_ns is not None and one.deadline_ns < now_ns):
            self._answers.results.append(Failed(late.op_id, FailureReason.TIMEOUT))

    def drop(self, unwanted: Callable[[Forward], bool]) -> None:
        """Drops the waiting forwards for which `unwanted` is true. They get no answer."""
        for owner in (self._adapters, self._kv_disk):
            if owner is not None:
                owner.drop(unwanted)
