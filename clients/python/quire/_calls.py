"""Shared by the blocking and the asyncio client: makes requests, and applies responses to caches."""

from __future__ import annotations

import math
import uuid
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias, TypedDict, TypeVar

from google.protobuf import duration_pb2
from google.protobuf.message import Message
from quire._chunks import Chunk
from quire._enums import Priority, number_of
from quire.v1 import executor_pb2, runner_pb2, types_pb2

# Requests that create caches, with a request id.
_CREATING_REQUESTS = (
    executor_pb2.PrefillRequest,
    executor_pb2.BatchPrefillRequest,
    executor_pb2.ForkCacheRequest,
    executor_pb2.ForkCachesRequest,
)
# Prefix of the request ids that this client generates. A caller does not know them and cannot retry with
# them.
_OWN_REQUEST_ID = "auto-"
# A year.
_LONGEST_TIMEOUT_S = 365 * 86_400

_State = TypeVar("_State", bound="CacheState")


class CallOptions(TypedDict, total=False):
    """Options that each call takes.

    Attributes:
        timeout_s: Of the call, including retries. None: the client's.
        priority: How it is scheduled under load, if it appends to caches or scores. None: the client's.
    """

    timeout_s: float | None
    priority: Priority | None


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of `verify`.

    Attributes:
        tokens: The accepted drafts, and the token that follows them: what a loop adds to its text. The last
            one is not in the cache yet: the next `verify` or `decode` appends it.
        accepted: How many drafts were accepted. These and the first token are kept in the cache.
        outputs: The prediction after each token that was sent. `outputs[path[-1]]` predicts the next token.
        path: The indexes of the kept tokens, including the first one: 0 to `accepted`, or a path of the tree.
        token_logprobs: With `score`: the log-probability of each draft under the model's own distribution.
        token_is_argmax: With `score`: for each draft, whether no other token was more likely.
    """

    tokens: Sequence[int]
    outputs: Sequence[types_pb2.StepOutput]
    accepted: int
    token_logprobs: Sequence[float] = ()
    token_is_argmax: Sequence[bool] = ()
    path: Sequence[int] = ()


def limit_s(own_s: float | None, default_s: float | None) -> float | None:
    """The timeout of a call: its own, or else the client's. None: there is none, as for more than a year.

    gRPC would take the end of infinite time for one that has passed. Raises ValueError if it is not a number.
    """
    timeout_s = default_s if own_s is None else own_s
    if timeout_s is not None and math.isnan(timeout_s):
        raise ValueError("timeout_s is a number of seconds, not nan")
    return None if timeout_s is None or timeout_s > _LONGEST_TIMEOUT_S else timeout_s


def duration(seconds: float | None) -> duration_pb2.Duration | None:
    """A protobuf duration, or None for None."""
    if seconds is None:
        return None
    length = duration_pb2.Duration()
    length.FromNanoseconds(round(seconds * 1e9))
    return length


def output_of(request: executor_pb2.PrefillRequest) -> types_pb2.OutputOptions | None:
    """A copy of the output that a request asks for. None: it asks for none."""
    if not request.HasField("output"):
        return None
    output = types_pb2.OutputOptions()
    output.CopyFrom(request.output)
    return output


def no_such_setting(rpc: str, unknown: Iterable[str]) -> TypeError:
    """The error for settings that a call does not have: without types they would have no effect."""
    return TypeError(f"{rpc} has no setting {', '.join(unknown)}")


def set_priority(request: Message, own: Priority | None, default: Priority | None) -> None:
    """Sets the priority of an append, or of each append of a batch: `own` or `default`. Mutates `request`."""
    if priority := number_of("priority", types_pb2.Priority, own or default):
        # One of several message types, which share only the name of the field.
        append: Any
        for append in getattr(request, "items", (request,)):
            if "priority" in append.DESCRIPTOR.fields_by_name:
                append.priority = priority


def new_request_id() -> str:
    """A new idempotency key."""
    return _OWN_REQUEST_ID + uuid.uuid4().hex


def own_request_ids(request: Message) -> list[str]:
    """The request ids of a call that makes caches which its caller can learn only from its response.

    A caller that chose the request id can retry to get the caches.
    """
    if not isinstance(request, _CREATING_REQUESTS):
        return []
    items: Sequence[Any] = getattr(request, "items", (request,))
    return [item.request_id for item in items if item.request_id.startswith(_OWN_REQUEST_ID)]


def new_caches(request: Message, response: Any) -> list[str]:
    """Ids of the caches that such a call made."""
    if isinstance(request, executor_pb2.BatchPrefillRequest):
        made = zip(request.items, response.results, strict=False)
        results = [result for item, result in made if item.request_id.startswith(_OWN_REQUEST_ID)]
        handles = [result.response.kv_cache for result in results if result.HasField("response")]
    elif isinstance(request, executor_pb2.PrefillRequest):
        handles = [response.kv_cache]
    elif isinstance(request, executor_pb2.ForkCachesRequest):
        handles = [handle for forked in response.results for handle in forked.kv_caches]
    else:
        handles = [*response.kv_caches]
    return [handle.cache_id for handle in handles]


def check_given(name: str, value: object) -> None:
    """Raises TypeError for None, which protobuf treats as an unset field."""
    if value is None:
        raise TypeError(f"{name} must be an integer, not None")


def tokens(token_ids: Sequence[int] | str) -> Sequence[int]:
    """Raises TypeError for a text, which is a sequence, too."""
    if isinstance(token_ids, str):
        raise TypeError("tokens are numbers, not a text: tokenizer().encode(text) of a client makes them")
    return token_ids


class CacheState:
    """The client's state of a cache, and the requests for it.

    Every append sends `seq_len` as `position`. If its response was lost, call it again: it is not applied
    twice. Not safe for concurrent use by several threads or tasks.
    """

    # Whether a warning is due if it is forgotten.
    _is_owned = False

    def __init__(
        self,
        prefilled: executor_pb2.PrefillResponse,
        default_output: types_pb2.OutputOptions | None = None,
        *,
        is_owned: bool = True,
    ) -> None:
        """`prefilled` is the response that created the cache. `is_owned`: this program is to release it."""
        self._is_owned = is_owned
        # That of appends which are given none: at first the one of the prefill, and of a copy that of its
        # origin. None: only the most likely next token.
        self.default_output = default_output
        self.cache_id = prefilled.kv_cache.cache_id
        # Tokens in the cache.
        self.seq_len = prefilled.kv_cache.seq_len
        # The version of the weights with which the last append was computed; see LoadWeights.
        self.weights_version = prefilled.kv_cache.weights_version
        # The output of the last append.
        self.output = prefilled.output
        # Tokens of the prompt whose KV was cached.
        self.reused_tokens = prefilled.reused_tokens
        # Tokens that the last append had to recompute, because their KV was lost or evicted.
        self.replayed_tokens = prefilled.replayed_tokens
        # For the tokens that the last append scored, from its index max(score_from, 1) on: log-probabilities
        # under the model's own distribution, and whether no other token was more likely. Otherwise empty.
        self.token_logprobs: Sequence[float] = prefilled.token_logprobs
        self.token_is_argmax: Sequence[bool] = prefilled.token_is_argmax
        # The extra tokens that the last prefill drew, one for each of its `sample_seeds`.
        self.samples: Sequence[types_pb2.SampledToken] = prefilled.samples

    def __del__(self) -> None:
        if self._is_owned:
            warnings.warn(
                f"{self!r} was not released: the server keeps it until its lease expires; "
                "release it, use it in a `with`, or `detach` it",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )

    def __reduce__(self) -> NoReturn:
        raise TypeError("another process gets a cache by its id: detach() it, and call cache(id) of a client")

    def detach(self) -> str:
        """Leaves the cache to others or to its lease. Returns the id, for a client's `cache`."""
        self._is_owned = False
        return self.cache_id

    def prompt(self, token_ids: int | Sequence[int]) -> runner_pb2.CachePrompt:
        """The prompt of an item of `execute` that appends a token, or several, and generates after these.

        For several caches in one call. This object does not change by it: call `refresh`.
        """
        appended = [token_ids] if isinstance(token_ids, int) else tokens(token_ids)
        return runner_pb2.CachePrompt(cache_id=self.cache_id, token_ids=appended, position=self.seq_len)

    def _generated(self, base: int, chunk: Chunk) -> None:
        """A chunk has come of what is generated from a length of `base` on."""
        self.seq_len = base + chunk.position + len(chunk.token_ids) - 1
        self.token_logprobs = self.token_is_argmax = self.samples = ()
        if chunk.kv_cache is not None:
            self.weights_version = chunk.kv_cache.weights_version
        if chunk.token_ids:
            self.output = types_pb2.StepOutput(token_id=chunk.token_ids[-1])
        if chunk.token_ids and chunk.logprobs:
            last = chunk.logprobs[-1]
            self.output.logprob = last.logprob
            self.output.top.CopyFrom(last.top)
        if chunk.token_ids and chunk.hidden:
            self.output.hidden.extend(chunk.hidden[-1].states)
        if chunk.token_ids and chunk.experts:
            self.output.experts = chunk.experts[-1]

    def _wanted(self, output: types_pb2.OutputOptions | None) -> types_pb2.OutputOptions | None:
        return self.default_output if output is None else output

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.cache_id} of {self.seq_len} tokens>"

    def _appended(
        self, response: executor_pb2.PrefillResponse | executor_pb2.DecodeResponse
    ) -> types_pb2.StepOutput:
        self.seq_len, self.weights_version = response.kv_cache.seq_len, response.kv_cache.weights_version
        self.replayed_tokens = response.replayed_tokens
        self.output = response.output
        if isinstance(response, executor_pb2.PrefillResponse):
            self.token_logprobs, self.token_is_argmax = response.token_logprobs, response.token_is_argmax
            self.samples = response.samples
        else:
            self.token_logprobs = self.token_is_argmax = self.samples = ()
        return response.output

    def _verified(self, sent: Sequence[int], response: executor_pb2.ForwardVerifyResponse) -> Verified:
        self.seq_len, self.weights_version = response.kv_cache.seq_len, response.kv_cache.weights_version
        self.replayed_tokens = response.replayed_tokens
        path = tuple(response.accepted_path) or tuple(range(response.accepted + 1))
        self.output = response.outputs[path[-1]]
        self.token_logprobs = self.token_is_argmax = self.samples = ()
        return Verified(
            (*(sent[index] for index in path[1:]), self.output.token_id),
            tuple(response.outputs),
            response.accepted,
            tuple(response.token_logprobs),
            tuple(response.token_is_argmax),
            path,
        )

    def _forked(
        self, response: executor_pb2.ForkCacheResponse | executor_pb2.ForkedCaches
    ) -> list[executor_pb2.PrefillResponse]:
        """For each copy, a response like that of a prefill."""
        return [
            executor_pb2.PrefillResponse(kv_cache=handle, output=self.output, reused_tokens=handle.seq_len)
            for handle in response.kv_caches
        ]


# Caches, each with the number of copies.
Forks: TypeAlias = Sequence[tuple[_State, int]]


def decode_request(
    cache: CacheState, token_id: int, output: types_pb2.OutputOptions | None
) -> executor_pb2.DecodeRequest:
    """A request that appends a token to a cache, fenced by its length."""
    check_given("token_id", token_id)
    return executor_pb2.DecodeRequest(
        cache_id=cache.cache_id,
        token_id=token_id,
        position=cache.seq_len,
        output=cache._wanted(output),  # noqa: SLF001 - a class of this module
    )


# Caches with the token to append, and optionally with their own output options.
Decodes: TypeAlias = Sequence[tuple[_State, int] | tuple[_State, int, types_pb2.OutputOptions | None]]
