"""The trace that a call continues: the metadata `traceparent` of W3C Trace Context, checked."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextvars import ContextVar
from typing import NamedTuple

TRACEPARENT = "traceparent"
_ID = "(?!0+-)([0-9a-f]{32})-(?!0+-)([0-9a-f]{16})-([0-9a-f]{2})"
# Version 0, or a later one, which may have more fields. There is no version ff.
_VALID = re.compile(f"00-{_ID}|(?!00|ff)[0-9a-f]{{2}}-{_ID}(?:-.*)?")

# The value for calls to others within the current call. Empty without traces.
_traceparent: ContextVar[str] = ContextVar("traceparent", default="")
bind_traceparent: Callable[[str], object] = _traceparent.set
current_traceparent: Callable[[], str] = _traceparent.get


class TraceParent(NamedTuple):
    """The caller's span, in hexadecimal digits, and whether its trace is recorded."""

    trace_id: str
    span_id: str
    is_sampled: bool


def trace_parent(value: str | bytes) -> TraceParent | None:
    """The parent that a value of `traceparent` names. None if it is not valid: then there is none."""
    found = _VALID.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return None
    trace_id, span_id, flags = (one for one in found.groups() if one is not None)
    return TraceParent(trace_id, span_id, bool(int(flags, 16) & 1))
