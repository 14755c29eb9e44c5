"""Requests of the public API as steps of the state machine: check the fields, then translate."""

from __future__ import annotations

from quire.v1 import executor_pb2, types_pb2

from service.api import validation
from service.api.validation import RequestLimits
from service.caches.requests import Append, Kind, Rows
from service.errors import InvalidArgument


def prefill(request: executor_pb2.PrefillRequest, limits: RequestLimits, timeout_s: float | None) -> Append:
    """A Prefill. Raises InvalidArgument, and Unsupported for an adapter."""
    validation.check_prefill(request, limits)
    return Append(
        kind=Kind.PREFILL,
        cache_id=request.cache_id,
        token_ids=list(request.token_ids),
        position=_position(request),
        output=_output(request),
        lease_s=validation.lease_seconds(request.lease) if request.HasField("lease") else None,
        request_id=request.request_id,
        timeout_s=timeout_s,
    )


def decode(request: executor_pb2.DecodeRequest, limits: RequestLimits, timeout_s: float | None) -> Append:
    """A Decode. Raises InvalidArgument."""
    validation.check_cache_id(request.cache_id)
    validation.check_token(request.token_id, limits)
    output = _output(request)
    if output is not None:
        validation.check_output(output, limits, 1)
    return Append(
        kind=Kind.DECODE,
        cache_id=request.cache_id,
        token_ids=(request.token_id,),
        position=request.position if request.HasField("position") else None,
        output=output,
        timeout_s=timeout_s,
    )


def verify(
    request: executor_pb2.ForwardVerifyRequest, limits: RequestLimits, timeout_s: float | None
) -> Append:
    """A ForwardVerify: an output for every token. Raises InvalidArgument."""
    validation.check_verify(request, limits)
    return Append(
        kind=Kind.VERIFY,
        cache_id=request.cache_id,
        token_ids=list(request.token_ids),
        position=request.position if request.HasField("position") else None,
        rows=Rows.ALL,
        output=_output(request),
        accept=request.accept,
        timeout_s=timeout_s,
    )


def score(request: executor_pb2.ForwardRequest, limits: RequestLimits, timeout_s: float | None) -> Append:
    """A Forward: an output for every token, and no cache. Raises InvalidArgument."""
    validation.check_tokens(request.token_ids, limits)
    validation.check_output(request.output, limits, len(request.token_ids))
    return Append(
        kind=Kind.SCORE,
        cache_id="",
        token_ids=list(request.token_ids),
        rows=Rows.ALL,
        output=_output(request),
        timeout_s=timeout_s,
    )


def unified_item(
    item: executor_pb2.UnifiedForwardItem, limits: RequestLimits, timeout_s: float | None
) -> Append:
    """An item of a UnifiedForward: a decode, a prefill, or a chunk of one. Raises InvalidArgument."""
    validation.check_tokens(item.token_ids, limits)
    validation.check_output(item.output, limits, 1)
    is_final = item.is_final_chunk or not item.HasField("is_final_chunk")
    is_decode = bool(item.cache_id) and is_final and len(item.token_ids) == 1
    return Append(
        kind=Kind.DECODE if is_decode else Kind.PREFILL,
        cache_id=item.cache_id,
        token_ids=list(item.token_ids),
        position=_position(item),
        rows=Rows.LAST if is_final else Rows.NONE,
        output=_output(item),
        timeout_s=timeout_s,
    )


def _position(request: executor_pb2.PrefillRequest | executor_pb2.UnifiedForwardItem) -> int | None:
    if not request.HasField("position"):
        return None
    if not request.cache_id and request.position != 0:
        raise InvalidArgument("BAD_POSITION", "position", "a new cache starts at position 0")
    return request.position


def _output(
    request: executor_pb2.PrefillRequest
    | executor_pb2.DecodeRequest
    | executor_pb2.ForwardVerifyRequest
    | executor_pb2.ForwardRequest
    | executor_pb2.UnifiedForwardItem,
) -> types_pb2.OutputOptions | None:
    return request.output if request.HasField("output") else None
