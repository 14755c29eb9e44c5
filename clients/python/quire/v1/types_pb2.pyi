import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from quire.v1 import settings_pb2 as _settings_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Priority(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRIORITY_UNSPECIFIED: _ClassVar[Priority]
    PRIORITY_LOW: _ClassVar[Priority]
    PRIORITY_NORMAL: _ClassVar[Priority]
    PRIORITY_HIGH: _ClassVar[Priority]

class DataType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DATA_TYPE_UNSPECIFIED: _ClassVar[DataType]
    DATA_TYPE_F32: _ClassVar[DataType]
    DATA_TYPE_BF16: _ClassVar[DataType]
    DATA_TYPE_F16: _ClassVar[DataType]

class VerifyAccept(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERIFY_ACCEPT_UNSPECIFIED: _ClassVar[VerifyAccept]
    VERIFY_ACCEPT_ALL: _ClassVar[VerifyAccept]
    VERIFY_ACCEPT_GREEDY: _ClassVar[VerifyAccept]
    VERIFY_ACCEPT_SAMPLED: _ClassVar[VerifyAccept]
    VERIFY_ACCEPT_SPECULATIVE: _ClassVar[VerifyAccept]
PRIORITY_UNSPECIFIED: Priority
PRIORITY_LOW: Priority
PRIORITY_NORMAL: Priority
PRIORITY_HIGH: Priority
DATA_TYPE_UNSPECIFIED: DataType
DATA_TYPE_F32: DataType
DATA_TYPE_BF16: DataType
DATA_TYPE_F16: DataType
VERIFY_ACCEPT_UNSPECIFIED: VerifyAccept
VERIFY_ACCEPT_ALL: VerifyAccept
VERIFY_ACCEPT_GREEDY: VerifyAccept
VERIFY_ACCEPT_SAMPLED: VerifyAccept
VERIFY_ACCEPT_SPECULATIVE: VerifyAccept

class KvCacheHandle(_message.Message):
    __slots__ = ("cache_id", "seq_len", "epoch", "worker_id", "expire_time", "weights_version", "adapter_version")
    CACHE_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_LEN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    cache_id: str
    seq_len: int
    epoch: int
    worker_id: str
    expire_time: _timestamp_pb2.Timestamp
    weights_version: int
    adapter_version: int
    def __init__(self, cache_id: _Optional[str] = ..., seq_len: _Optional[int] = ..., epoch: _Optional[int] = ..., worker_id: _Optional[str] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., weights_version: _Optional[int] = ..., adapter_version: _Optional[int] = ...) -> None: ...

class OutputOptions(_message.Message):
    __slots__ = ("logits", "top_logprobs", "logprob_token_ids", "sampling", "mask", "logprob", "sampled_logprob", "hidden", "experts", "entropy")
    LOGITS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MASK_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    ENTROPY_FIELD_NUMBER: _ClassVar[int]
    logits: DataType
    top_logprobs: int
    logprob_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParams
    mask: TokenMask
    logprob: bool
    sampled_logprob: bool
    hidden: HiddenStates
    experts: bool
    entropy: bool
    def __init__(self, logits: _Optional[_Union[DataType, str]] = ..., top_logprobs: _Optional[int] = ..., logprob_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., mask: _Optional[_Union[TokenMask, _Mapping]] = ..., logprob: _Optional[bool] = ..., sampled_logprob: _Optional[bool] = ..., hidden: _Optional[_Union[HiddenStates, _Mapping]] = ..., experts: _Optional[bool] = ..., entropy: _Optional[bool] = ...) -> None: ...

class HiddenStates(_message.Message):
    __slots__ = ("layers", "dtype", "mean")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedScalarFieldContainer[int]
    dtype: DataType
    mean: bool
    def __init__(self, layers: _Optional[_Iterable[int]] = ..., dtype: _Optional[_Union[DataType, str]] = ..., mean: _Optional[bool] = ...) -> None: ...

class DraftProbabilities(_message.Message):
    __slots__ = ("token_ids", "probabilities", "dense")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    DENSE_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    probabilities: _containers.RepeatedScalarFieldContainer[float]
    dense: bytes
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., probabilities: _Optional[_Iterable[float]] = ..., dense: _Optional[bytes] = ...) -> None: ...

class VerifyRow(_message.Message):
    __slots__ = ("mask", "draft")
    MASK_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    mask: TokenMask
    draft: DraftProbabilities
    def __init__(self, mask: _Optional[_Union[TokenMask, _Mapping]] = ..., draft: _Optional[_Union[DraftProbabilities, _Mapping]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "seed", "penalty_from", "typical_p")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PENALTY_FROM_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_P_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    seed: int
    penalty_from: int
    typical_p: float
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seed: _Optional[int] = ..., penalty_from: _Optional[int] = ..., typical_p: _Optional[float] = ...) -> None: ...

class TokenMask(_message.Message):
    __slots__ = ("packed", "allowed", "deflated", "forbidden")
    PACKED_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_FIELD_NUMBER: _ClassVar[int]
    DEFLATED_FIELD_NUMBER: _ClassVar[int]
    FORBIDDEN_FIELD_NUMBER: _ClassVar[int]
    packed: bytes
    allowed: TokenIds
    deflated: bytes
    forbidden: TokenIds
    def __init__(self, packed: _Optional[bytes] = ..., allowed: _Optional[_Union[TokenIds, _Mapping]] = ..., deflated: _Optional[bytes] = ..., forbidden: _Optional[_Union[TokenIds, _Mapping]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class StepOutput(_message.Message):
    __slots__ = ("token_id", "logprob", "top", "chosen_logprobs", "logits", "sampled_logprob", "hidden", "experts", "entropy")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGITS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    ENTROPY_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    top: TopLogprobs
    chosen_logprobs: _containers.RepeatedScalarFieldContainer[float]
    logits: Tensor
    sampled_logprob: float
    hidden: _containers.RepeatedCompositeFieldContainer[Tensor]
    experts: bytes
    entropy: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Union[TopLogprobs, _Mapping]] = ..., chosen_logprobs: _Optional[_Iterable[float]] = ..., logits: _Optional[_Union[Tensor, _Mapping]] = ..., sampled_logprob: _Optional[float] = ..., hidden: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., experts: _Optional[bytes] = ..., entropy: _Optional[float] = ...) -> None: ...

class SampledToken(_message.Message):
    __slots__ = ("token_id", "logprob", "sampled_logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    sampled_logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., sampled_logprob: _Optional[float] = ...) -> None: ...

class TopLogprobs(_message.Message):
    __slots__ = ("token_ids", "logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape", "data")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    dtype: DataType
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, dtype: _Optional[_Union[DataType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class StepTiming(_message.Message):
    __slots__ = ("queue_ns", "compute_ns", "steps", "batch_items")
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_NS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    BATCH_ITEMS_FIELD_NUMBER: _ClassVar[int]
    queue_ns: int
    compute_ns: int
    steps: int
    batch_items: int
    def __init__(self, queue_ns: _Optional[int] = ..., compute_ns: _Optional[int] = ..., steps: _Optional[int] = ..., batch_items: _Optional[int] = ...) -> None: ...

class ModelDescription(_message.Message):
    __slots__ = ("model_id", "architecture", "vocab_size", "max_seq_len", "num_layers", "hidden_size", "num_attention_heads", "num_kv_heads", "head_dim", "dtype", "num_parameters", "weight_bytes", "eos_token_ids", "bos_token_id", "fingerprint", "backend", "moe_layers", "num_experts", "experts_per_token", "quantization", "pooling", "moe_layer_ids")
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
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    MOE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    MOE_LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    architecture: str
    vocab_size: int
    max_seq_len: int
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: DataType
    num_parameters: int
    weight_bytes: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bos_token_id: int
    fingerprint: str
    backend: str
    moe_layers: int
    num_experts: int
    experts_per_token: int
    quantization: str
    pooling: str
    moe_layer_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, model_id: _Optional[str] = ..., architecture: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_seq_len: _Optional[int] = ..., num_layers: _Optional[int] = ..., hidden_size: _Optional[int] = ..., num_attention_heads: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[_Union[DataType, str]] = ..., num_parameters: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., bos_token_id: _Optional[int] = ..., fingerprint: _Optional[str] = ..., backend: _Optional[str] = ..., moe_layers: _Optional[int] = ..., num_experts: _Optional[int] = ..., experts_per_token: _Optional[int] = ..., quantization: _Optional[str] = ..., pooling: _Optional[str] = ..., moe_layer_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChatTemplate(_message.Message):
    __slots__ = ("sources", "special_tokens")
    class SourcesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class SpecialTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sources: _containers.ScalarMap[str, str]
    special_tokens: _containers.ScalarMap[str, str]
    def __init__(self, sources: _Optional[_Mapping[str, str]] = ..., special_tokens: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ExecutorCapabilities(_message.Message):
    __slots__ = ("executor", "runner", "kernels", "device", "supports_native_unified_decode", "supports_verify", "supports_fork", "supports_sampling", "supports_prefix_reuse", "supports_lora", "page_size_tokens", "bytes_per_page", "kv_capacity_tokens", "max_lora_adapters", "max_batch_tokens", "max_batch_items", "supports_token_trees", "supports_hidden_states", "products", "batch_invariant", "backend_reason", "draft_model", "bytes_per_state")
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_NATIVE_UNIFIED_DECODE_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_VERIFY_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_FORK_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_PREFIX_REUSE_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_LORA_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_PAGE_FIELD_NUMBER: _ClassVar[int]
    KV_CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_LORA_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_ITEMS_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_TOKEN_TREES_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_HIDDEN_STATES_FIELD_NUMBER: _ClassVar[int]
    PRODUCTS_FIELD_NUMBER: _ClassVar[int]
    BATCH_INVARIANT_FIELD_NUMBER: _ClassVar[int]
    BACKEND_REASON_FIELD_NUMBER: _ClassVar[int]
    DRAFT_MODEL_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_STATE_FIELD_NUMBER: _ClassVar[int]
    executor: str
    runner: str
    kernels: _containers.RepeatedScalarFieldContainer[str]
    device: str
    supports_native_unified_decode: bool
    supports_verify: bool
    supports_fork: bool
    supports_sampling: bool
    supports_prefix_reuse: bool
    supports_lora: bool
    page_size_tokens: int
    bytes_per_page: int
    kv_capacity_tokens: int
    max_lora_adapters: int
    max_batch_tokens: int
    max_batch_items: int
    supports_token_trees: bool
    supports_hidden_states: bool
    products: str
    batch_invariant: bool
    backend_reason: str
    draft_model: str
    bytes_per_state: int
    def __init__(self, executor: _Optional[str] = ..., runner: _Optional[str] = ..., kernels: _Optional[_Iterable[str]] = ..., device: _Optional[str] = ..., supports_native_unified_decode: _Optional[bool] = ..., supports_verify: _Optional[bool] = ..., supports_fork: _Optional[bool] = ..., supports_sampling: _Optional[bool] = ..., supports_prefix_reuse: _Optional[bool] = ..., supports_lora: _Optional[bool] = ..., page_size_tokens: _Optional[int] = ..., bytes_per_page: _Optional[int] = ..., kv_capacity_tokens: _Optional[int] = ..., max_lora_adapters: _Optional[int] = ..., max_batch_tokens: _Optional[int] = ..., max_batch_items: _Optional[int] = ..., supports_token_trees: _Optional[bool] = ..., supports_hidden_states: _Optional[bool] = ..., products: _Optional[str] = ..., batch_invariant: _Optional[bool] = ..., backend_reason: _Optional[str] = ..., draft_model: _Optional[str] = ..., bytes_per_state: _Optional[int] = ...) -> None: ...

class PoolUsage(_message.Message):
    __slots__ = ("sequences", "tokens", "pages_total", "pages_free", "pages_cached", "pages_referenced", "prefix_hit_tokens", "prefix_query_tokens", "evicted_pages", "copied_pages")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    PAGES_CACHED_FIELD_NUMBER: _ClassVar[int]
    PAGES_REFERENCED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_PAGES_FIELD_NUMBER: _ClassVar[int]
    COPIED_PAGES_FIELD_NUMBER: _ClassVar[int]
    sequences: int
    tokens: int
    pages_total: int
    pages_free: int
    pages_cached: int
    pages_referenced: int
    prefix_hit_tokens: int
    prefix_query_tokens: int
    evicted_pages: int
    copied_pages: int
    def __init__(self, sequences: _Optional[int] = ..., tokens: _Optional[int] = ..., pages_total: _Optional[int] = ..., pages_free: _Optional[int] = ..., pages_cached: _Optional[int] = ..., pages_referenced: _Optional[int] = ..., prefix_hit_tokens: _Optional[int] = ..., prefix_query_tokens: _Optional[int] = ..., evicted_pages: _Optional[int] = ..., copied_pages: _Optional[int] = ...) -> None: ...

class KvDiskUsage(_message.Message):
    __slots__ = ("bytes", "max_bytes", "stopped", "wanted_pages", "read_pages", "refused_pages", "written_pages", "dropped_pages", "unwritten_pages")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    WANTED_PAGES_FIELD_NUMBER: _ClassVar[int]
    READ_PAGES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_PAGES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_PAGES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_PAGES_FIELD_NUMBER: _ClassVar[int]
    UNWRITTEN_PAGES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    max_bytes: int
    stopped: bool
    wanted_pages: int
    read_pages: int
    refused_pages: int
    written_pages: int
    dropped_pages: int
    unwritten_pages: int
    def __init__(self, bytes: _Optional[int] = ..., max_bytes: _Optional[int] = ..., stopped: _Optional[bool] = ..., wanted_pages: _Optional[int] = ..., read_pages: _Optional[int] = ..., refused_pages: _Optional[int] = ..., written_pages: _Optional[int] = ..., dropped_pages: _Optional[int] = ..., unwritten_pages: _Optional[int] = ...) -> None: ...

class StepCounts(_message.Message):
    __slots__ = ("prefill_operations", "prefill_ns", "decode_operations", "decode_ns", "verify_operations", "verify_ns", "score_operations", "score_ns", "steps", "step_tokens", "batch_items", "replay_operations", "replay_ns", "draft_tokens", "accepted_draft_tokens")
    PREFILL_OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NS_FIELD_NUMBER: _ClassVar[int]
    DECODE_OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    DECODE_NS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_NS_FIELD_NUMBER: _ClassVar[int]
    SCORE_OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    SCORE_NS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BATCH_ITEMS_FIELD_NUMBER: _ClassVar[int]
    REPLAY_OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    REPLAY_NS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prefill_operations: int
    prefill_ns: int
    decode_operations: int
    decode_ns: int
    verify_operations: int
    verify_ns: int
    score_operations: int
    score_ns: int
    steps: int
    step_tokens: int
    batch_items: int
    replay_operations: int
    replay_ns: int
    draft_tokens: int
    accepted_draft_tokens: int
    def __init__(self, prefill_operations: _Optional[int] = ..., prefill_ns: _Optional[int] = ..., decode_operations: _Optional[int] = ..., decode_ns: _Optional[int] = ..., verify_operations: _Optional[int] = ..., verify_ns: _Optional[int] = ..., score_operations: _Optional[int] = ..., score_ns: _Optional[int] = ..., steps: _Optional[int] = ..., step_tokens: _Optional[int] = ..., batch_items: _Optional[int] = ..., replay_operations: _Optional[int] = ..., replay_ns: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_draft_tokens: _Optional[int] = ...) -> None: ...

class LoraAdapterMetrics(_message.Message):
    __slots__ = ("adapter_id", "rank", "sequences", "operations", "tokens", "version", "resident", "size_bytes", "loads", "evictions", "waiting")
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    adapter_id: str
    rank: int
    sequences: int
    operations: int
    tokens: int
    version: int
    resident: bool
    size_bytes: int
    loads: int
    evictions: int
    waiting: int
    def __init__(self, adapter_id: _Optional[str] = ..., rank: _Optional[int] = ..., sequences: _Optional[int] = ..., operations: _Optional[int] = ..., tokens: _Optional[int] = ..., version: _Optional[int] = ..., resident: _Optional[bool] = ..., size_bytes: _Optional[int] = ..., loads: _Optional[int] = ..., evictions: _Optional[int] = ..., waiting: _Optional[int] = ...) -> None: ...
