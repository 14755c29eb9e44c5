"""The calls of the blocking client that concern the server itself: its model, adapters and workers.

Generated from _aio_server.py by clients/python/generate_blocking.py: change that file.
"""

from __future__ import annotations

from typing import Unpack

import grpc
from quire import _calls, _methods
from quire._caches import Caller
from quire._calls import CallOptions
from quire._enums import Cause, number_of
from quire._transport import Transport
from quire._uploads import AdapterFiles, Upload, WeightFiles, adapter_requests, weight_requests
from quire.errors import InternalError, from_rpc_error
from quire.text import ModelTokenizer
from quire.v1 import admin_pb2, admin_pb2_grpc, executor_pb2, runner_pb2


class ServerCalls(Caller):
    """The calls that only a client has, and no session. Its attributes are set by the client."""

    admin_stub: admin_pb2_grpc.AdminServiceStub
    metadata: tuple[tuple[str, str], ...] | None
    _timeout_s: float | None
    _max_request_bytes: int
    _first_proxy: str
    _transport: Transport

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
            source: An absolute path of a directory of the server's machine.
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
        limit_s = _calls.limit_s(timeout_s, self._timeout_s)
        response: admin_pb2.LoadAdapterResponse = upload.send(
            self.admin_stub.LoadAdapter, timeout=limit_s, metadata=self.metadata
        )
        return response.adapter

    def unload_adapter(self, adapter_id: str, *, shared: bool = False, **call: Unpack[CallOptions]) -> bool:
        """Removes an adapter's id. Returns whether there was one. Its caches can be used until their release.

        `shared` removes the one that all tenants can use, not this client's own.
        """
        request = admin_pb2.UnloadAdapterRequest(adapter_id=adapter_id, shared=shared)
        response = self._call(_methods.UNLOAD_ADAPTER, request, **call)
        return response.unloaded

    def list_adapters(self, **call: Unpack[CallOptions]) -> list[admin_pb2.Adapter]:
        """The adapters that this client can use, ordered by id."""
        response = self._call(_methods.LIST_ADAPTERS, admin_pb2.ListAdaptersRequest(), **call)
        return list(response.adapters)

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
        limit_s = _calls.limit_s(timeout_s, self._timeout_s)
        response: admin_pb2.UploadWeightsResponse = upload.send(
            self.admin_stub.UploadWeights, timeout=limit_s, metadata=self.metadata
        )
        return response.source

    def load_weights(
        self,
        source: str,
        *,
        recompute: bool = False,
        keep_kv: bool = False,
        timeout_s: float | None = None,
    ) -> admin_pb2.LoadWeightsResponse:
        """Replaces the weights by others of the same config. Returns what is served now.

        It is never retried. Requires the role `administer` if the server requires tokens. Raises QuireError,
        or ValueError for both `recompute` and `keep_kv`.

        Args:
            source: An absolute path of a directory of the server, or what `upload_weights` returned.
            recompute: Caches continue, and their KV is recomputed with the new weights. Otherwise they end.
            keep_kv: Caches continue, and the KV that there is of them stays that of the previous weights.
            timeout_s: The timeout of the call. None: the client's.
        """
        request = admin_pb2.LoadWeightsRequest(source=source)
        if recompute and keep_kv:
            raise ValueError("give either recompute or keep_kv")
        if recompute:
            request.previous_caches = admin_pb2.PREVIOUS_CACHES_RECOMPUTE
        elif keep_kv:
            request.previous_caches = admin_pb2.PREVIOUS_CACHES_KEEP_KV
        limit_s = _calls.limit_s(timeout_s, self._timeout_s)
        updates = self.admin_stub.LoadWeights(request, timeout=limit_s, metadata=self.metadata)
        try:
            responses: list[admin_pb2.LoadWeightsResponse] = self._transport.every(updates)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self._first_proxy) from None
        if not responses:
            raise InternalError(grpc.StatusCode.INTERNAL, "", "the server sent no answer")
        return responses[-1]

    def list_runtimes(self, **call: Unpack[CallOptions]) -> list[runner_pb2.Runtime]:
        """The runtimes that `execute` can use, in the order of the configuration."""
        response = self._call(_methods.LIST_RUNTIMES, runner_pb2.ListRuntimesRequest(), **call)
        return list(response.runtimes)

    def rebuild_session(
        self, runtime: str = "", *, cause: Cause = "manual", **call: Unpack[CallOptions]
    ) -> int:
        """Restarts the workers, or connects anew to a provider. Returns how many processes or connections.

        It is never retried. Requires the role `administer` if the server requires tokens. Raises QuireError.
        """
        number = number_of("cause", admin_pb2.RebuildCause, cause)
        request = admin_pb2.RebuildSessionRequest(runtime=runtime, cause=number)
        return (self._call(_methods.REBUILD_SESSION, request, **call)).rebuilt

    def warmup(self, workers: int = 0, **call: Unpack[CallOptions]) -> int:
        """Waits until this many workers are ready; 0: all. Returns how many are."""
        request = admin_pb2.WarmupRequest(workers=workers)
        return (self._call(_methods.WARMUP, request, **call)).workers_ready

    def drain(
        self, worker_id: str = "", *, grace_s: float | None = None, **call: Unpack[CallOptions]
    ) -> list[admin_pb2.ReplacedWorker]:
        """Restarts a worker, or without a name all, one after another; returns when the new ones are ready.

        `grace_s` is how long running operations may take before another worker computes them again. It is
        never retried. Requires the role `administer` if the server requires tokens. Raises QuireError.
        """
        request = admin_pb2.DrainRequest(worker_id=worker_id, grace=_calls.duration(grace_s))
        return list((self._call(_methods.DRAIN, request, **call)).workers)

    def shutdown(self, *, leave_workers: bool = False, **call: Unpack[CallOptions]) -> None:
        """Stops the server gracefully, and returns at once. `leave_workers`: the next server takes them over.

        Requires the role `administer` if the server requires tokens. Raises QuireError.
        """
        self._call(_methods.SHUTDOWN, admin_pb2.ShutdownRequest(leave_workers=leave_workers), **call)

    def model_info(
        self,
        *,
        include_tokenizer: bool = False,
        include_chat_template: bool = False,
        **call: Unpack[CallOptions],
    ) -> executor_pb2.GetModelInfoResponse:
        """The description of the model; with tokenizer.json and the chat template if requested."""
        request = executor_pb2.GetModelInfoRequest(
            include_tokenizer=include_tokenizer, include_chat_template=include_chat_template
        )
        return self._call(_methods.GET_MODEL_INFO, request, **call)

    def tokenizer(self) -> ModelTokenizer:
        """The model's tokenizer, from the server. Needs the package `tokenizers` (extra `text`).

        Raises ImportError without it, and PreconditionFailed (NO_TOKENIZER) if the model has none.
        """
        return ModelTokenizer(self.model_info(include_tokenizer=True))

    def capabilities(self, **call: Unpack[CallOptions]) -> executor_pb2.GetCapabilitiesResponse:
        """What the server can do, and its limits."""
        return self._call(_methods.GET_CAPABILITIES, executor_pb2.GetCapabilitiesRequest(), **call)

    def status(self, **call: Unpack[CallOptions]) -> executor_pb2.GetStatusResponse:
        """The state of the gateway and its workers."""
        return self._call(_methods.GET_STATUS, executor_pb2.GetStatusRequest(), **call)

    def cache_metrics(
        self, *, check_integrity: bool = False, **call: Unpack[CallOptions]
    ) -> list[executor_pb2.WorkerCacheMetrics]:
        """The KV pages of each worker. `check_integrity` also checks the invariants of every pool."""
        request = executor_pb2.GetCacheMetricsRequest(check_integrity=check_integrity)
        return list((self._call(_methods.GET_CACHE_METRICS, request, **call)).workers)

    def lora_metrics(self, **call: Unpack[CallOptions]) -> list[executor_pb2.WorkerLoraMetrics]:
        """The use of adapters on each worker."""
        request = executor_pb2.GetLoraMetricsRequest()
        return list((self._call(_methods.GET_LORA_METRICS, request, **call)).workers)
