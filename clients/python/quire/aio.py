"""The asyncio client. The blocking one is generated from this file: see generate_blocking.py."""

from __future__ import annotations

import asyncio
import functools
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
from quire._items import Prompt, items_of
from quire._methods import Method
from quire.errors import QuireError, from_rpc_error
from quire.executions import AsyncExecution
from quire.session import (
    DEFAULT_CLOSE_TIMEOUT_S,
    DEFAULT_MAX_CALLS_PER_MESSAGE,
    DEFAULT_MAX_IN_FLIGHT,
    AsyncSessionStream,
)
from quire.text import ModelTokenizer
from quire.v1 import executor_pb2, executor_pb2_grpc, runner_pb2, runner_pb2_grpc, types_pb2

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)


class _Call(Protocol):
    """Makes one call with the client's timeout. Raises QuireError."""

    async def __call__(self, method: Method[_Request, _Response], request: _Request, /) -> _Response: ...


class _AsyncCaller(ABC):
    """The operations that do not need a cache, as unary calls or on a session."""

    @abstractmethod
    async def _call(self, method: Method[_Request, _Response], request: _Request) -> _Response:
        """See _Call."""

    async def prefill(
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
    ) -> AsyncCache:
        """Creates a cache of `token_ids`; its `output` predicts the next token. The caller releases it.

        `score_from` scores the tokens from this index on, into the cache's `token_logprobs` and
        `token_is_argmax`. For each of `sample_seeds` one extra token is drawn after them, into its `samples`.
        With a `cache_salt`, prefixes are shared only with caches of the same salt.

        To release the cache automatically: `async with await client.prefill(token_ids) as cache: ...`.
        """
        item = PrefillItem(
            token_ids, output, lease_s, adapter_id, request_id, cache_salt, score_from, sample_seeds
        )
        request = _batches.prefill_request(item)
        return AsyncCache(self._call, await self._call(_methods.PREFILL, request))

    async def batch_prefill(
        self, prompts: Prompts, *, output: types_pb2.OutputOptions | None = None
    ) -> list[AsyncCache | QuireError]:
        """Creates several caches in one call. The caller releases them.

        A prompt is its token ids, or a `PrefillItem` with its own settings. Common prefixes are computed
        once. The exceptions of failed items are returned in their places.
        """
        items = (prompt if isinstance(prompt, PrefillItem) else PrefillItem(prompt) for prompt in prompts)
        requests = [_batches.prefill_request(item, output) for item in items]
        request = executor_pb2.BatchPrefillRequest(items=requests)
        response = await self._call(_methods.BATCH_PREFILL, request)
        made = map(_batches.result_of, response.results)
        return [one if isinstance(one, QuireError) else AsyncCache(self._call, one) for one in made]

    async def cache(self, cache_id: str) -> AsyncCache:
        """An existing cache, which another process may have created, with its current length.

        Its lease restarts. Its `output` is empty until the next append. Raises CacheNotFound.
        """
        request = executor_pb2.RenewCacheRequest(cache_id=cache_id)
        renewed = await self._call(_methods.RENEW_CACHE, request)
        return AsyncCache(self._call, executor_pb2.PrefillResponse(kv_cache=renewed.kv_cache))

    async def batch_decode(
        self, decodes: Decodes[AsyncCache], *, output: types_pb2.OutputOptions | None = None
    ) -> list[types_pb2.StepOutput | QuireError]:
        """Appends one token to each cache in one call.

        An item is (cache, token), or (cache, token, output) with its own output options. The exceptions of
        failed items are returned in their places.
        """
        requests = [
            _calls.decode_request(cache, token_id, own[0] if own and own[0] is not None else output)
            for cache, token_id, *own in decodes
        ]
        request = executor_pb2.BatchDecodeRequest(items=requests)
        response = await self._call(_methods.BATCH_DECODE, request)
        results = zip(decodes, map(_batches.result_of, response.results), strict=True)
        return [
            one if isinstance(one, QuireError) else cache._appended(one)  # noqa: SLF001 - a class of this module
            for (cache, *_), one in results
        ]

    async def fork_caches(
        self, forks: Forks[AsyncCache], *, release: Iterable[AsyncCache] = (), request_id: str = ""
    ) -> list[list[AsyncCache]]:
        """Copies several caches and releases others atomically, as a step of a beam search does.

        A fork is (cache, count); each cache may occur at most once. At least one fork is required, but its
        count may be 0: `[(caches[0], 0)], release=caches` releases all. `release` may contain caches that are
        copied. Returns the copies of each cache, which the caller releases. Raises PositionMismatch if a
        cache has another length than its `seq_len`, and CacheNotFound if a cache does not exist.
        """
        request = executor_pb2.ForkCachesRequest(
            forks=[
                executor_pb2.ForkSource(cache_id=cache.cache_id, count=count, position=cache.seq_len)
                for cache, count in forks
            ],
            release=[cache.cache_id for cache in release],
            # So that a retry returns the same copies.
            request_id=request_id or _calls.new_request_id(),
        )
        response = await self._call(_methods.FORK_CACHES, request)
        return [
            [AsyncCache(self._call, copy) for copy in cache._forked(forked)]  # noqa: SLF001 - of this module
            for (cache, _), forked in zip(forks, response.results, strict=True)
        ]

    async def forward(
        self,
        token_ids: Sequence[int],
        *,
        output: types_pb2.OutputOptions | None = None,
        score_from: int = 0,
        cache_salt: str = "",
    ) -> executor_pb2.ForwardResponse:
        """Like `score`, but returns the response message."""
        request = _batches.forward_request(ScoreItem(token_ids, score_from, output, cache_salt))
        return await self._call(_methods.FORWARD, request)

    async def score(
        self,
        token_ids: Sequence[int],
        *,
        score_from: int = 0,
        output: types_pb2.OutputOptions | None = None,
        cache_salt: str = "",
    ) -> Scored:
        """The log-probability of each token given the tokens before it, and the predictions. Keeps no cache.

        Tokens before index `score_from` are context: they are not scored, and not computed if their KV is
        cached. The first token is never scored.
        """
        return _batches.scored(
            await self.forward(token_ids, output=output, score_from=score_from, cache_salt=cache_salt)
        )

    async def score_batch(
        self, texts: Texts, *, output: types_pb2.OutputOptions | None = None
    ) -> list[Scored | QuireError]:
        """Scores several texts in one call. Common prefixes are computed once.

        A text is its token ids, or a `ScoreItem` with its own settings. The exceptions of failed items are
        returned in their places.
        """
        items = (text if isinstance(text, ScoreItem) else ScoreItem(text) for text in texts)
        requests = [_batches.forward_request(item, output) for item in items]
        request = executor_pb2.BatchForwardRequest(items=requests)
        response = await self._call(_methods.BATCH_FORWARD, request)
        found = map(_batches.result_of, response.results)
        return [one if isinstance(one, QuireError) else _batches.scored(one) for one in found]

    def adopt(self, cache: AsyncCache) -> None:
        """Makes `cache` use this client or session for its calls from now on. Sends nothing."""
        cache._call = self._call  # noqa: SLF001 - a class of this module


