"""The worker protocol's messages as operations, and results as messages. The only reader of both."""

from __future__ import annotations

import time
from collections.abc import Sequence

from quire.v1 import types_pb2, worker_pb2

from workers.executors.info import Capabilities, ExecutorInfo, StepCounters
from workers.kv.table import KvStats
from workers.operations import (
    GREEDY,
    Abort,
    Accept,
    CheckIntegrity,
    Command,
    Done,
    Failed,
    FailureReason,
    Fork,
    Forward,
    ForwardDone,
    Kind,
    LogitsFormat,
    OutputSpec,
    Release,
    RowOutput,
    Rows,
    Sampling,
    TokenMask,
    Truncate,
)

_ROWS = {
    worker_pb2.ROW_SELECTION_UNSPECIFIED: Rows.NONE,
    worker_pb2.ROW_SELECTION_LAST: Rows.LAST,
    worker_pb2.ROW_SELECTION_ALL: Rows.ALL,
}
_KINDS = {
    worker_pb2.OPERATION_KIND_PREFILL: Kind.PREFILL,
    worker_pb2.OPERATION_KIND_DECODE: Kind.DECODE,
    worker_pb2.OPERATION_KIND_VERIFY: Kind.VERIFY,
    worker_pb2.OPERATION_KIND_SCORE: Kind.SCORE,
}
_FORMATS = {
    types_pb2.LOGITS_FORMAT_UNSPECIFIED: None,
    types_pb2.LOGITS_FORMAT_F32: LogitsFormat.F32,
    types_pb2.LOGITS_FORMAT_BF16: LogitsFormat.BF16,
    types_pb2.LOGITS_FORMAT_F16: LogitsFormat.F16,
}
_DTYPES = {
    LogitsFormat.F32: types_pb2.DATA_TYPE_F32,
    LogitsFormat.BF16: types_pb2.DATA_TYPE_BF16,
    LogitsFormat.F16: types_pb2.DATA_TYPE_F16,
}
_REASONS = {
    FailureReason.KV_MISSING: worker_pb2.WORKER_ERROR_REASON_KV_MISSING,
    FailureReason.KV_EXHAUSTED: worker_pb2.WORKER_ERROR_REASON_KV_EXHAUSTED,
    FailureReason.FAULT: worker_pb2.WORKER_ERROR_REASON_FAULT,
    FailureReason.TIMEOUT: worker_pb2.WORKER_ERROR_REASON_TIMEOUT,
    FailureReason.UNSUPPORTED: worker_pb2.WORKER_ERROR_REASON_UNSUPPORTED,
}


def to_command(message: worker_pb2.WorkerCommand) -> Command:
    """Decodes a command. Raises ValueError for one that is not known; snapshots are the server's own."""
    op_id = message.op_id
    match message.WhichOneof("command"):
        case "forward":
            return _to_forward(op_id, message.forward)
        case "fork":
            return Fork(op_id, message.fork.sequence, tuple(message.fork.children))
        case "truncate":
            return Truncate(op_id, message.truncate.sequence, message.truncate.new_len)
        case "release":
            return Release(op_id, tuple(message.release.sequences))
        case "abort":
            return Abort(op_id, message.abort.target_op_id)
        case "snapshot":
            return CheckIntegrity(op_id, message.snapshot.check_integrity)
        case kind:
            raise ValueError(f"unknown command {kind}")


def _to_forward(op_id: int, message: worker_pb2.ForwardCommand) -> Forward:
    now_ns = time.monotonic_ns()
    return Forward(
        op_id=op_id,
        sequence=message.sequence,
        position=message.position,
        token_ids=list(message.token_ids),
        rows=_ROWS[message.rows],
        output=_to_output(message.output) if message.HasField("output") else GREEDY,
        accept=Accept.CHOSEN if message.accept else Accept.ALL,
        kind=_KINDS[message.kind],
        caller=message.caller,
        prompt_len=message.prompt_len,
        ephemeral=message.ephemeral,
        deadline_ns=now_ns + message.timeout_ns if message.timeout_ns else None,
        arrived_ns=now_ns,
    )


def _to_output(message: types_pb2.OutputOptions) -> OutputSpec:
    return OutputSpec(
        logits=_FORMATS[message.logits],
        top_logprobs=message.top_logprobs,
        logprob_token_ids=tuple(message.logprob_token_ids),
        logprob=message.logprob,
        sampling=_to_sampling(message.sampling) if message.HasField("sampling") else None,
        mask=_to_mask(message.mask) if message.HasField("mask") else None,
    )


def _to_sampling(message: types_pb2.SamplingParams) -> Sampling:
    """Unset fields keep the defaults that have no effect."""
    given = {
        field.name: getattr(message, field.name)
        for field, _ in message.ListFields()
        if field.name != "logit_bias"
    }
    return Sampling(**given, logit_bias=dict(message.logit_bias))


