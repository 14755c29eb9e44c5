"""Builders of the commands a worker is sent."""

from __future__ import annotations

from collections.abc import Sequence

from quire.v1 import types_pb2, worker_pb2

from service.caches.entries import Operation
from service.caches.requests import Append


def forward(
    operation: Operation, append: Append, number: int, position: int, *, replay: bool = False
) -> worker_pb2.WorkerCommand:
    """Append the operation's tokens to the worker's sequence `number` at `position`.

    replay: compute the answer again on a temporary copy, which keeps all tokens and is then released.
    """
    entry = operation.entry
    command = worker_pb2.WorkerCommand(op_id=operation.ticket)
    body = command.forward
    body.sequence = number
    body.position = position
    body.token_ids.extend(append.token_ids)
    body.rows = append.rows.value
    if append.output is not None:
        _fill_output(body.output, append.output, entry.seed)
    body.kind = append.kind.value
    body.caller = operation.caller
    body.prompt_len = entry.prompt_len if replay else entry.prompt_len_after(append)
    body.ephemeral = replay or entry.ephemeral
    if not replay:
        body.accept = append.accept  # type: ignore[assignment]
    if append.timeout_s is not None:
        body.timeout_ns = max(1, int(append.timeout_s * 1e9))
    return command


def _fill_output(target: types_pb2.OutputOptions, source: types_pb2.OutputOptions, cache_seed: int) -> None:
    """Copies the options; a draw without a seed of its own uses the cache's, so that it can be repeated."""
    target.CopyFrom(source)
    if source.HasField("sampling") and not source.sampling.HasField("seed"):
        target.sampling.seed = cache_seed


def fork(op_id: int, number: int, children: Sequence[int]) -> worker_pb2.WorkerCommand:
    """Make `children` that share the pages of `number`."""
    return worker_pb2.WorkerCommand(
        op_id=op_id, fork=worker_pb2.ForkCommand(sequence=number, children=children)
    )


def truncate(op_id: int, number: int, new_len: int) -> worker_pb2.WorkerCommand:
    """Cut `number` to `new_len` tokens."""
    return worker_pb2.WorkerCommand(
        op_id=op_id, truncate=worker_pb2.TruncateCommand(sequence=number, new_len=new_len)
    )


def release(op_id: int, numbers: Sequence[int]) -> worker_pb2.WorkerCommand:
    """Forget sequences."""
    return worker_pb2.WorkerCommand(op_id=op_id, release=worker_pb2.ReleaseCommand(sequences=numbers))


def abort(op_id: int, target_op_id: int) -> worker_pb2.WorkerCommand:
    """Drop a forward that has not finished."""
    return worker_pb2.WorkerCommand(op_id=op_id, abort=worker_pb2.AbortCommand(target_op_id=target_op_id))