class AsyncClient(_AsyncCaller):
    """A connection to a Quire server, for one event loop. Close it, or use `async with`."""

    def __init__(  # noqa: PLR0913 - the settings of a connection
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
        retries: bool = True,
    ) -> None:
        """Connects when first used. Raises ValueError for invalid settings.

        Args:
            target: A gRPC target, such as `host:port` or `unix:/path`.
            timeout_s: The timeout of each call, including retries. None: no timeout.
            tls: True: TLS with the public certificate authorities. `Tls`: with other authorities or a client
                certificate. Any other gRPC channel credentials are also accepted.
            token: Sent with every call. Without TLS it is sent only to this machine.
            token_in_plain_view: Send the token without TLS also to other machines, for networks that encrypt.
            priority: The scheduling priority of all calls: high ones run first and are refused last.
            max_request_bytes: Larger requests are not sent.
            max_response_bytes: Larger responses are refused.
            retries: False: failed calls are never retried, even if that is safe.
        """
        link = connection(
            target,
            tls=tls,
            token=token,
            token_in_plain_view=token_in_plain_view,
            max_request_bytes=max_request_bytes,
            max_response_bytes=max_response_bytes,
            retries=retries,
        )
        if link.credentials is None:
            self._channel = grpc.aio.insecure_channel(target, options=link.options)
        else:
            self._channel = grpc.aio.secure_channel(target, link.credentials, options=link.options)
        self._is_closed = False
        self._timeout_s = timeout_s
        self._priority = priority
        self._max_request_bytes = max_request_bytes
        self._retries = retries
        # The generated stub of ModelExecutorService. Its calls raise grpc.RpcError and are not retried.
        self.stub = executor_pb2_grpc.ModelExecutorServiceStub(self._channel)
        # The generated stub of ModelRunnerService, likewise.
        self.runner_stub = runner_pb2_grpc.ModelRunnerServiceStub(self._channel)
        # The metadata of every call. Pass it to the calls of the stubs.
        self.metadata = link.metadata

    def session(
        self,
        *,
        max_in_flight: int = DEFAULT_MAX_IN_FLIGHT,
        max_calls_per_message: int = DEFAULT_MAX_CALLS_PER_MESSAGE,
        close_timeout_s: float = DEFAULT_CLOSE_TIMEOUT_S,
    ) -> AsyncSession:
        """Opens a stream for many concurrent calls.

        Each call costs less than a unary call, and calls that are sent together are batched. Calls beyond
        `max_in_flight` wait. A message has at most `max_calls_per_message` calls, for servers with a lower
        limit: see GetCapabilities. Closing waits up to `close_timeout_s` for pending calls.
        """
        stream = AsyncSessionStream(
            self.stub.Session,
            metadata=self.metadata,
            timeout_s=self._timeout_s,
            max_in_flight=max_in_flight,
            max_calls_per_message=max_calls_per_message,
            max_request_bytes=self._max_request_bytes,
        )
        return AsyncSession(stream, close_timeout_s, self._priority)

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
    ) -> AsyncExecution:
        """Generates whole texts on the server. Iterate over the result.

        Leaving its `async with` block ends it, unless it is kept.
        Raises TypeError or ValueError for invalid items.

        Args:
            items: Items, see `quire.item`; or one or several prompts, with their `settings`. The ids of
                several prompts are "0", "1" and so on.
            runtime: The name of a runtime. Empty: the server chooses one by `policy`.
            policy: Such as `runner_pb2.ROUTING_POLICY_CHEAPEST`. Unset: the server's configured policy.
            request_id: The key to resume the execution with. Empty: one is generated.
            keep_s: How long the server keeps the execution without a client. The stream then resumes
                automatically after a lost connection or a server restart.
            max_cost_usd: The maximum cost of all items together. None: no limit.
            timeout_s: The timeout of the call. None: the client's.
            settings: Fields of ExecuteItem, such as max_tokens, sampling, stop, n. For prompts only.
        """
        request = runner_pb2.ExecuteRequest(
            items=items_of(items, settings),
            runtime=runtime,
            request_id=request_id,
            policy=policy,
            keep=_calls.duration(keep_s),
            max_cost_usd=max_cost_usd,
            priority=self._priority,
        )
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        start_call = functools.partial(self.runner_stub.Execute, timeout=limit_s, metadata=self.metadata)
        return AsyncExecution(start_call, request, self.cancel_execution)

    async def cancel_execution(self, request_id: str) -> bool:
        """Ends a kept execution (`keep_s`), also of another client. Returns whether there was one.

        After a server restart an execution is unknown until a client resumes it; without that it expires.
        """
        request = runner_pb2.CancelExecutionRequest(request_id=request_id)
        answer = await self._call(_methods.CANCEL_EXECUTION, request)
        return answer.cancelled

    async def model_info(
        self, *, include_tokenizer: bool = False, include_chat_template: bool = False
    ) -> executor_pb2.GetModelInfoResponse:
        """The description of the model; with tokenizer.json and the chat template if requested."""
        request = executor_pb2.GetModelInfoRequest(
            include_tokenizer=include_tokenizer, include_chat_template=include_chat_template
        )
        return await self._call(_methods.GET_MODEL_INFO, request)

    async def tokenizer(self) -> ModelTokenizer:
        """The model's tokenizer, from the server. Needs the package `tokenizers` (extra `text`).

        Raises ImportError without it, and PreconditionFailed (NO_TOKENIZER) if the model has none.
        """
        return ModelTokenizer(await self.model_info(include_tokenizer=True))

    async def status(self) -> executor_pb2.GetStatusResponse:
        """The state of the gateway and its workers."""
        return await self._call(_methods.GET_STATUS, executor_pb2.GetStatusRequest())

    async def close(self) -> None:
        """Closes the connection and cancels its calls. Caches are kept until their leases expire."""
        self._is_closed = True
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _call(self, method: Method[_Request, _Response], request: _Request) -> _Response:
        _calls.set_priority(request, self._priority)
        call = getattr(self.runner_stub if method.is_runner_call else self.stub, method.rpc)
        attempts = Attempts(method, request, self._timeout_s, retries=self._retries)
        while True:
            try:
                response: _Response = await call(request, timeout=attempts.left_s(), metadata=self.metadata)
                return response
            except grpc.aio.AioRpcError as error:
                failed = from_rpc_error(error)
            backoff_s = attempts.backoff_s(failed)
            await asyncio.sleep(backoff_s)
            if self._is_closed:
                raise failed


