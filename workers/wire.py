"""Converts messages of the worker protocol to operations, and results to messages."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np
from quire.v1 import types_pb2

from workers.common import worker_pb2
from workers.decodes import NEVER, WIDTH, Column, Decodes
from workers.forward_options import DTYPES, UNKNOWN_SIZES, ModelSizes, options_of, plain_draw, plain_output
from workers.models.text import ModelText
from workers.operations import Failed, FailureReason, Forward, Kind, Priority, WeightsRead
from workers.outputs import DataType, OutputSpec, RowOutput

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    # Not at runtime: it needs torch, which a worker loads when its devices are chosen.
    from workers.models.model import ModelDescription

# A row of a DecodesCommand has the columns of `Decodes` up to DEADLINE (a timeout here), then the seed.
_SEED = Column.DEADLINE + 1
_DECODE_NUMBERS = _SEED + 1
_LONGEST_NS = 1 << 62
# PRELAUNCH in such a row is `prelaunch` + _PRELAUNCH_VALUES * (index of the options).
_PRELAUNCH_VALUES = 256
# The columns in a row of a DecodesDone.
_DONE = [Column.OP_ID, Column.CHOSEN, Column.QUEUE_NS, Column.COMPUTE_NS, Column.BATCH_ITEMS]


_KINDS = {worker_pb2.OperationKind.Value(f"OPERATION_KIND_{kind.name}"): kind for kind in Kind}
_PRIORITIES = {types_pb2.PRIORITY_UNSPECIFIED: Priority.NORMAL} | {
    types_pb2.Priority.Value(f"PRIORITY_{priority.name}"): priority for priority in Priority
}
_DTYPES_BY_NAME = {"float32": DataType.F32, "bfloat16": DataType.BF16, "float16": DataType.F16}
_REASONS = {
    reason: worker_pb2.WorkerErrorReason.Value(f"WORKER_ERROR_REASON_{reason.name}")
    for reason in FailureReason
}


def to_command(
    message: worker_pb2.WorkerCommand, sizes: ModelSizes = UNKNOWN_SIZES
) -> Forward | worker_pb2.WorkerCommand:
    """Decodes a forward. Other commands are returned unchanged.

    Raises ValueError for an unknown command, a mask of more tokens than the vocabulary has (without decoding
    it), hidden states of unknown layers, or given experts of a wrong shape.
    """
    match message.WhichOneof("command"):
        case "forward":
            return _to_forward(message.op_id, message.forward, sizes)
        case None:
            raise ValueError("unknown command")
        case _:
            return message


def to_decodes(
    message: worker_pb2.DecodesCommand, sizes: ModelSizes
) -> tuple[Decodes, list[worker_pb2.WorkerCommand]]:
    """Decodes plain decodes. Rows whose options are not plain are returned as separate commands.

    Raises ValueError for rows of a wrong size, or an unknown index of options.
    """
    rows = np.frombuffer(message.rows, "<u8").reshape(-1, _DECODE_NUMBERS).T
    options, which = list(message.options), (rows[Column.PRELAUNCH] // _PRELAUNCH_VALUES).tolist()
    if max(which) >= len(options):
        raise ValueError(f"options {max(which)} of {len(options)}")
    known, draws = zip(*map(plain_output, options, repeat(sizes)), strict=True)
    outputs: list[OutputSpec | None]
    if any(draws):
        # Draws without a seed use the seed of the cache, so each row has its own output.
        outputs = [
            plain_draw(options[index], seed, sizes) if draws[index] else known[index]
            for index, seed in zip(which, rows[_SEED].tolist(), strict=True)
        ]
    else:
        outputs = list(map(known.__getitem__, which))
    now_ns = time.monotonic_ns()
    columns = np.zeros((WIDTH, len(outputs)), np.int64)
    columns[:_SEED] = rows[:_SEED]
    columns[Column.LORA_SLOT] = -1
    columns[Column.PRELAUNCH] %= _PRELAUNCH_VALUES
    columns[Column.ARRIVED_NS] = now_ns
    timeouts = np.minimum(rows[Column.DEADLINE], _LONGEST_NS).astype(np.int64)
    columns[Column.DEADLINE] = np.where(timeouts > 0, now_ns + timeouts, NEVER)
    plain = [output for output in outputs if output is not None]
    if len(plain) == len(outputs):
        return Decodes(columns, plain), []
    is_plain = np.array([output is not None for output in outputs])
    others = [_command_of(row, options) for row in rows.T[~is_plain].tolist()]
    return Decodes(columns[:, is_plain], plain), others


def op_ids_of(message: worker_pb2.WorkerCommand) -> list[int]:
    """The op ids in a command. If it is malformed: those that can be read."""
    if message.WhichOneof("command") != "decodes":
        return [message.op_id]
    numbers = np.frombuffer(message.decodes.rows[: len(message.decodes.rows) // 8 * 8], "<u8")
    op_ids: list[int] = numbers[Column.OP_ID :: _DECODE_NUMBERS].tolist()
    return op_ids


def _command_of(row: list[int], options: Sequence[bytes]) -> worker_pb2.WorkerCommand:
    """A row of a DecodesCommand as a command of its own."""
    forward = worker_pb2.ForwardCommand(
        sequence=row[Column.SEQUENCE],
        caller=row[Column.CALLER],
        position=row[Column.POSITION],
        token_ids=[row[Column.TOKEN]],
        prompt_len=row[Column.PROMPT_LEN],
        options=options[row[Column.PRELAUNCH] // _PRELAUNCH_VALUES],
        prelaunch=row[Column.PRELAUNCH] % _PRELAUNCH_VALUES,
        timeout_ns=row[Column.DEADLINE],
        default_seed=row[_SEED],
        kind=worker_pb2.OPERATION_KIND_DECODE,
        priority=types_pb2.PRIORITY_NORMAL,
    )
    return worker_pb2.WorkerCommand(op_id=row[Column.OP_ID], forward=forward)


def _to_forward(op_id: int, message: worker_pb2.ForwardCommand, sizes: ModelSizes) -> Forward:
    now_ns = time.monotonic_ns()
    options = options_of(message.options, message.default_seed, message.keep_all, sizes)
    return Forward(
        op_id=op_id,
        sequence=message.sequence,
        position=message.position,
        token_ids=list(message.token_ids),
        kind=_KINDS[message.kind],
        caller=message.caller,
        prompt_len=message.prompt_len,
        ephemeral=message.ephemeral,
        salt=message.salt if options["experts"] is None else options["experts"].salted(message.salt),
        adapter=message.adapter,
        priority=_PRIORITIES[message.priority],
        deadline_ns=now_ns + message.timeout_ns if message.timeout_ns else None,
        arrived_ns=now_ns,
        prelaunch=message.prelaunch,
        **options,
    )


def to_event(
    result: Forward | Decodes | worker_pb2.WorkerEvent | Failed | WeightsRead,
) -> worker_pb2.WorkerEvent:
    """Encodes a result."""
    match result:
        case worker_pb2.WorkerEvent():
            return result
        case Decodes():
            rows = np.ascontiguousarray(result.columns[_DONE].T, "<i8").tobytes()
            outputs = map(_row, result.row_outputs or ())
            return worker_pb2.WorkerEvent(decodes=worker_pb2.DecodesDone(rows=rows, outputs=outputs))
        case Forward():
            return worker_pb2.WorkerEvent(op_id=result.op_id, forward=_forward_done(result))
        case WeightsRead():
            read = worker_pb2.WeightsRead(model=_description(result.model))
            return worker_pb2.WorkerEvent(op_id=result.op_id, weights_read=read)
        case Failed():
            error = worker_pb2.WorkerError(
                reason=_REASONS[result.reason],  # type: ignore[arg-type]  # an enum to the stubs
                detail=result.detail,
                pages_needed=result.pages_needed,
                pages_available=result.pages_available,
            )
            return worker_pb2.WorkerEvent(op_id=result.op_id, error=error)


def _forward_done(result: Forward) -> worker_pb2.ForwardDone:
    return worker_pb2.ForwardDone(
        outputs=map(_row, result.outputs),
        kept=result.kept,
        reused_tokens=result.reused,
        timing=types_pb2.StepTiming(
            queue_ns=result.queue_ns,
            compute_ns=result.compute_ns,
            steps=result.steps,
            batch_items=result.batch_items,
        ),
        token_logprobs=result.token_logprobs,
        token_is_argmax=result.token_is_argmax,
        samples=map(_sample, result.samples),
        kept_path=result.kept_path,
        appended=result.appended,
        draft_token_ids=result.drafts,
    )


def _sample(row: RowOutput) -> types_pb2.SampledToken:
    return types_pb2.SampledToken(
        token_id=row.token_id, logprob=row.logprob, sampled_logprob=row.sampled_logprob
    )


def _row(row: RowOutput) -> types_pb2.StepOutput:
    message = types_pb2.StepOutput(
        token_id=row.token_id,
        logprob=row.logprob,
        sampled_logprob=row.sampled_logprob,
        entropy=row.entropy,
    )
    if row.top_ids:
        message.top.token_ids.extend(row.top_ids)
        message.top.logprobs.extend(row.top_logprobs)
    if row.chosen_logprobs:
        message.chosen_logprobs.extend(row.chosen_logprobs)
    if row.logits is not None and row.logits_format is not None:
        _write_row(row.logits, row.logits_format, message.logits)
    if row.experts:
        message.experts = row.experts
    if row.hidden_format is not None:
        for states in row.hidden:
            _write_row(states, row.hidden_format, message.hidden.add())
    return message


def _write_row(data: bytes, number_format: DataType, into: types_pb2.Tensor) -> None:
    into.dtype = DTYPES[number_format]  # type: ignore[assignment]  # an enum to the stubs
    into.shape.append(len(data) // (4 if number_format is DataType.F32 else 2))
    into.data = data


def _description(model: ModelDescription, pooling: str = "") -> types_pb2.ModelDescription:
    dtype = _DTYPES_BY_NAME.get(model.dtype)
    fields = _fields(model) | {"dtype": None if dtype is None else DTYPES[dtype]}
    del fields["rounds_rows"]  # `ExecutorCapabilities.products` says it
    return types_pb2.ModelDescription(**fields, pooling=pooling)


def to_ready(
    model: ModelDescription,
    capabilities: types_pb2.ExecutorCapabilities,
    *,
    pages_total: int,
    text: ModelText,
    holdings: Sequence[tuple[int, int]],
) -> worker_pb2.WorkerReady:
    """Describes this worker, which is ready. `holdings`: (sequence, length in tokens) of all that it has."""
    defaults: Any = text.sampling_defaults
    return worker_pb2.WorkerReady(
        pid=os.getpid(),
        model=_description(model, text.pooling),
        tokenizer_json=text.tokenizer_json,
        chat_template=types_pb2.ChatTemplate(**_fields(text.chat_template)),
        sampling_defaults=types_pb2.SamplingParams(**defaults) if defaults else None,
        executor=capabilities,
        pages_total=pages_total,
        holdings=[worker_pb2.Holding(sequence=number, length=length) for number, length in holdings],
    )


def _fields(record: DataclassInstance) -> dict[str, Any]:
    """The fields of a dataclass by name. The message made of them has the same names."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
