"""Validates the metadata `traceparent` of W3C Trace Context: the trace that a call continues."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextvars import ContextVar

TRACEPARENT = "traceparent"
_IDS = "(?!0+-)([0-9a-f]{32})-(?!0+-)[0-9a-f]{16}-[0-9a-f]{2}"
# Version 0, or a later one, which may have more fields. There is no version ff.
_VALID = re.compile(f"00-{_IDS}|(?!00|ff)[0-9a-f]{{2}}-{_IDS}(?:-.*)?")

# The value for outgoing calls made within the current call. Empty: no trace.
_traceparent: ContextVar[str] = ContextVar("traceparent", default="")
bind_traceparent: Callable[[str], object] = _traceparent.set
current_traceparent: Callable[[], str] = _traceparent.get


def trace_id_of(value: str | bytes) -> str | None:
    """The trace id in a value of `traceparent`. None: the value is not valid."""
    found = _VALID.fullmatch(value) if isinstance(value, str) else None
    return None if found is None else found[1] or found[2]
