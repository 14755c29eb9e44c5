"""Translates requests into appends, and results into answers.

Requests are checked against the limits of the model and the server only. Each failure names its field.
Answers are written in place, so that a batch copies nothing twice.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Sequence
from typing import Any, TypeAlias

from quire.v1 import executor_pb2, types_pb2

from service.api import validation
from service.api.masks import bytes_in_worker, out_of_vocab
from service.api.request_limits import RequestLimits
from service.api.validation import ROW_ANSWER_BYTES
from service.api.verify_rows import check_tree, check_verify_rows
from service.budgets import COPIES, SMALL_BYTES
from service.caches.answers import DecodeDone
from service.caches.requests import DECODE, Append, Appended, AppendKind, Fork, Handle, Priority, Request
from service.errors import InvalidArgument, QuireError
from service.pool.wire import decode_answer
from workers.common import worker_pb2

_OnCache: TypeAlias = (
    executor_pb2.PrefillRequest
    | executor_pb2.DecodeRequest
    | executor_pb2.ForwardVerifyRequest
    | executor_pb2.UnifiedForwardItem
)
_OneOutput: TypeAlias = (
    executor_pb2.PrefillResponse | executor_pb2.DecodeResponse | executor_pb2.UnifiedForwardItemResponse
)
_Scored: TypeAlias = (
    executor_pb2.PrefillResponse | executor_pb2.ForwardVerifyResponse | executor_pb2.ForwardResponse
)

# The largest answer, with its options, that a cache stores for a repeat of its last append.
MAX_KEPT_BYTES = 1 << 14
# Bytes of one logit in a worker.
_LOGIT_BYTES = 4
# One more sample from a row costs this fraction of a row. Workers count the same way.
_SAMPLES_PER_ROW = 16
# The largest Timestamp: the end of the year 9999.
_MAX_TIMESTAMP_S = 253_402_300_799
# The options of an append with one output, for its last token, and all defaults.
_NEXT_TOKEN = worker_pb2.ForwardOptions(rows=1).SerializeToString(deterministic=True)
PRIORITIES = {
    types_pb2.PRIORITY_UNSPECIFIED: Priority.NORMAL,
    types_pb2.PRIORITY_LOW: Priority.LOW,
    types_pb2.PRIORITY_NORMAL: Priority.NORMAL,
    types_pb2.PRIORITY_HIGH: Priority.HIGH,
}


# Requests.


def prefill(request: executor_pb2.PrefillRequest, limits: RequestLimits, timeout_s: float | None) -> Append:
    """Translates a Prefill. Raises InvalidArgument, and AdapterNotFound or Unsupported for an adapter."""
    validation.check_creation(request)
    validation.check_tokens(request.token_ids, limits)
    validation.check_sample_seeds(len(request.sample_seeds))
    options = worker_pb2.ForwardOptions(rows=1, sample_seeds=request.sample_seeds)
    if request.HasField("score_from"):
        options.scored = validation.check_scored(request.score_from, len(request.token_ids))
    made_with = limits.made_with(request.request_id) if request.request_id else 0
    return _append(
        request,
        limits,
        timeout_s,
        options,
        kind=AppendKind.PREFILL,
        token_ids=_packed(request.token_ids),
        adapter=validation.check_adapter(request.adapter_id, request.cache_id, limits, made_with),
        lease_s=validation.lease_seconds(request.lease) if request.HasField("lease") else None,
        request_id=request.request_id,
        cache_salt=request.cache_salt,
    )


def decode(request: executor_pb2.DecodeRequest, limits: RequestLimits, timeout_s: float | None) -> Append:
    """Translates a Decode. Raises InvalidArgument."""
    # This runs for each token, so valid fields cause no function calls, and each is read once.
    cache_id, token_id, priority = request.cache_id, request.token_id, PRIORITIES.get(request.priority)
    if not cache_id:
        validation.check_cache_id(cache_id)
    if not request.HasField("token_id"):
        raise InvalidArgument("EMPTY_TOKENS", "token_id", "token_id is required")
    if token_id >= limits.vocab_size:
        raise out_of_vocab(token_id, limits, "token_id")
    token_ids = (token_id,)
    if request.HasField("output") or priority is None:
        options = worker_pb2.ForwardOptions(rows=1)
        return _append(request, limits, timeout_s, options, kind=AppendKind.DECODE, token_ids=token_ids)
    # Only the next token is requested: the same result as below, in a fifth of the time.
    return Append(
        DECODE,
        cache_id,
        token_ids,
        request.position if request.HasField("position") else None,
        _NEXT_TOKEN,
        timeout_s,
        priority,
        ROW_ANSWER_BYTES,
        limits.weights,
    )


def verify(
    request: executor_pb2.ForwardVerifyRequest, limits: RequestLimits, timeout_s: float | None
) -> Append:
    """Translates a ForwardVerify: one output per token. Raises InvalidArgument."""
    validation.check_cache_id(request.cache_id)
    validation.check_tokens(request.token_ids, limits)
    validation.check_accept(request)
    check_tree(request)
    check_verify_rows(request, limits)
    options = worker_pb2.ForwardOptions(
        rows=len(request.token_ids),
        scored=len(request.token_ids) - 1 if request.score else 0,
        verify_rows=request.rows,
        parents=request.parents,
        accept=None if request.accept == types_pb2.VERIFY_ACCEPT_ALL else request.accept,
    )
    token_ids = _packed(request.token_ids)
    return _append(request, limits, timeout_s, options, kind=AppendKind.VERIFY, token_ids=token_ids)


def unified_item(
    item: executor_pb2.UnifiedForwardItem, limits: RequestLimits, timeout_s: float | None
) -> Append:
    """Translates an item of a UnifiedForward: a decode, a prefill or a chunk. Raises InvalidArgument."""
    validation.check_tokens(item.token_ids, limits)
    is_final = item.is_final_chunk or not item.HasField("is_final_chunk")
    is_decode = bool(item.cache_id) and is_final and len(item.token_ids) == 1
    kind = AppendKind.DECODE if is_decode else AppendKind.PREFILL
    options = worker_pb2.ForwardOptions(rows=int(is_final))
    return _append(
        item,
        limits,
        timeout_s,
        options,
        kind=kind,
        token_ids=_packed(item.token_ids),
        adapter=validation.check_adapter(item.adapter_id, item.cache_id, limits),
    )


def score(request: executor_pb2.ForwardRequest, limits: RequestLimits, timeout_s: float | None) -> Append:
    """Translates a Forward: outputs from one token on, without a cache. Raises InvalidArgument."""
    validation.check_tokens(request.token_ids, limits)
    validation.check_cache_salt(request.cache_salt)
    scored = validation.check_scored(request.score_from, len(request.token_ids))
    limits.experts.check_replay(request.experts, request.experts_from, len(request.token_ids))
    options = worker_pb2.ForwardOptions(
        rows=scored + 1, scored=scored, experts=request.experts, experts_from=request.experts_from
    )
    return _append(
        request,
        limits,
        timeout_s,
        options,
        kind=AppendKind.SCORE,
        token_ids=_packed(request.token_ids),
        adapter=validation.check_adapter(request.adapter_id, "", limits),
        cache_salt=request.cache_salt,
    )


def last_row(output: types_pb2.OutputOptions, end_token_ids: Sequence[int] = ()) -> bytes:
    """Options of an append with one output, for its last token."""
    options = worker_pb2.ForwardOptions(rows=1, output=output, end_token_ids=end_token_ids)
    return serialized(options)


def sampled_rows(
    output: types_pb2.OutputOptions, rows: int, masks: Sequence[bytes] = (), draft_tokens: int = 0
) -> bytes:
    """Options of an append of a token and its draft, with an output for each. See VERIFY_ACCEPT_SAMPLED.

    `masks`: a packed one for each row, or none. `draft_tokens`: how many tokens a draft model adds.
    """
    options = worker_pb2.ForwardOptions(rows=rows, output=output, draft_tokens=draft_tokens)
    if rows > 1:
        options.accept = types_pb2.VERIFY_ACCEPT_SAMPLED
    for mask in masks:
        options.verify_rows.add().mask.packed = mask
    return serialized(options)


def serialized(options: worker_pb2.ForwardOptions) -> bytes:
    """The options as they are sent to the worker. Equal options have equal bytes, because maps are sorted."""
    return options.SerializeToString(deterministic=True)


def _append(
    request: _OnCache | executor_pb2.ForwardRequest,
    limits: RequestLimits,
    timeout_s: float | None,
    options: worker_pb2.ForwardOptions,
    **rest: Any,
) -> Append:
    """Fills the common fields. `options` have no output yet. `rest`: the fields of one kind of request."""
    cache_id, position, takes_mean = "", None, True
    if not isinstance(request, executor_pb2.ForwardRequest):
        cache_id, takes_mean = request.cache_id, False
        position = request.position if request.HasField("position") else None
        if position and not cache_id:
            raise InvalidArgument("BAD_POSITION", "position", "a new cache starts at position 0")
    output, samples = None, len(options.sample_seeds)
    if request.HasField("output"):
        output = options.output
        output.CopyFrom(request.output)
        validation.refuse_unknown(output, "output.")
    answer_bytes = validation.check_output(
        output, limits, options.rows, options.scored, samples, takes_mean=takes_mean
    )
    rows = max(options.rows, options.scored)
    if takes_mean and output is not None and output.hidden.mean:
        rows = len(rest["token_ids"])
    priority = PRIORITIES.get(request.priority)
    if priority is None:
        raise InvalidArgument("BAD_PRIORITY", "priority", f"priority {request.priority} is not defined")
    worker_bytes = 0
    if output is not None or samples or options.verify_rows:
        worker_bytes = _worker_bytes(options, limits)
    packed = options.SerializeToString(deterministic=True)
    has_rows = output is not None and (bool(output.logits) or output.HasField("hidden"))
    return Append(
        cache_id=cache_id,
        position=position,
        options=packed,
        accept=options.accept,
        parents=tuple(options.parents),
        rows=rows + samples // _SAMPLES_PER_ROW,
        timeout_s=timeout_s,
        priority=priority,
        answer_bytes=answer_bytes,
        worker_bytes=worker_bytes,
        keeps_answer=not (has_rows or answer_bytes + len(packed) > MAX_KEPT_BYTES),
        weights=limits.weights,
        **rest,
    )


def _worker_bytes(options: worker_pb2.ForwardOptions, limits: RequestLimits) -> int:
    """Memory that a worker needs beyond the request: expanded masks, and the row of logits for samples."""
    size_bytes = _LOGIT_BYTES * limits.vocab_size if options.sample_seeds else 0
    masks = [row.mask for row in options.verify_rows if row.HasField("mask")]
    if options.output.HasField("mask"):
        masks.append(options.output.mask)
    return size_bytes + bytes_in_worker(masks, limits)


def _packed(token_ids: Sequence[int]) -> array[int]:
    """Packs tokens at 4 bytes each. In a list of ints a token takes 36."""
    return array("I", token_ids)


# Answers. Each is written from the request and its result.


def held_bytes(requests: Sequence[Request | QuireError]) -> int:
    """An upper estimate of the memory for the answers, and in workers beyond the requests."""
    answer_bytes = worker_bytes = 0
    for one in requests:
        if isinstance(one, Append):
            answer_bytes += one.answer_bytes
            worker_bytes += one.worker_bytes
        elif isinstance(one, Fork):
            answer_bytes += validation.forked_bytes(one.count)
        elif isinstance(one, QuireError):
            answer_bytes += validation.ANSWER_BYTES
    # `in_memory`, inlined: this runs for each token.
    return (answer_bytes if answer_bytes <= SMALL_BYTES else COPIES * answer_bytes) + worker_bytes


def write_decode(_request: Append, result: Appended, into: _OneOutput) -> None:
    """Writes a decode's answer. A chunk of a UnifiedForward has no output unless it is the last one."""
    done = result.answer
    assert result.cache_id
    write_handle(result, into.kv_cache)
    if isinstance(done, DecodeDone):
        # As for other answers below, but from a plain tuple instead of a message.
        timing = into.timing
        _, into.output.token_id, timing.queue_ns, timing.compute_ns, timing.batch_items = done
        timing.steps = 1
    else:
        assert isinstance(done, worker_pb2.ForwardDone)
        if done.outputs:
            into.output.CopyFrom(done.outputs[0])
        into.timing.CopyFrom(done.timing)
    if result.replayed_tokens:
        into.replayed_tokens = result.replayed_tokens


