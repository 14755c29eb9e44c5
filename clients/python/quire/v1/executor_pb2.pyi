import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.rpc import status_pb2 as _status_pb2
from quire.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ServerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVER_STATE_UNSPECIFIED: _ClassVar[ServerState]
    SERVER_STATE_STARTING: _ClassVar[ServerState]
    SERVER_STATE_SERVING: _ClassVar[ServerState]
    SERVER_STATE_DRAINING: _ClassVar[ServerState]

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_STARTING: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
    WORKER_STATE_DEAD: _ClassVar[WorkerState]
SERVER_STATE_UNSPECIFIED: ServerState
SERVER_STATE_STARTING: ServerState
SERVER_STATE_SERVING: ServerState
SERVER_STATE_DRAINING: ServerState
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_STARTING: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_DRAINING: WorkerState
WORKER_STATE_DEAD: WorkerState

class PrefillRequest(_message.Message):
    __slots__ = ("cache_id", "token_ids", "position", "output", "adapter_id", "lease", "request_id", "cache_salt", "priority", "score_from", "sample_seeds")
    CACHE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SCORE_FROM_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_SEEDS_FIELD_NUMBER: _ClassVar[int]
    cache_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    position: int
    output: _types_pb2.OutputOptions
    adapter_id: str
    lease: _duration_pb2.Duration
    request_id: str
    cache_salt: str
    priority: _types_pb2.Priority
    score_from: int
    sample_seeds: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, cache_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., position: _Optional[int] = ..., output: _Optional[_Union[_types_pb2.OutputOptions, _Mapping]] = ..., adapter_id: _Optional[str] = ..., lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., request_id: _Optional[str] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[_Union[_types_pb2.Priority, str]] = ..., score_from: _Optional[int] = ..., sample_seeds: _Optional[_Iterable[int]] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("kv_cache", "output", "reused_tokens", "timing", "replayed_tokens", "token_logprobs", "token_is_argmax", "samples")
    KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IS_ARGMAX_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    kv_cache: _types_pb2.KvCacheHandle
    output: _types_pb2.StepOutput
    reused_tokens: int
    timing: _types_pb2.StepTiming
    replayed_tokens: int
    token_logprobs: _containers.RepeatedScalarFieldContainer[float]
    token_is_argmax: _containers.RepeatedScalarFieldContainer[bool]
    samples: _containers.RepeatedCompositeFieldContainer[_types_pb2.SampledToken]
    def __init__(self, kv_cache: _Optional[_Union[_types_pb2.KvCacheHandle, _Mapping]] = ..., output: _Optional[_Union[_types_pb2.StepOutput, _Mapping]] = ..., reused_tokens: _Optional[int] = ..., timing: _Optional[_Union[_types_pb2.StepTiming, _Mapping]] = ..., replayed_tokens: _Optional[int] = ..., token_logprobs: _Optional[_Iterable[float]] = ..., token_is_argmax: _Optional[_Iterable[bool]] = ..., samples: _Optional[_Iterable[_Union[_types_pb2.SampledToken, _Mapping]]] = ...) -> None: ...

class BatchPrefillRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[PrefillRequest]
    def __init__(self, items: _Optional[_Iterable[_Union[PrefillRequest, _Mapping]]] = ...) -> None: ...

class BatchPrefillResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[BatchPrefillResult]
    def __init__(self, results: _Optional[_Iterable[_Union[BatchPrefillResult, _Mapping]]] = ...) -> None: ...

