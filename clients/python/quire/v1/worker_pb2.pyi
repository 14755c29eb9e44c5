from quire.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RowSelection(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROW_SELECTION_UNSPECIFIED: _ClassVar[RowSelection]
    ROW_SELECTION_LAST: _ClassVar[RowSelection]
    ROW_SELECTION_ALL: _ClassVar[RowSelection]

class OperationKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OPERATION_KIND_UNSPECIFIED: _ClassVar[OperationKind]
    OPERATION_KIND_PREFILL: _ClassVar[OperationKind]
    OPERATION_KIND_DECODE: _ClassVar[OperationKind]
    OPERATION_KIND_VERIFY: _ClassVar[OperationKind]
    OPERATION_KIND_SCORE: _ClassVar[OperationKind]

class WorkerErrorReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ERROR_REASON_UNSPECIFIED: _ClassVar[WorkerErrorReason]
    WORKER_ERROR_REASON_KV_MISSING: _ClassVar[WorkerErrorReason]
    WORKER_ERROR_REASON_KV_EXHAUSTED: _ClassVar[WorkerErrorReason]
    WORKER_ERROR_REASON_FAULT: _ClassVar[WorkerErrorReason]
    WORKER_ERROR_REASON_TIMEOUT: _ClassVar[WorkerErrorReason]
    WORKER_ERROR_REASON_UNSUPPORTED: _ClassVar[WorkerErrorReason]
ROW_SELECTION_UNSPECIFIED: RowSelection
ROW_SELECTION_LAST: RowSelection
ROW_SELECTION_ALL: RowSelection
OPERATION_KIND_UNSPECIFIED: OperationKind
OPERATION_KIND_PREFILL: OperationKind
OPERATION_KIND_DECODE: OperationKind
OPERATION_KIND_VERIFY: OperationKind
OPERATION_KIND_SCORE: OperationKind
WORKER_ERROR_REASON_UNSPECIFIED: WorkerErrorReason
WORKER_ERROR_REASON_KV_MISSING: WorkerErrorReason
WORKER_ERROR_REASON_KV_EXHAUSTED: WorkerErrorReason
WORKER_ERROR_REASON_FAULT: WorkerErrorReason
WORKER_ERROR_REASON_TIMEOUT: WorkerErrorReason
WORKER_ERROR_REASON_UNSUPPORTED: WorkerErrorReason

class ConnectRequest(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[WorkerCommand]
    def __init__(self, commands: _Optional[_Iterable[_Union[WorkerCommand, _Mapping]]] = ...) -> None: ...

class WorkerCommand(_message.Message):
    __slots__ = ("op_id", "forward", "fork", "truncate", "release", "abort", "snapshot")
    OP_ID_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    op_id: int
    forward: ForwardCommand
    fork: ForkCommand
    truncate: TruncateCommand
    release: ReleaseCommand
    abort: AbortCommand
    snapshot: SnapshotCommand
    def __init__(self, op_id: _Optional[int] = ..., forward: _Optional[_Union[ForwardCommand, _Mapping]] = ..., fork: _Optional[_Union[ForkCommand, _Mapping]] = ..., truncate: _Optional[_Union[TruncateCommand, _Mapping]] = ..., release: _Optional[_Union[ReleaseCommand, _Mapping]] = ..., abort: _Optional[_Union[AbortCommand, _Mapping]] = ..., snapshot: _Optional[_Union[SnapshotCommand, _Mapping]] = ...) -> None: ...

class ForwardCommand(_message.Message):
    __slots__ = ("sequence", "position", "token_ids", "rows", "output", "accept", "prompt_len", "ephemeral", "timeout_ns", "kind", "caller")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    EPHEMERAL_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_NS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    rows: RowSelection
    output: _types_pb2.OutputOptions
    accept: _types_pb2.VerifyAccept
    prompt_len: int
    ephemeral: bool
    timeout_ns: int
    kind: OperationKind
    caller: int
    def __init__(self, sequence: _Optional[int] = ..., position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., rows: _Optional[_Union[RowSelection, str]] = ..., output: _Optional[_Union[_types_pb2.OutputOptions, _Mapping]] = ..., accept: _Optional[_Union[_types_pb2.VerifyAccept, str]] = ..., prompt_len: _Optional[int] = ..., ephemeral: _Optional[bool] = ..., timeout_ns: _Optional[int] = ..., kind: _Optional[_Union[OperationKind, str]] = ..., caller: _Optional[int] = ...) -> None: ...

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

class ConnectResponse(_message.Message):
    __slots__ = ("events", "pages_available")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    PAGES_AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[WorkerEvent]
    pages_available: int
    def __init__(self, events: _Optional[_Iterable[_Union[WorkerEvent, _Mapping]]] = ..., pages_available: _Optional[int] = ...) -> None: ...

class WorkerEvent(_message.Message):
    __slots__ = ("op_id", "forward", "done", "error", "progress", "ready", "snapshot")
    OP_ID_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    op_id: int
    forward: ForwardDone
    done: ControlDone
    error: WorkerError
    progress: LoadProgress
    ready: WorkerReady
    snapshot: WorkerSnapshot
    def __init__(self, op_id: _Optional[int] = ..., forward: _Optional[_Union[ForwardDone, _Mapping]] = ..., done: _Optional[_Union[ControlDone, _Mapping]] = ..., error: _Optional[_Union[WorkerError, _Mapping]] = ..., progress: _Optional[_Union[LoadProgress, _Mapping]] = ..., ready: _Optional[_Union[WorkerReady, _Mapping]] = ..., snapshot: _Optional[_Union[WorkerSnapshot, _Mapping]] = ...) -> None: ...

class ForwardDone(_message.Message):
    __slots__ = ("outputs", "kept", "reused_tokens", "timing", "token_logprobs")
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    TOKEN_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[_types_pb2.StepOutput]
    kept: int
    reused_tokens: int
    timing: _types_pb2.StepTiming
    token_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, outputs: _Optional[_Iterable[_Union[_types_pb2.StepOutput, _Mapping]]] = ..., kept: _Optional[int] = ..., reused_tokens: _Optional[int] = ..., timing: _Optional[_Union[_types_pb2.StepTiming, _Mapping]] = ..., token_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class ControlDone(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerError(_message.Message):
    __slots__ = ("reason", "detail", "pages_needed", "pages_available")
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    PAGES_NEEDED_FIELD_NUMBER: _ClassVar[int]
    PAGES_AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    reason: WorkerErrorReason
    detail: str
    pages_needed: int
    pages_available: int
    def __init__(self, reason: _Optional[_Union[WorkerErrorReason, str]] = ..., detail: _Optional[str] = ..., pages_needed: _Optional[int] = ..., pages_available: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("pid", "device", "model_id", "architecture", "vocab_size", "max_seq_len", "num_layers", "hidden_size", "num_attention_heads", "num_kv_heads", "head_dim", "dtype", "num_parameters", "weight_bytes", "eos_token_ids", "bos_token_id", "tokenizer_json", "executor", "runner", "kernels", "supports_native_unified_decode", "supports_lora", "page_size_tokens", "bytes_per_page", "pages_total", "max_batch_tokens", "max_batch_items")
    PID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQ_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_ATTENTION_HEADS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_JSON_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_NATIVE_UNIFIED_DECODE_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_LORA_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_PAGE_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_ITEMS_FIELD_NUMBER: _ClassVar[int]
    pid: int
    device: str
    model_id: str
    architecture: str
    vocab_size: int
    max_seq_len: int
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    num_parameters: int
    weight_bytes: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bos_token_id: int
    tokenizer_json: bytes
    executor: str
    runner: str
    kernels: _containers.RepeatedScalarFieldContainer[str]
    supports_native_unified_decode: bool
    supports_lora: bool
    page_size_tokens: int
    bytes_per_page: int
    pages_total: int
    max_batch_tokens: int
    max_batch_items: int
    def __init__(self, pid: _Optional[int] = ..., device: _Optional[str] = ..., model_id: _Optional[str] = ..., architecture: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_seq_len: _Optional[int] = ..., num_layers: _Optional[int] = ..., hidden_size: _Optional[int] = ..., num_attention_heads: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ..., num_parameters: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., bos_token_id: _Optional[int] = ..., tokenizer_json: _Optional[bytes] = ..., executor: _Optional[str] = ..., runner: _Optional[str] = ..., kernels: _Optional[_Iterable[str]] = ..., supports_native_unified_decode: _Optional[bool] = ..., supports_lora: _Optional[bool] = ..., page_size_tokens: _Optional[int] = ..., bytes_per_page: _Optional[int] = ..., pages_total: _Optional[int] = ..., max_batch_tokens: _Optional[int] = ..., max_batch_items: _Optional[int] = ...) -> None: ...

class WorkerSnapshot(_message.Message):
    __slots__ = ("sequences", "pages_total", "pages_free", "pages_cached", "pages_referenced", "tokens", "prefix_hit_tokens", "prefix_query_tokens", "evicted_pages", "copied_pages", "prefill_operations", "decode_operations", "prefill_ns", "decode_ns", "steps", "step_tokens", "batch_items", "operations_in_flight", "memory_bytes", "step_age_ns", "pool_intact")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    PAGES_CACHED_FIELD_NUMBER: _ClassVar[int]
    PAGES_REFERENCED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_PAGES_FIELD_NUMBER: _ClassVar[int]
    COPIED_PAGES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    DECODE_OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NS_FIELD_NUMBER: _ClassVar[int]
    DECODE_NS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BATCH_ITEMS_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_NS_FIELD_NUMBER: _ClassVar[int]
    POOL_INTACT_FIELD_NUMBER: _ClassVar[int]
    sequences: int
    pages_total: int
    pages_free: int
    pages_cached: int
    pages_referenced: int
    tokens: int
    prefix_hit_tokens: int
    prefix_query_tokens: int
    evicted_pages: int
    copied_pages: int
    prefill_operations: int
    decode_operations: int
    prefill_ns: int
    decode_ns: int
    steps: int
    step_tokens: int
    batch_items: int
    operations_in_flight: int
    memory_bytes: int
    step_age_ns: int
    pool_intact: bool
    def __init__(self, sequences: _Optional[int] = ..., pages_total: _Optional[int] = ..., pages_free: _Optional[int] = ..., pages_cached: _Optional[int] = ..., pages_referenced: _Optional[int] = ..., tokens: _Optional[int] = ..., prefix_hit_tokens: _Optional[int] = ..., prefix_query_tokens: _Optional[int] = ..., evicted_pages: _Optional[int] = ..., copied_pages: _Optional[int] = ..., prefill_operations: _Optional[int] = ..., decode_operations: _Optional[int] = ..., prefill_ns: _Optional[int] = ..., decode_ns: _Optional[int] = ..., steps: _Optional[int] = ..., step_tokens: _Optional[int] = ..., batch_items: _Optional[int] = ..., operations_in_flight: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., step_age_ns: _Optional[int] = ..., pool_intact: _Optional[bool] = ...) -> None: ...
