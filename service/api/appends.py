"""Requests that add tokens as appends of the state machine: check the fields, then translate."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, TypeAlias

from quire.v1 import executor_pb2, types_pb2

from service.api import validation
from service.api.masks import bytes_in_worker
from service.api.token_trees import check_tree
from service.api.validation import RequestLimits
from service.api.verify_rows import check_verify_rows
from service.caches.requests import Append, Kind, Priority
from service.errors import InvalidArgument

_OnCache: TypeAlias = (
    executor_pb2.PrefillRequest
    | executor_pb2.DecodeRequest
    | executor_pb2.ForwardVerifyRequest
    | executor_pb2.UnifiedForwardItem
)


# Each cache keeps its last answer, and what was asked for, up to this size.
MAX_KEPT_BYTES = 1 << 14
# Of a row of logits in a worker.
_LOGIT_BYTES = 4
PRIORITIES = {
    types_pb2.PRIORITY_UNSPECIFIED: Priority.NORMAL,
    types_pb2.PRIORITY_LOW: Priority.LOW,
    types_pb2.PRIORITY_NORMAL: Priority.NORMAL,
    types_pb2.PRIORITY_HIGH: Priority.HIGH,
}


def prefill(request: executor_pb2.PrefillRequest, limits: RequestLimits, timeout_s: float | None) -> Append:
    """A Prefill. Raises InvalidArgument, and Unsupported for an adapter."""
    limits = limits.of(request.cache_id)
    validation.check_tokens(request.token_ids, limits)
    validation.check_creation(request)
    validation.check_sample_seeds(len(request.sample_seeds))
    scored = 0
    if request.HasField("score_from"):
        scored = validation.check_scored(request.score_from, len(request.token_ids))
    return _append(
        request,
        limits,
        timeout_s,
        kind=Kind.PREFILL,
        token_ids=_packed(request.token_ids),
        rows=1,
        scored=scored,
        sample_seeds=tuple(request.sample_seeds),
        lease_s=validation.lease_seconds(request.lease) if request.HasField("lease") else None,
        request_id=request.request_id,
        cache_salt=request.cache_salt,
    )


def decode(request: executor_pb2.DecodeRequest, limits: RequestLimits, timeout_s: float | None) -> Append:
    """A Decode. Raises InvalidArgument."""
    limits = limits.of(request.cache_id)
    validation.check_cache_id(request.cache_id)
    if not request.HasField("token_id"):
        raise InvalidArgument("EMPTY_TOKENS", "token_id", "a token is needed")
    validation.check_token(request.token_id, limits)
    return _append(request, limits, timeout_s, kind=Kind.DECODE, token_ids=(request.token_id,), rows=1)


def verify(
    request: executor_pb2.ForwardVerifyRequest, limits: RequestLimits, timeout_s: float | None
) -> Append:
    """A ForwardVerify: an output for every token. Raises InvalidArgument."""
    limits = limits.of(request.cache_id)
    validation.check_cache_id(request.cache_id)
    validation.check_tokens(request.token_ids, limits)
    validation.check_accept(request)
    check_tree(request)
    check_verify_rows(request, limits)
    token_ids = _packed(request.token_ids)
    return _append(
        request,
        limits,
        timeout_s,
        kind=Kind.VERIFY,
        token_ids=token_ids,
        rows=len(token_ids),
        scored=len(token_ids) - 1 if request.score else 0,
        accept=request.accept,
        choices=_copied(request.rows),
        parents=tuple(request.parents),
    )


def unified_item(
    item: executor_pb2.UnifiedForwardItem, limits: RequestLimits, timeout_s: float | None
) -> Append:
    """An item of a UnifiedForward: a decode, a prefill, or a chunk of one. Raises InvalidArgument."""
    limits = limits.of(item.cache_id)
    validation.check_tokens(item.token_ids, limits)
    is_final = item.is_final_chunk or not item.HasField("is_final_chunk")
    is_decode = bool(item.cache_id) and is_final and len(item.token_ids) == 1
    kind = Kind.DECODE if is_decode else Kind.PREFILL
    return _append(item, limits, timeout_s, kind=kind, token_ids=_packed(item.token_ids), rows=int(is_final))


def score(request: executor_pb2.ForwardRequest, limits: RequestLimits, timeout_s: float | None) -> Append:
    """A Forward: outputs from a token on, and no cache. Raises InvalidArgument."""
    validation.check_tokens(request.token_ids, limits)
    validation.check_cache_salt(request.cache_salt)
    token_ids = _packed(request.token_ids)
    scored = validation.check_scored(request.score_from, len(token_ids))
    output, answer_bytes = _checked_output(request, limits, scored + 1, scored)
    return Append(
        kind=Kind.SCORE,
        cache_id="",
        token_ids=token_ids,
        rows=scored + 1,
        scored=scored,
        output=output,
        cache_salt=request.cache_salt,
        timeout_s=timeout_s,
        priority=_priority(request),
        answer_bytes=answer_bytes,
        worker_bytes=_worker_bytes(output, (), limits),
        weights=limits.weights,
    )


def _append(
    request: _OnCache,
    limits: RequestLimits,
    timeout_s: float | None,
    *,
    kind: Kind,
    token_ids: Sequence[int],
    rows: int,
    scored: int = 0,
    choices: tuple[types_pb2.VerifyRow, ...] | None = None,
    **rest: Any,
) -> Append:
    """An append to a cache. `rest` is what only one kind has."""
    position = request.position if request.HasField("position") else None
    if position and not request.cache_id:
        raise InvalidArgument("BAD_POSITION", "position", "a new cache starts at position 0")
    samples = len(rest.get("sample_seeds", ()))
    output, answer_bytes = _checked_output(request, limits, rows, scored, samples)
    kept_bytes = answer_bytes + sum(message.ByteSize() for message in (output, *(choices or ())) if message)
    return Append(
        kind=kind,
        cache_id=request.cache_id,
        token_ids=token_ids,
        position=position,
        rows=rows,
        scored=scored,
        choices=choices,
        output=output,
        timeout_s=timeout_s,
        priority=_priority(request),
        answer_bytes=answer_bytes,
        worker_bytes=_worker_bytes(output, choices or (), limits, samples),
        has_logits=output is not None and (bool(output.logits) or output.HasField("hidden")),
        is_large=kept_bytes > MAX_KEPT_BYTES,
        weights=limits.weights,
        **rest,
    )


def _worker_bytes(
    output: types_pb2.OutputOptions | None,
    choices: Sequence[types_pb2.VerifyRow],
    limits: RequestLimits,
    samples: int = 0,
) -> int:
    """What a worker holds for an append beyond what was sent."""
    row_bytes = _LOGIT_BYTES * limits.vocab_size if samples else 0
    if not choices and (output is None or not output.HasField("mask")):
        return row_bytes
    of_rows = [row.mask for row in choices if row.HasField("mask")]
    return row_bytes + bytes_in_worker(of_rows if output is None else [output.mask, *of_rows], limits)


def _priority(request: _OnCache | executor_pb2.ForwardRequest) -> Priority:
    """Raises InvalidArgument for a number without a name."""
    priority = PRIORITIES.get(request.priority)
    if priority is None:
        raise InvalidArgument("BAD_PRIORITY", "priority", f"priority {request.priority} has no name")
    return priority


def _copied(rows: Sequence[types_pb2.VerifyRow]) -> tuple[types_pb2.VerifyRow, ...] | None:
    """Messages of their own, as `_checked_output` gives. None: there are none."""
    copies = []
    for row in rows:
        copy = types_pb2.VerifyRow()
        copy.CopyFrom(row)
        copies.append(copy)
    return tuple(copies) or None


def _packed(token_ids: Sequence[int]) -> array[int]:
    """Tokens at 4 bytes each, which as a list of numbers would take 36."""
    return array("I", token_ids)


def _checked_output(
    request: _OnCache | executor_pb2.ForwardRequest,
    limits: RequestLimits,
    rows: int,
    scored: int,
    samples: int = 0,
) -> tuple[types_pb2.OutputOptions | None, int]:
    """The options, and the most bytes of an answer. Raises InvalidArgument.

    They are a message of their own: a part of the request would keep all of it in memory.
    """
    if not request.HasField("output"):
        return None, validation.check_output(None, limits, rows, scored, samples)
    answer_bytes = validation.check_output(request.output, limits, rows, scored, samples)
    output = types_pb2.OutputOptions()
    output.CopyFrom(request.output)
    return output, answer_bytes
