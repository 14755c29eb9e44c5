"""Loads the tracer where the settings ask for it. Without them OpenTelemetry is not imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from service.config import Config, ConfigError

if TYPE_CHECKING:
    from service.tracing.tracer import CallTracer


def open_tracer(config: Config) -> CallTracer | None:
    """The tracer of calls, if there is a collector. Raises ConfigError if its libraries are not installed."""
    endpoint = config.otlp_endpoint
    if not endpoint:
        return None
    try:
        from service.tracing.tracer import CallTracer  # noqa: PLC0415 - its libraries are an extra
    except ModuleNotFoundError as error:
        allowed = f"needs {error.name}, of the extra otel: `make setup` installs it"
        raise ConfigError("otlp_endpoint", "a setting", endpoint, allowed) from None
    return CallTracer(endpoint)
