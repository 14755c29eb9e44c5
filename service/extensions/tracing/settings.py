"""The setting of this extension."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from service.config import Config, ExtensionSettings
from service.setting_rules import Text
from service.settings import needing_extra, setting


def _is_collector(value: str) -> bool:
    """Whether a value is the URL of a trace collector, or empty."""
    return not value or bool(re.fullmatch(r"https?://[^/?#@\s]+/?", value))


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingSettings(ExtensionSettings):
    """The setting of spans for OpenTelemetry."""

    otlp_endpoint: str = setting(
        "",
        "send a span of each call to this OpenTelemetry collector, by OTLP over gRPC",
        Text(_is_collector, "must be http://host:port, or https:// for TLS"),
        group="traces",
    )

    def open_extension(self, config: Config) -> Any:  # noqa: ARG002
        """Returns the extension. Raises ConfigError if its libraries are not installed."""
        if not self.otlp_endpoint:
            return None
        with needing_extra("otel", "otlp_endpoint", self.otlp_endpoint):
            from service.extensions.tracing.tracer import Tracing  # noqa: PLC0415
        return Tracing(self.otlp_endpoint)
