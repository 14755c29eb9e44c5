"""What the blocking and the asyncio client share: what requests hold, and what answers mean for caches."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from google.protobuf import duration_pb2
from google.protobuf.message import Message
from quire.errors import QuireError, from_status
from quire.v1 import executor_pb2, types_pb2

# Of one item, and with a request id.
_MAKING = (executor_pb2.PrefillRequest, executor_pb2.ForkCacheRequest, executor_pb2.ForkCachesRequest)
# Begins the request ids that were made here, so that no caller knows them.
_OWN_REQUEST_ID = "auto-"

_State = TypeVar("_State", bound="CacheState")


@dataclass(frozen=True, slots=True)
class Verified:
    """What `verify` found: `accepted` drafts are kept, `outputs[path[-1]]` says what follows them.

    `path` has the indexes of the tokens that were kept, the first one's included: of a tree one of its paths,
    else 0 to `accepted`.

    With `score`, `token_logprobs` says of each draft how likely it was under the model's own distribution,
    and `token_is_argmax` whether no other token was more likely.
    """

    outputs: Sequence[types_pb2.StepOutput]
    accepted: int
    token_logprobs: Sequence[float] = ()
    token_is_argmax: Sequence[bool] = ()
    path: Sequence[int] = ()


def duration(seconds: float | None) -> duration_pb2.Duration | None:
    """A protobuf duration, or None for None."""
    if seconds is None:
        return None
    length = duration_pb2.Duration()
    length.FromNanoseconds(round(seconds * 1e9))
    return length


def prioritise(request: Message, priority: types_pb2.Priority) -> None:
    """Writes a priority into an append, or into each of a batch. Other requests have none."""
    if priority:
        # Of one of several types, which share the field's name only.
        append: Any
        for append in getattr(request, "items", (request,)):
            if "priority" in append.DESCRIPTOR.fields_by_name:
                append.priority = priority


def new_request_id() -> str:
    """One that no caller knows."""
    return _OWN_REQUEST_ID + uuid.uuid4().hex


def new_caches(request: Message, result: executor_pb2.SessionResult) -> list[str]:
    """Ids of the caches that a call has made and that only its answer tells of."""
    if isinstance(request, executor_pb2.BatchPrefillRequest):
        return [
            made.response.kv_cache.cache_id
            for item, made in zip(request.items, result.batch_prefill.results, strict=False)
            if made.HasField("response") and item.request_id.startswith(_OWN_REQUEST_ID)
        ]
    if not isinstance(request, _MAKING):
        return []
    if not request.request_id.startswith(_OWN_REQUEST_ID):
        # With a request id of its own choice, a caller can ask for the caches again.
        return []
    handles = [result.prefill.kv_cache] if result.HasField("prefill") else [*result.fork_cache.kv_caches]
    handles += [handle for forked in result.fork_caches.results for handle in forked.kv_caches]
    return [handle.cache_id for handle in handles]


def check_given(name: str, value: object) -> None:
    """Raises TypeError for None, which protobuf takes for a field that is left out."""
    if value is None:
        raise TypeError(f"{name} must be an integer, not None")


class CacheState:
    """A cache as its client knows it, and the requests that fit it.

    `seq_len` goes out as `position` with every append. So one whose answer was lost may simply be called
    again: it is answered, never applied twice. Not safe for use by several threads or tasks at once.
    """

    def __init__(self, prefilled: executor_pb2.PrefillResponse) -> None:
        """`prefilled` is the answer that made the cache."""
        self.cache_id = prefilled.kv_cache.cache_id
        # Tokens in the cache.
        self.seq_len = prefilled.kv_cache.seq_len
        # What the last append said.
        self.output = prefilled.output
        # Tokens of the prompt that need not be computed.
        self.reused_tokens = prefilled.reused_tokens
        # Tokens that had to be computed again for the last append, since their KV was gone.
        self.replayed_tokens = prefilled.replayed_tokens
        # Of the tokens that the last append scored, from its index max(score_from, 1) on: log-probabilities
        # under the model's own distribution, and whether no other token was more likely. Else empty.
        self.token_logprobs: Sequence[float] = prefilled.token_logprobs
        self.token_is_argmax: Sequence[bool] = prefilled.token_is_argmax
        # What else the prefill has drawn, for each of its `sample_seeds`; copies are for these.
        self.samples: Sequence[types_pb2.SampledToken] = prefilled.samples

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.cache_id} of {self.seq_len} tokens>"

    def _extend_request(
        self,
        token_ids: Sequence[int],
        output: types_pb2.OutputOptions | None,
        score_from: int | None,
        sample_seeds: Sequence[int],
    ) -> executor_pb2.PrefillRequest:
        return executor_pb2.PrefillRequest(
            cache_id=self.cache_id,
            token_ids=token_ids,
            position=self.seq_len,
            output=output,
            score_from=score_from,
            sample_seeds=sample_seeds,
        )

    def _verify_request(
        self,
        token_ids: Sequence[int],
        output: types_pb2.OutputOptions | None,
        accept: types_pb2.VerifyAccept,
        score: bool,
        rows: Sequence[types_pb2.VerifyRow],
        parents: Sequence[int],
    ) -> executor_pb2.ForwardVerifyRequest:
        return executor_pb2.ForwardVerifyRequest(
            cache_id=self.cache_id,
            token_ids=token_ids,
            position=self.seq_len,
            output=output,
            accept=accept,
            score=score,
            rows=rows,
            parents=parents,
        )

    def _truncate_request(self, new_len: int) -> executor_pb2.TruncateKVRequest:
        check_given("new_len", new_len)
        # To the length that is known: what was given up, and may have been applied, is to go.
        position = None if new_len == self.seq_len else self.seq_len
        return executor_pb2.TruncateKVRequest(cache_id=self.cache_id, new_len=new_len, position=position)

    def _fork_request(
        self, count: int, release: Iterable[CacheState], request_id: str
    ) -> executor_pb2.ForkCacheRequest:
        """Always with a request id, so that a retry finds the copies it made before."""
        return executor_pb2.ForkCacheRequest(
            cache_id=self.cache_id,
            count=count,
            release=[cache.cache_id for cache in release],
            request_id=request_id or new_request_id(),
        )

    def _appended(
        self, response: executor_pb2.PrefillResponse | executor_pb2.DecodeResponse
    ) -> types_pb2.StepOutput:
        self.seq_len = response.kv_cache.seq_len
        self.replayed_tokens = response.replayed_tokens
        self.output = response.output
        if isinstance(response, executor_pb2.PrefillResponse):
            self.token_logprobs, self.token_is_argmax = response.token_logprobs, response.token_is_argmax
            self.samples = response.samples
        else:
            self.token_logprobs = self.token_is_argmax = self.samples = ()
        return response.output

    def _verified(self, response: executor_pb2.ForwardVerifyResponse) -> Verified:
        self.seq_len = response.kv_cache.seq_len
        self.replayed_tokens = response.replayed_tokens
        path = tuple(response.accepted_path) or tuple(range(response.accepted + 1))
        self.output = response.outputs[path[-1]]
        self.token_logprobs = self.token_is_argmax = self.samples = ()
        return Verified(
            tuple(response.outputs),
            response.accepted,
            tuple(response.token_logprobs),
            tuple(response.token_is_argmax),
            path,
        )

    def _forked(
        self, response: executor_pb2.ForkCacheResponse | executor_pb2.ForkedCaches
    ) -> list[executor_pb2.PrefillResponse]:
        """For each copy, the answer that a prefill would have given."""
        return [
            executor_pb2.PrefillResponse(kv_cache=handle, output=self.output, reused_tokens=handle.seq_len)
            for handle in response.kv_caches
        ]


# Caches, each with how many copies of it are made.
Forks: TypeAlias = Sequence[tuple[_State, int]]


def fork_caches_request(
    forks: Forks[_State], release: Iterable[CacheState], request_id: str
) -> executor_pb2.ForkCachesRequest:
    """Fenced by lengths, and with a request id, so that a retry finds the copies it made before."""
    return executor_pb2.ForkCachesRequest(
        forks=[
            executor_pb2.ForkSource(cache_id=cache.cache_id, count=count, position=cache.seq_len)
            for cache, count in forks
        ],
        release=[cache.cache_id for cache in release],
        request_id=request_id or new_request_id(),
    )


def forked_caches(
    forks: Forks[_State],
    response: executor_pb2.ForkCachesResponse,
    make: Callable[[executor_pb2.PrefillResponse], _State],
) -> list[list[_State]]:
    """The copies of each cache."""
    return [
        [make(copy) for copy in cache._forked(forked)]  # noqa: SLF001 - the module's own class
        for (cache, _), forked in zip(forks, response.results, strict=True)
    ]


def decode_request(
    cache: CacheState, token_id: int, output: types_pb2.OutputOptions | None
) -> executor_pb2.DecodeRequest:
    """One more token of a cache, fenced by its length."""
    check_given("token_id", token_id)
    return executor_pb2.DecodeRequest(
        cache_id=cache.cache_id, token_id=token_id, position=cache.seq_len, output=output
    )


# Caches with the token that each of them appends, and perhaps an output of its own.
Decodes: TypeAlias = Sequence[tuple[_State, int] | tuple[_State, int, types_pb2.OutputOptions | None]]


def batch_decode_request(
    decodes: Decodes[_State], output: types_pb2.OutputOptions | None
) -> executor_pb2.BatchDecodeRequest:
    """One token for each of several caches; `output` is for those that have none of their own."""
    return executor_pb2.BatchDecodeRequest(
        items=[
            decode_request(cache, token_id, own[0] if own and own[0] is not None else output)
            for cache, token_id, *own in decodes
        ]
    )


def batch_decoded(
    decodes: Decodes[_State], response: executor_pb2.BatchDecodeResponse
) -> list[types_pb2.StepOutput | QuireError]:
    """Updates the caches that grew. Failed items become exceptions that are returned, not raised."""
    results: list[types_pb2.StepOutput | QuireError] = []
    for (cache, *_), result in zip(decodes, response.results, strict=True):
        if result.HasField("error"):
            results.append(from_status(result.error))
        else:
            results.append(cache._appended(result.response))  # noqa: SLF001 - the module's own class
    return results
