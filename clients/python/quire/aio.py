"""The asyncio client. The blocking one is generated from this file: see generate_blocking.py."""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NoReturn, Self, TypeVar, Unpack

import grpc
from google.protobuf.message import Message
from quire import _calls, _methods
from quire._aio_caches import AsyncCaller
from quire._aio_server import AsyncServerCalls
from quire._attempts import Attempts
from quire._batches import result_of
from quire._calls import CallOptions
from quire._connection import (
    DEFAULT_MAX_REQUEST_BYTES,
    DEFAULT_MAX_RESPONSE_BYTES,
    DEFAULT_TARGET,
    Tls,
    connection,
)
from quire._enums import Policy, Priority, number_of
from quire._gateways import Gateways, targets_of
from quire._items import Prompt, TextSettings, embed_inputs, items_of
from quire._methods import Method
from quire._proxies import proxy_of
from quire._transport import AsyncTransport
from quire.errors import QuireError, from_rpc_error
from quire.executions import AsyncExecution
from quire.session import (
    DEFAULT_CLOSE_TIMEOUT_S,
    DEFAULT_MAX_CALLS_PER_MESSAGE,
    DEFAULT_MAX_IN_FLIGHT,
    AsyncSessionStream,
)
from quire.v1 import admin_pb2_grpc, executor_pb2, executor_pb2_grpc, runner_pb2, runner_pb2_grpc, types_pb2

# Caches in a page of ListCaches: the most that it allows.
_PAGE_SIZE = 1000

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)


