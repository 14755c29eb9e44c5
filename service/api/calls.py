"""Every data call, declared once: its request, its check, and how outcomes become its answer.

The servicer and the Session both read this table. A new call is an entry: the names of its messages follow
from its own, as everywhere in the protos (`DecodeRequest`, `DecodeResponse`; `BatchDecodeResult`).

A call becomes a plan: its requests to the state machine, and what to make of their outcomes. Making a plan
checks the call and does nothing else. A unary call runs one plan; a Session runs many at once.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from google.protobuf.message import Message
from quire.v1 import executor_pb2

from service.api import answers, appends, validation
from service.api.breath import Breather
from service.api.status import to_status
from service.api.validation import RequestLimits
from service.caches.requests import Append, Fork, Release, Renew, Request, Result, Source, Truncate
from service.errors import InvalidArgument, QuireError

Outcome: TypeAlias = Result | QuireError
# Messages are of one type in each call, which only the table knows: Any.
_Check: TypeAlias = Callable[[Any, RequestLimits, float | None], Request]
_CheckAppend: TypeAlias = Callable[[Any, RequestLimits, float | None], Append]
_Write: TypeAlias = Callable[[Any, Any], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a call does. `answer` takes one outcome for each request, in order; it raises the call's error.

    It may be called in anybody's context, so the call's request id comes with the outcomes.
    """

    requests: Sequence[Request]
    answer: Callable[[Sequence[Outcome], str], Message]
    # At most about how large the answer will be, with what is held for the call beyond what was sent.
    answer_bytes: int = 0
    # How much work it is to start, in requests that touch one cache.
    weight: int = 1


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the service. `plan` raises a QuireError for a request that is wrong.

    It lets others run while it checks many items.
    """

    method: str
    plan: Callable[[Any, RequestLimits, float | None], Coroutine[Any, Any, Plan]]


def _single(method: str, check: _Check, write: _Write) -> Call:
    """A call that is one request to the state machine, and answered with its result."""
    answer = _answered_by(getattr(executor_pb2, f"{method}Response"), write)

    async def plan(request: Any, limits: RequestLimits, timeout_s: float | None) -> Plan:
        checked = check(request, limits, timeout_s)
        size_bytes = checked.answer_bytes + checked.worker_bytes if isinstance(checked, Append) else 0
        return Plan((checked,), answer, size_bytes)

    return Call(method, plan)


def _answered_by(response_type: type[Message], write: _Write) -> Callable[[Sequence[Outcome], str], Message]:
    """How one result becomes an answer."""

    def answer(outcomes: Sequence[Outcome], _request_id: str) -> Message:
        (outcome,) = outcomes
        if isinstance(outcome, QuireError):
            raise outcome
        response = response_type()
        write(outcome, response)
        return response

    return answer


def _batch(method: str, check: _CheckAppend, write: _Write) -> Call:
    """A call of many appends, each with an outcome of its own: who fails does not touch the others."""
    response_type: type[Any] = getattr(executor_pb2, f"{method}Response")

    async def plan(batch: Any, limits: RequestLimits, timeout_s: float | None) -> Plan:
        validation.check_batch(batch.items, limits)
        breather = Breather()
        # A scoring has no cache, so none occurs twice.
        times = Counter(getattr(item, "cache_id", "") for item in batch.items)
        # An append, or why there is none.
        checked: list[Append | QuireError] = []
        for index, item in enumerate(batch.items):
            if breather.due:
                await breather.breathe()
            try:
                cache_id = getattr(item, "cache_id", "")
                if cache_id and times[cache_id] > 1:
                    # Which of two should come first, nobody can say: both fail.
                    raise InvalidArgument(
                        "DUPLICATE_CACHE_IN_BATCH", "cache_id", "the cache occurs more than once in the batch"
                    )
                checked.append(check(item, limits, timeout_s))
            except InvalidArgument as error:
                checked.append(error.below(f"items[{index}]"))
            except QuireError as error:
                checked.append(error.untraced())
        sizes = (c.answer_bytes if isinstance(c, Append) else validation.ANSWER_BYTES for c in checked)
        answer_bytes = sum(sizes)
        validation.check_response_size(answer_bytes, limits, "items")
        refused = [None if isinstance(c, Append) else c for c in checked]

        def answer(outcomes: Sequence[Outcome], request_id: str) -> Message:
            ran = iter(outcomes)
            response = response_type()
            for error in refused:
                outcome = error or next(ran)
                result = response.results.add()
                if isinstance(outcome, QuireError):
                    result.error.CopyFrom(to_status(outcome, request_id))
                else:
                    write(outcome, result.response)
            return response  # type: ignore[no-any-return]

        requests = [c for c in checked if isinstance(c, Append)]
        held_bytes = answer_bytes + sum(append.worker_bytes for append in requests)
        return Plan(requests, answer, held_bytes, weight=len(checked))

    return Call(method, plan)


async def _plan_fork(request: Any, limits: RequestLimits, _timeout_s: float | None) -> Plan:
    answer_bytes = validation.check_fork(request, limits)
    fork = Fork.of(request.cache_id, request.count, tuple(request.release), request.request_id)
    answer = _answered_by(executor_pb2.ForkCacheResponse, answers.caches)
    return Plan((fork,), answer, answer_bytes, _weight_of(fork))


async def _plan_forks(request: Any, limits: RequestLimits, _timeout_s: float | None) -> Plan:
    answer_bytes = validation.check_forks(request, limits)
    sources = [
        Source(each.cache_id, each.count, each.position if each.HasField("position") else None)
        for each in request.forks
    ]
    fork = Fork(sources, tuple(request.release), request.request_id)
    write = functools.partial(answers.forked_caches, [source.count for source in sources])
    answer = _answered_by(executor_pb2.ForkCachesResponse, write)
    return Plan((fork,), answer, answer_bytes, _weight_of(fork))


def _weight_of(fork: Fork) -> int:
    """The caches that a fork touches: a release ends whatever is asked of one, and frees it."""
    return len(fork.sources) + fork.count + len(fork.release)


def _truncate(request: executor_pb2.TruncateKVRequest, *_: object) -> Truncate:
    validation.check_cache_id(request.cache_id)
    if not request.HasField("new_len"):
        # It would be 0, and the cache empty.
        raise InvalidArgument("BAD_FIELD", "new_len", "a new_len is needed")
    position = request.position if request.HasField("position") else None
    return Truncate(request.cache_id, request.new_len, position)


def _release(request: executor_pb2.ReleaseCacheRequest, *_: object) -> Release:
    return Release(request.cache_id)


def _renew(request: executor_pb2.RenewCacheRequest, *_: object) -> Renew:
    validation.check_cache_id(request.cache_id)
    lease_s = validation.lease_seconds(request.lease) if request.HasField("lease") else None
    return Renew(request.cache_id, lease_s)


CALLS = (
    _single("Prefill", appends.prefill, answers.scored_prefill),
    _single("Decode", appends.decode, answers.decode),
    _single("ForwardVerify", appends.verify, answers.verify),
    _single("Forward", appends.score, answers.score),
    _batch("BatchForward", appends.score, answers.score),
    _batch("BatchPrefill", appends.prefill, answers.scored_prefill),
    _batch("BatchDecode", appends.decode, answers.decode),
    _batch("UnifiedForward", appends.unified_item, answers.prefill),
    Call("ForkCache", _plan_fork),
    Call("ForkCaches", _plan_forks),
    _single("TruncateKV", _truncate, answers.cache),
    _single("ReleaseCache", _release, answers.released),
    _single("RenewCache", _renew, answers.cache),
)
