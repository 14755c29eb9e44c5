from google.protobuf import empty_pb2 as _empty_pb2
from quire.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OperationKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OPERATION_KIND_UNSPECIFIED: _ClassVar[OperationKind]
    OPERATION_KIND_PREFILL: _ClassVar[OperationKind]
    OPERATION_KIND_DECODE: _ClassVar[OperationKind]
    OPERATION_KIND_VERIFY: _ClassVar[OperationKind]
    OPERATION_KIND_SCORE: _ClassVar[OperationKind]
    OPERATION_KIND_REPLAY: _ClassVar[OperationKind]

class WorkerErrorReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ERROR_REASON_UNSPECIFIED: _ClassVar[WorkerErrorReason]
    WORKER_ERROR_REASON_KV_MISSING: _ClassVar[WorkerErrorReason]
    WORKER_ERROR_REASON_KV_EXHAUSTED: _ClassVar[WorkerErrorReason]
    WORKER_ERROR_REASON_FAULT: _ClassVar[WorkerErrorReason]
    WORKER_ERROR_REASON_TIMEOUT: _ClassVar[WorkerErrorReason]
    WORKER_ERROR_REASON_UNSUPPORTED: _ClassVar[WorkerErrorReason]
    WORKER_ERROR_REASON_ADAPTER: _ClassVar[WorkerErrorReason]
    WORKER_ERROR_REASON_WEIGHTS: _ClassVar[WorkerErrorReason]
OPERATION_KIND_UNSPECIFIED: OperationKind
OPERATION_KIND_PREFILL: OperationKind
OPERATION_KIND_DECODE: OperationKind
OPERATION_KIND_VERIFY: OperationKind
OPERATION_KIND_SCORE: OperationKind
OPERATION_KIND_REPLAY: OperationKind
WORKER_ERROR_REASON_UNSPECIFIED: WorkerErrorReason
WORKER_ERROR_REASON_KV_MISSING: WorkerErrorReason
WORKER_ERROR_REASON_KV_EXHAUSTED: WorkerErrorReason
WORKER_ERROR_REASON_FAULT: WorkerErrorReason
WORKER_ERROR_REASON_TIMEOUT: WorkerErrorReason
WORKER_ERROR_REASON_UNSUPPORTED: WorkerErrorReason
WORKER_ERROR_REASON_ADAPTER: WorkerErrorReason
WORKER_ERROR_REASON_WEIGHTS: WorkerErrorReason