def write_prefill(
    request: Append,
    result: Appended,
    into: executor_pb2.PrefillResponse | executor_pb2.UnifiedForwardItemResponse,
) -> None:
    """Writes a prefill's answer: as a decode's, with the number of reused tokens."""
    write_decode(request, result, into)
    if not isinstance(result.answer, DecodeDone):
        into.reused_tokens = done_of(result).reused_tokens


def write_scored_prefill(request: Append, result: Appended, into: executor_pb2.PrefillResponse) -> None:
    """Writes a prefill's answer, with the scores of its tokens and further samples."""
    write_prefill(request, result, into)
    into.samples.extend(done_of(result).samples)
    _write_scores(done_of(result), into)


def write_verify(_request: Append, result: Appended, into: executor_pb2.ForwardVerifyResponse) -> None:
    """Writes a verify's answer. The first token of a verify is not a draft."""
    done = done_of(result)
    assert result.cache_id
    write_handle(result, into.kv_cache)
    into.outputs.extend(done.outputs)
    into.accepted = result.kept - 1
    into.accepted_path.extend(result.path)
    _write_scores(done, into)
    into.timing.CopyFrom(done.timing)
    into.replayed_tokens = result.replayed_tokens


def write_score(_request: Append, result: Appended, into: executor_pb2.ForwardResponse) -> None:
    """Writes a scoring's answer."""
    done = done_of(result)
    into.outputs.extend(done.outputs)
    _write_scores(done, into)
    into.reused_tokens = done.reused_tokens
    into.timing.CopyFrom(done.timing)
    into.weights_version, into.adapter_version = result.weights, result.adapter


