"""The setting of this extension."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from service.config import ExtensionSettings
from service.setting_rules import Text
from service.settings import setting


def _is_collector(value: str) -> bool:
    """Whether it is the address of a collector of traces, or empty."""
    return not value or bool(re.fullmatch(r"https?://[^/?#@\s]+/?", value))


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingSettings(ExtensionSettings):
    """Spans for OpenTelemetry."""

    opened_by: ClassVar[str] = "service.extensions.tracing.extension:open_extension"

    otlp_endpoint: str = setting(
        "",
        "send a span of each call to this OpenTelemetry collector, by OTLP over gRPC",
        Text(_is_collector, "must be http://host:port, or https:// for TLS"),
        group="traces",
    )
