"""Each data call as a plan: its requests to the state machine, and how their outcomes become its answer.

A unary call runs one plan; a Session runs many at once. Making a plan checks the call and does nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import Message
from google.rpc import status_pb2
from quire.v1 import executor_pb2

from service.api import encoding, requests, validation
from service.api.validation import RequestLimits
from service.caches.requests import Append, AppendResult, ForkRequest, HandlesResult, Request, TruncateRequest
from service.dispatcher import Outcome
from service.errors import QuireError, to_status
from service.logging import current_request_id

_AnswerT = TypeVar("_AnswerT", bound=Message)
_StepAnswerT = TypeVar("_StepAnswerT", bound=Message)
_ItemResultT = TypeVar("_ItemResultT", bound=Message)
_ItemT = TypeVar(
    "_ItemT", executor_pb2.PrefillRequest, executor_pb2.DecodeRequest, executor_pb2.UnifiedForwardItem
)


@dataclass(frozen=True, slots=True)
class Plan(Generic[_AnswerT]):
    """What a call does. `answer` takes one outcome for each request, in order; it raises the call's error."""

    requests: Sequence[Request]
    answer: Callable[[Sequence[Outcome]], _AnswerT]
    # About how large the answer will be.
    answer_bytes: int = 0


def prefill(
    request: executor_pb2.PrefillRequest, limits: RequestLimits, timeout_s: float | None
) -> Plan[executor_pb2.PrefillResponse]:
    """Prefill. Raises InvalidArgument or Unsupported, like every plan."""
    return _one_step(requests.prefill(request, limits, timeout_s), limits, encoding.prefill)


def decode(
    request: executor_pb2.DecodeRequest, limits: RequestLimits, timeout_s: float | None
) -> Plan[executor_pb2.DecodeResponse]:
    """Decode."""
    return _one_step(requests.decode(request, limits, timeout_s), limits, encoding.decode)


def forward_verify(
    request: executor_pb2.ForwardVerifyRequest, limits: RequestLimits, timeout_s: float | None
) -> Plan[executor_pb2.ForwardVerifyResponse]:
    """ForwardVerify."""
    return _one_step(requests.verify(request, limits, timeout_s), limits, encoding.verify)


def forward(
    request: executor_pb2.ForwardRequest, limits: RequestLimits, timeout_s: float | None
) -> Plan[executor_pb2.ForwardResponse]:
    """Forward."""
    return _one_step(requests.score(request, limits, timeout_s), limits, encoding.score)


def batch_prefill(
    request: executor_pb2.BatchPrefillRequest, limits: RequestLimits, timeout_s: float | None
) -> Plan[executor_pb2.BatchPrefillResponse]:
    """BatchPrefill."""
    return _batch(
        request.items,
        limits,
        lambda item: requests.prefill(item, limits, timeout_s),
        lambda result: executor_pb2.BatchPrefillResult(response=encoding.prefill(result)),
        lambda status: executor_pb2.BatchPrefillResult(error=status),
        lambda results: executor_pb2.BatchPrefillResponse(results=results),
    )


def batch_decode(
    request: executor_pb2.BatchDecodeRequest, limits: RequestLimits, timeout_s: float | None
) -> Plan[executor_pb2.BatchDecodeResponse]:
    """BatchDecode."""
    return _batch(
        request.items,
        limits,
        lambda item: requests.decode(item, limits, timeout_s),
        lambda result: executor_pb2.BatchDecodeResult(response=encoding.decode(result)),
        lambda status: executor_pb2.BatchDecodeResult(error=status),
        lambda results: executor_pb2.BatchDecodeResponse(results=results),
    )


def unified_forward(
    request: executor_pb2.UnifiedForwardRequest, limits: RequestLimits, timeout_s: float | None
) -> Plan[executor_pb2.UnifiedForwardResponse]:
    """UnifiedForward."""
    return _batch(
        request.items,
        limits,
        lambda item: requests.unified_item(item, limits, timeout_s),
        lambda result: executor_pb2.UnifiedForwardResult(response=encoding.unified_item(result)),
        lambda status: executor_pb2.UnifiedForwardResult(error=status),
        lambda results: executor_pb2.UnifiedForwardResponse(results=results),
    )


def fork_cache(
    request: executor_pb2.ForkCacheRequest, _limits: RequestLimits, _timeout_s: float | None
) -> Plan[executor_pb2.ForkCacheResponse]:
    """ForkCache."""
    validation.check_fork(request)

    def answer(outcomes: Sequence[Outcome]) -> executor_pb2.ForkCacheResponse:
        handles = [encoding.kv_cache(handle) for handle in _handles(outcomes[0]).handles]
        return executor_pb2.ForkCacheResponse(kv_caches=handles)

    return Plan((ForkRequest(request.cache_id, request.count, tuple(request.release)),), answer)


def truncate_kv(
    request: executor_pb2.TruncateKVRequest, _limits: RequestLimits, _timeout_s: float | None
) -> Plan[executor_pb2.TruncateKVResponse]:
    """TruncateKV."""
    validation.check_cache_id(request.cache_id)

    def answer(outcomes: Sequence[Outcome]) -> executor_pb2.TruncateKVResponse:
        (handle,) = _handles(outcomes[0]).handles
        return executor_pb2.TruncateKVResponse(kv_cache=encoding.kv_cache(handle))

    return Plan((TruncateRequest(request.cache_id, request.new_len),), answer)


def _handles(outcome: Outcome) -> HandlesResult:
    if isinstance(outcome, QuireError):
        raise outcome
    assert isinstance(outcome, HandlesResult)
    return outcome


def _step(outcome: Outcome) -> AppendResult:
    if isinstance(outcome, QuireError):
        raise outcome
    assert isinstance(outcome, AppendResult)
    return outcome


def _one_step(
    append: Append, limits: RequestLimits, encode: Callable[[AppendResult], _StepAnswerT]
) -> Plan[_StepAnswerT]:
    size_bytes = (
        0 if append.output is None else validation.response_bytes(append.output, limits, append.num_rows)
    )
    return Plan((append,), lambda outcomes: encode(_step(outcomes[0])), size_bytes)


def _batch(
    items: Sequence[_ItemT],
    limits: RequestLimits,
    to_step: Callable[[_ItemT], Append],
    wrap: Callable[[AppendResult], _ItemResultT],
    wrap_error: Callable[[status_pb2.Status], _ItemResultT],
    combine: Callable[[Sequence[_ItemResultT]], _AnswerT],
) -> Plan[_AnswerT]:
    """The items that pass their checks run together; all are answered, in their order."""
    validation.check_batch(items, limits)
    duplicates = validation.duplicate_ids(item.cache_id for item in items)
    refused: dict[int, QuireError] = {}
    steps: list[Append] = []
    size_bytes = 0
    for index, item in enumerate(items):
        try:
            validation.check_not_duplicate(item.cache_id, duplicates)
            steps.append(to_step(item))
            size_bytes += validation.response_bytes(item.output, limits, 1)
        except QuireError as error:
            refused[index] = validation.in_item(error, index)
            size_bytes += validation.ANSWER_BYTES
    validation.check_response_size(size_bytes, limits, "items")
    count = len(items)

    def answer(outcomes: Sequence[Outcome]) -> _AnswerT:
        ran = iter(outcomes)
        results = []
        for index in range(count):
            outcome = refused[index] if index in refused else next(ran)
            if isinstance(outcome, QuireError):
                results.append(wrap_error(to_status(outcome, current_request_id())))
            else:
                results.append(wrap(_step(outcome)))
        return combine(results)

    return Plan(steps, answer, size_bytes)
