"""Caches, and the calls that make them or score, of the asyncio client and its sessions.

The blocking ones are generated from this file: see generate_blocking.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from types import TracebackType
from typing import Self, TypeVar, Unpack

from google.protobuf.message import Message
from quire import _batches, _calls, _methods
from quire._batches import PrefillItem, Prompts, Scored, ScoreItem, Texts
from quire._calls import CacheState, CallOptions, Decodes, Forks, Verified
from quire._chunks import Chunk
from quire._enums import Accept, Priority, number_of
from quire._items import TextSettings, item
from quire._methods import Method
from quire._opening import opens
from quire.errors import QuireError
from quire.executions import AsyncExecution
from quire.v1 import executor_pb2, runner_pb2, types_pb2

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)


class AsyncCaller(ABC):
    """The operations that do not need a cache, as unary calls or on a session.

    Each takes `timeout_s` and `priority` for this call alone, see `CallOptions`.
    """

    # That of the client, also in its sessions.
    _execute: Callable[..., AsyncExecution]

    @abstractmethod
    async def _call(
        self,
        method: Method[_Request, _Response],
        request: _Request,
        *,
        timeout_s: float | None = None,
        priority: Priority | None = None,
        **unknown: object,
    ) -> _Response:
        """Makes one call. Raises QuireError, and TypeError if a setting is `unknown`."""

    @opens
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
        **call: Unpack[CallOptions],
    ) -> AsyncCache:
        """Creates a cache of `token_ids`; its `output` predicts the next token. The caller releases it.

        Its later appends have the same `output` options, unless they are given others: see `default_output`.
        `score_from` scores the tokens from this index on, into the cache's `token_logprobs` and
        `token_is_argmax`. For each of `sample_seeds` one extra token is drawn after them, into its `samples`.
        With a `cache_salt`, prefixes are shared only with caches of the same salt. `adapter_id` names a LoRA
        adapter, which the cache and its forks keep in its current version. Raises AdapterNotFound.

        To release the cache automatically: `async with client.prefill(token_ids) as cache: ...`.
        """
        item = PrefillItem(
            token_ids, output, lease_s, adapter_id, request_id, cache_salt, score_from, sample_seeds
        )
        request = _batches.prefill_request(item)
        prefilled = await self._call(_methods.PREFILL, request, **call)
        return AsyncCache(self, prefilled, _calls.output_of(request))

    async def batch_prefill(
        self, prompts: Prompts, *, output: types_pb2.OutputOptions | None = None, **call: Unpack[CallOptions]
    ) -> list[AsyncCache | QuireError]:
        """Creates several caches in one call. The caller releases them.

        A prompt is its token ids, or a `PrefillItem` with its own settings. Common prefixes are computed
        once. The exceptions of failed items are returned in their places.
        """
        items = (prompt if isinstance(prompt, PrefillItem) else PrefillItem(prompt) for prompt in prompts)
        requests = [_batches.prefill_request(item, output) for item in items]
        request = executor_pb2.BatchPrefillRequest(items=requests)
        response = await self._call(_methods.BATCH_PREFILL, request, **call)
        made = zip(map(_batches.result_of, response.results), requests, strict=True)
        return [
            one if isinstance(one, QuireError) else AsyncCache(self, one, _calls.output_of(its))
            for one, its in made
        ]

    @opens
    async def cache(self, cache_id: str, **call: Unpack[CallOptions]) -> AsyncCache:
        """An existing cache, which another process may have created, with its current length.

        Its lease restarts. Its `output` is empty until the next append, and it has no `default_output`.
        Nobody is warned if it is not released here. Raises CacheNotFound.
        """
        request = executor_pb2.RenewCacheRequest(cache_id=cache_id)
        renewed = await self._call(_methods.RENEW_CACHE, request, **call)
        found = executor_pb2.PrefillResponse(kv_cache=renewed.kv_cache)
        return AsyncCache(self, found, is_owned=False)

    async def batch_decode(
        self,
        decodes: Decodes[AsyncCache],
        *,
        output: types_pb2.OutputOptions | None = None,
        **call: Unpack[CallOptions],
    ) -> list[types_pb2.StepOutput | QuireError]:
        """Appends one token to each cache in one call.

        An item is (cache, token), or (cache, token, output) with its own output options; without any, its
        cache's `default_output`. The exceptions of failed items are returned in their places.
        """
        requests = [
            _calls.decode_request(cache, token_id, own[0] if own and own[0] is not None else output)
            for cache, token_id, *own in decodes
        ]
        request = executor_pb2.BatchDecodeRequest(items=requests)
        response = await self._call(_methods.BATCH_DECODE, request, **call)
        results = zip(decodes, map(_batches.result_of, response.results), strict=True)
        return [
            one if isinstance(one, QuireError) else cache._appended(one)  # noqa: SLF001 - a class of this module
            for (cache, *_), one in results
        ]

    async def fork_caches(
        self,
        forks: Forks[AsyncCache],
        *,
        release: Iterable[AsyncCache] = (),
        request_id: str = "",
        **call: Unpack[CallOptions],
    ) -> list[list[AsyncCache]]:
        """Copies several caches and releases others atomically, as a step of a beam search does.

        A fork is (cache, count); each cache may occur at most once. At least one fork is required, but its
        count may be 0: `[(caches[0], 0)], release=caches` releases all. `release` may contain caches that are
        copied. Returns the copies of each cache, which the caller releases. Raises PositionMismatch if a
        cache has another length than its `seq_len`, and CacheNotFound if a cache does not exist.
        """
        released = list(release)
        request = executor_pb2.ForkCachesRequest(
            forks=[
                executor_pb2.ForkSource(cache_id=cache.cache_id, count=count, position=cache.seq_len)
                for cache, count in forks
            ],
            release=[cache.cache_id for cache in released],
            # So that a retry returns the same copies.
            request_id=request_id or _calls.new_request_id(),
        )
        response = await self._call(_methods.FORK_CACHES, request, **call)
        for cache in released:
            cache.detach()
        return [
            [
                AsyncCache(self, copy, cache.default_output)
                for copy in cache._forked(forked)  # noqa: SLF001 - of this module
            ]
            for (cache, _), forked in zip(forks, response.results, strict=True)
        ]

    async def forward(
        self,
        token_ids: Sequence[int],
        *,
        output: types_pb2.OutputOptions | None = None,
        score_from: int = 0,
        cache_salt: str = "",
        adapter_id: str = "",
        **call: Unpack[CallOptions],
    ) -> executor_pb2.ForwardResponse:
        """Like `score`, but returns the response message."""
        request = _batches.forward_request(ScoreItem(token_ids, score_from, output, cache_salt, adapter_id))
        return await self._call(_methods.FORWARD, request, **call)

    async def score(
        self,
        token_ids: Sequence[int],
        *,
        score_from: int = 0,
        output: types_pb2.OutputOptions | None = None,
        cache_salt: str = "",
        adapter_id: str = "",
        experts: bytes = b"",
        experts_from: int | None = None,
        **call: Unpack[CallOptions],
    ) -> Scored:
        """The log-probability of each token given the tokens before it, and the predictions. Keeps no cache.

        Tokens before index `score_from` are context: they are not scored, and not computed if their KV is
        cached. The first token is never scored. `adapter_id` is as in `prefill`. `experts` replays a routing:
        see `ScoreItem`.
        """
        item = ScoreItem(token_ids, score_from, output, cache_salt, adapter_id, experts, experts_from)
        return _batches.scored(await self._call(_methods.FORWARD, _batches.forward_request(item), **call))

    async def score_batch(
        self, texts: Texts, *, output: types_pb2.OutputOptions | None = None, **call: Unpack[CallOptions]
    ) -> list[Scored | QuireError]:
        """Scores several texts in one call. Common prefixes are computed once.

        A text is its token ids, or a `ScoreItem` with its own settings. The exceptions of failed items are
        returned in their places.
        """
        items = (text if isinstance(text, ScoreItem) else ScoreItem(text) for text in texts)
        requests = [_batches.forward_request(item, output) for item in items]
        request = executor_pb2.BatchForwardRequest(items=requests)
        response = await self._call(_methods.BATCH_FORWARD, request, **call)
        found = map(_batches.result_of, response.results)
        return [one if isinstance(one, QuireError) else _batches.scored(one) for one in found]

    def adopt(self, cache: AsyncCache) -> None:
        """Makes `cache` use this client or session for its calls from now on. Sends nothing."""
        cache._use(self)  # noqa: SLF001 - a class of this module


class AsyncCache(CacheState):
    """A sequence that the server stores. Release it, or use it in an `async with`.

    Attributes: `cache_id`; `seq_len`, its tokens; of the last append `output`, `weights_version` (that of the
    weights that computed it), `replayed_tokens`, and, if it asked for them, `token_logprobs`,
    `token_is_argmax` and `samples`; of the prompt `reused_tokens`. `default_output`, which can be set, has
    the options of appends that are given none. Each call takes `timeout_s` and `priority` for itself, see
    `CallOptions`.
    """

    def __init__(
        self,
        caller: AsyncCaller,
        prefilled: executor_pb2.PrefillResponse,
        default_output: types_pb2.OutputOptions | None = None,
        *,
        is_owned: bool = True,
    ) -> None:
        """Created by `prefill` and `fork`."""
        super().__init__(prefilled, default_output, is_owned=is_owned)
        self._use(caller)

    def _use(self, caller: AsyncCaller) -> None:
        self._caller = caller
        self._call = caller._call  # noqa: SLF001 - a class of this module

    async def decode(
        self, token_id: int, *, output: types_pb2.OutputOptions | None = None, **call: Unpack[CallOptions]
    ) -> types_pb2.StepOutput:
        """Appends a token and predicts the next one."""
        request = _calls.decode_request(self, token_id, output)
        response = await self._call(_methods.DECODE, request, **call)
        return self._appended(response)

    def generate(
        self,
        token_ids: int | Sequence[int],
        *,
        keep_s: float = 10.0,
        timeout_s: float | None = None,
        priority: Priority | None = None,
        **settings: Unpack[TextSettings],
    ) -> AsyncGeneration:
        """Appends a token, or several, and then each token that is chosen, as a loop of `decode` does.

        It is one call, whose chunks come as fast as the server computes, however far away it is:

            async with cache.generate(token_id) as generation: ...

        With every chunk `seq_len` and `output` are as after the `decode` that returned its token: that token
        is not appended yet, and the next `generate` or `decode` appends it. The stream resumes after a lost
        connection or a server restart for up to `keep_s`. Raises PositionMismatch if the length of the cache
        is not `seq_len`, unless it has tokens that were generated for this object and did not arrive: these
        come again.

        `settings` are those of `quire.item`: such as max_tokens, stop, temperature, constraint, min_logprob,
        max_entropy. Unset settings of sampling are those of `default_output`. With `n` the tokens are
        generated on so many copies, which are released, and the cache does not change.
        """
        if settings.get("sampling") is None and self.default_output is not None:
            settings["sampling"] = self.default_output.sampling
        made = item(self.prompt(token_ids), **settings)
        execute = self._caller._execute  # noqa: SLF001 - a class of this module
        execution = execute([made], keep_s=keep_s, timeout_s=timeout_s, priority=priority)
        return AsyncGeneration(execution, self, made)

    async def extend(
        self,
        token_ids: Sequence[int],
        *,
        output: types_pb2.OutputOptions | None = None,
        score_from: int | None = None,
        sample_seeds: Sequence[int] = (),
        **call: Unpack[CallOptions],
    ) -> types_pb2.StepOutput:
        """Appends several tokens and predicts the next one. The options are those of `prefill`."""
        request = executor_pb2.PrefillRequest(
            cache_id=self.cache_id,
            token_ids=_calls.tokens(token_ids),
            position=self.seq_len,
            output=self._wanted(output),
            score_from=score_from,
            sample_seeds=sample_seeds,
        )
        response = await self._call(_methods.PREFILL, request, **call)
        return self._appended(response)

    async def verify(
        self,
        token_ids: Sequence[int],
        *,
        output: types_pb2.OutputOptions | None = None,
        accept: Accept = "greedy",
        score: bool = False,
        rows: Sequence[types_pb2.VerifyRow] = (),
        parents: Sequence[int] = (),
        **call: Unpack[CallOptions],
    ) -> Verified:
        """Appends the last accepted token and draft tokens in one forward, and keeps the accepted ones.

        `accept` says which: "greedy" those that are the most likely token at their position, "sampled" those
        that `output` draws there, "speculative" those that pass rejection sampling, "all" every one.
        `score` returns the log-probability of each draft. `rows`, which `quire.verify_rows` makes, has one
        item for each token: the mask for the next token, and the distribution that the next draft was drawn
        from. With `parents` the tokens are a tree, of which one path is kept; it has the index of each
        token's parent, except for the first token.
        """
        request = executor_pb2.ForwardVerifyRequest(
            cache_id=self.cache_id,
            token_ids=_calls.tokens(token_ids),
            position=self.seq_len,
            output=self._wanted(output),
            accept=number_of("accept", types_pb2.VerifyAccept, accept),
            score=score,
            rows=rows,
            parents=parents,
        )
        return self._verified(token_ids, await self._call(_methods.FORWARD_VERIFY, request, **call))

    async def truncate(self, new_len: int, **call: Unpack[CallOptions]) -> None:
        """Truncates the cache to `new_len` tokens. `output` is invalid until the next append.

        With `seq_len` it undoes an abandoned append that may have been applied. With a shorter length it
        raises PositionMismatch if the length of the cache is not `seq_len`.
        """
        _calls.check_given("new_len", new_len)
        # No position when truncating to the known length, which undoes an abandoned append that was applied.
        position = None if new_len == self.seq_len else self.seq_len
        request = executor_pb2.TruncateKVRequest(cache_id=self.cache_id, new_len=new_len, position=position)
        response = await self._call(_methods.TRUNCATE_KV, request, **call)
        self.seq_len = response.kv_cache.seq_len

    async def fork(
        self,
        count: int = 1,
        *,
        release: Iterable[AsyncCache] = (),
        request_id: str = "",
        **call: Unpack[CallOptions],
    ) -> list[AsyncCache]:
        """Copies the cache. The copies share its pages, and the caller releases them.

        The caches in `release`, which may include this one, are released afterwards in the same call.
        """
        released = list(release)
        request = executor_pb2.ForkCacheRequest(
            cache_id=self.cache_id,
            count=count,
            release=[cache.cache_id for cache in released],
            # So that a retry returns the same copies.
            request_id=request_id or _calls.new_request_id(),
        )
        response = await self._call(_methods.FORK_CACHE, request, **call)
        for cache in released:
            cache.detach()
        return [AsyncCache(self._caller, copy, self.default_output) for copy in self._forked(response)]

    async def renew(self, lease_s: float | None = None, **call: Unpack[CallOptions]) -> None:
        """Keeps the cache for `lease_s` seconds from now without use. None: restarts its lease."""
        request = executor_pb2.RenewCacheRequest(cache_id=self.cache_id, lease=_calls.duration(lease_s))
        await self._call(_methods.RENEW_CACHE, request, **call)

    async def refresh(self, **call: Unpack[CallOptions]) -> int:
        """Reads the cache's length from the server, and returns it. Its lease restarts.

        For a cache that others have changed, as PositionMismatch says. `output` is still that of this
        object's last append.
        """
        request = executor_pb2.RenewCacheRequest(cache_id=self.cache_id)
        renewed = await self._call(_methods.RENEW_CACHE, request, **call)
        self.seq_len = renewed.kv_cache.seq_len
        return self.seq_len

    async def release(self, *, timeout_s: float | None = None, priority: Priority | None = None) -> bool:
        """Releases the cache. Returns False if it did not exist any more."""
        # A call that is refused here must not lose the cache.
        number_of("priority", types_pb2.Priority, priority)
        request = executor_pb2.ReleaseCacheRequest(cache_id=self.detach())
        response = await self._call(_methods.RELEASE_CACHE, request, timeout_s=timeout_s, priority=priority)
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


class AsyncGeneration:
    """What `AsyncCache.generate` returns: chunks, one for each token.

    Iterate over it with `async for`, in an `async with` if you may leave early. Leaving the block ends it on
    the server, and takes back the tokens that were appended beyond those of the chunks that were read.
    """

    def __init__(self, execution: AsyncExecution, cache: AsyncCache, made: runner_pb2.ExecuteItem) -> None:
        """Created by `generate`."""
        self._execution = execution
        self._cache = cache
        # None: on copies.
        self._base = None if made.n else made.cache.position + len(made.cache.token_ids)
        self._has_ended = False

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """Raises QuireError."""
        async for chunk in self._execution:
            if self._base is not None:
                self._cache._generated(self._base, chunk)  # noqa: SLF001 - a class of this module
                self._has_ended = chunk.finish_reason is not None
            yield chunk

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._has_ended:
            return
        try:
            await self._execution.cancel()
            if self._base is not None:
                await self._cache.truncate(self._cache.seq_len)
        except QuireError:
            # Do not hide the exception of the block.
            if error is None:
                raise
