"""The blocking client. Generated from aio.py by clients/python/generate_blocking.py: change that file."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
from google.protobuf.message import Message
from quire import _calls, _methods
from quire._attempts import Attempts
from quire._caches import Caller
from quire._connection import (
    DEFAULT_MAX_REQUEST_BYTES,
    DEFAULT_MAX_RESPONSE_BYTES,
    DEFAULT_TARGET,
    Tls,
    connection,
)
from quire._gateways import Answer, Gateways, targets_of
from quire._items import Prompt, items_of
from quire._methods import Method
from quire._proxies import proxy_of
from quire._uploads import AdapterFiles, Upload, WeightFiles, adapter_requests, weight_requests
from quire.errors import QuireError, from_rpc_error
from quire.executions import Execution
from quire.session import (
    DEFAULT_CLOSE_TIMEOUT_S,
    DEFAULT_MAX_CALLS_PER_MESSAGE,
    DEFAULT_MAX_IN_FLIGHT,
    SessionStream,
)
from quire.text import ModelTokenizer
from quire.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    executor_pb2,
    executor_pb2_grpc,
    runner_pb2,
    runner_pb2_grpc,
    types_pb2,
)

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)


class _Stubs:
    """The generated stubs of one gateway."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
        self.runner_stub = runner_pb2_grpc.ModelRunnerServiceStub(channel)
        self.admin_stub = admin_pb2_grpc.AdminServiceStub(channel)


