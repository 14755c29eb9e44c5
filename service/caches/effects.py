"""What the state machine wants done (effects), and what workers answer (events). Plain data.

Commands name a sequence by the number that the gateway gave it. `op_id` is never used twice; the event that
answers a command carries it.
"""

from __future__ import annotations

from collections.abc import Sequence

from service.caches.plain import plain
from service.caches.records import Record
from service.caches.requests import Append, Result
from service.errors import QuireError

# Commands to a worker.


@plain
class ForwardSequence:
    """Compute the tokens of `append` at `position` of the sequence."""

    op_id: int
    number: int
    position: int
    append: Append
    # For draws that have no seed of their own.
    seed: int
    # Tokens before this index are prompt to the frequency and presence penalties.
    prompt_len: int
    caller: int
    # Keep all tokens, whatever `append` accepts.
    keep_all: bool
    # Release the sequence when done.
    ephemeral: bool
    # Of a sequence that begins: it shares pages with those of the same salt only.
    salt: bytes = b""
    # By when it has to begin, from now. None: there is no hurry.
    timeout_s: float | None = None


@plain
class ForkSequence:
    """Make `children` that share the pages of `number`."""

    op_id: int
    number: int
    children: Sequence[int]


@plain
class TruncateSequence:
    """Cut `number` to `new_len` tokens."""

    op_id: int
    number: int
    new_len: int


@plain
class ReleaseSequences:
    """Forget sequences."""

    op_id: int
    numbers: Sequence[int]


@plain
class AbortForward:
    """Drop a forward that has not finished."""

    op_id: int
    target_op_id: int


Command = ForwardSequence | ForkSequence | TruncateSequence | ReleaseSequences | AbortForward


# Effects, in the order in which they have to happen.


@plain
class Send:
    """A command for a worker's stream."""

    worker_id: str
    epoch: int
    command: Command


@plain
class Write:
    """Records of an operation for the journal, which are to become durable together.

    The table is told of their end (`committed` or `write_failed`); only then they are true, and answered.
    """

    ticket: int
    records: Sequence[Record]


@plain
class Reply:
    """The end of an operation. Sent once for each ticket that was not cancelled."""

    ticket: int
    outcome: Result | QuireError


Effect = Send | Write | Reply


# Events: what a worker answers.


@plain
class ForwardDone:
    """A forward was computed; `kept` of its tokens stay, of a tree those of `path`. `answer` is opaque."""

    op_id: int
    kept: int
    answer: object
    path: Sequence[int] = ()


@plain
class CommandDone:
    """Any other command was carried out."""

    op_id: int


@plain
class CommandFailed:
    """A command was refused or failed, and nothing of it was applied.

    `kv_missing`: the worker has less of the sequence than was thought. `detail` is for the log only.
    """

    op_id: int
    error: QuireError
    kv_missing: bool = False
    detail: str = ""


Event = ForwardDone | CommandDone | CommandFailed


# What a gateway and a worker that it finds say of sequences.


@plain
class Claim:
    """A sequence is wanted as it is, cut to `length` tokens, if `digest` is that of those tokens."""

    number: int
    length: int
    digest: bytes
