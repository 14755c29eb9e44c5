"""Forwards as plain data: what an operation has a worker compute, which the operation soon forgets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from service.caches.effects import (
    AbortForward,
    Command,
    ForkSequence,
    ReleaseSequences,
    Send,
    TruncateSequence,
)
from service.caches.entries import CacheEntry, Operation
from service.caches.handlers import BaseHandler
from service.caches.ledger import CacheState
from service.caches.requests import PREFILL, Append
from service.caches.states import COMPUTING, REPLAYING
from service.caches.tenants import Tenant


@dataclass(frozen=True)
class SentForward:
    """One forward. `append`: the request, or the tokens that are replayed."""

    op_id: int
    number: int
    position: int
    append: Append
    seed: int = 0
    prompt_len: int = 0
    caller: int = 0
    # On a temporary copy, of which all tokens are kept.
    is_copy: bool = False
    # Of a scoring.
    ephemeral: bool = False
    salt: bytes = b""
    adapter: int = 0
    timeout_s: float = 1e6
    replays: bool = False


def forward_of(operation: Operation) -> SentForward:
    """What an operation has a worker compute now."""
    entry, state, append = operation.entry, operation.entry.state, operation.request
    replays = operation.state is REPLAYING
    assert isinstance(append, Append)
    if replays:
        append = Append(PREFILL, "", operation.token_ids, rows=0, priority=operation.priority)
    is_copy = operation.copy_number is not None and not replays
    return SentForward(
        operation.op_id,
        operation.copy_number if is_copy and operation.copy_number is not None else entry.number,
        operation.position,
        append,
        state.seed,
        state.prompt_len if replays else operation.prompt_len,
        operation.caller,
        is_copy,
        entry.ephemeral and not replays,
        state.salt,
        state.adapter,
        operation.timeout_s,
        replays,
    )


def command_of(forward: SentForward) -> Operation:
    """The command to compute a forward: an operation without a state machine."""
    append, number = forward.append, forward.number
    state = CacheState(number, "kv", "", forward.salt, forward.seed, 60.0, adapter=forward.adapter)
    state.prompt_len = forward.prompt_len
    entry = CacheEntry(number, Tenant(), forward.ephemeral, state)
    operation = Operation(0, forward.caller, None, append, BaseHandler, entry, (entry,), 0.0)  # type: ignore[arg-type]
    operation.state = REPLAYING if forward.replays else COMPUTING
    operation.copy_number = number if forward.is_copy else None
    operation.op_id, operation.token_ids, operation.position = (
        forward.op_id,
        append.token_ids,
        forward.position,
    )
    operation.prompt_len, operation.timeout_s = forward.prompt_len, forward.timeout_s
    operation.priority = append.priority
    return operation


def forwards_in(commands: Iterable[Send]) -> list[SentForward]:
    """The forwards among some commands."""
    return [forward_of(command) for *_, command in commands if isinstance(command, Operation)]


# A command, a forward as plain data.
Told = SentForward | ForkSequence | TruncateSequence | ReleaseSequences | AbortForward


def told(command: Command) -> Told:
    """A command as it is now."""
    return forward_of(command) if isinstance(command, Operation) else command


def as_command(command: Told) -> Command:
    """The command that `told` was given."""
    return command_of(command) if isinstance(command, SentForward) else command
