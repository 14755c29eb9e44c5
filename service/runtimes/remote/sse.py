"""An incremental parser of server-sent events. Pure.

Lines end with CR, LF or CR LF, and input may be split anywhere, also between CR and LF. The buffered part of
a line and of an event's data is limited.
"""

from __future__ import annotations

from dataclasses import dataclass

from service.runtimes.remote.failures import failure


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One event. `name` is empty if none was sent."""

    name: str
    data: str


class EventParser:
    """Parses one stream."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: the limit of a line, and of an event's data."""
        self._max_bytes = max_bytes
        self._pending = bytearray()
        self._name = ""
        self._data: list[str] = []
        self._data_bytes = 0
        self._is_first_line = True

    def push(self, data: bytes) -> list[ServerEvent]:
        """The events completed by these bytes. Raises ProviderFailure if a line or event is too long."""
        events = []
        # The buffer is searched only when a line has ended: bytes may arrive one by one.
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
