"""The effects of the state machine, and the answers of workers. Plain data.

Commands name a sequence by its number. An `op_id` is never used twice; the answer to a command contains it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from service.caches.frozen_struct import frozen_struct
from service.caches.records import Record
from service.caches.requests import Append, Result
from service.caches.segments import Segment
from service.caches.worker_load import NO_WORK, Work
from service.errors import QuireError

# Commands to a worker.


@frozen_struct
class Attempt:
    """One forward of an operation: computes the tokens of `append` at `position` of a sequence."""

    op_id: int
    number: int
    position: int
    # The request; or the tokens that are replayed.
    append: Append
    # For samples without a seed of their own.
    seed: int
    # Tokens before this index are prompt to the frequency and presence penalties.
    prompt_len: int
    caller: int
    # Keep all tokens, regardless of `append.accept`.
    keep_all: bool
    # Release the sequence afterwards.
    ephemeral: bool
    # A sequence shares pages only with those of the same salt.
    salt: bytes = b""
    # The adapter of the cache. 0: none.
    adapter: int = 0
    # It has to begin within this time. None: no limit.
    timeout_s: float | None = None
    # It replays tokens of the cache.
    replays: bool = False

    # The others are not sent.

    # Counted in the worker's pages_queued.
    pages: int = 0
    # The first segment of the cache that it replays. Caches that share it wait for its pages.
    first_segment: Segment | None = None
    # Workers died while they computed this cache. Other such caches wait for its end.
    is_suspect: bool = False
    # How it counts in the load of the worker.
    work: Work = NO_WORK


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


@frozen_struct
class ExportKv:
    """Return the KV of the tokens `first` to `end` of `number`, which are whole pages or its last ones."""

    op_id: int
    number: int
    first: int
    end: int
    salt: bytes


@frozen_struct
class ImportKv:
    """Append tokens to `number` with KV from another worker. `pages` is opaque."""

    op_id: int
    number: int
    token_ids: Sequence[int]
    salt: bytes
    pages: object


Command = Attempt | ForkSequence | TruncateSequence | ReleaseSequences | AbortForward | ExportKv | ImportKv

# A command for one incarnation of a worker: its id, its epoch.
Send = tuple[str, int, Command]
# The records of an operation, by its ticket. They become durable together. The dispatcher reports the result
# (`committed` or `write_failed`); the records are applied and the caller is answered only then.
Write = tuple[int, Sequence[Record]]
# The result of an operation, by its ticket. One for each operation that was not cancelled.
Reply = tuple[int, Result | QuireError]


class Effects(NamedTuple):
    """What has to be done after some inputs, in this order: send, commit the records together, reply."""

    commands: list[Send]
    writes: list[Write]
    replies: list[Reply]


# What a worker answers.


class ForwardDone(Protocol):
    """A forward was computed. `kept` tokens stay; of a tree those of `kept_path`. Opaque otherwise.

    Plain decodes without scores are answered at once, by rows: each has a DecodeDone, smaller than a message.
    """

    @property
    def kept(self) -> int: ...

    @property
    def kept_path(self) -> Sequence[int]: ...


class _DecodesRow(NamedTuple):
    op_id: int
    token_id: int
    queue_ns: int
    compute_ns: int
    batch_items: int


class DecodeDone(_DecodesRow):
    """The row of a decode: its token was kept, and only the next one is told, without scores."""

    __slots__ = ()
    kept = 1
    kept_path = ()


@frozen_struct
class CommandFailed:
    """A command was refused or failed, without an effect.

    `kv_missing`: the worker has fewer tokens of the sequence than expected. `detail` is only for the log.
    """

    error: QuireError
    kv_missing: bool = False
    detail: str = ""


@frozen_struct
class KvExported:
    """The answer to ExportKv. `pages` is opaque."""

    pages: object
    size_bytes: int


# The answer to the command with this op id. None: a command without a result succeeded.
Event = tuple[int, ForwardDone | KvExported | CommandFailed | None]


# Adoption of workers.


@frozen_struct
class Claim:
    """A sequence that a worker should keep, cut to `length`, if `digest` is that of its tokens and salt."""

    number: int
    length: int
    digest: bytes
