"""The blocking client. Generated from aio.py by clients/python/generate_blocking.py: change that file."""

from __future__ import annotations

import functools
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import grpc
from google.protobuf.message import Message
from quire import _batches, _calls, _methods
from quire._attempts import Attempts
from quire._batches import PrefillItem, Prompts, Scored, ScoreItem, Texts
from quire._calls import CacheState, Decodes, Forks, Verified
from quire._connection import (
    DEFAULT_MAX_REQUEST_BYTES,
    DEFAULT_MAX_RESPONSE_BYTES,
    DEFAULT_TARGET,
    Tls,
    connection,
)
from quire._executions import Progress
from quire._items import Prompt, items_of
from quire._methods import Method
from quire.errors import QuireError, from_rpc_error
from quire.executions import Execution
from quire.session import DEFAULT_CLOSE_TIMEOUT_S, DEFAULT_MAX_IN_FLIGHT, SessionStream
from quire.text import ModelTokenizer
from quire.v1 import executor_pb2, executor_pb2_grpc, runner_pb2, runner_pb2_grpc, types_pb2

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)


class _Call(Protocol):
    """Makes one call with the client's time limit. Raises QuireError."""

    def __call__(self, method: Method[_Request, _Response], request: _Request, /) -> _Response: ...


class _Caller(ABC):
    """What can be done without a cache, whichever way the calls go."""

    @abstractmethod
    def _call(self, method: Method[_Request, _Response], request: _Request) -> _Response:
        """As _Call."""

    def prefill(
        self,
        token_ids: Sequence[int],
        *,
        output: types_pb2.OutputOptions | None = None,
        lease_s: float | None = None,
        adapter_id: str = "",
        request_id: str = "",
        cache_salt: str = "",
        score_from: int | None = None,
        sample_seeds: Sequence[int] = (),
    ) -> Cache:
        """Makes a cache of `token_ids`; its `output` says what follows them. The caller releases it.

        `score_from` scores the tokens from this index on, into its `token_logprobs` and `token_is_argmax`.
        For each of `sample_seeds` one more token is drawn behind them, into its `samples`.
        With a `cache_salt` prefixes are shared only with caches of the same one.

        With a block of its own: `with client.prefill(token_ids) as cache: ...`.
        """
        item = PrefillItem(
            token_ids, output, lease_s, adapter_id, request_id, cache_salt, score_from, sample_seeds
        )
        request = _batches.prefill_request(item)
        return Cache(self._call, self._call(_methods.PREFILL, request))

    def batch_prefill(
        self, prompts: Prompts, *, output: types_pb2.OutputOptions | None = None
    ) -> list[Cache | QuireError]:
        """Makes several caches in one call. The caller releases them.

        A prompt is its token ids, or a `PrefillItem` with settings of its own. What they begin with in common
        is computed once. Failed items are returned as exceptions, in place.
        """
        request = _batches.batch_prefill_request(prompts, output)
        response = self._call(_methods.BATCH_PREFILL, request)
        return _batches.batch_prefilled(response, lambda made: Cache(self._call, made))

    def cache(self, cache_id: str) -> Cache:
        """A cache that was made before, perhaps by another process, as long as it is now.

        Its lease begins anew. Its `output` is empty until the next append. Raises CacheNotFound.
        """
        request = executor_pb2.RenewCacheRequest(cache_id=cache_id)
        renewed = self._call(_methods.RENEW_CACHE, request)
        return Cache(self._call, executor_pb2.PrefillResponse(kv_cache=renewed.kv_cache))

    def batch_decode(
        self, decodes: Decodes[Cache], *, output: types_pb2.OutputOptions | None = None
    ) -> list[types_pb2.StepOutput | QuireError]:
        """Appends one token to each cache in one call. Failed items are returned as exceptions, in place.

        An item is (cache, token), or (cache, token, output) with an output of its own.
        """
        request = _calls.batch_decode_request(decodes, output)
        return _calls.batch_decoded(decodes, self._call(_methods.BATCH_DECODE, request))

    def fork_caches(
        self, forks: Forks[Cache], *, release: Iterable[Cache] = (), request_id: str = ""
    ) -> list[list[Cache]]:
        """Copies several caches and releases others, all of it or nothing: a step of a beam search.

        A fork is (cache, count); a cache may occur once. At least one is needed, if only with a count of 0:
        `[(caches[0], 0)], release=caches` releases all. `release` may name caches that are copied. Returns
        the copies of each, which the caller releases. Raises PositionMismatch if one has another length than
        is known here, and CacheNotFound if one is gone.
        """
        request = _calls.fork_caches_request(forks, release, request_id)
        response = self._call(_methods.FORK_CACHES, request)
        return _calls.forked_caches(forks, response, lambda copy: Cache(self._call, copy))

    def forward(
        self,
        token_ids: Sequence[int],
        *,
        output: types_pb2.OutputOptions | None = None,
        score_from: int = 0,
        cache_salt: str = "",
    ) -> executor_pb2.ForwardResponse:
        """As `score`: the answer as it is."""
        request = _batches.forward_request(ScoreItem(token_ids, score_from, output, cache_salt))
        return self._call(_methods.FORWARD, request)

    def score(
        self,
        token_ids: Sequence[int],
        *,
        score_from: int = 0,
        output: types_pb2.OutputOptions | None = None,
        cache_salt: str = "",
    ) -> Scored:
        """Says how likely each token was behind those before it, and what follows it. Keeps no cache.

        Tokens before index `score_from` are context: they are not scored, and not computed where their KV is
        there. Of the first token nothing is said.
        """
        return _batches.scored(
            self.forward(token_ids, output=output, score_from=score_from, cache_salt=cache_salt)
        )

    def score_batch(
        self, texts: Texts, *, output: types_pb2.OutputOptions | None = None
    ) -> list[Scored | QuireError]:
        """Scores several texts in one call. What they begin with in common is computed once.

        A text is its token ids, or a `ScoreItem` with settings of its own. Failed items are returned as
        exceptions, in place.
        """
        request = _batches.batch_forward_request(texts, output)
        return _batches.batch_scored(self._call(_methods.BATCH_FORWARD, request))

    def adopt(self, cache: Cache) -> None:
        """Lets the calls of `cache` go this way from now on. Nothing is sent."""
        cache._call = self._call  # noqa: SLF001 - a class of this module