class BatchPrefillResult(_message.Message):
    __slots__ = ("response", "error")
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    response: PrefillResponse
    error: _status_pb2.Status
    def __init__(self, response: _Optional[_Union[PrefillResponse, _Mapping]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("cache_id", "token_id", "position", "output", "priority")
    CACHE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    cache_id: str
    token_id: int
    position: int
    output: _types_pb2.OutputOptions
    priority: _types_pb2.Priority
    def __init__(self, cache_id: _Optional[str] = ..., token_id: _Optional[int] = ..., position: _Optional[int] = ..., output: _Optional[_Union[_types_pb2.OutputOptions, _Mapping]] = ..., priority: _Optional[_Union[_types_pb2.Priority, str]] = ...) -> None: ...

class DecodeResponse(_message.Message):
    __slots__ = ("kv_cache", "output", "timing", "replayed_tokens")
    KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    kv_cache: _types_pb2.KvCacheHandle
    output: _types_pb2.StepOutput
    timing: _types_pb2.StepTiming
    replayed_tokens: int
    def __init__(self, kv_cache: _Optional[_Union[_types_pb2.KvCacheHandle, _Mapping]] = ..., output: _Optional[_Union[_types_pb2.StepOutput, _Mapping]] = ..., timing: _Optional[_Union[_types_pb2.StepTiming, _Mapping]] = ..., replayed_tokens: _Optional[int] = ...) -> None: ...

class BatchDecodeRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[DecodeRequest]
    def __init__(self, items: _Optional[_Iterable[_Union[DecodeRequest, _Mapping]]] = ...) -> None: ...

class BatchDecodeResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[BatchDecodeResult]
    def __init__(self, results: _Optional[_Iterable[_Union[BatchDecodeResult, _Mapping]]] = ...) -> None: ...

class BatchDecodeResult(_message.Message):
    __slots__ = ("response", "error")
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    response: DecodeResponse
    error: _status_pb2.Status
    def __init__(self, response: _Optional[_Union[DecodeResponse, _Mapping]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class ForwardVerifyRequest(_message.Message):
    __slots__ = ("cache_id", "token_ids", "position", "output", "accept", "priority", "score", "rows", "parents")
    CACHE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    cache_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    position: int
    output: _types_pb2.OutputOptions
    accept: _types_pb2.VerifyAccept
    priority: _types_pb2.Priority
    score: bool
    rows: _containers.RepeatedCompositeFieldContainer[_types_pb2.VerifyRow]
    parents: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, cache_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., position: _Optional[int] = ..., output: _Optional[_Union[_types_pb2.OutputOptions, _Mapping]] = ..., accept: _Optional[_Union[_types_pb2.VerifyAccept, str]] = ..., priority: _Optional[_Union[_types_pb2.Priority, str]] = ..., score: _Optional[bool] = ..., rows: _Optional[_Iterable[_Union[_types_pb2.VerifyRow, _Mapping]]] = ..., parents: _Optional[_Iterable[int]] = ...) -> None: ...

class ForwardVerifyResponse(_message.Message):
    __slots__ = ("kv_cache", "outputs", "accepted", "timing", "replayed_tokens", "token_logprobs", "token_is_argmax", "accepted_path")
    KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IS_ARGMAX_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PATH_FIELD_NUMBER: _ClassVar[int]
    kv_cache: _types_pb2.KvCacheHandle
    outputs: _containers.RepeatedCompositeFieldContainer[_types_pb2.StepOutput]
    accepted: int
    timing: _types_pb2.StepTiming
    replayed_tokens: int
    token_logprobs: _containers.RepeatedScalarFieldContainer[float]
    token_is_argmax: _containers.RepeatedScalarFieldContainer[bool]
    accepted_path: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, kv_cache: _Optional[_Union[_types_pb2.KvCacheHandle, _Mapping]] = ..., outputs: _Optional[_Iterable[_Union[_types_pb2.StepOutput, _Mapping]]] = ..., accepted: _Optional[int] = ..., timing: _Optional[_Union[_types_pb2.StepTiming, _Mapping]] = ..., replayed_tokens: _Optional[int] = ..., token_logprobs: _Optional[_Iterable[float]] = ..., token_is_argmax: _Optional[_Iterable[bool]] = ..., accepted_path: _Optional[_Iterable[int]] = ...) -> None: ...

class UnifiedForwardRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[UnifiedForwardItem]
    def __init__(self, items: _Optional[_Iterable[_Union[UnifiedForwardItem, _Mapping]]] = ...) -> None: ...

class UnifiedForwardItem(_message.Message):
    __slots__ = ("cache_id", "token_ids", "position", "is_final_chunk", "output", "priority", "adapter_id")
    CACHE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    IS_FINAL_CHUNK_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    cache_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    position: int
    is_final_chunk: bool
    output: _types_pb2.OutputOptions
    priority: _types_pb2.Priority
    adapter_id: str
    def __init__(self, cache_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., position: _Optional[int] = ..., is_final_chunk: _Optional[bool] = ..., output: _Optional[_Union[_types_pb2.OutputOptions, _Mapping]] = ..., priority: _Optional[_Union[_types_pb2.Priority, str]] = ..., adapter_id: _Optional[str] = ...) -> None: ...

class UnifiedForwardResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[UnifiedForwardResult]
    def __init__(self, results: _Optional[_Iterable[_Union[UnifiedForwardResult, _Mapping]]] = ...) -> None: ...

class UnifiedForwardResult(_message.Message):
    __slots__ = ("response", "error")
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    response: UnifiedForwardItemResponse
    error: _status_pb2.Status
    def __init__(self, response: _Optional[_Union[UnifiedForwardItemResponse, _Mapping]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class UnifiedForwardItemResponse(_message.Message):
    __slots__ = ("kv_cache", "output", "reused_tokens", "timing", "replayed_tokens")
    KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    kv_cache: _types_pb2.KvCacheHandle
    output: _types_pb2.StepOutput
    reused_tokens: int
    timing: _types_pb2.StepTiming
    replayed_tokens: int
    def __init__(self, kv_cache: _Optional[_Union[_types_pb2.KvCacheHandle, _Mapping]] = ..., output: _Optional[_Union[_types_pb2.StepOutput, _Mapping]] = ..., reused_tokens: _Optional[int] = ..., timing: _Optional[_Union[_types_pb2.StepTiming, _Mapping]] = ..., replayed_tokens: _Optional[int] = ...) -> None: ...

class ForwardRequest(_message.Message):
    __slots__ = ("token_ids", "output", "priority", "score_from", "cache_salt", "adapter_id", "experts", "experts_from")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SCORE_FROM_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FROM_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    output: _types_pb2.OutputOptions
    priority: _types_pb2.Priority
    score_from: int
    cache_salt: str
    adapter_id: str
    experts: bytes
    experts_from: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., output: _Optional[_Union[_types_pb2.OutputOptions, _Mapping]] = ..., priority: _Optional[_Union[_types_pb2.Priority, str]] = ..., score_from: _Optional[int] = ..., cache_salt: _Optional[str] = ..., adapter_id: _Optional[str] = ..., experts: _Optional[bytes] = ..., experts_from: _Optional[int] = ...) -> None: ...

class ForwardResponse(_message.Message):
    __slots__ = ("outputs", "token_logprobs", "timing", "token_is_argmax", "reused_tokens", "weights_version", "adapter_version")
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IS_ARGMAX_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[_types_pb2.StepOutput]
    token_logprobs: _containers.RepeatedScalarFieldContainer[float]
    timing: _types_pb2.StepTiming
    token_is_argmax: _containers.RepeatedScalarFieldContainer[bool]
    reused_tokens: int
    weights_version: int
    adapter_version: int
    def __init__(self, outputs: _Optional[_Iterable[_Union[_types_pb2.StepOutput, _Mapping]]] = ..., token_logprobs: _Optional[_Iterable[float]] = ..., timing: _Optional[_Union[_types_pb2.StepTiming, _Mapping]] = ..., token_is_argmax: _Optional[_Iterable[bool]] = ..., reused_tokens: _Optional[int] = ..., weights_version: _Optional[int] = ..., adapter_version: _Optional[int] = ...) -> None: ...

class BatchForwardRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[ForwardRequest]
    def __init__(self, items: _Optional[_Iterable[_Union[ForwardRequest, _Mapping]]] = ...) -> None: ...

class BatchForwardResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[BatchForwardResult]
    def __init__(self, results: _Optional[_Iterable[_Union[BatchForwardResult, _Mapping]]] = ...) -> None: ...

class BatchForwardResult(_message.Message):
    __slots__ = ("response", "error")
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    response: ForwardResponse
    error: _status_pb2.Status
    def __init__(self, response: _Optional[_Union[ForwardResponse, _Mapping]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class ForkCacheRequest(_message.Message):
    __slots__ = ("cache_id", "count", "release", "request_id")
    CACHE_ID_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    cache_id: str
    count: int
    release: _containers.RepeatedScalarFieldContainer[str]
    request_id: str
    def __init__(self, cache_id: _Optional[str] = ..., count: _Optional[int] = ..., release: _Optional[_Iterable[str]] = ..., request_id: _Optional[str] = ...) -> None: ...

class ForkCacheResponse(_message.Message):
    __slots__ = ("kv_caches",)
    KV_CACHES_FIELD_NUMBER: _ClassVar[int]
    kv_caches: _containers.RepeatedCompositeFieldContainer[_types_pb2.KvCacheHandle]
    def __init__(self, kv_caches: _Optional[_Iterable[_Union[_types_pb2.KvCacheHandle, _Mapping]]] = ...) -> None: ...

class ForkCachesRequest(_message.Message):
    __slots__ = ("forks", "release", "request_id")
    FORKS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    forks: _containers.RepeatedCompositeFieldContainer[ForkSource]
    release: _containers.RepeatedScalarFieldContainer[str]
    request_id: str
    def __init__(self, forks: _Optional[_Iterable[_Union[ForkSource, _Mapping]]] = ..., release: _Optional[_Iterable[str]] = ..., request_id: _Optional[str] = ...) -> None: ...

class ForkSource(_message.Message):
    __slots__ = ("cache_id", "count", "position")
    CACHE_ID_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    cache_id: str
    count: int
    position: int
    def __init__(self, cache_id: _Optional[str] = ..., count: _Optional[int] = ..., position: _Optional[int] = ...) -> None: ...

class ForkCachesResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[ForkedCaches]
    def __init__(self, results: _Optional[_Iterable[_Union[ForkedCaches, _Mapping]]] = ...) -> None: ...

class ForkedCaches(_message.Message):
    __slots__ = ("kv_caches",)
    KV_CACHES_FIELD_NUMBER: _ClassVar[int]
    kv_caches: _containers.RepeatedCompositeFieldContainer[_types_pb2.KvCacheHandle]
    def __init__(self, kv_caches: _Optional[_Iterable[_Union[_types_pb2.KvCacheHandle, _Mapping]]] = ...) -> None: ...

class TruncateKVRequest(_message.Message):
    __slots__ = ("cache_id", "new_len", "position")
    CACHE_ID_FIELD_NUMBER: _ClassVar[int]
    NEW_LEN_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    cache_id: str
    new_len: int
    position: int
    def __init__(self, cache_id: _Optional[str] = ..., new_len: _Optional[int] = ..., position: _Optional[int] = ...) -> None: ...

class TruncateKVResponse(_message.Message):
    __slots__ = ("kv_cache",)
    KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    kv_cache: _types_pb2.KvCacheHandle
    def __init__(self, kv_cache: _Optional[_Union[_types_pb2.KvCacheHandle, _Mapping]] = ...) -> None: ...

class ReleaseCacheRequest(_message.Message):
    __slots__ = ("cache_id", "request_ids")
    CACHE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    cache_id: str
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, cache_id: _Optional[str] = ..., request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseCacheResponse(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: bool
    def __init__(self, released: _Optional[bool] = ...) -> None: ...

class ListCachesRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListCachesResponse(_message.Message):
    __slots__ = ("kv_caches", "next_page_token")
    KV_CACHES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    kv_caches: _containers.RepeatedCompositeFieldContainer[_types_pb2.KvCacheHandle]
    next_page_token: str
    def __init__(self, kv_caches: _Optional[_Iterable[_Union[_types_pb2.KvCacheHandle, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class RenewCacheRequest(_message.Message):
    __slots__ = ("cache_id", "lease")
    CACHE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    cache_id: str
    lease: _duration_pb2.Duration
    def __init__(self, cache_id: _Optional[str] = ..., lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RenewCacheResponse(_message.Message):
    __slots__ = ("kv_cache",)
    KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    kv_cache: _types_pb2.KvCacheHandle
    def __init__(self, kv_cache: _Optional[_Union[_types_pb2.KvCacheHandle, _Mapping]] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("calls",)
    CALLS_FIELD_NUMBER: _ClassVar[int]
    calls: _containers.RepeatedCompositeFieldContainer[SessionCall]
    def __init__(self, calls: _Optional[_Iterable[_Union[SessionCall, _Mapping]]] = ...) -> None: ...

class SessionCall(_message.Message):
    __slots__ = ("tag", "prefill", "decode", "forward_verify", "forward", "batch_prefill", "batch_decode", "unified_forward", "batch_forward", "fork_cache", "fork_caches", "truncate_kv", "release_cache", "renew_cache", "timeout")
    TAG_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    FORWARD_VERIFY_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    BATCH_PREFILL_FIELD_NUMBER: _ClassVar[int]
    BATCH_DECODE_FIELD_NUMBER: _ClassVar[int]
    UNIFIED_FORWARD_FIELD_NUMBER: _ClassVar[int]
    BATCH_FORWARD_FIELD_NUMBER: _ClassVar[int]
    FORK_CACHE_FIELD_NUMBER: _ClassVar[int]
    FORK_CACHES_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_KV_FIELD_NUMBER: _ClassVar[int]
    RELEASE_CACHE_FIELD_NUMBER: _ClassVar[int]
    RENEW_CACHE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    tag: int
    prefill: PrefillRequest
    decode: DecodeRequest
    forward_verify: ForwardVerifyRequest
    forward: ForwardRequest
    batch_prefill: BatchPrefillRequest
    batch_decode: BatchDecodeRequest
    unified_forward: UnifiedForwardRequest
    batch_forward: BatchForwardRequest
    fork_cache: ForkCacheRequest
    fork_caches: ForkCachesRequest
    truncate_kv: TruncateKVRequest
    release_cache: ReleaseCacheRequest
    renew_cache: RenewCacheRequest
    timeout: _duration_pb2.Duration
    def __init__(self, tag: _Optional[int] = ..., prefill: _Optional[_Union[PrefillRequest, _Mapping]] = ..., decode: _Optional[_Union[DecodeRequest, _Mapping]] = ..., forward_verify: _Optional[_Union[ForwardVerifyRequest, _Mapping]] = ..., forward: _Optional[_Union[ForwardRequest, _Mapping]] = ..., batch_prefill: _Optional[_Union[BatchPrefillRequest, _Mapping]] = ..., batch_decode: _Optional[_Union[BatchDecodeRequest, _Mapping]] = ..., unified_forward: _Optional[_Union[UnifiedForwardRequest, _Mapping]] = ..., batch_forward: _Optional[_Union[BatchForwardRequest, _Mapping]] = ..., fork_cache: _Optional[_Union[ForkCacheRequest, _Mapping]] = ..., fork_caches: _Optional[_Union[ForkCachesRequest, _Mapping]] = ..., truncate_kv: _Optional[_Union[TruncateKVRequest, _Mapping]] = ..., release_cache: _Optional[_Union[ReleaseCacheRequest, _Mapping]] = ..., renew_cache: _Optional[_Union[RenewCacheRequest, _Mapping]] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[SessionResult]
    def __init__(self, results: _Optional[_Iterable[_Union[SessionResult, _Mapping]]] = ...) -> None: ...

class SessionResult(_message.Message):
    __slots__ = ("tag", "prefill", "decode", "forward_verify", "forward", "batch_prefill", "batch_decode", "unified_forward", "batch_forward", "fork_cache", "fork_caches", "truncate_kv", "release_cache", "renew_cache", "error")
    TAG_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    FORWARD_VERIFY_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    BATCH_PREFILL_FIELD_NUMBER: _ClassVar[int]
    BATCH_DECODE_FIELD_NUMBER: _ClassVar[int]
    UNIFIED_FORWARD_FIELD_NUMBER: _ClassVar[int]
    BATCH_FORWARD_FIELD_NUMBER: _ClassVar[int]
    FORK_CACHE_FIELD_NUMBER: _ClassVar[int]
    FORK_CACHES_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_KV_FIELD_NUMBER: _ClassVar[int]
    RELEASE_CACHE_FIELD_NUMBER: _ClassVar[int]
    RENEW_CACHE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    tag: int
    prefill: PrefillResponse
    decode: DecodeResponse
    forward_verify: ForwardVerifyResponse
    forward: ForwardResponse
    batch_prefill: BatchPrefillResponse
    batch_decode: BatchDecodeResponse
    unified_forward: UnifiedForwardResponse
    batch_forward: BatchForwardResponse
    fork_cache: ForkCacheResponse
    fork_caches: ForkCachesResponse
    truncate_kv: TruncateKVResponse
    release_cache: ReleaseCacheResponse
    renew_cache: RenewCacheResponse
    error: _status_pb2.Status
    def __init__(self, tag: _Optional[int] = ..., prefill: _Optional[_Union[PrefillResponse, _Mapping]] = ..., decode: _Optional[_Union[DecodeResponse, _Mapping]] = ..., forward_verify: _Optional[_Union[ForwardVerifyResponse, _Mapping]] = ..., forward: _Optional[_Union[ForwardResponse, _Mapping]] = ..., batch_prefill: _Optional[_Union[BatchPrefillResponse, _Mapping]] = ..., batch_decode: _Optional[_Union[BatchDecodeResponse, _Mapping]] = ..., unified_forward: _Optional[_Union[UnifiedForwardResponse, _Mapping]] = ..., batch_forward: _Optional[_Union[BatchForwardResponse, _Mapping]] = ..., fork_cache: _Optional[_Union[ForkCacheResponse, _Mapping]] = ..., fork_caches: _Optional[_Union[ForkCachesResponse, _Mapping]] = ..., truncate_kv: _Optional[_Union[TruncateKVResponse, _Mapping]] = ..., release_cache: _Optional[_Union[ReleaseCacheResponse, _Mapping]] = ..., renew_cache: _Optional[_Union[RenewCacheResponse, _Mapping]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ("include_tokenizer", "include_chat_template")
    INCLUDE_TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    include_tokenizer: bool
    include_chat_template: bool
    def __init__(self, include_tokenizer: _Optional[bool] = ..., include_chat_template: _Optional[bool] = ...) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("model", "tokenizer_json", "chat_template", "sampling_defaults", "device", "special_tokens")
    class SpecialTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_JSON_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: _types_pb2.ModelDescription
    tokenizer_json: bytes
    chat_template: _types_pb2.ChatTemplate
    sampling_defaults: _types_pb2.SamplingParams
    device: str
    special_tokens: _containers.ScalarMap[str, str]
    def __init__(self, model: _Optional[_Union[_types_pb2.ModelDescription, _Mapping]] = ..., tokenizer_json: _Optional[bytes] = ..., chat_template: _Optional[_Union[_types_pb2.ChatTemplate, _Mapping]] = ..., sampling_defaults: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., device: _Optional[str] = ..., special_tokens: _Optional[_Mapping[str, str]] = ...) -> None: ...

class GetCapabilitiesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetCapabilitiesResponse(_message.Message):
    __slots__ = ("version", "executor", "limits", "max_top_logprobs")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    version: str
    executor: _types_pb2.ExecutorCapabilities
    limits: GatewayLimits
    max_top_logprobs: int
    def __init__(self, version: _Optional[str] = ..., executor: _Optional[_Union[_types_pb2.ExecutorCapabilities, _Mapping]] = ..., limits: _Optional[_Union[GatewayLimits, _Mapping]] = ..., max_top_logprobs: _Optional[int] = ...) -> None: ...

class GatewayLimits(_message.Message):
    __slots__ = ("max_request_bytes", "max_response_bytes", "max_calls_per_message", "max_items_per_call", "max_session_calls", "max_queued_operations", "max_caches", "max_journal_bytes", "max_unread_bytes", "max_wait", "max_arriving_bytes", "max_sessions", "max_connections", "message_timeout", "max_executions")
    MAX_REQUEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_RESPONSE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_CALLS_PER_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    MAX_ITEMS_PER_CALL_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSION_CALLS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_CACHES_FIELD_NUMBER: _ClassVar[int]
    MAX_JOURNAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_UNREAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_FIELD_NUMBER: _ClassVar[int]
    MAX_ARRIVING_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    MAX_EXECUTIONS_FIELD_NUMBER: _ClassVar[int]
    max_request_bytes: int
    max_response_bytes: int
    max_calls_per_message: int
    max_items_per_call: int
    max_session_calls: int
    max_queued_operations: int
    max_caches: int
    max_journal_bytes: int
    max_unread_bytes: int
    max_wait: _duration_pb2.Duration
    max_arriving_bytes: int
    max_sessions: int
    max_connections: int
    message_timeout: _duration_pb2.Duration
    max_executions: int
    def __init__(self, max_request_bytes: _Optional[int] = ..., max_response_bytes: _Optional[int] = ..., max_calls_per_message: _Optional[int] = ..., max_items_per_call: _Optional[int] = ..., max_session_calls: _Optional[int] = ..., max_queued_operations: _Optional[int] = ..., max_caches: _Optional[int] = ..., max_journal_bytes: _Optional[int] = ..., max_unread_bytes: _Optional[int] = ..., max_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_arriving_bytes: _Optional[int] = ..., max_sessions: _Optional[int] = ..., max_connections: _Optional[int] = ..., message_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_executions: _Optional[int] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("state", "workers", "uptime", "caches", "operations_in_flight", "memory_bytes", "version", "tasks", "longest_stall", "journal_bytes", "unread_bytes", "arriving_requests", "sessions", "connections", "refusals", "model_id", "fingerprint", "weights_version")
    class RefusalsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    STATE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    CACHES_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    LONGEST_STALL_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNREAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    ARRIVING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    state: ServerState
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    uptime: _duration_pb2.Duration
    caches: int
    operations_in_flight: int
    memory_bytes: int
    version: str
    tasks: int
    longest_stall: _duration_pb2.Duration
    journal_bytes: int
    unread_bytes: int
    arriving_requests: int
    sessions: int
    connections: int
    refusals: _containers.ScalarMap[str, int]
    model_id: str
    fingerprint: str
    weights_version: int
    def __init__(self, state: _Optional[_Union[ServerState, str]] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., uptime: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., caches: _Optional[int] = ..., operations_in_flight: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., version: _Optional[str] = ..., tasks: _Optional[int] = ..., longest_stall: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., journal_bytes: _Optional[int] = ..., unread_bytes: _Optional[int] = ..., arriving_requests: _Optional[int] = ..., sessions: _Optional[int] = ..., connections: _Optional[int] = ..., refusals: _Optional[_Mapping[str, int]] = ..., model_id: _Optional[str] = ..., fingerprint: _Optional[str] = ..., weights_version: _Optional[int] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker_id", "pid", "epoch", "state", "load_progress", "executor", "pool", "counts", "operations_in_flight", "memory_bytes", "device_memory_bytes", "device_memory_peak_bytes", "step_age", "suspect", "trouble", "address", "kv_disk")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_MEMORY_PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_FIELD_NUMBER: _ClassVar[int]
    SUSPECT_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    KV_DISK_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    pid: int
    epoch: int
    state: WorkerState
    load_progress: float
    executor: _types_pb2.ExecutorCapabilities
    pool: _types_pb2.PoolUsage
    counts: _types_pb2.StepCounts
    operations_in_flight: int
    memory_bytes: int
    device_memory_bytes: int
    device_memory_peak_bytes: int
    step_age: _duration_pb2.Duration
    suspect: bool
    trouble: str
    address: str
    kv_disk: _types_pb2.KvDiskUsage
    def __init__(self, worker_id: _Optional[str] = ..., pid: _Optional[int] = ..., epoch: _Optional[int] = ..., state: _Optional[_Union[WorkerState, str]] = ..., load_progress: _Optional[float] = ..., executor: _Optional[_Union[_types_pb2.ExecutorCapabilities, _Mapping]] = ..., pool: _Optional[_Union[_types_pb2.PoolUsage, _Mapping]] = ..., counts: _Optional[_Union[_types_pb2.StepCounts, _Mapping]] = ..., operations_in_flight: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., device_memory_bytes: _Optional[int] = ..., device_memory_peak_bytes: _Optional[int] = ..., step_age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., suspect: _Optional[bool] = ..., trouble: _Optional[str] = ..., address: _Optional[str] = ..., kv_disk: _Optional[_Union[_types_pb2.KvDiskUsage, _Mapping]] = ...) -> None: ...

class GetCacheMetricsRequest(_message.Message):
    __slots__ = ("check_integrity",)
    CHECK_INTEGRITY_FIELD_NUMBER: _ClassVar[int]
    check_integrity: bool
    def __init__(self, check_integrity: _Optional[bool] = ...) -> None: ...

class GetCacheMetricsResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerCacheMetrics]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerCacheMetrics, _Mapping]]] = ...) -> None: ...

class WorkerCacheMetrics(_message.Message):
    __slots__ = ("worker_id", "pool", "pool_intact")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    POOL_INTACT_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    pool: _types_pb2.PoolUsage
    pool_intact: bool
    def __init__(self, worker_id: _Optional[str] = ..., pool: _Optional[_Union[_types_pb2.PoolUsage, _Mapping]] = ..., pool_intact: _Optional[bool] = ...) -> None: ...

class GetLoraMetricsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoraMetricsResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerLoraMetrics]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerLoraMetrics, _Mapping]]] = ...) -> None: ...

class WorkerLoraMetrics(_message.Message):
    __slots__ = ("worker_id", "adapters")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    adapters: _containers.RepeatedCompositeFieldContainer[_types_pb2.LoraAdapterMetrics]
    def __init__(self, worker_id: _Optional[str] = ..., adapters: _Optional[_Iterable[_Union[_types_pb2.LoraAdapterMetrics, _Mapping]]] = ...) -> None: ...
