"""Traces for an OpenTelemetry collector, with `otlp_endpoint`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from service.config import Config, needing_extra
from service.extension import Extension

if TYPE_CHECKING:
    from service.extensions.tracing.tracer import CallTracer


class Tracing(Extension):
    """Spans of calls and of HTTP requests."""

    def __init__(self, tracer: CallTracer) -> None:
        self._tracer = tracer
        self.calls, self.http = tracer.observing, tracer.http

    def close(self) -> None:
        """Exports the last spans."""
        self._tracer.close()


def open_extension(config: Config) -> Tracing | None:
    """Raises ConfigError if its libraries are not installed."""
    if not config.otlp_endpoint:
        return None
    with needing_extra("otel", "otlp_endpoint", config.otlp_endpoint):
        from service.extensions.tracing.tracer import CallTracer  # noqa: PLC0415
    return Tracing(CallTracer(config.otlp_endpoint))
