from google.protobuf import descriptor_pb2 as _descriptor_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor
SETTING_FIELD_NUMBER: _ClassVar[int]
setting: _descriptor.FieldDescriptor

class Setting(_message.Message):
    __slots__ = ("gte", "gt", "lte", "neutral")
    GTE_FIELD_NUMBER: _ClassVar[int]
    GT_FIELD_NUMBER: _ClassVar[int]
    LTE_FIELD_NUMBER: _ClassVar[int]
    NEUTRAL_FIELD_NUMBER: _ClassVar[int]
    gte: float
    gt: float
    lte: float
    neutral: float
    def __init__(self, gte: _Optional[float] = ..., gt: _Optional[float] = ..., lte: _Optional[float] = ..., neutral: _Optional[float] = ...) -> None: ...