class _Stubs:
    """The generated stubs of one gateway."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
        self.runner_stub = runner_pb2_grpc.ModelRunnerServiceStub(channel)
        self.admin_stub = admin_pb2_grpc.AdminServiceStub(channel)


class AsyncClient(AsyncServerCalls):
    """A connection to a Quire server, for one event loop. Close it, or use `async with`.

    gRPC does not work in a process that was forked while a client was connected: its calls hang. Start it by
    the method "spawn", or set GRPC_ENABLE_FORK_SUPPORT=1 before the first process starts.
    """

    def __init__(  # noqa: PLR0913 - the settings of a connection
        self,
        target: str | Sequence[str] = DEFAULT_TARGET,
        *,
        timeout_s: float | None = None,
        tls: Tls | grpc.ChannelCredentials | bool = False,
        token: str = "",
        token_in_plain_view: bool = False,
        priority: Priority | None = None,
        max_request_bytes: int = DEFAULT_MAX_REQUEST_BYTES,
        max_response_bytes: int = DEFAULT_MAX_RESPONSE_BYTES,
        retries: bool = True,
    ) -> None:
        """Connects when first used. Raises ValueError for invalid settings.

        If a server does not answer a ping, running calls fail with UNAVAILABLE. A single server is pinged
        every 20 s and has 20 s to answer, so calls survive a pause of at most about 40 s; each of several
        gateways is pinged every 2 s and has 3 s.

        Args:
            target: A gRPC target, such as `host:port` or `unix:/path`. Several gateways of one server as a
                list, or as `host:port,host:port`: a call goes to the one that has its cache, and its next
                attempt to another one.
            timeout_s: The timeout of each call, including retries. None: no timeout.
            tls: True: TLS with the public certificate authorities. `Tls`: with other authorities or a client
                certificate. Any other gRPC channel credentials are also accepted.
            token: Sent with every call. Without TLS it is sent only to this machine.
            token_in_plain_view: Send the token without TLS also to other machines, for networks that encrypt.
            priority: The scheduling priority of all calls: high ones run first and are refused last. None:
                normal.
            max_request_bytes: Larger requests are not sent.
            max_response_bytes: Larger responses are refused.
            retries: False: failed calls are never retried, even if that is safe.
        """
        targets = targets_of(target)
        link = connection(
            targets,
            tls=tls,
            token=token,
            token_in_plain_view=token_in_plain_view,
            max_request_bytes=max_request_bytes,
            max_response_bytes=max_response_bytes,
            retries=retries,
        )
        self._transport = AsyncTransport()
        self._channels = {
            target: grpc.aio.insecure_channel(target, options=link.options_for(target))
            if link.credentials is None
            else grpc.aio.secure_channel(target, link.credentials, options=link.options_for(target))
            for target in targets
        }
        self._stubs = {target: _Stubs(channel) for target, channel in self._channels.items()}
        # For messages.
        self._proxies = {target: proxy_of(target) for target in targets}
        self._first_proxy = self._proxies[targets[0]]
        self._gateways = Gateways(targets)
        self._is_closed = False
        self._timeout_s = _calls.limit_s(timeout_s, None)
        number_of("priority", types_pb2.Priority, priority)
        self._priority = priority
        self._max_request_bytes = max_request_bytes
        self._retries = retries
        # The generated stub of ModelExecutorService. Its calls raise grpc.RpcError and are not retried.
        # Of several gateways it is the first one's.
        self.stub = self._stubs[targets[0]].stub
        # The generated stubs of ModelRunnerService and AdminService, likewise.
        self.runner_stub = self._stubs[targets[0]].runner_stub
        self.admin_stub = self._stubs[targets[0]].admin_stub
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
        close_limit_s = _calls.limit_s(close_timeout_s, None)
        target = self._gateways.next()
        stream = AsyncSessionStream(
            self._stubs[target].stub.Session,
            metadata=self.metadata,
            proxy=self._proxies[target],
            timeout_s=self._timeout_s,
            max_in_flight=max_in_flight,
            max_calls_per_message=max_calls_per_message,
            max_request_bytes=self._max_request_bytes,
        )
        return AsyncSession(stream, close_limit_s, self._priority, self.execute)

    def execute(  # noqa: PLR0913 - the fields of ExecuteRequest
        self,
        items: Sequence[runner_pb2.ExecuteItem] | Sequence[Prompt] | Prompt,
        *,
        runtime: str = "",
        policy: Policy | None = None,
        request_id: str = "",
        keep_s: float | None = None,
        max_cost_usd: float | None = None,
        timeout_s: float | None = None,
        priority: Priority | None = None,
        raise_on_error: bool = True,
        **settings: Unpack[TextSettings],
    ) -> AsyncExecution:
        """Generates whole texts on the server. Iterate over the result for its chunks, or call its `texts`.

        Leaving its `async with` block ends it, unless it is kept.
        Raises TypeError or ValueError for invalid items.

        Args:
            items: Items, see `quire.item`; or one or several prompts, with their `settings`. The ids of
                several prompts are "0", "1" and so on.
            runtime: The name of a runtime. Empty: the server chooses one by `policy`.
            policy: How the server chooses: "order", "local_first" or "cheapest". None: as it is configured.
            request_id: The key to resume the execution with. Empty: one is generated.
            keep_s: How long the server keeps the execution without a client. The stream then resumes
                automatically after a lost connection or a server restart, but not with `retries=False`.
            max_cost_usd: The maximum cost of all items together. None: no limit.
            timeout_s: The timeout of the call, with all that resume it. None: the client's.
            priority: None: the client's.
            raise_on_error: Raise the error of a sample that fails, which ends all. False: its last chunk has
                the error, and others go on.
            settings: Such as max_tokens, temperature, stop, n; see `quire.item`. For prompts only.
        """
        made = items_of(items, settings)
        request = runner_pb2.ExecuteRequest(
            items=made,
            runtime=runtime,
            request_id=request_id,
            policy=number_of("policy", runner_pb2.RoutingPolicy, policy),
            keep=_calls.duration(keep_s),
            max_cost_usd=max_cost_usd,
            priority=number_of("priority", types_pb2.Priority, priority or self._priority),
        )
        # Caches are continued by the gateway that has them. Without one it is the turn of any.
        target = self._gateways.target(made[0].cache)
        return AsyncExecution(
            functools.partial(self._stubs[target].runner_stub.Execute, metadata=self.metadata),
            request,
            self.cancel_execution,
            timeout_s=_calls.limit_s(timeout_s, self._timeout_s),
            retries=self._retries,
            raise_on_error=raise_on_error,
            proxy=self._proxies[target],
        )

    _execute = execute

    async def generate(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        priority: Priority | None = None,
        **settings: Unpack[TextSettings],
    ) -> str:
        """The text that the server generates for a prompt: token ids, a text, or messages.

        `execute` has more: texts as they are generated, several prompts or samples, log-probabilities.
        Raises QuireError, and the errors of `quire.item`.
        """
        items = items_of(prompt, settings)
        if len(items) > 1 or items[0].n > 1:
            raise TypeError("generate returns one text; for several: execute(...).texts()")
        execution = self.execute(items, timeout_s=timeout_s, priority=priority)
        async with execution:
            return "".join(await execution.texts())

    async def cancel_execution(self, request_id: str) -> bool:
        """Ends a kept execution (`keep_s`), also of another client. Returns whether there was one.

        After a server restart an execution is unknown until a client resumes it; without that it expires.
        """
        request = runner_pb2.CancelExecutionRequest(request_id=request_id)
        return (await self._call(_methods.CANCEL_EXECUTION, request)).cancelled

    async def list_caches(self, **call: Unpack[CallOptions]) -> list[types_pb2.KvCacheHandle]:
        """All caches of this client's tenant. `timeout_s` is that of each page of 1,000."""
        request = executor_pb2.ListCachesRequest(page_size=_PAGE_SIZE)
        handles = list[types_pb2.KvCacheHandle]()
        while True:
            page = await self._call(_methods.LIST_CACHES, request, **call)
            handles.extend(page.kv_caches)
            if not page.next_page_token:
                return handles
            request.page_token = page.next_page_token

    async def unified_forward(
        self, items: Sequence[executor_pb2.UnifiedForwardItem], **call: Unpack[CallOptions]
    ) -> list[executor_pb2.UnifiedForwardItemResponse | QuireError]:
        """A mixed batch: whole prompts, chunks of prompts and single tokens in one call.

        The exceptions of failed items are returned in their places. Calls on a session that are made together
        share steps as well, and keep the lengths of their caches.
        """
        request = executor_pb2.UnifiedForwardRequest(items=items)
        response = await self._call(_methods.UNIFIED_FORWARD, request, **call)
        return [result_of(result) for result in response.results]

    async def estimate_cost(
        self,
        items: Sequence[runner_pb2.ExecuteItem] | Sequence[Prompt] | Prompt,
        *,
        runtime: str = "",
        timeout_s: float | None = None,
        **settings: Unpack[TextSettings],
    ) -> list[runner_pb2.CostEstimate]:
        """The maximum cost of what `execute` would do, on one runtime or, without a name, on each."""
        request = runner_pb2.EstimateCostRequest(runtime=runtime, items=items_of(items, settings))
        response = await self._call(_methods.ESTIMATE_COST, request, timeout_s=timeout_s)
        return list(response.estimates)

    async def embed(
        self,
        inputs: Sequence[str] | Sequence[Sequence[int]],
        *,
        dimensions: int | None = None,
        normalize: bool = True,
        adapter_id: str = "",
        cache_salt: str = "",
        **call: Unpack[CallOptions],
    ) -> list[list[float]]:
        """A vector for each text, or for each list of token ids, as `model_info().model.pooling` says.

        Raises QuireError.

        Args:
            inputs: Texts, or lists of token ids.
            dimensions: How many numbers of a vector to return, if the model was trained for it. None: all.
            normalize: Each vector has the length 1, so that the product of two is their cosine.
            adapter_id: As in `prefill`.
            cache_salt: As in `prefill`.
        """
        request = runner_pb2.EmbedRequest(
            inputs=embed_inputs(inputs),
            dimensions=dimensions,
            unnormalized=not normalize,
            adapter_id=adapter_id,
            cache_salt=cache_salt,
        )
        response = await self._call(_methods.EMBED, request, **call)
        return [list(each.values) for each in response.embeddings]

    def __reduce__(self) -> NoReturn:
        raise TypeError("a client is a connection: each process makes its own")

    async def close(self) -> None:
        """Closes the connection and cancels its calls. Caches are kept until their leases expire."""
        self._is_closed = True
        try:
            await self._transport.close()
        finally:
            for channel in self._channels.values():
                await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _call(
        self,
        method: Method[_Request, _Response],
        request: _Request,
        *,
        timeout_s: float | None = None,
        priority: Priority | None = None,
        **unknown: object,
    ) -> _Response:
        if unknown:
            raise _calls.no_such_setting(method.rpc, unknown)
        _calls.set_priority(request, priority, self._priority)
        limit_s = _calls.limit_s(timeout_s, self._timeout_s)
        several = len(self._stubs) > 1
        attempts = Attempts(method, request, limit_s, retries=self._retries, several=several)
        while True:
            target = self._gateways.target(request)
            stubs = self._stubs[target]
            call, release = getattr(getattr(stubs, method.stub), method.rpc), stubs.stub.ReleaseCache
            try:
                response: _Response
                response, trailing = await self._transport.unary(
                    call, request, release, timeout=attempts.left_s(), metadata=self.metadata
                )
                self._gateways.answered(target, request, response, trailing)
                if (away := attempts.failed_item(response)) is None:
                    return response
                failed = away
            except grpc.aio.AioRpcError as error:
                failed = from_rpc_error(error, self._proxies[target])
            self._gateways.failed(target)
            backoff_s = attempts.backoff_s(failed)
            await asyncio.sleep(backoff_s)
            if self._is_closed:
                raise failed


class AsyncSession(AsyncCaller):
    """A stream of many calls, for any number of tasks of one event loop. Close it, or use `async with`.

    A cache that is created on a session uses it for its calls; `adopt` moves it to another session or back to
    the client. Calls raise the same exceptions as the client's, with three differences. They are not retried.
    If the stream breaks, each of its calls raises SessionEnded. An abandoned call (cancelled, or its timeout
    passed) may still be applied: retry an append, or undo it with `truncate` to `seq_len`.
    """

    def __init__(
        self,
        stream: AsyncSessionStream,
        close_timeout_s: float | None,
        priority: Priority | None,
        execute: Callable[..., AsyncExecution],
    ) -> None:
        """Created by `AsyncClient.session`. `execute`: the client's, for streams beside this one."""
        self._stream = stream
        self._execute = execute
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

    async def _call(
        self,
        method: Method[_Request, _Response],
        request: _Request,
        *,
        timeout_s: float | None = None,
        priority: Priority | None = None,
        **unknown: object,
    ) -> _Response:
        if unknown:
            raise _calls.no_such_setting(method.rpc, unknown)
        _calls.set_priority(request, priority, self._priority)
        return await self._stream.call(method, request, timeout_s)
