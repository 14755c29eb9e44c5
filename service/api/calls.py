"""The table of data calls: for each, its request, its check, and how its result is written.

`ExecutorApi` (one line per call) and `Session` (all calls on one stream) use this table. The names of the
messages follow from the call's name, as everywhere in the protos (`DecodeRequest`, `DecodeResponse`;
`BatchDecodeResult`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from quire.v1 import executor_pb2

from service.api import append_codec, validation
from service.api.append_codec import write_handle
from service.api.request_limits import RequestLimits
from service.api.status import to_status
from service.api.time_slice import TimeSlice
from service.caches.requests import (
    Append,
    Fork,
    Handles,
    Release,
    Released,
    Renew,
    Request,
    Source,
    Truncate,
)
from service.dispatcher import Outcome
from service.errors import InvalidArgument, QuireError, too_many

# Any: the message types differ by call. Only the table below has them.
Check: TypeAlias = Callable[[Any, RequestLimits, float | None], Any]
Write: TypeAlias = Callable[[Any, Any, Any], None]


class Call:
    """A call of the service. `check` raises a QuireError for an invalid request.

    A batch has many appends, each with its own outcome: one that fails does not affect the others. For a
    batch, `check` and `write` are for a single item.
    """

    def __init__(self, method: str, check: Check, write: Write, *, is_batch: bool = False) -> None:
        self.method = method
        self.check = check
        self.write = write
        self.is_batch = is_batch
        self.response: type[Any] = getattr(executor_pb2, f"{method}Response")

    async def check_items(
        self, batch: Any, limits: RequestLimits, timeout_s: float | None
    ) -> list[Append | QuireError]:
        """Returns an append or error for each item of a batch. Yields to the event loop if it takes long."""
        items = batch.items
        validation.check_batch(items, limits)
        time_slice = TimeSlice()
        # Scorings have no cache, so they are never duplicates.
        names = [getattr(item, "cache_id", "") for item in items]
        repeated: set[str] = set()
        if len(set(names)) < len(names):
            repeated = {name for name, times in Counter(names).items() if name and times > 1}
        checked: list[Append | QuireError] = []
        answer_bytes = 0
        for index, (item, cache_id) in enumerate(zip(items, names, strict=True)):
            if time_slice.clock_s() >= time_slice.until_s:
                await time_slice.yield_to_others()
            try:
                if cache_id in repeated:
                    # The order of the two is undefined, so both fail.
                    raise InvalidArgument(
                        "DUPLICATE_CACHE_IN_BATCH", "cache_id", "the cache occurs more than once in the batch"
                    )
                append = self.check(item, limits, timeout_s)
            except InvalidArgument as error:
                checked.append(error.nested_in(f"items[{index}]"))
                answer_bytes += validation.ANSWER_BYTES
            except QuireError as error:
                checked.append(error.without_traceback())
                answer_bytes += validation.ANSWER_BYTES
            else:
                checked.append(append)
                answer_bytes += append.answer_bytes
        validation.check_response_size(answer_bytes, limits, "items")
        return checked

    def write_items(
        self, requests: Sequence[object], outcomes: Sequence[Outcome], request_id: str, into: Any
    ) -> None:
        """Writes the answer to a batch. `outcomes`: one for each of `requests` that is not an error."""
        remaining = iter(outcomes)
        for one in requests:
            result = into.results.add()
            outcome = one if isinstance(one, QuireError) else next(remaining)
            if isinstance(outcome, QuireError):
                result.error.CopyFrom(to_status(outcome, request_id))
            else:
                self.write(one, outcome, result.response)


def start_weight(requests: Sequence[Request | QuireError]) -> int:
    """The cost of starting requests, in units of a request for one cache.

    A fork counts each cache that it copies, creates or releases: releasing one cancels its other requests.
    """
    weight = len(requests)
    for one in requests:
        if isinstance(one, Fork):
            weight += len(one.sources) + one.count + len(one.release) - 1
    return weight


# Calls that are not appends.


def _fork(request: executor_pb2.ForkCacheRequest, limits: RequestLimits, _timeout_s: object) -> Fork:
    validation.check_fork(request, limits)
    return Fork.of(request.cache_id, request.count, tuple(request.release), request.request_id)


def _forks(request: executor_pb2.ForkCachesRequest, limits: RequestLimits, _timeout_s: object) -> Fork:
    validation.check_forks(request, limits)
    sources = [
        Source(each.cache_id, each.count, each.position if each.HasField("position") else None)
        for each in request.forks
    ]
    return Fork(sources, tuple(request.release), request.request_id)


def _truncate(request: executor_pb2.TruncateKVRequest, *_: object) -> Truncate:
    validation.check_cache_id(request.cache_id)
    if not request.HasField("new_len"):
        # The default, 0, would empty the cache.
        raise InvalidArgument("BAD_FIELD", "new_len", "new_len is required")
    position = request.position if request.HasField("position") else None
    return Truncate(request.cache_id, request.new_len, position)


def _release(request: executor_pb2.ReleaseCacheRequest, *_: object) -> Release:
    if request.request_ids:
        raise too_many("request_ids", 0)
    validation.check_cache_id(request.cache_id)
    return Release(request.cache_id)


def _renew(request: executor_pb2.RenewCacheRequest, *_: object) -> Renew:
    validation.check_cache_id(request.cache_id)
    lease_s = validation.lease_seconds(request.lease) if request.HasField("lease") else None
    return Renew(request.cache_id, lease_s)


def _write_fork(_request: Fork, result: Handles, into: executor_pb2.ForkCacheResponse) -> None:
    for handle in result.handles:
        write_handle(handle, into.kv_caches.add())


def _write_forks(request: Fork, result: Handles, into: executor_pb2.ForkCachesResponse) -> None:
    handles = iter(result.handles)
    for source in request.sources:
        forked = into.results.add()
        for handle in itertools.islice(handles, source.count):
            write_handle(handle, forked.kv_caches.add())


def _write_cache(
    _request: Truncate | Renew,
    result: Handles,
    into: executor_pb2.TruncateKVResponse | executor_pb2.RenewCacheResponse,
) -> None:
    (handle,) = result.handles
    write_handle(handle, into.kv_cache)


def _write_released(_request: Release, result: Released, into: executor_pb2.ReleaseCacheResponse) -> None:
    into.released = result.released


CALLS = {
    call.method: call
    for call in (
        Call("Prefill", append_codec.prefill, append_codec.write_scored_prefill),
        Call("Decode", append_codec.decode, append_codec.write_decode),
        Call("ForwardVerify", append_codec.verify, append_codec.write_verify),
        Call("Forward", append_codec.score, append_codec.write_score),
        Call("BatchForward", append_codec.score, append_codec.write_score, is_batch=True),
        Call("BatchPrefill", append_codec.prefill, append_codec.write_scored_prefill, is_batch=True),
        Call("BatchDecode", append_codec.decode, append_codec.write_decode, is_batch=True),
        Call("UnifiedForward", append_codec.unified_item, append_codec.write_prefill, is_batch=True),
        Call("ForkCache", _fork, _write_fork),
        Call("ForkCaches", _forks, _write_forks),
        Call("TruncateKV", _truncate, _write_cache),
        Call("ReleaseCache", _release, _write_released),
        Call("RenewCache", _renew, _write_cache),
    )
}
# The cache ids in a request, by call. All other calls have one `cache_id`.
_IDS: dict[str, Callable[[Any], Iterable[str]]] = {
    "Forward": lambda _: (),
    "BatchForward": lambda _: (),
    "ForkCache": lambda request: (request.cache_id, *request.release),
    "ForkCaches": lambda request: (*(each.cache_id for each in request.forks), *request.release),
} | {
    call.method: lambda batch: [item.cache_id for item in batch.items]
    for call in CALLS.values()
    if call.is_batch and call.method != "BatchForward"
}


def ids_in(method: str, request: Any) -> Iterable[str]:
    """The ids of caches that a request names. Empty for a new cache."""
    ids = _IDS.get(method)
    return (request.cache_id,) if ids is None else ids(request)
