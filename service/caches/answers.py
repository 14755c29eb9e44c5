"""What workers answer to commands. Plain data, and opaque but for what is stated here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from service.caches.frozen_struct import frozen_struct
from service.errors import QuireError


class ForwardDone(Protocol):
    """A forward was computed. `kept` tokens stay; of a tree those of `kept_path`. Opaque otherwise.

    `reused_tokens` of them were not computed: their KV was in shared pages, or was read from disk.
    Of a decode more can be kept: behind its token those of `appended`, which the worker has chosen.
    Plain decodes without scores are answered at once, by rows: each has a DecodeDone, smaller than a message.
    """

    @property
    def kept(self) -> int: ...

    @property
    def kept_path(self) -> Sequence[int]: ...

    @property
    def reused_tokens(self) -> int: ...

    @property
    def appended(self) -> Sequence[int]: ...


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
    kept_path = appended = ()
    reused_tokens = 0


@frozen_struct
class CommandFailed:
    """A command was refused or failed, without an effect.

    `kv_missing`: the worker has fewer tokens of the sequence than expected. `detail` is only for the log.
    """

    error: QuireError
    kv_missing: bool = False
    detail: str = ""


# The answer to the command with this op id. None: a command without a result succeeded.
Event = tuple[int, ForwardDone | CommandFailed | None]
