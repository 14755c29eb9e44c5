"""Translates commands of the state machine to worker messages, and worker messages to events.

The counterpart is `workers/wire.py`.
"""

from __future__ import annotations

import functools
import itertools
import operator
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from quire.v1 import types_pb2

from service.caches import answers, effects
from service.caches.entries import Operation
from service.caches.requests import DECODE, NORMAL, Append, AppendKind, Priority
from service.caches.states import REPLAYING
from service.errors import AdapterLost, DeadlinePassed, KvExhausted, QuireError, Unsupported, WorkerFault
from service.logging import get_logger
from service.pool.link import WorkerLink
from workers.common import worker_pb2

_log = get_logger(__name__)

# The protocol uses the same names.
_KINDS = {kind: worker_pb2.OperationKind.Value(f"OPERATION_KIND_{kind.name}") for kind in AppendKind}
# The rows of DecodesCommand and DecodesDone.
_pack_decode = struct.Struct("<9Q").pack
_DONE = struct.Struct("<5Q")
_new_decode_done = functools.partial(tuple.__new__, answers.DecodeDone)
_incarnation_of = operator.itemgetter(0, 1)
# Larger options are sent with each forward.
_MAX_OPTIONS_BYTES = 256
_PRIORITIES = [types_pb2.Priority.Value(f"PRIORITY_{priority.name}") for priority in Priority]


class _Message(NamedTuple):
    """What is sent to one worker at once: plain decodes that follow each other are one command."""

    request: worker_pb2.ConnectRequest
    # The rows of plain decodes that are not in the message yet; and the number of each of their options.
    rows: list[bytes]
    options: dict[bytes, int]

    def add(self, command: effects.Command) -> None:
        """Appends a command, which is no plain decode."""
        self.write_decodes()
        try:
            # In place: a message that is appended is copied.
            write_command(command, self.request.commands.add())
        except Exception:
            del self.request.commands[-1]
            raise

    def write_decodes(self) -> None:
        """Appends the plain decodes so far, so that they precede what is added later."""
        if self.rows:
            decodes = self.request.commands.add().decodes
            decodes.rows = b"".join(self.rows)
            decodes.options.extend(self.options)
            self.rows.clear()
            self.options.clear()


def send(links: Mapping[tuple[str, int], WorkerLink], commands: Sequence[effects.Send]) -> None:
    """Sends commands to incarnations. Drops those to an incarnation that has ended."""
    messages: dict[WorkerLink, _Message] = {}
    for incarnation, group in itertools.groupby(commands, _incarnation_of):
        link = links.get(incarnation)
        if link is None:
            continue
        message = messages.setdefault(link, _Message(worker_pb2.ConnectRequest(), [], {}))
        for worker_id, _, command in group:
            try:
                # The only place that decides which decodes are plain: this runs for each token.
                if (
                    not isinstance(command, Operation)
                    or not isinstance(append := command.request, Append)
                    or append.kind is not DECODE
                    or len(append.token_ids) != 1
                    or len(append.options) > _MAX_OPTIONS_BYTES
                    or append.priority is not NORMAL
                    or command.position == 0
                    or command.state is REPLAYING
                    or command.copy_number is not None
                    or command.entry.state.adapter
                ):
                    message.add(command)
                    continue
                index = message.options.setdefault(append.options, len(message.options))
                state = command.entry.state
                message.rows.append(
                    _pack_decode(
                        command.op_id, state.number, command.caller, command.position, append.token_ids[0],
                        command.prompt_len, 256 * index + append.prelaunch,
                        max(1, int(command.timeout_s * 1e9)), state.seed,
                    )
                )  # fmt: skip
            except Exception:
                # A bug, which must not keep the others from being sent.
                _log.exception("a command could not be encoded", worker_id=worker_id)
    for link, message in messages.items():
        message.write_decodes()
        link.send(message.request)


def write_command(command: effects.Command, message: worker_pb2.WorkerCommand) -> None:
    """Encodes a command."""
    message.op_id = command.op_id
    if isinstance(command, Operation):
        _write_forward(command, message.forward)
    else:
        _write_control(command, message)


def _write_forward(operation: Operation, body: worker_pb2.ForwardCommand) -> None:
    """The forward that an operation describes: see `Operation.op_id`."""
    append, state = operation.request, operation.entry.state
    body.sequence = state.number
    body.position = operation.position
    body.token_ids.extend(operation.token_ids)
    body.default_seed = state.seed
    body.caller = operation.caller
    body.priority = _PRIORITIES[operation.priority]  # type: ignore[assignment]  # an enum to the stubs
    body.timeout_ns = max(1, int(operation.timeout_s * 1e9))
    # To set a field to its default takes time, too.
    if operation.position == 0:
        body.salt = state.salt
    if state.adapter:
        body.adapter = state.adapter
    if operation.state is REPLAYING:
        body.kind = worker_pb2.OPERATION_KIND_REPLAY
        body.prompt_len = state.prompt_len
        return
    assert isinstance(append, Append)
    body.kind = _KINDS[append.kind]  # type: ignore[assignment]
    body.options = append.options
    body.prompt_len = operation.prompt_len
    if append.prelaunch:
        body.prelaunch = append.prelaunch
    if operation.copy_number is not None:
        # All of its tokens are computed again, whichever were kept.
        body.sequence = operation.copy_number
        body.keep_all = body.ephemeral = True
    elif operation.entry.ephemeral:
        body.ephemeral = True


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


def to_events(response: worker_pb2.ConnectResponse) -> list[answers.Event]:
    """The answers to commands in a worker's message. Other events, such as snapshots, are skipped."""
    events: list[answers.Event] = []
    for event in response.events:
        match event.WhichOneof("event"):
            case "forward":
                events.append((event.op_id, event.forward))
            case "decodes":
                # Without the call of a Python function that `DecodeDone._make()` is.
                rows = map(_new_decode_done, _DONE.iter_unpack(event.decodes.rows))
                if outputs := event.decodes.outputs:
                    for row, output in zip(rows, outputs, strict=True):
                        done = decode_answer(row)
                        done.outputs[0].CopyFrom(output)
                        events.append((row.op_id, done))
                else:
                    events += [(row[0], row) for row in rows]
            case "done":
                events.append((event.op_id, None))
            case "error":
                events.append((event.op_id, _failed(event.error)))
    return events


def decode_answer(row: answers.DecodeDone) -> worker_pb2.ForwardDone:
    """The message that a worker would send for this decode alone."""
    return worker_pb2.ForwardDone(
        outputs=[types_pb2.StepOutput(token_id=row.token_id)],
        kept=1,
        timing=types_pb2.StepTiming(
            queue_ns=row.queue_ns, compute_ns=row.compute_ns, batch_items=row.batch_items, steps=1
        ),
    )


def _failed(error: worker_pb2.WorkerError) -> answers.CommandFailed:
    return answers.CommandFailed(
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
            return Unsupported("this executor cannot do it", field=error.field)
        case _:
            return WorkerFault()