class AsyncSession(_AsyncCaller):
    """A stream of many calls, for any number of tasks of one event loop. Close it, or use `async with`.

    A cache that is created on a session uses it for its calls; `adopt` moves it to another session or back to
    the client. Calls raise the same exceptions as the client's, with three differences. They are not retried.
    If the stream breaks, each of its calls raises SessionEnded. An abandoned call (cancelled, or its timeout
    passed) may still be applied: retry an append, or undo it with `truncate` to `seq_len`.
    """

    def __init__(
        self, stream: AsyncSessionStream, close_timeout_s: float, priority: types_pb2.Priority
    ) -> None:
        """Created by `AsyncClient.session`."""
        self._stream = stream
        self._close_timeout_s = close_timeout_s
        self._priority = priority
        # The stream's tasks do not refer to the session, so that the stream of an unused session is
        # cancelled.
        weakref.finalize(self, stream.cancel).atexit = False

    async def close(self) -> None:
        """Refuses further calls, waits for those in flight for a limited time, and ends the stream.

        Caches are kept until their leases expire.
        """
        await self._stream.close(self._close_timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _call(self, method: Method[_Request, _Response], request: _Request) -> _Response:
        _calls.set_priority(request, self._priority)
        return await self._stream.call(method, request)


class AsyncCache(CacheState):
    """A sequence that the server stores. Release it, or use it in an `async with`."""

    def __init__(self, call: _Call, prefilled: executor_pb2.PrefillResponse) -> None:
        """Created by `prefill` and `fork`."""
        super().__init__(prefilled)
        self._call = call

    async def decode(
        self, token_id: int, *, output: types_pb2.OutputOptions | None = None
    ) -> types_pb2.StepOutput:
        """Appends a token and predicts the next one."""
        request = _calls.decode_request(self, token_id, output)
        response = await self._call(_methods.DECODE, request)
        return self._appended(response)

    async def extend(
        self,
        token_ids: Sequence[int],
        *,
        output: types_pb2.OutputOptions | None = None,
        score_from: int | None = None,
        sample_seeds: Sequence[int] = (),
    ) -> types_pb2.StepOutput:
        """Appends several tokens and predicts the next one. The options are those of `prefill`."""
        request = executor_pb2.PrefillRequest(
            cache_id=self.cache_id,
            token_ids=token_ids,
            position=self.seq_len,
            output=output,
            score_from=score_from,
            sample_seeds=sample_seeds,
        )
        response = await self._call(_methods.PREFILL, request)
        return self._appended(response)

    async def verify(
        self,
        token_ids: Sequence[int],
        *,
        output: types_pb2.OutputOptions | None = None,
        accept: types_pb2.VerifyAccept = types_pb2.VERIFY_ACCEPT_GREEDY,
        score: bool = False,
        rows: Sequence[types_pb2.VerifyRow] = (),
        parents: Sequence[int] = (),
    ) -> Verified:
        """Appends the last accepted token and draft tokens in one forward, and keeps the accepted ones.

        `score` returns the log-probability of each draft. `rows`, which `quire.verify_rows` makes, has one
        item for each token: the mask for the next token, and the distribution that the next draft was drawn
        from. With `parents` the tokens are a tree, of which one path is kept; it has the index of each
        token's parent, except for the first token.
        """
        request = executor_pb2.ForwardVerifyRequest(
            cache_id=self.cache_id,
            token_ids=token_ids,
            position=self.seq_len,
            output=output,
            accept=accept,
            score=score,
            rows=rows,
            parents=parents,
        )
        return self._verified(await self._call(_methods.FORWARD_VERIFY, request))

    async def truncate(self, new_len: int) -> None:
        """Truncates the cache to `new_len` tokens. `output` is invalid until the next append.

        With `seq_len` it undoes an abandoned append that may have been applied. With a shorter length it
        raises PositionMismatch if the length of the cache is not `seq_len`.
        """
        _calls.check_given("new_len", new_len)
        # No position when truncating to the known length, which undoes an abandoned append that was applied.
        position = None if new_len == self.seq_len else self.seq_len
        request = executor_pb2.TruncateKVRequest(cache_id=self.cache_id, new_len=new_len, position=position)
        response = await self._call(_methods.TRUNCATE_KV, request)
        self.seq_len = response.kv_cache.seq_len

    async def fork(
        self, count: int = 1, *, release: Iterable[AsyncCache] = (), request_id: str = ""
    ) -> list[AsyncCache]:
        """Copies the cache. The copies share its pages, and the caller releases them.

        The caches in `release`, which may include this one, are released afterwards in the same call.
        """
        request = executor_pb2.ForkCacheRequest(
            cache_id=self.cache_id,
            count=count,
            release=[cache.cache_id for cache in release],
            # So that a retry returns the same copies.
            request_id=request_id or _calls.new_request_id(),
        )
        response = await self._call(_methods.FORK_CACHE, request)
        return [AsyncCache(self._call, copy) for copy in self._forked(response)]

    async def renew(self, lease_s: float | None = None) -> None:
        """Keeps the cache for `lease_s` seconds from now without use. None: restarts its lease."""
        request = executor_pb2.RenewCacheRequest(cache_id=self.cache_id, lease=_calls.duration(lease_s))
        await self._call(_methods.RENEW_CACHE, request)

    async def release(self) -> bool:
        """Releases the cache. Returns False if it did not exist any more."""
        request = executor_pb2.ReleaseCacheRequest(cache_id=self.cache_id)
        response = await self._call(_methods.RELEASE_CACHE, request)
        return response.released

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.release()
        except QuireError:
            # Do not hide the exception of the block. The cache is released when its lease expires.
            if error is None:
                raise
