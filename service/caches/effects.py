"""The output of a turn, and the context in which all parts write it: the time and a counter.

Commands name a sequence by its number. An `op_id` is never used twice; the answer to a command contains it.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from service.caches.entries import Operation, WorkerView
from service.caches.frozen_struct import frozen_struct
from service.caches.records import Record
from service.caches.requests import Result
from service.errors import QuireError

# Commands to a worker.


@frozen_struct
class ForkSequence:
    """Create `children` that share the pages of `number`."""

    op_id: int
    number: int
    children: Sequence[int]


@frozen_struct
class TruncateSequence:
    """Cut `number` to `new_len` tokens."""

    op_id: int
    number: int
    new_len: int


@frozen_struct
class ReleaseSequences:
    """Release sequences."""

    op_id: int
    numbers: Sequence[int]


@frozen_struct
class AbortForward:
    """Abort a forward."""

    op_id: int
    target_op_id: int


# An operation is the command for the forward that it describes. Read it before the next input, which may
# change it.
Command = Operation | ForkSequence | TruncateSequence | ReleaseSequences | AbortForward

# A command for one incarnation of a worker: (worker id, epoch, command).
Send = tuple[str, int, Command]
# (ticket, the records of that operation). They become durable together. The dispatcher reports the result
# (`committed` or `write_failed`); only then are they applied and the caller answered.
Write = tuple[int, Sequence[Record]]
# (ticket, the result of that operation). One for each operation that was not cancelled.
Reply = tuple[int, Result | QuireError]


class Effects(NamedTuple):
    """What to do after some inputs, in this order: send commands, commit all records together, reply."""

    commands: list[Send]
    writes: list[Write]
    replies: list[Reply]


class Context:
    """The time of the current input, the effects so far, and the numbers of tickets, commands and caches."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.effects = Effects([], [], [])
        # For metrics. All shards of a process share it.
        self.counts: Counter[str] = Counter()
        # The digest of an adapter's content, by its number: see `Tenant.salt`.
        self.digest_of: Callable[[int], int | str] = lambda number: number
        # Returns a number that was never used before. Numbers only grow.
        self.number = itertools.count(1).__next__

    def skip_numbers(self, last: int) -> None:
        """Marks all numbers up to `last` as used."""
        self.number = itertools.count(max(self.number(), last + 1)).__next__

    def send(self, worker: WorkerView, command: Command) -> None:
        """Sends a command, unless this incarnation of the worker is lost."""
        if worker.is_ready:
            self.effects.commands.append((worker.worker_id, worker.epoch, command))

    def withdraw(self, op_id: int) -> bool:
        """Takes a command back. Returns False if it is of an earlier turn, and so was sent."""
        commands = self.effects.commands
        # They are in the order of their numbers.
        at = bisect_left(commands, op_id, key=_op_id_of)
        if at == len(commands) or _op_id_of(commands[at]) != op_id:
            return False
        del commands[at]
        return True


def _op_id_of(send: Send) -> int:
    return send[2].op_id


# Adoption of workers.


@frozen_struct
class Claim:
    """A worker should keep sequence `number`, cut to `length`, if `digest` matches its tokens and salt."""

    number: int
    length: int
    digest: bytes