class Client(_Caller):
    """A connection to a Quire server. Safe for use by several threads; close it, or use it in a `with`."""

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        timeout_s: float | None = None,
        tls: Tls | grpc.ChannelCredentials | bool = False,
        token: str = "",
        token_in_plain_view: bool = False,
        priority: types_pb2.Priority = types_pb2.PRIORITY_UNSPECIFIED,
        max_request_bytes: int = DEFAULT_MAX_REQUEST_BYTES,
        max_response_bytes: int = DEFAULT_MAX_RESPONSE_BYTES,
    ) -> None:
        """Connects when first used. Raises ValueError for settings that contradict themselves.

        Args:
            target: As gRPC has them, such as `host:port` and `unix:/path`.
            timeout_s: Bounds each call, what is sent again included; None: no bound.
            tls: True trusts public authorities; `Tls` says whom else, and who calls; gRPC's own credentials
                are for all else.
            token: Goes with every call. Without TLS only to this machine, as others could read it.
            token_in_plain_view: It may go to others, too, where the network encrypts by itself.
            priority: Who goes first, and is refused last, where there is too much to do.
            max_request_bytes: What is larger is not sent.
            max_response_bytes: What is larger is not taken.
        """
        link = connection(
            target,
            tls=tls,
            token=token,
            token_in_plain_view=token_in_plain_view,
            max_request_bytes=max_request_bytes,
            max_response_bytes=max_response_bytes,
        )
        if link.credentials is None:
            self._channel = grpc.insecure_channel(target, options=link.options)
        else:
            self._channel = grpc.secure_channel(target, link.credentials, options=link.options)
        self._is_closed = False
        self._timeout_s = timeout_s
        self._priority = priority
        self._max_request_bytes = max_request_bytes
        # Every call for tokens and caches. These raise grpc.RpcError, and none is made again by itself.
        self.stub = executor_pb2_grpc.ModelExecutorServiceStub(self._channel)
        # Every call for whole texts, likewise.
        self.runner_stub = runner_pb2_grpc.ModelRunnerServiceStub(self._channel)
        # What goes with every call; those of `stub` have to be given it.
        self.metadata = link.metadata

    def session(
        self,
        *,
        max_in_flight: int = DEFAULT_MAX_IN_FLIGHT,
        close_timeout_s: float = DEFAULT_CLOSE_TIMEOUT_S,
    ) -> Session:
        """Opens a stream for many calls at once: less work for each, and what is sent together runs together.

        Calls beyond `max_in_flight` wait. `close_timeout_s` bounds how long closing lets calls be answered.
        """
        stream = SessionStream(
            self.stub.Session,
            metadata=self.metadata,
            timeout_s=self._timeout_s,
            max_in_flight=max_in_flight,
            max_request_bytes=self._max_request_bytes,
        )
        return Session(stream, close_timeout_s, self._priority)

    def execute(
        self,
        items: Sequence[runner_pb2.ExecuteItem] | Sequence[Prompt] | Prompt,
        *,
        runtime: str = "",
        policy: runner_pb2.RoutingPolicy = runner_pb2.ROUTING_POLICY_UNSPECIFIED,
        request_id: str = "",
        keep_s: float | None = None,
        max_cost_usd: float | None = None,
        timeout_s: float | None = None,
        **settings: Any,
    ) -> Execution:
        """Generates whole texts on the server. Iterate over what is returned; leave its block to end it.

        Raises TypeError or ValueError for what can be no item.

        Args:
            items: Items, see `quire.item`; or a prompt or several, with `settings` of theirs.
                Several are the items "0", "1" and so on.
            runtime: Its name; empty: the server chooses, as `policy` says.
            policy: Such as `runner_pb2.ROUTING_POLICY_CHEAPEST`; unset: as the server is configured.
            request_id: With which it can be asked for again. Empty: one is made.
            keep_s: So long it survives the loss of its client or of the server, and goes on by itself here.
            max_cost_usd: What all items may cost together; None: no bound.
            timeout_s: Bounds the call; None: the client's.
            settings: Fields of ExecuteItem, such as max_tokens, sampling, stop, n; for prompts only.
        """
        progress = Progress(
            items_of(items, settings),
            runtime=runtime,
            request_id=request_id,
            policy=policy,
            keep_s=keep_s,
            max_cost_usd=max_cost_usd,
            priority=self._priority,
        )
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        begin = functools.partial(self.runner_stub.Execute, timeout=limit_s, metadata=self.metadata)
        return Execution(begin, progress, keep_s or 0.0, self.cancel_execution)

    def cancel_execution(self, request_id: str) -> bool:
        """Ends an execution that is kept (`keep_s`), whoever began it. Returns whether there was one.

        One of before the server was started again is not known until it is asked for; its time runs out.
        """
        request = runner_pb2.CancelExecutionRequest(request_id=request_id)
        answer = self._call(_methods.CANCEL_EXECUTION, request)
        return answer.cancelled

    def model_info(
        self, *, include_tokenizer: bool = False, include_chat_template: bool = False
    ) -> executor_pb2.GetModelInfoResponse:
        """Describes the model; with tokenizer.json and the chat template if asked for."""
        request = executor_pb2.GetModelInfoRequest(
            include_tokenizer=include_tokenizer, include_chat_template=include_chat_template
        )
        return self._call(_methods.GET_MODEL_INFO, request)

    def tokenizer(self) -> ModelTokenizer:
        """The model's tokenizer, which the server hands out. Needs the package `tokenizers` (extra `text`).

        Raises ImportError without it, and PreconditionFailed (NO_TOKENIZER) where the model has none.
        """
        return ModelTokenizer(self.model_info(include_tokenizer=True))

    def status(self) -> executor_pb2.GetStatusResponse:
        """How the gateway and its workers are."""
        return self._call(_methods.GET_STATUS, executor_pb2.GetStatusRequest())

    def close(self) -> None:
        """Ends the connection and every call on it. Caches stay until their leases run out."""
        self._is_closed = True
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, method: Method[_Request, _Response], request: _Request) -> _Response:
        _calls.prioritise(request, self._priority)
        call = getattr(self.runner_stub if method.is_runners else self.stub, method.rpc)
        attempts = Attempts(method, request, self._timeout_s)
        while True:
            try:
                response: _Response = call(request, timeout=attempts.left_s(), metadata=self.metadata)
                return response
            except grpc.RpcError as error:
                failed = from_rpc_error(error)
            pause_s = attempts.pause_s(failed)
            time.sleep(pause_s)
            if self._is_closed:
                raise failed


