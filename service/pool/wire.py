"""Translates commands of the state machine to worker messages, and worker messages to events.

The counterpart is `workers/wire.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from quire.v1 import types_pb2, worker_pb2

from service.caches import effects
from service.caches.requests import AppendKind, Priority
from service.errors import (
    AdapterLost,
    DeadlinePassed,
    KvExhausted,
    QuireError,
    Unsupported,
    WorkerFault,
)
from service.logging import get_logger
from service.pool.link import WorkerLink

_log = get_logger(__name__)

# The protocol uses the same names.
_KINDS = {kind: worker_pb2.OperationKind.Value(f"OPERATION_KIND_{kind.name}") for kind in AppendKind}
_PRIORITIES = [types_pb2.Priority.Value(f"PRIORITY_{priority.name}") for priority in Priority]


def send(links: Mapping[tuple[str, int], WorkerLink], commands: Sequence[effects.Send]) -> None:
    """Sends commands to incarnations. Drops those to an incarnation that has ended."""
    requests: defaultdict[WorkerLink, worker_pb2.ConnectRequest] = defaultdict(worker_pb2.ConnectRequest)
    for worker_id, epoch, command in commands:
        link = links.get((worker_id, epoch))
        if link is not None:
            messages = requests[link].commands
            try:
                # In place: a message that is appended is copied.
                write_command(command, messages.add())
            except Exception:
                # A bug, which must not keep the others from being sent.
                _log.exception("a command could not be encoded", worker_id=worker_id)
                del messages[-1]
    for link, request in requests.items():
        link.send(request)


def write_command(command: effects.Command, message: worker_pb2.WorkerCommand) -> None:
    """Encodes a command."""
    message.op_id = command.op_id
    if not isinstance(command, effects.Attempt):
        _write_control(command, message)
        return
    append, body = command.append, message.forward
    body.sequence = command.number
    body.position = command.position
    body.token_ids.extend(append.token_ids)
    body.options = append.options
    body.default_seed = command.seed
    body.kind = _KINDS[append.kind]  # type: ignore[assignment]  # an enum to the stubs
    body.caller = command.caller
    body.prompt_len = command.prompt_len
    body.priority = _PRIORITIES[append.priority]  # type: ignore[assignment]
    # To set a field to its default takes time, too.
    if command.position == 0:
        body.salt = command.salt
    if command.keep_all:
        body.keep_all = True
    if command.ephemeral:
        body.ephemeral = True
    if append.prelaunch:
        body.prelaunch = True
    if command.adapter:
        body.adapter = command.adapter
    if command.timeout_s is not None:
        body.timeout_ns = max(1, int(command.timeout_s * 1e9))


def _write_control(command: effects.Command, message: worker_pb2.WorkerCommand) -> None:
    match command:
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
        case effects.ExportKv():
            wanted = message.export_kv
            wanted.sequence, wanted.first, wanted.end = command.number, command.first, command.end
            wanted.salt = command.salt
        case effects.ImportKv():
            message.import_kv.sequence, message.import_kv.salt = command.number, command.salt
            message.import_kv.token_ids.extend(command.token_ids)
            assert isinstance(command.pages, worker_pb2.KvPages)
            message.import_kv.pages.CopyFrom(command.pages)


def to_events(response: worker_pb2.ConnectResponse) -> list[effects.Event]:
    """The answers to commands in a worker's message. Other events, such as snapshots, are skipped."""
    events: list[effects.Event] = []
    for event in response.events:
        match event.WhichOneof("event"):
            case "forward":
                events.append((event.op_id, event.forward))
            case "done":
                events.append((event.op_id, None))
            case "kv_pages":
                pages = event.kv_pages
                events.append((event.op_id, effects.KvExported(pages, len(pages.data))))
            case "error":
                events.append((event.op_id, _failed(event.error)))
    return events


def _failed(error: worker_pb2.WorkerError) -> effects.CommandFailed:
    return effects.CommandFailed(
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
        case worker_pb2.WORKER_ERROR_REASON_ADAPTER:
            return AdapterLost(error.detail)
        case worker_pb2.WORKER_ERROR_REASON_UNSUPPORTED:
            return Unsupported("this executor cannot do it")
        case _:
            return WorkerFault()
