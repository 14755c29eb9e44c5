"""What a dialect is: how items are asked for, and what answers mean.

Answers are read like anything from outside: whatever has another type than the dialect says is malformed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeAlias

from quire.v1 import runner_pb2

from service.errors import InvalidArgument, ProviderFailure
from service.runtimes.remote.config import ProviderConfig
from service.runtimes.remote.failures import malformed
from service.runtimes.remote.sse import ServerEvent
from service.text import bounded_json

_MAX_UINT32 = (1 << 32) - 1
_ROLES = {
    runner_pb2.CHAT_ROLE_SYSTEM: "system",
    runner_pb2.CHAT_ROLE_USER: "user",
    runner_pb2.CHAT_ROLE_ASSISTANT: "assistant",
    runner_pb2.CHAT_ROLE_TOOL: "tool",
}


@dataclass(frozen=True, slots=True)
class ToolPiece:
    """More of a sample's call of a tool: the `index`-th. What is said in pieces may be cut in a character."""

    index: int
    id: str = ""
    name: str = ""
    arguments_json: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """More of one sample."""

    sample: int = 0
    text: str = ""
    logprobs: Sequence[float] = ()
    tool_calls: Sequence[ToolPiece] = ()
    # Its end, where that is known.
    finish: runner_pb2.FinishReason = runner_pb2.FINISH_REASON_UNSPECIFIED
    stop: str = ""


# What an event says: more of samples, or what the request has used, of which the last word counts.
Said: TypeAlias = Delta | runner_pb2.Usage


class Reader(Protocol):
    """Reads the events of one answer, in their order."""

    @property
    def is_done(self) -> bool:
        """The answer says that nothing more comes."""

    def read(self, event: ServerEvent) -> Sequence[Said]:
        """What an event says. Raises ProviderFailure."""


class Dialect(Protocol):
    """A way to speak with providers. Has no state of its own."""

    kind: runner_pb2.RuntimeKind
    # Behind the provider's base_url.
    path: str
    # Whether one request can ask for several samples.
    takes_n: bool

    def headers(self, secret: str) -> Mapping[str, str]:
        """Those that show the credentials (empty: there are none), and others of the dialect."""

    def body(
        self, item: runner_pb2.ExecuteItem, samples: int, config: ProviderConfig
    ) -> Mapping[str, object]:
        """What is asked for so many samples of a checked item.

        Raises ProviderFailure for what the dialect cannot do, InvalidArgument.
        """

    def reader(self, runtime: str) -> Reader:
        """For a new answer."""


def unsupported(field: str) -> NoReturn:
    """Raises: the dialect cannot do what this field of the item asks for."""
    raise ProviderFailure("UNSUPPORTED", f"{field}: this runtime's provider cannot do it", field=field)


def chat_role(message: runner_pb2.ChatMessage, index: int) -> str:
    """A message's role by its usual name. Raises InvalidArgument."""
    role = _ROLES.get(message.role)
    if role is None:
        raise InvalidArgument("BAD_CHAT", f"chat.messages[{index}].role", "a role is needed")
    return role


def tools_of(chat: runner_pb2.Chat) -> list[Any]:
    """The tools of a chat. Raises InvalidArgument."""
    tools = parsed_json(chat.tools_json, "BAD_CHAT", "chat.tools_json") if chat.tools_json else []
    if not isinstance(tools, list):
        raise InvalidArgument("BAD_CHAT", "chat.tools_json", "is not a list in JSON")
    return tools


def parsed_json(text: str, reason: str, field: str) -> Any:
    """JSON that a caller sent, which can be sent on. Raises InvalidArgument."""
    value = bounded_json.parsed(text, reason, field)
    try:
        # Numbers that are too large, and halves of characters, can be read and not written.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        raise InvalidArgument(reason, field, "is not JSON") from None
    return value


class Fields:
    """An object of an answer. What is missing or null is empty.

    What has another type raises ProviderFailure.
    """

    def __init__(self, value: object) -> None:
        if not isinstance(value, Mapping):
            raise malformed()
        self._values = value

    @classmethod
    def of_event(cls, event: ServerEvent) -> Fields:
        """The data of an event."""
        try:
            return cls(json.loads(event.data))
        except (ValueError, RecursionError):
            pass
        raise malformed()

    def has(self, name: str) -> bool:
        """Whether there is anything."""
        return self._values.get(name) is not None

    def value(self, name: str) -> object:
        """Of whatever type."""
        return self._values.get(name)

    def text(self, name: str) -> str:
        """A string."""
        value = self._values.get(name)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise malformed()
        return value

    def count(self, name: str) -> int:
        """A number of things, or an index."""
        value = self._values.get(name)
        if value is None:
            return 0
        if type(value) is not int or not 0 <= value <= _MAX_UINT32:
            raise malformed()
        return value

    def fields(self, name: str) -> Fields:
        """Another object."""
        value = self._values.get(name)
        return Fields({} if value is None else value)

    def items(self, name: str) -> list[object]:
        """A list."""
        value = self._values.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise malformed()
        return value

    def objects(self, name: str) -> list[Fields]:
        """A list of objects."""
        return [Fields(value) for value in self.items(name)]


def logprob(value: object) -> float:
    """A log-probability. Null, as some send for the first token of a text, is 0."""
    if value is None:
        return 0.0
    if type(value) not in (int, float):
        raise malformed()
    return float(str(value))