def _to_mask(message: types_pb2.TokenMask) -> TokenMask:
    if message.WhichOneof("kind") == "packed":
        return TokenMask(packed=message.packed)
    return TokenMask(allowed=tuple(message.allowed.ids))


def to_event(result: ForwardDone | Done | Failed) -> worker_pb2.WorkerEvent:
    """Encodes a result."""
    match result:
        case ForwardDone():
            return worker_pb2.WorkerEvent(op_id=result.op_id, forward=_forward_done(result))
        case Done():
            return worker_pb2.WorkerEvent(op_id=result.op_id, done=worker_pb2.ControlDone())
        case Failed():
            error = worker_pb2.WorkerError(
                reason=_REASONS[result.reason],
                detail=result.detail,
                pages_needed=result.pages_needed,
                pages_available=result.pages_available,
            )
            return worker_pb2.WorkerEvent(op_id=result.op_id, error=error)


def _forward_done(result: ForwardDone) -> worker_pb2.ForwardDone:
    return worker_pb2.ForwardDone(
        outputs=[_row(row) for row in result.outputs],
        kept=result.kept,
        reused_tokens=result.reused,
        timing=types_pb2.StepTiming(
            queue_ns=result.queue_ns,
            compute_ns=result.compute_ns,
            steps=result.steps,
            batch_items=result.batch_items,
        ),
        token_logprobs=result.token_logprobs,
    )


def _row(row: RowOutput) -> types_pb2.StepOutput:
    message = types_pb2.StepOutput(token_id=row.token_id, logprob=row.logprob)
    if row.top_ids:
        message.top.token_ids.extend(row.top_ids)
        message.top.logprobs.extend(row.top_logprobs)
    if row.chosen_logprobs:
        message.chosen_logprobs.extend(row.chosen_logprobs)
    if row.logits is not None and row.logits_format is not None:
        width = 4 if row.logits_format is LogitsFormat.F32 else 2
        message.logits.dtype = _DTYPES[row.logits_format]
        message.logits.shape.append(len(row.logits) // width)
        message.logits.data = row.logits
    return message


def to_ready(
    info: ExecutorInfo,
    capabilities: Capabilities,
    stats: KvStats,
    *,
    pid: int,
    page_size: int,
    bytes_per_page: int,
    limits: Sequence[int],
) -> worker_pb2.WorkerReady:
    """Describes a worker that can serve. `limits`: most tokens and most items in one step."""
    max_batch_tokens, max_batch_items = limits
    return worker_pb2.WorkerReady(
        pid=pid,
        device=info.device,
        model_id=info.model_id,
        architecture=info.architecture,
        vocab_size=info.vocab_size,
        max_seq_len=info.max_seq_len,
        num_layers=info.num_layers,
        hidden_size=info.hidden_size,
        num_attention_heads=info.num_attention_heads,
        num_kv_heads=info.num_kv_heads,
        head_dim=info.head_dim,
        dtype=info.dtype,
        num_parameters=info.num_parameters,
        weight_bytes=info.weight_bytes,
        eos_token_ids=info.eos_token_ids,
        bos_token_id=info.bos_token_id,
        tokenizer_json=info.tokenizer_json,
        executor=info.executor,
        runner=info.runner,
        kernels=info.kernels,
        supports_native_unified_decode=capabilities.native_unified_decode,
        supports_lora=capabilities.lora,
        page_size_tokens=page_size,
        bytes_per_page=bytes_per_page,
        pages_total=stats.pages_total,
        max_batch_tokens=max_batch_tokens,
        max_batch_items=max_batch_items,
    )


def to_snapshot(
    stats: KvStats,
    counters: StepCounters,
    *,
    operations_in_flight: int,
    memory_bytes: int,
    step_age_ns: int,
    intact: bool | None,
) -> worker_pb2.WorkerSnapshot:
    """Says how a worker is."""
    return worker_pb2.WorkerSnapshot(
        sequences=stats.sequences,
        pages_total=stats.pages_total,
        pages_free=stats.pages_free,
        pages_cached=stats.pages_cached,
        pages_referenced=stats.pages_referenced,
        tokens=stats.tokens,
        prefix_hit_tokens=stats.prefix_hit_tokens,
        prefix_query_tokens=stats.prefix_query_tokens,
        evicted_pages=stats.evicted_pages,
        copied_pages=stats.copied_pages,
        prefill_operations=counters.prefill_operations,
        decode_operations=counters.decode_operations,
        prefill_ns=counters.prefill_ns,
        decode_ns=counters.decode_ns,
        steps=counters.steps,
        step_tokens=counters.step_tokens,
        batch_items=counters.batch_items,
        operations_in_flight=operations_in_flight,
        memory_bytes=memory_bytes,
        step_age_ns=step_age_ns,
        pool_intact=intact,
    )