class Client(Caller):
    """A connection to a Quire server. Thread-safe. Close it, or use `with`."""

    def __init__(  # noqa: PLR0913 - the settings of a connection
        self,
        target: str | Sequence[str] = DEFAULT_TARGET,
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
            target: A gRPC target, such as `host:port` or `unix:/path`. Several gateways of one server as a
                list, or as `host:port,host:port`: a call goes to the one that has its cache, and its next
                attempt to another one.
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
        targets = targets_of(target)
        link = connection(
            ",".join(targets),
            tls=tls,
            token=token,
            token_in_plain_view=token_in_plain_view,
            max_request_bytes=max_request_bytes,
            max_response_bytes=max_response_bytes,
            retries=retries,
            several=len(targets) > 1,
        )
        self._channels = {
            target: grpc.insecure_channel(target, options=link.options_for(target))
            if link.credentials is None
            else grpc.secure_channel(target, link.credentials, options=link.options_for(target))
            for target in targets
        }
        self._stubs = {target: _Stubs(channel) for target, channel in self._channels.items()}
        # For messages.
        self._proxies = {target: proxy_of(target) for target in targets}
        self._first_proxy = self._proxies[targets[0]]
        self._gateways = Gateways(targets)
        self._is_closed = False
        self._timeout_s = timeout_s
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
    ) -> Session:
        """Opens a stream for many concurrent calls.

        Each call costs less than a unary call, and calls that are sent together are batched. Calls beyond
        `max_in_flight` wait. A message has at most `max_calls_per_message` calls, for servers with a lower
        limit: see GetCapabilities. Closing waits up to `close_timeout_s` for pending calls.
        """
        target = self._gateways.next()
        stream = SessionStream(
            self._stubs[target].stub.Session,
            metadata=self.metadata,
            proxy=self._proxies[target],
            timeout_s=self._timeout_s,
            max_in_flight=max_in_flight,
            max_calls_per_message=max_calls_per_message,
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
        """Generates whole texts on the server. Iterate over the result.

        Leaving its `with` block ends it, unless it is kept.
        Raises TypeError or ValueError for invalid items.

        Args:
            items: Items, see `quire.item`; or one or several prompts, with their `settings`. The ids of
                several prompts are "0", "1" and so on.
            runtime: The name of a runtime. Empty: the server chooses one by `policy`.
            policy: Such as `runner_pb2.ROUTING_POLICY_CHEAPEST`. Unset: the server's configured policy.
            request_id: The key to resume the execution with. Empty: one is generated.
            keep_s: How long the server keeps the execution without a client. The stream then resumes
                automatically after a lost connection or a server restart, but not with `retries=False`.
            max_cost_usd: The maximum cost of all items together. None: no limit.
            timeout_s: The timeout of the call, with all that resume it. None: the client's.
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
        target = self._gateways.next()
        return Execution(
            functools.partial(self._stubs[target].runner_stub.Execute, metadata=self.metadata),
            request,
            self.cancel_execution,
            timeout_s=self._timeout_s if timeout_s is None else timeout_s,
            retries=self._retries,
            proxy=self._proxies[target],
        )

    def cancel_execution(self, request_id: str) -> bool:
        """Ends a kept execution (`keep_s`), also of another client. Returns whether there was one.

        After a server restart an execution is unknown until a client resumes it; without that it expires.
        """
        request = runner_pb2.CancelExecutionRequest(request_id=request_id)
        was_there, failures = False, list[QuireError]()
        # Only the gateway that runs it knows it.
        for target in self._stubs:
            try:
                was_there |= (self._call(_methods.CANCEL_EXECUTION, request, target)).cancelled
            except QuireError as error:
                failures.append(error)
        if failures and not was_there:
            raise failures[0]
        return was_there

    def load_adapter(
        self,
        adapter_id: str,
        source: str = "",
        *,
        files: AdapterFiles | None = None,
        pinned: bool = False,
        shared: bool = False,
        timeout_s: float | None = None,
    ) -> admin_pb2.Adapter:
        """Loads a LoRA adapter in PEFT's layout: give either `source` or `files`.

        If the id is in use, this makes a new version: caches keep theirs until they are released. It is never
        retried, because each attempt can make a version. If its response was lost, `list_adapters` returns
        the current version. Requires the role `administer` if the server requires tokens.

        Raises QuireError; ValueError for both a source and files, or neither; OSError for unreadable files.

        Args:
            adapter_id: Its name in calls: letters, digits and ._-/, at most 128, a letter or digit first.
            source: An absolute path of a directory of the server's machine, or ORG/NAME on the hub.
            files: A directory of this machine, or the contents of adapter_config.json and
                adapter_model.safetensors by their names.
            pinned: Keep it in the memory of workers that have loaded it.
            shared: All tenants can use it, not only this client's.
            timeout_s: The timeout of the call. None: the client's.
        """
        settings = admin_pb2.LoadAdapterRequest(
            adapter_id=adapter_id, source=source, pinned=pinned, shared=shared
        )
        requests = adapter_requests(settings, files, self._max_request_bytes)
        upload = Upload(requests, self._first_proxy)
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        response: admin_pb2.LoadAdapterResponse = upload.send(
            self.admin_stub.LoadAdapter, timeout=limit_s, metadata=self.metadata
        )
        return response.adapter

    def unload_adapter(self, adapter_id: str, *, shared: bool = False) -> bool:
        """Removes an adapter's id. Returns whether there was one. Its caches can be used until their release.

        `shared` removes the one that all tenants can use, not this client's own.
        """
        request = admin_pb2.UnloadAdapterRequest(adapter_id=adapter_id, shared=shared)
        response = self._call(_methods.UNLOAD_ADAPTER, request)
        return response.unloaded

    def move_cache(self, cache_id: str, worker_id: str) -> admin_pb2.MoveCacheResponse:
        """Moves a cache to another worker, as `status` names it. Returns how its KV got there.

        Requires the role `administer` if the server requires tokens. Raises QuireError: NO_WORKER if that
        worker is not ready or cannot take it. The cache keeps its tokens whatever happens. A repetition after
        a lost answer finds the cache where it is to be, and says that nothing was copied.
        """
        request = admin_pb2.MoveCacheRequest(cache_id=cache_id, worker_id=worker_id)
        return self._call(_methods.MOVE_CACHE, request)

    def upload_weights(self, files: WeightFiles, *, timeout_s: float | None = None) -> str:
        """Sends new weights for the served model, in safetensors format. Returns a source for LoadWeights.

        The server keeps the latest upload until it has been loaded and other weights are served, or the
        server stops. It is never retried. Requires the role `administer` if the server requires tokens.

        Raises QuireError; ValueError if a file is not in safetensors format, or a tensor is in two files;
        OSError for unreadable files; and what an iterable raises.

        Args:
            files: A directory or a file of this machine; or the contents of a file with the tensors of the
                checkpoint; or several files, as contents or paths, at most 1,024. An iterator is advanced in
                another thread, when the file before was sent: `(safetensors.torch.save(shard) for shard in
                shards)` never makes a second copy of the whole model.
            timeout_s: The timeout of the call. None: the client's.
        """
        upload = Upload(weight_requests(files, self._max_request_bytes), self._first_proxy)
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        response: runner_pb2.UploadWeightsResponse = upload.send(
            self.runner_stub.UploadWeights, timeout=limit_s, metadata=self.metadata
        )
        return response.source

    def load_weights(
        self,
        source: str,
        *,
        replace: bool = False,
        recompute: bool = False,
        drain_s: float | None = None,
        timeout_s: float | None = None,
    ) -> runner_pb2.LoadWeightsResponse:
        """Serves other weights. Returns the last message, which says what is served now.

        It is never retried. Requires the role `administer` if the server requires tokens. Raises QuireError.

        Args:
            source: An absolute path of a directory of the server's machine, ORG/NAME on the hub, or what
                `upload_weights` returned.
            replace: In place, between two steps; the model must have the same config. Otherwise further
                workers load them.
            recompute: With `replace`: caches continue with the new weights. Otherwise they end.
            drain_s: Without `replace`: how long caches of the previous weights can be used.
            timeout_s: The timeout of the call. None: the client's.
        """
        request = runner_pb2.LoadWeightsRequest(source=source, drain=_calls.duration(drain_s))
        if replace:
            request.mode = runner_pb2.LOAD_WEIGHTS_MODE_REPLACE
        if recompute:
            request.previous_caches = runner_pb2.PREVIOUS_CACHES_RECOMPUTE
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        served = runner_pb2.LoadWeightsResponse()
        updates = self.runner_stub.LoadWeights(request, timeout=limit_s, metadata=self.metadata)
        try:
            for update in updates:
                served = update
        except grpc.RpcError as error:
            raise from_rpc_error(error, self._first_proxy) from None
        return served

    def list_adapters(self) -> list[admin_pb2.Adapter]:
        """The adapters that this client can use, ordered by id."""
        response = self._call(_methods.LIST_ADAPTERS, admin_pb2.ListAdaptersRequest())
        return list(response.adapters)

    def model_info(
        self, *, include_tokenizer: bool = False, include_chat_template: bool = False
    ) -> executor_pb2.GetModelInfoResponse:
        """The description of the model; with tokenizer.json and the chat template if requested."""
        request = executor_pb2.GetModelInfoRequest(
            include_tokenizer=include_tokenizer, include_chat_template=include_chat_template
        )
        return self._call(_methods.GET_MODEL_INFO, request)

    def tokenizer(self) -> ModelTokenizer:
        """The model's tokenizer, from the server. Needs the package `tokenizers` (extra `text`).

        Raises ImportError without it, and PreconditionFailed (NO_TOKENIZER) if the model has none.
        """
        return ModelTokenizer(self.model_info(include_tokenizer=True))

    def status(self) -> executor_pb2.GetStatusResponse:
        """The state of the gateway and its workers."""
        return self._call(_methods.GET_STATUS, executor_pb2.GetStatusRequest())

    def close(self) -> None:
        """Closes the connection and cancels its calls. Caches are kept until their leases expire."""
        self._is_closed = True
        for channel in self._channels.values():
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, method: Method[_Request, _Response], request: _Request, first: str = "") -> _Response:
        """`first`: where the first attempt goes."""
        _calls.set_priority(request, self._priority)
        several = len(self._stubs) > 1
        attempts = Attempts(method, request, self._timeout_s, retries=self._retries, several=several)
        while True:
            target, first = first or self._gateways.target(request), ""
            call = getattr(getattr(self._stubs[target], method.stub), method.rpc)
            try:
                response: _Response
                response, trailing = Answer.get(
                    call, request, timeout=attempts.left_s(), metadata=self.metadata
                )
                self._gateways.answered(target, request, response, trailing)
                if (away := attempts.failed_item(response)) is None:
                    return response
                failed = away
            except grpc.RpcError as error:
                failed = from_rpc_error(error, self._proxies[target])
            self._gateways.failed(target)
            backoff_s = attempts.backoff_s(failed)
            time.sleep(backoff_s)
            if self._is_closed:
                raise failed


class Session(Caller):
    """A stream of many calls. Thread-safe. Close it, or use `with`.

    A cache that is created on a session uses it for its calls; `adopt` moves it to another session or back to
    the client. Calls raise the same exceptions as the client's, with three differences. They are not retried.
    If the stream breaks, each of its calls raises SessionEnded. An abandoned call (its timeout passed)
    may still be applied: retry an append, or undo it with `truncate` to `seq_len`.
    """

    def __init__(self, stream: SessionStream, close_timeout_s: float, priority: types_pb2.Priority) -> None:
        """Created by `Client.session`."""
        self._stream = stream
        self._close_timeout_s = close_timeout_s
        self._priority = priority
        # The stream's threads do not refer to the session, so that the stream of an unused session is
        # cancelled.
        weakref.finalize(self, stream.cancel).atexit = False

    def close(self) -> None:
        """Refuses further calls, waits for those in flight for a limited time, and ends the stream.

        Caches are kept until their leases expire.
        """
        self._stream.close(self._close_timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, method: Method[_Request, _Response], request: _Request) -> _Response:
        _calls.set_priority(request, self._priority)
        return self._stream.call(method, request)
