"""Results of the state machine as messages of the public API.

Written in place, so that a batch copies nothing twice.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from typing import TypeAlias

from quire.v1 import executor_pb2, types_pb2, worker_pb2

from service.caches.requests import Appended, Handle, Handles, Released

# What a Timestamp may hold: the end of the year 9999.
_MAX_TIMESTAMP_S = 253_402_300_799

_OneOutput: TypeAlias = (
    executor_pb2.PrefillResponse | executor_pb2.DecodeResponse | executor_pb2.UnifiedForwardItemResponse
)
_Scored: TypeAlias = (
    executor_pb2.PrefillResponse | executor_pb2.ForwardVerifyResponse | executor_pb2.ForwardResponse
)


def write_handle(handle: Handle, into: types_pb2.KvCacheHandle) -> None:
    """A handle. The state machine's clock is monotonic; callers get wall-clock time."""
    into.cache_id = handle.cache_id
    into.seq_len = handle.seq_len
    into.epoch = handle.epoch
    into.worker_id = handle.worker_id
    if math.isfinite(handle.expires_at_s):
        expire_s = min(time.time() + handle.expires_at_s - time.monotonic(), _MAX_TIMESTAMP_S)
        seconds = int(expire_s)
        into.expire_time.seconds = seconds
        into.expire_time.nanos = int((expire_s - seconds) * 1e9)


def decode(result: Appended, into: _OneOutput) -> None:
    """A decode's answer. One that is not a final chunk of a UnifiedForward has no output."""
    done = done_of(result)
    _write_cache(result, into.kv_cache)
    if done.outputs:
        into.output.CopyFrom(done.outputs[0])
    into.timing.CopyFrom(done.timing)
    into.replayed_tokens = result.replayed_tokens


def prefill(
    result: Appended, into: executor_pb2.PrefillResponse | executor_pb2.UnifiedForwardItemResponse
) -> None:
    """A prefill's answer: a decode's, and what was reused."""
    decode(result, into)
    into.reused_tokens = done_of(result).reused_tokens


def scored_prefill(result: Appended, into: executor_pb2.PrefillResponse) -> None:
    """A prefill's answer, with the scores of its tokens and what else was drawn."""
    prefill(result, into)
    into.samples.extend(done_of(result).samples)
    _write_scores(done_of(result), into)


def verify(result: Appended, into: executor_pb2.ForwardVerifyResponse) -> None:
    """A verify's answer. The first token of a verify is no draft."""
    done = done_of(result)
    _write_cache(result, into.kv_cache)
    into.outputs.extend(done.outputs)
    into.accepted = result.kept - 1
    into.accepted_path.extend(result.path)
    _write_scores(done, into)
    into.timing.CopyFrom(done.timing)
    into.replayed_tokens = result.replayed_tokens


def score(result: Appended, into: executor_pb2.ForwardResponse) -> None:
    """A scoring's answer."""
    done = done_of(result)
    into.outputs.extend(done.outputs)
    _write_scores(done, into)
    into.reused_tokens = done.reused_tokens
    into.timing.CopyFrom(done.timing)


def caches(result: Handles, into: executor_pb2.ForkCacheResponse) -> None:
    """What a fork has made."""
    for handle in result.handles:
        write_handle(handle, into.kv_caches.add())


def forked_caches(counts: Sequence[int], result: Handles, into: executor_pb2.ForkCachesResponse) -> None:
    """What a fork of several has made: `counts` copies of each."""
    handles = iter(result.handles)
    for count in counts:
        forked = into.results.add()
        for handle in itertools.islice(handles, count):
            write_handle(handle, forked.kv_caches.add())


def cache(result: Handles, into: executor_pb2.TruncateKVResponse | executor_pb2.RenewCacheResponse) -> None:
    """A cache as it is now."""
    (handle,) = result.handles
    write_handle(handle, into.kv_cache)


def released(result: Released, into: executor_pb2.ReleaseCacheResponse) -> None:
    """Whether there was anything to release."""
    into.released = result.released


def done_of(result: Appended) -> worker_pb2.ForwardDone:
    """What the worker said of an append."""
    assert isinstance(result.answer, worker_pb2.ForwardDone)
    return result.answer


def _write_scores(done: worker_pb2.ForwardDone, into: _Scored) -> None:
    into.token_logprobs.extend(done.token_logprobs)
    into.token_is_argmax.extend(done.token_is_argmax)


def _write_cache(result: Appended, into: types_pb2.KvCacheHandle) -> None:
    assert result.handle is not None, "only scoring keeps no cache"
    write_handle(result.handle, into)
