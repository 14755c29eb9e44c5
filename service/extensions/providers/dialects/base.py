"""The interface of a dialect: how it writes requests and reads responses.

Responses are untrusted: a field with an unexpected type makes the response malformed.
"""

from __future__ import annotations

import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, TypeAlias, TypeVar

from quire.v1 import runner_pb2, types_pb2
from quire.v1.sampling_settings import SETTINGS

from service.errors import InvalidArgument, ProviderFailure
from service.extensions.providers.config import ProviderConfig
from service.extensions.providers.failures import malformed
from service.text import bounded_json

_T = TypeVar("_T")
_MAX_UINT32 = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """An update of the tool call with this index. Strings may be split inside a surrogate pair."""

    index: int
    id: str = ""
    name: str = ""
    arguments_json: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """An update of one sample."""

    sample: int = 0
    text: str = ""
    logprobs: Sequence[float] = ()
    tool_calls: Sequence[ToolCallDelta] = ()
    thoughts: str = ""
    # Why the sample ended, if it has.
    finish: runner_pb2.FinishReason = runner_pb2.FINISH_REASON_UNSPECIFIED
    stop: str = ""


# A part of an event: an update of a sample, or the usage of the request. The last usage counts.
StreamUpdate: TypeAlias = Delta | runner_pb2.Usage


class Dialect(ABC):
    """A provider's API. An instance reads the events of one response, in order."""

    kind: ClassVar[runner_pb2.RuntimeKind]
    # Appended to the provider's base_url.
    path: ClassVar[str]
    # Whether one request can ask for several samples.
    takes_n: ClassVar[bool]
    # The fields of an item that the API has no equivalent for.
    unsupported_fields: ClassVar[Sequence[str]]

    def __init__(self, runtime: str) -> None:
        """`runtime`: the runtime's name, for the log."""
        self._runtime = runtime
        # Whether the event that ends the stream has come.
        self.is_done = False

    @staticmethod
    @abstractmethod
    def headers(secret: str) -> Mapping[str, str]:
        """The headers of a request with these credentials. Empty `secret`: no credentials."""

    @staticmethod
    @abstractmethod
    def body(item: runner_pb2.ExecuteItem, samples: int, config: ProviderConfig) -> Mapping[str, object]:
        """The body of a request for `samples` samples of a checked item.

        Raises InvalidArgument, and ProviderFailure for features that the provider lacks.
        """

    @abstractmethod
    def read(self, data: str) -> Sequence[StreamUpdate]:
        """The updates in the data of an event. Raises ProviderFailure."""


# Values of optional fields that mean the same as an unset field.
_NEUTRAL = {f"sampling.{setting.name}": setting.neutral for setting in SETTINGS}


def sampling_fields_but(*names: str) -> tuple[str, ...]:
    """All fields of `sampling` but these, for `Dialect.unsupported_fields`."""
    fields = types_pb2.SamplingParams.DESCRIPTOR.fields
    return tuple(f"sampling.{field.name}" for field in fields if field.name not in names)


def rounded(value: float) -> float:
    """A float32 setting with the digits that the caller gave, without those added by the conversion."""
    return round(value, 6)


def unsupported(field: str) -> NoReturn:
    """Raises ProviderFailure: the dialect does not support this field of the item."""
    raise ProviderFailure("UNSUPPORTED", f"{field}: this runtime's provider cannot do it", field=field)


def refuse(item: runner_pb2.ExecuteItem, fields: Sequence[str]) -> None:
    """Raises ProviderFailure if one of these fields is set to a value that would have an effect."""
    for path in fields:
        *parents, name = path.split(".")
        message = functools.reduce(getattr, parents, item)
        has_presence = message.DESCRIPTOR.fields_by_name[name].has_presence
        value = getattr(message, name)
        if message.HasField(name) and value != _NEUTRAL.get(path) if has_presence else value:
            unsupported(path)


def parsed_json(text: str, reason: str, field: str) -> Any:
    """Parses JSON from a caller that will be sent to the provider. Raises InvalidArgument."""
    value = bounded_json.parse(text, reason, field)
    try:
        # Infinite numbers and unpaired surrogates can be parsed but not encoded.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        raise InvalidArgument(reason, field, "is not JSON") from None
    return value


class Fields:
    """A JSON object of a response. A missing or null field reads as empty.

    A field of another type raises ProviderFailure.
    """

    def __init__(self, value: object) -> None:
        if not isinstance(value, Mapping):
            raise malformed()
        self._values = value

    @classmethod
    def of_event(cls, data: str) -> Fields:
        try:
            return cls(json.loads(data))
        except (ValueError, RecursionError):
            pass
        raise malformed()

    def has(self, name: str) -> bool:
        """Whether a field is present and not null."""
        return self._values.get(name) is not None

    def value(self, name: str) -> object:
        return self._values.get(name)

    def text(self, name: str) -> str:
        return self._get(name, str, "")

    def count(self, name: str) -> int:
        value = self._get(name, int, 0)
        if isinstance(value, bool) or not 0 <= value <= _MAX_UINT32:
            raise malformed()
        return value

    def fields(self, name: str) -> Fields:
        value = self._values.get(name)
        return Fields({} if value is None else value)

    def items(self, name: str) -> list[object]:
        return self._get(name, list, [])

    def objects(self, name: str) -> list[Fields]:
        return [Fields(value) for value in self.items(name)]

    def _get(self, name: str, kind: type[_T], nothing: _T) -> _T:
        value = self._values.get(name)
        if value is None:
            return nothing
        if not isinstance(value, kind):
            raise malformed()
        return value


def logprob(value: object) -> float:
    """A log-probability. Null, which some providers send for the first token of a text, becomes 0."""
    if value is None:
        return 0.0
    if type(value) not in (int, float):
        raise malformed()
    return float(str(value))
