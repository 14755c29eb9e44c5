"""Traces for an OpenTelemetry collector, with `otlp_endpoint`."""

from __future__ import annotations

from service.config import Config, needing_extra
from service.extension import Extension


def open_extension(config: Config) -> Extension | None:
    """Raises ConfigError if its libraries are not installed."""
    if not config.otlp_endpoint:
        return None
    with needing_extra("otel", "otlp_endpoint", config.otlp_endpoint):
        from service.extensions.tracing.tracer import Tracing  # noqa: PLC0415
    return Tracing(config.otlp_endpoint)
