"""Traces for an OpenTelemetry collector, with `otlp_endpoint`."""

from __future__ import annotations

from service.config import Config
from service.extension import Extension
from service.extensions.tracing.settings import TracingSettings
from service.settings import needing_extra


def open_extension(config: Config) -> Extension | None:
    """Raises ConfigError if its libraries are not installed."""
    endpoint = config.of(TracingSettings).otlp_endpoint
    if not endpoint:
        return None
    with needing_extra("otel", "otlp_endpoint", endpoint):
        from service.extensions.tracing.tracer import Tracing  # noqa: PLC0415
    return Tracing(endpoint)