def write_handle(handle: Handle, into: types_pb2.KvCacheHandle) -> None:
    """Writes a handle. The state machine uses the monotonic clock; callers get wall-clock time."""
    into.cache_id = handle.cache_id
    into.seq_len = handle.seq_len
    into.epoch = handle.epoch
    into.worker_id = handle.worker_id
    # Setting a field to its default would take time, too.
    if handle.weights:
        into.weights_version = handle.weights
    if handle.adapter:
        into.adapter_version = handle.adapter
    if handle.expires_at_s < math.inf:
        expire_s = time.time() + handle.expires_at_s - time.monotonic()
        expire_s = min(expire_s, _MAX_TIMESTAMP_S)
        seconds, expire_time = int(expire_s), into.expire_time
        expire_time.seconds = seconds
        expire_time.nanos = int((expire_s - seconds) * 1e9)


def done_of(result: Appended) -> worker_pb2.ForwardDone:
    """The worker's answer to an append."""
    done = result.answer
    if isinstance(done, DecodeDone):
        return decode_answer(done)
    assert isinstance(done, worker_pb2.ForwardDone)
    return done


def _write_scores(done: worker_pb2.ForwardDone, into: _Scored) -> None:
    into.token_logprobs.extend(done.token_logprobs)
    into.token_is_argmax.extend(done.token_is_argmax)