class Hello(_message.Message):
    __slots__ = ("protocol", "name", "gateway_id", "epoch", "secret")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    protocol: str
    name: str
    gateway_id: str
    epoch: int
    secret: str
    def __init__(self, protocol: _Optional[str] = ..., name: _Optional[str] = ..., gateway_id: _Optional[str] = ..., epoch: _Optional[int] = ..., secret: _Optional[str] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("gateway_id", "epoch", "silence_timeout_s", "config", "secret")
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SILENCE_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    epoch: int
    silence_timeout_s: float
    config: WorkerConfig
    secret: str
    def __init__(self, gateway_id: _Optional[str] = ..., epoch: _Optional[int] = ..., silence_timeout_s: _Optional[float] = ..., config: _Optional[_Union[WorkerConfig, _Mapping]] = ..., secret: _Optional[str] = ...) -> None: ...

class WorkerConfig(_message.Message):
    __slots__ = ("worker_id", "model", "device", "device_index", "dtype", "kv_pages", "gpu_memory_utilization", "cuda_graphs", "threads", "max_batch_tokens", "max_batch_items", "max_request_bytes", "max_response_bytes", "log_level", "log_format", "model_backend", "no_self_check", "model_was_proved", "orphan_grace_s", "batch_invariant", "max_lora_adapters", "max_lora_bytes", "max_lora_rank", "workers", "tensor_parallel", "quantization", "kv_disk", "kv_disk_gb", "kv_cache_dtype", "draft_model", "head_dtype", "activation_quantization")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_PAGES_FIELD_NUMBER: _ClassVar[int]
    GPU_MEMORY_UTILIZATION_FIELD_NUMBER: _ClassVar[int]
    CUDA_GRAPHS_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_ITEMS_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_RESPONSE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOG_LEVEL_FIELD_NUMBER: _ClassVar[int]
    LOG_FORMAT_FIELD_NUMBER: _ClassVar[int]
    MODEL_BACKEND_FIELD_NUMBER: _ClassVar[int]
    NO_SELF_CHECK_FIELD_NUMBER: _ClassVar[int]
    MODEL_WAS_PROVED_FIELD_NUMBER: _ClassVar[int]
    ORPHAN_GRACE_S_FIELD_NUMBER: _ClassVar[int]
    BATCH_INVARIANT_FIELD_NUMBER: _ClassVar[int]
    MAX_LORA_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_LORA_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_LORA_RANK_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    KV_DISK_FIELD_NUMBER: _ClassVar[int]
    KV_DISK_GB_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_MODEL_FIELD_NUMBER: _ClassVar[int]
    HEAD_DTYPE_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    model: str
    device: str
    device_index: int
    dtype: str
    kv_pages: int
    gpu_memory_utilization: float
    cuda_graphs: str
    threads: int
    max_batch_tokens: int
    max_batch_items: int
    max_request_bytes: int
    max_response_bytes: int
    log_level: str
    log_format: str
    model_backend: str
    no_self_check: str
    model_was_proved: bool
    orphan_grace_s: float
    batch_invariant: str
    max_lora_adapters: int
    max_lora_bytes: int
    max_lora_rank: int
    workers: int
    tensor_parallel: int
    quantization: str
    kv_disk: str
    kv_disk_gb: float
    kv_cache_dtype: str
    draft_model: str
    head_dtype: str
    activation_quantization: str
    def __init__(self, worker_id: _Optional[str] = ..., model: _Optional[str] = ..., device: _Optional[str] = ..., device_index: _Optional[int] = ..., dtype: _Optional[str] = ..., kv_pages: _Optional[int] = ..., gpu_memory_utilization: _Optional[float] = ..., cuda_graphs: _Optional[str] = ..., threads: _Optional[int] = ..., max_batch_tokens: _Optional[int] = ..., max_batch_items: _Optional[int] = ..., max_request_bytes: _Optional[int] = ..., max_response_bytes: _Optional[int] = ..., log_level: _Optional[str] = ..., log_format: _Optional[str] = ..., model_backend: _Optional[str] = ..., no_self_check: _Optional[str] = ..., model_was_proved: _Optional[bool] = ..., orphan_grace_s: _Optional[float] = ..., batch_invariant: _Optional[str] = ..., max_lora_adapters: _Optional[int] = ..., max_lora_bytes: _Optional[int] = ..., max_lora_rank: _Optional[int] = ..., workers: _Optional[int] = ..., tensor_parallel: _Optional[int] = ..., quantization: _Optional[str] = ..., kv_disk: _Optional[str] = ..., kv_disk_gb: _Optional[float] = ..., kv_cache_dtype: _Optional[str] = ..., draft_model: _Optional[str] = ..., head_dtype: _Optional[str] = ..., activation_quantization: _Optional[str] = ...) -> None: ...

class ConnectRequest(_message.Message):
    __slots__ = ("commands", "lease", "give_back", "refusal")
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    GIVE_BACK_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[WorkerCommand]
    lease: Lease
    give_back: bool
    refusal: str
    def __init__(self, commands: _Optional[_Iterable[_Union[WorkerCommand, _Mapping]]] = ..., lease: _Optional[_Union[Lease, _Mapping]] = ..., give_back: _Optional[bool] = ..., refusal: _Optional[str] = ...) -> None: ...

class WorkerCommand(_message.Message):
    __slots__ = ("op_id", "forward", "fork", "truncate", "release", "abort", "snapshot", "adopt", "adapter", "replace_weights", "decodes")
    OP_ID_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    ADOPT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    REPLACE_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    DECODES_FIELD_NUMBER: _ClassVar[int]
    op_id: int
    forward: ForwardCommand
    fork: ForkCommand
    truncate: TruncateCommand
    release: ReleaseCommand
    abort: AbortCommand
    snapshot: SnapshotCommand
    adopt: AdoptCommand
    adapter: AdapterCommand
    replace_weights: ReplaceWeightsCommand
    decodes: DecodesCommand
    def __init__(self, op_id: _Optional[int] = ..., forward: _Optional[_Union[ForwardCommand, _Mapping]] = ..., fork: _Optional[_Union[ForkCommand, _Mapping]] = ..., truncate: _Optional[_Union[TruncateCommand, _Mapping]] = ..., release: _Optional[_Union[ReleaseCommand, _Mapping]] = ..., abort: _Optional[_Union[AbortCommand, _Mapping]] = ..., snapshot: _Optional[_Union[SnapshotCommand, _Mapping]] = ..., adopt: _Optional[_Union[AdoptCommand, _Mapping]] = ..., adapter: _Optional[_Union[AdapterCommand, _Mapping]] = ..., replace_weights: _Optional[_Union[ReplaceWeightsCommand, _Mapping]] = ..., decodes: _Optional[_Union[DecodesCommand, _Mapping]] = ...) -> None: ...

class ForwardOptions(_message.Message):
    __slots__ = ("rows", "scored", "output", "verify_rows", "sample_seeds", "parents", "accept", "experts", "experts_from", "end_token_ids", "draft_tokens")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SCORED_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    VERIFY_ROWS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_SEEDS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FROM_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    rows: int
    scored: int
    output: _types_pb2.OutputOptions
    verify_rows: _containers.RepeatedCompositeFieldContainer[_types_pb2.VerifyRow]
    sample_seeds: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    accept: _types_pb2.VerifyAccept
    experts: bytes
    experts_from: int
    end_token_ids: _containers.RepeatedScalarFieldContainer[int]
    draft_tokens: int
    def __init__(self, rows: _Optional[int] = ..., scored: _Optional[int] = ..., output: _Optional[_Union[_types_pb2.OutputOptions, _Mapping]] = ..., verify_rows: _Optional[_Iterable[_Union[_types_pb2.VerifyRow, _Mapping]]] = ..., sample_seeds: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., accept: _Optional[_Union[_types_pb2.VerifyAccept, str]] = ..., experts: _Optional[bytes] = ..., experts_from: _Optional[int] = ..., end_token_ids: _Optional[_Iterable[int]] = ..., draft_tokens: _Optional[int] = ...) -> None: ...

class ForwardCommand(_message.Message):
    __slots__ = ("sequence", "position", "token_ids", "options", "default_seed", "keep_all", "prompt_len", "ephemeral", "timeout_ns", "kind", "caller", "salt", "priority", "prelaunch", "adapter")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SEED_FIELD_NUMBER: _ClassVar[int]
    KEEP_ALL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    EPHEMERAL_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_NS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PRELAUNCH_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    options: bytes
    default_seed: int
    keep_all: bool
    prompt_len: int
    ephemeral: bool
    timeout_ns: int
    kind: OperationKind
    caller: int
    salt: bytes
    priority: _types_pb2.Priority
    prelaunch: int
    adapter: int
    def __init__(self, sequence: _Optional[int] = ..., position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., options: _Optional[bytes] = ..., default_seed: _Optional[int] = ..., keep_all: _Optional[bool] = ..., prompt_len: _Optional[int] = ..., ephemeral: _Optional[bool] = ..., timeout_ns: _Optional[int] = ..., kind: _Optional[_Union[OperationKind, str]] = ..., caller: _Optional[int] = ..., salt: _Optional[bytes] = ..., priority: _Optional[_Union[_types_pb2.Priority, str]] = ..., prelaunch: _Optional[int] = ..., adapter: _Optional[int] = ...) -> None: ...

class DecodesCommand(_message.Message):
    __slots__ = ("rows", "options")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    rows: bytes
    options: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, rows: _Optional[bytes] = ..., options: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ForkCommand(_message.Message):
    __slots__ = ("sequence", "children")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    children: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence: _Optional[int] = ..., children: _Optional[_Iterable[int]] = ...) -> None: ...

