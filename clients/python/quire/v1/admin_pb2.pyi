import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PreviousCaches(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PREVIOUS_CACHES_UNSPECIFIED: _ClassVar[PreviousCaches]
    PREVIOUS_CACHES_END: _ClassVar[PreviousCaches]
    PREVIOUS_CACHES_RECOMPUTE: _ClassVar[PreviousCaches]
    PREVIOUS_CACHES_KEEP_KV: _ClassVar[PreviousCaches]

class LoadWeightsPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOAD_WEIGHTS_PHASE_UNSPECIFIED: _ClassVar[LoadWeightsPhase]
    LOAD_WEIGHTS_PHASE_LOADING: _ClassVar[LoadWeightsPhase]
    LOAD_WEIGHTS_PHASE_SERVING: _ClassVar[LoadWeightsPhase]
    LOAD_WEIGHTS_PHASE_NOT_NEEDED: _ClassVar[LoadWeightsPhase]

class RebuildCause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REBUILD_CAUSE_UNSPECIFIED: _ClassVar[RebuildCause]
    REBUILD_CAUSE_CUDA_CONTEXT_POISONED: _ClassVar[RebuildCause]
    REBUILD_CAUSE_REMOTE_AUTH_FAILURE: _ClassVar[RebuildCause]
    REBUILD_CAUSE_REMOTE_CONFIG_CHANGE: _ClassVar[RebuildCause]
    REBUILD_CAUSE_MANUAL: _ClassVar[RebuildCause]
PREVIOUS_CACHES_UNSPECIFIED: PreviousCaches
PREVIOUS_CACHES_END: PreviousCaches
PREVIOUS_CACHES_RECOMPUTE: PreviousCaches
PREVIOUS_CACHES_KEEP_KV: PreviousCaches
LOAD_WEIGHTS_PHASE_UNSPECIFIED: LoadWeightsPhase
LOAD_WEIGHTS_PHASE_LOADING: LoadWeightsPhase
LOAD_WEIGHTS_PHASE_SERVING: LoadWeightsPhase
LOAD_WEIGHTS_PHASE_NOT_NEEDED: LoadWeightsPhase
REBUILD_CAUSE_UNSPECIFIED: RebuildCause
REBUILD_CAUSE_CUDA_CONTEXT_POISONED: RebuildCause
REBUILD_CAUSE_REMOTE_AUTH_FAILURE: RebuildCause
REBUILD_CAUSE_REMOTE_CONFIG_CHANGE: RebuildCause
REBUILD_CAUSE_MANUAL: RebuildCause

class WarmupRequest(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: int
    def __init__(self, workers: _Optional[int] = ...) -> None: ...

class WarmupResponse(_message.Message):
    __slots__ = ("workers_ready",)
    WORKERS_READY_FIELD_NUMBER: _ClassVar[int]
    workers_ready: int
    def __init__(self, workers_ready: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("worker_id", "grace")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GRACE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    grace: _duration_pb2.Duration
    def __init__(self, worker_id: _Optional[str] = ..., grace: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[ReplacedWorker]
    def __init__(self, workers: _Optional[_Iterable[_Union[ReplacedWorker, _Mapping]]] = ...) -> None: ...

class ReplacedWorker(_message.Message):
    __slots__ = ("worker_id", "old_pid", "new_pid")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    OLD_PID_FIELD_NUMBER: _ClassVar[int]
    NEW_PID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    old_pid: int
    new_pid: int
    def __init__(self, worker_id: _Optional[str] = ..., old_pid: _Optional[int] = ..., new_pid: _Optional[int] = ...) -> None: ...

class LoadWeightsRequest(_message.Message):
    __slots__ = ("runtime", "source", "previous_caches")
    RUNTIME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_CACHES_FIELD_NUMBER: _ClassVar[int]
    runtime: str
    source: str
    previous_caches: PreviousCaches
    def __init__(self, runtime: _Optional[str] = ..., source: _Optional[str] = ..., previous_caches: _Optional[_Union[PreviousCaches, str]] = ...) -> None: ...

class LoadWeightsResponse(_message.Message):
    __slots__ = ("phase", "progress", "model_id", "fingerprint", "weights_version")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    phase: LoadWeightsPhase
    progress: float
    model_id: str
    fingerprint: str
    weights_version: int
    def __init__(self, phase: _Optional[_Union[LoadWeightsPhase, str]] = ..., progress: _Optional[float] = ..., model_id: _Optional[str] = ..., fingerprint: _Optional[str] = ..., weights_version: _Optional[int] = ...) -> None: ...

class UploadWeightsRequest(_message.Message):
    __slots__ = ("name", "size_bytes", "data", "sha256")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    name: str
    size_bytes: int
    data: bytes
    sha256: bytes
    def __init__(self, name: _Optional[str] = ..., size_bytes: _Optional[int] = ..., data: _Optional[bytes] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class UploadWeightsResponse(_message.Message):
    __slots__ = ("source",)
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    source: str
    def __init__(self, source: _Optional[str] = ...) -> None: ...

class RebuildSessionRequest(_message.Message):
    __slots__ = ("runtime", "cause")
    RUNTIME_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    runtime: str
    cause: RebuildCause
    def __init__(self, runtime: _Optional[str] = ..., cause: _Optional[_Union[RebuildCause, str]] = ...) -> None: ...

class RebuildSessionResponse(_message.Message):
    __slots__ = ("rebuilt",)
    REBUILT_FIELD_NUMBER: _ClassVar[int]
    rebuilt: int
    def __init__(self, rebuilt: _Optional[int] = ...) -> None: ...

class ShutdownRequest(_message.Message):
    __slots__ = ("leave_workers",)
    LEAVE_WORKERS_FIELD_NUMBER: _ClassVar[int]
    leave_workers: bool
    def __init__(self, leave_workers: _Optional[bool] = ...) -> None: ...

class ShutdownResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("adapter_id", "source", "pinned", "shared", "file")
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    adapter_id: str
    source: str
    pinned: bool
    shared: bool
    file: AdapterFile
    def __init__(self, adapter_id: _Optional[str] = ..., source: _Optional[str] = ..., pinned: _Optional[bool] = ..., shared: _Optional[bool] = ..., file: _Optional[_Union[AdapterFile, _Mapping]] = ...) -> None: ...

class AdapterFile(_message.Message):
    __slots__ = ("name", "data")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    name: str
    data: bytes
    def __init__(self, name: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("adapter_id", "shared")
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    adapter_id: str
    shared: bool
    def __init__(self, adapter_id: _Optional[str] = ..., shared: _Optional[bool] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ("unloaded",)
    UNLOADED_FIELD_NUMBER: _ClassVar[int]
    unloaded: bool
    def __init__(self, unloaded: _Optional[bool] = ...) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    def __init__(self, adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("adapter_id", "version", "pinned", "shared", "rank", "size_bytes", "caches")
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CACHES_FIELD_NUMBER: _ClassVar[int]
    adapter_id: str
    version: int
    pinned: bool
    shared: bool
    rank: int
    size_bytes: int
    caches: int
    def __init__(self, adapter_id: _Optional[str] = ..., version: _Optional[int] = ..., pinned: _Optional[bool] = ..., shared: _Optional[bool] = ..., rank: _Optional[int] = ..., size_bytes: _Optional[int] = ..., caches: _Optional[int] = ...) -> None: ...
