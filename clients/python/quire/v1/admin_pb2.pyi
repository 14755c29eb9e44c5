import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

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

class ShutdownRequest(_message.Message):
    __slots__ = ("leave_workers",)
    LEAVE_WORKERS_FIELD_NUMBER: _ClassVar[int]
    leave_workers: bool
    def __init__(self, leave_workers: _Optional[bool] = ...) -> None: ...

class ShutdownResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
