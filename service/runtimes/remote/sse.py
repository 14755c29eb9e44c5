"""An incremental parser of server-sent events. Pure.

Lines end with CR, LF or CR LF, and input may be split anywhere, also between CR and LF. The buffered part of
a line and of an event's data is limited. Names of events are not read: all dialects repeat them in the data.
"""

from __future__ import annotations

import re

from service.runtimes.remote.failures import failure

_BOM = b"\xef\xbb\xbf"
# A CR at the end may be the first half of a CR LF.
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")


class EventParser:
    """Parses one stream."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: the limit of a line, and of an event's data."""
        self._max_bytes = max_bytes
        self._line = bytearray()
        self._data: list[bytes] = []
        self._data_bytes = 0

    def push(self, data: bytes) -> list[str]:
        """The data of the events that end. Raises ProviderFailure if a line or an event is too long."""
        events = []
        # The buffer is searched only when a line has ended: bytes may arrive one by one.
        has_line = b"\n" in data or b"\r" in data or self._line.endswith(b"\r")
        self._line += data
        if has_line:
            *lines, rest = _LINE_END.split(self._line)
            self._line = bytearray(rest)
            for line in lines:
                self._check(len(line))
                name, _, value = line.removeprefix(_BOM).partition(b":")
                if name == b"data":
                    self._data.append(value.removeprefix(b" "))
                    self._data_bytes += len(line)
                    self._check(self._data_bytes)
                elif not line and self._data:
                    events.append(b"\n".join(self._data).decode(errors="replace"))
                    self._data, self._data_bytes = [], 0
        self._check(len(self._line))
        return events

    def _check(self, size_bytes: int) -> None:
        if size_bytes > self._max_bytes:
            raise failure("SERVER_ERROR", f"the provider sent more than {self._max_bytes} bytes in one piece")
