"""Server-sent events, from bytes as they come. Pure.

Lines end with CR, LF or both, and so may a piece of bytes in their middle. What is not yet a line, and the
data of what is not yet an event, are bounded.
"""

from __future__ import annotations

from dataclasses import dataclass

from service.runtimes.remote.failures import failure


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """`name` is empty where none was sent."""

    name: str
    data: str


class EventParser:
    """One stream of them."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: of a line, and of an event's data."""
        self._max_bytes = max_bytes
        self._pending = bytearray()
        self._name = ""
        self._data: list[str] = []
        self._data_bytes = 0
        self._is_first_line = True

    def push(self, data: bytes) -> list[ServerEvent]:
        """The events that these bytes end. Raises ProviderFailure if something is too long."""
        events = []
        # Only what has a line in it is looked through: bytes may come one by one.
        has_line = b"\n" in data or b"\r" in data or self._pending.endswith(b"\r")
        self._pending += data
        if has_line:
            lines = bytes(self._pending).splitlines(keepends=True)
            # A CR at the end may be the first half of a CR LF.
            rest = b"" if lines[-1].endswith(b"\n") else lines.pop()
            self._pending = bytearray(rest)
            for line in lines:
                self._check(len(line))
                event = self._take(line.rstrip(b"\r\n"))
                if event is not None:
                    events.append(event)
        self._check(len(self._pending))
        return events

    def _take(self, line: bytes) -> ServerEvent | None:
        text = line.decode(errors="replace")
        if self._is_first_line:
            text = text.removeprefix("\ufeff")
            self._is_first_line = False
        if not text:
            event = ServerEvent(self._name, "\n".join(self._data)) if self._data else None
            self._name, self._data, self._data_bytes = "", [], 0
            return event
        name, _, value = text.partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            self._name = value
        elif name == "data":
            self._data.append(value)
            self._data_bytes += len(line)
            self._check(self._data_bytes)
        return None

    def _check(self, size_bytes: int) -> None:
        if size_bytes > self._max_bytes:
            raise failure("SERVER_ERROR", f"the provider sent more than {self._max_bytes} bytes in one piece")
