"""What workers answer to commands: plain data. The state machine reads only the fields declared here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from service.caches.frozen_struct import frozen_struct
from service.errors import QuireError


class ForwardDone(Protocol):
    """A forward was computed. `kept` of its tokens stay; of a tree those with the indexes `kept_path`.

    `reused_tokens` of them were not computed: their KV was in shared pages, or was read from disk.
    A decode can keep more than its own token: also the tokens of `appended`, which the worker chose next.
    Plain decodes that return no logprobs are answered as `DecodeDone`, which is smaller than a message.
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
    """The answer to a plain decode: its token was kept. Contains only the chosen token, no logprobs."""

    __slots__ = ()
    kept = 1
    kept_path = appended = ()
    reused_tokens = 0


@frozen_struct
class CommandFailed:
    """A command was refused or failed. It had no effect.

    `kv_missing`: the worker has fewer tokens of the sequence than expected. `detail`: for the log only.
    """

    error: QuireError
    kv_missing: bool = False
    detail: str = ""


# The answer to the command with this op id. None: a command without a result succeeded.
Event = tuple[int, ForwardDone | CommandFailed | None]
