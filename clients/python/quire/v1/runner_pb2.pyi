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

class RoutingPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROUTING_POLICY_UNSPECIFIED: _ClassVar[RoutingPolicy]
    ROUTING_POLICY_ORDER: _ClassVar[RoutingPolicy]
    ROUTING_POLICY_LOCAL_FIRST: _ClassVar[RoutingPolicy]
    ROUTING_POLICY_CHEAPEST: _ClassVar[RoutingPolicy]

class ToolChoice(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOOL_CHOICE_UNSPECIFIED: _ClassVar[ToolChoice]
    TOOL_CHOICE_NONE: _ClassVar[ToolChoice]
    TOOL_CHOICE_REQUIRED: _ClassVar[ToolChoice]

class SpeculationMethod(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPECULATION_METHOD_UNSPECIFIED: _ClassVar[SpeculationMethod]
    SPECULATION_METHOD_PROMPT_LOOKUP: _ClassVar[SpeculationMethod]
    SPECULATION_METHOD_DRAFT_MODEL: _ClassVar[SpeculationMethod]

class ChatRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHAT_ROLE_UNSPECIFIED: _ClassVar[ChatRole]
    CHAT_ROLE_SYSTEM: _ClassVar[ChatRole]
    CHAT_ROLE_USER: _ClassVar[ChatRole]
    CHAT_ROLE_ASSISTANT: _ClassVar[ChatRole]
    CHAT_ROLE_TOOL: _ClassVar[ChatRole]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CONTENT_FILTER: _ClassVar[FinishReason]
    FINISH_REASON_TOOL_CALLS: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
    FINISH_REASON_UNLIKELY: _ClassVar[FinishReason]
    FINISH_REASON_UNCERTAIN: _ClassVar[FinishReason]

class TransportKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSPORT_KIND_UNSPECIFIED: _ClassVar[TransportKind]
    TRANSPORT_KIND_LOCAL_CPU: _ClassVar[TransportKind]
    TRANSPORT_KIND_LOCAL_GPU: _ClassVar[TransportKind]
    TRANSPORT_KIND_REMOTE_NETWORK: _ClassVar[TransportKind]

class RuntimeKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUNTIME_KIND_UNSPECIFIED: _ClassVar[RuntimeKind]
    RUNTIME_KIND_LOCAL: _ClassVar[RuntimeKind]
    RUNTIME_KIND_OPENAI_CHAT: _ClassVar[RuntimeKind]
    RUNTIME_KIND_OPENAI_COMPLETIONS: _ClassVar[RuntimeKind]
    RUNTIME_KIND_ANTHROPIC_MESSAGES: _ClassVar[RuntimeKind]

class BreakerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BREAKER_STATE_UNSPECIFIED: _ClassVar[BreakerState]
    BREAKER_STATE_CLOSED: _ClassVar[BreakerState]
    BREAKER_STATE_OPEN: _ClassVar[BreakerState]
    BREAKER_STATE_HALF_OPEN: _ClassVar[BreakerState]
ROUTING_POLICY_UNSPECIFIED: RoutingPolicy
ROUTING_POLICY_ORDER: RoutingPolicy
ROUTING_POLICY_LOCAL_FIRST: RoutingPolicy
ROUTING_POLICY_CHEAPEST: RoutingPolicy
TOOL_CHOICE_UNSPECIFIED: ToolChoice
TOOL_CHOICE_NONE: ToolChoice
TOOL_CHOICE_REQUIRED: ToolChoice
SPECULATION_METHOD_UNSPECIFIED: SpeculationMethod
SPECULATION_METHOD_PROMPT_LOOKUP: SpeculationMethod
SPECULATION_METHOD_DRAFT_MODEL: SpeculationMethod
CHAT_ROLE_UNSPECIFIED: ChatRole
CHAT_ROLE_SYSTEM: ChatRole
CHAT_ROLE_USER: ChatRole
CHAT_ROLE_ASSISTANT: ChatRole
CHAT_ROLE_TOOL: ChatRole
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CONTENT_FILTER: FinishReason
FINISH_REASON_TOOL_CALLS: FinishReason
FINISH_REASON_ERROR: FinishReason
FINISH_REASON_CANCELLED: FinishReason
FINISH_REASON_UNLIKELY: FinishReason
FINISH_REASON_UNCERTAIN: FinishReason
TRANSPORT_KIND_UNSPECIFIED: TransportKind
TRANSPORT_KIND_LOCAL_CPU: TransportKind
TRANSPORT_KIND_LOCAL_GPU: TransportKind
TRANSPORT_KIND_REMOTE_NETWORK: TransportKind
RUNTIME_KIND_UNSPECIFIED: RuntimeKind
RUNTIME_KIND_LOCAL: RuntimeKind
RUNTIME_KIND_OPENAI_CHAT: RuntimeKind
RUNTIME_KIND_OPENAI_COMPLETIONS: RuntimeKind
RUNTIME_KIND_ANTHROPIC_MESSAGES: RuntimeKind
BREAKER_STATE_UNSPECIFIED: BreakerState
BREAKER_STATE_CLOSED: BreakerState
BREAKER_STATE_OPEN: BreakerState
BREAKER_STATE_HALF_OPEN: BreakerState

class ExecuteRequest(_message.Message):
    __slots__ = ("request_id", "runtime", "policy", "items", "resume_after", "keep", "max_cost_usd", "priority")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RUNTIME_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    RESUME_AFTER_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    MAX_COST_USD_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    runtime: str
    policy: RoutingPolicy
    items: _containers.RepeatedCompositeFieldContainer[ExecuteItem]
    resume_after: _containers.RepeatedCompositeFieldContainer[SampleProgress]
    keep: _duration_pb2.Duration
    max_cost_usd: float
    priority: _types_pb2.Priority
    def __init__(self, request_id: _Optional[str] = ..., runtime: _Optional[str] = ..., policy: _Optional[_Union[RoutingPolicy, str]] = ..., items: _Optional[_Iterable[_Union[ExecuteItem, _Mapping]]] = ..., resume_after: _Optional[_Iterable[_Union[SampleProgress, _Mapping]]] = ..., keep: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_cost_usd: _Optional[float] = ..., priority: _Optional[_Union[_types_pb2.Priority, str]] = ...) -> None: ...

class ExecuteItem(_message.Message):
    __slots__ = ("item_id", "tokens", "text", "chat", "cache", "sampling", "max_tokens", "stop", "stop_token_ids", "ignore_eos", "logprobs", "top_logprobs", "n", "constraint", "tokens_only", "timeout", "max_cost_usd", "adapter_id", "sampled_logprobs", "cache_salt", "min_logprob", "hidden", "speculation", "max_entropy", "special_tokens_in_text", "min_tokens", "bad_words", "answer_parts", "experts")
    ITEM_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_ONLY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    MAX_COST_USD_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    MIN_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    MAX_ENTROPY_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_IN_TEXT_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_PARTS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    item_id: str
    tokens: TokenPrompt
    text: str
    chat: Chat
    cache: CachePrompt
    sampling: _types_pb2.SamplingParams
    max_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logprobs: bool
    top_logprobs: int
    n: int
    constraint: Constraint
    tokens_only: bool
    timeout: _duration_pb2.Duration
    max_cost_usd: float
    adapter_id: str
    sampled_logprobs: bool
    cache_salt: str
    min_logprob: float
    hidden: _types_pb2.HiddenStates
    speculation: Speculation
    max_entropy: float
    special_tokens_in_text: bool
    min_tokens: int
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    answer_parts: AnswerParts
    experts: bool
    def __init__(self, item_id: _Optional[str] = ..., tokens: _Optional[_Union[TokenPrompt, _Mapping]] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., cache: _Optional[_Union[CachePrompt, _Mapping]] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., max_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[bool] = ..., top_logprobs: _Optional[int] = ..., n: _Optional[int] = ..., constraint: _Optional[_Union[Constraint, _Mapping]] = ..., tokens_only: _Optional[bool] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_cost_usd: _Optional[float] = ..., adapter_id: _Optional[str] = ..., sampled_logprobs: _Optional[bool] = ..., cache_salt: _Optional[str] = ..., min_logprob: _Optional[float] = ..., hidden: _Optional[_Union[_types_pb2.HiddenStates, _Mapping]] = ..., speculation: _Optional[_Union[Speculation, _Mapping]] = ..., max_entropy: _Optional[float] = ..., special_tokens_in_text: _Optional[bool] = ..., min_tokens: _Optional[int] = ..., bad_words: _Optional[_Iterable[str]] = ..., answer_parts: _Optional[_Union[AnswerParts, _Mapping]] = ..., experts: _Optional[bool] = ...) -> None: ...

class AnswerParts(_message.Message):
    __slots__ = ("tool_choice", "function", "single_call", "tools_json")
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    SINGLE_CALL_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    tool_choice: ToolChoice
    function: str
    single_call: bool
    tools_json: str
    def __init__(self, tool_choice: _Optional[_Union[ToolChoice, str]] = ..., function: _Optional[str] = ..., single_call: _Optional[bool] = ..., tools_json: _Optional[str] = ...) -> None: ...

class Speculation(_message.Message):
    __slots__ = ("method", "max_draft_tokens")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    method: SpeculationMethod
    max_draft_tokens: int
    def __init__(self, method: _Optional[_Union[SpeculationMethod, str]] = ..., max_draft_tokens: _Optional[int] = ...) -> None: ...

class TokenPrompt(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class CachePrompt(_message.Message):
    __slots__ = ("cache_id", "token_ids", "position")
    CACHE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    cache_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    position: int
    def __init__(self, cache_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., position: _Optional[int] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages", "template", "tools_json", "variables_json", "continue_last_message", "omit_generation_prompt")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_JSON_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_LAST_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    OMIT_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    template: str
    tools_json: str
    variables_json: str
    continue_last_message: bool
    omit_generation_prompt: bool
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., template: _Optional[str] = ..., tools_json: _Optional[str] = ..., variables_json: _Optional[str] = ..., continue_last_message: _Optional[bool] = ..., omit_generation_prompt: _Optional[bool] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASONING_CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: ChatRole
    content: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    name: str
    reasoning_content: str
    def __init__(self, role: _Optional[_Union[ChatRole, str]] = ..., content: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ..., name: _Optional[str] = ..., reasoning_content: _Optional[str] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("index", "id", "name", "arguments_json")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    index: int
    id: str
    name: str
    arguments_json: str
    def __init__(self, index: _Optional[int] = ..., id: _Optional[str] = ..., name: _Optional[str] = ..., arguments_json: _Optional[str] = ...) -> None: ...

class Constraint(_message.Message):
    __slots__ = ("json_schema", "regex", "lark", "mask")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    LARK_FIELD_NUMBER: _ClassVar[int]
    MASK_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    lark: str
    mask: _types_pb2.TokenMask
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., lark: _Optional[str] = ..., mask: _Optional[_Union[_types_pb2.TokenMask, _Mapping]] = ...) -> None: ...

class SampleProgress(_message.Message):
    __slots__ = ("item_id", "sample", "position")
    ITEM_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    item_id: str
    sample: int
    position: int
    def __init__(self, item_id: _Optional[str] = ..., sample: _Optional[int] = ..., position: _Optional[int] = ...) -> None: ...

class ExecuteResponse(_message.Message):
    __slots__ = ("started", "chunks")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    started: ExecutionStarted
    chunks: _containers.RepeatedCompositeFieldContainer[SampleChunk]
    def __init__(self, started: _Optional[_Union[ExecutionStarted, _Mapping]] = ..., chunks: _Optional[_Iterable[_Union[SampleChunk, _Mapping]]] = ...) -> None: ...

class ExecutionStarted(_message.Message):
    __slots__ = ("request_id", "runtime", "transport_kind", "reason", "model_id", "fingerprint", "resumed")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RUNTIME_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    runtime: str
    transport_kind: TransportKind
    reason: str
    model_id: str
    fingerprint: str
    resumed: bool
    def __init__(self, request_id: _Optional[str] = ..., runtime: _Optional[str] = ..., transport_kind: _Optional[_Union[TransportKind, str]] = ..., reason: _Optional[str] = ..., model_id: _Optional[str] = ..., fingerprint: _Optional[str] = ..., resumed: _Optional[bool] = ...) -> None: ...

class SampleChunk(_message.Message):
    __slots__ = ("item_id", "sample", "position", "token_ids", "text", "logprobs", "tool_calls", "finish_reason", "stop", "error", "usage", "runtime", "kv_cache", "hidden", "weights_version", "reasoning_content", "malformed_calls", "experts")
    class MalformedCallsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: str
        def __init__(self, key: _Optional[int] = ..., value: _Optional[str] = ...) -> None: ...
    ITEM_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    RUNTIME_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    REASONING_CONTENT_FIELD_NUMBER: _ClassVar[int]
    MALFORMED_CALLS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    item_id: str
    sample: int
    position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    finish_reason: FinishReason
    stop: str
    error: _status_pb2.Status
    usage: Usage
    runtime: str
    kv_cache: _types_pb2.KvCacheHandle
    hidden: _containers.RepeatedCompositeFieldContainer[TokenHidden]
    weights_version: int
    reasoning_content: str
    malformed_calls: _containers.ScalarMap[int, str]
    experts: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, item_id: _Optional[str] = ..., sample: _Optional[int] = ..., position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., stop: _Optional[str] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., runtime: _Optional[str] = ..., kv_cache: _Optional[_Union[_types_pb2.KvCacheHandle, _Mapping]] = ..., hidden: _Optional[_Iterable[_Union[TokenHidden, _Mapping]]] = ..., weights_version: _Optional[int] = ..., reasoning_content: _Optional[str] = ..., malformed_calls: _Optional[_Mapping[int, str]] = ..., experts: _Optional[_Iterable[bytes]] = ...) -> None: ...

class TokenHidden(_message.Message):
    __slots__ = ("states",)
    STATES_FIELD_NUMBER: _ClassVar[int]
    states: _containers.RepeatedCompositeFieldContainer[_types_pb2.Tensor]
    def __init__(self, states: _Optional[_Iterable[_Union[_types_pb2.Tensor, _Mapping]]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("logprob", "top", "sampled_logprob", "text_offset")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TEXT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top: _types_pb2.TopLogprobs
    sampled_logprob: float
    text_offset: int
    def __init__(self, logprob: _Optional[float] = ..., top: _Optional[_Union[_types_pb2.TopLogprobs, _Mapping]] = ..., sampled_logprob: _Optional[float] = ..., text_offset: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("input_tokens", "output_tokens", "reasoning_tokens", "cached_tokens", "cost_usd", "draft_tokens", "accepted_draft_tokens")
    INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COST_USD_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    input_tokens: int
    output_tokens: int
    reasoning_tokens: int
    cached_tokens: int
    cost_usd: float
    draft_tokens: int
    accepted_draft_tokens: int
    def __init__(self, input_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., reasoning_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., cost_usd: _Optional[float] = ..., draft_tokens: _Optional[int] = ..., accepted_draft_tokens: _Optional[int] = ...) -> None: ...

class RateLimits(_message.Message):
    __slots__ = ("requests_per_minute", "tokens_per_minute", "max_concurrent", "requests_left", "tokens_left", "running")
    REQUESTS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONCURRENT_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_LEFT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_LEFT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    requests_per_minute: float
    tokens_per_minute: float
    max_concurrent: int
    requests_left: float
    tokens_left: float
    running: int
    def __init__(self, requests_per_minute: _Optional[float] = ..., tokens_per_minute: _Optional[float] = ..., max_concurrent: _Optional[int] = ..., requests_left: _Optional[float] = ..., tokens_left: _Optional[float] = ..., running: _Optional[int] = ...) -> None: ...

class TokenPrices(_message.Message):
    __slots__ = ("input_usd", "output_usd", "cached_input_usd")
    INPUT_USD_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_USD_FIELD_NUMBER: _ClassVar[int]
    CACHED_INPUT_USD_FIELD_NUMBER: _ClassVar[int]
    input_usd: float
    output_usd: float
    cached_input_usd: float
    def __init__(self, input_usd: _Optional[float] = ..., output_usd: _Optional[float] = ..., cached_input_usd: _Optional[float] = ...) -> None: ...

class Runtime(_message.Message):
    __slots__ = ("name", "runtime_kind", "transport_kind", "provider", "model_id", "fingerprint", "rate_limits", "breaker", "prices", "trouble", "executions")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RUNTIME_KIND_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_KIND_FIELD_NUMBER: _ClassVar[int]
    PROVIDER_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    RATE_LIMITS_FIELD_NUMBER: _ClassVar[int]
    BREAKER_FIELD_NUMBER: _ClassVar[int]
    PRICES_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    EXECUTIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    runtime_kind: RuntimeKind
    transport_kind: TransportKind
    provider: str
    model_id: str
    fingerprint: str
    rate_limits: RateLimits
    breaker: BreakerState
    prices: TokenPrices
    trouble: str
    executions: int
    def __init__(self, name: _Optional[str] = ..., runtime_kind: _Optional[_Union[RuntimeKind, str]] = ..., transport_kind: _Optional[_Union[TransportKind, str]] = ..., provider: _Optional[str] = ..., model_id: _Optional[str] = ..., fingerprint: _Optional[str] = ..., rate_limits: _Optional[_Union[RateLimits, _Mapping]] = ..., breaker: _Optional[_Union[BreakerState, str]] = ..., prices: _Optional[_Union[TokenPrices, _Mapping]] = ..., trouble: _Optional[str] = ..., executions: _Optional[int] = ...) -> None: ...

class CancelExecutionRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class CancelExecutionResponse(_message.Message):
    __slots__ = ("cancelled",)
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    cancelled: bool
    def __init__(self, cancelled: _Optional[bool] = ...) -> None: ...

class ListRuntimesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRuntimesResponse(_message.Message):
    __slots__ = ("runtimes",)
    RUNTIMES_FIELD_NUMBER: _ClassVar[int]
    runtimes: _containers.RepeatedCompositeFieldContainer[Runtime]
    def __init__(self, runtimes: _Optional[_Iterable[_Union[Runtime, _Mapping]]] = ...) -> None: ...

class EmbedRequest(_message.Message):
    __slots__ = ("inputs", "adapter_id", "cache_salt", "priority", "dimensions", "unnormalized")
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    UNNORMALIZED_FIELD_NUMBER: _ClassVar[int]
    inputs: _containers.RepeatedCompositeFieldContainer[EmbedInput]
    adapter_id: str
    cache_salt: str
    priority: _types_pb2.Priority
    dimensions: int
    unnormalized: bool
    def __init__(self, inputs: _Optional[_Iterable[_Union[EmbedInput, _Mapping]]] = ..., adapter_id: _Optional[str] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[_Union[_types_pb2.Priority, str]] = ..., dimensions: _Optional[int] = ..., unnormalized: _Optional[bool] = ...) -> None: ...

class EmbedInput(_message.Message):
    __slots__ = ("tokens", "text")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    tokens: TokenPrompt
    text: str
    def __init__(self, tokens: _Optional[_Union[TokenPrompt, _Mapping]] = ..., text: _Optional[str] = ...) -> None: ...

class EmbedResponse(_message.Message):
    __slots__ = ("embeddings",)
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    embeddings: _containers.RepeatedCompositeFieldContainer[Embedding]
    def __init__(self, embeddings: _Optional[_Iterable[_Union[Embedding, _Mapping]]] = ...) -> None: ...

class Embedding(_message.Message):
    __slots__ = ("values", "input_tokens", "cached_tokens")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    input_tokens: int
    cached_tokens: int
    def __init__(self, values: _Optional[_Iterable[float]] = ..., input_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class EstimateCostRequest(_message.Message):
    __slots__ = ("runtime", "items")
    RUNTIME_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    runtime: str
    items: _containers.RepeatedCompositeFieldContainer[ExecuteItem]
    def __init__(self, runtime: _Optional[str] = ..., items: _Optional[_Iterable[_Union[ExecuteItem, _Mapping]]] = ...) -> None: ...

class EstimateCostResponse(_message.Message):
    __slots__ = ("estimates",)
    ESTIMATES_FIELD_NUMBER: _ClassVar[int]
    estimates: _containers.RepeatedCompositeFieldContainer[CostEstimate]
    def __init__(self, estimates: _Optional[_Iterable[_Union[CostEstimate, _Mapping]]] = ...) -> None: ...

class CostEstimate(_message.Message):
    __slots__ = ("runtime", "input_tokens", "max_output_tokens", "max_cost_usd", "is_counted", "error")
    RUNTIME_FIELD_NUMBER: _ClassVar[int]
    INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_COST_USD_FIELD_NUMBER: _ClassVar[int]
    IS_COUNTED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    runtime: str
    input_tokens: int
    max_output_tokens: int
    max_cost_usd: float
    is_counted: bool
    error: _status_pb2.Status
    def __init__(self, runtime: _Optional[str] = ..., input_tokens: _Optional[int] = ..., max_output_tokens: _Optional[int] = ..., max_cost_usd: _Optional[float] = ..., is_counted: _Optional[bool] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...
