"""Commands of the state machine as messages to a worker, and its messages as events. The only reader of both.

Mirrors `workers/wire.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from quire.v1 import types_pb2, worker_pb2

from service.caches import effects
from service.caches.requests import Kind, Priority
from service.errors import DeadlinePassed, KvExhausted, QuireError, Unsupported, WorkerFault

# The protocol's numbers have the same names.
_KINDS = {kind: worker_pb2.OperationKind.Value(f"OPERATION_KIND_{kind.name}") for kind in Kind}
_PRIORITIES = [types_pb2.Priority.Value(f"PRIORITY_{priority.name}") for priority in Priority]


def to_message(command: effects.Command) -> worker_pb2.WorkerCommand:
    """Encodes a command."""
    message = worker_pb2.WorkerCommand(op_id=command.op_id)
    match command:
        case effects.ForwardSequence():
            _fill_forward(message.forward, command)
        case effects.ForkSequence():
            message.fork.sequence = command.number
            message.fork.children.extend(command.children)
        case effects.TruncateSequence():
            message.truncate.sequence = command.number
            message.truncate.new_len = command.new_len
        case effects.ReleaseSequences():
            message.release.sequences.extend(command.numbers)
        case effects.AbortForward():
            message.abort.target_op_id = command.target_op_id
    return message


def _fill_forward(body: worker_pb2.ForwardCommand, command: effects.ForwardSequence) -> None:
    append = command.append
    body.sequence = command.number
    body.position = command.position
    body.token_ids.extend(append.token_ids)
    body.rows = append.rows
    body.kind = _KINDS[append.kind]  # type: ignore[assignment]  # an enum to the stubs, a number to Python
    body.caller = command.caller
    body.prompt_len = command.prompt_len
    body.ephemeral = command.ephemeral
    if command.position == 0:
        body.salt = command.salt
    if isinstance(append.output, types_pb2.OutputOptions):
        body.output.CopyFrom(append.output)
        if body.output.HasField("sampling") and not body.output.sampling.HasField("seed"):
            # The cache's, so that the draw can be repeated.
            body.output.sampling.seed = command.seed
    if append.accept and not command.keep_all:
        body.accept = append.accept  # type: ignore[assignment]
    body.run_ahead = append.run_ahead
    body.scored = append.scored
    if isinstance(append.choices, tuple):
        body.verify_rows.extend(append.choices)
    body.sample_seeds.extend(append.sample_seeds)
    body.parents.extend(append.parents)
    body.priority = _PRIORITIES[append.priority]  # type: ignore[assignment]
    if command.timeout_s is not None:
        body.timeout_ns = max(1, int(command.timeout_s * 1e9))


def to_events(response: worker_pb2.ConnectResponse) -> Iterator[effects.Event]:
    """The answers to commands in a worker's message; what it says of itself is passed over."""
    for event in response.events:
        match event.WhichOneof("event"):
            case "forward":
                done = event.forward
                yield effects.ForwardDone(event.op_id, done.kept, done, tuple(done.kept_path))
            case "done":
                yield effects.CommandDone(event.op_id)
            case "error":
                yield _failed(event.op_id, event.error)


def _failed(op_id: int, error: worker_pb2.WorkerError) -> effects.CommandFailed:
    return effects.CommandFailed(
        op_id,
        _to_error(error),
        kv_missing=error.reason == worker_pb2.WORKER_ERROR_REASON_KV_MISSING,
        detail=f"{worker_pb2.WorkerErrorReason.Name(error.reason)} {error.detail}",
    )


def _to_error(error: worker_pb2.WorkerError) -> QuireError:
    match error.reason:
        case worker_pb2.WORKER_ERROR_REASON_KV_EXHAUSTED:
            return KvExhausted(error.pages_needed, error.pages_available)
        case worker_pb2.WORKER_ERROR_REASON_TIMEOUT:
            return DeadlinePassed()
        case worker_pb2.WORKER_ERROR_REASON_UNSUPPORTED:
            return Unsupported("this executor cannot do it")
        case _:
            return WorkerFault()