class Session(_Caller):
    """A stream of many calls. Safe for use by several threads; close it, or use it in a `with`.

    Caches that are made here make their calls here; `adopt` moves one to another session or back to the
    client. Calls raise what the client's raise, with three differences. None is retried. A stream that breaks
    raises SessionEnded from every call of it. And a call that was given up (its time limit passed)
    may still be applied: an append can be repeated, and `truncate` to `seq_len` undoes it.
    """

    def __init__(self, stream: SessionStream, close_timeout_s: float, priority: types_pb2.Priority) -> None:
        """Made by `Client.session`."""
        self._stream = stream
        self._close_timeout_s = close_timeout_s
        self._priority = priority
        # The stream's threads do not know the session, so that one that is forgotten ends.
        weakref.finalize(self, stream.cancel).atexit = False

    def close(self) -> None:
        """Takes no more calls, lets those in flight be answered for a bounded time, and ends the stream.

        Caches stay until their leases run out.
        """
        self._stream.close(self._close_timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, method: Method[_Request, _Response], request: _Request) -> _Response:
        _calls.prioritise(request, self._priority)
        return self._stream.call(method, request)


class Cache(CacheState):
    """A sequence that the server remembers. Release it, or use it in a `with`."""

    def __init__(self, call: _Call, prefilled: executor_pb2.PrefillResponse) -> None:
        """Made by `prefill` and `fork`."""
        super().__init__(prefilled)
        self._call = call

    def decode(self, token_id: int, *, output: types_pb2.OutputOptions | None = None) -> types_pb2.StepOutput:
        """Appends a token; says what follows it."""
        request = _calls.decode_request(self, token_id, output)
        response = self._call(_methods.DECODE, request)
        return self._appended(response)

    def extend(
        self,
        token_ids: Sequence[int],
        *,
        output: types_pb2.OutputOptions | None = None,
        score_from: int | None = None,
        sample_seeds: Sequence[int] = (),
    ) -> types_pb2.StepOutput:
        """Appends several tokens; says what follows the last one. The rest is as in `prefill`."""
        request = self._extend_request(token_ids, output, score_from, sample_seeds)
        response = self._call(_methods.PREFILL, request)
        return self._appended(response)

    def verify(
        self,
        token_ids: Sequence[int],
        *,
        output: types_pb2.OutputOptions | None = None,
        accept: types_pb2.VerifyAccept = types_pb2.VERIFY_ACCEPT_GREEDY,
        score: bool = False,
        rows: Sequence[types_pb2.VerifyRow] = (),
        parents: Sequence[int] = (),
    ) -> Verified:
        """Appends the last accepted token and drafts in one forward; keeps what `accept` accepts.

        `score` says how likely each draft was; `rows`, which `quire.verify_rows` writes, has one for each
        token: which tokens may follow it, and what the draft behind it was drawn from. With `parents` the
        tokens are a tree, of which one path is kept: of each but the first the index of the one it follows.
        """
        request = self._verify_request(token_ids, output, accept, score, rows, parents)
        return self._verified(self._call(_methods.FORWARD_VERIFY, request))

    def truncate(self, new_len: int) -> None:
        """Shortens the cache to `new_len` tokens. `output` is of no meaning until the next append.

        To `seq_len`: takes back an append that was given up and may have been applied. Shorter: raises
        PositionMismatch if the cache has another length than is known here.
        """
        request = self._truncate_request(new_len)
        response = self._call(_methods.TRUNCATE_KV, request)
        self.seq_len = response.kv_cache.seq_len

    def fork(self, count: int = 1, *, release: Iterable[Cache] = (), request_id: str = "") -> list[Cache]:
        """Makes copies that share pages with this cache. The caller releases them.

        `release` is forgotten behind that, in the same call; this cache itself may be among it.
        """
        request = self._fork_request(count, release, request_id)
        response = self._call(_methods.FORK_CACHE, request)
        return [Cache(self._call, copy) for copy in self._forked(response)]

    def renew(self, lease_s: float | None = None) -> None:
        """Lets the cache live for `lease_s` seconds from now without being used; None: its lease anew."""
        request = executor_pb2.RenewCacheRequest(cache_id=self.cache_id, lease=_calls.duration(lease_s))
        self._call(_methods.RENEW_CACHE, request)

    def release(self) -> bool:
        """Forgets the cache. False if it was not there any more."""
        request = executor_pb2.ReleaseCacheRequest(cache_id=self.cache_id)
        response = self._call(_methods.RELEASE_CACHE, request)
        return response.released

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.release()
        except QuireError:
            # What ended the block matters more; the lease takes care of the cache.
            if error is None:
                raise
