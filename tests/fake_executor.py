"""The services in this process for tests of clients: keeps token lists, computes nothing.

After a cache's tokens t comes the token `script[len(t) - prompt length]` while the script lasts, then
`sum(t) % VOCAB`. Steps are fenced like the real ones. Failures are planted, before or after a call takes
effect.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from quire.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    executor_pb2,
    executor_pb2_grpc,
    runner_pb2,
    runner_pb2_grpc,
    types_pb2,
)
from tokenizers import Tokenizer

from service.runtimes.sample import Sample, SampleSpec
from service.text.chat_template import TemplateError
from tests.chat_templates import render_chat

VOCAB = 1000
EOS = 999


def rich_status(
    code: grpc.StatusCode,
    reason: str,
    message: str = "",
    *,
    metadata: dict[str, str] | None = None,
    retry_delay_s: float | None = None,
    violations: Sequence[tuple[str, str]] = (),
) -> status_pb2.Status:
    """A status with the details that Quire attaches."""
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=reason, domain="quire", metadata=metadata or {})
    ]
    if retry_delay_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(retry_delay_s * 1e9))
        details.append(retry)
    if violations:
        fields = [
            error_details_pb2.BadRequest.FieldViolation(field=field, description=text)
            for field, text in violations
        ]
        details.append(error_details_pb2.BadRequest(field_violations=fields))
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def _answers(rpc: str, response: Message) -> Any:
    """A call that changes nothing and is always answered in the same way."""

    def answer(executor: FakeExecutor, request: Any, context: Any) -> Message:
        with executor._call(rpc, request, context):
            return response

    return answer


class FakeExecutor(
    executor_pb2_grpc.ModelExecutorServiceServicer,
    runner_pb2_grpc.ModelRunnerServiceServicer,
    admin_pb2_grpc.AdminServiceServicer,
):
    """See the module. `calls` has every request by method, `caches` the tokens of every live cache."""

    def __init__(self) -> None:
        self.caches: dict[str, list[int]] = {}
        self.calls: dict[str, list[Any]] = defaultdict(list)
        self.adapters: dict[str, admin_pb2.Adapter] = {}
        # The parts of files that were sent with adapters.
        self.uploaded: list[admin_pb2.AdapterFile] = []
        # By worker, the adapters in its memory. Without any, workers do not support them.
        self.resident: dict[str, list[str]] = {}
        # What calls said of who makes them.
        self.authorizations: set[str] = set()
        self.script: list[int] = []
        self.tokenizer_json = b""
        self.chat_template: types_pb2.ChatTemplate | None = None
        self.sampling_defaults: types_pb2.SamplingParams | None = None
        self.max_seq_len = 4096
        # Whether any that is to be cancelled is there.
        # The tokens that executions began with.
        self.prompts: list[list[int]] = []
        self.decode_delay_s = 0.0
        self.decoding = threading.Event()
        self.loading = threading.Event()
        # An execution has ended, however it did.
        self.ended = threading.Event()
        self._prompt_len: dict[str, int] = {}
        self._by_request_id: dict[str, str] = {}
        self._forked: dict[str, list[str]] = {}
        self._before: dict[str, list[status_pb2.Status]] = defaultdict(list)
        self._after: dict[str, list[status_pb2.Status]] = defaultdict(list)
        self._lock = threading.Lock()

    def fail(self, method: str, status: status_pb2.Status, *, applied: bool = False) -> None:
        """The next call of `method` fails; `applied`: only its answer is lost."""
        (self._after if applied else self._before)[method].append(status)

    def Prefill(self, request: Any, context: Any) -> executor_pb2.PrefillResponse:
        with self._call("Prefill", request, context):
            return self._prefilled(request, context)

    def _prefilled(self, request: Any, context: Any) -> executor_pb2.PrefillResponse:
        cache_id = request.cache_id or self._by_request_id.get(request.request_id, "")
        if not cache_id:
            cache_id = f"cache-{len(self.caches)}"
            if request.request_id:
                self._by_request_id[request.request_id] = cache_id
            self.caches[cache_id] = list(request.token_ids)
            self._prompt_len[cache_id] = len(request.token_ids)
        elif request.cache_id:
            self._append(cache_id, request, list(request.token_ids), context)
        return executor_pb2.PrefillResponse(
            kv_cache=self._handle(cache_id), output=self._output(cache_id), reused_tokens=0
        )

    def BatchPrefill(self, request: Any, context: Any) -> executor_pb2.BatchPrefillResponse:
        with self._call("BatchPrefill", request, context):
            results = [
                executor_pb2.BatchPrefillResult(response=self._prefilled(item, context))
                for item in request.items
            ]
            return executor_pb2.BatchPrefillResponse(results=results)

    def Decode(self, request: Any, context: Any) -> executor_pb2.DecodeResponse:
        self.decoding.set()
        time.sleep(self.decode_delay_s)
        with self._call("Decode", request, context):
            self._append(request.cache_id, request, [request.token_id], context)
            return executor_pb2.DecodeResponse(
                kv_cache=self._handle(request.cache_id), output=self._output(request.cache_id)
            )

    def BatchDecode(self, request: Any, context: Any) -> executor_pb2.BatchDecodeResponse:
        results = []
        with self._call("BatchDecode", request, context):
            for item in request.items:
                result = executor_pb2.BatchDecodeResult()
                if item.cache_id in self.caches:
                    self._append(item.cache_id, item, [item.token_id], context)
                    result.response.kv_cache.CopyFrom(self._handle(item.cache_id))
                    result.response.output.CopyFrom(self._output(item.cache_id))
                else:
                    result.error.CopyFrom(rich_status(grpc.StatusCode.NOT_FOUND, "CACHE_NOT_FOUND"))
                results.append(result)
        return executor_pb2.BatchDecodeResponse(results=results)

    def ForwardVerify(self, request: Any, context: Any) -> executor_pb2.ForwardVerifyResponse:
        """Accepts drafts while they count up by one."""
        with self._call("ForwardVerify", request, context):
            tokens = list(request.token_ids)
            accepted = 0
            while accepted + 1 < len(tokens) and tokens[accepted + 1] == tokens[accepted] + 1:
                accepted += 1
            self._append(request.cache_id, request, tokens[: accepted + 1], context)
            outputs = [types_pb2.StepOutput(token_id=token + 1) for token in tokens]
            return executor_pb2.ForwardVerifyResponse(
                kv_cache=self._handle(request.cache_id), outputs=outputs, accepted=accepted
            )

    def Forward(self, request: Any, context: Any) -> executor_pb2.ForwardResponse:
        with self._call("Forward", request, context):
            outputs = [types_pb2.StepOutput(token_id=token) for token in request.token_ids]
            return executor_pb2.ForwardResponse(outputs=outputs)

    def BatchForward(self, request: Any, context: Any) -> executor_pb2.BatchForwardResponse:
        with self._call("BatchForward", request, context):
            results = [
                executor_pb2.BatchForwardResult(response=executor_pb2.ForwardResponse())
                for _ in request.items
            ]
            return executor_pb2.BatchForwardResponse(results=results)

    def ForkCache(self, request: Any, context: Any) -> executor_pb2.ForkCacheResponse:
        with self._call("ForkCache", request, context):
            made = self._forked.get(request.request_id)
            if made is not None:
                return executor_pb2.ForkCacheResponse(kv_caches=[self._handle(copy) for copy in made])
            handles = [self._copy(request.cache_id) for _ in range(request.count)]
            if request.request_id:
                self._forked[request.request_id] = [handle.cache_id for handle in handles]
            return executor_pb2.ForkCacheResponse(kv_caches=handles)

    def ForkCaches(self, request: Any, context: Any) -> executor_pb2.ForkCachesResponse:
        with self._call("ForkCaches", request, context):
            response = executor_pb2.ForkCachesResponse()
            known = iter(self._forked.get(request.request_id, ()))
            for fork in request.forks:
                made = [next(known, "") or self._copy(fork.cache_id).cache_id for _ in range(fork.count)]
                response.results.add(kv_caches=[self._handle(copy) for copy in made])
            copies = [handle.cache_id for result in response.results for handle in result.kv_caches]
            self._forked[request.request_id] = copies
            return response

    def _copy(self, cache_id: str) -> types_pb2.KvCacheHandle:
        copy = f"fork-{len(self.caches)}"
        self.caches[copy] = list(self.caches[cache_id])
        self._prompt_len[copy] = self._prompt_len[cache_id]
        return self._handle(copy)

    def TruncateKV(self, request: Any, context: Any) -> executor_pb2.TruncateKVResponse:
        with self._call("TruncateKV", request, context):
            del self.caches[request.cache_id][request.new_len :]
            return executor_pb2.TruncateKVResponse(kv_cache=self._handle(request.cache_id))

    def RenewCache(self, request: Any, context: Any) -> executor_pb2.RenewCacheResponse:
        with self._call("RenewCache", request, context):
            if request.cache_id not in self.caches:
                self._abort(rich_status(grpc.StatusCode.NOT_FOUND, "CACHE_NOT_FOUND"), context)
            return executor_pb2.RenewCacheResponse(kv_cache=self._handle(request.cache_id))

    def ReleaseCache(self, request: Any, context: Any) -> executor_pb2.ReleaseCacheResponse:
        with self._call("ReleaseCache", request, context):
            for request_id in request.request_ids:
                made = self._forked.get(request_id) or [self._by_request_id.get(request_id, "")]
                for cache_id in made:
                    self.caches.pop(cache_id, None)
            return executor_pb2.ReleaseCacheResponse(
                released=self.caches.pop(request.cache_id, None) is not None
            )

    def ListCaches(self, request: Any, context: Any) -> executor_pb2.ListCachesResponse:
        """Two on each page."""
        with self._call("ListCaches", request, context):
            begin = int(request.page_token or 0)
            handles = [self._handle(cache_id) for cache_id in self.caches]
            for handle in handles:
                handle.worker_id = "worker-0"
                handle.expire_time.FromSeconds(2_000_000_000)
            return executor_pb2.ListCachesResponse(
                kv_caches=handles[begin : begin + 2],
                next_page_token=str(begin + 2) if begin + 2 < len(handles) else "",
            )

    def GetModelInfo(self, request: Any, context: Any) -> executor_pb2.GetModelInfoResponse:
        with self._call("GetModelInfo", request, context):
            return executor_pb2.GetModelInfoResponse(
                model=types_pb2.ModelDescription(
                    model_id="fake", vocab_size=VOCAB, max_seq_len=self.max_seq_len, eos_token_ids=[EOS]
                ),
                tokenizer_json=self.tokenizer_json if request.include_tokenizer else b"",
                chat_template=self.chat_template if request.include_chat_template else None,
                sampling_defaults=self.sampling_defaults,
            )

    def GetStatus(self, request: Any, context: Any) -> executor_pb2.GetStatusResponse:
        """Counters grow by fixed steps from call to call."""
        with self._call("GetStatus", request, context):
            count = len(self.calls["GetStatus"])
            worker = executor_pb2.WorkerStatus(
                worker_id="worker-0",
                pid=4711,
                epoch=3,
                state=executor_pb2.WORKER_STATE_READY,
                executor=types_pb2.ExecutorCapabilities(
                    device="cpu",
                    runner="eager",
                    products="torch: this CPU has no AVX2",
                    supports_lora=bool(self.resident),
                ),
                pool=types_pb2.PoolUsage(
                    sequences=5, pages_total=100, pages_free=60, pages_cached=15, pages_referenced=25
                ),
                counts=types_pb2.StepCounts(
                    prefill_operations=10 * count,
                    prefill_ns=123_400_000 * count,
                    decode_operations=100 * count,
                    decode_ns=126_000_000 * count,
                    steps=50 * count,
                    step_tokens=1000 * count,
                    batch_items=150 * count,
                ),
                memory_bytes=300 << 20,
                operations_in_flight=2,
            )
            starting = executor_pb2.WorkerStatus(
                worker_id="worker-1", state=executor_pb2.WORKER_STATE_STARTING, load_progress=0.42
            )
            return executor_pb2.GetStatusResponse(
                state=executor_pb2.SERVER_STATE_SERVING,
                workers=[worker, starting],
                version="9.9.9",
                uptime=Duration(seconds=61),
            )

    def GetLoraMetrics(self, request: Any, context: Any) -> executor_pb2.GetLoraMetricsResponse:
        """Each worker has also used one that is not in its memory any more."""
        with self._call("GetLoraMetrics", request, context):
            response = executor_pb2.GetLoraMetricsResponse()
            for worker_id, names in self.resident.items():
                worker = response.workers.add(worker_id=worker_id)
                worker.adapters.add(adapter_id="evicted")
                for name in names:
                    worker.adapters.add(adapter_id=name, resident=True)
            return response

    def LoadAdapter(self, requests: Any, context: Any) -> admin_pb2.LoadAdapterResponse:
        """A planted failure comes before the files are read."""
        first = next(requests)
        with self._call("LoadAdapter", first, context):
            self.uploaded += [request.file for request in requests]
            made = admin_pb2.Adapter(
                adapter_id=first.adapter_id,
                version=len(self.calls["LoadAdapter"]),
                pinned=first.pinned,
                shared=first.shared,
                rank=8,
                size_bytes=3 << 19,
            )
            self.adapters[first.adapter_id] = made
            return admin_pb2.LoadAdapterResponse(adapter=made)

    def UnloadAdapter(self, request: Any, context: Any) -> admin_pb2.UnloadAdapterResponse:
        with self._call("UnloadAdapter", request, context):
            known = self.adapters.pop(request.adapter_id, None)
            return admin_pb2.UnloadAdapterResponse(unloaded=known is not None)

    def ListAdapters(self, request: Any, context: Any) -> admin_pb2.ListAdaptersResponse:
        with self._call("ListAdapters", request, context):
            return admin_pb2.ListAdaptersResponse(adapters=self.adapters.values())

    def Execute(self, request: Any, context: Any) -> Iterator[runner_pb2.ExecuteResponse]:
        """One item after another. A failure of "Step" is one of the item at its next step."""
        with self._call("Execute", request, context):
            pass
        yield runner_pb2.ExecuteResponse(started=runner_pb2.ExecutionStarted(runtime="local"))
        for item in request.items:
            cache_id = f"execution-{item.item_id}"
            try:
                prompt = self._prompt(item)
            except TemplateError as error:
                status = rich_status(grpc.StatusCode.INVALID_ARGUMENT, "BAD_CHAT", str(error))
                chunk = runner_pb2.SampleChunk(
                    item_id=item.item_id, finish_reason=runner_pb2.FINISH_REASON_ERROR, error=status
                )
                yield runner_pb2.ExecuteResponse(chunks=[chunk])
                continue
            self.prompts.append(prompt)
            self.caches[cache_id] = list(prompt)
            self._prompt_len[cache_id] = len(prompt)
            try:
                for chunk in self._steps(cache_id, item, context):
                    yield runner_pb2.ExecuteResponse(chunks=[chunk])
            finally:
                del self.caches[cache_id]
                self.ended.set()

    def _prompt(self, item: Any) -> list[int]:
        """As the real ones make it. Raises TemplateError."""
        if not item.HasField("chat"):
            return list(item.tokens.token_ids)
        roles = {runner_pb2.CHAT_ROLE_SYSTEM: "system", runner_pb2.CHAT_ROLE_USER: "user"}
        messages = [{"role": roles[said.role], "content": said.content} for said in item.chat.messages]
        assert self.chat_template is not None
        text = render_chat(self.chat_template, messages)
        return Tokenizer.from_buffer(self.tokenizer_json).encode(text, add_special_tokens=False).ids

    def CancelExecution(self, request: Any, context: Any) -> runner_pb2.CancelExecutionResponse:
        with self._call("CancelExecution", request, context):
            return runner_pb2.CancelExecutionResponse(cancelled=True)

    def _steps(self, cache_id: str, item: Any, context: Any) -> Iterator[runner_pb2.SampleChunk]:
        tokens = self.caches[cache_id]
        room = self.max_seq_len - len(tokens) + 1
        spec = SampleSpec(
            item_id=item.item_id,
            prompt=list(tokens),
            max_tokens=min(item.max_tokens or room, room),
            end_ids=frozenset({EOS}),
            stops=tuple(item.stop),
            tokenizer=Tokenizer.from_buffer(self.tokenizer_json) if self.tokenizer_json else None,
            with_logprobs=item.logprobs,
        )
        sample = Sample(spec, 0)
        while not sample.is_finished and context.is_active():
            self.decoding.set()
            time.sleep(self.decode_delay_s)
            if self._before["Step"]:
                yield sample.fail(self._before["Step"].pop(0))
                return
            output = self._output(cache_id)
            tokens.append(output.token_id)
            yield sample.take(output.token_id, output)

    def LoadWeights(self, _request: Any, context: Any) -> Iterator[admin_pb2.LoadWeightsResponse]:
        """Never ends by itself."""
        yield admin_pb2.LoadWeightsResponse(phase=admin_pb2.LOAD_WEIGHTS_PHASE_LOADING)
        self.loading.set()
        while context.is_active():
            time.sleep(0.01)

    def _unimplemented(self, request: Any, context: Any) -> NoReturn:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "not needed by any test")
        raise AssertionError("abort raises")

    Session: Any = _unimplemented
    UploadWeights: Any = _unimplemented

    def UnifiedForward(self, request: Any, context: Any) -> executor_pb2.UnifiedForwardResponse:
        response = executor_pb2.UnifiedForwardResponse()
        with self._call("UnifiedForward", request, context):
            for item in request.items:
                if not item.cache_id:
                    continue
                self._append(item.cache_id, item, list(item.token_ids), context)
                response.results.add().response.kv_cache.CopyFrom(self._handle(item.cache_id))
        return response

    GetCacheMetrics: Any = _answers("GetCacheMetrics", executor_pb2.GetCacheMetricsResponse())
    GetCapabilities: Any = _answers("GetCapabilities", executor_pb2.GetCapabilitiesResponse())
    ListRuntimes: Any = _answers("ListRuntimes", runner_pb2.ListRuntimesResponse())
    Embed: Any = _answers(
        "Embed", runner_pb2.EmbedResponse(embeddings=[runner_pb2.Embedding(values=[0.6, 0.8])])
    )
    EstimateCost: Any = _answers("EstimateCost", runner_pb2.EstimateCostResponse())
    RebuildSession: Any = _answers("RebuildSession", admin_pb2.RebuildSessionResponse(rebuilt=1))
    Warmup: Any = _answers("Warmup", admin_pb2.WarmupResponse(workers_ready=2))
    Drain: Any = _answers("Drain", admin_pb2.DrainResponse())
    Shutdown: Any = _answers("Shutdown", admin_pb2.ShutdownResponse())

    @contextmanager
    def _call(self, method: str, request: Any, context: Any) -> Iterator[None]:
        with self._lock:
            self.authorizations.add(str(dict(context.invocation_metadata()).get("authorization", "")))
            self.calls[method].append(request)
            if self._before[method]:
                self._abort(self._before[method].pop(0), context)
            yield
            if self._after[method]:
                self._abort(self._after[method].pop(0), context)

    def _abort(self, status: status_pb2.Status, context: Any) -> NoReturn:
        context.abort_with_status(rpc_status.to_status(status))
        raise AssertionError("abort raises")

    def _append(self, cache_id: str, request: Any, tokens: list[int], context: Any) -> None:
        held = self.caches.get(cache_id)
        if held is None:
            self._abort(rich_status(grpc.StatusCode.NOT_FOUND, "CACHE_NOT_FOUND", "no such cache"), context)
        if not request.HasField("position") or request.position == len(held):
            held.extend(tokens)
        elif request.position != len(held) - len(tokens) or held[request.position :] != tokens:
            mismatch = {"position": str(request.position), "seq_len": str(len(held))}
            self._abort(
                rich_status(
                    grpc.StatusCode.FAILED_PRECONDITION, "POSITION_MISMATCH", "moved on", metadata=mismatch
                ),
                context,
            )

    def _handle(self, cache_id: str) -> types_pb2.KvCacheHandle:
        return types_pb2.KvCacheHandle(cache_id=cache_id, seq_len=len(self.caches[cache_id]))

    def _output(self, cache_id: str) -> types_pb2.StepOutput:
        tokens = self.caches[cache_id]
        index = len(tokens) - self._prompt_len[cache_id]
        token_id = self.script[index] if index < len(self.script) else sum(tokens) % VOCAB
        return types_pb2.StepOutput(token_id=token_id, logprob=-0.5)


@contextmanager
def serving(
    executor: FakeExecutor, port: int = 0, credentials: grpc.ServerCredentials | None = None
) -> Iterator[str]:
    """Serves `executor`, on a free port if none is given. Yields the target."""
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    executor_pb2_grpc.add_ModelExecutorServiceServicer_to_server(executor, server)
    runner_pb2_grpc.add_ModelRunnerServiceServicer_to_server(executor, server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(executor, server)
    address = f"127.0.0.1:{port}"
    if credentials is None:
        port = server.add_insecure_port(address)
    else:
        port = server.add_secure_port(address, credentials)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()
