import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LogitsFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOGITS_FORMAT_UNSPECIFIED: _ClassVar[LogitsFormat]
    LOGITS_FORMAT_F32: _ClassVar[LogitsFormat]
    LOGITS_FORMAT_BF16: _ClassVar[LogitsFormat]
    LOGITS_FORMAT_F16: _ClassVar[LogitsFormat]

class DataType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DATA_TYPE_UNSPECIFIED: _ClassVar[DataType]
    DATA_TYPE_F32: _ClassVar[DataType]
    DATA_TYPE_BF16: _ClassVar[DataType]
    DATA_TYPE_F16: _ClassVar[DataType]

class VerifyAccept(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERIFY_ACCEPT_UNSPECIFIED: _ClassVar[VerifyAccept]
    VERIFY_ACCEPT_GREEDY: _ClassVar[VerifyAccept]
    VERIFY_ACCEPT_SAMPLED: _ClassVar[VerifyAccept]
LOGITS_FORMAT_UNSPECIFIED: LogitsFormat
LOGITS_FORMAT_F32: LogitsFormat
LOGITS_FORMAT_BF16: LogitsFormat
LOGITS_FORMAT_F16: LogitsFormat
DATA_TYPE_UNSPECIFIED: DataType
DATA_TYPE_F32: DataType
DATA_TYPE_BF16: DataType
DATA_TYPE_F16: DataType
VERIFY_ACCEPT_UNSPECIFIED: VerifyAccept
VERIFY_ACCEPT_GREEDY: VerifyAccept
VERIFY_ACCEPT_SAMPLED: VerifyAccept

class KvCacheHandle(_message.Message):
    __slots__ = ("cache_id", "seq_len", "epoch", "worker_id", "expire_time")
    CACHE_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_LEN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    cache_id: str
    seq_len: int
    epoch: int
    worker_id: str
    expire_time: _timestamp_pb2.Timestamp
    def __init__(self, cache_id: _Optional[str] = ..., seq_len: _Optional[int] = ..., epoch: _Optional[int] = ..., worker_id: _Optional[str] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class OutputOptions(_message.Message):
    __slots__ = ("logits", "top_logprobs", "logprob_token_ids", "sampling", "mask", "logprob")
    LOGITS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MASK_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    logits: LogitsFormat
    top_logprobs: int
    logprob_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParams
    mask: TokenMask
    logprob: bool
    def __init__(self, logits: _Optional[_Union[LogitsFormat, str]] = ..., top_logprobs: _Optional[int] = ..., logprob_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., mask: _Optional[_Union[TokenMask, _Mapping]] = ..., logprob: _Optional[bool] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "seed")
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
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    seed: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seed: _Optional[int] = ...) -> None: ...

class TokenMask(_message.Message):
    __slots__ = ("packed", "allowed")
    PACKED_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_FIELD_NUMBER: _ClassVar[int]
    packed: bytes
    allowed: TokenIds
    def __init__(self, packed: _Optional[bytes] = ..., allowed: _Optional[_Union[TokenIds, _Mapping]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class StepOutput(_message.Message):
    __slots__ = ("token_id", "logprob", "top", "chosen_logprobs", "logits")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGITS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    top: TopLogprobs
    chosen_logprobs: _containers.RepeatedScalarFieldContainer[float]
    logits: Tensor
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Union[TopLogprobs, _Mapping]] = ..., chosen_logprobs: _Optional[_Iterable[float]] = ..., logits: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

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
