"""Commands of a worker as a gateway sends them, by the names of their messages; and an answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from workers.common.worker_pb2 import (
    AbortCommand,
    AdapterCommand,
    AdoptCommand,
    ControlDone,
    ForkCommand,
    ReleaseCommand,
    ReplaceWeightsCommand,
    SnapshotCommand,
    TruncateCommand,
    WorkerCommand,
    WorkerEvent,
)
from workers.common.worker_pb2 import AdapterSource as SourceMessage
from workers.operations import AdapterSource, Forward

Command = Forward | WorkerCommand
Claim = AdoptCommand.Item


def Fork(op_id: int, sequence: int, children: Iterable[int]) -> WorkerCommand:
    return WorkerCommand(op_id=op_id, fork=ForkCommand(sequence=sequence, children=children))


def Truncate(op_id: int, sequence: int, new_len: int) -> WorkerCommand:
    return WorkerCommand(op_id=op_id, truncate=TruncateCommand(sequence=sequence, new_len=new_len))


def Release(op_id: int, sequences: Iterable[int]) -> WorkerCommand:
    return WorkerCommand(op_id=op_id, release=ReleaseCommand(sequences=sequences))


def Abort(op_id: int, target_op_id: int) -> WorkerCommand:
    return WorkerCommand(op_id=op_id, abort=AbortCommand(target_op_id=target_op_id))


def CheckIntegrity(op_id: int, *, check_pages: bool = False) -> WorkerCommand:
    return WorkerCommand(op_id=op_id, snapshot=SnapshotCommand(ordered=True, check_integrity=check_pages))


def Adopt(op_id: int, claims: Iterable[AdoptCommand.Item]) -> WorkerCommand:
    return WorkerCommand(op_id=op_id, adopt=AdoptCommand(items=claims))


def ChangeAdapters(
    op_id: int,
    added: Sequence[AdapterSource] = (),
    removed: Sequence[int] = (),
    *,
    load: bool = False,
    all: bool = False,  # noqa: A002 - as in the message
) -> WorkerCommand:
    sources = [
        SourceMessage(adapter=one.number, directory=one.directory, digest=one.digest, pinned=one.pinned)
        for one in added
    ]
    change = AdapterCommand(added=sources, removed=removed, load=load, all=all)
    return WorkerCommand(op_id=op_id, adapter=change)


def ReadWeights(op_id: int, directory: str) -> WorkerCommand:
    return WorkerCommand(op_id=op_id, replace_weights=ReplaceWeightsCommand(read=directory))


def ApplyWeights(op_id: int) -> WorkerCommand:
    return WorkerCommand(op_id=op_id, replace_weights=ReplaceWeightsCommand(apply={}))


def DiscardWeights(op_id: int) -> WorkerCommand:
    return WorkerCommand(op_id=op_id, replace_weights=ReplaceWeightsCommand(discard={}))


def carried_out(op_id: int) -> WorkerEvent:
    """The answer to most commands."""
    return WorkerEvent(op_id=op_id, done=ControlDone())