class TruncateCommand(_message.Message):
    __slots__ = ("sequence", "new_len")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NEW_LEN_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    new_len: int
    def __init__(self, sequence: _Optional[int] = ..., new_len: _Optional[int] = ...) -> None: ...

class ReleaseCommand(_message.Message):
    __slots__ = ("sequences",)
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequences: _Optional[_Iterable[int]] = ...) -> None: ...

class AbortCommand(_message.Message):
    __slots__ = ("target_op_id",)
    TARGET_OP_ID_FIELD_NUMBER: _ClassVar[int]
    target_op_id: int
    def __init__(self, target_op_id: _Optional[int] = ...) -> None: ...

class SnapshotCommand(_message.Message):
    __slots__ = ("ordered", "check_integrity")
    ORDERED_FIELD_NUMBER: _ClassVar[int]
    CHECK_INTEGRITY_FIELD_NUMBER: _ClassVar[int]
    ordered: bool
    check_integrity: bool
    def __init__(self, ordered: _Optional[bool] = ..., check_integrity: _Optional[bool] = ...) -> None: ...

class AdoptCommand(_message.Message):
    __slots__ = ("items",)
    class Item(_message.Message):
        __slots__ = ("sequence", "length", "digest")
        SEQUENCE_FIELD_NUMBER: _ClassVar[int]
        LENGTH_FIELD_NUMBER: _ClassVar[int]
        DIGEST_FIELD_NUMBER: _ClassVar[int]
        sequence: int
        length: int
        digest: bytes
        def __init__(self, sequence: _Optional[int] = ..., length: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[AdoptCommand.Item]
    def __init__(self, items: _Optional[_Iterable[_Union[AdoptCommand.Item, _Mapping]]] = ...) -> None: ...

class AdapterCommand(_message.Message):
    __slots__ = ("added", "removed", "load", "all")
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    added: _containers.RepeatedCompositeFieldContainer[AdapterSource]
    removed: _containers.RepeatedScalarFieldContainer[int]
    load: bool
    all: bool
    def __init__(self, added: _Optional[_Iterable[_Union[AdapterSource, _Mapping]]] = ..., removed: _Optional[_Iterable[int]] = ..., load: _Optional[bool] = ..., all: _Optional[bool] = ...) -> None: ...

class ReplaceWeightsCommand(_message.Message):
    __slots__ = ("read", "apply", "discard", "keep_sequences")
    READ_FIELD_NUMBER: _ClassVar[int]
    APPLY_FIELD_NUMBER: _ClassVar[int]
    DISCARD_FIELD_NUMBER: _ClassVar[int]
    KEEP_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    read: str
    apply: _empty_pb2.Empty
    discard: _empty_pb2.Empty
    keep_sequences: bool
    def __init__(self, read: _Optional[str] = ..., apply: _Optional[_Union[_empty_pb2.Empty, _Mapping]] = ..., discard: _Optional[_Union[_empty_pb2.Empty, _Mapping]] = ..., keep_sequences: _Optional[bool] = ...) -> None: ...

class AdapterSource(_message.Message):
    __slots__ = ("adapter", "directory", "digest", "pinned")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    adapter: int
    directory: str
    digest: str
    pinned: bool
    def __init__(self, adapter: _Optional[int] = ..., directory: _Optional[str] = ..., digest: _Optional[str] = ..., pinned: _Optional[bool] = ...) -> None: ...

class ConnectResponse(_message.Message):
    __slots__ = ("events", "pages_available", "hello")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    PAGES_AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[WorkerEvent]
    pages_available: int
    hello: Hello
    def __init__(self, events: _Optional[_Iterable[_Union[WorkerEvent, _Mapping]]] = ..., pages_available: _Optional[int] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ...) -> None: ...

class WorkerEvent(_message.Message):
    __slots__ = ("op_id", "forward", "done", "error", "progress", "ready", "snapshot", "adopted", "adapter_loaded", "weights_read", "decodes")
    OP_ID_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_LOADED_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_READ_FIELD_NUMBER: _ClassVar[int]
    DECODES_FIELD_NUMBER: _ClassVar[int]
    op_id: int
    forward: ForwardDone
    done: ControlDone
    error: WorkerError
    progress: LoadProgress
    ready: WorkerReady
    snapshot: WorkerSnapshot
    adopted: Adopted
    adapter_loaded: AdapterLoaded
    weights_read: WeightsRead
    decodes: DecodesDone
    def __init__(self, op_id: _Optional[int] = ..., forward: _Optional[_Union[ForwardDone, _Mapping]] = ..., done: _Optional[_Union[ControlDone, _Mapping]] = ..., error: _Optional[_Union[WorkerError, _Mapping]] = ..., progress: _Optional[_Union[LoadProgress, _Mapping]] = ..., ready: _Optional[_Union[WorkerReady, _Mapping]] = ..., snapshot: _Optional[_Union[WorkerSnapshot, _Mapping]] = ..., adopted: _Optional[_Union[Adopted, _Mapping]] = ..., adapter_loaded: _Optional[_Union[AdapterLoaded, _Mapping]] = ..., weights_read: _Optional[_Union[WeightsRead, _Mapping]] = ..., decodes: _Optional[_Union[DecodesDone, _Mapping]] = ...) -> None: ...

class DecodesDone(_message.Message):
    __slots__ = ("rows", "outputs")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    rows: bytes
    outputs: _containers.RepeatedCompositeFieldContainer[_types_pb2.StepOutput]
    def __init__(self, rows: _Optional[bytes] = ..., outputs: _Optional[_Iterable[_Union[_types_pb2.StepOutput, _Mapping]]] = ...) -> None: ...

class ForwardDone(_message.Message):
    __slots__ = ("outputs", "kept", "reused_tokens", "timing", "token_logprobs", "token_is_argmax", "kept_path", "samples", "appended", "draft_token_ids")
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    TOKEN_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IS_ARGMAX_FIELD_NUMBER: _ClassVar[int]
    KEPT_PATH_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    APPENDED_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[_types_pb2.StepOutput]
    kept: int
    reused_tokens: int
    timing: _types_pb2.StepTiming
    token_logprobs: _containers.RepeatedScalarFieldContainer[float]
    token_is_argmax: _containers.RepeatedScalarFieldContainer[bool]
    kept_path: _containers.RepeatedScalarFieldContainer[int]
    samples: _containers.RepeatedCompositeFieldContainer[_types_pb2.SampledToken]
    appended: _containers.RepeatedScalarFieldContainer[int]
    draft_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, outputs: _Optional[_Iterable[_Union[_types_pb2.StepOutput, _Mapping]]] = ..., kept: _Optional[int] = ..., reused_tokens: _Optional[int] = ..., timing: _Optional[_Union[_types_pb2.StepTiming, _Mapping]] = ..., token_logprobs: _Optional[_Iterable[float]] = ..., token_is_argmax: _Optional[_Iterable[bool]] = ..., kept_path: _Optional[_Iterable[int]] = ..., samples: _Optional[_Iterable[_Union[_types_pb2.SampledToken, _Mapping]]] = ..., appended: _Optional[_Iterable[int]] = ..., draft_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ControlDone(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WeightsRead(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: _types_pb2.ModelDescription
    def __init__(self, model: _Optional[_Union[_types_pb2.ModelDescription, _Mapping]] = ...) -> None: ...

class AdapterLoaded(_message.Message):
    __slots__ = ("rank", "size_bytes")
    RANK_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    rank: int
    size_bytes: int
    def __init__(self, rank: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class Adopted(_message.Message):
    __slots__ = ("kept",)
    KEPT_FIELD_NUMBER: _ClassVar[int]
    kept: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, kept: _Optional[_Iterable[int]] = ...) -> None: ...

class WorkerError(_message.Message):
    __slots__ = ("reason", "detail", "pages_needed", "pages_available", "field")
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    PAGES_NEEDED_FIELD_NUMBER: _ClassVar[int]
    PAGES_AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    reason: WorkerErrorReason
    detail: str
    pages_needed: int
    pages_available: int
    field: str
    def __init__(self, reason: _Optional[_Union[WorkerErrorReason, str]] = ..., detail: _Optional[str] = ..., pages_needed: _Optional[int] = ..., pages_available: _Optional[int] = ..., field: _Optional[str] = ...) -> None: ...

class LoadProgress(_message.Message):
    __slots__ = ("phase", "done_bytes", "total_bytes")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    DONE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    phase: str
    done_bytes: int
    total_bytes: int
    def __init__(self, phase: _Optional[str] = ..., done_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class WorkerReady(_message.Message):
    __slots__ = ("pid", "model", "tokenizer_json", "executor", "pages_total", "chat_template", "sampling_defaults", "holdings", "weights_replaced")
    PID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_JSON_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    HOLDINGS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_REPLACED_FIELD_NUMBER: _ClassVar[int]
    pid: int
    model: _types_pb2.ModelDescription
    tokenizer_json: bytes
    executor: _types_pb2.ExecutorCapabilities
    pages_total: int
    chat_template: _types_pb2.ChatTemplate
    sampling_defaults: _types_pb2.SamplingParams
    holdings: _containers.RepeatedCompositeFieldContainer[Holding]
    weights_replaced: bool
    def __init__(self, pid: _Optional[int] = ..., model: _Optional[_Union[_types_pb2.ModelDescription, _Mapping]] = ..., tokenizer_json: _Optional[bytes] = ..., executor: _Optional[_Union[_types_pb2.ExecutorCapabilities, _Mapping]] = ..., pages_total: _Optional[int] = ..., chat_template: _Optional[_Union[_types_pb2.ChatTemplate, _Mapping]] = ..., sampling_defaults: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., holdings: _Optional[_Iterable[_Union[Holding, _Mapping]]] = ..., weights_replaced: _Optional[bool] = ...) -> None: ...

class Holding(_message.Message):
    __slots__ = ("sequence", "length")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    length: int
    def __init__(self, sequence: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class WorkerSnapshot(_message.Message):
    __slots__ = ("pool", "counts", "operations_in_flight", "memory_bytes", "device_memory_bytes", "device_memory_peak_bytes", "step_age_ns", "pool_intact", "lora_adapters", "step_number", "step_expected_ns", "kv_disk")
    POOL_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_MEMORY_PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_NS_FIELD_NUMBER: _ClassVar[int]
    POOL_INTACT_FIELD_NUMBER: _ClassVar[int]
    LORA_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    STEP_NUMBER_FIELD_NUMBER: _ClassVar[int]
    STEP_EXPECTED_NS_FIELD_NUMBER: _ClassVar[int]
    KV_DISK_FIELD_NUMBER: _ClassVar[int]
    pool: _types_pb2.PoolUsage
    counts: _types_pb2.StepCounts
    operations_in_flight: int
    memory_bytes: int
    device_memory_bytes: int
    device_memory_peak_bytes: int
    step_age_ns: int
    pool_intact: bool
    lora_adapters: _containers.RepeatedCompositeFieldContainer[_types_pb2.LoraAdapterMetrics]
    step_number: int
    step_expected_ns: int
    kv_disk: _types_pb2.KvDiskUsage
    def __init__(self, pool: _Optional[_Union[_types_pb2.PoolUsage, _Mapping]] = ..., counts: _Optional[_Union[_types_pb2.StepCounts, _Mapping]] = ..., operations_in_flight: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., device_memory_bytes: _Optional[int] = ..., device_memory_peak_bytes: _Optional[int] = ..., step_age_ns: _Optional[int] = ..., pool_intact: _Optional[bool] = ..., lora_adapters: _Optional[_Iterable[_Union[_types_pb2.LoraAdapterMetrics, _Mapping]]] = ..., step_number: _Optional[int] = ..., step_expected_ns: _Optional[int] = ..., kv_disk: _Optional[_Union[_types_pb2.KvDiskUsage, _Mapping]] = ...) -> None: ...
